//! A worker process as one would deploy it: configured by its environment, checked on start, stopped in order.
//!
//! Start a local account, a few workers, and talk to them with the tool, each in a terminal of its own:
//!
//! ```text
//! cargo run -p duroxide-cosmos-emulator
//! cargo run --example worker
//! cargo run --example worker
//! cargo run -p duroxide-cosmos-cli -- start Batch 20
//! ```
//!
//! Without any account the first worker keeps one itself, on port 8081, for as long as it runs. On a real account, set
//! COSMOS_ENDPOINT and what `.env.example` says about signing in; every option below has a variable too.
//!
//! What it shows: the account's health on start; logs in text or JSON (`RUST_LOG` says how much); metrics for Prometheus
//! with `--metrics-port 9090`; SIGTERM and Ctrl-C, on which it stops taking work, finishes what it has, and gives back
//! what it can't finish in time.

mod common;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use common::workflows;
use duroxide::{
    runtime::{Runtime, RuntimeOptions},
    Client,
};
use duroxide_cosmos::{CosmosDBProvider, Retention};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use metrics_exporter_prometheus::PrometheusBuilder;
use std::{
    io::IsTerminal,
    net::Ipv4Addr,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};
use tracing::info;
use tracing_subscriber::EnvFilter;

/// Runs the orchestrations of the examples until it is told to stop.
#[derive(Parser)]
struct Options {
    /// How many turns to run at a time
    #[arg(long, env = "WORKER_ORCHESTRATIONS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    orchestrations: u32,
    /// How many activities to run at a time
    #[arg(long, env = "WORKER_ACTIVITIES", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    activities: u32,
    /// A name that stays the same when the worker is restarted, so that it finds its sessions again
    #[arg(long, env = "WORKER_NAME")]
    name: Option<String>,
    /// Seconds to finish what is under way when told to stop; keep it below the host's own patience
    #[arg(long, env = "WORKER_GRACE_SECONDS", default_value_t = 20)]
    grace: u64,
    /// The port to serve metrics for Prometheus on, all interfaces; none if not given
    #[arg(long, env = "WORKER_METRICS_PORT")]
    metrics_port: Option<u16>,
    /// Seconds after which finished instances go by themselves; they stay if not given
    #[arg(long, env = "WORKER_RETAIN_SECONDS")]
    retain: Option<u64>,
    /// How to write logs
    #[arg(long, env = "WORKER_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[tokio::main]
async fn main() -> ExitCode {
    common::exit(run(Options::parse()).await)
}

async fn run(options: Options) -> anyhow::Result<()> {
    init_logging(options.log_format);
    init_metrics(options.metrics_port)?;
    let served = keep_account_where_there_is_none().await?;
    let provider = open(options.retain.map(Duration::from_secs)).await?;
    check_health(&provider).await?;

    let runtime = Runtime::start_with_options(
        provider.clone(),
        workflows::activities(),
        workflows::orchestrations(),
        runtime_options(&options),
    )
    .await;
    let names: Vec<_> = workflows::ORCHESTRATIONS.iter().map(|(name, ..)| *name).collect();
    info!(orchestrations = names.join(", "), "working; stop with Ctrl-C");
    let signal = told_to_stop().await?;
    info!(signal, grace_seconds = options.grace, "stopping");

    // First the runtime, which finishes or gives back what it holds; then the provider, which delivers what was committed.
    runtime.shutdown(Some(options.grace * 1_000)).await;
    provider.shutdown().await;
    let spent = provider.request_statistics();
    info!(requests = spent.requests(), request_units = spent.charge().round(), "stopped");
    if let Some(served) = served {
        served.shutdown().await;
    }
    Ok(())
}

fn init_logging(format: LogFormat) {
    let by_default = "info,azure_data_cosmos=warn,azure_data_cosmos_driver=warn,hyper=warn";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(by_default));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => subscriber.with_target(false).init(),
        LogFormat::Json => subscriber.json().init(),
    }
}

/// duroxide and the provider report through the `metrics` facade: whatever recorder is installed before they start gets it all.
fn init_metrics(port: Option<u16>) -> anyhow::Result<()> {
    let Some(port) = port else { return Ok(()) };
    let exporter = PrometheusBuilder::new().with_http_listener((Ipv4Addr::UNSPECIFIED, port));
    exporter.install().with_context(|| format!("metrics can't be served on port {port} (--metrics-port)"))?;
    info!(port, "serving metrics at /metrics");
    Ok(())
}

async fn keep_account_where_there_is_none() -> anyhow::Result<Option<Served>> {
    if common::is_shared_account_there().await {
        return Ok(None);
    }
    let served = LocalAccount::new().serve(common::LOCAL_ACCOUNT).await?;
    info!(
        endpoint = served.endpoint(),
        "no account in the environment and none on this port: keeping one in memory for as long as this worker runs"
    );
    Ok(Some(served))
}

async fn open(retain: Option<Duration>) -> anyhow::Result<Arc<CosmosDBProvider>> {
    let mut config = common::shared_config()?;
    if let Some(age) = retain {
        config = config.with_retention(Retention::default().with_completed(age).with_failed(age).with_cancelled(age));
    }
    let (endpoint, container) = (config.endpoint().unwrap_or_default().to_owned(), config.container().to_owned());
    let database = config.database().to_owned();
    let began = Instant::now();
    let provider = CosmosDBProvider::new_with_config(config).await.with_context(|| format!("opening {endpoint}"))?;
    info!(endpoint, database, container, took_ms = began.elapsed().as_millis() as u64, "the account is there and fits");
    Ok(Arc::new(provider))
}

/// Opening has shown that the container can be found; this shows that its documents can be read.
async fn check_health(provider: &Arc<CosmosDBProvider>) -> anyhow::Result<()> {
    let client = Client::new(provider.clone());
    let metrics = client.get_system_metrics().await.context("reading the account's documents")?;
    let queues = client.get_queue_depths().await.context("reading the account's queues")?;
    info!(
        running = metrics.running_instances,
        completed = metrics.completed_instances,
        failed = metrics.failed_instances,
        messages = queues.orchestrator_queue,
        activities = queues.worker_queue,
        "what is there"
    );
    Ok(())
}

fn runtime_options(options: &Options) -> RuntimeOptions {
    RuntimeOptions {
        orchestration_concurrency: options.orchestrations as usize,
        worker_concurrency: options.activities as usize,
        worker_node_id: options.name.clone(),
        ..RuntimeOptions::default()
    }
}

/// Waits for Ctrl-C or, as container hosts and systemd send it, SIGTERM.
#[cfg(unix)]
async fn told_to_stop() -> anyhow::Result<&'static str> {
    use tokio::signal::unix::{signal, SignalKind};
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM can't be waited for")?;
    tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed.map(|()| "Ctrl-C").context("Ctrl-C can't be waited for"),
        _ = terminate.recv() => Ok("SIGTERM"),
    }
}

/// Waits for Ctrl-C.
#[cfg(not(unix))]
async fn told_to_stop() -> anyhow::Result<&'static str> {
    tokio::signal::ctrl_c().await.map(|()| "Ctrl-C").context("Ctrl-C can't be waited for")
}
