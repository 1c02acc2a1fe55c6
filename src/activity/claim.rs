//! Taking an activity: one conditional write; where it has a session, the session first.
//!
//! Invariant: when [`claim`] does not return an activity, it holds neither the activity nor a session that it took for it.

use super::{session, unreadable, ActivityHandle, ActivityState};
use crate::{
    cosmos::{Applied, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    discovery::ActivityCandidate,
    engine::Engine,
    model::{clock::millis, ActivityDocument, DocumentId, Millis, Partition, PayloadDocument},
    queue::{activity::ActivityFilter, FetchTerms},
    turn::cache::Known,
};
use azure_core::http::Etag;
use duroxide::providers::{SessionFetchConfig, WorkItem};
use std::{sync::Arc, time::Duration};
use tracing::{debug, warn};

/// How an attempt at an activity ended.
pub(crate) enum ActivityClaim {
    /// It is ours, with the session that was taken for it.
    Work(Box<(WorkItem, String, u32)>, Option<session::SessionHold>),
    /// It is somebody else's until then.
    Held(Millis),
    /// Its session is this owner's until then.
    SessionHeld(String, Millis),
    /// It is done or cancelled.
    Gone,
}

/// Tries to take the activity that a candidate names.
pub(crate) async fn claim(
    engine: &Arc<Engine>,
    candidate: &ActivityCandidate,
    terms: &FetchTerms<ActivityFilter>,
    owner: Option<&SessionFetchConfig>,
    deadline: Deadline,
) -> Result<ActivityClaim, StoreError> {
    let mut hold = match (&candidate.document.session_id, owner) {
        (Some(id), Some(owner)) => match session::take(engine, id, owner, deadline).await? {
            session::SessionClaim::Held(owner, until) => return Ok(ActivityClaim::SessionHeld(owner, until)),
            session::SessionClaim::Ours(hold) => Some(hold),
        },
        _ => None,
    };
    let mut outcome = take(engine, candidate, terms, deadline).await;
    if let Ok(ActivityClaim::Work(work, _)) = outcome {
        if let (Some(taken), Some(owner)) = (&mut hold, owner) {
            // It may have taken so long that the session is another's by now.
            session::take_again(engine, taken, owner, deadline).await.unwrap_or_else(|error| {
                warn!(%error, "a session could not be taken again");
            });
        }
        if hold.as_ref().is_none_or(|hold| hold.valid_for(engine.now())) {
            return Ok(ActivityClaim::Work(work, hold));
        }
        release_claim_later(engine, candidate.document.clone(), work.1, engine.clock.after(terms.lock_timeout));
        outcome = Ok(ActivityClaim::Held(engine.now() + 20));
    }
    if let Some(hold) = hold {
        session::release_claim_later(engine, hold);
    }
    outcome
}

async fn take(
    engine: &Arc<Engine>,
    candidate: &ActivityCandidate,
    terms: &FetchTerms<ActivityFilter>,
    deadline: Deadline,
) -> Result<ActivityClaim, StoreError> {
    let (mut document, mut etag) = (candidate.document.clone(), candidate.document.etag.clone());
    // What the candidate says may be stale, so there is a second look at most.
    for _ in 0..2 {
        let Some(known) = etag.take() else {
            match look(engine, &document, deadline).await? {
                None => return Ok(ActivityClaim::Gone),
                Some(found) => (document, etag) = (found.document, Some(found.etag)),
            }
            continue;
        };
        let now = engine.now();
        if document.due > now {
            return Ok(ActivityClaim::Held(document.due));
        }
        match lock(engine, document.clone(), known, terms.lock_timeout, now, deadline).await? {
            Locked::Ours(held) => return open(engine, *held, terms, deadline).await,
            // Others have it, or are done with it. If it comes back, whoever gives it back says so, or a look finds it.
            Locked::Lost => return Ok(ActivityClaim::Gone),
            Locked::Stale => match look(engine, &document, deadline).await? {
                None => return Ok(ActivityClaim::Gone),
                Some(found) => (document, etag) = (found.document, Some(found.etag)),
            },
        }
    }
    let due = document.due.max(engine.now() + 20);
    Ok(ActivityClaim::Held(due))
}

async fn look(
    engine: &Engine,
    document: &ActivityDocument,
    deadline: Deadline,
) -> Result<Option<Versioned<ActivityDocument>>, StoreError> {
    engine.store.read(&document.instance_id, &document.id, Freshness::Authoritative, deadline).await
}

enum Locked {
    Ours(Box<(ActivityDocument, Etag, String)>),
    /// It is not as it was known, for certain.
    Lost,
    /// It is not as it was known, or the answer to our own write was lost.
    Stale,
}

/// The conditional write that decides who has the activity.
async fn lock(
    engine: &Arc<Engine>,
    mut document: ActivityDocument,
    etag: Etag,
    lock_timeout: Duration,
    now: Millis,
    deadline: Deadline,
) -> Result<Locked, StoreError> {
    let token = engine.new_token();
    let until = now.saturating_add(millis(lock_timeout));
    document.claim(&token, until);
    let partition = document.instance_id.clone();
    let store = &engine.store;
    let written = store.replace_noting_repeats(&partition, &document.id, &document, Some(&etag), deadline).await;
    match written {
        Ok((WriteOutcome::Done(etag), _)) => Ok(Locked::Ours(Box::new((document, etag, token)))),
        Ok((WriteOutcome::Refused(_), Applied::No)) => {
            crate::telemetry::claim_race("activity");
            Ok(Locked::Lost)
        }
        Ok((WriteOutcome::Refused(_), Applied::Perhaps)) => match look(engine, &document, deadline).await {
            Ok(Some(found)) if found.document.held_by(&token) => {
                Ok(Locked::Ours(Box::new((found.document, found.etag, token))))
            }
            Ok(_) => {
                crate::telemetry::claim_race("activity");
                Ok(Locked::Stale)
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

/// Gives a claim back whose write may have happened, or may yet happen: until its lock would end, or the document is not the
/// one any more that the write depends on.
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
        Ok(item) => item.ok_or_else(|| "its input is not there".to_owned()),
        Err(StoreError::Malformed { detail }) => Err(detail),
        Err(error) => {
            release_claim_later(engine, document, token, until);
            return Err(error);
        }
    };
    if until.saturating_sub(engine.now()) < millis(terms.lock_timeout) / 2 {
        // It took so long that the caller would lose it: it is not counted.
        release_claim_later(engine, document, token, until);
        return Ok(ActivityClaim::Held(engine.now() + 20));
    }
    let parsed = item.and_then(|item| serde_json::from_str::<WorkItem>(&item).map_err(|e| e.to_string()));
    let identity = ActivityDocument::identity(&document.id);
    if let Some((execution, id)) = identity {
        // The turn that scheduled it is there. What is known from before must not be what the activity is told about it.
        let knows = |known: &Known| known.document.execution == execution && known.document.events.contains(id);
        if engine.cache.doubt_unless(&document.instance_id, knows) {
            engine.reads.doubt(&document.instance_id);
        }
    }
    let attempts = document.attempts;
    let (partition, id, terms) = (document.instance_id.clone(), document.id.clone(), terms.clone());
    let here = Some(engine.discovery.here.place(&partition));
    let state = ActivityState { until, document, etag, identity, closed: false, here };
    let handle = ActivityHandle { token: token.clone(), partition, id, terms, state: state.into() };
    engine.activities.insert(token.clone(), Arc::new(handle));
    match parsed {
        Ok(work_item) => Ok(ActivityClaim::Work(Box::new((work_item, token, attempts)), None)),
        Err(why) => {
            unreadable::put_off_or_fail(engine, &token, attempts, &why).await;
            Ok(ActivityClaim::Gone)
        }
    }
}

/// The work item: in the document, or in one of its own.
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

/// Gives a claim back in the background: for a caller that went away, or that could not find out what happened to it. Its
/// lock ends at `until` or earlier.
pub(crate) fn release_claim_later(engine: &Arc<Engine>, document: ActivityDocument, token: String, until: Millis) {
    let engine_too = engine.clone();
    engine.spawn(async move {
        engine_too.activities.remove(&token);
        let engine = &engine_too;
        match engine.until_released(until, |deadline| release_claim(engine, &document, &token, deadline)).await {
            Ok(()) => debug!(id = %document.id, "gave an activity back"),
            Err(error) => warn!(id = %document.id, %error, "an activity could not be given back: its lock expires"),
        }
    });
}

/// Gives back an activity of which no more is known than its id and the end of its lock.
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
        warn!(%id, %error, "an activity could not be given back: its lock expires");
    }
}

/// Gives a claim back, uncounted, if its token is still the lock's.
pub(crate) async fn release_claim(
    engine: &Engine,
    document: &ActivityDocument,
    token: &str,
    deadline: Deadline,
) -> Result<(), StoreError> {
    loop {
        let Some(Versioned { mut document, etag }) = look(engine, document, deadline).await? else { return Ok(()) };
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
