//! Settings at their limits: endless locks and waits, filters without a version, and the delay between processes.

use crate::fixture::*;
use duroxide::providers::{DispatcherCapabilityFilter, Provider, SessionFetchConfig, TagFilter};
use duroxide_cosmos::Clock;
use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

const OWNER: &str = "worker";

/// The largest number in a document.
fn largest(value: &serde_json::Value) -> u64 {
    match value {
        serde_json::Value::Array(values) => values.iter().map(largest).max().unwrap_or(0),
        serde_json::Value::Object(fields) => fields.values().map(largest).max().unwrap_or(0),
        value => value.as_u64().unwrap_or(0),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_and_timers_and_waits_may_be_endless() {
    let fixture = Fixture::new(1);
    let endless = test_config().with_poll_interval(Duration::MAX).with_wakeup_interval(Duration::MAX);
    let a = Arc::new(fixture.provider_with("a", endless.with_operation_timeout(Duration::MAX)).await);
    let waits = a.clone();
    let waiting = tokio::spawn(async move { waits.fetch_orchestration_item(Duration::MAX, Duration::MAX, None).await });
    a.enqueue_for_orchestrator(start("i"), Some(Duration::ZERO)).await.unwrap();
    let (_, token, _) = waiting.await.unwrap().unwrap().expect("a turn");
    let timer = duroxide::providers::WorkItem::TimerFired {
        instance: "i".to_owned(),
        execution_id: 1,
        id: 9,
        fire_at_ms: u64::MAX,
    };
    let work = vec![activity_with("i", 2, Some("s"), None)];
    commit(a.as_ref(), &token, vec![started("i", 1)], work, vec![timer], running()).await.unwrap();
    a.enqueue_for_orchestrator(external("i", "never"), Some(Duration::MAX)).await.unwrap();
    let owner = SessionFetchConfig { owner_id: OWNER.to_owned(), lock_timeout: Duration::MAX };
    let fetched = a.fetch_work_item(Duration::MAX, Duration::MAX, Some(&owner), &TagFilter::Any).await.unwrap();
    let (_, token, _) = fetched.expect("an activity");
    assert_eq!(a.renew_session_lock(&[OWNER], Duration::MAX, Duration::MAX).await.unwrap(), 1);
    a.renew_work_item_lock(&token, Duration::MAX).await.unwrap();
    // Cosmos DB turns larger integers into floats, and 2^53 - 1 marks a message without an instance.
    for document in fixture.documents().await {
        assert!(largest(&document) < (1 << 53) - 1, "{document:#}");
    }
    // Another process reads all documents and finds no work that is due.
    let b = fixture.provider("b").await;
    assert!(b.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    a.ack_work_item(&token, Some(done("i", 2))).await.unwrap();
    let (item, ..) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [done("i", 2)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filter_without_version_ranges_takes_no_turn_even_of_instances_without_a_version() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    let nothing = DispatcherCapabilityFilter { supported_duroxide_versions: Vec::new() };
    a.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    for patience in [NOW, Duration::MAX] {
        let fetched = a.fetch_orchestration_item(LONG, patience, Some(&nothing)).await.unwrap();
        assert!(fetched.is_none(), "{fetched:?}");
    }
    assert!(fixture.documents_of_type("i", "instance").await.is_empty(), "it was not claimed");
    assert_eq!(next_turn(&a, LONG).await.2, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_this_process_overtake_those_of_another_for_a_second_at_most() {
    let fixture = Fixture::new(1);
    let time = Arc::new(AtomicU64::new(now()));
    let clock = |time: &Arc<AtomicU64>| {
        let time = time.clone();
        Clock::from_fn(move || time.load(Ordering::SeqCst))
    };
    let config = || test_config().with_clock(clock(&time)).with_inline_claims(false);
    let (a, b) = (fixture.provider_with("a", config()).await, fixture.provider_with("b", config()).await);
    begin(&a, "i", Vec::new(), Vec::new()).await;
    // This turn queries the queue, and so gets all messages.
    time.fetch_add(1_000, Ordering::SeqCst);
    a.enqueue_for_orchestrator(external("i", "asks"), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external("i", "asks")]);
    commit(&a, &token, vec![filler("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();

    time.fetch_add(1, Ordering::SeqCst);
    b.enqueue_for_orchestrator(external("i", "first, of b"), None).await.unwrap();
    time.fetch_add(1, Ordering::SeqCst);
    a.enqueue_for_orchestrator(external("i", "second, of a"), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external("i", "second, of a")], "README: a process runs on its own messages at once");
    commit(&a, &token, vec![filler("i", 1, 3)], Vec::new(), Vec::new(), running()).await.unwrap();

    time.fetch_add(1_000, Ordering::SeqCst);
    a.enqueue_for_orchestrator(external("i", "third, of a"), None).await.unwrap();
    let (item, ..) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external("i", "first, of b"), external("i", "third, of a")]);
}
