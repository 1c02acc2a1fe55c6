//! The claim of an instance: one conditional write takes its lock. [`open`] loads the protected contents afterwards.
//!
//! Invariant: if [`claim`] returns no turn, its lock is released. After a lost answer the worker reads the outcome. If
//! the read fails too, a task that outlives the call releases the claim.

use super::{
    cache::{CachedInstance, Contents},
    instance_id, load, open, release, staging, Runner,
};
use crate::{
    cosmos::{Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    discovery::TurnCandidate,
    engine::Engine,
    model::{clock::millis, InstanceDocument, Millis, Partition},
    queue::{turn::TurnFilter, FetchTerms},
};
use azure_core::http::Etag;
use duroxide::providers::{DispatcherCapabilityFilter, OrchestrationItem};
use std::sync::Arc;

/// How the claim of an instance ended.
pub(crate) enum TurnClaim {
    /// The claim succeeded, and the turn is loaded.
    Turn(Box<(OrchestrationItem, String, u32)>),
    /// Another worker holds the lock until this time.
    Locked(Millis),
    /// The instance has nothing to run.
    Nothing,
    /// The messages are for an instance that does not exist. They are deferred.
    Deferred,
    /// The execution is pinned to a duroxide version that the caller does not support.
    Incompatible(semver::Version),
}

/// Tries to claim the instance that a candidate names.
pub(crate) async fn claim(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    terms: &FetchTerms<TurnFilter>,
    deadline: Deadline,
) -> Result<TurnClaim, StoreError> {
    let partition = &candidate.partition;
    if !candidate.must_query
        && candidate.messages.iter().all(|m| engine.discovery.was_consumed(partition, &m.document.id))
    {
        return Ok(TurnClaim::Nothing);
    }
    let mut known = engine.cache.get(partition);
    if known.is_none() && !candidate.starts {
        known = read_instance(engine, partition, deadline).await?;
    }
    // A cached document may be stale, so the worker reads the document and tries again, at most twice.
    for _ in 0..3 {
        let attempt = match known.take() {
            None => claim_new(engine, partition, terms, deadline).await?,
            Some(known) => match claim_obstacle(engine, &known.document, terms.filter.0.as_ref(), deadline).await? {
                Some(outcome) => return Ok(outcome),
                None => claim_existing(engine, partition, known, terms, deadline).await?,
            },
        };
        match attempt {
            ClaimAttempt::Claimed(claimed) => return open::open(engine, candidate, *claimed).await,
            ClaimAttempt::Stale => {
                engine.cache.forget(partition);
                known = read_instance(engine, partition, deadline).await?;
                if known.is_none() && !candidate.starts {
                    return Ok(TurnClaim::Nothing);
                }
            }
        }
    }
    Ok(TurnClaim::Locked(engine.now() + 50))
}

/// The outcome of one conditional write.
enum ClaimAttempt {
    Claimed(Box<ClaimedInstance>),
    /// The document is not as the worker knew it.
    Stale,
}

/// An instance whose lock this process has taken.
pub(crate) struct ClaimedInstance {
    pub(crate) token: String,
    /// The instance document as this token last wrote it. The ETag is the fence.
    pub(crate) document: InstanceDocument,
    pub(crate) etag: Etag,
    pub(crate) claimed_at: Millis,
    pub(crate) runner: Runner,
    /// The cached contents of the instance. The condition of the claim has proved that they are current.
    pub(crate) contents: Option<Contents>,
}

impl ClaimedInstance {
    /// Reads the document again after a rejected write, because an earlier request of that write may have succeeded
    /// without an answer. Fails if another token has the lock.
    pub(super) async fn refresh(&mut self, engine: &Engine, deadline: Deadline) -> Result<(), StoreError> {
        match read_instance(engine, &self.document.instance_id, deadline).await? {
            Some(known) if known.document.held_by(&self.token) => {
                (self.document, self.etag) = (known.document, known.etag);
                Ok(())
            }
            _ => Err(StoreError::Unavailable { detail: "another worker has taken the claim over".to_owned() }),
        }
    }
}

/// Reads the instance document where writes go.
async fn read_instance(
    engine: &Engine,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Option<CachedInstance>, StoreError> {
    let found = engine.store.read(partition, &instance_id(), Freshness::Authoritative, deadline).await?;
    Ok(found.map(|Versioned { document, etag }| CachedInstance { document, etag, contents: None }))
}

/// Checks, before anything is written, whether the instance can be claimed. Finishes an incomplete deletion or
/// roll-forward. Returns the outcome of the claim if the instance cannot be claimed now.
async fn claim_obstacle(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    filter: Option<&DispatcherCapabilityFilter>,
    deadline: Deadline,
) -> Result<Option<TurnClaim>, StoreError> {
    if let Some(until) = document.locked_until(engine.now()) {
        return Ok(Some(TurnClaim::Locked(retry_at(engine, document, until))));
    }
    if document.removal.deleting.is_some() {
        // Finish an incomplete deletion, or abort it if it was never committed.
        let recovered = engine.lifecycle().recover_deletion(engine, document, deadline).await?;
        engine.cache.forget(&document.instance_id);
        return Ok(Some(TurnClaim::Locked(engine.now() + if recovered { 20 } else { 1_000 })));
    }
    if document.commit.roll_forward.is_some() {
        staging::roll_forward(engine, &document.instance_id, deadline).await?;
        engine.cache.forget(&document.instance_id);
        return Ok(Some(TurnClaim::Locked(engine.now())));
    }
    Ok(incompatible(document, filter).map(TurnClaim::Incompatible))
}

/// When to try a locked instance again. This process knows when its own turn ends. A turn of another process may end at
/// any time, so the worker tries every second before the lock expires.
fn retry_at(engine: &Engine, document: &InstanceDocument, until: Millis) -> Millis {
    const RECHECK_AFTER: Millis = 1_000;
    let claimed = document.claim.lock.as_ref().is_some_and(|lock| engine.turns.contains_key(&lock.token));
    if claimed {
        return until;
    }
    engine.cache.forget(&document.instance_id);
    until.min(engine.now() + RECHECK_AFTER)
}

/// The version that the execution is pinned to, if the filter does not accept it.
fn incompatible(document: &InstanceDocument, filter: Option<&DispatcherCapabilityFilter>) -> Option<semver::Version> {
    let pinned = document.current.pinned.as_deref().and_then(|v| semver::Version::parse(v).ok())?;
    (!supports(filter?, &pinned)).then_some(pinned)
}

/// Whether a filter accepts an execution that is pinned to this version. Only the first of several version ranges
/// counts, as in the SQLite provider. duroxide's validation tests demand this.
pub(crate) fn supports(filter: &DispatcherCapabilityFilter, pinned: &semver::Version) -> bool {
    filter.supported_duroxide_versions.first().is_some_and(|range| range.contains(pinned))
}

/// Claims an instance that has no document yet, by creating the document.
async fn claim_new(
    engine: &Arc<Engine>,
    partition: &Partition,
    terms: &FetchTerms<TurnFilter>,
    deadline: Deadline,
) -> Result<ClaimAttempt, StoreError> {
    let (now, token) = (engine.now(), engine.new_token());
    let mut document = InstanceDocument::new(partition.clone(), &token, now);
    document.lock(&token, now.saturating_add(millis(terms.lock_timeout)));
    document.record_claim(now);
    let written = engine.store.create(partition, &instance_id(), &document, deadline).await;
    // An instance without a document has neither history nor values.
    let contents = Some(load::empty_contents());
    let pending = PendingClaim { token, document, claimed_at: now, terms: terms.clone(), contents, condition: None };
    settle(engine, pending, written, deadline).await
}

/// Claims an instance whose document is as `known` says.
async fn claim_existing(
    engine: &Arc<Engine>,
    partition: &Partition,
    known: CachedInstance,
    terms: &FetchTerms<TurnFilter>,
    deadline: Deadline,
) -> Result<ClaimAttempt, StoreError> {
    let (now, token) = (engine.now(), engine.new_token());
    let CachedInstance { mut document, etag, contents } = known;
    document.lock(&token, now.saturating_add(millis(terms.lock_timeout)));
    document.record_claim(now);
    let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await;
    let pending =
        PendingClaim { token, document, claimed_at: now, terms: terms.clone(), contents, condition: Some(etag) };
    settle(engine, pending, written, deadline).await
}

/// A claim whose outcome is not known yet.
struct PendingClaim {
    token: String,
    document: InstanceDocument,
    claimed_at: Millis,
    terms: FetchTerms<TurnFilter>,
    contents: Option<Contents>,
    /// The ETag on which the write depends. `None` if the write depends on the absence of the document.
    condition: Option<Etag>,
}

impl PendingClaim {
    /// The claim succeeded, with the document in this state.
    fn granted(self, document: InstanceDocument, etag: Etag) -> ClaimAttempt {
        let Self { token, claimed_at, terms, contents, .. } = self;
        let runner = Runner { terms, in_a_row: 0 };
        ClaimAttempt::Claimed(Box::new(ClaimedInstance { token, document, etag, claimed_at, runner, contents }))
    }
}

/// Finds out whether the write of a claim happened.
async fn settle(
    engine: &Arc<Engine>,
    pending: PendingClaim,
    written: Result<WriteOutcome, StoreError>,
    deadline: Deadline,
) -> Result<ClaimAttempt, StoreError> {
    let partition = pending.document.instance_id.clone();
    let found = match written {
        Ok(WriteOutcome::Done(etag)) => {
            let document = pending.document.clone();
            return Ok(pending.granted(document, etag));
        }
        Ok(WriteOutcome::Refused(_)) => read_instance(engine, &partition, deadline).await,
        Err(error) => Err(error),
    };
    match found {
        Ok(Some(known)) if known.document.held_by(&pending.token) => Ok(pending.granted(known.document, known.etag)),
        Ok(_) => {
            crate::telemetry::claim_race("orchestration");
            Ok(ClaimAttempt::Stale)
        }
        Err(error) => {
            // A rejected write needs this too: an earlier request of it may have succeeded without an answer.
            let due = engine.clock.after(error.pause());
            release::release_unknown_claim(engine, &pending.document, pending.token, pending.condition, due);
            Err(error)
        }
    }
}
