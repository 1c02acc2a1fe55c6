//! One process that starts Hellos, runs them and waits for them, with many in flight: their rate, and the CPU time of
//! the process without the account.

use std::time::Duration;

use anyhow::{ensure, Context, Result};

use crate::fixture::Setting;
use crate::fleet::client_process::{span, ClientProcess, Job, OrchestrationTimes, StreamOptions};
use crate::measure::{name, Outcome, Reading};
use crate::run::SETTLE;

/// Orchestration and activity dispatchers, each.
pub const DISPATCHERS: usize = 16;

/// How long an orchestration in flight may take.
const LIMIT: Duration = Duration::from_secs(20);

/// Keeps this many in flight until `count` have been started or the time is up.
pub async fn run(outcome: &mut Outcome, setting: Setting, in_flight: usize, count: u64, cap: Duration) -> Result<()> {
    let account = setting.account();
    let server = account.serve(([127, 0, 0, 1], 0).into()).await.context("no loopback port is free")?;
    let mut process = ClientProcess::start_with_runtime(outcome.provider, &server.endpoint()).await?;
    let options = |count| StreamOptions { count, in_flight, pause: Duration::ZERO, duration: cap, limit: LIMIT };
    let warm = process.stream(Job::new("warm", "Hello", ""), options(in_flight as u64)).await?;
    ensure!(warm.iter().all(|run| run.ended.is_some()), "a warm-up orchestration did not end");
    tokio::time::sleep(SETTLE).await;
    let reading = || Reading::of(account.stats());
    let (before, cpu) = (reading(), process.cpu().await?);
    let runs = process.stream(Job::new("busy", "Hello", "world"), options(count)).await?;
    let spent = reading() - before;
    let cpu = process.cpu().await? - cpu;
    let ended: Vec<OrchestrationTimes> = runs.iter().filter(|run| run.ended.is_some()).copied().collect();
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
    server.shutdown().await;
    Ok(())
}
