//! Deletion and pruning that are cut half-way, as when their process dies: nothing is deleted before the decision, all of it
//! is gone after it for whoever looks, and the next call leaves nothing behind.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, PruneOptions};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use futures::{stream, StreamExt};
use scene::*;

/// Cuts call after call: each case on an instance and with a client of its own, all at once, since a deletion that was not
/// decided is waited for before the next one gives it up. How many of the cases were cut.
async fn at_every_cut<F, Fut>(cases: u64, case: F) -> usize
where
    F: Fn(u64, bool) -> Fut,
    Fut: std::future::Future<Output = bool>,
{
    let cases: Vec<_> = (0..cases).flat_map(|passing| [(passing, false), (passing, true)]).collect();
    let count = cases.len();
    let running = stream::iter(cases).map(|(passing, answer_only)| case(passing, answer_only));
    let felt: Vec<bool> = running.buffer_unordered(count).collect().await;
    felt.into_iter().filter(|felt| *felt).count()
}

fn cut(scene: &Scene, name: &str, passing: u64, answer_only: bool) -> duroxide_cosmos_emulator::WireRuleHandle {
    if answer_only {
        scene.cut_after(name, passing)
    } else {
        scene.cut(name, passing)
    }
}

/// Which of these instances there are for `provider`, by every way to ask.
async fn there(provider: &CosmosDBProvider, instances: &[String]) -> Vec<String> {
    let listed = admin(provider).list_instances().await.unwrap();
    let mut there = Vec::new();
    for instance in instances {
        let is_there = admin(provider).get_instance_info(instance).await.is_ok();
        assert_eq!(listed.contains(instance), is_there, "listed and known are the same for {instance}");
        let history = provider.read(instance).await.unwrap();
        assert_eq!(!history.is_empty(), is_there, "{instance} has a history exactly where it is there");
        if is_there {
            there.push(instance.clone());
        }
    }
    there
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_of_five_thousand_events_is_deleted_by_the_next_call_wherever_the_first_was_cut() {
    let scene = Scene::new(16);
    let b = scene.provider("b").await;
    // 100 executions of 50 events: 200 documents and more, three batches of deletions.
    finish_after(&b, "model", 100, 50).await;
    assert_eq!(b.read_with_execution("model", 100).await.unwrap().len(), 50);
    let (scene, b) = (&scene, &b);
    let cuts = at_every_cut(9, |passing, answer_only| async move {
        let name = format!("a{passing}{answer_only}");
        scene.copy("model", std::iter::once(name.clone())).await;
        let a = scene.provider(&name).await;
        let cut = cut(scene, &name, passing, answer_only);
        let ended = until_cut(admin(&a).delete_instance(&name, false), &cut).await;
        let before = there(b, std::slice::from_ref(&name)).await;
        if !before.is_empty() {
            let history = b.read_with_execution(&name, 1).await.unwrap();
            assert_eq!(history.len(), 50, "an instance that is there is whole");
        }
        if let Err(error) = admin(b).delete_instance(&name, false).await {
            assert!(error.message.contains("not found"), "{error:?}");
        }
        assert!(scene.partition(&name).await.is_empty(), "cut after {passing}, answer only: {answer_only}");
        matches!(ended, Ended::Cut)
    })
    .await;
    assert!(cuts >= 14, "{cuts}");
}

/// A root with seven children, each of which has six: fifty instances.
async fn plant(scene: &Scene, provider: &CosmosDBProvider, root: &str) -> Vec<String> {
    let mut tree = vec![root.to_owned()];
    finish(provider, root, None).await;
    for child in 0..7 {
        let child = format!("{root}/{child}");
        finish(provider, &child, Some(root)).await;
        let leaf = format!("{child}/0");
        finish(provider, &leaf, Some(&child)).await;
        let others: Vec<String> = (1..6).map(|n| format!("{child}/{n}")).collect();
        scene.copy(&leaf, others.iter().cloned()).await;
        tree.push(child);
        tree.push(leaf);
        tree.extend(others);
    }
    assert_eq!(tree.len(), 50);
    tree
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_of_fifty_instances_is_there_as_a_whole_or_not_at_all_wherever_its_deletion_was_cut() {
    let scene = Scene::new(8);
    let b = scene.provider("b").await;
    let mut trees = Vec::new();
    // A deletion of fifty takes some 250 requests: marking, the decision, erasing.
    for passing in [3, 40, 69, 80, 85, 90, 150, 220] {
        trees.push((passing, plant(&scene, &b, &format!("root {passing}")).await));
    }
    let (scene, b) = (&scene, &b);
    let running = stream::iter(trees).map(|(passing, tree)| async move {
        let (root, name) = (tree[0].clone(), format!("a{passing}"));
        let a = scene.provider(&name).await;
        let cut = cut(scene, &name, passing, passing % 2 == 0);
        let ended = until_cut(admin(&a).delete_instance(&root, false), &cut).await;
        assert!(matches!(ended, Ended::Cut), "after {passing}");
        let left = there(b, &tree).await;
        assert!(left.is_empty() || left.len() == tree.len(), "after {passing}: {} of {}", left.len(), tree.len());
        let before = left.len();
        if let Err(error) = admin(b).delete_instance(&root, false).await {
            assert!(error.message.contains("not found"), "{error:?}");
        }
        for instance in &tree {
            assert!(scene.partition(instance).await.is_empty(), "after {passing}: {instance}");
        }
        before
    });
    let before: Vec<usize> = running.buffer_unordered(16).collect().await;
    assert!(before.contains(&0) && before.contains(&50), "cuts before and after the decision: {before:?}");
}

#[tokio::test]
async fn a_deletion_that_is_refused_and_cut_while_it_takes_its_marks_back_deletes_nothing() {
    // The last of the set runs, so the marks of the others are taken back.
    for passing in 0..30 {
        let scene = Scene::new(1);
        let b = scene.provider("b").await;
        for instance in ["x", "y", "z"] {
            finish(&b, instance, None).await;
        }
        begin(&b, "runs", Vec::new(), Vec::new()).await;
        let a = scene.provider("a").await;
        let cut = scene.cut("a", passing);
        let set = ["x", "y", "z", "runs"].map(ToOwned::to_owned);
        let ended = until_cut(admin(&a).delete_instances_atomic(&set, false), &cut).await;
        assert_eq!(there(&b, &set).await, set, "cut after {passing}");
        if let Ended::Returned(returned) = ended {
            assert!(returned.unwrap_err().message.contains("still running"));
            assert!(passing > 8);
            return;
        }
    }
    panic!("the refusal took more than 30 requests");
}

#[tokio::test]
async fn a_set_whose_first_instance_is_not_there_is_there_as_a_whole_or_not_at_all() {
    for passing in 0..40 {
        let scene = Scene::new(1);
        let b = scene.provider("b").await;
        finish(&b, "x", None).await;
        finish(&b, "y", None).await;
        let a = scene.provider("a").await;
        let cut = scene.cut("a", passing);
        let set = ["nobody", "x", "y"].map(ToOwned::to_owned);
        let ended = until_cut(admin(&a).delete_instances_atomic(&set, false), &cut).await;
        let left = there(&b, &set).await;
        assert!(left.is_empty() || left == ["x", "y"], "cut after {passing}: {left:?}");
        if let Ended::Returned(returned) = ended {
            assert_eq!(returned.unwrap().instances_deleted, 2);
            return;
        }
    }
    panic!("a deletion of two instances took more than 40 requests");
}

#[tokio::test]
async fn what_comes_for_a_deleted_instance_before_it_is_erased_starts_a_new_one_that_is_whole() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    finish_after(&b, "i", 3, 10).await;
    // `a` dies right after the decision, which is the second write of the instance's document.
    let decided = WireRule::new(WireAction::FailConnection).client("a").matching(about_items);
    let writes = WireRule::new(WireAction::DelayAnswer(NOW)).client("a").on(RequestKind::Replace);
    let writes = scene.account.wire().add(writes);
    let deleting = async {
        tokio::select! {
            biased;
            () = writes.wait_for_hits(2) => {}
            _ = admin(&a).delete_instance("i", false) => panic!("it was to be cut"),
        }
    };
    deleting.await;
    scene.account.wire().add(decided);
    writes.remove();
    // Which of two processes was first is told by their clocks, and so not within a millisecond.
    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    b.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (item, token, attempts) = next_turn(&b, LONG).await;
    assert_eq!((item.instance.as_str(), item.history.len(), item.execution_id, attempts), ("i", 0, 1, 1));
    let events = vec![started("i", 1), completed("i", 1, 2)];
    commit(&b, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
    assert_eq!(b.read("i").await.unwrap().len(), 2);
    assert_eq!(admin(&b).list_executions("i").await.unwrap(), [1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_that_was_cut_is_finished_by_the_next_call() {
    let scene = Scene::new(4);
    let b = scene.provider("b").await;
    finish_after(&b, "model", 120, 5).await;
    let (scene, b) = (&scene, &b);
    let cuts = at_every_cut(9, |passing, answer_only| async move {
        let name = format!("a{passing}{answer_only}");
        scene.copy("model", std::iter::once(name.clone())).await;
        let a = scene.provider(&name).await;
        let cut = cut(scene, &name, passing, answer_only);
        let ended = until_cut(admin(&a).prune_executions(&name, PruneOptions::default()), &cut).await;
        let case = format!("cut after {passing}, answer only: {answer_only}");
        // All old executions are there, or none.
        let executions = admin(b).list_executions(&name).await.unwrap();
        assert!(executions.len() == 120 || executions == [120], "{case}: {executions:?}");
        let first = b.read_with_execution(&name, 1).await.unwrap();
        assert_eq!(first.len(), if executions.len() == 1 { 0 } else { 5 }, "{case}");
        admin(b).prune_executions(&name, PruneOptions::default()).await.unwrap();
        assert_eq!(admin(b).list_executions(&name).await.unwrap(), [120], "{case}");
        let left = scene.partition(&name).await;
        assert_eq!(left.iter().filter(|d| d["type"] == "history").count(), 1, "{case}");
        assert!(left.iter().filter(|d| d["type"] == "execution").all(|d| d["execution"] == 120), "{case}");
        let instance = left.iter().find(|d| d["type"] == "instance").unwrap();
        assert!(instance.get("pruning").is_none(), "{case}");
        let totals = (instance["totals"]["executions"].as_u64(), instance["totals"]["events"].as_u64());
        assert_eq!(totals, (Some(1), Some(5)), "{case}: what was pruned is counted out once");
        matches!(ended, Ended::Cut)
    })
    .await;
    assert!(cuts >= 12, "{cuts}");
}

#[tokio::test]
async fn what_is_pruned_is_counted_out_once_when_the_answer_to_the_decision_is_lost() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    finish_after(&a, "i", 3, 5).await;
    let lose = WireRule::new(WireAction::LoseAnswer).on(RequestKind::Replace).matching(|r| goes_to(r, "i"));
    let lost = scene.account.wire().add(lose.times(1));
    let pruned = admin(&a).prune_executions("i", PruneOptions::default()).await.unwrap();
    assert_eq!((pruned.executions_deleted, pruned.events_deleted), (2, 10));
    assert_eq!(lost.hits(), 1);
    let metrics = admin(&a).get_system_metrics().await.unwrap();
    assert_eq!((metrics.total_executions, metrics.total_events), (1, 5));
}
