//! Makes sure that a failure can always be stored and that the parent always learns of it.
//!
//! duroxide's runtime embeds the messages of a turn in the event that poisons it, and the text of an error may have any
//! size. If such an event were too large to store, the turn would be rejected, run again and fail again, without end.
//! So the provider shortens the texts.

use super::{load, plan::Ack, read, TurnState};
use crate::{
    cosmos::{Freshness, StoreError},
    engine::Engine,
    model::{status, Partition},
};
use duroxide::{providers::WorkItem, ErrorDetails, Event, EventKind, PoisonMessageType};
use std::sync::Arc;
use tracing::warn;

/// The longest text of a failure, in bytes. The stored text is JSON within JSON within JSON, which makes some
/// characters eight times as long. A text of this size still fits into a document, in an event as in a message.
const MAX_TEXT: usize = 96 * 1024;

/// Shortens the texts of the failures in an ack.
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

/// Adds the message to the parent that duroxide's runtime omits if it fails a turn that cannot be stored or read.
/// Without it the parent would wait for ever. An instance that had already ended has sent that message before.
pub(crate) async fn tell_parent(engine: &Arc<Engine>, state: &TurnState, ack: &mut Ack) -> Result<(), StoreError> {
    let had_ended = state.document.has_ended();
    let fails = ack.metadata.status.as_deref() == Some(status::FAILED);
    if !fails || had_ended || (state.document.exists() && ack.execution < state.document.current.execution) {
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

/// The parent that waits for an instance: with which event, of which execution.
struct Parent {
    instance: String,
    execution: Option<u64>,
    event: u64,
}

/// The parent, from the first event, or from the start of an instance that has no history yet.
async fn parent(engine: &Arc<Engine>, state: &TurnState) -> Result<Option<Parent>, StoreError> {
    let begun = match &state.contents {
        Some(contents) => contents.history.iter().find_map(started_by),
        None if state.document.origin.parent.is_some() => unreadable_start(engine, state).await?,
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
    // A start for an instance that already exists is another parent's.
    let begun = if state.document.exists() { begun } else { begun.or_else(start) };
    let (instance, execution, event) = begun.unwrap_or_default();
    Ok(instance.zip(event).map(|(instance, event)| Parent { instance, execution, event }))
}

type StartedBy = (Option<String>, Option<u64>, Option<u64>);

/// The parent, from the first event of a history that cannot be read as a whole. If no event can be read, the failure
/// must still be recorded, so this returns `None`.
async fn unreadable_start(engine: &Arc<Engine>, state: &TurnState) -> Result<Option<StartedBy>, StoreError> {
    let (document, deadline) = (&state.document, engine.deadline_at(state.until));
    let freshness = Freshness::Authoritative;
    let history = read::history(engine, &document.instance_id, document.current.execution, freshness, deadline).await;
    match history {
        Ok(history) => Ok(load::readable_events(&history).find_map(|event| started_by(&event))),
        Err(error) if error.is_retryable() => Err(error),
        Err(error) => {
            warn!(instance_id = document.instance_id.instance_id(), %error, "the parent of a failed child is unknown");
            Ok(None)
        }
    }
}

/// The parent that the first event of an execution names.
fn started_by(event: &Event) -> Option<StartedBy> {
    let EventKind::OrchestrationStarted { parent_instance, parent_execution_id, parent_id, .. } = &event.kind else {
        return None;
    };
    Some((parent_instance.clone(), *parent_execution_id, *parent_id))
}

/// The parent's current execution, for a start of an older duroxide version, which does not name the execution.
async fn current_execution(engine: &Engine, instance: &str) -> Result<u64, StoreError> {
    const FIRST: u64 = 1;
    let Ok(partition) = Partition::instance(instance) else { return Ok(FIRST) };
    match engine.read_latest(&partition, engine.deadline()).await {
        Ok(found) => Ok(found.map_or(FIRST, |found| found.document.current.execution)),
        // The failure of the child must be recorded even if the parent cannot be read.
        Err(StoreError::Malformed { .. }) => Ok(FIRST),
        Err(error) => Err(error),
    }
}

/// Shortens the texts of a message about a failure.
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

/// Keeps the beginning of a text that is too long, and appends its original size.
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
    fn a_long_text_is_cut_between_characters_and_a_short_one_is_kept() {
        let mut long = "é".repeat(MAX_TEXT);
        cut(&mut long);
        assert!(long.len() < MAX_TEXT + 64 && long.ends_with(&format!("(cut: {} bytes in all)", 2 * MAX_TEXT)));
        let mut short = "x".repeat(MAX_TEXT);
        cut(&mut short);
        assert_eq!(short.len(), MAX_TEXT);
    }
}
