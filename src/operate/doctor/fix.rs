//! Repairs: actions for findings that two new snapshots confirm. Every write is conditional on the instance's document.

use super::{
    findings::{DetectedFault, RepairAction},
    rebuild,
    snapshot::Snapshot,
    Diagnosis, Doctor, Examined, Finding,
};
use crate::model::operation;
use crate::{
    cosmos::{BatchOutcome, Freshness, StoreError, Versioned, WriteOutcome},
    discovery,
    engine::Engine,
    lifecycle::service_time::ClockSkew,
    model::{
        clock::millis, item, ActivityDocument, ExecutionDocument, InstanceDocument, IntentDocument, KvDocument,
        MessageDocument, Millis, Operation, Partition, StatusDocument,
    },
    outbox,
    turn::{instance_id, load, read, staging},
};
use duroxide::providers::WorkItem;
use serde::Serialize;
use std::sync::Arc;
use tracing::info;

/// The number of consecutive attempts without a repair.
const ATTEMPTS: usize = 8;
/// Bytes of a batch that are reserved for the instance's document.
const FENCE_BYTES: usize = 16 * 1024;

/// The reason why a repair stops if a document has changed.
const CHANGED: &str = "it has changed meanwhile";

/// The result of a repair.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Repair {
    /// The repaired findings, in order.
    pub done: Vec<Finding>,
    /// The reason why the other findings were not repaired, if there is one.
    pub hindered: Option<String>,
    /// The diagnosis after the repair. `None` if no document of the instance exists any more.
    pub after: Option<Diagnosis>,
}

pub(super) async fn repair(doctor: &Doctor, said: &Diagnosis) -> Result<Repair, StoreError> {
    let engine = &doctor.engine;
    let mut repair = Repair { done: Vec::new(), hindered: None, after: None };
    let Ok(partition) = Partition::instance(&said.instance) else { return Ok(repair) };
    // The repair depends on expired locks. By a clock that is ahead, a turn in progress would lose its lock.
    let skew = ClockSkew::measure(engine).await?;
    let mut attempts = 0;
    while attempts < ATTEMPTS {
        let Some(Examined { diagnosis, found, snapshot }) = doctor.examine(&partition, skew).await? else {
            repair.after = None;
            return Ok(repair);
        };
        repair.after = Some(diagnosis);
        let Some(snapshot) = snapshot else {
            repair.hindered = Some("it is changing".to_owned());
            return Ok(repair);
        };
        let todo: Vec<DetectedFault> = found
            .into_iter()
            .filter(|found| found.repair_text().is_some() && found.is_reported_in(&said.findings))
            .collect();
        if todo.is_empty() {
            repair.hindered = None;
            return Ok(repair);
        }
        let now = skew.now(engine);
        let locked = snapshot.document().and_then(|document| document.locked_until(now));
        if locked.is_some() {
            repair.hindered = Some("a turn is in progress: try again when it has ended".to_owned());
            return Ok(repair);
        }
        let before = repair.done.len();
        repair.hindered = fix(engine, &snapshot, now, todo, &mut repair.done).await?;
        attempts = if repair.done.len() > before { 0 } else { attempts + 1 };
    }
    Ok(repair)
}

/// Repairs the first group of findings. Returns the reason if something prevents it.
async fn fix(
    engine: &Arc<Engine>,
    snapshot: &Snapshot,
    now: Millis,
    todo: Vec<DetectedFault>,
    done: &mut Vec<Finding>,
) -> Result<Option<String>, StoreError> {
    for found in &todo {
        let prevented = match (&found.fix, snapshot.document()) {
            (RepairAction::RollForward, _) => {
                staging::roll_forward(engine, &snapshot.partition, engine.deadline()).await?;
                None
            }
            (RepairAction::ContinueDeletion, Some(document)) => {
                let recovered = engine.lifecycle().recover_deletion(engine, document, engine.deadline()).await?;
                (!recovered).then_some("another process is deleting it right now")
            }
            (RepairAction::RebuildInstance, _) => (!rebuild_instance(engine, snapshot).await?).then_some(CHANGED),
            _ => continue,
        };
        if let Some(prevented) = prevented {
            return Ok(Some(prevented.to_owned()));
        }
        engine.cache.forget(&snapshot.partition);
        info!(instance_id = snapshot.partition.instance_id(), reason = ?found.finding.reason, "repaired");
        done.push(found.finding.clone());
        // The other findings must be confirmed again after this repair.
        return Ok(None);
    }
    match &snapshot.instance {
        Some(instance) => fix_in_batches(engine, snapshot, instance, now, todo, done).await,
        None => delete_without_fence(engine, snapshot, todo, done).await,
    }
}

/// Repairs findings with batches that are conditional on the instance's document. Returns the reason if something
/// prevents it.
async fn fix_in_batches(
    engine: &Arc<Engine>,
    snapshot: &Snapshot,
    instance: &Versioned<InstanceDocument>,
    now: Millis,
    todo: Vec<DetectedFault>,
    done: &mut Vec<Finding>,
) -> Result<Option<String>, StoreError> {
    let changed = || Ok(Some(CHANGED.to_owned()));
    let mut fence = instance.clone();
    let mut drafter = Drafter { engine, snapshot, now, token: engine.new_token(), count: 0 };
    let mut hindered = None;
    let (mut ready, mut operations): (Vec<DetectedFault>, Vec<Operation>) = (Vec::new(), Vec::new());
    let mut bytes = 0;
    for found in todo {
        let draft = match drafter.draft(&instance.document, &found.fix).await {
            // The source of one repair can't be read. The others are repaired nevertheless.
            Err(StoreError::Malformed { detail }) => {
                hindered.get_or_insert(detail);
                continue;
            }
            draft => draft?,
        };
        let size: usize = draft.iter().map(Operation::size).sum();
        let is_full = operations.len() + draft.len() >= operation::MAX_OPERATIONS
            || bytes + size > operation::MAX_BYTES - FENCE_BYTES;
        if is_full && !operations.is_empty() {
            if !write(engine, now, &mut fence, &std::mem::take(&mut operations)).await? {
                return changed();
            }
            done.extend(ready.drain(..).map(|found| found.finding));
            bytes = 0;
        }
        bytes += size;
        operations.extend(draft);
        ready.push(found);
    }
    if !operations.is_empty() && !write(engine, now, &mut fence, &operations).await? {
        return changed();
    }
    done.extend(ready.into_iter().map(|found| found.finding));
    Ok(hindered)
}

/// Rebuilds the document of an instance. Returns `false` if a document has changed. The batch proves that the basis of
/// the new document still exists, and that no worker has claimed the instance since.
async fn rebuild_instance(engine: &Engine, snapshot: &Snapshot) -> Result<bool, StoreError> {
    let (Ok(document), Some((id, basis))) = (rebuild::instance(snapshot, &engine.new_token()), &snapshot.basis) else {
        return Ok(false);
    };
    let made = match &snapshot.instance {
        Some(left) => Operation::replace(instance_id(), &document, Some(&left.etag))?,
        None => Operation::create(&document)?,
    };
    let operations = [made, Operation::replace(id.clone(), &basis.document, Some(&basis.etag))?];
    let written = engine.store.batch(&snapshot.partition, &operations, engine.deadline()).await?;
    Ok(matches!(written, BatchOutcome::Committed(_)))
}

/// Deletes unreferenced documents if no instance exists, each under its own ETag.
async fn delete_without_fence(
    engine: &Engine,
    snapshot: &Snapshot,
    todo: Vec<DetectedFault>,
    done: &mut Vec<Finding>,
) -> Result<Option<String>, StoreError> {
    for found in todo {
        let RepairAction::Delete(id, etag) = &found.fix else { continue };
        let deleted = engine.store.delete(&snapshot.partition, id, Some(etag), engine.deadline()).await?;
        if !matches!(deleted, WriteOutcome::Done(_)) {
            return Ok(Some(CHANGED.to_owned()));
        }
        done.push(found.finding);
    }
    Ok(None)
}

/// Writes one batch that is conditional on the instance's document, and updates `fence`. Returns `false` if a document
/// has changed.
async fn write(
    engine: &Arc<Engine>,
    now: Millis,
    fence: &mut Versioned<InstanceDocument>,
    operations: &[Operation],
) -> Result<bool, StoreError> {
    let partition = fence.document.instance_id.clone();
    let mut next = fence.document.clone();
    next.updated_at = now;
    if next.claim.lock.is_some() && next.waiting.inlined.is_none() {
        // The lock has expired. Its stalled holder must not continue beside this repair.
        next.unlock(now);
    }
    let mut whole = vec![Operation::replace(instance_id(), &next, Some(&fence.etag))?];
    whole.extend_from_slice(operations);
    let BatchOutcome::Committed(committed) = engine.store.batch(&partition, &whole, engine.deadline()).await? else {
        return Ok(false);
    };
    *fence = Versioned { document: next, etag: committed.fence()? };
    engine.cache.forget(&partition);
    discovery::announce(engine, &partition, operations, &committed, 1);
    let intents = operations.iter().filter_map(|operation| match operation {
        Operation::Create { document } => serde_json::from_value::<IntentDocument>(document.clone()).ok(),
        _ => None,
    });
    outbox::deliver_soon(engine, intents.collect()).await;
    info!(instance_id = partition.instance_id(), documents = operations.len(), "repaired");
    Ok(true)
}

/// Makes the documents of a repair.
struct Drafter<'a> {
    engine: &'a Arc<Engine>,
    snapshot: &'a Snapshot,
    /// Cosmos DB's time.
    now: Millis,
    /// A unique token in the ids of the new documents.
    token: String,
    count: usize,
}

impl Drafter<'_> {
    async fn draft(&mut self, document: &InstanceDocument, fix: &RepairAction) -> Result<Vec<Operation>, StoreError> {
        let snapshot = self.snapshot;
        let partition = &snapshot.partition;
        Ok(match fix {
            RepairAction::Nothing
            | RepairAction::RollForward
            | RepairAction::ContinueDeletion
            | RepairAction::RebuildInstance => Vec::new(),
            RepairAction::Schedule(item) => self.schedule(item)?,
            RepairAction::Enqueue(item) => vec![self.message(item)?],
            RepairAction::Send(item) => vec![self.intent(document, item)?],
            RepairAction::SetValue { key, lost } => {
                // The turn that ends an execution begins the next epoch.
                let epoch = document.commit.epoch.saturating_sub(u64::from(document.execution_has_ended()));
                // A value of an earlier execution belongs to the epoch before the current one.
                let epoch = epoch.saturating_sub(u64::from(!lost.is_current));
                let (value, at) = (Some(lost.value.value.clone()), lost.value.at);
                let mut next = KvDocument::written(partition, key, snapshot.values.get(key), value, at, epoch);
                if lost.is_current && lost.before.is_some() {
                    next.base = lost.before.clone();
                }
                vec![Operation::upsert(&next)?]
            }
            RepairAction::SetStatus(value) => {
                let next = StatusDocument::new(partition.clone(), value.clone(), document.commit.status_version);
                vec![Operation::upsert(&next)?]
            }
            RepairAction::Archive(execution) => self.archive(document, *execution).await?,
            RepairAction::Delete(id, etag) => vec![Operation::delete(id.clone(), Some(etag))],
        })
    }

    /// Schedules an activity. It replaces the document that was seen, readable or not.
    fn schedule(&self, item: &WorkItem) -> Result<Vec<Operation>, StoreError> {
        let WorkItem::ActivityExecute { execution_id, id, .. } = item else { return Ok(Vec::new()) };
        let activity_id = ActivityDocument::scheduled_id(*execution_id, *id);
        let seq = self.engine.sequencer.next();
        let partition = self.snapshot.partition.clone();
        let (activity, payload) = ActivityDocument::new(partition, activity_id.clone(), item, seq, self.now)
            .map_err(StoreError::unwritable)?;
        let unreadable = self.snapshot.unreadable.iter().find(|unreadable| unreadable.id == activity_id.as_str());
        let seen = self
            .snapshot
            .activities
            .get(&activity_id)
            .map(|(_, etag)| etag)
            .or(unreadable.map(|unreadable| &unreadable.etag));
        let mut operations = vec![match seen {
            Some(etag) => Operation::replace(activity_id, &activity, Some(etag))?,
            None => Operation::create(&activity)?,
        }];
        if let Some(payload) = payload {
            operations.push(Operation::upsert(&payload)?);
        }
        Ok(operations)
    }

    /// A unique key.
    fn key(&mut self) -> String {
        self.count += 1;
        format!("r:{}:{}", self.token, self.count)
    }

    fn message(&mut self, item: &WorkItem) -> Result<Operation, StoreError> {
        let (key, seq, now) = (self.key(), self.engine.sequencer.next(), self.now);
        let partition = self.snapshot.partition.clone();
        let due = item::visible_at(item, now);
        let message = MessageDocument::new(partition, &key, item, seq, now, due).map_err(StoreError::unwritable)?;
        Ok(Operation::create(&message)?)
    }

    fn intent(&mut self, sender: &InstanceDocument, item: &WorkItem) -> Result<Operation, StoreError> {
        let (key, seq, now) = (self.key(), self.engine.sequencer.next(), self.now);
        let target = Partition::instance(item::target(item).unwrap_or_default())
            .map_err(|e| StoreError::Malformed { detail: e.to_string() })?;
        let mut message =
            MessageDocument::new(target.clone(), &key, item, seq, now, now).map_err(StoreError::unwritable)?;
        message.send(sender, Some(sender.origin.incarnation.clone()));
        let document = serde_json::to_value(&message).map_err(StoreError::unwritable)?;
        let takeover = now.saturating_add(millis(self.engine.config.reconciler_age_threshold()));
        let partition = self.snapshot.partition.clone();
        let intent = IntentDocument::new(partition, target, &self.token, self.count, document, now, takeover);
        Ok(Operation::create(&intent)?)
    }

    async fn archive(&self, document: &InstanceDocument, execution: u64) -> Result<Vec<Operation>, StoreError> {
        let events = self.history(&self.snapshot.partition, execution).await?;
        let archive = if execution == document.current.execution {
            let output = rebuild::end(&events).map(|(_, output)| output);
            ExecutionDocument::of(document, output)
        } else {
            rebuild::execution(&self.snapshot.partition, execution, &events)
        };
        Ok(vec![Operation::upsert(&archive)?])
    }

    async fn history(&self, partition: &Partition, execution: u64) -> Result<Vec<duroxide::Event>, StoreError> {
        let (freshness, deadline) = (Freshness::Authoritative, self.engine.deadline());
        let documents = read::history(self.engine, partition, execution, freshness, deadline).await?;
        let events = load::events(documents).map_err(|detail| StoreError::Malformed { detail })?;
        Ok(events.0)
    }
}
