//! Recovery of deletions: finishes or aborts a plan whose process has died.

use super::{
    erase::{self, Decision},
    plan::{
        carry_out, give_up, help, unmark, PlanDriver, RecoveryBudget, CONCURRENCY, RECOVERY_TIME, SKEW, UNDO_AFTER,
    },
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

/// What the coordinator's document says of a plan.
pub(super) struct Theirs {
    pub(super) mark: Deleting,
    pub(super) due: Millis,
    pub(super) written_at: u64,
}

pub(super) async fn coordinators_mark(
    engine: &Engine,
    mark: &Deleting,
    deadline: Deadline,
) -> Result<Option<Theirs>, StoreError> {
    let Ok(partition) = Partition::instance(&mark.coordinator) else { return Ok(None) };
    let found = engine.read_latest(&partition, deadline).await?;
    Ok(found.and_then(|Versioned { document, .. }| {
        let (due, written_at) = (document.due.unwrap_or_default(), document.written_at);
        let theirs = document.deleting.filter(|theirs| theirs.plan == mark.plan)?;
        Some(Theirs { mark: theirs, due, written_at })
    }))
}

/// Whether an instance that carries a mark is gone for good.
pub(crate) async fn is_deleted(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Some(mark) = document.deleting.clone() else { return Ok(false) };
    let marked = vec![(document.instance_id.clone(), mark)];
    Ok(!deleted_among(engine, marked, deadline).await?.is_empty())
}

/// Whether a mark is still there whose coordinator knows nothing of its plan: then that was given up. Otherwise it was
/// finished since the mark was read.
async fn is_marked_still(
    engine: &Engine,
    partition: &Partition,
    mark: &Deleting,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let found = engine.read_latest(partition, deadline).await?;
    Ok(found.and_then(|found| found.document.deleting).is_some_and(|ours| ours.plan == mark.plan))
}

/// Which of some instances with their marks are gone for good. Each plan's coordinator is asked once.
pub(crate) async fn deleted_among(
    engine: &Arc<Engine>,
    marked: Vec<(Partition, Deleting)>,
    deadline: Deadline,
) -> Result<HashSet<Partition>, StoreError> {
    let plans: BTreeMap<String, Deleting> = marked.iter().map(|(_, mark)| (mark.plan.clone(), mark.clone())).collect();
    let mut verdicts: HashMap<String, Option<DeletionState>> = HashMap::new();
    let mut asking = stream::iter(plans)
        .map(|(plan, mark)| async move { (plan, coordinators_mark(engine, &mark, deadline).await) })
        .buffer_unordered(CONCURRENCY);
    while let Some((plan, theirs)) = asking.next().await {
        let state = match theirs {
            Ok(theirs) => theirs.map(|theirs| theirs.mark.state),
            // Nobody can say what became of the plan: what may be there is shown, and the others with it.
            Err(StoreError::Malformed { detail }) => {
                warn!(plan, detail, "the coordinator of a deletion can't be read");
                Some(DeletionState::Open)
            }
            Err(error) => return Err(error),
        };
        verdicts.insert(plan, state);
    }
    let verdicts = &verdicts;
    let mut telling = stream::iter(marked)
        .map(|(partition, mark)| async move {
            let deleted = match verdicts.get(&mark.plan).copied().flatten() {
                Some(state) => Ok(state == DeletionState::Committed),
                None => is_marked_still(engine, &partition, &mark, deadline).await.map(|still| !still),
            };
            (partition, deleted)
        })
        .buffer_unordered(CONCURRENCY);
    let mut deleted = HashSet::new();
    while let Some((partition, is_deleted)) = telling.next().await {
        match is_deleted {
            Ok(true) => drop(deleted.insert(partition)),
            Ok(false) => {}
            Err(StoreError::Malformed { detail }) => warn!(detail, "an instance that carries a mark can't be read"),
            Err(error) => return Err(error),
        }
    }
    Ok(deleted)
}

/// Whether nobody has gone on with a plan that is not decided for as long as `old`.
///
/// The coordinator's `due` tells by the clock of the process that makes the plan. That may be an operator's, and be off by
/// days. So the service's time is asked for, which costs two requests every few seconds, before a plan is given up, and
/// where `due` is further ahead than a clock that is right puts it.
pub(super) async fn is_abandoned(engine: &Engine, theirs: &Theirs, old: Millis) -> Result<bool, StoreError> {
    if old == 0 {
        return Ok(true);
    }
    let now = engine.now();
    let is_late = theirs.due.saturating_add(old) <= now + UNDO_AFTER;
    if !is_late && theirs.due <= now + UNDO_AFTER + SKEW {
        return Ok(false);
    }
    let written_by = theirs.written_at.saturating_mul(1_000) + 999;
    Ok(written_by.saturating_add(old) <= service_time::recent_skew(engine).await?.now(engine))
}

/// Goes on with the plan behind an instance's mark, or gives it up where it is not decided and is `old`: for this instance at
/// once, for a large plan a little at a time. Whether there was anything to do.
pub(crate) async fn recover(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    old: Millis,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let Some(mark) = &document.deleting else { return Ok(false) };
    let Some(id) = document.instance_id.instance_id() else { return Ok(false) };
    let Some(theirs) = coordinators_mark(engine, mark, deadline).await? else {
        unmark(engine, id, &mark.plan).await?;
        return Ok(true);
    };
    let Ok(coordinator) = Partition::instance(&mark.coordinator) else { return Ok(false) };
    let patience = RecoveryBudget::Until(Deadline::after(RECOVERY_TIME));
    match theirs.mark.state {
        DeletionState::Open => {
            if !is_abandoned(engine, &theirs, old).await? {
                return Ok(false);
            }
            give_up(engine, &coordinator, &mark.plan).await?;
        }
        DeletionState::Committed if id != mark.coordinator => {
            if !help(engine, &coordinator, &theirs.mark).await? {
                return Ok(true);
            }
            let decision = Decision::new(theirs.mark, theirs.written_at);
            let erased = erase::erase_all(engine, &[id.to_owned()], &decision, &Documents::new(), patience).await;
            return erased.trouble.map_or(Ok(true), Err);
        }
        DeletionState::Aborted if id != mark.coordinator => {
            unmark(engine, id, &mark.plan).await?;
            return Ok(true);
        }
        // Somebody is at it.
        _ if theirs.mark.part < theirs.mark.parts && theirs.due > engine.now() => return Ok(false),
        _ => {}
    }
    let carried = carry_out(engine, &coordinator, &mark.plan, PlanDriver::Helper, patience).await;
    carried.trouble.map_or(Ok(true), Err)
}
