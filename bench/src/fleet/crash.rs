//! Kills a process under load. Measures how long its claimed work, and the work in its share of the slots, waits for
//! another process.

use std::time::Duration;

use anyhow::Result;

use super::client_process::{now, Job, OrchestrationTimes, StreamOptions};
use super::fixture::FleetFixture;
use super::{Effort, FleetRow};
use crate::measure::{name, Outcome};

const ACTIVITIES: usize = 3;

/// More than the fleet has activity dispatchers, so that every process always has claimed work.
const IN_FLIGHT: usize = 32;

/// The duration of the load before the kill, and in all.
const BEFORE: Duration = Duration::from_secs(5);
const DURATION: Duration = Duration::from_secs(20);

/// How long an orchestration may take. One that takes longer counts as lost.
const LIMIT: Duration = Duration::from_secs(90);

pub async fn run(fleet: &mut FleetFixture, row: &FleetRow, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    fleet.start_workers(row.processes).await?;
    fleet.settle(effort.rest).await?;
    let job = Job::new("crash", "SlowSequence", &ACTIVITIES.to_string());
    let options = StreamOptions {
        count: u64::MAX,
        in_flight: IN_FLIGHT,
        pause: Duration::ZERO,
        duration: DURATION,
        limit: LIMIT,
    };
    let (client, workers) = (&mut fleet.client, &mut fleet.workers);
    let kill = async {
        tokio::time::sleep(BEFORE).await;
        let done = workers.done().await?;
        let all: u64 = done.iter().map(|done| done.activities).sum();
        let share = done.last().map_or(0, |last| last.activities) as f64 / all.max(1) as f64;
        workers.kill_last().await?;
        anyhow::Ok((now(), share))
    };
    let (runs, killed_at) = tokio::join!(client.stream(job.clone(), options), kill);
    let (runs, (killed_at, share)) = (runs?, killed_at?);
    outcome.neutral(name::STARTED, runs.len() as f64);
    outcome.neutral(name::KILLED_SHARE, share);
    add_waiting_times(outcome, &runs, killed_at);
    let lost = runs.iter().filter(|run| run.ended.is_none()).count();
    outcome.lower(name::LOST, lost as f64);
    outcome.lower(name::NOT_EXACTLY_ONCE, client.verify(job, runs.len() as u64, ACTIVITIES).await? as f64);
    Ok(())
}

/// Adds the waiting times that the kill caused.
fn add_waiting_times(outcome: &mut Outcome, runs: &[OrchestrationTimes], killed_at: f64) {
    let times = |run: &OrchestrationTimes| run.ended.map(|ended| (run.started, ended));
    let ended: Vec<(f64, f64)> = runs.iter().filter_map(times).collect();
    let in_flight = ended.iter().filter(|(started, ended)| *started < killed_at && *ended >= killed_at);
    let last_end = in_flight.map(|(_, ended)| ended - killed_at).fold(0.0, f64::max);
    let later = ended.iter().filter(|(started, _)| *started >= killed_at);
    let longest = later.map(|(started, ended)| ended - started).fold(0.0, f64::max);
    let earlier = ended.iter().filter(|(_, ended)| *ended < killed_at);
    let usual: Vec<Duration> =
        earlier.map(|(started, ended)| Duration::from_secs_f64((ended - started).max(0.0) / 1000.0)).collect();
    outcome.lower(name::IN_FLIGHT_AT_KILL, last_end / 1000.0);
    outcome.lower(name::STARTED_LATER, longest / 1000.0);
    // The latencies before the kill, for comparison.
    outcome.latencies(usual);
}
