//! The doctor names instances that make no progress, and is silent about healthy ones.

use super::*;
use crate::fixture::*;
use duroxide::{
    providers::{ExecutionMetadata, Provider},
    Event, EventKind,
};
use duroxide_cosmos::{
    operate::{Diagnosis, Reason},
    CosmosDBProvider,
};
use serde_json::{json, Value};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_names_the_missing_worker_if_no_worker_takes_waiting_work() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("worker").await;
    let late = fixture.provider("late").await;
    let detail = |diagnosis: &Diagnosis| {
        diagnosis.findings.iter().map(|finding| finding.detail.clone()).collect::<Vec<_>>().join("; ")
    };
    provider.enqueue_for_orchestrator(start("turn"), None).await.unwrap();
    age(&fixture, "turn", "message", "due", 40_000).await;
    let diagnosis = diagnose(&late, "turn").await;
    assert_eq!(reasons(&diagnosis), [Reason::Late]);
    assert!(detail(&diagnosis).contains("no process takes turns"), "{diagnosis:#?}");
    // An expired lock of a version that no worker runs.
    let provider = fixture.provider("other").await;
    let (_, token, _) = next_turn(&provider, LONG).await;
    let events = vec![started("turn", 1), activity_scheduled("turn", 2), activity_scheduled("turn", 3)];
    let metadata = duroxide::providers::ExecutionMetadata {
        pinned_duroxide_version: Some(semver::Version::new(9, 0, 0)),
        ..running()
    };
    let work = vec![activity_with("turn", 2, None, Some("gpu")), activity_with("turn", 3, Some("cart"), None)];
    commit(&provider, &token, events, work, Vec::new(), metadata).await.unwrap();
    let member = |owners: Value| {
        let slots = json!({ "from": 0, "to": 256 });
        json!({ "id": "member:m", "instanceId": "$d:fleet", "type": "member", "member": "m", "owners": owners,
                "turns": { "need": ["0.1.0", "0.2.0"], "slots": slots },
                "activities": { "need": { "any": false, "untagged": true, "tags": [] }, "slots": slots } })
    };
    for document in fixture.partition("$d:fleet").await {
        fixture.remove(&document).await;
    }
    fixture.put(&member(json!(["somebody"]))).await;
    let mut locked = fixture.documents_of_type("turn", "instance").await.remove(0);
    locked["lock"] = json!({ "token": "dead", "until": 1 });
    fixture.put(&locked).await;
    provider.enqueue_for_orchestrator(external("turn", "x"), None).await.unwrap();
    age(&fixture, "turn", "message", "due", 40_000).await;
    age(&fixture, "turn", "activity", "due", 40_000).await;
    let held = |owner: &str| {
        json!({ "id": "session", "instanceId": "$s:cart", "type": "session", "sessionId": "cart", "owner": owner,
                "lockedUntil": 9_000_000_000_000_000u64, "lastActivity": 1 })
    };
    fixture.put(&held("somebody")).await;
    let diagnosis = diagnose(&late, "turn").await;
    assert_eq!(reasons(&diagnosis), [Reason::Late; 3], "{diagnosis:#?}");
    let said = detail(&diagnosis);
    assert!(
        said.contains("with a lock that has expired: it is pinned to duroxide 9.0.0, which none of 1 processes runs"),
        "{said}"
    );
    assert!(said.contains("no process runs activities with tag \"gpu\""), "{said}");
    assert!(said.contains("of session \"cart\"") && said.contains("its session belongs to \"somebody\""), "{said}");
    fixture.put(&held("a stranger")).await;
    let said = detail(&diagnose(&late, "turn").await);
    assert!(said.contains("no live process has that name"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_without_its_parent_and_an_undelivered_message_are_reported() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider_with("worker", test_config().with_inline_claims(false)).await;
    parent_and_child(&provider).await;
    let (_, token, _) = next_turn(&provider, LONG).await;
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..running() };
    let events = vec![started("child", 1), filler("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    assert_eq!(diagnose(&provider, "child").await.findings, []);
    let mut parent = fixture.documents_of_type("parent", "instance").await.remove(0);
    parent["incarnation"] = json!("another");
    fixture.put(&parent).await;
    not_repairable(&provider, "child", Reason::Orphan).await;
    not_repairable(&provider, "parent", Reason::LostChild).await;
    fixture.remove(&parent).await;
    not_repairable(&provider, "child", Reason::Orphan).await;
    let intent = json!({ "id": "i:t:0", "instanceId": "child", "type": "intent", "createdAt": 1, "target": "x", "document": {},
                         "poisoned": "too large" });
    fixture.put(&intent).await;
    let found = reasons(&diagnose(&provider, "child").await);
    assert_eq!(found, [Reason::Orphan, Reason::Undelivered]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scan_finds_instances_without_progress_and_a_full_scan_finds_those_without_a_document() {
    let fixture = Fixture::new(3);
    let provider = fixture.provider("worker").await;
    let later = fixture.provider("later").await;
    for n in 0..3 {
        begin(&provider, &format!("still {n}"), Vec::new(), Vec::new()).await;
        age(&fixture, &format!("still {n}"), "instance", "updatedAt", HOUR).await;
    }
    finish(&provider, "ended", None).await;
    finish(&provider, "headless", None).await;
    fixture.remove(&fixture.documents_of_type("headless", "instance").await.remove(0)).await;
    provider.enqueue_for_orchestrator(start("waits"), None).await.unwrap();
    age(&fixture, "waits", "message", "due", HOUR).await;
    fixture.put(&json!({ "id": "m:e:x", "instanceId": "deferred", "type": "message", "due": 9_007_199_254_740_991u64, "seq": "1",
                         "createdAt": 1, "item": serde_json::to_string(&external("deferred", "x")).unwrap() }),
    )
    .await;
    let scan = |unmoved: u64, all: bool| {
        let later = &later;
        async move {
            let mut scan = later.doctor().await.unwrap().scan(Duration::from_secs(unmoved), all);
            let mut found = Vec::new();
            while let Some(page) = scan.next().await.unwrap() {
                found.extend(page);
            }
            found.sort();
            found
        }
    };
    assert_eq!(scan(60, false).await, ["still 0", "still 1", "still 2", "waits"]);
    assert_eq!(scan(7_200, false).await, ["waits"], "they have moved since");
    assert_eq!(scan(60, true).await, ["deferred", "ended", "headless", "still 0", "still 1", "still 2", "waits"]);
    repaired_as_offered(&later, "deferred", Reason::LostInstance).await;
    assert_eq!(fixture.documents_of_type("deferred", "instance").await[0]["deferred"], true);
}

async fn scan(provider: &CosmosDBProvider) -> Vec<String> {
    let mut scan = provider.doctor().await.unwrap().scan(Duration::from_secs(600), false);
    let mut found = Vec::new();
    while let Some(page) = scan.next().await.unwrap() {
        found.extend(page);
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_cannot_be_delivered_for_hours_is_found() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("worker").await;
    let intent = |instance: &str, age: u64| {
        json!({ "id": "i:t:0", "instanceId": instance, "type": "intent", "createdAt": now() - age, "target": "x", "document": {},
                "due": now() + 50_000, "retries": 200 })
    };
    for instance in ["hours", "moment", "poisoned"] {
        finish(&provider, instance, None).await;
    }
    fixture.put(&intent("hours", 3 * HOUR as u64)).await;
    // One failure a moment ago is not reported.
    let mut young = intent("moment", 1_000);
    young["retries"] = 1.into();
    fixture.put(&young).await;
    let mut poisoned = intent("poisoned", HOUR as u64);
    (poisoned["due"], poisoned["poisoned"]) = (Value::Null, "too large".into());
    poisoned.as_object_mut().unwrap().remove("due");
    fixture.put(&poisoned).await;
    let detail = left_to_the_operator(&provider, "hours", Reason::Undelivered).await;
    assert!(detail.contains("200 attempts"), "{detail}");
    assert_eq!(diagnose(&provider, "moment").await.findings, []);
    let mut found = scan(&provider).await;
    found.sort();
    assert_eq!(found, ["hours", "poisoned"], "they are found without being named");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_waits_for_an_event_is_not_idle() {
    let came = |id| event("i", 1, id, EventKind::ExternalEvent { name: "go".to_owned(), data: String::new() });
    let queued = |id| event("i", 1, id, EventKind::QueueEventDelivered { name: "go".to_owned(), data: String::new() });
    let takes = |id| event("i", 1, id, EventKind::QueueSubscribed { name: "go".to_owned() });
    let gave_up = |id, of, kind: fn(String) -> EventKind| {
        Event::with_event_id(id, "i", 1, Some(of), kind("dropped_future".to_owned()))
    };
    let wait_over = |id, of| gave_up(id, of, |reason| EventKind::ExternalSubscribedCancelled { reason });
    let queue_over = |id, of| gave_up(id, of, |reason| EventKind::QueueSubscriptionCancelled { reason });
    let cases: [(&str, Vec<Event>, bool); 8] = [
        ("the event came before the subscription", vec![came(2), waits_for(3, "go")], true),
        (
            "the wait was over when the event came",
            vec![waits_for(2, "go"), wait_over(3, 2), came(4), waits_for(5, "go")],
            true,
        ),
        (
            "the wait was over after the event came",
            vec![waits_for(2, "go"), came(3), wait_over(4, 2), waits_for(5, "go")],
            true,
        ),
        ("one of two events came", vec![waits_for(2, "go"), waits_for(3, "go"), came(4)], true),
        ("both came", vec![waits_for(2, "go"), came(3), waits_for(4, "go"), came(5)], false),
        ("a queue keeps what comes early", vec![queued(2), takes(3)], false),
        ("an event is no queue message", vec![came(2), takes(3)], true),
        ("a cancelled wait takes nothing from a queue", vec![takes(2), queue_over(3, 2), queued(4), takes(5)], false),
    ];
    for (what, events, waits) in cases {
        let fixture = Fixture::new(1);
        let provider = fixture.provider("worker").await;
        first_turn(&provider, "i", events).await;
        let diagnosis = diagnose(&provider, "i").await;
        let expected = if waits { vec![] } else { vec![Reason::Idle] };
        assert_eq!(reasons(&diagnosis), expected, "{what}: {diagnosis:#?}");
        assert_eq!(diagnosis.state == "waits for event go", waits, "{what}: {}", diagnosis.state);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_workers_are_not_reported_as_missing() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("worker").await;
    // A process whose workers are all busy has asked for no activity in the last minute.
    waiting_activity(&fixture, &provider, Value::Null).await;
    let detail = left_to_the_operator(&provider, "i", Reason::Late).await;
    assert!(!detail.contains("no process runs activities") && detail.contains("busy"), "{detail}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_between_two_executions_has_not_ended_and_its_lost_start_is_found() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider_with("worker", test_config().with_inline_claims(false)).await;
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let continued = EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() };
    let events = vec![started("i", 1), event("i", 1, 2, continued)];
    commit(&worker, &token, events, Vec::new(), vec![continue_as_new("i")], ended("ContinuedAsNew")).await.unwrap();
    let diagnosis = diagnose(&worker, "i").await;
    assert!(!diagnosis.state.starts_with("has ended"), "{diagnosis:#?}");
    fixture.remove(&fixture.documents_of_type("i", "message").await[0]).await;
    // Another start of the same id begins no execution of this instance.
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let diagnosis = diagnose(&worker, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostContinuation], "{diagnosis:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_whose_parent_cannot_be_read_is_no_orphan() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    begin(&worker, "parent", Vec::new(), Vec::new()).await;
    worker.enqueue_for_orchestrator(start_child("child", Some("parent")), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let metadata = ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..running() };
    commit(&worker, &token, vec![started("child", 1)], Vec::new(), Vec::new(), metadata).await.unwrap();
    let mut parent = fixture.documents_of_type("parent", "instance").await.remove(0);
    parent["execution"] = json!("one");
    fixture.put(&parent).await;
    let doctor = fixture.provider("doctor").await;
    let diagnosis = diagnose(&doctor, "child").await;
    assert!(!reasons(&diagnosis).contains(&Reason::Orphan), "{diagnosis:#?}");
}
