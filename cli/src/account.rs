//! The account of the commands: the one that the environment names, or the local one.

use anyhow::{bail, Context};
use duroxide::Client;
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

/// The address of the local account.
const LOCAL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081);
/// The key of every Cosmos DB emulator, which Microsoft has published.
const EMULATOR_KEY: &str = "C2y6yDjf5/R+ob0N8A7Cgv30VRDJIWEHLM+4QDU5DE2nQ9nDuVTqobD4b8mGGyPMbIZnqyMsEcaGQy67XIw/Jw==";

/// The provider, and duroxide's client on it.
pub struct Account {
    pub provider: Arc<CosmosDBProvider>,
    pub client: Client,
}

/// The configuration from the environment. The options of the command line take precedence.
pub fn config(database: Option<String>, container: Option<String>) -> anyhow::Result<CosmosDBProviderConfig> {
    let is_set = |name| std::env::var(name).is_ok_and(|value| !value.trim().is_empty());
    let mut config = if is_set("COSMOS_ENDPOINT") || is_set("COSMOS_CONNECTION_STRING") {
        CosmosDBProviderConfig::from_env()?
    } else {
        if TcpStream::connect_timeout(&LOCAL, Duration::from_secs(1)).is_err() {
            bail!(
                "the environment names no account, and no account answers on http://{LOCAL}/\n\
                 start a local account in another terminal:  cargo run -p duroxide-cosmos-emulator\n\
                 or name your account:  export COSMOS_ENDPOINT=https://<account>.documents.azure.com/"
            );
        }
        let key = Credential::account_key(EMULATOR_KEY);
        CosmosDBProviderConfig::default().with_endpoint(format!("http://{LOCAL}/")).with_credential(key)
    };
    // These two variables apply to the local account too, which `from_env` does not read.
    let variable = |name| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    if let Some(database) = database.or_else(|| variable("COSMOS_DATABASE")) {
        config = config.with_database(database);
    }
    if let Some(container) = container.or_else(|| variable("COSMOS_CONTAINER")) {
        config = config.with_container(container);
    }
    Ok(config)
}

/// Opens the provider.
pub async fn open(config: CosmosDBProviderConfig) -> anyhow::Result<Account> {
    let endpoint = config.endpoint().unwrap_or_default().to_owned();
    let provider = CosmosDBProvider::new_with_config(config).await;
    let context = || format!("{endpoint} can't be used; `duroxide-cosmos check` shows the details");
    let provider = Arc::new(provider.with_context(context)?);
    Ok(Account { client: Client::new(provider.clone()), provider })
}
