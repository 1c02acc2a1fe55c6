//! Rebuilds the document of an instance from its other documents.

use super::{
    snapshot::{ChildSnapshot, Snapshot},
    values::custom_status,
};
use crate::model::{
    item, kind, status, ActivityDocument, CountedFigures, Ending, EventSet, ExecutionDocument, InstanceDocument,
    Millis, Partition, Totals,
};
use duroxide::{providers::WorkItem, Event, EventKind};

/// The status and the output of an execution that has ended, from its history. A running execution has none.
pub(super) fn end(events: &[Event]) -> Option<(&'static str, String)> {
    events.iter().rev().find_map(|event| match &event.kind {
        EventKind::OrchestrationCompleted { output } => Some((status::COMPLETED, output.clone())),
        EventKind::OrchestrationFailed { details } => Some((status::FAILED, details.display_message())),
        EventKind::OrchestrationContinuedAsNew { input } => Some((status::CONTINUED, input.clone())),
        _ => None,
    })
}

fn ids(events: &[Event]) -> EventSet {
    events.iter().map(|event| event.event_id).collect()
}

fn began_at(events: &[Event]) -> Millis {
    events.first().map_or(0, |event| event.timestamp_ms)
}

fn last_event_at(events: &[Event]) -> Millis {
    events.last().map_or(0, |event| event.timestamp_ms)
}

/// The document of a past execution, from its history.
pub(super) fn execution(partition: &Partition, execution: u64, events: &[Event]) -> ExecutionDocument {
    let end = end(events);
    let mut past = ExecutionDocument::of(&InstanceDocument::new(partition.clone(), "", 0), None);
    past.id = ExecutionDocument::document_id(execution);
    past.execution = execution;
    past.status = end.as_ref().map_or(status::RUNNING, |(status, _)| status).to_owned();
    past.started_at = began_at(events);
    past.ended_at = end.as_ref().map(|_| last_event_at(events));
    past.output = end.map(|(_, output)| output);
    past.events = ids(events);
    past
}

/// The reason to assume that a part of the history is missing.
fn lacks(snapshot: &Snapshot, events: &[Event]) -> Option<String> {
    let ids: Vec<u64> = events.iter().map(|event| event.event_id).filter(|id| *id != item::POISON_EVENT_ID).collect();
    let last = ids.len() as u64;
    if ids.iter().copied().ne(1..=last) {
        return Some(format!("the history has gaps: {last} events up to {}", ids.last().copied().unwrap_or(0)));
    }
    if snapshot.cant_read_any(kind::HISTORY) {
        return Some("a part of the history can't be read".to_owned());
    }
    if !snapshot.staged.is_empty() {
        return Some("staged parts exist, and their turn may be committed".to_owned());
    }
    let scheduled =
        snapshot.activities.keys().filter_map(ActivityDocument::identity).filter(|(of, _)| *of == snapshot.execution);
    let named = snapshot.items().filter_map(|item| match item {
        WorkItem::ActivityCompleted { execution_id, id, .. }
        | WorkItem::ActivityFailed { execution_id, id, .. }
        | WorkItem::TimerFired { execution_id, id, .. } => Some((*execution_id, *id)),
        WorkItem::SubOrchCompleted { parent_execution_id, parent_id, .. }
        | WorkItem::SubOrchFailed { parent_execution_id, parent_id, .. } => Some((*parent_execution_id, *parent_id)),
        _ => None,
    });
    let mut later = scheduled.chain(named.filter(|(of, _)| *of == snapshot.execution)).map(|(_, id)| id);
    later
        .find(|id| *id > last)
        .map(|id| format!("the history has {last} events, but another document refers to event {id}"))
}

/// The document of the instance, or the reason why it can't be rebuilt. `token` must be unique.
pub(super) fn instance(snapshot: &Snapshot, token: &str) -> Result<InstanceDocument, String> {
    let mut document = InstanceDocument::new(snapshot.partition.clone(), token, snapshot.now);
    document.waiting.deferred = snapshot.messages.iter().any(|(message, _)| message.is_deferred());
    // A document that a claim has created instead may hold a message.
    document.waiting.inlined = snapshot.document().and_then(|left| left.waiting.inlined.clone());
    if snapshot.turns.is_empty() {
        return if document.waiting.deferred { Ok(document) } else { Err("no message is deferred".to_owned()) };
    }
    let events = snapshot.events.as_ref().map_err(Clone::clone)?;
    if let Some(lacks) = lacks(snapshot, events) {
        return Err(lacks);
    }
    let began = events.iter().find_map(|event| match &event.kind {
        EventKind::OrchestrationStarted { name, version, parent_instance, .. } => {
            Some((event, (name.clone(), version.clone(), parent_instance.clone())))
        }
        _ => None,
    });
    let (first, began_by) = began.ok_or_else(|| "the history has no start event".to_owned())?;
    (document.current.name, document.current.version, document.origin.parent) = began_by;
    document.current.pinned = Some(first.duroxide_version.clone());
    document.origin.incarnation = incarnation(snapshot).unwrap_or(document.origin.incarnation);
    document.current.execution = snapshot.execution;
    document.current.started_at = began_at(events);
    document.origin.created_at =
        snapshot.executions.get(&1).map_or(document.current.started_at, |first| first.started_at);
    document.updated_at = last_event_at(events);
    document.current.events = ids(events);
    document.commit.turn = snapshot.turns.values().map(|turns| turns.len() as u64).sum();
    let past = snapshot.executions.values().filter(|past| past.execution < snapshot.execution);
    document.counting.totals = past.fold(Totals { executions: 1, events: events.len() as u64 }, |totals, past| {
        Totals { executions: totals.executions + 1, events: totals.events + past.events.len() }
    });
    // Executions are numbered from 1, and all but the last have ended.
    document.commit.epoch = snapshot.execution.saturating_sub(1);
    let status = snapshot.status.as_ref().map(|status| status.version);
    document.commit.status_version = status.unwrap_or_else(|| u64::from(custom_status(events).is_some()));
    document.current.status = Some(status::RUNNING.to_owned());
    document.counting.count_pending = Some("open".to_owned());
    if let Some((status, output)) = end(events) {
        document.commit.epoch += 1;
        document.current.status = Some(status.to_owned());
        document.current.completed_at = Some(document.updated_at);
        let ending = Ending::of(status, events).filter(|_| document.origin.parent.is_none());
        document.removal.ended = ending.map(|ending| ending.at(document.updated_at));
        document.current.archived = output.len() > ExecutionDocument::INLINE;
        document.current.output = Some(output).filter(|_| !document.current.archived);
        if status != status::CONTINUED {
            // It is not known whether the instance was counted. Instances that ended long ago were.
            document.counting.count_pending = None;
            document.counting.counted = Some(CountedFigures {
                status: status.to_owned(),
                totals: document.counting.totals,
                round: token.to_owned(),
            });
        }
    }
    if document.needs_recovery() {
        document.due = Some(snapshot.now);
    }
    Ok(document)
}

/// The incarnation of the instance, from its children, the starts that it has sent, or the messages for it.
fn incarnation(snapshot: &Snapshot) -> Option<String> {
    let instance = snapshot.partition.instance_id();
    let of_child = |child: &ChildSnapshot| {
        let document = child.document.as_ref().filter(|document| document.origin.parent.as_deref() == instance);
        document.and_then(|document| document.origin.parent_incarnation.clone()).or_else(|| child.sender.clone())
    };
    let sent = snapshot.intents.iter().filter(|intent| intent.document["starts"] == true);
    let mut sent = sent.filter_map(|intent| intent.document["incarnation"].as_str().map(ToOwned::to_owned));
    let messages = snapshot.messages.iter().map(|(message, _)| message).filter(|message| !message.starts);
    let mut told = messages.filter_map(|message| message.incarnation.clone());
    snapshot.children.values().find_map(of_child).or_else(|| sent.next()).or_else(|| told.next())
}
