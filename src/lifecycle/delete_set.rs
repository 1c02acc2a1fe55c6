//! Deletes a set of instances as one, or reports the obstacles.

use super::{
    finish::PlanOutcome,
    plan::{self, DeletionPlan},
    prepare::{DeletionTerms, PrepareError},
    trees::{self, UndeliveredMessage},
    Documents, Incarnation, InstanceRow,
};
use crate::{
    cosmos::{queries::chunks_for_query, StoreError},
    engine::Engine,
    model::Partition,
    outbox,
};
use duroxide::providers::ProviderError;
use futures::{stream, StreamExt};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tracing::warn;

pub(super) const OPERATION: &str = "delete_instances_atomic";

/// The number of generations of children that a growing tree may add. A prepared instance starts no children, so each
/// query finds one generation more at most.
const MAX_GENERATIONS: usize = 20;

/// The reason why a set can't be deleted. It may concern one instance of the set.
pub(super) struct Obstacle {
    pub(super) instance: Option<String>,
    pub(super) reason: RefusalReason,
    pub(super) error: ProviderError,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum RefusalReason {
    Running,
    /// The instance is not the one that was found.
    Changed,
    /// Another deletion of the same instances came first.
    Overtaken,
    Other,
}

impl Obstacle {
    fn new(instance: Option<String>, refused: PrepareError) -> Self {
        let name = instance.as_deref().unwrap_or_default();
        let (reason, error) = match refused {
            PrepareError::Store(error) => (RefusalReason::Other, error.into_provider_error(OPERATION)),
            PrepareError::Running => {
                let advice = "Use force=true to delete it anyway, or cancel it first.";
                let message = format!("Instance {name} is still running. {advice}");
                (RefusalReason::Running, ProviderError::permanent(OPERATION, message))
            }
            PrepareError::Changed => {
                let how = "it has ended again, or a new instance has its id";
                let message = format!("Instance {name} has changed during the deletion: {how}. Try again.");
                (RefusalReason::Changed, ProviderError::retryable(OPERATION, message))
            }
            PrepareError::Overtaken => {
                let message = "Another deletion of the same instances came first. Try again.";
                (RefusalReason::Overtaken, ProviderError::retryable(OPERATION, message))
            }
        };
        Self { instance, reason, error }
    }

    pub(super) fn at(instance: String, refused: PrepareError) -> Self {
        Self::new(Some(instance), refused)
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

    /// A message of the instance could not be delivered.
    fn undelivered(sender: String, error: StoreError) -> Self {
        let error = error.into_provider_error(OPERATION);
        let message = format!(
            "Instance {sender} has sent a message that could not be delivered yet: {}. Nothing was deleted. Try again, \
             or use force=true to drop messages that can never be delivered.",
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

    /// Whether another attempt of the same call may succeed.
    pub(super) fn is_retryable(&self) -> bool {
        matches!(self.reason, RefusalReason::Changed | RefusalReason::Overtaken)
    }
}

impl From<PrepareError> for Obstacle {
    fn from(refused: PrepareError) -> Self {
        Self::new(None, refused)
    }
}

impl From<StoreError> for Obstacle {
    fn from(error: StoreError) -> Self {
        PrepareError::from(error).into()
    }
}

/// How a deletion treats a child that is not in the set and that it finds after preparing the parent.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Growth {
    /// The deletion is refused, since the caller named the set.
    Refuse,
    /// The child joins the set.
    Include,
}

/// Deletes a set as one, or returns at least one obstacle. An error after the commit is no obstacle.
pub(super) async fn delete_set(
    engine: &Arc<Engine>,
    ids: &[String],
    seen: Documents,
    terms: &DeletionTerms,
    growth: Growth,
) -> Result<PlanOutcome, Vec<Obstacle>> {
    let mut unique = HashSet::with_capacity(ids.len());
    let ids: Vec<String> = ids.iter().filter(|id| unique.insert(*id)).cloned().collect();
    let begun = DeletionPlan::begin(engine, &ids, &seen, terms).await;
    let begun = begun.map_err(|(id, refused)| vec![Obstacle::at(id, refused)])?;
    let Some((mut plan, others)) = begun else { return Ok(PlanOutcome::default()) };
    let (parent_of, delivered, drops_messages) = (HashMap::new(), HashSet::new(), terms.drops_messages);
    let mut set = DeletionSet { ids, others, parent_of, delivered, drops_messages };
    let mut obstacles = prepare(engine, &mut plan, &mut set, seen, growth).await;
    if obstacles.is_empty() {
        obstacles.extend(plan.commit().await.err().map(Obstacle::from));
    }
    if !obstacles.is_empty() {
        plan.abort(&set.others).await;
        return Err(obstacles);
    }
    Ok(plan.finish().await)
}

/// The instances of a deletion.
struct DeletionSet {
    ids: Vec<String>,
    /// All instances except the coordinator and the ids before it, which do not exist.
    others: Vec<String>,
    /// The parents of instances that were found after their parents were prepared.
    parent_of: HashMap<String, String>,
    /// Messages of the instances to others that the deletion has delivered.
    delivered: HashSet<UndeliveredMessage>,
    /// Messages that can never be delivered are dropped.
    drops_messages: bool,
}

impl DeletionSet {
    /// The instance of the caller's set that an instance descends from, if it was found later.
    fn known(&self, id: &str) -> String {
        let mut known = id;
        while let Some(parent) = self.parent_of.get(known) {
            known = parent;
        }
        known.to_owned()
    }
}

/// Does everything that precedes the commit. Returns the obstacles to it.
async fn prepare(
    engine: &Arc<Engine>,
    plan: &mut DeletionPlan<'_>,
    set: &mut DeletionSet,
    mut seen: Documents,
    growth: Growth,
) -> Vec<Obstacle> {
    let mut more = set.others.clone();
    for _ in 0..MAX_GENERATIONS {
        let refused = match plan.prepare_others(&more, std::mem::take(&mut seen)).await {
            Ok(refused) => refused,
            Err(error) => return vec![error.into()],
        };
        if !refused.is_empty() {
            let obstacle = |(id, refused): (String, PrepareError)| {
                let instance = Some(set.known(&id));
                Obstacle { instance, ..Obstacle::at(id, refused) }
            };
            return refused.into_iter().map(obstacle).collect();
        }
        let OutsideDependents { children, undelivered } = match outside_dependents(engine, plan, set).await {
            Ok(left) => left,
            Err(error) => return vec![error.into()],
        };
        if children.is_empty() && undelivered.is_empty() {
            return Vec::new();
        }
        if growth == Growth::Refuse && !children.is_empty() {
            return children.into_iter().map(|(id, child)| Obstacle::orphan(child.parent, &id)).collect();
        }
        let failures = match plan.with_heartbeat(deliver_messages(engine, &undelivered, set.drops_messages)).await {
            Ok(failures) => failures,
            Err(error) => return vec![error.into()],
        };
        if !failures.is_empty() {
            let obstacle = |(sender, error): (String, StoreError)| {
                let instance = Some(set.known(&sender));
                Obstacle { instance, ..Obstacle::undelivered(sender, error) }
            };
            return failures.into_iter().map(obstacle).collect();
        }
        set.delivered.extend(undelivered);
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

/// Documents that depend on a set: its deletion would lose them or leave them without a parent.
#[derive(Default)]
struct OutsideDependents {
    /// Children that are not in the set.
    children: BTreeMap<String, FoundChild>,
    /// Undelivered messages of committed turns to instances outside the set.
    undelivered: Vec<UndeliveredMessage>,
}

/// A child that was found after its parent was prepared.
struct FoundChild {
    parent: String,
    incarnation: Incarnation,
}

/// Queries the dependents once the set is prepared. A prepared instance commits no turn, so it sends no more messages
/// and starts no more children.
async fn outside_dependents(
    engine: &Arc<Engine>,
    plan: &mut DeletionPlan<'_>,
    set: &DeletionSet,
) -> Result<OutsideDependents, PrepareError> {
    let ids: HashSet<&String> = set.ids.iter().collect();
    let mut left = OutsideDependents::default();
    for parents in chunks_for_query(&set.ids, trees::PARENTS) {
        // A parent may have very many children. Without a heartbeat, other processes would abort the plan before the
        // last page.
        let mut pages = trees::dependents_pages(engine, parents)?;
        while let Some(found) = trees::next_dependents(engine, &mut pages).await? {
            let child =
                |row: InstanceRow| Some((row.id()?, FoundChild { parent: row.parent?, incarnation: row.incarnation }));
            left.children.extend(found.children.into_iter().filter_map(child).filter(|(id, _)| !ids.contains(id)));
            // A message for another instance of the plan is erased with both.
            let leaves_set =
                |message: &UndeliveredMessage| !message.receiver.as_ref().is_some_and(|receiver| plan.has(receiver));
            left.undelivered.extend(
                found.undelivered.into_iter().filter(|message| leaves_set(message) && !set.delivered.contains(message)),
            );
            plan.heartbeat().await?;
        }
    }
    Ok(left)
}

/// Delivers the messages of a prepared set before the commit, since a message of a committed turn must not be lost with
/// its sender. Returns the senders whose messages could not be delivered, each with the first error. `drops_messages`
/// drops messages that can never be delivered.
async fn deliver_messages(
    engine: &Arc<Engine>,
    messages: &[UndeliveredMessage],
    drops_messages: bool,
) -> BTreeMap<String, StoreError> {
    let failures = Mutex::new(DeliveryFailures::default());
    let delivering = stream::iter(messages).for_each_concurrent(plan::CONCURRENCY, |message| {
        let failures = &failures;
        async move {
            let Ok(partition) = Partition::instance(&message.sender) else { return };
            let expected = lock(failures).expected(message);
            let delivered = match expected {
                Some(error) => Err(error),
                None => outbox::deliver_before_deletion(engine, &partition, &message.id).await,
            };
            match delivered {
                Ok(()) => {}
                Err(error) if drops_messages && !error.is_retryable() => {
                    warn!(instance_id = message.sender, %error, "forced deletion drops an undeliverable message");
                }
                Err(error) => lock(failures).record(message, error),
            }
        }
    });
    delivering.await;
    failures.into_inner().unwrap_or_else(PoisonError::into_inner).senders
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Messages that could not be delivered. One is enough to keep its sender. An unreachable receiver is not tried again
/// for each of its messages.
#[derive(Default)]
struct DeliveryFailures {
    senders: BTreeMap<String, StoreError>,
    receivers: HashMap<Partition, StoreError>,
}

impl DeliveryFailures {
    /// The error that the delivery of a message would meet again, if one is known.
    fn expected(&self, message: &UndeliveredMessage) -> Option<StoreError> {
        let of_receiver = || self.receivers.get(message.receiver.as_ref()?);
        self.senders.get(&message.sender).or_else(of_receiver).cloned()
    }

    fn record(&mut self, message: &UndeliveredMessage, error: StoreError) {
        if let Some(receiver) = message.receiver.clone().filter(|_| error.is_retryable()) {
            self.receivers.insert(receiver, error.clone());
        }
        self.senders.entry(message.sender.clone()).or_insert(error);
    }
}
