//! What a process remembers of a queue may be overtaken by others. A turn that ran on such a memory commits nothing.

#[path = "common/scene.rs"]
mod scene;

use duroxide::{
    providers::{Provider, ProviderAdmin, WorkItem},
    Event, EventKind,
};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use scene::*;
use std::sync::Arc;

const PARENT: &str = "parent";
const CHILD: &str = "child";

fn happened(instance: &str, id: u64) -> Event {
    event(instance, 1, id, EventKind::ExternalEvent { name: "Event".to_owned(), data: "news".to_owned() })
}

fn failed(instance: &str, id: u64) -> Event {
    let details = duroxide::ErrorDetails::Infrastructure {
        operation: "ack_orchestration_item".to_owned(),
        message: "refused".to_owned(),
        retryable: false,
    };
    event(instance, 1, id, EventKind::OrchestrationFailed { details })
}

fn ids(events: &[Event]) -> Vec<u64> {
    events.iter().map(|event| event.event_id).collect()
}

/// Holds the answer to the next request of this kind that `client` sends about `instance`.
fn hold_the_answer(scene: &Scene, kind: RequestKind, client: &str, instance: &'static str) -> Gate {
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldAfter(gate.clone())).on(kind).client(client);
    scene.account.wire().add(rule.matching(move |request| goes_to(request, instance)).times(1));
    gate
}

/// Everything in a partition but `_ts` and such, in a stable order.
async fn contents(scene: &Scene, key: &str) -> Vec<serde_json::Value> {
    let mut documents = scene.partition(key).await;
    documents.sort_by_key(|document| document["id"].to_string());
    documents
}

/// The provider "a" has a memory of a message that "b" has consumed, and runs a turn on it.
async fn runs_on_a_ghost(scene: &Scene, a: &dyn Provider, ghost: WorkItem) {
    let (item, token, _) = next_turn(a, LONG).await;
    assert_eq!(item.messages, [ghost], "the memory of it is what this test is about");
    let before = ids(&a.read(CHILD).await.unwrap());
    let next = before.last().unwrap() + 1;
    let refused = commit(a, &token, vec![happened(CHILD, next)], Vec::new(), Vec::new(), running()).await;
    assert!(!refused.unwrap_err().is_retryable());
    // What the runtime sends then would be the end of a healthy orchestration.
    let failure = commit(a, &token, vec![failed(CHILD, next)], Vec::new(), Vec::new(), ended("Failed")).await;
    assert!(!failure.unwrap_err().is_retryable());
    let other = scene.provider("other").await;
    assert_eq!(ids(&other.read(CHILD).await.unwrap()), before);
    // It is given back, uncounted: the next message has a turn of its own.
    other.enqueue_for_orchestrator(external(CHILD, "later"), None).await.unwrap();
    let (item, token, attempts) = next_turn(&other, LONG).await;
    assert_eq!((item.messages, attempts), (vec![external(CHILD, "later")], 1));
    commit(&other, &token, vec![happened(CHILD, next)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert!(scene.of_kind(CHILD, "message").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_childs_start_that_another_process_has_consumed_is_not_consumed_again() {
    let scene = Scene::new(1);
    let a = scene.provider_with("a", quiet().with_inline_claims(false)).await;
    let b = scene.provider("b").await;
    // The delivery's answer is late: "a" learns that the start is in the queue when it is not any more.
    let gate = hold_the_answer(&scene, RequestKind::Create, "a", CHILD);
    let child = start_child(CHILD, Some(PARENT));
    begin(&a, PARENT, Vec::new(), vec![child.clone()]).await;
    gate.reached().await;
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, std::slice::from_ref(&child));
    commit(&b, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    // "a" runs a later turn of the child, so that it knows its history.
    a.enqueue_for_orchestrator(external(CHILD, "news"), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external(CHILD, "news")]);
    commit(&a, &token, vec![happened(CHILD, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    gate.open();
    runs_on_a_ghost(&scene, &a, child).await;
    assert_eq!(scene.of_kind(CHILD, "delivered").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_that_another_process_has_consumed_is_not_consumed_again() {
    let scene = Scene::new(1);
    let (a, b) = (Arc::new(scene.provider("a").await), scene.provider("b").await);
    begin(a.as_ref(), CHILD, vec![activity(CHILD, 2)], Vec::new()).await;
    let (_, work, _) = next_work(a.as_ref(), LONG).await;
    let gate = hold_the_answer(&scene, RequestKind::Batch, "a", CHILD);
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
    runs_on_a_ghost(&scene, a.as_ref(), done(CHILD, 2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_from_outside_that_another_process_has_consumed_is_not_even_handed_out() {
    let scene = Scene::new(1);
    let (a, b) = (Arc::new(scene.provider("a").await), scene.provider("b").await);
    begin(a.as_ref(), CHILD, Vec::new(), Vec::new()).await;
    let gate = hold_the_answer(&scene, RequestKind::Create, "a", CHILD);
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
async fn what_was_due_when_a_turn_ran_without_it_is_not_offered_again() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
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

/// Whether the process that has written a message twice finds that out by itself.
#[derive(Clone, Copy, PartialEq)]
enum Sender {
    Looks,
    CantLook,
}

/// The answer to what "a" puts into the queue is lost, and the SDK's repetition of it comes when `consume` is through.
async fn doubled<F: std::future::Future<Output = ()>>(scene: &Scene, item: WorkItem, sender: Sender, consume: F) {
    let a = Arc::new(scene.provider("a").await);
    let (gate, wire) = (Gate::new(), scene.account.wire());
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
    let scene = Scene::new(1);
    let b = scene.provider("b").await;
    begin(&b, CHILD, Vec::new(), Vec::new()).await;
    doubled(&scene, external(CHILD, "once"), Sender::CantLook, async {
        let (item, token, _) = next_turn(&b, LONG).await;
        assert_eq!(item.messages, [external(CHILD, "once")]);
        commit(&b, &token, vec![happened(CHILD, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    })
    .await;
    assert_eq!(scene.of_kind(CHILD, "message").await.len(), 1, "the copy is what this test is about");
    // For a process that has the history in memory, and for one that has not.
    for name in ["b", "cold"] {
        let provider = if name == "b" { &b } else { &scene.provider(name).await };
        assert!(provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none(), "{name}");
    }
    assert!(scene.of_kind(CHILD, "message").await.is_empty());
    assert_eq!(ids(&b.read(CHILD).await.unwrap()), [1, 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_whose_answer_was_lost_does_not_start_the_instance_twice_also_in_its_next_execution() {
    for executions in [1, 2] {
        let scene = Scene::new(1);
        let b = scene.provider("b").await;
        doubled(&scene, start(CHILD), Sender::CantLook, async {
            for execution in 1..=executions {
                let (_, token, _) = next_turn(&b, LONG).await;
                let (messages, metadata) = if execution < executions {
                    (vec![again(CHILD)], ended("ContinuedAsNew"))
                } else {
                    (Vec::new(), running())
                };
                commit(&b, &token, vec![started(CHILD, execution)], Vec::new(), messages, metadata).await.unwrap();
            }
        })
        .await;
        let cold = scene.provider("cold").await;
        assert!(cold.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
        assert!(scene.of_kind(CHILD, "message").await.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_childs_end_is_not_told_to_a_new_instance_of_its_parents_name() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, Arc::new(scene.provider("b").await));
    begin(&a, PARENT, Vec::new(), vec![start_child(CHILD, Some(PARENT))]).await;
    let (_, token, _) = next_turn(b.as_ref(), LONG).await;
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Create).client("b");
    scene.account.wire().add(held.matching(|request| goes_to(request, PARENT)).times(1));
    let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
    commit(b.as_ref(), &token, events, Vec::new(), vec![child_ended()], of_parent("Completed")).await.unwrap();
    gate.reached().await;
    // While the message is on its way, its parent is deleted and another one takes its name.
    a.delete_instance(PARENT, true).await.unwrap();
    let c = scene.provider("c").await;
    begin(&c, PARENT, Vec::new(), Vec::new()).await;
    gate.open();
    b.shutdown().await;
    assert_eq!(scene.of_kind(PARENT, "message").await.len(), 1, "the message is what this test is about");
    let before = contents(&scene, PARENT).await;
    assert!(c.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    assert!(scene.of_kind(PARENT, "message").await.is_empty());
    assert_eq!(contents(&scene, PARENT).await.len(), before.len() - 1);
}

/// The end of [`CHILD`], for its parent.
fn child_ended() -> WorkItem {
    WorkItem::SubOrchCompleted {
        parent_instance: PARENT.to_owned(),
        parent_execution_id: 1,
        parent_id: 2,
        result: "done".to_owned(),
    }
}

fn of_parent(status: &str) -> duroxide::providers::ExecutionMetadata {
    let mut metadata = ended(status);
    metadata.parent_instance_id = Some(PARENT.to_owned());
    metadata
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_two_instances_of_its_parents_name_have_started_tells_the_second_how_it_ended() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    let child = start_child(CHILD, Some(PARENT));
    begin(&a, PARENT, Vec::new(), vec![child.clone()]).await;
    // The child has not begun, so that the deletion does not know of it.
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
async fn a_claim_that_was_overtaken_by_a_deletion_drops_nothing_of_the_new_instance() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    begin(&b, PARENT, Vec::new(), Vec::new()).await;
    b.enqueue_for_orchestrator(external(PARENT, "news"), None).await.unwrap();
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Query).client("a");
    scene.account.wire().add(held.matching(|request| goes_to(request, PARENT)).times(1));
    let stalled = tokio::spawn(async move { a.fetch_orchestration_item(LONG, NOW, None).await });
    gate.reached().await;
    // Its instance is deleted, another one takes its name, and a child of that one ends.
    b.delete_instance(PARENT, true).await.unwrap();
    begin(&b, PARENT, Vec::new(), vec![start_child(CHILD, Some(PARENT))]).await;
    let (_, token, _) = next_turn(&b, LONG).await;
    let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
    commit(&b, &token, events, Vec::new(), vec![child_ended()], of_parent("Completed")).await.unwrap();
    gate.open();
    drop(stalled.await.unwrap());
    let (item, _, _) = next_turn(&b, LONG).await;
    assert_eq!((item.instance.as_str(), item.messages), (PARENT, vec![child_ended()]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_was_written_twice_is_known_however_many_executions_have_passed() {
    let scene = Scene::new(1);
    let b = scene.provider("b").await;
    begin(&b, CHILD, Vec::new(), Vec::new()).await;
    doubled(&scene, external(CHILD, "once"), Sender::Looks, async {
        // More messages, one for each execution, than a new execution remembers of those before it.
        for execution in 1..=30 {
            if execution > 1 {
                b.enqueue_for_orchestrator(external(CHILD, "more"), None).await.unwrap();
            }
            let (_, token, _) = next_turn(&b, LONG).await;
            let end = event(CHILD, execution, 2, EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() });
            let messages = vec![again(CHILD)];
            commit(&b, &token, vec![end], Vec::new(), messages, ended("ContinuedAsNew")).await.unwrap();
            let (_, token, _) = next_turn(&b, LONG).await;
            let begins = vec![started(CHILD, execution + 1)];
            commit(&b, &token, begins, Vec::new(), Vec::new(), running()).await.unwrap();
        }
    })
    .await;
    assert!(scene.of_kind(CHILD, "message").await.is_empty());
    assert!(b.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
}
