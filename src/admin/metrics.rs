//! Counting without `COUNT`: what finished is in the counters, what is open is few.
//!
//! An instance's document has `tally` while the counters don't hold its figures. The metrics are the counters plus the
//! figures of the open instances. Finished ones are *sealed*: their figures move into the counters, exactly once:
//!
//! 1. the counters note which instances are being sealed, with their figures;
//! 2. each instance's document loses `tally` and notes what the counters hold of it;
//! 3. the counters add the figures of those that are sealed, and the note goes.
//!
//! Whoever finds a note in the counters finishes it first, so a crash at any point is mended by the next round. An instance
//! that changes again is open again, and contributes the difference to what the counters hold of it.

use super::delete;
use crate::{
    engine::Engine,
    model::{status, CountersDocument, Deleting, InstanceDocument, Partition, Sealed, Totals},
    store::{queries, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    turn::{instance_id, release::read_latest},
};
use duroxide::providers::{QueueDepths, SystemMetrics};
use serde::Deserialize;
use std::{collections::BTreeMap, sync::Arc};
use tracing::debug;

/// Sealed in one round.
const ROUND: usize = 50;

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
    fn figures(&self) -> Option<Sealed> {
        let status = self.status.clone()?;
        Some(Sealed { status, totals: self.totals })
    }
}

/// The system's figures: exact while at most 1,000 instances are open, a lower bound of what runs beyond that.
pub(crate) async fn system(engine: &Arc<Engine>) -> Result<SystemMetrics, StoreError> {
    let deadline = engine.deadline();
    loop {
        let counters = read_counters(engine, deadline).await?.map_or_else(CountersDocument::new, |c| c.document);
        let open = open_instances(engine, deadline).await?;
        let finished = open.iter().filter(|row| row.status.as_deref().is_some_and(status::is_terminal)).count();
        let metrics = sum(engine, &counters, &open, deadline).await?;
        // Few finished ones are left for the next time; many would make every call dear.
        if finished < ROUND || !seal(engine, &open, deadline).await? {
            return Ok(metrics);
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
    for (id, sealed) in &counters.sealing {
        // Where it is not open any more, it is sealed but not added yet.
        if !open.iter().any(|row| row.instance_id.as_str() == id) {
            total.count(sealed, 1);
        }
    }
    for row in open {
        if let Some(sealed) = &row.sealed {
            total.count(sealed, -1);
        }
        let deleted = match &row.deleting {
            Some(mark) => delete::is_decided(engine, mark, deadline).await?,
            None => false,
        };
        if let Some(figures) = row.figures().filter(|_| !deleted) {
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

/// Moves the figures of finished instances into the counters; `false` where there was nothing to move.
async fn seal(engine: &Arc<Engine>, open: &[OpenRow], deadline: Deadline) -> Result<bool, StoreError> {
    let finished: BTreeMap<String, Sealed> = open
        .iter()
        .filter(|row| row.deleting.is_none() && row.sealed.is_none())
        .filter_map(|row| Some((row.instance_id.as_str().to_owned(), row.figures()?)))
        .filter(|(_, figures)| status::is_terminal(&figures.status))
        .take(ROUND)
        .collect();
    if finished.is_empty() {
        return Ok(false);
    }
    let mut current = settle(engine, deadline).await?;
    current.document.sealing = finished;
    if write_counters(engine, &current, deadline).await? {
        settle(engine, deadline).await?;
    }
    Ok(true)
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
        for (id, figures) in &sealing {
            if seal_one(engine, id, figures, deadline).await? {
                counters.document.count(figures, 1);
            }
        }
        write_counters(engine, &counters, deadline).await?;
    }
}

/// Seals one instance with these figures; whether it is sealed with them afterwards.
async fn seal_one(engine: &Engine, id: &str, figures: &Sealed, deadline: Deadline) -> Result<bool, StoreError> {
    // The note holds the partition's own value.
    let Ok(partition) = serde_json::from_value::<Partition>(serde_json::Value::String(id.to_owned())) else {
        return Ok(false);
    };
    loop {
        let Some(Versioned { mut document, etag }) = read_latest(engine, &partition, deadline).await? else {
            return Ok(false);
        };
        if document.sealed.as_ref() == Some(figures) {
            return Ok(true);
        }
        let same = document.totals == figures.totals && document.status.as_ref() == Some(&figures.status);
        if !same || document.sealed.is_some() || document.deleting.is_some() {
            return Ok(false);
        }
        document.sealed = Some(figures.clone());
        document.tally = None;
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(_) = written {
            return Ok(true);
        }
    }
}

/// Takes an instance that is being erased out of the counters. Called before its document goes; a crash in between may count
/// it out twice only where the document's deletion failed, which the marker in the document prevents.
pub(crate) async fn forget(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    deadline: Deadline,
) -> Result<(), StoreError> {
    if document.sealed.is_none() {
        return Ok(());
    }
    loop {
        let mut counters = settle(engine, deadline).await?;
        let Some(sealed) = take_seal(engine, document, deadline).await? else { return Ok(()) };
        counters.document.count(&sealed, -1);
        if write_counters(engine, &counters, deadline).await? {
            return Ok(());
        }
        restore_seal(engine, document, &sealed, deadline).await?;
    }
}

/// Removes the note of what the counters hold from an instance's document; what it was.
async fn take_seal(
    engine: &Engine,
    document: &InstanceDocument,
    deadline: Deadline,
) -> Result<Option<Sealed>, StoreError> {
    let partition = &document.instance_id;
    loop {
        let Some(Versioned { mut document, etag }) = read_latest(engine, partition, deadline).await? else {
            return Ok(None);
        };
        let Some(sealed) = document.sealed.take() else { return Ok(None) };
        let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await?;
        if let WriteOutcome::Done(_) = written {
            return Ok(Some(sealed));
        }
    }
}

async fn restore_seal(
    engine: &Engine,
    document: &InstanceDocument,
    sealed: &Sealed,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let partition = &document.instance_id;
    loop {
        let Some(Versioned { mut document, etag }) = read_latest(engine, partition, deadline).await? else {
            return Ok(());
        };
        document.sealed = Some(sealed.clone());
        let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await?;
        if let WriteOutcome::Done(_) = written {
            return Ok(());
        }
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
