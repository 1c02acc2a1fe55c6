//! Turns that do not fit one batch.
//!
//! What does not fit is staged: written into documents that no query takes for messages, activities or history. Each part is
//! written in a batch with the instance's document, conditional on the fence, which also renews the lock. The commit then is
//! the one write that sets `rolling` to the turn's token. After it, each part is applied by one batch that also deletes
//! it, so that a part is applied exactly once, by whoever comes first.
//!
//! Crash points: before the commit, the parts are dead: the next claim sweeps them. After it, whoever reads, claims or polls
//! the instance rolls it forward before anything else.

use super::{cache::Known, instance_id, release, TurnHandle, TurnState};
use crate::{
    engine::Engine,
    model::{clock::millis, DocumentId, Lock, Millis, Partition, StagedDocument},
    store::{batch, queries, BatchOutcome, Deadline, Operation, RolledBack, StoreError, Versioned, WriteOutcome},
};
use std::sync::Arc;
use tracing::{debug, warn};

/// How long the process that committed has for rolling forward before others look after it.
pub(crate) const TAKEOVER_AFTER: Millis = 3_000;

/// How staging ended.
pub(crate) enum Staged {
    /// Under this key, which the commit puts into `rolling`.
    Done(String),
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
    deadline: Deadline,
) -> Result<Staged, StoreError> {
    let _ = deadline;
    let parts = split(operations);
    debug!(instance_id = handle.partition.instance_id(), parts = parts.len(), "staging a large turn");
    let key = Engine::new_token();
    for (number, part) in parts.into_iter().enumerate() {
        let staged = StagedDocument::new(handle.partition.clone(), &key, number, part);
        if !stage_part(engine, handle, state, &staged).await? {
            return Ok(Staged::Lost);
        }
    }
    Ok(Staged::Done(key))
}

/// Parts that each fit one batch, together with the operation that deletes their document.
fn split(operations: &[Operation]) -> Vec<Vec<Operation>> {
    const ROOM: usize = batch::MAX_BYTES - 8 * 1024;
    let mut parts: Vec<Vec<Operation>> = Vec::new();
    let mut bytes = 0;
    for operation in operations {
        let size = operation.size();
        let full = parts.last().is_none_or(|part| part.len() + 2 > batch::MAX_OPERATIONS || bytes + size > ROOM);
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

/// Writes one part and renews the lock with it; `false` where another token has the lock.
async fn stage_part(
    engine: &Engine,
    handle: &TurnHandle,
    state: &mut TurnState,
    staged: &StagedDocument,
) -> Result<bool, StoreError> {
    loop {
        let deadline = engine.deadline_at(state.until);
        let until = engine.now().saturating_add(millis(state.lock_timeout));
        let mut document = state.document.clone();
        document.lock = Some(Lock { token: handle.token.clone(), until });
        // An attempt whose answer was lost may have written this part already.
        let operations = [Operation::replace(instance_id(), &document, Some(&state.etag))?, Operation::upsert(staged)?];
        match engine.store.batch(&handle.partition, &operations, deadline).await? {
            BatchOutcome::Committed(committed) => {
                let etag = committed.etag(0).cloned();
                state.etag = etag.ok_or_else(|| StoreError::Malformed { detail: "no ETag in a batch".to_owned() })?;
                state.document = document;
                state.until = until;
                return Ok(true);
            }
            BatchOutcome::RolledBack(RolledBack { index: 0, .. }) => {
                let Some(found) = release::read_latest(engine, &handle.partition, deadline).await? else {
                    return Ok(false);
                };
                if !found.document.held_by(&handle.token) {
                    return Ok(false);
                }
                // Ours still: either this part was written with its answer lost, or something else touched the document.
                state.until = found.document.lock.as_ref().map_or(state.until, |lock| lock.until);
                state.document = found.document;
                state.etag = found.etag;
            }
            BatchOutcome::RolledBack(back) => {
                let detail = format!("a staged part was answered {}", back.status);
                return Err(StoreError::Rejected { document: staged.id.to_string(), detail });
            }
        }
    }
}

/// Applies what a committed turn staged. Safe to call at any time, by several at once.
pub(crate) async fn roll_forward(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let Some(Versioned { document, .. }) = release::read_latest(engine, partition, deadline).await? else {
        return Ok(());
    };
    let Some(token) = document.rolling else { return Ok(()) };
    let statement = queries::STAGED.statement();
    let mut parts: Vec<StagedDocument> = engine.store.query_partition(partition, statement, deadline).await?;
    parts.retain(|part| part.token == token);
    parts.sort_by_key(|part| part.part);
    debug!(instance_id = partition.instance_id(), parts = parts.len(), "rolling a staged turn forward");
    for part in parts {
        apply(engine, partition, part, deadline).await?;
    }
    finish(engine, partition, &token, deadline).await
}

/// Applies one part and deletes it in the same batch.
async fn apply(
    engine: &Arc<Engine>,
    partition: &Partition,
    part: StagedDocument,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let mut operations = part.operations;
    loop {
        let mut whole = operations.clone();
        whole.push(Operation::delete(part.id.clone(), None));
        match engine.store.batch(partition, &whole, deadline).await? {
            BatchOutcome::Committed(committed) => {
                engine.dispatch.announce(engine, partition, &operations, &committed, 0);
                return Ok(());
            }
            BatchOutcome::RolledBack(back) if back.index == operations.len() => {
                // Somebody else has applied it.
                return Ok(());
            }
            BatchOutcome::RolledBack(back) => {
                // Somebody else may have applied it between two of our looks; the part tells.
                if !is_there(engine, partition, &part.id, deadline).await? {
                    return Ok(());
                }
                mend(&mut operations, &back)?;
            }
        }
    }
}

async fn is_there(
    engine: &Engine,
    partition: &Partition,
    id: &DocumentId,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let freshness = crate::store::Freshness::LatestCommitted;
    let found = engine.store.read::<serde_json::Value>(partition, id, freshness, deadline).await?;
    Ok(found.is_some())
}

/// The turn is committed, so what its operations meet can't undo it: a document that is gone already needs no deletion.
fn mend(operations: &mut Vec<Operation>, back: &RolledBack) -> Result<(), StoreError> {
    let document = match (&operations[back.index], back.status) {
        (Operation::Delete { .. } | Operation::Replace { .. }, 404 | 412) => {
            operations.remove(back.index);
            return Ok(());
        }
        (Operation::Create { document }, 409) => document.clone(),
        (operation, status) => {
            let detail = format!("{} was answered {status} while a turn was rolled forward", operation.document_id());
            return Err(StoreError::Malformed { detail });
        }
    };
    operations[back.index] = Operation::Upsert { document };
    Ok(())
}

/// Takes the mark off, once no part is left.
async fn finish(engine: &Engine, partition: &Partition, token: &str, deadline: Deadline) -> Result<(), StoreError> {
    loop {
        let Some(Versioned { mut document, etag }) = release::read_latest(engine, partition, deadline).await? else {
            return Ok(());
        };
        if document.rolling.as_deref() != Some(token) {
            return Ok(());
        }
        document.rolling = None;
        document.due = None;
        let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await?;
        if let WriteOutcome::Done(etag) = written {
            engine.cache.put(partition, Known { document, etag, contents: None });
            return Ok(());
        }
    }
}

/// Deletes what turns that were never committed have staged. Best effort: the next claim tries again.
pub(crate) async fn sweep(engine: &Engine, partition: &Partition, dead: &[StagedDocument], deadline: Deadline) {
    for part in dead {
        if let Err(error) = engine.store.delete(partition, &part.id, None, deadline).await {
            warn!(instance_id = partition.instance_id(), %error, "a dead turn's staged part is swept later");
            return;
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

    #[test]
    fn every_part_fits_a_batch_with_its_own_deletion_and_nothing_is_left_out() {
        for (count, bytes) in [(1, 10), (98, 10), (99, 10), (1_000, 10), (30, 100_000), (5, 1_900_000)] {
            let operations = creations(count, bytes);
            let parts = split(&operations);
            assert_eq!(parts.concat(), operations);
            for part in parts {
                assert!(part.len() < batch::MAX_OPERATIONS);
                let size: usize = part.iter().map(Operation::size).sum();
                assert!(size + 8 * 1024 <= batch::MAX_BYTES, "{count} of {bytes}: {size}");
            }
        }
    }
}
