//! A worker process for a deployment: the environment configures it, it checks the account on start, and it shuts down
//! gracefully.
//!
//! Start a local account, two workers and an orchestration, each in a terminal of its own:
//!
//! ```text
//! cargo run -p duroxide-cosmos-emulator
//! cargo run --example worker
//! cargo run --example worker
//! cargo run -p duroxide-cosmos-cli -- start Batch 20
//! ```
//!
//! Without an account, the first worker serves a local one on port 8081 while it runs. For an account on Azure, set
//! COSMOS_ENDPOINT and the sign-in variables of `.env.example`. Every option has a variable too.
//!
//! The example contains:
//!
//! - a health check of the account on start;
//! - logs in text or JSON, filtered by `RUST_LOG`;
//! - metrics for Prometheus, with `--metrics-port 9090`;
//! - a graceful shutdown on SIGTERM and Ctrl-C: the worker takes no more work, finishes its turns and activities within
//!   the grace period, and releases the rest.

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

/// Runs the orchestrations of the examples until a signal stops it.
#[derive(Parser)]
struct Options {
    /// The number of turns to run at once
    #[arg(
        long,
        env = "WORKER_ORCHESTRATIONS",
        default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    orchestrations: u32,
    /// The number of activities to run at once
    #[arg(long, env = "WORKER_ACTIVITIES", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    activities: u32,
    /// A name that stays the same after a restart, so that the worker finds its sessions again
    #[arg(long, env = "WORKER_NAME")]
    name: Option<String>,
    /// Seconds to finish running work on shutdown. Keep it below the grace period of the host
    #[arg(long, env = "WORKER_GRACE_SECONDS", default_value_t = 20)]
    grace: u64,
    /// The port for Prometheus metrics, on all interfaces; without it, no metrics are served
    #[arg(long, env = "WORKER_METRICS_PORT")]
    metrics_port: Option<u16>,
    /// Seconds after which finished instances are deleted; without it, they stay
    #[arg(long, env = "WORKER_RETAIN_SECONDS")]
    retain: Option<u64>,
    /// The format of the logs
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
    let served = serve_account_if_missing().await?;
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
    info!(orchestrations = names.join(", "), "the worker runs; stop it with Ctrl-C");
    let signal = stop_signal().await?;
    info!(signal, grace_seconds = options.grace, "stopping");

    // The runtime comes first: it finishes or releases its work. Then the provider delivers the committed messages.
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
    let default_filter = "info,azure_data_cosmos=warn,azure_data_cosmos_driver=warn,hyper=warn";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default_filter));
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => subscriber.with_target(false).init(),
        LogFormat::Json => subscriber.json().init(),
    }
}

/// Installs a recorder. duroxide and the provider report through the `metrics` facade to the recorder that is installed
/// before they start.
fn init_metrics(port: Option<u16>) -> anyhow::Result<()> {
    let Some(port) = port else { return Ok(()) };
    let exporter = PrometheusBuilder::new().with_http_listener((Ipv4Addr::UNSPECIFIED, port));
    exporter.install().with_context(|| format!("can't serve metrics on port {port} (--metrics-port)"))?;
    info!(port, "serving metrics at /metrics");
    Ok(())
}

/// Serves a local account if the environment names none and none answers on its port.
async fn serve_account_if_missing() -> anyhow::Result<Option<Served>> {
    if common::is_shared_account_there().await {
        return Ok(None);
    }
    let served = LocalAccount::new().serve(common::LOCAL_ACCOUNT).await?;
    info!(
        endpoint = served.endpoint(),
        "no account in the environment and none on this port: this worker serves one in memory while it runs"
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
    info!(
        endpoint,
        database,
        container,
        took_ms = began.elapsed().as_millis() as u64,
        "the account and its container can be used"
    );
    Ok(Arc::new(provider))
}

/// Reads documents. Opening the provider has only shown that the container exists and fits.
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
        "state of the container"
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
async fn stop_signal() -> anyhow::Result<&'static str> {
    use tokio::signal::unix::{signal, SignalKind};
    let mut terminate = signal(SignalKind::terminate()).context("can't wait for SIGTERM")?;
    tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed.map(|()| "Ctrl-C").context("can't wait for Ctrl-C"),
        _ = terminate.recv() => Ok("SIGTERM"),
    }
}

/// Waits for Ctrl-C.
#[cfg(not(unix))]
async fn stop_signal() -> anyhow::Result<&'static str> {
    tokio::signal::ctrl_c().await.map(|()| "Ctrl-C").context("can't wait for Ctrl-C")
}
