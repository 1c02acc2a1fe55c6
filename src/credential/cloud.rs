//! Sovereign clouds: the Entra ID authority and the scope of tokens.
//!
//! The SDK uses the scope `https://cosmos.azure.com/.default` in every cloud, without a setting. Not every cloud
//! knows that scope. Each account also accepts tokens for its own name, which Microsoft's other Cosmos DB SDKs use
//! first. So outside the public cloud a wrapper around the credential replaces the SDK's scope by that of the
//! account.

use std::sync::Arc;

use async_trait::async_trait;
use azure_core::{
    cloud::{CloudConfiguration, CustomConfiguration},
    credentials::{AccessToken, TokenCredential, TokenRequestOptions},
    http::Url,
};

use super::ConfigError;

pub(crate) const AUTHORITY_SETTING: &str = "the authority host (AZURE_AUTHORITY_HOST)";

const PUBLIC_ACCOUNTS: &str = ".documents.azure.com";
const CHINA_ACCOUNTS: &str = ".documents.azure.cn";
const US_GOVERNMENT_ACCOUNTS: &str = ".documents.azure.us";

/// The Azure cloud whose Entra ID issues tokens.
///
/// Client secrets and workload identities use it, because they ask an Entra ID authority by name. A managed identity
/// asks its host. The developer tools use the cloud that the user has signed in to (`az cloud set`). Account keys
/// ignore it.
///
/// Outside the public cloud, the scope of tokens is that of the account. The account
/// `https://<account>.documents.azure.cn/` has the scope `https://<account>.documents.azure.cn/.default`. Not every
/// cloud knows the SDK's scope, `https://cosmos.azure.com/.default`.
/// [`with_token_scope`](crate::CosmosDBProviderConfig::with_token_scope) sets another scope.
///
/// ```
/// use duroxide_cosmos::{Cloud, CosmosDBProviderConfig};
///
/// let config = CosmosDBProviderConfig::default().with_cloud(Cloud::UsGovernment);
/// assert_eq!(config.cloud(), &Cloud::UsGovernment);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cloud {
    /// The cloud of the endpoint's suffix: `.documents.azure.cn` is China, and `.documents.azure.us` is the US
    /// government. For other suffixes it is the cloud of `AZURE_AUTHORITY_HOST`, or else the public cloud.
    #[default]
    FromEndpoint,
    /// The public cloud, `https://login.microsoftonline.com`.
    Public,
    /// Azure operated by 21Vianet in China, `https://login.chinacloudapi.cn`.
    China,
    /// Azure Government of the United States, `https://login.microsoftonline.us`.
    UsGovernment,
    /// Any other cloud.
    Custom {
        /// The Entra ID authority, `https://…`.
        authority_host: String,
    },
}

impl Cloud {
    /// The cloud of an authority host, in the notation of `AZURE_AUTHORITY_HOST`.
    pub(crate) fn from_authority_host(authority_host: &str) -> Result<Self, ConfigError> {
        let url = parse_authority(authority_host)?;
        Ok(match url.host_str() {
            Some("login.microsoftonline.com") => Self::Public,
            Some("login.chinacloudapi.cn" | "login.partner.microsoftonline.cn") => Self::China,
            Some("login.microsoftonline.us") => Self::UsGovernment,
            _ => Self::Custom { authority_host: authority_host.to_owned() },
        })
    }

    /// The cloud of an account, if its host name has a known suffix.
    pub(crate) fn of_account(endpoint: &Url) -> Option<Self> {
        let host = endpoint.host_str()?;
        [(PUBLIC_ACCOUNTS, Self::Public), (CHINA_ACCOUNTS, Self::China), (US_GOVERNMENT_ACCOUNTS, Self::UsGovernment)]
            .into_iter()
            .find_map(|(suffix, cloud)| host.ends_with(suffix).then_some(cloud))
    }

    pub(crate) fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::Custom { authority_host } => parse_authority(authority_host).map(drop),
            _ => Ok(()),
        }
    }

    /// The cloud for the identity library. `None` leaves the choice to the library, which reads `AZURE_AUTHORITY_HOST`.
    pub(super) fn configuration(&self, endpoint: &Url) -> Option<Arc<CloudConfiguration>> {
        let configuration = match self {
            Self::FromEndpoint => match Self::of_account(endpoint) {
                Some(cloud @ (Self::China | Self::UsGovernment)) => return cloud.configuration(endpoint),
                _ => return None,
            },
            Self::Public => CloudConfiguration::AzurePublic,
            Self::China => CloudConfiguration::AzureChina,
            Self::UsGovernment => CloudConfiguration::AzureGovernment,
            Self::Custom { authority_host } => {
                let mut custom = CustomConfiguration::default();
                custom.authority_host.clone_from(authority_host);
                custom.into()
            }
        };
        Some(Arc::new(configuration))
    }
}

fn parse_authority(authority_host: &str) -> Result<Url, ConfigError> {
    match Url::parse(authority_host) {
        Ok(url) if url.scheme() == "https" && url.host_str().is_some() => Ok(url),
        _ => Err(ConfigError::invalid(AUTHORITY_SETTING, "must be a URL like https://login.microsoftonline.com/")),
    }
}

/// The scope that replaces the SDK's: the configured one, or that of the account outside the public cloud.
pub(super) fn scope_for(endpoint: &Url, given: Option<&str>) -> Option<String> {
    let own_scope = || {
        // The name of an emulator, or a private name, says nothing about the scope. Then the SDK's scope is more
        // likely.
        let host = endpoint.host_str()?;
        let outside_public = host.contains(".documents.") && !host.ends_with(PUBLIC_ACCOUNTS);
        outside_public.then(|| format!("https://{host}/.default"))
    };
    given.map(str::to_owned).or_else(own_scope)
}

/// A credential that asks for `scope` instead of the SDK's scope.
#[derive(Debug)]
pub(super) struct Rescoped {
    pub(super) inner: Arc<dyn TokenCredential>,
    pub(super) scope: String,
}

#[async_trait]
impl TokenCredential for Rescoped {
    async fn get_token(
        &self,
        _scopes: &[&str],
        options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        self.inner.get_token(&[&self.scope], options).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap()
    }

    #[test]
    fn the_host_name_of_the_account_determines_the_cloud() {
        let of = |text| Cloud::of_account(&url(text));
        assert_eq!(of("https://a.documents.azure.com/"), Some(Cloud::Public));
        assert_eq!(of("https://a.documents.azure.cn/"), Some(Cloud::China));
        assert_eq!(of("https://a.documents.azure.us/"), Some(Cloud::UsGovernment));
        assert_eq!(of("https://localhost:8081/"), None);
        assert_eq!(of("https://documents.azure.cn.evil.example/"), None);
    }

    #[test]
    fn known_authority_hosts_are_clouds_and_others_are_custom() {
        let of = |text| Cloud::from_authority_host(text).unwrap();
        assert_eq!(of("https://login.microsoftonline.com/"), Cloud::Public);
        assert_eq!(of("https://login.chinacloudapi.cn"), Cloud::China);
        assert_eq!(of("https://login.microsoftonline.us/"), Cloud::UsGovernment);
        assert_eq!(
            of("https://login.example.org"),
            Cloud::Custom { authority_host: "https://login.example.org".into() }
        );
        for bad in ["login.microsoftonline.com", "http://login.microsoftonline.com", "https://"] {
            let error = Cloud::from_authority_host(bad).unwrap_err().to_string();
            assert!(error.contains("AZURE_AUTHORITY_HOST"), "{error}");
        }
    }

    #[test]
    fn the_identity_library_gets_the_cloud_only_if_it_is_known() {
        let public = url("https://a.documents.azure.com/");
        let china = url("https://a.documents.azure.cn/");
        let configuration_of =
            |cloud: Cloud, endpoint| cloud.configuration(endpoint).map(|configuration| (*configuration).clone());

        assert_eq!(configuration_of(Cloud::FromEndpoint, &public), None);
        assert_eq!(configuration_of(Cloud::FromEndpoint, &china), Some(CloudConfiguration::AzureChina));
        assert_eq!(configuration_of(Cloud::Public, &china), Some(CloudConfiguration::AzurePublic));
        assert_eq!(configuration_of(Cloud::UsGovernment, &public), Some(CloudConfiguration::AzureGovernment));
        let custom = Cloud::Custom { authority_host: "https://login.example.org".into() };
        let Some(CloudConfiguration::Custom(custom)) = configuration_of(custom, &public) else {
            panic!("expected a custom cloud");
        };
        assert_eq!(custom.authority_host, "https://login.example.org");
    }

    #[test]
    fn outside_the_public_cloud_the_scope_is_that_of_the_account() {
        let scope = |text| scope_for(&url(text), None);
        assert_eq!(scope("https://a.documents.azure.com/"), None);
        assert_eq!(scope("https://localhost:8081/"), None);
        assert_eq!(scope("https://a.documents.azure.cn/").as_deref(), Some("https://a.documents.azure.cn/.default"));
        assert_eq!(
            scope_for(&url("https://a.documents.azure.us/"), Some("https://x/.default")).as_deref(),
            Some("https://x/.default")
        );
    }
}
