//! The document of an instance, made from what is left of it.

use super::{
    findings::custom_status,
    snapshot::{ChildSnapshot, Snapshot},
};
use crate::model::{
    item, kind, status, ActivityDocument, CountedFigures, Ending, EventSet, ExecutionDocument, InstanceDocument,
    Millis, Partition, Totals,
};
use duroxide::{providers::WorkItem, Event, EventKind};

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
    events.iter().map(|event| event.event_id).collect()
}

fn began_at(events: &[Event]) -> Millis {
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
    past.started_at = began_at(events);
    past.ended_at = end.as_ref().map(|_| moved(events));
    past.output = end.map(|(_, output)| output);
    past.events = ids(events);
    past
}

/// Whether there may be more of the history than was seen; how that is known.
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
        return Some("there are parts of a turn that may have been committed".to_owned());
    }
    let scheduled =
        snapshot.work.keys().filter_map(ActivityDocument::identity).filter(|(of, _)| *of == snapshot.execution);
    let named = snapshot.items().filter_map(|item| match item {
        WorkItem::ActivityCompleted { execution_id, id, .. }
        | WorkItem::ActivityFailed { execution_id, id, .. }
        | WorkItem::TimerFired { execution_id, id, .. } => Some((*execution_id, *id)),
        WorkItem::SubOrchCompleted { parent_execution_id, parent_id, .. }
        | WorkItem::SubOrchFailed { parent_execution_id, parent_id, .. } => Some((*parent_execution_id, *parent_id)),
        _ => None,
    });
    let mut later = scheduled.chain(named.filter(|(of, _)| *of == snapshot.execution)).map(|(_, id)| id);
    later.find(|id| *id > last).map(|id| format!("the history has {last} events, but something is about event {id}"))
}

/// The document of the instance, for `token`, which nobody else has; or why it can't be made.
pub(super) fn instance(snapshot: &Snapshot, token: &str) -> Result<InstanceDocument, String> {
    let mut document = InstanceDocument::new(snapshot.partition.clone(), token, snapshot.now);
    document.deferred = snapshot.messages.iter().any(|(message, _)| message.is_deferred());
    // What a claim has left in place of it may hold a message.
    document.inlined = snapshot.document().and_then(|left| left.inlined.clone());
    if snapshot.turns.is_empty() {
        return if document.deferred { Ok(document) } else { Err("nothing is deferred".to_owned()) };
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
    let (first, began_by) = began.ok_or_else(|| "the history does not say what began it".to_owned())?;
    (document.name, document.version, document.parent) = began_by;
    document.pinned = Some(first.duroxide_version.clone());
    document.incarnation = birth(snapshot).unwrap_or(document.incarnation);
    document.execution = snapshot.execution;
    document.started_at = began_at(events);
    document.created_at = snapshot.executions.get(&1).map_or(document.started_at, |first| first.started_at);
    document.updated_at = moved(events);
    document.events = ids(events);
    document.turn = snapshot.turns.values().map(|turns| turns.len() as u64).sum();
    let past = snapshot.executions.values().filter(|past| past.execution < snapshot.execution);
    document.totals = past.fold(Totals { executions: 1, events: events.len() as u64 }, |totals, past| Totals {
        executions: totals.executions + 1,
        events: totals.events + past.events.len(),
    });
    // Executions are numbered from 1 on, and all but the last have ended.
    document.epoch = snapshot.execution.saturating_sub(1);
    let status = snapshot.status.as_ref().map(|status| status.version);
    document.status_version = status.unwrap_or_else(|| u64::from(custom_status(events).is_some()));
    document.status = Some(status::RUNNING.to_owned());
    document.count_pending = Some("open".to_owned());
    if let Some((status, output)) = end(events) {
        document.epoch += 1;
        document.status = Some(status.to_owned());
        document.completed_at = Some(document.updated_at);
        let ending = Ending::of(status, events).filter(|_| document.parent.is_none());
        document.ended = ending.map(|ending| ending.at(document.updated_at));
        document.archived = output.len() > ExecutionDocument::INLINE;
        document.output = Some(output).filter(|_| !document.archived);
        if status != status::CONTINUED {
            // Whether it was counted is not known. Those who have ended long ago were.
            document.count_pending = None;
            document.counted =
                Some(CountedFigures { status: status.to_owned(), totals: document.totals, round: token.to_owned() });
        }
    }
    if document.needs_recovery() {
        document.due = Some(snapshot.now);
    }
    Ok(document)
}

/// Which of its name it is, by those who know: its children, starts that it has sent, and messages for it.
fn birth(snapshot: &Snapshot) -> Option<String> {
    let instance = snapshot.partition.instance_id();
    let of_child = |child: &ChildSnapshot| {
        let document = child.document.as_ref().filter(|document| document.parent.as_deref() == instance);
        document.and_then(|document| document.parent_incarnation.clone()).or_else(|| child.sender.clone())
    };
    let sent = snapshot.intents.iter().filter(|intent| intent.document["starts"] == true);
    let mut sent = sent.filter_map(|intent| intent.document["incarnation"].as_str().map(ToOwned::to_owned));
    let messages = snapshot.messages.iter().map(|(message, _)| message).filter(|message| !message.starts);
    let mut told = messages.filter_map(|message| message.incarnation.clone());
    snapshot.children.values().find_map(of_child).or_else(|| sent.next()).or_else(|| told.next())
}
