//! The documents of the container. SPEC.md shows an example of each.
//!
//! Every document has `id`, `instanceId` (the partition key) and `type`. What must be looked at by a certain time has
//! `due`; documents without it are never found by a poll. Payloads stay strings: the service turns large integers into
//! floats and `1.0` into `1`.

use super::{item, DocumentId, Ending, EventSet, Fingerprints, InlinedMessage, Millis, Partition, Slot, Unknown};
use super::{operation::MAX_DOCUMENT_BYTES, Operation};
use azure_core::http::Etag;
use duroxide::providers::WorkItem;
use serde::{Deserialize, Serialize};

/// Values of the property `type`.
pub(crate) mod kind {
    pub(crate) const INSTANCE: &str = "instance";
    pub(crate) const MESSAGE: &str = "message";
    pub(crate) const DELIVERED: &str = "delivered";
    pub(crate) const ACTIVITY: &str = "activity";
    pub(crate) const PAYLOAD: &str = "payload";
    pub(crate) const HISTORY: &str = "history";
    pub(crate) const EXECUTION: &str = "execution";
    pub(crate) const KV: &str = "kv";
    pub(crate) const STATUS: &str = "customStatus";
    pub(crate) const INTENT: &str = "intent";
    pub(crate) const STAGED: &str = "staged";
    pub(crate) const SESSION: &str = "session";
    pub(crate) const COUNTERS: &str = "counters";
    pub(crate) const PLAN: &str = "plan";
    pub(crate) const MEMBER: &str = "member";
    pub(crate) const WAKEUP: &str = "wakeup";
    pub(crate) const FORMAT: &str = "format";
    pub(crate) const SHARED_RESULT: &str = "sharedResult";
}

/// The format of the documents in a container. It goes up with a change that versions before it would misread; what they can
/// overlook does not count.
pub(crate) const FORMAT: u32 = 1;

/// Statuses of an execution.
pub(crate) mod status {
    pub(crate) const RUNNING: &str = "Running";
    pub(crate) const COMPLETED: &str = "Completed";
    pub(crate) const FAILED: &str = "Failed";
    pub(crate) const CONTINUED: &str = "ContinuedAsNew";

    /// Whether an execution with this status has ended. Its instance may go on with the next execution.
    pub(crate) fn execution_has_ended(status: &str) -> bool {
        matches!(status, COMPLETED | FAILED | CONTINUED)
    }

    /// Whether an instance whose current execution has this status has ended. An instance that continues as new has
    /// not: its next execution is about to begin.
    pub(crate) fn instance_has_ended(status: &str) -> bool {
        matches!(status, COMPLETED | FAILED)
    }
}

/// The lock of an instance or an activity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lock {
    /// Who holds it: the token that duroxide's runtime has.
    pub(crate) token: String,
    /// Until when, by the holder's clock.
    pub(crate) until: Millis,
}

/// The hot document of an instance: replaced by every claim, renewal and commit, so it holds no payload.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct InstanceDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The turn that is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lock: Option<Lock>,
    /// When each claim since the last commit was made: what the attempts of a message are counted from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) claims: Vec<Millis>,
    /// How many claims there were before those: a document has no room for all times.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) earlier_claims: u32,
    /// The current execution.
    pub(crate) execution: u64,
    /// Its status; none before the first commit, when there is a lock but no instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) version: String,
    /// Tells it from other instances that have had or will have this name.
    #[serde(default)]
    pub(crate) incarnation: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parent: Option<String>,
    /// Which instance of the parent's name started it: only that one is told how it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parent_incarnation: Option<String>,
    /// The duroxide version that the current execution is pinned to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pinned: Option<String>,
    #[serde(default)]
    pub(crate) created_at: Millis,
    #[serde(default)]
    pub(crate) updated_at: Millis,
    /// When the current execution began and ended.
    #[serde(default)]
    pub(crate) started_at: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) completed_at: Option<Millis>,
    /// How and when it ended, for retention: only of one that no other has started, since a family goes as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ended: Option<String>,
    /// Its output, where that is small. A large one is in the execution's own document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) output: Option<String>,
    /// Whether the current execution has a document of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) archived: bool,
    /// The event ids of the current execution.
    #[serde(default)]
    pub(crate) events: EventSet,
    /// Executions and events of the instance as a whole, for the metrics.
    #[serde(default)]
    pub(crate) totals: Totals,
    /// How many turns were committed, and the token of the last.
    #[serde(default)]
    pub(crate) turn: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) last_turn: Option<String>,
    /// What turns have staged that are not committed, or never will be: the next claim deletes what it finds here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) staging: Vec<Staging>,
    /// A turn that was committed and whose staged operations are still to be applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) roll_forward: Option<RollForwardProgress>,
    /// How often an execution has ended: tells values of the running execution from those before it.
    #[serde(default)]
    pub(crate) epoch: u64,
    #[serde(default)]
    pub(crate) status_version: u64,
    /// Present while the counters don't hold this instance's figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) count_pending: Option<String>,
    /// What the counters hold of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) counted: Option<CountedFigures>,
    /// Set when the instance is being deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) deleting: Option<Deleting>,
    /// Executions that were pruned and whose documents are still to be erased.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) pruning: Vec<u64>,
    /// A message that was written with the claim of its turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inlined: Option<Box<InlinedMessage>>,
    /// There are deferred messages in its partition.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) deferred: bool,
    /// All deferred messages are orphans: queue messages that are dropped after a day, unless a start comes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) orphans: bool,
    /// When somebody must look at it: a roll-forward or a deletion that may have been left half-way, deferred messages that
    /// did not fit a turn, an inlined message, or a claim of what may turn out not to be there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) due: Option<Millis>,
    /// The service's time, in seconds, of the last write before the document was read. A write of this process does not change it.
    #[serde(rename = "_ts", default, skip_serializing)]
    pub(crate) written_at: u64,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

/// Parts of a turn that does not fit one batch. Noted by the batch that writes each part, so that none is unknown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staging {
    /// What the parts' ids hold.
    pub(crate) key: String,
    /// How many parts were written.
    pub(crate) parts: usize,
}

/// How far the staged parts of a committed turn have been applied. They are applied in order, each by a batch that also
/// moves `next`, so that a part which is not there is known to be missing and never taken for one that was applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RollForwardProgress {
    /// What the parts' ids hold.
    pub(crate) key: String,
    /// How many parts the turn has.
    pub(crate) parts: usize,
    /// The first that is not applied yet.
    pub(crate) next: usize,
}

/// Figures of an instance that the metrics sum up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Totals {
    pub(crate) executions: u64,
    pub(crate) events: u64,
}

/// What the counters hold of a finished instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CountedFigures {
    pub(crate) status: String,
    #[serde(flatten)]
    pub(crate) totals: Totals,
    /// The round that put it there: tells its step from one that a round before has counted.
    pub(crate) round: String,
}

/// A step of what the counters hold of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FoldStep {
    /// What they hold before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) was: Option<CountedFigures>,
    /// What they hold after it; none where the instance is erased.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) now: Option<CountedFigures>,
}

/// The mark of an instance that is being deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Deleting {
    /// Unique to the call that deletes.
    pub(crate) plan: String,
    /// The instance whose document decides whether the plan holds.
    pub(crate) coordinator: String,
    /// When the plan began, in the coordinator when it was decided: messages that were made after that may belong to a new
    /// instance of the same name.
    pub(crate) before: String,
    /// In the coordinator of a decided plan only: the service's time, in seconds, of the last write before the decision. A message
    /// that the service took in a later second may belong to a new instance of the same name, whatever its sender's clock says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) committed_after: Option<u64>,
    /// The same, of the decision itself, once the document was written again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) committed_by: Option<u64>,
    /// The service's time, in seconds, of the last write before this mark was put on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) last_written: Option<u64>,
    /// In the coordinator only: what became of the plan. Until it is decided nothing is deleted.
    #[serde(default)]
    pub(crate) state: DeletionState,
    /// In the coordinator only: how many parts list the other instances, and the first that is not dealt with yet.
    #[serde(default)]
    pub(crate) parts: usize,
    #[serde(default)]
    pub(crate) part: usize,
    /// In the coordinator only: whether anybody but the one who decided the plan may have erased instances of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) recovered_by_others: bool,
}

impl Deleting {
    /// Whether this plan began before another: one order for all processes, also where their clocks are off.
    pub(crate) fn began_before(&self, other: &Self) -> bool {
        (&self.before, &self.plan) < (&other.before, &other.plan)
    }
}

/// What became of the plan of a deletion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum DeletionState {
    /// Nothing yet: fingerprints are being put on.
    #[default]
    Open,
    /// Every instance of it is deleted.
    Committed,
    /// None of them is: the fingerprints come off.
    Aborted,
}

/// Some of the instances that a deletion covers, in the coordinator's partition.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PlanDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) members: Vec<String>,
}

impl PlanDocument {
    /// Members of one part: with the longest ids they take a tenth of what a document may have.
    pub(crate) const MEMBERS: usize = 100;

    pub(crate) fn document_id(plan: &str, part: usize) -> DocumentId {
        DocumentId::new("d", &[plan, &part.to_string()])
    }

    pub(crate) fn new(partition: Partition, plan: &str, part: usize, members: Vec<String>) -> Self {
        Self { id: Self::document_id(plan, part), instance_id: partition, kind: kind::PLAN.to_owned(), members }
    }
}

impl InstanceDocument {
    /// So long after its lock has ended a document without an instance is looked at.
    const LEFT_BEHIND: Millis = 3_000;

    /// The id, the same in every partition.
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("instance", &[])
    }

    /// A document for an instance that has none; `token` is one that nobody else has.
    pub(crate) fn new(partition: Partition, token: &str, now: Millis) -> Self {
        Self {
            id: Self::document_id(),
            instance_id: partition,
            kind: kind::INSTANCE.to_owned(),
            lock: None,
            claims: Vec::new(),
            earlier_claims: 0,
            execution: 1,
            status: None,
            name: String::new(),
            version: String::new(),
            incarnation: token.chars().take(8).collect(),
            parent: None,
            parent_incarnation: None,
            pinned: None,
            created_at: now,
            updated_at: now,
            started_at: now,
            completed_at: None,
            ended: None,
            output: None,
            archived: false,
            events: EventSet::default(),
            totals: Totals::default(),
            turn: 0,
            last_turn: None,
            staging: Vec::new(),
            roll_forward: None,
            epoch: 0,
            status_version: 0,
            count_pending: None,
            counted: None,
            deleting: None,
            pruning: Vec::new(),
            inlined: None,
            deferred: false,
            orphans: false,
            due: None,
            written_at: 0,
            unknown: Unknown::default(),
        }
    }

    /// Whether there is an instance, not just a lock.
    pub(crate) fn exists(&self) -> bool {
        self.status.is_some()
    }

    /// Whether nothing was ever written for it but by claims: there is neither history nor a value.
    pub(crate) fn is_placeholder(&self) -> bool {
        !self.exists() && self.turn == 0 && self.staging.is_empty() && self.totals.events == 0
    }

    /// Whether it only fingerprints that messages are deferred for an instance which nobody has started.
    pub(crate) fn has_only_deferred(&self, now: Millis) -> bool {
        self.deferred && self.is_placeholder() && self.locked_until(now).is_none()
    }

    /// Whether an instance that runs has deferred messages left: somebody must look, though no poll sees them.
    fn has_deferred_left(&self) -> bool {
        self.deferred && self.exists()
    }

    /// Whether there is nothing but claims: if the message goes that they were made for, nothing else tells of the document.
    fn is_only_claimed(&self) -> bool {
        !self.exists() && !self.deferred
    }

    /// Whether somebody must look at it, though no message may tell of it.
    pub(crate) fn needs_recovery(&self) -> bool {
        self.has_deferred_left()
            || self.is_only_claimed()
            || self.inlined.is_some()
            || !self.staging.is_empty()
            || self.roll_forward.is_some()
    }

    /// Locks it. A poll finds a document that is left behind with a message in it, or without an instance.
    pub(crate) fn hold(&mut self, token: &str, until: Millis) {
        self.lock = Some(Lock { token: token.to_owned(), until });
        self.schedule_recovery(until);
    }

    /// Takes the lock off for messages that are there again at `due`.
    pub(crate) fn give_up(&mut self, due: Millis) {
        self.lock = None;
        self.schedule_recovery(due);
    }

    fn schedule_recovery(&mut self, then: Millis) {
        if self.inlined.is_some() {
            self.due = Some(then);
        } else if self.is_only_claimed() {
            self.due = Some(then.saturating_add(Self::LEFT_BEHIND));
        }
    }

    /// Notes a claim at this time, or right after the last: in order, also where the clock was set back or that of the claim
    /// before is ahead.
    pub(crate) fn record_claim(&mut self, now: Millis) {
        const MOST: usize = 64;
        if self.claims.len() >= MOST {
            self.claims.remove(0);
            self.earlier_claims = self.earlier_claims.saturating_add(1);
        }
        let after = self.claims.last().map_or(0, |last| last + 1);
        self.claims.push(now.max(after));
    }

    /// How many claims there were since then. Those whose times are not kept are taken together.
    pub(crate) fn claims_since(&self, then: Millis) -> u32 {
        let seen = self.claims.iter().filter(|claim| **claim >= then).count();
        let all = self.claims.first().is_some_and(|first| *first >= then);
        let earlier = if all { self.earlier_claims } else { 0 };
        u32::try_from(seen).unwrap_or(u32::MAX).saturating_add(earlier)
    }

    /// Claims so far count no more.
    pub(crate) fn forget_claims(&mut self) {
        self.claims.clear();
        self.earlier_claims = 0;
    }

    /// Whether the lock is held by this token, valid or not.
    pub(crate) fn held_by(&self, token: &str) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.token == token)
    }

    /// Until when somebody holds the lock, if anybody does.
    pub(crate) fn locked_until(&self, now: Millis) -> Option<Millis> {
        self.lock.as_ref().filter(|lock| lock.until > now).map(|lock| lock.until)
    }

    /// Whether the current execution has ended. The instance may go on with the next one.
    pub(crate) fn execution_has_ended(&self) -> bool {
        self.status.as_deref().is_some_and(status::execution_has_ended)
    }

    /// Whether the instance has ended for good.
    pub(crate) fn has_ended(&self) -> bool {
        self.status.as_deref().is_some_and(status::instance_has_ended)
    }

    /// Notes what the time of the last write tells, before another write changes it: when the instance has ended, for
    /// retention, and when its deletion was decided. Not for a write that says something new about either.
    pub(crate) fn keep_service_times(&mut self) {
        match self.deleting.as_mut() {
            Some(mark) if mark.state == DeletionState::Committed => {
                mark.committed_by.get_or_insert(self.written_at);
            }
            Some(_) => {}
            None => self.prove_end(self.written_at),
        }
    }

    /// Notes that the instance had ended by this time of the service, in seconds, unless that is known better.
    fn prove_end(&mut self, by: u64) {
        if let Some(ended) = self.ended.as_mut().filter(|ended| by > 0 && !Ending::is_proved(ended)) {
            *ended = Ending::proved(ended, by.saturating_mul(1_000));
        }
    }

    /// Puts the mark of a deletion on.
    pub(crate) fn mark(&mut self, mark: &Deleting) {
        let last_written = Some(self.written_at).filter(|time| *time > 0);
        self.deleting = Some(Deleting { last_written, ..mark.clone() });
    }

    /// Takes the mark of a deletion off that was given up. It was no write that retention counts from.
    pub(crate) fn unmark(&mut self) {
        if let Some(mark) = self.deleting.take() {
            self.prove_end(mark.last_written.unwrap_or_default());
        }
    }

    /// Whether there is an instance that has not ended.
    pub(crate) fn is_running(&self) -> bool {
        self.exists() && !self.has_ended()
    }

    /// Which instance of this name is meant, where that is known: of the parent, the one that started it.
    pub(crate) fn incarnation_of(&self, instance: &str) -> Option<String> {
        self.parent_incarnation.clone().filter(|_| self.parent.as_deref() == Some(instance))
    }
}

/// A message for an orchestration. A claim does not touch it: the lock is the instance's.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MessageDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// When it becomes visible.
    pub(crate) due: Millis,
    /// Its place in the queue.
    pub(crate) seq: String,
    /// When it was made: a claim before that did not have it.
    pub(crate) created_at: Millis,
    /// Where it lies, so that members who share a physical partition can tell theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) slot: Option<Slot>,
    /// The member that knows of it without asking.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) known_by: Option<String>,
    /// Attempts that are not in the instance's claims any more.
    #[serde(default)]
    pub(crate) attempts: u32,
    /// Whether it can begin an instance, so that a poller knows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) starts: bool,
    /// Came from another partition: what consumes it leaves a marker, so that a second copy is known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) delivered: bool,
    /// Which instance of a name it concerns: of a start, the one that sent it; of any other message, the one it is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) incarnation: Option<String>,
    /// Of a start that another instance has sent: that instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sender: Option<String>,
    /// When a worker found this queue message and neither an instance nor a start for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) orphan_since: Option<Millis>,
    /// The work item as JSON.
    pub(crate) item: String,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

impl MessageDocument {
    /// What a message may take: the event that it becomes has more around it, and must fit a document, too.
    pub(crate) const MAX_BYTES: usize = MAX_DOCUMENT_BYTES - 16 * 1024;
    /// The `due` of a message that is deferred: no poll ever asks that far ahead. It is the largest integer that the service
    /// keeps.
    pub(crate) const DEFERRED: Millis = (1 << 53) - 1;

    /// The key of a message that was put into the queue from outside any turn or activity.
    pub(crate) fn outside_key(token: &str) -> String {
        format!("e:{token}")
    }

    /// The key of the message that tells of the end of an activity, held under this token.
    pub(crate) fn completion_key(token: &str) -> String {
        format!("a:{token}")
    }

    /// Whether a message of this id tells of the end of an activity.
    pub(crate) fn is_completion(id: &DocumentId) -> bool {
        id.as_str().starts_with("m:a:")
    }

    /// Whether a message of this id came from outside any turn or activity. Of all messages only such a one can be meant for
    /// a new instance of a name that is being deleted, and only such a one can be written again by a repeated request.
    pub(crate) fn is_from_outside(id: &DocumentId) -> bool {
        Self::outside_token(id).is_some()
    }

    /// A message that becomes visible at `due`.
    pub(crate) fn new(
        partition: Partition,
        key: &str,
        work_item: &WorkItem,
        seq: String,
        now: Millis,
        due: Millis,
    ) -> Result<Self, serde_json::Error> {
        let text = serde_json::to_string(work_item)?;
        let message = Self::with_item(partition, DocumentId::new("m", &[key]), text, seq, now, due);
        Ok(Self { starts: item::starts(work_item), ..message })
    }

    /// A message with this work item as JSON.
    pub(crate) fn with_item(
        partition: Partition,
        id: DocumentId,
        item: String,
        seq: String,
        now: Millis,
        due: Millis,
    ) -> Self {
        Self {
            id,
            slot: Some(Slot::of(&partition)),
            instance_id: partition,
            kind: kind::MESSAGE.to_owned(),
            due,
            seq,
            created_at: now,
            known_by: None,
            attempts: 0,
            starts: false,
            delivered: false,
            incarnation: None,
            sender: None,
            orphan_since: None,
            item,
            unknown: Unknown::default(),
        }
    }

    /// Says that an instance has sent it to another one, and which instance of the receiver's name it is for. A start
    /// says instead who has sent it, so that its end is told to nobody else.
    pub(crate) fn send(&mut self, sender: &InstanceDocument, receiver: Option<String>) {
        self.delivered = true;
        self.incarnation = receiver;
        if self.starts {
            self.incarnation = Some(sender.incarnation.clone());
            self.sender = sender.instance_id.instance_id().map(ToOwned::to_owned);
        }
    }

    /// When its sender put it into the queue, by the sender's clock: `seq` begins with that time.
    pub(crate) fn sent_at(&self) -> Millis {
        self.seq.get(..15).and_then(|sent| sent.parse().ok()).unwrap_or(0)
    }

    /// Whether it waits, out of the polls' sight, for the start of its instance.
    pub(crate) fn is_deferred(&self) -> bool {
        self.due == Self::DEFERRED
    }

    /// Its size, where it is too large for the event that it becomes.
    pub(crate) fn oversize(&self) -> Option<usize> {
        // Escaping makes a character six bytes long at most: what is short can't be too large, and most are short.
        const SHORT: usize = MessageDocument::MAX_BYTES / 8;
        if self.item.len() <= SHORT {
            return None;
        }
        let bytes = Operation::create(self).map_or(usize::MAX, |operation| operation.size());
        (bytes > Self::MAX_BYTES).then_some(bytes)
    }

    /// The token of a message from outside.
    pub(crate) fn outside_token(id: &DocumentId) -> Option<&str> {
        id.as_str().strip_prefix("m:e:")
    }
}

/// What is left of a delivered message once it is consumed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeliveredDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Seconds until the service removes it, where the container has time to live turned on.
    pub(crate) ttl: u32,
}

impl DeliveredDocument {
    /// A day: a delivery that is still under way after that has long been given up.
    const TTL: u32 = 24 * 60 * 60;

    pub(crate) fn new(id: DocumentId, partition: Partition) -> Self {
        Self { id, instance_id: partition, kind: kind::DELIVERED.to_owned(), ttl: Self::TTL }
    }
}

/// An activity to run, in the partition of its orchestration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ActivityDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// When it can be taken: at once, after a delay, or when its lock expires.
    pub(crate) due: Millis,
    pub(crate) seq: String,
    #[serde(default)]
    pub(crate) attempts: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) session_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tag: Option<String>,
    /// Where it lies, so that members who share a physical partition can tell theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) slot: Option<Slot>,
    /// The member whose turn scheduled it: it knows of it without asking, and is told when it is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) known_by: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lock: Option<Lock>,
    /// The work item as JSON; a large one is in a document of its own, which claims don't rewrite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) item: Option<String>,
    #[serde(rename = "_etag", default, skip_serializing)]
    pub(crate) etag: Option<Etag>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

/// The work item of an activity whose input is large.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PayloadDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) item: String,
}

impl ActivityDocument {
    /// Takes it until then; the attempt counts.
    pub(crate) fn claim(&mut self, token: &str, until: Millis) {
        self.lock = Some(Lock { token: token.to_owned(), until });
        self.due = until;
        self.attempts += 1;
    }

    /// Larger work items go into a document of their own.
    const INLINE: usize = 4 * 1024;

    /// The id of an activity that a turn scheduled: known without asking, so that it can be cancelled.
    pub(crate) fn scheduled_id(execution: u64, activity: u64) -> DocumentId {
        DocumentId::new("w", &[&execution.to_string(), &activity.to_string()])
    }

    /// Whether a document of this id is an activity, or the payload of one.
    pub(crate) fn is_activity_id(id: &DocumentId) -> bool {
        id.as_str().starts_with("w:") || id.as_str().starts_with("p:w:")
    }

    /// The id of the payload of the activity `id`.
    pub(crate) fn payload_id(id: &DocumentId) -> DocumentId {
        DocumentId::new("p", &[id.as_str()])
    }

    /// Whether a work item of this text stays in the activity's own document.
    pub(crate) fn is_inline(item: &str) -> bool {
        item.len() <= Self::INLINE
    }

    /// The execution and activity that an id names.
    pub(crate) fn identity(id: &DocumentId) -> Option<(u64, u64)> {
        let mut parts = id.as_str().strip_prefix("w:")?.split(':');
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }

    /// The documents of an activity: its own, and one for a large payload.
    pub(crate) fn new(
        partition: Partition,
        id: DocumentId,
        work_item: &WorkItem,
        seq: String,
        now: Millis,
    ) -> Result<(Self, Option<PayloadDocument>), serde_json::Error> {
        let (session_id, tag) = match work_item {
            WorkItem::ActivityExecute { session_id, tag, .. } => (session_id.clone(), tag.clone()),
            _ => (None, None),
        };
        let item = serde_json::to_string(work_item)?;
        let mut document = Self {
            id,
            slot: Some(Slot::of(&partition)),
            known_by: None,
            instance_id: partition,
            kind: kind::ACTIVITY.to_owned(),
            due: now,
            seq,
            attempts: 0,
            session_id,
            tag,
            lock: None,
            item: None,
            etag: None,
            unknown: Unknown::default(),
        };
        if Self::is_inline(&item) {
            document.item = Some(item);
            return Ok((document, None));
        }
        let payload = PayloadDocument {
            id: Self::payload_id(&document.id),
            instance_id: document.instance_id.clone(),
            kind: kind::PAYLOAD.to_owned(),
            item,
        };
        Ok((document, Some(payload)))
    }

    /// Whether its payload is in a document of its own.
    pub(crate) fn has_payload_document(&self) -> bool {
        self.item.is_none()
    }

    /// Whether the lock is held by this token, valid or not.
    pub(crate) fn held_by(&self, token: &str) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.token == token)
    }
}

/// Events that one turn appended to one execution.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HistoryDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) execution: u64,
    /// Events as JSON, in order.
    pub(crate) events: Vec<String>,
    /// The id of the first event: what the documents of an execution are ordered by.
    pub(crate) first: u64,
    /// The messages from outside that the turn consumed: one that a repeated request writes again is known by them.
    #[serde(default, skip_serializing_if = "Fingerprints::is_empty")]
    pub(crate) consumed: Fingerprints,
}

impl HistoryDocument {
    pub(crate) fn new(
        partition: Partition,
        execution: u64,
        turn: &str,
        part: usize,
        first: u64,
        events: Vec<String>,
    ) -> Self {
        Self {
            id: DocumentId::new("h", &[&execution.to_string(), turn, &part.to_string()]),
            instance_id: partition,
            kind: kind::HISTORY.to_owned(),
            execution,
            events,
            first,
            consumed: Fingerprints::default(),
        }
    }
}

/// An execution that has ended, or that a newer one has superseded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ExecutionDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) execution: u64,
    pub(crate) status: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) output: Option<String>,
    pub(crate) started_at: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ended_at: Option<Millis>,
    #[serde(default)]
    pub(crate) events: EventSet,
}

impl ExecutionDocument {
    /// Outputs up to this size stay in the instance's document: a finished instance is hardly ever claimed again.
    pub(crate) const INLINE: usize = 512;

    pub(crate) fn document_id(execution: u64) -> DocumentId {
        DocumentId::new("x", &[&execution.to_string()])
    }

    /// What the instance's document says of its current execution.
    pub(crate) fn of(instance: &InstanceDocument, output: Option<String>) -> Self {
        Self {
            id: Self::document_id(instance.execution),
            instance_id: instance.instance_id.clone(),
            kind: kind::EXECUTION.to_owned(),
            execution: instance.execution,
            status: instance.status.clone().unwrap_or_else(|| status::RUNNING.to_owned()),
            output,
            started_at: instance.started_at,
            ended_at: instance.completed_at,
            events: instance.events.clone(),
        }
    }
}

/// A value of the KV store: what the running execution wrote, and what was there before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KvDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The key as the user wrote it; the id holds it encoded.
    pub(crate) key: String,
    /// The latest value, none where it was cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<String>,
    #[serde(default)]
    pub(crate) at: Millis,
    /// The instance's epoch in which the latest value was written.
    pub(crate) epoch: u64,
    /// The value before that epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<KvBase>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

/// The value that a key had when the running execution began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvBase {
    pub(crate) value: String,
    pub(crate) at: Millis,
}

impl KvDocument {
    pub(crate) fn document_id(key: &str) -> DocumentId {
        DocumentId::new("k", &[&super::id::encode(key)])
    }

    /// The document after `value` was written in `epoch`, given the one before.
    pub(crate) fn written(
        partition: &Partition,
        key: &str,
        before: Option<&Self>,
        value: Option<String>,
        at: Millis,
        epoch: u64,
    ) -> Self {
        let base = before.and_then(|b| b.snapshot(epoch));
        Self {
            id: Self::document_id(key),
            instance_id: partition.clone(),
            kind: kind::KV.to_owned(),
            key: key.to_owned(),
            value,
            at,
            epoch,
            base,
            unknown: before.map(|before| before.unknown.clone()).unwrap_or_default(),
        }
    }

    /// Whether nobody needs to know any more that the key was cleared in, or before, `epoch`, which may be ending.
    pub(crate) fn is_forgotten(&self, epoch: u64, ends: bool) -> bool {
        self.value.is_none() && (ends || self.snapshot(epoch).is_none())
    }

    /// The value as the execution that runs in `epoch` found it.
    pub(crate) fn snapshot(&self, epoch: u64) -> Option<KvBase> {
        if self.epoch == epoch {
            return self.base.clone();
        }
        self.value.clone().map(|value| KvBase { value, at: self.at })
    }
}

/// The custom status of an instance, which may be large and changes with few turns.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatusDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<String>,
    pub(crate) version: u64,
}

impl StatusDocument {
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("status", &[])
    }

    pub(crate) fn new(partition: Partition, value: Option<String>, version: u64) -> Self {
        Self { id: Self::document_id(), instance_id: partition, kind: kind::STATUS.to_owned(), value, version }
    }
}

/// A document that a committed turn owes to another partition.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct IntentDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// When it may be taken over, by the reconciler of any process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) due: Option<Millis>,
    pub(crate) created_at: Millis,
    /// The instance that sends it. A deletion asks for the children of an instance and for what it still owes with one query, so
    /// the property has the name that children have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parent: Option<String>,
    pub(crate) target: Partition,
    /// The document to create in the target.
    pub(crate) document: serde_json::Value,
    /// How often those who took it over could not deliver it, for a passing reason.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) retries: u32,
    /// Why it can't be delivered, once that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) poisoned: Option<String>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

impl IntentDocument {
    /// The id and document are unique to the turn: its token is in both.
    pub(crate) fn new(
        source: Partition,
        target: Partition,
        token: &str,
        position: usize,
        document: serde_json::Value,
        now: Millis,
        due: Millis,
    ) -> Self {
        Self {
            id: DocumentId::new("i", &[token, &position.to_string()]),
            parent: source.instance_id().map(ToOwned::to_owned),
            instance_id: source,
            kind: kind::INTENT.to_owned(),
            due: Some(due),
            created_at: now,
            target,
            document,
            retries: 0,
            poisoned: None,
            unknown: Unknown::default(),
        }
    }
}

/// Operations of a turn that did not fit its batch. Invisible until the turn is committed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StagedDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) operations: Vec<Operation>,
}

impl StagedDocument {
    /// The id of a part of the turn that was staged under `key`.
    pub(crate) fn document_id(key: &str, part: usize) -> DocumentId {
        DocumentId::new("s", &[key, &part.to_string()])
    }

    pub(crate) fn new(partition: Partition, key: &str, part: usize, operations: Vec<Operation>) -> Self {
        Self { id: Self::document_id(key, part), instance_id: partition, kind: kind::STAGED.to_owned(), operations }
    }
}

/// Who owns a session. It incarnations in a partition of its own, since instances share sessions.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SessionDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) session_id: String,
    pub(crate) owner: String,
    pub(crate) locked_until: Millis,
    pub(crate) last_activity: Millis,
    #[serde(rename = "_etag", default, skip_serializing)]
    pub(crate) etag: Option<Etag>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

impl SessionDocument {
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("session", &[])
    }

    pub(crate) fn new(session: &str, owner: &str, now: Millis, locked_until: Millis) -> Self {
        Self {
            id: Self::document_id(),
            instance_id: Partition::session(session),
            kind: kind::SESSION.to_owned(),
            session_id: session.to_owned(),
            owner: owner.to_owned(),
            locked_until,
            last_activity: now,
            etag: None,
            unknown: Unknown::default(),
        }
    }
}

/// What the documents of a container are like, for whoever opens it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FormatDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) format: u32,
    /// The version of this crate that wrote it, for whoever looks.
    pub(crate) written_by: String,
}

impl FormatDocument {
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("format", &[])
    }

    pub(crate) fn partition() -> Partition {
        Partition::system("format")
    }

    /// This version's.
    pub(crate) fn new() -> Self {
        Self {
            id: Self::document_id(),
            instance_id: Self::partition(),
            kind: kind::FORMAT.to_owned(),
            format: FORMAT,
            written_by: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Figures of the finished instances that have been counted.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CountersDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) completed: i64,
    pub(crate) failed: i64,
    pub(crate) other: i64,
    pub(crate) executions: i64,
    pub(crate) events: i64,
    /// Instances that are being counted in, or out, right now.
    #[serde(default)]
    pub(crate) folding: std::collections::BTreeMap<String, FoldStep>,
    /// Who counts finished instances in: a candidate that keeps others from doing the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fold_lease: Option<Lock>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

impl CountersDocument {
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("counters", &[])
    }

    pub(crate) fn partition() -> Partition {
        Partition::system("metrics")
    }

    pub(crate) fn new() -> Self {
        Self {
            id: Self::document_id(),
            instance_id: Self::partition(),
            kind: kind::COUNTERS.to_owned(),
            completed: 0,
            failed: 0,
            other: 0,
            executions: 0,
            events: 0,
            folding: Default::default(),
            fold_lease: None,
            unknown: Unknown::default(),
        }
    }

    /// Counts a step that an instance's document has taken.
    pub(crate) fn count_step(&mut self, step: &FoldStep) {
        if let Some(now) = &step.now {
            self.count(now, 1);
        }
        if let Some(was) = &step.was {
            self.count(was, -1);
        }
    }

    /// Adds or takes away the figures of one instance.
    pub(crate) fn count(&mut self, counted: &CountedFigures, sign: i64) {
        match counted.status.as_str() {
            status::COMPLETED => self.completed += sign,
            status::FAILED => self.failed += sign,
            _ => self.other += sign,
        }
        self.executions += sign * counted.totals.executions as i64;
        self.events += sign * counted.totals.events as i64;
    }
}

/// For fields that are left out while they say nothing.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_counted_also_where_their_times_are_not_kept() {
        let mut document = InstanceDocument::new(Partition::instance("i").unwrap(), "token", 0);
        for time in 1..=200 {
            document.record_claim(time);
            assert_eq!(u64::from(document.claims_since(0)), time);
        }
        assert!(document.claims.len() < 100);
        assert_eq!(document.claims_since(191), 10);
        document.record_claim(5);
        assert_eq!(document.claims.last(), Some(&201), "after the one before, whatever the clock says");
        document.forget_claims();
        document.record_claim(300);
        assert_eq!(document.claims_since(0), 1);
    }
}
