//! The history that a turn runs on is complete, or the turn does not run.

use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_appends_of_one_event_one_is_refused() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    begin(&a, "i", Vec::new(), Vec::new()).await;
    // "b" has compared the events and is about to write.
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldAfter(gate.clone())).client("b").on(RequestKind::Query);
    fixture.account.wire().add(rule.times(1));
    let second = tokio::spawn(async move { b.append_with_execution("i", 1, vec![filler("i", 1, 5)]).await });
    reached(&gate).await;
    a.append_with_execution("i", 1, vec![filler("i", 1, 5)]).await.unwrap();
    gate.open();
    let error = second.await.unwrap().expect_err("the event is there");
    assert!(error.message.contains('5'), "{error:?}");
    assert_eq!(a.read("i").await.unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_append_beside_a_turn_the_next_turn_has_the_whole_history() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    begin(&a, "i", Vec::new(), Vec::new()).await;
    a.enqueue_for_orchestrator(external("i", "first"), None).await.unwrap();
    let (_, token, _) = next_turn(&a, LONG).await;
    a.append_with_execution("i", 1, vec![filler("i", 1, 10)]).await.unwrap();
    commit(&a, &token, vec![filler("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    a.enqueue_for_orchestrator(external("i", "second"), None).await.unwrap();
    let (item, ..) = next_turn(&a, LONG).await;
    let ids: Vec<u64> = item.history.iter().map(|event| event.event_id).collect();
    assert_eq!(ids, [1, 2, 10]);
}

const INSTANCE: &str = "i";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_history_document_is_reported_as_an_unreadable_history() {
    let fixture = Fixture::new(1);
    let (sender, worker) = (fixture.provider("sender").await, fixture.provider("worker").await);
    begin(&sender, INSTANCE, Vec::new(), Vec::new()).await;
    fixture.change_type(INSTANCE, "history", |history| history["events"] = json!("none")).await;
    sender.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    let (item, _, attempts) = next_turn(&worker, LONG).await;
    assert!(item.history_error.is_some());
    assert_eq!(attempts, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_turn_runs_on_an_incomplete_history() {
    let fixture = Fixture::new(1);
    let (sender, worker) = (fixture.provider("sender").await, fixture.provider("worker").await);
    begin(&sender, INSTANCE, Vec::new(), Vec::new()).await;
    let history = fixture.documents_of_type(INSTANCE, "history").await.pop().expect("its history");
    let id = history["id"].as_str().unwrap().to_owned();
    fixture.container().await.delete_item(INSTANCE, &id, None).await.unwrap();
    sender.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    let (item, token, attempts) = next_turn(&worker, LONG).await;
    let error = item.history_error.expect("it is said");
    assert!(error.contains("the history has 0 events up to 0, and must have 1 up to 1"), "{error}");
    assert_eq!((attempts, item.history.len()), (1, 0));
    worker.abandon_orchestration_item(&token, None, false).await.unwrap();
    // The document was there all the time: the replica that answered the query was behind.
    fixture.container().await.create_item(INSTANCE, &id, &history, None).await.unwrap();
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!((item.history_error, item.history.len()), (None, 1));
}
