//! Turns, activities, messages and appends beside a deletion. None of them survives the deletion, except messages for a
//! new instance of the same name, which gets nothing else.

use crate::fixture::*;
use duroxide::{
    providers::{DeleteInstanceResult, Provider, ProviderError, TagFilter, WorkItem},
    EventKind,
};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use std::{sync::Arc, time::Duration};
use tokio::task::JoinHandle;

type Deletion = JoinHandle<Result<DeleteInstanceResult, ProviderError>>;

/// Deletes `i` with force, up to the erasure after the commit. The deletion is held there until the gate is opened.
async fn delete_up_to_the_erasure(fixture: &Fixture, deleter: &Arc<CosmosDBProvider>) -> (Gate, Deletion) {
    let gate = Gate::new();
    let erasure = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Batch);
    fixture.account.wire().add(erasure.matching(|request| goes_to(request, "i")));
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

/// A new instance of the same name starts without any trace of the old one.
async fn starts_clean(fixture: &Fixture, provider: &CosmosDBProvider) {
    let (item, token, attempts) = next_turn(provider, LONG).await;
    assert_eq!((item.instance.as_str(), item.execution_id, attempts), ("i", 1, 1));
    assert!(item.history.is_empty() && item.kv_snapshot.is_empty(), "{item:?}");
    assert!(matches!(item.messages[..], [WorkItem::StartOrchestration { .. }]), "{:?}", item.messages);
    commit(provider, &token, vec![started("i", 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let work = provider.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap();
    assert!(work.is_none(), "{work:?}");
    let turn = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(turn.is_none(), "{turn:?}");
    let mut kinds: Vec<String> = fixture.partition("i").await.iter().map(|d| d["type"].to_string()).collect();
    kinds.sort();
    assert_eq!(kinds, ["\"history\"", "\"instance\""]);
}

struct Race {
    fixture: Fixture,
    worker: CosmosDBProvider,
    deleter: Arc<CosmosDBProvider>,
}

/// Makes an instance `i` that runs, with these activities.
async fn race(work: Vec<WorkItem>) -> Race {
    let fixture = Fixture::new(2);
    let (worker, deleter) = (fixture.provider("worker").await, Arc::new(fixture.provider("deleter").await));
    begin(&worker, "i", work, Vec::new()).await;
    Race { fixture, worker, deleter }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_turn_of_a_deleted_instance_is_lost_and_stores_nothing() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
    let timer = WorkItem::TimerFired { instance: "i".to_owned(), execution_id: 1, id: 3, fire_at_ms: 1 };
    let ended = ended("ContinuedAsNew");
    let (work, messages) = (vec![activity("i", 2)], vec![continue_as_new("i"), timer]);
    let acked = commit(&worker, &token, vec![filler("i", 1, 2)], work, messages, ended).await;
    let error = acked.expect_err("the preparation has removed the lock");
    assert!(!error.is_retryable() && error.message.contains("lock"), "{error:?}");
    assert!(worker.renew_orchestration_item_lock(&token, LONG).await.is_err());
    // In the meantime a client starts the next instance of this name.
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    finish_deletion(gate, deletion).await;
    starts_clean(&fixture, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_turn_in_parts_of_a_deleted_instance_stores_nothing_either() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
    let many = (2..250).map(|id| activity("i", id)).collect();
    let acked = commit(&worker, &token, vec![filler("i", 1, 2)], many, Vec::new(), running()).await;
    assert!(acked.is_err());
    finish_deletion(gate, deletion).await;
    assert!(fixture.partition("i").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_ends_between_the_preparation_and_the_erasure_leaves_no_completion() {
    let Race { fixture, worker, deleter } = race(vec![activity("i", 2)]).await;
    let (_, token, _) = next_activity(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
    // The erasure has listed the activity, but not its completion.
    worker.ack_work_item(&token, Some(done("i", 2))).await.unwrap();
    assert_eq!(fixture.documents_of_type("i", "message").await.len(), 1);
    finish_deletion(gate, deletion).await;
    assert!(fixture.partition("i").await.is_empty(), "{:?}", fixture.partition("i").await);
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    starts_clean(&fixture, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_ends_after_the_erasure_is_told_so() {
    let Race { fixture, worker, deleter } = race(vec![activity("i", 2)]).await;
    let (_, token, _) = next_activity(&worker, LONG).await;
    admin(&deleter).delete_instance("i", true).await.unwrap();
    assert!(worker.ack_work_item(&token, Some(done("i", 2))).await.is_err());
    assert!(fixture.partition("i").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_ends_while_its_parent_is_erased_leaves_it_no_message() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    // The child is detached, so that it is not in the tree. Its message is a child's message all the same.
    worker.enqueue_for_orchestrator(start("child"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
    let completion = WorkItem::SubOrchCompleted {
        parent_instance: "i".to_owned(),
        parent_id: 2,
        parent_execution_id: 1,
        result: "done".to_owned(),
    };
    let events = vec![started("child", 1), completed("child", 1, 2)];
    commit(&worker, &token, events, Vec::new(), vec![completion], ended("Completed")).await.unwrap();
    assert_eq!(fixture.documents_of_type("i", "message").await.len(), 1, "delivered after the query of the erasure");
    finish_deletion(gate, deletion).await;
    // The marker stays for a day: the child may deliver its completion again.
    let left = fixture.partition("i").await;
    assert!(left.len() == 1 && left[0]["type"] == "delivered" && left[0]["ttl"] == 86_400, "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_another_instance_sends_while_the_old_one_is_erased_begins_a_new_one() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    worker.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
    let events = vec![started("sender", 1), completed("sender", 1, 2)];
    commit(&worker, &token, events, Vec::new(), vec![start("i")], ended("Completed")).await.unwrap();
    finish_deletion(gate, deletion).await;
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!((item.instance.as_str(), item.history.len(), item.messages.len()), ("i", 0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_by_a_client_whose_clock_is_behind_begins_a_new_instance() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    let client = fixture.provider_with("client", test_config().with_clock(off_by(-60_000))).await;
    let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
    assert!(admin(&client).get_instance_info("i").await.is_err(), "the client sees that it is deleted");
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    finish_deletion(gate, deletion).await;
    starts_clean(&fixture, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_by_a_client_whose_clock_is_behind_stays_after_the_erasure() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    let client = fixture.provider_with("client", test_config().with_clock(off_by(-60_000))).await;
    // The erasure is done, except for its last query for late documents.
    let gate = Gate::new();
    let erasure = WireRule::new(WireAction::HoldAfter(gate.clone())).client("deleter").on(RequestKind::Batch);
    fixture.account.wire().add(erasure.matching(|request| goes_to(request, "i") && deletes_instance(request)));
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
    gate.reached().await;
    assert!(fixture.partition("i").await.is_empty(), "erased");
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    finish_deletion(gate, deletion).await;
    starts_clean(&fixture, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_before_the_deletion_from_a_clock_that_is_ahead_are_deleted_with_the_instance() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    let client = fixture.provider_with("client", test_config().with_clock(off_by(60_000))).await;
    client.enqueue_for_orchestrator(external("i", "early"), None).await.unwrap();
    let sent = fixture.documents_of_type("i", "message").await[0]["_ts"].as_u64().unwrap();
    // Timestamps of Cosmos DB have whole seconds.
    while std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() <= sent {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    admin(&deleter).delete_instance("i", true).await.unwrap();
    assert!(fixture.partition("i").await.is_empty(), "{:?}", fixture.partition("i").await);
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    starts_clean(&fixture, &worker).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_not_appended_to_an_instance_that_is_being_deleted() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
    let event = event("i", 1, 2, EventKind::ExternalSubscribed { name: "late".to_owned() });
    let error = worker.append_with_execution("i", 1, vec![event]).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    gate.open();
    deletion.await.unwrap().unwrap();
    assert!(fixture.partition("i").await.is_empty(), "{:?}", fixture.partition("i").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aborted_deletion_counts_no_attempt_of_the_turn_that_it_interrupted() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    finish(&worker, "child", Some("i")).await;
    worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, attempts) = next_turn(&worker, LONG).await;
    assert_eq!(attempts, 1);
    // The deletion is refused after it has prepared all instances: the child would have no parent.
    let refused = admin(&deleter).delete_instances_atomic(&["i".to_owned()], true).await.unwrap_err();
    assert!(refused.message.contains("orphan"), "{refused:?}");
    let instance = fixture.documents_of_type("i", "instance").await.pop().unwrap();
    assert!(instance.get("deleting").is_none() && instance.get("due").is_none(), "{instance}");
    let acked = commit(&worker, &token, vec![filler("i", 1, 2)], Vec::new(), Vec::new(), running()).await;
    assert!(acked.is_err(), "the turn was broken off");
    let (item, token, attempts) = next_turn(&worker, LONG).await;
    assert_eq!((item.messages.len(), attempts), (1, 1));
    commit(&worker, &token, vec![filler("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_release_of_a_claim_does_not_undo_the_preparation_of_a_deletion() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    for ignore_attempt in [false, true] {
        worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
        let (_, token, _) = next_turn(&worker, LONG).await;
        let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
        // This call may be refused or have no effect. The deletion continues.
        drop(worker.abandon_orchestration_item(&token, Some(Duration::from_millis(10)), ignore_attempt).await);
        let instance = fixture.documents_of_type("i", "instance").await.pop().unwrap();
        assert!(instance.get("deleting").is_some(), "{instance}");
        finish_deletion(gate, deletion).await;
        assert!(fixture.partition("i").await.is_empty());
        fixture.account.wire().clear();
        begin(&worker, "i", Vec::new(), Vec::new()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_that_are_raised_before_the_commit_are_deleted_with_the_instance() {
    for a_second_later in [false, true] {
        let Race { fixture, worker, deleter } = race(Vec::new()).await;
        let gate = Gate::new();
        // The deletion queries both partitions for children before it prepares, and again afterwards.
        let check = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Query);
        fixture.account.wire().add(check.skip(2));
        let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
        gate.reached().await;
        assert!(fixture.documents_of_type("i", "instance").await[0].get("deleting").is_some(), "prepared");
        if a_second_later {
            next_second().await;
        }
        worker.enqueue_for_orchestrator(external("i", "early"), None).await.unwrap();
        gate.open();
        deletion.await.unwrap().unwrap();
        worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        starts_clean(&fixture, &worker).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_after_the_start_of_the_next_instance_arrive() {
    let Race { fixture, worker, deleter } = race(Vec::new()).await;
    let client = fixture.provider_with("client", test_config().with_clock(off_by(-60_000))).await;
    worker.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let (gate, deletion) = delete_up_to_the_erasure(&fixture, &deleter).await;
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
