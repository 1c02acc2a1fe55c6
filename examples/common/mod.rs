//! The parts that the examples share: the choice of the account, logs, costs and errors.

// Each example is a crate of its own and uses only some of the functions.
#![allow(dead_code)]

pub mod workflows;

use anyhow::{bail, Context};
use duroxide::{Client, OrchestrationStatus};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, EMULATOR_KEY};
use std::{
    io::IsTerminal,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};
use tokio::net::TcpStream;
use tracing_subscriber::EnvFilter;

/// The address of `cargo run -p duroxide-cosmos-emulator`.
pub const LOCAL_ACCOUNT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081);

/// Writes logs to standard error, so that standard output contains only the output of the example. `RUST_LOG` filters
/// them.
///
/// Without this call the runtime would set up logs on standard output.
pub fn init_logging(default_filter: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default_filter));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
}

/// The exit code of an example. Prints an error with its causes in one line.
pub fn exit(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the environment names an account.
pub fn environment_names_an_account() -> bool {
    let is_set = |name| std::env::var(name).is_ok_and(|value| !value.trim().is_empty());
    is_set("COSMOS_ENDPOINT") || is_set("COSMOS_CONNECTION_STRING")
}

/// A provider on the account that the environment names, or else on an account in this process.
pub async fn open() -> anyhow::Result<Arc<CosmosDBProvider>> {
    if environment_names_an_account() {
        return open_with(CosmosDBProviderConfig::from_env()?).await;
    }
    println!("Account: in this process, in memory. Set COSMOS_ENDPOINT to run on another.");
    open_embedded(&LocalAccount::new()).await
}

/// A provider on an account in this process.
pub async fn open_embedded(account: &LocalAccount) -> anyhow::Result<Arc<CosmosDBProvider>> {
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    let provider = CosmosDBProvider::new_with_client(&account.client().await, config).await?;
    Ok(Arc::new(provider))
}

/// A provider on the account that `config` names.
pub async fn open_with(config: CosmosDBProviderConfig) -> anyhow::Result<Arc<CosmosDBProvider>> {
    let endpoint = config.endpoint().unwrap_or_default();
    println!("Account: {endpoint}, database {}, container {}.", config.database(), config.container());
    Ok(Arc::new(CosmosDBProvider::new_with_config(config).await?))
}

/// The configuration for an account that several processes share: the one that the environment names, or else the local
/// one on port 8081.
pub fn shared_config() -> anyhow::Result<CosmosDBProviderConfig> {
    if environment_names_an_account() {
        return Ok(CosmosDBProviderConfig::from_env()?);
    }
    Ok(CosmosDBProviderConfig::default()
        .with_endpoint(format!("http://{LOCAL_ACCOUNT}/"))
        .with_credential(Credential::account_key(EMULATOR_KEY)))
}

/// Whether a shared account exists: the environment names one, or a process listens on port 8081.
pub async fn is_shared_account_there() -> bool {
    environment_names_an_account() || TcpStream::connect(LOCAL_ACCOUNT).await.is_ok()
}

/// A new instance id. On an account on Azure the instances of earlier runs still exist.
pub fn unique(prefix: &str) -> String {
    let id = uuid::Uuid::new_v4().simple().to_string();
    format!("{prefix}-{}", &id[..8])
}

/// Waits for the end of an instance. Returns its output, or its failure as an error.
pub async fn output(client: &Client, instance: &str, timeout: Duration) -> anyhow::Result<String> {
    let status = client.wait_for_orchestration(instance, timeout).await;
    match status.with_context(|| format!("waiting for {instance}"))? {
        OrchestrationStatus::Completed { output, .. } => Ok(output),
        OrchestrationStatus::Failed { details, .. } => bail!("{instance} failed: {}", details.display_message()),
        other => bail!("{instance} is {other:?}"),
    }
}

/// Counts the requests and request units from its start.
pub struct Meter<'a> {
    provider: &'a CosmosDBProvider,
    requests: u64,
    charge: f64,
}

impl<'a> Meter<'a> {
    /// Starts to count.
    pub fn start(provider: &'a CosmosDBProvider) -> Self {
        let spent = provider.request_statistics();
        Self { provider, requests: spent.requests(), charge: spent.charge() }
    }

    /// The requests and request units so far, as text.
    pub fn read(&self) -> String {
        let spent = self.provider.request_statistics();
        let (requests, charge) = (spent.requests() - self.requests, spent.charge() - self.charge);
        let note = " (estimate from published prices, not measured on Azure)";
        let note = if environment_names_an_account() { "" } else { note };
        format!("{requests} requests, {charge:.0} RU{note}")
    }
}
