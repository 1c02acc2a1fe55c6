//! Connecting, and opening the container: a missing one is created, an existing one is checked.

use super::fixture::{account, client, config, done, in_time, note, refuse, Note, StoreFixture, CLIENT};
use crate::{
    config::{CosmosDBProviderConfig, Throughput},
    cosmos::{
        bootstrap::{self, policy_json},
        connect::{self, ConnectError},
        indexing, Freshness, Store, StoreError,
    },
};
use azure_data_cosmos::{
    models::{ContainerProperties, IndexingPolicy, PartitionKeyDefinition, PartitionKeyVersion, TimeToLive},
    ContainerClient, CosmosClient,
};
use duroxide_cosmos_emulator::{Gate, LocalAccount, RequestKind, Served, WireAction, WireRule, WireRuleHandle};
use std::{net::Ipv4Addr, time::Duration};

const NAME: &str = "duroxide";

async fn open(account: &LocalAccount, config: &CosmosDBProviderConfig) -> Result<Store, StoreError> {
    bootstrap::open(&client(account, Vec::new()).await, config, None).await
}

/// An account in which the container exists, with these properties.
async fn account_with(properties: ContainerProperties) -> LocalAccount {
    let account = account();
    let client = account.client_named("operator").await;
    client.create_database(NAME, None).await.unwrap();
    client.database_client(NAME).create_container(properties, None).await.unwrap();
    account
}

async fn container(client: &CosmosClient) -> ContainerClient {
    client.database_client(NAME).container_client(NAME, None).await.unwrap()
}

async fn properties(account: &LocalAccount) -> ContainerProperties {
    let container = container(&account.client_named("operator").await).await;
    container.read(None).await.unwrap().into_model().unwrap()
}

fn key(path: &'static str) -> PartitionKeyDefinition {
    PartitionKeyDefinition::from(path).with_version(PartitionKeyVersion::V2)
}

/// Counts the requests that change databases or containers, without changing them.
fn changes(account: &LocalAccount) -> WireRuleHandle {
    let harmless = WireRule::new(WireAction::Delay(Duration::ZERO)).client(CLIENT);
    let structure = harmless.on(RequestKind::Database).on(RequestKind::Container);
    account.wire().add(structure.matching(|request| request.method != "GET"))
}

#[tokio::test]
async fn a_missing_database_and_container_are_created_as_the_provider_needs_them() {
    let account = account();
    open(&account, &config(&account)).await.unwrap();
    let created = properties(&account).await;
    let paths: Vec<&str> = created.partition_key.paths().iter().map(AsRef::as_ref).collect();
    assert_eq!((paths, created.partition_key.version()), (vec!["/instanceId"], PartitionKeyVersion::V2));
    assert_eq!(created.default_ttl, TimeToLive::NoDefault);
    let policy = created.indexing_policy.unwrap();
    assert!(indexing::missing_paths(Some(&policy)).is_empty());
    assert!(policy.excluded_paths.iter().any(|excluded| excluded.path == "/*"), "{policy:?}");
}

#[tokio::test]
async fn a_missing_container_is_created_in_an_existing_database() {
    let account = account();
    account.client_named("operator").await.create_database(NAME, None).await.unwrap();
    open(&account, &config(&account)).await.unwrap();
    assert_eq!(account.partition_count(NAME, NAME), 4);
}

#[tokio::test]
async fn a_container_is_created_with_the_configured_throughput() {
    let account = account();
    open(&account, &config(&account).with_throughput(Throughput::Manual(700))).await.unwrap();
    let container = container(&account.client_named("operator").await).await;
    let throughput = container.read_throughput(None).await.unwrap().unwrap();
    assert_eq!(throughput.throughput(), Some(700));
}

#[tokio::test]
async fn two_processes_that_open_at_once_share_the_container_that_one_of_them_creates() {
    let account = account();
    let (databases, containers) = (Gate::new(), Gate::new());
    for (gate, kind) in [(&databases, RequestKind::Database), (&containers, RequestKind::Container)] {
        let hold = WireRule::new(WireAction::HoldBefore(gate.clone())).on(kind);
        account.wire().add(hold.matching(|request| request.method == "POST"));
    }
    let config = config(&account);
    let race = async {
        databases.reached_by(2).await;
        databases.open();
        containers.reached_by(2).await;
        containers.open();
    };
    let (one, other, ()) = tokio::join!(open(&account, &config), open(&account, &config), race);
    let (one, other) = (one.unwrap(), other.unwrap());
    let note = note("i", "a", "");
    done(one.create(&note.instance_id, &note.id, &note, in_time()).await);
    let seen = other.read::<Note>(&note.instance_id, &note.id, Freshness::Authoritative, in_time()).await.unwrap();
    assert_eq!(seen.unwrap().document, note);
}

#[tokio::test]
async fn transient_failures_while_creating_are_retried() {
    for action in [refuse(429), refuse(503), refuse(408), refuse(500), WireAction::FailConnection] {
        let account = account();
        let client = client(&account, Vec::new()).await;
        let rules = [RequestKind::Database, RequestKind::Container].map(|kind| {
            let posts = WireRule::new(action.clone()).on(kind).matching(|request| request.method == "POST");
            account.wire().add(posts.times(6))
        });
        bootstrap::open(&client, &config(&account), None).await.unwrap();
        assert_eq!(rules.map(|rule| rule.hits()), [6, 6], "{action:?}");
    }
}

#[tokio::test]
async fn a_creation_whose_answer_is_lost_is_found_to_have_happened() {
    let account = account();
    for kind in [RequestKind::Database, RequestKind::Container] {
        let posts = WireRule::new(WireAction::LoseAnswer).on(kind).matching(|request| request.method == "POST");
        account.wire().add(posts.times(1));
    }
    open(&account, &config(&account)).await.unwrap();
    assert_eq!(account.partition_count(NAME, NAME), 4);
}

#[tokio::test]
async fn transient_failures_while_checking_are_retried() {
    let account = account_with(bootstrap::container_properties(NAME)).await;
    let client = client(&account, Vec::new()).await;
    let rule = account.wire().add(WireRule::new(refuse(503)).on(RequestKind::Container).times(9));
    bootstrap::open(&client, &config(&account), None).await.unwrap();
    assert_eq!(rule.hits(), 9);
}

#[tokio::test]
async fn the_error_for_a_missing_container_has_the_command_that_creates_it() {
    let account = account();
    let changes = changes(&account);
    let config = config(&account).with_create_if_missing(false).with_database("orders").with_container("flows");
    let error = open(&account, &config).await.err().unwrap();
    assert!(matches!(&error, StoreError::Missing { .. }), "{error:?}");
    assert!(!error.is_retryable());
    let text = error.to_string();
    for part in [
        "the container flows in database orders",
        "az cosmosdb sql container create",
        "--database-name orders --name flows",
        "--partition-key-path /instanceId --partition-key-version 2",
        "--ttl -1",
        &policy_json(),
    ] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert_eq!(changes.hits(), 0);
}

async fn unfit(properties: ContainerProperties) -> String {
    let account = account_with(properties).await;
    let changes = changes(&account);
    let error = open(&account, &config(&account)).await.err().unwrap();
    assert!(matches!(&error, StoreError::Unfit { .. }), "{error:?}");
    assert!(!error.is_retryable());
    assert_eq!(changes.hits(), 0);
    error.to_string()
}

#[tokio::test]
async fn a_container_with_another_partition_key_does_not_fit() {
    let text = unfit(ContainerProperties::new(NAME, key("/tenant"))).await;
    assert!(text.contains("its partition key is /tenant, but must be /instanceId"), "{text}");
    assert!(text.contains("az cosmosdb sql container create"), "{text}");
}

#[tokio::test]
async fn a_container_with_a_partition_key_of_version_1_does_not_fit() {
    let old = PartitionKeyDefinition::from("/instanceId").with_version(PartitionKeyVersion::V1);
    let text = unfit(ContainerProperties::new(NAME, old)).await;
    assert!(text.contains("version 1"), "{text}");
    assert!(text.contains("--partition-key-version 2"), "{text}");
}

#[tokio::test]
async fn a_container_whose_index_misses_a_path_does_not_fit() {
    let path = indexing::INDEXED_PATHS[1];
    let policy = IndexingPolicy::default().with_included_path("/*").with_excluded_path(path);
    let text = unfit(ContainerProperties::new(NAME, key("/instanceId")).with_indexing_policy(policy)).await;
    assert!(text.contains(&format!("its index does not cover {path}.")), "{text}");
    assert!(text.contains("az cosmosdb sql container update"), "{text}");
    assert!(text.contains(&format!("--idx '{}'", policy_json())), "{text}");
}

#[tokio::test]
async fn a_container_with_a_default_time_to_live_does_not_fit() {
    let text = unfit(bootstrap::container_properties(NAME).with_default_ttl(TimeToLive::Seconds(86_400))).await;
    assert!(text.contains("its default time to live is 86400 s"), "{text}");
    assert!(text.contains("az cosmosdb sql container update") && text.contains("--ttl -1"), "{text}");
}

#[tokio::test]
async fn a_container_that_fits_is_not_changed() {
    let everything = IndexingPolicy::default().with_included_path("/*");
    let own = ContainerProperties::new(NAME, key("/instanceId"))
        .with_indexing_policy(everything)
        .with_default_ttl(TimeToLive::Forever);
    for existing in [own, bootstrap::container_properties(NAME)] {
        let account = account_with(existing).await;
        let before = serde_json::to_value(properties(&account).await).unwrap();
        let changes = changes(&account);
        open(&account, &config(&account)).await.unwrap();
        assert_eq!(changes.hits(), 0);
        assert_eq!(serde_json::to_value(properties(&account).await).unwrap(), before);
    }
}

#[tokio::test]
async fn a_refused_credential_is_named_while_opening() {
    for (kind, status) in [(RequestKind::Container, 401), (RequestKind::Container, 403), (RequestKind::Database, 403)] {
        let account = account();
        let client = client(&account, Vec::new()).await;
        account.wire().add(WireRule::new(refuse(status)).on(kind));
        let error = bootstrap::open(&client, &config(&account), None).await.err().unwrap();
        assert!(matches!(&error, StoreError::Denied { .. }), "{error:?}");
        let text = format!("{error} {error:?}");
        assert!(text.contains("account key") && !text.contains(account.key()), "{text}");
    }
}

async fn serve(account: &LocalAccount) -> (Served, CosmosDBProviderConfig) {
    let served = account.serve((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
    let config = config(account).with_endpoint(served.endpoint());
    (served, config)
}

#[tokio::test]
async fn transient_failures_while_connecting_are_retried() {
    for action in [refuse(429), refuse(503), refuse(500), WireAction::FailConnection] {
        let account = account();
        let (_served, config) = serve(&account).await;
        let rule = account.wire().add(WireRule::new(action.clone()).on(RequestKind::Account).times(6));
        connect::client(&config).await.unwrap();
        assert_eq!(rule.hits(), 6, "{action:?}");
    }
}

#[tokio::test]
async fn an_unreachable_account_is_unavailable_after_the_operation_timeout() {
    let account = account();
    let (_served, config) = serve(&account).await;
    let config = config.with_operation_timeout(Duration::from_secs(1));
    for action in [refuse(503), WireAction::FailConnection, WireAction::HoldBefore(Gate::new())] {
        let rule = account.wire().add(WireRule::new(action.clone()).on(RequestKind::Account));
        let connecting = tokio::time::timeout(Duration::from_secs(10), connect::client(&config));
        let error = connecting.await.expect("the operation timeout is kept").err().unwrap();
        assert!(matches!(&error, ConnectError::Store(StoreError::Unavailable { .. })), "{action:?}: {error:?}");
        assert!(rule.hits() >= 1);
        rule.remove();
        assert!(duroxide::providers::ProviderError::from(error).is_retryable());
    }
}

#[tokio::test]
async fn a_store_opened_over_http_and_one_in_process_see_the_same_documents() {
    let fixture = StoreFixture::over_http().await;
    let inside = open(&fixture.account, &config(&fixture.account)).await.unwrap();
    let note = note("i", "a", "");
    let etag = fixture.given(&note).await;
    let seen = inside.read::<Note>(&note.instance_id, &note.id, Freshness::Session, in_time()).await.unwrap();
    assert_eq!(seen.unwrap().etag, etag);
}
