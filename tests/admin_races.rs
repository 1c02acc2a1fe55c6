//! Two administrators at once, lost answers, and clocks that are off: prunings, removals of starts and retention say
//! what was done, and do no more than they say.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, PruneOptions};
use duroxide_cosmos::Retention;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule};
use scene::*;
use std::time::Duration;

const WEEK: i64 = 7 * 24 * 3_600_000;
const HOUR: Duration = Duration::from_secs(3_600);

fn keep(last: u32) -> PruneOptions {
    PruneOptions { keep_last: Some(last), ..PruneOptions::default() }
}

/// Holds the answer to the first such request of a client.
fn hold_answer(scene: &Scene, client: &str, kind: RequestKind, such: fn(&WireRequest<'_>) -> bool) -> Gate {
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldAfter(gate.clone())).client(client).on(kind).matching(such);
    scene.account.wire().add(rule.times(1));
    gate
}

/// Whether a request asks for the documents of executions that were pruned.
fn asks_for_pruned(request: &WireRequest<'_>) -> bool {
    let text = request.json().and_then(|body| body["query"].as_str().map(ToOwned::to_owned));
    text.is_some_and(|text| text.contains("@from"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pruning_forgets_only_the_executions_that_it_has_erased() {
    let scene = Scene::new(1);
    let (slow, fast) = (scene.provider("slow").await, scene.provider("fast").await);
    finish_after(&fast, "i", 8, 3).await;
    // The slow one has pruned 1 to 4 and knows what is to be erased of them.
    let slow_gate = hold_answer(&scene, "slow", RequestKind::Query, asks_for_pruned);
    let slowly = tokio::spawn(async move { admin(&slow).prune_executions("i", keep(4)).await });
    reach(&slow_gate).await;
    // The fast one erases those, prunes 5 to 7 and is about to erase them, too.
    let fast_gate = Gate::new();
    let second = WireRule::new(WireAction::HoldBefore(fast_gate.clone())).client("fast").on(RequestKind::Query);
    scene.account.wire().add(second.matching(asks_for_pruned).skip(1).times(1));
    let fast = std::sync::Arc::new(fast);
    let fast_too = fast.clone();
    let quickly = tokio::spawn(async move { admin(&fast_too).prune_executions("i", keep(1)).await });
    reach(&fast_gate).await;
    slow_gate.open();
    slowly.await.unwrap().unwrap();
    fast_gate.open();
    quickly.await.unwrap().unwrap();
    assert_eq!(admin(&fast).list_executions("i").await.unwrap(), [8]);
    admin(&fast).prune_executions("i", keep(1)).await.unwrap();
    let metrics = admin(&fast).get_system_metrics().await.unwrap();
    assert_eq!((metrics.total_executions, metrics.total_events), (1, 3), "each execution is counted out once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pruning_erases_what_another_one_has_pruned_while_it_looked() {
    let mut reads = 0;
    while erased_beside_a_dying_one(reads).await {
        reads += 1;
    }
    assert!(reads > 1, "it reads the instance more than once");
}

/// A process dies right after it has pruned four executions, which happens while another process is about to read the
/// instance again after so many reads. Asserts that the other one erases them; `false` where it does not read as often.
async fn erased_beside_a_dying_one(reads: u64) -> bool {
    let scene = Scene::new(1);
    let (dying, other) = (scene.provider("dying").await, scene.provider("other").await);
    finish_after(&other, "i", 5, 3).await;
    let decision = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(decision.clone())).client("dying").on(RequestKind::Replace);
    scene.account.wire().add(rule.times(1));
    let dying = tokio::spawn(async move { admin(&dying).prune_executions("i", keep(1)).await });
    reach(&decision).await;
    let look = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(look.clone())).client("other").on(RequestKind::Read);
    scene.account.wire().add(rule.matching(is_for_i).skip(reads).times(1));
    let mut pruning = tokio::spawn(async move { admin(&other).prune_executions("i", keep(5)).await });
    tokio::select! {
        () = reach(&look) => {}
        pruned = &mut pruning => {
            pruned.unwrap().unwrap();
            return false;
        }
    }
    let death = WireRule::new(WireAction::FailConnection).client("dying").matching(about_items);
    let death = scene.account.wire().add(death);
    decision.open();
    death.wait_for_hits(1).await;
    dying.abort();
    look.open();
    pruning.await.unwrap().unwrap();
    let instance = scene.of_kind("i", "instance").await.pop().unwrap();
    assert!(instance["pruning"].is_null(), "after {reads} reads: {instance}");
    assert_eq!(scene.of_kind("i", "history").await.len(), 1, "after {reads} reads");
    true
}

/// Whether a request is a batch for the instance.
fn is_for_i(request: &WireRequest<'_>) -> bool {
    goes_to(request, "i")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_a_worker_has_begun_meanwhile_was_not_removed() {
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    // By the worker's clock the operator's claim has expired when it is made.
    let operator = scene.provider_with("operator", quiet().with_clock(off_by(-60_000))).await;
    worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let gate = hold_answer(&scene, "operator", RequestKind::Batch, is_for_i);
    let removal = tokio::spawn(async move { operator.drop_start("i").await });
    reach(&gate).await;
    let (item, token, _) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "i");
    commit(&worker, &token, vec![started("i", 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    gate.open();
    assert!(!removal.await.unwrap().unwrap_or(false), "the instance runs");
    assert_eq!(admin(&worker).get_instance_info("i").await.unwrap().status, "Running");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_is_removed_whichever_answer_is_lost() {
    for passing in 0..4 {
        let scene = Scene::new(1);
        let (client, operator) = (scene.provider("client").await, scene.provider("operator").await);
        client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        let lost = WireRule::new(WireAction::LoseAnswer).client("operator").on(RequestKind::Batch);
        scene.account.wire().add(lost.matching(is_for_i).skip(passing).times(1));
        assert!(operator.drop_start("i").await.unwrap(), "the answer of batch {passing} is lost");
        assert_eq!(operator.queued_start("i").await.unwrap(), None);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_clocks_that_are_behind_do_not_end_a_retention() {
    let scene = Scene::new(1);
    let worker = scene.provider_with("worker", quiet().with_clock(off_by(-2 * WEEK))).await;
    finish(&worker, "i", None).await;
    let retention = Retention::default().with_completed(HOUR);
    let config = quiet().with_clock(off_by(-WEEK)).with_retention(retention);
    let keeper = scene.provider_with("keeper", config).await;
    assert_eq!(keeper.apply_retention().await.unwrap(), 0, "it ended a moment ago");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pruning_whose_look_takes_longer_than_a_request_may_take_goes_on() {
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish_after(&worker, "i", 6, 2).await;
    let timeout = Duration::from_secs(2);
    let pruner = quiet().with_operation_timeout(timeout).with_request_timeout(timeout);
    let pruner = scene.provider_with("pruner", pruner).await;
    let slowly = WireRule::new(WireAction::Delay(Duration::from_millis(1_200))).client("pruner");
    scene.account.wire().add(slowly.on(RequestKind::Query));
    // One query says which is the first that stays, one which may go.
    let pruned = admin(&pruner).prune_executions("i", keep(2)).await.unwrap();
    assert_eq!(pruned.executions_deleted, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tree_is_deleted_whose_children_take_longer_to_list_than_a_request_may_take() {
    let scene = Scene::new(8);
    let worker = scene.provider("worker").await;
    finish(&worker, "parent", None).await;
    finish(&worker, "child", Some("parent")).await;
    let timeout = Duration::from_secs(2);
    let deleter = quiet().with_operation_timeout(timeout).with_request_timeout(timeout);
    let deleter = scene.provider_with("deleter", deleter).await;
    // Each of the eight physical partitions answers with a page of its own.
    let slowly = WireRule::new(WireAction::Delay(Duration::from_millis(500))).client("deleter");
    scene.account.wire().add(slowly.on(RequestKind::Query));
    let deleted = admin(&deleter).delete_instance("parent", false).await.unwrap();
    assert_eq!(deleted.instances_deleted, 2);
}
