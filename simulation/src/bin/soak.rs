//! Runs duroxide-cosmos for long while whatever can go wrong goes wrong, and looks at what is left.
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
use simulation::ledger::Broken;
use simulation::soak::run::{self, Outcome, Plan};
use simulation::soak::worker;

/// Real worker processes on a local account over HTTP, killed, stopped and refused for a while; then an audit
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Options {
    /// How many minutes things go wrong
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// Worker processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(1..=64))]
    workers: u64,
    /// Errands under way at once, at most
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    under_way: u64,
    /// What errands and blows are drawn from; the time of day by default
    #[arg(long)]
    seed: Option<u64>,
    /// Write the last minutes of the story to this file
    #[arg(long, value_name = "FILE")]
    story: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// A worker process
    #[command(hide = true)]
    Worker { endpoint: String, place: usize },
}

/// Broken invariants that are shown, and of how many instances the story is.
const SHOWN: usize = 20;
const STORIES: usize = 3;

fn main() -> ExitCode {
    // The SDK asks the machine where it runs: a soak has no network but its own.
    std::env::set_var("COSMOS_DISABLE_IMDS", "1");
    simulation::exit(run(&Options::parse()))
}

fn run(options: &Options) -> Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if let Some(Command::Worker { endpoint, place }) = &options.command {
        return runtime.block_on(worker::serve(endpoint, *place)).map(|()| true);
    }
    let seed = match options.seed {
        Some(seed) => seed,
        None => SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
    };
    let plan = Plan {
        time: Duration::from_secs(options.minutes * 60),
        workers: usize::try_from(options.workers)?,
        under_way: usize::try_from(options.under_way)?,
        seed,
    };
    println!("{} min, {} workers, {} errands under way, seed {seed}", options.minutes, plan.workers, plan.under_way);
    let outcome = runtime.block_on(run::run(plan))?;
    if let Some(path) = &options.story {
        std::fs::write(path, outcome.story.whole()).with_context(|| path.display().to_string())?;
    }
    print(&outcome);
    Ok(outcome.broken.is_empty())
}

fn print(outcome: &Outcome) {
    let broken = &outcome.broken;
    for broken in broken.iter().take(SHOWN) {
        println!("broken: {broken}");
    }
    if broken.len() > SHOWN {
        println!("and {} more", broken.len() - SHOWN);
    }
    let mut told: Vec<&str> = Vec::new();
    for Broken { instance, .. } in broken {
        if told.len() < STORIES && !told.contains(&instance.as_str()) {
            told.push(instance);
            print_story(outcome, instance);
        }
    }
    let mut rows = outcome.figures.rows();
    rows.push(("requests".to_owned(), outcome.requests.to_string()));
    rows.push(("documents at the end".to_owned(), outcome.documents.len().to_string()));
    rows.push(("took".to_owned(), format!("{:.1} min", outcome.took.as_secs_f64() / 60.0)));
    let verdict =
        if broken.is_empty() { "every invariant holds".to_owned() } else { format!("{} BROKEN", broken.len()) };
    rows.push(("state".to_owned(), verdict));
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in rows {
        println!("{name:<width$}  {value}");
    }
}

fn print_story(outcome: &Outcome, instance: &str) {
    println!("the story of {instance:?}, in order (--story FILE writes that of everybody):");
    for line in outcome.story.of(instance, 120) {
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
