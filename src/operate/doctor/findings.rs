//! What a look says of an instance. Pure: nothing is asked here.

use super::{
    lateness, rebuild,
    snapshot::{ChildSnapshot, End, Illegible, Past, Snapshot},
    Finding, Member, Reason, Remedy,
};
use crate::model::{
    item, kind, status, ActivityDocument, DocumentId, EventSet, InstanceDocument, IntentDocument, KvBase, Lock, Millis,
    RollForwardProgress, StagedDocument, Staging,
};
use azure_core::http::Etag;
use duroxide::{providers::WorkItem, Event, EventKind};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What is due for so long, and was not taken, nobody takes.
pub(super) const LATE: Millis = 30_000;

/// A finding, what it is about, and how it is mended.
pub(super) struct DetectedFault {
    pub(super) finding: Finding,
    /// Tells it from others of the same reason.
    subject: String,
    pub(super) fix: Fix,
}

/// How something is mended.
pub(super) enum Fix {
    /// It is not.
    Nothing,
    /// This activity is put into the queue again, over what is left of it.
    Schedule(WorkItem),
    /// This message is put into the instance's own queue.
    Tell(WorkItem),
    /// This message is sent to another instance.
    Send(WorkItem),
    /// A value is written as the history says.
    SetValue { key: String, lost: LostValue },
    /// The custom status is written as the history says.
    SetStatus(Option<String>),
    /// An execution's document is made from its history.
    Archive(u64),
    /// A document is deleted, if it is the one that was seen.
    Delete(DocumentId, Etag),
    /// A committed turn is applied.
    RollForward,
    /// A deletion is gone on with, or undone.
    GoOnDeleting,
    /// The instance's document is made from what is there.
    Rebuild,
}

/// A value as histories say that it must be.
pub(super) struct LostValue {
    pub(super) value: KvBase,
    /// Whether the current execution has set it.
    pub(super) is_current: bool,
    /// The value that earlier executions have left under its key, as far as their histories are there.
    pub(super) before: Option<KvBase>,
}

impl DetectedFault {
    /// Whether both are the same.
    pub(super) fn is(&self, other: &Self) -> bool {
        (self.finding.reason, &self.subject) == (other.finding.reason, &other.subject)
    }

    /// Whether it was said before.
    pub(super) fn was_said(&self, findings: &[Finding]) -> bool {
        findings.iter().any(|said| (said.reason, &said.detail) == (self.finding.reason, &self.finding.detail))
    }

    /// What its repair does.
    pub(super) fn does(&self) -> Option<&str> {
        match &self.finding.remedy {
            Remedy::Repair(does) => Some(does),
            Remedy::ByHand(_) => None,
        }
    }
}

/// Findings that come together.
#[derive(Default)]
struct Findings(Vec<DetectedFault>);

impl Findings {
    fn fix(&mut self, reason: Reason, subject: impl ToString, detail: String, does: impl Into<String>, fix: Fix) {
        let finding = Finding { reason, detail, remedy: Remedy::Repair(does.into()) };
        self.0.push(DetectedFault { finding, subject: subject.to_string(), fix });
    }

    fn by_hand(&mut self, reason: Reason, subject: impl ToString, detail: String, todo: impl Into<String>) {
        let finding = Finding { reason, detail, remedy: Remedy::ByHand(todo.into()) };
        self.0.push(DetectedFault { finding, subject: subject.to_string(), fix: Fix::Nothing });
    }
}

/// What is wrong with an instance.
pub(super) fn of(snapshot: &Snapshot, members: &[Member]) -> Vec<DetectedFault> {
    let mut findings = Findings::default();
    unreadable(snapshot, &mut findings);
    if snapshot.is_illegible() {
        return findings.0;
    }
    let Some(document) = snapshot.document().filter(|_| !snapshot.is_headless()) else {
        without_document(snapshot, members, &mut findings);
        return findings.0;
    };
    half_done(snapshot, document, &mut findings);
    // What a turn has written is not all there before it is applied, and of what is deleted some is gone.
    if document.roll_forward.is_none() && document.deleting.is_none() {
        // A part of a history says nothing of what was never scheduled.
        if is_whole(snapshot, document, &mut findings) && document.exists() {
            lost(snapshot, document, &mut findings);
            archives(snapshot, document, &mut findings);
            past(snapshot, document, &mut findings);
            unneeded(snapshot, document, &mut findings);
        }
        unnamed(snapshot, document, &mut findings);
        parents(snapshot, document, &mut findings);
    }
    for late in lateness::of(snapshot, Some(document), members) {
        findings.by_hand(Reason::Late, &late.subject, late.detail, late.todo);
    }
    undelivered(snapshot, &mut findings);
    findings.0
}

fn unreadable(snapshot: &Snapshot, findings: &mut Findings) {
    for Illegible { id, kind: of_kind, why, .. } in &snapshot.unreadable {
        let todo = match of_kind.as_str() {
            // An activity is made again from the history, with its input.
            kind::ACTIVITY | kind::PAYLOAD | kind::EXECUTION | kind::STATUS => {
                "what the history says of it is made again, as another finding says; a newer version may be able to read it"
            }
            kind::KV => {
                "a value that this execution has set is written again, as another finding says; until then each turn is put off, \
                 and after its attempts the instance is failed"
            }
            _ => "a newer version may be able to read it; or restore it from a backup",
        };
        findings.by_hand(Reason::Unreadable, id, format!("{of_kind} {id} can't be read: {why}"), todo);
    }
    for (message, item) in &snapshot.messages {
        if let Err(error) = item {
            let detail = format!("message {} can't be read: {error}", message.id);
            let todo =
                "a newer version may be able to read it; until then each turn is put off, and after its attempts the instance \
                        is failed";
            findings.by_hand(Reason::Unreadable, &message.id, detail, todo);
        }
    }
    if let Err(error) = &snapshot.events {
        let todo = "restore it from a backup: no turn runs on a part of its history, and after its attempts the instance is failed";
        findings.by_hand(Reason::Unreadable, "history", error.clone(), todo);
    }
    for id in &snapshot.strangers {
        let todo = "it is none of ours: into_inner put it there should take it away";
        findings.by_hand(Reason::Stray, id, format!("document {id:?} is not of a kind that is known"), todo);
    }
}

/// Whether something that can't be read may be what is missed: then nothing is made again.
fn may_be_unread(snapshot: &Snapshot) -> bool {
    let messages = snapshot.messages.iter().filter(|(_, item)| item.is_err()).map(|(message, _)| message.id.as_str());
    let documents = snapshot.unreadable.iter().filter(|illegible| illegible.kind == kind::MESSAGE);
    let mut messages = messages.chain(documents.map(|illegible| illegible.id.as_str()));
    // What came from outside is nobody's answer.
    messages.any(|id| !id.starts_with("m:e:")) || snapshot.cant_read_any(kind::INTENT)
}

/// There is no document that says what the instance is.
fn without_document(snapshot: &Snapshot, members: &[Member], findings: &mut Findings) {
    let deferred = snapshot.messages.iter().filter(|(message, _)| message.is_deferred()).count();
    if !snapshot.turns.is_empty() {
        let count = snapshot.events.as_ref().map_or(0, Vec::len);
        let detail =
            format!("there are {count} events of execution {}, but no document of the instance", snapshot.execution);
        match rebuild::instance(snapshot, "") {
            Ok(_) => {
                let does = "make it from the history; whether the metrics have counted it is not known";
                findings.fix(Reason::LostInstance, "", detail, does, Fix::Rebuild);
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
        let detail = format!("{deferred} messages wait for a start, and there is no document that says so");
        findings.fix(Reason::LostInstance, "", detail, "make it: a start takes them along", Fix::Rebuild);
    }
    for (id, (work, etag)) in &snapshot.work {
        if !is_held(work.lock.as_ref(), snapshot.now) {
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

fn is_held(lock: Option<&Lock>, now: Millis) -> bool {
    lock.is_some_and(|lock| lock.until > now)
}

/// A turn, or a deletion, that was left half-way.
fn half_done(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let is_late = document.due.is_none_or(|due| due + LATE < snapshot.now);
    if let Some(RollForwardProgress { key, parts, next }) = &document.roll_forward {
        let missing =
            (*next..*parts).find(|part| !snapshot.staged.contains_key(&StagedDocument::document_id(key, *part)));
        if let Some(missing) = missing.filter(|_| is_late) {
            let detail = format!("part {} of {parts} of a committed turn is missing", missing + 1);
            let todo = format!("restore document {} from a backup", StagedDocument::document_id(key, missing));
            findings.by_hand(Reason::HalfCommitted, key, detail, todo);
        } else if is_late {
            let detail = format!("{next} of {parts} parts of a committed turn are applied");
            findings.fix(Reason::HalfCommitted, key, detail, "apply the others", Fix::RollForward);
        }
    }
    if let Some(mark) = &document.deleting {
        if is_late {
            let detail = format!("it was to be deleted with {:?}, and is not", mark.coordinator);
            let does = "go on with the deletion, or undo it where it was not decided";
            findings.fix(Reason::HalfDeleted, &mark.plan, detail, does, Fix::GoOnDeleting);
        }
    }
}

/// Whether the history is what the instance's document says.
fn is_whole(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) -> bool {
    let Ok(events) = &snapshot.events else { return false };
    if snapshot.cant_read_any(kind::HISTORY) {
        return false;
    }
    let found: EventSet = events.iter().map(|event| event.event_id).collect();
    if found == document.events {
        return true;
    }
    let (is, must) = (found.len(), document.events.len());
    let detail = format!(
        "the history of execution {} has {is} events up to {}, and must have {must} up to {}",
        document.execution,
        found.last(),
        document.events.last()
    );
    let todo = "restore what is missing from a backup: no turn runs on a part of its history, and after its attempts the instance \
                is failed";
    findings.by_hand(Reason::LostHistory, document.execution, detail, todo);
    false
}

/// What the history says must be there, and is not.
fn lost(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    values(snapshot, document, findings);
    match document.status.as_deref() {
        Some(status::RUNNING) => {
            for event in snapshot.outstanding() {
                lost_step(snapshot, document, event, findings);
            }
            let is_idle = snapshot.messages.is_empty() && !is_held(document.lock.as_ref(), snapshot.now);
            if is_idle && waits(snapshot).is_empty() {
                let detail = "it runs, but waits for nothing: no activity, timer, child, event or message".to_owned();
                let todo = "raise an event that it should have had, or cancel it";
                findings.by_hand(Reason::Idle, "", detail, todo);
            }
        }
        Some(status::CONTINUED) if !snapshot.items().any(|item| matches!(item, WorkItem::ContinueAsNew { .. })) => {
            if let Some(next) = continuation(snapshot, document) {
                let detail = format!("execution {} continued as new, and nothing starts the next", document.execution);
                let fix = Fix::Tell(next);
                lost_and_found(
                    snapshot,
                    Reason::LostContinuation,
                    document.execution,
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

/// Something is lost that can be made again, unless what can't be read may be it.
fn lost_and_found(
    snapshot: &Snapshot,
    reason: Reason,
    subject: u64,
    detail: String,
    does: impl Into<String>,
    fix: Fix,
    findings: &mut Findings,
) {
    if may_be_unread(snapshot) {
        let todo = "a message that can't be read may be it: nothing is made again while it is there";
        findings.by_hand(reason, subject, detail, todo);
    } else {
        findings.fix(reason, subject, detail, does, fix);
    }
}

/// What nobody has ended or cancelled: is there something that will?
fn lost_step(snapshot: &Snapshot, document: &InstanceDocument, event: &Event, findings: &mut Findings) {
    let Some(instance) = snapshot.partition.instance_id() else { return };
    let (id, execution) = (event.event_id, document.execution);
    match &event.kind {
        EventKind::ActivityScheduled { .. } => lost_activity(snapshot, instance, execution, event, findings),
        EventKind::TimerCreated { fire_at_ms } => {
            let told = snapshot.items().any(|item| {
                matches!(item, WorkItem::TimerFired { execution_id, id: of, .. } if (*execution_id, *of) == (execution, id))
            });
            if !told {
                let (instance, fire_at_ms) = (instance.to_owned(), *fire_at_ms);
                let fix = Fix::Tell(WorkItem::TimerFired { instance, execution_id: execution, id, fire_at_ms });
                let detail = format!("the timer of event {id} has no message that fires it");
                let does = "set it again, for the same time";
                lost_and_found(snapshot, Reason::LostTimer, id, detail, does, fix, findings);
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

/// An activity that nobody has ended: is there work, with its input, or a completion?
fn lost_activity(snapshot: &Snapshot, instance: &str, execution: u64, event: &Event, findings: &mut Findings) {
    let EventKind::ActivityScheduled { name, .. } = &event.kind else { return };
    let id = event.event_id;
    let work_id = ActivityDocument::scheduled_id(execution, id);
    let payload_id = ActivityDocument::payload_id(&work_id);
    let Some(item) = item::scheduled(instance, execution, event) else { return };
    let told = snapshot.items().any(|item| match item {
        WorkItem::ActivityCompleted { execution_id, id: of, .. }
        | WorkItem::ActivityFailed { execution_id, id: of, .. } => (*execution_id, *of) == (execution, id),
        _ => false,
    });
    if told {
        return;
    }
    let Some((work, _)) = snapshot.work.get(&work_id) else {
        let illegible = snapshot.unreadable.iter().find(|illegible| illegible.id == work_id.as_str());
        // Somebody who can read it is at it.
        if illegible.is_none_or(|illegible| illegible.held_until <= snapshot.now) {
            let detail = format!("activity {name} (event {id}) has neither work nor completion");
            let does = format!("schedule it again ({work_id}): it may have run before");
            lost_and_found(snapshot, Reason::LostActivity, id, detail, does, Fix::Schedule(item), findings);
        }
        return;
    };
    let is_readable = match &work.item {
        Some(item) => serde_json::from_str::<WorkItem>(item).is_ok(),
        None => snapshot.payloads.get(&payload_id).is_some_and(|(_, is_readable)| *is_readable),
    };
    if !is_readable && !is_held(work.lock.as_ref(), snapshot.now) {
        let detail = format!("the input of activity {name} (event {id}) is not there, or can't be read");
        let does = format!("schedule it again with its input ({work_id})");
        findings.fix(Reason::LostInput, id, detail, does, Fix::Schedule(item));
    }
}

/// A child that the orchestration waits for, and whose end is not in its queue.
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
    // A start that is on its way is answered, also by a child that is there or has ended.
    if is_sent || child.is_queued {
        return;
    }
    if child.is_broken {
        let detail = format!("child {name:?} (event {id}) has a history, but no document that can be read");
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
            parent_execution_id: Some(parent.execution),
            execution_id: duroxide::INITIAL_EXECUTION_ID,
        };
        let detail = format!("child {name:?} (event {id}) does not exist, and no start is on its way");
        let does = format!("start it, in the version of {orchestration} that is the default");
        lost_and_found(snapshot, Reason::LostChild, id, detail, does, Fix::Send(item), findings);
        return;
    };
    if document.parent.as_deref() != Some(instance) {
        let whose = document.parent.as_deref().map_or_else(|| "nobody's".to_owned(), |parent| format!("{parent:?}'s"));
        let detail = format!("it waits for child {name:?} (event {id}), but the instance of that name is {whose}");
        findings.by_hand(Reason::LostChild, id, detail, "cancel it: that child will never be its own");
    } else if document.parent_incarnation.as_ref().is_some_and(|incarnation| *incarnation != parent.incarnation) {
        let detail = format!("child {name:?} (event {id}) was started by a former instance of this name");
        findings.by_hand(Reason::LostChild, id, detail, "cancel it: that child tells it nothing");
    } else if let Some(end) = child.end.as_ref().filter(|_| !child.owes) {
        lost_end(snapshot, parent, id, child, end, findings);
    }
}

/// A child that has ended, and whose end nobody tells.
fn lost_end(
    snapshot: &Snapshot,
    parent: &InstanceDocument,
    id: u64,
    child: &ChildSnapshot,
    end: &End,
    findings: &mut Findings,
) {
    let Some(instance) = snapshot.partition.instance_id() else { return };
    let (name, execution) = (&child.name, parent.execution);
    let is_of_another = end.scheduled_by.is_some_and(|(event, of_execution)| {
        event.is_some_and(|event| event != id) || of_execution.is_some_and(|of_execution| of_execution != execution)
    });
    if is_of_another {
        let detail = format!("child {name:?} (event {id}) has ended, but another event has started it");
        findings.by_hand(Reason::LostEnd, id, detail, "cancel it: nobody answers this start any more");
        return;
    }
    let (parent_instance, parent_id) = (instance.to_owned(), id);
    let item = match end.outcome.clone() {
        Ok(result) => WorkItem::SubOrchCompleted { parent_instance, parent_execution_id: execution, parent_id, result },
        Err(details) => WorkItem::SubOrchFailed { parent_instance, parent_execution_id: execution, parent_id, details },
    };
    let detail = format!("child {name:?} (event {id}) has ended, and nobody tells");
    lost_and_found(snapshot, Reason::LostEnd, id, detail, "tell how it has ended", Fix::Tell(item), findings);
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
        orchestration: document.name.clone(),
        input,
        version: None,
        parent_instance,
        parent_id,
        parent_execution_id,
        carry_forward_events: unheard(events),
        initial_custom_status: custom_status(events).flatten(),
    })
}

/// What came into queues and nobody has waited for: the next execution hears of it.
fn unheard(events: &[Event]) -> Vec<(String, String)> {
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

/// The custom status as the history says, if it says anything.
pub(super) fn custom_status(events: &[Event]) -> Option<Option<String>> {
    let said = |event: &Event| match &event.kind {
        EventKind::CustomStatusUpdated { status } => Some(status.clone()),
        EventKind::OrchestrationStarted { initial_custom_status: Some(status), .. } => Some(Some(status.clone())),
        _ => None,
    };
    events.iter().rev().find_map(said)
}

/// Follows what events say of values: of each key, what it was set to last, and nothing where it was cleared.
fn follow<'a>(values: &mut BTreeMap<&'a str, Option<KvBase>>, events: impl IntoIterator<Item = &'a Event>) {
    for event in events {
        match &event.kind {
            EventKind::KeyValueSet { key, value, last_updated_at_ms } => {
                values.insert(key, Some(KvBase { value: value.clone(), at: *last_updated_at_ms }));
            }
            EventKind::KeyValueCleared { key } => drop(values.insert(key, None)),
            EventKind::KeyValuesCleared => values.values_mut().for_each(|value| *value = None),
            _ => {}
        }
    }
}

/// The executions right before the current one whose histories are whole, oldest first. An execution before a gap says
/// nothing of values: one that is missing may have set or cleared them since.
fn unbroken_past<'a>(snapshot: &'a Snapshot, document: &InstanceDocument) -> impl Iterator<Item = &'a Past> {
    let whole = |execution: u64| {
        let (past, ended) = (snapshot.past.get(&execution)?, snapshot.executions.get(&execution)?);
        Some(past).filter(|past| past.unreadable.is_none() && past.events == ended.events)
    };
    let unbroken: Vec<&Past> = (1..document.execution).rev().map_while(whole).collect();
    unbroken.into_iter().rev()
}

/// Values, as all executions that are still there have left them, and the custom status, as the current one has set it.
fn values(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let Ok(events) = &snapshot.events else { return };
    let mut before = BTreeMap::new();
    follow(&mut before, unbroken_past(snapshot, document).flat_map(|past| &past.values));
    let (mut current, mut all) = (BTreeMap::new(), before.clone());
    follow(&mut current, events);
    follow(&mut all, events);
    for (key, said) in all {
        let Some(value) = said else { continue };
        let is = snapshot.values.get(key).and_then(|document| document.value.as_ref());
        if is == Some(&value.value) {
            continue;
        }
        let how = if is.is_none() { "is not there" } else { "is not as the history says" };
        let is_current = current.get(key).is_some_and(Option::is_some);
        let lost = LostValue { value, is_current, before: before.get(key).cloned().flatten() };
        let does = match lost.is_current && lost.before.is_none() {
            true => "write it; what it was before this execution is not known",
            false => "write it",
        };
        let fix = Fix::SetValue { key: key.to_owned(), lost };
        findings.fix(Reason::LostValue, key, format!("the value of key {key:?} {how}"), does, fix);
    }
    let is = snapshot.status.as_ref().map(|status| &status.value);
    match custom_status(events) {
        Some(said) if is != Some(&said) && document.status_version > 0 => {
            let how = if is.is_none() { "is not there" } else { "is not as the history says" };
            findings.fix(Reason::LostStatus, "", format!("the custom status {how}"), "write it", Fix::SetStatus(said));
        }
        None if is.is_none() && document.status_version > 0 => {
            let todo = "nothing says what it was: the next turn that sets it makes it anew";
            findings.by_hand(Reason::LostStatus, "", "the custom status is not there".to_owned(), todo);
        }
        _ => {}
    }
}

/// The documents of executions.
fn archives(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let past = snapshot.turns.keys().copied().filter(|execution| *execution < document.execution);
    let current = document.archived.then_some(document.execution);
    for execution in past.chain(current) {
        if !snapshot.executions.contains_key(&execution) && !document.pruning.contains(&execution) {
            let detail = format!("there is no document that says how execution {execution} ended");
            let does = "make it from the history of that execution";
            findings.fix(Reason::LostExecution, execution, detail, does, Fix::Archive(execution));
        }
    }
}

/// Earlier executions: none of them may have lost a part of its history, nor be gone without having been pruned.
fn past(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let nothing = Past::default();
    let is_past = |execution: &u64| *execution < document.execution && !document.pruning.contains(execution);
    for (execution, ended) in snapshot.executions.iter().filter(|(execution, _)| is_past(execution)) {
        let found = snapshot.past.get(execution).unwrap_or(&nothing);
        if let Some(why) = &found.unreadable {
            let todo = "a newer version may be able to read it; the instance runs without it";
            let detail = format!("the history of execution {execution} can't be read: {why}");
            findings.by_hand(Reason::Unreadable, format!("history {execution}"), detail, todo);
        } else if found.events != ended.events {
            let detail = match found.events.len() {
                0 => format!("the history of execution {execution} is not there"),
                is => format!("the history of execution {execution} has {is} of {} events", ended.events.len()),
            };
            let todo = "restore it from a backup, or prune that execution; the instance runs without it";
            findings.by_hand(Reason::LostHistory, execution, detail, todo);
        }
    }
    let there: BTreeSet<u64> =
        snapshot.executions.keys().chain(snapshot.turns.keys()).copied().filter(is_past).collect();
    let (is, must) = (there.len() as u64 + 1, document.totals.executions);
    if is < must {
        let detail = format!("{} of {must} executions are not there, and were not pruned", must - is);
        let todo = "restore them from a backup; the instance runs without them";
        findings.by_hand(Reason::LostHistory, "executions", detail, todo);
    }
}

/// A document that nobody will ever ask for.
fn unreferenced(id: &DocumentId, etag: &Etag, what: &str, findings: &mut Findings) {
    let fix = Fix::Delete(id.clone(), etag.clone());
    findings.fix(Reason::Stray, id, format!("{what} {id} is of no use to anybody"), format!("delete {id}"), fix);
}

/// Activities, and inputs, that the history does not wait for.
fn unneeded(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let is_running = document.status.as_deref() == Some(status::RUNNING);
    let waited: BTreeSet<DocumentId> = snapshot
        .outstanding()
        .filter(|event| is_running && matches!(event.kind, EventKind::ActivityScheduled { .. }))
        .map(|event| ActivityDocument::scheduled_id(document.execution, event.event_id))
        .collect();
    // Who runs one ends it by itself.
    let held =
        snapshot.work.iter().filter(|(_, (work, _))| is_held(work.lock.as_ref(), snapshot.now)).map(|(id, _)| id);
    let needed: BTreeSet<DocumentId> = waited.iter().chain(held).cloned().collect();
    for (id, (_, etag)) in snapshot.work.iter().filter(|(id, _)| !needed.contains(id)) {
        unreferenced(id, etag, "activity", findings);
    }
    let inputs: BTreeSet<DocumentId> = needed.iter().map(ActivityDocument::payload_id).collect();
    for (id, (etag, _)) in snapshot.payloads.iter().filter(|(id, _)| !inputs.contains(id)) {
        unreferenced(id, etag, "the input", findings);
    }
}

/// Staged parts that the instance's document does not know of.
fn unnamed(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let parts = |note: &Staging| {
        let key = note.key.clone();
        (0..note.parts).map(move |part| StagedDocument::document_id(&key, part))
    };
    let named: BTreeSet<DocumentId> = document.staging.iter().flat_map(parts).collect();
    for (id, etag) in snapshot.staged.iter().filter(|(id, _)| !named.contains(id)) {
        unreferenced(id, etag, "the staged part", findings);
    }
}

/// Whether the one that started it is there.
fn parents(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let (Some(name), Some(parent)) = (&document.parent, &snapshot.parent) else { return };
    if document.has_ended() {
        return;
    }
    let parent = parent.as_ref().filter(|parent| parent.exists());
    let todo = "it runs to its end and tells nobody; cancel it, if that is not wanted";
    match parent {
        None => findings.by_hand(Reason::Orphan, name, format!("its parent {name:?} does not exist"), todo),
        Some(parent)
            if document.parent_incarnation.as_ref().is_some_and(|incarnation| *incarnation != parent.incarnation) =>
        {
            let detail = format!("its parent {name:?} was deleted, and another one has that name");
            findings.by_hand(Reason::Orphan, name, detail, todo);
        }
        Some(_) => {}
    }
}

/// Messages that it owes to others.
fn undelivered(snapshot: &Snapshot, findings: &mut Findings) {
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
        // Each attempt that fails puts it off, so that it is hardly ever late.
        let fails = intent.retries > 0 && intent.created_at + LATE < snapshot.now;
        if is_late || fails {
            let (since, attempts) = (lateness::seconds(intent.created_at, snapshot.now), intent.retries);
            let detail = format!("a message for {target:?} is not delivered since {since}, after {attempts} attempts");
            let todo = match fails {
                true => format!("the logs of the workers say why; or {}", retry(intent)),
                false => format!("start a worker: any delivers it; or {}", retry(intent)),
            };
            findings.by_hand(Reason::Undelivered, &intent.id, detail, todo);
        }
    }
}

/// What an instance does or waits for, in a few words.
pub(super) fn state(snapshot: &Snapshot) -> String {
    let Some(document) = snapshot.document().filter(|_| !snapshot.is_headless()) else {
        if snapshot.is_illegible() {
            return "can't be read".to_owned();
        }
        let starts = snapshot.messages.iter().any(|(message, _)| message.starts);
        return match (starts, snapshot.turns.is_empty()) {
            (true, true) => "waits for its first turn".to_owned(),
            (_, false) => "has lost its document".to_owned(),
            (false, true) => "does not exist".to_owned(),
        };
    };
    if document.deleting.is_some() {
        return "is being deleted".to_owned();
    }
    if let Some(status) = document.status.as_deref().filter(|_| document.has_ended()) {
        return format!("has ended: {status}");
    }
    if is_held(document.lock.as_ref(), snapshot.now) {
        return "a turn is under way".to_owned();
    }
    let ready = snapshot.messages.iter().filter(|(message, _)| message.due <= snapshot.now).count();
    if ready > 0 {
        return format!("{ready} messages wait for a turn");
    }
    if !document.exists() {
        return "nobody has started it".to_owned();
    }
    let waits = waits(snapshot);
    match waits.as_slice() {
        [] => "waits for nothing".to_owned(),
        [first] => format!("waits for {first}"),
        [first, rest @ ..] => format!("waits for {first} and {} more", rest.len()),
    }
}

/// The waits for events that nothing has answered, by the ids of the events that began them. As duroxide replays a
/// history, an event answers the first wait for its name that was there before it and was not over. A queue message
/// answers the first wait for its name that was not cancelled, whichever came first.
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

/// What an orchestration waits for.
fn waits(snapshot: &Snapshot) -> Vec<String> {
    let unanswered = unanswered(snapshot.events.as_deref().unwrap_or_default());
    let mut waits = Vec::new();
    for event in snapshot.outstanding() {
        waits.push(match &event.kind {
            EventKind::ActivityScheduled { name, .. } => {
                let work = event.execution_id;
                let work = snapshot.work.get(&ActivityDocument::scheduled_id(work, event.event_id));
                let runs = work.is_some_and(|(work, _)| is_held(work.lock.as_ref(), snapshot.now));
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
