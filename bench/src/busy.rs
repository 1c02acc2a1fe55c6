//! One process that starts greetings, runs them and waits for them, with many under way: how fast that is, and what it takes of the
//! processor without what the account takes.

use std::time::Duration;

use anyhow::{ensure, Context, Result};

use crate::fleet::starter::{span, Job, Pace, Run, Starter};
use crate::measure::{name, Outcome, Reading};
use crate::run::SETTLE;
use crate::scene::Setting;

/// Orchestration and activity dispatchers, each.
pub const DISPATCHERS: usize = 16;

/// How long what is under way may take.
const LIMIT: Duration = Duration::from_secs(20);

/// Keeps so many under way until there were `count`, or the time is up.
pub async fn run(outcome: &mut Outcome, setting: Setting, under_way: usize, count: u64, cap: Duration) -> Result<()> {
    let account = setting.account();
    let door = account.serve(([127, 0, 0, 1], 0).into()).await.context("no port is free")?;
    let mut process = Starter::start_with_runtime(outcome.provider, &door.endpoint()).await?;
    let pace = |count| Pace { count, under_way, pause: Duration::ZERO, lasting: cap, limit: LIMIT };
    let warm = process.stream(Job::new("warm", "Hello", ""), pace(under_way as u64)).await?;
    ensure!(warm.iter().all(|run| run.ended.is_some()), "a greeting does not end");
    tokio::time::sleep(SETTLE).await;
    let reading = || Reading::of(account.stats());
    let (before, cpu) = (reading(), process.cpu().await?);
    let runs = process.stream(Job::new("busy", "Hello", "world"), pace(count)).await?;
    let spent = reading() - before;
    let cpu = process.cpu().await? - cpu;
    let ended: Vec<Run> = runs.iter().filter(|run| run.ended.is_some()).copied().collect();
    let by = ended.len() as f64;
    if (ended.len() as u64) < count {
        outcome.note = Some(format!("{by} of {count} ended within {} s", cap.as_secs()));
    }
    if !ended.is_empty() {
        outcome.higher(name::RATE, by / span(&ended)?.as_secs_f64());
        outcome.lower(name::CPU, cpu.as_secs_f64() * 1000.0 / by);
        outcome.lower(name::BUSY_REQUESTS, spent.stats.total().requests as f64 / by);
        outcome.lower(name::BUSY_UNITS, spent.units / by);
        outcome.latencies(ended.iter().filter_map(|run| run.took()).collect());
        outcome.kinds(&spent, by);
    }
    drop(process);
    door.shutdown().await;
    Ok(())
}
