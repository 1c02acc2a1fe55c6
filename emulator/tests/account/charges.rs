//! The charge of every answer follows the published prices.

use azure_data_cosmos::models::{ContainerProperties, IndexingPolicy};
use azure_data_cosmos::options::{ItemReadOptions, OperationOptionsBuilder, ReadConsistencyStrategy};
use azure_data_cosmos::{ContainerClient, TransactionalBatch};
use duroxide_cosmos_emulator::{ConsistencyLevel, LocalAccount, RequestKind, WireAction, WireRule};
use serde_json::{json, Value};

use crate::fixture::*;

/// Creates an account whose container indexes only the path `/value`.
async fn account_that_indexes_values() -> (LocalAccount, ContainerClient) {
    let account = LocalAccount::new();
    let client = account.client().await;
    let policy = IndexingPolicy::default().with_included_path("/value/?").with_excluded_path("/*");
    let properties = ContainerProperties::new(CONTAINER, "/pk".into()).with_indexing_policy(policy);
    client.create_database(DATABASE, None).await.unwrap();
    client.database_client(DATABASE).create_container(properties, None).await.unwrap();
    let container = open_container(&client).await;
    account.reset_stats();
    (account, container)
}

/// Creates a document whose JSON text has this many KB.
fn document(id: &str, kilobytes: usize, value: i64) -> Value {
    let empty = json!({ "id": id, "pk": "p", "value": value, "text": "" }).to_string().len();
    json!({ "id": id, "pk": "p", "value": value, "text": "x".repeat(kilobytes * 1024 - empty) })
}

fn assert_close(charge: f64, expected: f64) {
    assert!((charge - expected).abs() < 0.011, "{charge} RU, not {expected}");
}

#[tokio::test]
async fn writes_cost_the_published_prices_and_their_index_terms() {
    let (account, container) = account_that_indexes_values().await;
    let charged = |kind: RequestKind| account.stats().of(kind).charge;
    for kilobytes in [1, 4, 64] {
        account.reset_stats();
        let create = [(1, 4.95), (4, 6.67), (64, 22.67)].iter().find(|(size, _)| *size == kilobytes).unwrap().1;
        let id = kilobytes.to_string();
        let created = container.create_item("p", &id, document(&id, kilobytes, 1), None).await.unwrap();
        assert_close(created.headers().request_charge().unwrap().value(), create + 0.2);
        assert_close(charged(RequestKind::Create), create + 0.2);

        container.replace_item("p", &id, document(&id, kilobytes, 2), None).await.unwrap();
        assert_close(charged(RequestKind::Replace), 2.0 * create + 0.4);
        container.upsert_item("p", &id, document(&id, kilobytes, 2), None).await.unwrap();
        assert_close(charged(RequestKind::Upsert), 2.0 * create);
        container.delete_item("p", &id, None).await.unwrap();
        assert_close(charged(RequestKind::Delete), 5.2);
        container.upsert_item("p", &id, document(&id, kilobytes, 3), None).await.unwrap();
        assert_close(charged(RequestKind::Upsert), 2.0 * create + create + 0.2);
    }
}

#[tokio::test]
async fn a_batch_costs_the_sum_of_its_operations() {
    let (account, container) = account_that_indexes_values().await;
    container.create_item("p", "1", document("1", 1, 1), None).await.unwrap();
    container.create_item("p", "2", document("2", 1, 1), None).await.unwrap();
    account.reset_stats();
    let batch = TransactionalBatch::new("p")
        .create_item(document("3", 16, 1))
        .unwrap()
        .replace_item("1", document("1", 1, 7), None)
        .unwrap()
        .delete_item("2", None)
        .read_item("1", None);
    let answer = container.execute_transactional_batch(batch, None).await.unwrap();
    let total = answer.headers().request_charge().unwrap().value();
    let results = answer.into_model().unwrap();
    let charges: Vec<f64> = results.results().iter().map(|result| result.request_charge().unwrap_or(0.0)).collect();
    // The document that is read also has system properties, so it is a little over 1 KB.
    for (charge, expected) in charges.iter().zip([9.72, 10.3, 5.2, 1.01]) {
        assert_close(*charge, expected);
    }
    assert_close(total, charges.iter().sum());
    assert_close(account.stats().of(RequestKind::Batch).charge, total);
}

#[tokio::test]
async fn a_refused_request_costs_1_and_a_throttled_one_is_free() {
    let (account, container) = account_that_indexes_values().await;
    assert_eq!(read(&container, "p", "missing").await, None);
    assert_close(account.stats().of(RequestKind::Read).charge, 1.0);

    let batch = TransactionalBatch::new("p").create_item(document("1", 1, 1)).unwrap().delete_item("missing", None);
    container.execute_transactional_batch(batch, None).await.unwrap();
    assert_close(account.stats().of(RequestKind::Batch).charge, 1.0);

    let throttle = WireAction::Refuse { status: 429, substatus: Some(3200), retry_after: None };
    account.wire().add(WireRule::new(throttle).on(RequestKind::Create).times(3));
    container.create_item("p", "1", document("1", 1, 1), None).await.unwrap();
    assert_close(account.stats().of(RequestKind::Create).charge, 5.15);
}

#[tokio::test]
async fn the_charge_of_a_query_page_depends_on_partitions_and_bytes() {
    let account = LocalAccount::builder().with_partitions(3).build();
    let container = create_container(&account.client().await).await;
    account.reset_stats();
    assert_eq!(query(&container, "SELECT * FROM c").await, []);
    let queries = account.stats().of(RequestKind::Query);
    assert_eq!(queries.requests, 3);
    assert!((7.5..7.7).contains(&queries.charge), "{}", queries.charge);
    assert_eq!(account.stats().total().charge, account.stats().items().charge, "metadata is free");
}

#[tokio::test]
async fn a_quorum_read_costs_twice_as_much() {
    let (account, container) = account_that_indexes_values().await;
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
    let strategy =
        OperationOptionsBuilder::new().with_read_consistency_strategy(ReadConsistencyStrategy::LatestCommitted).build();
    let latest_committed = || Some(ItemReadOptions::default().with_operation_options(strategy.clone()));
    account.reset_stats();
    read(&container, "p", "1").await;
    assert_close(account.stats().of(RequestKind::Read).charge, 1.0);
    container.read_item("p", "1", latest_committed()).await.unwrap();
    assert_close(account.stats().of(RequestKind::Read).charge, 3.0);

    let strong = LocalAccount::builder().with_consistency(ConsistencyLevel::Strong).build();
    let container = create_container(&strong.client().await).await;
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
    read(&container, "p", "1").await;
    assert_close(strong.stats().of(RequestKind::Read).charge, 2.0);
}

#[tokio::test]
async fn an_upsert_of_a_document_that_bypassed_the_wire_costs_a_replacement() {
    let (account, container) = account_that_indexes_values().await;
    assert!(account.put(DATABASE, CONTAINER, "p", &document("1", 1, 1)).await);
    assert_close(account.stats().items().charge, 0.0);
    container.upsert_item("p", "1", document("1", 1, 1), None).await.unwrap();
    assert_close(account.stats().of(RequestKind::Upsert).charge, 9.9);
}
