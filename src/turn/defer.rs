//! Messages for nobody: those of an instance that does not exist, and that no start has come for yet.
//!
//! A look that finds such messages parks them: `due` becomes a time that no poll asks for, and the instance's document stays
//! behind, `deferred`, without a lock. From then on they cost nothing. Their start meets that document, and the turn that it
//! begins loads them, too, in the order in which they came.
//!
//! duroxide drops queue messages that a worker finds before anybody has started their instance. Here the start may still be on
//! its way from a turn that is committed: as an intent, or in a part of a large turn. So such messages are deferred as orphans,
//! and the start decides: see [`drop_orphans`]. Where no start comes, a look drops them a day later.
//!
//! Invariant: where a partition has a deferred message, the instance's document is there and says so. The batch that parks the
//! first one says it; the commit of a turn that has taken every one of them takes it back; a deletion takes them along. A
//! start is never deferred, since it has a turn, nor is a message that can't be read: that one is put off.
//!
//! Crash points: each batch is conditional on the claim, and on every message being the one that was loaded. After any of
//! them, what is not deferred yet is visible, and the next look parks it, once the lock, which goes with the last batch, has
//! expired.

use super::{
    claim::Ours,
    instance_id,
    load::{self, Loaded, Sight},
    open, release,
};
use crate::{
    cosmos::{BatchOutcome, Deadline, StoreError, Versioned},
    engine::Engine,
    model::{clock::millis, InstanceDocument, MessageDocument, Millis, Operation},
};
use duroxide::providers::WorkItem;
use tracing::{debug, warn};

/// Orphans are kept for so long. A start that a turn has committed is delivered within seconds, after an outage within minutes
/// of its end.
const ORPHAN_LIFE: Millis = 24 * 60 * 60 * 1_000;
/// Clocks may differ by so much: the time at which one process found a message is compared with that at which another process
/// has sent a start.
const CLOCK_SKEW: Millis = 60_000;

/// Parks what a claim has loaded, and what did not fit with it. The last batch gives the claim up, uncounted; where there was
/// nothing to defer, that is left to the caller.
pub(super) async fn defer(
    engine: &Engine,
    ours: &mut Ours,
    loaded: Loaded,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let partition = ours.document.instance_id.clone();
    let Loaded { mut messages, mut more, .. } = loaded;
    if is_over(engine, &ours.document) {
        expire(engine, ours, &mut messages, more).await?;
    }
    loop {
        messages.retain(|message| !message.document.is_deferred());
        let orphans = are_orphans(engine, ours, &messages, deadline).await?;
        let count = messages.len();
        debug!(instance_id = partition.instance_id(), messages = count, more, orphans, "parking messages for nobody");
        let mut parts = parts(messages, orphans.then(|| engine.now()))?;
        while let Some(part) = parts.pop() {
            write(engine, ours, part, orphans, parts.is_empty() && !more).await?;
        }
        if !more {
            return Ok(());
        }
        let warm = Some(load::nothing());
        let next = load::load(engine, &partition, ours.document.execution, warm, engine.now(), (Sight::Visible, false))
            .await?;
        let has_turn = next.messages.iter().any(|m| m.document.starts) || !next.unknown.is_empty();
        if has_turn {
            let first = next.messages.first().map(|message| message.document.seq.clone());
            engine.discovery.offer_rest(&partition, first.unwrap_or_default());
            return Ok(());
        }
        (messages, more) = (next.messages, next.more);
    }
}

/// Whether duroxide would drop these messages: all are queue messages, nothing else is deferred, and no start is queued.
async fn are_orphans(
    engine: &Engine,
    ours: &Ours,
    messages: &[Versioned<MessageDocument>],
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let is_queued = |item: WorkItem| matches!(item, WorkItem::QueueMessage { .. });
    let candidates = !messages.is_empty()
        && (!ours.document.deferred || ours.document.orphans)
        && messages.iter().all(|message| serde_json::from_str(&message.document.item).is_ok_and(is_queued));
    Ok(candidates && !load::has_start(engine, &ours.document.instance_id, deadline).await?)
}

/// Drops the orphans that were found before their instance was started; whether there were any.
///
/// - A start from outside any turn is in the queue as soon as it is sent: all orphans were found before it.
/// - A start that a turn has sent arrives some time after the turn's commit. It is older than its commit, so an orphan that was
///   found before the start was sent was found before the commit. One that was found later may have been sent after it.
pub(super) async fn drop_orphans(engine: &Engine, ours: &mut Ours, loaded: &mut Loaded) -> Result<bool, StoreError> {
    if ours.document.exists() {
        // The first turn has decided.
        return Ok(false);
    }
    let messages = || loaded.messages.iter().map(|message| &message.document);
    let starts: Vec<&MessageDocument> = messages().filter(|message| message.starts).collect();
    let came_before = |found: Millis| {
        !starts.is_empty() && starts.iter().all(|start| !start.delivered || found + CLOCK_SKEW < start.sent_at())
    };
    let is_dropped = |message: &MessageDocument| message.orphan_since.is_some_and(came_before);
    let dropped: Vec<_> = loaded.messages.iter().filter(|message| is_dropped(&message.document)).cloned().collect();
    drop_with_warning(engine, ours, &dropped).await?;
    Ok(!dropped.is_empty())
}

/// Whether it is time to drop the orphans of a name that nobody has started.
pub(super) fn is_over(engine: &Engine, document: &InstanceDocument) -> bool {
    document.orphans && document.due.is_some_and(|due| due <= engine.now())
}

/// Drops the orphans whose time is over, and notes when that of the next is.
async fn expire(
    engine: &Engine,
    ours: &mut Ours,
    messages: &mut Vec<Versioned<MessageDocument>>,
    more: bool,
) -> Result<(), StoreError> {
    let now = engine.now();
    let ends = |message: &Versioned<MessageDocument>| message.document.orphan_since.map(|found| found + ORPHAN_LIFE);
    let (over, left): (Vec<_>, Vec<_>) =
        std::mem::take(messages).into_iter().partition(|message| ends(message).is_some_and(|end| end <= now));
    *messages = left;
    drop_with_warning(engine, ours, &over).await?;
    match messages.iter().filter_map(ends).min() {
        // The oldest come first: if none of them is over, none of the others is.
        Some(end) if over.is_empty() || !more => ours.document.due = Some(end),
        _ if more => ours.document.due = Some(now),
        _ => nothing_is_left(engine, &mut ours.document),
    }
    Ok(())
}

async fn drop_with_warning(
    engine: &Engine,
    ours: &mut Ours,
    orphans: &[Versioned<MessageDocument>],
) -> Result<(), StoreError> {
    if orphans.is_empty() {
        return Ok(());
    }
    warn!(
        instance_id = ours.document.instance_id.instance_id(),
        messages = orphans.len(),
        "dropping queue messages that were sent before anybody started their instance"
    );
    open::drop_messages(engine, ours, orphans).await
}

/// Nothing is deferred any more.
pub(super) fn nothing_is_left(engine: &Engine, document: &mut InstanceDocument) {
    (document.deferred, document.orphans) = (false, false);
    document.due = document.needs_recovery().then(|| engine.now());
}

/// Replacements that defer these messages, in parts that fit a batch. Orphans note when they were found.
fn parts(
    mut messages: Vec<Versioned<MessageDocument>>,
    orphan_since: Option<Millis>,
) -> Result<Vec<Vec<Operation>>, StoreError> {
    for Versioned { document: message, .. } in &mut messages {
        (message.due, message.orphan_since) = (MessageDocument::DEFERRED, orphan_since);
    }
    release::chunked(&messages)
}

/// Writes one part under the fence, which keeps the lock, or gives it up with the last.
async fn write(
    engine: &Engine,
    ours: &mut Ours,
    mut part: Vec<Operation>,
    orphans: bool,
    last: bool,
) -> Result<(), StoreError> {
    let (partition, deadline) = (ours.document.instance_id.clone(), engine.deadline());
    while !part.is_empty() {
        let next = marked(engine, ours, orphans, last);
        let mut operations = vec![Operation::replace(instance_id(), &next, Some(&ours.etag))?];
        operations.extend(part.iter().cloned());
        let outcome = engine.store.batch(&partition, &operations, deadline).await;
        engine.cache.forget(&partition);
        match outcome? {
            BatchOutcome::Committed(committed) => {
                (ours.document, ours.etag) = (next, committed.fence()?);
                return Ok(());
            }
            // A copy that its sender has removed meanwhile.
            BatchOutcome::RolledBack(back) if back.index > 0 && matches!(back.status, 404 | 412) => {
                part.remove(back.index - 1);
            }
            BatchOutcome::RolledBack(_) if deadline.passed() => {
                return Err(StoreError::Unavailable { detail: "messages for nobody could not be deferred".to_owned() });
            }
            BatchOutcome::RolledBack(_) => {
                let found = engine.read_latest(&partition, deadline).await?;
                let Some(found) = found.filter(|f| f.document.held_by(&ours.token) || is_there(&f.document, &next))
                else {
                    return Err(StoreError::Unavailable {
                        detail: "a claim was taken over before it was used".to_owned(),
                    });
                };
                let done = is_there(&found.document, &next);
                (ours.document, ours.etag) = (found.document, found.etag);
                if done {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// The document once a part is deferred.
fn marked(engine: &Engine, ours: &Ours, orphans: bool, last: bool) -> InstanceDocument {
    let mut next = ours.document.clone();
    // The first orphans decide when somebody looks at them again.
    let due = next.due.filter(|_| next.orphans).unwrap_or_else(|| engine.now() + ORPHAN_LIFE);
    (next.deferred, next.orphans, next.due) = (true, orphans, orphans.then_some(due));
    if last {
        next.lock = None;
        next.claims.pop();
        return next;
    }
    // Later than before, so that a part whose answer was lost is known by it.
    let before = ours.document.lock.as_ref().map_or(0, |lock| lock.until);
    let until = engine.now().saturating_add(millis(ours.runner.terms.lock_timeout)).max(before + 1);
    next.hold(&ours.token, until);
    next
}

/// Whether what was found is what we wrote, its answer lost.
fn is_there(found: &InstanceDocument, next: &InstanceDocument) -> bool {
    found.deferred && found.lock == next.lock && found.claims == next.claims
}
