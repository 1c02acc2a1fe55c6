//! Repairs of lost starts, ends and continuations, and of documents that cannot be read.

use super::*;
use crate::fixture::*;
use duroxide::{
    providers::{Provider, WorkItem},
    EventKind,
};
use duroxide_cosmos::operate::{Diagnosis, Reason};
use serde_json::{json, Value};

async fn message_of(fixture: &Fixture, instance: &str) -> Value {
    let mut messages = fixture.documents_of_type(instance, "message").await;
    assert_eq!(messages.len(), 1, "{messages:?}");
    messages.remove(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_child_is_started_again_and_a_lost_completion_is_sent_again() {
    let fixture = Fixture::new(1);
    let (provider, doctor) = (
        fixture.provider_with("worker", test_config().with_inline_claims(false)).await,
        fixture.provider("doctor").await,
    );
    parent_and_child(&provider).await;
    assert_eq!(diagnose(&doctor, "parent").await.findings, [], "its start is on the way");
    fixture.remove(&message_of(&fixture, "child").await).await;
    repaired_as_offered(&doctor, "parent", Reason::LostChild).await;
    // A provider that does not have the lost documents in memory.
    let provider = fixture.provider_with("other", test_config().with_inline_claims(false)).await;
    let (item, token, _) = next_turn(&provider, LONG).await;
    assert_eq!(item.instance, "child");
    let [WorkItem::StartOrchestration { parent_instance, parent_id, .. }] = item.messages.as_slice() else {
        panic!("{:?}", item.messages);
    };
    assert_eq!((parent_instance.as_deref(), *parent_id), (Some("parent"), Some(2)));
    // The child ends, and its completion is lost.
    let end = WorkItem::SubOrchCompleted {
        parent_instance: "parent".to_owned(),
        parent_execution_id: 1,
        parent_id: 2,
        result: "done".to_owned(),
    };
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..ended("Completed") };
    let events = vec![started("child", 1), completed("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), vec![end.clone()], metadata).await.unwrap();
    assert_eq!(diagnose(&doctor, "parent").await.findings, [], "its end waits in the queue");
    fixture.remove(&message_of(&fixture, "parent").await).await;
    repaired_as_offered(&doctor, "parent", Reason::LostEnd).await;
    let (item, ..) = next_turn(&fixture.provider("third").await, LONG).await;
    assert_eq!((item.instance.as_str(), item.messages), ("parent", vec![end]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_sends_no_completion_while_a_start_is_on_its_way_to_the_ended_child() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider_with("worker", test_config().with_inline_claims(false)).await;
    parent_and_child(&provider).await;
    let (_, token, _) = next_turn(&provider, LONG).await;
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..ended("Completed") };
    let child = |parent_id| {
        let mut event = started("child", 1);
        let EventKind::OrchestrationStarted { parent_instance, parent_id: of, .. } = &mut event.kind else {
            panic!("it is started");
        };
        (*parent_instance, *of) = (Some("parent".to_owned()), Some(parent_id));
        event
    };
    let events = vec![child(2), completed("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    let again = fixture.provider("again").await;
    again.enqueue_for_orchestrator(start_child("child", Some("parent")), None).await.unwrap();
    assert_eq!(diagnose(&provider, "parent").await.findings, [], "the child has yet to say that it is there already");
    fixture.remove(&message_of(&fixture, "child").await).await;
    let diagnosis = diagnose(&provider, "parent").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostEnd]);
    assert!(diagnosis.can_be_repaired());
    // Another event of the parent has started that child: its end does not complete this event.
    let mut history = fixture.documents_of_type("child", "history").await.remove(0);
    let text = history["events"][0].as_str().unwrap().replace("\"parent_id\":2", "\"parent_id\":7");
    history["events"][0] = json!(text);
    fixture.put(&history).await;
    not_repairable(&provider, "parent", Reason::LostEnd).await;
    // A child whose history cannot be read has failed without a message to its parent. The doctor sends that message.
    history["events"][0] = json!("garbage");
    fixture.put(&history).await;
    let mut document = fixture.documents_of_type("child", "instance").await.remove(0);
    (document["status"], document["output"]) = (json!("Failed"), json!("poisoned"));
    fixture.put(&document).await;
    repaired_as_offered(&provider, "parent", Reason::LostEnd).await;
    let (item, ..) = next_turn(&fixture.provider("other").await, LONG).await;
    let [WorkItem::SubOrchFailed { parent_id: 2, details, .. }] = item.messages.as_slice() else {
        panic!("{:?}", item.messages);
    };
    assert!(details.display_message().contains("poisoned"), "{details:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_is_not_restored_from_a_part_of_its_history_and_keeps_its_incarnation() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider_with("worker", test_config().with_inline_claims(false)).await;
    parent_and_child(&provider).await;
    let document = fixture.documents_of_type("parent", "instance").await.remove(0);
    fixture.remove(&document).await;
    let history = fixture.documents_of_type("parent", "history").await.remove(0);
    // The doctor does not restore the document if another document proves a longer history.
    let candidates = [
        json!({ "id": "s:key:0", "instanceId": "parent", "type": "staged", "operations": [] }),
        json!({ "id": "w:1:9", "instanceId": "parent", "type": "activity", "due": 1, "seq": "1", "item": "{}" }),
        json!({ "id": "h:1:other:0", "instanceId": "parent", "type": "history", "execution": 1, "first": 9, "events": 7 }),
    ];
    for candidate in &candidates {
        fixture.put(candidate).await;
        let diagnosis = diagnose(&provider, "parent").await;
        assert!(reasons(&diagnosis).contains(&Reason::LostInstance), "{diagnosis:#?}");
        assert!(!diagnosis.can_be_repaired(), "{diagnosis:#?}");
        fixture.remove(candidate).await;
    }
    let mut gap = history.clone();
    gap["events"].as_array_mut().unwrap().remove(0);
    fixture.put(&gap).await;
    not_repairable(&provider, "parent", Reason::LostInstance).await;
    fixture.put(&history).await;
    // The start in the child's queue records the incarnation of its sender.
    repaired_as_offered(&provider, "parent", Reason::LostInstance).await;
    let made = fixture.documents_of_type("parent", "instance").await.remove(0);
    for field in ["incarnation", "execution", "status", "name", "version", "events", "totals", "epoch", "turn"] {
        assert_eq!(made[field], document[field], "{field}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_execution_that_lost_its_continuation_continues_with_its_queued_events() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider_with("worker", test_config().with_inline_claims(false)).await;
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let queue = |id, name: &str, data: &str| {
        let kind = EventKind::QueueEventDelivered { name: name.to_owned(), data: data.to_owned() };
        event("i", 1, id, kind)
    };
    let events = vec![
        started("i", 1),
        event("i", 1, 2, EventKind::QueueSubscribed { name: "q".to_owned() }),
        queue(3, "q", "heard"),
        queue(4, "q", "not heard"),
        event("i", 1, 5, EventKind::CustomStatusUpdated { status: Some("half".to_owned()) }),
        event("i", 1, 6, EventKind::OrchestrationContinuedAsNew { input: "next".to_owned() }),
    ];
    commit(&provider, &token, events, Vec::new(), vec![continue_as_new("i")], ended("ContinuedAsNew")).await.unwrap();
    assert_eq!(diagnose(&provider, "i").await.findings, []);
    fixture.remove(&message_of(&fixture, "i").await).await;
    repaired_as_offered(&fixture.provider("doctor").await, "i", Reason::LostContinuation).await;
    // The claim disproves the memory of the lost start.
    let (item, ..) = next_turn(&fixture.provider("other").await, LONG).await;
    let [WorkItem::ContinueAsNew { input, orchestration, carry_forward_events, initial_custom_status, .. }] =
        item.messages.as_slice()
    else {
        panic!("{:?}", item.messages)
    };
    assert_eq!((input.as_str(), orchestration.as_str()), ("next", "Orchestration"));
    assert_eq!(carry_forward_events, &[("q".to_owned(), "not heard".to_owned())]);
    assert_eq!(initial_custom_status.as_deref(), Some("half"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreferenced_documents_are_deleted_and_foreign_documents_stay() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("worker").await;
    begin(&provider, "i", Vec::new(), Vec::new()).await;
    let by_hand_only = diagnose(&provider, "i").await;
    assert_eq!(reasons(&by_hand_only), [Reason::Idle], "nothing was scheduled: {by_hand_only:#?}");
    // The event that the instance waited for has arrived: it waits for nothing any more.
    provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let came = EventKind::ExternalEvent { name: "note 2".to_owned(), data: String::new() };
    commit(&provider, &token, vec![filler("i", 1, 2), event("i", 1, 3, came)], Vec::new(), Vec::new(), running())
        .await
        .unwrap();
    not_repairable(&provider, "i", Reason::Idle).await;
    let unreferenced = [
        json!({ "id": "w:1:9", "instanceId": "i", "type": "activity", "due": 1, "seq": "1", "item": "{}" }),
        json!({ "id": "p:w:1:9", "instanceId": "i", "type": "payload", "item": "{}" }),
        json!({ "id": "s:dead:0", "instanceId": "i", "type": "staged", "operations": [] }),
    ];
    for document in &unreferenced {
        fixture.put(document).await;
    }
    fixture.put(&json!({ "id": "note", "instanceId": "i", "text": "remember the milk" })).await;
    let diagnosis = diagnose(&provider, "i").await;
    let unreferenced =
        |diagnosis: &Diagnosis| reasons(diagnosis).iter().filter(|reason| **reason == Reason::Unreferenced).count();
    assert_eq!(unreferenced(&diagnosis), 4, "{diagnosis:#?}");
    let done = repair(&provider, &diagnosis).await;
    assert_eq!(done.done.len(), 3, "{done:#?}");
    assert_eq!(unreferenced(&done.after.unwrap()), 1);
    let left: Vec<String> = fixture.partition("i").await.iter().map(|document| document["type"].to_string()).collect();
    assert_eq!(left.iter().filter(|kind| *kind == "null").count(), 1, "{left:?}");
    assert_eq!(left.len(), 4, "the instance, its history of two turns, the note: {left:?}");
    // Activities without an event.
    fixture
        .put(&json!({ "id": "w:1:2", "instanceId": "nobody", "type": "activity", "due": 1, "seq": "1", "item": "{}" }))
        .await;
    let diagnosis = diagnose(&provider, "nobody").await;
    assert!(reasons(&diagnosis).contains(&Reason::Unreferenced));
    let done = repair(&provider, &diagnosis).await;
    assert!(done.after.is_none() && fixture.partition("nobody").await.is_empty(), "{done:#?}");
    assert!(provider.doctor().await.unwrap().diagnose("nobody").await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_documents_are_named_and_an_unreadable_activity_is_restored() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("worker").await;
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let events = vec![started("i", 1), activity_scheduled("i", 2)];
    commit(&provider, &token, events, vec![activity("i", 2)], Vec::new(), running()).await.unwrap();
    fixture.put(&json!({ "id": "w:1:2", "instanceId": "i", "type": "activity", "due": "soon" })).await;
    fixture.put(&json!({ "id": "m:x", "instanceId": "i", "type": "message", "due": 1, "seq": "1", "createdAt": 1, "item": "garbage" }))
        .await;
    let doctor = fixture.provider("doctor").await;
    let diagnosis = diagnose(&doctor, "i").await;
    let mut found = reasons(&diagnosis);
    found.sort();
    assert_eq!(found, [Reason::LostActivity, Reason::Late, Reason::Unreadable, Reason::Unreadable], "{diagnosis:#?}");
    // The unreadable message may be the completion of the activity.
    assert!(!diagnosis.can_be_repaired(), "{diagnosis:#?}");
    fixture.remove(&json!({ "id": "m:x", "instanceId": "i" })).await;
    let mut held = json!({ "id": "w:1:2", "instanceId": "i", "type": "activity", "due": "soon" });
    held["lock"] = json!({ "token": "newer", "until": 9_000_000_000_000_000u64 });
    fixture.put(&held).await;
    not_repairable(&doctor, "i", Reason::Unreadable).await;
    held["lock"]["until"] = json!(1);
    fixture.put(&held).await;
    let diagnosis = diagnose(&doctor, "i").await;
    let done = repair(&doctor, &diagnosis).await;
    assert_eq!(done.done.len(), 1, "{done:#?}");
    // Only the text of the activity cannot be read.
    let mut work = fixture.documents_of_type("i", "activity").await.remove(0);
    work["item"] = json!("garbage");
    fixture.put(&work).await;
    repaired_as_offered(&doctor, "i", Reason::LostInput).await;
    let (item, ..) = next_activity(&fixture.provider("other").await, LONG).await;
    assert_eq!(
        item,
        WorkItem::ActivityExecute {
            instance: "i".to_owned(),
            execution_id: 1,
            id: 2,
            name: "Activity".to_owned(),
            input: "{}".to_owned(),
            session_id: None,
            tag: None,
        }
    );
    // The instance's document itself.
    fixture.put(&json!({ "id": "instance", "instanceId": "i", "type": "instance", "execution": "many" })).await;
    let diagnosis = diagnose(&doctor, "i").await;
    assert!(!diagnosis.can_be_repaired() && reasons(&diagnosis).contains(&Reason::Unreadable), "{diagnosis:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_operations_are_continued() {
    let fixture = Fixture::new(1);
    let (provider, late) = (fixture.provider("worker").await, fixture.provider("late").await);
    begin(&provider, "i", Vec::new(), Vec::new()).await;
    let instance = || async { fixture.documents_of_type("i", "instance").await.remove(0) };
    // A committed turn with one part that is not applied.
    let part = json!({ "op": "create", "document": { "id": "k:a", "instanceId": "i", "type": "kv", "key": "a", "value": "1", "epoch": 0 } });
    let staged = json!({ "id": "s:key:1", "instanceId": "i", "type": "staged", "operations": [part] });
    let mut half = instance().await;
    half["rollForward"] = json!({ "key": "key", "parts": 2, "next": 1 });
    half["due"] = json!(1);
    fixture.put(&half).await;
    not_repairable(&late, "i", Reason::HalfCommitted).await;
    fixture.put(&staged).await;
    let diagnosis = diagnose(&late, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::HalfCommitted], "{diagnosis:#?}");
    let done = repair(&late, &diagnosis).await;
    assert_eq!(done.done.len(), 1, "{done:#?}");
    assert!(fixture.documents_of_type("i", "staged").await.is_empty() && instance().await["rollForward"].is_null());
    assert_eq!(fixture.documents_of_type("i", "kv").await.len(), 1);
    // A prepared deletion whose coordinator does not know of it.
    let mut prepared = instance().await;
    prepared["deleting"] = json!({ "plan": "p", "coordinator": "gone", "before": "0" });
    prepared["due"] = json!(1);
    fixture.put(&prepared).await;
    let diagnosis = diagnose(&late, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::HalfDeleted], "{diagnosis:#?}");
    let done = repair(&late, &diagnosis).await;
    assert_eq!(done.done.len(), 1, "{done:#?}");
    assert!(instance().await["deleting"].is_null());
}
