//! Clients: a bounded number of errands under way, one after the other for as long as the soak lasts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::bank::Business;
use crate::dice::Dice;
use crate::errand::{Errand, Errands, Fate};
use crate::script::{Author, Step, NEVER};
use crate::soak::stage::Stage;
use crate::world::alone;

/// What one errand leaves behind.
#[derive(Clone, Debug)]
pub struct Family {
    /// The errand's name, which the names of all its instances begin with.
    pub name: String,
    /// How the instances that it has started must have ended.
    pub fates: BTreeMap<String, Fate>,
    /// Since when it is done; none while it is under way.
    pub done: Option<Instant>,
    /// Whether it was looked at and is being deleted, which may take several attempts.
    pub condemned: bool,
}

impl Family {
    /// Whether an instance is of this family: one of its own, a descendant, or one that was detached.
    pub fn has(&self, instance: &str) -> bool {
        let rest = instance.strip_prefix(self.name.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', ':', ' ']))
    }
}

/// What is known of the errands so far.
#[derive(Debug, Default)]
pub struct Register(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    families: BTreeMap<String, Family>,
    /// Instances that were looked at and deleted.
    gone: BTreeSet<String>,
}

impl Register {
    /// An errand begins.
    fn begun(&self, name: &str, errand: &Errand) {
        let fates = errand.fates(name).into_iter().collect();
        self.with(|entries| {
            let family = Family { name: name.to_owned(), fates, done: None, condemned: false };
            entries.families.insert(name.to_owned(), family);
        });
    }

    fn done(&self, name: &str) {
        self.with(|entries| {
            if let Some(family) = entries.families.get_mut(name) {
                family.done = Some(Instant::now());
            }
        });
    }

    /// A family was looked at, and from here on all of it is to be gone.
    pub fn condemn(&self, name: &str) {
        self.with(|entries| {
            if let Some(family) = entries.families.get_mut(name) {
                family.condemned = true;
                family.fates.values_mut().for_each(|fate| *fate = Fate::Gone);
            }
        });
    }

    /// Families that are being deleted.
    pub fn condemned(&self) -> Vec<Family> {
        self.with(|entries| entries.families.values().filter(|family| family.condemned).cloned().collect())
    }

    /// A family is deleted: all of it must stay gone.
    pub fn deleted(&self, family: &Family) {
        self.with(|entries| {
            entries.families.remove(&family.name);
            entries.gone.extend(family.fates.keys().cloned());
        });
    }

    /// Errands that are under way.
    pub fn under_way(&self) -> Vec<String> {
        self.with(|entries| {
            let under_way = entries.families.values().filter(|family| family.done.is_none());
            under_way.map(|family| family.name.clone()).collect()
        })
    }

    /// Families whose errands are done since at least `age`, but for those that are being deleted.
    pub fn done_since(&self, age: Duration) -> Vec<Family> {
        let is_old = |family: &&Family| !family.condemned && family.done.is_some_and(|done| done.elapsed() >= age);
        self.with(|entries| entries.families.values().filter(is_old).cloned().collect())
    }

    /// How every instance that was ever started must have ended.
    pub fn fates(&self) -> BTreeMap<String, Fate> {
        self.with(|entries| {
            let there = entries.families.values().flat_map(|family| family.fates.clone());
            there.chain(entries.gone.iter().map(|name| (name.clone(), Fate::Gone))).collect()
        })
    }

    fn with<R>(&self, use_it: impl FnOnce(&mut Entries) -> R) -> R {
        use_it(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The clients.
pub struct Traffic {
    /// What is shared.
    pub stage: Arc<Stage>,
    /// Who does errands.
    pub runner: Errands,
    /// Where errands are entered.
    pub register: Arc<Register>,
    /// How many are under way at most.
    pub under_way: usize,
    /// Errands are drawn from these.
    pub dice: Dice,
}

/// The longest that passes before the next errand.
const PACE: u64 = 500;

impl Traffic {
    /// Sends errands until nothing bad happens any more, and waits for the last one.
    pub async fn flow(mut self) {
        let room = Arc::new(Semaphore::new(self.under_way));
        let mut errands = JoinSet::new();
        for number in 0.. {
            let Ok(permit) = room.clone().acquire_owned().await else { break };
            if !self.stage.is_rough() {
                break;
            }
            let (name, errand) = draw(&mut self.dice, number);
            self.register.begun(&name, &errand);
            let (stage, runner, register) = (self.stage.clone(), self.runner.clone(), self.register.clone());
            stage.tally.count(|figures| figures.begun += 1);
            errands.spawn(async move {
                let begun = Instant::now();
                runner.run(&name, &errand).await;
                register.done(&name);
                note(&stage, &name, &errand, begun.elapsed());
                drop(permit);
            });
            while errands.try_join_next().is_some() {}
            let pause = Duration::from_millis(self.dice.among(0..=PACE));
            self.stage.rough_for(pause).await;
        }
        while errands.join_next().await.is_some() {}
    }
}

fn note(stage: &Stage, name: &str, errand: &Errand, took: Duration) {
    stage.tally.count(|figures| {
        *figures.done.entry(kind(errand)).or_default() += 1;
        if took > figures.longest.0 {
            figures.longest = (took, format!("{name} ({})", kind(errand)));
        }
    });
}

fn kind(errand: &Errand) -> &'static str {
    match errand {
        Errand::Run(_) => "run to the end",
        Errand::Cancel { .. } => "cancelled",
        Errand::DeleteAndRunAgain(..) => "deleted and run again",
        Errand::DeleteRunning { .. } => "deleted while running",
        Errand::Prune(_) => "pruned",
        Errand::Chain { .. } => "pruned while running",
        Errand::Restart(_) => "run again and again",
        Errand::Poison => "poison",
        Errand::Bank(_) => "bank",
    }
}

fn draw(dice: &mut Dice, number: u64) -> (String, Errand) {
    let name = format!("o{number}");
    let after = Duration::from_millis(dice.mostly_small(0..=15_000));
    let widest = *dice.pick(&[5, 5, 20, 20, 60, 150]);
    let heavy = dice.one_in(10);
    let mut author = Author::new(dice, 3, widest, heavy);
    let (mut steps, mut more) = (author.script(), author.script());
    let errand = match dice.among(0..=15) {
        0 => {
            steps.retain(|step| *step != Step::Fail);
            steps.push(Step::Event { name: NEVER.to_owned() });
            Errand::Cancel { steps: alone(steps, true), after }
        }
        1 => {
            for script in [&mut steps, &mut more] {
                script.retain(|step| !matches!(step, Step::Detached(_)));
            }
            Errand::DeleteAndRunAgain(steps, more)
        }
        2 => Errand::DeleteRunning { steps: alone(steps, false), after },
        3 => Errand::Prune(steps),
        4 => Errand::Poison,
        5 => {
            let accounts = usize::try_from(dice.among(2..=4)).unwrap_or(2);
            let transfers = usize::try_from(dice.among(3..=20)).unwrap_or(3);
            let business = Business::draw(dice, accounts, transfers);
            Errand::Bank(Business { prefix: format!("{name} "), ..business })
        }
        _ => Errand::Run(steps),
    };
    (name, errand)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_has_descendants_and_no_namesakes() {
        let family = Family { name: "o1".to_owned(), fates: BTreeMap::new(), done: None, condemned: false };
        for instance in ["o1", "o1::sub::2", "o1.d3", "o1.d3::sub::2", "o1 account 0"] {
            assert!(family.has(instance), "{instance}");
        }
        for instance in ["o12", "o2", "$d:metrics", "o10.d1"] {
            assert!(!family.has(instance), "{instance}");
        }
    }
}
