//! What waits: starts that a worker finds when it comes, and timers that are far away.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};

use super::scale::{hellos, HELLOS};
use super::site::Site;
use super::starter::Job;
use super::{Effort, Row, Waits};
use crate::measure::{name, Outcome};
use crate::processes::Done;

/// Turns and activities of a Hello.
const STEPS: u64 = 3;

/// So many Hellos' steps are measured: messages come in order, so that those of a large backlog are all begun before the
/// first one ends.
const FIRST: u64 = 200;

/// When a run is cut short.
const LIMIT: Duration = Duration::from_secs(30);

/// The same beside many documents, of which the local account copies many for every batch.
const BESIDE_LIMIT: Duration = Duration::from_secs(60);

/// How often the worker is asked what it has done.
const ASK: Duration = Duration::from_millis(20);

/// Instances that timers are put for: many, so that they lie in all partitions.
const INSTANCES: u64 = 200;

/// Timers of each instance that are put through the provider; more are copies of those.
const EACH: u64 = 10;

/// Timers that an orchestration sets in its first turn.
const IN_A_TURN: u64 = 100;

/// How long the worker may take to set its own.
const SLEEP_LIMIT: Duration = Duration::from_secs(120);

/// A worker comes to starts that wait.
pub async fn starts(site: &mut Site, row: &Row, outcome: &mut Outcome) -> Result<()> {
    site.client.fill(Job::new("waiting", "Hello", "world"), row.waiting).await?;
    // The runtime counts the queues before it is up; that is not a look at them.
    site.employ(1).await?;
    site.largest_look();
    let (before, begun) = (site.reading(), Instant::now());
    let mut steps = 0;
    while steps < FIRST * STEPS && begun.elapsed() < LIMIT {
        tokio::time::sleep(ASK).await;
        steps = site.crew.done().await?.iter().map(|done: &Done| done.steps()).sum();
    }
    let (spent, elapsed, largest) = (site.reading() - before, begun.elapsed(), site.largest_look());
    if steps < FIRST * STEPS {
        outcome.note = Some(format!("cut off after {} s with {} of {FIRST} done", LIMIT.as_secs(), steps / STEPS));
    }
    let by = steps.max(1) as f64 / STEPS as f64;
    outcome.lower(name::ANSWER, largest.answer as f64 / 1024.0);
    outcome.lower(name::LOOK, largest.look as f64 / 1024.0);
    outcome.lower(name::REQUESTS, spent.stats.total().requests as f64 / by);
    outcome.lower(name::UNITS, spent.units / by);
    outcome.higher(name::RATE, by / elapsed.as_secs_f64());
    outcome.kinds(&spent, by);
    Ok(())
}

/// Hellos beside timers, or beside as many documents that are nobody's work.
pub async fn timers(site: &mut Site, row: &Row, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    if row.waiting > 0 && row.waits != Waits::Own {
        site.client.timers(INSTANCES, EACH).await?;
        let put = INSTANCES * EACH;
        site.multiply_timers(put, row.waiting / put, row.waits == Waits::Padding).await?;
    }
    site.employ(1).await?;
    if row.waits == Waits::Own {
        fall_asleep(site, row.waiting / IN_A_TURN).await?;
    }
    site.settle(effort.rest).await?;
    site.largest_look();
    hellos(site, outcome, effort.some(HELLOS), BESIDE_LIMIT).await?;
    outcome.lower(name::LOOK, site.largest_look().look as f64 / 1024.0);
    Ok(())
}

/// The worker itself sets timers, in as many instances. Their turns come before those of what is started next.
async fn fall_asleep(site: &mut Site, sleepers: u64) -> Result<()> {
    let begun = Instant::now();
    site.client.fill(Job::new("sleeper", "Sleep", &IN_A_TURN.to_string()), sleepers).await?;
    while site.crew.done().await?.iter().map(|done| done.turns).sum::<u64>() < sleepers {
        ensure!(begun.elapsed() < SLEEP_LIMIT, "the timers are not set within {} s", SLEEP_LIMIT.as_secs());
        tokio::time::sleep(ASK).await;
    }
    Ok(())
}
