//! Deleting instances: a set that the caller names, a tree, or whatever a filter takes. [`plan`](super::plan) is how.

use super::{
    inspect,
    plan::{self, Carried, Carrier, Patience, Plan, Unmarked},
    Documents, Failures,
};
use crate::{
    engine::Engine,
    model::{Deleting, Partition, Verdict},
    store::{queries::names_in_questions, StoreError},
    turn::release::read_latest,
};
use duroxide::providers::{DeleteInstanceResult, InstanceFilter, ProviderError};
use futures::{stream, StreamExt};
use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

pub(crate) use super::plan::{is_deleted, recover, UNDO_AFTER};

const OPERATION: &str = "delete_instances_atomic";
/// Instances of a bulk operation that go as one set, if no tree is larger.
const SET: usize = 200;
/// Roots whose trees are looked for at once, and how many such groups are dealt with at a time.
const ROOTS: usize = 200;
const GROUPS: usize = 4;

/// What keeps a set from being deleted: an instance of it, or something else.
struct Obstacle {
    instance: Option<String>,
    /// Whether that is since the instance runs.
    runs: bool,
    error: ProviderError,
}

impl Obstacle {
    fn at(instance: String, unmarked: Unmarked) -> Self {
        let runs = matches!(unmarked, Unmarked::Running);
        let error = match unmarked {
            Unmarked::Store(error) => error.into_provider_error(OPERATION),
            Unmarked::Running => ProviderError::permanent(
                OPERATION,
                format!(
                    "Instance {instance} is still running. Use force=true to delete it anyway, or cancel it first."
                ),
            ),
            Unmarked::Changed => ProviderError::retryable(
                OPERATION,
                format!(
                    "Instance {instance} is not as it was found: it has ended again, or is another one of that name."
                ),
            ),
        };
        Self { instance: Some(instance), runs, error }
    }

    fn orphan(parent: Option<String>, orphan: &str) -> Self {
        let error = ProviderError::permanent(
            OPERATION,
            format!(
                "Deleting would orphan the sub-orchestration {orphan}: it is not in the set. Ask for the tree again."
            ),
        );
        Self { instance: parent, runs: false, error }
    }
}

impl From<StoreError> for Obstacle {
    fn from(error: StoreError) -> Self {
        Self { instance: None, runs: false, error: error.into_provider_error(OPERATION) }
    }
}

/// Deletes every instance of `ids`, or none.
pub(crate) async fn delete_all(
    engine: &Arc<Engine>,
    ids: &[String],
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    delete_seen(engine, ids, Documents::new(), force).await
}

/// The same, some of which were seen.
async fn delete_seen(
    engine: &Arc<Engine>,
    ids: &[String],
    seen: Documents,
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    match delete_set(engine, ids, seen, force).await {
        Ok(carried) => whole(carried, OPERATION),
        Err(mut obstacles) => Err(obstacles.swap_remove(0).error),
    }
}

fn whole(carried: Carried, operation: &str) -> Result<DeleteInstanceResult, ProviderError> {
    match carried.trouble {
        None => Ok(carried.result),
        Some(error) => Err(error.into_provider_error(operation)),
    }
}

/// Deletes a set as one, or says what keeps it from that; at least one obstacle. Trouble after the decision is not one.
async fn delete_set(
    engine: &Arc<Engine>,
    ids: &[String],
    seen: Documents,
    force: bool,
) -> Result<Carried, Vec<Obstacle>> {
    let mut set: HashSet<&str> = HashSet::with_capacity(ids.len());
    let unique: Vec<String> = ids.iter().filter(|id| set.insert(id)).cloned().collect();
    let begun = Plan::begin(engine, &unique, &seen, force).await;
    let begun = begun.map_err(|(id, unmarked)| vec![Obstacle::at(id, unmarked)])?;
    let Some((mut plan, others)) = begun else { return Ok(Carried::default()) };
    let obstacles = prepare(engine, &mut plan, &others, seen, &unique, &set).await;
    if !obstacles.is_empty() {
        plan.undo(&others).await;
        return Err(obstacles);
    }
    if let Err(error) = plan.decide().await {
        plan.undo(&others).await;
        return Err(vec![error.into()]);
    }
    Ok(plan.finish().await)
}

/// Everything before the decision: what stands in its way.
async fn prepare(
    engine: &Arc<Engine>,
    plan: &mut Plan<'_>,
    others: &[String],
    seen: Documents,
    ids: &[String],
    set: &HashSet<&str>,
) -> Vec<Obstacle> {
    let unmarked = match plan.mark_others(others, seen).await {
        Ok(unmarked) => unmarked,
        Err(error) => return vec![error.into()],
    };
    if !unmarked.is_empty() {
        return unmarked.into_iter().map(|(id, unmarked)| Obstacle::at(id, unmarked)).collect();
    }
    match check_orphans(engine, plan, ids, set).await {
        Ok(orphans) => orphans,
        Err(error) => vec![error.into()],
    }
}

/// A child that is not in the set would be left without its parent.
async fn check_orphans(
    engine: &Arc<Engine>,
    plan: &mut Plan<'_>,
    ids: &[String],
    set: &HashSet<&str>,
) -> Result<Vec<Obstacle>, StoreError> {
    let mut orphans = Vec::new();
    for parents in names_in_questions(ids, inspect::PARENTS) {
        for row in inspect::children(engine, parents, engine.deadline()).await? {
            if let Some(id) = row.id().filter(|id| !set.contains(id.as_str())) {
                orphans.push(Obstacle::orphan(row.parent, &id));
            }
        }
        plan.go_on().await?;
    }
    Ok(orphans)
}

/// Deletes an instance with everything that descends from it.
pub(crate) async fn delete_tree(
    engine: &Arc<Engine>,
    id: &str,
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("delete_instance");
    if let Some(finished) = resume(engine, id).await.map_err(failed)? {
        return whole(finished, "delete_instance");
    }
    let found = inspect::existing(engine, id, "delete_instance").await?;
    if found.document.parent.is_some() {
        return Err(ProviderError::permanent(
            "delete_instance",
            format!("Cannot delete sub-orchestration {id} directly. Delete root instance instead."),
        ));
    }
    let mut seen = Documents::new();
    let mut trees = inspect::forest(engine, &[id.to_owned()], Some(&mut seen)).await.map_err(failed)?;
    delete_seen(engine, &trees.swap_remove(0), seen, force).await
}

/// Finishes a deletion of this instance that was decided and left half-way: what was left of it.
async fn resume(engine: &Arc<Engine>, id: &str) -> Result<Option<Carried>, StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let found = read_latest(engine, &partition, engine.deadline()).await?;
    let Some(mark) = found.and_then(|found| found.document.deleting) else { return Ok(None) };
    resume_plan(engine, &mark).await
}

/// Finishes a plan that was decided; none where it was not.
async fn resume_plan(engine: &Arc<Engine>, mark: &Deleting) -> Result<Option<Carried>, StoreError> {
    let theirs = plan::coordinators_mark(engine, mark, engine.deadline()).await?;
    let decided = theirs.is_some_and(|theirs| theirs.mark.verdict == Verdict::Decided);
    let Some(coordinator) = Partition::instance(&mark.coordinator).ok().filter(|_| decided) else { return Ok(None) };
    Ok(Some(plan::carry_out(engine, &coordinator, &mark.plan, Carrier::Helper, Patience::Endless).await))
}

/// Deletes the finished root instances that a filter takes, each with its tree, and finishes deletions that were left
/// half-way. What was done counts, whatever else has failed.
pub(crate) async fn delete_bulk(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
) -> Result<DeleteInstanceResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("delete_instance_bulk");
    let roots = |row: &super::InstanceRow| row.parent.is_none() && row.is_terminal();
    let candidates = inspect::candidates(engine, filter, roots).await.map_err(failed)?;
    let mut bulk = Bulk::default();
    let plans: BTreeMap<String, Deleting> =
        candidates.iter().filter_map(|row| row.deleting.clone()).map(|mark| (mark.plan.clone(), mark)).collect();
    for mark in plans.values() {
        match resume_plan(engine, mark).await {
            Ok(carried) => bulk.carried(&mark.coordinator, carried.unwrap_or_default()),
            Err(error) => bulk.failures.note(&mark.coordinator, failed(error)),
        }
    }
    let chosen = inspect::chosen(engine, candidates, filter, roots).await.map_err(failed)?;
    bulk.add(delete_families(engine, &chosen, Documents::new(), true).await);
    bulk.failures.unless(bulk.result.instances_deleted > 0, bulk.result)
}

/// What a bulk deletion has come to.
#[derive(Default)]
pub(super) struct Bulk {
    pub(super) result: DeleteInstanceResult,
    /// Roots of trees that were left out since a member runs.
    pub(super) running: Vec<String>,
    failures: Failures,
}

impl Bulk {
    /// Whether everything went.
    pub(super) fn is_whole(&self) -> bool {
        self.failures.first.is_none()
    }

    fn carried(&mut self, instance: &str, carried: Carried) {
        super::add(&mut self.result, carried.result);
        if let Some(error) = carried.trouble {
            self.failures.note(instance, error.into_provider_error("delete_instance_bulk"));
        }
    }

    fn add(&mut self, more: Self) {
        super::add(&mut self.result, more.result);
        self.running.extend(more.running);
        if let Some(error) = more.failures.first {
            self.failures.first.get_or_insert(error);
        }
    }
}

/// Deletes roots, some of which were seen, with their trees, several groups of them at once.
pub(super) async fn delete_families(engine: &Arc<Engine>, roots: &[String], mut seen: Documents, force: bool) -> Bulk {
    let groups = roots.chunks(ROOTS).map(|roots| {
        let seen: Documents = roots.iter().filter_map(|root| seen.remove_entry(root)).collect();
        (roots.to_vec(), seen)
    });
    let deleting = stream::iter(groups.collect::<Vec<_>>())
        .map(|(roots, seen)| async move { delete_roots(engine, &roots, seen, force).await });
    let mut bulk = Bulk::default();
    let groups: Vec<Bulk> = deleting.buffer_unordered(GROUPS).collect().await;
    groups.into_iter().for_each(|group| bulk.add(group));
    bulk
}

/// Deletes some roots with their trees, as many in one set as make a small one: a set costs a few requests of its own.
async fn delete_roots(engine: &Arc<Engine>, roots: &[String], mut seen: Documents, force: bool) -> Bulk {
    let mut bulk = Bulk::default();
    let trees = match inspect::forest(engine, roots, Some(&mut seen)).await {
        Ok(trees) => trees,
        Err(error) => {
            bulk.failures.note(&roots[0], error.into_provider_error("delete_instance_bulk"));
            return bulk;
        }
    };
    let mut set: Vec<Vec<String>> = Vec::new();
    for tree in trees {
        let runs = |id: &&String| seen.get(*id).is_some_and(|found| inspect::is_running(&found.document));
        if let Some(running) = tree.iter().find(runs).filter(|_| !force) {
            let obstacle = Obstacle::at(running.clone(), Unmarked::Running);
            bulk.failures.note(running, obstacle.error);
            bulk.running.push(tree[0].clone());
            continue;
        }
        let size: usize = set.iter().map(Vec::len).sum();
        if size > 0 && size + tree.len() > SET {
            delete_trees(engine, std::mem::take(&mut set), &mut seen, force, &mut bulk).await;
        }
        set.push(tree);
    }
    delete_trees(engine, set, &mut seen, force, &mut bulk).await;
    bulk
}

/// Deletes trees as one set. Those that can't be deleted are left out, and the others tried again.
async fn delete_trees(
    engine: &Arc<Engine>,
    mut trees: Vec<Vec<String>>,
    seen: &mut Documents,
    force: bool,
    bulk: &mut Bulk,
) {
    while !trees.is_empty() {
        let set = trees.concat();
        // What was seen of them is not true any more once they are marked.
        let seen: Documents = set.iter().filter_map(|id| seen.remove_entry(id)).collect();
        let obstacles = match delete_set(engine, &set, seen, force).await {
            Ok(carried) => return bulk.carried(&trees[0][0], carried),
            Err(obstacles) => obstacles,
        };
        let blocked: HashSet<String> = obstacles.iter().filter_map(|obstacle| obstacle.instance.clone()).collect();
        let running: HashSet<&String> = obstacles
            .iter()
            .filter(|obstacle| obstacle.runs)
            .filter_map(|obstacle| obstacle.instance.as_ref())
            .collect();
        let before = trees.len();
        trees.retain(|tree| {
            if tree.iter().any(|id| running.contains(id)) {
                bulk.running.push(tree[0].clone());
            }
            !tree.iter().any(|id| blocked.contains(id))
        });
        let nothing_told = trees.len() == before;
        for Obstacle { instance, error, .. } in obstacles {
            bulk.failures.note(instance.as_deref().unwrap_or_default(), error);
        }
        if nothing_told {
            return;
        }
    }
}
