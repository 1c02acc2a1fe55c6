//! Giving a turn back, renewing its lock, and cleaning up after a claim that came to nothing.

use super::{cache::Known, instance_id, lock_lost, TurnHandle, TurnPhase, TurnState, ROOM};
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
        return Err(lock_lost(OPERATION, "it has expired or was given up"));
    }
    let deadline = engine.deadline_at(state.until);
    let until = engine.clock.after(extend_for);
    let change = |document: &mut InstanceDocument| {
        document.hold(token, until);
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
        document.give_up(due);
        if ignore_attempt {
            document.claims.pop();
        }
    };
    if delay.is_some() {
        // Claims so far are among its attempts now, whatever the clock says.
        let counted = state.document.claims.last().map_or(0, |last| last + 1);
        for Versioned { document: message, .. } in &mut returned {
            message.due = due;
            message.created_at = message.created_at.max(counted);
        }
    }
    let is_enclosed = |message: &MessageDocument| state.document.has_inlined(&message.id);
    let inlined = returned.iter().map(|message| &message.document).find(|message| is_enclosed(message)).cloned();
    let rewritten = delay.is_some() || inlined.is_some();
    let outcome = if rewritten {
        let changed: Vec<_> =
            returned.iter().filter(|m| delay.is_some() && !is_enclosed(&m.document)).cloned().collect();
        let inlined = inlined.map(|message| written_out(message, delay.is_some()));
        let messages = (changed.as_slice(), inlined.as_ref());
        release_with(engine, &handle, &mut state, messages, change, deadline).await
    } else {
        rewrite(engine, &handle, &mut state, change, deadline).await
    };
    match outcome {
        Ok(Rewritten::Done) => {
            close(engine, &handle, &mut state);
            // What was rewritten has another ETag now, which nobody has asked for.
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

/// Nothing more can be done with this token.
pub(crate) fn close(engine: &Engine, handle: &TurnHandle, state: &mut TurnState) {
    state.phase = TurnPhase::Closed;
    engine.turns.remove(&handle.token);
}

/// The turn was lost. Its messages are another's now; where a deletion took the lock off and was taken back, they are in the
/// queue, and a poll that returns them brings news.
pub(crate) fn forget_turn(engine: &Engine, handle: &TurnHandle, state: &TurnState) {
    engine.discovery.taken(&handle.partition, state.taken.iter().map(|taken| &taken.document.id), 0);
    engine.discovery.turn_ended(&handle.partition);
}

/// How a change to the instance's document under our lock ended.
pub(crate) enum Rewritten {
    Done,
    /// Another token has the lock.
    Lost,
}

/// Changes the instance's document as long as our token is in it. A 412 is a loss only when a read shows another token.
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
            // A change that was made with its answer lost: it is there already.
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
            return Err(StoreError::Unavailable { detail: "the instance's document keeps changing".to_owned() });
        }
    }
}

/// Whether what was found is what we wrote. A new owner that has committed leaves no lock and no claims either.
fn is_there(found: &InstanceDocument, next: &InstanceDocument) -> bool {
    found.lock == next.lock && found.claims == next.claims && found.last_turn == next.last_turn
}

/// Keeps the document as we wrote it, with what goes with it, for the next claim.
fn remember(engine: &Engine, handle: &TurnHandle, state: &TurnState) {
    let contents = state.contents.clone();
    let known = Known { document: state.document.clone(), etag: state.etag.clone(), contents };
    engine.cache.put(&handle.partition, known);
}

/// An inlined message as it is written when the turn that has it is abandoned. Only where it is delayed its attempts are its own: the
/// others are counted by the claims of the instance.
fn written_out(mut message: MessageDocument, delayed: bool) -> MessageDocument {
    if !delayed {
        message.attempts = 0;
    }
    message
}

/// Releases the lock and changes the messages that this fetch took, and no others; the one that was inlined is written. Every batch
/// carries the fence, so that a former owner delays nothing; the last one takes the lock off. A crash in between leaves the lock to
/// expire.
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
                // Consumed by others, while this turn ran on what it remembered of it.
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
                    // Done with its answer lost: nobody has the lock, and the claims are as we left them.
                    Some(found) if is_there(&found.document, &next) => break,
                    _ => return Ok(Rewritten::Lost),
                },
            }
        }
    }
    engine.cache.forget(&handle.partition);
    Ok(Rewritten::Done)
}

/// Replacements of messages, in parts that fit a batch together with the fence and a message that was inlined; at least one part.
pub(super) fn chunked(messages: &[Versioned<MessageDocument>]) -> Result<Vec<Vec<Operation>>, StoreError> {
    let replacement = |Versioned { document: message, etag }: &Versioned<MessageDocument>| {
        Operation::replace(message.id.clone(), message, Some(etag))
    };
    Ok(in_parts(messages.iter().map(replacement).collect::<Result<_, _>>()?))
}

/// The same of any operations.
pub(super) fn in_parts(operations: Vec<Operation>) -> Vec<Vec<Operation>> {
    let mut chunks: Vec<Vec<Operation>> = vec![Vec::new()];
    let mut bytes = 0;
    for operation in operations {
        let size = operation.size();
        let full = chunks.last().is_none_or(|c| c.len() + 3 > operation::MAX_OPERATIONS)
            || bytes + size > operation::MAX_BYTES - ROOM;
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

/// Takes a claim back that came to nothing: the lock goes, and the attempt with it.
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
        document.lock = None;
        document.claims.pop();
        let inlined = document.take_inlined();
        // A document that holds nothing but the lock was made by the claim. One that fingerprints deferred messages stays.
        let made_by_the_claim = document.is_placeholder() && document.claims.is_empty() && !document.deferred;
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

/// Gives a claim back in the background, for a caller that went away or has no use for it. Its lock ends at `until` or
/// earlier. The turn is tried again at `due`.
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
        note_failure(partition, released);
        engine.discovery.turn_returned(partition, due);
    });
}

/// Gives a claim back whose write may have happened, or may yet happen: until its lock would end, or the document is not the
/// one any more that the write depends on.
pub(crate) fn release_unknown_claim(
    engine: &Arc<Engine>,
    wanted: &InstanceDocument,
    token: String,
    condition: Option<Etag>,
    due: Millis,
) {
    let (engine_too, partition) = (engine.clone(), wanted.instance_id.clone());
    let until = wanted.lock.as_ref().map_or(0, |lock| lock.until);
    engine.cache.forget(&partition);
    engine.spawn(async move {
        let (engine, partition, token) = (&engine_too, &partition, &token);
        engine.until_settled(partition, &instance_id(), condition.as_ref(), until).await;
        let released = engine.until_released(until, |deadline| release_claim(engine, partition, token, deadline)).await;
        note_failure(partition, released);
        engine.discovery.turn_returned(partition, due);
    });
}

fn note_failure(partition: &Partition, outcome: Result<(), StoreError>) {
    if let Err(error) = outcome {
        warn!(instance_id = partition.instance_id(), %error, "a claim could not be given back: its lock expires");
    }
}

/// Gives a claim back, uncounted, if its token is still the lock's.
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
    debug!(instance_id = partition.instance_id(), "gave a claim back");
    Ok(())
}
