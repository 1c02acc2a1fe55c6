//! Releases a turn, renews its lock, and releases claims that found nothing to run.

use super::{cache::CachedInstance, instance_id, lock_lost, TurnHandle, TurnPhase, TurnState, RESERVED_BYTES};
use crate::model::operation;
use crate::{
    cosmos::{BatchOutcome, Deadline, StoreError, Versioned, WriteOutcome},
    engine::Engine,
    model::{InstanceDocument, MessageDocument, Millis, Operation, Partition},
};
use azure_core::http::Etag;
use duroxide::providers::ProviderError;
use std::{sync::Arc, time::Duration};
use tracing::{debug, warn};

/// Extends the lock of a turn from now.
pub(crate) async fn renew(engine: &Arc<Engine>, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
    const OPERATION: &str = "renew_orchestration_item_lock";
    let handle = engine.turns.get(token).map(|entry| entry.value().clone());
    let handle = handle.ok_or_else(|| lock_lost(OPERATION, "it is not held here"))?;
    let mut state = handle.state.lock().await;
    if state.phase != TurnPhase::Open || state.until <= engine.now() {
        return Err(lock_lost(OPERATION, "it has expired, or an earlier commit failed"));
    }
    let deadline = engine.deadline_at(state.until);
    let until = engine.clock.after(extend_for);
    let change = |document: &mut InstanceDocument| {
        document.lock(token, until);
    };
    match rewrite(engine, &handle, &mut state, change, deadline).await {
        Ok(Rewritten::Done) => {
            state.until = until;
            engine.discovery.turn_holds(&handle.partition, until);
            Ok(())
        }
        Ok(Rewritten::Lost) => {
            state.phase = TurnPhase::Closed;
            Err(lock_lost(OPERATION, "the lock was taken over"))
        }
        Err(error) => Err(error.into_provider_error(OPERATION)),
    }
}

/// Makes the messages of a turn available again.
pub(crate) async fn abandon(
    engine: &Arc<Engine>,
    token: &str,
    delay: Option<Duration>,
    ignore_attempt: bool,
) -> Result<(), ProviderError> {
    const OPERATION: &str = "abandon_orchestration_item";
    let handle = engine.turns.get(token).map(|entry| entry.value().clone());
    let handle = handle.ok_or_else(|| lock_lost(OPERATION, "it is not held here"))?;
    let mut state = handle.state.lock().await;
    if state.phase == TurnPhase::Closed {
        return Err(lock_lost(OPERATION, "the turn has ended"));
    }
    let deadline = engine.deadline();
    let mut returned = state.taken.clone();
    for Versioned { document: message, .. } in &mut returned {
        message.attempts = message.attempts.saturating_sub(u32::from(ignore_attempt));
    }
    let delay = delay.filter(|d| !d.is_zero());
    let due = engine.clock.after(delay.unwrap_or_default());
    let change = |document: &mut InstanceDocument| {
        document.unlock(due);
        if ignore_attempt {
            document.claim.claims.pop();
        }
    };
    if delay.is_some() {
        delay_messages(&mut returned, &state.document, due);
    }
    let is_inlined = |message: &MessageDocument| state.document.has_inlined(&message.id);
    let inlined = returned.iter().map(|message| &message.document).find(|message| is_inlined(message)).cloned();
    let rewritten = delay.is_some() || inlined.is_some();
    let outcome = if rewritten {
        let changed: Vec<_> =
            returned.iter().filter(|m| delay.is_some() && !is_inlined(&m.document)).cloned().collect();
        let inlined = inlined.map(|message| own_document(message, delay.is_some()));
        let messages = (changed.as_slice(), inlined.as_ref());
        release_with(engine, &handle, &mut state, messages, change, deadline).await
    } else {
        rewrite(engine, &handle, &mut state, change, deadline).await
    };
    match outcome {
        Ok(Rewritten::Done) => {
            close(engine, &handle, &mut state);
            // A rewritten message has a new ETag, which this process has not read.
            let returned = returned.into_iter().map(|m| (m.document, (!rewritten).then_some(m.etag)));
            engine.discovery.messages_returned(&handle.partition, returned);
            Ok(())
        }
        Ok(Rewritten::Lost) => {
            close(engine, &handle, &mut state);
            forget_turn(engine, &handle, &state);
            Err(lock_lost(OPERATION, "the lock was taken over"))
        }
        Err(error) => Err(error.into_provider_error(OPERATION)),
    }
}

/// Delays messages until `due`. Their attempts already include all claims so far, so a later count starts after the
/// last claim, whatever the clock says.
fn delay_messages(messages: &mut [Versioned<MessageDocument>], document: &InstanceDocument, due: Millis) {
    let counted = document.claim.claims.last().map_or(0, |last| last + 1);
    for Versioned { document: message, .. } in messages {
        message.due = due;
        message.created_at = message.created_at.max(counted);
    }
}

/// Ends the use of a token.
pub(crate) fn close(engine: &Engine, handle: &TurnHandle, state: &mut TurnState) {
    state.phase = TurnPhase::Closed;
    engine.turns.remove(&handle.token);
}

/// Forgets a lost turn. Usually another worker has its messages now. If an aborted deletion removed the lock, they are
/// still in the queue; the next poll that returns them makes them candidates again.
pub(crate) fn forget_turn(engine: &Engine, handle: &TurnHandle, state: &TurnState) {
    engine.discovery.messages_taken(&handle.partition, state.taken.iter().map(|taken| &taken.document.id), 0);
    engine.discovery.turn_ended(&handle.partition);
}

/// How a change of the instance document under our lock ended.
pub(crate) enum Rewritten {
    Done,
    /// Another token has the lock.
    Lost,
}

/// Changes the instance document while our token holds its lock. After a 412 the lock is lost only if a read shows
/// another token.
async fn rewrite(
    engine: &Engine,
    handle: &TurnHandle,
    state: &mut TurnState,
    change: impl Fn(&mut InstanceDocument),
    deadline: Deadline,
) -> Result<Rewritten, StoreError> {
    loop {
        let mut next = state.document.clone();
        change(&mut next);
        let written =
            engine.store.replace(&handle.partition, &instance_id(), &next, Some(&state.etag), deadline).await?;
        if let WriteOutcome::Done(etag) = written {
            state.document = next;
            state.etag = etag;
            remember(engine, handle, state);
            return Ok(Rewritten::Done);
        }
        match engine.read_latest(&handle.partition, deadline).await? {
            // The write happened, and its answer was lost.
            Some(found) if is_there(&found.document, &next) => {
                state.refresh(found);
                remember(engine, handle, state);
                return Ok(Rewritten::Done);
            }
            Some(found) if found.document.held_by(&handle.token) => state.refresh(found),
            _ => {
                engine.cache.forget(&handle.partition);
                return Ok(Rewritten::Lost);
            }
        }
        if deadline.passed() {
            return Err(StoreError::Unavailable {
                detail: "other writers keep changing the instance document".to_owned(),
            });
        }
    }
}

/// Whether the found document is the one that we wrote. A new owner that has committed also leaves no lock and no
/// claims, so the last turn must agree too.
fn is_there(found: &InstanceDocument, next: &InstanceDocument) -> bool {
    found.claim.lock == next.claim.lock
        && found.claim.claims == next.claim.claims
        && found.commit.last_turn == next.commit.last_turn
}

/// Caches the document as we wrote it, with the loaded contents, for the next claim.
fn remember(engine: &Engine, handle: &TurnHandle, state: &TurnState) {
    let contents = state.contents.clone();
    let known = CachedInstance { document: state.document.clone(), etag: state.etag.clone(), contents };
    engine.cache.put(&handle.partition, known);
}

/// The document of an inlined message whose turn is abandoned. A delayed message keeps its attempts. Otherwise the
/// claims of the instance count them.
fn own_document(mut message: MessageDocument, delayed: bool) -> MessageDocument {
    if !delayed {
        message.attempts = 0;
    }
    message
}

/// Releases the lock, changes the given messages, and writes the inlined message as a document. Every batch contains
/// the fence, so a former owner delays nothing. The last batch removes the lock. After a crash in between the lock
/// expires.
async fn release_with(
    engine: &Engine,
    handle: &TurnHandle,
    state: &mut TurnState,
    (messages, inlined): (&[Versioned<MessageDocument>], Option<&MessageDocument>),
    change: impl Fn(&mut InstanceDocument),
    deadline: Deadline,
) -> Result<Rewritten, StoreError> {
    let mut chunks = chunked(messages)?;
    while let Some(mut chunk) = chunks.pop() {
        loop {
            let (mut next, mut out) = (state.document.clone(), None);
            if chunks.is_empty() {
                out = next.take_inlined().and(inlined);
                change(&mut next);
            }
            let mut operations = vec![Operation::replace(instance_id(), &next, Some(&state.etag))?];
            operations.extend(chunk.iter().cloned());
            if let Some(message) = out {
                operations.push(Operation::upsert(message)?);
            }
            match engine.store.batch(&handle.partition, &operations, deadline).await? {
                BatchOutcome::Committed(committed) => {
                    state.etag = committed.etag(0).cloned().unwrap_or_else(|| state.etag.clone());
                    state.document = next;
                    break;
                }
                // Another worker has consumed the message; this turn ran on a remembered copy.
                BatchOutcome::RolledBack(back)
                    if (1..=chunk.len()).contains(&back.index) && matches!(back.status, 404 | 412) =>
                {
                    chunk.remove(back.index - 1);
                }
                BatchOutcome::RolledBack(_) => match engine.read_latest(&handle.partition, deadline).await? {
                    Some(found) if found.document.held_by(&handle.token) => {
                        state.document = found.document;
                        state.etag = found.etag;
                    }
                    // The batch happened, and its answer was lost: the lock is free and the claims are as we left them.
                    Some(found) if is_there(&found.document, &next) => break,
                    _ => return Ok(Rewritten::Lost),
                },
            }
        }
    }
    engine.cache.forget(&handle.partition);
    Ok(Rewritten::Done)
}

/// Replacements of messages, in chunks that each fit a batch with the fence and an inlined message. Returns at least
/// one chunk.
pub(super) fn chunked(messages: &[Versioned<MessageDocument>]) -> Result<Vec<Vec<Operation>>, StoreError> {
    let replacement = |Versioned { document: message, etag }: &Versioned<MessageDocument>| {
        Operation::replace(message.id.clone(), message, Some(etag))
    };
    Ok(in_parts(messages.iter().map(replacement).collect::<Result<_, _>>()?))
}

/// Splits operations into chunks like [`chunked`].
pub(super) fn in_parts(operations: Vec<Operation>) -> Vec<Vec<Operation>> {
    let mut chunks: Vec<Vec<Operation>> = vec![Vec::new()];
    let mut bytes = 0;
    for operation in operations {
        let size = operation.size();
        let full = chunks.last().is_none_or(|c| c.len() + 3 > operation::MAX_OPERATIONS)
            || bytes + size > operation::MAX_BYTES - RESERVED_BYTES;
        if full {
            chunks.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
        if let Some(chunk) = chunks.last_mut() {
            chunk.push(operation);
        }
    }
    chunks
}

/// Releases a claim that found nothing to run. Removes the lock and the attempt.
pub(crate) async fn undo_claim(
    engine: &Engine,
    partition: &Partition,
    token: &str,
    document: InstanceDocument,
    etag: Etag,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let mut current = Some(Versioned { document, etag });
    while let Some(Versioned { mut document, etag }) = current.take() {
        if !document.held_by(token) {
            return Ok(());
        }
        document.claim.lock = None;
        document.claim.claims.pop();
        let inlined = document.take_inlined();
        // The claim created a document that has nothing but the lock. A document that marks deferred messages stays.
        let made_by_the_claim =
            document.is_placeholder() && document.claim.claims.is_empty() && !document.waiting.deferred;
        let mut operations = vec![match made_by_the_claim {
            true => Operation::delete(instance_id(), Some(&etag)),
            false => Operation::replace(instance_id(), &document, Some(&etag))?,
        }];
        if let Some(message) = &inlined {
            operations.push(Operation::upsert(message)?);
        }
        let outcome = engine.store.batch(partition, &operations, deadline).await?;
        engine.cache.forget(partition);
        match outcome {
            BatchOutcome::Committed(_) => {}
            BatchOutcome::RolledBack(_) => current = engine.read_latest(partition, deadline).await?,
        }
    }
    Ok(())
}

/// Releases a claim in the background, for a caller that has gone away or has no use for it. The lock ends at `until`
/// or earlier. The ready queue offers the turn again at `due`.
pub(crate) fn release_claim_later(
    engine: &Arc<Engine>,
    partition: &Partition,
    token: String,
    until: Millis,
    due: Millis,
) {
    let (engine_too, partition) = (engine.clone(), partition.clone());
    engine.cache.forget(&partition);
    engine.spawn(async move {
        let (engine, partition, token) = (&engine_too, &partition, &token);
        let released = engine.until_released(until, |deadline| release_claim(engine, partition, token, deadline)).await;
        log_failure(partition, released);
        engine.discovery.turn_returned(partition, due);
    });
}

/// Releases a claim whose write may have happened or may still happen. A task watches the document until the lock would
/// end, or until the document is no longer the one on which the write depends.
pub(crate) fn release_unknown_claim(
    engine: &Arc<Engine>,
    pending: &InstanceDocument,
    token: String,
    condition: Option<Etag>,
    due: Millis,
) {
    let (engine_too, partition) = (engine.clone(), pending.instance_id.clone());
    let until = pending.claim.lock.as_ref().map_or(0, |lock| lock.until);
    engine.cache.forget(&partition);
    engine.spawn(async move {
        let (engine, partition, token) = (&engine_too, &partition, &token);
        engine.until_settled(partition, &instance_id(), condition.as_ref(), until).await;
        let released = engine.until_released(until, |deadline| release_claim(engine, partition, token, deadline)).await;
        log_failure(partition, released);
        engine.discovery.turn_returned(partition, due);
    });
}

fn log_failure(partition: &Partition, outcome: Result<(), StoreError>) {
    if let Err(error) = outcome {
        warn!(instance_id = partition.instance_id(), %error, "could not release a claim, its lock will expire");
    }
}

/// Releases a claim without counting an attempt, if its token still has the lock.
pub(crate) async fn release_claim(
    engine: &Engine,
    partition: &Partition,
    token: &str,
    deadline: Deadline,
) -> Result<(), StoreError> {
    engine.turns.remove(token);
    if let Some(Versioned { document, etag }) = engine.read_latest(partition, deadline).await? {
        undo_claim(engine, partition, token, document, etag, deadline).await?;
    }
    debug!(instance_id = partition.instance_id(), "released a claim");
    Ok(())
}
