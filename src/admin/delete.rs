//! Deleting instances: all of a set, or none, also when the process dies in the middle.
//!
//! 1. Every instance of the set gets a mark that names the plan and its coordinator, the first of the set. The mark changes
//!    the instance's document, so a turn that is under way can't commit any more. Nothing is deleted yet.
//! 2. The coordinator's mark is *decided*: one write. From here on the whole set does not exist for anybody who looks.
//! 3. The partitions are emptied, the coordinator's last; then its document goes.
//!
//! Crash points: before the decision, whoever meets a mark undoes it once the plan is old enough; after it, whoever meets a
//! mark finishes the deletion. Marked documents carry `due`, so that a poll meets them.

use super::inspect;
use crate::{
    engine::Engine,
    model::{Deleting, DocumentId, InstanceDocument, Millis, Partition},
    store::{batch::MAX_OPERATIONS, queries, BatchOutcome, Deadline, Operation, StoreError, Versioned, WriteOutcome},
    turn::{instance_id, release::read_latest, staging},
};
use duroxide::providers::{DeleteInstanceResult, ProviderError};
use serde::Deserialize;
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tracing::{debug, info};

const OPERATION: &str = "delete_instances_atomic";
/// How long a plan that is not decided has before others undo it.
const UNDO_AFTER: Millis = 30_000;
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
    let Some(coordinator) = unique.first().cloned() else { return Ok(DeleteInstanceResult::default()) };
    let plan = Engine::new_token();
    let before = engine.sequencer.next();
    let mut marked: Vec<String> = Vec::new();
    for id in &unique {
        let members = if *id == coordinator { unique.clone() } else { Vec::new() };
        let mark = Deleting {
            plan: plan.clone(),
            coordinator: coordinator.clone(),
            members,
            decided: false,
            before: before.clone(),
        };
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
    if marked.is_empty() {
        return Ok(DeleteInstanceResult::default());
    }
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    // The coordinator may have been the one that is not there; then another decides.
    let coordinator = marked.first().cloned().unwrap_or(coordinator);
    decide(engine, &coordinator, &plan, &marked, deadline).await.map_err(failed)?;
    finish(engine, &coordinator, &marked, &plan, deadline).await.map_err(failed)
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
            recover(engine, &document, deadline).await.map_err(failed)?;
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

/// Changes, or with no change removes, the mark of a plan; `false` where it is not there.
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

/// Whether the plan behind a mark is decided.
pub(crate) async fn is_decided(engine: &Arc<Engine>, mark: &Deleting, deadline: Deadline) -> Result<bool, StoreError> {
    if mark.decided {
        return Ok(true);
    }
    let Ok(partition) = Partition::instance(&mark.coordinator) else { return Ok(false) };
    let found = read_latest(engine, &partition, deadline).await?;
    // The coordinator goes last: where it is gone, the plan was decided.
    Ok(match found {
        None => true,
        Some(found) => match found.document.deleting {
            Some(theirs) if theirs.plan == mark.plan => theirs.decided,
            _ => true,
        },
    })
}

/// Whether an instance that carries a mark is gone for good.
pub(crate) async fn is_deleted(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    match &document.deleting {
        Some(mark) => is_decided(engine, mark, deadline).await,
        None => Ok(false),
    }
}

/// Finishes a deletion that was decided, or undoes one that was not and is old.
pub(crate) async fn recover(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let Some(mark) = &document.deleting else { return Ok(()) };
    let Ok(coordinator) = Partition::instance(&mark.coordinator) else { return Ok(()) };
    let found = read_latest(engine, &coordinator, deadline).await?;
    let theirs = found.and_then(|found| found.document.deleting).filter(|theirs| theirs.plan == mark.plan);
    match theirs {
        Some(theirs) if theirs.decided => {
            finish(engine, &mark.coordinator, &theirs.members, &mark.plan, deadline).await?;
        }
        Some(theirs) if document.due.is_some_and(|due| due <= engine.now()) => {
            // The process that planned it has died. The coordinator's mark goes first, so that nobody can decide any more.
            rewrite(engine, &mark.coordinator, &mark.plan, None, deadline).await?;
            undo(engine, &theirs.members, &mark.plan, deadline).await;
        }
        Some(_) => {}
        None if mark.coordinator == document.instance_id.instance_id().unwrap_or_default() => {}
        None => {
            let Some(id) = document.instance_id.instance_id() else { return Ok(()) };
            // The coordinator is gone, so the plan was decided and this instance is what is left of it.
            erase(engine, id, &mark.plan, deadline).await?;
        }
    }
    Ok(())
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
    let Ok(partition) = Partition::instance(id) else { return Ok(DeleteInstanceResult::default()) };
    let Some(Versioned { document, etag }) = read_latest(engine, &partition, deadline).await? else {
        return Ok(DeleteInstanceResult::default());
    };
    let Some(mark) = document.deleting.as_ref().filter(|mark| mark.plan == plan) else {
        return Ok(DeleteInstanceResult::default());
    };
    super::metrics::forget(engine, &document, deadline).await?;
    let rows: Vec<Row> = engine.store.query_partition(&partition, queries::CONTENTS.statement(), deadline).await?;
    let messages = rows.iter().filter(|row| matches!(row.kind.as_str(), "message" | "work")).count();
    // What was put into the queue after the decision is for a new instance of the same name.
    let doomed: Vec<DocumentId> = rows
        .into_iter()
        .filter(|row| row.kind != "instance" && row.seq.as_ref().is_none_or(|seq| *seq < mark.before))
        .map(|row| row.id)
        .collect();
    remove(engine, &partition, &doomed, deadline).await?;
    engine.cache.forget(&partition);
    engine.store.delete(&partition, &instance_id(), Some(&etag), deadline).await?;
    debug!(instance_id = id, documents = doomed.len(), "deleted");
    // Messages that came after the decision belong to a new instance of the same name.
    engine.dispatch.turn_returned(&partition, engine.now());
    Ok(DeleteInstanceResult {
        instances_deleted: u64::from(document.exists()),
        executions_deleted: document.totals.executions,
        events_deleted: document.totals.events,
        queue_messages_deleted: messages as u64,
    })
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
