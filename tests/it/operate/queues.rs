//! Queues, members and poisoned messages.

use crate::fixture::*;
use duroxide::providers::{Provider, TagFilter};
use duroxide_cosmos::{operate::IntentState, CosmosDBProvider};
use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queues_show_waiting_work_its_age_and_running_work() {
    let fixture = Fixture::new(1);
    let time = Arc::new(AtomicU64::new(1_000));
    let maker = fixture.provider_at(&time).await;
    let work = vec![
        activity("i", 2),
        activity("i", 3),
        activity_with("i", 4, None, Some("gpu")),
        activity_with("i", 5, Some("cart"), None),
    ];
    begin(&maker, "i", work, Vec::new()).await;
    time.store(3_000, Ordering::Relaxed);
    let running = maker.fetch_work_item(LONG, Duration::ZERO, None, &TagFilter::DefaultOnly).await.unwrap();
    assert!(running.is_some());
    maker.enqueue_for_orchestrator(external("i", "now"), None).await.unwrap();
    maker.enqueue_for_orchestrator(external("i", "later"), Some(Duration::from_secs(60))).await.unwrap();
    let report = maker.queues().await.unwrap();
    let turns = &report.turns;
    assert_eq!((turns.waiting, turns.later, turns.deferred, turns.oldest), (1, 1, 0, Some(3_000)));
    let told: Vec<_> = report
        .activities
        .iter()
        .map(|q| (q.tag.as_deref(), q.session.as_deref(), q.waiting, q.running, q.oldest))
        .collect();
    let expected = [
        (None, None, 1, 1, Some(1_000)),
        (None, Some("cart"), 1, 0, Some(1_000)),
        (Some("gpu"), None, 1, 0, Some(1_000)),
    ];
    assert_eq!(told, expected);
    assert!(!report.capped);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_are_the_workers_whose_dispatchers_wait() {
    let fixture = Fixture::new(1);
    let runner = Arc::new(fixture.provider("runner").await);
    assert!(runner.members().await.unwrap().is_empty(), "no dispatcher has waited yet");
    let waiting = runner.clone();
    let task = tokio::spawn(async move { waiting.fetch_orchestration_item(LONG, PATIENCE, None).await });
    let there = async {
        loop {
            let members = runner.members().await.unwrap();
            if members.iter().any(|member| member.turns.is_some()) {
                return members;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let members = tokio::time::timeout(PATIENCE, there).await.expect("it says that it is there");
    assert_eq!(members.len(), 1);
    assert_eq!(members[0].turns.as_ref().unwrap().slots.to_string(), "0 to 255");
    assert!(members[0].activities.is_none() && members[0].last_heard > 0);
    task.abort();
}

/// Makes an instance with a message that cannot be delivered.
async fn poisoned(fixture: &Fixture, maker: &CosmosDBProvider) -> String {
    begin(maker, "i", Vec::new(), Vec::new()).await;
    let intent = serde_json::json!({
        "id": "i:token:0", "instanceId": "i", "type": "intent", "createdAt": 1, "target": "other", "retries": 3,
        "poisoned": "too large", "document": {
            "id": "m:token:0", "instanceId": "other", "type": "message", "due": 1, "seq": "1", "createdAt": 1, "attempts": 0,
            "starts": true, "delivered": true, "item": serde_json::to_string(&start("other")).unwrap(),
        },
    });
    fixture.container().await.create_item("i", "i:token:0", intent, None).await.unwrap();
    "i:token:0".to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poisoned_message_is_shown_and_can_be_retried_or_removed() {
    for retry in [true, false] {
        let fixture = Fixture::new(1);
        let maker = fixture.provider("maker").await;
        let id = poisoned(&fixture, &maker).await;
        let late = maker.late_intents().await.unwrap();
        assert_eq!(late.len(), 1);
        assert_eq!((late[0].id.as_str(), late[0].message.as_str()), (id.as_str(), "StartOrchestration"));
        assert_eq!(late[0].state, IntentState::Poisoned { reason: "too large".to_owned() });
        assert!(!maker.retry_intent("i", "i:nothing").await.unwrap());
        assert!(!maker.drop_intent("i", "instance").await.unwrap(), "only intents can be removed");
        if retry {
            assert!(maker.retry_intent("i", &id).await.unwrap());
            assert_eq!(next_turn(&maker, LONG).await.0.instance, "other");
        } else {
            assert!(maker.drop_intent("i", &id).await.unwrap());
            assert!(!maker.drop_intent("i", &id).await.unwrap(), "it is gone");
        }
        assert!(fixture.documents_of_type("i", "instance").await.len() == 1);
        let gone = async {
            while !fixture.documents_of_type("i", "intent").await.is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, gone).await.expect("it is settled");
    }
}
