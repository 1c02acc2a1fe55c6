//! Recovery of deletions: finishes or aborts a plan whose process has died.

use super::{
    erase::{self, CommittedPlan},
    finish::{abort_one, abort_plan, announce_recovery, finish_plan, PlanDriver, RecoveryBudget, RECOVERY_TIME},
    plan::{ABORT_AFTER, CONCURRENCY, MAX_CLOCK_SKEW},
    service_time, Documents,
};
use crate::{
    cosmos::{Deadline, StoreError, Versioned},
    engine::Engine,
    model::{Deleting, DeletionState, InstanceDocument, Millis, Partition},
};
use futures::{stream, StreamExt};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};
use tracing::warn;

/// The coordinator's record of a plan, with the times of its document.
pub(super) struct CoordinatorView {
    pub(super) record: Deleting,
    pub(super) due: Millis,
    pub(super) written_at: u64,
}

/// Reads the coordinator's record of a plan. Returns `None` if the coordinator does not know the plan.
pub(super) async fn coordinator_view(
    engine: &Engine,
    record: &Deleting,
    deadline: Deadline,
) -> Result<Option<CoordinatorView>, StoreError> {
    let Ok(partition) = Partition::instance(&record.coordinator) else { return Ok(None) };
    let found = engine.read_latest(&partition, deadline).await?;
    Ok(found.and_then(|Versioned { document, .. }| {
        let (due, written_at) = (document.due.unwrap_or_default(), document.written_at);
        let record = document.removal.deleting.filter(|found| found.plan == record.plan)?;
        Some(CoordinatorView { record, due, written_at })
    }))
}

/// Whether the deletion of a prepared instance is committed.
pub(crate) async fn is_deleted(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Some(record) = document.removal.deleting.clone() else { return Ok(false) };
    let prepared = vec![(document.instance_id.clone(), record)];
    Ok(!deleted_among(engine, prepared, deadline).await?.is_empty())
}

/// Whether an instance is still prepared although the coordinator does not know its plan. Then the plan was aborted. If
/// the instance is not prepared any more, the plan was finished since the record was read.
async fn is_still_prepared(
    engine: &Engine,
    partition: &Partition,
    record: &Deleting,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let found = engine.read_latest(partition, deadline).await?;
    Ok(found.and_then(|found| found.document.removal.deleting).is_some_and(|found| found.plan == record.plan))
}

/// The prepared instances whose deletion is committed. Each plan's coordinator is read once.
pub(crate) async fn deleted_among(
    engine: &Arc<Engine>,
    prepared: Vec<(Partition, Deleting)>,
    deadline: Deadline,
) -> Result<HashSet<Partition>, StoreError> {
    let plans: BTreeMap<String, Deleting> =
        prepared.iter().map(|(_, record)| (record.plan.clone(), record.clone())).collect();
    let mut states: HashMap<String, Option<DeletionState>> = HashMap::new();
    let mut asking = stream::iter(plans)
        .map(|(plan, record)| async move { (plan, coordinator_view(engine, &record, deadline).await) })
        .buffer_unordered(CONCURRENCY);
    while let Some((plan, view)) = asking.next().await {
        let state = match view {
            Ok(view) => view.map(|view| view.record.state),
            // The state of the plan is unknown. Its instances are shown, since they may exist.
            Err(StoreError::Malformed { detail }) => {
                warn!(plan, detail, "the coordinator of a deletion can't be read, its instances count as existing");
                Some(DeletionState::Preparing)
            }
            Err(error) => return Err(error),
        };
        states.insert(plan, state);
    }
    let states = &states;
    let mut telling = stream::iter(prepared)
        .map(|(partition, record)| async move {
            let deleted = match states.get(&record.plan).copied().flatten() {
                Some(state) => Ok(state == DeletionState::Committed),
                None => is_still_prepared(engine, &partition, &record, deadline).await.map(|still| !still),
            };
            (partition, deleted)
        })
        .buffer_unordered(CONCURRENCY);
    let mut deleted = HashSet::new();
    while let Some((partition, is_deleted)) = telling.next().await {
        match is_deleted {
            Ok(true) => drop(deleted.insert(partition)),
            Ok(false) => {}
            Err(StoreError::Malformed { detail }) => {
                warn!(detail, "an instance that is being deleted can't be read, it counts as existing")
            }
            Err(error) => return Err(error),
        }
    }
    Ok(deleted)
}

/// Whether the last heartbeat of an uncommitted plan is older than `abort_after`.
///
/// The clock of the process that makes the plan writes the coordinator's `due`. That may be an operator's computer,
/// whose clock is off by days. Cosmos DB's time costs two requests every few seconds at most. It is read in two cases:
///
/// - the plan is about to be aborted;
/// - `due` is further ahead than a correct clock can put it.
pub(super) async fn is_abandoned(
    engine: &Engine,
    view: &CoordinatorView,
    abort_after: Millis,
) -> Result<bool, StoreError> {
    if abort_after == 0 {
        return Ok(true);
    }
    let now = engine.now();
    let is_late = view.due.saturating_add(abort_after) <= now + ABORT_AFTER;
    if !is_late && view.due <= now + ABORT_AFTER + MAX_CLOCK_SKEW {
        return Ok(false);
    }
    let written_by = view.written_at.saturating_mul(1_000) + 999;
    Ok(written_by.saturating_add(abort_after) <= service_time::recent_skew(engine).await?.now(engine))
}

/// Continues the plan of a prepared instance, or aborts an uncommitted plan whose last heartbeat is older than
/// `abort_after`. It handles this instance at once and spends a limited time on a large plan. Returns whether there was
/// anything to do.
pub(crate) async fn recover(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    abort_after: Millis,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Some(record) = &document.removal.deleting else { return Ok(false) };
    let Some(id) = document.instance_id.instance_id() else { return Ok(false) };
    let Some(view) = coordinator_view(engine, record, deadline).await? else {
        abort_one(engine, id, &record.plan).await?;
        return Ok(true);
    };
    let Ok(coordinator) = Partition::instance(&record.coordinator) else { return Ok(false) };
    let budget = RecoveryBudget::Until(Deadline::after(RECOVERY_TIME));
    match view.record.state {
        DeletionState::Preparing => {
            if !is_abandoned(engine, &view, abort_after).await? {
                return Ok(false);
            }
            abort_plan(engine, &coordinator, &record.plan).await?;
        }
        DeletionState::Committed if id != record.coordinator => {
            if !announce_recovery(engine, &coordinator, &view.record).await? {
                return Ok(true);
            }
            let committed = CommittedPlan::new(view.record, view.written_at);
            let erased = erase::erase_all(engine, &[id.to_owned()], &committed, &Documents::new(), budget).await;
            return erased.first_error.map_or(Ok(true), Err);
        }
        DeletionState::Aborted if id != record.coordinator => {
            abort_one(engine, id, &record.plan).await?;
            return Ok(true);
        }
        // Another process is finishing the plan.
        _ if view.record.part < view.record.parts && view.due > engine.now() => return Ok(false),
        _ => {}
    }
    let outcome = finish_plan(engine, &coordinator, &record.plan, PlanDriver::Recovery, budget).await;
    outcome.first_error.map_or(Ok(true), Err)
}
