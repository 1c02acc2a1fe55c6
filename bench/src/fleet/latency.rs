//! A client that comes to workers with nothing to do: how long an orchestration of three activities takes it.

use std::time::Duration;

use anyhow::{ensure, Result};

use super::site::Site;
use super::starter::{Job, Pace, Run};
use super::{Effort, Row};
use crate::measure::{name, Outcome};

const ROUNDS: u64 = 20;

/// Long enough for pollers that slow down with idleness to have done so.
const PAUSE: Duration = Duration::from_secs(3);

/// When a run is cut short.
const LASTING: Duration = Duration::from_secs(120);

pub async fn run(site: &mut Site, row: &Row, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    site.employ(row.processes).await?;
    site.settle(effort.rest).await?;
    let count = effort.some(ROUNDS);
    let pace = Pace { count, under_way: 1, pause: PAUSE, lasting: LASTING, limit: LASTING };
    let runs = site.client.stream(Job::new("chain", "Sequence", "3"), pace).await?;
    let latencies: Vec<Duration> = runs.iter().copied().filter_map(Run::took).collect();
    ensure!(!latencies.is_empty() && latencies.len() == runs.len(), "{} of {count} ended", latencies.len());
    if (runs.len() as u64) < count {
        outcome.note = Some(format!("{} of {count} in {} s", runs.len(), LASTING.as_secs()));
    }
    outcome.neutral(name::STARTED, runs.len() as f64);
    outcome.latencies(latencies);
    Ok(())
}
