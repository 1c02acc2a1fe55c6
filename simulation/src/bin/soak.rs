//! Runs duroxide-cosmos with real processes under faults for minutes or hours, and audits the documents that are left.
//!
//! ```text
//! cargo run --release -p simulation --bin soak -- --minutes 30 --workers 4
//! ```
#![warn(missing_docs)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use simulation::oracle::Violation;
use simulation::soak::run::{self, SoakOutcome, SoakPlan};
use simulation::soak::worker;

/// Runs real worker processes on a local account over HTTP under faults, and then an audit
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Options {
    /// The number of minutes in which faults happen
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// The number of worker processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    workers: u64,
    /// The largest number of workload items in progress
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    under_way: u64,
    /// The seed of workload and faults [default: the current time]
    #[arg(long)]
    seed: Option<u64>,
    /// Write the last minutes of the transcript to this file
    #[arg(long, value_name = "FILE", alias = "story")]
    transcript: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Runs a worker process
    #[command(hide = true)]
    Worker { endpoint: String, number: usize },
}

/// The number of violations that are printed.
const SHOWN: usize = 20;
/// The number of instances whose transcript is printed.
const TRANSCRIPTS: usize = 3;

fn main() -> ExitCode {
    // The SDK asks the metadata service of the machine where it runs. A soak uses its own account only.
    std::env::set_var("COSMOS_DISABLE_IMDS", "1");
    simulation::exit(run(&Options::parse()))
}

fn run(options: &Options) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if let Some(Command::Worker { endpoint, number }) = &options.command {
        return runtime.block_on(worker::serve(endpoint, *number)).map(|()| true);
    }
    let seed = match options.seed {
        Some(seed) => seed,
        None => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
    };
    let plan = SoakPlan {
        time: Duration::from_secs(options.minutes * 60),
        workers: usize::try_from(options.workers)?,
        max_in_progress: usize::try_from(options.under_way)?,
        seed,
    };
    println!(
        "{} min, {} workers, {} workload items in progress, seed {seed}",
        options.minutes, plan.workers, plan.max_in_progress
    );
    let outcome = runtime.block_on(run::run(plan))?;
    if let Some(path) = &options.transcript {
        std::fs::write(path, outcome.transcript.text()).with_context(|| path.display().to_string())?;
    }
    print(&outcome);
    Ok(outcome.violations.is_empty())
}

fn print(outcome: &SoakOutcome) {
    let violations = &outcome.violations;
    for violation in violations.iter().take(SHOWN) {
        println!("violated: {violation}");
    }
    if violations.len() > SHOWN {
        println!("and {} more", violations.len() - SHOWN);
    }
    let mut printed: Vec<&str> = Vec::new();
    for Violation { instance, .. } in violations {
        if printed.len() < TRANSCRIPTS && !printed.contains(&instance.as_str()) {
            printed.push(instance);
            print_transcript(outcome, instance);
        }
    }
    let mut rows = outcome.summary.rows();
    rows.push(("requests".to_owned(), outcome.requests.to_string()));
    rows.push(("documents at the end".to_owned(), outcome.documents.len().to_string()));
    rows.push(("took".to_owned(), format!("{:.1} min", outcome.took.as_secs_f64() / 60.0)));
    let result = match violations.len() {
        0 => "every invariant holds".to_owned(),
        count => format!("{count} VIOLATED"),
    };
    rows.push(("invariants".to_owned(), result));
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in rows {
        println!("{name:<width$}  {value}");
    }
}

fn print_transcript(outcome: &SoakOutcome, instance: &str) {
    println!("the transcript of {instance:?} (--transcript FILE writes all of it):");
    for line in outcome.transcript.lines_about(instance, 120) {
        println!("  {}", cut(&line.to_string(), 260));
    }
    println!("its documents:");
    for document in outcome.documents.iter().filter(|document| document["instanceId"] == instance) {
        println!("  {}", cut(&document.to_string(), 1_000));
    }
}

fn cut(text: &str, length: usize) -> String {
    text.chars().take(length).collect()
}
