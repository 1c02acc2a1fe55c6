//! The SDK's account reference for a credential.

use super::{
    cloud, endpoint,
    token_cache::{CachingCredential, TokenCache},
    Cloud, ConfigError, Credential,
};
use crate::model::{Clock, Randomness};
use azure_core::{
    credentials::{Secret, TokenCredential},
    http::{ClientOptions, Url},
};
use azure_data_cosmos::AccountReference;
use azure_identity::{ClientSecretCredential, ClientSecretCredentialOptions, DeveloperToolsCredential};
use std::sync::Arc;

/// The SDK's account reference for an endpoint and a credential, and the token cache of an Entra ID credential.
///
/// `token_scope` replaces the scope of Entra ID tokens. The default scope is the SDK's own in the public cloud, and
/// that of the account in other clouds. Tokens expire by the clock of `sources`.
pub(crate) fn account_reference(
    endpoint: &str,
    credential: &Credential,
    cloud: &Cloud,
    token_scope: Option<&str>,
    sources: (&Clock, &Randomness),
) -> Result<(AccountReference, Option<TokenCache>), ConfigError> {
    let (clock, randomness) = sources;
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
    let token = token_credential(credential, &endpoint, cloud)
        .map_err(|error| ConfigError::Credential { kind: credential.kind().into_owned(), reason: error.to_string() })?;
    let token = rescoped(token, &endpoint, token_scope);
    let recreate = {
        let (credential, endpoint, cloud) = (credential.clone(), endpoint.clone(), cloud.clone());
        let token_scope = token_scope.map(ToOwned::to_owned);
        move || {
            Some(rescoped(token_credential(&credential, &endpoint, &cloud).ok()?, &endpoint, token_scope.as_deref()))
        }
    };
    let cached = CachingCredential::new(token, clock.clone(), randomness.clone()).recreated_by(recreate);
    let tokens = cached.tokens();
    Ok((AccountReference::with_credential(endpoint.into(), Arc::new(cached)), Some(tokens)))
}

/// The credential of `azure_identity`, or that of the application.
fn token_credential(
    credential: &Credential,
    endpoint: &Url,
    cloud: &Cloud,
) -> azure_core::Result<Arc<dyn TokenCredential>> {
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

/// Wraps a credential that must ask for another scope than the SDK's.
pub(super) fn rescoped(
    inner: Arc<dyn TokenCredential>,
    endpoint: &Url,
    token_scope: Option<&str>,
) -> Arc<dyn TokenCredential> {
    match cloud::scope_for(endpoint, token_scope) {
        Some(scope) => Arc::new(cloud::Rescoped { inner, scope }),
        None => inner,
    }
}
