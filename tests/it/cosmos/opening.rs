//! Behaviour of Azure that the SDK's emulator does not have: accounts whose batches are not atomic, containers that
//! are not there yet, pages that take seconds, and physical partitions that are merged.

use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos::{ConnectError, CosmosDBProvider, CosmosDBProviderConfig, Credential, StoreError};
use duroxide_cosmos_emulator::{LocalAccount, RequestKind, Served, WireAction, WireRule, WireRuleHandle, WriteMode};
use std::time::Duration;

const NAME: &str = "duroxide";

async fn open(account: &LocalAccount, client: &str) -> Result<CosmosDBProvider, ConnectError> {
    let client = account.client_named(client).await;
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    CosmosDBProvider::new_with_client(&client, config).await
}

/// Opens the account with the client that the provider builds itself.
async fn open_over_http(account: &LocalAccount, served: &Served) -> Result<CosmosDBProvider, ConnectError> {
    let config = CosmosDBProviderConfig::default()
        .with_endpoint(served.endpoint())
        .with_credential(Credential::account_key(account.key().to_owned()));
    CosmosDBProvider::new_with_config(config).await
}

#[tokio::test]
async fn an_account_whose_batches_are_not_atomic_is_refused_with_any_client() {
    for (misbehaviour, problem) in
        [("batches-not-atomic", "does not roll back"), ("batches-ignore-if-match", "ignores ifMatch")]
    {
        let account = LocalAccount::new();
        account.wire().misbehave(misbehaviour.parse().unwrap());
        let served = serve(&account).await;
        for opened in [open(&account, "brought").await, open_over_http(&account, &served).await] {
            let error = opened.expect_err("it is refused");
            assert!(matches!(&error, ConnectError::Store(StoreError::Unfit { .. })), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(problem) && text.contains("vNext emulator"), "{text}");
        }
        let left = account.documents(NAME, NAME);
        assert!(left.iter().all(|document| document["type"] == "format"), "the probe is removed: {left:?}");
    }
}

#[tokio::test]
async fn a_sound_account_is_probed_by_one_batch_that_changes_nothing() {
    let account = LocalAccount::new();
    open(&account, "first").await.unwrap();
    let before = account.documents(NAME, NAME);
    open(&account, "second").await.unwrap();
    assert_eq!(account.documents(NAME, NAME), before);
    assert_eq!(account.stats_of("second").of(RequestKind::Batch).requests, 1);
}

/// A container that was just created: its properties can be read, and requests for its items are answered with 404 for
/// a while.
fn just_created(account: &LocalAccount, substatus: u32) -> WireRuleHandle {
    let missing = WireAction::Refuse { status: 404, substatus: Some(substatus), retry_after: None };
    account.wire().add(WireRule::new(missing).matching(|request| !request.kind.is_metadata()).times(9))
}

#[tokio::test]
async fn opening_waits_for_a_container_that_was_just_created() {
    for substatus in [1013, 1003] {
        let account = LocalAccount::new();
        let missing = just_created(&account, substatus);
        let provider = within("opening", open(&account, "a")).await.expect("it is there in the end");
        assert_eq!(missing.hits(), 9);
        begin_with_activities(&provider, "order", 0).await;
        let account = LocalAccount::new();
        account.wire().misbehave(format!("new-containers-missing={substatus},700ms").parse().unwrap());
        within("opening", open(&account, "a")).await.expect("it is there in the end");
    }
}

#[tokio::test]
async fn several_write_regions_are_noticed_even_right_after_the_container_was_created() {
    for substatus in [1013, 1003] {
        let regions = ["East US", "West US"];
        let account = LocalAccount::builder().with_regions(&regions).with_write_mode(WriteMode::Multi).build();
        just_created(&account, substatus);
        let error = within("opening", open(&account, "a")).await.expect_err("it is refused");
        assert!(error.to_string().contains("--enable-multiple-write-locations false"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_waits_for_a_page_that_takes_four_seconds() {
    let account = LocalAccount::new();
    let served = serve(&account).await;
    let (worker, sender) = (open_over_http(&account, &served).await.unwrap(), open(&account, "sender").await.unwrap());
    sender.enqueue_for_orchestrator(start("order"), None).await.unwrap();
    account.wire().misbehave("slow-pages=4s".parse().unwrap());
    let fetched = worker.fetch_orchestration_item(LONG, Duration::from_secs(30), None).await.unwrap();
    assert_eq!(fetched.expect("a turn").0.instance, "order");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_is_found_at_once_after_physical_partitions_were_merged() {
    let account = LocalAccount::builder().with_partitions(2).build();
    let (worker, sender) = (open(&account, "worker").await.unwrap(), open(&account, "sender").await.unwrap());
    // The worker has cached the partitions as they were.
    let none = worker.fetch_orchestration_item(LONG, Duration::from_secs(2), None).await.unwrap();
    assert!(none.is_none());
    let partitions = account.partitions(NAME, NAME);
    account.merge(NAME, NAME, partitions[0], partitions[1]).await.unwrap();
    for number in 0..4 {
        sender.enqueue_for_orchestrator(start(&format!("order-{number}")), None).await.unwrap();
    }
    for _ in 0..4 {
        let fetched = worker.fetch_orchestration_item(LONG, Duration::from_secs(10), None).await.unwrap();
        assert!(fetched.is_some(), "a turn within ten seconds");
    }
}

#[tokio::test]
async fn each_step_of_opening_waits_for_a_container_that_not_every_node_knows_yet() {
    for kind in [RequestKind::Read, RequestKind::Create, RequestKind::Batch] {
        for substatus in [1013, 1003] {
            let account = LocalAccount::new();
            let missing = WireAction::Refuse { status: 404, substatus: Some(substatus), retry_after: None };
            let rule = account.wire().add(WireRule::new(missing).on(kind).client("a").times(3));
            within("opening", open(&account, "a")).await.unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            assert_eq!(rule.hits(), 3, "{kind:?}");
        }
    }
}
