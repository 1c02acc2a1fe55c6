//! Decisions are proved by the write that carries them out, a refusal stays one, and one bad document or partition hides no
//! other.

#[path = "common/scene.rs"]
mod scene;

use duroxide::{
    providers::{InstanceFilter, Provider, TagFilter, WorkItem},
    ErrorDetails, Event, EventKind,
};
use duroxide_cosmos::{Clock, CosmosDBProvider};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use scene::*;
use serde_json::json;
use std::{
    sync::{
        atomic::{AtomicI64, Ordering},
        Arc,
    },
    time::Duration,
};

/// A clock that a test can set.
fn adjustable() -> (Arc<AtomicI64>, Clock) {
    let off = Arc::new(AtomicI64::new(0));
    let by = off.clone();
    let system = || u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    (off, Clock::from_fn(move || system().saturating_add_signed(by.load(Ordering::Relaxed))))
}

fn failed(instance: &str, id: u64) -> Event {
    let details = ErrorDetails::Infrastructure {
        operation: "ack_orchestration_item".to_owned(),
        message: "the turn could not be stored".to_owned(),
        retryable: false,
    };
    event(instance, 1, id, EventKind::OrchestrationFailed { details })
}

async fn status_of(provider: &CosmosDBProvider, instance: &str) -> Option<String> {
    admin(provider).get_instance_info(instance).await.ok().map(|info| info.status)
}

// Refusals.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_a_full_partition_refuses_does_not_fail_the_orchestration() {
    for (status, substatus, is_given_up) in [(403, Some(1014), true), (403, None, true), (400, None, false)] {
        let scene = Scene::new(1);
        let a = scene.provider("a").await;
        begin(&a, "i", Vec::new(), Vec::new()).await;
        a.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
        let (_, token, _) = next_turn(&a, LONG).await;
        let refusal = WireAction::RefuseBatchOperation { index: 0, status, substatus };
        let rule = WireRule::new(refusal).client("a").on(RequestKind::Batch).matching(|request| goes_to(request, "i"));
        scene.account.wire().add(rule.times(1));
        let error = commit(&a, &token, vec![note("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap_err();
        assert!(!error.is_retryable(), "{error:?}");
        // The runtime sends this next.
        let recorded = commit(&a, &token, vec![failed("i", 2)], Vec::new(), Vec::new(), ended("Failed")).await;
        assert_eq!(recorded.is_err(), is_given_up, "{status}/{substatus:?}: {recorded:?}");
        let expected = if is_given_up { "Running" } else { "Failed" };
        assert_eq!(status_of(&a, "i").await.as_deref(), Some(expected));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_whose_batches_are_refused_says_why() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    finish(&a, "i", None).await;
    let refusal = WireAction::RefuseBatchOperation { index: 0, status: 403, substatus: None };
    let rule = WireRule::new(refusal).client("b").on(RequestKind::Batch);
    let rule = scene.account.wire().add(rule.matching(|request| goes_to(request, "i")));
    let deletion = tokio::time::timeout(PATIENCE, admin(&b).delete_instance("i", false)).await;
    let error = deletion.expect("it ends").unwrap_err();
    assert!(!error.is_retryable() && error.message.contains("access denied"), "{error:?}");
    rule.remove();
    // It was decided: the next call finishes it.
    admin(&a).delete_instance("i", false).await.unwrap();
    assert!(scene.partition("i").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_renewal_was_refused_is_not_removed_when_the_clock_is_set_back() {
    let scene = Scene::new(1);
    let (off, clock) = adjustable();
    let a = scene.provider_with("a", quiet().with_clock(clock)).await;
    begin(&a, "i", vec![activity("i", 2)], Vec::new()).await;
    let (_, token, _) = next_work(&a, Duration::from_secs(5)).await;
    off.store(10_000, Ordering::Relaxed);
    a.renew_work_item_lock(&token, LONG).await.unwrap_err();
    off.store(0, Ordering::Relaxed);
    a.ack_work_item(&token, None).await.expect_err("the runtime has cancelled it without a completion");
    assert_eq!(scene.of_kind("i", "activity").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_whose_lock_has_expired_records_no_failure_when_the_clock_is_set_back() {
    let scene = Scene::new(1);
    let (off, clock) = adjustable();
    let a = scene.provider_with("a", quiet().with_clock(clock)).await;
    begin(&a, "i", Vec::new(), Vec::new()).await;
    a.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, _) = next_turn(&a, Duration::from_secs(5)).await;
    off.store(10_000, Ordering::Relaxed);
    commit(&a, &token, vec![note("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap_err();
    off.store(0, Ordering::Relaxed);
    commit(&a, &token, vec![failed("i", 2)], Vec::new(), Vec::new(), ended("Failed")).await.unwrap_err();
    assert_eq!(status_of(&a, "i").await.as_deref(), Some("Running"));
}

// Decisions.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_spares_an_instance_that_has_the_name_of_a_child() {
    let scene = Scene::new(1);
    let (worker, deleter) = (scene.provider("worker").await, scene.provider("deleter").await);
    finish(&worker, "r1", None).await;
    finish(&worker, "child", Some("r1")).await;
    finish(&worker, "r2", None).await;
    let hold = |skip: u64, instance: &'static str| {
        let gate = Gate::new();
        let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Replace);
        scene.account.wire().add(rule.matching(move |request| goes_to(request, instance)).skip(skip).times(1));
        gate
    };
    // The first attempt marks the child, meets another `r2`, and takes the mark off. The second one comes to the child again.
    let (first_of_r2, second_of_child) = (hold(0, "r2"), hold(2, "child"));
    let bulk = tokio::spawn(async move { admin(&deleter).delete_instance_bulk(InstanceFilter::default()).await });
    reach(&first_of_r2).await;
    admin(&worker).delete_instance("r2", false).await.unwrap();
    finish(&worker, "r2", None).await;
    first_of_r2.open();
    reach(&second_of_child).await;
    admin(&worker).delete_instances_atomic(&["child".to_owned()], true).await.unwrap();
    begin(&worker, "child", Vec::new(), Vec::new()).await;
    second_of_child.open();
    drop(bulk.await.unwrap());
    assert_eq!(status_of(&worker, "child").await.as_deref(), Some("Running"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_appends_of_one_event_one_is_refused() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    begin(&a, "i", Vec::new(), Vec::new()).await;
    // B has compared the events and is about to write.
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldAfter(gate.clone())).client("b").on(RequestKind::Query);
    scene.account.wire().add(rule.times(1));
    let second = tokio::spawn(async move { b.append_with_execution("i", 1, vec![note("i", 1, 5)]).await });
    reach(&gate).await;
    a.append_with_execution("i", 1, vec![note("i", 1, 5)]).await.unwrap();
    gate.open();
    let error = second.await.unwrap().expect_err("the event is there");
    assert!(error.message.contains('5'), "{error:?}");
    assert_eq!(a.read("i").await.unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_beside_which_an_event_was_appended_leaves_the_next_one_the_whole_history() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    begin(&a, "i", Vec::new(), Vec::new()).await;
    a.enqueue_for_orchestrator(external("i", "first"), None).await.unwrap();
    let (_, token, _) = next_turn(&a, LONG).await;
    a.append_with_execution("i", 1, vec![note("i", 1, 10)]).await.unwrap();
    commit(&a, &token, vec![note("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    a.enqueue_for_orchestrator(external("i", "second"), None).await.unwrap();
    let (item, ..) = next_turn(&a, LONG).await;
    let ids: Vec<u64> = item.history.iter().map(|event| event.event_id).collect();
    assert_eq!(ids, [1, 2, 10]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_without_force_leaves_the_first_turn_of_an_instance_alone() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    a.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&a, LONG).await;
    let deleted = admin(&b).delete_instances_atomic(&["i".to_owned()], false).await.unwrap();
    assert_eq!(deleted.instances_deleted, 0);
    commit(&a, &token, vec![started("i", 1)], Vec::new(), Vec::new(), running()).await.expect("its first turn");
}

// One bad document or partition.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_document_with_any_id_goes_with_its_instance() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    finish(&a, "i", None).await;
    for id in ["note.txt", "with a space", "ümlaut"] {
        let document = json!({ "id": id, "instanceId": "i", "execution": 1, "type": "note" });
        assert!(scene.account.put("duroxide", "duroxide", "i", &document).await);
    }
    admin(&a).delete_instance("i", false).await.unwrap();
    assert!(scene.partition("i").await.is_empty(), "{:?}", scene.partition("i").await);
    begin(&a, "i", Vec::new(), Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_input_can_not_be_read_is_counted_and_put_off() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    let WorkItem::ActivityExecute { instance, execution_id, id, name, session_id, tag, .. } = activity("i", 2) else {
        panic!("an activity");
    };
    let input = "x".repeat(5_000);
    let large = WorkItem::ActivityExecute { instance, execution_id, id, name, input, session_id, tag };
    begin(&a, "i", vec![large], Vec::new()).await;
    mangle(&scene, "i", "p:w:1:2", |document| document["item"] = json!(7)).await;
    let worker = scene.provider("worker").await;
    let claims = WireRule::new(WireAction::Delay(NOW)).client("worker").on(RequestKind::Replace);
    let claims = scene.account.wire().add(claims.matching(|request| goes_to(request, "i")));
    let fetched = worker.fetch_work_item(LONG, Duration::from_secs(1), None, &TagFilter::Any).await.unwrap();
    assert!(fetched.is_none(), "{fetched:?}");
    let work = scene.of_kind("i", "activity").await.remove(0);
    assert!(work["attempts"].as_u64() >= Some(1), "{work}");
    assert!(claims.hits() <= 4, "it is not claimed over and over: {}", claims.hits());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_whose_partition_is_full_keeps_no_other_from_being_fetched() {
    let scene = Scene::new(1);
    let (a, worker) = (scene.provider("a").await, scene.provider("worker").await);
    for instance in ["full", "good"] {
        begin(&a, instance, Vec::new(), Vec::new()).await;
    }
    for instance in ["full", "good"] {
        a.enqueue_for_orchestrator(external(instance, "go on"), None).await.unwrap();
    }
    let full = WireAction::Refuse { status: 403, substatus: Some(1014), retry_after: None };
    let rule = WireRule::new(full).client("worker").on(RequestKind::Replace).on(RequestKind::Batch);
    scene.account.wire().add(rule.matching(|request| goes_to(request, "full")));
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "good");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_can_not_be_read_keeps_no_other_of_its_deletion_from_being_erased() {
    // The parts of a plan have a hundred members each.
    let scene = Scene::new(2);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    let names: Vec<String> = (0..150).map(|number| format!("i{number:03}")).collect();
    finish(&a, "i000", None).await;
    scene.copy("i000", names[1..].iter().cloned()).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").on(RequestKind::Batch);
    scene.account.wire().add(rule.matching(deletes));
    let set = names.clone();
    let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&set, true).await });
    reach(&gate).await;
    deletion.abort();
    mangle(&scene, "i050", "instance", |document| document["execution"] = json!("one")).await;
    let error = admin(&b).delete_instances_atomic(&names[..1], true).await.expect_err("one can't be read");
    assert!(error.message.contains("i050"), "{error:?}");
    let mut left = Vec::new();
    for name in &names {
        if !scene.is_erased(name).await {
            left.push(name.as_str());
        }
    }
    assert_eq!(left, ["i000", "i050"], "the coordinator stays as long as one of its instances does");
    mangle(&scene, "i050", "instance", |document| document["execution"] = json!(1)).await;
    admin(&b).delete_instances_atomic(&names[..1], true).await.unwrap();
    assert!(scene.is_erased("i000").await && scene.is_erased("i050").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_can_be_read_although_the_deletion_that_marks_it_can_not_be_judged() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    finish(&a, "x", None).await;
    finish(&a, "y", None).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldAfter(gate.clone())).client("a").on(RequestKind::Replace);
    scene.account.wire().add(rule.matching(|request| goes_to(request, "y")));
    let set = ["x".to_owned(), "y".to_owned()];
    let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&set, true).await });
    reach(&gate).await;
    deletion.abort();
    mangle(&scene, "x", "instance", |document| document["execution"] = json!("one")).await;
    assert_eq!(b.read("y").await.unwrap().len(), 2);
    assert_eq!(status_of(&b, "y").await.as_deref(), Some("Completed"));
    assert!(admin(&b).list_instances().await.unwrap().contains(&"y".to_owned()));
}
