//! Waiting work: starts that a new worker finds, and timers that fire much later.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};

use super::client_process::Job;
use super::fixture::FleetFixture;
use super::scale::{hellos, HELLOS};
use super::{Effort, FleetRow, WaitingWork};
use crate::measure::{name, Outcome};
use crate::processes::WorkDone;

/// The number of turns and activities of a Hello.
const STEPS: u64 = 3;

/// The number of Hellos whose steps are measured. Messages are processed in order, so all Hellos of a large backlog
/// begin before the first one ends.
const MEASURED: u64 = 200;

/// The time after which a run is cut off.
const LIMIT: Duration = Duration::from_secs(30);

/// The limit beside many documents, of which the local account copies many for every batch.
const TIMERS_LIMIT: Duration = Duration::from_secs(60);

/// The interval between reads of the worker's progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(20);

/// The number of instances that have timers. They are many, so that every partition has timers.
const INSTANCES: u64 = 200;

/// The number of timers per instance that the provider enqueues. The others are copies.
const EACH: u64 = 10;

/// The number of timers that an orchestration sets in its first turn.
const IN_A_TURN: u64 = 100;

/// How long the worker may take to set its timers.
const SLEEP_LIMIT: Duration = Duration::from_secs(120);

/// Starts a worker when starts already wait.
pub async fn starts(fleet: &mut FleetFixture, row: &FleetRow, outcome: &mut Outcome) -> Result<()> {
    fleet.client.fill(Job::new("waiting", "Hello", "world"), row.waiting).await?;
    // The runtime counts the queues when it starts. Those queries are not polls.
    fleet.start_workers(1).await?;
    fleet.largest_poll();
    let (before, begun) = (fleet.reading(), Instant::now());
    let mut steps = 0;
    while steps < MEASURED * STEPS && begun.elapsed() < LIMIT {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        steps = fleet.workers.done().await?.iter().map(|done: &WorkDone| done.steps()).sum();
    }
    let (spent, elapsed, largest) = (fleet.reading() - before, begun.elapsed(), fleet.largest_poll());
    if steps < MEASURED * STEPS {
        outcome.note = Some(format!("cut off after {} s with {} of {MEASURED} done", LIMIT.as_secs(), steps / STEPS));
    }
    let by = steps.max(1) as f64 / STEPS as f64;
    outcome.lower(name::ANSWER, largest.answer as f64 / 1024.0);
    outcome.lower(name::POLL, largest.poll as f64 / 1024.0);
    outcome.lower(name::REQUESTS, spent.stats.total().requests as f64 / by);
    outcome.lower(name::UNITS, spent.units / by);
    outcome.higher(name::RATE, by / elapsed.as_secs_f64());
    outcome.kinds(&spent, by);
    Ok(())
}

/// Runs Hellos beside timers, or beside as many padding documents.
pub async fn timers(fleet: &mut FleetFixture, row: &FleetRow, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    if row.waiting > 0 && row.origin != WaitingWork::Own {
        fleet.client.timers(INSTANCES, EACH).await?;
        let put = INSTANCES * EACH;
        fleet.multiply_timers(put, row.waiting / put, row.origin == WaitingWork::Padding).await?;
    }
    fleet.start_workers(1).await?;
    if row.origin == WaitingWork::Own {
        set_timers(fleet, row.waiting / IN_A_TURN).await?;
    }
    fleet.settle(effort.rest).await?;
    fleet.largest_poll();
    hellos(fleet, outcome, effort.some(HELLOS), TIMERS_LIMIT).await?;
    outcome.lower(name::POLL, fleet.largest_poll().poll as f64 / 1024.0);
    Ok(())
}

/// Lets the worker set timers in as many instances. Their turns run before those of later starts.
async fn set_timers(fleet: &mut FleetFixture, sleepers: u64) -> Result<()> {
    let begun = Instant::now();
    fleet.client.fill(Job::new("sleeper", "Sleep", &IN_A_TURN.to_string()), sleepers).await?;
    while fleet.workers.done().await?.iter().map(|done| done.turns).sum::<u64>() < sleepers {
        ensure!(begun.elapsed() < SLEEP_LIMIT, "the worker did not set its timers within {} s", SLEEP_LIMIT.as_secs());
        tokio::time::sleep(PROGRESS_INTERVAL).await;
    }
    Ok(())
}
