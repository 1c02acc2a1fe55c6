//! Pruning: old executions of an instance that continues as new.
//!
//! The write that puts the executions' numbers into the instance's document decides: from then on they are not there for
//! anybody who looks. Their documents are erased after it, and the numbers taken out at last. A crash in between leaves them
//! for the next call.

use super::{erase, inspect, Failures};
use crate::{
    engine::Engine,
    model::{kind, status, DocumentId, InstanceDocument, Partition},
    store::{queries, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    turn::{instance_id, release::read_latest},
};
use azure_core::http::Etag;
use duroxide::providers::{InstanceFilter, ProviderError, PruneOptions, PruneResult};
use futures::{stream, StreamExt};
use serde::Deserialize;
use std::sync::Arc;

const OPERATION: &str = "prune_executions";
/// Instances of a bulk operation that are pruned at once.
const CONCURRENCY: usize = 8;

/// Prunes the executions of one instance that `options` select. The current one, and those that run, always stay.
pub(crate) async fn prune(
    engine: &Arc<Engine>,
    instance: &str,
    options: &PruneOptions,
) -> Result<PruneResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    let deadline = engine.deadline();
    let partition = inspect::existing(engine, instance, OPERATION).await?.document.instance_id;
    finish(engine, &partition, deadline).await.map_err(failed)?;
    // Memory and other regions may know an older execution as the current one.
    let Some(found) = read_latest(engine, &partition, deadline).await.map_err(failed)? else {
        return Err(ProviderError::permanent(OPERATION, format!("Instance {instance} not found")));
    };
    let freshness = Freshness::Authoritative;
    let past = inspect::past_executions(engine, &found.document, freshness, deadline).await.map_err(failed)?;
    let doomed = select(&found.document, past, options);
    let mut result = PruneResult { instances_processed: 1, ..PruneResult::default() };
    if doomed.is_empty() {
        return Ok(result);
    }
    if !decide(engine, &found.document, &doomed, deadline).await.map_err(failed)? {
        return Ok(result);
    }
    result.executions_deleted = doomed.len() as u64;
    result.events_deleted = doomed.iter().map(|e| e.events.len()).sum();
    finish(engine, &partition, engine.deadline()).await.map_err(failed)?;
    Ok(result)
}

fn select(
    document: &InstanceDocument,
    past: Vec<inspect::PastExecution>,
    options: &PruneOptions,
) -> Vec<inspect::PastExecution> {
    // The current execution is one of those that are kept.
    let keep = options.keep_last.unwrap_or(1).max(1) as usize - 1;
    let mut old: Vec<_> = past.into_iter().filter(|e| e.execution != document.execution).collect();
    old.sort_by_key(|e| std::cmp::Reverse(e.execution));
    old.into_iter()
        .skip(keep)
        .filter(|e| e.status != status::RUNNING)
        .filter(|e| options.completed_before.is_none_or(|before| e.ended_at.is_some_and(|ended| ended < before)))
        .collect()
}

/// The write from which on the executions are not there any more; `false` where the instance is gone, or another has its name.
async fn decide(
    engine: &Engine,
    instance: &InstanceDocument,
    doomed: &[inspect::PastExecution],
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let change = |document: &mut InstanceDocument| {
        // Those that are there already were put in by an attempt whose answer was lost.
        for pruned in doomed.iter().filter(|e| !document.pruning.contains(&e.execution)).collect::<Vec<_>>() {
            document.totals.executions = document.totals.executions.saturating_sub(1);
            document.totals.events = document.totals.events.saturating_sub(pruned.events.len());
            document.pruning.push(pruned.execution);
        }
        document.tally = Some("open".to_owned());
    };
    rewrite(engine, instance, change, deadline).await
}

/// Changes the document of this very instance; `false` where it is gone, or another has its name.
async fn rewrite(
    engine: &Engine,
    instance: &InstanceDocument,
    change: impl Fn(&mut InstanceDocument),
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let partition = &instance.instance_id;
    loop {
        let found = read_latest(engine, partition, deadline).await?;
        let Some(Versioned { mut document, etag }) = found.filter(|f| f.document.born == instance.born) else {
            return Ok(false);
        };
        change(&mut document);
        let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(partition);
        if let WriteOutcome::Done(_) = written {
            return Ok(true);
        }
    }
}

#[derive(Deserialize)]
struct Row {
    id: DocumentId,
    #[serde(rename = "_etag")]
    etag: Etag,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    execution: Option<u64>,
}

/// Erases what was pruned and takes the mark off.
///
/// The documents are looked at before the instance that judges them: those of a former instance of the same name are gone by
/// then, or have other ETags, and those of a later one are not among them.
async fn finish(engine: &Engine, partition: &Partition, deadline: Deadline) -> Result<(), StoreError> {
    let unfinished = |found: &Versioned<InstanceDocument>| !found.document.pruning.is_empty();
    if read_latest(engine, partition, deadline).await?.filter(unfinished).is_none() {
        return Ok(());
    }
    let rows: Vec<Row> =
        engine.store.query_partition(partition, queries::CONTENTS.statement().authoritative(), deadline).await?;
    let Some(found) = read_latest(engine, partition, deadline).await?.filter(unfinished) else { return Ok(()) };
    let instance = found.document;
    let pruned = |row: &Row| row.execution.is_some_and(|e| instance.pruning.contains(&e));
    let (history, executions): (Vec<Row>, Vec<Row>) = rows
        .into_iter()
        .filter(|row| matches!(row.kind.as_str(), kind::HISTORY | kind::EXECUTION) && pruned(row))
        .partition(|row| row.kind == kind::HISTORY);
    let judged = |rows: Vec<Row>| rows.into_iter().map(|row| (row.id, row.etag)).collect::<Vec<_>>();
    // Each batch has a deadline of its own: there may be thousands.
    erase::remove(engine, partition, &judged(history)).await?;
    erase::remove(engine, partition, &judged(executions)).await?;
    let forget = |document: &mut InstanceDocument| document.pruning.retain(|e| !instance.pruning.contains(e));
    rewrite(engine, &instance, forget, engine.deadline()).await?;
    Ok(())
}

/// Prunes the instances that a filter takes, several at a time.
pub(crate) async fn prune_bulk(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
    options: &PruneOptions,
) -> Result<PruneResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("prune_executions_bulk");
    let candidates = inspect::candidates(engine, filter, |_| true).await.map_err(failed)?;
    let chosen = inspect::chosen(engine, candidates, filter, |_| true).await.map_err(failed)?;
    let mut pruning = stream::iter(chosen)
        .map(|instance| async move {
            let pruned = prune(engine, &instance, options).await;
            (instance, pruned)
        })
        .buffer_unordered(CONCURRENCY);
    let (mut result, mut failures) = (PruneResult::default(), Failures::default());
    while let Some((instance, pruned)) = pruning.next().await {
        match pruned {
            Ok(pruned) => {
                result.instances_processed += pruned.instances_processed;
                result.executions_deleted += pruned.executions_deleted;
                result.events_deleted += pruned.events_deleted;
            }
            Err(error) => failures.note(&instance, error),
        }
    }
    failures.unless(result.instances_processed > 0, result)
}
