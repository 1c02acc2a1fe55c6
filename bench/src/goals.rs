//! The goals of the project: bounds on figures of the benchmark.

use crate::measure::name;

/// A bound on one figure.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// The figure is at most this.
    AtMost(f64),
    /// The figure is at least this.
    AtLeast(f64),
}

impl Goal {
    /// Whether a figure meets the goal.
    pub fn met(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
        }
    }
}

/// The goals by workload and measure. A name with an asterisk at its end means all workloads whose names begin so.
const GOALS: &[(&str, &str, Goal)] = &[
    ("Hello", name::REQUESTS, Goal::AtMost(4.5)),
    ("Hello", name::UNITS, Goal::AtMost(80.0)),
    ("Chain of 3", name::REQUESTS, Goal::AtMost(9.0)),
    ("Chain of 3", name::MEDIAN, Goal::AtMost(60.0)),
    ("Fan-out of 20", name::REQUESTS, Goal::AtMost(40.0)),
    ("Parent of 5", name::REQUESTS, Goal::AtMost(40.0)),
    ("Fan-out of 300", name::REQUESTS, Goal::AtMost(500.0)),
    ("Fan-out of 300", name::MEDIAN, Goal::AtMost(1000.0)),
    ("Hello, 8 in flight, 16 + 16", name::CPU, Goal::AtMost(2.0)),
    ("Hello, 32 in flight, 16 + 16", name::CPU, Goal::AtMost(2.0)),
    ("Hello, 128 in flight, 16 + 16", name::CPU, Goal::AtMost(2.0)),
    ("Backlog of 400", name::RATE_RATIO, Goal::AtLeast(0.9)),
    ("Idle", name::REQUESTS_A_SECOND, Goal::AtMost(6.0)),
    ("Fleet of *", name::REQUESTS, Goal::AtMost(10.0)),
    ("Fleet of *", name::UNITS, Goal::AtMost(120.0)),
    ("Fleet of *", name::FLEET_RATIO, Goal::AtLeast(1.0)),
    ("Fleet of *", name::SHARE_RATIO, Goal::AtMost(2.0)),
    ("Fleet of *", name::IDLE_UNITS, Goal::AtMost(6.0)),
    ("Chain of 3, fleet of *", name::MEDIAN, Goal::AtMost(300.0)),
    ("300 slow activities, fleet of 4", name::SPEED_RATIO, Goal::AtLeast(3.0)),
    ("2,000 starts waiting", name::POLL, Goal::AtMost(100.0)),
    ("20,000 starts waiting", name::POLL, Goal::AtMost(100.0)),
    ("20,000 timers set by the worker", name::PADDING_RATIO, Goal::AtLeast(1.0 / 1.2)),
    ("20,000 timers", name::PADDING_RATIO, Goal::AtLeast(1.0 / 1.2)),
    ("100,000 timers", name::PADDING_RATIO, Goal::AtLeast(1.0 / 1.2)),
    ("One of 4 workers killed", name::LOST, Goal::AtMost(0.0)),
    ("One of 4 workers killed", name::NOT_EXACTLY_ONCE, Goal::AtMost(0.0)),
];

/// Returns the goal for a figure of a workload, if there is one.
pub fn goal(workload: &str, measure: &str) -> Option<Goal> {
    let found = GOALS.iter().find(|(of, name, _)| matches(of, workload) && *name == measure);
    found.map(|(_, _, goal)| *goal)
}

fn matches(of: &str, workload: &str) -> bool {
    match of.strip_suffix('*') {
        Some(beginning) => workload.starts_with(beginning),
        None => of == workload,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fleet, workloads};

    #[test]
    fn every_goal_is_that_of_an_existing_workload() {
        let workloads = workloads::all(false).into_iter().map(|workload| workload.name.to_owned());
        let names: Vec<String> = workloads.chain(fleet::rows().into_iter().map(|row| row.name)).collect();
        for (workload, _, _) in GOALS {
            assert!(names.iter().any(|name| matches(workload, name)), "{workload}");
        }
    }
}
