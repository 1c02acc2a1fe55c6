//! Deletes a set of instances that the caller names, or an instance tree. [`plan`](super::plan) describes the protocol.

use super::{
    delete_set::{delete_set, Growth, Obstacle, OPERATION},
    finish::{self, PlanDriver, PlanOutcome, RecoveryBudget},
    prepare::{ChosenInstance, DeletionTerms},
    recovery,
    trees::{self, Seen},
    Documents, Incarnation,
};
use crate::{
    cosmos::StoreError,
    engine::Engine,
    model::{Deleting, DeletionState, InstanceDocument, Partition},
};
use duroxide::providers::{DeleteInstanceResult, ProviderError};
use std::{collections::HashMap, sync::Arc};

/// The number of attempts of a call. It tries again if the instances change, or if another deletion of them comes
/// first.
pub(super) const ATTEMPTS: usize = 5;

/// Deletes every instance of `ids`, or none.
pub(crate) async fn delete_all(
    engine: &Arc<Engine>,
    ids: &[String],
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    let terms = DeletionTerms { force, drops_messages: force, ..DeletionTerms::default() };
    let mut attempt = 1;
    loop {
        match delete_set(engine, ids, Documents::new(), &terms, Growth::Refuse).await {
            Ok(outcome) => return into_result(outcome, OPERATION),
            Err(obstacles) if attempt < ATTEMPTS && obstacles.iter().all(Obstacle::is_retryable) => attempt += 1,
            Err(mut obstacles) => return Err(obstacles.swap_remove(0).error),
        }
    }
}

fn into_result(outcome: PlanOutcome, operation: &str) -> Result<DeleteInstanceResult, ProviderError> {
    match outcome.first_error {
        None => Ok(outcome.result),
        Some(error) => Err(error.into_provider_error(operation)),
    }
}

/// Deletes an instance with all its descendants.
pub(crate) async fn delete_tree(
    engine: &Arc<Engine>,
    id: &str,
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("delete_instance");
    let refused = |message: String| Err(ProviderError::permanent("delete_instance", message));
    let mut attempt = 1;
    loop {
        if let Some(finished) = finish_committed(engine, id).await.map_err(failed)? {
            return into_result(finished, "delete_instance");
        }
        let Some(found) = trees::latest(engine, id).await.map_err(failed)? else {
            // Another deletion has deleted the instance since the first attempt.
            return if attempt > 1 { Ok(Default::default()) } else { refused(format!("Instance {id} not found")) };
        };
        let root = found.document;
        if root.origin.parent.is_some() && !is_orphan(engine, &root).await.map_err(failed)? {
            let advice = "Delete root instance instead.";
            return refused(format!("Cannot delete sub-orchestration {id} directly. {advice}"));
        }
        let mut seen = Seen::default();
        let mut trees = trees::forest(engine, &[id.to_owned()], Some(&mut seen)).await.map_err(failed)?;
        let choice = ChosenInstance { incarnation: Incarnation::of(&root), has_ended: !force };
        let chosen = HashMap::from([(id.to_owned(), choice)]);
        let mut terms = DeletionTerms { force, drops_messages: force, chosen };
        terms.expect(seen.incarnations);
        match delete_set(engine, &trees.swap_remove(0), seen.documents, &terms, Growth::Include).await {
            Ok(outcome) => return into_result(outcome, OPERATION),
            Err(obstacles) if attempt < ATTEMPTS && obstacles.iter().all(Obstacle::is_retryable) => attempt += 1,
            Err(mut obstacles) => return Err(obstacles.swap_remove(0).error),
        }
    }
}

/// The parent of an instance, if that incarnation of the parent still exists.
pub(crate) async fn parent_of(engine: &Arc<Engine>, id: &str) -> Result<Option<String>, StoreError> {
    let Some(found) = trees::latest(engine, id).await? else { return Ok(None) };
    let is_orphan = is_orphan(engine, &found.document).await?;
    Ok(found.document.origin.parent.filter(|_| !is_orphan))
}

/// Whether the parent of an instance no longer exists. Another incarnation with its id is not the parent. An orphan is
/// deleted as a root, since no tree leads to it.
async fn is_orphan(engine: &Arc<Engine>, document: &InstanceDocument) -> Result<bool, StoreError> {
    let Some(parent) = &document.origin.parent else { return Ok(false) };
    let Some(found) = trees::latest(engine, parent).await? else { return Ok(true) };
    Ok(document
        .origin
        .parent_incarnation
        .as_ref()
        .is_some_and(|incarnation| *incarnation != found.document.origin.incarnation))
}

/// Finishes a committed deletion of this instance that another call left unfinished. Returns the outcome of the rest.
async fn finish_committed(engine: &Arc<Engine>, id: &str) -> Result<Option<PlanOutcome>, StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let found = engine.read_latest(&partition, engine.deadline()).await?;
    let Some(record) = found.and_then(|found| found.document.removal.deleting) else { return Ok(None) };
    finish_if_committed(engine, &record).await
}

/// Finishes a plan if it is committed. Returns `None` otherwise.
pub(super) async fn finish_if_committed(
    engine: &Arc<Engine>,
    record: &Deleting,
) -> Result<Option<PlanOutcome>, StoreError> {
    let view = recovery::coordinator_view(engine, record, engine.deadline()).await?;
    let committed = view.is_some_and(|view| view.record.state == DeletionState::Committed);
    let Some(coordinator) = Partition::instance(&record.coordinator).ok().filter(|_| committed) else {
        return Ok(None);
    };
    Ok(Some(
        finish::finish_plan(engine, &coordinator, &record.plan, PlanDriver::Recovery, RecoveryBudget::Unlimited).await,
    ))
}
