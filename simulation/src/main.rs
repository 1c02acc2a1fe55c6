//! Plays simulation runs and prints the violated invariant of each run that fails.
//!
//! ```text
//! cargo run --release -p simulation -- --seed 7           # one run, one line
//! cargo run --release -p simulation -- --seeds 1..500     # many runs, each in a process of its own
//! cargo run --release -p simulation -- --today            # as CI does: new seeds of the day and all seeds that once failed
//! ```
#![warn(missing_docs)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{bail, Context, Result};
use clap::Parser;
use simulation::parallel::{self, RunProgram, RunReport};
use simulation::run::{self, RunOutcome, RunPlan};
use simulation::virtual_time;

/// The local account clones documents for every query. Half of the time of a run is spent in the allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Plays seeded simulation runs of duroxide-cosmos under faults
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Play the run of this seed
    #[arg(long, conflicts_with_all = ["seeds", "today"])]
    seed: Option<u64>,
    /// Play the runs of these seeds; the last number is not included
    #[arg(long, value_name = "FROM..TO", value_parser = range, conflicts_with = "today")]
    seeds: Option<(u64, u64)>,
    /// Play new runs of the day for 75 seconds, and the runs of all seeds that once failed
    #[arg(long)]
    today: bool,
    /// Write the transcript of the run to this file
    #[arg(long, value_name = "FILE", requires = "seed", alias = "story")]
    transcript: Option<PathBuf>,
    /// The number of runs at once [default: the number of cores]
    #[arg(long)]
    jobs: Option<usize>,
    /// Stop at the first run that fails
    #[arg(long)]
    stop: bool,
}

/// The seeds that once failed, each with the bug that it found. Every later version must pass them.
const FAILED_SEEDS: &str = include_str!("../failed.txt");

fn main() -> ExitCode {
    let _ = tracing::subscriber::set_global_default(tracing::subscriber::NoSubscriber::new());
    simulation::exit(play(&Options::parse()))
}

fn play(options: &Options) -> Result<bool> {
    let jobs = parallel::jobs(options.jobs);
    if options.today {
        return play_today(jobs);
    }
    match (options.seed, options.seeds) {
        (Some(seed), _) => play_one(seed, options),
        (None, Some((from, to))) => {
            print_summary(&parallel::play(&RunProgram::this()?, (from..to).collect(), jobs, None, options.stop)?)
        }
        (None, None) => bail!("say which runs to play: --seed 7, --seeds 1..500 or --today"),
    }
}

/// Plays one run. Prints a line, and the violation if there is one.
fn play_one(seed: u64, options: &Options) -> Result<bool> {
    // The SDK asks the metadata service of the machine where it runs. A run has no network.
    std::env::set_var("COSMOS_DISABLE_IMDS", "1");
    // With backtraces enabled, the SDK captures one for every error, which takes a third of the time.
    std::env::set_var("RUST_LIB_BACKTRACE", "0");
    let began = Instant::now();
    let plan = RunPlan::draw(seed);
    let summary = plan.summary();
    abandon_if_stuck(seed, summary.clone());
    let played = std::thread::Builder::new().name(format!("run {seed}")).spawn(move || run::play(plan))?.join();
    let Ok(outcome) = played else { bail!("seed {seed}: the thread of the run panicked; {}", repeat(seed)) };
    if let Some(path) = &options.transcript {
        std::fs::write(path, outcome.transcript.text()).with_context(|| path.display().to_string())?;
    }
    let RunOutcome { violation, lasted, requests, transcript } = outcome;
    let result = if violation.is_none() { "ok" } else { "FAILED" };
    let took = began.elapsed();
    println!(
        "seed {seed}: {result}: {summary}; {:.0} s of virtual time in {:.1} s, {requests} requests, transcript {:016x}",
        lasted.as_secs_f64(),
        took.as_secs_f64(),
        transcript.fingerprint(),
    );
    let Some(violation) = violation else { return Ok(true) };
    println!("  violated: {violation}");
    println!("  the transcript of {:?} (--transcript FILE writes all of it):", violation.instance);
    for line in transcript.lines_about(&violation.instance, 120) {
        println!("    {}", line.to_string().chars().take(260).collect::<String>());
    }
    println!("  {}", repeat(seed));
    Ok(false)
}

/// Ends the process if virtual time stands still. The readers of a lock in the SDK (`async-lock`) wake each other while
/// one of them fetches the partition map. With real time that costs some milliseconds. Virtual time stands still while
/// a task is ready.
fn abandon_if_stuck(seed: u64, summary: String) {
    std::thread::spawn(move || loop {
        let before = virtual_time::steps();
        std::thread::sleep(LONGEST_STEP);
        if virtual_time::steps() == before {
            println!("seed {seed}: abandoned: {summary}; a dependency spins, and virtual time stands still");
            std::process::exit(parallel::ABANDONED);
        }
    });
}

/// The longest real time of one step of virtual time, on a busy machine.
const LONGEST_STEP: Duration = Duration::from_secs(20);

fn repeat(seed: u64) -> String {
    format!("repeat: cargo run --release -p simulation -- --seed {seed}")
}

/// Plays the seeds that once failed, and then new seeds of the day for 75 seconds.
fn play_today(jobs: usize) -> Result<bool> {
    let program = RunProgram::this()?;
    let day = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    let failed = FAILED_SEEDS.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok());
    let failed: Vec<u64> = failed.collect();
    println!("{} seeds that once failed", failed.len());
    let old_passed = print_summary(&parallel::play(&program, failed, jobs, None, false)?)?;
    println!("day {day}: seeds from {} on", day * 1_000);
    let new = (day * 1_000..(day + 1) * 1_000).collect();
    let new_passed = print_summary(&parallel::play(&program, new, jobs, Some(Duration::from_secs(75)), false)?)?;
    Ok(old_passed && new_passed)
}

fn print_summary(reports: &[RunReport]) -> Result<bool> {
    let (abandoned, played): (Vec<&RunReport>, Vec<&RunReport>) =
        reports.iter().partition(|report| report.is_abandoned);
    for report in &abandoned {
        println!("{}", report.output);
    }
    let failed: Vec<&RunReport> = played.iter().copied().filter(|report| !report.passed).collect();
    for report in &failed {
        println!("{}", report.output);
    }
    let seeds: Vec<String> = failed.iter().map(|report| report.seed.to_string()).collect();
    let failed = if seeds.is_empty() { String::new() } else { format!(": seeds {}", seeds.join(", ")) };
    let abandoned = if abandoned.is_empty() { String::new() } else { format!(", {} abandoned", abandoned.len()) };
    println!("{} runs played{abandoned}, {} failed{failed}", played.len(), seeds.len());
    Ok(seeds.is_empty())
}

fn range(text: &str) -> Result<(u64, u64), String> {
    let parts = text.split_once("..").and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    parts.filter(|(from, to)| from < to).ok_or_else(|| "not a range such as 1..500".to_owned())
}
