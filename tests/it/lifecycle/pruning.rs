//! Pruning removes only old executions, and finishes after a crash or beside other prunings.

use super::*;
use crate::fixture::*;
use azure_data_cosmos::TransactionalBatch;
use duroxide::providers::{ExecutionMetadata, Provider, PruneOptions};
use duroxide_cosmos_emulator::{Gate, Misbehaviour, RequestKind, WireAction, WireRequest, WireRule};
use serde_json::json;
use std::{num::NonZeroU32, sync::Arc, time::Duration};

/// Runs the next execution of `instance`, which continues as new.
async fn run_to_next_execution(provider: &dyn Provider, instance: &str, execution: u64) {
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!(item.instance, instance);
    let events = vec![started(instance, execution), completed(instance, execution, 2)];
    commit(provider, &token, events, Vec::new(), vec![continue_as_new(instance)], ended("ContinuedAsNew"))
        .await
        .unwrap();
}

/// Runs the last execution of `instance`. Its output is too large for the instance's own document.
async fn complete_with_large_output(provider: &dyn Provider, instance: &str, execution: u64) {
    let (_, token, _) = next_turn(provider, LONG).await;
    let metadata = ExecutionMetadata { output: Some("x".repeat(2_000)), ..ended("Completed") };
    let events = vec![started(instance, execution), completed(instance, execution, 2)];
    commit(provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
}

/// Whether a request queries the executions of an instance.
fn asks_for_executions(request: &WireRequest<'_>) -> bool {
    let text = request.json().and_then(|body| body["query"].as_str().map(ToOwned::to_owned));
    text.is_some_and(|text| text.contains("'execution'"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_spares_an_execution_that_became_the_current_one_during_its_query() {
    for last in [None, Some(0), Some(1), Some(2)] {
        let fixture = Fixture::new(1);
        let (pruner, worker) = (fixture.provider("pruner").await, fixture.provider("worker").await);
        worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        run_to_next_execution(&worker, "i", 1).await;
        run_to_next_execution(&worker, "i", 2).await;
        let gate = fixture.hold("pruner", RequestKind::Query, asks_for_executions);
        let options = PruneOptions { keep_last: last, ..PruneOptions::default() };
        let pruning = tokio::spawn(async move { admin(&pruner).prune_executions("i", options).await });
        reached(&gate).await;
        run_to_next_execution(&worker, "i", 3).await;
        complete_with_large_output(&worker, "i", 4).await;
        gate.open();
        let pruned = pruning.await.unwrap().unwrap();
        let info = admin(&worker).get_instance_info("i").await.unwrap();
        assert_eq!(info.output.map(|output| output.len()), Some(2_000), "keep_last: {last:?}");
        let history = admin(&worker).read_history_with_execution_id("i", 4).await.unwrap();
        assert_eq!(history.len(), 2, "keep_last: {last:?}");
        let left = admin(&worker).list_executions("i").await.unwrap();
        // At the time of the query there were two executions, and it had to keep two.
        assert_eq!(left, if last == Some(2) { vec![1, 2, 3, 4] } else { vec![4] }, "keep_last: {last:?}");
        assert_eq!(pruned.executions_deleted, 4 - left.len() as u64);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executions_that_two_processes_prune_are_subtracted_once() {
    let fixture = Fixture::new(1);
    let (pruner, worker) = (fixture.provider("pruner").await, fixture.provider("worker").await);
    finish_after(&worker, "i", 4, 3).await;
    let gate = Gate::new();
    let write = WireRule::new(WireAction::HoldBefore(gate.clone())).client("pruner").on(RequestKind::Replace);
    fixture.account.wire().add(write.times(1));
    let pruning = tokio::spawn(async move { admin(&pruner).prune_executions("i", keep_last(1)).await });
    reached(&gate).await;
    admin(&worker).prune_executions("i", keep_last(1)).await.unwrap();
    gate.open();
    pruning.await.unwrap().unwrap();
    let metrics = admin(&worker).get_system_metrics().await.unwrap();
    assert_eq!((metrics.total_executions, metrics.total_events), (1, 3));
}

/// Gives `i` so many executions before the current one, which then has no history of its own.
async fn lengthen(fixture: &Fixture, executions: u64) {
    let instance = fixture.documents_of_type("i", "instance").await.remove(0);
    let mut longer = instance.clone();
    longer["execution"] = (executions + 1).into();
    longer["totals"] = json!({ "executions": executions + 1, "events": 2 * (executions + 1) });
    let container = fixture.container().await;
    let past: Vec<u64> = (1..=executions).collect();
    for chunk in past.chunks(50) {
        let mut batch = TransactionalBatch::new("i".to_owned());
        for execution in chunk {
            let common = json!({ "instanceId": "i", "execution": execution });
            let mut x = common.clone();
            x["id"] = format!("x:{execution}").into();
            (x["type"], x["status"]) = ("execution".into(), "ContinuedAsNew".into());
            (x["startedAt"], x["endedAt"], x["events"]) = (1.into(), 2.into(), json!([[1, 2]]));
            let mut h = common;
            h["id"] = format!("h:{execution}:t:0").into();
            (h["type"], h["first"], h["events"]) = ("history".into(), 1.into(), json!([]));
            batch = batch.upsert_item(x, None).unwrap().upsert_item(h, None).unwrap();
        }
        container.execute_transactional_batch(batch, None).await.unwrap();
    }
    container.upsert_item("i".to_owned(), "instance", &longer, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_executions_are_pruned_in_steps_and_the_instance_stays_small() {
    const MANY: u64 = 1_600;
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish(&worker, "i", None).await;
    lengthen(&fixture, MANY).await;
    let pruner = fixture.provider("pruner").await;
    let largest = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let seen = largest.clone();
    fixture.account.wire().observe(move |request, _| {
        if request.kind == RequestKind::Replace && request.client == Some("pruner") {
            seen.fetch_max(request.body.len(), std::sync::atomic::Ordering::Relaxed);
        }
    });
    // The process crashes in the middle of the pruning.
    let cut = fixture.cut("pruner", 40);
    assert!(matches!(until_cut(admin(&pruner).prune_executions("i", keep_last(3)), &cut).await, Ended::Cut));
    fixture.account.wire().clear();
    admin(&worker).prune_executions("i", keep_last(3)).await.unwrap();
    assert_eq!(admin(&worker).list_executions("i").await.unwrap(), [MANY - 1, MANY, MANY + 1]);
    let left = fixture.partition("i").await;
    assert_eq!(left.iter().filter(|d| d["type"] == "history").count(), 2);
    let instance = left.iter().find(|d| d["type"] == "instance").unwrap();
    assert!(instance.get("pruning").is_none(), "{instance}");
    assert_eq!(instance["totals"], json!({ "executions": 3, "events": 6 }));
    let largest = largest.load(std::sync::atomic::Ordering::Relaxed);
    assert!((1..6_000).contains(&largest), "{largest} bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_partition_is_listed_pruned_and_erased_page_by_page() {
    let fixture = Fixture::new(1);
    // Each page takes a third of the request timeout, and there are a dozen pages.
    let config =
        test_config().with_operation_timeout(Duration::from_secs(2)).with_request_timeout(Duration::from_secs(2));
    let provider = fixture.provider_with("p", config).await;
    finish(&provider, "i", None).await;
    lengthen(&fixture, 60).await;
    let wire = fixture.account.wire();
    wire.misbehave(Misbehaviour::SmallPages(NonZeroU32::new(10).unwrap()));
    wire.misbehave(Misbehaviour::SlowPages(Duration::from_millis(600)));
    assert_eq!(admin(&provider).list_executions("i").await.unwrap().len(), 61);
    let pruned = admin(&provider).prune_executions("i", keep_last(40)).await.unwrap();
    assert_eq!(pruned.executions_deleted, 21);
    assert_eq!(admin(&provider).delete_instance("i", false).await.unwrap().instances_deleted, 1);
    wire.behave();
    assert!(fixture.partition("i").await.is_empty());
}

/// Whether a request queries the documents of executions that were pruned.
fn asks_for_pruned(request: &WireRequest<'_>) -> bool {
    let text = request.json().and_then(|body| body["query"].as_str().map(ToOwned::to_owned));
    text.is_some_and(|text| text.contains("@from"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pruning_settles_only_the_executions_that_it_has_erased() {
    let fixture = Fixture::new(1);
    let (slow, fast) = (fixture.provider("slow").await, fixture.provider("fast").await);
    finish_after(&fast, "i", 8, 3).await;
    // The slow provider has pruned 1 to 4 and has listed the documents to erase.
    let slow_gate = fixture.hold_answer("slow", RequestKind::Query, asks_for_pruned);
    let slowly = tokio::spawn(async move { admin(&slow).prune_executions("i", keep_last(4)).await });
    reached(&slow_gate).await;
    // The fast provider erases those, prunes 5 to 7 and is about to erase them, too.
    let fast_gate = Gate::new();
    let second = WireRule::new(WireAction::HoldBefore(fast_gate.clone())).client("fast").on(RequestKind::Query);
    fixture.account.wire().add(second.matching(asks_for_pruned).skip(1).times(1));
    let fast = std::sync::Arc::new(fast);
    let fast_too = fast.clone();
    let quickly = tokio::spawn(async move { admin(&fast_too).prune_executions("i", keep_last(1)).await });
    reached(&fast_gate).await;
    slow_gate.open();
    slowly.await.unwrap().unwrap();
    fast_gate.open();
    quickly.await.unwrap().unwrap();
    assert_eq!(admin(&fast).list_executions("i").await.unwrap(), [8]);
    admin(&fast).prune_executions("i", keep_last(1)).await.unwrap();
    let metrics = admin(&fast).get_system_metrics().await.unwrap();
    assert_eq!((metrics.total_executions, metrics.total_events), (1, 3), "each execution is counted out once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pruning_erases_executions_that_another_one_pruned_during_its_query() {
    let mut reads = 0;
    while erased_beside_a_crash(reads).await {
        reads += 1;
    }
    assert!(reads > 1, "it reads the instance more than once");
}

/// A process crashes right after it has pruned four executions, while another process is about to read the instance
/// again after so many reads. Asserts that the other process erases them. Returns `false` if it does not read that
/// often.
async fn erased_beside_a_crash(reads: u64) -> bool {
    let fixture = Fixture::new(1);
    let (dying, other) = (fixture.provider("dying").await, fixture.provider("other").await);
    finish_after(&other, "i", 5, 3).await;
    let decision = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(decision.clone())).client("dying").on(RequestKind::Replace);
    fixture.account.wire().add(rule.times(1));
    let dying = tokio::spawn(async move { admin(&dying).prune_executions("i", keep_last(1)).await });
    reached(&decision).await;
    let query = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(query.clone())).client("other").on(RequestKind::Read);
    fixture.account.wire().add(rule.matching(|request| goes_to(request, "i")).skip(reads).times(1));
    let mut pruning = tokio::spawn(async move { admin(&other).prune_executions("i", keep_last(5)).await });
    tokio::select! {
        () = reached(&query) => {}
        pruned = &mut pruning => {
            pruned.unwrap().unwrap();
            return false;
        }
    }
    let death = WireRule::new(WireAction::FailConnection).client("dying").matching(about_items);
    let death = fixture.account.wire().add(death);
    decision.open();
    death.wait_for_hits(1).await;
    dying.abort();
    query.open();
    pruning.await.unwrap().unwrap();
    let instance = fixture.documents_of_type("i", "instance").await.pop().unwrap();
    assert!(instance["pruning"].is_null(), "after {reads} reads: {instance}");
    assert_eq!(fixture.documents_of_type("i", "history").await.len(), 1, "after {reads} reads");
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pruning_whose_query_takes_longer_than_the_request_timeout_continues() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish_after(&worker, "i", 6, 2).await;
    let timeout = Duration::from_secs(2);
    let pruner = test_config().with_operation_timeout(timeout).with_request_timeout(timeout);
    let pruner = fixture.provider_with("pruner", pruner).await;
    let slowly = WireRule::new(WireAction::Delay(Duration::from_millis(1_200))).client("pruner");
    fixture.account.wire().add(slowly.on(RequestKind::Query));
    // One query finds the first execution that stays, and one finds those to prune.
    let pruned = admin(&pruner).prune_executions("i", keep_last(2)).await.unwrap();
    assert_eq!(pruned.executions_deleted, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_that_was_cut_is_finished_by_the_next_call() {
    let fixture = Fixture::new(4);
    let b = fixture.provider("b").await;
    finish_after(&b, "model", 120, 5).await;
    let (fixture, b) = (&fixture, &b);
    let cuts = at_every_cut(9, |passing, answer_only| async move {
        let name = format!("a{passing}{answer_only}");
        fixture.copy_instance("model", std::iter::once(name.clone())).await;
        let a = fixture.provider(&name).await;
        let cut = fixture.cut_at(&name, passing, answer_only);
        let ended = until_cut(admin(&a).prune_executions(&name, PruneOptions::default()), &cut).await;
        let case = format!("cut after {passing}, answer only: {answer_only}");
        // Either all old executions exist, or none.
        let executions = admin(b).list_executions(&name).await.unwrap();
        assert!(executions.len() == 120 || executions == [120], "{case}: {executions:?}");
        let first = b.read_with_execution(&name, 1).await.unwrap();
        assert_eq!(first.len(), if executions.len() == 1 { 0 } else { 5 }, "{case}");
        admin(b).prune_executions(&name, PruneOptions::default()).await.unwrap();
        assert_eq!(admin(b).list_executions(&name).await.unwrap(), [120], "{case}");
        let left = fixture.partition(&name).await;
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
async fn pruned_executions_are_subtracted_once_when_the_answer_to_the_commit_is_lost() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    finish_after(&a, "i", 3, 5).await;
    let lose = WireRule::new(WireAction::LoseAnswer).on(RequestKind::Replace).matching(|r| goes_to(r, "i"));
    let lost = fixture.account.wire().add(lose.times(1));
    let pruned = admin(&a).prune_executions("i", PruneOptions::default()).await.unwrap();
    assert_eq!((pruned.executions_deleted, pruned.events_deleted), (2, 10));
    assert_eq!(lost.hits(), 1);
    let metrics = admin(&a).get_system_metrics().await.unwrap();
    assert_eq!((metrics.total_executions, metrics.total_events), (1, 5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_that_a_deletion_overtakes_erases_nothing_of_the_next_instance() {
    let fixture = Fixture::new(1);
    let (pruner, other) = (fixture.provider("pruner").await, fixture.provider("other").await);
    finish_after(&other, "i", 3, 3).await;
    let gate = Gate::new();
    let erasure = WireRule::new(WireAction::HoldBefore(gate.clone())).client("pruner").on(RequestKind::Batch);
    fixture.account.wire().add(erasure.matching(|request| goes_to(request, "i")));
    let options = PruneOptions { keep_last: Some(1), ..PruneOptions::default() };
    let pruning = tokio::spawn(async move { admin(&pruner).prune_executions("i", options).await });
    gate.reached().await;
    admin(&other).delete_instance("i", true).await.unwrap();
    finish_after(&other, "i", 3, 3).await;
    gate.open();
    pruning.await.unwrap().unwrap();
    assert_eq!(admin(&other).list_executions("i").await.unwrap(), [1, 2, 3]);
    for execution in 1..=3 {
        assert_eq!(admin(&other).read_history_with_execution_id("i", execution).await.unwrap().len(), 3);
    }
    assert!(fixture.documents_of_type("i", "instance").await[0]["pruning"].is_null());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_pruning_continues_past_an_instance_that_it_cannot_prune() {
    let fixture = Fixture::new(2);
    let a = fixture.provider("a").await;
    finish_after(&a, "i0", 3, 4).await;
    fixture.copy_instance("i0", (1..10).map(|n| format!("i{n}"))).await;
    let refuse = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    fixture.account.wire().add(WireRule::new(refuse).matching(|r| goes_to(r, "i0")));
    let pruned = admin(&a).prune_executions_bulk(everything(100), PruneOptions::default()).await.unwrap();
    assert_eq!((pruned.instances_processed, pruned.executions_deleted), (9, 18));
}
