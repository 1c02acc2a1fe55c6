//! A process dies under load: how long what it held, and what lay in its share, waits for another one.

use std::time::Duration;

use anyhow::Result;

use super::site::Site;
use super::starter::{now, Job, Pace, Run};
use super::{Effort, Row};
use crate::measure::{name, Outcome};

const ACTIVITIES: usize = 3;

/// More than the fleet has activity dispatchers for, so that every process holds something at any time.
const UNDER_WAY: usize = 32;

/// The load before the crash, and in all.
const BEFORE: Duration = Duration::from_secs(5);
const LASTING: Duration = Duration::from_secs(20);

/// How long one may take; what takes longer is lost.
const LIMIT: Duration = Duration::from_secs(90);

pub async fn run(site: &mut Site, row: &Row, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    site.employ(row.processes).await?;
    site.settle(effort.rest).await?;
    let job = Job::new("crash", "SlowSequence", &ACTIVITIES.to_string());
    let pace = Pace { count: u64::MAX, under_way: UNDER_WAY, pause: Duration::ZERO, lasting: LASTING, limit: LIMIT };
    let (client, crew) = (&mut site.client, &mut site.crew);
    let crash = async {
        tokio::time::sleep(BEFORE).await;
        let done = crew.done().await?;
        let all: u64 = done.iter().map(|done| done.activities).sum();
        let share = done.last().map_or(0, |last| last.activities) as f64 / all.max(1) as f64;
        crew.crash_last().await?;
        anyhow::Ok((now(), share))
    };
    let (runs, crashed) = tokio::join!(client.stream(job.clone(), pace), crash);
    let (runs, (crashed, share)) = (runs?, crashed?);
    outcome.neutral(name::STARTED, runs.len() as f64);
    outcome.neutral(name::KILLED_SHARE, share);
    waits(outcome, &runs, crashed);
    let lost = runs.iter().filter(|run| run.ended.is_none()).count();
    outcome.lower(name::LOST, lost as f64);
    outcome.lower(name::NOT_ONCE, client.verify(job, runs.len() as u64, ACTIVITIES).await? as f64);
    Ok(())
}

/// How long the crash made its victims wait.
fn waits(outcome: &mut Outcome, runs: &[Run], crashed: f64) {
    let ends = |run: &Run| run.ended.map(|ended| (run.started, ended));
    let ended: Vec<(f64, f64)> = runs.iter().filter_map(ends).collect();
    let under_way = ended.iter().filter(|(started, ended)| *started < crashed && *ended >= crashed);
    let held = under_way.map(|(_, ended)| ended - crashed).fold(0.0, f64::max);
    let later = ended.iter().filter(|(started, _)| *started >= crashed);
    let longest = later.map(|(started, ended)| ended - started).fold(0.0, f64::max);
    let earlier = ended.iter().filter(|(_, ended)| *ended < crashed);
    let usual: Vec<Duration> =
        earlier.map(|(started, ended)| Duration::from_secs_f64((ended - started).max(0.0) / 1000.0)).collect();
    outcome.lower(name::HELD, held / 1000.0);
    outcome.lower(name::AFTER, longest / 1000.0);
    // Of those before the crash, to compare with.
    outcome.latencies(usual);
}
