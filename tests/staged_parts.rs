//! The parts of a turn that does not fit one batch: dead ones are swept under the fence, live ones are never lost in silence.

#[path = "common/turns.rs"]
mod turns;

use duroxide::providers::Provider;
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest};
use serde_json::Value;
use std::sync::Arc;
use turns::{drain_activities, fetch, fetch_now, raised, start, within, Delta, Site, LONG, SHORT};

const INSTANCE: &str = "order";
const ACTIVITIES: u64 = 400;

/// Whether a request commits a turn whose parts are staged.
fn commits_parts(request: &WireRequest<'_>) -> bool {
    request.json().is_some_and(|body| !body[0]["resourceBody"]["rollForward"].is_null())
}

/// Whether a request applies a part of a committed turn: it deletes the part's document.
fn applies_a_part(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let deletes =
        |op: &Value| op["operationType"] == "Delete" && op["id"].as_str().is_some_and(|id| id.starts_with("s:"));
    body.as_array().is_some_and(|operations| operations.iter().any(deletes))
}

/// A turn of "dead" that was staged and never committed. Its lock is a short one.
async fn dead_turn(site: &Site) {
    let dead = Arc::new(site.provider("dead").await);
    dead.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
    let (_, token) = fetch(&dead, SHORT).await;
    let gate = Gate::new();
    let rule = site.rule("dead", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch).matching(commits_parts);
    site.account.wire().add(rule);
    let owner = dead.clone();
    let ack = tokio::spawn(async move { Delta::start(INSTANCE, ACTIVITIES).ack(&owner, &token).await });
    within("the commit", gate.reached()).await;
    // The process dies; its commit never arrives.
    ack.abort();
    assert!(site.documents_of(INSTANCE, "staged").await.len() > 3);
}

async fn assert_whole(site: &Site, provider: &CosmosDBProvider) {
    let history = provider.read(INSTANCE).await.expect("a history");
    assert_eq!(history.len() as u64, 1 + ACTIVITIES);
    assert_eq!(drain_activities(provider).await, (2..2 + ACTIVITIES).collect::<Vec<_>>());
    assert!(site.documents_of(INSTANCE, "staged").await.is_empty());
    let instance = site.instance(INSTANCE).await;
    assert!(instance["rollForward"].is_null() && instance["staging"].is_null(), "{instance}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_whose_first_turn_was_only_staged_is_seen_and_not_removed_under_it() {
    let site = Site::new().await;
    dead_turn(&site).await;
    let operator = site.provider("operator").await;
    assert!(operator.queued_start(INSTANCE).await.expect("an answer").is_some());
    let error = operator.drop_start(INSTANCE).await.expect_err("its parts are to be swept first");
    assert!(error.is_retryable(), "{error}");
    assert!(operator.queued_start(INSTANCE).await.expect("an answer").is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_claim_sweeps_what_a_dead_turn_staged() {
    let site = Site::new().await;
    dead_turn(&site).await;
    let a = site.provider("a").await;
    let (_, token) = fetch(&a, LONG).await;
    assert!(site.documents_of(INSTANCE, "staged").await.is_empty());
    Delta::start(INSTANCE, ACTIVITIES).ack(&a, &token).await.expect("the turn");
    assert_whole(&site, &a).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_stalls_past_its_lock_does_not_sweep_what_the_new_owner_stages() {
    let site = Site::new().await;
    dead_turn(&site).await;
    let (a, b) = (site.provider("a").await, Arc::new(site.provider("b").await));
    // "a" claims, and everything that it asks for after that stalls.
    let stall = Gate::new();
    for kind in [RequestKind::Query, RequestKind::Batch] {
        let rule = site.rule("a", WireAction::HoldBefore(stall.clone())).on(kind);
        site.account.wire().add(rule.matching(|request| turns::concerns(request, INSTANCE)));
    }
    let stalled = tokio::spawn(async move { a.fetch_orchestration_item(SHORT, SHORT, None).await });
    within("the stalled claim", stall.reached()).await;
    // "b" takes over and stages its own turn; its commit is on its way.
    let (_, token) = fetch(&b, LONG).await;
    let commit = Gate::new();
    let rule = site.rule("b", WireAction::HoldBefore(commit.clone())).on(RequestKind::Batch).matching(commits_parts);
    site.account.wire().add(rule.times(1));
    let owner = b.clone();
    let ack = tokio::spawn(async move { Delta::start(INSTANCE, ACTIVITIES).ack(&owner, &token).await });
    within("the commit", commit.reached()).await;
    let parts = site.documents_of(INSTANCE, "staged").await.len();
    stall.open();
    // Whatever the stalled claim comes to, it is through before the commit arrives.
    drop(within("the stalled claim's end", stalled).await);
    assert_eq!(site.documents_of(INSTANCE, "staged").await.len(), parts);
    commit.open();
    within("the ack", ack).await.expect("no panic").expect("the turn");
    assert_whole(&site, &b).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_is_missing_is_not_taken_for_one_that_was_applied() {
    let site = Site::new().await;
    let a = site.provider("a").await;
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
    let (_, token) = fetch(&a, LONG).await;
    // Its second part is not applied by the process that committed it, and somebody deletes it by hand.
    let gate = Gate::new();
    let rule = site.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch).matching(applies_a_part);
    site.account.wire().add(rule.skip(1));
    let ack = tokio::spawn(async move { Delta::start(INSTANCE, ACTIVITIES).ack(&a, &token).await });
    within("the second part", gate.reached()).await;
    ack.abort();
    let left = site.documents_of(INSTANCE, "staged").await;
    let lost = left[0]["id"].as_str().expect("an id").to_owned();
    site.delete(INSTANCE, &lost).await;

    let b = site.provider("b").await;
    let error = b.read(INSTANCE).await.expect_err("half a turn");
    assert!(error.message.contains(&lost) && error.message.contains("missing"), "{error:?}");
    b.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
    let fetched = b.fetch_orchestration_item(LONG, std::time::Duration::ZERO, None).await;
    assert!(!matches!(fetched, Ok(Some(_))), "a turn on half a history");
    assert_eq!(site.documents_of(INSTANCE, "staged").await.len(), left.len() - 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_that_roll_the_same_turn_forward_apply_each_part_once() {
    let site = Site::new().await;
    let a = site.provider("a").await;
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
    let (_, token) = fetch(&a, LONG).await;
    let gate = Gate::new();
    let rule = site.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch).matching(applies_a_part);
    site.account.wire().add(rule);
    let ack = tokio::spawn(async move { Delta::start(INSTANCE, ACTIVITIES).ack(&a, &token).await });
    within("the first part", gate.reached()).await;
    let mut others = Vec::new();
    for name in ["b", "c", "d"] {
        let provider = site.provider(name).await;
        others.push(tokio::spawn(async move { provider.read(INSTANCE).await.expect("a history").len() }));
    }
    for other in others {
        assert_eq!(within("a reader", other).await.expect("no panic") as u64, 1 + ACTIVITIES);
    }
    gate.open();
    within("the ack", ack).await.expect("no panic").expect("the turn");
    let e = site.provider("e").await;
    assert!(fetch_now(&e, LONG).await.is_none());
    assert_whole(&site, &e).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_staged_for_a_turn_that_the_service_refused_goes_though_no_message_comes() {
    let site = Site::new().await;
    let a = site.provider("a").await;
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
    let (_, token) = fetch(&a, LONG).await;
    let refused = WireAction::RefuseBatchOperation { index: 0, status: 413, substatus: None };
    let rule = site.rule("a", refused).on(RequestKind::Batch).matching(commits_parts);
    site.account.wire().add(rule.times(1));
    let error = Delta::start(INSTANCE, ACTIVITIES).ack(&a, &token).await.expect_err("what can't be stored");
    assert!(!error.is_retryable(), "{error:?}");
    assert!(!site.documents_of(INSTANCE, "staged").await.is_empty());
    // The runtime records the failure with the same token, and the instance has ended.
    Delta::failure(INSTANCE, 1).ack(&a, &token).await.expect("the failure");
    let b = site.provider("b").await;
    let swept = async {
        while !site.documents_of(INSTANCE, "staged").await.is_empty() {
            assert!(b.fetch_orchestration_item(LONG, SHORT, None).await.expect("a fetch").is_none());
        }
    };
    within("the sweep", swept).await;
    let instance = site.instance(INSTANCE).await;
    assert!(instance["staging"].is_null() && instance["due"].is_null() && instance["lock"].is_null(), "{instance}");
}
