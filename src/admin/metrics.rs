//! Counting without `COUNT`: what finished is in the counters, what is open is few.
//!
//! An instance's document has `tally` while the counters don't hold its figures. The metrics are the counters plus the
//! figures of the open instances. Finished ones are *sealed*: their figures move into the counters, exactly once:
//!
//! 1. the counters note which instances take a step, from what they hold of each to what they will;
//! 2. each instance's document takes its step: it loses `tally` and notes what the counters hold of it;
//! 3. the counters add the figures of those that took it, and the note goes.
//!
//! An instance that is erased takes the step back to nothing in the same way. Whoever finds a note in the counters finishes
//! it first, so a crash at any point is mended by the next round. An instance that changes again is open again, contributes
//! the difference to what the counters hold of it, and is sealed again.

use super::delete;
use crate::{
    engine::Engine,
    model::{status, CountersDocument, Deleting, InstanceDocument, Partition, Sealed, Sealing, Totals},
    store::{queries, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    turn::{instance_id, release::read_latest},
};
use duroxide::providers::{QueueDepths, SystemMetrics};
use futures::{stream, StreamExt, TryStreamExt};
use serde::Deserialize;
use std::sync::Arc;
use tracing::debug;

/// Sealed in one round.
const ROUND: usize = 50;
/// Documents that are sealed at once.
const CONCURRENCY: usize = 16;

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OpenRow {
    instance_id: Partition,
    #[serde(default)]
    status: Option<String>,
    #[serde(default)]
    totals: Totals,
    #[serde(default)]
    sealed: Option<Sealed>,
    #[serde(default)]
    deleting: Option<Deleting>,
}

impl OpenRow {
    fn figures(&self, round: &str) -> Option<Sealed> {
        let status = self.status.clone()?;
        Some(Sealed { status, totals: self.totals, round: round.to_owned() })
    }
}

/// The system's figures: exact while at most 1,000 instances are open, a lower bound of what runs beyond that.
pub(crate) async fn system(engine: &Arc<Engine>) -> Result<SystemMetrics, StoreError> {
    let deadline = engine.deadline();
    // Sealing is housekeeping: it must not keep a caller from its answer.
    let time_to_seal = Deadline::after(engine.config.operation_timeout() / 2);
    loop {
        let counters = read_counters(engine, deadline).await?.map_or_else(CountersDocument::new, |c| c.document);
        let open = open_instances(engine, deadline).await?;
        let metrics = sum(engine, &counters, &open, deadline).await?;
        let finished = steps(&open);
        // Few finished ones are left for the next time; many would make every call dear.
        if finished.len() < ROUND || time_to_seal.passed() {
            return Ok(metrics);
        }
        for round in finished.chunks(ROUND) {
            seal(engine, round, deadline).await?;
        }
    }
}

async fn open_instances(engine: &Engine, deadline: Deadline) -> Result<Vec<OpenRow>, StoreError> {
    engine.store.query_container(queries::OPEN_INSTANCES.statement(), deadline).await
}

async fn read_counters(engine: &Engine, deadline: Deadline) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
    let (partition, id) = (CountersDocument::partition(), CountersDocument::document_id());
    engine.store.read(&partition, &id, Freshness::LatestCommitted, deadline).await
}

async fn sum(
    engine: &Arc<Engine>,
    counters: &CountersDocument,
    open: &[OpenRow],
    deadline: Deadline,
) -> Result<SystemMetrics, StoreError> {
    let mut total = counters.clone();
    let mut running = 0i64;
    for (id, step) in &counters.sealing {
        // Where its document is not open any more, or shows it, the step is taken and not counted yet.
        let row = open.iter().find(|row| row.instance_id.as_str() == id);
        if row.is_none_or(|row| row.sealed == step.now) {
            total.count_step(step);
        }
    }
    for row in open {
        if let Some(sealed) = &row.sealed {
            total.count(sealed, -1);
        }
        let deleted = match &row.deleting {
            Some(mark) => delete::is_decided(engine, &row.instance_id, mark, deadline).await?,
            None => false,
        };
        if let Some(figures) = row.figures("").filter(|_| !deleted) {
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

/// The steps of the finished instances. A row may be stale: whoever has sealed the instance since did so in another round, so
/// that the step can't be taken.
fn steps(open: &[OpenRow]) -> Vec<(String, Sealing)> {
    let round = Engine::new_token();
    open.iter()
        .filter(|row| row.deleting.is_none())
        .filter_map(|row| {
            let now = row.figures(&round).filter(|figures| status::is_terminal(&figures.status))?;
            let step = Sealing { was: row.sealed.clone(), now: Some(now) };
            Some((row.instance_id.as_str().to_owned(), step))
        })
        .collect()
}

/// Moves the figures of finished instances into the counters.
async fn seal(engine: &Arc<Engine>, round: &[(String, Sealing)], deadline: Deadline) -> Result<(), StoreError> {
    let mut current = settle(engine, deadline).await?;
    current.document.sealing = round.iter().cloned().collect();
    if write_counters(engine, &current, deadline).await? {
        settle(engine, deadline).await?;
    }
    Ok(())
}

/// Finishes what the counters note as being sealed, and returns them without a note.
async fn settle(engine: &Arc<Engine>, deadline: Deadline) -> Result<Versioned<CountersDocument>, StoreError> {
    loop {
        let Some(mut counters) = read_counters(engine, deadline).await? else {
            let fresh = CountersDocument::new();
            engine.store.create(&fresh.instance_id, &fresh.id, &fresh, deadline).await?;
            continue;
        };
        if counters.document.sealing.is_empty() {
            return Ok(counters);
        }
        let sealing = std::mem::take(&mut counters.document.sealing);
        debug!(instances = sealing.len(), "sealing finished instances");
        let taken: Vec<Option<Sealing>> = stream::iter(sealing)
            .map(|(id, step)| async move { Ok(take_step(engine, &id, &step, deadline).await?.then_some(step)) })
            .buffer_unordered(CONCURRENCY)
            .try_collect()
            .await?;
        for step in taken.iter().flatten() {
            counters.document.count_step(step);
        }
        write_counters(engine, &counters, deadline).await?;
    }
}

/// Takes the step of one instance's document; whether it is taken afterwards. It is not where the instance has changed.
async fn take_step(engine: &Engine, id: &str, step: &Sealing, deadline: Deadline) -> Result<bool, StoreError> {
    // The note holds the partition's own value.
    let Ok(partition) = serde_json::from_value::<Partition>(serde_json::Value::String(id.to_owned())) else {
        return Ok(false);
    };
    loop {
        let Some(Versioned { mut document, etag }) = read_latest(engine, &partition, deadline).await? else {
            // Erased: only a document that has taken the step to nothing is.
            return Ok(step.now.is_none());
        };
        if !step_is_open(&document, step) {
            return Ok(step.now.is_none() || document.sealed == step.now);
        }
        document.sealed.clone_from(&step.now);
        if step.now.is_some() {
            document.tally = None;
        }
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(_) = written {
            return Ok(true);
        }
    }
}

/// Whether a document can take the step and has not yet.
fn step_is_open(document: &InstanceDocument, step: &Sealing) -> bool {
    let Some(now) = &step.now else { return document.sealed == step.was };
    let same = document.totals == now.totals && document.status.as_ref() == Some(&now.status);
    let before = document.sealed == step.was && document.tally.is_some();
    same && before && document.deleting.is_none()
}

/// Takes an instance that is being erased out of the counters. Afterwards its document notes nothing of them.
pub(crate) async fn forget(engine: &Arc<Engine>, partition: &Partition, deadline: Deadline) -> Result<(), StoreError> {
    loop {
        let mut counters = settle(engine, deadline).await?;
        let found = read_latest(engine, partition, deadline).await?;
        let Some(was) = found.and_then(|found| found.document.sealed) else { return Ok(()) };
        let step = Sealing { was: Some(was), now: None };
        counters.document.sealing.insert(partition.as_str().to_owned(), step);
        // Written or not, by us or another: what is noted is settled before the next look.
        write_counters(engine, &counters, deadline).await?;
    }
}

async fn write_counters(
    engine: &Engine,
    counters: &Versioned<CountersDocument>,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Versioned { document, etag } = counters;
    let written = engine.store.replace(&document.instance_id, &document.id, document, Some(etag), deadline).await?;
    Ok(matches!(written, WriteOutcome::Done(_)))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MessageRow {
    instance_id: Partition,
}

#[derive(Deserialize)]
struct WorkRow {
    #[serde(default)]
    until: Option<u64>,
}

/// Unlocked messages and activities: exact up to 1,000 of each.
pub(crate) async fn queue_depths(engine: &Arc<Engine>) -> Result<QueueDepths, StoreError> {
    let (deadline, now) = (engine.deadline(), engine.now());
    let messages: Vec<MessageRow> = engine.store.query_container(queries::MESSAGE_DEPTH.statement(), deadline).await?;
    let work: Vec<WorkRow> = engine.store.query_container(queries::WORK_DEPTH.statement(), deadline).await?;
    // A message is locked with its instance, which only its holder knows without asking for each.
    let held: std::collections::HashSet<Partition> = engine.turns.iter().map(|t| t.partition.clone()).collect();
    Ok(QueueDepths {
        orchestrator_queue: messages.iter().filter(|row| !held.contains(&row.instance_id)).count(),
        worker_queue: work.iter().filter(|row| row.until.is_none_or(|until| until <= now)).count(),
        timer_queue: 0,
    })
}
