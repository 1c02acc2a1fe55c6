//! An activity that cannot be read is attempted, delayed and failed in the end.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, TagFilter, WorkItem},
    ErrorDetails,
};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use serde_json::json;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_input_cannot_be_read_counts_an_attempt_and_is_delayed() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    let WorkItem::ActivityExecute { instance, execution_id, id, name, session_id, tag, .. } = activity("i", 2) else {
        panic!("an activity");
    };
    let input = "x".repeat(5_000);
    let large = WorkItem::ActivityExecute { instance, execution_id, id, name, input, session_id, tag };
    begin(&a, "i", vec![large], Vec::new()).await;
    fixture.change("i", "p:w:1:2", |document| document["item"] = json!(7)).await;
    let worker = fixture.provider("worker").await;
    let claims = WireRule::new(WireAction::Delay(NOW)).client("worker").on(RequestKind::Replace);
    let claims = fixture.account.wire().add(claims.matching(|request| goes_to(request, "i")));
    let fetched = worker.fetch_work_item(LONG, Duration::from_secs(1), None, &TagFilter::Any).await.unwrap();
    assert!(fetched.is_none(), "{fetched:?}");
    let work = fixture.documents_of_type("i", "activity").await.remove(0);
    assert!(work["attempts"].as_u64() >= Some(1), "{work}");
    assert!(claims.hits() <= 4, "it is not claimed over and over: {}", claims.hits());
}

const INSTANCE: &str = "i";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_cannot_be_read_is_delayed_and_fails_after_its_last_attempt() {
    let fixture = Fixture::new(1);
    let (sender, worker) = (fixture.provider("sender").await, fixture.provider("worker").await);
    begin(&sender, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    fixture.change_type(INSTANCE, "activity", |work| work["item"] = json!("{\"FromTheFuture\":{}}")).await;
    let fetched = worker.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap();
    assert!(fetched.is_none());
    let work = fixture.documents_of_type(INSTANCE, "activity").await.pop().unwrap();
    assert_eq!((work["attempts"].as_u64(), work["lock"].is_null()), (Some(1), true));
    // This is the last attempt. The test does not wait for those before it.
    fixture
        .change_type(INSTANCE, "activity", |work| {
            work["attempts"] = json!(9);
            work["due"] = json!(1);
        })
        .await;
    let fresh = fixture.provider("fresh").await;
    assert!(fresh.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap().is_none());
    let (item, _, _) = next_turn(&fresh, LONG).await;
    let [WorkItem::ActivityFailed { id: 2, details, .. }] = &item.messages[..] else { panic!("{:?}", item.messages) };
    assert!(matches!(details, ErrorDetails::Poison { attempt_count: 10, .. }), "{details:?}");
    assert!(fixture.documents_of_type(INSTANCE, "activity").await.is_empty());
}
