//! Starts that no worker has begun: they are seen, and removed under a claim, with what waits for them.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, WorkItem};
use scene::*;
use serde_json::Value;

fn cancel(instance: &str) -> WorkItem {
    WorkItem::CancelInstance { instance: instance.to_owned(), reason: "operator".to_owned() }
}

/// The queue of an instance, visible or not.
async fn queue(scene: &Scene, instance: &str) -> Vec<Value> {
    let documents = scene.partition(instance).await;
    documents.into_iter().filter(|document| document["type"] != "delivered").collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_is_seen_until_a_worker_has_begun_the_instance() {
    let scene = Scene::new(1);
    let (worker, operator) = (scene.provider("worker").await, scene.provider("operator").await);
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
async fn a_start_that_was_removed_is_run_by_nobody() {
    let scene = Scene::new(1);
    let (worker, operator) = (scene.provider("worker").await, scene.provider("operator").await);
    assert!(!operator.drop_start("i").await.unwrap(), "there is none");
    // The worker has enqueued the start itself, and knows it by heart.
    for item in [start("i"), cancel("i"), external("i", "x")] {
        worker.enqueue_for_orchestrator(item, None).await.unwrap();
    }
    assert!(operator.drop_start("i").await.unwrap());
    assert_eq!(queue(&scene, "i").await, Vec::<Value>::new());
    assert!(worker.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    assert_eq!(queue(&scene, "i").await, Vec::<Value>::new(), "its claim leaves nothing");
    begin(&worker, "i", Vec::new(), Vec::new()).await;
    assert!(!operator.drop_start("i").await.unwrap(), "an instance is deleted in another way");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_a_worker_is_about_to_begin_stays() {
    let scene = Scene::new(1);
    let (worker, operator) = (scene.provider("worker").await, scene.provider("operator").await);
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    let error = operator.drop_start("i").await.expect_err("a turn is under way");
    assert!(error.to_string().contains("about to begin"), "{error}");
    commit(&worker, &token, vec![started("i", 1)], Vec::new(), Vec::new(), running()).await.expect("its turn");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_messages_than_fit_a_batch_go_with_a_start() {
    let scene = Scene::new(1);
    let (worker, operator) = (scene.provider("worker").await, scene.provider("operator").await);
    for n in 0..150 {
        worker.enqueue_for_orchestrator(external("i", &n.to_string()), None).await.unwrap();
    }
    // They are parked, and the start finds them.
    assert!(worker.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    operator.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    assert!(operator.drop_start("i").await.unwrap());
    assert_eq!(queue(&scene, "i").await, Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_that_is_cut_anywhere_leaves_the_start_or_removes_it() {
    for lost_answer in [false, true] {
        for passing in 0.. {
            let scene = Scene::new(1);
            let (client, operator) = (scene.provider("client").await, scene.provider("operator").await);
            for item in [start("i"), cancel("i")] {
                client.enqueue_for_orchestrator(item, None).await.unwrap();
            }
            let cut = if lost_answer { scene.cut_after("operator", passing) } else { scene.cut("operator", passing) };
            let ended = until_cut(operator.drop_start("i"), &cut).await;
            // Its lock has expired.
            let late = scene.provider_with("late", quiet().with_clock(off_by(60_000))).await;
            let is_left = late.queued_start("i").await.unwrap().is_some();
            assert_eq!(late.drop_start("i").await.unwrap(), is_left, "cut after {passing}");
            assert_eq!(late.queued_start("i").await.unwrap(), None, "cut after {passing}");
            let left = queue(&scene, "i").await;
            assert_eq!(left, Vec::<Value>::new(), "cut after {passing}");
            if let Ended::Returned(removed) = ended {
                assert!(removed.unwrap() && passing > 3, "a removal has more than {passing} requests");
                break;
            }
        }
    }
}
