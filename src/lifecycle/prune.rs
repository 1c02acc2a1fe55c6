//! Pruning: deletes old executions of an instance that continues as new.
//!
//! Executions are pruned in slices, the oldest first. One write puts the numbers of a slice into the instance's
//! document (`pruning`). From then on these executions do not exist for any reader. The process then erases their
//! documents and removes the numbers last. After a crash in between, the next call does both.
//!
//! Invariants:
//!
//! - Every number in `pruning` is below the `execution` of its document.
//! - A slice is subtracted from the totals once, even if two processes prune the same instance.

use super::{erase, trees, Failures};
use crate::{
    cosmos::{or_default, queries, Deadline, Rows, StoreError, Versioned, WriteOutcome},
    engine::Engine,
    model::{kind, status, DocumentId, InstanceDocument},
    turn::{instance_id, staging},
};
use azure_core::http::Etag;
use duroxide::providers::{InstanceFilter, ProviderError, PruneOptions, PruneResult};
use futures::{stream, StreamExt};
use serde::Deserialize;
use std::{collections::HashSet, num::NonZeroU32, sync::Arc};

const OPERATION: &str = "prune_executions";
/// Instances of a bulk operation that are pruned at once.
const CONCURRENCY: usize = 8;
/// The largest number of executions in a slice. It bounds the instance's document and the memory of a call.
const SLICE: usize = 500;
/// The largest number of events in a slice.
const SLICE_EVENTS: u64 = 50_000;
/// Rows in a page of executions.
const PAGE: NonZeroU32 = NonZeroU32::new(500).unwrap();

/// Prunes the executions of one instance that `options` select. The current execution and running ones always stay.
pub(crate) async fn prune(
    engine: &Arc<Engine>,
    instance: &str,
    options: &PruneOptions,
) -> Result<PruneResult, ProviderError> {
    let pruned = prune_if(engine, instance, options, |_| true).await?;
    pruned.ok_or_else(|| ProviderError::permanent(OPERATION, format!("Instance {instance} not found")))
}

/// Prunes an instance if it exists and meets a condition.
async fn prune_if(
    engine: &Arc<Engine>,
    instance: &str,
    options: &PruneOptions,
    condition: impl Fn(&InstanceDocument) -> bool,
) -> Result<Option<PruneResult>, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    let found = trees::latest(engine, instance).await.map_err(failed)?;
    let Some(found) = found.filter(|found| condition(&found.document)) else { return Ok(None) };
    prune_all(engine, &found.document, options).await.map(Some).map_err(failed)
}

/// Prunes the incarnation that was read, slice by slice.
async fn prune_all(
    engine: &Arc<Engine>,
    instance: &InstanceDocument,
    options: &PruneOptions,
) -> Result<PruneResult, StoreError> {
    let partition = &instance.instance_id;
    if instance.commit.roll_forward.is_some() {
        staging::roll_forward(engine, partition, engine.deadline()).await?;
    }
    let mut result = PruneResult { instances_processed: 1, ..PruneResult::default() };
    let mut after = 0;
    loop {
        let slice = prune_slice(engine, instance, options, after).await?;
        let Some(last) = slice.last() else { return Ok(result) };
        after = last.execution;
        result.executions_deleted += slice.len() as u64;
        result.events_deleted += slice.iter().map(|e| e.events.len()).sum::<u64>();
    }
}

/// Commits the next slice: its executions do not exist for any reader any more, but their documents are not erased yet.
/// The slice is empty if everything is pruned and erased, or if the instance is deleted.
async fn prune_slice(
    engine: &Engine,
    instance: &InstanceDocument,
    options: &PruneOptions,
    after: u64,
) -> Result<Vec<trees::PastExecution>, StoreError> {
    loop {
        let Some(found) = erase_pending(engine, instance).await? else { return Ok(Vec::new()) };
        let slice = choose_slice(engine, &found.document, options, after).await?;
        // The query may have had many pages, so the commit has a deadline of its own.
        if slice.is_empty() || commit_slice(engine, found, &slice, engine.deadline()).await? {
            return Ok(slice);
        }
    }
}

/// Reads the instance's document, if it is still the same incarnation.
async fn read_same(
    engine: &Engine,
    instance: &InstanceDocument,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let found = engine.read_latest(&instance.instance_id, deadline).await?;
    Ok(found.filter(|found| found.document.origin.incarnation == instance.origin.incarnation))
}

/// The oldest executions after a number that can be pruned, by the document that was read.
async fn choose_slice(
    engine: &Engine,
    document: &InstanceDocument,
    options: &PruneOptions,
    after: u64,
) -> Result<Vec<trees::PastExecution>, StoreError> {
    let below = first_kept(engine, document, options.keep_last).await?;
    let statement = queries::EXECUTIONS_BETWEEN.statement().bind("@after", after).bind("@below", below);
    let statement = statement.in_pages_of(PAGE).authoritative();
    let mut pages = engine.store.partition_pages(&document.instance_id, statement, engine.per_page())?;
    let (mut slice, mut events) = (Vec::new(), 0);
    while let Some(page) = pages.next().await? {
        // An execution whose document can't be read is not pruned.
        let page: Rows<trees::PastExecution> = page;
        for past in page.readable().into_iter().filter(|past| may_go(past, options)) {
            events += past.events.len();
            if slice.len() == SLICE || (events > SLICE_EVENTS && !slice.is_empty()) {
                return Ok(slice);
            }
            slice.push(past);
        }
    }
    Ok(slice)
}

/// The oldest execution that `keep_last` keeps. The current one is always among them.
async fn first_kept(engine: &Engine, document: &InstanceDocument, keep_last: Option<u32>) -> Result<u64, StoreError> {
    let current = document.current.execution;
    let others = keep_last.unwrap_or(1).max(1) as usize - 1;
    if others == 0 {
        return Ok(current);
    }
    #[derive(Deserialize)]
    struct Number {
        execution: u64,
    }
    let statement = queries::LAST_EXECUTIONS.statement().bind("@below", current).in_pages_of(PAGE).authoritative();
    let mut pages = engine.store.partition_pages::<Number>(&document.instance_id, statement, engine.per_page())?;
    let mut kept = Vec::new();
    while kept.len() < others {
        // The instance has fewer executions than `keep_last` keeps.
        let Some(page) = pages.next().await? else { return Ok(0) };
        kept.extend(page.readable().into_iter().map(|past| past.execution));
    }
    Ok(kept[others - 1])
}

fn may_go(past: &trees::PastExecution, options: &PruneOptions) -> bool {
    let is_old = |before: u64| past.ended_at.is_some_and(|ended| ended < before);
    status::execution_has_ended(&past.status) && options.completed_before.is_none_or(is_old)
}

/// Writes the numbers of a slice: from then on its executions do not exist. Returns `false` if the slice must be chosen
/// again.
async fn commit_slice(
    engine: &Engine,
    chosen_by: Versioned<InstanceDocument>,
    slice: &[trees::PastExecution],
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Versioned { mut document, mut etag } = chosen_by;
    loop {
        let partition = &document.instance_id;
        let mut next = document.clone();
        next.keep_service_times();
        next.removal.pruning.extend(slice.iter().map(|e| e.execution));
        next.counting.totals.executions = next.counting.totals.executions.saturating_sub(slice.len() as u64);
        let events = slice.iter().map(|e| e.events.len()).sum();
        next.counting.totals.events = next.counting.totals.events.saturating_sub(events);
        next.counting.count_pending = Some("open".to_owned());
        let written = engine.store.replace(partition, &instance_id(), &next, Some(&etag), deadline).await?;
        engine.cache.forget(partition);
        if let WriteOutcome::Done(_) = written {
            return Ok(true);
        }
        let Some(now) = read_same(engine, &document, deadline).await? else { return Ok(false) };
        // An earlier write succeeded, and its answer was lost.
        if now.document.removal.pruning == next.removal.pruning {
            return Ok(true);
        }
        if !has_same_past(&document, &now.document) {
            return Ok(false);
        }
        Versioned { document, etag } = now;
    }
}

/// Whether no process has pruned the instance between the two versions. Then the executions that were chosen by the
/// first one exist, are counted, and are below the current execution of the second one.
fn has_same_past(before: &InstanceDocument, now: &InstanceDocument) -> bool {
    let past =
        |document: &InstanceDocument| document.counting.totals.executions as i64 - document.current.execution as i64;
    before.removal.pruning == now.removal.pruning && past(before) == past(now)
}

#[derive(Deserialize)]
struct PrunableRow {
    #[serde(deserialize_with = "DocumentId::of_any")]
    id: DocumentId,
    #[serde(rename = "_etag")]
    etag: Etag,
    #[serde(rename = "type", default, deserialize_with = "or_default")]
    kind: String,
    execution: u64,
}

/// Erases all executions that were pruned: by this call, by a call that died, or by another process. Returns the
/// instance after that.
async fn erase_pending(
    engine: &Engine,
    instance: &InstanceDocument,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    loop {
        let Some(found) = read_same(engine, instance, engine.deadline()).await? else { return Ok(None) };
        if found.document.removal.pruning.is_empty() {
            return Ok(Some(found));
        }
        erase_pruned(engine, &found.document).await?;
    }
}

/// Erases the executions that were pruned before the instance was read, and removes their numbers.
///
/// The documents are listed before the instance is read again. Documents of an earlier incarnation are deleted by then,
/// or have other ETags. Numbers that another process has added meanwhile stay, since the list lacks the documents of
/// those executions.
async fn erase_pruned(engine: &Engine, before: &InstanceDocument) -> Result<(), StoreError> {
    let partition = &before.instance_id;
    let Some((from, to)) = before.removal.pruning.iter().min().zip(before.removal.pruning.iter().max()) else {
        return Ok(());
    };
    let statement = queries::OF_EXECUTIONS.statement().bind("@from", from).bind("@to", to).authoritative();
    let rows: Vec<PrunableRow> = engine.store.query_partition(partition, statement, engine.per_page()).await?;
    let Some(found) = read_same(engine, before, engine.deadline()).await? else { return Ok(()) };
    let instance = found.document;
    let pruned: HashSet<u64> =
        instance.removal.pruning.iter().copied().filter(|e| before.removal.pruning.contains(e)).collect();
    if pruned.is_empty() {
        return Ok(());
    }
    let (history, executions): (Vec<PrunableRow>, Vec<PrunableRow>) =
        rows.into_iter().filter(|row| pruned.contains(&row.execution)).partition(|row| row.kind == kind::HISTORY);
    let judged = |rows: Vec<PrunableRow>| rows.into_iter().map(|row| (row.id, row.etag)).collect::<Vec<_>>();
    // Each batch has a deadline of its own, since there may be thousands.
    erase::delete_documents(engine, partition, &judged(history)).await?;
    erase::delete_documents(engine, partition, &judged(executions)).await?;
    remove_numbers(engine, &instance, &pruned).await
}

/// Removes the numbers of erased executions from the document of this incarnation.
async fn remove_numbers(engine: &Engine, instance: &InstanceDocument, erased: &HashSet<u64>) -> Result<(), StoreError> {
    let (partition, deadline) = (&instance.instance_id, engine.deadline());
    while let Some(Versioned { mut document, etag }) = read_same(engine, instance, deadline).await? {
        document.removal.pruning.retain(|execution| !erased.contains(execution));
        let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(partition);
        if let WriteOutcome::Done(_) = written {
            break;
        }
    }
    Ok(())
}

/// Prunes the instances that a filter selects, several at a time.
pub(crate) async fn prune_bulk(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
    options: &PruneOptions,
) -> Result<PruneResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("prune_executions_bulk");
    let candidates = trees::candidates(engine, filter, |_| true, "prune_executions_bulk").await?;
    let chosen = trees::select(engine, candidates, filter, |_| true).await.map_err(failed)?;
    let mut pruning = stream::iter(chosen)
        .map(|(instance, incarnation)| async move {
            // A new instance with the same id is not the one that the filter selected.
            let pruned =
                prune_if(engine, &instance, options, |document| document.origin.incarnation == incarnation.incarnation)
                    .await;
            (instance, pruned)
        })
        .buffer_unordered(CONCURRENCY);
    let (mut result, mut failures) = (PruneResult::default(), Failures::default());
    while let Some((instance, pruned)) = pruning.next().await {
        match pruned {
            Ok(pruned) => {
                let pruned = pruned.unwrap_or_default();
                result.instances_processed += pruned.instances_processed;
                result.executions_deleted += pruned.executions_deleted;
                result.events_deleted += pruned.events_deleted;
            }
            Err(error) => failures.record(&instance, error),
        }
    }
    failures.into_result(result.instances_processed > 0, result)
}
