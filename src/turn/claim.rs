//! Taking the lock of an instance: one conditional write. What it protects is looked at after it, in [`open`].
//!
//! Invariant: when [`claim`] does not return a turn, the instance is not locked by it. A claim whose answer was lost is
//! read; one that can't be read is given back by a task that outlives the call.

use super::{
    cache::{Contents, Known},
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

/// How an attempt at an instance ended.
pub(crate) enum TurnClaim {
    /// The turn is ours.
    Turn(Box<(OrchestrationItem, String, u32)>),
    /// Somebody else has it until then.
    Locked(Millis),
    /// Nothing to do here.
    Nothing,
    /// Messages for an instance that nobody has started: they are deferred, and there is nothing to do.
    Waiting,
    /// The execution is pinned to a version that the caller doesn't support.
    Incompatible(semver::Version),
}

/// Tries to take the instance that a candidate names.
pub(crate) async fn claim(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    terms: &FetchTerms<TurnFilter>,
    deadline: Deadline,
) -> Result<TurnClaim, StoreError> {
    let partition = &candidate.partition;
    if !candidate.ask && candidate.messages.iter().all(|m| engine.discovery.was_consumed(partition, &m.document.id)) {
        return Ok(TurnClaim::Nothing);
    }
    let mut known = engine.cache.get(partition);
    if known.is_none() && !candidate.starts {
        known = look(engine, partition, deadline).await?;
    }
    // What was cached may be stale, so there is a second look at most.
    for _ in 0..3 {
        let attempt = match known.take() {
            None => begin(engine, partition, terms, deadline).await?,
            Some(known) => match unclaimable(engine, &known.document, terms.filter.0.as_ref(), deadline).await? {
                Some(outcome) => return Ok(outcome),
                None => take_over(engine, partition, known, terms, deadline).await?,
            },
        };
        match attempt {
            Attempt::Ours(ours) => return open::open(engine, candidate, *ours).await,
            Attempt::Look => {
                engine.cache.forget(partition);
                known = look(engine, partition, deadline).await?;
                if known.is_none() && !candidate.starts {
                    return Ok(TurnClaim::Nothing);
                }
            }
        }
    }
    Ok(TurnClaim::Locked(engine.now() + 50))
}

/// The outcome of one conditional write.
enum Attempt {
    Ours(Box<Ours>),
    /// The document is not as we thought.
    Look,
}

/// An instance whose lock this process has taken.
pub(crate) struct Ours {
    pub(crate) token: String,
    /// The document as this token last wrote it, and its ETag: the fence.
    pub(crate) document: InstanceDocument,
    pub(crate) etag: Etag,
    pub(crate) claimed_at: Millis,
    pub(crate) runner: Runner,
    /// What was known of the instance, which the claim's condition has proved.
    pub(crate) contents: Option<Contents>,
}

impl Ours {
    /// Takes the document as it is now: after a refusal, which may be that of a write whose answer was lost. An error where
    /// somebody else has the lock.
    pub(super) async fn look_again(&mut self, engine: &Engine, deadline: Deadline) -> Result<(), StoreError> {
        match look(engine, &self.document.instance_id, deadline).await? {
            Some(known) if known.document.held_by(&self.token) => {
                (self.document, self.etag) = (known.document, known.etag);
                Ok(())
            }
            _ => Err(StoreError::Unavailable { detail: "a claim was taken over before it was used".to_owned() }),
        }
    }
}

async fn look(engine: &Engine, partition: &Partition, deadline: Deadline) -> Result<Option<Known>, StoreError> {
    let found = engine.store.read(partition, &instance_id(), Freshness::Authoritative, deadline).await?;
    Ok(found.map(|Versioned { document, etag }| Known { document, etag, contents: None }))
}

/// What keeps an instance from being claimed, seen before anything is written.
async fn unclaimable(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    filter: Option<&DispatcherCapabilityFilter>,
    deadline: Deadline,
) -> Result<Option<TurnClaim>, StoreError> {
    if let Some(until) = document.locked_until(engine.now()) {
        return Ok(Some(TurnClaim::Locked(look_again(engine, document, until))));
    }
    if document.deleting.is_some() {
        // A deletion that was left half-way is finished, or undone where it was never decided.
        let recovered = engine.lifecycle().recover_deletion(engine, document, deadline).await?;
        engine.cache.forget(&document.instance_id);
        return Ok(Some(TurnClaim::Locked(engine.now() + if recovered { 20 } else { 1_000 })));
    }
    if document.roll_forward.is_some() {
        staging::roll_forward(engine, &document.instance_id, deadline).await?;
        engine.cache.forget(&document.instance_id);
        return Ok(Some(TurnClaim::Locked(engine.now())));
    }
    Ok(incompatible(document, filter).map(TurnClaim::Incompatible))
}

/// When to try a locked instance again. This process tells when its own turn ends; another one may end it any time, so
/// there is a look now and then before its lock expires.
fn look_again(engine: &Engine, document: &InstanceDocument, until: Millis) -> Millis {
    const LOOK_AFTER: Millis = 1_000;
    let ours = document.lock.as_ref().is_some_and(|lock| engine.turns.contains_key(&lock.token));
    if ours {
        return until;
    }
    engine.cache.forget(&document.instance_id);
    until.min(engine.now() + LOOK_AFTER)
}

/// The version that the execution is pinned to, where the filter does not take it.
fn incompatible(document: &InstanceDocument, filter: Option<&DispatcherCapabilityFilter>) -> Option<semver::Version> {
    let pinned = document.pinned.as_deref().and_then(|v| semver::Version::parse(v).ok())?;
    (!supports(filter?, &pinned)).then_some(pinned)
}

/// Whether a filter takes an execution that is pinned so. Of several version ranges only the first counts: SQLite looks at
/// no other, and duroxide's validation tests demand that.
pub(crate) fn supports(filter: &DispatcherCapabilityFilter, pinned: &semver::Version) -> bool {
    filter.supported_duroxide_versions.first().is_some_and(|range| range.contains(pinned))
}

/// Claims an instance that has no document yet.
async fn begin(
    engine: &Arc<Engine>,
    partition: &Partition,
    terms: &FetchTerms<TurnFilter>,
    deadline: Deadline,
) -> Result<Attempt, StoreError> {
    let (now, token) = (engine.now(), engine.new_token());
    let mut document = InstanceDocument::new(partition.clone(), &token, now);
    document.hold(&token, now.saturating_add(millis(terms.lock_timeout)));
    document.record_claim(now);
    let written = engine.store.create(partition, &instance_id(), &document, deadline).await;
    // Where there was no document, there is neither history nor a value.
    let contents = Some(load::nothing());
    let wanted = Wanted { token, document, claimed_at: now, terms: terms.clone(), contents, condition: None };
    settle(engine, wanted, written, deadline).await
}

/// Claims an instance whose document is as `known` says.
async fn take_over(
    engine: &Arc<Engine>,
    partition: &Partition,
    known: Known,
    terms: &FetchTerms<TurnFilter>,
    deadline: Deadline,
) -> Result<Attempt, StoreError> {
    let (now, token) = (engine.now(), engine.new_token());
    let Known { mut document, etag, contents } = known;
    document.hold(&token, now.saturating_add(millis(terms.lock_timeout)));
    document.record_claim(now);
    let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await;
    let wanted = Wanted { token, document, claimed_at: now, terms: terms.clone(), contents, condition: Some(etag) };
    settle(engine, wanted, written, deadline).await
}

/// What a claim's write makes ours, if it happens.
struct Wanted {
    token: String,
    document: InstanceDocument,
    claimed_at: Millis,
    terms: FetchTerms<TurnFilter>,
    contents: Option<Contents>,
    /// The document that the write depends on; none where it depends on there being none.
    condition: Option<Etag>,
}

impl Wanted {
    /// It happened, and this is how the document is now.
    fn granted(self, document: InstanceDocument, etag: Etag) -> Attempt {
        let Self { token, claimed_at, terms, contents, .. } = self;
        let runner = Runner { terms, in_a_row: 0 };
        Attempt::Ours(Box::new(Ours { token, document, etag, claimed_at, runner, contents }))
    }
}

/// Finds out whether a claim's write happened.
async fn settle(
    engine: &Arc<Engine>,
    wanted: Wanted,
    written: Result<WriteOutcome, StoreError>,
    deadline: Deadline,
) -> Result<Attempt, StoreError> {
    let partition = wanted.document.instance_id.clone();
    let found = match written {
        Ok(WriteOutcome::Done(etag)) => {
            let document = wanted.document.clone();
            return Ok(wanted.granted(document, etag));
        }
        Ok(WriteOutcome::Refused(_)) => look(engine, &partition, deadline).await,
        Err(error) => Err(error),
    };
    match found {
        Ok(Some(known)) if known.document.held_by(&wanted.token) => Ok(wanted.granted(known.document, known.etag)),
        Ok(_) => {
            crate::telemetry::claim_race("orchestration");
            Ok(Attempt::Look)
        }
        Err(error) => {
            // Also after a refusal: an attempt before it may have been carried out, its answer lost.
            let due = engine.clock.after(error.pause());
            release::release_unknown_claim(engine, &wanted.document, wanted.token, wanted.condition, due);
            Err(error)
        }
    }
}
