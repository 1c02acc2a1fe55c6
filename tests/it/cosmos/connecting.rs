//! Signing in through the public API, to an account on loopback that checks credentials as Cosmos DB does.

#![cfg(feature = "key_auth")]

use crate::fixture::*;
use async_trait::async_trait;
use azure_core::{
    credentials::{AccessToken, TokenCredential, TokenRequestOptions},
    time::OffsetDateTime,
};
use azure_data_cosmos::models::IndexingPolicy;
use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos::{
    container_properties, Cloud, ConfigError, ConnectError, CosmosDBProvider, CosmosDBProviderConfig, Credential,
    OperationKind, StoreError, WorkloadIdentity,
};
use duroxide_cosmos_emulator::{LocalAccount, RequestKind, Served};
use std::{
    net::Ipv4Addr,
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    process::Command,
};

/// A valid Base64 key of the right length that is not the account's key.
const WRONG_KEY: &str = "d3JvbmcgZDNKdmJtYyB3cm9uZyBkM0p2Ym1jIHdyb25nIGQzSnZibWMgd3JvbmcgZDNKdmJtYyB3cm9uZyA0Mg==";

const TOKEN: &str = "eyJhbGciOi.a-token-of-entra-id.c2lnbmF0dXJl";

/// An account with a container that an operator has made.
async fn prepared_account() -> LocalAccount {
    let account = LocalAccount::new();
    let client = account.client_named("operator").await;
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    CosmosDBProvider::new_with_client(&client, config).await.unwrap();
    account
}

fn config(served: &Served, credential: Credential) -> CosmosDBProviderConfig {
    CosmosDBProviderConfig::default()
        .with_endpoint(served.endpoint())
        .with_credential(credential)
        .with_operation_timeout(Duration::from_secs(3))
}

fn has_container(account: &LocalAccount, database: &str) -> bool {
    account.partition_count(database, "duroxide") > 0
}

/// The text contains no piece of the secret that would reveal it.
#[track_caller]
fn assert_hides(text: &str, secret: &str) {
    for start in 0..=secret.len() - 8 {
        let piece = &secret[start..start + 8];
        assert!(!text.contains(piece), "{piece} of the secret is in: {text}");
    }
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// A credential of the application: it returns a token, or a reason why it has none.
#[derive(Debug)]
struct ApplicationCredential {
    token: Result<&'static str, &'static str>,
    scopes: Mutex<Vec<String>>,
}

impl ApplicationCredential {
    fn new(token: Result<&'static str, &'static str>) -> Arc<Self> {
        Arc::new(Self { token, scopes: Mutex::default() })
    }
}

#[async_trait]
impl TokenCredential for ApplicationCredential {
    async fn get_token(
        &self,
        scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        self.scopes.lock().unwrap().extend(scopes.iter().map(|scope| (*scope).to_owned()));
        let expires = OffsetDateTime::now_utc() + Duration::from_secs(3_600);
        let refusal = |reason| azure_core::Error::with_message(azure_core::error::ErrorKind::Credential, reason);
        self.token.map(|token| AccessToken::new(token, expires)).map_err(refusal)
    }
}

fn token(credential: &Arc<ApplicationCredential>) -> Credential {
    let credential: Arc<dyn TokenCredential> = credential.clone();
    Credential::from(credential)
}

#[tokio::test]
async fn the_account_key_opens_the_account_and_creates_the_missing_container() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let provider = CosmosDBProvider::new(served.endpoint(), account.key().to_owned(), "orders").await.unwrap();
    assert!(has_container(&account, "orders"));
    assert_hides(&format!("{provider:?}"), account.key());
}

#[tokio::test]
async fn a_second_provider_opens_the_container_that_the_first_one_created() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let config = config(&served, Credential::account_key(account.key().to_owned()));
    let (one, other) =
        tokio::join!(CosmosDBProvider::new_with_config(config.clone()), CosmosDBProvider::new_with_config(config));
    one.unwrap();
    other.unwrap();
}

#[tokio::test]
async fn a_wrong_key_is_refused_with_its_name_and_without_its_text() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let refused = CosmosDBProvider::new(served.endpoint(), WRONG_KEY.to_owned(), "orders").await;
    let error = refused.unwrap_err();
    assert!(matches!(&error, ConnectError::Store(StoreError::Denied { .. })), "{error:?}");
    let text = format!("{error} {error:?}");
    assert_says(&text, &["account key", "401", "Check that the key belongs to", "clock"]);
    assert_hides(&text, WRONG_KEY);
    assert_hides(&text, account.key());
    assert!(!has_container(&account, "orders"));
}

#[tokio::test]
async fn an_invalid_key_is_refused_before_any_request() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let not_base64 = "!%&/()=?-!%&/()=?-!%&/()=?-";
    let error = CosmosDBProvider::new(served.endpoint(), not_base64.to_owned(), "orders").await.unwrap_err();
    assert!(matches!(&error, ConnectError::Config(ConfigError::Invalid { .. })), "{error:?}");
    assert_hides(&format!("{error} {error:?}"), not_base64);
    assert_eq!(account.stats().total().requests, 0);
}

#[tokio::test]
async fn a_connection_string_brings_its_endpoint_and_key() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let text = format!("AccountEndpoint={};AccountKey={};", served.endpoint(), account.key());
    let config = CosmosDBProviderConfig::default().with_credential(Credential::connection_string(&text).unwrap());
    assert_hides(&format!("{config:?}"), account.key());
    CosmosDBProvider::new_with_config(config).await.unwrap();
    assert!(has_container(&account, "duroxide"));
}

#[tokio::test]
async fn a_connection_string_with_a_wrong_key_is_named_without_its_text() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let text = format!("AccountEndpoint={};AccountKey={WRONG_KEY};", served.endpoint());
    let config = CosmosDBProviderConfig::default().with_credential(Credential::connection_string(&text).unwrap());
    let error = CosmosDBProvider::new_with_config(config).await.unwrap_err();
    let text = format!("{error} {error:?}");
    assert_says(&text, &["connection string", "401"]);
    assert_hides(&text, WRONG_KEY);
}

#[tokio::test]
async fn any_token_credential_opens_an_existing_container() {
    let account = prepared_account().await;
    let served = serve(&account).await;
    account.accept_token(TOKEN);
    let credential = ApplicationCredential::new(Ok(TOKEN));
    let provider = CosmosDBProvider::new_with_config(config(&served, token(&credential))).await.unwrap();
    assert_eq!(served.tokens_seen(), [TOKEN]);
    assert_hides(&format!("{provider:?}"), TOKEN);
}

#[tokio::test]
async fn tokens_are_asked_for_with_the_scope_that_was_set() {
    let account = prepared_account().await;
    let served = serve(&account).await;
    account.accept_any_token();
    let credential = ApplicationCredential::new(Ok(TOKEN));
    let config = config(&served, token(&credential)).with_token_scope("https://my.scope/.default");
    CosmosDBProvider::new_with_config(config).await.unwrap();
    let scopes = credential.scopes.lock().unwrap().clone();
    assert!(!scopes.is_empty() && scopes.iter().all(|scope| scope == "https://my.scope/.default"), "{scopes:?}");
}

#[tokio::test]
async fn a_token_without_a_role_is_refused_and_the_error_names_the_role() {
    let account = prepared_account().await;
    account.know_token(TOKEN);
    let served = serve(&account).await;
    let error = CosmosDBProvider::new_with_config(config(&served, token(&ApplicationCredential::new(Ok(TOKEN)))))
        .await
        .unwrap_err();
    assert!(matches!(&error, ConnectError::Store(StoreError::Denied { .. })), "{error:?}");
    let text = format!("{error} {error:?}");
    assert_says(
        &text,
        &[
            "token credential of the application",
            "Cosmos DB Built-in Data Contributor",
            "az cosmosdb sql role assignment",
        ],
    );
    assert_hides(&text, TOKEN);
}

#[tokio::test]
async fn a_provider_with_a_token_does_not_create_a_missing_container() {
    let account = LocalAccount::new();
    account.accept_any_token();
    let served = serve(&account).await;
    let config = config(&served, token(&ApplicationCredential::new(Ok(TOKEN))));
    let error = CosmosDBProvider::new_with_config(config.clone()).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Store(StoreError::Missing { .. })), "{error:?}");
    assert_says(&error.to_string(), &["az cosmosdb sql container create", "--partition-key-path /instanceId"]);

    let error = CosmosDBProvider::new_with_config(config.with_create_if_missing(true)).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Store(StoreError::Denied { .. })), "{error:?}");
    assert_says(&error.to_string(), &["Entra ID can create neither", "az cosmosdb sql container create"]);
}

#[tokio::test]
async fn a_credential_that_gives_no_token_is_named_with_its_reason() {
    let account = prepared_account().await;
    let served = serve(&account).await;
    let credential = ApplicationCredential::new(Err("the vault is sealed"));
    let error = CosmosDBProvider::new_with_config(config(&served, token(&credential))).await.unwrap_err();
    let text = error.to_string();
    assert_says(&text, &["token credential of the application", "the vault is sealed"]);
    assert_eq!(account.stats_of("duroxide-cosmos").total().requests, 0);
}

#[tokio::test]
async fn a_client_of_the_application_is_used_as_it_is() {
    let account = LocalAccount::new();
    let client = account.client_named("the-callers").await;
    let config = CosmosDBProviderConfig::default().with_database("orders");
    let error = CosmosDBProvider::new_with_client(&client, config.clone()).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Store(StoreError::Missing { .. })), "{error:?}");

    let provider = CosmosDBProvider::new_with_client(&client, config.with_create_if_missing(true)).await.unwrap();
    assert!(has_container(&account, "orders"));
    let statistics = provider.request_statistics();
    assert_eq!(statistics.iter().count(), OperationKind::ALL.len());
    assert!(statistics.requests() <= account.stats_of("the-callers").items().requests);
}

#[tokio::test]
async fn an_invalid_configuration_is_refused_even_with_a_client() {
    let account = LocalAccount::new();
    let client = account.client_named("the-callers").await;
    let asked = account.stats().total().requests;
    let config = CosmosDBProviderConfig::default()
        .with_create_if_missing(true)
        .with_database("a/b")
        .with_wakeup_interval(Duration::ZERO)
        .with_operation_timeout(Duration::ZERO);
    let error = CosmosDBProvider::new_with_client(&client, config).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Config(ConfigError::Several(_))), "{error:?}");
    assert_says(&error.to_string(), &["COSMOS_DATABASE", "wakeup_interval", "operation_timeout"]);
    assert_eq!(account.stats().total().requests, asked, "nothing was asked of the account");
}

#[tokio::test]
async fn one_token_serves_all_requests_until_it_expires() {
    let account = prepared_account().await;
    let served = serve(&account).await;
    account.accept_token(TOKEN);
    let credential = ApplicationCredential::new(Ok(TOKEN));
    let provider = CosmosDBProvider::new_with_config(config(&served, token(&credential))).await.unwrap();
    for instance in ["one", "two", "three"] {
        assert!(provider.read(instance).await.unwrap().is_empty());
    }
    assert!(account.stats_of("duroxide-cosmos").total().requests > 3);
    assert_eq!(credential.scopes.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn items_are_sent_to_an_emulator_as_text() {
    let account = LocalAccount::new();
    let text = Arc::new(Mutex::new(Vec::new()));
    let seen = text.clone();
    account.wire().observe(move |request, _| {
        if request.kind == RequestKind::Create {
            seen.lock().unwrap().push(serde_json::from_slice::<serde_json::Value>(request.body).is_ok());
        }
    });
    let served = serve(&account).await;
    let provider = CosmosDBProvider::new(served.endpoint(), account.key().to_owned(), "orders").await.unwrap();
    let message = WorkItem::ExternalRaised { instance: "i".into(), name: "paid".into(), data: "{}".into() };
    provider.enqueue_for_orchestrator(message, None).await.unwrap();
    assert_eq!(*text.lock().unwrap(), [true, true], "the format and the message");
}

#[tokio::test]
async fn a_container_of_duroxide_cdb_is_refused_and_left_unchanged() {
    let account = LocalAccount::new();
    let client = account.client_named("operator").await;
    client.create_database("duroxide", None).await.unwrap();
    let policy = IndexingPolicy::default().with_included_path("/type/?").with_included_path("/dispatchSlot/?");
    let properties = container_properties("duroxide").with_indexing_policy(policy.with_excluded_path("/*"));
    client.database_client("duroxide").create_container(properties, None).await.unwrap();

    let error = CosmosDBProvider::new_with_client(&client, CosmosDBProviderConfig::default()).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Store(StoreError::Unfit { .. })), "{error:?}");
    assert_says(&error.to_string(), &["duroxide-cdb created it", "COSMOS_CONTAINER"]);
    assert!(!error.to_string().contains("az cosmosdb"), "{error}");
}

#[tokio::test]
async fn plain_http_is_refused_for_other_machines() {
    for endpoint in ["http://myaccount.documents.azure.com/", "http://10.0.0.4:8081/", "http://localhost.evil.example/"]
    {
        let error = CosmosDBProvider::new(endpoint, WRONG_KEY.to_owned(), "orders").await.unwrap_err();
        assert!(matches!(&error, ConnectError::Config(_)), "{error:?}");
        assert_says(&error.to_string(), &["COSMOS_ENDPOINT", "must use https"]);
        assert_hides(&format!("{error} {error:?}"), WRONG_KEY);
    }
}

#[tokio::test]
async fn a_missing_credential_is_reported_at_once() {
    let error = CosmosDBProvider::new_with_config(CosmosDBProviderConfig::default()).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Config(ConfigError::Several(all)) if all.len() == 2), "{error:?}");
    assert_says(&error.to_string(), &["with_endpoint", "with_credential"]);
}

/// An https authority, as Entra ID's must be, without a server behind it.
async fn silent_authority() -> Cloud {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let authority_host = format!("https://{}/", listener.local_addr().unwrap());
    Cloud::Custom { authority_host }
}

#[tokio::test]
async fn entra_id_out_of_reach_names_the_credential_and_shows_no_secret() {
    let account = prepared_account().await;
    let served = serve(&account).await;
    let token_file = std::env::temp_dir().join(format!("duroxide-cosmos-connect-{}", std::process::id()));
    std::fs::write(&token_file, TOKEN).unwrap();
    let workload =
        WorkloadIdentity::default().with_client_id("client-1").with_tenant_id("tenant-1").with_token_file(&token_file);
    for (credential, name) in [
        (Credential::client_secret("tenant-1", "client-1", WRONG_KEY.to_owned()), "client secret (tenant tenant-1"),
        (Credential::WorkloadIdentity(workload), "workload identity (client id client-1)"),
    ] {
        let config = config(&served, credential)
            .with_cloud(silent_authority().await)
            .with_operation_timeout(Duration::from_secs(1))
            .with_request_timeout(Duration::from_secs(1));
        let connecting = tokio::time::timeout(Duration::from_secs(20), CosmosDBProvider::new_with_config(config));
        let error = connecting.await.expect("the operation timeout is kept").unwrap_err();
        let text = format!("{error} {error:?}");
        assert_says(&text, &[name]);
        assert_hides(&text, WRONG_KEY);
        assert_hides(&text, TOKEN);
    }
    std::fs::remove_file(token_file).unwrap();
    assert!(served.tokens_seen().is_empty());
}

/// Tests in a process of their own. The identity library reads environment variables, which cannot be set in this
/// process.
mod child {
    use super::*;

    const CONNECT: &str = "cosmos::connecting::child::connect_from_the_environment";

    /// Connects with the settings of the environment, and prints the result.
    #[tokio::test]
    #[ignore = "run by the tests below, in a process with an environment of its own"]
    async fn connect_from_the_environment() {
        if std::env::var_os("COSMOS_ENDPOINT").is_none() {
            return;
        }
        match CosmosDBProvider::from_env().await {
            Ok(provider) => println!("connected: {provider:?}"),
            Err(error) => println!("refused: {error} {error:?}"),
        }
    }

    /// Runs [`connect_from_the_environment`] with these variables and without the others that it reads.
    pub(super) async fn connect(variables: &[(&str, &str)]) -> String {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", CONNECT]);
        let read = |name: &str| ["COSMOS_", "AZURE_", "IDENTITY_", "IMDS_", "MSI_"].iter().any(|p| name.starts_with(p));
        for (name, _) in std::env::vars().filter(|(name, _)| read(name)) {
            command.env_remove(name);
        }
        command.envs(variables.iter().copied()).stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(Duration::from_secs(60), command.output()).await;
        let output = output.expect("the child ends").unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        text
    }
}

#[tokio::test]
async fn the_environment_can_name_a_key_or_a_connection_string() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let endpoint = served.endpoint();
    let by_key = [("COSMOS_ENDPOINT", endpoint.as_str()), ("COSMOS_KEY", account.key()), ("COSMOS_DATABASE", "one")];
    let text = child::connect(&by_key).await;
    assert_says(&text, &["connected:"]);
    assert_hides(&text, account.key());
    assert!(has_container(&account, "one"));

    let string = format!("AccountEndpoint={endpoint};AccountKey={};", account.key());
    let by_string = [
        ("COSMOS_ENDPOINT", endpoint.as_str()),
        ("COSMOS_CONNECTION_STRING", string.as_str()),
        ("COSMOS_DATABASE", "two"),
    ];
    let text = child::connect(&by_string).await;
    assert_says(&text, &["connected:"]);
    assert_hides(&text, account.key());
    assert!(has_container(&account, "two"));
}

/// The identity endpoint that App Service offers to its applications.
struct IdentityEndpoint {
    url: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl IdentityEndpoint {
    /// Answers every request with this status and body.
    async fn serve(status: &'static str, body: String) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let url = format!("http://{}/msi/token", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = asked.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else { break };
                    head.push(byte);
                }
                log.lock().unwrap().push(String::from_utf8(head).unwrap());
                let length = body.len();
                let answer = format!(
                    "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
                     connection: close\r\n\r\n{body}"
                );
                stream.write_all(answer.as_bytes()).await.unwrap();
            }
        });
        Self { url, asked }
    }

    async fn giving(token: &str) -> Self {
        let expires = OffsetDateTime::now_utc().unix_timestamp() + 3_600;
        let body = format!(
            r#"{{"access_token":"{token}","expires_on":"{expires}","resource":"https://cosmos.azure.com","token_type":"Bearer"}}"#
        );
        Self::serve("200 OK", body).await
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

#[tokio::test]
async fn a_managed_identity_signs_in_with_the_token_of_its_host() {
    let account = prepared_account().await;
    account.accept_token(TOKEN);
    for client_id in [None, Some("client-1")] {
        let served = serve(&account).await;
        let endpoint = served.endpoint();
        let identity = IdentityEndpoint::giving(TOKEN).await;
        let mut variables = vec![
            ("COSMOS_ENDPOINT", endpoint.as_str()),
            ("IDENTITY_ENDPOINT", identity.url.as_str()),
            ("IDENTITY_HEADER", "the-hosts-secret"),
        ];
        variables.extend(client_id.map(|id| ("AZURE_CLIENT_ID", id)));
        let text = child::connect(&variables).await;
        assert_says(&text, &["connected:", "managed identity"]);
        assert_hides(&text, TOKEN);
        assert_eq!(served.tokens_seen(), [TOKEN]);

        let asked = identity.asked();
        assert_eq!(asked.len(), 1, "the token is kept: {asked:?}");
        let head = asked[0].to_ascii_lowercase();
        assert_says(&head, &["/msi/token?", "resource=https%3a%2f%2f", "x-identity-header: the-hosts-secret"]);
        assert_eq!(head.contains("client_id=client-1"), client_id.is_some(), "{head}");
    }
}

#[tokio::test]
async fn a_managed_identity_that_the_host_does_not_have_is_named() {
    let account = prepared_account().await;
    let served = serve(&account).await;
    let endpoint = served.endpoint();
    let identity = IdentityEndpoint::serve("400 Bad Request", r#"{"error":"no such identity"}"#.to_owned()).await;
    let text = child::connect(&[
        ("COSMOS_ENDPOINT", &endpoint),
        ("COSMOS_CREDENTIAL", "managed_identity"),
        ("AZURE_CLIENT_ID", "client-1"),
        ("IDENTITY_ENDPOINT", &identity.url),
        ("IDENTITY_HEADER", "the-hosts-secret"),
    ])
    .await;
    assert_says(&text, &["refused:", "managed identity (user-assigned, client id client-1)"]);
    assert_says(&text, &["The requested identity has not been assigned to this resource"]);
    assert_hides(&text, "the-hosts-secret");
    assert!(served.tokens_seen().is_empty());
}

#[tokio::test]
async fn a_machine_without_developer_tools_is_told_to_sign_in() {
    let account = prepared_account().await;
    let served = serve(&account).await;
    let endpoint = served.endpoint();
    let nowhere = std::env::temp_dir().join("duroxide-cosmos-no-such-folder");
    let text = child::connect(&[
        ("COSMOS_ENDPOINT", &endpoint),
        ("COSMOS_CREDENTIAL", "developer_tools"),
        ("PATH", nowhere.to_str().unwrap()),
    ])
    .await;
    assert_says(&text, &["refused:", "developer tools (az or azd)", "az login"]);
    assert!(served.tokens_seen().is_empty());
}

/// A stand-in for the Azure CLI, which counts how often a program starts it to get a token.
#[cfg(unix)]
fn fake_az(folder: &std::path::Path, token: &str) {
    use std::os::unix::fs::PermissionsExt;
    let expires = OffsetDateTime::now_utc().unix_timestamp() + 3_600;
    let answer = format!(
        r#"{{"accessToken":"{token}","expires_on":{expires},"expiresOn":"2030-01-01 00:00:00.000000","tokenType":"Bearer"}}"#
    );
    let script = format!("#!/bin/sh\necho started >> '{}/log'\ncat <<'END'\n{answer}\nEND\n", folder.display());
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("az"), script).unwrap();
    std::fs::set_permissions(folder.join("az"), std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[cfg(unix)]
#[tokio::test]
async fn the_developer_tools_are_started_once() {
    let account = prepared_account().await;
    account.accept_token(TOKEN);
    let served = serve(&account).await;
    let endpoint = served.endpoint();
    let folder = std::env::temp_dir().join(format!("duroxide-cosmos-az-{}", std::process::id()));
    fake_az(&folder, TOKEN);
    let path = format!("{}:/usr/bin:/bin", folder.display());
    let variables = [("COSMOS_ENDPOINT", endpoint.as_str()), ("COSMOS_CREDENTIAL", "developer_tools"), ("PATH", &path)];
    let text = child::connect(&variables).await;
    assert_says(&text, &["connected:", "developer tools"]);
    assert_eq!(served.tokens_seen(), [TOKEN]);
    let log = std::fs::read_to_string(folder.join("log")).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
    assert_eq!(log.lines().count(), 1, "az was started {} times", log.lines().count());
}
