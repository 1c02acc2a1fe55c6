//! Builds a client of the SDK from a configuration.

use super::{
    bootstrap::{Opening, Setup},
    error::{describe, StoreError},
    QUERY_TIME,
};
use crate::{
    config::{ConfigError, CosmosDBProviderConfig},
    credential::{endpoint, TokenCache},
};
use azure_core::http::Url;
use azure_data_cosmos::{
    options::{BinaryEncodingOptions, ConnectionPoolOptions, UserAgentSuffix},
    CosmosClient, CosmosClientBuilder, CosmosError, CosmosRuntime,
};

/// A failure to set up the provider.
///
/// ```
/// use duroxide_cosmos::{client, ConnectError, CosmosDBProviderConfig};
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let error = client(&CosmosDBProviderConfig::default()).await.unwrap_err();
/// assert!(matches!(error, ConnectError::Config(_)), "no endpoint is set: {error}");
/// # });
/// ```
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The configuration is incomplete or contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The account, database or container can't be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The SDK could not build a client.
    #[error("the SDK could not build a client for {endpoint}: {detail}")]
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

/// The SDK's own switch. If it is set, the user decides.
const BINARY_ENCODING_VARIABLE: &str = "AZURE_COSMOS_BINARY_ENCODING_ENABLED";

/// Turns binary JSON off for an emulator, because the one in Docker answers 400 to binary writes of items. `None`
/// leaves the choice to the SDK, which reads the variable.
fn binary_encoding(endpoint: &Url, variable: Option<&str>) -> Option<BinaryEncodingOptions> {
    let user_decides = variable.is_some_and(|value| !value.trim().is_empty());
    (!user_decides && endpoint::is_emulator(endpoint)).then(|| BinaryEncodingOptions::new().with_enabled(false))
}

/// The connection options of the client.
///
/// - Gateway 2.0 is off, because the SDK's encoder for it has no token for the flag that makes a batch atomic.
/// - The HTTP timeout is that of queries, whose pages take up to 5 s on the server. All other operations get a shorter
///   limit, because one attempt must end before the lock of a turn expires.
pub(super) fn connection_pool(config: &CosmosDBProviderConfig) -> Result<ConnectionPoolOptions, CosmosError> {
    ConnectionPoolOptions::builder()
        .with_gateway_v2_disabled(true)
        .with_max_dataplane_request_timeout(config.request_timeout().max(QUERY_TIME))
        .build()
}

/// Builds the client that a provider with this configuration uses.
///
/// Use it for [`new_with_client`](crate::CosmosDBProvider::new_with_client), and for operations that only a client has,
/// such as removing a container.
///
/// The client has its own runtime. The SDK's process-wide runtime would take its timeouts from the first client.
pub async fn client(config: &CosmosDBProviderConfig) -> Result<CosmosClient, ConnectError> {
    Ok(connect(config).await?.0)
}

/// The client, and the token cache of its credential.
pub(crate) async fn connect(
    config: &CosmosDBProviderConfig,
) -> Result<(CosmosClient, Option<TokenCache>), ConnectError> {
    let (account, tokens) = config.account_reference()?;
    let endpoint = config.endpoint().unwrap_or("the account").to_owned();
    let failed =
        |e: azure_data_cosmos::CosmosError| ConnectError::Client { endpoint: endpoint.clone(), detail: describe(&e) };
    let pool = connection_pool(config).map_err(failed)?;
    let runtime = CosmosRuntime::builder().with_connection_pool(pool).build().await.map_err(failed)?;
    let suffix = UserAgentSuffix::try_from(config.user_agent_suffix().to_owned())
        .map_err(|e| ConnectError::Client { endpoint: endpoint.clone(), detail: e.to_string() })?;
    // Building a client reads the account. That is the first request, so a wrong credential fails here.
    let url = endpoint::parse(&endpoint)?;
    let opening = Opening::new(url.host_str(), config, config.operation_timeout());
    let encoding = binary_encoding(&url, std::env::var(BINARY_ENCODING_VARIABLE).ok().as_deref());
    let built = opening.with_retries(|| {
        let mut builder =
            CosmosClientBuilder::new().with_runtime(runtime.clone()).with_user_agent_suffix(suffix.clone());
        if let Some(encoding) = encoding.clone() {
            builder = builder.with_binary_encoding_options(encoding);
        }
        Box::pin(builder.build(account.clone(), config.routing_strategy()))
    });
    match built.await? {
        Setup::Done(client) => Ok((client, tokens)),
        Setup::NotFound | Setup::Conflict => Err(ConnectError::Client {
            endpoint: endpoint.clone(),
            detail: "there is no account at this endpoint".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(endpoint: &str, variable: Option<&str>) -> Option<bool> {
        binary_encoding(&Url::parse(endpoint).unwrap(), variable).map(|options| options.enabled)
    }

    #[test]
    fn gateway_2_is_off_and_a_page_may_take_its_time() {
        let pool = connection_pool(&CosmosDBProviderConfig::default()).unwrap();
        assert!(pool.gateway_v2_disabled());
        assert!(pool.max_dataplane_request_timeout() >= std::time::Duration::from_secs(6));
        let patient = CosmosDBProviderConfig::default().with_request_timeout(std::time::Duration::from_secs(20));
        assert_eq!(connection_pool(&patient).unwrap().max_dataplane_request_timeout().as_secs(), 20);
    }

    #[test]
    fn binary_json_is_off_for_emulators_unless_the_user_says_otherwise() {
        for emulator in ["http://localhost:8081/", "https://127.0.0.1:8081/", "http://[::1]:8081/"] {
            assert_eq!(chosen(emulator, None), Some(false), "{emulator}");
            assert_eq!(chosen(emulator, Some("")), Some(false), "{emulator}");
            assert_eq!(chosen(emulator, Some("true")), None, "{emulator}");
        }
        assert_eq!(chosen("https://acc.documents.azure.com/", None), None);
        assert_eq!(chosen("https://acc.documents.azure.com/", Some("false")), None);
    }
}
