//! The state of an instance in a few words.

use super::{findings::is_held, snapshot::Snapshot};
use crate::model::ActivityDocument;
use duroxide::{Event, EventKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The state of an instance: its progress, or the event that it waits for, in a few words.
pub(super) fn state(snapshot: &Snapshot) -> String {
    let Some(document) = snapshot.document().filter(|_| !snapshot.lacks_document()) else {
        if snapshot.is_unreadable() {
            return "can't be read".to_owned();
        }
        let starts = snapshot.messages.iter().any(|(message, _)| message.starts);
        return match (starts, snapshot.turns.is_empty()) {
            (true, true) => "waits for its first turn".to_owned(),
            (_, false) => "has lost its document".to_owned(),
            (false, true) => "does not exist".to_owned(),
        };
    };
    if document.removal.deleting.is_some() {
        return "is being deleted".to_owned();
    }
    if let Some(status) = document.current.status.as_deref().filter(|_| document.has_ended()) {
        return format!("has ended: {status}");
    }
    if is_held(document.claim.lock.as_ref(), snapshot.now) {
        return "a turn is in progress".to_owned();
    }
    let ready = snapshot.messages.iter().filter(|(message, _)| message.due <= snapshot.now).count();
    if ready > 0 {
        return format!("{ready} messages wait for a turn");
    }
    if !document.exists() {
        return "was never started".to_owned();
    }
    let waits = waits(snapshot);
    match waits.as_slice() {
        [] => "waits for nothing".to_owned(),
        [first] => format!("waits for {first}"),
        [first, rest @ ..] => format!("waits for {first} and {} more", rest.len()),
    }
}

/// The unanswered waits for events, by the ids of the events that began them.
///
/// The rules are those of duroxide's replay. An event answers the first earlier wait for its name that is still open. A
/// queue message answers the first wait for its name that was not cancelled, whichever came first.
fn unanswered(events: &[Event]) -> BTreeSet<u64> {
    let over: BTreeSet<u64> = events.iter().filter_map(|event| event.source_event_id).collect();
    let mut waits: BTreeMap<&str, VecDeque<u64>> = BTreeMap::new();
    let (mut queues, mut arrived): (Vec<(&str, u64)>, BTreeMap<&str, usize>) = (Vec::new(), BTreeMap::new());
    for event in events {
        match &event.kind {
            EventKind::ExternalSubscribed { name } => waits.entry(name).or_default().push_back(event.event_id),
            EventKind::ExternalEvent { name, .. } => {
                waits.get_mut(name.as_str()).and_then(VecDeque::pop_front);
            }
            EventKind::ExternalSubscribedCancelled { .. } => {
                waits.values_mut().for_each(|waits| waits.retain(|id| Some(*id) != event.source_event_id));
            }
            EventKind::QueueSubscribed { name } if !over.contains(&event.event_id) => {
                queues.push((name, event.event_id))
            }
            EventKind::QueueEventDelivered { name, .. } => *arrived.entry(name).or_default() += 1,
            _ => {}
        }
    }
    let mut unanswered: BTreeSet<u64> = waits.into_values().flatten().collect();
    for (name, id) in queues {
        match arrived.get_mut(name).filter(|left| **left > 0) {
            Some(left) => *left -= 1,
            None => drop(unanswered.insert(id)),
        }
    }
    unanswered
}

/// The events that an orchestration waits for.
pub(super) fn waits(snapshot: &Snapshot) -> Vec<String> {
    let unanswered = unanswered(snapshot.events.as_deref().unwrap_or_default());
    let mut waits = Vec::new();
    for event in snapshot.outstanding() {
        waits.push(match &event.kind {
            EventKind::ActivityScheduled { name, .. } => {
                let activity = event.execution_id;
                let activity = snapshot.activities.get(&ActivityDocument::scheduled_id(activity, event.event_id));
                let runs = activity.is_some_and(|(activity, _)| is_held(activity.lock.as_ref(), snapshot.now));
                format!("activity {name}{}", if runs { ", which runs" } else { "" })
            }
            EventKind::TimerCreated { .. } => "a timer".to_owned(),
            EventKind::SubOrchestrationScheduled { name, .. } => format!("a child {name}"),
            EventKind::ExternalSubscribed { name } | EventKind::QueueSubscribed { name }
                if unanswered.contains(&event.event_id) =>
            {
                format!("event {name}")
            }
            _ => continue,
        });
    }
    waits
}
