//! Documents of past executions, unreferenced documents, orphans and undelivered messages.

use super::{
    findings::{is_held, Findings, RepairAction, LATE},
    lateness,
    snapshot::{PastHistory, Snapshot},
    Reason,
};
use crate::model::{status, ActivityDocument, DocumentId, InstanceDocument, IntentDocument, StagedDocument, Staging};
use azure_core::http::Etag;
use duroxide::EventKind;
use std::collections::BTreeSet;

/// Checks the documents of executions.
pub(super) fn archives(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let past = snapshot.turns.keys().copied().filter(|execution| *execution < document.current.execution);
    let current = document.current.archived.then_some(document.current.execution);
    for execution in past.chain(current) {
        if !snapshot.executions.contains_key(&execution) && !document.removal.pruning.contains(&execution) {
            let detail = format!("the document of execution {execution} is missing");
            let does = "rebuild it from the history of that execution";
            findings.fix(Reason::LostExecution, execution, detail, does, RepairAction::Archive(execution));
        }
    }
}

/// Checks earlier executions: each history must be complete, and only pruning may remove an execution.
pub(super) fn past(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let nothing = PastHistory::default();
    let is_past =
        |execution: &u64| *execution < document.current.execution && !document.removal.pruning.contains(execution);
    for (execution, ended) in snapshot.executions.iter().filter(|(execution, _)| is_past(execution)) {
        let found = snapshot.past.get(execution).unwrap_or(&nothing);
        if let Some(why) = &found.unreadable {
            let todo = "a newer version may be able to read it; the instance runs without it";
            let detail = format!("the history of execution {execution} can't be read: {why}");
            findings.by_hand(Reason::Unreadable, format!("history {execution}"), detail, todo);
        } else if found.events != ended.events {
            let detail = match found.events.len() {
                0 => format!("the history of execution {execution} is missing"),
                is => format!("the history of execution {execution} has {is} of {} events", ended.events.len()),
            };
            let todo = "restore it from a backup, or prune that execution; the instance runs without it";
            findings.by_hand(Reason::LostHistory, execution, detail, todo);
        }
    }
    let there: BTreeSet<u64> =
        snapshot.executions.keys().chain(snapshot.turns.keys()).copied().filter(is_past).collect();
    let (is, must) = (there.len() as u64 + 1, document.counting.totals.executions);
    if is < must {
        let detail = format!("{} of {must} executions are missing, and were not pruned", must - is);
        let todo = "restore them from a backup; the instance runs without them";
        findings.by_hand(Reason::LostHistory, "executions", detail, todo);
    }
}

/// Reports a document that no worker will ever read.
pub(super) fn unreferenced(id: &DocumentId, etag: &Etag, what: &str, findings: &mut Findings) {
    let fix = RepairAction::Delete(id.clone(), etag.clone());
    findings.fix(Reason::Unreferenced, id, format!("{what} {id} belongs to nothing"), format!("delete {id}"), fix);
}

/// Reports activities and inputs that the history does not wait for.
pub(super) fn unneeded_activities(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let is_running = document.current.status.as_deref() == Some(status::RUNNING);
    let awaited: BTreeSet<DocumentId> = snapshot
        .outstanding()
        .filter(|event| is_running && matches!(event.kind, EventKind::ActivityScheduled { .. }))
        .map(|event| ActivityDocument::scheduled_id(document.current.execution, event.event_id))
        .collect();
    // A worker that runs an activity completes it by itself.
    let held = snapshot
        .activities
        .iter()
        .filter(|(_, (activity, _))| is_held(activity.lock.as_ref(), snapshot.now))
        .map(|(id, _)| id);
    let needed: BTreeSet<DocumentId> = awaited.iter().chain(held).cloned().collect();
    for (id, (_, etag)) in snapshot.activities.iter().filter(|(id, _)| !needed.contains(id)) {
        unreferenced(id, etag, "activity", findings);
    }
    let inputs: BTreeSet<DocumentId> = needed.iter().map(ActivityDocument::payload_id).collect();
    for (id, (etag, _)) in snapshot.payloads.iter().filter(|(id, _)| !inputs.contains(id)) {
        unreferenced(id, etag, "the input", findings);
    }
}

/// Reports staged parts that the instance's document does not list.
pub(super) fn unreferenced_parts(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let parts = |staging: &Staging| {
        let key = staging.key.clone();
        (0..staging.parts).map(move |part| StagedDocument::document_id(&key, part))
    };
    let named: BTreeSet<DocumentId> = document.commit.staging.iter().flat_map(parts).collect();
    for (id, etag) in snapshot.staged.iter().filter(|(id, _)| !named.contains(id)) {
        unreferenced(id, etag, "the staged part", findings);
    }
}

/// Checks that the parent exists.
pub(super) fn parents(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let (Some(name), Some(parent)) = (&document.origin.parent, &snapshot.parent) else { return };
    if document.has_ended() {
        return;
    }
    let parent = parent.as_ref().filter(|parent| parent.exists());
    let todo = "it runs to its end without a parent that hears of it; cancel it if that is not wanted";
    match parent {
        None => findings.by_hand(Reason::Orphan, name, format!("its parent {name:?} does not exist"), todo),
        Some(parent)
            if document
                .origin
                .parent_incarnation
                .as_ref()
                .is_some_and(|incarnation| *incarnation != parent.origin.incarnation) =>
        {
            let detail = format!("its parent {name:?} was deleted, and another instance has that id");
            findings.by_hand(Reason::Orphan, name, detail, todo);
        }
        Some(_) => {}
    }
}

/// Reports undelivered messages to other instances.
pub(super) fn undelivered(snapshot: &Snapshot, findings: &mut Findings) {
    let retry = |intent: &IntentDocument| {
        format!("duroxide-cosmos queues --retry {} {}", snapshot.partition.instance_id().unwrap_or_default(), intent.id)
    };
    for intent in &snapshot.intents {
        let target = intent.target.instance_id().unwrap_or_default();
        if let Some(why) = &intent.poisoned {
            let detail = format!("a message for {target:?} can't be delivered: {why}");
            findings.by_hand(Reason::Undelivered, &intent.id, detail, format!("{}, or --drop", retry(intent)));
            continue;
        }
        let is_late = intent.due.is_some_and(|due| due + LATE < snapshot.now);
        // Each failed attempt postpones the message, so it is hardly ever late.
        let fails = intent.retries > 0 && intent.created_at + LATE < snapshot.now;
        if is_late || fails {
            let (since, attempts) = (lateness::seconds(intent.created_at, snapshot.now), intent.retries);
            let detail =
                format!("a message for {target:?} has not been delivered for {since}, after {attempts} attempts");
            let todo = match fails {
                true => format!("read the logs of the workers; or {}", retry(intent)),
                false => format!("start a worker, which delivers it; or {}", retry(intent)),
            };
            findings.by_hand(Reason::Undelivered, &intent.id, detail, todo);
        }
    }
}
