//! Credentials: account key, connection string or Entra ID.

mod account;
mod cloud;
#[cfg(feature = "key_auth")]
mod connection_string;
pub(crate) mod endpoint;
mod error;
mod identity;
#[cfg(test)]
mod tests;
mod token_cache;

pub(crate) use account::account_reference;
pub use cloud::Cloud;
#[cfg(feature = "key_auth")]
pub use connection_string::ConnectionString;
pub use error::ConfigError;
pub(crate) use error::Problems;
pub use identity::{ManagedIdentity, WorkloadIdentity};
pub(crate) use token_cache::TokenCache;

use azure_core::credentials::{Secret, TokenCredential};
use std::{borrow::Cow, fmt, sync::Arc};

/// The credential for the account.
///
/// `Debug` shows the [`kind`](Self::kind) and no secret.
///
/// ```
/// use duroxide_cosmos::Credential;
///
/// let in_azure = Credential::managed_identity();
/// assert_eq!(in_azure.kind(), "managed identity (system-assigned)");
///
/// let in_a_pipeline = Credential::client_secret("my-tenant", "my-client", "my-secret".to_string());
/// assert!(!format!("{in_a_pipeline:?}").contains("my-secret"));
/// ```
///
/// A token credential can be any other credential of `azure_identity`, such as a certificate or the service
/// connection of a pipeline. It can also be your own implementation:
///
/// ```
/// use azure_core::credentials::TokenCredential;
/// use duroxide_cosmos::Credential;
/// use std::sync::Arc;
///
/// let cli: Arc<dyn TokenCredential> = azure_identity::AzureCliCredential::new(None)?;
/// let credential = Credential::from(cli);
/// # Ok::<(), azure_core::Error>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub enum Credential {
    /// The account's primary or secondary key.
    #[cfg(feature = "key_auth")]
    AccountKey(Secret),
    /// A connection string: the account's endpoint and key in one.
    #[cfg(feature = "key_auth")]
    ConnectionString(ConnectionString),
    /// The managed identity of the virtual machine, App Service, Function or Container App that the process runs in.
    ManagedIdentity(ManagedIdentity),
    /// The federated identity of a Kubernetes service account.
    WorkloadIdentity(WorkloadIdentity),
    /// A service principal with a secret.
    ClientSecret {
        /// The directory (tenant) id.
        tenant_id: String,
        /// The application (client) id.
        client_id: String,
        /// The client secret.
        secret: Secret,
    },
    /// The user of the Azure CLI (`az login`) or the Azure Developer CLI (`azd auth login`).
    DeveloperTools,
    /// A token credential of the application.
    Token(Arc<dyn TokenCredential>),
}

impl Credential {
    /// The account's primary or secondary key.
    #[cfg(feature = "key_auth")]
    pub fn account_key(key: impl Into<Secret>) -> Self {
        Self::AccountKey(key.into())
    }

    /// A connection string, which includes the endpoint.
    ///
    /// ```
    /// use duroxide_cosmos::{CosmosDBProviderConfig, Credential};
    ///
    /// let credential = Credential::connection_string(
    ///     "AccountEndpoint=https://myaccount.documents.azure.com:443/;AccountKey=a2V5;",
    /// )?;
    /// let config = CosmosDBProviderConfig::default().with_credential(credential);
    /// assert_eq!(config.endpoint(), Some("https://myaccount.documents.azure.com/"));
    /// # Ok::<(), duroxide_cosmos::ConfigError>(())
    /// ```
    #[cfg(feature = "key_auth")]
    pub fn connection_string(text: &str) -> Result<Self, ConfigError> {
        text.parse().map(Self::ConnectionString)
    }

    /// The host's system-assigned managed identity.
    pub fn managed_identity() -> Self {
        Self::ManagedIdentity(ManagedIdentity::SystemAssigned)
    }

    /// The user-assigned managed identity with this client id. [`ManagedIdentity`] has other ids.
    pub fn user_assigned_identity(client_id: impl Into<String>) -> Self {
        Self::ManagedIdentity(ManagedIdentity::ClientId(client_id.into()))
    }

    /// The workload identity of the pod's environment. [`WorkloadIdentity`] can name another.
    pub fn workload_identity() -> Self {
        Self::WorkloadIdentity(WorkloadIdentity::default())
    }

    /// A service principal with a secret.
    pub fn client_secret(
        tenant_id: impl Into<String>,
        client_id: impl Into<String>,
        secret: impl Into<Secret>,
    ) -> Self {
        Self::ClientSecret { tenant_id: tenant_id.into(), client_id: client_id.into(), secret: secret.into() }
    }

    /// The user of `az` or `azd`, for a developer's machine.
    pub fn developer_tools() -> Self {
        Self::DeveloperTools
    }

    /// A short name of the kind of credential, for messages. It contains ids and no secret.
    pub fn kind(&self) -> Cow<'static, str> {
        match self {
            #[cfg(feature = "key_auth")]
            Self::AccountKey(_) => "account key".into(),
            #[cfg(feature = "key_auth")]
            Self::ConnectionString(_) => "account key from a connection string".into(),
            Self::ManagedIdentity(identity) => identity.kind(),
            Self::WorkloadIdentity(WorkloadIdentity { client_id: Some(client_id), .. }) => {
                format!("workload identity (client id {client_id})").into()
            }
            Self::WorkloadIdentity(_) => "workload identity".into(),
            Self::ClientSecret { tenant_id, client_id, .. } => {
                format!("client secret (tenant {tenant_id}, client id {client_id})").into()
            }
            Self::DeveloperTools => "developer tools (az or azd)".into(),
            Self::Token(_) => "token credential of the application".into(),
        }
    }

    /// Whether this is an account key. A key may do everything. An Entra ID identity can create neither databases nor
    /// containers on the data plane.
    pub fn is_key(&self) -> bool {
        match self {
            #[cfg(feature = "key_auth")]
            Self::AccountKey(_) | Self::ConnectionString(_) => true,
            _ => false,
        }
    }

    /// The endpoint of a connection string.
    pub(crate) fn endpoint(&self) -> Option<&str> {
        match self {
            #[cfg(feature = "key_auth")]
            Self::ConnectionString(parsed) => Some(parsed.endpoint()),
            _ => None,
        }
    }

    /// Finds problems that would otherwise appear with the first request.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        match self {
            #[cfg(feature = "key_auth")]
            Self::AccountKey(key) => validate_key(key),
            #[cfg(feature = "key_auth")]
            Self::ConnectionString(parsed) => validate_key(parsed.key()),
            Self::ManagedIdentity(
                ManagedIdentity::ClientId(id) | ManagedIdentity::ObjectId(id) | ManagedIdentity::ResourceId(id),
            ) => validate_parts("the managed identity's id", &[id]),
            Self::ClientSecret { tenant_id, client_id, secret } => validate_parts(
                "the client secret credential (AZURE_TENANT_ID, AZURE_CLIENT_ID, AZURE_CLIENT_SECRET)",
                &[tenant_id, client_id, secret.secret()],
            ),
            _ => Ok(()),
        }
    }
}

impl From<Arc<dyn TokenCredential>> for Credential {
    fn from(credential: Arc<dyn TokenCredential>) -> Self {
        Self::Token(credential)
    }
}

impl fmt::Debug for Credential {
    // Not derived, because a token credential of the application may show anything.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({})", self.kind())
    }
}

/// Checks that no part of a credential is empty.
fn validate_parts(setting: &'static str, parts: &[&str]) -> Result<(), ConfigError> {
    if parts.iter().any(|part| part.trim().is_empty()) {
        return Err(ConfigError::invalid(setting, "has an empty part"));
    }
    Ok(())
}

/// Checks that a key is Base64. Another key can't sign, and every request would fail with a misleading token error.
#[cfg(feature = "key_auth")]
fn validate_key(key: &Secret) -> Result<(), ConfigError> {
    let is_base64 = azure_core::base64::decode(key.secret()).is_ok_and(|bytes| !bytes.is_empty());
    if is_base64 {
        return Ok(());
    }
    Err(ConfigError::invalid(
        "the account key (COSMOS_KEY or COSMOS_CONNECTION_STRING)",
        "is not Base64: copy the whole key, with the = signs at its end",
    ))
}
