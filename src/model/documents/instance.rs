//! The document of an instance, and the fields that each protocol writes to it.

use super::{
    is_zero, kind, status, CountedFigures, Deleting, DeletionState, Lock, RollForwardProgress, Staging, Totals,
};
use crate::model::{DocumentId, Ending, EventSet, InlinedMessage, Millis, Partition, Unknown};
use serde::{Deserialize, Serialize};

/// The document of an instance. Every claim, renewal and commit replaces it, so it holds no large payload.
///
/// The groups are flat in JSON: they divide the fields by the protocol that writes them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct InstanceDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(flatten)]
    pub(crate) origin: InstanceOrigin,
    #[serde(flatten)]
    pub(crate) claim: ClaimState,
    #[serde(flatten)]
    pub(crate) current: CurrentExecution,
    #[serde(flatten)]
    pub(crate) commit: CommitState,
    #[serde(flatten)]
    pub(crate) waiting: WaitingMessages,
    #[serde(flatten)]
    pub(crate) counting: CountingState,
    #[serde(flatten)]
    pub(crate) removal: RemovalState,
    #[serde(default)]
    pub(crate) updated_at: Millis,
    /// When a worker must look at the instance although no message names it. The reasons:
    ///
    /// - a roll-forward or a deletion may have been left half done;
    /// - deferred messages did not fit a turn;
    /// - the document holds an inlined message;
    /// - a claim created the document, and its message may turn out to be gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) due: Option<Millis>,
    /// The service's time, in seconds, of the last write before the document was read. A write by this process does not
    /// change the field.
    #[serde(rename = "_ts", default, skip_serializing)]
    pub(crate) written_at: u64,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

/// Which instance this is, among all that have had or will have its id.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct InstanceOrigin {
    /// A random value that tells this instance from others of the same id.
    #[serde(default)]
    pub(crate) incarnation: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parent: Option<String>,
    /// The incarnation of the parent that started this instance. Only that one hears how the instance ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parent_incarnation: Option<String>,
    #[serde(default)]
    pub(crate) created_at: Millis,
}

/// The lock of the turn in progress, and the claims since the last commit.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimState {
    /// The turn in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lock: Option<Lock>,
    /// The time of each claim since the last commit. The attempts of a message are counted from these times.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) claims: Vec<Millis>,
    /// The number of claims before those: the document keeps only the last times.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) earlier_claims: u32,
}

/// The current execution.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CurrentExecution {
    pub(crate) execution: u64,
    /// Absent before the first commit, when there is a lock but no instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<String>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) version: String,
    /// The duroxide version that the execution is pinned to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) pinned: Option<String>,
    #[serde(default)]
    pub(crate) started_at: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) completed_at: Option<Millis>,
    /// A small output. The execution's own document holds a large one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) output: Option<String>,
    /// Whether the execution has a document of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) archived: bool,
    /// The event ids of the execution.
    #[serde(default)]
    pub(crate) events: EventSet,
}

/// The committed turns, and the turns that did not fit one batch.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CommitState {
    /// The number of committed turns.
    #[serde(default)]
    pub(crate) turn: u64,
    /// The token of the last committed turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) last_turn: Option<String>,
    /// Parts that were staged by turns without a commit. The next claim deletes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) staging: Vec<Staging>,
    /// A committed turn whose staged operations are not all applied yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) roll_forward: Option<RollForwardProgress>,
    /// The number of executions that have ended. It tells values of the running execution from earlier ones.
    #[serde(default)]
    pub(crate) epoch: u64,
    /// The version of the custom status.
    #[serde(default)]
    pub(crate) status_version: u64,
}

/// Messages of the instance that a poll does not find by documents of their own.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WaitingMessages {
    /// A message that was written with the claim of its turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inlined: Option<Box<InlinedMessage>>,
    /// Whether the partition holds deferred messages.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) deferred: bool,
    /// Whether all deferred messages are orphans: queue messages that are dropped after a day without a start.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) orphans: bool,
}

/// The figures of the instance, and the figures of it that the counters hold.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CountingState {
    /// Executions and events of the instance as a whole, for the metrics.
    #[serde(default)]
    pub(crate) totals: Totals,
    /// Present while the counters do not hold the instance's figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) count_pending: Option<String>,
    /// The figures that the counters hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) counted: Option<CountedFigures>,
}

/// Retention, deletion and pruning.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RemovalState {
    /// How and when a root instance ended, for retention. Children have none: an instance tree is deleted as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ended: Option<String>,
    /// Present while the instance is being deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) deleting: Option<Deleting>,
    /// Pruned executions whose documents are not erased yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) pruning: Vec<u64>,
}

impl InstanceDocument {
    /// The time between the end of the lock and recovery, for a document without an instance.
    const RECOVERY_DELAY: Millis = 3_000;

    /// The id of the document. It is the same in every partition.
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("instance", &[])
    }

    /// A new document for an instance id that has none. `token` must be unique: the incarnation is derived from it.
    pub(crate) fn new(partition: Partition, token: &str, now: Millis) -> Self {
        Self {
            id: Self::document_id(),
            instance_id: partition,
            kind: kind::INSTANCE.to_owned(),
            origin: InstanceOrigin {
                incarnation: token.chars().take(8).collect(),
                created_at: now,
                ..InstanceOrigin::default()
            },
            claim: ClaimState::default(),
            current: CurrentExecution { execution: 1, started_at: now, ..CurrentExecution::default() },
            commit: CommitState::default(),
            waiting: WaitingMessages::default(),
            counting: CountingState::default(),
            removal: RemovalState::default(),
            updated_at: now,
            due: None,
            written_at: 0,
            unknown: Unknown::default(),
        }
    }

    /// Whether an instance exists. Without one, the document only holds a lock or deferred messages.
    pub(crate) fn exists(&self) -> bool {
        self.current.status.is_some()
    }

    /// Whether only claims have written the document. Such a document has no history and no values.
    pub(crate) fn is_placeholder(&self) -> bool {
        !self.exists() && self.commit.turn == 0 && self.commit.staging.is_empty() && self.counting.totals.events == 0
    }

    /// Whether the document only says that messages are deferred for an instance that was never started.
    pub(crate) fn has_only_deferred(&self, now: Millis) -> bool {
        self.waiting.deferred && self.is_placeholder() && self.locked_until(now).is_none()
    }

    /// Whether an existing instance has deferred messages. No poll finds them, so the instance needs recovery.
    fn has_deferred_messages(&self) -> bool {
        self.waiting.deferred && self.exists()
    }

    /// Whether the document holds nothing but claims. If the message of those claims is deleted, no other document
    /// leads to this one.
    fn has_only_claims(&self) -> bool {
        !self.exists() && !self.waiting.deferred
    }

    /// Whether a worker must look at the instance although no message may lead to it.
    pub(crate) fn needs_recovery(&self) -> bool {
        self.has_deferred_messages()
            || self.has_only_claims()
            || self.waiting.inlined.is_some()
            || !self.commit.staging.is_empty()
            || self.commit.roll_forward.is_some()
    }

    /// Locks the instance. If the worker dies, a poll finds the document in two cases:
    ///
    /// - the document holds an inlined message;
    /// - no instance exists.
    pub(crate) fn lock(&mut self, token: &str, until: Millis) {
        self.claim.lock = Some(Lock { token: token.to_owned(), until });
        self.schedule_recovery(until);
    }

    /// Releases the lock. The messages of the turn become visible at `due`.
    pub(crate) fn unlock(&mut self, due: Millis) {
        self.claim.lock = None;
        self.schedule_recovery(due);
    }

    fn schedule_recovery(&mut self, then: Millis) {
        if self.waiting.inlined.is_some() {
            self.due = Some(then);
        } else if self.has_only_claims() {
            self.due = Some(then.saturating_add(Self::RECOVERY_DELAY));
        }
    }

    /// Records a claim at this time. The recorded times increase, even if a clock is set back or the previous worker's
    /// clock is ahead.
    pub(crate) fn record_claim(&mut self, now: Millis) {
        const MAX_TIMES: usize = 64;
        if self.claim.claims.len() >= MAX_TIMES {
            self.claim.claims.remove(0);
            self.claim.earlier_claims = self.claim.earlier_claims.saturating_add(1);
        }
        let after = self.claim.claims.last().map_or(0, |last| last + 1);
        self.claim.claims.push(now.max(after));
    }

    /// The number of claims since a time. Claims whose times were dropped count if all recorded times count.
    pub(crate) fn claims_since(&self, then: Millis) -> u32 {
        let seen = self.claim.claims.iter().filter(|claim| **claim >= then).count();
        let all = self.claim.claims.first().is_some_and(|first| *first >= then);
        let earlier = if all { self.claim.earlier_claims } else { 0 };
        u32::try_from(seen).unwrap_or(u32::MAX).saturating_add(earlier)
    }

    /// Discards the recorded claims, so that they count as no attempts.
    pub(crate) fn forget_claims(&mut self) {
        self.claim.claims.clear();
        self.claim.earlier_claims = 0;
    }

    /// Whether this token holds the lock, expired or not.
    pub(crate) fn held_by(&self, token: &str) -> bool {
        self.claim.lock.as_ref().is_some_and(|lock| lock.token == token)
    }

    /// The end of the lock, unless the instance is unlocked or its lock has expired.
    pub(crate) fn locked_until(&self, now: Millis) -> Option<Millis> {
        self.claim.lock.as_ref().filter(|lock| lock.until > now).map(|lock| lock.until)
    }

    /// Whether the current execution has ended. The instance may continue with the next one.
    pub(crate) fn execution_has_ended(&self) -> bool {
        self.current.status.as_deref().is_some_and(status::execution_has_ended)
    }

    /// Whether the instance has ended for good.
    pub(crate) fn has_ended(&self) -> bool {
        self.current.status.as_deref().is_some_and(status::instance_has_ended)
    }

    /// Copies Cosmos DB's time of the last write into the document, before the next write replaces that time:
    ///
    /// - the end of the instance, for retention;
    /// - the commit of its deletion.
    ///
    /// A write that itself ends the instance, or commits the deletion, must not call this.
    pub(crate) fn keep_service_times(&mut self) {
        match self.removal.deleting.as_mut() {
            Some(record) if record.state == DeletionState::Committed => {
                record.committed_by.get_or_insert(self.written_at);
            }
            Some(_) => {}
            None => self.prove_end(self.written_at),
        }
    }

    /// Records that the instance had ended by this time of Cosmos DB, in seconds. A time that Cosmos DB has already
    /// proved stays.
    fn prove_end(&mut self, by: u64) {
        if let Some(ended) = self.removal.ended.as_mut().filter(|ended| by > 0 && !Ending::is_proved(ended)) {
            *ended = Ending::proved(ended, by.saturating_mul(1_000));
        }
    }

    /// Prepares the instance for a deletion.
    pub(crate) fn prepare_deletion(&mut self, record: &Deleting) {
        let last_written = Some(self.written_at).filter(|time| *time > 0);
        self.removal.deleting = Some(Deleting { last_written, ..record.clone() });
    }

    /// Removes the record of an aborted deletion. Retention does not count the age of the instance from the write that
    /// prepared it.
    pub(crate) fn abort_deletion(&mut self) {
        if let Some(record) = self.removal.deleting.take() {
            self.prove_end(record.last_written.unwrap_or_default());
        }
    }

    /// Whether an instance exists and has not ended.
    pub(crate) fn is_running(&self) -> bool {
        self.exists() && !self.has_ended()
    }

    /// The incarnation of another instance that this instance means, if it is known. It is known for the parent that
    /// started this instance.
    pub(crate) fn incarnation_of(&self, instance: &str) -> Option<String> {
        self.origin.parent_incarnation.clone().filter(|_| self.origin.parent.as_deref() == Some(instance))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_counted_after_their_times_are_dropped() {
        let mut document = InstanceDocument::new(Partition::instance("i").unwrap(), "token", 0);
        for time in 1..=200 {
            document.record_claim(time);
            assert_eq!(u64::from(document.claims_since(0)), time);
        }
        assert!(document.claim.claims.len() < 100);
        assert_eq!(document.claims_since(191), 10);
        document.record_claim(5);
        assert_eq!(
            document.claim.claims.last(),
            Some(&201),
            "later than the previous claim, although the clock was set back"
        );
        document.forget_claims();
        document.record_claim(300);
        assert_eq!(document.claims_since(0), 1);
    }
}
