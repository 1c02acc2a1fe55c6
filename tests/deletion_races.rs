//! What goes on in an instance while it is deleted: turns, activities, messages, appends. Nothing of it survives the deletion
//! but what is meant for a new instance of the same name, and that one gets nothing else.

#[path = "common/scene.rs"]
mod scene;

use duroxide::{
    providers::{DeleteInstanceResult, Provider, ProviderError, PruneOptions, TagFilter, WorkItem},
    EventKind,
};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use scene::*;
use std::{sync::Arc, time::Duration};
use tokio::task::JoinHandle;

type Deletion = JoinHandle<Result<DeleteInstanceResult, ProviderError>>;

/// Deletes `i` by force, up to where its decided deletion erases it: held there until the gate is opened.
async fn delete_up_to_the_erasure(scene: &Scene, deleter: &Arc<CosmosDBProvider>) -> (Gate, Deletion) {
    let gate = Gate::new();
    let erasure = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Batch);
    scene.account.wire().add(erasure.matching(|request| goes_to(request, "i")));
    let deleter = deleter.clone();
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
    gate.reached().await;
    (gate, deletion)
}

async fn finish_deletion(gate: Gate, deletion: Deletion) {
    gate.open();
    let deleted = deletion.await.unwrap().unwrap();
    assert_eq!(deleted.instances_deleted, 1);
}

/// A new instance of the same name starts as if there had never been another.
async fn starts_clean(scene: &Scene, provider: &CosmosDBProvider) {
    let (item, token, attempts) = next_turn(provider, LONG).await;
    assert_eq!((item.instance.as_str(), item.execution_id, attempts), ("i", 1, 1));
    assert!(item.history.is_empty() && item.kv_snapshot.is_empty(), "{item:?}");
    assert!(matches!(item.messages[..], [WorkItem::StartOrchestration { .. }]), "{:?}", item.messages);
    commit(provider, &token, vec![started("i", 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let work = provider.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap();
    assert!(work.is_none(), "{work:?}");
    let turn = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(turn.is_none(), "{turn:?}");
    let mut kinds: Vec<String> = scene.partition("i").await.iter().map(|d| d["type"].to_string()).collect();
    kinds.sort();
    assert_eq!(kinds, ["\"history\"", "\"instance\""]);
}

struct Race {
    scene: Scene,
    worker: CosmosDBProvider,
    deleter: Arc<CosmosDBProvider>,
}

/// An instance `i` that runs, with these activities.
async fn race(work: Vec<WorkItem>) -> Race {
    let scene = Scene::new(2);
    let (worker, deleter) = (scene.provider("worker").await, Arc::new(scene.provider("deleter").await));
    begin(&worker, "i", work, Vec::new()).await;
    Race { scene, worker, deleter }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_under_way_is_lost_when_its_instance_is_deleted_and_what_it_would_have_written_never_comes() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
    let timer = WorkItem::TimerFired { instance: "i".to_owned(), execution_id: 1, id: 3, fire_at_ms: 1 };
    let ended = ended("ContinuedAsNew");
    let (work, messages) = (vec![activity("i", 2)], vec![again("i"), timer]);
    let acked = commit(&worker, &token, vec![note("i", 1, 2)], work, messages, ended).await;
    let error = acked.expect_err("the lock went with the mark");
    assert!(!error.is_retryable() && error.message.contains("lock"), "{error:?}");
    assert!(worker.renew_orchestration_item_lock(&token, LONG).await.is_err());
    // In the meantime a client starts the next one.
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    finish_deletion(gate, deletion).await;
    starts_clean(&scene, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_too_large_for_a_batch_leaves_nothing_either() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
    let many = (2..250).map(|id| activity("i", id)).collect();
    let acked = commit(&worker, &token, vec![note("i", 1, 2)], many, Vec::new(), running()).await;
    assert!(acked.is_err());
    finish_deletion(gate, deletion).await;
    assert!(scene.partition("i").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_ends_between_the_mark_and_the_erasure_leaves_no_completion() {
    let Race { scene, worker, deleter } = race(vec![activity("i", 2)]).await;
    let (_, token, _) = next_work(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
    // The erasure has looked and knows the activity, not its completion.
    worker.ack_work_item(&token, Some(done("i", 2))).await.unwrap();
    assert_eq!(scene.of_kind("i", "message").await.len(), 1);
    finish_deletion(gate, deletion).await;
    assert!(scene.partition("i").await.is_empty(), "{:?}", scene.partition("i").await);
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    starts_clean(&scene, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_ends_after_the_erasure_is_told_so() {
    let Race { scene, worker, deleter } = race(vec![activity("i", 2)]).await;
    let (_, token, _) = next_work(&worker, LONG).await;
    admin(&deleter).delete_instance("i", true).await.unwrap();
    assert!(worker.ack_work_item(&token, Some(done("i", 2))).await.is_err());
    assert!(scene.partition("i").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_ends_while_its_parent_is_erased_leaves_it_no_message() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    // Detached, so that it is not in the tree; the message is a child's all the same.
    worker.enqueue_for_orchestrator(start("child"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
    let completion = WorkItem::SubOrchCompleted {
        parent_instance: "i".to_owned(),
        parent_id: 2,
        parent_execution_id: 1,
        result: "done".to_owned(),
    };
    let events = vec![started("child", 1), completed("child", 1, 2)];
    commit(&worker, &token, events, Vec::new(), vec![completion], ended("Completed")).await.unwrap();
    assert_eq!(scene.of_kind("i", "message").await.len(), 1, "delivered after the erasure's look");
    finish_deletion(gate, deletion).await;
    // The marker stays for a day: the child may deliver its end again.
    let left = scene.partition("i").await;
    assert!(left.len() == 1 && left[0]["type"] == "delivered" && left[0]["ttl"] == 86_400, "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_another_instance_sends_while_the_old_one_is_erased_begins_a_new_one() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    worker.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
    let events = vec![started("sender", 1), completed("sender", 1, 2)];
    commit(&worker, &token, events, Vec::new(), vec![start("i")], ended("Completed")).await.unwrap();
    finish_deletion(gate, deletion).await;
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!((item.instance.as_str(), item.history.len(), item.messages.len()), ("i", 0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_by_a_client_whose_clock_is_behind_begins_a_new_instance() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    let client = scene.provider_with("client", quiet().with_clock(off_by(-60_000))).await;
    let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
    assert!(admin(&client).get_instance_info("i").await.is_err(), "the client sees that it is deleted");
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    finish_deletion(gate, deletion).await;
    starts_clean(&scene, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_by_a_client_whose_clock_is_behind_stays_after_the_erasure() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    let client = scene.provider_with("client", quiet().with_clock(off_by(-60_000))).await;
    // The erasure is done, and its last look at what came late is still to come.
    let gate = Gate::new();
    let erasure = WireRule::new(WireAction::HoldAfter(gate.clone())).client("deleter").on(RequestKind::Batch);
    scene.account.wire().add(erasure.matching(|request| goes_to(request, "i") && deletes(request)));
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
    gate.reached().await;
    assert!(scene.partition("i").await.is_empty(), "erased");
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    finish_deletion(gate, deletion).await;
    starts_clean(&scene, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_client_whose_clock_is_ahead_sent_before_the_deletion_goes_with_the_instance() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    let client = scene.provider_with("client", quiet().with_clock(off_by(60_000))).await;
    client.enqueue_for_orchestrator(external("i", "early"), None).await.unwrap();
    let sent = scene.of_kind("i", "message").await[0]["_ts"].as_u64().unwrap();
    // The service tells times apart by the second.
    while std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() <= sent {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    admin(&deleter).delete_instance("i", true).await.unwrap();
    assert!(scene.partition("i").await.is_empty(), "{:?}", scene.partition("i").await);
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    starts_clean(&scene, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_not_appended_to_an_instance_that_is_being_deleted() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
    let event = event("i", 1, 2, EventKind::ExternalSubscribed { name: "late".to_owned() });
    let error = worker.append_with_execution("i", 1, vec![event]).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    gate.open();
    deletion.await.unwrap().unwrap();
    assert!(scene.partition("i").await.is_empty(), "{:?}", scene.partition("i").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_is_taken_back_counts_no_attempt_of_the_turn_that_it_broke_off() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    finish(&worker, "child", Some("i")).await;
    worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, attempts) = next_turn(&worker, LONG).await;
    assert_eq!(attempts, 1);
    // Refused after everything was marked: the child would be an orphan.
    let refused = admin(&deleter).delete_instances_atomic(&["i".to_owned()], true).await.unwrap_err();
    assert!(refused.message.contains("orphan"), "{refused:?}");
    let instance = scene.of_kind("i", "instance").await.pop().unwrap();
    assert!(instance.get("deleting").is_none() && instance.get("due").is_none(), "{instance}");
    let acked = commit(&worker, &token, vec![note("i", 1, 2)], Vec::new(), Vec::new(), running()).await;
    assert!(acked.is_err(), "the turn was broken off");
    let (item, token, attempts) = next_turn(&worker, LONG).await;
    assert_eq!((item.messages.len(), attempts), (1, 1));
    commit(&worker, &token, vec![note("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_given_back_while_its_instance_is_marked_leaves_the_mark_on() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    for ignore_attempt in [false, true] {
        worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
        let (_, token, _) = next_turn(&worker, LONG).await;
        let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
        // Whether this is refused or has nothing to do: the deletion goes on.
        drop(worker.abandon_orchestration_item(&token, Some(Duration::from_millis(10)), ignore_attempt).await);
        let instance = scene.of_kind("i", "instance").await.pop().unwrap();
        assert!(instance.get("deleting").is_some(), "{instance}");
        finish_deletion(gate, deletion).await;
        assert!(scene.partition("i").await.is_empty());
        scene.account.wire().clear();
        begin(&worker, "i", Vec::new(), Vec::new()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_raised_before_the_deletion_is_decided_goes_with_the_instance() {
    for a_second_later in [false, true] {
        let Race { scene, worker, deleter } = race(Vec::new()).await;
        let gate = Gate::new();
        // Both partitions are asked for children before the mark, and again after it.
        let check = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Query);
        scene.account.wire().add(check.skip(2));
        let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
        gate.reached().await;
        assert!(scene.of_kind("i", "instance").await[0].get("deleting").is_some(), "marked");
        if a_second_later {
            next_second().await;
        }
        worker.enqueue_for_orchestrator(external("i", "early"), None).await.unwrap();
        gate.open();
        deletion.await.unwrap().unwrap();
        worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        starts_clean(&scene, &worker).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_the_start_of_the_next_instance_arrives() {
    let Race { scene, worker, deleter } = race(Vec::new()).await;
    let client = scene.provider_with("client", quiet().with_clock(off_by(-60_000))).await;
    worker.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&scene, &deleter).await;
    let cancel = WorkItem::CancelInstance { instance: "i".to_owned(), reason: "enough".to_owned() };
    let events = vec![started("sender", 1), completed("sender", 1, 2)];
    let messages = vec![start_child("i", Some("sender")), cancel];
    commit(&worker, &token, events, Vec::new(), messages, ended("Completed")).await.unwrap();
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    client.enqueue_for_orchestrator(external("i", "late"), None).await.unwrap();
    finish_deletion(gate, deletion).await;
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!((item.history.len(), item.messages.len()), (0, 4), "{:?}", item.messages);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_that_a_deletion_overtakes_erases_nothing_of_the_next_instance() {
    let scene = Scene::new(1);
    let (pruner, other) = (scene.provider("pruner").await, scene.provider("other").await);
    finish_after(&other, "i", 3, 3).await;
    let gate = Gate::new();
    let erasure = WireRule::new(WireAction::HoldBefore(gate.clone())).client("pruner").on(RequestKind::Batch);
    scene.account.wire().add(erasure.matching(|request| goes_to(request, "i")));
    let options = PruneOptions { keep_last: Some(1), ..PruneOptions::default() };
    let pruning = tokio::spawn(async move { admin(&pruner).prune_executions("i", options).await });
    gate.reached().await;
    admin(&other).delete_instance("i", true).await.unwrap();
    finish_after(&other, "i", 3, 3).await;
    gate.open();
    pruning.await.unwrap().unwrap();
    assert_eq!(admin(&other).list_executions("i").await.unwrap(), [1, 2, 3]);
    for execution in 1..=3 {
        assert_eq!(admin(&other).read_history_with_execution_id("i", execution).await.unwrap().len(), 3);
    }
    assert!(scene.of_kind("i", "instance").await[0]["pruning"].is_null());
}
