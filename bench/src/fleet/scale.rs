//! Different numbers of processes and partitions: the cost of a Hello, the rate, the distribution of the work and the
//! cost of an idle fleet.

use std::time::Duration;

use anyhow::Result;

use super::client_process::{span, Job, OrchestrationTimes};
use super::fixture::FleetFixture;
use super::{Effort, FleetRow};
use crate::measure::{name, Outcome};
use crate::processes::WorkDone;
use crate::run::SETTLE;

/// The number of Hellos.
pub const HELLOS: u64 = 200;

/// How long all Hellos may take.
const LIMIT: Duration = Duration::from_secs(60);

/// How long an idle fleet is measured. The time is longer than the intervals of its periodic tasks.
const IDLE_TIME: Duration = Duration::from_secs(10);

pub async fn run(fleet: &mut FleetFixture, row: &FleetRow, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    fleet.start_workers(row.processes).await?;
    fleet.settle(effort.rest).await?;
    // The smallest and the largest fleet show whether the idle cost grows with the number of processes.
    if row.processes == 1 || row.processes == 8 {
        idle(fleet, outcome).await;
    }
    hellos(fleet, outcome, effort.some(HELLOS), LIMIT).await
}

/// Starts the Hellos and waits for them. Measures their rate from the first turn on, their cost and the share of each
/// worker.
pub async fn hellos(fleet: &mut FleetFixture, outcome: &mut Outcome, count: u64, limit: Duration) -> Result<()> {
    let (before, done) = (fleet.reading(), fleet.workers.done().await?);
    let runs = fleet.client.burst(Job::new("hello", "Hello", "world"), count, limit).await?;
    tokio::time::sleep(SETTLE).await;
    let (spent, done_now) = (fleet.reading() - before, fleet.workers.done().await?);
    let ended: Vec<OrchestrationTimes> = runs.iter().filter(|run| run.ended.is_some()).copied().collect();
    if ended.len() < runs.len() {
        let (ended, all) = (ended.len(), runs.len());
        outcome.note = Some(format!("cut off after {} s with {ended} of {all} done", limit.as_secs()));
    }
    if ended.is_empty() {
        return Ok(());
    }
    let by = ended.len() as f64;
    outcome.lower(name::REQUESTS, spent.stats.total().requests as f64 / by);
    outcome.lower(name::UNITS, spent.units / by);
    // The time until the first turn is a separate figure and not part of the rate. If the run was cut off, it took the
    // whole limit.
    let first = runs.iter().map(|run| run.started).fold(f64::MAX, f64::min);
    let first_turn = done_now.iter().filter_map(|done| done.first_turn).reduce(f64::min).unwrap_or(first);
    let until_first_turn = Duration::from_secs_f64((first_turn - first).max(0.0) / 1000.0);
    let elapsed = if ended.len() < runs.len() { limit } else { span(&ended)?.saturating_sub(until_first_turn) };
    outcome.higher(name::RATE, by / elapsed.as_secs_f64().max(0.001));
    outcome.lower(name::FIRST_TURN, until_first_turn.as_secs_f64() * 1000.0);
    add_shares(outcome, &done, &done_now);
    outcome.kinds(&spent, by);
    Ok(())
}

async fn idle(fleet: &FleetFixture, outcome: &mut Outcome) {
    let before = fleet.reading();
    tokio::time::sleep(IDLE_TIME).await;
    let (spent, by) = (fleet.reading() - before, IDLE_TIME.as_secs_f64() * fleet.workers.len() as f64);
    outcome.lower(name::IDLE_REQUESTS, spent.stats.total().requests as f64 / by);
    outcome.lower(name::IDLE_UNITS, spent.units / by);
}

/// Adds the shares of the processes in turns and activities.
pub fn add_shares(outcome: &mut Outcome, before: &[WorkDone], after: &[WorkDone]) {
    let steps: Vec<u64> = after.iter().zip(before).map(|(after, before)| after.steps() - before.steps()).collect();
    let (Some(most), Some(least), true) = (steps.iter().max(), steps.iter().min(), steps.len() > 1) else { return };
    let all = steps.iter().sum::<u64>().max(1) as f64;
    outcome.neutral(name::LARGEST_SHARE, *most as f64 / all);
    outcome.neutral(name::SMALLEST_SHARE, *least as f64 / all);
    // A process without work counts as one step, so that the ratio is finite.
    outcome.lower(name::SHARE_RATIO, *most as f64 / (*least).max(1) as f64);
}
