//! What the examples share: the account that they run on, and how they tell costs and failures.

// Each example is a crate of its own and takes what it needs.
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

/// Where `cargo run -p duroxide-cosmos-emulator` listens.
pub const LOCAL_ACCOUNT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081);

/// Logs go to standard error, so that standard output holds the example's own words. `RUST_LOG` says how much.
///
/// The runtime sets up logging by itself, on standard output, where nobody has done so before.
pub fn init_logging(default_filter: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default_filter));
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();
}

/// Ends an example: a failure in one line, with its causes.
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

/// The account that the environment names, or else one in this process that ends with it.
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

/// The account that several processes share: the one that the environment names, or else the local one on port 8081.
pub fn shared_config() -> anyhow::Result<CosmosDBProviderConfig> {
    if environment_names_an_account() {
        return Ok(CosmosDBProviderConfig::from_env()?);
    }
    Ok(CosmosDBProviderConfig::default()
        .with_endpoint(format!("http://{LOCAL_ACCOUNT}/"))
        .with_credential(Credential::account_key(EMULATOR_KEY)))
}

/// Whether there is a shared account: the environment names one, or something listens on port 8081.
pub async fn is_shared_account_there() -> bool {
    environment_names_an_account() || TcpStream::connect(LOCAL_ACCOUNT).await.is_ok()
}

/// A new name for an instance: on a real account the ones of earlier runs are still there.
pub fn unique(prefix: &str) -> String {
    let id = uuid::Uuid::new_v4().simple().to_string();
    format!("{prefix}-{}", &id[..8])
}

/// Waits for an instance's end: its output, or its failure as an error.
pub async fn output(client: &Client, instance: &str, timeout: Duration) -> anyhow::Result<String> {
    let status = client.wait_for_orchestration(instance, timeout).await;
    match status.with_context(|| format!("waiting for {instance}"))? {
        OrchestrationStatus::Completed { output, .. } => Ok(output),
        OrchestrationStatus::Failed { details, .. } => bail!("{instance} failed: {}", details.display_message()),
        other => bail!("{instance} is {other:?}"),
    }
}

/// What is spent from a moment on.
pub struct Meter<'a> {
    provider: &'a CosmosDBProvider,
    requests: u64,
    charge: f64,
}

impl<'a> Meter<'a> {
    /// Begins to count.
    pub fn start(provider: &'a CosmosDBProvider) -> Self {
        let spent = provider.request_statistics();
        Self { provider, requests: spent.requests(), charge: spent.charge() }
    }

    /// Requests and request units so far, for people.
    pub fn read(&self) -> String {
        let spent = self.provider.request_statistics();
        let (requests, charge) = (spent.requests() - self.requests, spent.charge() - self.charge);
        let reckoning = if environment_names_an_account() { "" } else { " by the emulator's reckoning" };
        format!("{requests} requests, {charge:.0} RU{reckoning}")
    }
}
