//! Pruning, deletion and retention decide by the documents that they write: an instance that changes, starts again or
//! grows beside them loses nothing, and an instance that is broken can still be deleted.

#[path = "common/scene.rs"]
mod scene;

use azure_data_cosmos::TransactionalBatch;
use duroxide::providers::{
    DeleteInstanceResult, ExecutionMetadata, InstanceFilter, Provider, ProviderError, PruneOptions, WorkItem,
};
use duroxide_cosmos::{CosmosDBProvider, Retention};
use duroxide_cosmos_emulator::{Gate, Misbehaviour, RequestKind, WireAction, WireRequest, WireRule};
use scene::*;
use serde_json::{json, Value};
use std::{num::NonZeroU32, sync::Arc, time::Duration};

const WEEK: i64 = 7 * 24 * 3_600_000;
const HOUR: Duration = Duration::from_secs(3_600);

fn keep(last: u32) -> PruneOptions {
    PruneOptions { keep_last: Some(last), ..PruneOptions::default() }
}

/// Plays the next execution of `instance`, which continues as new.
async fn continue_as_new(provider: &dyn Provider, instance: &str, execution: u64) {
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!(item.instance, instance);
    let events = vec![started(instance, execution), completed(instance, execution, 2)];
    commit(provider, &token, events, Vec::new(), vec![again(instance)], ended("ContinuedAsNew")).await.unwrap();
}

/// Plays the last execution of `instance`. Its output is too large for the instance's own document.
async fn complete_largely(provider: &dyn Provider, instance: &str, execution: u64) {
    let (_, token, _) = next_turn(provider, LONG).await;
    let metadata = ExecutionMetadata { output: Some("x".repeat(2_000)), ..ended("Completed") };
    let events = vec![started(instance, execution), completed(instance, execution, 2)];
    commit(provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
}

/// Whether a request asks for the executions of an instance.
fn asks_for_executions(request: &WireRequest<'_>) -> bool {
    let text = request.json().and_then(|body| body["query"].as_str().map(ToOwned::to_owned));
    text.is_some_and(|text| text.contains("'execution'"))
}

/// Holds the first such request of a client.
fn hold(scene: &Scene, client: &str, kind: RequestKind, such: fn(&WireRequest<'_>) -> bool) -> Gate {
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client(client).on(kind).matching(such);
    scene.account.wire().add(rule.times(1));
    gate
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_spares_the_execution_that_became_the_current_one_while_it_looked() {
    for last in [None, Some(0), Some(1), Some(2)] {
        let scene = Scene::new(1);
        let (pruner, worker) = (scene.provider("pruner").await, scene.provider("worker").await);
        worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        continue_as_new(&worker, "i", 1).await;
        continue_as_new(&worker, "i", 2).await;
        let gate = hold(&scene, "pruner", RequestKind::Query, asks_for_executions);
        let options = PruneOptions { keep_last: last, ..PruneOptions::default() };
        let pruning = tokio::spawn(async move { admin(&pruner).prune_executions("i", options).await });
        reach(&gate).await;
        continue_as_new(&worker, "i", 3).await;
        complete_largely(&worker, "i", 4).await;
        gate.open();
        let pruned = pruning.await.unwrap().unwrap();
        let info = admin(&worker).get_instance_info("i").await.unwrap();
        assert_eq!(info.output.map(|output| output.len()), Some(2_000), "keep_last: {last:?}");
        let history = admin(&worker).read_history_with_execution_id("i", 4).await.unwrap();
        assert_eq!(history.len(), 2, "keep_last: {last:?}");
        let left = admin(&worker).list_executions("i").await.unwrap();
        // When it looked, two executions were there, of which it was to keep two.
        assert_eq!(left, if last == Some(2) { vec![1, 2, 3, 4] } else { vec![4] }, "keep_last: {last:?}");
        assert_eq!(pruned.executions_deleted, 4 - left.len() as u64);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executions_that_another_process_has_pruned_meanwhile_are_counted_out_once() {
    let scene = Scene::new(1);
    let (pruner, worker) = (scene.provider("pruner").await, scene.provider("worker").await);
    finish_after(&worker, "i", 4, 3).await;
    let gate = Gate::new();
    let write = WireRule::new(WireAction::HoldBefore(gate.clone())).client("pruner").on(RequestKind::Replace);
    scene.account.wire().add(write.times(1));
    let pruning = tokio::spawn(async move { admin(&pruner).prune_executions("i", keep(1)).await });
    reach(&gate).await;
    admin(&worker).prune_executions("i", keep(1)).await.unwrap();
    gate.open();
    pruning.await.unwrap().unwrap();
    let metrics = admin(&worker).get_system_metrics().await.unwrap();
    assert_eq!((metrics.total_executions, metrics.total_events), (1, 3));
}

fn of_parent(metadata: ExecutionMetadata) -> ExecutionMetadata {
    ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..metadata }
}

/// A parent that has completed, and its child between two executions.
async fn live_family(provider: &dyn Provider) {
    begin(provider, "parent", Vec::new(), vec![start_child("child", Some("parent"))]).await;
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!(item.instance, "child");
    // The message that begins its next execution comes later, so that the child stays between the two.
    let events = vec![started("child", 1), completed("child", 1, 2)];
    commit(provider, &token, events, Vec::new(), Vec::new(), of_parent(ended("ContinuedAsNew"))).await.unwrap();
    provider.enqueue_for_orchestrator(external("parent", "enough"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![completed("parent", 1, 2)];
    commit(provider, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
}

async fn status_of(provider: &CosmosDBProvider, instance: &str) -> Option<String> {
    admin(provider).get_instance_info(instance).await.ok().map(|info| info.status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_between_two_executions_has_not_ended() {
    let scene = Scene::new(2);
    let at_once = Retention::default().with_completed(Duration::ZERO).with_failed(Duration::ZERO);
    let provider = scene.provider_with("p", quiet().with_retention(at_once)).await;
    live_family(&provider).await;
    let refused = admin(&provider).delete_instance("parent", false).await.unwrap_err();
    assert!(!refused.is_retryable() && refused.message.contains("child is still running"), "{refused:?}");
    // The child ended some milliseconds ago at least, whatever the granularity of the service's time.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    assert_eq!(provider.apply_retention().await.unwrap(), 0);
    assert_eq!(status_of(&provider, "child").await.as_deref(), Some("ContinuedAsNew"));
    // Its next turn is taken.
    provider.enqueue_for_orchestrator(again("child"), None).await.unwrap();
    let (item, token, _) = next_turn(&provider, LONG).await;
    assert_eq!(item.instance, "child");
    let events = vec![started("child", 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), of_parent(running())).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_leaves_a_root_between_two_executions_alone() {
    let scene = Scene::new(2);
    let provider = scene.provider("p").await;
    finish(&provider, "ended", None).await;
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    continue_as_new(&provider, "i", 1).await;
    let deleted = admin(&provider).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!(deleted.instances_deleted, 1);
    assert!(status_of(&provider, "ended").await.is_none());
    let (item, ..) = next_turn(&provider, LONG).await;
    assert!(item.instance == "i" && matches!(item.messages[..], [WorkItem::ContinueAsNew { .. }]), "{item:?}");
}

/// A bulk deletion by "deleter" that has chosen `i`, held before the write that marks it.
async fn bulk_up_to_the_mark(
    scene: &Scene,
    filter: InstanceFilter,
) -> (Gate, tokio::task::JoinHandle<Result<DeleteInstanceResult, ProviderError>>) {
    let deleter = scene.provider("deleter").await;
    let gate = hold(scene, "deleter", RequestKind::Replace, |request| goes_to(request, "i"));
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance_bulk(filter).await });
    reach(&gate).await;
    (gate, deletion)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_spares_an_instance_that_was_started_again_under_the_same_id() {
    let named = InstanceFilter { instance_ids: Some(vec!["i".to_owned()]), ..InstanceFilter::default() };
    for filter in [InstanceFilter::default(), named] {
        let scene = Scene::new(1);
        let worker = scene.provider("worker").await;
        finish(&worker, "i", None).await;
        let (gate, deletion) = bulk_up_to_the_mark(&scene, filter).await;
        admin(&worker).delete_instance("i", false).await.unwrap();
        begin(&worker, "i", Vec::new(), Vec::new()).await;
        gate.open();
        let deleted = deletion.await.unwrap();
        assert_eq!(deleted.map_or(0, |deleted| deleted.instances_deleted), 0);
        assert_eq!(status_of(&worker, "i").await.as_deref(), Some("Running"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_spares_an_instance_of_the_same_id_that_ended_after_the_filter_chose() {
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish(&worker, "i", None).await;
    let (gate, deletion) = bulk_up_to_the_mark(&scene, InstanceFilter::default()).await;
    admin(&worker).delete_instance("i", false).await.unwrap();
    finish(&worker, "i", None).await;
    gate.open();
    let deleted = deletion.await.unwrap();
    assert_eq!(deleted.map_or(0, |deleted| deleted.instances_deleted), 0);
    assert_eq!(status_of(&worker, "i").await.as_deref(), Some("Completed"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_takes_running_children_of_a_root_that_has_ended() {
    let scene = Scene::new(2);
    let provider = scene.provider("p").await;
    live_family(&provider).await;
    let deleted = admin(&provider).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!(deleted.instances_deleted, 2);
    assert!(scene.is_erased("parent").await && scene.is_erased("child").await);
}

/// Deletes every document of a partition past any provider.
async fn wipe(scene: &Scene, partition: &str) {
    for document in scene.partition(partition).await {
        let id = document["id"].as_str().unwrap().to_owned();
        scene.container().await.delete_item(partition.to_owned(), &id, None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orphan_is_deleted_as_a_root() {
    let scene = Scene::new(2);
    let provider = scene.provider("p").await;
    // Its parent was never there.
    finish(&provider, "ended", Some("nobody")).await;
    assert_eq!(admin(&provider).delete_instance("ended", false).await.unwrap().instances_deleted, 1);
    // Its parent was lost, and another one has its name.
    begin(&provider, "parent", Vec::new(), vec![start_child("child", Some("parent"))]).await;
    let (_, token, _) = next_turn(&provider, LONG).await;
    let first = commit(&provider, &token, vec![started("child", 1)], Vec::new(), Vec::new(), of_parent(running()));
    first.await.unwrap();
    let refused = admin(&provider).delete_instance("child", true).await.unwrap_err();
    assert!(refused.message.contains("Delete root instance instead"), "{refused:?}");
    wipe(&scene, "parent").await;
    begin(&provider, "parent", Vec::new(), Vec::new()).await;
    let refused = admin(&provider).delete_instance("child", false).await.unwrap_err();
    assert!(refused.message.contains("still running"), "{refused:?}");
    assert_eq!(admin(&provider).delete_instance("child", true).await.unwrap().instances_deleted, 1);
    assert!(scene.is_erased("child").await);
    assert_eq!(status_of(&provider, "parent").await.as_deref(), Some("Running"));
}

/// Whether a request applies a part of a committed turn: it deletes the part's document.
fn applies_a_part(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let deletes =
        |op: &Value| op["operationType"] == "Delete" && op["id"].as_str().is_some_and(|id| id.starts_with("s:"));
    body.as_array().is_some_and(|operations| operations.iter().any(deletes))
}

/// An instance `i` whose last turn is committed and can't be applied, since one of its parts is lost.
async fn stuck(scene: &Scene) {
    let worker = scene.provider("worker").await;
    begin(&worker, "i", Vec::new(), Vec::new()).await;
    worker.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("worker").on(RequestKind::Batch);
    scene.account.wire().add(rule.matching(applies_a_part));
    let ack = tokio::spawn(async move {
        let many = (2..400).map(|id| activity("i", id)).collect();
        commit(&worker, &token, vec![note("i", 1, 2)], many, Vec::new(), running()).await
    });
    reach(&gate).await;
    ack.abort();
    let parts = scene.of_kind("i", "staged").await;
    let lost = parts[0]["id"].as_str().unwrap().to_owned();
    scene.container().await.delete_item("i".to_owned(), &lost, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_whose_turn_can_not_be_applied_is_deleted_by_force() {
    let scene = Scene::new(2);
    stuck(&scene).await;
    let deleter = scene.provider("deleter").await;
    let refused = admin(&deleter).delete_instance("i", false).await.unwrap_err();
    assert!(!refused.is_retryable(), "{refused:?}");
    assert_eq!(admin(&deleter).delete_instance("i", true).await.unwrap().instances_deleted, 1);
    assert!(scene.partition("i").await.is_empty());
    begin(&deleter, "i", Vec::new(), Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_document_of_an_unknown_kind_goes_with_the_instance() {
    let scene = Scene::new(1);
    let provider = scene.provider("p").await;
    finish_after(&provider, "i", 3, 3).await;
    finish(&provider, "beside", None).await;
    let strangers = [
        json!({ "id": "stranger", "instanceId": "i", "note": "without a type" }),
        json!({ "id": "x:17", "instanceId": "i", "type": 17, "due": "tomorrow", "execution": "one", "starts": 1 }),
    ];
    for stranger in &strangers {
        assert!(scene.account.put("duroxide", "duroxide", "i", stranger).await);
    }
    let pruned = admin(&provider).prune_executions("i", keep(1)).await.unwrap();
    assert_eq!(pruned.executions_deleted, 2);
    let deleted = admin(&provider).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!(deleted.instances_deleted, 2);
    assert!(scene.partition("i").await.is_empty(), "{:?}", scene.partition("i").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_deletions_of_the_same_set_in_opposite_order_both_end_well() {
    let scene = Scene::new(2);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    // Each has its first mark on before either goes on.
    let slow = WireRule::new(WireAction::DelayAnswer(Duration::from_millis(100))).on(RequestKind::Replace);
    scene.account.wire().add(slow);
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
            assert!(scene.partition(instance).await.is_empty());
        }
    }
}

/// Whether a request asks for the children of instances.
fn asks_for_children(request: &WireRequest<'_>) -> bool {
    let text = request.json().and_then(|body| body["query"].as_str().map(ToOwned::to_owned));
    text.is_some_and(|text| text.contains("c.parent IN"))
}

/// A parent that runs, and the first turn of each of its children, which are still to be committed.
async fn growing(worker: &CosmosDBProvider, children: usize) -> Vec<(String, String)> {
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
async fn a_tree_that_grows_while_it_is_deleted_by_force_goes_as_a_whole() {
    let scene = Scene::new(1);
    let (worker, deleter) = (scene.provider("worker").await, scene.provider("deleter").await);
    let children = growing(&worker, 3).await;
    grow(&worker, &children[0], Vec::new()).await;
    // The tree has been read twice: the parent's children, and theirs. The next question is whether anybody would be
    // left.
    let gates = [Gate::new(), Gate::new()];
    for gate in &gates {
        let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Query);
        scene.account.wire().add(rule.matching(asks_for_children).skip(2).times(1));
    }
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("parent", true).await });
    for (gate, child) in gates.iter().zip(&children[1..]) {
        reach(gate).await;
        grow(&worker, child, Vec::new()).await;
        gate.open();
    }
    let deleted = deletion.await.unwrap().unwrap();
    assert_eq!(deleted.instances_deleted, 4);
    for partition in ["parent", "child-0", "child-1", "child-2"] {
        assert!(scene.is_erased(partition).await, "{partition}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_set_that_would_leave_a_child_behind_is_refused_and_says_what_to_do() {
    let scene = Scene::new(1);
    let provider = scene.provider("p").await;
    let children = growing(&provider, 1).await;
    grow(&provider, &children[0], Vec::new()).await;
    let refused = admin(&provider).delete_instances_atomic(&["parent".to_owned()], true).await.unwrap_err();
    assert!(!refused.is_retryable() && refused.message.contains("Ask for the tree again"), "{refused:?}");
    assert_eq!(status_of(&provider, "parent").await.as_deref(), Some("Running"));
}

fn after_an_hour() -> Retention {
    Retention::default().with_completed(HOUR).with_failed(HOUR).with_cancelled(HOUR)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_is_ahead_does_not_end_the_retention_of_anything() {
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish(&worker, "i", None).await;
    let ahead = scene.provider_with("ahead", quiet().with_clock(off_by(WEEK)).with_retention(after_an_hour())).await;
    assert_eq!(ahead.apply_retention().await.unwrap(), 0);
    assert_eq!(status_of(&worker, "i").await.as_deref(), Some("Completed"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_clock_is_behind_does_not_shorten_the_retention_of_what_it_ends() {
    let scene = Scene::new(1);
    let behind = scene.provider_with("behind", quiet().with_clock(off_by(-WEEK))).await;
    finish(&behind, "i", None).await;
    let keeper = scene.provider_with("keeper", quiet().with_retention(after_an_hour())).await;
    for _ in 0..2 {
        assert_eq!(keeper.apply_retention().await.unwrap(), 0);
    }
    assert_eq!(status_of(&keeper, "i").await.as_deref(), Some("Completed"));
    // It goes an hour after its end, by the service's time, and is not written again until then.
    let before = scene.of_kind("i", "instance").await.remove(0);
    assert_eq!(keeper.apply_retention().await.unwrap(), 0);
    assert_eq!(scene.of_kind("i", "instance").await[0]["_etag"], before["_etag"]);
    let at_once = Retention::default().with_completed(Duration::from_secs(1));
    let other = scene.provider_with("other", quiet().with_retention(at_once)).await;
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert_eq!(other.apply_retention().await.unwrap(), 1);
}

/// Gives `i` so many executions before the current one, which then has no history of its own.
async fn lengthen(scene: &Scene, executions: u64) {
    let instance = scene.of_kind("i", "instance").await.remove(0);
    let mut longer = instance.clone();
    longer["execution"] = (executions + 1).into();
    longer["totals"] = json!({ "executions": executions + 1, "events": 2 * (executions + 1) });
    let container = scene.container().await;
    let past: Vec<u64> = (1..=executions).collect();
    for chunk in past.chunks(50) {
        let mut batch = TransactionalBatch::new("i".to_owned());
        for execution in chunk {
            let common = json!({ "instanceId": "i", "execution": execution });
            let mut x = common.clone();
            x["id"] = format!("x:{execution}").into();
            (x["type"], x["status"]) = ("execution".into(), "ContinuedAsNew".into());
            (x["startedAt"], x["endedAt"], x["events"]) = (1.into(), 2.into(), json!([[1, 2]]));
            let mut h = common;
            h["id"] = format!("h:{execution}:t:0").into();
            (h["type"], h["first"], h["events"]) = ("history".into(), 1.into(), json!([]));
            batch = batch.upsert_item(x, None).unwrap().upsert_item(h, None).unwrap();
        }
        container.execute_transactional_batch(batch, None).await.unwrap();
    }
    container.upsert_item("i".to_owned(), "instance", &longer, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_executions_are_pruned_in_slices_and_the_instance_stays_small() {
    const MANY: u64 = 1_600;
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish(&worker, "i", None).await;
    lengthen(&scene, MANY).await;
    let pruner = scene.provider("pruner").await;
    let largest = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let seen = largest.clone();
    scene.account.wire().observe(move |request, _| {
        if request.kind == RequestKind::Replace && request.client == Some("pruner") {
            seen.fetch_max(request.body.len(), std::sync::atomic::Ordering::Relaxed);
        }
    });
    // The process dies in the middle of it.
    let cut = scene.cut("pruner", 40);
    assert!(matches!(until_cut(admin(&pruner).prune_executions("i", keep(3)), &cut).await, Ended::Cut));
    scene.account.wire().clear();
    admin(&worker).prune_executions("i", keep(3)).await.unwrap();
    assert_eq!(admin(&worker).list_executions("i").await.unwrap(), [MANY - 1, MANY, MANY + 1]);
    let left = scene.partition("i").await;
    assert_eq!(left.iter().filter(|d| d["type"] == "history").count(), 2);
    let instance = left.iter().find(|d| d["type"] == "instance").unwrap();
    assert!(instance.get("pruning").is_none(), "{instance}");
    assert_eq!(instance["totals"], json!({ "executions": 3, "events": 6 }));
    let largest = largest.load(std::sync::atomic::Ordering::Relaxed);
    assert!((1..6_000).contains(&largest), "{largest} bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_partition_is_listed_pruned_and_erased_page_by_page() {
    let scene = Scene::new(1);
    // Each page takes a third of the time that a request has, and there are a dozen.
    let config = quiet().with_operation_timeout(Duration::from_secs(2)).with_request_timeout(Duration::from_secs(2));
    let provider = scene.provider_with("p", config).await;
    finish(&provider, "i", None).await;
    lengthen(&scene, 60).await;
    let wire = scene.account.wire();
    wire.misbehave(Misbehaviour::SmallPages(NonZeroU32::new(10).unwrap()));
    wire.misbehave(Misbehaviour::SlowPages(Duration::from_millis(600)));
    assert_eq!(admin(&provider).list_executions("i").await.unwrap().len(), 61);
    let pruned = admin(&provider).prune_executions("i", keep(40)).await.unwrap();
    assert_eq!(pruned.executions_deleted, 21);
    assert_eq!(admin(&provider).delete_instance("i", false).await.unwrap().instances_deleted, 1);
    wire.behave();
    assert!(scene.partition("i").await.is_empty());
}
