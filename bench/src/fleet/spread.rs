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

pub async fn run(site: &mut Site, row: &Row, outcome: &mut Outcome, effort: Effort) -> Result<()> {
    site.employ(row.processes).await?;
    site.settle(effort.rest).await?;
    let (before, done) = (site.reading(), site.crew.done().await?);
    let runs = site.client.burst(Job::new("spread", "SlowFanOut", ACTIVITIES), 1, LIMIT).await?;
    tokio::time::sleep(SETTLE).await;
    let spent = site.reading() - before;
    match runs.first().copied().and_then(Run::took) {
        Some(took) => outcome.lower(name::SECONDS, took.as_secs_f64()),
        None => outcome.note = Some(format!("did not end within {} s", LIMIT.as_secs())),
    }
    outcome.lower(name::REQUESTS, spent.stats.total().requests as f64);
    outcome.lower(name::UNITS, spent.units);
    outcome.kinds(&spent, 1.0);
    shares(outcome, &done, &site.crew.done().await?);
    Ok(())
}
