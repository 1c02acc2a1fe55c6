//! Deletions of any size: a set whose names alone are larger than a document may be, one that takes longer than an abandoned
//! one is waited for, bulk deletions in which one instance can't be deleted; cut anywhere, and finished by the next call.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{InstanceFilter, Provider, PruneOptions};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use futures::future;
use scene::*;
use serde_json::Value;
use std::{future::Future, time::Duration};

/// A finished root with so many finished children, whose names have so many bytes; the root comes first.
async fn plant(scene: &Scene, provider: &CosmosDBProvider, root: &str, children: usize, bytes: usize) -> Vec<String> {
    let name = |n: usize| format!("{root}/{n:0>width$}", width = bytes.saturating_sub(root.len() + 1));
    finish(provider, root, None).await;
    finish(provider, &name(0), Some(root)).await;
    scene.copy(&name(0), (1..children).map(name)).await;
    std::iter::once(root.to_owned()).chain((0..children).map(name)).collect()
}

/// Runs them all, on every core.
async fn all_at_once<F>(runs: impl Iterator<Item = F>) -> Vec<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    future::try_join_all(runs.map(tokio::spawn)).await.expect("no panic")
}

/// The instances of the container, by its documents, and everything else that is left in it.
async fn left(scene: &Scene) -> (usize, Vec<String>) {
    let documents = scene.documents().await;
    let (instances, others): (Vec<_>, Vec<_>) = documents.into_iter().partition(|d| d["type"] == "instance");
    let lasting = ["counters", "format", "member", "wakeup"];
    // Whoever gives a deletion up that was cut has asked for the service's time.
    let is_lasting = |d: &&Value| lasting.iter().any(|kind| d["type"] == *kind) || d["id"] == "kept:clock";
    let others = others.iter().filter(|d| !is_lasting(d));
    (instances.len(), others.map(|d| format!("{} in {}", d["id"], d["instanceId"])).collect())
}

async fn assert_nothing_left(scene: &Scene, case: &str) {
    let (instances, others) = left(scene).await;
    assert!(instances == 0 && others.is_empty(), "{case}: {instances} instances and {others:?}");
}

fn everything(limit: u32) -> InstanceFilter {
    InstanceFilter { limit: Some(limit), ..InstanceFilter::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_whose_names_alone_are_larger_than_a_document_is_deleted_as_one() {
    let scene = Scene::new(64);
    let a = scene.provider("a").await;
    // 1,050 names of 2,000 bytes: 2.1 MB.
    let tree = plant(&scene, &a, "root", 1_050, 2_000).await;
    let deleted = admin(&a).delete_instance("root", false).await.unwrap();
    assert_eq!(deleted.instances_deleted, tree.len() as u64);
    assert_nothing_left(&scene, "the tree").await;
}

/// Cuts the deletion of a tree after so many requests, and lets another provider finish it; how many instances were there for
/// that one.
async fn cut_tree(children: usize, passing: u64) -> usize {
    let scene = Scene::new(16);
    let b = scene.provider("b").await;
    let tree = plant(&scene, &b, "root", children, 20).await;
    let a = scene.provider("a").await;
    let cut = if passing.is_multiple_of(2) { scene.cut_after("a", passing) } else { scene.cut("a", passing) };
    let ended = until_cut(admin(&a).delete_instance("root", false), &cut).await;
    assert!(matches!(ended, Ended::Cut), "the deletion took no more than {passing} requests");
    drop(a);
    let there = admin(&b).list_instances().await.unwrap().len();
    assert!(there == 0 || there == tree.len(), "cut after {passing}: {there} of {}", tree.len());
    if let Err(error) = admin(&b).delete_instance("root", false).await {
        assert!(error.message.contains("not found"), "{error:?}");
    }
    assert_nothing_left(&scene, &format!("cut after {passing}")).await;
    there
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_of_several_parts_is_there_as_a_whole_or_not_at_all_wherever_its_deletion_was_cut() {
    // Three parts: some 80 requests to see the tree, 240 to mark it, the decision, 680 to erase it.
    let cuts = [10, 101, 250, 300, 309, 314, 320, 325, 330, 340, 500, 901];
    let there = all_at_once(cuts.into_iter().map(|passing| cut_tree(220, passing))).await;
    assert!(there.contains(&0) && there.contains(&221), "cuts before and after the decision: {there:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_deletion_that_goes_on_is_not_given_up_by_another_of_the_same_tree() {
    let scene = Scene::new(4);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    plant(&scene, &a, "root", 250, 20).await;
    // Marking takes longer than an abandoned deletion is waited for by another one.
    let slow = WireRule::new(WireAction::Delay(Duration::from_millis(600))).client("a").on(RequestKind::Replace);
    let marks = scene.account.wire().add(slow);
    let second = async {
        marks.wait_for_hits(40).await;
        admin(&b).delete_instance("root", false).await
    };
    let (first, second) = tokio::join!(admin(&a).delete_instance("root", false), second);
    assert_eq!(first.expect("the first goes through").instances_deleted, 251);
    if let Err(error) = second {
        assert!(error.message.contains("not found") || error.is_retryable(), "{error:?}");
    }
    assert_nothing_left(&scene, "after both").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dispatchers_finish_a_large_deletion_whose_process_died_a_little_at_a_time() {
    let scene = Scene::new(4);
    let b = scene.provider("b").await;
    plant(&scene, &b, "root", 220, 20).await;
    let a = scene.provider("a").await;
    // It dies while it erases.
    let erasures = WireRule::new(WireAction::Delay(NOW)).client("a").on(RequestKind::Batch);
    let erasures = scene.account.wire().add(erasures.matching(|r| !goes_to(r, "root")));
    tokio::select! {
        biased;
        () = erasures.wait_for_hits(10) => {}
        deleted = admin(&a).delete_instance("root", false) => panic!("it was to die: {deleted:?}"),
    }
    drop(a);
    assert!(admin(&b).list_instances().await.unwrap().is_empty(), "committed");
    let finishing = async {
        while left(&scene).await.0 > 0 {
            let turn = b.fetch_orchestration_item(LONG, Duration::from_millis(500), None).await.unwrap();
            assert!(turn.is_none(), "{turn:?}");
        }
    };
    tokio::time::timeout(PATIENCE, finishing).await.expect("dispatchers finish it");
    assert_nothing_left(&scene, "after the polls").await;
}

/// Finished instances `i0` and so on.
async fn flock(scene: &Scene, provider: &CosmosDBProvider, count: usize) {
    finish(provider, "i0", None).await;
    scene.copy("i0", (1..count).map(|n| format!("i{n}"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_goes_on_past_instances_that_it_may_not_touch() {
    let scene = Scene::new(4);
    let a = scene.provider("a").await;
    flock(&scene, &a, 60).await;
    let refuse = || WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    // One can't be read at all, another not be written.
    scene.account.wire().add(WireRule::new(refuse()).matching(|r| goes_to(r, "i7")));
    let write = |kind| WireRule::new(refuse()).on(kind).matching(|r| goes_to(r, "i9"));
    scene.account.wire().add(write(RequestKind::Replace));
    let deleted = admin(&a).delete_instance_bulk(everything(1_000)).await.unwrap();
    assert_eq!(deleted.instances_deleted, 58);
    scene.account.wire().clear();
    let mut there = admin(&a).list_instances().await.unwrap();
    there.sort();
    assert_eq!(there, ["i7", "i9"]);
    assert!(scene.documents().await.iter().all(|d| d.get("deleting").is_none()), "their marks are off");
    assert_eq!(admin(&a).delete_instance_bulk(everything(1_000)).await.unwrap().instances_deleted, 2);
    assert_nothing_left(&scene, "at last").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_in_which_nothing_can_be_done_says_why() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    flock(&scene, &a, 3).await;
    let refuse = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    scene.account.wire().add(WireRule::new(refuse).on(RequestKind::Replace));
    let error = admin(&a).delete_instance_bulk(everything(10)).await.unwrap_err();
    assert!(!error.is_retryable(), "{error:?}");
    scene.account.wire().clear();
    assert_eq!(admin(&a).list_instances().await.unwrap().len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_pruning_goes_on_past_an_instance_that_it_may_not_touch() {
    let scene = Scene::new(2);
    let a = scene.provider("a").await;
    finish_after(&a, "i0", 3, 4).await;
    scene.copy("i0", (1..10).map(|n| format!("i{n}"))).await;
    let refuse = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    scene.account.wire().add(WireRule::new(refuse).matching(|r| goes_to(r, "i0")));
    let pruned = admin(&a).prune_executions_bulk(everything(100), PruneOptions::default()).await.unwrap();
    assert_eq!((pruned.instances_processed, pruned.executions_deleted), (9, 18));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_that_names_instances_reads_those_only() {
    let scene = Scene::new(4);
    let a = scene.provider("a").await;
    flock(&scene, &a, 40).await;
    let named = ["i3", "i4", "nobody", "i4"].map(ToOwned::to_owned).to_vec();
    let filter = InstanceFilter { instance_ids: Some(named), ..InstanceFilter::default() };
    let before = scene.account.stats_of("a");
    assert_eq!(admin(&a).delete_instance_bulk(filter).await.unwrap().instances_deleted, 2);
    let spent = (scene.account.stats_of("a") - before).of(RequestKind::Query).response_bytes;
    assert!(spent < 4_000, "{spent} bytes of answers to queries");
    assert_eq!(admin(&a).list_instances().await.unwrap().len(), 38);
}

/// Cuts a bulk deletion after so many requests, and lets another provider call it again.
async fn cut_bulk(passing: u64) {
    let scene = Scene::new(4);
    let b = scene.provider("b").await;
    flock(&scene, &b, 150).await;
    plant(&scene, &b, "root", 5, 10).await;
    let a = scene.provider("a").await;
    let cut = if passing.is_multiple_of(2) { scene.cut_after("a", passing) } else { scene.cut("a", passing) };
    let ended = until_cut(admin(&a).delete_instance_bulk(everything(1_000)), &cut).await;
    assert!(matches!(ended, Ended::Cut), "the bulk deletion took no more than {passing} requests");
    drop(a);
    // The second finishes what the first has decided, and deletes the rest.
    admin(&b).delete_instance_bulk(everything(1_000)).await.unwrap();
    assert_nothing_left(&scene, &format!("cut after {passing}")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_that_was_cut_is_finished_by_the_next_call() {
    let cuts = [5, 20, 150, 326, 332, 345, 400, 500, 701];
    all_at_once(cuts.into_iter().map(cut_bulk)).await;
}

#[tokio::test]
async fn a_marked_container_is_listed_with_one_question_for_each_plan() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    plant(&scene, &a, "root", 60, 10).await;
    let b = scene.provider("b").await;
    // `a` dies while everything is marked and nothing decided.
    let marks = WireRule::new(WireAction::Delay(NOW)).client("a").on(RequestKind::Replace);
    let marks = scene.account.wire().add(marks);
    tokio::select! {
        biased;
        () = marks.wait_for_hits(61) => {}
        deleted = admin(&a).delete_instance("root", false) => panic!("it was to die: {deleted:?}"),
    }
    drop(a);
    let before = scene.account.stats_of("b");
    assert_eq!(admin(&b).list_instances().await.unwrap().len(), 61);
    let reads = (scene.account.stats_of("b") - before).of(RequestKind::Read).requests;
    assert!(reads <= 2, "{reads} reads to list 61 instances of one plan");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes: ten thousand instances in bulk and a tree of five thousand"]
async fn ten_thousand_instances_and_a_tree_of_five_thousand() {
    let scene = Scene::new(64);
    let a = scene.provider("a").await;
    let tree = plant(&scene, &a, "root", 4_999, 20).await;
    let begun = std::time::Instant::now();
    let before = scene.account.stats_of("a");
    let deleted = admin(&a).delete_instance("root", false).await.unwrap();
    assert_eq!(deleted.instances_deleted, tree.len() as u64);
    let spent = (scene.account.stats_of("a") - before).items().requests;
    println!("a tree of 5,000: {spent} requests, {:?}", begun.elapsed());
    assert_nothing_left(&scene, "the tree").await;
    flock(&scene, &a, 10_000).await;
    let begun = std::time::Instant::now();
    let before = scene.account.stats_of("a");
    let deleted = admin(&a).delete_instance_bulk(everything(20_000)).await.unwrap();
    assert_eq!(deleted.instances_deleted, 10_000);
    let spent = (scene.account.stats_of("a") - before).items().requests;
    println!("10,000 in bulk: {spent} requests, {:?}", begun.elapsed());
    assert_nothing_left(&scene, "in bulk").await;
}
