//! Delivery of the messages that a committed turn sends to other instances:
//!
//! - They are delivered once: after an outage, by another process, and after the first copy was consumed.
//! - A late message has one deliverer, however many processes find it.
//! - A message that cannot be delivered is kept, reported or delayed, and delays no other.

use crate::fixture::*;
use azure_data_cosmos::PartitionKey;
use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos::{Clock, CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule, WireRuleHandle};
use futures::future::join_all;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
};

const PARENT: &str = "parent";

const CHILDREN: [&str; 4] = ["child 1", "child 2", "child 3", "child 4"];

/// Applies `action` to the deliveries of `client` to the children's partitions.
fn block(fixture: &Fixture, client: &str, action: WireAction) -> WireRuleHandle {
    let to_children = |r: &duroxide_cosmos_emulator::WireRequest<'_>| CHILDREN.iter().any(|child| goes_to(r, child));
    // A delivery is a batch if it claims the child inline.
    let rule = WireRule::new(action).client(client).on(RequestKind::Create).on(RequestKind::Batch);
    let rule = rule.matching(to_children);
    fixture.account.wire().add(rule)
}

/// A configuration whose clock is ahead by so many milliseconds.
fn ahead(by: &Arc<AtomicU64>) -> CosmosDBProviderConfig {
    let by = by.clone();
    test_config().with_clock(Clock::from_fn(move || now() + by.load(Ordering::Relaxed)))
}

/// A configuration for which every message that another process has claimed or delayed is due.
fn an_hour_later() -> CosmosDBProviderConfig {
    ahead(&Arc::new(AtomicU64::new(3_600_000)))
}

/// Commits a turn with starts, by a process that crashes before it has delivered any of them.
async fn commit_undelivered(fixture: &Fixture, parent: &str, children: impl Iterator<Item = String>) {
    let dead = format!("dead {parent}");
    let provider = fixture.provider(&dead).await;
    let to_others = WireRule::new(WireAction::FailConnection).client(dead.clone());
    let to_others = to_others.on(RequestKind::Create).on(RequestKind::Batch);
    let own = parent.to_owned();
    let blocked = fixture.account.wire().add(to_others.matching(move |r| about_items(r) && !goes_to(r, &own)));
    let starts = children.map(|child| start_child(&child, Some(parent))).collect();
    begin(&provider, parent, Vec::new(), starts).await;
    blocked.wait_for_hits(1).await;
    fixture.cut(&dead, 0);
}

fn child(number: usize) -> String {
    format!("child {number}")
}

/// Counts the messages to children that clients with this prefix send.
fn count_deliveries(fixture: &Fixture, clients: &'static str) -> Arc<AtomicU64> {
    let counted = Arc::new(AtomicU64::new(0));
    let counting = counted.clone();
    fixture.account.wire().observe(move |request, _| {
        let delivers =
            request.kind == RequestKind::Create && request.partition_key.is_some_and(|k| k.contains("child"));
        if delivers && request.client.is_some_and(|client| client.starts_with(clients)) {
            counting.fetch_add(1, Ordering::Relaxed);
        }
    });
    counted
}

/// Runs two turns of the parent, each of which starts two children.
async fn two_turns(provider: &CosmosDBProvider) {
    let children =
        |from: usize| CHILDREN[from..from + 2].iter().map(|child| start_child(child, Some(PARENT))).collect();
    begin(provider, PARENT, Vec::new(), children(0)).await;
    provider.enqueue_for_orchestrator(external(PARENT, "go on"), None).await.unwrap();
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!(item.instance, PARENT);
    let events = vec![filler(PARENT, 1, 2)];
    commit(provider, &token, events, Vec::new(), children(2), running()).await.unwrap();
}

/// Runs all turns that can be fetched. Returns the number of starts of each child.
async fn run_all(provider: &CosmosDBProvider) -> BTreeMap<String, usize> {
    let mut starts = BTreeMap::new();
    while let Some((item, token, _)) = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap() {
        let started_here = item.messages.iter().filter(|m| matches!(m, WorkItem::StartOrchestration { .. })).count();
        *starts.entry(item.instance.clone()).or_default() += started_here;
        let events = if item.history.is_empty() { vec![started(&item.instance, 1)] } else { Vec::new() };
        commit(provider, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
    }
    starts
}

fn each_once(children: &[&str]) -> BTreeMap<String, usize> {
    children.iter().map(|child| ((*child).to_owned(), 1)).collect()
}

async fn intents(fixture: &Fixture) -> Vec<Value> {
    fixture.documents_of_type(PARENT, "intent").await
}

/// Waits until no intent is left.
async fn until_delivered(fixture: &Fixture) {
    let delivered = async {
        while !intents(fixture).await.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, delivered).await.expect("everything is delivered");
}

#[tokio::test]
async fn children_whose_starts_were_delayed_start_exactly_once() {
    let fixture = Fixture::new(2);
    let a = fixture.provider("a").await;
    let blocked = block(&fixture, "a", unavailable());
    two_turns(&a).await;
    blocked.wait_for_hits(4).await;
    assert_eq!(intents(&fixture).await.len(), 4);
    assert_eq!(run_all(&a).await, BTreeMap::new());
    blocked.remove();
    // The deliveries run in the background. The shutdown waits for them.
    a.shutdown().await;
    assert_eq!(intents(&fixture).await, Vec::<Value>::new());
    let b = fixture.provider("b").await;
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    assert_eq!(b.reconcile().await.unwrap(), 0);
}

#[tokio::test]
async fn another_process_takes_over_the_deliveries_of_a_crashed_one() {
    let fixture = Fixture::new(2);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", an_hour_later()).await);
    let blocked = block(&fixture, "a", WireAction::FailConnection);
    two_turns(&a).await;
    blocked.wait_for_hits(4).await;
    fixture.cut("a", 0);
    drop(a);
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(intents(&fixture).await, Vec::<Value>::new());
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    assert_eq!(b.reconcile().await.unwrap(), 0);
    assert_eq!(run_all(&b).await, BTreeMap::new());
}

#[tokio::test]
async fn two_processes_that_deliver_the_same_messages_start_each_child_once() {
    let fixture = Fixture::new(2);
    // With inline claims, the claims of the children would be released later.
    let a = fixture.provider_with("a", test_config().with_inline_claims(false)).await;
    let b = fixture.provider("b").await;
    // The deliveries of `a` arrive, but their answers are lost. `a` keeps retrying while `b` takes over and runs the
    // children.
    let deaf = block(&fixture, "a", WireAction::LoseAnswer);
    two_turns(&a).await;
    deaf.wait_for_hits(4).await;
    b.reconcile().await.unwrap();
    let mut starts = run_all(&b).await;
    deaf.remove();
    a.shutdown().await;
    b.reconcile().await.unwrap();
    for (child, more) in run_all(&b).await {
        *starts.entry(child).or_default() += more;
    }
    assert_eq!(starts, each_once(&CHILDREN));
    assert_eq!(intents(&fixture).await, Vec::<Value>::new());
}

#[tokio::test]
async fn a_second_copy_of_a_consumed_message_is_not_consumed() {
    let fixture = Fixture::new(1);
    // With inline claims, the children would be claimed for a moment.
    let a = fixture.provider_with("a", test_config().with_inline_claims(false)).await;
    let b = fixture.provider("b").await;
    // The deletion of the intents fails: they are delivered and still stored.
    let kept = WireRule::new(unavailable()).client("a").matching(|r| goes_to(r, PARENT));
    let kept = kept.on(RequestKind::Delete).on(RequestKind::Batch).skip(1);
    let kept = fixture.account.wire().add(kept);
    begin(&a, PARENT, Vec::new(), CHILDREN.iter().map(|child| start_child(child, Some(PARENT))).collect()).await;
    kept.wait_for_hits(1).await;
    let left = intents(&fixture).await;
    assert_eq!(left.len(), 4);
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    // `b` delivers them again and deletes them. Its polls may do so at the same time.
    b.reconcile().await.unwrap();
    until_delivered(&fixture).await;
    assert_eq!(run_all(&b).await, BTreeMap::new());
    // Once more, from a copy that an operator has restored.
    let container = fixture.container().await;
    for intent in &left {
        let id = intent["id"].as_str().unwrap();
        container.create_item(PartitionKey::from(PARENT), id, intent, None).await.unwrap();
    }
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(run_all(&b).await, BTreeMap::new());
}

#[tokio::test]
async fn a_message_that_is_refused_is_kept_with_the_reason_and_the_others_arrive() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    let refuse = WireAction::Refuse { status: 400, substatus: None, retry_after: None };
    let refused = WireRule::new(refuse).on(RequestKind::Create).matching(|r| goes_to(r, CHILDREN[1]));
    let refused = fixture.account.wire().add(refused);
    begin(&a, PARENT, Vec::new(), CHILDREN.iter().map(|child| start_child(child, Some(PARENT))).collect()).await;
    a.shutdown().await;
    let kept = intents(&fixture).await;
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0]["target"], CHILDREN[1]);
    assert!(kept[0]["poisoned"].as_str().unwrap().contains("400"), "{}", kept[0]["poisoned"]);
    let b = fixture.provider("b").await;
    assert_eq!(run_all(&b).await, each_once(&[CHILDREN[0], CHILDREN[2], CHILDREN[3]]));
    // No process retries the message by itself.
    let hits = refused.hits();
    assert_eq!(b.reconcile().await.unwrap(), 0);
    assert_eq!(refused.hits(), hits);
}

#[tokio::test]
async fn an_unknown_status_code_poisons_no_message() {
    for status in [405, 407] {
        let fixture = Fixture::new(1);
        let a = fixture.provider("a").await;
        let unknown = WireAction::Refuse { status, substatus: None, retry_after: None };
        let blocked = block(&fixture, "a", unknown);
        begin(&a, PARENT, Vec::new(), vec![start_child(CHILDREN[0], Some(PARENT))]).await;
        blocked.wait_for_hits(2).await;
        blocked.remove();
        a.shutdown().await;
        let b = fixture.provider_with("b", an_hour_later()).await;
        b.reconcile().await.unwrap();
        until_delivered(&fixture).await;
        assert_eq!(run_all(&b).await, each_once(&CHILDREN[..1]), "{status}");
    }
}

#[tokio::test]
async fn a_temporarily_missing_role_poisons_no_message() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", an_hour_later()).await);
    let denied = block(&fixture, "a", WireAction::Refuse { status: 403, substatus: None, retry_after: None });
    two_turns(&a).await;
    denied.wait_for_hits(4).await;
    a.shutdown().await;
    assert!(intents(&fixture).await.iter().all(|intent| intent.get("poisoned").is_none()));
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_find_the_same_late_messages_share_them() {
    const LATE: usize = 50;
    for processes in [2, 8] {
        let fixture = Fixture::new(1);
        commit_undelivered(&fixture, PARENT, (0..LATE).map(child)).await;
        assert_eq!(intents(&fixture).await.len(), LATE);
        let deliveries = count_deliveries(&fixture, "p");
        let names: Vec<String> = (0..processes).map(|number| format!("p{number}")).collect();
        let mut providers = Vec::new();
        for name in &names {
            providers.push(fixture.provider(name).await);
        }
        let sent = || -> u64 { names.iter().map(|name| fixture.account.stats_of(name).items().requests).sum() };
        let before = sent();
        let mut rounds = 0;
        while !intents(&fixture).await.is_empty() {
            let results = join_all(providers.iter().map(CosmosDBProvider::reconcile)).await;
            assert!(results.iter().all(Result::is_ok));
            rounds += 1;
        }
        assert!(rounds <= 2, "{rounds} rounds");
        assert_eq!(deliveries.load(Ordering::Relaxed), LATE as u64, "each is delivered once");
        // A claim, a delivery and a deletion per message. For each process one query per round, the claim that it
        // loses, and a read of the members.
        let requests = sent() - before;
        assert!(requests <= (3 * LATE + 4 * processes * rounds) as u64, "{processes} processes: {requests} requests");
        let children: Vec<String> = (0..LATE).map(child).collect();
        let names: Vec<&str> = children.iter().map(String::as_str).collect();
        assert_eq!(run_all(&providers[0]).await, each_once(&names));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_cannot_be_delivered_delay_no_others_and_are_retried_less_and_less_often() {
    const STUCK: usize = 150;
    let fixture = Fixture::new(1);
    commit_undelivered(&fixture, PARENT, (0..STUCK).map(child)).await;
    commit_undelivered(&fixture, "later", std::iter::once("arrives".to_owned())).await;
    let to_children = |r: &WireRequest<'_>| r.partition_key.is_some_and(|key| key.contains("child"));
    let rule = WireRule::new(unavailable()).on(RequestKind::Create).on(RequestKind::Batch).matching(to_children);
    let stuck = fixture.account.wire().add(rule);
    let deliveries = count_deliveries(&fixture, "b");
    let by = Arc::new(AtomicU64::new(0));
    let b = fixture.provider_with("b", ahead(&by)).await;
    assert_eq!(b.reconcile().await.unwrap(), 100, "the oldest");
    b.reconcile().await.unwrap();
    assert_eq!(fixture.documents_of_type("arrives", "message").await.len(), 1);
    let left = intents(&fixture).await;
    assert_eq!(left.len(), STUCK);
    // The process that created them may be delivering some.
    let held = |intent: &Value| intent["due"].as_u64() >= intent["createdAt"].as_u64().map(|at| at + 9_000);
    let tried =
        |intent: &Value| (held(intent) || intent["retries"].as_u64() >= Some(1)) && intent["poisoned"].is_null();
    assert!(left.iter().all(tried), "not tried: {:?}", left.iter().find(|intent| !tried(intent)));
    // Each of them was tried for a moment, with the repetitions of the SDK.
    let attempts: u64 = left.iter().filter_map(|intent| intent["retries"].as_u64()).sum();
    let tries = deliveries.load(Ordering::Relaxed);
    assert!(tries <= 32 * attempts, "{tries} requests for {attempts} attempts");
    stuck.remove();
    for round in 1..=3 {
        by.store(round * 120_000, Ordering::Relaxed);
        b.reconcile().await.unwrap();
    }
    assert_eq!(intents(&fixture).await, Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_message_whose_deliverer_crashes_is_delivered_by_another_process_when_the_claim_expires() {
    for delivered in [false, true] {
        let fixture = Fixture::new(1);
        commit_undelivered(&fixture, PARENT, (0..4).map(child)).await;
        let b = fixture.provider("b").await;
        // The query, then a claim, then its message. The process crashes at one of the last two.
        let cut = fixture.cut_after("b", 1 + u64::from(delivered));
        assert!(matches!(until_cut(b.reconcile(), &cut).await, Ended::Cut));
        drop(b);
        let by = Arc::new(AtomicU64::new(0));
        let c = fixture.provider_with("c", ahead(&by)).await;
        let taken = intents(&fixture).await.iter().filter(|intent| intent["due"].as_u64() > Some(now())).count();
        assert!((1..=2).contains(&taken), "{taken}");
        assert_eq!(c.reconcile().await.unwrap(), 4 - taken, "what is taken is left alone");
        by.store(8_000, Ordering::Relaxed);
        assert_eq!(c.reconcile().await.unwrap(), 0);
        by.store(11_000, Ordering::Relaxed);
        assert_eq!(c.reconcile().await.unwrap(), taken);
        assert_eq!(intents(&fixture).await, Vec::<Value>::new());
        assert_eq!(run_all(&c).await, each_once(&["child 0", "child 1", "child 2", "child 3"]));
    }
}
