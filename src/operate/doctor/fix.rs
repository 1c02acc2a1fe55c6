//! Mending: what findings have said, and two new looks find again, under the instance's fence.

use super::{
    findings::{DetectedFault, Fix},
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

/// So often in a row something may be in the way.
const ATTEMPTS: usize = 8;
/// What a batch keeps free for the fence.
const ROOM: usize = 16 * 1024;

/// What a repair has done.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Repair {
    /// What was done, in order: the findings that are mended.
    pub done: Vec<Finding>,
    /// Why the rest was not, where something was in the way.
    pub hindered: Option<String>,
    /// How the instance is after it; none where there is nothing of that name any more.
    pub after: Option<Diagnosis>,
}

pub(super) async fn repair(doctor: &Doctor, said: &Diagnosis) -> Result<Repair, StoreError> {
    let engine = &doctor.engine;
    let mut repair = Repair { done: Vec::new(), hindered: None, after: None };
    let Ok(partition) = Partition::instance(&said.instance) else { return Ok(repair) };
    // Whether a lock has expired decides: by a clock that is ahead, a turn that is under way would lose its own.
    let skew = ClockSkew::measure(engine).await?;
    let mut attempts = 0;
    while attempts < ATTEMPTS {
        let Some(Examined { diagnosis, found, snapshot }) = doctor.examine(&partition, skew).await? else {
            repair.after = None;
            return Ok(repair);
        };
        repair.after = Some(diagnosis);
        let Some(snapshot) = snapshot else {
            repair.hindered = Some("it moves".to_owned());
            return Ok(repair);
        };
        let todo: Vec<DetectedFault> =
            found.into_iter().filter(|found| found.does().is_some() && found.was_said(&said.findings)).collect();
        if todo.is_empty() {
            repair.hindered = None;
            return Ok(repair);
        }
        let now = skew.now(engine);
        let locked = snapshot.document().and_then(|document| document.locked_until(now));
        if locked.is_some() {
            repair.hindered = Some("a turn is under way: try again when it has ended".to_owned());
            return Ok(repair);
        }
        let before = repair.done.len();
        repair.hindered = fix(engine, &snapshot, now, todo, &mut repair.done).await?;
        attempts = if repair.done.len() > before { 0 } else { attempts + 1 };
    }
    Ok(repair)
}

/// Mends what there is first of; why not, where something was in the way.
async fn fix(
    engine: &Arc<Engine>,
    snapshot: &Snapshot,
    now: Millis,
    todo: Vec<DetectedFault>,
    done: &mut Vec<Finding>,
) -> Result<Option<String>, StoreError> {
    let partition = &snapshot.partition;
    let moved = || Ok(Some("it has changed meanwhile".to_owned()));
    for found in &todo {
        match (&found.fix, snapshot.document()) {
            (Fix::RollForward, _) => drop(staging::roll_forward(engine, partition, engine.deadline()).await?),
            (Fix::GoOnDeleting, Some(document)) => {
                if !engine.lifecycle().recover_deletion(engine, document, engine.deadline()).await? {
                    return Ok(Some("somebody is deleting it right now".to_owned()));
                }
            }
            (Fix::Rebuild, _) => {
                if !make(engine, snapshot).await? {
                    return moved();
                }
            }
            _ => continue,
        }
        engine.cache.forget(partition);
        info!(instance_id = partition.instance_id(), reason = ?found.finding.reason, "mended");
        done.push(found.finding.clone());
        // What else is wrong is another matter after that.
        return Ok(None);
    }
    let Some(instance) = &snapshot.instance else { return without_fence(engine, snapshot, todo, done).await };
    let mut fence = instance.clone();
    let mut drafter = Drafter { engine, snapshot, now, token: engine.new_token(), count: 0 };
    let mut hindered = None;
    let (mut ready, mut operations): (Vec<DetectedFault>, Vec<Operation>) = (Vec::new(), Vec::new());
    let mut bytes = 0;
    for found in todo {
        let draft = match drafter.draft(&instance.document, &found.fix).await {
            // What one of them is made of can't be read: the others are mended all the same.
            Err(StoreError::Malformed { detail }) => {
                hindered.get_or_insert(detail);
                continue;
            }
            draft => draft?,
        };
        let size: usize = draft.iter().map(Operation::size).sum();
        let is_full =
            operations.len() + draft.len() >= operation::MAX_OPERATIONS || bytes + size > operation::MAX_BYTES - ROOM;
        if is_full && !operations.is_empty() {
            if !write(engine, now, &mut fence, &std::mem::take(&mut operations)).await? {
                return moved();
            }
            done.extend(ready.drain(..).map(|found| found.finding));
            bytes = 0;
        }
        bytes += size;
        operations.extend(draft);
        ready.push(found);
    }
    if !operations.is_empty() && !write(engine, now, &mut fence, &operations).await? {
        return moved();
    }
    done.extend(ready.into_iter().map(|found| found.finding));
    Ok(hindered)
}

/// Makes the document of an instance; `false` where something has changed. Its batch proves that the basis of the
/// document is still there, and that nobody has claimed the instance since.
async fn make(engine: &Engine, snapshot: &Snapshot) -> Result<bool, StoreError> {
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

/// Where there is no instance, what does not belong goes by its own ETag.
async fn without_fence(
    engine: &Engine,
    snapshot: &Snapshot,
    todo: Vec<DetectedFault>,
    done: &mut Vec<Finding>,
) -> Result<Option<String>, StoreError> {
    for found in todo {
        let Fix::Delete(id, etag) = &found.fix else { continue };
        let deleted = engine.store.delete(&snapshot.partition, id, Some(etag), engine.deadline()).await?;
        if !matches!(deleted, WriteOutcome::Done(_)) {
            return Ok(Some("it has changed meanwhile".to_owned()));
        }
        done.push(found.finding);
    }
    Ok(None)
}

/// One batch with the fence, which moves; `false` where something has changed.
async fn write(
    engine: &Arc<Engine>,
    now: Millis,
    fence: &mut Versioned<InstanceDocument>,
    operations: &[Operation],
) -> Result<bool, StoreError> {
    let partition = fence.document.instance_id.clone();
    let mut next = fence.document.clone();
    next.updated_at = now;
    if next.lock.is_some() && next.inlined.is_none() {
        // It has expired. Who had it may have stalled, and must not go on beside this.
        next.give_up(now);
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
    info!(instance_id = partition.instance_id(), documents = operations.len(), "mended");
    Ok(true)
}

/// Makes the documents of a repair.
struct Drafter<'a> {
    engine: &'a Arc<Engine>,
    snapshot: &'a Snapshot,
    /// The service's time.
    now: Millis,
    /// Nobody else has it: what is made has it in its id.
    token: String,
    count: usize,
}

impl Drafter<'_> {
    async fn draft(&mut self, document: &InstanceDocument, fix: &Fix) -> Result<Vec<Operation>, StoreError> {
        let snapshot = self.snapshot;
        let partition = &snapshot.partition;
        Ok(match fix {
            Fix::Nothing | Fix::RollForward | Fix::GoOnDeleting | Fix::Rebuild => Vec::new(),
            Fix::Schedule(item) => self.schedule(item)?,
            Fix::Tell(item) => vec![self.message(item)?],
            Fix::Send(item) => vec![self.intent(document, item)?],
            Fix::SetValue { key, lost } => {
                // The turn that ends an execution begins the next epoch.
                let epoch = document.epoch.saturating_sub(u64::from(document.execution_has_ended()));
                // What an earlier execution has set is what the current one has found.
                let epoch = epoch.saturating_sub(u64::from(!lost.is_current));
                let (value, at) = (Some(lost.value.value.clone()), lost.value.at);
                let mut next = KvDocument::written(partition, key, snapshot.values.get(key), value, at, epoch);
                if lost.is_current && lost.before.is_some() {
                    next.base = lost.before.clone();
                }
                vec![Operation::upsert(&next)?]
            }
            Fix::SetStatus(value) => {
                let next = StatusDocument::new(partition.clone(), value.clone(), document.status_version);
                vec![Operation::upsert(&next)?]
            }
            Fix::Archive(execution) => self.archive(document, *execution).await?,
            Fix::Delete(id, etag) => vec![Operation::delete(id.clone(), Some(etag))],
        })
    }

    /// An activity over what is left of it: nothing, what can't be read, or the one that was seen.
    fn schedule(&self, item: &WorkItem) -> Result<Vec<Operation>, StoreError> {
        let WorkItem::ActivityExecute { execution_id, id, .. } = item else { return Ok(Vec::new()) };
        let work_id = ActivityDocument::scheduled_id(*execution_id, *id);
        let seq = self.engine.sequencer.next();
        let partition = self.snapshot.partition.clone();
        let (work, payload) =
            ActivityDocument::new(partition, work_id.clone(), item, seq, self.now).map_err(StoreError::unwritable)?;
        let illegible = self.snapshot.unreadable.iter().find(|illegible| illegible.id == work_id.as_str());
        let seen =
            self.snapshot.work.get(&work_id).map(|(_, etag)| etag).or(illegible.map(|illegible| &illegible.etag));
        let mut operations = vec![match seen {
            Some(etag) => Operation::replace(work_id, &work, Some(etag))?,
            None => Operation::create(&work)?,
        }];
        if let Some(payload) = payload {
            operations.push(Operation::upsert(&payload)?);
        }
        Ok(operations)
    }

    /// A key that nobody else has.
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
        message.send(sender, Some(sender.incarnation.clone()));
        let document = serde_json::to_value(&message).map_err(StoreError::unwritable)?;
        let takeover = now.saturating_add(millis(self.engine.config.reconciler_age_threshold()));
        let partition = self.snapshot.partition.clone();
        let intent = IntentDocument::new(partition, target, &self.token, self.count, document, now, takeover);
        Ok(Operation::create(&intent)?)
    }

    async fn archive(&self, document: &InstanceDocument, execution: u64) -> Result<Vec<Operation>, StoreError> {
        let events = self.history(&self.snapshot.partition, execution).await?;
        let archive = if execution == document.execution {
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
