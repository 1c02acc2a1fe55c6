//! What this project has promised itself.

use crate::measure::name;

/// A bound on one figure.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// No more than this.
    AtMost(f64),
    /// No less than this.
    AtLeast(f64),
}

impl Goal {
    /// Whether a figure meets it.
    pub fn met(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
        }
    }
}

const GOALS: &[(&str, &str, Goal)] = &[
    ("Hello", name::REQUESTS, Goal::AtMost(10.0)),
    ("Hello", name::UNITS, Goal::AtMost(110.0)),
    ("Chain of 3", name::REQUESTS, Goal::AtMost(22.0)),
    ("Chain of 3", name::MEDIAN, Goal::AtMost(100.0)),
    ("Fan-out of 20", name::REQUESTS, Goal::AtMost(90.0)),
    ("Parent of 5", name::REQUESTS, Goal::AtMost(90.0)),
    ("Fan-out of 300", name::REQUESTS, Goal::AtMost(1000.0)),
    ("Fan-out of 300", name::MEDIAN, Goal::AtMost(2000.0)),
    ("Backlog of 400", name::RATE_RATIO, Goal::AtLeast(0.9)),
    ("Idle", name::REQUESTS_A_SECOND, Goal::AtMost(0.5)),
];

/// The goal for a figure of a workload, if there is one.
pub fn goal(workload: &str, measure: &str) -> Option<Goal> {
    let found = GOALS.iter().find(|(of, name, _)| *of == workload && *name == measure);
    found.map(|(_, _, goal)| *goal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workloads;

    #[test]
    fn every_goal_is_for_a_workload_that_is_run() {
        let names: Vec<&str> = workloads::all(false).iter().map(|workload| workload.name).collect();
        for (workload, _, _) in GOALS {
            assert!(names.contains(workload), "{workload}");
        }
    }
}
