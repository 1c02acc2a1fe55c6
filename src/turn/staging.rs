//! Turns that do not fit into one batch.
//!
//! 1. The worker writes the operations into staging documents, which no query takes for messages, activities or
//!    history. It writes each part in one batch with the instance document, on condition of the fence. The instance
//!    document lists the parts (`staging`), and each batch renews the lock.
//! 2. The commit is the one write that turns this entry into `rollForward`, with the number of parts.
//! 3. After the commit a worker applies the parts in order. One batch applies a part, deletes it and advances
//!    `rollForward.next`, on condition of the instance document. So each part is applied exactly once, whichever worker
//!    comes first, and a missing part is detected.
//!
//! Crash points:
//!
//! - Before the commit the parts have no effect. The next claim deletes the parts that `staging` lists, under its own
//!   fence.
//! - After the commit, any process that reads, claims or polls the instance first rolls it forward.

use super::{cache::CachedInstance, claim::ClaimedInstance, instance_id, TurnHandle, TurnState, RESERVED_BYTES};
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

/// How long the committing process has to roll the turn forward before other processes take over.
pub(crate) const TAKEOVER_AFTER: Millis = 3_000;

/// How staging ended.
pub(crate) enum Staged {
    /// The value that the commit stores in `rollForward`.
    Done(RollForwardProgress),
    /// Another token has the lock.
    Lost,
}

/// Stages `operations` under the fence, which moves with every part. The key is new each time. Otherwise parts of an
/// earlier, rejected ack with the same token could be taken for parts of this one.
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
        let entry = Staging { key: roll_forward.key.clone(), parts: number + 1 };
        if !stage_part(engine, handle, state, &staged, &entry).await? {
            return Ok(Staged::Lost);
        }
    }
    Ok(Staged::Done(roll_forward))
}

/// Splits operations into parts. Each fits into one batch with the fence and the deletion of its own staging document.
fn split(operations: &[Operation]) -> Vec<Vec<Operation>> {
    let mut parts: Vec<Vec<Operation>> = Vec::new();
    let mut bytes = 0;
    for operation in operations {
        let size = operation.size();
        let full = parts.last().is_none_or(|part| {
            part.len() + 3 > operation::MAX_OPERATIONS || bytes + size > operation::MAX_BYTES - RESERVED_BYTES
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

/// Writes one part, lists it in the instance document and renews the lock. Returns `false` if another token has the
/// lock.
async fn stage_part(
    engine: &Engine,
    handle: &TurnHandle,
    state: &mut TurnState,
    staged: &StagedDocument,
    entry: &Staging,
) -> Result<bool, StoreError> {
    loop {
        let deadline = engine.deadline_at(state.until);
        let until = engine.now().saturating_add(millis(state.runner.terms.lock_timeout));
        let mut document = state.document.clone();
        document.lock(&handle.token, until);
        document.commit.staging.retain(|other| other.key != entry.key);
        document.commit.staging.push(entry.clone());
        // An upsert, because an earlier request without an answer may have written this part.
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
                // This worker still has the lock. Either this part was written and the answer lost, or another writer
                // changed the document.
                state.until = found.document.claim.lock.as_ref().map_or(state.until, |lock| lock.until);
                state.refresh(found);
            }
            BatchOutcome::RolledBack(back) => {
                let detail = format!("Cosmos DB answered {} for a staged part", back.status);
                return Err(StoreError::Rejected { document: staged.id.to_string(), detail });
            }
        }
    }
}

/// The instances that this process is rolling forward. One call at a time does it for an instance, because several
/// would only make each other's batches fail.
#[derive(Default)]
pub(crate) struct RollForwards(DashMap<Partition, Arc<Mutex<()>>>);

/// The permission to roll one instance forward.
struct RollForward<'a> {
    roll_forwards: &'a RollForwards,
    partition: &'a Partition,
    guard: Option<OwnedMutexGuard<()>>,
}

impl RollForwards {
    /// Whether a call of this process is rolling the instance forward.
    pub(crate) fn in_progress(&self, partition: &Partition) -> bool {
        self.0.contains_key(partition)
    }

    /// Waits until no call of this process is rolling the instance forward.
    pub(crate) async fn wait(&self, partition: &Partition, deadline: Deadline) -> Result<(), StoreError> {
        self.join(partition, deadline).await.map(drop)
    }

    /// Waits for the permission to roll the instance forward.
    async fn join<'a>(&'a self, partition: &'a Partition, deadline: Deadline) -> Result<RollForward<'a>, StoreError> {
        let mut roll = RollForward { roll_forwards: self, partition, guard: None };
        let lock = self.0.entry(partition.clone()).or_default().clone();
        let unavailable =
            |_| StoreError::Unavailable { detail: "the roll-forward of an earlier turn takes too long".to_owned() };
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

/// Applies the staged parts of a committed turn. It may be called at any time, and several times at once. Returns the
/// document after the last part if this call applied that part.
pub(crate) async fn roll_forward(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let _roll = engine.roll_forwards.join(partition, deadline).await?;
    let mut current = engine.read_latest(partition, deadline).await?;
    // The part that the last read did not find.
    let mut missing = None;
    let mut applied = false;
    while let Some(found) = current.take() {
        let Some(roll_forward) = found.document.commit.roll_forward.clone() else {
            return Ok(applied.then_some(found));
        };
        applied = false;
        let id = StagedDocument::document_id(&roll_forward.key, roll_forward.next);
        let part = engine.store.read::<StagedDocument>(partition, &id, Freshness::Authoritative, deadline).await?;
        current = match part {
            Some(part) => apply(engine, found, &roll_forward, part.document, &mut applied, deadline).await?,
            // Another process may have applied the part since the document was read.
            None if missing.as_ref() != Some(&roll_forward) => {
                missing = Some(roll_forward);
                engine.read_latest(partition, deadline).await?
            }
            None => return Err(lost_part(partition, &roll_forward)),
        };
    }
    Ok(None)
}

/// The error for an unapplied part that does not exist. Only a writer outside this provider can have deleted it.
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

/// Applies one part, deletes it and advances the roll-forward, in one batch. Returns the document afterwards, and sets
/// `applied` if this call wrote it.
async fn apply(
    engine: &Arc<Engine>,
    found: Versioned<InstanceDocument>,
    roll_forward: &RollForwardProgress,
    part: StagedDocument,
    applied: &mut bool,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let partition = &part.instance_id;
    let next = advanced(&found.document, roll_forward);
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
                engine
                    .cache
                    .put(partition, CachedInstance { document: next.clone(), etag: etag.clone(), contents: None });
                return Ok(Some(Versioned { document: next, etag }));
            }
            BatchOutcome::RolledBack(back) if back.index == 0 || back.index > operations.len() => {
                // Another process has applied the part or changed the document.
                return engine.read_latest(partition, deadline).await;
            }
            BatchOutcome::RolledBack(back) => adapt(&mut operations, &back)?,
        }
    }
}

/// The document once the next part is applied.
fn advanced(document: &InstanceDocument, roll_forward: &RollForwardProgress) -> InstanceDocument {
    let mut next = document.clone();
    if roll_forward.next + 1 < roll_forward.parts {
        next.commit.roll_forward = Some(RollForwardProgress { next: roll_forward.next + 1, ..roll_forward.clone() });
        return next;
    }
    next.commit.roll_forward = None;
    if !next.needs_recovery() {
        next.due = None;
    }
    next
}

/// Changes the operation that failed so that the part can be applied. The turn is committed, so the state of a document
/// cannot undo it. For example, a document that is already deleted needs no deletion.
fn adapt(operations: &mut Vec<Operation>, back: &RolledBack) -> Result<(), StoreError> {
    let index = back.index - 1;
    let document = match (&operations[index], back.status) {
        (Operation::Delete { .. } | Operation::Replace { .. }, 404 | 412) => {
            operations.remove(index);
            return Ok(());
        }
        (Operation::Create { document }, 409) => document.clone(),
        (operation, status) => {
            let document = operation.document_id();
            let detail = format!("Cosmos DB answered {status} for document {document} during a roll-forward");
            return Err(StoreError::Malformed { detail });
        }
    };
    operations[index] = Operation::Upsert { document };
    Ok(())
}

/// Deletes the staging documents of turns that were never committed, as the instance document lists them. The deletion
/// is conditional on the document as our claim wrote it. So a claim that has lost its lock cannot delete the parts of
/// its successor.
pub(super) async fn delete_uncommitted(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    deadline: Deadline,
) -> Result<(), StoreError> {
    while let Some(entry) = claimed.document.commit.staging.last().cloned() {
        info!(partition = %claimed.document.instance_id, parts = entry.parts, "deleting parts of an uncommitted turn");
        delete_chunk(engine, claimed, entry, deadline).await?;
    }
    Ok(())
}

/// Deletes the last parts of an entry and removes them from the entry, in one batch.
async fn delete_chunk(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    entry: Staging,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let left = entry.parts.saturating_sub(operation::MAX_OPERATIONS - 1);
    let mut chunk: Vec<DocumentId> =
        (left..entry.parts).map(|part| StagedDocument::document_id(&entry.key, part)).collect();
    let mut next = claimed.document.clone();
    next.commit.staging.pop();
    if left > 0 {
        next.commit.staging.push(Staging { parts: left, ..entry });
    }
    if !next.needs_recovery() {
        next.due = None;
    }
    loop {
        let mut operations = vec![Operation::replace(instance_id(), &next, Some(&claimed.etag))?];
        operations.extend(chunk.iter().map(|id| Operation::delete(id.clone(), None)));
        match engine.store.batch(&next.instance_id, &operations, deadline).await? {
            BatchOutcome::Committed(committed) => {
                (claimed.document, claimed.etag) = (next, committed.fence()?);
                return Ok(());
            }
            BatchOutcome::RolledBack(RolledBack { index, status: 404, .. }) if index > 0 => {
                chunk.remove(index - 1);
            }
            // Either the batch happened and its answer was lost, or another writer changed the document. The entry
            // tells.
            BatchOutcome::RolledBack(_) => return claimed.refresh(engine, deadline).await,
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
    async fn one_call_at_a_time_rolls_an_instance_forward_and_leaves_no_entry_behind() {
        let (roll_forwards, a, b) =
            (RollForwards::default(), Partition::instance("a").unwrap(), Partition::instance("b").unwrap());
        let soon = || Deadline::after(std::time::Duration::from_secs(1));
        let first = roll_forwards.join(&a, soon()).await.unwrap();
        assert!(roll_forwards.in_progress(&a) && !roll_forwards.in_progress(&b));
        drop(roll_forwards.join(&b, soon()).await.unwrap());
        assert!(roll_forwards.join(&a, soon()).await.is_err(), "it waits no longer than its time");
        let second = roll_forwards.join(&a, soon());
        tokio::pin!(second);
        assert!(futures::poll!(&mut second).is_pending());
        drop(first);
        assert!(roll_forwards.in_progress(&a));
        drop(second.await.unwrap());
        assert!(!roll_forwards.in_progress(&a) && roll_forwards.0.is_empty());
    }

    #[test]
    fn every_part_fits_into_a_batch_with_its_deletion_and_the_fence() {
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
