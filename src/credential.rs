//! How the provider signs in: account key, connection string or Entra ID, turned into the SDK's account reference.

mod cached;
mod cloud;
#[cfg(feature = "key_auth")]
mod connection_string;
pub(crate) mod endpoint;
mod error;

use std::{borrow::Cow, fmt, path::PathBuf, sync::Arc};

use azure_core::{
    credentials::{Secret, TokenCredential},
    http::{ClientOptions, Url},
};
use azure_data_cosmos::AccountReference;
use azure_identity::{
    ClientAssertionCredentialOptions, ClientSecretCredential, ClientSecretCredentialOptions, DeveloperToolsCredential,
    ManagedIdentityCredential, ManagedIdentityCredentialOptions, UserAssignedId, WorkloadIdentityCredential,
    WorkloadIdentityCredentialOptions,
};

use crate::model::{Clock, Randomness};

use cached::Cached;
pub(crate) use cached::TokenCache;
pub use cloud::Cloud;
#[cfg(feature = "key_auth")]
pub use connection_string::ConnectionString;
pub use error::ConfigError;
pub(crate) use error::Problems;

/// How to sign in to the account.
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
/// Any other Entra ID credential of `azure_identity` (a certificate, a pipeline's service connection), or one of your
/// own, goes in as a token credential:
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
    /// Whoever is signed in to the Azure CLI (`az login`) or the Azure Developer CLI (`azd auth login`).
    DeveloperTools,
    /// A token credential that the application made.
    Token(Arc<dyn TokenCredential>),
}

/// Which managed identity to use, where a host may have several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ManagedIdentity {
    /// The host's own identity.
    #[default]
    SystemAssigned,
    /// The user-assigned identity with this client id.
    ClientId(String),
    /// The user-assigned identity with this object (principal) id.
    ObjectId(String),
    /// The user-assigned identity with this Azure resource id. App Service and Container Apps don't take one.
    ResourceId(String),
}

/// A workload identity; what isn't given comes from the variables that Kubernetes' webhook sets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkloadIdentity {
    /// The client id, or `AZURE_CLIENT_ID`.
    pub client_id: Option<String>,
    /// The tenant id, or `AZURE_TENANT_ID`.
    pub tenant_id: Option<String>,
    /// The file with the service account's token, or `AZURE_FEDERATED_TOKEN_FILE`.
    pub token_file: Option<PathBuf>,
}

impl WorkloadIdentity {
    /// Sets the client id.
    pub fn with_client_id(mut self, client_id: impl Into<String>) -> Self {
        self.client_id = Some(client_id.into());
        self
    }

    /// Sets the tenant id.
    pub fn with_tenant_id(mut self, tenant_id: impl Into<String>) -> Self {
        self.tenant_id = Some(tenant_id.into());
        self
    }

    /// Sets the file with the service account's token.
    pub fn with_token_file(mut self, token_file: impl Into<PathBuf>) -> Self {
        self.token_file = Some(token_file.into());
        self
    }

    fn build(&self, client_options: ClientOptions) -> azure_core::Result<Arc<dyn TokenCredential>> {
        let options = WorkloadIdentityCredentialOptions {
            credential_options: ClientAssertionCredentialOptions { client_options },
            client_id: self.client_id.clone(),
            tenant_id: self.tenant_id.clone(),
            token_file_path: self.token_file.clone(),
        };
        Ok(WorkloadIdentityCredential::new(Some(options))?)
    }
}

impl ManagedIdentity {
    fn build(&self, client_options: ClientOptions) -> azure_core::Result<Arc<dyn TokenCredential>> {
        let user_assigned_id = match self {
            Self::SystemAssigned => None,
            Self::ClientId(id) => Some(UserAssignedId::ClientId(id.clone())),
            Self::ObjectId(id) => Some(UserAssignedId::ObjectId(id.clone())),
            Self::ResourceId(id) => Some(UserAssignedId::ResourceId(id.clone())),
        };
        let options = ManagedIdentityCredentialOptions { user_assigned_id, client_options };
        Ok(ManagedIdentityCredential::new(Some(options))?)
    }
}

impl Credential {
    /// The account's primary or secondary key.
    #[cfg(feature = "key_auth")]
    pub fn account_key(key: impl Into<Secret>) -> Self {
        Self::AccountKey(key.into())
    }

    /// A connection string, which brings its endpoint along.
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

    /// The user-assigned managed identity with this client id. [`ManagedIdentity`] has the other ways to name one.
    pub fn user_assigned_identity(client_id: impl Into<String>) -> Self {
        Self::ManagedIdentity(ManagedIdentity::ClientId(client_id.into()))
    }

    /// The workload identity that the pod's environment describes. [`WorkloadIdentity`] can name another.
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

    /// Whoever is signed in to `az` or `azd`: for a developer's machine.
    pub fn developer_tools() -> Self {
        Self::DeveloperTools
    }

    /// A short name of this kind of credential, as error messages use it. It shows ids, and no secret.
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

    /// Whether this is an account key, which may do all; Entra ID identities can neither create databases nor
    /// containers through the data plane.
    pub fn is_key(&self) -> bool {
        match self {
            #[cfg(feature = "key_auth")]
            Self::AccountKey(_) | Self::ConnectionString(_) => true,
            _ => false,
        }
    }

    /// The endpoint that comes with a connection string.
    pub(crate) fn endpoint(&self) -> Option<&str> {
        match self {
            #[cfg(feature = "key_auth")]
            Self::ConnectionString(parsed) => Some(parsed.endpoint()),
            _ => None,
        }
    }

    /// Finds what the SDK or Entra ID would only find at the first request.
    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        match self {
            #[cfg(feature = "key_auth")]
            Self::AccountKey(key) => validate_key(key),
            #[cfg(feature = "key_auth")]
            Self::ConnectionString(parsed) => validate_key(parsed.key()),
            Self::ManagedIdentity(
                ManagedIdentity::ClientId(id) | ManagedIdentity::ObjectId(id) | ManagedIdentity::ResourceId(id),
            ) => validate_given("the managed identity's id", &[id]),
            Self::ClientSecret { tenant_id, client_id, secret } => validate_given(
                "the client secret credential (AZURE_TENANT_ID, AZURE_CLIENT_ID, AZURE_CLIENT_SECRET)",
                &[tenant_id, client_id, secret.secret()],
            ),
            _ => Ok(()),
        }
    }
}

impl ManagedIdentity {
    fn kind(&self) -> Cow<'static, str> {
        let (by, id) = match self {
            Self::SystemAssigned => return "managed identity (system-assigned)".into(),
            Self::ClientId(id) => ("client id", id),
            Self::ObjectId(id) => ("object id", id),
            Self::ResourceId(id) => ("resource id", id),
        };
        format!("managed identity (user-assigned, {by} {id})").into()
    }
}

impl From<Arc<dyn TokenCredential>> for Credential {
    fn from(credential: Arc<dyn TokenCredential>) -> Self {
        Self::Token(credential)
    }
}

impl fmt::Debug for Credential {
    // Not derived: a token credential of the application may show anything.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({})", self.kind())
    }
}

fn validate_given(setting: &'static str, parts: &[&str]) -> Result<(), ConfigError> {
    if parts.iter().any(|part| part.trim().is_empty()) {
        return Err(ConfigError::invalid(setting, "has an empty part"));
    }
    Ok(())
}

/// A key that isn't Base64 can't sign: without this check, every request would fail as if a token could not be had.
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

/// The SDK's account reference for an endpoint and a credential.
///
/// `token_scope` replaces the scope that Entra ID tokens are asked for with; without it that is the SDK's own, or the
/// account's outside the public cloud. Tokens expire by `clock`.
pub(crate) fn account_reference(
    endpoint: &str,
    credential: &Credential,
    cloud: &Cloud,
    token_scope: Option<&str>,
    (clock, randomness): (&Clock, &Randomness),
) -> Result<(AccountReference, Option<TokenCache>), ConfigError> {
    let endpoint = endpoint::parse(endpoint)?;
    cloud.validate()?;
    #[cfg(feature = "key_auth")]
    let by_key = |key: &Secret| AccountReference::with_authentication_key(endpoint.clone().into(), key.clone());
    #[cfg(feature = "key_auth")]
    match credential {
        Credential::AccountKey(key) => return Ok((by_key(key), None)),
        Credential::ConnectionString(parsed) => return Ok((by_key(parsed.key()), None)),
        _ => {}
    }
    let token = entra(credential, &endpoint, cloud)
        .map_err(|error| ConfigError::Credential { kind: credential.kind().into_owned(), reason: error.to_string() })?;
    let token = rescoped(token, &endpoint, token_scope);
    let again = {
        let (credential, endpoint, cloud) = (credential.clone(), endpoint.clone(), cloud.clone());
        let token_scope = token_scope.map(ToOwned::to_owned);
        move || Some(rescoped(entra(&credential, &endpoint, &cloud).ok()?, &endpoint, token_scope.as_deref()))
    };
    let cached = Cached::new(token, clock.clone(), randomness.clone()).made_again_by(again);
    let tokens = cached.tokens();
    Ok((AccountReference::with_credential(endpoint.into(), Arc::new(cached)), Some(tokens)))
}

/// The credential of `azure_identity`, or the caller's own.
fn entra(credential: &Credential, endpoint: &Url, cloud: &Cloud) -> azure_core::Result<Arc<dyn TokenCredential>> {
    let options = || ClientOptions { cloud: cloud.configuration(endpoint), ..ClientOptions::default() };
    match credential {
        #[cfg(feature = "key_auth")]
        Credential::AccountKey(_) | Credential::ConnectionString(_) => Err(azure_core::Error::with_message(
            azure_core::error::ErrorKind::Credential,
            "a key is not a token credential",
        )),
        Credential::ManagedIdentity(identity) => identity.build(options()),
        Credential::WorkloadIdentity(identity) => identity.build(options()),
        Credential::ClientSecret { tenant_id, client_id, secret } => {
            client_secret(tenant_id, client_id, secret, options())
        }
        Credential::DeveloperTools => developer_tools(),
        Credential::Token(token) => Ok(token.clone()),
    }
}

fn client_secret(
    tenant_id: &str,
    client_id: &str,
    secret: &Secret,
    client_options: ClientOptions,
) -> azure_core::Result<Arc<dyn TokenCredential>> {
    let options = ClientSecretCredentialOptions { client_options };
    Ok(ClientSecretCredential::new(tenant_id, client_id.to_owned(), secret.clone(), Some(options))?)
}

fn developer_tools() -> azure_core::Result<Arc<dyn TokenCredential>> {
    Ok(DeveloperToolsCredential::new(None)?)
}

fn rescoped(inner: Arc<dyn TokenCredential>, endpoint: &Url, token_scope: Option<&str>) -> Arc<dyn TokenCredential> {
    match cloud::scope_for(endpoint, token_scope) {
        Some(scope) => Arc::new(cloud::Rescoped { inner, scope }),
        None => inner,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use async_trait::async_trait;
    use azure_core::{
        credentials::{AccessToken, TokenRequestOptions},
        time::OffsetDateTime,
    };

    use super::*;

    const ENDPOINT: &str = "https://acc.documents.azure.com/";

    #[derive(Debug, Default)]
    struct Recording {
        /// `Debug` shows it, to prove that ours doesn't.
        _secret: &'static str,
        scopes: Mutex<Vec<String>>,
    }

    #[async_trait]
    impl TokenCredential for Recording {
        async fn get_token(
            &self,
            scopes: &[&str],
            _options: Option<TokenRequestOptions<'_>>,
        ) -> azure_core::Result<AccessToken> {
            self.scopes.lock().unwrap().extend(scopes.iter().map(|scope| scope.to_string()));
            Ok(AccessToken::new("token", OffsetDateTime::UNIX_EPOCH))
        }
    }

    fn build(credential: &Credential) -> Result<AccountReference, ConfigError> {
        let sources = (&Clock::system(), &Randomness::system());
        Ok(account_reference(ENDPOINT, credential, &Cloud::FromEndpoint, None, sources)?.0)
    }

    async fn scope_asked_for(endpoint: &str, given: Option<&str>) -> String {
        let recording = Arc::new(Recording::default());
        let endpoint = Url::parse(endpoint).unwrap();
        let credential = rescoped(recording.clone(), &endpoint, given);
        credential.get_token(&["https://cosmos.azure.com/.default"], None).await.unwrap();
        let asked = recording.scopes.lock().unwrap().join(" ");
        asked
    }

    #[test]
    fn kinds_name_the_credential_and_its_ids() {
        let object_id = Credential::ManagedIdentity(ManagedIdentity::ObjectId("o-1".into()));
        let resource_id = Credential::ManagedIdentity(ManagedIdentity::ResourceId("/subscriptions/s".into()));
        let workload = WorkloadIdentity::default().with_client_id("c-2");
        let token: Arc<dyn TokenCredential> = Arc::new(Recording::default());
        for (credential, kind) in [
            (Credential::managed_identity(), "managed identity (system-assigned)"),
            (Credential::user_assigned_identity("c-1"), "managed identity (user-assigned, client id c-1)"),
            (object_id, "managed identity (user-assigned, object id o-1)"),
            (resource_id, "managed identity (user-assigned, resource id /subscriptions/s)"),
            (Credential::workload_identity(), "workload identity"),
            (Credential::WorkloadIdentity(workload), "workload identity (client id c-2)"),
            (Credential::client_secret("t", "c-3", "s"), "client secret (tenant t, client id c-3)"),
            (Credential::developer_tools(), "developer tools (az or azd)"),
            (Credential::from(token), "token credential of the application"),
        ] {
            assert_eq!(credential.kind(), kind);
            assert!(!credential.is_key());
            assert_eq!(credential.endpoint(), None);
        }
    }

    #[cfg(feature = "key_auth")]
    #[test]
    fn keys_are_keys_and_a_connection_string_brings_its_endpoint() {
        let key = Credential::account_key("a2V5");
        assert_eq!((key.kind().as_ref(), key.is_key()), ("account key", true));
        let text = "AccountEndpoint=https://acc.documents.azure.com:443/;AccountKey=a2V5;";
        let parsed = Credential::connection_string(text).unwrap();
        assert_eq!(parsed.kind(), "account key from a connection string");
        assert!(parsed.is_key());
        assert_eq!(parsed.endpoint(), Some(ENDPOINT));
        assert!(build(&key).is_ok() && build(&parsed).is_ok());
    }

    #[cfg(feature = "key_auth")]
    #[test]
    fn a_key_that_is_not_base64_is_refused_without_showing_it() {
        for bad in ["", "not base64!", "c2VjcmV0c2VjcmV0="] {
            let error = Credential::account_key(bad).validate().unwrap_err();
            assert!(error.to_string().contains("not Base64"));
            assert!(bad.is_empty() || !format!("{error} {error:?}").contains(bad));
        }
        assert_eq!(Credential::account_key("a2V5").validate(), Ok(()));
    }

    #[test]
    fn debug_shows_no_secret() {
        let mut credentials = vec![
            Credential::client_secret("t", "c", "c2VjcmV0"),
            Credential::Token(Arc::new(Recording { _secret: "c2VjcmV0", ..Default::default() })),
        ];
        #[cfg(feature = "key_auth")]
        credentials.extend([
            Credential::account_key("c2VjcmV0"),
            Credential::connection_string("AccountEndpoint=https://a.documents.azure.com/;AccountKey=c2VjcmV0")
                .unwrap(),
        ]);
        credentials.push(Credential::DeveloperTools);
        for credential in credentials {
            assert!(!format!("{credential:?} {credential:#?}").contains("c2VjcmV0"));
        }
    }

    #[test]
    fn empty_ids_and_secrets_are_refused() {
        for credential in [
            Credential::user_assigned_identity(" "),
            Credential::ManagedIdentity(ManagedIdentity::ObjectId(String::new())),
            Credential::ManagedIdentity(ManagedIdentity::ResourceId(String::new())),
            Credential::client_secret("", "c", "s"),
            Credential::client_secret("t", "", "s"),
            Credential::client_secret("t", "c", ""),
        ] {
            let error = credential.validate().unwrap_err();
            assert!(error.to_string().contains("empty"), "{error}");
        }
        assert_eq!(Credential::client_secret("t", "c", "s").validate(), Ok(()));
        assert_eq!(Credential::managed_identity().validate(), Ok(()));
    }

    #[test]
    fn every_kind_of_entra_credential_becomes_an_account_reference() {
        let token_file = std::env::temp_dir().join(format!("duroxide-cosmos-token-{}", std::process::id()));
        std::fs::write(&token_file, "token").unwrap();
        let workload = WorkloadIdentity::default().with_client_id("c").with_tenant_id("t").with_token_file(&token_file);
        for credential in [
            Credential::managed_identity(),
            Credential::user_assigned_identity("c"),
            Credential::ManagedIdentity(ManagedIdentity::ObjectId("o".into())),
            Credential::WorkloadIdentity(workload),
            Credential::client_secret("t", "c", "s"),
            Credential::developer_tools(),
            Credential::Token(Arc::new(Recording::default())),
        ] {
            let built = build(&credential);
            assert!(built.is_ok(), "{credential:?}: {built:?}");
        }
        std::fs::remove_file(token_file).unwrap();
    }

    #[test]
    fn what_the_identity_library_refuses_names_the_credential_and_no_secret() {
        let error = build(&Credential::client_secret("not a tenant!", "c", "c2VjcmV0")).unwrap_err();
        assert!(matches!(&error, ConfigError::Credential { kind, .. } if kind.contains("client id c")));
        assert!(!format!("{error} {error:?}").contains("c2VjcmV0"));

        let no_file =
            WorkloadIdentity::default().with_client_id("c").with_tenant_id("t").with_token_file("/nonexistent/token");
        let error = build(&Credential::WorkloadIdentity(no_file)).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/token"), "{error}");
    }

    #[test]
    fn bad_endpoints_and_authorities_are_refused() {
        let credential = Credential::managed_identity();
        let bad_endpoint =
            account_reference("acc", &credential, &Cloud::Public, None, (&Clock::system(), &Randomness::system()));
        assert!(bad_endpoint.unwrap_err().to_string().contains("COSMOS_ENDPOINT"));
        let cloud = Cloud::Custom { authority_host: "login".into() };
        let bad_authority =
            account_reference(ENDPOINT, &credential, &cloud, None, (&Clock::system(), &Randomness::system()));
        assert!(bad_authority.unwrap_err().to_string().contains("AZURE_AUTHORITY_HOST"));
    }

    #[tokio::test]
    async fn tokens_are_asked_for_with_the_scope_that_fits_the_cloud() {
        let sdk_scope = "https://cosmos.azure.com/.default";
        assert_eq!(scope_asked_for(ENDPOINT, None).await, sdk_scope);
        assert_eq!(
            scope_asked_for("https://acc.documents.azure.us:443/", None).await,
            "https://acc.documents.azure.us/.default"
        );
        assert_eq!(scope_asked_for(ENDPOINT, Some("https://given/.default")).await, "https://given/.default");
    }
}
