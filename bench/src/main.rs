//! Requests, request units and speed of duroxide-cosmos beside its peer, duroxide-cdb, on a local account over HTTP.
//!
//! Every workload runs with each provider on an account of its own; the account counts what comes over the wire.
#![forbid(unsafe_code)]

mod account;
mod backlog;
mod busy;
mod chart;
mod fleet;
mod goals;
mod history;
mod measure;
mod orchestrations;
mod processes;
mod retention;
mod run;
mod scene;
mod stress;
mod table;
mod workloads;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::measure::{name, Outcome};
use crate::scene::{Setting, Which};
use crate::workloads::{Plan, Workload};

/// Compares duroxide-cosmos with duroxide-cdb on a local Cosmos DB account
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Milliseconds that every request takes on top
    #[arg(long, default_value_t = 2)]
    latency_ms: u64,
    /// Physical partitions of the container
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    partitions: u32,
    /// Only this workload, or this row or table of the fleet (such as scale, scale-8x4, crash); can be given several times
    #[arg(long = "only", visible_alias = "workload", value_name = "ROW", value_parser = known_row)]
    only: Vec<String>,
    /// Only the rows of a fleet: several worker processes and a client process on one container. They are not run otherwise,
    /// since they take some 25 minutes, half of that the peer's
    #[arg(long, conflicts_with = "account")]
    fleet: bool,
    /// Seconds for which a fleet comes to rest before it is measured
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    rest: u64,
    /// duroxide's own stress test of providers: 20 at a time, 5 activities of 10 ms, 10 s; SQLite too where this is built with the
    /// feature sqlite
    #[arg(long, conflicts_with_all = ["account", "fleet"])]
    stress: bool,
    /// Retention: what it adds to a greeting, and how fast what has ended goes
    #[arg(long, conflicts_with_all = ["account", "fleet", "stress"])]
    retention: bool,
    /// Which provider to run
    #[arg(long, default_value = "all")]
    provider: Providers,
    /// On the account that COSMOS_ENDPOINT and COSMOS_KEY name, in a container that this run makes and removes
    #[arg(long)]
    account: bool,
    /// A fifth of the rounds
    #[arg(long)]
    quick: bool,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw a chart into this file, of the fleet where only that is run
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// A worker process of a workload that has several
    #[command(hide = true)]
    Worker { provider: Which, endpoint: String },
    /// The process of a fleet that starts and waits
    #[command(hide = true)]
    Client { provider: Which, endpoint: String },
    /// One that starts, runs and waits
    #[command(hide = true)]
    Both { provider: Which, endpoint: String },
}

#[derive(Clone, Copy, ValueEnum)]
enum Providers {
    /// duroxide-cosmos
    Ours,
    /// duroxide-cosmos with nothing handed over
    Plain,
    /// duroxide-cdb
    Peer,
    /// duroxide-cosmos and duroxide-cdb
    Both,
    /// All in turn. A fleet is not run with nothing handed over, nor is what has several processes or none busy
    All,
}

impl Providers {
    fn list(self) -> &'static [Which] {
        match self {
            Self::Ours => &[Which::Ours],
            Self::Plain => &[Which::Plain],
            Self::Peer => &[Which::Peer],
            Self::Both => &[Which::Ours, Which::Peer],
            Self::All => &Which::ALL,
        }
    }

    /// Those that run this workload.
    fn running(self, workload: &Workload) -> Vec<Which> {
        let mut list = self.list().to_vec();
        if matches!(self, Self::All) && !workload.is_of_one_process() {
            list.retain(|which| *which != Which::Plain);
        }
        list
    }

    /// Those that run a fleet.
    fn of_fleet(self) -> &'static [Which] {
        match self {
            Self::All => Self::Both.list(),
            other => other.list(),
        }
    }
}

/// A workload's name, or that of a fleet's row or table.
fn known_row(text: &str) -> Result<String, String> {
    let workloads = workloads::all(false).into_iter().map(|workload| workload.slug.to_owned());
    let known: Vec<String> = workloads.chain(fleet::slugs()).collect();
    if known.iter().any(|slug| slug == text) {
        return Ok(text.to_owned());
    }
    Err(format!("there are {}", known.join(", ")))
}

#[tokio::main]
async fn main() -> Result<()> {
    let filter = EnvFilter::builder().with_default_directive(tracing::Level::ERROR.into()).from_env_lossy();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    let options = Options::parse();
    match &options.command {
        Some(Command::Worker { provider, endpoint }) => processes::serve(*provider, endpoint).await,
        Some(Command::Client { provider, endpoint }) => fleet::starter::serve(*provider, endpoint, None).await,
        Some(Command::Both { provider, endpoint }) => {
            fleet::starter::serve(*provider, endpoint, Some(busy::DISPATCHERS)).await
        }
        None if options.stress => stress::compare(options.provider.list(), options.latency_ms).await,
        None if options.retention => retention::run(options.latency_ms).await,
        None if options.account => on_account(&options).await,
        None => compare(&options).await,
    }
}

fn chosen(options: &Options) -> Vec<Workload> {
    let mut workloads = workloads::all(options.quick);
    if !options.only.is_empty() {
        workloads.retain(|workload| options.only.iter().any(|slug| slug == workload.slug));
    }
    if options.fleet {
        workloads.clear();
    }
    workloads
}

/// The rows of a fleet take long, so they are run only where they are asked for.
fn chosen_rows(options: &Options) -> Vec<fleet::Row> {
    let mut rows = fleet::rows();
    rows.retain(|row| match options.only.as_slice() {
        [] => options.fleet,
        only => only.iter().any(|slug| row.is_called(slug)),
    });
    rows
}

async fn on_account(options: &Options) -> Result<()> {
    let outcomes = account::run(&chosen(options)).await?;
    println!("{}", table::render(&outcomes));
    println!(
        "Figures are of one orchestration, one after the other; busy: with 8 under way. Requests and RU as the provider \
         counted them, those of the waiting client included."
    );
    if let Some(path) = &options.json {
        let report = json!({ "quick": options.quick, "outcomes": outcomes });
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("{} can't be written", path.display()))?;
    }
    Ok(())
}

async fn compare(options: &Options) -> Result<()> {
    let setting = Setting { latency_ms: options.latency_ms, partitions: options.partitions };
    let (workloads, rows) = (chosen(options), chosen_rows(options));
    let (begun, load) = (Instant::now(), load());
    let mut outcomes = run_all(&workloads, options.provider, setting).await;
    compare_backlogs(&mut outcomes);
    if !outcomes.is_empty() {
        print_all(&outcomes, setting, begun.elapsed());
    }
    if !rows.is_empty() {
        let begun = Instant::now();
        let fleet = run_fleet(&rows, options).await;
        print_fleet(&rows, &fleet, options, begun.elapsed());
        outcomes.extend(fleet);
    }
    if let Some(load) = load.filter(|load| *load > 0.5) {
        println!("The machine was busy (load {load:.1} a core) when this began: times are too long, and so are waits.");
    }
    if let Some(path) = &options.json {
        let report = json!({ "setting": setting, "quick": options.quick, "load": load, "outcomes": outcomes });
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("{} can't be written", path.display()))?;
    }
    if let Some(path) = &options.svg {
        let drawing = match workloads.is_empty() {
            true => chart::draw_fleet(&outcomes, setting.latency_ms),
            false => chart::draw(&outcomes, setting),
        };
        std::fs::write(path, drawing).with_context(|| format!("{} can't be written", path.display()))?;
    }
    Ok(())
}

/// Runs the workloads; what fails is an outcome with a note.
async fn run_all(workloads: &[Workload], providers: Providers, setting: Setting) -> Vec<Outcome> {
    let bar = progress(workloads.iter().map(|workload| providers.running(workload).len()).sum());
    let mut outcomes = Vec::new();
    for workload in workloads {
        let providers = providers.running(workload);
        // Two idle runtimes don't disturb each other, and waiting for one after the other is dull.
        if let (Plan::Idle { .. }, [first, second]) = (&workload.plan, providers.as_slice()) {
            bar.set_message(workload.name);
            let (first, second) = tokio::join!(attempt(workload, *first, setting), attempt(workload, *second, setting));
            outcomes.extend([first, second]);
            bar.inc(2);
            continue;
        }
        for which in &providers {
            bar.set_message(format!("{}, {}", workload.name, which.package()));
            outcomes.push(attempt(workload, *which, setting).await);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    outcomes
}

async fn attempt(workload: &Workload, which: Which, setting: Setting) -> Outcome {
    let outcome = run::run(workload, which, setting).await;
    outcome.unwrap_or_else(|error| Outcome::none(workload.name, which, format!("failed: {error:#}")))
}

/// Runs the rows of a fleet with one provider, then with the other: a ratio's two figures come soon after each other.
async fn run_fleet(rows: &[fleet::Row], options: &Options) -> Vec<Outcome> {
    let effort = fleet::Effort { rest: Duration::from_secs(options.rest), quick: options.quick };
    let providers = options.provider.of_fleet();
    let bar = progress(rows.len() * providers.len());
    let mut outcomes = Vec::new();
    for which in providers {
        for row in rows {
            bar.set_message(format!("{}, {}", row.name, which.package()));
            outcomes.push(fleet::run(row, *which, options.latency_ms, effort).await);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    fleet::compare(rows, &mut outcomes);
    let place = |outcome: &Outcome| rows.iter().position(|row| row.name == outcome.workload);
    outcomes.sort_by_key(place);
    outcomes
}

/// How many programs compete for each core, where the system says so.
fn load() -> Option<f64> {
    let cores = std::thread::available_parallelism().ok()?.get();
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    Some(text.split(' ').next()?.parse::<f64>().ok()? / cores as f64)
}

fn progress(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    let style = ProgressStyle::with_template("{spinner} {bar:30} {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// Adds each backlog's rate by that of 20. One that was cut off has none: its last turns are missing.
fn compare_backlogs(outcomes: &mut [Outcome]) {
    let bases = [("Backlog of 20", name::RATE_RATIO), ("Backlog of 20, padded", name::PADDED_RATIO)];
    for (which, (base, ratio)) in Which::ALL.into_iter().flat_map(|which| bases.map(|base| (which, base))) {
        let is_base = |outcome: &&Outcome| outcome.workload == base && outcome.provider == which;
        let rate = outcomes.iter().find(is_base).filter(|o| o.note.is_none()).and_then(|o| o.get(name::RATE));
        let Some(rate) = rate else { continue };
        let large = ["Backlog of 100", "Backlog of 400"];
        let complete =
            |o: &&mut Outcome| o.provider == which && o.note.is_none() && large.contains(&o.workload.as_str());
        for outcome in outcomes.iter_mut().filter(complete) {
            if let Some(own) = outcome.get(name::RATE) {
                outcome.higher(ratio, own / rate);
            }
        }
    }
}

fn print_fleet(rows: &[fleet::Row], outcomes: &[Outcome], options: &Options, elapsed: Duration) {
    println!("{}", fleet::render(rows, outcomes));
    println!("ours: {}; peer: {}", Which::Ours.package(), Which::Peer.package());
    println!(
        "An account in memory, over HTTP on loopback: {} ms a request. Every worker is a process with 4 orchestration and 4 \
         activity dispatchers; they come up one after the other, run a greeting each and rest for {} s. {} s in all.",
        options.latency_ms,
        options.rest,
        elapsed.as_secs()
    );
}

fn print_all(outcomes: &[Outcome], setting: Setting, elapsed: Duration) {
    println!("{}", table::render(outcomes));
    println!("{}", Which::ALL.map(|which| format!("{}: {}", which.as_str(), which.package())).join("; "));
    println!(
        "An account in memory, over HTTP on loopback: {} ms a request, {} physical partition(s). \
         4 orchestration and 4 activity dispatchers where nothing else is said, duroxide's defaults otherwise.",
        setting.latency_ms, setting.partitions
    );
    println!(
        "The emulator's own work grows with what a container holds. The padded backlog's container holds as many documents \
         as that of 400; that of 2,000 has at least 8 partitions."
    );
    println!(
        "Figures are of one orchestration, one after the other; busy: with 8 under way, 32 for two processes. RU by the published prices \
         (emulator/src/prices.rs). {} s in all.",
        elapsed.as_secs()
    );
}
