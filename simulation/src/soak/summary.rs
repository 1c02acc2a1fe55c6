//! The summary of a soak: its counters.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The counters of a soak.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Workload items that were begun.
    pub begun: u64,
    /// Completed workload items, by kind.
    pub completed: BTreeMap<&'static str, u64>,
    /// Instances that were audited: deleted ones, and those that exist at the end.
    pub orchestrations: u64,
    /// Instances that were audited and deleted.
    pub deleted: u64,
    /// Activities that workers have begun.
    pub activities: u64,
    /// Workers that were killed.
    pub kills: u64,
    /// Workers that were stopped for a while.
    pub stops: u64,
    /// Workers that were asked to shut down before the end.
    pub shutdowns: u64,
    /// Partitions that were split.
    pub splits: u64,
    /// Requests that met a fault, by the name of the fault.
    pub faults: BTreeMap<String, u64>,
    /// The workload item that took longest.
    pub longest: (Duration, String),
}

impl Summary {
    /// The number of completed workload items.
    pub fn all_completed(&self) -> u64 {
        self.completed.values().sum()
    }

    /// The number of requests that met a fault.
    pub fn all_faults(&self) -> u64 {
        self.faults.values().sum()
    }

    /// The main counters in one line.
    pub fn line(&self) -> String {
        format!(
            "{} items completed, {} in progress, {} orchestrations deleted, {} activities, {} kills, {} stops, {} faults",
            self.all_completed(),
            self.begun - self.all_completed(),
            self.deleted,
            self.activities,
            self.kills,
            self.stops,
            self.all_faults(),
        )
    }

    /// All counters, each with its name.
    pub fn rows(&self) -> Vec<(String, String)> {
        let mut rows = vec![row("workload items", self.all_completed())];
        rows.extend(self.completed.iter().map(|(kind, count)| row(&format!("  {kind}"), count)));
        rows.push(row("longest item", format!("{:.1} s, {}", self.longest.0.as_secs_f64(), self.longest.1)));
        rows.push(row("orchestrations", self.orchestrations));
        rows.push(row("  deleted before the end", self.deleted));
        rows.push(row("activities run", self.activities));
        rows.push(row("workers killed", self.kills));
        rows.push(row("workers stopped", self.stops));
        rows.push(row("workers shut down", self.shutdowns));
        rows.push(row("splits", self.splits));
        rows.push(row("requests that met a fault", self.all_faults()));
        rows.extend(self.faults.iter().map(|(fault, count)| row(&format!("  {fault}"), count)));
        rows
    }
}

fn row(name: &str, value: impl ToString) -> (String, String) {
    (name.to_owned(), value.to_string())
}

/// A summary that several tasks update.
#[derive(Debug, Default)]
pub struct SharedSummary(Mutex<Summary>);

impl SharedSummary {
    /// Changes the counters.
    pub fn update(&self, change: impl FnOnce(&mut Summary)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// A copy of the counters.
    pub fn read(&self) -> Summary {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
