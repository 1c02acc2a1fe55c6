use std::time::Duration;

use azure_data_cosmos::TransactionalBatch;
use duroxide_cosmos_emulator::{Gate, LocalAccount, RequestKind, WireAction, WireRule};

use crate::fixture::*;

const THROTTLE: WireAction =
    WireAction::Refuse { status: 429, substatus: Some(3200), retry_after: Some(Duration::from_millis(1)) };

#[tokio::test]
async fn a_batch_whose_answer_is_lost_is_applied() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    let lose = WireRule::new(WireAction::LoseAnswer).on(RequestKind::Batch).times(1);
    let lost = account.wire().add(lose);
    let batch = TransactionalBatch::new("p").create_item(item("p", "1", 1)).unwrap();
    let response = container.execute_transactional_batch(batch, None).await;

    // The SDK sends the batch again, and the repeat finds the item of the first one.
    let results = response.unwrap().into_model().unwrap();
    assert_eq!(results.results()[0].status_code(), 409);
    assert_eq!(lost.hits(), 1);
    assert_eq!(account.stats().of(RequestKind::Batch).requests, 2);
    assert_eq!(read(&container, "p", "1").await, Some(item("p", "1", 1)));
}

#[tokio::test]
async fn a_failed_connection_never_reaches_the_store() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    let fail = WireRule::new(WireAction::FailConnection).on(RequestKind::Create);
    let rule = account.wire().add(fail);
    let created = container.create_item("p", "1", item("p", "1", 1), None).await;
    created.unwrap_err();
    assert!(rule.hits() >= 1);
    rule.remove();
    assert_eq!(read(&container, "p", "1").await, None);
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
}

#[tokio::test]
async fn a_held_request_waits_for_its_gate() {
    let account = LocalAccount::new();
    let container = create_container(&account.client_named("slow").await).await;
    let other = open_container(&account.client_named("other").await).await;
    let gate = Gate::new();
    let hold = WireRule::new(WireAction::HoldBefore(gate.clone()));
    account.wire().add(hold.on(RequestKind::Create).client("slow"));

    let create = async move { container.create_item("p", "1", item("p", "1", 1), None).await };
    let create = tokio::spawn(create);
    gate.reached().await;
    assert_eq!(read(&other, "p", "1").await, None);
    other.create_item("p", "2", item("p", "2", 2), None).await.unwrap();
    assert_eq!(gate.count(), 1);
    gate.open();
    create.await.unwrap().unwrap();
    assert!(read(&other, "p", "1").await.is_some());
}

#[tokio::test]
async fn a_request_whose_answer_is_held_is_applied() {
    let account = LocalAccount::new();
    let container = create_container(&account.client_named("slow").await).await;
    let other = open_container(&account.client_named("other").await).await;
    let gate = Gate::new();
    let hold = WireRule::new(WireAction::HoldAfter(gate.clone()));
    account.wire().add(hold.on(RequestKind::Create));

    let create = async move { container.create_item("p", "1", item("p", "1", 1), None).await };
    let create = tokio::spawn(create);
    gate.reached().await;
    assert!(read(&other, "p", "1").await.is_some());
    assert!(!create.is_finished());
    gate.open();
    create.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_lost_answer_counts_after_the_store_has_executed_the_request() {
    // With this latency, a test that waited only for the arrival of the request would read the store too early.
    let account = LocalAccount::builder().with_latency(Duration::from_millis(50)).build();
    let container = create_container(&account.client().await).await;
    let lost = account.wire().add(WireRule::new(WireAction::LoseAnswer).on(RequestKind::Create));
    tokio::spawn(async move { container.create_item("p", "1", item("p", "1", 1), None).await });
    lost.wait_for_hits(1).await;
    assert_eq!(account.documents(DATABASE, CONTAINER).len(), 1);
}

#[tokio::test]
async fn a_rule_is_applied_at_most_as_often_as_it_says() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    let rule = WireRule::new(THROTTLE).on(RequestKind::Create).times(2);
    let throttled = account.wire().add(rule);
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
    assert_eq!(throttled.hits(), 2);
    throttled.wait_for_hits(2).await;
    let stats = account.stats().of(RequestKind::Create);
    assert_eq!((stats.requests, stats.failures), (3, 2));
}

#[tokio::test]
async fn rules_match_on_the_properties_of_a_request() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    let refuse = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    let rule = WireRule::new(refuse)
        .on(RequestKind::Create)
        .on(RequestKind::Upsert)
        .skip(1)
        .matching(|request| request.partition_key == Some(r#"["p"]"#))
        .matching(|request| request.document_id == Some("1"))
        .matching(|request| request.json().is_some_and(|body| body["value"] == 5));
    let rule = account.wire().add(rule);
    for (pk, id, value) in [("q", "1", 5), ("p", "2", 5), ("p", "1", 4), ("p", "1", 5)] {
        container.upsert_item(pk, id, item(pk, id, value), None).await.unwrap();
    }
    let refused = container.upsert_item("p", "1", item("p", "1", 5), None).await;
    assert_eq!(status(&refused.unwrap_err()), 403);
    assert_eq!(rule.hits(), 1);
    account.wire().clear();
    container.upsert_item("p", "1", item("p", "1", 5), None).await.unwrap();
}

#[tokio::test]
async fn one_operation_of_a_batch_can_be_refused() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    let refuse = WireAction::RefuseBatchOperation { index: 1, status: 449, substatus: None };
    account.wire().add(WireRule::new(refuse).times(1));
    let batch =
        TransactionalBatch::new("p").create_item(item("p", "1", 1)).unwrap().create_item(item("p", "2", 1)).unwrap();
    let response = container.execute_transactional_batch(batch, None).await.unwrap();
    let results = response.into_model().unwrap();
    let statuses: Vec<u16> = results.results().iter().map(|r| r.status_code()).collect();
    assert_eq!(statuses, [424, 449]);
    assert_eq!(read(&container, "p", "1").await, None);
}
