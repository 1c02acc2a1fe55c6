//! Deleting instances: a set that the caller names, a tree, or whatever a filter takes. [`plan`](super::plan) is how.

use super::{
    plan::{self, ChosenInstance, DeletionPlan, DeletionTerms, PlanDriver, PlanOutcome, RecoveryBudget, Unmarked},
    recovery,
    trees::{self, Owed, Seen},
    Documents, Failures, Incarnation, InstanceRow,
};
use crate::{
    cosmos::{queries::names_in_questions, StoreError},
    engine::Engine,
    model::{Deleting, DeletionState, InstanceDocument, Partition},
    outbox,
};
use duroxide::providers::{DeleteInstanceResult, InstanceFilter, ProviderError};
use futures::{stream, StreamExt};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tracing::{info, warn};

const OPERATION: &str = "delete_instances_atomic";
/// Instances of a bulk operation that go as one set, if no tree is larger.
const SET: usize = 200;
/// Roots whose trees are looked for at once, and how many such groups are dealt with at a time.
const ROOTS: usize = 200;
const GROUPS: usize = 4;
/// How often a call begins again where the instances change, or another deletion of them comes first.
const ATTEMPTS: usize = 5;
/// How often a tree that grows is looked at, and its new instances marked, too. A marked instance starts no others:
/// each time there is one generation more at most.
const GENERATIONS: usize = 20;

/// What keeps a set from being deleted: an instance of it, or something else.
struct Obstacle {
    instance: Option<String>,
    reason: RefusalReason,
    error: ProviderError,
}

#[derive(Clone, Copy, PartialEq)]
enum RefusalReason {
    Running,
    /// The instance is not the one that was found.
    Changed,
    /// Another deletion of the same instances came first.
    Overtaken,
    Other,
}

impl Obstacle {
    fn new(instance: Option<String>, unmarked: Unmarked) -> Self {
        let name = instance.as_deref().unwrap_or_default();
        let (reason, error) = match unmarked {
            Unmarked::Store(error) => (RefusalReason::Other, error.into_provider_error(OPERATION)),
            Unmarked::Running => {
                let advice = "Use force=true to delete it anyway, or cancel it first.";
                let message = format!("Instance {name} is still running. {advice}");
                (RefusalReason::Running, ProviderError::permanent(OPERATION, message))
            }
            Unmarked::Changed => {
                let how = "it has ended again, or is another one of that name";
                let message = format!("Instance {name} is not as it was found: {how}. Try again.");
                (RefusalReason::Changed, ProviderError::retryable(OPERATION, message))
            }
            Unmarked::Overtaken => {
                let message = "Another deletion of the same instances came first. Try again.";
                (RefusalReason::Overtaken, ProviderError::retryable(OPERATION, message))
            }
        };
        Self { instance, reason, error }
    }

    fn at(instance: String, unmarked: Unmarked) -> Self {
        Self::new(Some(instance), unmarked)
    }

    fn orphan(parent: String, orphan: &str) -> Self {
        let error = ProviderError::permanent(
            OPERATION,
            format!(
                "Deleting would orphan the sub-orchestration {orphan}: it is not in the set. Ask for the tree again."
            ),
        );
        Self { instance: Some(parent), reason: RefusalReason::Other, error }
    }

    /// Not all of what the instance owes to others could be delivered.
    fn owing(sender: String, error: StoreError) -> Self {
        let error = error.into_provider_error(OPERATION);
        let message = format!(
            "Instance {sender} has sent a message that could not be delivered yet: {}. Nothing was deleted. Try again, or \
             use force=true to give up messages that can't be delivered.",
            error.message
        );
        let error = match error.is_retryable() {
            true => ProviderError::retryable(OPERATION, message),
            false => ProviderError::permanent(OPERATION, message),
        };
        Self { instance: Some(sender), reason: RefusalReason::Other, error }
    }

    fn growing(parent: String) -> Self {
        let message = format!(
            "The tree grows faster than it can be deleted: {parent} has started more instances. Try again, or cancel \
             its root first."
        );
        Self {
            instance: Some(parent),
            reason: RefusalReason::Other,
            error: ProviderError::retryable(OPERATION, message),
        }
    }

    /// Whether a call that looks again may do better.
    fn is_retryable(&self) -> bool {
        matches!(self.reason, RefusalReason::Changed | RefusalReason::Overtaken)
    }
}

impl From<Unmarked> for Obstacle {
    fn from(unmarked: Unmarked) -> Self {
        Self::new(None, unmarked)
    }
}

impl From<StoreError> for Obstacle {
    fn from(error: StoreError) -> Self {
        Unmarked::from(error).into()
    }
}

/// Deletes every instance of `ids`, or none.
pub(crate) async fn delete_all(
    engine: &Arc<Engine>,
    ids: &[String],
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    let terms = DeletionTerms { force, gives_up_messages: force, ..DeletionTerms::default() };
    let mut attempt = 1;
    loop {
        match delete_set(engine, ids, Documents::new(), &terms, Growth::Refused).await {
            Ok(carried) => return whole(carried, OPERATION),
            Err(obstacles) if attempt < ATTEMPTS && obstacles.iter().all(Obstacle::is_retryable) => attempt += 1,
            Err(mut obstacles) => return Err(obstacles.swap_remove(0).error),
        }
    }
}

fn whole(carried: PlanOutcome, operation: &str) -> Result<DeleteInstanceResult, ProviderError> {
    match carried.trouble {
        None => Ok(carried.result),
        Some(error) => Err(error.into_provider_error(operation)),
    }
}

/// How a deletion treats a child that it finds after the parent was marked, and that is not in the set.
#[derive(Clone, Copy, PartialEq)]
enum Growth {
    /// The set stays as it is: its caller has named it.
    Refused,
    /// The child goes with its tree.
    Taken,
}

/// Deletes a set as one, or says what keeps it from that; at least one obstacle. Trouble after the decision is not one.
async fn delete_set(
    engine: &Arc<Engine>,
    ids: &[String],
    seen: Documents,
    terms: &DeletionTerms,
    growth: Growth,
) -> Result<PlanOutcome, Vec<Obstacle>> {
    let mut unique = HashSet::with_capacity(ids.len());
    let ids: Vec<String> = ids.iter().filter(|id| unique.insert(*id)).cloned().collect();
    let begun = DeletionPlan::begin(engine, &ids, &seen, terms).await;
    let begun = begun.map_err(|(id, unmarked)| vec![Obstacle::at(id, unmarked)])?;
    let Some((mut plan, others)) = begun else { return Ok(PlanOutcome::default()) };
    let (parent_of, delivered, gives_up) = (HashMap::new(), HashSet::new(), terms.gives_up_messages);
    let mut set = Set { ids, others, parent_of, delivered, gives_up };
    let mut obstacles = prepare(engine, &mut plan, &mut set, seen, growth).await;
    if obstacles.is_empty() {
        obstacles.extend(plan.decide().await.err().map(Obstacle::from));
    }
    if !obstacles.is_empty() {
        plan.undo(&set.others).await;
        return Err(obstacles);
    }
    Ok(plan.finish().await)
}

/// The instances of a deletion.
struct Set {
    ids: Vec<String>,
    /// All but the coordinator, and those before it, which are not there.
    others: Vec<String>,
    /// Of those that were found after their parents were marked, whose children they are.
    parent_of: HashMap<String, String>,
    /// Messages that the instances owed to others, and that the deletion has delivered.
    delivered: HashSet<Owed>,
    /// Messages that nobody can deliver are given up.
    gives_up: bool,
}

impl Set {
    /// The instance that the caller knows of, by one that may have been found later.
    fn known(&self, id: &str) -> String {
        let mut known = id;
        while let Some(parent) = self.parent_of.get(known) {
            known = parent;
        }
        known.to_owned()
    }
}

/// Everything before the decision: what stands in its way.
async fn prepare(
    engine: &Arc<Engine>,
    plan: &mut DeletionPlan<'_>,
    set: &mut Set,
    mut seen: Documents,
    growth: Growth,
) -> Vec<Obstacle> {
    let mut more = set.others.clone();
    for _ in 0..GENERATIONS {
        let unmarked = match plan.mark_others(&more, std::mem::take(&mut seen)).await {
            Ok(unmarked) => unmarked,
            Err(error) => return vec![error.into()],
        };
        if !unmarked.is_empty() {
            let obstacle = |(id, unmarked): (String, Unmarked)| {
                let instance = Some(set.known(&id));
                Obstacle { instance, ..Obstacle::at(id, unmarked) }
            };
            return unmarked.into_iter().map(obstacle).collect();
        }
        let LeftBehind { children, owed } = match left_behind(engine, plan, set).await {
            Ok(left) => left,
            Err(error) => return vec![error.into()],
        };
        if children.is_empty() && owed.is_empty() {
            return Vec::new();
        }
        if growth == Growth::Refused && !children.is_empty() {
            return children.into_iter().map(|(id, child)| Obstacle::orphan(child.parent, &id)).collect();
        }
        let undelivered = match plan.while_it_goes_on(deliver_owed(engine, &owed, set.gives_up)).await {
            Ok(undelivered) => undelivered,
            Err(error) => return vec![error.into()],
        };
        if !undelivered.is_empty() {
            let obstacle = |(sender, error): (String, StoreError)| {
                let instance = Some(set.known(&sender));
                Obstacle { instance, ..Obstacle::owing(sender, error) }
            };
            return undelivered.into_iter().map(obstacle).collect();
        }
        set.delivered.extend(owed);
        more = children.keys().cloned().collect();
        set.ids.extend_from_slice(&more);
        set.others.extend_from_slice(&more);
        for (id, FoundChild { parent, incarnation }) in children {
            plan.expect([(id.clone(), incarnation)]);
            set.parent_of.insert(id, parent);
        }
    }
    let last = more.first().map(|id| set.known(id)).unwrap_or_default();
    vec![Obstacle::growing(last)]
}

/// Documents outside a set that its deletion would lose or leave without a parent.
#[derive(Default)]
struct LeftBehind {
    /// Children that are not in the set.
    children: BTreeMap<String, FoundChild>,
    /// Messages that committed turns of the set owe to instances outside it.
    owed: Vec<Owed>,
}

/// A child that was found after its parent was marked.
struct FoundChild {
    parent: String,
    incarnation: Incarnation,
}

/// Asks once the set is marked: a marked instance commits no turn, so it sends nothing more and starts no child.
async fn left_behind(engine: &Arc<Engine>, plan: &mut DeletionPlan<'_>, set: &Set) -> Result<LeftBehind, Unmarked> {
    let ids: HashSet<&String> = set.ids.iter().collect();
    let mut left = LeftBehind::default();
    for parents in names_in_questions(&set.ids, trees::PARENTS) {
        // A parent may have so many children that others would think the plan dead by the last page.
        let mut pages = trees::dependents_pages(engine, parents)?;
        while let Some(found) = trees::next_dependents(engine, &mut pages).await? {
            let child =
                |row: InstanceRow| Some((row.id()?, FoundChild { parent: row.parent?, incarnation: row.incarnation }));
            left.children.extend(found.children.into_iter().filter_map(child).filter(|(id, _)| !ids.contains(id)));
            // A message for another instance of the plan goes with both.
            let leaves = |owed: &Owed| !owed.receiver.as_ref().is_some_and(|receiver| plan.has(receiver));
            left.owed.extend(found.owed.into_iter().filter(|owed| leaves(owed) && !set.delivered.contains(owed)));
            plan.go_on().await?;
        }
    }
    Ok(left)
}

/// Delivers what a marked set owes to others, before it is decided: a message of a committed turn must not go with its
/// sender. Returns the senders whose messages could not be delivered, each with the first reason. `gives_up` is for messages
/// that nobody can deliver.
async fn deliver_owed(engine: &Arc<Engine>, owed: &[Owed], gives_up: bool) -> BTreeMap<String, StoreError> {
    let undelivered = Mutex::new(Undelivered::default());
    let delivering = stream::iter(owed).for_each_concurrent(plan::CONCURRENCY, |owed| {
        let undelivered = &undelivered;
        async move {
            let Ok(partition) = Partition::instance(&owed.sender) else { return };
            let expected = lock(undelivered).expected(owed);
            let delivered = match expected {
                Some(error) => Err(error),
                None => outbox::deliver_before_deletion(engine, &partition, &owed.id).await,
            };
            match delivered {
                Ok(()) => {}
                Err(error) if gives_up && !error.is_retryable() => {
                    warn!(instance_id = owed.sender, %error, "deleting an instance whose message can't be delivered");
                }
                Err(error) => lock(undelivered).note(owed, error),
            }
        }
    });
    delivering.await;
    undelivered.into_inner().unwrap_or_else(PoisonError::into_inner).senders
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Messages that could not be delivered. One is enough to keep its sender, and a receiver that can't be reached is not asked
/// for each of its messages.
#[derive(Default)]
struct Undelivered {
    senders: BTreeMap<String, StoreError>,
    receivers: HashMap<Partition, StoreError>,
}

impl Undelivered {
    /// The reason that a message would not be delivered for either, if there is one.
    fn expected(&self, owed: &Owed) -> Option<StoreError> {
        let of_receiver = || self.receivers.get(owed.receiver.as_ref()?);
        self.senders.get(&owed.sender).or_else(of_receiver).cloned()
    }

    fn note(&mut self, owed: &Owed, error: StoreError) {
        if let Some(receiver) = owed.receiver.clone().filter(|_| error.is_retryable()) {
            self.receivers.insert(receiver, error.clone());
        }
        self.senders.entry(owed.sender.clone()).or_insert(error);
    }
}

/// Deletes an instance with everything that descends from it.
pub(crate) async fn delete_tree(
    engine: &Arc<Engine>,
    id: &str,
    force: bool,
) -> Result<DeleteInstanceResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("delete_instance");
    let refused = |message: String| Err(ProviderError::permanent("delete_instance", message));
    let mut attempt = 1;
    loop {
        if let Some(finished) = resume(engine, id).await.map_err(failed)? {
            return whole(finished, "delete_instance");
        }
        let Some(found) = trees::latest(engine, id).await.map_err(failed)? else {
            // Another deletion has taken it since the first attempt.
            return if attempt > 1 { Ok(Default::default()) } else { refused(format!("Instance {id} not found")) };
        };
        let root = found.document;
        if root.parent.is_some() && !is_orphan(engine, &root).await.map_err(failed)? {
            let advice = "Delete root instance instead.";
            return refused(format!("Cannot delete sub-orchestration {id} directly. {advice}"));
        }
        let mut seen = Seen::default();
        let mut trees = trees::forest(engine, &[id.to_owned()], Some(&mut seen)).await.map_err(failed)?;
        let choice = ChosenInstance { incarnation: Incarnation::of(&root), has_ended: !force };
        let chosen = HashMap::from([(id.to_owned(), choice)]);
        let mut terms = DeletionTerms { force, gives_up_messages: force, chosen };
        terms.expect(seen.incarnations);
        match delete_set(engine, &trees.swap_remove(0), seen.documents, &terms, Growth::Taken).await {
            Ok(carried) => return whole(carried, OPERATION),
            Err(obstacles) if attempt < ATTEMPTS && obstacles.iter().all(Obstacle::is_retryable) => attempt += 1,
            Err(mut obstacles) => return Err(obstacles.swap_remove(0).error),
        }
    }
}

/// The instance that started this one, unless it is gone.
pub(crate) async fn parent_of(engine: &Arc<Engine>, id: &str) -> Result<Option<String>, StoreError> {
    let Some(found) = trees::latest(engine, id).await? else { return Ok(None) };
    let is_orphan = is_orphan(engine, &found.document).await?;
    Ok(found.document.parent.filter(|_| !is_orphan))
}

/// Whether the instance that started this one is gone, though another one may have its name. An orphan is deleted as a
/// root: no deletion of a tree would ever find it.
async fn is_orphan(engine: &Arc<Engine>, document: &InstanceDocument) -> Result<bool, StoreError> {
    let Some(parent) = &document.parent else { return Ok(false) };
    let Some(found) = trees::latest(engine, parent).await? else { return Ok(true) };
    Ok(document.parent_incarnation.as_ref().is_some_and(|incarnation| *incarnation != found.document.incarnation))
}

/// Finishes a deletion of this instance that was decided and left half-way: what was left of it.
async fn resume(engine: &Arc<Engine>, id: &str) -> Result<Option<PlanOutcome>, StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let found = engine.read_latest(&partition, engine.deadline()).await?;
    let Some(mark) = found.and_then(|found| found.document.deleting) else { return Ok(None) };
    resume_plan(engine, &mark).await
}

/// Finishes a plan that was decided; none where it was not.
async fn resume_plan(engine: &Arc<Engine>, mark: &Deleting) -> Result<Option<PlanOutcome>, StoreError> {
    let theirs = recovery::coordinators_mark(engine, mark, engine.deadline()).await?;
    let decided = theirs.is_some_and(|theirs| theirs.mark.state == DeletionState::Committed);
    let Some(coordinator) = Partition::instance(&mark.coordinator).ok().filter(|_| decided) else { return Ok(None) };
    Ok(Some(plan::carry_out(engine, &coordinator, &mark.plan, PlanDriver::Helper, RecoveryBudget::Endless).await))
}

/// Deletes the finished root instances that a filter takes, each with its tree, and finishes deletions that were left
/// half-way. What was done counts, whatever else has failed.
pub(crate) async fn delete_bulk(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
) -> Result<DeleteInstanceResult, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error("delete_instance_bulk");
    let roots = |row: &InstanceRow| row.parent.is_none() && row.has_ended();
    let candidates = trees::candidates(engine, filter, roots, "delete_instance_bulk").await?;
    let mut bulk = Bulk::default();
    let plans: BTreeMap<String, Deleting> =
        candidates.iter().filter_map(|row| row.deleting.clone()).map(|mark| (mark.plan.clone(), mark)).collect();
    for mark in plans.values() {
        match resume_plan(engine, mark).await {
            Ok(carried) => bulk.carried(&mark.coordinator, carried.unwrap_or_default()),
            Err(error) => bulk.failures.note(&mark.coordinator, failed(error)),
        }
    }
    let chosen = trees::chosen(engine, candidates, filter, roots).await.map_err(failed)?;
    bulk.add(delete_families(engine, chosen, Documents::new(), true).await);
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

    fn carried(&mut self, instance: &str, carried: PlanOutcome) {
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

/// Deletes roots that were chosen since they had ended, some of which were seen, with their trees, several groups of
/// them at once. `force` is for their descendants: a root that runs again is left alone.
pub(super) async fn delete_families(
    engine: &Arc<Engine>,
    roots: Vec<(String, Incarnation)>,
    mut seen: Documents,
    force: bool,
) -> Bulk {
    let groups = roots.chunks(ROOTS).map(|roots| {
        let seen: Documents = roots.iter().filter_map(|(root, _)| seen.remove_entry(root)).collect();
        let choice = |incarnation: &Incarnation| ChosenInstance { incarnation: incarnation.clone(), has_ended: true };
        let chosen = roots.iter().map(|(root, incarnation)| (root.clone(), choice(incarnation))).collect();
        let ids: Vec<String> = roots.iter().map(|(root, _)| root.clone()).collect();
        (ids, seen, DeletionTerms { force, gives_up_messages: false, chosen })
    });
    let deleting = stream::iter(groups.collect::<Vec<_>>())
        .map(|(roots, seen, terms)| async move { delete_roots(engine, &roots, seen, terms).await });
    let mut bulk = Bulk::default();
    let groups: Vec<Bulk> = deleting.buffer_unordered(GROUPS).collect().await;
    groups.into_iter().for_each(|group| bulk.add(group));
    bulk
}

/// Deletes some roots with their trees, as many in one set as make a small one: a set costs a few requests of its own.
async fn delete_roots(engine: &Arc<Engine>, roots: &[String], seen: Documents, mut terms: DeletionTerms) -> Bulk {
    let mut bulk = Bulk::default();
    let mut seen = Seen { documents: seen, incarnations: HashMap::new() };
    let trees = match trees::forest(engine, roots, Some(&mut seen)).await {
        Ok(trees) => trees,
        Err(error) => {
            bulk.failures.note(&roots[0], error.into_provider_error("delete_instance_bulk"));
            return bulk;
        }
    };
    terms.expect(seen.incarnations);
    let (terms, mut seen) = (&terms, seen.documents);
    let mut set: Vec<Vec<String>> = Vec::new();
    for tree in trees {
        let runs = |id: &&String| seen.get(*id).is_some_and(|found| found.document.is_running());
        if let Some(running) = tree.iter().find(runs).filter(|_| !terms.force) {
            let obstacle = Obstacle::at(running.clone(), Unmarked::Running);
            bulk.failures.note(running, obstacle.error);
            bulk.running.push(tree[0].clone());
            continue;
        }
        let size: usize = set.iter().map(Vec::len).sum();
        if size > 0 && size + tree.len() > SET {
            delete_trees(engine, std::mem::take(&mut set), &mut seen, terms, &mut bulk).await;
        }
        set.push(tree);
    }
    delete_trees(engine, set, &mut seen, terms, &mut bulk).await;
    bulk
}

/// Deletes trees as one set. Those that can't be deleted are left out, and the others tried again.
async fn delete_trees(
    engine: &Arc<Engine>,
    mut trees: Vec<Vec<String>>,
    seen: &mut Documents,
    terms: &DeletionTerms,
    bulk: &mut Bulk,
) {
    let mut attempt = 1;
    while !trees.is_empty() {
        let set = trees.concat();
        // What was seen of them is not true any more once they are marked.
        let seen: Documents = set.iter().filter_map(|id| seen.remove_entry(id)).collect();
        let obstacles = match delete_set(engine, &set, seen, terms, Growth::Taken).await {
            Ok(carried) => return bulk.carried(&trees[0][0], carried),
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
        let nothing_told = trees.len() == before;
        if nothing_told && attempt < ATTEMPTS && obstacles.iter().all(Obstacle::is_retryable) {
            attempt += 1;
            continue;
        }
        for Obstacle { instance, reason, error } in obstacles {
            match reason {
                // It is not what was asked for any more.
                RefusalReason::Changed => {
                    info!(instance_id = instance, "a bulk deletion spares an instance that has changed")
                }
                _ => bulk.failures.note(instance.as_deref().unwrap_or_default(), error),
            }
        }
        if nothing_told {
            return;
        }
    }
}
