//! Kinds of credentials, their validation, and the account reference of the SDK.

use std::sync::Mutex;

use async_trait::async_trait;
use azure_core::{
    credentials::{AccessToken, TokenRequestOptions},
    http::Url,
    time::OffsetDateTime,
};
use azure_data_cosmos::AccountReference;

use super::{account::rescoped, *};
use crate::model::{Clock, Randomness};

const ENDPOINT: &str = "https://acc.documents.azure.com/";

#[derive(Debug, Default)]
struct Recording {
    /// `Debug` of this type shows the secret. `Debug` of [`Credential`] must not.
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

async fn requested_scope(endpoint: &str, given: Option<&str>) -> String {
    let recording = Arc::new(Recording::default());
    let endpoint = Url::parse(endpoint).unwrap();
    let credential = rescoped(recording.clone(), &endpoint, given);
    credential.get_token(&["https://cosmos.azure.com/.default"], None).await.unwrap();
    let requested = recording.scopes.lock().unwrap().join(" ");
    requested
}

#[test]
fn the_kind_has_the_credential_and_its_ids() {
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
fn a_connection_string_is_a_key_and_has_an_endpoint() {
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
        Credential::connection_string("AccountEndpoint=https://a.documents.azure.com/;AccountKey=c2VjcmV0").unwrap(),
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
fn an_error_of_the_identity_library_names_the_credential_and_no_secret() {
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
async fn tokens_have_the_scope_of_the_cloud() {
    let sdk_scope = "https://cosmos.azure.com/.default";
    assert_eq!(requested_scope(ENDPOINT, None).await, sdk_scope);
    assert_eq!(
        requested_scope("https://acc.documents.azure.us:443/", None).await,
        "https://acc.documents.azure.us/.default"
    );
    assert_eq!(requested_scope(ENDPOINT, Some("https://given/.default")).await, "https://given/.default");
}
