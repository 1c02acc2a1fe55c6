//! `delete`, `prune` and `purge`.

use crate::fixture::{start_message, Fixture};
use duroxide::providers::Provider;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_deletes_prints_the_instances_first_and_asks() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    fixture.complete("parent-1", "Parent", "2").await;
    fixture.complete("countdown-1", "Countdown", "5").await;
    fixture.start_order("order-1", "a book").await;
    let count = || async { fixture.client.list_all_instances().await.unwrap().len() };
    assert_eq!(count().await, 5);
    let ran = fixture.run(&["delete", "parent-1"]).await;
    assert_eq!(ran.code, 1, "without a terminal the user cannot answer");
    assert!(ran.err.contains("add --yes, or use --dry-run"), "{ran:?}");
    let ran = fixture.run(&["delete", "parent-1", "--dry-run"]).await;
    assert!(ran.out.contains("dry run: 3 instances would be deleted"), "{ran:?}");
    let ran = fixture.run(&["delete", "order-1", "--yes"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("still runs"), "{ran:?}");
    let ran = fixture.run(&["purge", "--ended-before", "1h", "--yes"]).await;
    assert!(ran.out.contains("no instance ended that long ago"), "{ran:?}");
    assert_eq!(count().await, 5, "nothing is deleted yet");
    let ran = fixture.run(&["prune", "countdown-1", "--keep-last", "2", "--status", "failed", "--yes"]).await;
    assert!(ran.err.contains("filters need --all"), "{ran:?}");
    let ran = fixture.run(&["prune", "--all", "--keep-last", "2", "--dry-run"]).await;
    assert!(ran.out.contains("executions of 1 instances would be deleted"), "{ran:?}");
    let pruned = fixture.json(&["prune", "countdown-1", "--keep-last", "2", "--yes"]).await;
    assert!(pruned.last().unwrap()["deletedExecutions"].as_u64() >= Some(3), "{pruned:?}");
    let child = fixture.json(&["list", "--parent", "parent-1"]).await[0]["id"].as_str().unwrap().to_owned();
    let ran = fixture.run(&["delete", &child, "--yes"]).await;
    assert!(ran.err.contains("an instance tree is deleted as a whole"), "{ran:?}");
    let deleted = fixture.json(&["delete", "parent-1", "parent-1", "--yes"]).await;
    assert_eq!(deleted.last().unwrap()["deletedInstances"], 3, "{deleted:?}");
    let deleted = fixture.json(&["purge", "--ended-before", "0s", "--yes"]).await;
    assert_eq!(deleted.last().unwrap()["deletedInstances"], 1, "{deleted:?}");
    let deleted = fixture.json(&["delete", "order-1", "--force", "--yes"]).await;
    assert_eq!(deleted.last().unwrap()["deletedInstances"], 1);
    assert_eq!(count().await, 0);
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_purge_keeps_an_instance_tree_with_a_running_instance_and_prints_its_root() {
    let fixture = Fixture::open().await;
    for status in [None, Some("ContinuedAsNew")] {
        let (root, child) = (format!("root-{status:?}"), format!("child-{status:?}"));
        fixture.commit_one_turn(&root, None, Some("Completed")).await;
        fixture.commit_one_turn(&child, Some(&root), status).await;
    }
    fixture.commit_one_turn("whole", None, Some("Completed")).await;
    let ran = fixture.run(&["purge", "--ended-before", "0s", "--yes"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("deleted 1 instances"), "{ran:?}");
    assert_eq!(ran.out.matches("stays: an instance of its tree runs").count(), 2, "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orphan_is_deleted_by_its_own_id() {
    let fixture = Fixture::open().await;
    fixture.commit_one_turn("orphan", Some("missing"), Some("Completed")).await;
    let ran = fixture.run(&["delete", "orphan", "--yes"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("deleted 1 instances"), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_is_deleted_by_its_own_id_only_if_its_parent_does_not_exist() {
    let fixture = Fixture::open().await;
    fixture.commit_one_turn("parent", None, None).await;
    for (instance, parent) in [("child", "parent"), ("orphan", "missing")] {
        fixture.provider.enqueue_for_orchestrator(start_message(instance, Some(parent)), None).await.unwrap();
    }
    let ran = fixture.run(&["delete", "child", "--force", "--yes"]).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("is a child of \"parent\""), "{ran:?}");
    let ran = fixture.run(&["delete", "orphan", "--force", "--yes"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("deleted 1 instances"), "{ran:?}");
}
