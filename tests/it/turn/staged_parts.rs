//! The staged parts of a turn that does not fit one batch. A claim removes those of a dead turn, and no live part is
//! lost.

use crate::fixture::*;
use duroxide::providers::{Provider, ProviderAdmin, PruneOptions};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule};
use std::sync::Arc;

const INSTANCE: &str = "order";

const ACTIVITIES: u64 = 400;

/// A turn of "dead" that was staged and never committed. Its lock is short.
async fn dead_turn(fixture: &Fixture) {
    let dead = Arc::new(fixture.impatient_provider("dead").await);
    dead.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
    let (_, token) = fetch_turn(&dead, SHORT).await;
    let gate = Gate::new();
    let rule =
        fixture.rule("dead", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch).matching(commits_parts);
    fixture.account.wire().add(rule);
    let owner = dead.clone();
    let ack = tokio::spawn(async move { Delta::start(INSTANCE, ACTIVITIES).ack(&owner, &token).await });
    within("the commit", gate.reached()).await;
    // The process crashes, and its commit never arrives.
    ack.abort();
    assert!(fixture.documents_of_type(INSTANCE, "staged").await.len() > 3);
}

async fn assert_whole(fixture: &Fixture, provider: &CosmosDBProvider) {
    let history = provider.read(INSTANCE).await.expect("a history");
    assert_eq!(history.len() as u64, 1 + ACTIVITIES);
    assert_eq!(drain_activities(provider).await, (2..2 + ACTIVITIES).collect::<Vec<_>>());
    assert!(fixture.documents_of_type(INSTANCE, "staged").await.is_empty());
    let instance = fixture.instance(INSTANCE).await;
    assert!(instance["rollForward"].is_null() && instance["staging"].is_null(), "{instance}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_whose_first_turn_is_only_staged_is_listed_and_cannot_be_removed() {
    let fixture = Fixture::with_container().await;
    dead_turn(&fixture).await;
    let operator = fixture.impatient_provider("operator").await;
    assert!(operator.queued_start(INSTANCE).await.expect("an answer").is_some());
    let error = operator.drop_start(INSTANCE).await.expect_err("its parts must be removed first");
    assert!(error.is_retryable(), "{error}");
    assert!(operator.queued_start(INSTANCE).await.expect("an answer").is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_claim_removes_the_staged_parts_of_a_dead_turn() {
    let fixture = Fixture::with_container().await;
    dead_turn(&fixture).await;
    let a = fixture.impatient_provider("a").await;
    let (_, token) = fetch_turn(&a, LONG).await;
    assert!(fixture.documents_of_type(INSTANCE, "staged").await.is_empty());
    Delta::start(INSTANCE, ACTIVITIES).ack(&a, &token).await.expect("the turn");
    assert_whole(&fixture, &a).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_stalls_past_its_lock_does_not_remove_the_staged_parts_of_the_new_owner() {
    let fixture = Fixture::with_container().await;
    dead_turn(&fixture).await;
    let (a, b) = (fixture.impatient_provider("a").await, Arc::new(fixture.impatient_provider("b").await));
    // "a" claims, and all of its further requests stall.
    let stall = Gate::new();
    for kind in [RequestKind::Query, RequestKind::Batch] {
        let rule = fixture.rule("a", WireAction::HoldBefore(stall.clone())).on(kind);
        fixture.account.wire().add(rule.matching(|request| goes_to(request, INSTANCE)));
    }
    let stalled = tokio::spawn(async move { a.fetch_orchestration_item(SHORT, SHORT, None).await });
    within("the stalled claim", stall.reached()).await;
    // "b" takes over and stages its own turn. Its commit is on its way.
    let (_, token) = fetch_turn(&b, LONG).await;
    let commit = Gate::new();
    let rule = fixture.rule("b", WireAction::HoldBefore(commit.clone())).on(RequestKind::Batch).matching(commits_parts);
    fixture.account.wire().add(rule.times(1));
    let owner = b.clone();
    let ack = tokio::spawn(async move { Delta::start(INSTANCE, ACTIVITIES).ack(&owner, &token).await });
    within("the commit", commit.reached()).await;
    let parts = fixture.documents_of_type(INSTANCE, "staged").await.len();
    stall.open();
    // The stalled claim ends, with any result, before the commit arrives.
    drop(within("the stalled claim's end", stalled).await);
    assert_eq!(fixture.documents_of_type(INSTANCE, "staged").await.len(), parts);
    commit.open();
    within("the ack", ack).await.expect("no panic").expect("the turn");
    assert_whole(&fixture, &b).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_part_is_not_mistaken_for_an_applied_one() {
    let fixture = Fixture::with_container().await;
    let a = fixture.impatient_provider("a").await;
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
    let (_, token) = fetch_turn(&a, LONG).await;
    // The process that committed the turn does not apply its second part, and an operator deletes that part.
    let gate = Gate::new();
    let rule = fixture.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch).matching(applies_a_part);
    fixture.account.wire().add(rule.skip(1));
    let ack = tokio::spawn(async move { Delta::start(INSTANCE, ACTIVITIES).ack(&a, &token).await });
    within("the second part", gate.reached()).await;
    ack.abort();
    let left = fixture.documents_of_type(INSTANCE, "staged").await;
    let lost = left[0]["id"].as_str().expect("an id").to_owned();
    fixture.remove(&left[0]).await;

    let b = fixture.impatient_provider("b").await;
    let error = b.read(INSTANCE).await.expect_err("half a turn");
    assert!(error.message.contains(&lost) && error.message.contains("missing"), "{error:?}");
    b.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
    let fetched = b.fetch_orchestration_item(LONG, std::time::Duration::ZERO, None).await;
    assert!(!matches!(fetched, Ok(Some(_))), "a turn on half a history");
    assert_eq!(fixture.documents_of_type(INSTANCE, "staged").await.len(), left.len() - 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_that_roll_the_same_turn_forward_apply_each_part_once() {
    let fixture = Fixture::with_container().await;
    let a = fixture.impatient_provider("a").await;
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
    let (_, token) = fetch_turn(&a, LONG).await;
    let gate = Gate::new();
    let rule = fixture.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch).matching(applies_a_part);
    fixture.account.wire().add(rule);
    let ack = tokio::spawn(async move { Delta::start(INSTANCE, ACTIVITIES).ack(&a, &token).await });
    within("the first part", gate.reached()).await;
    let mut others = Vec::new();
    for name in ["b", "c", "d"] {
        let provider = fixture.impatient_provider(name).await;
        others.push(tokio::spawn(async move { provider.read(INSTANCE).await.expect("a history").len() }));
    }
    for other in others {
        assert_eq!(within("a reader", other).await.expect("no panic") as u64, 1 + ACTIVITIES);
    }
    gate.open();
    within("the ack", ack).await.expect("no panic").expect("the turn");
    let e = fixture.impatient_provider("e").await;
    assert!(fetch_turn_now(&e, LONG).await.is_none());
    assert_whole(&fixture, &e).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_staged_parts_of_a_turn_that_cosmos_db_refused_are_removed_without_a_new_message() {
    let fixture = Fixture::with_container().await;
    let a = fixture.impatient_provider("a").await;
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
    let (_, token) = fetch_turn(&a, LONG).await;
    let refused = WireAction::RefuseBatchOperation { index: 0, status: 413, substatus: None };
    let rule = fixture.rule("a", refused).on(RequestKind::Batch).matching(commits_parts);
    fixture.account.wire().add(rule.times(1));
    let error = Delta::start(INSTANCE, ACTIVITIES).ack(&a, &token).await.expect_err("what can't be stored");
    assert!(!error.is_retryable(), "{error:?}");
    assert!(!fixture.documents_of_type(INSTANCE, "staged").await.is_empty());
    // duroxide's runtime records the failure with the same token, and the instance has ended.
    Delta::failure(INSTANCE, 1).ack(&a, &token).await.expect("the failure");
    let b = fixture.impatient_provider("b").await;
    let removed = async {
        while !fixture.documents_of_type(INSTANCE, "staged").await.is_empty() {
            assert!(b.fetch_orchestration_item(LONG, SHORT, None).await.expect("a fetch").is_none());
        }
    };
    within("the removal", removed).await;
    let instance = fixture.instance(INSTANCE).await;
    assert!(instance["staging"].is_null() && instance["due"].is_null() && instance["lock"].is_null(), "{instance}");
}

const CHILD: &str = "child";

/// Makes an instance in its fifth execution. The first four continued as new.
async fn continue_four_times(provider: &CosmosDBProvider, instance: &str) {
    provider.enqueue_for_orchestrator(start(instance), None).await.unwrap();
    for execution in 1..=5 {
        let (_, token, _) = next_turn(provider, LONG).await;
        let goes_on = execution < 5;
        let (messages, metadata) =
            if goes_on { (vec![continue_as_new(instance)], ended("ContinuedAsNew")) } else { (Vec::new(), running()) };
        commit(provider, &token, vec![started(instance, execution)], Vec::new(), messages, metadata).await.unwrap();
    }
}

/// Whether a request writes a part of a turn that does not fit one batch.
fn stages(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    body.as_array().is_some_and(|operations| operations.iter().any(|op| op["resourceBody"]["type"] == "staged"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_in_parts_keeps_the_fields_that_a_pruning_writes_beside_it() {
    let fixture = Fixture::new(1);
    let (a, b) = (Arc::new(fixture.provider("a").await), fixture.provider("b").await);
    continue_four_times(&a, CHILD).await;
    a.enqueue_for_orchestrator(external(CHILD, "go"), None).await.unwrap();
    let (_, token, _) = next_turn(a.as_ref(), LONG).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").on(RequestKind::Batch).matching(stages);
    fixture.account.wire().add(rule.skip(1).times(1));
    let owner = a.clone();
    let ack = tokio::spawn(async move {
        let work = (2..302).map(|id| activity(CHILD, id)).collect();
        commit(owner.as_ref(), &token, vec![filler(CHILD, 5, 2)], work, Vec::new(), running()).await
    });
    gate.reached().await;
    let pruned = b.prune_executions(CHILD, PruneOptions { keep_last: Some(1), ..PruneOptions::default() }).await;
    assert_eq!(pruned.unwrap().executions_deleted, 4);
    gate.open();
    ack.await.unwrap().unwrap();
    let instance = fixture.documents_of_type(CHILD, "instance").await.pop().unwrap();
    assert_eq!(instance["totals"], serde_json::json!({"executions": 1, "events": 2}), "{instance}");
    assert!(instance["pruning"].is_null() && instance["rollForward"].is_null(), "{instance}");
    assert_eq!(b.list_executions(CHILD).await.unwrap(), [5]);
    assert_eq!(b.get_system_metrics().await.unwrap().total_executions, 1);
}
