//! Deletions of any size: a set whose names are larger than a document, and one that takes longer than the wait for an
//! abandoned deletion. A cut at any request is finished by the next call.

use super::*;
use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_whose_names_alone_are_larger_than_a_document_is_deleted_as_one() {
    let fixture = Fixture::new(64);
    let a = fixture.provider("a").await;
    // 1,050 names of 2,000 bytes: 2.1 MB.
    let tree = make_tree(&fixture, &a, "root", 1_050, 2_000).await;
    let deleted = admin(&a).delete_instance("root", false).await.unwrap();
    assert_eq!(deleted.instances_deleted, tree.len() as u64);
    assert_nothing_left(&fixture, "the tree").await;
}

/// Cuts the deletion of a tree after so many requests, and lets another provider finish it. Returns the number of
/// instances that the other provider saw.
async fn cut_tree(children: usize, passing: u64) -> usize {
    let fixture = Fixture::new(16);
    let b = fixture.provider("b").await;
    let tree = make_tree(&fixture, &b, "root", children, 20).await;
    let a = fixture.provider("a").await;
    let cut = fixture.cut_at("a", passing, passing.is_multiple_of(2));
    let ended = until_cut(admin(&a).delete_instance("root", false), &cut).await;
    assert!(matches!(ended, Ended::Cut), "the deletion took no more than {passing} requests");
    drop(a);
    let there = admin(&b).list_instances().await.unwrap().len();
    assert!(there == 0 || there == tree.len(), "cut after {passing}: {there} of {}", tree.len());
    if let Err(error) = admin(&b).delete_instance("root", false).await {
        assert!(error.message.contains("not found"), "{error:?}");
    }
    assert_nothing_left(&fixture, &format!("cut after {passing}")).await;
    there
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_of_several_parts_exists_as_a_whole_or_not_at_all_after_a_cut_of_its_deletion() {
    // Three parts: about 80 requests to read the tree, 240 to prepare it, the commit, and 680 to erase it.
    let cuts = [10, 101, 250, 300, 309, 314, 320, 325, 330, 340, 500, 901];
    let there = all_at_once(cuts.into_iter().map(|passing| cut_tree(220, passing))).await;
    assert!(there.contains(&0) && there.contains(&221), "cuts before and after the decision: {there:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_deletion_that_makes_progress_is_not_aborted_by_another_one_of_the_same_tree() {
    let fixture = Fixture::new(4);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    make_tree(&fixture, &a, "root", 250, 20).await;
    // Preparing takes longer than another deletion waits for an abandoned one.
    let slow = WireRule::new(WireAction::Delay(Duration::from_millis(600))).client("a").on(RequestKind::Replace);
    let preparations = fixture.account.wire().add(slow);
    let second = async {
        preparations.wait_for_hits(40).await;
        admin(&b).delete_instance("root", false).await
    };
    let (first, second) = tokio::join!(admin(&a).delete_instance("root", false), second);
    assert_eq!(first.expect("the first goes through").instances_deleted, 251);
    if let Err(error) = second {
        assert!(error.message.contains("not found") || error.is_retryable(), "{error:?}");
    }
    assert_nothing_left(&fixture, "after both").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dispatchers_finish_a_large_deletion_of_a_crashed_process_in_small_steps() {
    let fixture = Fixture::new(4);
    let b = fixture.provider("b").await;
    make_tree(&fixture, &b, "root", 220, 20).await;
    let a = fixture.provider("a").await;
    // The process crashes during the erasure.
    let erasures = WireRule::new(WireAction::Delay(NOW)).client("a").on(RequestKind::Batch);
    let erasures = fixture.account.wire().add(erasures.matching(|r| !goes_to(r, "root")));
    tokio::select! {
        biased;
        () = erasures.wait_for_hits(10) => {}
        deleted = admin(&a).delete_instance("root", false) => panic!("it was to die: {deleted:?}"),
    }
    drop(a);
    assert!(admin(&b).list_instances().await.unwrap().is_empty(), "committed");
    let finishing = async {
        while left(&fixture).await.0 > 0 {
            let turn = b.fetch_orchestration_item(LONG, Duration::from_millis(500), None).await.unwrap();
            assert!(turn.is_none(), "{turn:?}");
        }
    };
    tokio::time::timeout(PATIENCE, finishing).await.expect("dispatchers finish it");
    assert_nothing_left(&fixture, "after the polls").await;
}

#[tokio::test]
async fn a_container_full_of_prepared_instances_is_listed_with_one_query_per_deletion() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    make_tree(&fixture, &a, "root", 60, 10).await;
    let b = fixture.provider("b").await;
    // `a` crashes when all instances are prepared and the deletion is not committed.
    let preparations = WireRule::new(WireAction::Delay(NOW)).client("a").on(RequestKind::Replace);
    let preparations = fixture.account.wire().add(preparations);
    tokio::select! {
        biased;
        () = preparations.wait_for_hits(61) => {}
        deleted = admin(&a).delete_instance("root", false) => panic!("it was to die: {deleted:?}"),
    }
    drop(a);
    let before = fixture.account.stats_of("b");
    assert_eq!(admin(&b).list_instances().await.unwrap().len(), 61);
    let reads = (fixture.account.stats_of("b") - before).of(RequestKind::Read).requests;
    assert!(reads <= 2, "{reads} reads to list 61 instances of one plan");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes: ten thousand instances in bulk and a tree of five thousand"]
async fn ten_thousand_instances_and_a_tree_of_five_thousand() {
    let fixture = Fixture::new(64);
    let a = fixture.provider("a").await;
    let tree = make_tree(&fixture, &a, "root", 4_999, 20).await;
    let begun = std::time::Instant::now();
    let before = fixture.account.stats_of("a");
    let deleted = admin(&a).delete_instance("root", false).await.unwrap();
    assert_eq!(deleted.instances_deleted, tree.len() as u64);
    let spent = (fixture.account.stats_of("a") - before).items().requests;
    println!("a tree of 5,000: {spent} requests, {:?}", begun.elapsed());
    assert_nothing_left(&fixture, "the tree").await;
    many_instances(&fixture, &a, 10_000).await;
    let begun = std::time::Instant::now();
    let before = fixture.account.stats_of("a");
    let deleted = admin(&a).delete_instance_bulk(everything(20_000)).await.unwrap();
    assert_eq!(deleted.instances_deleted, 10_000);
    let spent = (fixture.account.stats_of("a") - before).items().requests;
    println!("10,000 in bulk: {spent} requests, {:?}", begun.elapsed());
    assert_nothing_left(&fixture, "in bulk").await;
}
