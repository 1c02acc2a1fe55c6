//! The provider's configuration.

mod debug;
mod env;
mod retention;
mod settings;
#[cfg(test)]
mod tests;
mod throughput;
mod validate;

pub use crate::credential::ConfigError;
pub use retention::Retention;
pub use throughput::Throughput;

use crate::{
    credential::{account_reference, Cloud, Credential, TokenCache},
    model::{Clock, LeaseProvider, Randomness},
};
use azure_data_cosmos::{options::Region, AccountReference};
use std::{sync::Arc, time::Duration};

/// The longest interval between polls. Some intervals are multiplied, and beyond this limit an `Instant` overflows.
const LONGEST_INTERVAL: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The configuration of a provider: account, credential, container, intervals and limits.
///
/// Only the endpoint and the credential have no default. [`from_env`](Self::from_env) reads both, and other settings,
/// from the environment.
///
/// ```
/// use duroxide_cosmos::{CosmosDBProviderConfig, Credential};
///
/// let config = CosmosDBProviderConfig::default()
///     .with_endpoint("https://myaccount.documents.azure.com/")
///     .with_credential(Credential::managed_identity())
///     .with_database("orders")
///     .with_region("West Europe");
/// config.validate()?;
/// # Ok::<(), duroxide_cosmos::ConfigError>(())
/// ```
///
/// `Debug` shows no key, secret or connection string.
#[derive(Clone)]
pub struct CosmosDBProviderConfig {
    endpoint: Option<String>,
    credential: Option<Credential>,
    cloud: Cloud,
    token_scope: Option<String>,
    database: String,
    container: String,
    regions: Vec<Region>,
    create_if_missing: Option<bool>,
    throughput: Throughput,
    reconciler_age_threshold: Duration,
    request_timeout: Duration,
    operation_timeout: Duration,
    wakeup_interval: Duration,
    poll_interval: Duration,
    inline_claims: bool,
    retention: Retention,
    /// `None` means [`EqualShares`](crate::EqualShares).
    leases: Option<Arc<dyn LeaseProvider>>,
    history_cache_bytes: usize,
    read_staleness: Duration,
    user_agent_suffix: String,
    clock: Clock,
    randomness: Randomness,
}

impl Default for CosmosDBProviderConfig {
    fn default() -> Self {
        Self {
            endpoint: None,
            credential: None,
            cloud: Cloud::default(),
            token_scope: None,
            database: "duroxide".into(),
            container: "duroxide".into(),
            regions: Vec::new(),
            create_if_missing: None,
            throughput: Throughput::default(),
            reconciler_age_threshold: Duration::from_secs(2),
            request_timeout: Duration::from_secs(3),
            operation_timeout: Duration::from_secs(10),
            wakeup_interval: Duration::from_millis(250),
            poll_interval: Duration::from_secs(3),
            inline_claims: true,
            retention: Retention::default(),
            leases: None,
            history_cache_bytes: 64 * 1024 * 1024,
            read_staleness: Duration::from_millis(50),
            user_agent_suffix: "duroxide-cosmos".into(),
            clock: Clock::system(),
            randomness: Randomness::system(),
        }
    }
}

impl CosmosDBProviderConfig {
    /// Reads the configuration from the environment of the process. An empty variable counts as not set.
    ///
    /// | Variable | Meaning |
    /// |---|---|
    /// | `COSMOS_ENDPOINT` | the account's endpoint |
    /// | `COSMOS_KEY` | an account key |
    /// | `COSMOS_CONNECTION_STRING` | endpoint and key in one |
    /// | `COSMOS_CREDENTIAL` | `key`, `connection_string`, `managed_identity`, `workload_identity`, `client_secret` or `developer_tools` |
    /// | `COSMOS_DATABASE`, `COSMOS_CONTAINER` | both `duroxide` by default |
    /// | `COSMOS_REGION` | a region, or several separated by commas |
    /// | `COSMOS_CREATE_IF_MISSING` | `true` or `false` |
    /// | `COSMOS_THROUGHPUT` | RU/s of a container that the provider creates: `400` or `autoscale:4000` |
    /// | `AZURE_TENANT_ID`, `AZURE_CLIENT_ID`, `AZURE_CLIENT_SECRET`, `AZURE_FEDERATED_TOKEN_FILE`, `AZURE_AUTHORITY_HOST` | the Entra ID identity, as all Azure SDKs read them |
    /// | `AZURE_COSMOS_AAD_SCOPE_OVERRIDE` | the scope of Entra ID tokens, as other Cosmos DB SDKs read it |
    ///
    /// `COSMOS_CREDENTIAL` selects the credential. Without it, the first of these variables that is set selects it:
    ///
    /// 1. `COSMOS_KEY`: account key.
    /// 2. `COSMOS_CONNECTION_STRING`: connection string.
    /// 3. `AZURE_FEDERATED_TOKEN_FILE`: workload identity.
    /// 4. `AZURE_CLIENT_SECRET`: client secret.
    /// 5. `IDENTITY_ENDPOINT` or `MSI_ENDPOINT`, which App Service and Container Apps set: managed identity.
    /// 6. None of them: the developer tools.
    ///
    /// A key beside a connection string is an error, and so is either of them beside another `COSMOS_CREDENTIAL`.
    ///
    /// A virtual machine sets none of these variables, so set `COSMOS_CREDENTIAL=managed_identity` there. With
    /// `AZURE_CLIENT_ID`, a managed identity is the user-assigned one with that client id. The provider logs the choice
    /// and its reason at info level.
    ///
    /// # Errors
    /// One error that lists all missing, contradictory and unusable variables.
    ///
    /// ```no_run
    /// use duroxide_cosmos::CosmosDBProviderConfig;
    ///
    /// let config = CosmosDBProviderConfig::from_env()?.with_wakeup_interval(std::time::Duration::from_millis(500));
    /// # Ok::<(), duroxide_cosmos::ConfigError>(())
    /// ```
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::from_lookup(|name| std::env::var(name).ok())
    }

    /// Like [`from_env`](Self::from_env), from any source of variables.
    pub(crate) fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        env::read(lookup)
    }

    /// The SDK's account reference for this endpoint and credential, and the token cache of the credential.
    pub(crate) fn account_reference(&self) -> Result<(AccountReference, Option<TokenCache>), ConfigError> {
        let (endpoint, credential) = (self.require_endpoint()?, self.require_credential()?);
        let sources = (&self.clock, &self.randomness);
        account_reference(endpoint, credential, &self.cloud, self.token_scope(), sources)
    }
}
