//! One instance with many activities: how much faster a fleet is than one process.

use std::time::Duration;

use anyhow::Result;

use super::scale::shares;
use super::site::Site;
use super::starter::{Job, Run};
use super::{Effort, Row};
use crate::measure::{name, Outcome};
use crate::run::SETTLE;

/// As the input of the orchestration.
const ACTIVITIES: &str = "300";

const LIMIT: Duration = Duration::from_secs(60);

/// How often it is run: when an idle process next looks is chance, a fifth of the whole. What takes long varies little.
const ROUNDS: usize = 3;
const LONG: Duration = Duration::from_secs(10);

pub async fn run(site: &mut Site, row: &Row, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    site.employ(row.processes).await?;
    site.settle(effort.rest).await?;
    let done = site.crew.done().await?;
    let (mut times, mut requests, mut units) = (Vec::new(), 0, 0.0);
    for round in 0..ROUNDS {
        if times.iter().any(|took| *took > LONG) {
            break;
        }
        tokio::time::sleep(effort.rest).await;
        let before = site.reading();
        let job = Job::new(&format!("spread-{round}"), "SlowFanOut", ACTIVITIES);
        let runs = site.client.burst(job, 1, LIMIT).await?;
        tokio::time::sleep(SETTLE).await;
        let spent = site.reading() - before;
        let Some(took) = runs.first().copied().and_then(Run::took) else {
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
    shares(outcome, &done, &site.crew.done().await?);
    Ok(())
}
