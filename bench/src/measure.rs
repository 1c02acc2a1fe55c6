//! Readings of the account's counters, and the figures that follow from them.

use std::collections::BTreeMap;
use std::ops::Sub;
use std::time::Duration;

use duroxide_cosmos_emulator::Stats;
use serde::Serialize;

use crate::fixture::ProviderKind;

/// The account's counters at one moment, or their difference between two moments.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Requests and bytes by kind.
    pub stats: Stats,
    /// Request units that the account charged for items: an estimate from published prices, not measured on Azure.
    pub units: f64,
}

impl Reading {
    /// Creates a reading of these counters.
    pub fn of(stats: Stats) -> Self {
        Self { units: stats.items().charge, stats }
    }
}

impl Sub for Reading {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self { stats: self.stats - earlier.stats, units: self.units - earlier.units }
    }
}

/// The names of the figures in the tables.
pub mod name {
    /// Requests per orchestration, without those of a client that waits.
    pub const REQUESTS: &str = "requests";
    /// Request units per orchestration, counted in the same way.
    pub const UNITS: &str = "RU";
    /// Requests per orchestration, including those of a waiting client in the same process.
    pub const CLIENT_REQUESTS: &str = "requests with client";
    /// Request units per orchestration, counted in the same way.
    pub const CLIENT_UNITS: &str = "RU with client";
    /// Turns per orchestration.
    pub const TURNS: &str = "turns";
    /// CPU time per orchestration of the process that runs it and waits for it, without that of the account.
    pub const CPU: &str = "CPU, ms";
    /// Median time from start to end, as a client sees it.
    pub const MEDIAN: &str = "median, ms";
    /// The 95th percentile of the same time.
    pub const P95: &str = "p95, ms";
    /// Orchestrations per second, with several in flight.
    pub const RATE: &str = "orchestrations/s";
    /// Requests per orchestration, with several in flight.
    pub const BUSY_REQUESTS: &str = "requests, busy";
    /// Request units per orchestration, with several in flight.
    pub const BUSY_UNITS: &str = "RU, busy";
    /// Requests per second.
    pub const REQUESTS_A_SECOND: &str = "requests/s";
    /// Request units per second.
    pub const UNITS_A_SECOND: &str = "RU/s";
    /// The ratio of the rate of a backlog to that of a backlog of 20.
    pub const RATE_RATIO: &str = "rate ÷ rate with 20";
    /// The ratio to the rate of a backlog of 20 in a container with as many documents.
    pub const PADDED_RATIO: &str = "rate ÷ padded 20";
    /// Kilobytes of requests and answers.
    pub const KILOBYTES: &str = "KB";
    /// The time from the first start to the first turn.
    pub const FIRST_TURN: &str = "until first turn, ms";
    /// The ratio of the rate of a fleet to that of one process.
    pub const FLEET_RATIO: &str = "rate ÷ one process";
    /// The ratio of the speed of a fleet to that of one process, with one orchestration.
    pub const SPEED_RATIO: &str = "speed ÷ one process";
    /// The largest share of the work of one process.
    pub const LARGEST_SHARE: &str = "largest share";
    /// The smallest share of the work of one process.
    pub const SMALLEST_SHARE: &str = "smallest share";
    /// The ratio of the largest share to the smallest.
    pub const SHARE_RATIO: &str = "largest ÷ smallest";
    /// Request units per second of each idle process.
    pub const IDLE_UNITS: &str = "idle RU/s per process";
    /// Requests per second of each idle process.
    pub const IDLE_REQUESTS: &str = "idle requests/s per process";
    /// The time from the start to the end of one orchestration.
    pub const SECONDS: &str = "seconds";
    /// The size of the largest answer to a query across instances.
    pub const ANSWER: &str = "largest answer, KB";
    /// The size of all answers to the same query on every physical partition.
    pub const POLL: &str = "one poll, KB";
    /// The ratio of the rate to that in an empty container.
    pub const EMPTY_RATIO: &str = "rate ÷ no timers";
    /// The ratio of the rate to that beside as many padding documents.
    pub const PADDING_RATIO: &str = "rate ÷ padding";
    /// The killed worker's share of the activities before the kill.
    pub const KILLED_SHARE: &str = "killed worker's share";
    /// The time from the kill to the end of the last orchestration that was in flight.
    pub const IN_FLIGHT_AT_KILL: &str = "in flight at the kill, s";
    /// The longest time of an orchestration that was started after the kill.
    pub const STARTED_LATER: &str = "started later, s";
    /// Orchestrations that were started.
    pub const STARTED: &str = "started";
    /// Orchestrations that did not end.
    pub const LOST: &str = "lost";
    /// Orchestrations whose history does not have exactly one end and one completion of each activity.
    pub const NOT_EXACTLY_ONCE: &str = "not exactly once";
    /// The second process's share of the activities.
    pub const SHARE: &str = "second process's share";
}

/// The direction in which a figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// A lower figure is better.
    Lower,
    /// A higher figure is better.
    Higher,
    /// Neither direction is better.
    Neither,
}

/// A figure.
#[derive(Clone, Debug, Serialize)]
pub struct Measure {
    /// The name of the figure.
    pub name: &'static str,
    /// The value of the figure.
    pub value: f64,
    /// The direction in which a figure is better.
    pub better: Better,
}

/// The figures of a workload with one provider.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The workload's name.
    pub workload: String,
    /// The provider.
    pub provider: ProviderKind,
    /// The figures.
    pub measures: Vec<Measure>,
    /// Requests by kind, per orchestration. For an idle runtime, per second.
    pub requests_by_kind: BTreeMap<&'static str, f64>,
    /// A note for the reader: a run was cut off, or a provider was skipped.
    pub note: Option<String>,
}

impl Outcome {
    /// Creates an outcome without figures.
    pub fn new(workload: &str, provider: ProviderKind) -> Self {
        let workload = workload.to_owned();
        Self { workload, provider, measures: Vec::new(), requests_by_kind: BTreeMap::new(), note: None }
    }

    /// Creates an outcome that has a note instead of figures.
    pub fn none(workload: &str, provider: ProviderKind, note: impl Into<String>) -> Self {
        Self { note: Some(note.into()), ..Self::new(workload, provider) }
    }

    /// Adds a figure that is better if lower.
    pub fn lower(&mut self, name: &'static str, value: f64) {
        self.measures.push(Measure { name, value, better: Better::Lower });
    }

    /// Adds a figure that is better if higher.
    pub fn higher(&mut self, name: &'static str, value: f64) {
        self.measures.push(Measure { name, value, better: Better::Higher });
    }

    /// Adds a figure that is better in neither direction.
    pub fn neutral(&mut self, name: &'static str, value: f64) {
        self.measures.push(Measure { name, value, better: Better::Neither });
    }

    /// Adds the ratio of two figures if both exist. A higher ratio is better.
    pub fn ratio(&mut self, name: &'static str, figure: Option<f64>, by: Option<f64>) {
        if let (Some(figure), Some(by)) = (figure, by.filter(|by| *by > 0.0)) {
            self.higher(name, figure / by);
        }
    }

    /// Returns a figure by its name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.measures.iter().find(|measure| measure.name == name).map(|measure| measure.value)
    }

    /// Sets the requests by kind, each divided by `by`.
    pub fn kinds(&mut self, reading: &Reading, by: f64) {
        let each = reading.stats.iter().map(|(kind, stats)| (kind.as_str(), stats.requests as f64 / by));
        self.requests_by_kind = each.collect();
    }

    /// Adds the median of some latencies and, with at least ten of them, the 95th percentile.
    pub fn latencies(&mut self, mut latencies: Vec<Duration>) {
        latencies.sort_unstable();
        let wanted = if latencies.len() < 10 { 1 } else { 2 };
        for (name, quantile) in [(name::MEDIAN, 0.5), (name::P95, 0.95)].into_iter().take(wanted) {
            if let Some(latency) = at_quantile(&latencies, quantile) {
                self.lower(name, latency.as_secs_f64() * 1000.0);
            }
        }
    }
}

/// Returns a quantile by the nearest rank.
fn at_quantile(sorted: &[Duration], quantile: f64) -> Option<Duration> {
    let rank = (sorted.len() as f64 * quantile).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_sample() {
        let seen: Vec<Duration> = (1..=20).map(Duration::from_millis).collect();
        assert_eq!(at_quantile(&seen, 0.5), Some(Duration::from_millis(10)));
        assert_eq!(at_quantile(&seen, 0.95), Some(Duration::from_millis(19)));
        assert_eq!(at_quantile(&seen[..1], 0.95), Some(Duration::from_millis(1)));
        assert_eq!(at_quantile(&[], 0.5), None);
    }
}
