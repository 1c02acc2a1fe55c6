//! Turns that do not fit one batch.
//!
//! What does not fit is staged: written into documents that no query takes for messages, activities or history. Each part is
//! written in a batch with the instance's document, conditional on the fence, which notes the part (`staging`) and renews
//! the lock. The commit then is the one write that turns the note into `roll_forward`, with the number of parts. After it, the
//! parts are applied in order, each by one batch that deletes it and moves `roll_forward.next`, conditional on the instance's
//! document: so exactly once, by whoever comes first, and a part that is not there is known to be missing.
//!
//! Crash points: before the commit, the parts are dead: the next claim sweeps what the note names, under its own fence. After
//! it, whoever reads, claims or polls the instance roll_forwards it forward before anything else.

use super::{cache::Known, claim::Ours, instance_id, TurnHandle, TurnState, ROOM};
use crate::model::operation;
use crate::{
    cosmos::{BatchOutcome, Deadline, Freshness, RolledBack, StoreError, Versioned},
    discovery,
    engine::Engine,
    model::{
        clock::millis, DocumentId, InstanceDocument, Millis, Operation, Partition, RollForwardProgress, StagedDocument,
        Staging,
    },
};
use dashmap::DashMap;
use std::sync::Arc;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tracing::{debug, info};

/// How long the process that committed has for roll_forward forward before others look after it.
pub(crate) const TAKEOVER_AFTER: Millis = 3_000;

/// How staging ended.
pub(crate) enum Staged {
    /// What the commit puts into `roll_forward`.
    Done(RollForwardProgress),
    /// Another token has the lock.
    Lost,
}

/// Stages `operations` under the fence, which moves with every part. Their key is new each time: parts that an earlier
/// ack with the same token has left behind, one that was refused, must not be taken for parts of this one.
pub(crate) async fn stage(
    engine: &Engine,
    handle: &TurnHandle,
    state: &mut TurnState,
    operations: &[Operation],
) -> Result<Staged, StoreError> {
    let parts = split(operations);
    debug!(instance_id = handle.partition.instance_id(), parts = parts.len(), "staging a large turn");
    let roll_forward = RollForwardProgress { key: engine.new_token(), parts: parts.len(), next: 0 };
    for (number, part) in parts.into_iter().enumerate() {
        let staged = StagedDocument::new(handle.partition.clone(), &roll_forward.key, number, part);
        let note = Staging { key: roll_forward.key.clone(), parts: number + 1 };
        if !stage_part(engine, handle, state, &staged, &note).await? {
            return Ok(Staged::Lost);
        }
    }
    Ok(Staged::Done(roll_forward))
}

/// Parts that each fit one together with the fence and the operation that deletes their document.
fn split(operations: &[Operation]) -> Vec<Vec<Operation>> {
    let mut parts: Vec<Vec<Operation>> = Vec::new();
    let mut bytes = 0;
    for operation in operations {
        let size = operation.size();
        let full = parts.last().is_none_or(|part| {
            part.len() + 3 > operation::MAX_OPERATIONS || bytes + size > operation::MAX_BYTES - ROOM
        });
        if full {
            parts.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
        if let Some(part) = parts.last_mut() {
            part.push(operation.clone());
        }
    }
    parts
}

/// Writes one part, notes it and renews the lock with it; `false` where another token has the lock.
async fn stage_part(
    engine: &Engine,
    handle: &TurnHandle,
    state: &mut TurnState,
    staged: &StagedDocument,
    note: &Staging,
) -> Result<bool, StoreError> {
    loop {
        let deadline = engine.deadline_at(state.until);
        let until = engine.now().saturating_add(millis(state.runner.terms.lock_timeout));
        let mut document = state.document.clone();
        document.hold(&handle.token, until);
        document.staging.retain(|other| other.key != note.key);
        document.staging.push(note.clone());
        // An attempt whose answer was lost may have written this part already.
        let operations = [Operation::replace(instance_id(), &document, Some(&state.etag))?, Operation::upsert(staged)?];
        match engine.store.batch(&handle.partition, &operations, deadline).await? {
            BatchOutcome::Committed(committed) => {
                state.etag = committed.fence()?;
                state.document = document;
                state.until = until;
                return Ok(true);
            }
            BatchOutcome::RolledBack(RolledBack { index: 0, status: 404 | 412, .. }) => {
                let Some(found) = engine.read_latest(&handle.partition, deadline).await? else {
                    return Ok(false);
                };
                if !found.document.held_by(&handle.token) {
                    return Ok(false);
                }
                // Ours still: either this part was written with its answer lost, or something else touched the document.
                state.until = found.document.lock.as_ref().map_or(state.until, |lock| lock.until);
                state.refresh(found);
            }
            BatchOutcome::RolledBack(back) => {
                let detail = format!("a staged part was answered {}", back.status);
                return Err(StoreError::Rejected { document: staged.id.to_string(), detail });
            }
        }
    }
}

/// The instances that this process roll_forwards forward. Several that do it at once only refuse each other's batches, so one does.
#[derive(Default)]
pub(crate) struct RollForwards(DashMap<Partition, Arc<Mutex<()>>>);

/// The turn of one that roll_forwards forward.
struct RollForward<'a> {
    roll_forwards: &'a RollForwards,
    partition: &'a Partition,
    guard: Option<OwnedMutexGuard<()>>,
}

impl RollForwards {
    /// Whether somebody here roll_forwards this instance forward.
    pub(crate) fn is_under_way(&self, partition: &Partition) -> bool {
        self.0.contains_key(partition)
    }

    /// Waits while somebody here roll_forwards this instance forward.
    pub(crate) async fn wait(&self, partition: &Partition, deadline: Deadline) -> Result<(), StoreError> {
        self.join(partition, deadline).await.map(drop)
    }

    /// The turn of a call that roll_forwards this instance forward, after those before it.
    async fn join<'a>(&'a self, partition: &'a Partition, deadline: Deadline) -> Result<RollForward<'a>, StoreError> {
        let mut roll = RollForward { roll_forwards: self, partition, guard: None };
        let lock = self.0.entry(partition.clone()).or_default().clone();
        let unavailable =
            |_| StoreError::Unavailable { detail: "a turn that is rolled forward does not end".to_owned() };
        roll.guard = Some(tokio::time::timeout_at(deadline.instant(), lock.lock_owned()).await.map_err(unavailable)?);
        Ok(roll)
    }
}

impl Drop for RollForward<'_> {
    fn drop(&mut self) {
        self.guard = None;
        self.roll_forwards.0.remove_if(self.partition, |_, lock| Arc::strong_count(lock) == 1);
    }
}

/// Applies what a committed turn staged. Safe to call at any time, by several at once. The document after the last part, where
/// it was applied here.
pub(crate) async fn roll_forward(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let _roll = engine.roll_forwards.join(partition, deadline).await?;
    let mut current = engine.read_latest(partition, deadline).await?;
    // The part that was not there at the last look.
    let mut missing = None;
    let mut applied = false;
    while let Some(found) = current.take() {
        let Some(roll_forward) = found.document.roll_forward.clone() else { return Ok(applied.then_some(found)) };
        applied = false;
        let id = StagedDocument::document_id(&roll_forward.key, roll_forward.next);
        let part = engine.store.read::<StagedDocument>(partition, &id, Freshness::Authoritative, deadline).await?;
        current = match part {
            Some(part) => apply(engine, found, &roll_forward, part.document, &mut applied, deadline).await?,
            // Somebody else may have applied it since the document was read.
            None if missing.as_ref() != Some(&roll_forward) => {
                missing = Some(roll_forward);
                engine.read_latest(partition, deadline).await?
            }
            None => return Err(lost_part(partition, &roll_forward)),
        };
    }
    Ok(None)
}

/// A part that nobody has applied and that is not there: something outside this provider has deleted it.
fn lost_part(partition: &Partition, roll_forward: &RollForwardProgress) -> StoreError {
    let RollForwardProgress { key, parts, next } = roll_forward;
    StoreError::Malformed {
        detail: format!(
            "part {} of {parts} of the committed turn {key} of {partition} is missing: restore the document {}, or \
             delete the instance",
            next + 1,
            StagedDocument::document_id(key, *next)
        ),
    }
}

/// Applies one part, deletes it and moves on, in one batch. The document after that, and whether it was done here.
async fn apply(
    engine: &Arc<Engine>,
    found: Versioned<InstanceDocument>,
    roll_forward: &RollForwardProgress,
    part: StagedDocument,
    applied: &mut bool,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let partition = &part.instance_id;
    let next = moved_on(&found.document, roll_forward);
    let mut operations = part.operations;
    loop {
        let mut whole = Vec::with_capacity(operations.len() + 2);
        whole.push(Operation::replace(instance_id(), &next, Some(&found.etag))?);
        whole.extend(operations.iter().cloned());
        whole.push(Operation::delete(part.id.clone(), None));
        match engine.store.batch(partition, &whole, deadline).await? {
            BatchOutcome::Committed(committed) => {
                debug!(instance_id = partition.instance_id(), part = roll_forward.next, "rolled forward");
                let etag = committed.fence()?;
                *applied = true;
                discovery::announce(engine, partition, &operations, &committed, 1);
                engine.cache.put(partition, Known { document: next.clone(), etag: etag.clone(), contents: None });
                return Ok(Some(Versioned { document: next, etag }));
            }
            BatchOutcome::RolledBack(back) if back.index == 0 || back.index > operations.len() => {
                // Somebody else has applied it, or has changed the document.
                return engine.read_latest(partition, deadline).await;
            }
            BatchOutcome::RolledBack(back) => mend(&mut operations, &back)?,
        }
    }
}

/// The document once the next part is applied.
fn moved_on(document: &InstanceDocument, roll_forward: &RollForwardProgress) -> InstanceDocument {
    let mut next = document.clone();
    if roll_forward.next + 1 < roll_forward.parts {
        next.roll_forward = Some(RollForwardProgress { next: roll_forward.next + 1, ..roll_forward.clone() });
        return next;
    }
    next.roll_forward = None;
    if !next.needs_recovery() {
        next.due = None;
    }
    next
}

/// The turn is committed, so what its operations meet can't undo it: a document that is gone already needs no deletion.
fn mend(operations: &mut Vec<Operation>, back: &RolledBack) -> Result<(), StoreError> {
    let index = back.index - 1;
    let document = match (&operations[index], back.status) {
        (Operation::Delete { .. } | Operation::Replace { .. }, 404 | 412) => {
            operations.remove(index);
            return Ok(());
        }
        (Operation::Create { document }, 409) => document.clone(),
        (operation, status) => {
            let detail = format!("{} was answered {status} while a turn was rolled forward", operation.document_id());
            return Err(StoreError::Malformed { detail });
        }
    };
    operations[index] = Operation::Upsert { document };
    Ok(())
}

/// Deletes what turns that were never committed have staged: what the document notes, as long as it is as our claim wrote it.
/// So a claim that was overtaken can't delete what its successor stages.
pub(super) async fn sweep(engine: &Engine, ours: &mut Ours, deadline: Deadline) -> Result<(), StoreError> {
    while let Some(note) = ours.document.staging.last().cloned() {
        info!(partition = %ours.document.instance_id, parts = note.parts, "sweeping what a dead turn staged");
        sweep_chunk(engine, ours, note, deadline).await?;
    }
    Ok(())
}

/// Deletes the last parts of a note, and takes them off it, in one batch.
async fn sweep_chunk(engine: &Engine, ours: &mut Ours, note: Staging, deadline: Deadline) -> Result<(), StoreError> {
    let left = note.parts.saturating_sub(operation::MAX_OPERATIONS - 1);
    let mut chunk: Vec<DocumentId> =
        (left..note.parts).map(|part| StagedDocument::document_id(&note.key, part)).collect();
    let mut next = ours.document.clone();
    next.staging.pop();
    if left > 0 {
        next.staging.push(Staging { parts: left, ..note });
    }
    if !next.needs_recovery() {
        next.due = None;
    }
    loop {
        let mut operations = vec![Operation::replace(instance_id(), &next, Some(&ours.etag))?];
        operations.extend(chunk.iter().map(|id| Operation::delete(id.clone(), None)));
        match engine.store.batch(&next.instance_id, &operations, deadline).await? {
            BatchOutcome::Committed(committed) => {
                (ours.document, ours.etag) = (next, committed.fence()?);
                return Ok(());
            }
            BatchOutcome::RolledBack(RolledBack { index, status: 404, .. }) if index > 0 => {
                chunk.remove(index - 1);
            }
            // Done with its answer lost, or something else has touched the document: the note tells.
            BatchOutcome::RolledBack(_) => return ours.look_again(engine, deadline).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn creations(count: usize, bytes: usize) -> Vec<Operation> {
        (0..count)
            .map(|n| Operation::Create { document: json!({"id": format!("d{n}"), "text": "x".repeat(bytes)}) })
            .collect()
    }

    #[tokio::test(start_paused = true)]
    async fn one_call_of_a_process_rolls_an_instance_forward_and_none_leaves_anything_behind() {
        let (roll_forwards, a, b) =
            (RollForwards::default(), Partition::instance("a").unwrap(), Partition::instance("b").unwrap());
        let soon = || Deadline::after(std::time::Duration::from_secs(1));
        let first = roll_forwards.join(&a, soon()).await.unwrap();
        assert!(roll_forwards.is_under_way(&a) && !roll_forwards.is_under_way(&b));
        drop(roll_forwards.join(&b, soon()).await.unwrap());
        assert!(roll_forwards.join(&a, soon()).await.is_err(), "it waits no longer than its time");
        let second = roll_forwards.join(&a, soon());
        tokio::pin!(second);
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        assert!(roll_forwards.is_under_way(&a));
        drop(second.await.unwrap());
        assert!(!roll_forwards.is_under_way(&a) && roll_forwards.0.is_empty());
    }

    #[test]
    fn every_part_fits_a_batch_with_its_own_deletion_and_the_fence_and_nothing_is_left_out() {
        for (count, bytes) in [(1, 10), (98, 10), (99, 10), (1_000, 10), (30, 100_000), (5, 1_900_000)] {
            let operations = creations(count, bytes);
            let parts = split(&operations);
            assert_eq!(parts.concat(), operations);
            for part in parts {
                assert!(part.len() + 2 <= operation::MAX_OPERATIONS);
                let size: usize = part.iter().map(Operation::size).sum();
                assert!(size + 32 * 1024 <= operation::MAX_BYTES, "{count} of {bytes}: {size}");
            }
        }
    }
}
