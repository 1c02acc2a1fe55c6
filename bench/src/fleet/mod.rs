//! A fleet: worker processes that share a container, and a client process that only starts and waits. Every row has an
//! account of its own; what the client sends is not counted.

mod crash;
mod latency;
mod looks;
mod render;
mod rows;
mod scale;
mod site;
mod spread;
pub mod starter;
mod waiting;

use std::time::Duration;

use anyhow::Result;

use crate::measure::{name, Outcome};
use crate::scene::{Setting, Which};

pub use render::render;
pub use rows::{rows, slugs, Group, Row, Waits};

/// How long a fleet comes to rest before it is measured, and how much is done.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Between the last worker's coming up and the load.
    pub rest: Duration,
    /// A fifth of the rounds.
    pub quick: bool,
}

impl Effort {
    fn some(self, full: u64) -> u64 {
        if self.quick {
            full.div_ceil(5)
        } else {
            full
        }
    }
}

/// Runs a row with a provider; what fails is an outcome with a note.
pub async fn run(row: &Row, which: Which, latency_ms: u64, effort: Effort) -> Outcome {
    if let (Which::Peer, Some(reason)) = (which, row.skip_peer) {
        return Outcome::none(&row.name, which, reason);
    }
    let mut outcome = Outcome::new(&row.name, which);
    if let Err(error) = measure(row, &mut outcome, latency_ms, effort).await {
        outcome.note = Some(format!("failed: {error:#}"));
    }
    outcome
}

async fn measure(row: &Row, outcome: &mut Outcome, latency_ms: u64, effort: Effort) -> Result<()> {
    let setting = Setting { latency_ms, partitions: row.partitions };
    let mut site = site::Site::open(outcome.provider, setting).await?;
    match row.group {
        Group::Scale => scale::run(&mut site, row, outcome, effort).await?,
        Group::Chain => latency::run(&mut site, row, outcome, effort).await?,
        Group::Spread => spread::run(&mut site, row, outcome, effort).await?,
        Group::Starts => waiting::starts(&mut site, row, outcome).await?,
        Group::Timers => waiting::timers(&mut site, row, outcome, effort).await?,
        Group::Crash => crash::run(&mut site, row, outcome, effort).await?,
    }
    site.close().await
}

/// Adds what several rows say together: each fleet's figures by those of one process, each backlog's by those without.
pub fn compare(rows: &[Row], outcomes: &mut [Outcome]) {
    let of = |outcome: &Outcome| rows.iter().find(|row| row.name == outcome.workload);
    let known: Vec<(Row, Outcome)> =
        outcomes.iter().filter_map(|outcome| Some((of(outcome)?.clone(), outcome.clone()))).collect();
    for outcome in outcomes {
        let Some(row) = of(outcome) else { continue };
        let which = outcome.provider;
        let base = |measure: &str, is_base: &dyn Fn(&Row) -> bool| {
            let is = |(other, found): &&(Row, Outcome)| {
                found.provider == which && found.note.is_none() && other.group == row.group && is_base(other)
            };
            known.iter().find(is).and_then(|(_, found)| found.get(measure))
        };
        let alone = |other: &Row| other.processes == 1 && other.partitions == row.partitions;
        match row.group {
            Group::Scale if row.processes > 1 => {
                outcome.ratio(name::FLEET_RATIO, outcome.get(name::RATE), base(name::RATE, &alone));
            }
            Group::Spread if row.processes > 1 => {
                outcome.ratio(name::SPEED_RATIO, base(name::SECONDS, &alone), outcome.get(name::SECONDS));
            }
            Group::Timers if row.waiting > 0 => {
                let empty = base(name::RATE, &|other| other.waiting == 0);
                outcome.ratio(name::EMPTY_RATIO, outcome.get(name::RATE), empty);
                let padded = base(name::RATE, &|other| other.waiting == row.waiting && other.waits == Waits::Padding);
                outcome.ratio(
                    name::BESIDE_RATIO,
                    outcome.get(name::RATE),
                    padded.filter(|_| row.waits != Waits::Padding),
                );
            }
            _ => {}
        }
    }
}
