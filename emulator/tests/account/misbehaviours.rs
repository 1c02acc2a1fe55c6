//! Misbehaviours that a test turns on.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use azure_data_cosmos::options::{
    ItemReadOptions, ItemWriteOptions, OperationOptionsBuilder, Precondition, PriorityLevel, ReadConsistencyStrategy,
    ThroughputControlOptionsBuilder,
};
use azure_data_cosmos::{ContainerClient, FeedScope, Query, TransactionalBatch};
use duroxide_cosmos_emulator::{LocalAccount, Misbehaviour, RequestKind, Until, WireAction, WireRule};
use futures::TryStreamExt;

use crate::fixture::*;

async fn account_with_items(partitions: u32, count: i64) -> (LocalAccount, ContainerClient) {
    let account = LocalAccount::builder().with_partitions(partitions).build();
    let container = create_container(&account.client().await).await;
    for n in 0..count {
        let pk = format!("pk{n}");
        container.create_item(pk.clone(), "1", item(&pk, "1", n), None).await.unwrap();
    }
    account.reset_stats();
    (account, container)
}

/// Runs a batch and returns the status of each operation.
async fn run(container: &ContainerClient, batch: TransactionalBatch) -> Vec<u16> {
    let answer = container.execute_transactional_batch(batch, None).await.unwrap().into_model().unwrap();
    answer.results().iter().map(|result| result.status_code()).collect()
}

/// Returns a batch of three creations with consecutive ids.
fn creations(first: i64) -> TransactionalBatch {
    let mut batch = TransactionalBatch::new("p");
    for n in first..first + 3 {
        batch = batch.create_item(item("p", &n.to_string(), n)).unwrap();
    }
    batch
}

#[tokio::test]
async fn a_batch_without_its_atomic_flag_is_not_rolled_back() {
    let (account, container) = account_with_items(1, 0).await;
    container.create_item("p", "2", item("p", "2", 0), None).await.unwrap();
    assert_eq!(run(&container, creations(1)).await, [424, 409, 424]);
    assert_eq!(read(&container, "p", "1").await, None);

    let lost = account.wire().misbehave(Misbehaviour::BatchesNotAtomic);
    assert_eq!(run(&container, creations(1)).await, [201, 409, 424]);
    assert_eq!(read(&container, "p", "1").await, Some(item("p", "1", 1)));
    assert_eq!(read(&container, "p", "3").await, None);
    let charge = account.stats().of(RequestKind::Batch).charge;
    assert!((charge - (1.0 + 4.95 + 3.0 * 0.2 + 1.0)).abs() < 0.01, "{charge}");

    lost.remove();
    assert_eq!(run(&container, creations(2)).await, [409, 424, 424]);
    assert_eq!(run(&container, creations(3)).await, [201, 201, 201]);
}

#[tokio::test]
async fn every_operation_works_in_a_batch_without_its_atomic_flag() {
    let (account, container) = account_with_items(1, 0).await;
    container.create_item("p", "1", item("p", "1", 0), None).await.unwrap();
    container.create_item("p", "2", item("p", "2", 0), None).await.unwrap();
    account.wire().misbehave(Misbehaviour::BatchesNotAtomic);
    let batch = TransactionalBatch::new("p")
        .replace_item("1", item("p", "1", 5), None)
        .unwrap()
        .upsert_item(item("p", "2", 6), None)
        .unwrap()
        .upsert_item(item("p", "3", 7), None)
        .unwrap()
        .read_item("1", None)
        .delete_item("2", None);
    let answer = container.execute_transactional_batch(batch, None).await.unwrap().into_model().unwrap();
    let statuses: Vec<u16> = answer.results().iter().map(|result| result.status_code()).collect();
    assert_eq!(statuses, [200, 200, 201, 200, 204]);
    assert_eq!(answer.results()[3].into_model::<Item>().unwrap(), Some(item("p", "1", 5)));
    assert_eq!(answer.results()[0].etag(), answer.results()[3].etag());
    assert_eq!(read(&container, "p", "2").await, None);
    assert_eq!(read(&container, "p", "3").await, Some(item("p", "3", 7)));
}

#[tokio::test]
async fn batches_can_ignore_their_etag_conditions() {
    let (account, container) = account_with_items(1, 0).await;
    container.create_item("p", "1", item("p", "1", 0), None).await.unwrap();
    let stale = || {
        let options = Some(
            azure_data_cosmos::options::BatchReplaceOptions::default()
                .with_precondition(Precondition::if_match("\"stale\"")),
        );
        TransactionalBatch::new("p").replace_item("1", item("p", "1", 9), options).unwrap()
    };
    assert_eq!(run(&container, stale()).await, [412]);
    account.wire().misbehave(Misbehaviour::BatchesIgnoreIfMatch);
    assert_eq!(run(&container, stale()).await, [200]);
    // The same holds if the operations run one by one.
    account.wire().misbehave(Misbehaviour::BatchesNotAtomic);
    assert_eq!(run(&container, stale()).await, [200]);
}

#[tokio::test]
async fn the_answer_to_a_batch_can_lack_etags() {
    let (account, container) = account_with_items(1, 0).await;
    let etag_of = |first: i64| {
        let container = container.clone();
        async move {
            let answer = container.execute_transactional_batch(creations(first), None).await.unwrap();
            answer.into_model().unwrap().results()[0].etag().map(str::to_owned)
        }
    };
    assert!(etag_of(1).await.is_some());
    account.wire().misbehave(Misbehaviour::BatchesWithoutEtags);
    assert_eq!(etag_of(10).await, None);
}

const QUERIES: [&str; 4] = [
    "SELECT * FROM c",
    "SELECT * FROM c ORDER BY c[\"value\"]",
    "SELECT TOP 15 * FROM c ORDER BY c[\"value\"] DESC",
    "SELECT * FROM c WHERE c[\"value\"] >= 0",
];

#[tokio::test]
async fn an_empty_page_precedes_every_page_and_no_row_is_lost() {
    let (account, container) = account_with_items(3, 20).await;
    let mut expected = Vec::new();
    for text in QUERIES {
        expected.push(query(&container, text).await);
    }
    let without = account.stats().of(RequestKind::Query).requests;
    account.reset_stats();
    account.wire().misbehave(Misbehaviour::EmptyPages);
    for (text, expected) in QUERIES.iter().zip(expected) {
        assert_eq!(query(&container, text).await, expected, "{text}");
    }
    assert!(account.stats().of(RequestKind::Query).requests >= 2 * without);

    // The same with several real pages.
    account.wire().misbehave(Misbehaviour::SmallPages(NonZeroU32::new(3).unwrap()));
    for text in QUERIES {
        let rows = if text.contains("TOP") { 15 } else { 20 };
        assert_eq!(query(&container, text).await.len(), rows, "{text}");
    }
    let scope = FeedScope::partition("pk1");
    let rows: Vec<Item> =
        container.query_items(Query::from(QUERIES[0]), scope, None).await.unwrap().try_collect().await.unwrap();
    assert_eq!(rows, [item("pk1", "1", 1)]);
}

#[tokio::test]
async fn a_page_can_have_fewer_rows_than_the_client_requested() {
    let (account, container) = account_with_items(1, 20).await;
    for text in QUERIES {
        account.wire().behave();
        account.reset_stats();
        let expected = query(&container, text).await;
        assert_eq!(account.stats().of(RequestKind::Query).requests, 1, "{text}");
        account.wire().misbehave(Misbehaviour::SmallPages(NonZeroU32::new(7).unwrap()));
        assert_eq!(query(&container, text).await, expected, "{text}");
        assert_eq!(account.stats().of(RequestKind::Query).requests, 4, "{text}");
    }
}

#[tokio::test]
async fn a_page_can_be_slow() {
    let (account, container) = account_with_items(1, 1).await;
    account.wire().misbehave(Misbehaviour::SlowPages(Duration::from_millis(80)));
    let begun = Instant::now();
    assert_eq!(query(&container, QUERIES[0]).await.len(), 1);
    assert!(begun.elapsed() >= Duration::from_millis(80));
}

#[tokio::test]
async fn a_new_container_is_missing_for_some_requests_or_for_some_time() {
    for (substatus, until) in [(1013, Until::Requests(2)), (1003, Until::Time(Duration::from_millis(150)))] {
        let account = LocalAccount::new();
        let client = account.client().await;
        account.wire().misbehave(Misbehaviour::NewContainersMissing { substatus, until });
        let properties = azure_data_cosmos::models::ContainerProperties::new(CONTAINER, "/pk".into());
        client.create_database(DATABASE, None).await.unwrap();
        let begun = Instant::now();
        client.database_client(DATABASE).create_container(properties, None).await.unwrap();
        let error = client.database_client(DATABASE).container_client(CONTAINER, None).await.err().unwrap();
        assert_eq!(status(&error), 404);
        assert_eq!(error.status().sub_status().map(|code| code.value()), Some(substatus as u16));
        let container = loop {
            match client.database_client(DATABASE).container_client(CONTAINER, None).await {
                Ok(container) => break container,
                Err(error) => assert_eq!(status(&error), 404),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        if let Until::Time(time) = until {
            assert!(begun.elapsed() >= time);
        }
        container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
    }
}

#[tokio::test]
async fn access_to_items_can_be_refused_with_the_services_message() {
    let (account, container) = account_with_items(1, 0).await;
    let cases = [
        (Misbehaviour::Forbidden(None), 403, None, "firewall"),
        (Misbehaviour::Forbidden(Some(5301)), 403, Some(5301), "RBAC permissions"),
        (Misbehaviour::Forbidden(Some(5202)), 403, Some(5202), "Local Authorization is disabled"),
        (Misbehaviour::Unauthorized(Some(5005)), 401, Some(5005), "not valid at the current time"),
    ];
    for (misbehaviour, code, substatus, words) in cases {
        let refused = account.wire().misbehave(misbehaviour);
        let error = container.create_item("p", "1", item("p", "1", 1), None).await.unwrap_err();
        assert_eq!(status(&error), code);
        assert_eq!(error.status().sub_status().map(|code| code.value()), substatus);
        assert!(error.to_string().contains(words), "{error}");
        open_container(&account.client().await).await;
        refused.remove();
    }
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
}

#[tokio::test]
async fn queries_that_contain_a_text_can_be_refused() {
    let (account, container) = account_with_items(1, 1).await;
    account.wire().misbehave(Misbehaviour::RefuseQuery("c[\"value\"]".to_owned()));
    let scope = FeedScope::partition("pk0");
    let pages = container.query_items::<Item>(Query::from(QUERIES[3]), scope, None).await;
    let refused = pages.unwrap().try_collect::<Vec<_>>().await;
    assert_eq!(status(&refused.unwrap_err()), 400);
    assert_eq!(query(&container, QUERIES[0]).await.len(), 1);
}

#[tokio::test]
async fn charges_can_be_multiplied() {
    let (account, container) = account_with_items(1, 1).await;
    account.wire().misbehave(Misbehaviour::ChargesTimes(3.0));
    read(&container, "pk0", "1").await;
    assert_eq!(account.stats().of(RequestKind::Read).charge, 3.0);
    let batch = TransactionalBatch::new("pk0").read_item("1", None);
    let answer = container.execute_transactional_batch(batch, None).await.unwrap().into_model().unwrap();
    assert_eq!(answer.results()[0].request_charge(), Some(3.0));
}

#[tokio::test]
async fn writes_can_return_the_whole_document() {
    let (account, container) = account_with_items(1, 0).await;
    let bytes = |account: &LocalAccount| account.stats().of(RequestKind::Create).response_bytes;
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
    assert_eq!(bytes(&account), 0);
    account.wire().misbehave(Misbehaviour::FullAnswers);
    container.create_item("p", "2", item("p", "2", 1), None).await.unwrap();
    assert!(bytes(&account) > 0);
}

#[tokio::test]
async fn requests_with_a_priority_or_latest_committed_can_be_refused() {
    let (account, container) = account_with_items(1, 1).await;
    let low = OperationOptionsBuilder::new()
        .with_throughput_control(ThroughputControlOptionsBuilder::new().with_priority_level(PriorityLevel::Low).build())
        .build();
    let latest =
        OperationOptionsBuilder::new().with_read_consistency_strategy(ReadConsistencyStrategy::LatestCommitted).build();
    let read_with = |options: &azure_data_cosmos::options::OperationOptions| {
        let options = ItemReadOptions::default().with_operation_options(options.clone());
        let container = container.clone();
        async move { container.read_item("pk0", "1", Some(options)).await.map_err(|error| status(&error)) }
    };
    read_with(&low).await.unwrap();
    account.wire().misbehave(Misbehaviour::RefusePriority);
    assert_eq!(read_with(&low).await.err(), Some(400));
    read_with(&latest).await.unwrap();
    account.wire().misbehave(Misbehaviour::RefuseLatestCommitted);
    assert_eq!(read_with(&latest).await.err(), Some(400));
    assert!(read(&container, "pk0", "1").await.is_some());
    let options = ItemWriteOptions::default().with_operation_options(low);
    let refused = container.create_item("p", "1", item("p", "1", 1), Some(options)).await;
    assert_eq!(status(&refused.unwrap_err()), 400);
}

#[tokio::test]
async fn queries_can_be_made_to_scan() {
    let (account, container) = account_with_items(1, 1).await;
    account.wire().misbehave(Misbehaviour::ScanUnindexed);
    let scans = WireRule::new(WireAction::Delay(Duration::ZERO))
        .on(RequestKind::Query)
        .matching(|request| request.header("x-ms-documentdb-query-enable-scan") == Some("true"));
    let scans = account.wire().add(scans);
    query(&container, QUERIES[3]).await;
    assert_eq!(scans.hits(), 1);
}
