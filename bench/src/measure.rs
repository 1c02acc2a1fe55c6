//! What is measured: readings of the account's counters, and figures from them.

use std::collections::BTreeMap;
use std::ops::Sub;
use std::time::Duration;

use duroxide_cosmos_emulator::Stats;
use serde::Serialize;

use crate::scene::Which;

/// The account's counters at one moment, or what came between two.
#[derive(Clone, Debug)]
pub struct Reading {
    /// Requests and bytes by kind.
    pub stats: Stats,
    /// Request units, as the account charged for items.
    pub units: f64,
}

impl Reading {
    /// A reading of these counters.
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

/// The names of what is measured, as they stand in the table.
pub mod name {
    /// Requests an orchestration; what a client reads while it waits is not counted.
    pub const REQUESTS: &str = "requests";
    /// Request units an orchestration, the same.
    pub const UNITS: &str = "RU";
    /// Requests an orchestration, with those of a client in the same process that waits.
    pub const WAITED_REQUESTS: &str = "requests, client's too";
    /// Request units an orchestration, the same.
    pub const WAITED_UNITS: &str = "RU, client's too";
    /// Turns that ran for an orchestration.
    pub const TURNS: &str = "turns";
    /// Processor time of an orchestration in the process that runs it and waits for it, without the account's.
    pub const CPU: &str = "CPU, ms";
    /// Start to end, as a client sees it.
    pub const MEDIAN: &str = "median, ms";
    /// The same for the slowest in twenty.
    pub const P95: &str = "p95, ms";
    /// Orchestrations a second, with several under way.
    pub const RATE: &str = "orchestrations/s";
    /// Requests an orchestration, with several under way.
    pub const BUSY_REQUESTS: &str = "requests, busy";
    /// Request units an orchestration, with several under way.
    pub const BUSY_UNITS: &str = "RU, busy";
    /// Requests a second.
    pub const REQUESTS_A_SECOND: &str = "requests/s";
    /// Request units a second.
    pub const UNITS_A_SECOND: &str = "RU/s";
    /// The rate of one backlog by that of another.
    pub const RATE_RATIO: &str = "rate ÷ rate with 20";
    /// The same, beside a backlog in a container that holds as much.
    pub const PADDED_RATIO: &str = "rate ÷ padded 20";
    /// Kilobytes both ways.
    pub const KILOBYTES: &str = "KB";
    /// From the first start to the first turn.
    pub const NOTICED: &str = "noticed, ms";
    /// The rate of a fleet by that of one process.
    pub const FLEET_RATIO: &str = "rate ÷ one's";
    /// The speed of a fleet with one orchestration by that of one process.
    pub const SPEED_RATIO: &str = "speed ÷ one's";
    /// The largest part of the work that a process did.
    pub const LARGEST_SHARE: &str = "largest share";
    /// The smallest part of the work that a process did.
    pub const SMALLEST_SHARE: &str = "smallest";
    /// The one by the other.
    pub const SHARE_RATIO: &str = "largest ÷ smallest";
    /// Request units a second of each process with nothing to do.
    pub const IDLE_UNITS: &str = "idle RU/s each";
    /// Requests a second of each process with nothing to do.
    pub const IDLE_REQUESTS: &str = "idle requests/s each";
    /// Start to end of one orchestration.
    pub const SECONDS: &str = "seconds";
    /// The largest answer to a query across instances.
    pub const ANSWER: &str = "largest answer, KB";
    /// All answers to the same query on every physical partition.
    pub const LOOK: &str = "one look, KB";
    /// The rate by that in an empty container.
    pub const EMPTY_RATIO: &str = "rate ÷ without";
    /// The rate by that beside as many documents that are nobody's work.
    pub const BESIDE_RATIO: &str = "rate ÷ beside padding";
    /// What a process had done of all when it was killed.
    pub const KILLED_SHARE: &str = "its share";
    /// From the crash to the last end of what was under way.
    pub const HELD: &str = "under way then, s";
    /// The longest of those that were started after the crash.
    pub const AFTER: &str = "started later, s";
    /// Orchestrations that were started.
    pub const STARTED: &str = "started";
    /// Orchestrations that did not end.
    pub const LOST: &str = "lost";
    /// Orchestrations whose history does not end once.
    pub const NOT_ONCE: &str = "not once";
    /// Activities that the second process ran.
    pub const SHARE: &str = "second process's share";
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// Lower figures are.
    Lower,
    /// Higher figures are.
    Higher,
    /// Neither.
    Neither,
}

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub struct Measure {
    /// What it is.
    pub name: &'static str,
    /// How much.
    pub value: f64,
    /// Which way is better.
    pub better: Better,
}

/// What a workload came to with one provider.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// The workload's name.
    pub workload: String,
    /// Whose provider.
    pub provider: Which,
    /// The figures.
    pub measures: Vec<Measure>,
    /// Requests an orchestration by kind; for an idle runtime, a second.
    pub requests_by_kind: BTreeMap<&'static str, f64>,
    /// What a reader should know: a run cut short, a provider that was skipped.
    pub note: Option<String>,
}

impl Outcome {
    /// No figures yet.
    pub fn new(workload: &str, provider: Which) -> Self {
        let workload = workload.to_owned();
        Self { workload, provider, measures: Vec::new(), requests_by_kind: BTreeMap::new(), note: None }
    }

    /// No figures at all, and why.
    pub fn none(workload: &str, provider: Which, note: impl Into<String>) -> Self {
        Self { note: Some(note.into()), ..Self::new(workload, provider) }
    }

    /// Adds a figure of which less is better.
    pub fn lower(&mut self, name: &'static str, value: f64) {
        self.measures.push(Measure { name, value, better: Better::Lower });
    }

    /// Adds a figure of which more is better.
    pub fn higher(&mut self, name: &'static str, value: f64) {
        self.measures.push(Measure { name, value, better: Better::Higher });
    }

    /// Adds a figure that is neither.
    pub fn neutral(&mut self, name: &'static str, value: f64) {
        self.measures.push(Measure { name, value, better: Better::Neither });
    }

    /// Adds one figure by another, of which more is better, where both are there.
    pub fn ratio(&mut self, name: &'static str, figure: Option<f64>, by: Option<f64>) {
        if let (Some(figure), Some(by)) = (figure, by.filter(|by| *by > 0.0)) {
            self.higher(name, figure / by);
        }
    }

    /// A figure by its name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.measures.iter().find(|measure| measure.name == name).map(|measure| measure.value)
    }

    /// Sets the requests by kind, each divided by `by`.
    pub fn kinds(&mut self, reading: &Reading, by: f64) {
        let each = reading.stats.iter().map(|(kind, stats)| (kind.as_str(), stats.requests as f64 / by));
        self.requests_by_kind = each.collect();
    }

    /// Adds the median of some latencies and, where there are enough to have one, the 95th percentile.
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

/// The nearest rank.
fn at_quantile(sorted: &[Duration], quantile: f64) -> Option<Duration> {
    let rank = (sorted.len() as f64 * quantile).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let seen: Vec<Duration> = (1..=20).map(Duration::from_millis).collect();
        assert_eq!(at_quantile(&seen, 0.5), Some(Duration::from_millis(10)));
        assert_eq!(at_quantile(&seen, 0.95), Some(Duration::from_millis(19)));
        assert_eq!(at_quantile(&seen[..1], 0.95), Some(Duration::from_millis(1)));
        assert_eq!(at_quantile(&[], 0.5), None);
    }
}
