//! Retention: what has ended long enough ago goes by itself.
//!
//! The commit that ends a root instance writes how and when (`ended`), which the index has: no request more. A round, begun by one member
//! every half a minute, asks for those whose time is over by the present setting, oldest first, and deletes them as a bulk deletion does, each
//! with its family, if all of it has ended. So a setting that was changed holds for what ended before.
//!
//! Invariants: those of deletion. Nothing goes that has not ended, nor a part of a family. A round takes half of the time at most, and every
//! request of it lets others go first where throughput is short.
//!
//! Crash points: those of deletion. What a round has left is found by the next, of whichever process.

use super::{delete, prune, shared};
use crate::{
    engine::Engine,
    model::{clock::millis, Deleting, Ending, Millis, Partition},
    store::{in_background, queries, StoreError, WriteOutcome},
    turn::{instance_id, release::read_latest},
};
use duroxide::PruneOptions;
use serde::Deserialize;
use std::{collections::HashSet, sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::{debug, info, warn};

/// How often a process thinks of it: a little less often than another's word for it lasts.
const EVERY: Duration = Duration::from_secs(27);
/// How long a round takes at most, unless a page of deletions takes longer.
const ROUND: Duration = Duration::from_secs(25);
/// A family that can't go yet is looked at again after that.
const PUT_OFF: Millis = 10 * 60 * 1_000;
/// Rows of the query, and so many families go together.
const PAGE: usize = 1_000;

/// A root that has ended.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    instance_id: Partition,
    #[serde(default)]
    deleting: Option<Deleting>,
}

/// Begins a round in the background, if it is this process's turn.
pub(crate) fn soon(engine: &Arc<Engine>) {
    if !engine.config.retention().takes_instances() {
        return;
    }
    let engine_too = engine.clone();
    engine.spawn(async move {
        let Ok(mut last) = engine_too.retiring.try_lock() else { return };
        if last.is_some_and(|last| last.elapsed() < EVERY) {
            return;
        }
        *last = Some(Instant::now());
        if !shared::begins(&engine_too, shared::RETENTION).await {
            return;
        }
        match round(&engine_too).await {
            Ok(0) => {}
            Ok(gone) => info!(instances = gone, "deleted what had ended long enough ago"),
            Err(error) => warn!(%error, "what has ended long enough ago is deleted later"),
        }
    });
}

/// Deletes what has ended long enough ago; how many instances. All of it lets others go first.
pub(crate) async fn round(engine: &Arc<Engine>) -> Result<u64, StoreError> {
    in_background(retire_all(engine)).await
}

async fn retire_all(engine: &Arc<Engine>) -> Result<u64, StoreError> {
    let setting = engine.config.retention();
    let ways = [
        (Ending::Completed, setting.completed()),
        (Ending::Failed, setting.failed()),
        (Ending::Cancelled, setting.cancelled()),
    ];
    let (begun, mut gone) = (Instant::now(), 0);
    for (ending, age) in ways {
        if let Some(age) = age {
            gone += retire(engine, ending, millis(age), begun).await?;
        }
    }
    Ok(gone)
}

/// Deletes those that have ended in one way, page by page.
async fn retire(engine: &Arc<Engine>, ending: Ending, age: Millis, begun: Instant) -> Result<u64, StoreError> {
    let (mut gone, mut tried) = (0, HashSet::new());
    while begun.elapsed() < ROUND && !engine.stopping.is_cancelled() {
        let page = Instant::now();
        let before = engine.now().saturating_sub(age);
        let statement = queries::ENDED.statement().bind("@from", ending.at(0)).bind("@to", ending.at(before));
        let rows: Vec<Row> = engine.store.query_container(statement, engine.deadline()).await?;
        let is_last = rows.len() < PAGE;
        let (again, new): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|row| tried.contains(&row.instance_id));
        for row in again {
            put_off(engine, &row, ending, before).await?;
        }
        if new.is_empty() {
            return Ok(gone);
        }
        let roots: Vec<String> =
            new.iter().filter_map(|row| row.instance_id.instance_id().map(ToOwned::to_owned)).collect();
        let bulk = delete::delete_families(engine, &roots, false).await;
        gone += bulk.result.instances_deleted;
        debug!(families = roots.len(), instances = bulk.result.instances_deleted, "a page of what has ended");
        tried.extend(new.into_iter().map(|row| row.instance_id));
        if is_last && tried.len() == roots.len() && bulk.is_whole() {
            return Ok(gone);
        }
        // Others have as much of the time.
        tokio::time::sleep(page.elapsed()).await;
    }
    Ok(gone)
}

/// A family that could not go, since a member of it runs: it makes room for those behind it.
async fn put_off(engine: &Arc<Engine>, row: &Row, ending: Ending, before: Millis) -> Result<(), StoreError> {
    if row.deleting.is_some() {
        // A deletion that is under way, or was left half-way, is finished by whoever meets it.
        return Ok(());
    }
    let deadline = engine.deadline();
    let Some(found) = read_latest(engine, &row.instance_id, deadline).await? else { return Ok(()) };
    let mut document = found.document;
    if document.ended.is_none() || document.deleting.is_some() {
        return Ok(());
    }
    document.ended = Some(ending.at(before.saturating_add(PUT_OFF)));
    let written =
        engine.store.replace(&row.instance_id, &instance_id(), &document, Some(&found.etag), deadline).await?;
    engine.cache.forget(&row.instance_id);
    if let WriteOutcome::Done(_) = written {
        debug!(instance_id = row.instance_id.instance_id(), "a family that has not ended as a whole is kept for now");
    }
    Ok(())
}

/// Prunes old executions of an instance that has begun this one, if it is time for that.
pub(crate) fn prune_soon(engine: &Arc<Engine>, partition: &Partition, execution: u64) {
    let Some(keep) = engine.config.retention().prunes_at(execution) else { return };
    let (engine_too, instance) = (engine.clone(), partition.instance_id().unwrap_or_default().to_owned());
    engine.spawn(async move {
        let options = PruneOptions { keep_last: Some(keep), ..PruneOptions::default() };
        match in_background(prune::prune(&engine_too, &instance, &options)).await {
            Ok(pruned) => debug!(instance_id = instance, executions = pruned.executions_deleted, "pruned"),
            Err(error) => warn!(instance_id = instance, %error, "old executions go later"),
        }
    });
}
