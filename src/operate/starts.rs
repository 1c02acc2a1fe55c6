//! Starts that no worker has begun.
//!
//! Such a start is a message in the queue of an instance that does not exist yet. It is removed under a claim, as a
//! turn would consume it. A concurrent worker meets the lock. A worker that has the start in memory finds its document
//! missing when it commits.
//!
//! Crash points: each batch is conditional on the claim. If the process dies between two batches, some messages are
//! left and the claim expires. A poll finds its document by `due`. The first batch removes the start, so the remaining
//! messages wait for another start.

use crate::model::operation;
use crate::{
    cosmos::{queries, BatchOutcome, Deadline, StoreError, Versioned},
    engine::Engine,
    model::{item, InstanceDocument, MessageDocument, Operation, Partition},
    turn::{instance_id, plan::remove_message},
};
use duroxide::providers::WorkItem;
use serde::Serialize;
use std::{sync::Arc, time::Duration};
use tracing::info;

/// The duration of the claim under which a start is removed.
const LOCK: Duration = Duration::from_secs(10);

/// A start that waits for a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct QueuedStart {
    /// The instance that it starts.
    pub id: String,
    /// The name of the orchestration.
    pub name: String,
    /// The version of the orchestration, if the start names one.
    pub version: Option<String>,
    /// The instance that sent it and waits for the end of this one, if there is one.
    pub parent: Option<String>,
    /// The time when it was enqueued, in milliseconds since 1970.
    pub created_at: u64,
}

/// The queue of an instance that does not exist.
struct StartQueue {
    /// The document that a claim has created, or that says that messages are deferred.
    document: Option<Versioned<InstanceDocument>>,
    messages: Vec<Versioned<MessageDocument>>,
}

/// Reads the queue of an instance that does not exist. Returns `None` if the instance exists.
async fn read_queue(engine: &Engine, partition: &Partition) -> Result<Option<StartQueue>, StoreError> {
    let document = engine.read_latest(partition, engine.deadline()).await?;
    if document.as_ref().is_some_and(|found| found.document.exists()) {
        return Ok(None);
    }
    let statement = queries::MESSAGES.statement().authoritative();
    let messages = engine.store.query_partition(partition, statement, engine.per_page()).await?;
    Ok(Some(StartQueue { document, messages }))
}

impl StartQueue {
    /// The start that would begin the instance. If there are several, it is the first.
    fn start(&self, instance: &str) -> Option<QueuedStart> {
        let inlined = self.document.as_ref().and_then(|found| found.document.inlined_message());
        let messages = self.messages.iter().map(|message| &message.document).chain(&inlined);
        let first = messages.filter(|message| message.starts).min_by(|a, b| a.seq.cmp(&b.seq))?;
        let work_item = serde_json::from_str::<WorkItem>(&first.item).ok();
        let (name, version) = work_item.as_ref().and_then(item::started).unwrap_or_default();
        let parent = match &work_item {
            Some(WorkItem::StartOrchestration { parent_instance, .. }) => parent_instance.clone(),
            _ => None,
        };
        let (name, version) = (name.to_owned(), version.map(ToOwned::to_owned));
        Some(QueuedStart { id: instance.to_owned(), name, version, parent, created_at: first.created_at })
    }
}

pub(crate) async fn queued(engine: &Engine, instance: &str) -> Result<Option<QueuedStart>, StoreError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
    Ok(read_queue(engine, &partition).await?.and_then(|queue| queue.start(instance)))
}

pub(crate) async fn discard(engine: &Arc<Engine>, instance: &str) -> Result<bool, StoreError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(false) };
    let (token, deadline) = (engine.new_token(), engine.deadline());
    let mut has_claimed = false;
    loop {
        // A worker whose clock is ahead, or that comes after the end of the claim, may have begun the instance.
        let Some(queue) = read_queue(engine, &partition).await? else { return Ok(false) };
        // If a batch succeeded and its answer was lost, the start is removed already.
        if queue.start(instance).is_none() {
            return Ok(has_claimed);
        }
        if let Some(found) = queue.document.as_ref().filter(|found| found.document.removal.deleting.is_some()) {
            // Its document may be the coordinator of a deletion, which must be erased last.
            if deadline.passed() || !engine.lifecycle().recover_deletion(engine, &found.document, deadline).await? {
                let detail = "the instance is being deleted: try again in a moment".to_owned();
                return Err(StoreError::Unavailable { detail });
            }
            engine.cache.forget(&partition);
            continue;
        }
        if queue.document.as_ref().is_some_and(|found| !found.document.is_placeholder()) {
            let detail = "a worker has begun its first turn and has not committed it: try again in a moment".to_owned();
            return Err(StoreError::Unavailable { detail });
        }
        let Some(claim) = claim(engine, &partition, &token, queue.document, deadline).await? else { continue };
        has_claimed = true;
        // From here on no worker takes a message. A message that arrives now is for another start.
        let messages = read_queue(engine, &partition).await?.map(|queue| queue.messages).unwrap_or_default();
        if remove_messages(engine, &partition, claim, messages, deadline).await? {
            info!(instance_id = partition.instance_id(), "removed a start that no worker has begun");
            return Ok(true);
        }
    }
}

/// Claims an instance that does not exist. Returns `None` if its document has changed.
async fn claim(
    engine: &Engine,
    partition: &Partition,
    token: &str,
    found: Option<Versioned<InstanceDocument>>,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let (mut document, etag) = match found {
        Some(Versioned { document, etag }) => (document, Some(etag)),
        None => (InstanceDocument::new(partition.clone(), token, engine.now()), None),
    };
    let is_ours = document.claim.lock.as_ref().is_some_and(|lock| lock.token == token);
    if !is_ours && document.locked_until(engine.now()).is_some() {
        let detail = "a worker is about to begin the instance: try again in a moment".to_owned();
        return Err(StoreError::Unavailable { detail });
    }
    document.lock(token, engine.clock.after(LOCK));
    let operation = match &etag {
        Some(etag) => Operation::replace(instance_id(), &document, Some(etag))?,
        None => Operation::create(&document)?,
    };
    let written = engine.store.batch(partition, &[operation], deadline).await?;
    engine.cache.forget(partition);
    Ok(match written {
        BatchOutcome::Committed(committed) => Some(Versioned { document, etag: committed.fence()? }),
        BatchOutcome::RolledBack(_) => None,
    })
}

/// Removes messages under a claim, starts first. The last batch deletes the claim's document with its inlined message.
/// Returns `false` if a document has changed.
async fn remove_messages(
    engine: &Engine,
    partition: &Partition,
    mut claim: Versioned<InstanceDocument>,
    mut messages: Vec<Versioned<MessageDocument>>,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    messages.sort_by_key(|message| !message.document.starts);
    let operations: Result<Vec<Operation>, StoreError> = messages.iter().map(remove_message).collect();
    let operations = operations?;
    let mut parts = operations.chunks(operation::MAX_OPERATIONS - 1).peekable();
    loop {
        let part = parts.next().unwrap_or_default();
        let is_last = parts.peek().is_none();
        let mut batch = vec![match is_last {
            true => Operation::delete(instance_id(), Some(&claim.etag)),
            false => Operation::replace(instance_id(), &claim.document, Some(&claim.etag))?,
        }];
        batch.extend_from_slice(part);
        let written = engine.store.batch(partition, &batch, deadline).await?;
        engine.cache.forget(partition);
        let BatchOutcome::Committed(committed) = written else { return Ok(false) };
        if is_last {
            return Ok(true);
        }
        claim.etag = committed.fence()?;
    }
}
