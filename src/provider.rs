//! The provider: how it is made, and what it can tell about itself.

use crate::{
    config::CosmosDBProviderConfig,
    store::{bootstrap, connect, connect::ConnectError, RequestStatistics, Store},
};
use azure_data_cosmos::CosmosClient;
use std::fmt;

/// A duroxide storage provider on one container of an Azure Cosmos DB account.
pub struct CosmosDBProvider {
    config: CosmosDBProviderConfig,
    store: Store,
}

impl CosmosDBProvider {
    /// Signs in with an account key and opens the container `duroxide` of `database`, making both where they are missing.
    #[cfg(feature = "key_auth")]
    pub async fn new(
        endpoint: impl Into<String>,
        key: impl Into<azure_core::credentials::Secret>,
        database: impl Into<String>,
    ) -> Result<Self, ConnectError> {
        let config = CosmosDBProviderConfig::default()
            .with_endpoint(endpoint)
            .with_credential(crate::Credential::account_key(key))
            .with_database(database);
        Self::new_with_config(config).await
    }

    /// Opens the container that `config` names.
    pub async fn new_with_config(config: CosmosDBProviderConfig) -> Result<Self, ConnectError> {
        config.validate()?;
        let client = connect::client(&config).await?;
        Self::open(&client, config).await
    }

    /// Opens the container that the environment names: see [`CosmosDBProviderConfig::from_env`].
    pub async fn from_env() -> Result<Self, ConnectError> {
        Self::new_with_config(CosmosDBProviderConfig::from_env()?).await
    }

    /// Opens the container with a client that the caller has configured.
    pub async fn new_with_client(client: &CosmosClient, config: CosmosDBProviderConfig) -> Result<Self, ConnectError> {
        Self::open(client, config).await
    }

    async fn open(client: &CosmosClient, config: CosmosDBProviderConfig) -> Result<Self, ConnectError> {
        let store = bootstrap::open(client, &config).await?;
        Ok(Self { config, store })
    }

    /// Requests and charge by kind of operation since this provider was made.
    pub fn request_statistics(&self) -> RequestStatistics {
        self.store.statistics()
    }
}

impl fmt::Debug for CosmosDBProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CosmosDBProvider").field("config", &self.config).finish_non_exhaustive()
    }
}
