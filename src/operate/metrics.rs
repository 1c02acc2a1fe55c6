//! The system metrics and the queue depths, without `COUNT`.

use crate::{
    cosmos::{queries, Deadline, StoreError, Versioned},
    discovery::shared_result,
    engine::Engine,
    lifecycle::{
        counters::{fold_soon, is_leased, read_counters, WORTH_FOLDING},
        recovery::deleted_among,
    },
    model::{status, CountedFigures, CountersDocument, Deleting, Partition, Totals},
};
use azure_core::http::Etag;
use duroxide::providers::{QueueDepths, SystemMetrics};
use futures::TryFutureExt;
use serde::{Deserialize, Serialize};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};
use tracing::warn;

/// The number of reads of the metrics. They are read again if figures have moved meanwhile.
const MAX_READS: usize = 5;

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OpenRow {
    instance_id: Partition,
    #[serde(default)]
    status: Option<String>,
    #[serde(default)]
    totals: Totals,
    #[serde(default)]
    counted: Option<CountedFigures>,
    #[serde(default)]
    deleting: Option<Deleting>,
}

impl OpenRow {
    fn figures(&self) -> Option<CountedFigures> {
        Some(CountedFigures { status: self.status.clone()?, totals: self.totals, round: String::new() })
    }

    fn can_be_folded(&self) -> bool {
        self.deleting.is_none() && self.status.as_deref().is_some_and(status::instance_has_ended)
    }
}

/// The metrics as a shared result for other workers.
#[derive(Clone, Serialize, Deserialize)]
struct SharedMetrics(#[serde(with = "MetricsFields")] SystemMetrics);

#[derive(Serialize, Deserialize)]
#[serde(remote = "SystemMetrics", rename_all = "camelCase")]
struct MetricsFields {
    total_instances: u64,
    total_executions: u64,
    running_instances: u64,
    completed_instances: u64,
    failed_instances: u64,
    total_events: u64,
}

/// The system metrics. A worker among others gets a shared result, which is at most a minute old.
pub(crate) async fn shared_system(engine: &Arc<Engine>) -> Result<SystemMetrics, StoreError> {
    let compute = system(engine).map_ok(SharedMetrics);
    Ok(shared_result::get_or_compute(engine, shared_result::SYSTEM_METRICS, compute).await?.into_inner().0)
}

/// Computes the system metrics. They are exact for up to 1,000 open instances. Beyond that, the figures of open
/// instances are lower bounds.
async fn system(engine: &Arc<Engine>) -> Result<SystemMetrics, StoreError> {
    let deadline = engine.deadline();
    let mut counters = read_counters(engine, deadline).await?;
    let mut open = open_instances(engine, deadline).await?;
    for _ in 1..MAX_READS {
        // Figures that moved into the counters between the two reads would be missing from both.
        let again = read_counters(engine, deadline).await?;
        if version(again.as_ref()) == version(counters.as_ref()) {
            break;
        }
        counters = again;
        open = open_instances(engine, deadline).await?;
    }
    let counters = counters.map_or_else(CountersDocument::new, |counters| counters.document);
    // The fold runs in the background, so that the caller does not wait for it. It also settles pending steps that a
    // process has left.
    let has_abandoned_steps = !counters.folding.is_empty() && !is_leased(engine, &counters);
    if has_abandoned_steps || open.rows.iter().filter(|row| row.can_be_folded()).count() >= WORTH_FOLDING {
        fold_soon(engine);
    }
    sum(engine, &counters, &open, deadline).await
}

fn version(counters: Option<&Versioned<CountersDocument>>) -> Option<&Etag> {
    counters.map(|counters| &counters.etag)
}

/// The readable open instances, and the partitions of the unreadable ones, which are not counted.
struct OpenInstances {
    rows: Vec<OpenRow>,
    unreadable: HashSet<String>,
}

async fn open_instances(engine: &Engine, deadline: Deadline) -> Result<OpenInstances, StoreError> {
    let found = engine.store.query_container(queries::OPEN_INSTANCES.statement().in_background(), deadline).await?;
    let (rows, unreadable) = found.into_parts();
    let unreadable: HashSet<String> = unreadable.iter().map(|one| one.partition().to_owned()).collect();
    if !unreadable.is_empty() {
        warn!(instances = unreadable.len(), "the metrics do not count instances that this version can't read");
    }
    Ok(OpenInstances { rows, unreadable })
}

async fn sum(
    engine: &Arc<Engine>,
    counters: &CountersDocument,
    OpenInstances { rows: open, unreadable }: &OpenInstances,
    deadline: Deadline,
) -> Result<SystemMetrics, StoreError> {
    let mut total = counters.clone();
    let mut running = 0i64;
    let rows: HashMap<&str, &OpenRow> = open.iter().map(|row| (row.instance_id.as_str(), row)).collect();
    for (id, step) in &counters.folding {
        // If the document is not open any more, or shows the step, the step is taken and not counted yet.
        if !unreadable.contains(id) && rows.get(id.as_str()).is_none_or(|row| row.counted == step.now) {
            total.count_step(step);
        }
    }
    let deleted = deleted_among(engine, prepared(open), deadline).await?;
    for row in open {
        if let Some(counted) = &row.counted {
            total.count(counted, -1);
        }
        if let Some(figures) = row.figures().filter(|_| !deleted.contains(&row.instance_id)) {
            total.count(&figures, 1);
            running += i64::from(figures.status == status::RUNNING);
        }
    }
    let figure = |n: i64| u64::try_from(n).unwrap_or(0);
    Ok(SystemMetrics {
        total_instances: figure(total.completed + total.failed + total.other),
        total_executions: figure(total.executions),
        running_instances: figure(running),
        completed_instances: figure(total.completed),
        failed_instances: figure(total.failed),
        total_events: figure(total.events),
    })
}

fn prepared(open: &[OpenRow]) -> Vec<(Partition, Deleting)> {
    open.iter().filter_map(|row| Some((row.instance_id.clone(), row.deleting.clone()?))).collect()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MessageDepthRow {
    instance_id: Partition,
}

#[derive(Deserialize)]
struct ActivityDepthRow {
    /// An unreadable lock counts as no lock.
    #[serde(default)]
    until: serde_json::Value,
}

/// The queue depths as a shared result for other workers.
#[derive(Clone, Serialize, Deserialize)]
struct SharedDepths(#[serde(with = "DepthsFields")] QueueDepths);

#[derive(Serialize, Deserialize)]
#[serde(remote = "QueueDepths", rename_all = "camelCase")]
struct DepthsFields {
    orchestrator_queue: usize,
    worker_queue: usize,
    timer_queue: usize,
}

/// The queue depths. A worker among others gets a shared result, which is at most a minute old.
pub(crate) async fn shared_queue_depths(engine: &Arc<Engine>) -> Result<QueueDepths, StoreError> {
    let compute = queue_depths(engine).map_ok(SharedDepths);
    Ok(shared_result::get_or_compute(engine, shared_result::QUEUE_DEPTHS, compute).await?.into_inner().0)
}

/// Computes the unlocked messages and activities: exact up to 1,000 of each.
async fn queue_depths(engine: &Arc<Engine>) -> Result<QueueDepths, StoreError> {
    let (deadline, now) = (engine.deadline(), engine.now());
    let messages = engine.store.query_container(queries::MESSAGE_DEPTH.statement().in_background(), deadline).await?;
    let messages: Vec<MessageDepthRow> = messages.readable();
    let activities =
        engine.store.query_container(queries::ACTIVITY_DEPTH.statement().in_background(), deadline).await?;
    let activities: Vec<ActivityDepthRow> = activities.readable();
    // A message is locked with its instance. Only the holder of the lock knows this without a read of each instance.
    let locked: std::collections::HashSet<Partition> = engine.turns.iter().map(|t| t.partition.clone()).collect();
    Ok(QueueDepths {
        orchestrator_queue: messages.iter().filter(|row| !locked.contains(&row.instance_id)).count(),
        worker_queue: activities.iter().filter(|row| row.until.as_u64().is_none_or(|until| until <= now)).count(),
        timer_queue: 0,
    })
}
