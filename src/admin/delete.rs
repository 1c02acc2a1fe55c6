//! Deleting instances: all of a set, or none, also when the process dies in the middle.
//!
//! 1. Every instance of the set gets a mark that names the plan and its coordinator, the first of the set. The mark changes
//!    the instance's document, so a turn that is under way can't commit any more. Nothing is deleted yet.
//! 2. The coordinator's mark is *decided*: one write. From here on the whole set does not exist for anybody who looks.
//! 3. The partitions are emptied, the coordinator's last; then its document goes.
//!
//! A plan is decided where its coordinator's document says so, and nowhere else. The coordinator's mark is the first that is
//! put on and, where a plan is given up, the first that is taken off; its document is the last that goes. So a mark whose
//! coordinator knows nothing of the plan is that of a plan which was given up.
//!
//! Crash points: before the decision, whoever meets a mark undoes it once the plan is old enough; after it, whoever meets a
//! mark finishes the deletion. Marked documents carry `due`, so that a poll meets them.

use super::inspect;
use crate::{
    engine::Engine,
    model::{kind, Deleting, DocumentId, InstanceDocument, Millis, Partition},
    store::{
        batch::MAX_OPERATIONS, queries, BatchOutcome, Deadline, Operation, Refusal, StoreError, Versioned, WriteOutcome,
    },
    turn::{instance_id, release::read_latest, staging},
};
use azure_core::http::Etag;
use duroxide::providers::{DeleteInstanceResult, ProviderError};
use serde::Deserialize;
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tracing::{debug, info};

const OPERATION: &str = "delete_instances_atomic";
/// How long a plan that is not decided has before others undo it.
pub(crate) const UNDO_AFTER: Millis = 30_000;
/// How long it has before another deletion of the same instance undoes it, and how often that one looks.
const GIVE_WAY_AFTER: Millis = 3_000;
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A deletion may be large.
const TIME: Duration = Duration::from_secs(120);

/// Deletes every instance of `ids`, or none.
pub(crate) async fn delete_all(
    engine: &Arc<Engine>,
    ids: &[String],
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    let deadline = Deadline::after(TIME);
    let mut unique: Vec<String> = Vec::new();
    let mut seen = BTreeSet::new();
    unique.extend(ids.iter().filter(|id| seen.insert(id.as_str())).cloned());
    let plan = Engine::new_token();
    let before = engine.sequencer.next();
    let mut marked: Vec<String> = Vec::new();
    for id in &unique {
        // The first that is there decides.
        let coordinator = marked.first().unwrap_or(id).clone();
        let members = if marked.is_empty() { unique.clone() } else { Vec::new() };
        let mark = Deleting { plan: plan.clone(), coordinator, members, decided: false, before: before.clone() };
        match mark_one(engine, id, mark, force, deadline).await {
            Ok(true) => marked.push(id.clone()),
            Ok(false) => {}
            Err(error) => {
                undo(engine, &marked, &plan, deadline).await;
                return Err(error);
            }
        }
    }
    if let Err(error) = check_orphans(engine, &unique, deadline).await {
        undo(engine, &marked, &plan, deadline).await;
        return Err(error);
    }
    let Some(coordinator) = marked.first() else { return Ok(DeleteInstanceResult::default()) };
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    decide(engine, coordinator, &plan, &marked, deadline).await.map_err(failed)?;
    finish(engine, coordinator, &marked, &plan, deadline).await.map_err(failed)
}

/// Marks one instance; `false` where it is not there.
async fn mark_one(
    engine: &Arc<Engine>,
    id: &str,
    mark: Deleting,
    force: bool,
    deadline: Deadline,
) -> Result<bool, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    let Ok(partition) = Partition::instance(id) else { return Ok(false) };
    loop {
        let Some(Versioned { mut document, etag }) = read_latest(engine, &partition, deadline).await.map_err(failed)?
        else {
            return Ok(false);
        };
        if document.deleting.as_ref().is_some_and(|m| m.plan == mark.plan) {
            return Ok(true);
        }
        if document.deleting.is_some() {
            if !recover(engine, &document, GIVE_WAY_AFTER, deadline).await.map_err(failed)? {
                tokio::time::sleep(LOOK_EVERY).await;
            }
            continue;
        }
        if document.rolling.is_some() {
            staging::roll_forward(engine, &partition, deadline).await.map_err(failed)?;
            continue;
        }
        if !force && inspect::is_running(&document) {
            return Err(ProviderError::permanent(
                OPERATION,
                format!("Instance {id} is still running. Use force=true to delete it anyway, or cancel it first."),
            ));
        }
        document.deleting = Some(mark.clone());
        document.due = Some(engine.now() + UNDO_AFTER);
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(_) = written.map_err(failed)? {
            return Ok(true);
        }
    }
}

/// A child that is not in the set would be left without its parent.
async fn check_orphans(engine: &Arc<Engine>, ids: &[String], deadline: Deadline) -> Result<(), ProviderError> {
    let rows = inspect::children(engine, ids, deadline).await.map_err(|e| e.into_provider_error(OPERATION))?;
    let orphan = rows.iter().filter_map(|row| row.id()).find(|id| !ids.contains(id));
    match orphan {
        None => Ok(()),
        Some(orphan) => Err(ProviderError::permanent(
            OPERATION,
            format!(
                "Deleting would orphan the sub-orchestration {orphan}: it is not in the set. Ask for the tree again."
            ),
        )),
    }
}

/// The write that decides: from here on the set does not exist.
async fn decide(
    engine: &Arc<Engine>,
    coordinator: &str,
    plan: &str,
    members: &[String],
    deadline: Deadline,
) -> Result<(), StoreError> {
    let change = |mark: &mut Deleting| {
        mark.decided = true;
        mark.members = members.to_vec();
        mark.coordinator = coordinator.to_owned();
    };
    let decided = rewrite(engine, coordinator, plan, Some(&change), deadline).await?;
    if decided {
        return Ok(());
    }
    Err(StoreError::Unavailable { detail: "another deletion of the same instance came first".to_owned() })
}

/// Changes, or with no change removes, the mark of a plan; `false` where it is not there. What is decided is not removed.
async fn rewrite(
    engine: &Arc<Engine>,
    id: &str,
    plan: &str,
    change: Option<&(dyn Fn(&mut Deleting) + Sync)>,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(false) };
    loop {
        let found = read_latest(engine, &partition, deadline).await?;
        let Some(Versioned { mut document, etag }) = found else { return Ok(false) };
        let Some(mut mark) = document.deleting.take().filter(|mark| mark.plan == plan) else { return Ok(false) };
        match change {
            Some(change) => {
                change(&mut mark);
                document.deleting = Some(mark);
                document.due = Some(engine.now() + staging::TAKEOVER_AFTER);
            }
            None if mark.decided => return Ok(false),
            None => document.due = None,
        }
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(_) = written {
            return Ok(true);
        }
    }
}

/// Takes the marks of a plan that was not decided off again.
async fn undo(engine: &Arc<Engine>, marked: &[String], plan: &str, deadline: Deadline) {
    for id in marked {
        if let Err(error) = rewrite(engine, id, plan, None, deadline).await {
            info!(instance_id = id, %error, "a mark of deletion is taken off later");
        }
        if let Ok(partition) = Partition::instance(id) {
            engine.dispatch.turn_returned(&partition, 0);
        }
    }
}

/// Whether the plan behind the mark of `partition` is decided.
pub(crate) async fn is_decided(
    engine: &Arc<Engine>,
    partition: &Partition,
    mark: &Deleting,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    if mark.decided {
        return Ok(true);
    }
    if let Some(theirs) = coordinators_mark(engine, mark, deadline).await? {
        return Ok(theirs.decided);
    }
    // The plan was given up, or it was finished since the mark was read: then the mark is gone too.
    let found = read_latest(engine, partition, deadline).await?;
    let still = found.and_then(|found| found.document.deleting).is_some_and(|ours| ours.plan == mark.plan);
    Ok(!still)
}

/// What the coordinator's document says of the plan.
async fn coordinators_mark(
    engine: &Arc<Engine>,
    mark: &Deleting,
    deadline: Deadline,
) -> Result<Option<Deleting>, StoreError> {
    let Ok(partition) = Partition::instance(&mark.coordinator) else { return Ok(None) };
    let found = read_latest(engine, &partition, deadline).await?;
    Ok(found.and_then(|found| found.document.deleting).filter(|theirs| theirs.plan == mark.plan))
}

/// Whether an instance that carries a mark is gone for good.
pub(crate) async fn is_deleted(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    match &document.deleting {
        Some(mark) => is_decided(engine, &document.instance_id, mark, deadline).await,
        None => Ok(false),
    }
}

/// Finishes a deletion that was decided, or undoes one that was not and is `old`; whether there was anything to do.
pub(crate) async fn recover(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    old: Millis,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Some(mark) = &document.deleting else { return Ok(false) };
    let Some(id) = document.instance_id.instance_id() else { return Ok(false) };
    match coordinators_mark(engine, mark, deadline).await? {
        Some(theirs) if theirs.decided => {
            finish(engine, &mark.coordinator, &theirs.members, &mark.plan, deadline).await?;
        }
        Some(theirs) => {
            // `due` is when anybody may undo it.
            if document.due.is_some_and(|due| due + old > engine.now() + UNDO_AFTER) {
                return Ok(false);
            }
            // The process that planned it has died. The coordinator's mark goes first, so that nobody can decide any more.
            if rewrite(engine, &mark.coordinator, &mark.plan, None, deadline).await? {
                undo(engine, &theirs.members, &mark.plan, deadline).await;
            }
        }
        None => {
            rewrite(engine, id, &mark.plan, None, deadline).await?;
        }
    }
    Ok(true)
}

/// Empties the partitions of a decided plan, the coordinator's last.
async fn finish(
    engine: &Arc<Engine>,
    coordinator: &str,
    members: &[String],
    plan: &str,
    deadline: Deadline,
) -> Result<DeleteInstanceResult, StoreError> {
    let mut result = DeleteInstanceResult::default();
    let others = members.iter().filter(|id| *id != coordinator);
    for id in others.chain([&coordinator.to_owned()]) {
        let erased = erase(engine, id, plan, deadline).await?;
        add(&mut result, erased);
    }
    Ok(result)
}

/// A document of a partition that is emptied.
#[derive(Deserialize)]
struct Row {
    id: DocumentId,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    seq: Option<String>,
}

/// Empties one partition of what the plan covers; its document goes last.
async fn erase(
    engine: &Arc<Engine>,
    id: &str,
    plan: &str,
    deadline: Deadline,
) -> Result<DeleteInstanceResult, StoreError> {
    let mut result = DeleteInstanceResult::default();
    let Ok(partition) = Partition::instance(id) else { return Ok(result) };
    loop {
        let found = read_latest(engine, &partition, deadline).await?;
        let Some(found) = found.filter(|f| f.document.deleting.as_ref().is_some_and(|mark| mark.plan == plan)) else {
            return Ok(result);
        };
        engine.cache.forget(&partition);
        if found.document.sealed.is_some() {
            super::metrics::forget(engine, &partition, deadline).await?;
            continue;
        }
        let Some(etag) = empty(engine, &found, &mut result, deadline).await? else { continue };
        let deleted = engine.store.delete(&partition, &instance_id(), Some(&etag), deadline).await?;
        if let WriteOutcome::Refused(Refusal::Stale) = deleted {
            continue;
        }
        // Messages that came after the decision belong to a new instance of the same name.
        engine.dispatch.turn_returned(&partition, engine.now());
        result.instances_deleted = u64::from(found.document.exists());
        result.executions_deleted = found.document.totals.executions;
        result.events_deleted = found.document.totals.events;
        return Ok(result);
    }
}

/// Deletes everything but the instance's document, which fences it: a new instance of the same name loses nothing. The
/// document's ETag after that, or nothing where it or another document has changed meanwhile.
async fn empty(
    engine: &Arc<Engine>,
    found: &Versioned<InstanceDocument>,
    result: &mut DeleteInstanceResult,
    deadline: Deadline,
) -> Result<Option<Etag>, StoreError> {
    let (partition, mut etag) = (&found.document.instance_id, found.etag.clone());
    let before = found.document.deleting.as_ref().map(|mark| mark.before.as_str());
    let mut rows: Vec<Row> = engine.store.query_partition(partition, queries::CONTENTS.statement(), deadline).await?;
    // What was put into the queue after the decision is for a new instance of the same name.
    rows.retain(|row| row.kind != kind::INSTANCE && row.seq.as_deref().is_none_or(|seq| Some(seq) < before));
    for chunk in rows.chunks(MAX_OPERATIONS - 1) {
        let mut operations = vec![Operation::replace(instance_id(), &found.document, Some(&etag))?];
        operations.extend(chunk.iter().map(|row| Operation::delete(row.id.clone(), None)));
        let BatchOutcome::Committed(committed) = engine.store.batch(partition, &operations, deadline).await? else {
            return Ok(None);
        };
        let Some(fence) = committed.etag(0) else { return Ok(None) };
        etag = fence.clone();
        let queued = chunk.iter().filter(|row| matches!(row.kind.as_str(), kind::MESSAGE | kind::WORK));
        result.queue_messages_deleted += queued.count() as u64;
    }
    debug!(%partition, documents = rows.len(), "emptied");
    Ok(Some(etag))
}

/// Deletes documents in batches. One that is gone already is no reason to stop.
pub(crate) async fn remove(
    engine: &Engine,
    partition: &Partition,
    ids: &[DocumentId],
    deadline: Deadline,
) -> Result<(), StoreError> {
    for chunk in ids.chunks(MAX_OPERATIONS) {
        let operations: Vec<Operation> = chunk.iter().map(|id| Operation::delete(id.clone(), None)).collect();
        if let BatchOutcome::Committed(_) = engine.store.batch(partition, &operations, deadline).await? {
            continue;
        }
        for id in chunk {
            engine.store.delete(partition, id, None, deadline).await?;
        }
    }
    Ok(())
}

/// Deletes an instance with everything that descends from it.
pub(crate) async fn delete_tree(
    engine: &Arc<Engine>,
    id: &str,
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    if let Some(finished) = resume(engine, id).await.map_err(|e| e.into_provider_error("delete_instance"))? {
        return Ok(finished);
    }
    let found = inspect::existing(engine, id, "delete_instance").await?;
    if found.document.parent.is_some() {
        return Err(ProviderError::permanent(
            "delete_instance",
            format!("Cannot delete sub-orchestration {id} directly. Delete root instance instead."),
        ));
    }
    let tree = inspect::tree(engine, id).await.map_err(|e| e.into_provider_error("delete_instance"))?;
    delete_all(engine, &tree, force).await
}

/// Finishes a deletion of this instance that was decided and left half-way: what was left of it.
async fn resume(engine: &Arc<Engine>, id: &str) -> Result<Option<DeleteInstanceResult>, StoreError> {
    let deadline = Deadline::after(TIME);
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let found = read_latest(engine, &partition, deadline).await?;
    let Some(mark) = found.and_then(|found| found.document.deleting) else { return Ok(None) };
    match coordinators_mark(engine, &mark, deadline).await? {
        Some(theirs) if theirs.decided => {
            let result = finish(engine, &mark.coordinator, &theirs.members, &mark.plan, deadline).await?;
            Ok(Some(result))
        }
        _ => Ok(None),
    }
}

/// Deletes the finished root instances that a filter takes, each with its tree.
pub(crate) async fn delete_bulk(
    engine: &Arc<Engine>,
    filter: &duroxide::providers::InstanceFilter,
) -> Result<DeleteInstanceResult, ProviderError> {
    const OPERATION: &str = "delete_instance_bulk";
    let roots = inspect::filtered(engine, filter, |row| row.parent.is_none() && row.is_terminal(), OPERATION).await?;
    let mut result = DeleteInstanceResult::default();
    for root in roots {
        let tree = inspect::tree(engine, &root).await.map_err(|e| e.into_provider_error(OPERATION))?;
        add(&mut result, delete_all(engine, &tree, true).await?);
    }
    Ok(result)
}

fn add(result: &mut DeleteInstanceResult, more: DeleteInstanceResult) {
    result.instances_deleted += more.instances_deleted;
    result.executions_deleted += more.executions_deleted;
    result.events_deleted += more.events_deleted;
    result.queue_messages_deleted += more.queue_messages_deleted;
}
