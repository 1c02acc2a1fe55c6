//! Erases the partition of an instance whose deletion is committed.
//!
//! Invariants:
//!
//! - No document of the instance is left, except delivered markers.
//! - No message is lost that is meant for a new instance with the same id.
//!
//! Every batch is conditional on the instance's document, which the last batch deletes. A new instance has another
//! document.
//!
//! An activity completes with a batch of its own, which deletes the activity and creates the completion. If the erasing
//! batch deletes the activity first, the completion fails. If the completion comes first, the erasing batch fails on
//! the missing document, and the next listing finds the completion.
//!
//! A message that another instance's turn sends depends on no document here. If it arrives between the listing and the
//! last batch, one more listing after that batch finds it.

use super::{counters, finish::RecoveryBudget, plan::CONCURRENCY, recovery, Documents};
use crate::{
    cosmos::{or_default, queries, BatchOutcome, StoreError, Versioned},
    engine::Engine,
    model::{
        kind, operation, CountedFigures, Deleting, DeliveredDocument, DocumentId, InstanceDocument, MessageDocument,
        Millis, Operation, Partition,
    },
    turn::instance_id,
};
use azure_core::http::Etag;
use duroxide::providers::DeleteInstanceResult;
use futures::{stream, StreamExt};
use serde::Deserialize;
use std::{collections::HashMap, sync::Arc};
use tracing::debug;

/// The outcome of erasing some instances.
#[derive(Default)]
pub(super) struct Erased {
    pub(super) result: DeleteInstanceResult,
    /// Whether all of them are erased.
    pub(super) complete: bool,
    /// The first error. The other instances are erased nevertheless.
    pub(super) first_error: Option<StoreError>,
}

/// A committed plan.
pub(super) struct CommittedPlan {
    /// The coordinator's deletion record.
    pub(super) record: Deleting,
    /// The plan was committed at or after this time of Cosmos DB, in seconds.
    after: u64,
    /// The plan was committed at or before this time of Cosmos DB, in seconds.
    by: u64,
}

impl CommittedPlan {
    /// Takes the times from the coordinator's document, whose last write is the commit or a later write.
    pub(super) fn new(record: Deleting, written_at: u64) -> Self {
        let after = record.committed_after.unwrap_or_default();
        let by = record.committed_by.unwrap_or(written_at);
        Self { record, after, by }
    }
}

/// Erases the instances of `ids` that a committed plan has prepared, and removes them from the counters together.
/// `prepared` holds the documents that the caller knows from preparing them.
pub(super) async fn erase_all(
    engine: &Arc<Engine>,
    ids: &[String],
    committed: &CommittedPlan,
    prepared: &Documents,
    budget: RecoveryBudget,
) -> Erased {
    let partitions: Vec<Partition> = ids.iter().filter_map(|id| Partition::instance(id).ok()).collect();
    let mut erased = Erased { complete: true, ..Erased::default() };
    let removals = match counters::record_removals(engine, &partitions, &committed.record, prepared).await {
        Ok(removals) => removals,
        Err(error) => return Erased { first_error: Some(error), complete: false, ..erased },
    };
    erased.complete = removals.first_error.is_none();
    erased.first_error = removals.first_error;
    let mut erasing = stream::iter(removals.instances)
        .map(|found| async move {
            let partition = found.document.instance_id.clone();
            let mut result = DeleteInstanceResult::default();
            let mut counted = None;
            let outcome = erase(engine, found, committed, budget, &mut counted, &mut result).await;
            (partition, counted, result, outcome)
        })
        .buffer_unordered(CONCURRENCY);
    let mut erased_instances = HashMap::new();
    while let Some((partition, counted, result, outcome)) = erasing.next().await {
        super::add(&mut erased.result, result);
        match outcome {
            Ok(true) => {
                erased_instances.insert(partition, counted);
            }
            Ok(false) => erased.complete = false,
            Err(error) => {
                erased.complete = false;
                erased.first_error.get_or_insert(error);
            }
        }
    }
    drop(erasing);
    if let Err(error) = counters::count_out(engine, &erased_instances).await {
        erased.first_error.get_or_insert(error);
    }
    erased
}

/// A document of a partition that is being erased. Every document is erased, whatever its type. The optional fields are
/// those of messages: they identify a message for the next incarnation.
#[derive(Deserialize)]
struct ErasableRow {
    #[serde(deserialize_with = "DocumentId::of_any")]
    id: DocumentId,
    #[serde(rename = "_etag")]
    etag: Etag,
    #[serde(rename = "type", default, deserialize_with = "or_default")]
    kind: String,
    #[serde(default, deserialize_with = "or_default")]
    due: Option<Millis>,
    #[serde(default, deserialize_with = "or_default")]
    seq: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    starts: bool,
    #[serde(default, deserialize_with = "or_default")]
    delivered: bool,
    /// The sender of a start, if another instance sent it.
    #[serde(default, deserialize_with = "or_default")]
    sender: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    /// The incarnation of that sender.
    incarnation: Option<String>,
    /// Whether the sender of a start exists. It is only set if [`Self::needs_sender`] is true.
    #[serde(skip)]
    sender_exists: bool,
    /// Cosmos DB's time of the last write, in seconds.
    #[serde(rename = "_ts", default)]
    written_at: u64,
}

impl ErasableRow {
    /// Whether the message may be meant for a new instance with the same id. Both conditions must hold:
    ///
    /// - it came from outside any turn, or it starts an instance on behalf of another one;
    /// - it came after the commit of the deletion.
    fn is_for_next_incarnation(&self, committed: &CommittedPlan) -> bool {
        let from_elsewhere = self.is_from_outside() || (self.starts && self.delivered);
        self.is_message() && from_elsewhere && self.is_after(committed) && !self.is_deferred()
    }

    /// Whether the message came after the commit of the deletion.
    ///
    /// Cosmos DB's time decides if it is precise enough. Within the seconds of the commit, two kinds of starts count as
    /// later, so that none is lost: starts of clients, and starts whose sender still exists. The clocks of the
    /// processes order the other messages.
    fn is_after(&self, committed: &CommittedPlan) -> bool {
        if !self.is_within(committed) {
            return self.written_at > committed.by;
        }
        (self.starts && self.is_from_outside()) || self.sender_exists || self.is_made_after(committed)
    }

    /// Whether the message was written within the seconds of the commit.
    fn is_within(&self, committed: &CommittedPlan) -> bool {
        (committed.after..=committed.by).contains(&self.written_at)
    }

    fn is_made_after(&self, committed: &CommittedPlan) -> bool {
        self.seq.as_ref().is_some_and(|seq| *seq > committed.record.before)
    }

    /// Whether only the sender shows if a start is meant for the next incarnation. The start got its queue position
    /// when the turn that sends it was planned, but it may be delivered after the commit.
    fn needs_sender(&self, committed: &CommittedPlan) -> bool {
        self.is_message()
            && self.starts
            && self.delivered
            && self.is_within(committed)
            && !self.is_made_after(committed)
    }

    /// Whether the sender exists and is not deleted. The sender may wait for the end of the instance that the start
    /// begins.
    async fn find_sender(&self, engine: &Arc<Engine>) -> Result<bool, StoreError> {
        let sender = self.sender.as_deref().and_then(|sender| Partition::instance(sender).ok());
        let Some(sender) = sender else { return Ok(false) };
        let found = match engine.read_latest(&sender, engine.deadline()).await {
            Ok(found) => found.filter(|found| Some(&found.document.origin.incarnation) == self.incarnation.as_ref()),
            Err(StoreError::Malformed { .. }) => return Ok(true),
            Err(error) => return Err(error),
        };
        let Some(found) = found else { return Ok(false) };
        Ok(!recovery::is_deleted(engine, &found.document, engine.deadline()).await?)
    }

    /// Whether the message follows a start for the next incarnation, and so is meant for that incarnation, too.
    fn follows(&self, start: &str, committed: &CommittedPlan) -> bool {
        let from_elsewhere = self.is_from_outside() || self.delivered;
        let is_later = self.written_at >= committed.after && self.seq.as_deref().is_some_and(|seq| seq > start);
        self.is_message() && from_elsewhere && is_later && !self.is_deferred()
    }

    fn is_from_outside(&self) -> bool {
        MessageDocument::is_from_outside(&self.id)
    }

    fn is_message(&self) -> bool {
        self.kind == kind::MESSAGE
    }

    /// Whether the message was deferred before the instance existed. Without the instance's document, no worker would
    /// find it.
    fn is_deferred(&self) -> bool {
        self.is_message() && self.due == Some(MessageDocument::DEFERRED)
    }

    /// The marker that replaces a message of another instance, since the message may be delivered again.
    fn marker(&self, partition: &Partition) -> Option<DeliveredDocument> {
        let is_delivered = self.is_message() && self.delivered;
        is_delivered.then(|| DeliveredDocument::new(self.id.clone(), partition.clone()))
    }

    fn belongs_to_queue(&self) -> bool {
        self.is_queued() || self.kind == kind::PAYLOAD
    }

    fn is_queued(&self) -> bool {
        matches!(self.kind.as_str(), kind::MESSAGE | kind::ACTIVITY)
    }
}

/// Erases one partition. Returns whether it is complete. `counted` receives the figures that the counters hold of the
/// instance.
async fn erase(
    engine: &Arc<Engine>,
    found: Versioned<InstanceDocument>,
    committed: &CommittedPlan,
    budget: RecoveryBudget,
    counted: &mut Option<CountedFigures>,
    result: &mut DeleteInstanceResult,
) -> Result<bool, StoreError> {
    let partition = found.document.instance_id.clone();
    let mut known = Some(found);
    loop {
        let found = match known.take() {
            Some(found) => Some(found),
            None => {
                let partition = std::slice::from_ref(&partition);
                let mut removals =
                    counters::record_removals(engine, partition, &committed.record, &Documents::new()).await?;
                match removals.first_error {
                    Some(error) => return Err(error),
                    None => removals.instances.pop(),
                }
            }
        };
        engine.cache.forget(&partition);
        let Some(found) = found else { return Ok(true) };
        counted.clone_from(&found.document.counting.counted);
        match erase_documents(engine, &found, committed, budget, result).await? {
            EraseStep::Done => {
                result.instances_deleted = u64::from(found.document.exists());
                result.queue_messages_deleted += u64::from(found.document.waiting.inlined.is_some());
                result.executions_deleted = found.document.counting.totals.executions;
                result.events_deleted = found.document.counting.totals.events;
                erase_late_arrivals(engine, &partition, committed).await?;
                return Ok(true);
            }
            EraseStep::Retry if !budget.is_spent() => {}
            EraseStep::Retry => return Ok(false),
        }
    }
}

/// The outcome of one attempt to erase a partition.
enum EraseStep {
    /// Everything is erased, including the instance's document.
    Done,
    /// A document has changed meanwhile, or the budget is spent.
    Retry,
}

/// Deletes all documents except messages for a new instance. Each batch is conditional on the instance's document,
/// which goes last.
async fn erase_documents(
    engine: &Arc<Engine>,
    found: &Versioned<InstanceDocument>,
    committed: &CommittedPlan,
    budget: RecoveryBudget,
    result: &mut DeleteInstanceResult,
) -> Result<EraseStep, StoreError> {
    let (partition, mut etag) = (&found.document.instance_id, found.etag.clone());
    let mut document = found.document.clone();
    document.keep_service_times();
    let (next, mut rows) = split_rows(list_contents(engine, partition, committed).await?, committed);
    // A marker outlives its instance: its message may be delivered again while the sender has the intent.
    rows.retain(|row| !matches!(row.kind.as_str(), kind::INSTANCE | kind::DELIVERED));
    let documents = rows.len();
    while rows.len() >= operation::MAX_OPERATIONS {
        let chunk = rows.split_off(rows.len() - (operation::MAX_OPERATIONS - 1));
        let fence = Operation::replace(instance_id(), &document, Some(&etag))?;
        let BatchDelete::Done(Some(fence)) = delete_with(engine, partition, fence, &chunk, result).await? else {
            return Ok(EraseStep::Retry);
        };
        etag = fence;
        if budget.is_spent() {
            return Ok(EraseStep::Retry);
        }
    }
    let last = Operation::delete(instance_id(), Some(&etag));
    if let BatchDelete::Refused = delete_with(engine, partition, last, &rows, result).await? {
        return Ok(EraseStep::Retry);
    }
    debug!(%partition, documents, "erased");
    if !next.is_empty() {
        engine.discovery.turn_returned(partition, engine.now());
    }
    Ok(EraseStep::Done)
}

/// Splits the rows into those for the next incarnation and those that are erased.
fn split_rows(rows: Vec<ErasableRow>, committed: &CommittedPlan) -> (Vec<ErasableRow>, Vec<ErasableRow>) {
    let starts = rows.iter().filter(|row| row.starts && row.is_for_next_incarnation(committed));
    let first = starts.filter_map(|row| row.seq.clone()).min();
    let follows = |row: &ErasableRow| first.as_ref().is_some_and(|first| row.follows(first, committed));
    rows.into_iter().partition(|row| row.is_for_next_incarnation(committed) || follows(row))
}

async fn list_contents(
    engine: &Arc<Engine>,
    partition: &Partition,
    committed: &CommittedPlan,
) -> Result<Vec<ErasableRow>, StoreError> {
    let statement = queries::CONTENTS.statement().authoritative();
    let mut rows: Vec<ErasableRow> = engine.store.query_partition(partition, statement, engine.per_page()).await?;
    for row in rows.iter_mut().filter(|row| row.needs_sender(committed)) {
        row.sender_exists = row.find_sender(engine).await?;
    }
    Ok(rows)
}

/// The outcome of one batch of deletions.
enum BatchDelete {
    /// The batch is committed. The instance's document has this ETag now, or is deleted.
    Done(Option<Etag>),
    Refused,
}

/// Commits one batch: the fence, and the deletions.
async fn delete_with(
    engine: &Engine,
    partition: &Partition,
    fence: Operation,
    rows: &[ErasableRow],
    result: &mut DeleteInstanceResult,
) -> Result<BatchDelete, StoreError> {
    let mut operations = vec![fence];
    for row in rows {
        operations.push(match row.marker(partition) {
            Some(marker) => Operation::upsert(&marker)?,
            None => Operation::delete(row.id.clone(), None),
        });
    }
    let deleted = match engine.store.batch(partition, &operations, engine.deadline()).await? {
        BatchOutcome::Committed(committed) => BatchDelete::Done(committed.etag(0).cloned()),
        // The document is deleted already, by an earlier request whose answer was lost or by another process.
        BatchOutcome::RolledBack(back) if back.index == 0 && back.status == 404 => BatchDelete::Done(None),
        BatchOutcome::RolledBack(_) => return Ok(BatchDelete::Refused),
    };
    result.queue_messages_deleted += rows.iter().filter(|row| row.is_queued()).count() as u64;
    Ok(deleted)
}

/// Deletes messages and activities that the last listing did not show, or that arrived after it. If a new instance
/// exists, they may be meant for it and stay.
async fn erase_late_arrivals(
    engine: &Arc<Engine>,
    partition: &Partition,
    committed: &CommittedPlan,
) -> Result<(), StoreError> {
    let rows = list_contents(engine, partition, committed).await?;
    if rows.iter().any(|row| row.kind == kind::INSTANCE) {
        return Ok(());
    }
    let (_, rows) = split_rows(rows, committed);
    let late = rows.into_iter().filter(ErasableRow::belongs_to_queue);
    let (delivered, others): (Vec<ErasableRow>, Vec<ErasableRow>) =
        late.partition(|row| row.marker(partition).is_some());
    for row in delivered {
        let marker = row.marker(partition);
        engine.store.replace(partition, &row.id, &marker, Some(&row.etag), engine.deadline()).await?;
    }
    delete_documents(engine, partition, &others.into_iter().map(|row| (row.id, row.etag)).collect::<Vec<_>>()).await
}

/// Deletes documents in batches, each under the ETag that was listed. A document that is missing or has changed does
/// not stop the others.
pub(super) async fn delete_documents(
    engine: &Engine,
    partition: &Partition,
    documents: &[(DocumentId, Etag)],
) -> Result<(), StoreError> {
    for chunk in documents.chunks(operation::MAX_OPERATIONS) {
        let operations: Vec<Operation> =
            chunk.iter().map(|(id, etag)| Operation::delete(id.clone(), Some(etag))).collect();
        if let BatchOutcome::Committed(_) = engine.store.batch(partition, &operations, engine.deadline()).await? {
            continue;
        }
        for (id, etag) in chunk {
            engine.store.delete(partition, id, Some(etag), engine.deadline()).await?;
        }
    }
    Ok(())
}
