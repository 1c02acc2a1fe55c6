//! A fleet: worker processes that share a container, and a client process that only starts orchestrations and waits.
//! Every row has a separate account. The requests of the client are not counted.

pub mod client_process;
mod crash;
mod fixture;
mod latency;
mod polls;
mod render;
mod rows;
mod scale;
mod spread;
mod waiting;

use std::time::Duration;

use anyhow::Result;

use crate::fixture::{ProviderKind, Setting};
use crate::measure::{name, Outcome};

pub use render::render;
pub use rows::{rows, slugs, FleetRow, Group, WaitingWork};

/// How long a fleet idles before it is measured, and how many rounds it runs.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// The time between the start of the last worker and the load.
    pub rest: Duration,
    /// Runs a fifth of the rounds.
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

/// Runs a row with a provider. A failure becomes an outcome with a note.
pub async fn run(row: &FleetRow, kind: ProviderKind, latency_ms: u64, effort: Effort) -> Outcome {
    if let (ProviderKind::Cdb, Some(reason)) = (kind, row.skip_cdb) {
        return Outcome::none(&row.name, kind, reason);
    }
    let mut outcome = Outcome::new(&row.name, kind);
    if let Err(error) = measure(row, &mut outcome, latency_ms, effort).await {
        outcome.note = Some(format!("failed: {error:#}"));
    }
    outcome
}

async fn measure(row: &FleetRow, outcome: &mut Outcome, latency_ms: u64, effort: Effort) -> Result<()> {
    let setting = Setting { latency_ms, partitions: row.partitions };
    let mut fleet = fixture::FleetFixture::open(outcome.provider, setting).await?;
    match row.group {
        Group::Scale => scale::run(&mut fleet, row, outcome, effort).await?,
        Group::Chain => latency::run(&mut fleet, row, outcome, effort).await?,
        Group::Spread => spread::run(&mut fleet, row, outcome, effort).await?,
        Group::Starts => waiting::starts(&mut fleet, row, outcome).await?,
        Group::Timers => waiting::timers(&mut fleet, row, outcome, effort).await?,
        Group::Crash => crash::run(&mut fleet, row, outcome, effort).await?,
    }
    fleet.close().await
}

/// Adds ratios between rows. They compare each fleet with one process, and each backlog of timers with a container
/// without timers.
pub fn compare(rows: &[FleetRow], outcomes: &mut [Outcome]) {
    let of = |outcome: &Outcome| rows.iter().find(|row| row.name == outcome.workload);
    let known: Vec<(FleetRow, Outcome)> =
        outcomes.iter().filter_map(|outcome| Some((of(outcome)?.clone(), outcome.clone()))).collect();
    for outcome in outcomes {
        let Some(row) = of(outcome) else { continue };
        let kind = outcome.provider;
        let base = |measure: &str, is_base: &dyn Fn(&FleetRow) -> bool| {
            let is = |(other, found): &&(FleetRow, Outcome)| {
                found.provider == kind && found.note.is_none() && other.group == row.group && is_base(other)
            };
            known.iter().find(is).and_then(|(_, found)| found.get(measure))
        };
        let alone = |other: &FleetRow| other.processes == 1 && other.partitions == row.partitions;
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
                let padded =
                    base(name::RATE, &|other| other.waiting == row.waiting && other.origin == WaitingWork::Padding);
                outcome.ratio(
                    name::PADDING_RATIO,
                    outcome.get(name::RATE),
                    padded.filter(|_| row.origin != WaitingWork::Padding),
                );
            }
            _ => {}
        }
    }
}
