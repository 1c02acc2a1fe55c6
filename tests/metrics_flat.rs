//! System metrics and queue depths are asked for every minute by every runtime: they cost the same however many instances
//! have finished, and they are right, also when a process died while it moved figures into the counters.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{InstanceFilter, Provider, PruneOptions, SystemMetrics};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, KindStats, RequestKind, WireAction, WireRule, WireRuleHandle};
use futures::{stream, StreamExt};
use scene::*;
use serde_json::json;
use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

fn figures(metrics: &SystemMetrics) -> (u64, u64, u64, u64, u64, u64) {
    let m = metrics;
    let (total, running) = (m.total_instances, m.running_instances);
    (total, running, m.completed_instances, m.failed_instances, m.total_executions, m.total_events)
}

/// What so many instances come to that completed with two events each.
fn completed_only(count: u64) -> (u64, u64, u64, u64, u64, u64) {
    (count, 0, count, 0, count, 2 * count)
}

/// Asks for the metrics and waits until what has finished is in the counters, so many instances at least: that is done in the
/// background. False where `cut` is felt before.
async fn sealed_unless(scene: &Scene, provider: &CosmosDBProvider, count: u64, cut: Option<&WireRuleHandle>) -> bool {
    let sealing = async {
        // Whether this call returns is not what is asked here.
        drop(admin(provider).get_system_metrics().await);
        loop {
            let counters = scene.partition("$d:metrics").await.pop().unwrap_or_default();
            let noted = counters["folding"].as_object().is_none_or(|note| !note.is_empty());
            if !noted && counters["completed"].as_u64().is_some_and(|completed| completed >= count) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let felt = async {
        match cut {
            Some(cut) => cut.wait_for_hits(1).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = felt => false,
        sealed = tokio::time::timeout(PATIENCE, sealing) => {
            if sealed.is_err() {
                let open = scene.documents().await.into_iter().filter(|d| d["countPending"] == "open").count();
                panic!("{open} are open, the counters are {:?}", scene.partition("$d:metrics").await);
            }
            true
        }
    }
}

async fn sealed(scene: &Scene, provider: &CosmosDBProvider, count: u64) {
    sealed_unless(scene, provider, count, None).await;
}

/// Waits until nothing is sent any more.
async fn quiet_down(scene: &Scene) {
    let mut before = 0;
    while before != scene.account.stats().total().requests {
        before = scene.account.stats().total().requests;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Waits until the last who has sealed has said nothing for a while, and looks no more.
async fn nobody_seals(scene: &Scene) {
    let is_over = |until: u64| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64 > until;
    while !scene.partition("$d:metrics").await[0]["foldLease"]["until"].as_u64().is_none_or(is_over) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
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
    sealed(&scene, &provider, 3_000).await;
    quiet_down(&scene).await;
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(3_000));
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

/// Cuts `a` after so many requests of one call and the sealing that it begins, in both ways. The figures are right
/// afterwards, and after the next round; whether there was a cut.
async fn cut_while_sealing(passing: u64, answer_only: bool) -> bool {
    const COUNT: u64 = 52;
    let (scene, b) = finished(COUNT as usize).await;
    let a = scene.provider("a").await;
    let cut = if answer_only { scene.cut_after("a", passing) } else { scene.cut("a", passing) };
    let whole = sealed_unless(&scene, &a, COUNT, Some(&cut)).await;
    // Its process dies, and what it was doing with it.
    drop(a);
    let case = format!("cut after {passing}, answer only: {answer_only}");
    // Another one asks, and dies when it has heard, whatever it has begun: what is copied below must not be sealed yet.
    let c = scene.provider("c").await;
    assert_eq!(figures(&admin(&c).get_system_metrics().await.unwrap()), completed_only(COUNT), "{case}");
    drop(c);
    // Another round, by the one that is left.
    finish(&b, "j0", None).await;
    scene.copy("j0", (1..50).map(|n| format!("j{n}"))).await;
    // Fewer than fifty that are left over from a round are not worth another.
    sealed_once_free(&scene, &b, COUNT + 1).await;
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(COUNT + 50), "{case}");
    !whole
}

/// Like [`sealed`], where the one that died may have said that it is at it.
async fn sealed_once_free(scene: &Scene, provider: &CosmosDBProvider, count: u64) {
    let asking = async {
        loop {
            drop(admin(provider).get_system_metrics().await);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::select! {
        () = asking => {}
        () = sealed(scene, provider, count) => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_figures_are_right_after_a_crash_at_any_request_of_sealing() {
    // Between the note and the count the requests are the same again and again: a write for each instance.
    let mut cases: Vec<(u64, bool)> = (0..18).flat_map(|passing| [(passing, true), (passing, false)]).collect();
    cases.extend([30, 45, 60, 61, 62, 63, 64, 65, 66, 67].map(|passing| (passing, true)));
    let count = cases.len();
    let cutting = stream::iter(cases).map(|(passing, answer_only)| cut_while_sealing(passing, answer_only));
    let felt: Vec<bool> =
        cutting.map(tokio::spawn).buffer_unordered(12).map(|felt| felt.expect("no panic")).collect().await;
    let cuts = felt.iter().filter(|felt| **felt).count();
    assert!(cuts >= count - 6, "{cuts} of {count} cases were cut");
}

#[tokio::test]
async fn the_figures_are_right_when_answers_are_lost_while_sealing() {
    let (scene, b) = finished(52).await;
    let lose = WireRule::new(WireAction::LoseAnswer).client("b").matching(|r| about_items(r) && r.sequence % 3 == 0);
    let losing = scene.account.wire().add(lose);
    sealed(&scene, &b, 52).await;
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(52));
    assert!(losing.hits() > 20, "{}", losing.hits());
}

#[tokio::test]
async fn deleting_sealed_instances_keeps_the_figures_right_and_leaves_nothing() {
    let (scene, b) = finished(52).await;
    sealed(&scene, &b, 52).await;
    assert!(scene.of_kind("i0", "instance").await[0].get("countPending").is_none(), "counted");
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
    sealed(&scene, &b, COUNT).await;
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

/// What `b` does while `a` is held.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    /// It finishes the deletion.
    Finishes,
    /// It starts one of the instances anew, which it erases for that.
    StartsOne,
}

/// Holds `a`, which has decided to delete sealed instances, before one of its requests to the counters, and has `b` do some of
/// that meanwhile; whether there was such a request.
async fn overtaken_at(request: u64, meanwhile: Meanwhile) -> bool {
    const COUNT: usize = 52;
    const GOING: usize = 20;
    let (scene, b) = finished(COUNT).await;
    sealed(&scene, &b, COUNT as u64).await;
    quiet_down(&scene).await;
    let a = scene.provider("a").await;
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").skip(request).times(1);
    scene.account.wire().add(held.matching(|r| goes_to(r, "$d:metrics")));
    let mut going: Vec<String> = (0..GOING).map(|n| format!("i{n}")).collect();
    let names = going.clone();
    let mut deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&names, false).await });
    let was_held = tokio::select! {
        () = gate.reached() => true,
        deleted = &mut deletion => {
            deleted.unwrap().unwrap();
            false
        }
    };
    if was_held {
        match meanwhile {
            Meanwhile::Finishes => {
                let filter = InstanceFilter { instance_ids: Some(going.clone()), ..InstanceFilter::default() };
                admin(&b).delete_instance_bulk(filter).await.unwrap();
            }
            Meanwhile::StartsOne => {
                let anew = going.pop().unwrap();
                b.enqueue_for_orchestrator(start(&anew), None).await.unwrap();
                assert_eq!(next_turn(&b, LONG).await.0.instance, anew);
            }
        }
        gate.open();
        deletion.await.unwrap().unwrap();
    }
    let left = (COUNT - GOING) as u64;
    let figures = figures(&admin(&b).get_system_metrics().await.unwrap());
    assert_eq!(figures, completed_only(left), "{meanwhile:?}, held at {request}");
    let counters = scene.partition("$d:metrics").await.pop().unwrap();
    assert_eq!((&counters["completed"], &counters["events"]), (&json!(left), &json!(2 * left)), "{counters}");
    assert!(counters["folding"].as_object().is_none_or(|note| note.is_empty()), "{counters}");
    for instance in going {
        assert!(scene.partition(&instance).await.is_empty(), "{instance}");
    }
    was_held
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_note_whose_answer_was_lost_and_that_another_has_settled_is_not_made_again() {
    const COUNT: usize = 52;
    let (scene, b) = finished(COUNT).await;
    sealed(&scene, &b, COUNT as u64).await;
    nobody_seals(&scene).await;
    let a = scene.provider("a").await;
    let gate = Gate::new();
    let note =
        |action| WireRule::new(action).client("a").on(RequestKind::Replace).matching(|r| goes_to(r, "$d:metrics"));
    let lost = scene.account.wire().add(note(WireAction::LoseAnswer).times(1));
    scene.account.wire().add(note(WireAction::HoldBefore(gate.clone())));
    let going: Vec<String> = (0..20).map(|n| format!("i{n}")).collect();
    let names = going.clone();
    let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&names, false).await });
    gate.reached().await;
    assert_eq!(lost.hits(), 1, "it repeats what was done");
    let noted = scene.partition("$d:metrics").await.pop().unwrap();
    assert!(noted["folding"].as_object().is_some_and(|note| note.len() >= 19), "{noted}");
    // Who has something to seal settles what is in the note.
    finish(&b, "j0", None).await;
    scene.copy("j0", (1..COUNT).map(|n| format!("j{n}"))).await;
    let left = 2 * COUNT as u64 - 20;
    sealed(&scene, &b, left).await;
    gate.open();
    deletion.await.unwrap().unwrap();
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(left));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_erases_of_a_deletion_under_way_is_counted_once() {
    for meanwhile in [Meanwhile::Finishes, Meanwhile::StartsOne] {
        let cases = stream::iter(0..12).map(|request| overtaken_at(request, meanwhile));
        let held: Vec<bool> = cases.buffered(12).collect().await;
        assert!(held[..4].iter().all(|held| *held), "noted and counted out: {held:?}");
        assert!(!held[11], "at every one of them: {held:?}");
    }
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
    sealed(&scene, &provider, 50).await;
    for n in 0..50 {
        let pruned = admin(&provider).prune_executions(&format!("i{n}"), PruneOptions::default()).await.unwrap();
        assert_eq!((pruned.executions_deleted, pruned.events_deleted), (1, 2));
    }
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(50));
    // Sealed again: nothing is open any more.
    let is_open = |d: &serde_json::Value| d["countPending"] == "open";
    let sealing = async {
        while scene.documents().await.iter().any(is_open) {
            drop(admin(&provider).get_system_metrics().await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, sealing).await.expect("sealed again");
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(50));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seal_that_a_deletion_meets_half_way_is_counted_once() {
    const COUNT: u64 = 52;
    let scene = Scene::new(1);
    let b = scene.provider("b").await;
    finish_after(&b, "i0", 2, 2).await;
    scene.copy("i0", (1..COUNT).map(|n| format!("i{n}"))).await;
    sealed(&scene, &b, COUNT).await;
    nobody_seals(&scene).await;
    // All are to be sealed again, from what the counters hold of them.
    for n in 0..COUNT {
        admin(&b).prune_executions(&format!("i{n}"), PruneOptions::default()).await.unwrap();
    }
    let (seal, erasure) = (Gate::new(), Gate::new());
    let to_i0 = |action| WireRule::new(action).matching(|r| goes_to(r, "i0"));
    scene.account.wire().add(to_i0(WireAction::HoldBefore(seal.clone())).client("b").on(RequestKind::Replace));
    scene.account.wire().add(to_i0(WireAction::HoldBefore(erasure.clone())).client("a").on(RequestKind::Batch));
    admin(&b).get_system_metrics().await.unwrap();
    seal.reached().await;
    let a = scene.provider("a").await;
    let deletion = tokio::spawn(async move { admin(&a).delete_instance("i0", false).await });
    erasure.reached().await;
    seal.open();
    let others_are_counted = async {
        loop {
            let counters = scene.partition("$d:metrics").await.pop().unwrap();
            if counters["folding"].as_object().is_some_and(|note| note.keys().all(|id| id == "i0")) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, others_are_counted).await.expect("counted");
    erasure.open();
    deletion.await.unwrap().unwrap();
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(COUNT - 1));
    let counters = scene.partition("$d:metrics").await.pop().unwrap();
    assert_eq!(
        (&counters["executions"], &counters["events"]),
        (&json!(COUNT - 1), &json!(2 * (COUNT - 1))),
        "{counters}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sealing_five_hundred_finished_instances_takes_about_a_request_each() {
    let (scene, b) = finished(500).await;
    let before = scene.account.stats_of("b");
    sealed(&scene, &b, 500).await;
    quiet_down(&scene).await;
    let spent = (scene.account.stats_of("b") - before).items().requests;
    // The metrics themselves, looks at four partitions, the note and the count.
    assert!(spent <= 550 + 30, "{spent} requests for 500 instances");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_that_are_asked_at_once_seal_as_if_they_were_one() {
    let (scene, b) = finished(500).await;
    let c = scene.provider("c").await;
    let before = scene.account.stats_of("b") + scene.account.stats_of("c");
    let (_, asked) = tokio::join!(sealed(&scene, &b, 500), admin(&c).get_system_metrics());
    assert_eq!(figures(&asked.unwrap()), completed_only(500));
    quiet_down(&scene).await;
    let spent = (scene.account.stats_of("b") + scene.account.stats_of("c") - before).items().requests;
    assert!(spent <= 550 + 60, "{spent} requests for 500 instances");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleting_a_set_of_sealed_instances_writes_the_counters_a_few_times_in_all() {
    let (scene, b) = finished(100).await;
    sealed(&scene, &b, 100).await;
    let writes = WireRule::new(WireAction::Delay(NOW)).on(RequestKind::Replace).client("b");
    let writes = scene.account.wire().add(writes.matching(|r| goes_to(r, "$d:metrics")));
    let all: Vec<String> = (0..100).map(|n| format!("i{n}")).collect();
    assert_eq!(admin(&b).delete_instances_atomic(&all, false).await.unwrap().instances_deleted, 100);
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(0));
    assert!(writes.hits() <= 6, "{} writes of the counters", writes.hits());
}

#[tokio::test]
async fn what_is_asked_in_the_background_lets_everything_else_go_first() {
    let scene = Scene::new(2);
    let provider = scene.provider("figures").await;
    let queries = Arc::new(Mutex::new(Vec::new()));
    let seen = queries.clone();
    scene.account.wire().observe(move |request, _| {
        if request.kind == RequestKind::Query {
            seen.lock().unwrap().push(request.header("x-ms-cosmos-priority-level").map(str::to_owned));
        }
    });
    let asked = || std::mem::take(&mut *queries.lock().unwrap());

    admin(&provider).get_system_metrics().await.unwrap();
    admin(&provider).get_queue_depths().await.unwrap();
    provider.cleanup_orphaned_sessions(NOW).await.unwrap();
    let background = asked();
    assert_eq!(background.len(), 2 * 4, "four questions to two partitions");
    assert!(background.iter().all(|priority| priority.as_deref() == Some("Low")), "{background:?}");

    admin(&provider).list_instances().await.unwrap();
    // Who renews a session too late loses it.
    provider.renew_session_lock(&["owner"], LONG, LONG).await.unwrap();
    assert_eq!(asked(), [const { None }; 2 * 2]);
}
