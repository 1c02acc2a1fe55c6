//! A container carries the format of its documents: a provider writes it, knows it, or refuses to open the container.

#![cfg(feature = "key_auth")]

use async_trait::async_trait;
use azure_core::{
    credentials::{AccessToken, TokenCredential, TokenRequestOptions},
    time::{Duration, OffsetDateTime},
};
use duroxide::providers::Provider;
use duroxide_cosmos::{
    container_properties, ConnectError, CosmosDBProvider, CosmosDBProviderConfig, Credential, StoreError,
};
use duroxide_cosmos_emulator::{Gate, LocalAccount, RequestKind, WireAction, WireRule};
use serde_json::{json, Value};
use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex},
};

const NAME: &str = "duroxide";

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// An account with an empty container, as an operator makes it.
async fn prepared() -> LocalAccount {
    let account = LocalAccount::new();
    let client = account.client_named("operator").await;
    client.create_database(NAME, None).await.unwrap();
    client.database_client(NAME).create_container(container_properties(NAME), None).await.unwrap();
    account
}

/// An account whose container has a format document with these fields.
async fn with_format(fields: &Value) -> LocalAccount {
    let account = prepared().await;
    let mut document = json!({ "id": "format", "instanceId": "$d:format", "type": "format" });
    document.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let client = account.client_named("operator").await;
    let container = client.database_client(NAME).container_client(NAME, None).await.unwrap();
    container.create_item("$d:format", "format", &document, None).await.unwrap();
    account
}

async fn open(account: &LocalAccount, client: &str) -> Result<CosmosDBProvider, ConnectError> {
    let client = account.client_named(client).await;
    CosmosDBProvider::new_with_client(&client, CosmosDBProviderConfig::default()).await
}

/// The documents of the container, without system fields.
fn documents(account: &LocalAccount) -> Vec<Value> {
    let own = |document: Value| -> Value {
        let fields = document.as_object().unwrap().iter().filter(|(name, _)| !name.starts_with('_'));
        fields.map(|(name, value)| (name.clone(), value.clone())).collect()
    };
    account.documents(NAME, NAME).into_iter().map(own).collect()
}

fn current() -> Value {
    json!({ "id": "format", "instanceId": "$d:format", "type": "format", "format": 1, "writtenBy": VERSION })
}

/// The reason why a container with this format document is refused. No document of it changes.
async fn refusal(fields: &Value) -> String {
    let account = with_format(fields).await;
    let before = documents(&account);
    let error = open(&account, "opener").await.unwrap_err();
    assert!(matches!(&error, ConnectError::Store(StoreError::Unfit { .. })), "{error:?}");
    assert_eq!(documents(&account), before);
    let text = error.to_string();
    assert!(!duroxide::providers::ProviderError::from(error).is_retryable());
    text
}

#[tokio::test]
async fn a_container_without_a_format_gets_the_current_one() {
    let account = prepared().await;
    open(&account, "opener").await.unwrap();
    assert_eq!(documents(&account), [current()]);
}

#[tokio::test]
async fn a_new_container_gets_the_current_format() {
    let account = LocalAccount::new();
    let client = account.client_named("opener").await;
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    CosmosDBProvider::new_with_client(&client, config).await.unwrap();
    assert_eq!(documents(&account), [current()]);
}

#[tokio::test]
async fn a_known_format_costs_one_point_read_and_stays_unchanged() {
    let account = with_format(&json!({ "format": 1, "writtenBy": "0.0.9", "note": "of a later version" })).await;
    let before = documents(&account);
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = asked.clone();
    account.wire().observe(move |request, _| {
        if request.document_id == Some("format") {
            seen.lock().unwrap().push(request.kind);
        }
    });
    let provider = open(&account, "opener").await.unwrap();
    assert_eq!(*asked.lock().unwrap(), [RequestKind::Read]);
    assert_eq!(documents(&account), before);
    assert_eq!(provider.request_statistics().requests(), 0, "what opening takes is not counted");
}

#[tokio::test]
async fn another_format_is_refused_with_instructions() {
    for other in [2, 3] {
        assert_eq!(
            refusal(&json!({ "format": other, "writtenBy": "3.1.4" })).await,
            format!(
                "the container duroxide does not fit: its documents have format {other} (first written by version 3.1.4), \
                 and duroxide-cosmos {VERSION} supports only format 1. Use a version of duroxide-cosmos that supports format \
                 {other}, or name another container: COSMOS_CONTAINER, or with_container"
            )
        );
    }
    let text = refusal(&json!({ "format": 4_294_967_297_u64 })).await;
    assert!(text.contains("its documents have format 4294967297, and duroxide-cosmos"), "{text}");
}

#[tokio::test]
async fn an_invalid_format_document_is_refused_with_its_location() {
    for garbage in [json!(0), json!(-1), json!(1.5), json!("1"), json!(null), json!([1]), json!({ "format": 1 })] {
        assert_eq!(
            refusal(&json!({ "format": garbage })).await,
            format!(
                "the container duroxide does not fit: its document \"format\" in partition \"$d:format\" has no valid format \
                 number, and duroxide-cosmos {VERSION} supports only format 1. Find the application that wrote the document, or name another \
                 container: COSMOS_CONTAINER, or with_container"
            ),
            "{garbage}"
        );
    }
    assert!(refusal(&json!({})).await.contains("has no valid format number"));
}

#[tokio::test]
async fn two_providers_that_open_an_empty_container_at_once_both_succeed() {
    let account = prepared().await;
    let gate = Gate::new();
    account.wire().add(WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Create));
    let race = async {
        gate.reached_by(2).await;
        gate.open();
    };
    let (one, other, ()) = tokio::join!(open(&account, "one"), open(&account, "other"), race);
    one.unwrap();
    other.unwrap();
    assert_eq!(documents(&account), [current()]);
}

#[tokio::test]
async fn reading_and_writing_the_format_is_retried_and_a_lost_answer_is_recognised() {
    let refuse = |status| WireAction::Refuse { status, substatus: None, retry_after: None };
    for action in [refuse(429), refuse(503), WireAction::FailConnection, WireAction::LoseAnswer] {
        let account = prepared().await;
        let rules = [RequestKind::Read, RequestKind::Create].map(|kind| {
            let about_it = WireRule::new(action.clone()).on(kind);
            account.wire().add(about_it.matching(|request| request.document_id == Some("format")).times(1))
        });
        open(&account, "opener").await.unwrap();
        assert_eq!(rules.map(|rule| rule.hits()), [1, 1], "{action:?}");
        assert_eq!(documents(&account), [current()]);
    }
}

#[derive(Debug)]
struct Token;

#[async_trait]
impl TokenCredential for Token {
    async fn get_token(
        &self,
        _scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        Ok(AccessToken::new("token", OffsetDateTime::now_utc() + Duration::HOUR))
    }
}

#[tokio::test]
async fn an_identity_that_may_only_write_documents_writes_the_format() {
    let account = prepared().await;
    account.accept_token("token");
    let served = account.serve((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
    let credential: Arc<dyn TokenCredential> = Arc::new(Token);
    let config = CosmosDBProviderConfig::default()
        .with_endpoint(served.endpoint())
        .with_credential(Credential::from(credential));

    // An identity that may only read is told which role it needs, and not how to make a container that exists.
    let refuse = WireAction::Refuse { status: 403, substatus: Some(5_300), retry_after: None };
    let reader = account.wire().add(WireRule::new(refuse).on(RequestKind::Create));
    for create in [false, true] {
        let config = config.clone().with_create_if_missing(create);
        let text = CosmosDBProvider::new_with_config(config).await.unwrap_err().to_string();
        assert!(text.contains("Cosmos DB Built-in Data Contributor"), "{text}");
        assert!(!text.contains("container create"), "{text}");
    }
    reader.remove();

    let provider = CosmosDBProvider::new_with_config(config).await.unwrap();
    assert_eq!(documents(&account), [current()]);
    assert!(provider.read("nobody").await.unwrap().is_empty());
}

#[tokio::test]
async fn no_answer_of_the_provider_shows_the_format() {
    let account = prepared().await;
    let provider = open(&account, "opener").await.unwrap();
    let admin = provider.as_management_capability().unwrap();
    assert!(admin.list_instances().await.unwrap().is_empty());
    assert_eq!(admin.get_system_metrics().await.unwrap().total_instances, 0);
    let depths = admin.get_queue_depths().await.unwrap();
    assert_eq!((depths.orchestrator_queue, depths.worker_queue), (0, 0));
    // An instance of the same name is in another partition.
    assert!(provider.read("$d:format").await.unwrap().is_empty());
    assert!(admin.delete_instance("$d:format", true).await.is_err());
    assert_eq!(documents(&account), [current()]);
}
