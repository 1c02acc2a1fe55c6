//! Finishes a plan after its decision: erases the instances of a committed plan, or undoes the preparations of an
//! aborted one.

use super::{
    erase::{self, CommittedPlan},
    plan::CONCURRENCY,
    recovery, Documents,
};
use crate::{
    cosmos::{BatchOutcome, Deadline, Freshness, StoreError, Versioned, WriteOutcome},
    engine::Engine,
    model::{Deleting, DeletionState, InstanceDocument, Operation, Partition, PlanDocument},
    turn::{instance_id, staging},
};
use azure_core::http::Etag;
use duroxide::providers::DeleteInstanceResult;
use futures::{stream, StreamExt};
use std::{sync::Arc, time::Duration};
use tracing::{debug, info};

/// The time that a dispatcher spends on a large deletion. The next poll continues with the rest.
pub(super) const RECOVERY_TIME: Duration = Duration::from_secs(2);

/// The time that a process spends on a deletion, which may be large. Each step has a deadline of its own.
#[derive(Clone, Copy)]
pub(crate) enum RecoveryBudget {
    Unlimited,
    Until(Deadline),
}

impl RecoveryBudget {
    pub(super) fn is_spent(self) -> bool {
        matches!(self, Self::Until(deadline) if deadline.passed())
    }
}

/// The outcome of finishing a plan.
#[derive(Default)]
pub(super) struct PlanOutcome {
    pub(super) result: DeleteInstanceResult,
    /// The first error. The plan is not finished if there is one.
    pub(super) first_error: Option<StoreError>,
}

/// The process that finishes a committed or aborted plan.
pub(super) enum PlanDriver<'a> {
    /// The process that committed the plan. It has these documents from preparing the instances.
    Committer(&'a Documents),
    /// Any other process.
    Recovery,
}

/// Changes the coordinator's deletion record of a plan in one of `states`, together with `operations`. Returns `false`
/// if no such record exists.
pub(super) async fn update_coordinator(
    engine: &Engine,
    partition: &Partition,
    plan: &str,
    states: &[DeletionState],
    operations: &[Operation],
    change: impl Fn(&mut InstanceDocument, &mut Deleting),
) -> Result<bool, StoreError> {
    let deadline = engine.deadline();
    loop {
        let found = engine.read_latest(partition, deadline).await?;
        let Some(Versioned { mut document, etag }) = found else { return Ok(false) };
        document.keep_service_times();
        let Some(mut record) = document.removal.deleting.take().filter(|record| record.plan == plan) else {
            return Ok(false);
        };
        if !states.contains(&record.state) {
            return Ok(false);
        }
        change(&mut document, &mut record);
        document.removal.deleting = Some(record);
        let written = write_in_batch(engine, partition, &document, &etag, operations, deadline).await?;
        engine.cache.forget(partition);
        if let Some(written) = written {
            return Ok(written);
        }
    }
}

/// Replaces an instance's document under `etag`, together with `operations`. Returns `None` if the document has
/// changed, and `false` if one of the operations fails.
async fn write_in_batch(
    engine: &Engine,
    partition: &Partition,
    document: &InstanceDocument,
    etag: &Etag,
    operations: &[Operation],
    deadline: Deadline,
) -> Result<Option<bool>, StoreError> {
    if operations.is_empty() {
        let written = engine.store.replace(partition, &instance_id(), document, Some(etag), deadline).await?;
        return Ok(matches!(written, WriteOutcome::Done(_)).then_some(true));
    }
    let mut batch = vec![Operation::replace(instance_id(), document, Some(etag))?];
    batch.extend_from_slice(operations);
    match engine.store.batch(partition, &batch, deadline).await? {
        BatchOutcome::Committed(_) => Ok(Some(true)),
        BatchOutcome::RolledBack(back) => Ok((back.index > 0).then_some(false)),
    }
}

/// Aborts a plan: no process can commit it afterwards. Returns `false` if it was committed or aborted before.
pub(super) async fn abort_plan(engine: &Engine, partition: &Partition, plan: &str) -> Result<bool, StoreError> {
    let due = engine.now() + staging::TAKEOVER_AFTER;
    update_coordinator(engine, partition, plan, &[DeletionState::Preparing], &[], |document, record| {
        record.state = DeletionState::Aborted;
        document.due = Some(due);
    })
    .await
}

/// Finishes a committed or aborted plan, one plan document after the other, and the coordinator last. If an instance
/// can't be read, its plan document and the coordinator stay, and the other plan documents are handled.
pub(super) async fn finish_plan(
    engine: &Arc<Engine>,
    partition: &Partition,
    plan: &str,
    driver: PlanDriver<'_>,
    budget: RecoveryBudget,
) -> PlanOutcome {
    let mut outcome = PlanOutcome::default();
    let mut from = 0;
    loop {
        match finish_next_part(engine, partition, plan, &driver, budget, (&mut outcome, &mut from)).await {
            Ok(true) if !budget.is_spent() => {}
            Ok(_) => return outcome,
            Err(error) => {
                outcome.first_error.get_or_insert(error);
                return outcome;
            }
        }
    }
}

/// Handles the first plan document from a number on, or the coordinator if none is left. Returns whether more is left.
async fn finish_next_part(
    engine: &Arc<Engine>,
    partition: &Partition,
    plan: &str,
    driver: &PlanDriver<'_>,
    budget: RecoveryBudget,
    (outcome, from): (&mut PlanOutcome, &mut usize),
) -> Result<bool, StoreError> {
    let Some(found) = engine.read_latest(partition, engine.deadline()).await? else { return Ok(false) };
    let written_at = found.document.written_at;
    let Some(record) = found.document.removal.deleting.filter(|record| record.plan == plan) else { return Ok(false) };
    let next = next_part(engine, partition, &record, *from).await?;
    if next.is_none() && outcome.first_error.is_some() {
        return Ok(false);
    }
    let members = next.as_ref().map_or_else(|| vec![record.coordinator.clone()], |(_, part)| part.members.clone());
    match record.state {
        DeletionState::Preparing => return Ok(false),
        DeletionState::Committed => {
            let nothing = Documents::new();
            let prepared = match driver {
                PlanDriver::Committer(prepared) => *prepared,
                PlanDriver::Recovery if announce_recovery(engine, partition, &record).await? => &nothing,
                // Another process has finished the plan.
                PlanDriver::Recovery => return Ok(false),
            };
            let committed = CommittedPlan::new(record.clone(), written_at);
            let erased = erase::erase_all(engine, &members, &committed, prepared, budget).await;
            super::add(&mut outcome.result, erased.result);
            match (erased.first_error, &next) {
                (Some(error), Some((number, _))) if error.is_of_one_partition() => {
                    outcome.first_error.get_or_insert(error);
                    *from = number + 1;
                    return Ok(true);
                }
                (Some(error), _) => return Err(error),
                (None, _) => {}
            }
            if !erased.complete {
                return Ok(true);
            }
        }
        DeletionState::Aborted if next.is_some() => abort_all(engine, &members, plan).await,
        DeletionState::Aborted => {
            abort_one(engine, &record.coordinator, plan).await?;
        }
    }
    let Some((number, part)) = next else { return Ok(false) };
    debug!(coordinator = %partition, part = number, of = record.parts, "finished one plan document of a deletion");
    let due = engine.now() + staging::TAKEOVER_AFTER;
    // If another process was faster, the next read of the coordinator shows it.
    update_coordinator(
        engine,
        partition,
        plan,
        &[record.state],
        &[Operation::delete(part.id, None)],
        |document, record| {
            // An earlier plan document may be left.
            if record.part == number {
                record.part += 1;
            }
            document.due = Some(due);
        },
    )
    .await?;
    Ok(true)
}

/// Records in the coordinator that a process other than the committing one erases instances. It must precede every
/// other action of that process. Returns `false` if the plan is finished.
pub(super) async fn announce_recovery(
    engine: &Engine,
    coordinator: &Partition,
    record: &Deleting,
) -> Result<bool, StoreError> {
    if record.recovered_by_others {
        return Ok(true);
    }
    update_coordinator(engine, coordinator, &record.plan, &[DeletionState::Committed], &[], |_, record| {
        record.recovered_by_others = true
    })
    .await
}

/// Whether a process other than the committing one may have erased instances of the plan.
pub(super) async fn is_recovered_by_others(engine: &Engine, record: &Deleting) -> Result<bool, StoreError> {
    let view = recovery::coordinator_view(engine, record, engine.deadline()).await?;
    Ok(view.is_none_or(|view| view.record.recovered_by_others))
}

/// The first plan document from a number on that still exists.
async fn next_part(
    engine: &Engine,
    partition: &Partition,
    record: &Deleting,
    from: usize,
) -> Result<Option<(usize, PlanDocument)>, StoreError> {
    for part in record.part.max(from)..record.parts {
        let id = PlanDocument::document_id(&record.plan, part);
        let found = engine.store.read(partition, &id, Freshness::Authoritative, engine.deadline()).await?;
        if let Some(Versioned { document, .. }) = found {
            return Ok(Some((part, document)));
        }
    }
    Ok(None)
}

/// Removes the deletion records of an aborted plan. Failures are ignored, since each process that meets such a record
/// removes it.
pub(super) async fn abort_all(engine: &Arc<Engine>, ids: &[String], plan: &str) {
    let aborting = stream::iter(ids.to_vec()).map(|id| async move {
        if let Err(error) = abort_one(engine, &id, plan).await {
            info!(instance_id = id, %error, "undoing the preparation of an instance failed, recovery will undo it");
        }
    });
    aborting.buffer_unordered(CONCURRENCY).collect::<Vec<()>>().await;
}

/// Removes the deletion record of a plan from one instance, unless the plan is committed.
pub(super) async fn abort_one(engine: &Arc<Engine>, id: &str, plan: &str) -> Result<(), StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(()) };
    let deadline = engine.deadline();
    loop {
        let found = engine.read_latest(&partition, deadline).await?;
        let Some(Versioned { mut document, etag }) = found else { return Ok(()) };
        let ours = |record: &Deleting| record.plan == plan && record.state != DeletionState::Committed;
        if !document.removal.deleting.as_ref().is_some_and(ours) {
            return Ok(());
        }
        document.abort_deletion();
        document.due = document.needs_recovery().then(|| engine.now());
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(_) = written {
            engine.discovery.turn_returned(&partition, 0);
            return Ok(());
        }
    }
}
