//! A shutdown releases the locks of the process without counting an attempt.

use crate::fixture::*;
use duroxide::providers::{Provider, TagFilter};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use std::{sync::Arc, time::Duration};

const INSTANCE: &str = "i";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_releases_turns_activities_and_sessions_without_counting_an_attempt() {
    let fixture = Fixture::new(2);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    begin(&a, INSTANCE, vec![activity(INSTANCE, 2), activity_with(INSTANCE, 3, Some("s"), None)], Vec::new()).await;
    for _ in 0..2 {
        a.fetch_work_item(LONG, PATIENCE, Some(&session_owner("a")), &TagFilter::Any)
            .await
            .unwrap()
            .expect("an activity");
    }
    a.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    next_turn(&a, LONG).await;
    assert!(a.shutdown_within(PATIENCE).await);
    assert!(a.fetch_orchestration_item(LONG, PATIENCE, None).await.unwrap().is_none(), "it has left");

    let (item, _, attempts) = b.fetch_orchestration_item(LONG, NOW, None).await.unwrap().expect("the turn");
    assert_eq!((item.messages, attempts), (vec![external(INSTANCE, "news")], 1));
    for _ in 0..2 {
        let fetched = b.fetch_work_item(LONG, NOW, Some(&session_owner("b")), &TagFilter::Any).await.unwrap();
        assert_eq!(fetched.expect("an activity").2, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_ends_even_in_an_outage_and_reports_that_not_all_locks_were_released() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    begin(&a, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    next_activity(&a, LONG).await;
    fixture.account.wire().add(WireRule::new(WireAction::FailConnection).client("a"));
    let ended = tokio::time::timeout(PATIENCE, a.shutdown_within(Duration::from_millis(300))).await;
    assert!(!ended.expect("it ends by itself"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_releases_locks_although_a_poll_gets_no_answer() {
    let fixture = Fixture::new(1);
    let a = Arc::new(fixture.provider("a").await);
    begin(a.as_ref(), INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    next_activity(a.as_ref(), LONG).await;
    let (polls, members) = (Gate::new(), Gate::new());
    let hold = |gate: &Gate| WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Query).client("a");
    fixture.account.wire().add(hold(&polls).matching(|request| request.partition_range.is_some()));
    fixture.account.wire().add(hold(&members).matching(|request| goes_to(request, "$d:fleet")));
    fixture.account.wire().add(WireRule::new(WireAction::Delay(Duration::from_millis(20))).client("a"));
    let waiting = tokio::spawn({
        let a = a.clone();
        async move { a.fetch_orchestration_item(LONG, PATIENCE, None).await }
    });
    polls.reached().await;
    a.shutdown_within(Duration::from_secs(2)).await;
    let work = fixture.documents_of_type(INSTANCE, "activity").await;
    assert!(work[0].get("lock").is_none_or(serde_json::Value::is_null), "{work:?}");
    assert!(waiting.await.unwrap().unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_spares_sessions_that_another_process_has_taken_under_the_same_owner_name() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    begin(&a, INSTANCE, vec![activity_with(INSTANCE, 2, Some("s"), None)], Vec::new()).await;
    b.fetch_work_item(LONG, PATIENCE, Some(&session_owner("same")), &TagFilter::Any)
        .await
        .unwrap()
        .expect("an activity");
    assert!(a.shutdown_within(PATIENCE).await);
    assert_eq!(fixture.documents_of_type("$s:s", "session").await.len(), 1);
    assert!(b.shutdown_within(PATIENCE).await);
    assert!(fixture.documents_of_type("$s:s", "session").await.is_empty());
}
