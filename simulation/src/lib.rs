//! Seeded worlds in which duroxide-cosmos meets whatever can go wrong, and an auditor who looks at what is left.
//!
//! A *world* ([`world`]) is drawn from a number. It has an account in memory, workers that are whole duroxide runtimes, each
//! in a [`host`] of its own, and clients that want things done ([`errand`]). Time is virtual, [`weather`] and fate (kills,
//! stops, clocks that are off, splits) are drawn too, and so the same number is the same [`story`], request by request. While
//! it goes on, a [`witness`] between each runtime and its provider checks every promise that the provider makes; when it is
//! over, the [`audit`] checks histories and documents. That they would find a bug is tested by bugs ([`mutants`]).
#![warn(missing_docs)]

pub mod audit;
pub mod bank;
pub mod deletions;
pub mod dice;
pub mod errand;
pub mod fate;
pub mod host;
pub mod ledger;
pub mod many;
pub mod mutants;
pub mod owed;
pub mod script;
pub mod seams;
pub mod sessions;
pub mod soak;
pub mod story;
pub mod weather;
pub mod witness;
pub mod worker;
pub mod world;

/// How a program of this workspace member ends: well, with an invariant that does not hold, or without having been able to look.
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
