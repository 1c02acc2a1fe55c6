//! The doctor restores the document of an instance only if the history proves its content.

use super::*;
use crate::fixture::*;
use duroxide::{
    providers::{ExecutionMetadata, Provider},
    EventKind,
};
use duroxide_cosmos::{operate::Reason, CosmosDBProvider};
use duroxide_cosmos_emulator::{Gate, WireAction, WireRequest, WireRule};
use serde_json::{json, Value};

/// Makes an instance that waits for an event and an activity, and removes its document.
async fn without_its_document(fixture: &Fixture, provider: &CosmosDBProvider) -> Value {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![started("i", 1), activity_scheduled("i", 2), waits_for(3, "Event")];
    commit(provider, &token, events, vec![activity("i", 2)], Vec::new(), running()).await.unwrap();
    let document = fixture.only("i", "instance").await;
    fixture.remove(&document).await;
    document
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_instance_is_restored_after_a_worker_has_claimed_one_of_its_messages() {
    let fixture = Fixture::new(1);
    without_its_document(&fixture, &fixture.provider_with("first", test_config().with_inline_claims(false)).await)
        .await;
    let worker = fixture.provider("worker").await;
    worker.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let looked = worker.fetch_orchestration_item(LONG, NOW, None).await.expect("a fetch that works");
    assert!(looked.is_none(), "there is no instance: {looked:?}");
    repaired(&fixture.provider("doctor").await, "i", Reason::LostInstance).await;
    let (item, token, _) = next_turn(&fixture.provider("other").await, LONG).await;
    assert_eq!((item.instance.as_str(), item.history.len()), ("i", 3));
    assert_eq!(item.messages, [external("i", "x")], "the message is not lost either");
    drop(token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_instance_is_restored_over_a_document_that_claims_have_left() {
    for deferred in [false, true] {
        let fixture = Fixture::new(1);
        let before = without_its_document(&fixture, &fixture.provider("first").await).await;
        let mut left = json!({ "id": "instance", "instanceId": "i", "type": "instance", "execution": 1, "incarnation": "other",
                               "createdAt": now(), "updatedAt": now(), "startedAt": now(), "due": now() });
        if deferred {
            left["deferred"] = true.into();
            let item = serde_json::to_string(&external("i", "x")).unwrap();
            fixture
                .put(&json!({ "id": "m:e:x", "instanceId": "i", "type": "message", "due": 9_007_199_254_740_991u64,
                                 "seq": "1", "createdAt": now(), "item": item }))
                .await;
        } else {
            (left["lock"], left["claims"]) = (json!({ "token": "dead", "until": 1 }), json!([1]));
        }
        fixture.put(&left).await;
        let doctor = fixture.provider("doctor").await;
        let diagnosis = diagnose(&doctor, "i").await;
        assert_eq!(diagnosis.state, "has lost its document");
        repaired(&doctor, "i", Reason::LostInstance).await;
        let made = fixture.only("i", "instance").await;
        for field in ["execution", "status", "name", "version", "events", "totals", "epoch", "turn"] {
            assert_eq!(made[field], before[field], "{field}");
        }
        assert_eq!((made["lock"].is_null(), made["deferred"] == true), (true, deferred), "{made}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_has_lost_its_document_is_not_started_again() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider_with("worker", test_config().with_inline_claims(false)).await;
    provider.enqueue_for_orchestrator(start("parent"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let (name, instance, input) = ("Orchestration".to_owned(), "child".to_owned(), "{}".to_owned());
    let kind = EventKind::SubOrchestrationScheduled { name, instance, input };
    let events = vec![started("parent", 1), event("parent", 1, 2, kind)];
    let start = vec![start_child("child", Some("parent"))];
    commit(&provider, &token, events, Vec::new(), start, running()).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let metadata = ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..running() };
    let events = vec![started("child", 1), filler("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    fixture.remove(&fixture.only("child", "instance").await).await;
    fixture
        .put(&json!({ "id": "instance", "instanceId": "child", "type": "instance", "execution": 1, "deferred": true }))
        .await;
    let doctor = fixture.provider("doctor").await;
    assert!(left_to_the_operator(&doctor, "parent", Reason::LostChild).await.contains("has a history"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_is_not_restored_from_a_history_that_is_deleted_at_the_same_time() {
    let fixture = Fixture::new(1);
    without_its_document(&fixture, &fixture.provider("worker").await).await;
    let doctor = fixture.provider("doctor").await;
    let diagnosis = diagnose(&doctor, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostInstance]);
    // The write of the document is on its way when the history is deleted.
    let gate = Gate::new();
    let makes = |request: &WireRequest<'_>| {
        let body = request.json().unwrap_or_default();
        let writes = |document: &Value| document["type"] == "instance";
        goes_to(request, "i")
            && (writes(&body) || body.as_array().is_some_and(|o| o.iter().any(|o| writes(&o["resourceBody"]))))
    };
    fixture.account.wire().add(WireRule::new(WireAction::HoldBefore(gate.clone())).client("doctor").matching(makes));
    let repairing = tokio::spawn(async move { repair(&doctor, &diagnosis).await });
    tokio::time::timeout(PATIENCE, gate.reached()).await.expect("the document is made");
    for document in fixture.partition("i").await {
        fixture.remove(&document).await;
    }
    gate.open();
    let repair = repairing.await.unwrap();
    assert!(repair.done.is_empty(), "{repair:#?}");
    assert_eq!(fixture.partition("i").await, Vec::<Value>::new(), "an instance without a history");
}

const CHILD: &str = "child";

const HOUR: i64 = 3_600_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_instance_can_be_repaired_after_workers_have_claimed_its_messages() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    begin(&a, CHILD, Vec::new(), Vec::new()).await;
    fixture.container().await.delete_item(CHILD.to_owned(), "instance", None).await.unwrap();
    drop(a);
    let messages = [queue_message(CHILD, "queue", "1"), external(CHILD, "2"), queue_message(CHILD, "queue", "3")];
    for message in &messages {
        b.enqueue_for_orchestrator(message.clone(), None).await.unwrap();
        assert_no_turn(&b).await;
    }
    assert_eq!(fixture.documents_of_type(CHILD, "message").await.len(), messages.len());
    assert!(fixture.documents_of_type(CHILD, "instance").await.is_empty(), "nothing hides that it is lost");
    let doctor = b.doctor().await.unwrap();
    let diagnosis = doctor.diagnose(CHILD).await.unwrap().expect("something of that name");
    assert!(diagnosis.can_be_repaired(), "{diagnosis:#?}");
    doctor.repair(&diagnosis).await.unwrap();
    let c = fixture.provider_with("c", config_ahead_by(HOUR)).await;
    let (item, ..) = next_turn(&c, LONG).await;
    assert_eq!(item.messages, messages);
    assert_eq!(item.history.len(), 1);
}
