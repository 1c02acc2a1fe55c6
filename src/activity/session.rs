//! Sessions: one owner at a time, whichever instances share the session.
//!
//! A session incarnations in a partition of its own. It is taken before the activity and given back where the activity was lost.

use crate::{
    cosmos::{queries, queries::names_in_questions, Deadline, Freshness, Rows, StoreError, Versioned, WriteOutcome},
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

/// Whether a session could be taken.
pub(crate) enum SessionClaim {
    Ours(SessionHold),
    /// This owner has it until then.
    Held(String, Millis),
}

/// A session that was taken for an activity.
pub(crate) struct SessionHold {
    document: SessionDocument,
    etag: Etag,
    /// It was nobody's, or not there: where the activity is lost, it is given back.
    fresh: bool,
}

impl SessionHold {
    /// Whether at least half of its lock is left.
    pub(crate) fn valid_for(&self, now: Millis) -> bool {
        let SessionDocument { last_activity, locked_until, .. } = self.document;
        locked_until.saturating_sub(now) >= locked_until.saturating_sub(last_activity) / 2
    }
}

/// Takes a session that nobody else owns.
pub(crate) async fn take(
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
        let (written, fresh) = match &found {
            None => (engine.store.create(&partition, &id, &next, deadline).await?, true),
            Some(found) if found.document.locked_until > now && found.document.owner != owner.owner_id => {
                return Ok(SessionClaim::Held(found.document.owner.clone(), found.document.locked_until));
            }
            Some(found) => {
                let fresh = found.document.locked_until <= now;
                (engine.store.replace(&partition, &id, &next, Some(&found.etag), deadline).await?, fresh)
            }
        };
        if let WriteOutcome::Done(etag) = written {
            remember(engine, &next);
            return Ok(SessionClaim::Ours(SessionHold { document: next, etag, fresh }));
        }
        // Refused: another owner was faster, or the answer to our own write was lost. The next look tells, since it
        // takes a session that is ours already.
    }
}

/// Takes a session again while less than half of its lock is left, a few times. Locks may be shorter than a claim takes. Where
/// another owner has it by now, the hold stays as it is.
pub(crate) async fn take_again(
    engine: &Arc<Engine>,
    hold: &mut SessionHold,
    owner: &SessionFetchConfig,
    deadline: Deadline,
) -> Result<(), StoreError> {
    const ATTEMPTS: usize = 5;
    for _ in 0..ATTEMPTS {
        if hold.valid_for(engine.now()) {
            return Ok(());
        }
        let session = hold.document.session_id.clone();
        match take(engine, &session, owner, deadline).await? {
            SessionClaim::Ours(next) => *hold = SessionHold { fresh: hold.fresh || next.fresh, ..next },
            SessionClaim::Held(..) => return Ok(()),
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

/// Gives a session back that was taken for an activity which was lost.
pub(crate) fn release_claim_later(engine: &Arc<Engine>, hold: SessionHold) {
    if !hold.fresh {
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
            Ok(()) => debug!(session_id = document.session_id, "gave a session back"),
            Err(error) => {
                warn!(session_id = document.session_id, %error, "a session is given back when its lock expires")
            }
        }
    });
}

/// Remembers a session that a worker of this process has taken, for when it leaves.
fn remember(engine: &Engine, session: &SessionDocument) {
    /// More than that, and those whose locks are over are forgotten: if they were renewed, they expire some day.
    const MOST: usize = 10_000;
    if engine.sessions.len() >= MOST {
        let now = engine.now();
        engine.sessions.retain(|_, (_, until)| *until > now);
    }
    engine.sessions.insert(session.session_id.clone(), (session.owner.clone(), session.locked_until));
}

/// Gives back every session that a worker of this process has taken and still owns. Each is given back on its own; the error is
/// that of the last one that was not.
pub(crate) async fn release_all(engine: &Engine, deadline: Deadline) -> Result<(), StoreError> {
    let mut taken: Vec<(String, String)> =
        engine.sessions.iter().map(|entry| (entry.key().clone(), entry.value().0.clone())).collect();
    taken.sort();
    debug!(sessions = taken.len(), "giving sessions back");
    stream::iter(taken)
        .map(|(session, owner)| async move { release_one(engine, &session, &owner, deadline).await })
        .buffer_unordered(CONCURRENCY)
        .fold(Ok(()), |all, given| async move { given.and(all) })
        .await
}

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

/// Notes that a session is in use.
pub(crate) async fn touch(engine: &Engine, session: &str, deadline: Deadline) -> Result<(), StoreError> {
    loop {
        let Some(Versioned { mut document, etag }) = read(engine, session, Freshness::Session, deadline).await? else {
            return Ok(());
        };
        // As late as it can be told: idle time is counted from here.
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

/// Extends the locks of the owners' sessions that are in use; how many. Each session is renewed on its own, many at once: one
/// that can't be renewed costs no other its lock. The call fails if trouble left nothing renewed.
pub(crate) async fn renew(
    engine: &Engine,
    owners: &[&str],
    extend_for: Duration,
    idle_timeout: Duration,
) -> Result<usize, ProviderError> {
    if owners.is_empty() {
        return Ok(0);
    }
    let (sessions, mut trouble) = owned(engine, owners).await;
    // The caller calls again after this call. The locks that it extends first must last until then.
    let renewal = Renewal { extend_for, idle_timeout, limit: Deadline::after(extend_for / 2) };
    let extending = stream::iter(sessions).map(|session| async move {
        let name = session.session_id.clone();
        let extended = extend(engine, session, renewal).await;
        extended.inspect_err(|error| warn!(session_id = name, %error, "a session could not be renewed"))
    });
    let mut extending = extending.buffer_unordered(CONCURRENCY);
    let mut renewed = 0;
    while let Some(extended) = extending.next().await {
        match extended {
            Ok(extended) => renewed += usize::from(extended),
            Err(error) => trouble = Some(error),
        }
    }
    match trouble {
        Some(error) if renewed == 0 => Err(error.into_provider_error("renew_session_lock")),
        _ => Ok(renewed),
    }
}

/// The sessions of these owners, those whose locks end first at the front, and what kept the service from listing all. Then the
/// sessions that workers of this process have taken register for those that were not listed.
async fn owned(engine: &Engine, owners: &[&str]) -> (Vec<SessionDocument>, Option<StoreError>) {
    let now = engine.now();
    let taken_here = engine.sessions.iter().filter_map(|entry| {
        let (owner, until) = entry.value();
        let is_owned = owners.contains(&owner.as_str()) && *until > now;
        is_owned.then(|| SessionDocument::new(entry.key(), owner, now, *until))
    });
    let taken_here: Vec<SessionDocument> = taken_here.collect();
    // Half of the time is left for the renewals.
    let first_end = taken_here.iter().map(|session| session.locked_until).min();
    let patience = first_end.map_or(Duration::MAX, |end| Duration::from_millis(end.saturating_sub(now) / 2));
    let deadline = engine.deadline().min(Deadline::after(patience));
    let mut sessions = Vec::new();
    let trouble = list(engine, owners, &mut sessions, deadline).await.err();
    if let Some(error) = &trouble {
        warn!(%error, "sessions could not be listed: those that this process has taken are renewed");
    }
    // A lagging region does not list a session that was taken a moment ago.
    let listed: HashSet<String> = sessions.iter().map(|session| session.session_id.clone()).collect();
    sessions.extend(taken_here.into_iter().filter(|session| !listed.contains(&session.session_id)));
    sessions.sort_by(|a, b| (a.locked_until, &a.session_id).cmp(&(b.locked_until, &b.session_id)));
    (sessions, trouble)
}

/// Lists the sessions that these owners hold, as far as the service answers.
async fn list(
    engine: &Engine,
    owners: &[&str],
    sessions: &mut Vec<SessionDocument>,
    deadline: Deadline,
) -> Result<(), StoreError> {
    for part in names_in_questions(owners, MOST_OWNERS) {
        let statement = queries::SESSIONS_OF.statement().bind_list("@owners", part).bind("@now", engine.now());
        let mut pages = engine.store.container_pages::<SessionDocument>(statement, deadline)?;
        while let Some(page) = pages.next().await? {
            sessions.extend(page.readable());
        }
    }
    Ok(())
}

/// What a renewal is to do, and by when.
#[derive(Clone, Copy)]
struct Renewal {
    extend_for: Duration,
    idle_timeout: Duration,
    limit: Deadline,
}

/// Extends one session's lock, unless its owner has changed or it is idle. A session without an ETag is read first.
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
            // SessionClaim for another activity meanwhile, for longer than this call was to extend it.
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

/// Removes sessions that are of no use any more; how many. Among several processes one does it for all.
pub(crate) async fn clean_up(engine: &Engine) -> Result<usize, ProviderError> {
    let cleaned = shared_result::get_or_compute(engine, shared_result::SESSIONS, remove_expired(engine)).await?;
    Ok(cleaned.own().unwrap_or_default())
}

/// Removes sessions whose lock has expired and that no activity waits for; how many. Page by page, for a bounded time: what
/// is left is there the next time.
async fn remove_expired(engine: &Engine) -> Result<usize, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("cleanup_orphaned_sessions");
    let (now, time_is_up) = (engine.now(), engine.deadline());
    let (mut removed, mut from, mut trouble) = (0, 0, None);
    let ended = |removed: usize, trouble: Option<StoreError>| match trouble {
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
        let Some(last) = last else { return ended(removed, trouble) };
        let swept = remove_idle(engine, page).await.map_err(failed)?;
        removed += swept.removed;
        trouble = trouble.or(swept.trouble);
        let another_is_at_it = swept.removed < swept.tried / 2;
        if found < EXPIRED_PAGE || another_is_at_it || time_is_up.passed() {
            return ended(removed, trouble);
        }
        // Those that stay would come again and again. Where a whole page of them expired in one moment, the rest waits.
        from = if from == last { last + 1 } else { last };
    }
}

/// Owners that one query asks for.
const MOST_OWNERS: usize = 500;
/// Rows of a page, as the query says.
const EXPIRED_PAGE: usize = 500;
/// Sessions that are renewed or removed at once.
const CONCURRENCY: usize = 32;

struct CleanedUp {
    /// Those that the service has answered for.
    tried: usize,
    removed: usize,
    /// Why another one could not be removed.
    trouble: Option<StoreError>,
}

/// Removes those of some expired sessions that no activity waits for and nobody has taken since.
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
    let trouble = outcomes.into_iter().find_map(Result::err);
    if let Some(error) = &trouble {
        warn!(%error, "a session could not be removed: the next clean-up finds it");
    }
    Ok(CleanedUp { tried, removed, trouble })
}

/// Which of some sessions an activity waits for: a few questions, however many sessions there are.
async fn waited_for(engine: &Engine, sessions: &[SessionDocument]) -> Result<HashSet<String>, StoreError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct SessionActivityRow {
        session_id: String,
    }
    let names: Vec<String> = sessions.iter().map(|session| session.session_id.clone()).collect();
    let mut waited_for = HashSet::new();
    for part in names_in_questions(&names, EXPIRED_PAGE) {
        let statement = queries::ACTIVITIES_OF_SESSIONS.statement().in_background().bind_list("@sessions", part);
        let rows: Rows<SessionActivityRow> = engine.store.query_container(statement, engine.deadline()).await?;
        waited_for.extend(rows.complete()?.into_iter().map(|row| row.session_id));
    }
    Ok(waited_for)
}
