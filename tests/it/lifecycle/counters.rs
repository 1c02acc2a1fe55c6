//! Each runtime asks for system metrics and queue depths every minute. They cost the same however many instances have
//! ended. They are exact, even after a crash while a process folds figures into the counters.

use crate::fixture::*;
use duroxide::providers::{InstanceFilter, Provider, PruneOptions, SystemMetrics};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, KindStats, RequestKind, WireAction, WireRule, WireRuleHandle};
use futures::{stream, StreamExt};
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

/// The figures for so many instances that completed with two events each.
fn completed_only(count: u64) -> (u64, u64, u64, u64, u64, u64) {
    (count, 0, count, 0, count, 2 * count)
}

/// Asks for the metrics and waits until the counters contain at least so many ended instances, which happens in the
/// background. Returns false if `cut` takes effect before.
async fn folded_unless(
    fixture: &Fixture,
    provider: &CosmosDBProvider,
    count: u64,
    cut: Option<&WireRuleHandle>,
) -> bool {
    let folding = async {
        // This test does not need the result of the call.
        drop(admin(provider).get_system_metrics().await);
        loop {
            let counters = fixture.partition("$d:metrics").await.pop().unwrap_or_default();
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
        folded = tokio::time::timeout(PATIENCE, folding) => {
            if folded.is_err() {
                let open = fixture.documents().await.into_iter().filter(|d| d["countPending"] == "open").count();
                panic!("{open} are open, the counters are {:?}", fixture.partition("$d:metrics").await);
            }
            true
        }
    }
}

async fn folded(fixture: &Fixture, provider: &CosmosDBProvider, count: u64) {
    folded_unless(fixture, provider, count, None).await;
}

/// Waits until no more requests are sent.
async fn quiet_down(fixture: &Fixture) {
    let mut before = 0;
    while before != fixture.account.stats().total().requests {
        before = fixture.account.stats().total().requests;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Waits until the fold lease has expired.
async fn fold_lease_expired(fixture: &Fixture) {
    let is_over = |until: u64| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64 > until;
    while !fixture.partition("$d:metrics").await[0]["foldLease"]["until"].as_u64().is_none_or(is_over) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The cost of one call of each kind.
async fn cost(fixture: &Fixture, provider: &CosmosDBProvider) -> KindStats {
    let before = fixture.account.stats();
    admin(provider).get_system_metrics().await.unwrap();
    admin(provider).get_queue_depths().await.unwrap();
    (fixture.account.stats() - before).total()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_and_depths_cost_the_same_with_ten_and_with_three_thousand_ended_instances() {
    let fixture = Fixture::new(64);
    let provider = fixture.provider("a").await;
    finish(&provider, "i0", None).await;
    fixture.copy_instance("i0", (1..10).map(|n| format!("i{n}"))).await;
    // The first call may create the counters.
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(10));
    let few = cost(&fixture, &provider).await;

    finish(&provider, "j0", None).await;
    fixture.copy_instance("j0", (11..3_000).map(|n| format!("i{n}"))).await;
    folded(&fixture, &provider, 3_000).await;
    // The fold looks for more instances three seconds after its last step, and its lease lasts for five.
    fold_lease_expired(&fixture).await;
    quiet_down(&fixture).await;
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(3_000));
    let many = cost(&fixture, &provider).await;
    assert_eq!(many.requests, few.requests, "requests with 3,000 against 10");
    // The query may still count some ended instances by itself: fewer than one fold takes.
    assert!(many.response_bytes < few.response_bytes + 50 * 400, "{many:?} against {few:?}");
    let depths = admin(&provider).get_queue_depths().await.unwrap();
    assert_eq!((depths.orchestrator_queue, depths.worker_queue), (0, 0));
}

/// A container in which so many instances have ended, and a provider that has run none of them.
async fn finished(count: usize) -> (Fixture, CosmosDBProvider) {
    let fixture = Fixture::new(4);
    let maker = fixture.provider("maker").await;
    finish(&maker, "i0", None).await;
    fixture.copy_instance("i0", (1..count).map(|n| format!("i{n}"))).await;
    let b = fixture.provider("b").await;
    (fixture, b)
}

/// Cuts `a` after so many requests of one call and of the fold that it begins, in both ways. The figures are right
/// afterwards and after the next fold. Returns whether there was a cut.
async fn cut_while_folding(passing: u64, answer_only: bool) -> bool {
    const COUNT: u64 = 52;
    let (fixture, b) = finished(COUNT as usize).await;
    let a = fixture.provider("a").await;
    let cut = fixture.cut_at("a", passing, answer_only);
    let whole = folded_unless(&fixture, &a, COUNT, Some(&cut)).await;
    // The process of `a` crashes together with its background tasks.
    drop(a);
    let case = format!("cut after {passing}, answer only: {answer_only}");
    // Another provider reads the metrics and crashes then: it must not fold the instances that are copied below.
    let c = fixture.provider("c").await;
    assert_eq!(figures(&admin(&c).get_system_metrics().await.unwrap()), completed_only(COUNT), "{case}");
    drop(c);
    // The remaining provider folds once more.
    finish(&b, "j0", None).await;
    fixture.copy_instance("j0", (1..50).map(|n| format!("j{n}"))).await;
    // A fold needs at least fifty instances, so some may be left over.
    folded_once_free(&fixture, &b, COUNT + 1).await;
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(COUNT + 50), "{case}");
    !whole
}

/// Like [`folded`], but the crashed process may still hold the fold lease.
async fn folded_once_free(fixture: &Fixture, provider: &CosmosDBProvider, count: u64) {
    let asking = async {
        loop {
            drop(admin(provider).get_system_metrics().await);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    tokio::select! {
        () = asking => {}
        () = folded(fixture, provider, count) => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_figures_are_right_after_a_crash_at_any_request_of_a_fold() {
    // Between the note and the count all requests are alike: one write per instance.
    let mut cases: Vec<(u64, bool)> = (0..18).flat_map(|passing| [(passing, true), (passing, false)]).collect();
    cases.extend([30, 45, 60, 61, 62, 63, 64, 65, 66, 67].map(|passing| (passing, true)));
    let count = cases.len();
    let cutting = stream::iter(cases).map(|(passing, answer_only)| cut_while_folding(passing, answer_only));
    let felt: Vec<bool> =
        cutting.map(tokio::spawn).buffer_unordered(12).map(|felt| felt.expect("no panic")).collect().await;
    let cuts = felt.iter().filter(|felt| **felt).count();
    assert!(cuts >= count - 6, "{cuts} of {count} cases were cut");
}

#[tokio::test]
async fn the_figures_are_right_when_answers_are_lost_during_a_fold() {
    let (fixture, b) = finished(52).await;
    let lose = WireRule::new(WireAction::LoseAnswer).client("b").matching(|r| about_items(r) && r.sequence % 3 == 0);
    let losing = fixture.account.wire().add(lose);
    folded(&fixture, &b, 52).await;
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(52));
    assert!(losing.hits() > 20, "{}", losing.hits());
}

#[tokio::test]
async fn deleting_folded_instances_keeps_the_figures_right_and_leaves_no_document() {
    let (fixture, b) = finished(52).await;
    folded(&fixture, &b, 52).await;
    assert!(fixture.documents_of_type("i0", "instance").await[0].get("countPending").is_none(), "counted");
    for n in 0..20 {
        let deleted = admin(&b).delete_instance(&format!("i{n}"), false).await.unwrap();
        assert_eq!((deleted.instances_deleted, deleted.events_deleted), (1, 2));
        assert!(fixture.partition(&format!("i{n}")).await.is_empty());
    }
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(32));
    // The name is free again, and a new instance of it counts again.
    finish(&b, "i0", None).await;
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(33));
}

/// Cuts the deletion of a folded instance after so many requests. Returns whether there was a cut.
async fn cut_while_deleting(
    fixture: &Fixture,
    b: &CosmosDBProvider,
    instance: &str,
    passing: u64,
    answer: bool,
) -> bool {
    let name = format!("a {instance}");
    let a = fixture.provider(&name).await;
    let cut = fixture.cut_at(&name, passing, answer);
    let ended = until_cut(admin(&a).delete_instance(instance, false), &cut).await;
    // In every case the next call deletes the instance, or the rest of it.
    if let Err(error) = admin(b).delete_instance(instance, false).await {
        assert!(error.message.contains("not found"), "cut after {passing}, answer only: {answer}: {error:?}");
    }
    assert!(fixture.partition(instance).await.is_empty(), "cut after {passing}, answer only: {answer}");
    matches!(ended, Ended::Cut)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_figures_are_right_after_a_crash_at_any_request_of_the_deletion_of_a_folded_instance() {
    const COUNT: u64 = 50;
    let (fixture, b) = finished(COUNT as usize).await;
    folded(&fixture, &b, COUNT).await;
    // All cases run at once, since a deletion waits for another one that is not committed before it aborts that one.
    let (fixture, b) = (&fixture, &b);
    let cutting = stream::iter(0..COUNT).map(|n| async move {
        let instance = format!("i{n}");
        cut_while_deleting(fixture, b, &instance, n / 2, n % 2 == 1).await
    });
    let felt: Vec<bool> = cutting.buffered(COUNT as usize).collect().await;
    assert!(felt[..20].iter().all(|felt| *felt), "{felt:?}");
    assert_eq!(figures(&admin(b).get_system_metrics().await.unwrap()), completed_only(0));
}

/// The action of `b` while `a` is held.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    /// `b` finishes the deletion.
    Finishes,
    /// `b` starts one of the instances again, and erases the old one for that.
    StartsOne,
}

/// Holds `a`, which has committed a deletion of folded instances, before one of its requests to the counters. `b` acts
/// in the meantime. Returns whether there was such a request.
async fn while_held_at(request: u64, meanwhile: Meanwhile) -> bool {
    const COUNT: usize = 52;
    const GOING: usize = 20;
    let (fixture, b) = finished(COUNT).await;
    folded(&fixture, &b, COUNT as u64).await;
    quiet_down(&fixture).await;
    let a = fixture.provider("a").await;
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").skip(request).times(1);
    fixture.account.wire().add(held.matching(|r| goes_to(r, "$d:metrics")));
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
    let counters = fixture.partition("$d:metrics").await.pop().unwrap();
    assert_eq!((&counters["completed"], &counters["events"]), (&json!(left), &json!(2 * left)), "{counters}");
    assert!(counters["folding"].as_object().is_none_or(|note| note.is_empty()), "{counters}");
    for instance in going {
        assert!(fixture.partition(&instance).await.is_empty(), "{instance}");
    }
    was_held
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_note_whose_answer_was_lost_and_that_another_process_has_settled_is_not_written_again() {
    const COUNT: usize = 52;
    let (fixture, b) = finished(COUNT).await;
    folded(&fixture, &b, COUNT as u64).await;
    fold_lease_expired(&fixture).await;
    let a = fixture.provider("a").await;
    let gate = Gate::new();
    let note =
        |action| WireRule::new(action).client("a").on(RequestKind::Replace).matching(|r| goes_to(r, "$d:metrics"));
    let lost = fixture.account.wire().add(note(WireAction::LoseAnswer).times(1));
    fixture.account.wire().add(note(WireAction::HoldBefore(gate.clone())));
    let going: Vec<String> = (0..20).map(|n| format!("i{n}")).collect();
    let names = going.clone();
    let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&names, false).await });
    gate.reached().await;
    assert_eq!(lost.hits(), 1, "it repeats what was done");
    let noted = fixture.partition("$d:metrics").await.pop().unwrap();
    assert!(noted["folding"].as_object().is_some_and(|note| note.len() >= 19), "{noted}");
    // A process that folds new instances also settles the earlier note.
    finish(&b, "j0", None).await;
    fixture.copy_instance("j0", (1..COUNT).map(|n| format!("j{n}"))).await;
    let left = 2 * COUNT as u64 - 20;
    folded(&fixture, &b, left).await;
    gate.open();
    deletion.await.unwrap().unwrap();
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(left));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_another_process_erases_during_a_deletion_are_counted_once() {
    for meanwhile in [Meanwhile::Finishes, Meanwhile::StartsOne] {
        let cases = stream::iter(0..12).map(|request| while_held_at(request, meanwhile));
        let held: Vec<bool> = cases.buffered(12).collect().await;
        assert!(held[..4].iter().all(|held| *held), "noted and counted out: {held:?}");
        assert!(!held[11], "at every one of them: {held:?}");
    }
}

#[tokio::test]
async fn an_instance_that_changes_after_a_fold_is_counted_as_it_is_and_folded_again() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("a").await;
    // Two executions each, so that pruning has an effect.
    for n in 0..50 {
        finish_after(&provider, &format!("i{n}"), 2, 2).await;
    }
    let all = (50, 0, 50, 0, 100, 200);
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), all);
    folded(&fixture, &provider, 50).await;
    for n in 0..50 {
        let pruned = admin(&provider).prune_executions(&format!("i{n}"), PruneOptions::default()).await.unwrap();
        assert_eq!((pruned.executions_deleted, pruned.events_deleted), (1, 2));
    }
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(50));
    // All of them are folded again: no instance is open any more.
    let is_open = |d: &serde_json::Value| d["countPending"] == "open";
    let folding = async {
        while fixture.documents().await.iter().any(is_open) {
            drop(admin(&provider).get_system_metrics().await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, folding).await.expect("folded again");
    assert_eq!(figures(&admin(&provider).get_system_metrics().await.unwrap()), completed_only(50));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fold_that_a_deletion_interrupts_is_counted_once() {
    const COUNT: u64 = 52;
    let fixture = Fixture::new(1);
    let b = fixture.provider("b").await;
    finish_after(&b, "i0", 2, 2).await;
    fixture.copy_instance("i0", (1..COUNT).map(|n| format!("i{n}"))).await;
    folded(&fixture, &b, COUNT).await;
    fold_lease_expired(&fixture).await;
    // All instances have to be folded again, from the figures that the counters have of them.
    for n in 0..COUNT {
        admin(&b).prune_executions(&format!("i{n}"), PruneOptions::default()).await.unwrap();
    }
    let (fold, erasure) = (Gate::new(), Gate::new());
    let to_i0 = |action| WireRule::new(action).matching(|r| goes_to(r, "i0"));
    fixture.account.wire().add(to_i0(WireAction::HoldBefore(fold.clone())).client("b").on(RequestKind::Replace));
    fixture.account.wire().add(to_i0(WireAction::HoldBefore(erasure.clone())).client("a").on(RequestKind::Batch));
    admin(&b).get_system_metrics().await.unwrap();
    fold.reached().await;
    let a = fixture.provider("a").await;
    let deletion = tokio::spawn(async move { admin(&a).delete_instance("i0", false).await });
    erasure.reached().await;
    fold.open();
    let others_are_counted = async {
        loop {
            let counters = fixture.partition("$d:metrics").await.pop().unwrap();
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
    let counters = fixture.partition("$d:metrics").await.pop().unwrap();
    assert_eq!(
        (&counters["executions"], &counters["events"]),
        (&json!(COUNT - 1), &json!(2 * (COUNT - 1))),
        "{counters}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn folding_five_hundred_ended_instances_takes_about_a_request_each() {
    let (fixture, b) = finished(500).await;
    let before = fixture.account.stats_of("b");
    folded(&fixture, &b, 500).await;
    quiet_down(&fixture).await;
    let spent = (fixture.account.stats_of("b") - before).items().requests;
    // The metrics themselves, queries to four partitions, the note and the count.
    assert!(spent <= 550 + 30, "{spent} requests for 500 instances");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_processes_that_are_asked_at_once_only_one_folds() {
    let (fixture, b) = finished(500).await;
    let c = fixture.provider("c").await;
    let before = fixture.account.stats_of("b") + fixture.account.stats_of("c");
    let (_, asked) = tokio::join!(folded(&fixture, &b, 500), admin(&c).get_system_metrics());
    assert_eq!(figures(&asked.unwrap()), completed_only(500));
    quiet_down(&fixture).await;
    let spent = (fixture.account.stats_of("b") + fixture.account.stats_of("c") - before).items().requests;
    assert!(spent <= 550 + 60, "{spent} requests for 500 instances");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleting_a_set_of_folded_instances_writes_the_counters_only_a_few_times() {
    let (fixture, b) = finished(100).await;
    folded(&fixture, &b, 100).await;
    let writes = WireRule::new(WireAction::Delay(NOW)).on(RequestKind::Replace).client("b");
    let writes = fixture.account.wire().add(writes.matching(|r| goes_to(r, "$d:metrics")));
    let all: Vec<String> = (0..100).map(|n| format!("i{n}")).collect();
    assert_eq!(admin(&b).delete_instances_atomic(&all, false).await.unwrap().instances_deleted, 100);
    assert_eq!(figures(&admin(&b).get_system_metrics().await.unwrap()), completed_only(0));
    assert!(writes.hits() <= 6, "{} writes of the counters", writes.hits());
}

#[tokio::test]
async fn background_requests_yield_to_all_others() {
    let fixture = Fixture::new(2);
    let provider = fixture.provider("figures").await;
    let queries = Arc::new(Mutex::new(Vec::new()));
    let seen = queries.clone();
    fixture.account.wire().observe(move |request, _| {
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
    // A worker that renews a session too late loses it.
    provider.renew_session_lock(&["owner"], LONG, LONG).await.unwrap();
    assert_eq!(asked(), [const { None }; 2 * 2]);
}

/// A process that shuts down may have noted instances for the counters without counting them. The instances are deleted
/// before another process finishes the fold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_were_noted_and_not_folded_do_not_count_after_their_deletion() {
    const COUNT: u64 = 60;
    let fixture = Fixture::new(4);
    let maker = fixture.provider("maker").await;
    finish(&maker, "i0", None).await;
    fixture.copy_instance("i0", (1..COUNT).map(|n| format!("i{n}"))).await;
    let a = fixture.provider("a").await;
    // The note is written, and no instance is changed after it.
    let steps = WireRule::new(WireAction::FailConnection).client("a").on(RequestKind::Replace);
    let steps = fixture.account.wire().add(steps.matching(|request| !goes_to(request, "$d:metrics")));
    assert_eq!(admin(&a).get_system_metrics().await.unwrap().total_instances, COUNT);
    tokio::time::timeout(PATIENCE, steps.wait_for_hits(1)).await.expect("it seals");
    fixture.cut("a", 0);
    drop(a);
    let counters = fixture.documents_of_type("$d:metrics", "counters").await.remove(0);
    assert_eq!(counters["folding"].as_object().map(|note| note.len() as u64), Some(COUNT), "{counters}");
    let b = fixture.provider("b").await;
    let deleted = admin(&b).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!(deleted.instances_deleted, COUNT);
    assert!(admin(&b).list_instances().await.unwrap().is_empty());
    let metrics = admin(&b).get_system_metrics().await.unwrap();
    assert_eq!(
        (metrics.total_instances, metrics.completed_instances, metrics.total_events),
        (0, 0, 0),
        "there is nothing"
    );
}

/// All deletions write the one document of the counters. A newer version or an operator may have changed it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_counters_prevent_no_deletion() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish(&worker, "i", None).await;
    let counters = json!({
        "id": "counters", "instanceId": "$d:metrics", "type": "counters", "completed": { "v2": 7 }, "failed": 0,
        "other": 0, "executions": 7, "events": 14, "folding": {}
    });
    fixture.container().await.upsert_item("$d:metrics".to_owned(), "counters", &counters, None).await.unwrap();
    let deleted = admin(&worker).delete_instance("i", false).await;
    // The deletion is committed: the name must be free for the next instance, even if the call failed.
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let next = worker.fetch_orchestration_item(LONG, Duration::from_secs(15), None).await.unwrap();
    let (item, ..) = next.unwrap_or_else(|| panic!("the next instance of that name never begins: {deleted:?}"));
    assert_eq!((item.instance.as_str(), item.history.len()), ("i", 0));
    assert_eq!(deleted.unwrap().instances_deleted, 1);
}
