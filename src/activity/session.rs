//! Sessions: each has one owner at a time, whichever instances share it.
//!
//! The session document is in a partition of its own. The worker claims the session before the activity. It releases
//! the session if it does not get the activity.

use crate::{
    cosmos::{queries, queries::chunks_for_query, Deadline, Freshness, Rows, StoreError, Versioned, WriteOutcome},
    discovery::shared_result,
    engine::Engine,
    model::{clock::millis, Millis, Partition, SessionDocument},
};
use azure_core::http::Etag;
use duroxide::providers::{ProviderError, SessionFetchConfig};
use futures::{stream, StreamExt};
use serde::Deserialize;
use std::{collections::HashSet, sync::Arc, time::Duration};
use tracing::{debug, warn};

/// How the claim of a session ended.
pub(crate) enum SessionClaim {
    Claimed(SessionHold),
    /// This owner holds the session until this time.
    Locked(String, Millis),
}

/// A session that was claimed for an activity.
pub(crate) struct SessionHold {
    document: SessionDocument,
    etag: Etag,
    /// The session was free before. It is released if the activity is lost.
    newly_claimed: bool,
}

impl SessionHold {
    /// Whether at least half of its lock is left.
    pub(crate) fn has_half_left(&self, now: Millis) -> bool {
        let SessionDocument { last_activity, locked_until, .. } = self.document;
        locked_until.saturating_sub(now) >= locked_until.saturating_sub(last_activity) / 2
    }
}

/// Claims a session unless another owner holds it.
pub(crate) async fn claim(
    engine: &Arc<Engine>,
    session: &str,
    owner: &SessionFetchConfig,
    deadline: Deadline,
) -> Result<SessionClaim, StoreError> {
    loop {
        let found = read(engine, session, Freshness::Authoritative, deadline).await?;
        let now = engine.now();
        let until = now.saturating_add(millis(owner.lock_timeout));
        let mut next = SessionDocument::new(session, &owner.owner_id, now, until);
        next.unknown = found.as_ref().map(|found| found.document.unknown.clone()).unwrap_or_default();
        let (partition, id) = (next.instance_id.clone(), next.id.clone());
        let (written, newly_claimed) = match &found {
            None => (engine.store.create(&partition, &id, &next, deadline).await?, true),
            Some(found) if found.document.locked_until > now && found.document.owner != owner.owner_id => {
                return Ok(SessionClaim::Locked(found.document.owner.clone(), found.document.locked_until));
            }
            Some(found) => {
                let newly_claimed = found.document.locked_until <= now;
                (engine.store.replace(&partition, &id, &next, Some(&found.etag), deadline).await?, newly_claimed)
            }
        };
        if let WriteOutcome::Done(etag) = written {
            remember(engine, &next);
            return Ok(SessionClaim::Claimed(SessionHold { document: next, etag, newly_claimed }));
        }
        // The write was refused: another owner was faster, or the answer to our own write was lost. The next read
        // tells, because the loop also claims a session that is already ours.
    }
}

/// Claims the session again while less than half of its lock is left, a few times. Locks may be shorter than a claim
/// takes. If another owner has the session by now, the claim stays as it is.
pub(crate) async fn extend_claim(
    engine: &Arc<Engine>,
    hold: &mut SessionHold,
    owner: &SessionFetchConfig,
    deadline: Deadline,
) -> Result<(), StoreError> {
    const ATTEMPTS: usize = 5;
    for _ in 0..ATTEMPTS {
        if hold.has_half_left(engine.now()) {
            return Ok(());
        }
        let session = hold.document.session_id.clone();
        match claim(engine, &session, owner, deadline).await? {
            SessionClaim::Claimed(next) => {
                *hold = SessionHold { newly_claimed: hold.newly_claimed || next.newly_claimed, ..next }
            }
            SessionClaim::Locked(..) => return Ok(()),
        }
    }
    Ok(())
}

async fn read(
    engine: &Engine,
    session: &str,
    freshness: Freshness,
    deadline: Deadline,
) -> Result<Option<Versioned<SessionDocument>>, StoreError> {
    engine.store.read(&Partition::session(session), &SessionDocument::document_id(), freshness, deadline).await
}

/// Releases a session that was claimed for an activity, if the activity is lost.
pub(crate) fn release_claim_later(engine: &Arc<Engine>, hold: SessionHold) {
    if !hold.newly_claimed {
        return;
    }
    let engine_too = engine.clone();
    engine.spawn(async move {
        let SessionHold { document, etag, .. } = hold;
        let (store, document, etag) = (&engine_too.store, &document, &etag);
        let release = |deadline: Deadline| async move {
            store.delete(&document.instance_id, &document.id, Some(etag), deadline).await.map(drop)
        };
        match engine_too.until_released(document.locked_until, release).await {
            Ok(()) => debug!(session_id = document.session_id, "released a session"),
            Err(error) => {
                warn!(session_id = document.session_id, %error, "could not release a session, its lock will expire")
            }
        }
    });
}

/// Remembers a session that a worker of this process has claimed, so that a shutdown can release it.
fn remember(engine: &Engine, session: &SessionDocument) {
    /// Above this number the process forgets sessions whose locks have ended by its knowledge. If they were renewed,
    /// their locks expire later.
    const MAX_SESSIONS: usize = 10_000;
    if engine.sessions.len() >= MAX_SESSIONS {
        let now = engine.now();
        engine.sessions.retain(|_, (_, until)| *until > now);
    }
    engine.sessions.insert(session.session_id.clone(), (session.owner.clone(), session.locked_until));
}

/// Releases every session that a worker of this process has claimed and still owns. A failure does not stop the others.
/// Returns the last error.
pub(crate) async fn release_all(engine: &Engine, deadline: Deadline) -> Result<(), StoreError> {
    let mut taken: Vec<(String, String)> =
        engine.sessions.iter().map(|entry| (entry.key().clone(), entry.value().0.clone())).collect();
    taken.sort();
    debug!(sessions = taken.len(), "releasing sessions");
    stream::iter(taken)
        .map(|(session, owner)| async move { release_one(engine, &session, &owner, deadline).await })
        .buffer_unordered(CONCURRENCY)
        .fold(Ok(()), |all, released| async move { released.and(all) })
        .await
}

/// Deletes the session, unless it has another owner.
async fn release_one(engine: &Engine, session: &str, owner: &str, deadline: Deadline) -> Result<(), StoreError> {
    while let Some(found) = read(engine, session, Freshness::Authoritative, deadline).await? {
        if found.document.owner != owner {
            break;
        }
        let Versioned { document, etag } = found;
        let deleted = engine.store.delete(&document.instance_id, &document.id, Some(&etag), deadline).await?;
        if let WriteOutcome::Done(_) = deleted {
            break;
        }
    }
    engine.sessions.remove(session);
    Ok(())
}

/// Records that a session is in use.
pub(crate) async fn touch(engine: &Engine, session: &str, deadline: Deadline) -> Result<(), StoreError> {
    loop {
        let Some(Versioned { mut document, etag }) = read(engine, session, Freshness::Session, deadline).await? else {
            return Ok(());
        };
        // The latest possible time, because the idle time is counted from here.
        let now = engine.now();
        if document.last_activity >= now {
            return Ok(());
        }
        document.last_activity = now;
        let (partition, id) = (document.instance_id.clone(), document.id.clone());
        let written = engine.store.replace(&partition, &id, &document, Some(&etag), deadline).await?;
        if let WriteOutcome::Done(_) = written {
            return Ok(());
        }
    }
}

/// Extends the locks of the owners' sessions that are in use. Returns their number. Sessions are renewed independently
/// and concurrently, so a failed renewal costs no other session its lock. The call fails if an error left no session
/// renewed.
pub(crate) async fn renew(
    engine: &Engine,
    owners: &[&str],
    extend_for: Duration,
    idle_timeout: Duration,
) -> Result<usize, ProviderError> {
    if owners.is_empty() {
        return Ok(0);
    }
    let (sessions, mut failure) = owned(engine, owners).await;
    // The caller repeats this call after it returns. The locks that it extends first must last until then.
    let renewal = Renewal { extend_for, idle_timeout, limit: Deadline::after(extend_for / 2) };
    let extending = stream::iter(sessions).map(|session| async move {
        let name = session.session_id.clone();
        let extended = extend(engine, session, renewal).await;
        extended.inspect_err(|error| warn!(session_id = name, %error, "could not renew a session"))
    });
    let mut extending = extending.buffer_unordered(CONCURRENCY);
    let mut renewed = 0;
    while let Some(extended) = extending.next().await {
        match extended {
            Ok(extended) => renewed += usize::from(extended),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) if renewed == 0 => Err(error.into_provider_error("renew_session_lock")),
        _ => Ok(renewed),
    }
}

/// The sessions of these owners, ordered by the end of their locks, and the error if Cosmos DB did not list all.
/// Sessions that workers of this process have claimed are added if they are not listed.
async fn owned(engine: &Engine, owners: &[&str]) -> (Vec<SessionDocument>, Option<StoreError>) {
    let now = engine.now();
    let claimed_here = engine.sessions.iter().filter_map(|entry| {
        let (owner, until) = entry.value();
        let is_owned = owners.contains(&owner.as_str()) && *until > now;
        is_owned.then(|| SessionDocument::new(entry.key(), owner, now, *until))
    });
    let claimed_here: Vec<SessionDocument> = claimed_here.collect();
    // Half of the time is left for the renewals.
    let first_end = claimed_here.iter().map(|session| session.locked_until).min();
    let timeout = first_end.map_or(Duration::MAX, |end| Duration::from_millis(end.saturating_sub(now) / 2));
    let deadline = engine.deadline().min(Deadline::after(timeout));
    let mut sessions = Vec::new();
    let failure = list(engine, owners, &mut sessions, deadline).await.err();
    if let Some(error) = &failure {
        warn!(%error, "could not list sessions, renewing only those that this process has claimed");
    }
    // A lagging region does not list a session that was claimed a moment ago.
    let listed: HashSet<String> = sessions.iter().map(|session| session.session_id.clone()).collect();
    sessions.extend(claimed_here.into_iter().filter(|session| !listed.contains(&session.session_id)));
    sessions.sort_by(|a, b| (a.locked_until, &a.session_id).cmp(&(b.locked_until, &b.session_id)));
    (sessions, failure)
}

/// Lists the sessions that these owners hold, as far as Cosmos DB answers.
async fn list(
    engine: &Engine,
    owners: &[&str],
    sessions: &mut Vec<SessionDocument>,
    deadline: Deadline,
) -> Result<(), StoreError> {
    for part in chunks_for_query(owners, MAX_OWNERS) {
        let statement = queries::SESSIONS_OF.statement().bind_list("@owners", part).bind("@now", engine.now());
        let mut pages = engine.store.container_pages::<SessionDocument>(statement, deadline)?;
        while let Some(page) = pages.next().await? {
            sessions.extend(page.readable());
        }
    }
    Ok(())
}

/// The parameters of a renewal.
#[derive(Clone, Copy)]
struct Renewal {
    extend_for: Duration,
    idle_timeout: Duration,
    limit: Deadline,
}

/// Extends the lock of one session, unless its owner has changed or it is idle. A session without an ETag is read
/// first.
async fn extend(engine: &Engine, session: SessionDocument, renewal: Renewal) -> Result<bool, StoreError> {
    let owner = session.owner.clone();
    // After the end of its lock nothing is left to renew.
    let deadline = engine.deadline_at(session.locked_until).min(engine.deadline()).min(renewal.limit);
    let mut current = session.etag.clone().map(|etag| Versioned { document: session.clone(), etag });
    loop {
        if current.is_none() {
            current = read(engine, &session.session_id, Freshness::Authoritative, deadline).await?;
        }
        let Some(Versioned { mut document, etag }) = current.take() else { return Ok(false) };
        let now = engine.now();
        let is_idle = document.last_activity.saturating_add(millis(renewal.idle_timeout)) <= now;
        if document.owner != owner || document.locked_until <= now || is_idle {
            return Ok(false);
        }
        let until = engine.clock.after(renewal.extend_for);
        if document.locked_until >= until {
            // The session was claimed for another activity meanwhile, with a later end than this call would set.
            return Ok(true);
        }
        document.locked_until = until;
        let (partition, id) = (document.instance_id.clone(), document.id.clone());
        let written = engine.store.replace(&partition, &id, &document, Some(&etag), deadline).await?;
        if let WriteOutcome::Done(_) = written {
            if let Some(mut taken) = engine.sessions.get_mut(&session.session_id).filter(|taken| taken.0 == owner) {
                taken.1 = until;
            }
            return Ok(true);
        }
    }
}

/// Removes sessions that are no longer needed. Returns their number. Among several processes one does it for all.
pub(crate) async fn clean_up(engine: &Engine) -> Result<usize, ProviderError> {
    let cleaned = shared_result::get_or_compute(engine, shared_result::SESSIONS, remove_expired(engine)).await?;
    Ok(cleaned.own().unwrap_or_default())
}

/// Removes sessions whose lock has expired and for which no activity waits. Returns their number. It works page by page
/// for a bounded time. The next call handles the rest.
async fn remove_expired(engine: &Engine) -> Result<usize, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("cleanup_orphaned_sessions");
    let (now, time_is_up) = (engine.now(), engine.deadline());
    let (mut removed, mut from, mut failure) = (0, 0, None);
    let ended = |removed: usize, failure: Option<StoreError>| match failure {
        Some(error) if removed == 0 => Err(failed(error)),
        _ => Ok(removed),
    };
    loop {
        let statement = queries::EXPIRED_SESSIONS.statement().in_background().bind("@from", from).bind("@now", now);
        let page = engine.store.query_container(statement, engine.deadline()).await.map_err(failed)?;
        let found = page.len();
        let (page, unreadable): (Vec<SessionDocument>, _) = page.into_parts();
        let of_unreadable = unreadable.iter().filter_map(|session| session.row.get("lockedUntil")?.as_u64());
        let last = page.iter().map(|session| session.locked_until).chain(of_unreadable).max();
        let Some(last) = last else { return ended(removed, failure) };
        let cleaned = remove_idle(engine, page).await.map_err(failed)?;
        removed += cleaned.removed;
        failure = failure.or(cleaned.failure);
        let another_process_cleans_up = cleaned.removed < cleaned.tried / 2;
        if found < EXPIRED_PAGE || another_process_cleans_up || time_is_up.passed() {
            return ended(removed, failure);
        }
        // Sessions that stay would be listed again and again. If a whole page expired in the same millisecond, the rest
        // waits for the next call.
        from = if from == last { last + 1 } else { last };
    }
}

/// The number of owners in one query.
const MAX_OWNERS: usize = 500;
/// The number of rows of a page, as the query says.
const EXPIRED_PAGE: usize = 500;
/// The number of sessions that are renewed or removed at once.
const CONCURRENCY: usize = 32;

/// The result of one clean-up step.
struct CleanedUp {
    /// Sessions for which Cosmos DB has answered.
    tried: usize,
    removed: usize,
    /// Why another session could not be removed.
    failure: Option<StoreError>,
}

/// Removes those of the expired sessions for which no activity waits and which were not claimed since.
async fn remove_idle(engine: &Engine, expired: Vec<SessionDocument>) -> Result<CleanedUp, StoreError> {
    let waited_for = waited_for(engine, &expired).await?;
    let idle: Vec<_> = expired.into_iter().filter(|session| !waited_for.contains(&session.session_id)).collect();
    let removing = stream::iter(idle).map(|session| async move {
        let deadline = engine.deadline();
        engine.store.delete(&session.instance_id, &session.id, session.etag.as_ref(), deadline).await
    });
    let outcomes: Vec<Result<WriteOutcome, StoreError>> = removing.buffer_unordered(CONCURRENCY).collect().await;
    let tried = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
    let removed = outcomes.iter().filter(|outcome| matches!(outcome, Ok(WriteOutcome::Done(_)))).count();
    let failure = outcomes.into_iter().find_map(Result::err);
    if let Some(error) = &failure {
        warn!(%error, "could not remove a session, the next clean-up will retry");
    }
    Ok(CleanedUp { tried, removed, failure })
}

/// The sessions for which an activity waits. The number of queries stays small, however many sessions there are.
async fn waited_for(engine: &Engine, sessions: &[SessionDocument]) -> Result<HashSet<String>, StoreError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct SessionActivityRow {
        session_id: String,
    }
    let names: Vec<String> = sessions.iter().map(|session| session.session_id.clone()).collect();
    let mut waited_for = HashSet::new();
    for part in chunks_for_query(&names, EXPIRED_PAGE) {
        let statement = queries::ACTIVITIES_OF_SESSIONS.statement().in_background().bind_list("@sessions", part);
        let rows: Rows<SessionActivityRow> = engine.store.query_container(statement, engine.deadline()).await?;
        waited_for.extend(rows.complete()?.into_iter().map(|row| row.session_id));
    }
    Ok(waited_for)
}
