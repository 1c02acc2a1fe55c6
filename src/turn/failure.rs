//! A failure can always be recorded: what it embeds is cut to a size that fits, and its parent always hears.
//!
//! duroxide's runtime puts the messages of a turn into the event that poisons it, and an error's own text may have any size. If
//! such an event could not be stored, the turn would be refused, run again and fail again, for ever.

use super::{load, plan::Ack, read, TurnState};
use crate::{
    cosmos::{Freshness, StoreError},
    engine::Engine,
    model::{status, Partition},
};
use duroxide::{providers::WorkItem, ErrorDetails, Event, EventKind, PoisonMessageType};
use std::sync::Arc;
use tracing::warn;

/// Bytes of one text of a failure. A text is JSON within JSON within JSON when it is stored, which makes some characters eight
/// times as long: this many fit a document all the same, in an event as in a message.
const MAX_TEXT: usize = 96 * 1024;

/// Cuts what the failures of a turn embed.
pub(crate) fn shorten(ack: &mut Ack) {
    for event in &mut ack.events {
        if let EventKind::OrchestrationFailed { details } = &mut event.kind {
            shorten_details(details);
        }
    }
    for item in &mut ack.orchestrator_items {
        shorten_item(item);
    }
    let failed = ack.metadata.status.as_deref() == Some(status::FAILED);
    if let Some(output) = ack.metadata.output.as_mut().filter(|_| failed) {
        cut(output);
    }
}

/// Adds the word to the parent that duroxide's runtime leaves out where it fails a turn that can't be stored or read: the
/// parent would wait for ever. An instance that had ended before has told its parent.
pub(crate) async fn tell_parent(engine: &Arc<Engine>, state: &TurnState, ack: &mut Ack) -> Result<(), StoreError> {
    let had_ended = state.document.has_ended();
    let fails = ack.metadata.status.as_deref() == Some(status::FAILED);
    if !fails || had_ended || (state.document.exists() && ack.execution < state.document.execution) {
        return Ok(());
    }
    let details = ack.events.iter().rev().find_map(|event| match &event.kind {
        EventKind::OrchestrationFailed { details } => Some(details.clone()),
        _ => None,
    });
    let Some(details) = details else { return Ok(()) };
    let Some(Parent { instance, execution, event }) = parent(engine, state).await? else { return Ok(()) };
    if !state.document.exists() {
        ack.metadata.parent_instance_id.get_or_insert_with(|| instance.clone());
    }
    let is_told = |item: &WorkItem| match item {
        WorkItem::SubOrchCompleted { parent_instance, parent_id, .. }
        | WorkItem::SubOrchFailed { parent_instance, parent_id, .. } => {
            *parent_instance == instance && *parent_id == event
        }
        _ => false,
    };
    if ack.orchestrator_items.iter().any(is_told) {
        return Ok(());
    }
    let parent_execution_id = match execution {
        Some(execution) => execution,
        None => current_execution(engine, &instance).await?,
    };
    let told = WorkItem::SubOrchFailed { parent_instance: instance, parent_execution_id, parent_id: event, details };
    ack.orchestrator_items.push(told);
    Ok(())
}

/// Who waits for an instance: with which event, of which execution.
struct Parent {
    instance: String,
    execution: Option<u64>,
    event: u64,
}

/// The parent, as the first event says, or the start of an instance that has no history yet.
async fn parent(engine: &Arc<Engine>, state: &TurnState) -> Result<Option<Parent>, StoreError> {
    let begun = match &state.contents {
        Some(contents) => contents.history.iter().find_map(started_by),
        None if state.document.parent.is_some() => unreadable_start(engine, state).await?,
        None => None,
    };
    let start = || {
        let starts = state.taken.iter().map(|taken| &taken.document).filter(|message| message.starts);
        starts.filter_map(|start| serde_json::from_str(&start.item).ok()).find_map(|item| match item {
            WorkItem::StartOrchestration { parent_instance, parent_execution_id, parent_id, .. }
            | WorkItem::ContinueAsNew { parent_instance, parent_execution_id, parent_id, .. } => {
                Some((parent_instance, parent_execution_id, parent_id))
            }
            _ => None,
        })
    };
    // A start for an instance that is there already is another parent's.
    let begun = if state.document.exists() { begun } else { begun.or_else(start) };
    let (instance, execution, event) = begun.unwrap_or_default();
    Ok(instance.zip(event).map(|(instance, event)| Parent { instance, execution, event }))
}

type StartedBy = (Option<String>, Option<u64>, Option<u64>);

/// What the first event says, where others can't be read. A history of which nothing can be read must not keep the failure from
/// being recorded.
async fn unreadable_start(engine: &Arc<Engine>, state: &TurnState) -> Result<Option<StartedBy>, StoreError> {
    let (document, deadline) = (&state.document, engine.deadline_at(state.until));
    let freshness = Freshness::Authoritative;
    let history = read::history(engine, &document.instance_id, document.execution, freshness, deadline).await;
    match history {
        Ok(history) => Ok(load::readable_events(&history).find_map(|event| started_by(&event))),
        Err(error) if error.is_retryable() => Err(error),
        Err(error) => {
            warn!(instance_id = document.instance_id.instance_id(), %error, "who waits for a failed child is not known");
            Ok(None)
        }
    }
}

fn started_by(event: &Event) -> Option<StartedBy> {
    let EventKind::OrchestrationStarted { parent_instance, parent_execution_id, parent_id, .. } = &event.kind else {
        return None;
    };
    Some((parent_instance.clone(), *parent_execution_id, *parent_id))
}

/// The execution that a parent is in, for a start of an older duroxide, which does not say so.
async fn current_execution(engine: &Engine, instance: &str) -> Result<u64, StoreError> {
    const FIRST: u64 = 1;
    let Ok(partition) = Partition::instance(instance) else { return Ok(FIRST) };
    match engine.read_latest(&partition, engine.deadline()).await {
        Ok(found) => Ok(found.map_or(FIRST, |found| found.document.execution)),
        // A parent that can't be read must not keep the failure of its child from being recorded.
        Err(StoreError::Malformed { .. }) => Ok(FIRST),
        Err(error) => Err(error),
    }
}

/// Cuts what a message about a failure embeds.
pub(crate) fn shorten_item(item: &mut WorkItem) {
    if let WorkItem::SubOrchFailed { details, .. } | WorkItem::ActivityFailed { details, .. } = item {
        shorten_details(details);
    }
}

fn shorten_details(details: &mut ErrorDetails) {
    match details {
        ErrorDetails::Infrastructure { operation, message, .. } => {
            cut(operation);
            cut(message);
        }
        ErrorDetails::Configuration { resource, message, .. } => {
            cut(resource);
            if let Some(message) = message {
                cut(message);
            }
        }
        ErrorDetails::Application { message, .. } => cut(message),
        ErrorDetails::Poison { message, message_type, .. } => {
            cut(message);
            if let PoisonMessageType::FailedDeserialization { error, .. } = message_type {
                cut(error);
            }
        }
    }
}

/// Keeps the beginning of a text that is too long, and says how much there was.
fn cut(text: &mut String) {
    if text.len() <= MAX_TEXT {
        return;
    }
    let all = text.len();
    let mut end = MAX_TEXT;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text.push_str(&format!(" ... (cut: {all} bytes in all)"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters_and_says_so_and_a_short_one_is_not() {
        let mut long = "é".repeat(MAX_TEXT);
        cut(&mut long);
        assert!(long.len() < MAX_TEXT + 64 && long.ends_with(&format!("(cut: {} bytes in all)", 2 * MAX_TEXT)));
        let mut short = "x".repeat(MAX_TEXT);
        cut(&mut short);
        assert_eq!(short.len(), MAX_TEXT);
    }
}
