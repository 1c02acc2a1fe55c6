//! Serves a local Cosmos DB account over HTTP.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use base64::engine::{general_purpose::STANDARD, Engine};
use clap::Parser;
use duroxide_cosmos_emulator::{LocalAccount, Misbehaviour, Served, EMULATOR_KEY};
use tracing_subscriber::EnvFilter;

/// A local Azure Cosmos DB account over HTTP, for tests, examples and benchmarks. It stores nothing on disk.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// The port to listen on; 0 selects a free port
    #[arg(long, default_value_t = 8081)]
    port: u16,
    /// The loopback address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Physical partitions of every new container
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    partitions: u32,
    /// Milliseconds that are added to every request
    #[arg(long, default_value_t = 0)]
    latency_ms: u64,
    /// The account key, in base64
    #[arg(long, default_value = EMULATOR_KEY, value_parser = parse_key)]
    key: String,
    /// An Entra ID bearer token to accept; repeat the option for several tokens
    #[arg(long = "token")]
    tokens: Vec<String>,
    /// Accept any Entra ID bearer token
    #[arg(long)]
    any_token: bool,
    /// A misbehaviour to turn on, as NAME or NAME=VALUE; repeat the option for several. An unknown name prints the list
    #[arg(long = "misbehave", value_name = "NAME[=VALUE]")]
    misbehaviours: Vec<Misbehaviour>,
    /// Serve the dashboard of the account, on this port of the same address
    #[cfg(feature = "dashboard")]
    #[arg(long, value_name = "PORT", num_args = 0..=1, default_missing_value = "8090")]
    dashboard: Option<u16>,
    /// The container that the dashboard shows, of the database "duroxide"
    #[cfg(feature = "dashboard")]
    #[arg(long, value_name = "CONTAINER", default_value = "duroxide", requires = "dashboard")]
    dashboard_container: String,
}

/// Checks the key. Without this check, a key that is not base64 would only lead to a refusal of every request.
fn parse_key(text: &str) -> Result<String, String> {
    match STANDARD.decode(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("an account key must be base64: {error}")),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_env_filter(EnvFilter::from_default_env()).with_writer(io::stderr).init();
    match run(Options::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<(), String> {
    let account = account(&options);
    let addr = SocketAddr::new(options.host, options.port);
    let served = account.serve(addr).await.map_err(|error| explain(addr, &error))?;
    announce(&account, &served);
    #[cfg(feature = "dashboard")]
    serve_dashboard(&account, &options).await?;
    tokio::signal::ctrl_c().await.map_err(|error| format!("can't wait for Ctrl-C: {error}"))?;
    println!("Stopping.");
    served.shutdown().await;
    Ok(())
}

fn account(options: &Options) -> LocalAccount {
    let account = LocalAccount::builder()
        .with_partitions(options.partitions)
        .with_latency(Duration::from_millis(options.latency_ms))
        .with_account_key(&options.key)
        .build();
    for token in &options.tokens {
        account.accept_token(token);
    }
    for misbehaviour in &options.misbehaviours {
        account.wire().misbehave(misbehaviour.clone());
    }
    if options.any_token {
        account.accept_any_token();
    }
    account
}

/// Serves the dashboard until the process ends. It creates the container, as a worker does.
#[cfg(feature = "dashboard")]
async fn serve_dashboard(account: &LocalAccount, options: &Options) -> Result<(), String> {
    let Some(port) = options.dashboard else { return Ok(()) };
    let addr = SocketAddr::new(options.host, port);
    let listener = tokio::net::TcpListener::bind(addr).await.map_err(|error| explain(addr, &error))?;
    let addr = listener.local_addr().map_err(|error| error.to_string())?;
    let config = duroxide_cosmos::CosmosDBProviderConfig::default()
        .with_container(options.dashboard_container.clone())
        .with_create_if_missing(true);
    let client = account.client_named("dashboard").await;
    let provider = duroxide_cosmos::CosmosDBProvider::new_with_client(&client, config);
    let provider = std::sync::Arc::new(provider.await.map_err(|error| error.to_string())?);
    // The account is in memory on this machine, and every user who can reach it may change it.
    let options = duroxide_cosmos_dashboard::Options::default().with_changes(true);
    tokio::spawn(async move {
        if let Err(error) = duroxide_cosmos_dashboard::serve(listener, provider, options, std::future::pending()).await
        {
            eprintln!("error: the dashboard has stopped: {error}");
        }
    });
    println!();
    println!("Dashboard: http://{addr}/");
    Ok(())
}

fn explain(addr: SocketAddr, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            format!("{addr} is in use by another program; choose another port with --port")
        }
        _ => format!("can't listen on {addr}: {error}"),
    }
}

fn announce(account: &LocalAccount, served: &Served) {
    let (endpoint, key) = (served.endpoint(), account.key());
    println!("Local Azure Cosmos DB account in memory. It stores nothing on disk.");
    println!("Listening on {endpoint} (HTTP/1.1 and HTTP/2, without TLS). Stop it with Ctrl-C.");
    println!();
    println!("  export COSMOS_ENDPOINT={endpoint}");
    println!("  export COSMOS_KEY={key}");
    println!();
    println!("Counters: {endpoint}_emulator/stats");
    for misbehaviour in account.wire().misbehaviours() {
        println!("Misbehaviour: {misbehaviour}");
    }
}
