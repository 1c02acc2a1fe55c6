//! The document of an instance, made from what is left of it.

use super::{chart::Chart, findings::custom_status};
use crate::model::{status, Ending, EventSet, ExecutionDocument, InstanceDocument, Millis, Partition, Sealed, Totals};
use duroxide::{Event, EventKind};

/// How an execution ended, as its history says: its status and output; none where it runs.
pub(super) fn end(events: &[Event]) -> Option<(&'static str, String)> {
    events.iter().rev().find_map(|event| match &event.kind {
        EventKind::OrchestrationCompleted { output } => Some((status::COMPLETED, output.clone())),
        EventKind::OrchestrationFailed { details } => Some((status::FAILED, details.display_message())),
        EventKind::OrchestrationContinuedAsNew { input } => Some((status::CONTINUED, input.clone())),
        _ => None,
    })
}

fn ids(events: &[Event]) -> EventSet {
    let mut ids = EventSet::default();
    for event in events {
        ids.insert(event.event_id);
    }
    ids
}

fn began(events: &[Event]) -> Millis {
    events.first().map_or(0, |event| event.timestamp_ms)
}

fn moved(events: &[Event]) -> Millis {
    events.last().map_or(0, |event| event.timestamp_ms)
}

/// The document of an execution of the past, from its history.
pub(super) fn execution(partition: &Partition, execution: u64, events: &[Event]) -> ExecutionDocument {
    let end = end(events);
    let mut past = ExecutionDocument::of(&InstanceDocument::new(partition.clone(), "", 0), None);
    past.id = ExecutionDocument::document_id(execution);
    past.execution = execution;
    past.status = end.as_ref().map_or(status::RUNNING, |(status, _)| status).to_owned();
    past.started_at = began(events);
    past.ended_at = end.as_ref().map(|_| moved(events));
    past.output = end.map(|(_, output)| output);
    past.events = ids(events);
    past
}

/// The document of the instance, for `token`, which nobody else has: none where the history does not say what began it.
pub(super) fn instance(chart: &Chart, token: &str) -> Option<InstanceDocument> {
    let mut document = InstanceDocument::new(chart.partition.clone(), token, chart.now);
    document.parked = chart.messages.iter().any(|(message, _)| message.is_parked());
    if chart.turns.is_empty() {
        return document.parked.then_some(document);
    }
    let events = chart.events.as_ref().ok()?;
    let (first, began_by) = events.iter().find_map(|event| match &event.kind {
        EventKind::OrchestrationStarted { name, version, parent_instance, .. } => {
            Some((event, (name.clone(), version.clone(), parent_instance.clone())))
        }
        _ => None,
    })?;
    (document.name, document.version, document.parent) = began_by;
    document.pinned = Some(first.duroxide_version.clone());
    document.born = birth(chart).unwrap_or(document.born);
    document.execution = chart.execution;
    document.started_at = began(events);
    document.created_at = chart.executions.get(&1).map_or(document.started_at, |first| first.started_at);
    document.updated_at = moved(events);
    document.events = ids(events);
    document.turn = chart.turns.values().map(|turns| turns.len() as u64).sum();
    let past = chart.executions.values().filter(|past| past.execution < chart.execution);
    document.totals = past.fold(Totals { executions: 1, events: events.len() as u64 }, |totals, past| Totals {
        executions: totals.executions + 1,
        events: totals.events + past.events.len(),
    });
    // Executions are numbered from 1 on, and all but the last have ended.
    document.epoch = chart.execution.saturating_sub(1);
    let status = chart.status.as_ref().map(|status| status.version);
    document.status_version = status.unwrap_or_else(|| u64::from(custom_status(events).is_some()));
    document.status = Some(status::RUNNING.to_owned());
    document.tally = Some("open".to_owned());
    if let Some((status, output)) = end(events) {
        document.epoch += 1;
        document.status = Some(status.to_owned());
        document.completed_at = Some(document.updated_at);
        let ending = Ending::of(status, events).filter(|_| document.parent.is_none());
        document.ended = ending.map(|ending| ending.at(document.updated_at));
        document.archived = output.len() > ExecutionDocument::INLINE;
        document.output = Some(output).filter(|_| !document.archived);
        if status != status::CONTINUED {
            // It was counted soon after it ended.
            document.tally = None;
            document.sealed =
                Some(Sealed { status: status.to_owned(), totals: document.totals, round: token.to_owned() });
        }
    }
    if document.must_be_looked_at() {
        document.due = Some(chart.now);
    }
    Some(document)
}

/// Which of its name it is, by those who know: its children, and messages for it.
fn birth(chart: &Chart) -> Option<String> {
    let instance = chart.partition.instance_id();
    let children = chart.children.values().filter_map(|child| child.document.as_ref());
    let by_child =
        children.filter(|child| child.parent.as_deref() == instance).find_map(|child| child.parent_born.clone());
    let messages = chart.messages.iter().map(|(message, _)| message).filter(|message| !message.starts);
    by_child.or_else(|| messages.filter_map(|message| message.born.clone()).next())
}
