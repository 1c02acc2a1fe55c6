//! Requests, request units and speed of duroxide-cosmos beside duroxide-cdb, on a local account over HTTP.
//!
//! Every workload runs with each provider on a separate account. The account counts the requests on its wire.
#![forbid(unsafe_code)]

mod account;
mod backlog;
mod busy;
mod chart;
mod fixture;
mod fleet;
mod goals;
mod history;
mod measure;
mod orchestrations;
mod processes;
mod retention;
mod run;
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

use crate::fixture::{ProviderKind, Setting};
use crate::measure::{name, Outcome};
use crate::workloads::{Plan, Workload};

/// Compares duroxide-cosmos with duroxide-cdb on a local Cosmos DB account
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Milliseconds that are added to every request
    #[arg(long, default_value_t = 2)]
    latency_ms: u64,
    /// Physical partitions of the container
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    partitions: u32,
    /// Run only this workload, or this row or table of the fleet (such as scale, scale-8x4, crash); repeat the option
    /// for several
    #[arg(long = "only", visible_alias = "workload", value_name = "ROW", value_parser = known_row)]
    only: Vec<String>,
    /// Run only the rows of a fleet: several worker processes and a client process on one container. Other runs leave
    /// them out, because they take about 25 minutes, half of them for duroxide-cdb
    #[arg(long, conflicts_with = "account")]
    fleet: bool,
    /// Seconds that a fleet idles before it is measured
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    rest: u64,
    /// Run duroxide's own stress test of providers: 20 orchestrations at a time, 5 activities of 10 ms, 10 s; with the
    /// feature sqlite also for SQLite
    #[arg(long, conflicts_with_all = ["account", "fleet"])]
    stress: bool,
    /// Measure retention: its cost per orchestration, and the rate at which it deletes instances that have ended
    #[arg(long, conflicts_with_all = ["account", "fleet", "stress"])]
    retention: bool,
    /// The provider to run
    #[arg(long, default_value = "all")]
    provider: Providers,
    /// Run on the account that COSMOS_ENDPOINT and COSMOS_KEY name, in a container that this run creates and removes
    #[arg(long)]
    account: bool,
    /// Run a fifth of the rounds
    #[arg(long)]
    quick: bool,
    /// Write the figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw a chart to this file; with --fleet it shows the fleet
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// A worker process of a workload that has several
    #[command(hide = true)]
    Worker { provider: ProviderKind, endpoint: String },
    /// The client process of a fleet, which starts orchestrations and waits for them
    #[command(hide = true)]
    Client { provider: ProviderKind, endpoint: String },
    /// A process that starts and runs orchestrations and waits for them
    #[command(hide = true)]
    Both { provider: ProviderKind, endpoint: String },
}

#[derive(Clone, Copy, ValueEnum)]
enum Providers {
    /// duroxide-cosmos
    Cosmos,
    /// duroxide-cosmos without inline claims
    NoInlineClaims,
    /// duroxide-cdb
    Cdb,
    /// duroxide-cosmos and duroxide-cdb
    Both,
    /// All in turn. Workloads of several processes, idle workloads and fleets leave out the variant without inline
    /// claims
    All,
}

impl Providers {
    fn list(self) -> &'static [ProviderKind] {
        match self {
            Self::Cosmos => &[ProviderKind::Cosmos],
            Self::NoInlineClaims => &[ProviderKind::NoInlineClaims],
            Self::Cdb => &[ProviderKind::Cdb],
            Self::Both => &[ProviderKind::Cosmos, ProviderKind::Cdb],
            Self::All => &ProviderKind::ALL,
        }
    }

    /// Returns the providers that run this workload.
    fn running(self, workload: &Workload) -> Vec<ProviderKind> {
        let mut list = self.list().to_vec();
        if matches!(self, Self::All) && !workload.is_of_one_process() {
            list.retain(|kind| *kind != ProviderKind::NoInlineClaims);
        }
        list
    }

    /// Returns the providers that run a fleet.
    fn of_fleet(self) -> &'static [ProviderKind] {
        match self {
            Self::All => Self::Both.list(),
            other => other.list(),
        }
    }
}

/// Checks that a text names a workload, or a row or table of the fleet.
fn known_row(text: &str) -> Result<String, String> {
    let workloads = workloads::all(false).into_iter().map(|workload| workload.slug.to_owned());
    let known: Vec<String> = workloads.chain(fleet::slugs()).collect();
    if known.iter().any(|slug| slug == text) {
        return Ok(text.to_owned());
    }
    Err(format!("use one of: {}", known.join(", ")))
}

#[tokio::main]
async fn main() -> Result<()> {
    let filter = EnvFilter::builder().with_default_directive(tracing::Level::ERROR.into()).from_env_lossy();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    let options = Options::parse();
    match &options.command {
        Some(Command::Worker { provider, endpoint }) => processes::serve(*provider, endpoint).await,
        Some(Command::Client { provider, endpoint }) => fleet::client_process::serve(*provider, endpoint, None).await,
        Some(Command::Both { provider, endpoint }) => {
            fleet::client_process::serve(*provider, endpoint, Some(busy::DISPATCHERS)).await
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

/// Returns the chosen rows of the fleet. They take long, so they run only on request.
fn chosen_rows(options: &Options) -> Vec<fleet::FleetRow> {
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
        "Figures are per orchestration, one after the other; \"busy\" means 8 in flight. The provider counts requests and \
         RU, including those of the waiting client."
    );
    if let Some(path) = &options.json {
        let report = json!({ "quick": options.quick, "outcomes": outcomes });
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("can't write {}", path.display()))?;
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
        println!("The machine was busy when this run began (load {load:.1} per core), so its times are too long.");
    }
    if let Some(path) = &options.json {
        let report = json!({ "setting": setting, "quick": options.quick, "load": load, "outcomes": outcomes });
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("can't write {}", path.display()))?;
    }
    if let Some(path) = &options.svg {
        let drawing = match workloads.is_empty() {
            true => chart::draw_fleet(&outcomes, setting.latency_ms),
            false => chart::draw(&outcomes, setting),
        };
        std::fs::write(path, drawing).with_context(|| format!("can't write {}", path.display()))?;
    }
    Ok(())
}

/// Runs the workloads. A failure becomes an outcome with a note.
async fn run_all(workloads: &[Workload], providers: Providers, setting: Setting) -> Vec<Outcome> {
    let bar = progress(workloads.iter().map(|workload| providers.running(workload).len()).sum());
    let mut outcomes = Vec::new();
    for workload in workloads {
        let providers = providers.running(workload);
        // Two idle runtimes don't disturb each other, so they run concurrently to save time.
        if let (Plan::Idle { .. }, [first, second]) = (&workload.plan, providers.as_slice()) {
            bar.set_message(workload.name);
            let (first, second) = tokio::join!(attempt(workload, *first, setting), attempt(workload, *second, setting));
            outcomes.extend([first, second]);
            bar.inc(2);
            continue;
        }
        for kind in &providers {
            bar.set_message(format!("{}, {}", workload.name, kind.package()));
            outcomes.push(attempt(workload, *kind, setting).await);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    outcomes
}

async fn attempt(workload: &Workload, kind: ProviderKind, setting: Setting) -> Outcome {
    let outcome = run::run(workload, kind, setting).await;
    outcome.unwrap_or_else(|error| Outcome::none(workload.name, kind, format!("failed: {error:#}")))
}

/// Runs the rows of a fleet with one provider, then with the next. The two figures of a ratio thus follow each other
/// closely.
async fn run_fleet(rows: &[fleet::FleetRow], options: &Options) -> Vec<Outcome> {
    let effort = fleet::Effort { rest: Duration::from_secs(options.rest), quick: options.quick };
    let providers = options.provider.of_fleet();
    let bar = progress(rows.len() * providers.len());
    let mut outcomes = Vec::new();
    for kind in providers {
        for row in rows {
            bar.set_message(format!("{}, {}", row.name, kind.package()));
            outcomes.push(fleet::run(row, *kind, options.latency_ms, effort).await);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    fleet::compare(rows, &mut outcomes);
    let position = |outcome: &Outcome| rows.iter().position(|row| row.name == outcome.workload);
    outcomes.sort_by_key(position);
    outcomes
}

/// Returns the load per core, if the system reports it.
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

/// Adds the ratio of each backlog's rate to that of 20. A backlog that was cut off has no ratio, because its last turns
/// are missing.
fn compare_backlogs(outcomes: &mut [Outcome]) {
    let bases = [("Backlog of 20", name::RATE_RATIO), ("Backlog of 20, padded", name::PADDED_RATIO)];
    for (kind, (base, ratio)) in ProviderKind::ALL.into_iter().flat_map(|kind| bases.map(|base| (kind, base))) {
        let is_base = |outcome: &&Outcome| outcome.workload == base && outcome.provider == kind;
        let rate = outcomes.iter().find(is_base).filter(|o| o.note.is_none()).and_then(|o| o.get(name::RATE));
        let Some(rate) = rate else { continue };
        let large = ["Backlog of 100", "Backlog of 400"];
        let complete =
            |o: &&mut Outcome| o.provider == kind && o.note.is_none() && large.contains(&o.workload.as_str());
        for outcome in outcomes.iter_mut().filter(complete) {
            if let Some(own) = outcome.get(name::RATE) {
                outcome.higher(ratio, own / rate);
            }
        }
    }
}

fn print_fleet(rows: &[fleet::FleetRow], outcomes: &[Outcome], options: &Options, elapsed: Duration) {
    println!("{}", fleet::render(rows, outcomes));
    let legend = [ProviderKind::Cosmos, ProviderKind::Cdb].map(|kind| format!("{}: {}", kind.as_str(), kind.package()));
    println!("{}. RU: estimate from published prices, not measured on Azure.", legend.join("; "));
    println!(
        "Local account over HTTP on loopback: {} ms per request. Every worker is a process with 4 orchestration and 4 \
         activity dispatchers. The workers start one after the other, run one Hello each and idle for {} s. {} s in all.",
        options.latency_ms,
        options.rest,
        elapsed.as_secs()
    );
}

fn print_all(outcomes: &[Outcome], setting: Setting, elapsed: Duration) {
    println!("{}", table::render(outcomes));
    println!("{}", ProviderKind::ALL.map(|kind| format!("{}: {}", kind.as_str(), kind.package())).join("; "));
    println!(
        "Local account over HTTP on loopback: {} ms per request, {} physical partition(s). \
         4 orchestration and 4 activity dispatchers unless a row says otherwise; other options have duroxide's defaults.",
        setting.latency_ms, setting.partitions
    );
    println!(
        "The emulator's own work grows with the number of documents in a container. The container of the padded backlog \
         has as many documents as that of 400. The backlog of 2,000 has at least 8 partitions."
    );
    println!(
        "Figures are per orchestration, one after the other; \"busy\" means 8 in flight, 32 with two processes. \
         RU: estimate from published prices (emulator/src/prices.rs), not measured on Azure. {} s in all.",
        elapsed.as_secs()
    );
}
