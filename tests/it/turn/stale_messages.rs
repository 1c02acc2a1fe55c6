//! A process may remember a message that another worker has consumed since. A turn that ran on such a message commits
//! nothing.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, ProviderAdmin, WorkItem},
    Event, EventKind,
};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use std::sync::Arc;

const PARENT: &str = "parent";

const CHILD: &str = "child";

fn happened(instance: &str, id: u64) -> Event {
    event(instance, 1, id, EventKind::ExternalEvent { name: "Event".to_owned(), data: "news".to_owned() })
}

/// All fields of a partition's documents except system fields, in a stable order.
async fn contents(fixture: &Fixture, key: &str) -> Vec<serde_json::Value> {
    let mut documents = fixture.partition(key).await;
    documents.sort_by_key(|document| document["id"].to_string());
    documents
}

/// "a" remembers a message that "b" has consumed, and runs a turn on it.
async fn runs_on_a_consumed_message(fixture: &Fixture, a: &dyn Provider, consumed: WorkItem) {
    let (item, token, _) = next_turn(a, LONG).await;
    assert_eq!(item.messages, [consumed], "the memory of it is what this test is about");
    let before = ids(&a.read(CHILD).await.unwrap());
    let next = before.last().unwrap() + 1;
    let refused = commit(a, &token, vec![happened(CHILD, next)], Vec::new(), Vec::new(), running()).await;
    assert!(!refused.unwrap_err().is_retryable());
    // The next call of duroxide's runtime would fail a healthy orchestration.
    let failure = commit(a, &token, vec![failed(CHILD, next)], Vec::new(), Vec::new(), ended("Failed")).await;
    assert!(!failure.unwrap_err().is_retryable());
    let other = fixture.provider("other").await;
    assert_eq!(ids(&other.read(CHILD).await.unwrap()), before);
    // The turn is released without counting an attempt: the next message gets a turn of its own.
    other.enqueue_for_orchestrator(external(CHILD, "later"), None).await.unwrap();
    let (item, token, attempts) = next_turn(&other, LONG).await;
    assert_eq!((item.messages, attempts), (vec![external(CHILD, "later")], 1));
    commit(&other, &token, vec![happened(CHILD, next)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert!(fixture.documents_of_type(CHILD, "message").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_childs_start_that_another_process_has_consumed_is_not_consumed_again() {
    let fixture = Fixture::new(1);
    let a = fixture.provider_with("a", test_config().with_inline_claims(false)).await;
    let b = fixture.provider("b").await;
    // The answer to the delivery is late: "a" learns that the start is in the queue after another process has consumed
    // it.
    let gate = fixture.hold_answer("a", RequestKind::Create, |request| goes_to(request, CHILD));
    let child = start_child(CHILD, Some(PARENT));
    begin(&a, PARENT, Vec::new(), vec![child.clone()]).await;
    gate.reached().await;
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, std::slice::from_ref(&child));
    commit(&b, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    // "a" runs a later turn of the child, and so has its history in memory.
    a.enqueue_for_orchestrator(external(CHILD, "news"), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external(CHILD, "news")]);
    commit(&a, &token, vec![happened(CHILD, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    gate.open();
    runs_on_a_consumed_message(&fixture, &a, child).await;
    assert_eq!(fixture.documents_of_type(CHILD, "delivered").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_that_another_process_has_consumed_is_not_consumed_again() {
    let fixture = Fixture::new(1);
    let (a, b) = (Arc::new(fixture.provider("a").await), fixture.provider("b").await);
    begin(a.as_ref(), CHILD, vec![activity(CHILD, 2)], Vec::new()).await;
    let (_, work, _) = next_activity(a.as_ref(), LONG).await;
    let gate = fixture.hold_answer("a", RequestKind::Batch, |request| goes_to(request, CHILD));
    let worker = a.clone();
    let slow = tokio::spawn(async move { worker.ack_work_item(&work, Some(done(CHILD, 2))).await });
    gate.reached().await;
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [done(CHILD, 2)]);
    commit(&b, &token, vec![happened(CHILD, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    a.enqueue_for_orchestrator(external(CHILD, "news"), None).await.unwrap();
    let (_, token, _) = next_turn(a.as_ref(), LONG).await;
    commit(a.as_ref(), &token, vec![happened(CHILD, 3)], Vec::new(), Vec::new(), running()).await.unwrap();
    gate.open();
    slow.await.unwrap().unwrap();
    runs_on_a_consumed_message(&fixture, a.as_ref(), done(CHILD, 2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_external_message_that_another_process_has_consumed_is_not_fetched_again() {
    let fixture = Fixture::new(1);
    let (a, b) = (Arc::new(fixture.provider("a").await), fixture.provider("b").await);
    begin(a.as_ref(), CHILD, Vec::new(), Vec::new()).await;
    let gate = fixture.hold_answer("a", RequestKind::Create, |request| goes_to(request, CHILD));
    let sender = a.clone();
    let slow = tokio::spawn(async move { sender.enqueue_for_orchestrator(external(CHILD, "slow"), None).await });
    gate.reached().await;
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [external(CHILD, "slow")]);
    commit(&b, &token, vec![happened(CHILD, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    a.enqueue_for_orchestrator(external(CHILD, "news"), None).await.unwrap();
    let (_, token, _) = next_turn(a.as_ref(), LONG).await;
    commit(a.as_ref(), &token, vec![happened(CHILD, 3)], Vec::new(), Vec::new(), running()).await.unwrap();
    gate.open();
    slow.await.unwrap().unwrap();
    assert!(a.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_was_due_before_a_turn_consumed_it_is_not_offered_again() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    begin(&a, PARENT, Vec::new(), vec![start_child(CHILD, Some(PARENT))]).await;
    // "a" knows of the start, and "b" takes it.
    let (_, token, _) = next_turn(&b, LONG).await;
    commit(&b, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    a.enqueue_for_orchestrator(external(CHILD, "news"), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external(CHILD, "news")]);
    commit(&a, &token, vec![happened(CHILD, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert!(a.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
}

/// Whether the process that wrote a message twice notices it.
#[derive(Clone, Copy, PartialEq)]
enum Sender {
    Looks,
    CantLook,
}

/// The answer to the enqueue of "a" is lost, and the SDK's repetition arrives after `consume` has ended.
async fn enqueue_twice<F: std::future::Future<Output = ()>>(
    fixture: &Fixture,
    item: WorkItem,
    sender: Sender,
    consume: F,
) {
    let a = Arc::new(fixture.provider("a").await);
    let (gate, wire) = (Gate::new(), fixture.account.wire());
    if sender == Sender::CantLook {
        let refused = WireAction::Refuse { status: 400, substatus: None, retry_after: None };
        wire.add(WireRule::new(refused).on(RequestKind::Query).client("a"));
    }
    let create = |action| WireRule::new(action).on(RequestKind::Create).client("a");
    wire.add(create(WireAction::LoseAnswer).times(1));
    wire.add(create(WireAction::HoldBefore(gate.clone())).times(1));
    let enqueue = tokio::spawn(async move { a.enqueue_for_orchestrator(item, None).await });
    gate.reached().await;
    consume.await;
    gate.open();
    enqueue.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whose_answer_was_lost_and_that_was_consumed_before_it_is_sent_again_is_handled_once() {
    let fixture = Fixture::new(1);
    let b = fixture.provider("b").await;
    begin(&b, CHILD, Vec::new(), Vec::new()).await;
    enqueue_twice(&fixture, external(CHILD, "once"), Sender::CantLook, async {
        let (item, token, _) = next_turn(&b, LONG).await;
        assert_eq!(item.messages, [external(CHILD, "once")]);
        commit(&b, &token, vec![happened(CHILD, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    })
    .await;
    assert_eq!(fixture.documents_of_type(CHILD, "message").await.len(), 1, "the copy is what this test is about");
    // For a process that has the history in memory, and for one that has not.
    for name in ["b", "cold"] {
        let provider = if name == "b" { &b } else { &fixture.provider(name).await };
        assert!(provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none(), "{name}");
    }
    assert!(fixture.documents_of_type(CHILD, "message").await.is_empty());
    assert_eq!(ids(&b.read(CHILD).await.unwrap()), [1, 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_whose_answer_was_lost_starts_the_instance_once_even_in_its_next_execution() {
    for executions in [1, 2] {
        let fixture = Fixture::new(1);
        let b = fixture.provider("b").await;
        enqueue_twice(&fixture, start(CHILD), Sender::CantLook, async {
            for execution in 1..=executions {
                let (_, token, _) = next_turn(&b, LONG).await;
                let (messages, metadata) = if execution < executions {
                    (vec![continue_as_new(CHILD)], ended("ContinuedAsNew"))
                } else {
                    (Vec::new(), running())
                };
                commit(&b, &token, vec![started(CHILD, execution)], Vec::new(), messages, metadata).await.unwrap();
            }
        })
        .await;
        let cold = fixture.provider("cold").await;
        assert!(cold.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
        assert!(fixture.documents_of_type(CHILD, "message").await.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_completion_is_not_delivered_to_a_new_instance_of_the_parents_name() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, Arc::new(fixture.provider("b").await));
    begin(&a, PARENT, Vec::new(), vec![start_child(CHILD, Some(PARENT))]).await;
    let (_, token, _) = next_turn(b.as_ref(), LONG).await;
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Create).client("b");
    fixture.account.wire().add(held.matching(|request| goes_to(request, PARENT)).times(1));
    let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
    commit(b.as_ref(), &token, events, Vec::new(), vec![child_ended()], ended_child("Completed")).await.unwrap();
    gate.reached().await;
    // While the message is on its way, its parent is deleted and a new instance takes the parent's name.
    a.delete_instance(PARENT, true).await.unwrap();
    let c = fixture.provider("c").await;
    begin(&c, PARENT, Vec::new(), Vec::new()).await;
    gate.open();
    b.shutdown().await;
    assert_eq!(fixture.documents_of_type(PARENT, "message").await.len(), 1, "the message is what this test is about");
    let before = contents(&fixture, PARENT).await;
    assert!(c.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    assert!(fixture.documents_of_type(PARENT, "message").await.is_empty());
    assert_eq!(contents(&fixture, PARENT).await.len(), before.len() - 1);
}

/// The completion of [`CHILD`] for its parent.
fn child_ended() -> WorkItem {
    WorkItem::SubOrchCompleted {
        parent_instance: PARENT.to_owned(),
        parent_execution_id: 1,
        parent_id: 2,
        result: "done".to_owned(),
    }
}

fn ended_child(status: &str) -> duroxide::providers::ExecutionMetadata {
    let mut metadata = ended(status);
    metadata.parent_instance_id = Some(PARENT.to_owned());
    metadata
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_two_instances_of_one_name_have_started_reports_its_end_to_the_second() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    let child = start_child(CHILD, Some(PARENT));
    begin(&a, PARENT, Vec::new(), vec![child.clone()]).await;
    // The child has not begun, so the deletion does not know of it.
    a.delete_instance(PARENT, true).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, std::slice::from_ref(&child));
    let mut metadata = running();
    metadata.parent_instance_id = Some(PARENT.to_owned());
    commit(&a, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), metadata).await.unwrap();
    // A new parent starts the same child, which runs already.
    begin(&a, PARENT, Vec::new(), vec![child.clone()]).await;
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [child]);
    commit(&a, &token, vec![completed(CHILD, 1, 2)], Vec::new(), vec![child_ended()], ended("Completed"))
        .await
        .unwrap();
    let (item, _, _) = next_turn(&a, LONG).await;
    assert_eq!((item.instance.as_str(), item.messages), (PARENT, vec![child_ended()]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_a_deletion_overtakes_drops_nothing_of_the_new_instance() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    begin(&b, PARENT, Vec::new(), Vec::new()).await;
    b.enqueue_for_orchestrator(external(PARENT, "news"), None).await.unwrap();
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Query).client("a");
    fixture.account.wire().add(held.matching(|request| goes_to(request, PARENT)).times(1));
    let stalled = tokio::spawn(async move { a.fetch_orchestration_item(LONG, NOW, None).await });
    gate.reached().await;
    // The instance is deleted, a new one takes its name, and a child of the new one ends.
    b.delete_instance(PARENT, true).await.unwrap();
    begin(&b, PARENT, Vec::new(), vec![start_child(CHILD, Some(PARENT))]).await;
    let (_, token, _) = next_turn(&b, LONG).await;
    let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
    commit(&b, &token, events, Vec::new(), vec![child_ended()], ended_child("Completed")).await.unwrap();
    gate.open();
    drop(stalled.await.unwrap());
    let (item, _, _) = next_turn(&b, LONG).await;
    assert_eq!((item.instance.as_str(), item.messages), (PARENT, vec![child_ended()]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_was_written_twice_is_recognised_after_any_number_of_executions() {
    let fixture = Fixture::new(1);
    let b = fixture.provider("b").await;
    begin(&b, CHILD, Vec::new(), Vec::new()).await;
    enqueue_twice(&fixture, external(CHILD, "once"), Sender::Looks, async {
        // More messages, one per execution, than fingerprints that a new execution keeps of earlier ones.
        for execution in 1..=30 {
            if execution > 1 {
                b.enqueue_for_orchestrator(external(CHILD, "more"), None).await.unwrap();
            }
            let (_, token, _) = next_turn(&b, LONG).await;
            let end = event(CHILD, execution, 2, EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() });
            let messages = vec![continue_as_new(CHILD)];
            commit(&b, &token, vec![end], Vec::new(), messages, ended("ContinuedAsNew")).await.unwrap();
            let (_, token, _) = next_turn(&b, LONG).await;
            let begins = vec![started(CHILD, execution + 1)];
            commit(&b, &token, begins, Vec::new(), Vec::new(), running()).await.unwrap();
        }
    })
    .await;
    assert!(fixture.documents_of_type(CHILD, "message").await.is_empty());
    assert!(b.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
}
