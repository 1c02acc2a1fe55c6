//! What a soak counts.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The figures of a soak.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Errands that were begun.
    pub begun: u64,
    /// Errands that are done, by kind.
    pub done: BTreeMap<&'static str, u64>,
    /// Instances that were audited and deleted, or are there at the end.
    pub orchestrations: u64,
    /// Those that were audited and deleted.
    pub deleted: u64,
    /// Activities that workers have begun.
    pub activities: u64,
    /// Workers that were killed.
    pub kills: u64,
    /// Workers that were stopped for a while.
    pub stops: u64,
    /// Workers that were told to leave, before the end.
    pub leaves: u64,
    /// Partitions that were split.
    pub splits: u64,
    /// Requests that met a fault, by the fault's name.
    pub faults: BTreeMap<String, u64>,
    /// The errand that took longest.
    pub longest: (Duration, String),
}

impl Figures {
    /// All errands that are done.
    pub fn all_done(&self) -> u64 {
        self.done.values().sum()
    }

    /// All requests that met a fault.
    pub fn all_faults(&self) -> u64 {
        self.faults.values().sum()
    }

    /// How it stands, in a line.
    pub fn line(&self) -> String {
        format!(
            "{} errands done, {} under way, {} orchestrations deleted, {} activities, {} kills, {} stops, {} faults",
            self.all_done(),
            self.begun - self.all_done(),
            self.deleted,
            self.activities,
            self.kills,
            self.stops,
            self.all_faults(),
        )
    }

    /// All of them, each with its name.
    pub fn rows(&self) -> Vec<(String, String)> {
        let mut rows = vec![row("errands", self.all_done())];
        rows.extend(self.done.iter().map(|(kind, count)| row(&format!("  {kind}"), count)));
        rows.push(row("longest errand", format!("{:.1} s, {}", self.longest.0.as_secs_f64(), self.longest.1)));
        rows.push(row("orchestrations", self.orchestrations));
        rows.push(row("  deleted on the way", self.deleted));
        rows.push(row("activities ran", self.activities));
        rows.push(row("workers killed", self.kills));
        rows.push(row("workers stopped", self.stops));
        rows.push(row("workers told to leave", self.leaves));
        rows.push(row("splits", self.splits));
        rows.push(row("requests that met a fault", self.all_faults()));
        rows.extend(self.faults.iter().map(|(fault, count)| row(&format!("  {fault}"), count)));
        rows
    }
}

fn row(name: &str, value: impl ToString) -> (String, String) {
    (name.to_owned(), value.to_string())
}

/// The figures, shared.
#[derive(Debug, Default)]
pub struct Tally(Mutex<Figures>);

impl Tally {
    /// Counts.
    pub fn count(&self, change: impl FnOnce(&mut Figures)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The figures as they are.
    pub fn read(&self) -> Figures {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
