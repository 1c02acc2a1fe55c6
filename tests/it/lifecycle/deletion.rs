//! A deletion decides by the documents that it writes, and deletes broken instances too.

use super::*;
use crate::fixture::*;
use duroxide::providers::{InstanceFilter, Provider, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, Retention};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule};
use serde_json::json;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_between_two_executions_has_not_ended() {
    let fixture = Fixture::new(2);
    let at_once = Retention::default().with_completed(Duration::ZERO).with_failed(Duration::ZERO);
    let provider = fixture.provider_with("p", test_config().with_retention(at_once)).await;
    live_tree(&provider).await;
    let refused = admin(&provider).delete_instance("parent", false).await.unwrap_err();
    assert!(!refused.is_retryable() && refused.message.contains("child is still running"), "{refused:?}");
    // The child ended more than a second ago, so that it is in the past by the timestamps of Cosmos DB.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert_eq!(provider.apply_retention().await.unwrap(), 0);
    assert_eq!(status_of(&provider, "child").await.as_deref(), Some("ContinuedAsNew"));
    // The child's next turn is fetched.
    provider.enqueue_for_orchestrator(continue_as_new("child"), None).await.unwrap();
    let (item, token, _) = next_turn(&provider, LONG).await;
    assert_eq!(item.instance, "child");
    let events = vec![started("child", 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), of_parent(running())).await.unwrap();
}

/// Deletes all documents of a partition past the providers.
async fn erase_partition(fixture: &Fixture, partition: &str) {
    for document in fixture.partition(partition).await {
        let id = document["id"].as_str().unwrap().to_owned();
        fixture.container().await.delete_item(partition.to_owned(), &id, None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orphan_is_deleted_as_a_root() {
    let fixture = Fixture::new(2);
    let provider = fixture.provider("p").await;
    // The parent of this instance never existed.
    finish(&provider, "ended", Some("nobody")).await;
    assert_eq!(admin(&provider).delete_instance("ended", false).await.unwrap().instances_deleted, 1);
    // The parent of this instance was lost, and another instance has its name.
    begin(&provider, "parent", Vec::new(), vec![start_child("child", Some("parent"))]).await;
    let (_, token, _) = next_turn(&provider, LONG).await;
    let first = commit(&provider, &token, vec![started("child", 1)], Vec::new(), Vec::new(), of_parent(running()));
    first.await.unwrap();
    let refused = admin(&provider).delete_instance("child", true).await.unwrap_err();
    assert!(refused.message.contains("Delete root instance instead"), "{refused:?}");
    erase_partition(&fixture, "parent").await;
    begin(&provider, "parent", Vec::new(), Vec::new()).await;
    let refused = admin(&provider).delete_instance("child", false).await.unwrap_err();
    assert!(refused.message.contains("still running"), "{refused:?}");
    assert_eq!(admin(&provider).delete_instance("child", true).await.unwrap().instances_deleted, 1);
    assert!(fixture.is_erased("child").await);
    assert_eq!(status_of(&provider, "parent").await.as_deref(), Some("Running"));
}

/// Makes an instance `i` whose last turn is committed and cannot be applied, since one of its parts is lost.
async fn stuck(fixture: &Fixture) {
    let worker = fixture.provider("worker").await;
    begin(&worker, "i", Vec::new(), Vec::new()).await;
    worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("worker").on(RequestKind::Batch);
    fixture.account.wire().add(rule.matching(applies_a_part));
    let ack = tokio::spawn(async move {
        let many = (2..400).map(|id| activity("i", id)).collect();
        commit(&worker, &token, vec![filler("i", 1, 2)], many, Vec::new(), running()).await
    });
    reached(&gate).await;
    ack.abort();
    let parts = fixture.documents_of_type("i", "staged").await;
    let lost = parts[0]["id"].as_str().unwrap().to_owned();
    fixture.container().await.delete_item("i".to_owned(), &lost, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_whose_turn_cannot_be_applied_is_deleted_with_force() {
    let fixture = Fixture::new(2);
    stuck(&fixture).await;
    let deleter = fixture.provider("deleter").await;
    let refused = admin(&deleter).delete_instance("i", false).await.unwrap_err();
    assert!(!refused.is_retryable(), "{refused:?}");
    assert_eq!(admin(&deleter).delete_instance("i", true).await.unwrap().instances_deleted, 1);
    assert!(fixture.partition("i").await.is_empty());
    begin(&deleter, "i", Vec::new(), Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_document_of_an_unknown_type_is_deleted_with_its_instance() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("p").await;
    finish_after(&provider, "i", 3, 3).await;
    finish(&provider, "beside", None).await;
    let strangers = [
        json!({ "id": "stranger", "instanceId": "i", "note": "without a type" }),
        json!({ "id": "x:17", "instanceId": "i", "type": 17, "due": "tomorrow", "execution": "one", "starts": 1 }),
    ];
    for stranger in &strangers {
        assert!(fixture.account.put("duroxide", "duroxide", "i", stranger).await);
    }
    let pruned = admin(&provider).prune_executions("i", keep_last(1)).await.unwrap();
    assert_eq!(pruned.executions_deleted, 2);
    let deleted = admin(&provider).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!(deleted.instances_deleted, 2);
    assert!(fixture.partition("i").await.is_empty(), "{:?}", fixture.partition("i").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_deletions_of_the_same_set_in_opposite_order_both_succeed() {
    let fixture = Fixture::new(2);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    // Each deletion prepares its first instance before either continues.
    let slow = WireRule::new(WireAction::DelayAnswer(Duration::from_millis(100))).on(RequestKind::Replace);
    fixture.account.wire().add(slow);
    for round in 0..3 {
        let set: Vec<String> = ["x", "y", "z"].iter().map(|name| format!("{name}{round}")).collect();
        for instance in &set {
            begin(&a, instance, Vec::new(), Vec::new()).await;
        }
        let reversed: Vec<String> = set.iter().rev().cloned().collect();
        let deletions =
            (admin(&a).delete_instances_atomic(&set, true), admin(&b).delete_instances_atomic(&reversed, true));
        let (one, other) = tokio::join!(deletions.0, deletions.1);
        let deleted = one.expect("the one").instances_deleted + other.expect("the other").instances_deleted;
        assert_eq!(deleted, 3, "the call that decides counts them all");
        for instance in &set {
            assert!(fixture.partition(instance).await.is_empty());
        }
    }
}

/// Whether a request queries the children of instances.
fn asks_for_children(request: &WireRequest<'_>) -> bool {
    let text = request.json().and_then(|body| body["query"].as_str().map(ToOwned::to_owned));
    text.is_some_and(|text| text.contains("c.parent IN"))
}

/// Makes a parent that runs, and fetches the first turn of each of its children without committing it.
async fn growing_tree(worker: &CosmosDBProvider, children: usize) -> Vec<(String, String)> {
    let starts = (0..children).map(|n| start_child(&format!("child-{n}"), Some("parent"))).collect();
    begin(worker, "parent", Vec::new(), starts).await;
    let mut turns = Vec::new();
    for _ in 0..children {
        let (item, token, _) = next_turn(worker, LONG).await;
        turns.push((item.instance, token));
    }
    turns
}

async fn grow(worker: &CosmosDBProvider, child: &(String, String), messages: Vec<WorkItem>) {
    let events = vec![started(&child.0, 1)];
    commit(worker, &child.1, events, Vec::new(), messages, of_parent(running())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_that_grows_during_a_deletion_with_force_is_deleted_as_a_whole() {
    let fixture = Fixture::new(1);
    let (worker, deleter) = (fixture.provider("worker").await, fixture.provider("deleter").await);
    let children = growing_tree(&worker, 3).await;
    grow(&worker, &children[0], Vec::new()).await;
    // The deletion has read the tree twice: the parent's children, and their children. The next query shows whether any
    // child would be left without its parent.
    let gates = [Gate::new(), Gate::new()];
    for gate in &gates {
        let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Query);
        fixture.account.wire().add(rule.matching(asks_for_children).skip(2).times(1));
    }
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("parent", true).await });
    for (gate, child) in gates.iter().zip(&children[1..]) {
        reached(gate).await;
        grow(&worker, child, Vec::new()).await;
        gate.open();
    }
    let deleted = deletion.await.unwrap().unwrap();
    assert_eq!(deleted.instances_deleted, 4);
    for partition in ["parent", "child-0", "child-1", "child-2"] {
        assert!(fixture.is_erased(partition).await, "{partition}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_set_that_would_leave_a_child_behind_is_refused_with_instructions() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("p").await;
    let children = growing_tree(&provider, 1).await;
    grow(&provider, &children[0], Vec::new()).await;
    let refused = admin(&provider).delete_instances_atomic(&["parent".to_owned()], true).await.unwrap_err();
    assert!(!refused.is_retryable() && refused.message.contains("Ask for the tree again"), "{refused:?}");
    assert_eq!(status_of(&provider, "parent").await.as_deref(), Some("Running"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_is_deleted_even_if_listing_its_children_takes_longer_than_the_request_timeout() {
    let fixture = Fixture::new(8);
    let worker = fixture.provider("worker").await;
    finish(&worker, "parent", None).await;
    finish(&worker, "child", Some("parent")).await;
    let timeout = Duration::from_secs(2);
    let deleter = test_config().with_operation_timeout(timeout).with_request_timeout(timeout);
    let deleter = fixture.provider_with("deleter", deleter).await;
    // Each of the eight physical partitions answers with a page of its own.
    let slowly = WireRule::new(WireAction::Delay(Duration::from_millis(500))).client("deleter");
    fixture.account.wire().add(slowly.on(RequestKind::Query));
    let deleted = admin(&deleter).delete_instance("parent", false).await.unwrap();
    assert_eq!(deleted.instances_deleted, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_whose_batches_are_refused_reports_the_reason() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    finish(&a, "i", None).await;
    let refusal = WireAction::RefuseBatchOperation { index: 0, status: 403, substatus: None };
    let rule = WireRule::new(refusal).client("b").on(RequestKind::Batch);
    let rule = fixture.account.wire().add(rule.matching(|request| goes_to(request, "i")));
    let deletion = tokio::time::timeout(PATIENCE, admin(&b).delete_instance("i", false)).await;
    let error = deletion.expect("it ends").unwrap_err();
    assert!(!error.is_retryable() && error.message.contains("access denied"), "{error:?}");
    rule.remove();
    // The deletion was committed: the next call finishes it.
    admin(&a).delete_instance("i", false).await.unwrap();
    assert!(fixture.partition("i").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_without_force_spares_an_instance_in_its_first_turn() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    a.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&a, LONG).await;
    let deleted = admin(&b).delete_instances_atomic(&["i".to_owned()], false).await.unwrap();
    assert_eq!(deleted.instances_deleted, 0);
    commit(&a, &token, vec![started("i", 1)], Vec::new(), Vec::new(), running()).await.expect("its first turn");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_document_with_any_id_is_deleted_with_its_instance() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    finish(&a, "i", None).await;
    for id in ["note.txt", "with a space", "ümlaut"] {
        let document = json!({ "id": id, "instanceId": "i", "execution": 1, "type": "note" });
        assert!(fixture.account.put("duroxide", "duroxide", "i", &document).await);
    }
    admin(&a).delete_instance("i", false).await.unwrap();
    assert!(fixture.partition("i").await.is_empty(), "{:?}", fixture.partition("i").await);
    begin(&a, "i", Vec::new(), Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_instance_does_not_prevent_the_erasure_of_the_others_of_its_deletion() {
    // Each part of the plan has a hundred instances.
    let fixture = Fixture::new(2);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    let names: Vec<String> = (0..150).map(|number| format!("i{number:03}")).collect();
    finish(&a, "i000", None).await;
    fixture.copy_instance("i000", names[1..].iter().cloned()).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").on(RequestKind::Batch);
    fixture.account.wire().add(rule.matching(deletes_instance));
    let set = names.clone();
    let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&set, true).await });
    reached(&gate).await;
    deletion.abort();
    fixture.change("i050", "instance", |document| document["execution"] = json!("one")).await;
    let mut left: Vec<&str> = names.iter().map(String::as_str).collect();
    // Each call continues the recovery for two seconds. A busy machine needs more than one call.
    while left.len() > 2 {
        let error = admin(&b).delete_instances_atomic(&names[..1], true).await.expect_err("one can't be read");
        assert!(error.message.contains("i050"), "{error:?}");
        let mut remaining = Vec::new();
        for &name in &left {
            if !fixture.is_erased(name).await {
                remaining.push(name);
            }
        }
        assert!(remaining.len() < left.len(), "each call makes progress: {remaining:?}");
        left = remaining;
    }
    assert_eq!(left, ["i000", "i050"], "the coordinator stays as long as one of its instances does");
    fixture.change("i050", "instance", |document| document["execution"] = json!(1)).await;
    admin(&b).delete_instances_atomic(&names[..1], true).await.unwrap();
    assert!(fixture.is_erased("i000").await && fixture.is_erased("i050").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_can_be_read_although_the_state_of_its_deletion_cannot() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    finish(&a, "x", None).await;
    finish(&a, "y", None).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldAfter(gate.clone())).client("a").on(RequestKind::Replace);
    fixture.account.wire().add(rule.matching(|request| goes_to(request, "y")));
    let set = ["x".to_owned(), "y".to_owned()];
    let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&set, true).await });
    reached(&gate).await;
    deletion.abort();
    fixture.change("x", "instance", |document| document["execution"] = json!("one")).await;
    assert_eq!(b.read("y").await.unwrap().len(), 2);
    assert_eq!(status_of(&b, "y").await.as_deref(), Some("Completed"));
    assert!(admin(&b).list_instances().await.unwrap().contains(&"y".to_owned()));
}
