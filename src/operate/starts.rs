//! Starts that no worker has begun.
//!
//! Such a start is a message in the queue of an instance that does not exist yet. It is removed under a claim, as a
//! turn would take it: a worker that looks at the same time meets the lock, and one that had the start in memory finds
//! its document gone when it commits.
//!
//! Crash points: each batch is conditional on the claim. If the process dies between two of them, some messages are
//! left and the claim expires. A poll finds its document by `due`; the start is gone with the first so what is
//! left waits for another start.

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

/// How long the claim valid_for under which a start is removed.
const LOCK: Duration = Duration::from_secs(10);

/// A start that waits for a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct QueuedStart {
    /// The instance that it begins.
    pub id: String,
    /// Its orchestration.
    pub name: String,
    /// The orchestration's version, where the start names one.
    pub version: Option<String>,
    /// The instance that sent it, if that waits for the end of this one.
    pub parent: Option<String>,
    /// When it was enqueued, in milliseconds since 1970.
    pub created_at: u64,
}

/// The queue of an instance that does not exist.
struct StartQueue {
    /// The document that a claim has made, or that says that messages are deferred.
    document: Option<Versioned<InstanceDocument>>,
    messages: Vec<Versioned<MessageDocument>>,
}

/// The queue of an instance that does not exist; none where the instance exists.
async fn look(engine: &Engine, partition: &Partition) -> Result<Option<StartQueue>, StoreError> {
    let document = engine.read_latest(partition, engine.deadline()).await?;
    if document.as_ref().is_some_and(|found| found.document.exists()) {
        return Ok(None);
    }
    let statement = queries::MESSAGES.statement().authoritative();
    let messages = engine.store.query_partition(partition, statement, engine.per_page()).await?;
    Ok(Some(StartQueue { document, messages }))
}

impl StartQueue {
    /// The start that would begin the instance: of several, the first.
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

pub(super) async fn queued(engine: &Engine, instance: &str) -> Result<Option<QueuedStart>, StoreError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
    Ok(look(engine, &partition).await?.and_then(|queue| queue.start(instance)))
}

pub(super) async fn discard(engine: &Arc<Engine>, instance: &str) -> Result<bool, StoreError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(false) };
    let (token, deadline) = (engine.new_token(), engine.deadline());
    let mut has_begun = false;
    loop {
        // A worker whose clock is ahead, or that comes after the end of the claim, may have begun the instance.
        let Some(queue) = look(engine, &partition).await? else { return Ok(false) };
        // Where a batch was done and its answer lost, the start is gone by now.
        if queue.start(instance).is_none() {
            return Ok(has_begun);
        }
        if let Some(found) = queue.document.as_ref().filter(|found| found.document.deleting.is_some()) {
            // Its document may be the one that says of other instances that they are deleted: it goes last.
            if deadline.passed() || !engine.lifecycle().recover_deletion(engine, &found.document, deadline).await? {
                let detail = "a deletion of the instance is under way: look again in a moment".to_owned();
                return Err(StoreError::Unavailable { detail });
            }
            engine.cache.forget(&partition);
            continue;
        }
        if queue.document.as_ref().is_some_and(|found| !found.document.is_placeholder()) {
            let detail = "a worker has begun its first turn and not committed it: look again in a moment".to_owned();
            return Err(StoreError::Unavailable { detail });
        }
        let Some(claim) = claim(engine, &partition, &token, queue.document, deadline).await? else { continue };
        has_begun = true;
        // From here on nobody else takes a message. One that comes in is for another start.
        let messages = look(engine, &partition).await?.map(|queue| queue.messages).unwrap_or_default();
        if remove(engine, &partition, claim, messages, deadline).await? {
            info!(instance_id = partition.instance_id(), "removed a start that no worker has begun");
            return Ok(true);
        }
    }
}

/// Claims an instance that does not exist; none where something has changed.
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
    let is_ours = document.lock.as_ref().is_some_and(|lock| lock.token == token);
    if !is_ours && document.locked_until(engine.now()).is_some() {
        let detail = "a worker is about to begin the instance: look again in a moment".to_owned();
        return Err(StoreError::Unavailable { detail });
    }
    document.hold(token, engine.clock.after(LOCK));
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

/// Removes messages under a claim, starts first. The last batch takes the claim's document along, and what that
/// has_inlined. `false` where something has changed.
async fn remove(
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
        let mut whole = vec![match is_last {
            true => Operation::delete(instance_id(), Some(&claim.etag)),
            false => Operation::replace(instance_id(), &claim.document, Some(&claim.etag))?,
        }];
        whole.extend_from_slice(part);
        let written = engine.store.batch(partition, &whole, deadline).await?;
        engine.cache.forget(partition);
        let BatchOutcome::Committed(committed) = written else { return Ok(false) };
        if is_last {
            return Ok(true);
        }
        claim.etag = committed.fence()?;
    }
}
