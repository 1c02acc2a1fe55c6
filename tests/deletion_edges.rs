//! Deletion at its edges: starts that come in its very second, counters, clocks, and the removal of a start beside it.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{InstanceFilter, Provider};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use scene::*;
use serde_json::json;
use std::{sync::Arc, time::Duration};

/// A start has its place in the queue since the turn that sends it was planned. It may be delivered after a deletion is
/// decided, within the same second. Without it the parent would wait for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_whose_start_is_delivered_in_the_second_of_the_decision_begins() {
    for _ in 0..20 {
        let scene = Scene::new(1);
        let (worker, deleter) = (Arc::new(scene.provider("worker").await), Arc::new(scene.provider("deleter").await));
        begin(&*worker, "i", Vec::new(), Vec::new()).await;
        worker.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
        let (item, token, _) = next_turn(&*worker, LONG).await;
        assert_eq!(item.instance, "sender");
        let delivery = Gate::new();
        block(&scene, "worker", "i", WireAction::HoldBefore(delivery.clone()));
        let look = Gate::new();
        let rule = WireRule::new(WireAction::HoldBefore(look.clone())).client("deleter").on(RequestKind::Query);
        scene.account.wire().add(rule.matching(|request| goes_to(request, "i")).times(1));
        next_second().await;
        // The parent's turn is committed; its child's start is on its way.
        let sender = worker.clone();
        let committing = tokio::spawn(async move {
            let messages = vec![start_child("i", Some("sender"))];
            commit(&*sender, &token, vec![started("sender", 1)], Vec::new(), messages, running()).await
        });
        reach(&delivery).await;
        // The old instance of that name is deleted: the deletion is decided, and about to look at what it erases.
        let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
        reach(&look).await;
        let decided = scene.of_kind("i", "instance").await.remove(0);
        assert_eq!(decided["deleting"]["state"], "committed");
        assert!(scene.of_kind("i", "message").await.is_empty(), "nothing is delivered before the decision");
        delivery.open();
        committing.await.unwrap().unwrap();
        let mut messages = scene.of_kind("i", "message").await;
        while messages.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
            messages = scene.of_kind("i", "message").await;
        }
        let same_second = messages[0]["_ts"].as_u64() <= decided["_ts"].as_u64();
        look.open();
        deletion.await.unwrap().unwrap();
        if !same_second {
            continue;
        }
        let left = scene.partition("i").await;
        assert!(
            left.iter().any(|document| document["type"] == "message"),
            "the start came after the decision and is gone, and `sender` waits for ever: {left:?}"
        );
        let (item, ..) = next_turn(&*worker, LONG).await;
        assert_eq!((item.instance.as_str(), item.history.len()), ("i", 0));
        return;
    }
    panic!("the delivery never came within the second of the decision");
}

/// The document that a queued start waits beside may be the one that says of other instances that they are deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removing_a_start_does_not_undo_a_deletion_that_was_decided() {
    let scene = Scene::new(1);
    let (worker, operator) = (scene.provider("worker").await, scene.provider("operator").await);
    let deleter = scene.provider("deleter").await;
    finish(&worker, "y", None).await;
    // The first turn of `x` is under way: there is a lock and no instance. With force it is deleted, too.
    worker.enqueue_for_orchestrator(start("x"), None).await.unwrap();
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "x");
    let gate = Gate::new();
    let erasure = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Batch);
    scene.account.wire().add(erasure.matching(deletes));
    let set = ["x".to_owned(), "y".to_owned()];
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instances_atomic(&set, true).await });
    reach(&gate).await;
    let coordinator = scene.of_kind("x", "instance").await.remove(0);
    assert_eq!(coordinator["deleting"]["state"], "committed");
    assert!(admin(&operator).get_instance_info("y").await.is_err(), "it is deleted");
    // The deleter dies, and an operator removes the start that is still shown.
    scene.cut("deleter", 0);
    deletion.abort();
    drop(operator.drop_start("x").await);
    let info = admin(&operator).get_instance_info("y").await;
    assert!(info.is_err(), "a deletion that was decided is undone for y: {info:?}");
    // The next call goes on with the deletion.
    if let Err(error) = admin(&operator).delete_instance("y", false).await {
        assert!(error.message.contains("not found"), "{error:?}");
    }
    assert!(scene.is_erased("y").await);
    assert!(scene.of_kind("x", "plan").await.is_empty(), "{:?}", scene.partition("x").await);
}

/// A process that is shut down may have noted instances for the counters and not counted them. They are deleted before
/// another process finishes that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_noted_and_never_sealed_does_not_count_after_its_deletion() {
    const COUNT: u64 = 60;
    let scene = Scene::new(4);
    let maker = scene.provider("maker").await;
    finish(&maker, "i0", None).await;
    scene.copy("i0", (1..COUNT).map(|n| format!("i{n}"))).await;
    let a = scene.provider("a").await;
    // The note is written, no instance takes its step.
    let steps = WireRule::new(WireAction::FailConnection).client("a").on(RequestKind::Replace);
    let steps = scene.account.wire().add(steps.matching(|request| !goes_to(request, "$d:metrics")));
    assert_eq!(admin(&a).get_system_metrics().await.unwrap().total_instances, COUNT);
    tokio::time::timeout(PATIENCE, steps.wait_for_hits(1)).await.expect("it seals");
    scene.cut("a", 0);
    drop(a);
    let counters = scene.of_kind("$d:metrics", "counters").await.remove(0);
    assert_eq!(counters["folding"].as_object().map(|note| note.len() as u64), Some(COUNT), "{counters}");
    let b = scene.provider("b").await;
    let deleted = admin(&b).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!(deleted.instances_deleted, COUNT);
    assert!(admin(&b).list_instances().await.unwrap().is_empty());
    let metrics = admin(&b).get_system_metrics().await.unwrap();
    assert_eq!(
        (metrics.total_instances, metrics.completed_instances, metrics.total_events),
        (0, 0, 0),
        "there is nothing"
    );
}

/// The clock of an operator may be ahead by days. If that process dies before its deletion is decided, nobody waits until
/// the other clocks have come that far.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_died_before_its_decision_is_given_up_whatever_its_clock_said() {
    const WEEK: i64 = 7 * 24 * 3_600_000;
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish(&worker, "i", None).await;
    let operator = scene.provider_with("operator", quiet().with_clock(off_by(WEEK))).await;
    let gate = Gate::new();
    let mark = WireRule::new(WireAction::HoldAfter(gate.clone())).client("operator").on(RequestKind::Replace);
    scene.account.wire().add(mark.matching(|request| goes_to(request, "i")).times(1));
    let deletion = tokio::spawn(async move { admin(&operator).delete_instance("i", false).await });
    reach(&gate).await;
    scene.cut("operator", 0);
    deletion.abort();
    let document = scene.of_kind("i", "instance").await.remove(0);
    assert!(document["deleting"].is_object(), "it is marked: {document}");
    // Another deletion gives way for three seconds, a worker for thirty.
    let time = Duration::from_secs(15);
    let brief = quiet().with_operation_timeout(time).with_request_timeout(Duration::from_secs(5));
    let other = scene.provider_with("other", brief).await;
    let deleted = admin(&other).delete_instance("i", false).await;
    assert_eq!(deleted.expect("nobody goes on with the first deletion").instances_deleted, 1);
}

/// All deletions write the one document of the counters. A newer version, or a hand, may have changed it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_that_can_not_be_read_keep_no_instance_from_being_deleted() {
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish(&worker, "i", None).await;
    let counters = json!({
        "id": "counters", "instanceId": "$d:metrics", "type": "counters", "completed": { "v2": 7 }, "failed": 0,
        "other": 0, "executions": 7, "events": 14, "folding": {}
    });
    scene.container().await.upsert_item("$d:metrics".to_owned(), "counters", &counters, None).await.unwrap();
    let deleted = admin(&worker).delete_instance("i", false).await;
    // The deletion was decided: the name must be free for the next instance, also if the call failed.
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let next = worker.fetch_orchestration_item(LONG, Duration::from_secs(15), None).await.unwrap();
    let (item, ..) = next.unwrap_or_else(|| panic!("the next instance of that name never begins: {deleted:?}"));
    assert_eq!((item.instance.as_str(), item.history.len()), ("i", 0));
    assert_eq!(deleted.unwrap().instances_deleted, 1);
}

/// The clock of an operator may also be behind. By other clocks its last sign of life is then long ago.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_goes_on_is_not_given_up_whatever_its_clock_says() {
    const TEN_MINUTES: i64 = 10 * 60 * 1_000;
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish(&worker, "i", None).await;
    worker.enqueue_for_orchestrator(external("i", "late"), None).await.unwrap();
    let operator = scene.provider_with("operator", quiet().with_clock(off_by(-TEN_MINUTES))).await;
    let gate = Gate::new();
    let mark = WireRule::new(WireAction::HoldAfter(gate.clone())).client("operator").on(RequestKind::Replace);
    scene.account.wire().add(mark.times(1));
    let deletion = tokio::spawn(async move { admin(&operator).delete_instance("i", false).await });
    reach(&gate).await;
    // A worker meets the mark.
    let fetched = worker.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(fetched.is_none(), "{fetched:?}");
    let document = scene.of_kind("i", "instance").await.remove(0);
    assert_eq!(document["deleting"]["state"], "open", "{document}");
    gate.open();
    assert_eq!(deletion.await.unwrap().unwrap().instances_deleted, 1);
}
