//! The clients of a soak. They run a bounded number of workload items at once, as long as faults happen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::bank::BankWorkload;
use crate::rng::SeededRng;
use crate::script::{self_contained, ScriptGenerator, Step, NEVER};
use crate::soak::state::SoakState;
use crate::workload::{ExpectedOutcome, WorkloadClient, WorkloadItem};

/// The instances of one workload item.
#[derive(Clone, Debug)]
pub struct ItemInstances {
    /// The name of the item. The names of all its instances begin with it.
    pub name: String,
    /// The expected outcomes of the instances that clients have started.
    pub expected: BTreeMap<String, ExpectedOutcome>,
    /// When the item was completed. `None`: it is in progress.
    pub completed: Option<Instant>,
    /// Whether the instances were audited and are being deleted, which may take several attempts.
    pub is_being_deleted: bool,
}

impl ItemInstances {
    /// Whether an instance belongs to the item: a root, a descendant, or a detached orchestration.
    pub fn has(&self, instance: &str) -> bool {
        let rest = instance.strip_prefix(self.name.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ':', ' ']))
    }
}

/// All workload items that have begun.
#[derive(Debug, Default)]
pub struct ItemRegistry(Mutex<RegistryEntries>);

#[derive(Debug, Default)]
struct RegistryEntries {
    items: BTreeMap<String, ItemInstances>,
    /// Instances that were audited and deleted.
    deleted: BTreeSet<String>,
}

impl ItemRegistry {
    /// Adds an item that begins.
    fn begun(&self, name: &str, item: &WorkloadItem) {
        let expected = item.expected_outcomes(name).into_iter().collect();
        self.with(|entries| {
            let name = name.to_owned();
            let instances = ItemInstances { name: name.clone(), expected, completed: None, is_being_deleted: false };
            entries.items.insert(name, instances);
        });
    }

    fn completed(&self, name: &str) {
        self.with(|entries| {
            if let Some(instances) = entries.items.get_mut(name) {
                instances.completed = Some(Instant::now());
            }
        });
    }

    /// The instances of an item were audited. From here on all of them must be deleted.
    pub fn mark_for_deletion(&self, name: &str) {
        self.with(|entries| {
            if let Some(instances) = entries.items.get_mut(name) {
                instances.is_being_deleted = true;
                instances.expected.values_mut().for_each(|outcome| *outcome = ExpectedOutcome::Absent);
            }
        });
    }

    /// The items whose instances are being deleted.
    pub fn being_deleted(&self) -> Vec<ItemInstances> {
        self.with(|entries| entries.items.values().filter(|instances| instances.is_being_deleted).cloned().collect())
    }

    /// The instances of an item are deleted. They must stay deleted.
    pub fn deleted(&self, instances: &ItemInstances) {
        self.with(|entries| {
            entries.items.remove(&instances.name);
            entries.deleted.extend(instances.expected.keys().cloned());
        });
    }

    /// The names of the items in progress.
    pub fn in_progress(&self) -> Vec<String> {
        self.with(|entries| {
            let in_progress = entries.items.values().filter(|instances| instances.completed.is_none());
            in_progress.map(|instances| instances.name.clone()).collect()
        })
    }

    /// The items that were completed at least `age` ago, without those that are being deleted.
    pub fn completed_for(&self, age: Duration) -> Vec<ItemInstances> {
        let is_old = |instances: &&ItemInstances| {
            !instances.is_being_deleted && instances.completed.is_some_and(|completed| completed.elapsed() >= age)
        };
        self.with(|entries| entries.items.values().filter(is_old).cloned().collect())
    }

    /// The expected outcome of every instance that clients have started.
    pub fn expected_outcomes(&self) -> BTreeMap<String, ExpectedOutcome> {
        self.with(|entries| {
            let existing = entries.items.values().flat_map(|instances| instances.expected.clone());
            existing.chain(entries.deleted.iter().map(|name| (name.clone(), ExpectedOutcome::Absent))).collect()
        })
    }

    fn with<R>(&self, use_entries: impl FnOnce(&mut RegistryEntries) -> R) -> R {
        use_entries(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The clients of a soak.
pub struct Traffic {
    /// The shared state.
    pub state: Arc<SoakState>,
    /// The client that runs workload items.
    pub client: WorkloadClient,
    /// All workload items.
    pub registry: Arc<ItemRegistry>,
    /// The largest number of items in progress.
    pub max_in_progress: usize,
    /// The generator that draws the items.
    pub rng: SeededRng,
}

/// The longest time between two items, in milliseconds.
const LONGEST_PAUSE: u64 = 500;

impl Traffic {
    /// Starts items until the phase of faults ends, and waits for the last one.
    pub async fn run(mut self) {
        let permits = Arc::new(Semaphore::new(self.max_in_progress));
        let mut items = JoinSet::new();
        for number in 0.. {
            let Ok(permit) = permits.clone().acquire_owned().await else { break };
            if !self.state.has_faults() {
                break;
            }
            let (name, item) = draw(&mut self.rng, number);
            self.registry.begun(&name, &item);
            let (state, client, registry) = (self.state.clone(), self.client.clone(), self.registry.clone());
            state.summary.update(|summary| summary.begun += 1);
            items.spawn(async move {
                let begun = Instant::now();
                client.run(&name, &item).await;
                registry.completed(&name);
                count(&state, &name, &item, begun.elapsed());
                drop(permit);
            });
            while items.try_join_next().is_some() {}
            let pause = Duration::from_millis(self.rng.among(0..=LONGEST_PAUSE));
            self.state.sleep_while_faulty(pause).await;
        }
        while items.join_next().await.is_some() {}
    }
}

/// Counts a completed item.
fn count(state: &SoakState, name: &str, item: &WorkloadItem, took: Duration) {
    state.summary.update(|summary| {
        *summary.completed.entry(kind(item)).or_default() += 1;
        if took > summary.longest.0 {
            summary.longest = (took, format!("{name} ({})", kind(item)));
        }
    });
}

fn kind(item: &WorkloadItem) -> &'static str {
    match item {
        WorkloadItem::Run(_) => "run to the end",
        WorkloadItem::Cancel { .. } => "cancelled",
        WorkloadItem::DeleteAndRunAgain(..) => "deleted and run again",
        WorkloadItem::DeleteRunning { .. } => "deleted while running",
        WorkloadItem::Prune(_) => "pruned",
        WorkloadItem::Chain { .. } => "pruned while running",
        WorkloadItem::Restart(_) => "run repeatedly",
        WorkloadItem::Poison => "poison",
        WorkloadItem::Bank(_) => "bank",
    }
}

fn draw(rng: &mut SeededRng, number: u64) -> (String, WorkloadItem) {
    let name = format!("o{number}");
    let after = Duration::from_millis(rng.mostly_small(0..=15_000));
    let widest = *rng.pick(&[5, 5, 20, 20, 60, 150]);
    let heavy = rng.one_in(10);
    let mut generator = ScriptGenerator::new(rng, 3, widest, heavy);
    let (mut steps, mut more) = (generator.script(), generator.script());
    let item = match rng.among(0..=15) {
        0 => {
            steps.retain(|step| *step != Step::Fail);
            steps.push(Step::Event { name: NEVER.to_owned() });
            WorkloadItem::Cancel { steps: self_contained(steps, true), after }
        }
        1 => {
            for script in [&mut steps, &mut more] {
                script.retain(|step| !matches!(step, Step::Detached(_)));
            }
            WorkloadItem::DeleteAndRunAgain(steps, more)
        }
        2 => WorkloadItem::DeleteRunning { steps: self_contained(steps, false), after },
        3 => WorkloadItem::Prune(steps),
        4 => WorkloadItem::Poison,
        5 => {
            let accounts = usize::try_from(rng.among(2..=4)).unwrap_or(2);
            let transfers = usize::try_from(rng.among(3..=20)).unwrap_or(3);
            let bank = BankWorkload::draw(rng, accounts, transfers);
            WorkloadItem::Bank(BankWorkload { prefix: format!("{name} "), ..bank })
        }
        _ => WorkloadItem::Run(steps),
    };
    (name, item)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_has_its_descendants_and_no_instances_of_similar_names() {
        let item = ItemInstances {
            name: "o1".to_owned(),
            expected: BTreeMap::new(),
            completed: None,
            is_being_deleted: false,
        };
        for instance in ["o1", "o1::sub::2", "o1.d3", "o1.d3::sub::2", "o1 account 0"] {
            assert!(item.has(instance), "{instance}");
        }
        for instance in ["o12", "o2", "$d:metrics", "o10.d1"] {
            assert!(!item.has(instance), "{instance}");
        }
    }
}
