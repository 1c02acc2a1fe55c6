//! Bulk deletion: the root instances that a filter or retention selects, each with its tree.

use super::{
    delete::{finish_if_committed, ATTEMPTS},
    delete_set::{delete_set, Growth, Obstacle, RefusalReason},
    finish::PlanOutcome,
    prepare::{ChosenInstance, DeletionTerms, PrepareError},
    trees::{self, Seen},
    Documents, Failures, Incarnation, InstanceRow,
};
use crate::{cosmos::StoreError, engine::Engine, model::Deleting};
use duroxide::providers::{DeleteInstanceResult, InstanceFilter, ProviderError};
use futures::{stream, StreamExt};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};
use tracing::info;

/// Instances that a bulk deletion deletes as one set, unless a single tree is larger.
const MAX_SET: usize = 200;
/// Roots whose trees one group of queries reads.
const ROOTS_PER_GROUP: usize = 200;
/// Groups that are deleted at once.
const CONCURRENT_GROUPS: usize = 4;

/// Deletes the finished root instances that a filter selects, each with its tree. It also finishes committed deletions
/// that other calls left unfinished. It returns an error only if it could delete nothing at all.
pub(crate) async fn delete_bulk(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
) -> Result<DeleteInstanceResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("delete_instance_bulk");
    let roots = |row: &InstanceRow| row.parent.is_none() && row.has_ended();
    let candidates = trees::candidates(engine, filter, roots, "delete_instance_bulk").await?;
    let mut bulk = BulkOutcome::default();
    let plans: BTreeMap<String, Deleting> =
        candidates.iter().filter_map(|row| row.deleting.clone()).map(|record| (record.plan.clone(), record)).collect();
    for record in plans.values() {
        match finish_if_committed(engine, record).await {
            Ok(outcome) => bulk.add_outcome(&record.coordinator, outcome.unwrap_or_default()),
            Err(error) => bulk.failures.record(&record.coordinator, failed(error)),
        }
    }
    let chosen = trees::select(engine, candidates, filter, roots).await.map_err(failed)?;
    bulk.add(delete_instance_trees(engine, chosen, Documents::new(), true).await);
    bulk.failures.into_result(bulk.result.instances_deleted > 0, bulk.result)
}

/// The outcome of a bulk deletion.
#[derive(Default)]
pub(super) struct BulkOutcome {
    pub(super) result: DeleteInstanceResult,
    /// Roots of trees that were left out because a member runs.
    pub(super) running: Vec<String>,
    failures: Failures,
}

impl BulkOutcome {
    /// Whether all instances were deleted.
    pub(super) fn is_complete(&self) -> bool {
        self.failures.first.is_none()
    }

    fn add_outcome(&mut self, instance: &str, outcome: PlanOutcome) {
        super::add(&mut self.result, outcome.result);
        if let Some(error) = outcome.first_error {
            self.failures.record(instance, error.into_provider_error("delete_instance_bulk"));
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

/// Deletes roots with their trees, several groups at once. The roots were chosen because they had ended. `seen` holds
/// the documents of some of them. `force` applies to their descendants: a root that runs again is left alone.
pub(super) async fn delete_instance_trees(
    engine: &Arc<Engine>,
    roots: Vec<(String, Incarnation)>,
    mut seen: Documents,
    force: bool,
) -> BulkOutcome {
    let groups = roots.chunks(ROOTS_PER_GROUP).map(|roots| {
        let seen: Documents = roots.iter().filter_map(|(root, _)| seen.remove_entry(root)).collect();
        let choice = |incarnation: &Incarnation| ChosenInstance { incarnation: incarnation.clone(), has_ended: true };
        let chosen = roots.iter().map(|(root, incarnation)| (root.clone(), choice(incarnation))).collect();
        let ids: Vec<String> = roots.iter().map(|(root, _)| root.clone()).collect();
        (ids, seen, DeletionTerms { force, drops_messages: false, chosen })
    });
    let deleting = stream::iter(groups.collect::<Vec<_>>())
        .map(|(roots, seen, terms)| async move { delete_roots(engine, &roots, seen, terms).await });
    let mut bulk = BulkOutcome::default();
    let groups: Vec<BulkOutcome> = deleting.buffer_unordered(CONCURRENT_GROUPS).collect().await;
    groups.into_iter().for_each(|group| bulk.add(group));
    bulk
}

/// Deletes some roots with their trees, several trees in one set, since each set costs a few requests of its own.
async fn delete_roots(
    engine: &Arc<Engine>,
    roots: &[String],
    seen: Documents,
    mut terms: DeletionTerms,
) -> BulkOutcome {
    let mut bulk = BulkOutcome::default();
    let mut seen = Seen { documents: seen, incarnations: HashMap::new() };
    let trees = match trees::forest(engine, roots, Some(&mut seen)).await {
        Ok(trees) => trees,
        Err(error) => {
            bulk.failures.record(&roots[0], error.into_provider_error("delete_instance_bulk"));
            return bulk;
        }
    };
    terms.expect(seen.incarnations);
    let (terms, mut seen) = (&terms, seen.documents);
    let mut set: Vec<Vec<String>> = Vec::new();
    for tree in trees {
        let runs = |id: &&String| seen.get(*id).is_some_and(|found| found.document.is_running());
        if let Some(running) = tree.iter().find(runs).filter(|_| !terms.force) {
            let obstacle = Obstacle::at(running.clone(), PrepareError::Running);
            bulk.failures.record(running, obstacle.error);
            bulk.running.push(tree[0].clone());
            continue;
        }
        let size: usize = set.iter().map(Vec::len).sum();
        if size > 0 && size + tree.len() > MAX_SET {
            delete_trees(engine, std::mem::take(&mut set), &mut seen, terms, &mut bulk).await;
        }
        set.push(tree);
    }
    delete_trees(engine, set, &mut seen, terms, &mut bulk).await;
    bulk
}

/// Deletes trees as one set. Trees that can't be deleted are left out, and the others are tried again.
async fn delete_trees(
    engine: &Arc<Engine>,
    mut trees: Vec<Vec<String>>,
    seen: &mut Documents,
    terms: &DeletionTerms,
    bulk: &mut BulkOutcome,
) {
    let mut attempt = 1;
    while !trees.is_empty() {
        let set = trees.concat();
        // The documents in `seen` are outdated once the instances are prepared.
        let seen: Documents = set.iter().filter_map(|id| seen.remove_entry(id)).collect();
        let obstacles = match delete_set(engine, &set, seen, terms, Growth::Include).await {
            Ok(outcome) => return bulk.add_outcome(&trees[0][0], outcome),
            Err(obstacles) => obstacles,
        };
        let blocked: HashSet<String> = obstacles.iter().filter_map(|obstacle| obstacle.instance.clone()).collect();
        let running: HashSet<&String> = obstacles
            .iter()
            .filter(|obstacle| obstacle.reason == RefusalReason::Running)
            .filter_map(|obstacle| obstacle.instance.as_ref())
            .collect();
        let before = trees.len();
        trees.retain(|tree| {
            if tree.iter().any(|id| running.contains(id)) {
                bulk.running.push(tree[0].clone());
            }
            !tree.iter().any(|id| blocked.contains(id))
        });
        let unattributed = trees.len() == before;
        if unattributed && attempt < ATTEMPTS && obstacles.iter().all(Obstacle::is_retryable) {
            attempt += 1;
            continue;
        }
        for Obstacle { instance, reason, error } in obstacles {
            match reason {
                // The filter did not select this incarnation, or not in its present state.
                RefusalReason::Changed => {
                    info!(
                        instance_id = instance,
                        "bulk deletion skips an instance that has changed since it was selected"
                    )
                }
                _ => bulk.failures.record(instance.as_deref().unwrap_or_default(), error),
            }
        }
        if unattributed {
            return;
        }
    }
}
