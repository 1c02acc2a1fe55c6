//! A deletion that is cut half-way, as in a crash of its process: it deletes nothing before its commit, hides all of it
//! after the commit, and the next call erases the rest.

use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use futures::{stream, StreamExt};

/// The instances of this list that `provider` shows, by each call that lists or reads instances.
async fn existing(provider: &CosmosDBProvider, instances: &[String]) -> Vec<String> {
    let listed = admin(provider).list_instances().await.unwrap();
    let mut existing = Vec::new();
    for instance in instances {
        let is_there = admin(provider).get_instance_info(instance).await.is_ok();
        assert_eq!(listed.contains(instance), is_there, "listed and known are the same for {instance}");
        let history = provider.read(instance).await.unwrap();
        assert_eq!(!history.is_empty(), is_there, "{instance} has a history exactly where it is existing");
        if is_there {
            existing.push(instance.clone());
        }
    }
    existing
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_of_five_thousand_events_is_deleted_by_the_next_call_after_a_cut_at_any_request() {
    let fixture = Fixture::new(16);
    let b = fixture.provider("b").await;
    // 100 executions of 50 events: more than 200 documents, and three batches of deletions.
    finish_after(&b, "model", 100, 50).await;
    assert_eq!(b.read_with_execution("model", 100).await.unwrap().len(), 50);
    let (fixture, b) = (&fixture, &b);
    let cuts = at_every_cut(9, |passing, answer_only| async move {
        let name = format!("a{passing}{answer_only}");
        fixture.copy_instance("model", std::iter::once(name.clone())).await;
        let a = fixture.provider(&name).await;
        let cut = fixture.cut_at(&name, passing, answer_only);
        let ended = until_cut(admin(&a).delete_instance(&name, false), &cut).await;
        let before = existing(b, std::slice::from_ref(&name)).await;
        if !before.is_empty() {
            let history = b.read_with_execution(&name, 1).await.unwrap();
            assert_eq!(history.len(), 50, "an instance that is existing is whole");
        }
        if let Err(error) = admin(b).delete_instance(&name, false).await {
            assert!(error.message.contains("not found"), "{error:?}");
        }
        assert!(fixture.partition(&name).await.is_empty(), "cut after {passing}, answer only: {answer_only}");
        matches!(ended, Ended::Cut)
    })
    .await;
    assert!(cuts >= 14, "{cuts}");
}

/// Makes a root with seven children, each of which has six: fifty instances.
async fn make_tree(fixture: &Fixture, provider: &CosmosDBProvider, root: &str) -> Vec<String> {
    let mut tree = vec![root.to_owned()];
    finish(provider, root, None).await;
    for child in 0..7 {
        let child = format!("{root}/{child}");
        finish(provider, &child, Some(root)).await;
        let leaf = format!("{child}/0");
        finish(provider, &leaf, Some(&child)).await;
        let others: Vec<String> = (1..6).map(|n| format!("{child}/{n}")).collect();
        fixture.copy_instance(&leaf, others.iter().cloned()).await;
        tree.push(child);
        tree.push(leaf);
        tree.extend(others);
    }
    assert_eq!(tree.len(), 50);
    tree
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_of_fifty_instances_exists_as_a_whole_or_not_at_all_after_a_cut_of_its_deletion() {
    let fixture = Fixture::new(8);
    let b = fixture.provider("b").await;
    let mut trees = Vec::new();
    // A deletion of fifty instances takes about 250 requests: preparing, the commit, erasing.
    for passing in [3, 40, 69, 80, 85, 90, 150, 220] {
        trees.push((passing, make_tree(&fixture, &b, &format!("root {passing}")).await));
    }
    let (fixture, b) = (&fixture, &b);
    let running = stream::iter(trees).map(|(passing, tree)| async move {
        let (root, name) = (tree[0].clone(), format!("a{passing}"));
        let a = fixture.provider(&name).await;
        let cut = fixture.cut_at(&name, passing, passing % 2 == 0);
        let ended = until_cut(admin(&a).delete_instance(&root, false), &cut).await;
        assert!(matches!(ended, Ended::Cut), "after {passing}");
        let left = existing(b, &tree).await;
        assert!(left.is_empty() || left.len() == tree.len(), "after {passing}: {} of {}", left.len(), tree.len());
        let before = left.len();
        if let Err(error) = admin(b).delete_instance(&root, false).await {
            assert!(error.message.contains("not found"), "{error:?}");
        }
        for instance in &tree {
            assert!(fixture.partition(instance).await.is_empty(), "after {passing}: {instance}");
        }
        before
    });
    let before: Vec<usize> = running.buffer_unordered(16).collect().await;
    assert!(before.contains(&0) && before.contains(&50), "cuts before and after the decision: {before:?}");
}

#[tokio::test]
async fn a_deletion_that_is_refused_and_cut_while_it_aborts_deletes_nothing() {
    // The last instance of the set runs. Therefore the deletion aborts and releases the others.
    for passing in 0..30 {
        let fixture = Fixture::new(1);
        let b = fixture.provider("b").await;
        for instance in ["x", "y", "z"] {
            finish(&b, instance, None).await;
        }
        begin(&b, "runs", Vec::new(), Vec::new()).await;
        let a = fixture.provider("a").await;
        let cut = fixture.cut("a", passing);
        let set = ["x", "y", "z", "runs"].map(ToOwned::to_owned);
        let ended = until_cut(admin(&a).delete_instances_atomic(&set, false), &cut).await;
        assert_eq!(existing(&b, &set).await, set, "cut after {passing}");
        if let Ended::Returned(returned) = ended {
            assert!(returned.unwrap_err().message.contains("still running"));
            assert!(passing > 8);
            return;
        }
    }
    panic!("the refusal took more than 30 requests");
}

#[tokio::test]
async fn a_set_whose_first_instance_does_not_exist_exists_as_a_whole_or_not_at_all() {
    for passing in 0..40 {
        let fixture = Fixture::new(1);
        let b = fixture.provider("b").await;
        finish(&b, "x", None).await;
        finish(&b, "y", None).await;
        let a = fixture.provider("a").await;
        let cut = fixture.cut("a", passing);
        let set = ["nobody", "x", "y"].map(ToOwned::to_owned);
        let ended = until_cut(admin(&a).delete_instances_atomic(&set, false), &cut).await;
        let left = existing(&b, &set).await;
        assert!(left.is_empty() || left == ["x", "y"], "cut after {passing}: {left:?}");
        if let Ended::Returned(returned) = ended {
            assert_eq!(returned.unwrap().instances_deleted, 2);
            return;
        }
    }
    panic!("a deletion of two instances took more than 40 requests");
}

#[tokio::test]
async fn a_start_for_a_deleted_instance_that_is_not_erased_yet_begins_a_complete_new_one() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    finish_after(&b, "i", 3, 10).await;
    // `a` crashes right after the commit, which is the second write of the instance's document.
    let committed = WireRule::new(WireAction::FailConnection).client("a").matching(about_items);
    let writes = WireRule::new(WireAction::DelayAnswer(NOW)).client("a").on(RequestKind::Replace);
    let writes = fixture.account.wire().add(writes);
    let deleting = async {
        tokio::select! {
            biased;
            () = writes.wait_for_hits(2) => {}
            _ = admin(&a).delete_instance("i", false) => panic!("it was to be cut"),
        }
    };
    deleting.await;
    fixture.account.wire().add(committed);
    writes.remove();
    // The clocks of two processes order their writes, but not within a millisecond.
    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    b.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (item, token, attempts) = next_turn(&b, LONG).await;
    assert_eq!((item.instance.as_str(), item.history.len(), item.execution_id, attempts), ("i", 0, 1, 1));
    let events = vec![started("i", 1), completed("i", 1, 2)];
    commit(&b, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
    assert_eq!(b.read("i").await.unwrap().len(), 2);
    assert_eq!(admin(&b).list_executions("i").await.unwrap(), [1]);
}
