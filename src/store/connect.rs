//! From a configuration to a client of the SDK.

use super::{
    bootstrap::{Opening, Setup},
    error::{describe, StoreError},
};
use crate::config::{endpoint, ConfigError, CosmosDBProviderConfig};
use azure_data_cosmos::{
    options::{ConnectionPoolOptions, UserAgentSuffix},
    CosmosClient, CosmosClientBuilder, CosmosRuntime,
};

/// A failure to set up the provider.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The configuration is incomplete or contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The account, database or container can't be used as it is.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The SDK could not make a client.
    #[error("the SDK could not make a client for {endpoint}: {detail}")]
    Client {
        /// The account's endpoint.
        endpoint: String,
        /// The SDK's reason.
        detail: String,
    },
}

impl From<ConnectError> for duroxide::providers::ProviderError {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Store(error) => error.into_provider_error("connect"),
            error => Self::permanent("connect", error.to_string()),
        }
    }
}

/// Makes a client with a runtime of its own: the SDK's process-wide one would take its timeouts from whoever came first.
pub(crate) async fn client(config: &CosmosDBProviderConfig) -> Result<CosmosClient, ConnectError> {
    let account = config.account_reference()?;
    let endpoint = config.endpoint().unwrap_or("the account").to_owned();
    let failed =
        |e: azure_data_cosmos::CosmosError| ConnectError::Client { endpoint: endpoint.clone(), detail: describe(&e) };
    let pool = ConnectionPoolOptions::builder()
        // One HTTP attempt must end before a turn's lock does, or its retry comes too late.
        .with_max_dataplane_request_timeout(config.request_timeout())
        .build()
        .map_err(failed)?;
    let runtime = CosmosRuntime::builder().with_connection_pool(pool).build().await.map_err(failed)?;
    let suffix = UserAgentSuffix::try_from(config.user_agent_suffix().to_owned())
        .map_err(|e| ConnectError::Client { endpoint: endpoint.clone(), detail: e.to_string() })?;
    // Building a client reads the account: the first request, and the one that a wrong credential fails.
    let url = endpoint::parse(&endpoint)?;
    let opening = Opening::new(url.host_str(), config, config.operation_timeout());
    let built = opening.ride_out(|| {
        let builder = CosmosClientBuilder::new().with_runtime(runtime.clone()).with_user_agent_suffix(suffix.clone());
        Box::pin(builder.build(account.clone(), config.routing_strategy()))
    });
    match built.await? {
        Setup::Done(client) => Ok(client),
        Setup::NotFound | Setup::Conflict => {
            Err(ConnectError::Client { endpoint: endpoint.clone(), detail: "there is no account here".to_owned() })
        }
    }
}
