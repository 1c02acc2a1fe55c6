//! The findings of a snapshot. Nothing here does I/O.

use super::{
    lateness,
    leftovers::{archives, parents, past, undelivered, unneeded_activities, unreferenced, unreferenced_parts},
    lost::lost,
    rebuild,
    snapshot::{Snapshot, UnreadableDocument},
    Finding, Member, Reason, Remedy,
};
use crate::model::{
    kind, DocumentId, EventSet, InstanceDocument, KvBase, Lock, Millis, RollForwardProgress, StagedDocument,
};
use azure_core::http::Etag;
use duroxide::providers::WorkItem;

/// Work that has been due for this time, and that no worker has taken, is late.
pub(super) const LATE: Millis = 30_000;

/// A finding, its subject, and its repair.
pub(super) struct DetectedFault {
    pub(super) finding: Finding,
    /// Tells the finding from others with the same reason.
    subject: String,
    pub(super) fix: RepairAction,
}

/// The repair of a fault.
pub(super) enum RepairAction {
    /// The doctor does not repair the fault.
    Nothing,
    /// Schedules this activity again and replaces its remains.
    Schedule(WorkItem),
    /// Puts this message into the instance's own queue.
    Enqueue(WorkItem),
    /// Sends this message to another instance.
    Send(WorkItem),
    /// Writes a value from the history.
    SetValue { key: String, lost: LostValue },
    /// Writes the custom status from the history.
    SetStatus(Option<String>),
    /// Rebuilds an execution's document from its history.
    Archive(u64),
    /// Deletes a document if it has not changed since.
    Delete(DocumentId, Etag),
    /// Rolls a committed turn forward.
    RollForward,
    /// Finishes a committed deletion, or aborts an uncommitted one.
    ContinueDeletion,
    /// Rebuilds the instance's document from the other documents.
    RebuildInstance,
}

/// A value that the histories require.
pub(super) struct LostValue {
    pub(super) value: KvBase,
    /// Whether the current execution set it.
    pub(super) is_current: bool,
    /// The value that earlier executions left under the key, if their histories exist.
    pub(super) before: Option<KvBase>,
}

impl DetectedFault {
    /// Whether both are the same fault.
    pub(super) fn is_same_as(&self, other: &Self) -> bool {
        (self.finding.reason, &self.subject) == (other.finding.reason, &other.subject)
    }

    /// Whether a diagnosis reported the fault.
    pub(super) fn is_reported_in(&self, findings: &[Finding]) -> bool {
        findings.iter().any(|said| (said.reason, &said.detail) == (self.finding.reason, &self.finding.detail))
    }

    /// The description of the repair.
    pub(super) fn repair_text(&self) -> Option<&str> {
        match &self.finding.remedy {
            Remedy::Repair(does) => Some(does),
            Remedy::ByHand(_) => None,
        }
    }
}

/// A list of faults under construction.
#[derive(Default)]
pub(super) struct Findings(Vec<DetectedFault>);

impl Findings {
    pub(super) fn fix(
        &mut self,
        reason: Reason,
        subject: impl ToString,
        detail: String,
        does: impl Into<String>,
        fix: RepairAction,
    ) {
        let finding = Finding { reason, detail, remedy: Remedy::Repair(does.into()) };
        self.0.push(DetectedFault { finding, subject: subject.to_string(), fix });
    }

    pub(super) fn by_hand(&mut self, reason: Reason, subject: impl ToString, detail: String, todo: impl Into<String>) {
        let finding = Finding { reason, detail, remedy: Remedy::ByHand(todo.into()) };
        self.0.push(DetectedFault { finding, subject: subject.to_string(), fix: RepairAction::Nothing });
    }
}

/// The faults of an instance.
pub(super) fn of(snapshot: &Snapshot, members: &[Member]) -> Vec<DetectedFault> {
    let mut findings = Findings::default();
    unreadable(snapshot, &mut findings);
    if snapshot.is_unreadable() {
        return findings.0;
    }
    let Some(document) = snapshot.document().filter(|_| !snapshot.lacks_document()) else {
        without_document(snapshot, members, &mut findings);
        return findings.0;
    };
    unfinished(snapshot, document, &mut findings);
    // An unapplied turn has not written all its documents, and an unfinished deletion has erased some.
    if document.commit.roll_forward.is_none() && document.removal.deleting.is_none() {
        // An incomplete history does not tell which documents are missing.
        if has_complete_history(snapshot, document, &mut findings) && document.exists() {
            lost(snapshot, document, &mut findings);
            archives(snapshot, document, &mut findings);
            past(snapshot, document, &mut findings);
            unneeded_activities(snapshot, document, &mut findings);
        }
        unreferenced_parts(snapshot, document, &mut findings);
        parents(snapshot, document, &mut findings);
    }
    for late in lateness::of(snapshot, Some(document), members) {
        findings.by_hand(Reason::Late, &late.subject, late.detail, late.todo);
    }
    undelivered(snapshot, &mut findings);
    findings.0
}

fn unreadable(snapshot: &Snapshot, findings: &mut Findings) {
    for UnreadableDocument { id, kind: of_kind, why, .. } in &snapshot.unreadable {
        let todo = match of_kind.as_str() {
            // The doctor schedules an activity again from the history, with its input.
            kind::ACTIVITY | kind::PAYLOAD | kind::EXECUTION | kind::STATUS => {
                "another finding repairs it from the history; a newer version may be able to read it"
            }
            kind::KV => {
                "another finding repairs a value that this execution has set; until then each turn is postponed, and \
                 after its attempts the instance is failed"
            }
            _ => "a newer version may be able to read it; or restore it from a backup",
        };
        findings.by_hand(Reason::Unreadable, id, format!("{of_kind} {id} can't be read: {why}"), todo);
    }
    for (message, item) in &snapshot.messages {
        if let Err(error) = item {
            let detail = format!("message {} can't be read: {error}", message.id);
            let todo =
                "a newer version may be able to read it; until then each turn is postponed, and after its attempts \
                 the instance is failed";
            findings.by_hand(Reason::Unreadable, &message.id, detail, todo);
        }
    }
    if let Err(error) = &snapshot.events {
        let todo = "restore it from a backup: no turn runs on an incomplete history, and after its attempts the \
                    instance is failed";
        findings.by_hand(Reason::Unreadable, "history", error.clone(), todo);
    }
    for id in &snapshot.foreign_documents {
        let todo = "another program wrote it, and should delete it";
        findings.by_hand(Reason::Unreferenced, id, format!("document {id:?} has an unknown type"), todo);
    }
}

/// Whether an unreadable document may be the missing one. Then nothing is repaired.
pub(super) fn may_be_unread(snapshot: &Snapshot) -> bool {
    let messages = snapshot.messages.iter().filter(|(_, item)| item.is_err()).map(|(message, _)| message.id.as_str());
    let documents = snapshot.unreadable.iter().filter(|unreadable| unreadable.kind == kind::MESSAGE);
    let mut messages = messages.chain(documents.map(|unreadable| unreadable.id.as_str()));
    // A message from outside answers no schedule.
    messages.any(|id| !id.starts_with("m:e:")) || snapshot.cant_read_any(kind::INTENT)
}

/// The faults of an id without an instance's document.
fn without_document(snapshot: &Snapshot, members: &[Member], findings: &mut Findings) {
    let deferred = snapshot.messages.iter().filter(|(message, _)| message.is_deferred()).count();
    if !snapshot.turns.is_empty() {
        let count = snapshot.events.as_ref().map_or(0, Vec::len);
        let detail =
            format!("execution {} has {count} events, but the document of the instance is missing", snapshot.execution);
        match rebuild::instance(snapshot, "") {
            Ok(_) => {
                let does = "rebuild it from the history; it is not known whether the metrics have counted it";
                findings.fix(Reason::LostInstance, "", detail, does, RepairAction::RebuildInstance);
            }
            Err(why) => {
                let todo =
                    format!("restore document {:?} from a backup: {why}", InstanceDocument::document_id().as_str());
                findings.by_hand(Reason::LostInstance, "", detail, todo);
            }
        }
        return;
    }
    if deferred > 0 {
        let detail = format!("{deferred} messages wait for a start, but the document that says so is missing");
        findings.fix(
            Reason::LostInstance,
            "",
            detail,
            "create it, so that a start finds them",
            RepairAction::RebuildInstance,
        );
    }
    for (id, (activity, etag)) in &snapshot.activities {
        if !is_held(activity.lock.as_ref(), snapshot.now) {
            unreferenced(id, etag, "activity", findings);
        }
    }
    snapshot.payloads.iter().for_each(|(id, (etag, _))| unreferenced(id, etag, "the input", findings));
    snapshot.staged.iter().for_each(|(id, etag)| unreferenced(id, etag, "the staged part", findings));
    for late in lateness::of(snapshot, None, members) {
        findings.by_hand(Reason::Late, &late.subject, late.detail, late.todo);
    }
    undelivered(snapshot, findings);
}

pub(super) fn is_held(lock: Option<&Lock>, now: Millis) -> bool {
    lock.is_some_and(|lock| lock.until > now)
}

/// A turn or a deletion that is unfinished.
fn unfinished(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let is_late = document.due.is_none_or(|due| due + LATE < snapshot.now);
    if let Some(RollForwardProgress { key, parts, next }) = &document.commit.roll_forward {
        let missing =
            (*next..*parts).find(|part| !snapshot.staged.contains_key(&StagedDocument::document_id(key, *part)));
        if let Some(missing) = missing.filter(|_| is_late) {
            let detail = format!("part {} of {parts} of a committed turn is missing", missing + 1);
            let todo = format!("restore document {} from a backup", StagedDocument::document_id(key, missing));
            findings.by_hand(Reason::HalfCommitted, key, detail, todo);
        } else if is_late {
            let detail = format!("{next} of {parts} parts of a committed turn are applied");
            findings.fix(Reason::HalfCommitted, key, detail, "apply the others", RepairAction::RollForward);
        }
    }
    if let Some(record) = &document.removal.deleting {
        if is_late {
            let detail = format!("its deletion, together with {:?}, is unfinished", record.coordinator);
            let does = "finish the deletion if it is committed, or abort it";
            findings.fix(Reason::HalfDeleted, &record.plan, detail, does, RepairAction::ContinueDeletion);
        }
    }
}

/// Whether the history has the events that the instance's document lists.
fn has_complete_history(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) -> bool {
    let Ok(events) = &snapshot.events else { return false };
    if snapshot.cant_read_any(kind::HISTORY) {
        return false;
    }
    let found: EventSet = events.iter().map(|event| event.event_id).collect();
    if found == document.current.events {
        return true;
    }
    let (is, must) = (found.len(), document.current.events.len());
    let detail = format!(
        "the history of execution {} has {is} events up to {}, but must have {must} up to {}",
        document.current.execution,
        found.last(),
        document.current.events.last()
    );
    let todo =
        "restore the missing events from a backup: no turn runs on an incomplete history, and after its attempts \
                the instance is failed";
    findings.by_hand(Reason::LostHistory, document.current.execution, detail, todo);
    false
}
