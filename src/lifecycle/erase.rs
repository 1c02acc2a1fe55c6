//! Emptying the partition of an instance whose deletion is decided.
//!
//! Invariant: nothing of the instance is left, and nothing is lost of what is meant for a new instance of the same name. The
//! instance's document fences every batch and goes with the last one: a new instance has another.
//!
//! An activity ends with a batch of its own that deletes its document and creates the completion. Either our batch deletes
//! that document, and the completion fails; or the completion comes first, our batch fails for the missing document, and the
//! next look finds the completion. A message that another instance's turn has sent depends on nothing here: one that comes
//! between the look and the last batch is found by one more look after it.

use super::{
    counters,
    plan::{RecoveryBudget, CONCURRENCY},
    recovery, Documents,
};
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

/// What became of some instances that were to be erased.
#[derive(Default)]
pub(super) struct Erased {
    pub(super) result: DeleteInstanceResult,
    /// Whether nothing is left of any.
    pub(super) whole: bool,
    /// What the first that failed has met; the others were erased all the same.
    pub(super) trouble: Option<StoreError>,
}

/// A plan that was decided.
pub(super) struct Decision {
    /// The coordinator's mark.
    pub(super) mark: Deleting,
    /// The decision was made at or after the first of these times and at or before the second, in seconds of the service.
    after: u64,
    by: u64,
}

impl Decision {
    /// By the coordinator's document, which was last written with the decision or after it.
    pub(super) fn new(mark: Deleting, written_at: u64) -> Self {
        let after = mark.committed_after.unwrap_or_default();
        let by = mark.committed_by.unwrap_or(written_at);
        Self { mark, after, by }
    }
}

/// Erases the instances of `ids` that carry the mark of a decided plan, and takes them out of the counters together. `marked`
/// are those that the caller knows from marking them.
pub(super) async fn erase_all(
    engine: &Arc<Engine>,
    ids: &[String],
    decision: &Decision,
    marked: &Documents,
    patience: RecoveryBudget,
) -> Erased {
    let partitions: Vec<Partition> = ids.iter().filter_map(|id| Partition::instance(id).ok()).collect();
    let mut erased = Erased { whole: true, ..Erased::default() };
    let leaving = match counters::note_leaving(engine, &partitions, &decision.mark, marked).await {
        Ok(leaving) => leaving,
        Err(error) => return Erased { trouble: Some(error), whole: false, ..erased },
    };
    erased.whole = leaving.trouble.is_none();
    erased.trouble = leaving.trouble;
    let mut erasing = stream::iter(leaving.instances)
        .map(|found| async move {
            let partition = found.document.instance_id.clone();
            let mut result = DeleteInstanceResult::default();
            let mut noted = None;
            let outcome = erase(engine, found, decision, patience, &mut noted, &mut result).await;
            (partition, noted, result, outcome)
        })
        .buffer_unordered(CONCURRENCY);
    let mut gone = HashMap::new();
    while let Some((partition, noted, result, outcome)) = erasing.next().await {
        super::add(&mut erased.result, result);
        match outcome {
            Ok(true) => {
                gone.insert(partition, noted);
            }
            Ok(false) => erased.whole = false,
            Err(error) => {
                erased.whole = false;
                erased.trouble.get_or_insert(error);
            }
        }
    }
    drop(erasing);
    if let Err(error) = counters::count_out(engine, &gone).await {
        erased.trouble.get_or_insert(error);
    }
    erased
}

/// A document of a partition that is emptied: whatever it is, it goes. What tells a message for the next instance is what a message has.
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
    /// Of a start: the instance that has sent it, and which of that name.
    #[serde(default, deserialize_with = "or_default")]
    sender: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    incarnation: Option<String>,
    /// The sender of a contested start is still there.
    #[serde(skip)]
    has_sender: bool,
    /// When the service took it, in seconds.
    #[serde(rename = "_ts", default)]
    written_at: u64,
}

impl ErasableRow {
    /// Whether it may be meant for a new instance of the same name: what came from outside any turn, or starts an instance
    /// on behalf of another one, after the deletion was decided.
    fn is_for_the_next(&self, decision: &Decision) -> bool {
        let from_elsewhere = self.is_from_outside() || (self.starts && self.delivered);
        self.is_message() && from_elsewhere && self.is_after(decision) && !self.is_deferred()
    }

    /// Whether it came after the deletion was decided. The service's time tells, as far as it does. Within the seconds of the
    /// decision a start of a client counts as later, and so does one whose sender is still there, so that none is lost. For
    /// other messages the order of the processes' clocks decides.
    fn is_after(&self, decision: &Decision) -> bool {
        if !self.is_within(decision) {
            return self.written_at > decision.by;
        }
        (self.starts && self.is_from_outside()) || self.has_sender || self.is_made_after(decision)
    }

    /// Whether it was written within the seconds of the decision.
    fn is_within(&self, decision: &Decision) -> bool {
        (decision.after..=decision.by).contains(&self.written_at)
    }

    fn is_made_after(&self, decision: &Decision) -> bool {
        self.seq.as_ref().is_some_and(|seq| *seq > decision.mark.before)
    }

    /// Whether only its sender tells if it is for the next instance: a start has its place in the queue since the turn that
    /// sends it was planned, and may be delivered after the decision.
    fn is_contested(&self, decision: &Decision) -> bool {
        self.is_message() && self.starts && self.delivered && self.is_within(decision) && !self.is_made_after(decision)
    }

    /// Whether the instance that has sent it is there, and is not deleted. It may wait for the end of the instance that
    /// the start begins.
    async fn is_from_one_that_is_there(&self, engine: &Arc<Engine>) -> Result<bool, StoreError> {
        let sender = self.sender.as_deref().and_then(|sender| Partition::instance(sender).ok());
        let Some(sender) = sender else { return Ok(false) };
        let found = match engine.read_latest(&sender, engine.deadline()).await {
            Ok(found) => found.filter(|found| Some(&found.document.incarnation) == self.incarnation.as_ref()),
            Err(StoreError::Malformed { .. }) => return Ok(true),
            Err(error) => return Err(error),
        };
        let Some(found) = found else { return Ok(false) };
        Ok(!recovery::is_deleted(engine, &found.document, engine.deadline()).await?)
    }

    /// Whether it follows a start that is for the next instance, and so is for that one, too.
    fn follows(&self, start: &str, decision: &Decision) -> bool {
        let from_elsewhere = self.is_from_outside() || self.delivered;
        let is_later = self.written_at >= decision.after && self.seq.as_deref().is_some_and(|seq| seq > start);
        self.is_message() && from_elsewhere && is_later && !self.is_deferred()
    }

    fn is_from_outside(&self) -> bool {
        MessageDocument::is_from_outside(&self.id)
    }

    fn is_message(&self) -> bool {
        self.kind == kind::MESSAGE
    }

    /// Whether it was there before the instance: one that is left without the document which marks it would never be seen.
    fn is_deferred(&self) -> bool {
        self.is_message() && self.due == Some(MessageDocument::DEFERRED)
    }

    /// What is left of a message that another instance has sent: it may be delivered again.
    fn marker(&self, partition: &Partition) -> Option<DeliveredDocument> {
        let is_delivered = self.is_message() && self.delivered;
        is_delivered.then(|| DeliveredDocument::new(self.id.clone(), partition.clone()))
    }

    fn is_of_a_queue(&self) -> bool {
        self.is_queued() || self.kind == kind::PAYLOAD
    }

    fn is_queued(&self) -> bool {
        matches!(self.kind.as_str(), kind::MESSAGE | kind::ACTIVITY)
    }
}

/// Empties one partition; whether nothing is left. `noted` is what the counters have been told that they hold of it.
async fn erase(
    engine: &Arc<Engine>,
    found: Versioned<InstanceDocument>,
    decision: &Decision,
    patience: RecoveryBudget,
    noted: &mut Option<CountedFigures>,
    result: &mut DeleteInstanceResult,
) -> Result<bool, StoreError> {
    let partition = found.document.instance_id.clone();
    let mut known = Some(found);
    loop {
        let found = match known.take() {
            Some(found) => Some(found),
            None => {
                let partition = std::slice::from_ref(&partition);
                let mut leaving = counters::note_leaving(engine, partition, &decision.mark, &Documents::new()).await?;
                match leaving.trouble {
                    Some(error) => return Err(error),
                    None => leaving.instances.pop(),
                }
            }
        };
        engine.cache.forget(&partition);
        let Some(found) = found else { return Ok(true) };
        noted.clone_from(&found.document.counted);
        match empty(engine, &found, decision, patience, result).await? {
            Emptied::Wholly => {
                result.instances_deleted = u64::from(found.document.exists());
                result.queue_messages_deleted += u64::from(found.document.inlined.is_some());
                result.executions_deleted = found.document.totals.executions;
                result.events_deleted = found.document.totals.events;
                sweep_late(engine, &partition, decision).await?;
                return Ok(true);
            }
            Emptied::LookAgain if !patience.is_over() => {}
            Emptied::LookAgain => return Ok(false),
        }
    }
}

enum Emptied {
    /// The instance's document is gone, too.
    Wholly,
    /// It or another document has changed meanwhile, or the time is up.
    LookAgain,
}

/// Deletes everything but what may be meant for a new instance. The instance's document fences it, and goes last.
async fn empty(
    engine: &Arc<Engine>,
    found: &Versioned<InstanceDocument>,
    decision: &Decision,
    patience: RecoveryBudget,
    result: &mut DeleteInstanceResult,
) -> Result<Emptied, StoreError> {
    let (partition, mut etag) = (&found.document.instance_id, found.etag.clone());
    let mut document = found.document.clone();
    document.keep_service_times();
    let (next, mut rows) = tell_apart(contents(engine, partition, decision).await?, decision);
    // A marker outlives its instance: what it marks may be delivered again, as long as the sender has its intent.
    rows.retain(|row| !matches!(row.kind.as_str(), kind::INSTANCE | kind::DELIVERED));
    let documents = rows.len();
    while rows.len() >= operation::MAX_OPERATIONS {
        let chunk = rows.split_off(rows.len() - (operation::MAX_OPERATIONS - 1));
        let fence = Operation::replace(instance_id(), &document, Some(&etag))?;
        let Deleted::Now(Some(fence)) = delete_with(engine, partition, fence, &chunk, result).await? else {
            return Ok(Emptied::LookAgain);
        };
        etag = fence;
        if patience.is_over() {
            return Ok(Emptied::LookAgain);
        }
    }
    let last = Operation::delete(instance_id(), Some(&etag));
    if let Deleted::Not = delete_with(engine, partition, last, &rows, result).await? {
        return Ok(Emptied::LookAgain);
    }
    debug!(%partition, documents, "erased");
    if !next.is_empty() {
        engine.discovery.turn_returned(partition, engine.now());
    }
    Ok(Emptied::Wholly)
}

/// What is meant for the next instance of the same name, and what goes.
fn tell_apart(rows: Vec<ErasableRow>, decision: &Decision) -> (Vec<ErasableRow>, Vec<ErasableRow>) {
    let starts = rows.iter().filter(|row| row.starts && row.is_for_the_next(decision));
    let first = starts.filter_map(|row| row.seq.clone()).min();
    let follows = |row: &ErasableRow| first.as_ref().is_some_and(|first| row.follows(first, decision));
    rows.into_iter().partition(|row| row.is_for_the_next(decision) || follows(row))
}

async fn contents(
    engine: &Arc<Engine>,
    partition: &Partition,
    decision: &Decision,
) -> Result<Vec<ErasableRow>, StoreError> {
    let statement = queries::CONTENTS.statement().authoritative();
    let mut rows: Vec<ErasableRow> = engine.store.query_partition(partition, statement, engine.per_page()).await?;
    for row in rows.iter_mut().filter(|row| row.is_contested(decision)) {
        row.has_sender = row.is_from_one_that_is_there(engine).await?;
    }
    Ok(rows)
}

enum Deleted {
    /// The instance's document has this ETag now, none where it is gone.
    Now(Option<Etag>),
    Not,
}

/// One batch: what fences it, and the deletions.
async fn delete_with(
    engine: &Engine,
    partition: &Partition,
    fence: Operation,
    rows: &[ErasableRow],
    result: &mut DeleteInstanceResult,
) -> Result<Deleted, StoreError> {
    let mut operations = vec![fence];
    for row in rows {
        operations.push(match row.marker(partition) {
            Some(marker) => Operation::upsert(&marker)?,
            None => Operation::delete(row.id.clone(), None),
        });
    }
    let deleted = match engine.store.batch(partition, &operations, engine.deadline()).await? {
        BatchOutcome::Committed(committed) => Deleted::Now(committed.etag(0).cloned()),
        // The document is gone: we have deleted it and the answer was lost, or somebody was faster.
        BatchOutcome::RolledBack(back) if back.index == 0 && back.status == 404 => Deleted::Now(None),
        BatchOutcome::RolledBack(_) => return Ok(Deleted::Not),
    };
    result.queue_messages_deleted += rows.iter().filter(|row| row.is_queued()).count() as u64;
    Ok(deleted)
}

/// Deletes messages and activities that came between the last look and the end, or that it did not show, unless there is a new instance, which
/// they may be for.
async fn sweep_late(engine: &Arc<Engine>, partition: &Partition, decision: &Decision) -> Result<(), StoreError> {
    let rows = contents(engine, partition, decision).await?;
    if rows.iter().any(|row| row.kind == kind::INSTANCE) {
        return Ok(());
    }
    let (_, rows) = tell_apart(rows, decision);
    let late = rows.into_iter().filter(ErasableRow::is_of_a_queue);
    let (delivered, others): (Vec<ErasableRow>, Vec<ErasableRow>) =
        late.partition(|row| row.marker(partition).is_some());
    for row in delivered {
        let marker = row.marker(partition);
        engine.store.replace(partition, &row.id, &marker, Some(&row.etag), engine.deadline()).await?;
    }
    remove(engine, partition, &others.into_iter().map(|row| (row.id, row.etag)).collect::<Vec<_>>()).await
}

/// Deletes documents in batches, each as long as it is the very one that was judged. One that is gone already, or is another
/// one now, is no reason to stop.
pub(super) async fn remove(
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
