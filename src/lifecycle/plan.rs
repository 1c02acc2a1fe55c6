//! The plan of a deletion: a two-phase commit that deletes all instances of a set or none, even if the process dies.
//!
//! 1. Prepare. The coordinator is the first instance of the set that exists. Its document gets a deletion record that
//!    names the plan. Plan documents in its partition list the other instances, 100 in each. Each plan document is
//!    written before its instances are prepared, by a batch that also counts it in the coordinator's record. So a plan
//!    can grow until it is committed. Preparing an instance removes its lock, so a turn in progress fails by the
//!    ordinary fence. Nothing is deleted yet.
//! 2. Decide. One write of the coordinator commits the plan: from then on, the set does not exist for any reader. Or
//!    one write aborts it: from then on, no process can commit it.
//! 3. Finish. The instances of a committed plan are erased, one plan document after the other. The instances of an
//!    aborted plan lose their deletion records. The batch that deletes a plan document records the progress in the
//!    coordinator. The coordinator itself is handled last.
//!
//! A plan is committed if its coordinator's document says so, and in no other case. The coordinator is prepared first
//! and cleaned up last. If a coordinator does not know the plan of a prepared instance, that preparation came too late.
//!
//! If two plans share an instance, the plan that began first continues. The other one waits for it, or is aborted and
//! tried again. So of two plans that wait for each other, one always ends.
//!
//! Crash points:
//!
//! - Before the decision: a process that meets a prepared instance aborts the plan, once the coordinator's `due` shows
//!   that the heartbeat has stopped.
//! - After the decision: a process that meets a prepared instance continues with step 3.
//!
//! The coordinator has `due`, so a poll finds it.

use super::{
    finish::{abort_all, abort_plan, finish_plan, update_coordinator, PlanDriver, PlanOutcome, RecoveryBudget},
    prepare::{find, prepare_one, DeletionTerms, PrepareError},
    recovery, Documents, Incarnation,
};
use crate::{
    cosmos::StoreError,
    engine::Engine,
    model::{Deleting, DeletionState, InstanceDocument, Millis, Operation, Partition, PlanDocument},
    turn::staging,
};
use duroxide::providers::DeleteInstanceResult;
use futures::{stream, StreamExt};
use std::{collections::HashSet, future::Future, sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::{debug, info};

/// The time after its last heartbeat when any process aborts a plan that is not committed.
pub(crate) const ABORT_AFTER: Millis = 30_000;
/// The largest difference between two correct clocks.
pub(super) const MAX_CLOCK_SKEW: Millis = 5_000;
/// The time between two heartbeats of a plan.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// The time until a poll finds a prepared instance other than the coordinator. It is long: otherwise thousands of
/// prepared instances would fill the polls while a plan is in progress.
const RECOVERY_POLL_DELAY: Millis = 10 * 60 * 1_000;
/// Documents of a set that stay in memory after they were read or prepared. Each further instance costs a read.
pub(super) const MAX_CACHED_DOCUMENTS: usize = 2_000;
/// Instances that are prepared, or whose preparations are undone, at once.
pub(super) const CONCURRENCY: usize = 32;

/// A plan that this process drives.
pub(super) struct DeletionPlan<'a> {
    engine: &'a Arc<Engine>,
    record: Deleting,
    partition: Partition,
    terms: DeletionTerms,
    /// The time of the last heartbeat.
    last_heartbeat: Instant,
    /// The documents of the other instances, as this process prepared them.
    prepared: Documents,
    /// The prepared instances.
    members: HashSet<Partition>,
    /// The number of prepared instances, with their executions and events.
    covered: DeleteInstanceResult,
}

impl<'a> DeletionPlan<'a> {
    /// Prepares the coordinator of a plan for `ids`: the first instance that exists. Returns the plan and the other
    /// ids, or `None` if no instance exists. An error names its instance.
    pub(super) async fn begin(
        engine: &'a Arc<Engine>,
        ids: &[String],
        seen: &Documents,
        terms: &DeletionTerms,
    ) -> Result<Option<(Self, Vec<String>)>, (String, PrepareError)> {
        let (name, before) = (engine.new_token(), engine.sequencer.next());
        let read = |(at, id): (usize, String)| async move {
            let found = find(engine, &id, terms).await;
            (at, id, found)
        };
        // The first instance almost always exists. The others are read only if it does not.
        let mut ids_in_order = ids.iter().cloned().enumerate();
        let first = stream::iter(ids_in_order.next()).then(read);
        let mut reading = std::pin::pin!(first.chain(stream::iter(ids_in_order).map(read).buffered(CONCURRENCY)));
        while let Some((at, id, found)) = reading.next().await {
            let failed = |refused: PrepareError| (id.clone(), refused);
            let Some(found) = found.map_err(|e| failed(e.into()))? else { continue };
            if seen.get(&id).is_some_and(|seen| terms.is_changed(&Incarnation::of(&seen.document), &found.document)) {
                return Err(failed(PrepareError::Changed));
            }
            let others = &ids[at + 1..];
            let record = Deleting {
                plan: name.clone(),
                coordinator: id.clone(),
                before: before.clone(),
                committed_after: None,
                committed_by: None,
                last_written: None,
                state: DeletionState::Preparing,
                parts: 0,
                part: 0,
                recovered_by_others: false,
            };
            let Ok(partition) = Partition::instance(&id) else { continue };
            let prepared = prepare_one(engine, &id, &record, terms, ABORT_AFTER, Some(found)).await.map_err(failed)?;
            if let Some(coordinator) = prepared {
                let (last_heartbeat, prepared, covered) =
                    (Instant::now(), Documents::new(), DeleteInstanceResult::default());
                let (terms, members) = (terms.clone(), HashSet::new());
                let mut plan = Self { engine, record, partition, terms, last_heartbeat, prepared, members, covered };
                plan.cover(&coordinator.document);
                return Ok(Some((plan, others.to_vec())));
            }
        }
        Ok(None)
    }

    /// Lists and prepares more instances. `seen` holds documents of some of them. Returns the instances that could not
    /// be prepared, and stops at the first plan document that has one.
    pub(super) async fn prepare_others(
        &mut self,
        others: &[String],
        mut seen: Documents,
    ) -> Result<Vec<(String, PrepareError)>, PrepareError> {
        for members in others.chunks(PlanDocument::MEMBERS) {
            let part =
                PlanDocument::new(self.partition.clone(), &self.record.plan, self.record.parts, members.to_vec());
            self.record.parts += 1;
            // An attempt whose answer was lost may have written the document already.
            self.write_heartbeat(&[Operation::upsert(&part)?]).await?;
            for chunk in members.chunks(CONCURRENCY) {
                let failures = self.prepare_chunk(chunk, &mut seen).await;
                if !failures.is_empty() {
                    return Ok(failures);
                }
                self.heartbeat().await?;
            }
        }
        Ok(Vec::new())
    }

    async fn prepare_chunk(&mut self, chunk: &[String], seen: &mut Documents) -> Vec<(String, PrepareError)> {
        let (engine, terms, record) = (self.engine, &self.terms, &Deleting { parts: 0, ..self.record.clone() });
        let chunk: Vec<_> = chunk.iter().map(|id| (id.clone(), seen.remove(id))).collect();
        let preparing = stream::iter(chunk)
            .map(|(id, seen)| async move {
                let prepared = prepare_one(engine, &id, record, terms, RECOVERY_POLL_DELAY, seen).await;
                (id, prepared)
            })
            .buffer_unordered(CONCURRENCY);
        let prepared: Vec<_> = preparing.collect().await;
        let mut failures = Vec::new();
        for (id, prepared) in prepared {
            match prepared {
                Ok(Some(found)) => {
                    self.cover(&found.document);
                    self.prepared.extend(Some((id, found)).filter(|_| self.prepared.len() < MAX_CACHED_DOCUMENTS));
                }
                Ok(None) => {}
                Err(refused) => failures.push((id, refused)),
            }
        }
        failures
    }

    /// Counts an instance that this plan has prepared.
    fn cover(&mut self, document: &InstanceDocument) {
        self.members.insert(document.instance_id.clone());
        self.covered.instances_deleted += u64::from(document.exists());
        self.covered.executions_deleted += document.counting.totals.executions;
        self.covered.events_deleted += document.counting.totals.events;
    }

    /// Whether this plan has prepared an instance.
    pub(super) fn has(&self, instance: &Partition) -> bool {
        self.members.contains(instance)
    }

    /// Adds the expected incarnations of descendants that were found after their parents were prepared.
    pub(super) fn expect(&mut self, incarnations: impl IntoIterator<Item = (String, Incarnation)>) {
        self.terms.expect(incarnations);
    }

    /// Writes a heartbeat if one is due.
    pub(super) async fn heartbeat(&mut self) -> Result<(), PrepareError> {
        if self.last_heartbeat.elapsed() < HEARTBEAT_INTERVAL {
            return Ok(());
        }
        self.write_heartbeat(&[]).await
    }

    /// Runs `work`, which may take long, and writes heartbeats meanwhile.
    pub(super) async fn with_heartbeat<T>(&mut self, work: impl Future<Output = T>) -> Result<T, PrepareError> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                () = tokio::time::sleep(HEARTBEAT_INTERVAL) => match self.heartbeat().await {
                    Err(PrepareError::Store(error)) if error.is_retryable() => {
                        // The commit shows whether the plan still holds.
                        debug!(%error, "a heartbeat of a deletion failed, will retry");
                    }
                    heartbeat => heartbeat?,
                },
            }
        }
    }

    /// Writes a heartbeat together with `operations`. It postpones the time when other processes abort the plan.
    async fn write_heartbeat(&mut self, operations: &[Operation]) -> Result<(), PrepareError> {
        let (due, parts) = (self.engine.now() + ABORT_AFTER, self.record.parts);
        self.last_heartbeat = Instant::now();
        self.update_coordinator(operations, |document, record| {
            document.due = Some(due);
            record.parts = parts;
        })
        .await
    }

    /// Commits the plan with one write. From then on the set does not exist.
    pub(super) async fn commit(&self) -> Result<(), PrepareError> {
        let (due, before) = (self.engine.now() + staging::TAKEOVER_AFTER, self.engine.sequencer.next());
        self.update_coordinator(&[], |document, record| {
            record.state = DeletionState::Committed;
            record.before.clone_from(&before);
            record.committed_after = Some(document.written_at);
            document.due = Some(due);
        })
        .await
    }

    async fn update_coordinator(
        &self,
        operations: &[Operation],
        change: impl Fn(&mut InstanceDocument, &mut Deleting),
    ) -> Result<(), PrepareError> {
        let Self { engine, record, partition, .. } = self;
        if update_coordinator(engine, partition, &record.plan, &[DeletionState::Preparing], operations, change).await? {
            return Ok(());
        }
        // The plan may be committed already by a write whose answer was lost.
        let view = recovery::coordinator_view(engine, record, engine.deadline()).await?;
        if view.is_some_and(|view| view.record.state == DeletionState::Committed) {
            return Ok(());
        }
        Err(PrepareError::Overtaken)
    }

    /// Erases all instances of the committed plan. All of them count as deleted by this call, although other processes
    /// may have erased some of them.
    pub(super) async fn finish(&self) -> PlanOutcome {
        let driver = PlanDriver::Committer(&self.prepared);
        let mut outcome =
            finish_plan(self.engine, &self.partition, &self.record.plan, driver, RecoveryBudget::Unlimited).await;
        if outcome.first_error.is_none() {
            let queue_messages_deleted = outcome.result.queue_messages_deleted;
            outcome.result = DeleteInstanceResult { queue_messages_deleted, ..self.covered.clone() };
        }
        outcome
    }

    /// Aborts the plan and undoes its preparations. Failures are ignored, since each process that meets a prepared
    /// instance continues this work. If the plan turns out to be committed by a write whose answer was lost, this
    /// finishes it.
    pub(super) async fn abort(&self, others: &[String]) {
        let Self { engine, record, partition, .. } = self;
        let aborting = async {
            let aborted_here = abort_plan(engine, partition, &record.plan).await?;
            let view = recovery::coordinator_view(engine, record, engine.deadline()).await?;
            let committed = view.is_some_and(|view| view.record.state == DeletionState::Committed);
            let outcome =
                finish_plan(engine, partition, &record.plan, PlanDriver::Recovery, RecoveryBudget::Unlimited).await;
            if let Some(error) = outcome.first_error {
                return Err(error);
            }
            if !aborted_here && !committed {
                // Another process aborted the plan. It may have read an instance before this process prepared it.
                abort_all(engine, others, &record.plan).await;
            }
            Ok::<(), StoreError>(())
        };
        if let Err(error) = aborting.await {
            let coordinator = &record.coordinator;
            info!(instance_id = coordinator, %error, "undoing an aborted deletion failed, recovery will undo it");
        }
    }
}
