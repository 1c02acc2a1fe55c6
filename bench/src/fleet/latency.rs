//! A client that uses idle workers: the latency of an orchestration of three activities.

use std::time::Duration;

use anyhow::{ensure, Result};

use super::client_process::{Job, OrchestrationTimes, StreamOptions};
use super::fixture::FleetFixture;
use super::{Effort, FleetRow};
use crate::measure::{name, Outcome};

const ROUNDS: u64 = 20;

/// Long enough for polling to slow down, if it slows down with idleness.
const PAUSE: Duration = Duration::from_secs(3);

/// The time after which a run is cut off.
const DURATION: Duration = Duration::from_secs(120);

pub async fn run(fleet: &mut FleetFixture, row: &FleetRow, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    fleet.start_workers(row.processes).await?;
    fleet.settle(effort.rest).await?;
    let count = effort.some(ROUNDS);
    let options = StreamOptions { count, in_flight: 1, pause: PAUSE, duration: DURATION, limit: DURATION };
    let runs = fleet.client.stream(Job::new("chain", "Sequence", "3"), options).await?;
    let latencies: Vec<Duration> = runs.iter().copied().filter_map(OrchestrationTimes::took).collect();
    ensure!(!latencies.is_empty() && latencies.len() == runs.len(), "{} of {count} ended", latencies.len());
    if (runs.len() as u64) < count {
        outcome.note = Some(format!("{} of {count} in {} s", runs.len(), DURATION.as_secs()));
    }
    outcome.neutral(name::STARTED, runs.len() as f64);
    outcome.latencies(latencies);
    Ok(())
}
