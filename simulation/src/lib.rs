//! Seeded simulation runs of duroxide-cosmos under faults, with checks of every promise that the provider makes.
//!
//! A *run* ([`run`]) is drawn from a seed. It has:
//! - an account in memory,
//! - workers, each a whole duroxide runtime in a [`host`] of its own,
//! - clients with a [`workload`],
//! - a [`fault_schedule`] for requests and a [`crash_plan`] for processes: kills, stops, wrong clocks, partition
//!   splits.
//!
//! Time is virtual ([`virtual_time`]), so the same seed gives the same [`transcript`], request by request.
//!
//! Two checks find violated invariants:
//! - A [`recorder`] between each runtime and its provider reports every call to the [`oracle`] while the run goes on.
//! - The [`audit`] checks histories and documents when the run is over.
//!
//! The [`mutants`] test the checks: each is a bug in the library that some run must find.
#![warn(missing_docs)]

pub mod audit;
pub mod bank;
pub mod crash_plan;
pub mod deletions;
pub mod deliveries;
pub mod fault_schedule;
pub mod host;
pub mod mutants;
pub mod oracle;
pub mod parallel;
pub mod recorder;
pub mod rng;
pub mod run;
pub mod script;
pub mod sessions;
pub mod soak;
pub mod transcript;
pub mod virtual_time;
pub mod worker;
pub mod workload;

/// The exit code of a program of this crate: 0 if every invariant holds, 1 if one is violated, 2 if the check itself
/// failed.
pub fn exit(outcome: anyhow::Result<bool>) -> std::process::ExitCode {
    match outcome {
        Ok(true) => std::process::ExitCode::SUCCESS,
        Ok(false) => std::process::ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::from(2)
        }
    }
}
