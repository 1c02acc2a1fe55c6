//! Documents that the history requires and that are missing: activities, timers, children, continuations.

use super::{
    findings::{is_held, may_be_unread, Findings, RepairAction},
    snapshot::{ChildEnd, ChildSnapshot, Snapshot},
    state::waits,
    values::{custom_status, values},
    Reason,
};
use crate::model::{item, status, ActivityDocument, InstanceDocument};
use duroxide::{providers::WorkItem, Event, EventKind};
use std::collections::{BTreeMap, BTreeSet};

/// Documents that the history requires and that are missing.
pub(super) fn lost(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    values(snapshot, document, findings);
    match document.current.status.as_deref() {
        Some(status::RUNNING) => {
            for event in snapshot.outstanding() {
                lost_step(snapshot, document, event, findings);
            }
            let is_idle = snapshot.messages.is_empty() && !is_held(document.claim.lock.as_ref(), snapshot.now);
            if is_idle && waits(snapshot).is_empty() {
                let detail = "it runs, but waits for nothing: no activity, timer, child, event or message".to_owned();
                let todo = "raise an event that it should have received, or cancel it";
                findings.by_hand(Reason::Idle, "", detail, todo);
            }
        }
        Some(status::CONTINUED) if !snapshot.items().any(|item| matches!(item, WorkItem::ContinueAsNew { .. })) => {
            if let Some(next) = continuation(snapshot, document) {
                let detail = format!(
                    "execution {} continued as new, but no message starts the next",
                    document.current.execution
                );
                let fix = RepairAction::Enqueue(next);
                repair_unless_unread(
                    snapshot,
                    Reason::LostContinuation,
                    document.current.execution,
                    detail,
                    "start it",
                    fix,
                    findings,
                );
            }
        }
        _ => {}
    }
}

/// Reports a missing document that can be repaired, unless an unreadable document may be the missing one.
fn repair_unless_unread(
    snapshot: &Snapshot,
    reason: Reason,
    subject: u64,
    detail: String,
    does: impl Into<String>,
    fix: RepairAction,
    findings: &mut Findings,
) {
    if may_be_unread(snapshot) {
        let todo = "an unreadable message may be the missing one: the doctor repairs nothing while that message exists";
        findings.by_hand(reason, subject, detail, todo);
    } else {
        findings.fix(reason, subject, detail, does, fix);
    }
}

/// Checks a schedule that is neither completed nor cancelled: a document must exist that will complete it.
fn lost_step(snapshot: &Snapshot, document: &InstanceDocument, event: &Event, findings: &mut Findings) {
    let Some(instance) = snapshot.partition.instance_id() else { return };
    let (id, execution) = (event.event_id, document.current.execution);
    match &event.kind {
        EventKind::ActivityScheduled { .. } => lost_activity(snapshot, instance, execution, event, findings),
        EventKind::TimerCreated { fire_at_ms } => {
            let fires = |item: &WorkItem| match item {
                WorkItem::TimerFired { execution_id, id: of, .. } => (*execution_id, *of) == (execution, id),
                _ => false,
            };
            if !snapshot.items().any(fires) {
                let (instance, fire_at_ms) = (instance.to_owned(), *fire_at_ms);
                let fix =
                    RepairAction::Enqueue(WorkItem::TimerFired { instance, execution_id: execution, id, fire_at_ms });
                let detail = format!("the timer of event {id} has no message that fires it");
                let does = "enqueue that message again, for the same time";
                repair_unless_unread(snapshot, Reason::LostTimer, id, detail, does, fix, findings);
            }
        }
        EventKind::SubOrchestrationScheduled { .. } => {
            if let Some(child) = snapshot.children.get(&id) {
                lost_child(snapshot, document, event, child, findings);
            }
        }
        _ => {}
    }
}

/// Checks an activity that is not completed: the activity with its input must exist, or its completion.
fn lost_activity(snapshot: &Snapshot, instance: &str, execution: u64, event: &Event, findings: &mut Findings) {
    let EventKind::ActivityScheduled { name, .. } = &event.kind else { return };
    let id = event.event_id;
    let activity_id = ActivityDocument::scheduled_id(execution, id);
    let payload_id = ActivityDocument::payload_id(&activity_id);
    let Some(item) = item::scheduled(instance, execution, event) else { return };
    let is_completed = snapshot.items().any(|item| match item {
        WorkItem::ActivityCompleted { execution_id, id: of, .. }
        | WorkItem::ActivityFailed { execution_id, id: of, .. } => (*execution_id, *of) == (execution, id),
        _ => false,
    });
    if is_completed {
        return;
    }
    let Some((activity, _)) = snapshot.activities.get(&activity_id) else {
        let unreadable = snapshot.unreadable.iter().find(|unreadable| unreadable.id == activity_id.as_str());
        // While the lock lasts, a worker that can read the activity may run it.
        if unreadable.is_none_or(|unreadable| unreadable.held_until <= snapshot.now) {
            let detail = format!("activity {name} (event {id}) is missing, and so is its completion");
            let does = format!("schedule it again ({activity_id}): it may have run before");
            repair_unless_unread(
                snapshot,
                Reason::LostActivity,
                id,
                detail,
                does,
                RepairAction::Schedule(item),
                findings,
            );
        }
        return;
    };
    let is_readable = match &activity.item {
        Some(item) => serde_json::from_str::<WorkItem>(item).is_ok(),
        None => snapshot.payloads.get(&payload_id).is_some_and(|(_, is_readable)| *is_readable),
    };
    if !is_readable && !is_held(activity.lock.as_ref(), snapshot.now) {
        let detail = format!("the input of activity {name} (event {id}) is missing or can't be read");
        let does = format!("schedule it again with its input ({activity_id})");
        findings.fix(Reason::LostInput, id, detail, does, RepairAction::Schedule(item));
    }
}

/// Checks a child that the orchestration waits for and whose end is not in its queue.
fn lost_child(
    snapshot: &Snapshot,
    parent: &InstanceDocument,
    event: &Event,
    child: &ChildSnapshot,
    findings: &mut Findings,
) {
    let Some(instance) = snapshot.partition.instance_id() else { return };
    let (id, name) = (event.event_id, &child.name);
    let is_sent = snapshot.intents.iter().any(|intent| intent.target.instance_id() == Some(name));
    // A start in flight is always answered, even by a child that exists or has ended.
    if is_sent || child.is_queued {
        return;
    }
    if child.is_broken {
        let detail = format!("child {name:?} (event {id}) has a history, but no readable document");
        findings.by_hand(Reason::LostChild, id, detail, format!("duroxide-cosmos doctor {name}"));
        return;
    }
    let Some(document) = &child.document else {
        let EventKind::SubOrchestrationScheduled { name: orchestration, input, .. } = &event.kind else { return };
        let item = WorkItem::StartOrchestration {
            instance: name.clone(),
            orchestration: orchestration.clone(),
            input: input.clone(),
            version: None,
            parent_instance: Some(instance.to_owned()),
            parent_id: Some(id),
            parent_execution_id: Some(parent.current.execution),
            execution_id: duroxide::INITIAL_EXECUTION_ID,
        };
        let detail = format!("child {name:?} (event {id}) does not exist, and neither does its start");
        let does = format!("start it, with the default version of {orchestration}");
        repair_unless_unread(snapshot, Reason::LostChild, id, detail, does, RepairAction::Send(item), findings);
        return;
    };
    if document.origin.parent.as_deref() != Some(instance) {
        let whose = document
            .origin
            .parent
            .as_deref()
            .map_or_else(|| "has no parent".to_owned(), |parent| format!("belongs to {parent:?}"));
        let detail = format!("it waits for child {name:?} (event {id}), but the instance with that id {whose}");
        findings.by_hand(Reason::LostChild, id, detail, "cancel it: that instance will never complete this wait");
    } else if document
        .origin
        .parent_incarnation
        .as_ref()
        .is_some_and(|incarnation| *incarnation != parent.origin.incarnation)
    {
        let detail = format!("child {name:?} (event {id}) was started by an earlier instance with this id");
        findings.by_hand(Reason::LostChild, id, detail, "cancel it: that child will never report its end to it");
    } else if let Some(end) = child.end.as_ref().filter(|_| !child.end_is_undelivered) {
        lost_end(snapshot, parent, id, child, end, findings);
    }
}

/// Checks a child that has ended without a message to its parent.
fn lost_end(
    snapshot: &Snapshot,
    parent: &InstanceDocument,
    id: u64,
    child: &ChildSnapshot,
    end: &ChildEnd,
    findings: &mut Findings,
) {
    let Some(instance) = snapshot.partition.instance_id() else { return };
    let (name, execution) = (&child.name, parent.current.execution);
    let is_of_another = end.scheduled_by.is_some_and(|(event, of_execution)| {
        event.is_some_and(|event| event != id) || of_execution.is_some_and(|of_execution| of_execution != execution)
    });
    if is_of_another {
        let detail = format!("child {name:?} (event {id}) has ended, but another event has started it");
        findings.by_hand(Reason::LostEnd, id, detail, "cancel it: no message will complete this wait");
        return;
    }
    let (parent_instance, parent_id) = (instance.to_owned(), id);
    let item = match end.outcome.clone() {
        Ok(result) => WorkItem::SubOrchCompleted { parent_instance, parent_execution_id: execution, parent_id, result },
        Err(details) => WorkItem::SubOrchFailed { parent_instance, parent_execution_id: execution, parent_id, details },
    };
    let detail = format!("child {name:?} (event {id}) has ended, but no message tells its parent");
    repair_unless_unread(
        snapshot,
        Reason::LostEnd,
        id,
        detail,
        "enqueue its end",
        RepairAction::Enqueue(item),
        findings,
    );
}

/// The message that starts the execution after one that continued as new.
fn continuation(snapshot: &Snapshot, document: &InstanceDocument) -> Option<WorkItem> {
    let events = snapshot.events.as_ref().ok()?;
    let input = events.iter().find_map(|event| match &event.kind {
        EventKind::OrchestrationContinuedAsNew { input } => Some(input.clone()),
        _ => None,
    })?;
    let started = events.iter().find_map(|event| match &event.kind {
        EventKind::OrchestrationStarted { parent_instance, parent_id, parent_execution_id, .. } => {
            Some((parent_instance.clone(), *parent_id, *parent_execution_id))
        }
        _ => None,
    });
    let (parent_instance, parent_id, parent_execution_id) = started?;
    Some(WorkItem::ContinueAsNew {
        instance: snapshot.partition.instance_id()?.to_owned(),
        orchestration: document.current.name.clone(),
        input,
        version: None,
        parent_instance,
        parent_id,
        parent_execution_id,
        carry_forward_events: undelivered_queue_messages(events),
        initial_custom_status: custom_status(events).flatten(),
    })
}

/// Queue messages that the execution did not consume. The next execution receives them.
fn undelivered_queue_messages(events: &[Event]) -> Vec<(String, String)> {
    let cancelled: BTreeSet<u64> = events
        .iter()
        .filter(|event| matches!(event.kind, EventKind::QueueSubscriptionCancelled { .. }))
        .filter_map(|event| event.source_event_id)
        .collect();
    let mut waits: BTreeMap<&str, usize> = BTreeMap::new();
    for event in events.iter().filter(|event| !cancelled.contains(&event.event_id)) {
        if let EventKind::QueueSubscribed { name } = &event.kind {
            *waits.entry(name).or_default() += 1;
        }
    }
    let mut left = Vec::new();
    for event in events {
        let EventKind::QueueEventDelivered { name, data } = &event.kind else { continue };
        match waits.get_mut(name.as_str()).filter(|waits| **waits > 0) {
            Some(waits) => *waits -= 1,
            None => left.push((name.clone(), data.clone())),
        }
    }
    left
}
