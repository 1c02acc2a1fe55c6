//! The claim of an activity: one conditional write. An activity of a session claims the session first.
//!
//! Invariant: if [`claim`] returns no activity, it holds neither the activity nor a session that it claimed for it.

use super::{session, unreadable, ActivityHandle, ActivityState};
use crate::{
    cosmos::{Applied, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    discovery::ActivityCandidate,
    engine::Engine,
    model::{clock::millis, ActivityDocument, DocumentId, Millis, Partition, PayloadDocument},
    queue::{activity::ActivityFilter, FetchTerms},
    turn::cache::CachedInstance,
};
use azure_core::http::Etag;
use duroxide::providers::{SessionFetchConfig, WorkItem};
use std::{sync::Arc, time::Duration};
use tracing::{debug, warn};

/// How the claim of an activity ended.
pub(crate) enum ActivityClaim {
    /// The claim succeeded. It also returns the session that was claimed for the activity.
    Claimed(Box<(WorkItem, String, u32)>, Option<session::SessionHold>),
    /// Another worker holds the lock until this time.
    Locked(Millis),
    /// This owner holds the session until this time.
    SessionLocked(String, Millis),
    /// The activity is completed or cancelled, or another worker has claimed it.
    Gone,
}

/// Tries to claim the activity that a candidate names.
pub(crate) async fn claim(
    engine: &Arc<Engine>,
    candidate: &ActivityCandidate,
    terms: &FetchTerms<ActivityFilter>,
    owner: Option<&SessionFetchConfig>,
    deadline: Deadline,
) -> Result<ActivityClaim, StoreError> {
    let mut hold = match (&candidate.document.session_id, owner) {
        (Some(id), Some(owner)) => match session::claim(engine, id, owner, deadline).await? {
            session::SessionClaim::Locked(owner, until) => return Ok(ActivityClaim::SessionLocked(owner, until)),
            session::SessionClaim::Claimed(hold) => Some(hold),
        },
        _ => None,
    };
    let mut outcome = claim_activity(engine, candidate, terms, deadline).await;
    if let Ok(ActivityClaim::Claimed(item, _)) = outcome {
        if let (Some(taken), Some(owner)) = (&mut hold, owner) {
            // The claim may have taken so long that another owner has the session by now.
            session::extend_claim(engine, taken, owner, deadline).await.unwrap_or_else(|error| {
                warn!(%error, "could not extend the claim of a session");
            });
        }
        if hold.as_ref().is_none_or(|hold| hold.has_half_left(engine.now())) {
            return Ok(ActivityClaim::Claimed(item, hold));
        }
        release_claim_later(engine, candidate.document.clone(), item.1, engine.clock.after(terms.lock_timeout));
        outcome = Ok(ActivityClaim::Locked(engine.now() + 20));
    }
    if let Some(hold) = hold {
        session::release_claim_later(engine, hold);
    }
    outcome
}

/// Claims the activity alone, whatever its session.
async fn claim_activity(
    engine: &Arc<Engine>,
    candidate: &ActivityCandidate,
    terms: &FetchTerms<ActivityFilter>,
    deadline: Deadline,
) -> Result<ActivityClaim, StoreError> {
    let (mut document, mut etag) = (candidate.document.clone(), candidate.document.etag.clone());
    // The candidate may be stale, so the worker reads the document and tries again, once.
    for _ in 0..2 {
        let Some(known) = etag.take() else {
            match read_activity(engine, &document, deadline).await? {
                None => return Ok(ActivityClaim::Gone),
                Some(found) => (document, etag) = (found.document, Some(found.etag)),
            }
            continue;
        };
        let now = engine.now();
        if document.due > now {
            return Ok(ActivityClaim::Locked(document.due));
        }
        match lock(engine, document.clone(), known, terms.lock_timeout, now, deadline).await? {
            LockAttempt::Claimed(held) => return open(engine, *held, terms, deadline).await,
            // Another worker has claimed or completed it. If that worker releases it, the ready queue learns of it
            // directly or by a poll.
            LockAttempt::Lost => return Ok(ActivityClaim::Gone),
            LockAttempt::Stale => match read_activity(engine, &document, deadline).await? {
                None => return Ok(ActivityClaim::Gone),
                Some(found) => (document, etag) = (found.document, Some(found.etag)),
            },
        }
    }
    let due = document.due.max(engine.now() + 20);
    Ok(ActivityClaim::Locked(due))
}

/// Reads the activity document where writes go.
async fn read_activity(
    engine: &Engine,
    document: &ActivityDocument,
    deadline: Deadline,
) -> Result<Option<Versioned<ActivityDocument>>, StoreError> {
    engine.store.read(&document.instance_id, &document.id, Freshness::Authoritative, deadline).await
}

/// The outcome of one conditional write.
enum LockAttempt {
    Claimed(Box<(ActivityDocument, Etag, String)>),
    /// Another worker has certainly changed or deleted the document.
    Lost,
    /// The document has changed, or the answer to our own write was lost.
    Stale,
}

/// Writes the lock on condition of the ETag.
async fn lock(
    engine: &Arc<Engine>,
    mut document: ActivityDocument,
    etag: Etag,
    lock_timeout: Duration,
    now: Millis,
    deadline: Deadline,
) -> Result<LockAttempt, StoreError> {
    let token = engine.new_token();
    let until = now.saturating_add(millis(lock_timeout));
    document.claim(&token, until);
    let partition = document.instance_id.clone();
    let store = &engine.store;
    let written = store.replace_noting_repeats(&partition, &document.id, &document, Some(&etag), deadline).await;
    match written {
        Ok((WriteOutcome::Done(etag), _)) => Ok(LockAttempt::Claimed(Box::new((document, etag, token)))),
        Ok((WriteOutcome::Refused(_), Applied::No)) => {
            crate::telemetry::claim_race("activity");
            Ok(LockAttempt::Lost)
        }
        Ok((WriteOutcome::Refused(_), Applied::Perhaps)) => match read_activity(engine, &document, deadline).await {
            Ok(Some(found)) if found.document.held_by(&token) => {
                Ok(LockAttempt::Claimed(Box::new((found.document, found.etag, token))))
            }
            Ok(_) => {
                crate::telemetry::claim_race("activity");
                Ok(LockAttempt::Stale)
            }
            Err(error) => {
                release_unknown_claim(engine, document, token, etag);
                Err(error)
            }
        },
        Err(error) => {
            release_unknown_claim(engine, document, token, etag);
            Err(error)
        }
    }
}

/// Releases a claim whose write may have happened or may still happen. A task watches the document until the lock would
/// end, or until the document is no longer the one on which the write depends.
pub(crate) fn release_unknown_claim(engine: &Arc<Engine>, document: ActivityDocument, token: String, condition: Etag) {
    let (engine_too, until) = (engine.clone(), document.due);
    engine.spawn(async move {
        let (partition, id) = (&document.instance_id, &document.id);
        engine_too.until_settled(partition, id, Some(&condition), until).await;
        release_claim_later(&engine_too, document, token, until);
    });
}

/// Reads the payload and hands the activity out.
pub(crate) async fn open(
    engine: &Arc<Engine>,
    (document, etag, token): (ActivityDocument, Etag, String),
    terms: &FetchTerms<ActivityFilter>,
    deadline: Deadline,
) -> Result<ActivityClaim, StoreError> {
    let until = document.lock.as_ref().map_or(0, |lock| lock.until);
    let item = match payload(engine, &document, deadline).await {
        Ok(item) => item.ok_or_else(|| "the document of its input does not exist".to_owned()),
        Err(StoreError::Malformed { detail }) => Err(detail),
        Err(error) => {
            release_claim_later(engine, document, token, until);
            return Err(error);
        }
    };
    if until.saturating_sub(engine.now()) < millis(terms.lock_timeout) / 2 {
        // The claim took so long that the caller would lose the lock. It is released without counting an attempt.
        release_claim_later(engine, document, token, until);
        return Ok(ActivityClaim::Locked(engine.now() + 20));
    }
    let parsed = item.and_then(|item| serde_json::from_str::<WorkItem>(&item).map_err(|e| e.to_string()));
    let identity = ActivityDocument::identity(&document.id);
    if let Some((execution, id)) = identity {
        // The turn that scheduled the activity is committed. A cached history without its event must not be returned to
        // the activity.
        let knows = |known: &CachedInstance| {
            known.document.current.execution == execution && known.document.current.events.contains(id)
        };
        if engine.cache.invalidate_unless(&document.instance_id, knows) {
            engine.reads.invalidate(&document.instance_id);
        }
    }
    let attempts = document.attempts;
    let (partition, id, terms) = (document.instance_id.clone(), document.id.clone(), terms.clone());
    let local = Some(engine.discovery.local_instances.add(&partition));
    let state = ActivityState { until, document, etag, identity, closed: false, local };
    let handle = ActivityHandle { token: token.clone(), partition, id, terms, state: state.into() };
    engine.activities.insert(token.clone(), Arc::new(handle));
    match parsed {
        Ok(work_item) => Ok(ActivityClaim::Claimed(Box::new((work_item, token, attempts)), None)),
        Err(why) => {
            unreadable::delay_or_fail(engine, &token, attempts, &why).await;
            Ok(ActivityClaim::Gone)
        }
    }
}

/// The work item, from the activity document or from its payload document.
async fn payload(
    engine: &Engine,
    document: &ActivityDocument,
    deadline: Deadline,
) -> Result<Option<String>, StoreError> {
    if let Some(item) = &document.item {
        return Ok(Some(item.clone()));
    }
    let id = ActivityDocument::payload_id(&document.id);
    let found =
        engine.store.read::<PayloadDocument>(&document.instance_id, &id, Freshness::Authoritative, deadline).await?;
    Ok(found.map(|found| found.document.item))
}

/// Releases a claim in the background, for a caller that has gone away or does not know the outcome of its write. The
/// lock ends at `until` or earlier.
pub(crate) fn release_claim_later(engine: &Arc<Engine>, document: ActivityDocument, token: String, until: Millis) {
    let engine_too = engine.clone();
    engine.spawn(async move {
        engine_too.activities.remove(&token);
        let engine = &engine_too;
        match engine.until_released(until, |deadline| release_claim(engine, &document, &token, deadline)).await {
            Ok(()) => debug!(id = %document.id, "released an activity"),
            Err(error) => warn!(id = %document.id, %error, "could not release an activity, its lock will expire"),
        }
    });
}

/// Releases an activity of which only the id and the end of its lock are known.
pub(crate) async fn release_named_claim(
    engine: &Engine,
    partition: &Partition,
    id: String,
    token: String,
    until: Millis,
) {
    let Ok(id) = DocumentId::try_from(id) else { return };
    let (id, token) = (&id, token.as_str());
    let release = |deadline: Deadline| async move {
        let found = engine.store.read::<ActivityDocument>(partition, id, Freshness::Authoritative, deadline).await?;
        match found {
            Some(found) => release_claim(engine, &found.document, token, deadline).await,
            None => Ok(()),
        }
    };
    if let Err(error) = engine.until_released(until, release).await {
        warn!(%id, %error, "could not release an activity, its lock will expire");
    }
}

/// Releases a claim without counting an attempt, if its token still has the lock.
pub(crate) async fn release_claim(
    engine: &Engine,
    document: &ActivityDocument,
    token: &str,
    deadline: Deadline,
) -> Result<(), StoreError> {
    loop {
        let Some(Versioned { mut document, etag }) = read_activity(engine, document, deadline).await? else {
            return Ok(());
        };
        if !document.held_by(token) {
            return Ok(());
        }
        document.lock = None;
        document.due = engine.now();
        document.attempts = document.attempts.saturating_sub(1);
        let partition = document.instance_id.clone();
        let written = engine.store.replace(&partition, &document.id, &document, Some(&etag), deadline).await?;
        if let WriteOutcome::Done(etag) = written {
            document.etag = Some(etag);
            engine.discovery.offer_activity(document);
            return Ok(());
        }
    }
}
