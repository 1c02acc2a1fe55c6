//! System metrics and queue depths are asked for every minute by every runtime: they cost the same however many instances
//! have finished, and they are right, also when a process died while it moved figures into the counters.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{PruneOptions, SystemMetrics};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{KindStats, WireAction, WireRule};
use futures::{stream, StreamExt};
use scene::*;

fn figures(metrics: &SystemMetrics) -> (u64, u64, u64, u64, u64, u64) {
    let m = metrics;
    let (total, running) = (m.total_instances, m.running_instances);
    (total, running, m.completed_instances, m.failed_instances, m.total_executions, m.total_events)
}

/// What so many instances come to that completed with two events each.
fn completed_only(count: u64) -> (u64, u64, u64, u64, u64, u64) {
    (count, 0, count, 0, count, 2 * count)
}

/// What one call of each costs.
async fn cost(scene: &Scene, provider: &CosmosDBProvider) -> KindStats {
    let before = scene.account.stats();
    admin(provider).get_system_metrics().await.unwrap();
    admin(provider).get_queue_depths().await.unwrap();
    (scene.account.stats() - before).total()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_and_depths_cost_the_same_with_ten_and_with_three_thousand_finished_instances() {
    let scene = Scene::new(64);
    let provider = scene.provider("a").await;
    finish(&provider, "i0", None).await;
    scene.copy("i0", (1..10).map(|n| format!("i{n}"))).await;
    // The first call makes the counters, perhaps.
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(10));
    let few = cost(&scene, &provider).await;

    finish(&provider, "j0", None).await;
    scene.copy("j0", (11..3_000).map(|n| format!("i{n}"))).await;
    let metrics = loop {
        let before = scene.account.stats();
        let metrics = admin(&provider).get_system_metrics().await.unwrap();
        let spent = (scene.account.stats() - before).items();
        if spent.requests < 200 {
            break metrics;
        }
    };
    assert_eq!(figures(&metrics), completed_only(3_000));
    let many = cost(&scene, &provider).await;
    assert_eq!(many.requests, few.requests, "requests with 3,000 against 10");
    // Fewer than a round of finished instances may be left to be counted by hand.
    assert!(many.response_bytes < few.response_bytes + 50 * 400, "{many:?} against {few:?}");
    let depths = admin(&provider).get_queue_depths().await.unwrap();
    assert_eq!((depths.orchestrator_queue, depths.worker_queue), (0, 0));
}

/// A container in which so many instances have finished, and a provider that has had no part in it.
async fn finished(count: usize) -> (Scene, CosmosDBProvider) {
    let scene = Scene::new(4);
    let maker = scene.provider("maker").await;
    finish(&maker, "i0", None).await;
    scene.copy("i0", (1..count).map(|n| format!("i{n}"))).await;
    let b = scene.provider("b").await;
    (scene, b)
}

/// Cuts `a` after so many requests of one call, in both ways. The figures are right afterwards; whether there was a cut.
async fn cut_while_sealing(passing: u64, answer_only: bool) -> bool {
    const COUNT: u64 = 52;
    let (scene, b) = finished(COUNT as usize).await;
    let a = scene.provider("a").await;
    let cut = if answer_only { scene.cut_after("a", passing) } else { scene.cut("a", passing) };
    let ended = until_cut(admin(&a).get_system_metrics(), &cut).await;
    for _ in 0..2 {
        let metrics = admin(&b).get_system_metrics().await.unwrap();
        assert_eq!(figures(&metrics), completed_only(COUNT), "cut after {passing}, answer only: {answer_only}");
    }
    matches!(ended, Ended::Cut)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_figures_are_right_after_a_crash_at_any_request_of_sealing() {
    // Beyond the first ones the requests are the same again and again: a read and a write for each instance.
    let mut passing = 0;
    let mut cuts = 0;
    while cut_while_sealing(passing, true).await {
        if passing < 9 {
            assert!(cut_while_sealing(passing, false).await);
        }
        cuts += 1;
        passing += if (8..100).contains(&passing) { 31 } else { 1 };
    }
    assert!(cuts > 8 && passing > 100, "sealing 52 instances took {passing} requests only");
}

#[tokio::test]
async fn the_figures_are_right_when_answers_are_lost_while_sealing() {
    let (scene, b) = finished(52).await;
    let lose = WireRule::new(WireAction::LoseAnswer).client("b").matching(|r| about_items(r) && r.sequence % 3 == 0);
    let losing = scene.account.wire().add(lose);
    for _ in 0..2 {
        assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(52));
    }
    assert!(losing.hits() > 30);
}

#[tokio::test]
async fn deleting_sealed_instances_keeps_the_figures_right_and_leaves_nothing() {
    let (scene, b) = finished(52).await;
    admin(&b).get_system_metrics().await.unwrap();
    assert!(scene.of_kind("i0", "instance").await[0].get("tally").is_none(), "sealed");
    for n in 0..20 {
        let deleted = admin(&b).delete_instance(&format!("i{n}"), false).await.unwrap();
        assert_eq!((deleted.instances_deleted, deleted.events_deleted), (1, 2));
        assert!(scene.partition(&format!("i{n}")).await.is_empty());
    }
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(32));
    // Its name is free again, and it counts again.
    finish(&b, "i0", None).await;
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(33));
}

/// Cuts the deletion of a sealed instance after so many requests; whether there was a cut.
async fn cut_while_deleting(scene: &Scene, b: &CosmosDBProvider, instance: &str, passing: u64, answer: bool) -> bool {
    let name = format!("a {instance}");
    let a = scene.provider(&name).await;
    let cut = if answer { scene.cut_after(&name, passing) } else { scene.cut(&name, passing) };
    let ended = until_cut(admin(&a).delete_instance(instance, false), &cut).await;
    // Whatever `a` came to: the next call deletes it, or what is left of it.
    if let Err(error) = admin(b).delete_instance(instance, false).await {
        assert!(error.message.contains("not found"), "cut after {passing}, answer only: {answer}: {error:?}");
    }
    assert!(scene.partition(instance).await.is_empty(), "cut after {passing}, answer only: {answer}");
    matches!(ended, Ended::Cut)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_figures_are_right_after_a_crash_at_any_request_of_the_deletion_of_a_sealed_instance() {
    const COUNT: u64 = 50;
    let (scene, b) = finished(COUNT as usize).await;
    admin(&b).get_system_metrics().await.unwrap();
    // At once: a deletion that was not decided is waited for before the next gives it up.
    let (scene, b) = (&scene, &b);
    let cutting = stream::iter(0..COUNT).map(|n| async move {
        let instance = format!("i{n}");
        cut_while_deleting(scene, b, &instance, n / 2, n % 2 == 1).await
    });
    let felt: Vec<bool> = cutting.buffered(COUNT as usize).collect().await;
    assert!(felt[..20].iter().all(|felt| *felt), "{felt:?}");
    assert_eq!(figures(&admin(b).get_system_metrics().await.unwrap()), completed_only(0));
}

#[tokio::test]
async fn an_instance_that_changes_after_it_was_sealed_is_counted_as_it_is_and_sealed_again() {
    let scene = Scene::new(1);
    let provider = scene.provider("a").await;
    // Two executions each, so that there is something to prune.
    for n in 0..50 {
        finish_after(&provider, &format!("i{n}"), 2, 2).await;
    }
    let all = (50, 0, 50, 0, 100, 200);
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), all);
    for n in 0..50 {
        let pruned = admin(&provider).prune_executions(&format!("i{n}"), PruneOptions::default()).await.unwrap();
        assert_eq!((pruned.executions_deleted, pruned.events_deleted), (1, 2));
    }
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(50));
    // Sealed again: nothing is open any more.
    let open = scene.documents().await.into_iter().filter(|d| d["tally"] == "open").count();
    assert_eq!(open, 0);
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(50));
}
