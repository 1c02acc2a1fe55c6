//! Starts that no worker has begun: they are listed, and a claim protects their removal together with their messages.

use crate::fixture::*;
use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use serde_json::Value;

fn cancel(instance: &str) -> WorkItem {
    WorkItem::CancelInstance { instance: instance.to_owned(), reason: "operator".to_owned() }
}

/// The queue of an instance, with messages that are not visible.
async fn queue(fixture: &Fixture, instance: &str) -> Vec<Value> {
    let documents = fixture.partition(instance).await;
    documents.into_iter().filter(|document| document["type"] != "delivered").collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_is_listed_until_a_worker_has_begun_the_instance() {
    let fixture = Fixture::new(1);
    let (worker, operator) = (fixture.provider("worker").await, fixture.provider("operator").await);
    assert_eq!(operator.queued_start("i").await.unwrap(), None);
    worker.enqueue_for_orchestrator(cancel("i"), None).await.unwrap();
    assert_eq!(operator.queued_start("i").await.unwrap(), None, "a cancellation begins nothing");
    worker.enqueue_for_orchestrator(start("i"), Some(PATIENCE)).await.unwrap();
    let queued = operator.queued_start("i").await.unwrap().expect("a start whose time has not come");
    assert_eq!(
        (queued.id.as_str(), queued.name.as_str(), queued.version.as_deref()),
        ("i", "Orchestration", Some("1.0.0"))
    );
    worker.enqueue_for_orchestrator(start_child("child", Some("parent")), None).await.unwrap();
    let queued = operator.queued_start("child").await.unwrap().expect("a child's start");
    assert_eq!(queued.parent.as_deref(), Some("parent"));
    let (item, token, _) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "child");
    assert!(operator.queued_start("child").await.unwrap().is_some(), "its first turn is not committed");
    commit(&worker, &token, vec![started("child", 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_eq!(operator.queued_start("child").await.unwrap(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_start_is_not_run() {
    let fixture = Fixture::new(1);
    let (worker, operator) = (fixture.provider("worker").await, fixture.provider("operator").await);
    assert!(!operator.drop_start("i").await.unwrap(), "there is none");
    // The worker has enqueued the start itself, and has it in memory.
    for item in [start("i"), cancel("i"), external("i", "x")] {
        worker.enqueue_for_orchestrator(item, None).await.unwrap();
    }
    assert!(operator.drop_start("i").await.unwrap());
    assert_eq!(queue(&fixture, "i").await, Vec::<Value>::new());
    assert!(worker.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    assert_eq!(queue(&fixture, "i").await, Vec::<Value>::new(), "its claim leaves nothing");
    begin(&worker, "i", Vec::new(), Vec::new()).await;
    assert!(!operator.drop_start("i").await.unwrap(), "an instance is deleted in another way");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_a_worker_is_about_to_begin_stays() {
    let fixture = Fixture::new(1);
    let (worker, operator) = (fixture.provider("worker").await, fixture.provider("operator").await);
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let error = operator.drop_start("i").await.expect_err("a turn is under way");
    assert!(error.to_string().contains("about to begin"), "{error}");
    commit(&worker, &token, vec![started("i", 1)], Vec::new(), Vec::new(), running()).await.expect("its turn");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_messages_than_fit_a_batch_are_removed_with_a_start() {
    let fixture = Fixture::new(1);
    let (worker, operator) = (fixture.provider("worker").await, fixture.provider("operator").await);
    for n in 0..150 {
        worker.enqueue_for_orchestrator(external("i", &n.to_string()), None).await.unwrap();
    }
    // These messages are deferred, and the start finds them.
    assert!(worker.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    operator.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    assert!(operator.drop_start("i").await.unwrap());
    assert_eq!(queue(&fixture, "i").await, Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_that_is_cut_anywhere_leaves_the_start_or_removes_it() {
    for lost_answer in [false, true] {
        for passing in 0.. {
            let fixture = Fixture::new(1);
            let (client, operator) = (fixture.provider("client").await, fixture.provider("operator").await);
            for item in [start("i"), cancel("i")] {
                client.enqueue_for_orchestrator(item, None).await.unwrap();
            }
            let cut = fixture.cut_at("operator", passing, lost_answer);
            let ended = until_cut(operator.drop_start("i"), &cut).await;
            // The lock of the operator has expired.
            let late = fixture.provider_with("late", test_config().with_clock(off_by(60_000))).await;
            let is_left = late.queued_start("i").await.unwrap().is_some();
            assert_eq!(late.drop_start("i").await.unwrap(), is_left, "cut after {passing}");
            assert_eq!(late.queued_start("i").await.unwrap(), None, "cut after {passing}");
            let left = queue(&fixture, "i").await;
            assert_eq!(left, Vec::<Value>::new(), "cut after {passing}");
            if let Ended::Returned(removed) = ended {
                assert!(removed.unwrap() && passing > 3, "a removal has more than {passing} requests");
                break;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_a_worker_has_begun_in_the_meantime_is_not_removed() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    // By the worker's clock the operator's claim has already expired when it is made.
    let operator = fixture.provider_with("operator", test_config().with_clock(off_by(-60_000))).await;
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let gate = fixture.hold_answer("operator", RequestKind::Batch, |request| goes_to(request, "i"));
    let removal = tokio::spawn(async move { operator.drop_start("i").await });
    reached(&gate).await;
    let (item, token, _) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "i");
    commit(&worker, &token, vec![started("i", 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    gate.open();
    assert!(!removal.await.unwrap().unwrap_or(false), "the instance runs");
    assert_eq!(admin(&worker).get_instance_info("i").await.unwrap().status, "Running");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_is_removed_whichever_answer_is_lost() {
    for passing in 0..4 {
        let fixture = Fixture::new(1);
        let (client, operator) = (fixture.provider("client").await, fixture.provider("operator").await);
        client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        let lost = WireRule::new(WireAction::LoseAnswer).client("operator").on(RequestKind::Batch);
        fixture.account.wire().add(lost.matching(|request| goes_to(request, "i")).skip(passing).times(1));
        assert!(operator.drop_start("i").await.unwrap(), "the answer of batch {passing} is lost");
        assert_eq!(operator.queued_start("i").await.unwrap(), None);
    }
}

/// The document beside a queued start may be the coordinator of a deletion of other instances.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removing_a_start_does_not_undo_a_committed_deletion() {
    let fixture = Fixture::new(1);
    let (worker, operator) = (fixture.provider("worker").await, fixture.provider("operator").await);
    let deleter = fixture.provider("deleter").await;
    finish(&worker, "y", None).await;
    // The first turn of `x` runs: a lock exists, and no instance. The deletion with force includes it.
    worker.enqueue_for_orchestrator(start("x"), None).await.unwrap();
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "x");
    let gate = Gate::new();
    let erasure = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Batch);
    fixture.account.wire().add(erasure.matching(deletes_instance));
    let set = ["x".to_owned(), "y".to_owned()];
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instances_atomic(&set, true).await });
    reached(&gate).await;
    let coordinator = fixture.documents_of_type("x", "instance").await.remove(0);
    assert_eq!(coordinator["deleting"]["state"], "committed");
    assert!(admin(&operator).get_instance_info("y").await.is_err(), "it is deleted");
    // The deleter crashes, and an operator removes the start that is still listed.
    fixture.cut("deleter", 0);
    deletion.abort();
    drop(operator.drop_start("x").await);
    let info = admin(&operator).get_instance_info("y").await;
    assert!(info.is_err(), "a committed deletion is undone for y: {info:?}");
    // The next call continues the deletion.
    if let Err(error) = admin(&operator).delete_instance("y", false).await {
        assert!(error.message.contains("not found"), "{error:?}");
    }
    assert!(fixture.is_erased("y").await);
    assert!(fixture.documents_of_type("x", "plan").await.is_empty(), "{:?}", fixture.partition("x").await);
}
