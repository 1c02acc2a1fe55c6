//! Messages for nobody: those of an instance that does not exist, and that no start has come for yet.
//!
//! A look that finds such messages parks them: `due` becomes a time that no poll asks for, and the instance's document stays
//! behind, `parked`, without a lock. From then on they cost nothing. Their start meets that document, and the turn that it
//! begins loads them, too, in the order in which they came.
//!
//! Invariant: where a partition has a parked message, the instance's document is there and says so. The batch that parks the
//! first one says it; the commit of a turn that has taken every one of them takes it back; a deletion takes them along. A
//! start is never parked, nor what can't be read: both have a turn.
//!
//! Crash points: each batch is conditional on the claim, and on every message being the one that was loaded. After any of
//! them, what is not parked yet is visible, and the next look parks it, once the lock, which goes with the last batch, has
//! expired.

use super::{
    claim::Ours,
    instance_id,
    load::{self, Loaded, Sight},
    open, release,
};
use crate::{
    engine::Engine,
    model::{clock::millis, InstanceDocument, MessageDocument},
    store::{BatchOutcome, Operation, StoreError, Versioned},
};
use tracing::debug;

/// Parks what a claim has loaded, and what did not fit with it. The last batch gives the claim up, uncounted; where there was
/// nothing to park, that is left to the caller.
pub(super) async fn park(engine: &Engine, ours: &mut Ours, loaded: Loaded) -> Result<(), StoreError> {
    let partition = ours.document.instance_id.clone();
    let Loaded { mut messages, mut more, .. } = loaded;
    loop {
        messages.retain(|message| !message.document.is_parked());
        debug!(instance_id = partition.instance_id(), messages = messages.len(), more, "parking messages for nobody");
        let mut parts = parts(messages)?;
        while let Some(part) = parts.pop() {
            write(engine, ours, part, parts.is_empty() && !more).await?;
        }
        if !more {
            return Ok(());
        }
        let warm = Some(load::nothing());
        let next = load::load(engine, &partition, ours.document.execution, warm, engine.now(), (Sight::Visible, false))
            .await?;
        let has_turn = next.messages.iter().any(|m| m.document.starts) || open::parse_items(&next.messages).1.is_some();
        if has_turn {
            engine.dispatch.offer_rest(&partition);
            return Ok(());
        }
        (messages, more) = (next.messages, next.more);
    }
}

/// Replacements that park these messages, in parts that fit a batch.
fn parts(mut messages: Vec<Versioned<MessageDocument>>) -> Result<Vec<Vec<Operation>>, StoreError> {
    for message in &mut messages {
        message.document.due = MessageDocument::PARKED;
    }
    release::chunked(&messages)
}

/// Writes one part under the fence, which keeps the lock, or gives it up with the last.
async fn write(engine: &Engine, ours: &mut Ours, mut part: Vec<Operation>, last: bool) -> Result<(), StoreError> {
    let (partition, deadline) = (ours.document.instance_id.clone(), engine.deadline());
    while !part.is_empty() {
        let next = marked(engine, ours, last);
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
                return Err(StoreError::Unavailable { detail: "messages for nobody could not be parked".to_owned() });
            }
            BatchOutcome::RolledBack(_) => {
                let found = release::read_latest(engine, &partition, deadline).await?;
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

/// The document once a part is parked.
fn marked(engine: &Engine, ours: &Ours, last: bool) -> InstanceDocument {
    let mut next = ours.document.clone();
    (next.parked, next.due) = (true, None);
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
    found.parked && found.lock == next.lock && found.claims == next.claims
}
