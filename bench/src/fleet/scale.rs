//! More processes on more partitions: what a Hello costs, how fast they go, how evenly the work falls, what idleness
//! costs.

use std::time::Duration;

use anyhow::Result;

use super::site::Site;
use super::starter::{span, Job, Run};
use super::{Effort, Row};
use crate::measure::{name, Outcome};
use crate::processes::Done;
use crate::run::SETTLE;

/// How many are started.
pub const HELLOS: u64 = 200;

/// How long they may take.
const LIMIT: Duration = Duration::from_secs(60);

/// How long idleness is watched: longer than what an idle fleet does now and then.
const WATCH: Duration = Duration::from_secs(10);

pub async fn run(site: &mut Site, row: &Row, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    site.employ(row.processes).await?;
    site.settle(effort.rest).await?;
    // The ends of the range tell whether it is flat.
    if row.processes == 1 || row.processes == 8 {
        idle(site, outcome).await;
    }
    hellos(site, outcome, effort.some(HELLOS), LIMIT).await
}

/// Starts the Hellos and waits for them: their rate from the first turn on, what each costs the workers, and their shares.
pub async fn hellos(site: &mut Site, outcome: &mut Outcome, count: u64, limit: Duration) -> Result<()> {
    let (before, done) = (site.reading(), site.crew.done().await?);
    let runs = site.client.burst(Job::new("hello", "Hello", "world"), count, limit).await?;
    tokio::time::sleep(SETTLE).await;
    let (spent, done_now) = (site.reading() - before, site.crew.done().await?);
    let ended: Vec<Run> = runs.iter().filter(|run| run.ended.is_some()).copied().collect();
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
    // How long the fleet takes to notice is told apart from how fast it is then. What was cut off took all the time there was.
    let first = runs.iter().map(|run| run.started).fold(f64::MAX, f64::min);
    let woke = done_now.iter().filter_map(|done| done.woke).reduce(f64::min).unwrap_or(first);
    let noticed = Duration::from_secs_f64((woke - first).max(0.0) / 1000.0);
    let elapsed = if ended.len() < runs.len() { limit } else { span(&ended)?.saturating_sub(noticed) };
    outcome.higher(name::RATE, by / elapsed.as_secs_f64().max(0.001));
    outcome.lower(name::NOTICED, noticed.as_secs_f64() * 1000.0);
    shares(outcome, &done, &done_now);
    outcome.kinds(&spent, by);
    Ok(())
}

async fn idle(site: &Site, outcome: &mut Outcome) {
    let before = site.reading();
    tokio::time::sleep(WATCH).await;
    let (spent, by) = (site.reading() - before, WATCH.as_secs_f64() * site.crew.len() as f64);
    outcome.lower(name::IDLE_REQUESTS, spent.stats.total().requests as f64 / by);
    outcome.lower(name::IDLE_UNITS, spent.units / by);
}

/// How evenly turns and activities fell on the processes.
pub fn shares(outcome: &mut Outcome, before: &[Done], after: &[Done]) {
    let steps: Vec<u64> = after.iter().zip(before).map(|(after, before)| after.steps() - before.steps()).collect();
    let (Some(most), Some(least), true) = (steps.iter().max(), steps.iter().min(), steps.len() > 1) else { return };
    let all = steps.iter().sum::<u64>().max(1) as f64;
    outcome.neutral(name::LARGEST_SHARE, *most as f64 / all);
    outcome.neutral(name::SMALLEST_SHARE, *least as f64 / all);
    // One step for a process that did none: the figure stays finite.
    outcome.lower(name::SHARE_RATIO, *most as f64 / (*least).max(1) as f64);
}
