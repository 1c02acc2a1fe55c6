//! Deferred messages: messages to an instance that does not exist, and whose start has not arrived yet.
//!
//! A claim that finds such messages defers them. Their `due` becomes a time for which no poll asks. The instance
//! document remains, marked `deferred` and without a lock. From then on the messages cost nothing. Their start finds
//! that document, and its first turn loads the deferred messages too, in enqueue order.
//!
//! duroxide drops queue messages that a worker finds before their instance has started. Here the start may still be on
//! its way from a committed turn: as an intent, or in a part of a staged turn. So such messages are deferred as
//! orphans, and the start decides about them: see [`drop_orphans`]. If no start comes, a worker drops them a day later.
//!
//! Invariant: if a partition has a deferred message, its instance document exists and says so.
//!
//! - The batch that defers the first message sets the mark.
//! - The commit of a turn that took every deferred message removes the mark.
//! - A deletion of the instance deletes the messages too.
//! - A start is never deferred, because it has a turn. A message that cannot be read is never deferred, but delayed.
//!
//! Crash points: each batch is conditional on the claim and on the ETag of every message. After a crash the remaining
//! messages are visible. The last batch removes the lock, so the next claim defers them once the lock has expired.

use super::{
    claim::ClaimedInstance,
    instance_id,
    load::{self, Loaded, MessageScope},
    open, release,
};
use crate::{
    cosmos::{BatchOutcome, Deadline, StoreError, Versioned},
    engine::Engine,
    model::{clock::millis, InstanceDocument, MessageDocument, Millis, Operation},
};
use duroxide::providers::WorkItem;
use tracing::{debug, warn};

/// How long orphans are kept. The outbox delivers a committed start within seconds, or within minutes after the end of
/// an outage.
const ORPHAN_LIFETIME: Millis = 24 * 60 * 60 * 1_000;
/// The assumed difference between two clocks. The time at which one process found a message is compared with the time
/// at which another process sent a start.
const CLOCK_SKEW: Millis = 60_000;

/// Defers the loaded messages and those that did not fit into the load. The last batch releases the claim without
/// counting an attempt. If there is nothing to defer, the caller releases the claim.
pub(super) async fn defer(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    loaded: Loaded,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let partition = claimed.document.instance_id.clone();
    let Loaded { mut messages, mut more, .. } = loaded;
    if orphans_have_expired(engine, &claimed.document) {
        expire(engine, claimed, &mut messages, more).await?;
    }
    loop {
        messages.retain(|message| !message.document.is_deferred());
        let orphans = are_orphans(engine, claimed, &messages, deadline).await?;
        let count = messages.len();
        debug!(instance_id = partition.instance_id(), messages = count, more, orphans, "deferring messages");
        let mut parts = parts(messages, orphans.then(|| engine.now()))?;
        while let Some(part) = parts.pop() {
            write(engine, claimed, part, orphans, parts.is_empty() && !more).await?;
        }
        if !more {
            return Ok(());
        }
        let cached = Some(load::empty_contents());
        let next = load::load(
            engine,
            &partition,
            claimed.document.current.execution,
            cached,
            engine.now(),
            (MessageScope::Visible, false),
        )
        .await?;
        let has_turn = next.messages.iter().any(|m| m.document.starts) || !next.unknown.is_empty();
        if has_turn {
            let first = next.messages.first().map(|message| message.document.seq.clone());
            engine.discovery.offer_remaining(&partition, first.unwrap_or_default());
            return Ok(());
        }
        (messages, more) = (next.messages, next.more);
    }
}

/// Whether duroxide would drop these messages: all are queue messages, only orphans are deferred so far, and no start
/// is queued.
async fn are_orphans(
    engine: &Engine,
    claimed: &ClaimedInstance,
    messages: &[Versioned<MessageDocument>],
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let is_queued = |item: WorkItem| matches!(item, WorkItem::QueueMessage { .. });
    let candidates = !messages.is_empty()
        && (!claimed.document.waiting.deferred || claimed.document.waiting.orphans)
        && messages.iter().all(|message| serde_json::from_str(&message.document.item).is_ok_and(is_queued));
    Ok(candidates && !load::has_start(engine, &claimed.document.instance_id, deadline).await?)
}

/// Drops the orphans that were found before their instance was started. Returns whether there were any.
///
/// - A start from a client is in the queue as soon as it is sent. So all orphans were found before it.
/// - A start from a turn arrives some time after the commit of the turn, and its `sent` time is before the commit. So
///   an orphan that was found before that time was found before the commit. An orphan that was found later may have
///   been sent after the commit.
pub(super) async fn drop_orphans(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    loaded: &mut Loaded,
) -> Result<bool, StoreError> {
    if claimed.document.exists() {
        // The first turn has decided about them.
        return Ok(false);
    }
    let messages = || loaded.messages.iter().map(|message| &message.document);
    let starts: Vec<&MessageDocument> = messages().filter(|message| message.starts).collect();
    let came_before = |found: Millis| {
        !starts.is_empty() && starts.iter().all(|start| !start.delivered || found + CLOCK_SKEW < start.sent_at())
    };
    let is_dropped = |message: &MessageDocument| message.orphan_since.is_some_and(came_before);
    let dropped: Vec<_> = loaded.messages.iter().filter(|message| is_dropped(&message.document)).cloned().collect();
    drop_with_warning(engine, claimed, &dropped).await?;
    Ok(!dropped.is_empty())
}

/// Whether it is time to drop the orphans of an instance that was never started.
pub(super) fn orphans_have_expired(engine: &Engine, document: &InstanceDocument) -> bool {
    document.waiting.orphans && document.due.is_some_and(|due| due <= engine.now())
}

/// Drops the orphans whose time has passed, and sets `due` to the time of the next.
async fn expire(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    messages: &mut Vec<Versioned<MessageDocument>>,
    more: bool,
) -> Result<(), StoreError> {
    let now = engine.now();
    let ends =
        |message: &Versioned<MessageDocument>| message.document.orphan_since.map(|found| found + ORPHAN_LIFETIME);
    let (over, left): (Vec<_>, Vec<_>) =
        std::mem::take(messages).into_iter().partition(|message| ends(message).is_some_and(|end| end <= now));
    *messages = left;
    drop_with_warning(engine, claimed, &over).await?;
    match messages.iter().filter_map(ends).min() {
        // The oldest come first. If none of them has expired, none of the others has.
        Some(end) if over.is_empty() || !more => claimed.document.due = Some(end),
        _ if more => claimed.document.due = Some(now),
        _ => clear_mark(engine, &mut claimed.document),
    }
    Ok(())
}

/// Drops orphans and logs a warning.
async fn drop_with_warning(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    orphans: &[Versioned<MessageDocument>],
) -> Result<(), StoreError> {
    if orphans.is_empty() {
        return Ok(());
    }
    warn!(
        instance_id = claimed.document.instance_id.instance_id(),
        messages = orphans.len(),
        "dropping queue messages that were sent before their instance was started"
    );
    open::drop_messages(engine, claimed, orphans).await
}

/// Removes the mark: no message is deferred any more.
pub(super) fn clear_mark(engine: &Engine, document: &mut InstanceDocument) {
    (document.waiting.deferred, document.waiting.orphans) = (false, false);
    document.due = document.needs_recovery().then(|| engine.now());
}

/// Replacements that defer these messages, in parts that each fit into a batch. Orphans record when they were found.
fn parts(
    mut messages: Vec<Versioned<MessageDocument>>,
    orphan_since: Option<Millis>,
) -> Result<Vec<Vec<Operation>>, StoreError> {
    for Versioned { document: message, .. } in &mut messages {
        (message.due, message.orphan_since) = (MessageDocument::DEFERRED, orphan_since);
    }
    release::chunked(&messages)
}

/// Writes one part under the fence. The batch renews the lock, or removes it with the last part.
async fn write(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    mut part: Vec<Operation>,
    orphans: bool,
    last: bool,
) -> Result<(), StoreError> {
    let (partition, deadline) = (claimed.document.instance_id.clone(), engine.deadline());
    while !part.is_empty() {
        let next = marked(engine, claimed, orphans, last);
        let mut operations = vec![Operation::replace(instance_id(), &next, Some(&claimed.etag))?];
        operations.extend(part.iter().cloned());
        let outcome = engine.store.batch(&partition, &operations, deadline).await;
        engine.cache.forget(&partition);
        match outcome? {
            BatchOutcome::Committed(committed) => {
                (claimed.document, claimed.etag) = (next, committed.fence()?);
                return Ok(());
            }
            // The sender has removed a copy meanwhile.
            BatchOutcome::RolledBack(back) if back.index > 0 && matches!(back.status, 404 | 412) => {
                part.remove(back.index - 1);
            }
            BatchOutcome::RolledBack(_) if deadline.passed() => {
                let detail = "could not defer messages to an instance that does not exist".to_owned();
                return Err(StoreError::Unavailable { detail });
            }
            BatchOutcome::RolledBack(_) => {
                let found = engine.read_latest(&partition, deadline).await?;
                let Some(found) = found.filter(|f| f.document.held_by(&claimed.token) || is_there(&f.document, &next))
                else {
                    return Err(StoreError::Unavailable {
                        detail: "another worker has taken the claim over".to_owned(),
                    });
                };
                let done = is_there(&found.document, &next);
                (claimed.document, claimed.etag) = (found.document, found.etag);
                if done {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// The instance document once a part is deferred.
fn marked(engine: &Engine, claimed: &ClaimedInstance, orphans: bool, last: bool) -> InstanceDocument {
    let mut next = claimed.document.clone();
    // The first orphans decide when the next claim checks them.
    let due = next.due.filter(|_| next.waiting.orphans).unwrap_or_else(|| engine.now() + ORPHAN_LIFETIME);
    (next.waiting.deferred, next.waiting.orphans, next.due) = (true, orphans, orphans.then_some(due));
    if last {
        next.claim.lock = None;
        next.claim.claims.pop();
        return next;
    }
    // Later than before, so that a part whose answer was lost can be recognised by it.
    let before = claimed.document.claim.lock.as_ref().map_or(0, |lock| lock.until);
    let until = engine.now().saturating_add(millis(claimed.runner.terms.lock_timeout)).max(before + 1);
    next.lock(&claimed.token, until);
    next
}

/// Whether the found document is the one that we wrote, and only its answer was lost.
fn is_there(found: &InstanceDocument, next: &InstanceDocument) -> bool {
    found.waiting.deferred && found.claim.lock == next.claim.lock && found.claim.claims == next.claim.claims
}
