//! One instance with many activities: the speed of a fleet compared with one process.

use std::time::Duration;

use anyhow::Result;

use super::client_process::{Job, OrchestrationTimes};
use super::fixture::FleetFixture;
use super::scale::add_shares;
use super::{Effort, FleetRow};
use crate::measure::{name, Outcome};
use crate::run::SETTLE;

/// The number of activities, as input of the orchestration.
const ACTIVITIES: &str = "300";

const LIMIT: Duration = Duration::from_secs(60);

/// The number of rounds. When an idle process polls next is random and makes up a fifth of the time. A slow run varies
/// little and is not repeated.
const ROUNDS: usize = 3;
const SLOW_RUN: Duration = Duration::from_secs(10);

pub async fn run(fleet: &mut FleetFixture, row: &FleetRow, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    fleet.start_workers(row.processes).await?;
    fleet.settle(effort.rest).await?;
    let done = fleet.workers.done().await?;
    let (mut times, mut requests, mut units) = (Vec::new(), 0, 0.0);
    for round in 0..ROUNDS {
        if times.iter().any(|took| *took > SLOW_RUN) {
            break;
        }
        tokio::time::sleep(effort.rest).await;
        let before = fleet.reading();
        let job = Job::new(&format!("spread-{round}"), "SlowFanOut", ACTIVITIES);
        let runs = fleet.client.burst(job, 1, LIMIT).await?;
        tokio::time::sleep(SETTLE).await;
        let spent = fleet.reading() - before;
        let Some(took) = runs.first().copied().and_then(OrchestrationTimes::took) else {
            outcome.note = Some(format!("did not end within {} s", LIMIT.as_secs()));
            break;
        };
        times.push(took);
        requests += spent.stats.total().requests;
        units += spent.units;
        outcome.kinds(&spent, 1.0);
    }
    times.sort_unstable();
    if let Some(median) = times.get(times.len() / 2) {
        outcome.lower(name::SECONDS, median.as_secs_f64());
        outcome.lower(name::REQUESTS, requests as f64 / times.len() as f64);
        outcome.lower(name::UNITS, units / times.len() as f64);
    }
    add_shares(outcome, &done, &fleet.workers.done().await?);
    Ok(())
}
