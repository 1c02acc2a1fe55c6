//! What a committed turn owes to other instances is delivered once: after an outage, by another process, and when the first
//! copy has long been consumed. What is late has one deliverer, however many processes find it. What can't be delivered is kept,
//! reported or put off, and the others don't wait for it.

#[path = "common/scene.rs"]
mod scene;

use azure_data_cosmos::PartitionKey;
use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos::{Clock, CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule, WireRuleHandle};
use futures::future::join_all;
use scene::*;
use serde_json::Value;
use std::{
    collections::BTreeMap,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::{SystemTime, UNIX_EPOCH},
};

const PARENT: &str = "parent";
const CHILDREN: [&str; 4] = ["child 1", "child 2", "child 3", "child 4"];

/// Keeps what `client` delivers from the partitions of the children.
fn block(scene: &Scene, client: &str, action: WireAction) -> WireRuleHandle {
    let to_children = |r: &duroxide_cosmos_emulator::WireRequest<'_>| CHILDREN.iter().any(|child| goes_to(r, child));
    // A batch where the child is claimed with its start.
    let rule = WireRule::new(action).client(client).on(RequestKind::Create).on(RequestKind::Batch);
    let rule = rule.matching(to_children);
    scene.account.wire().add(rule)
}

/// A process whose clock is ahead by so many milliseconds.
fn ahead(by: &Arc<AtomicU64>) -> CosmosDBProviderConfig {
    let by = by.clone();
    quiet().with_clock(Clock::from_fn(move || now() + by.load(Ordering::Relaxed)))
}

/// One for which everything that others have taken over, or put off, is due.
fn an_hour_later() -> CosmosDBProviderConfig {
    ahead(&Arc::new(AtomicU64::new(3_600_000)))
}

/// The turn of a process that dies before it has delivered any of its starts.
async fn owe(scene: &Scene, parent: &str, children: impl Iterator<Item = String>) {
    let dead = format!("dead {parent}");
    let provider = scene.provider(&dead).await;
    let to_others = WireRule::new(WireAction::FailConnection).client(dead.clone());
    let to_others = to_others.on(RequestKind::Create).on(RequestKind::Batch);
    let own = parent.to_owned();
    let blocked = scene.account.wire().add(to_others.matching(move |r| about_items(r) && !goes_to(r, &own)));
    let starts = children.map(|child| start_child(&child, Some(parent))).collect();
    begin(&provider, parent, Vec::new(), starts).await;
    blocked.wait_for_hits(1).await;
    scene.cut(&dead, 0);
}

fn child(number: usize) -> String {
    format!("child {number}")
}

/// How often clients whose names begin like this have sent a message to a child.
fn count_deliveries(scene: &Scene, clients: &'static str) -> Arc<AtomicU64> {
    let counted = Arc::new(AtomicU64::new(0));
    let counting = counted.clone();
    scene.account.wire().observe(move |request, _| {
        let delivers =
            request.kind == RequestKind::Create && request.partition_key.is_some_and(|k| k.contains("child"));
        if delivers && request.client.is_some_and(|client| client.starts_with(clients)) {
            counting.fetch_add(1, Ordering::Relaxed);
        }
    });
    counted
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

fn unavailable() -> WireAction {
    WireAction::Refuse { status: 503, substatus: None, retry_after: None }
}

/// Two turns of the parent, each of which starts two children.
async fn two_turns(provider: &CosmosDBProvider) {
    let children =
        |from: usize| CHILDREN[from..from + 2].iter().map(|child| start_child(child, Some(PARENT))).collect();
    begin(provider, PARENT, Vec::new(), children(0)).await;
    provider.enqueue_for_orchestrator(external(PARENT, "go on"), None).await.unwrap();
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!(item.instance, PARENT);
    let events = vec![note(PARENT, 1, 2)];
    commit(provider, &token, events, Vec::new(), children(2), running()).await.unwrap();
}

/// Runs every turn that there is; the starts that each child had.
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

async fn intents(scene: &Scene) -> Vec<Value> {
    scene.of_kind(PARENT, "intent").await
}

/// Waits until nothing is owed any more.
async fn until_delivered(scene: &Scene) {
    let delivered = async {
        while !intents(scene).await.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, delivered).await.expect("everything is delivered");
}

#[tokio::test]
async fn children_whose_starts_were_held_up_start_exactly_once_when_they_come_through() {
    let scene = Scene::new(2);
    let a = scene.provider("a").await;
    let blocked = block(&scene, "a", unavailable());
    two_turns(&a).await;
    blocked.wait_for_hits(4).await;
    assert_eq!(intents(&scene).await.len(), 4);
    assert_eq!(run_all(&a).await, BTreeMap::new());
    blocked.remove();
    // The deliveries are under way in the background, and are waited for.
    a.shutdown().await;
    assert_eq!(intents(&scene).await, Vec::<Value>::new());
    let b = scene.provider("b").await;
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    assert_eq!(b.reconcile().await.unwrap(), 0);
}

#[tokio::test]
async fn another_process_takes_the_deliveries_of_a_dead_one_over() {
    let scene = Scene::new(2);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", an_hour_later()).await);
    let blocked = block(&scene, "a", WireAction::FailConnection);
    two_turns(&a).await;
    blocked.wait_for_hits(4).await;
    scene.cut("a", 0);
    drop(a);
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(intents(&scene).await, Vec::<Value>::new());
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    assert_eq!(b.reconcile().await.unwrap(), 0);
    assert_eq!(run_all(&b).await, BTreeMap::new());
}

#[tokio::test]
async fn two_processes_that_deliver_the_same_messages_start_each_child_once() {
    let scene = Scene::new(2);
    // Where it claims them, too, they are given back when it knows.
    let a = scene.provider_with("a", quiet().with_inline_claims(false)).await;
    let b = scene.provider("b").await;
    // What `a` delivers arrives, but it never hears of it, and keeps trying while `b` takes over and runs the children.
    let deaf = block(&scene, "a", WireAction::LoseAnswer);
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
    assert_eq!(intents(&scene).await, Vec::<Value>::new());
}

#[tokio::test]
async fn a_message_that_comes_again_after_its_first_copy_was_consumed_is_not_consumed_again() {
    let scene = Scene::new(1);
    // Nobody comes back for the children: they would be claimed for a moment.
    let a = scene.provider_with("a", quiet().with_inline_claims(false)).await;
    let b = scene.provider("b").await;
    // The deletion of the intents does not come through: they are delivered, and still there.
    let kept = WireRule::new(unavailable()).client("a").matching(|r| goes_to(r, PARENT));
    let kept = kept.on(RequestKind::Delete).on(RequestKind::Batch).skip(1);
    let kept = scene.account.wire().add(kept);
    begin(&a, PARENT, Vec::new(), CHILDREN.iter().map(|child| start_child(child, Some(PARENT))).collect()).await;
    kept.wait_for_hits(1).await;
    let left = intents(&scene).await;
    assert_eq!(left.len(), 4);
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
    // `b` delivers them again, and deletes them; its polls may be at it.
    b.reconcile().await.unwrap();
    until_delivered(&scene).await;
    assert_eq!(run_all(&b).await, BTreeMap::new());
    // Once more, from a copy that somebody restored.
    let container = scene.container().await;
    for intent in &left {
        let id = intent["id"].as_str().unwrap();
        container.create_item(PartitionKey::from(PARENT), id, intent, None).await.unwrap();
    }
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(run_all(&b).await, BTreeMap::new());
}

#[tokio::test]
async fn a_message_that_its_target_refuses_is_kept_with_the_reason_and_the_others_arrive() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    let refuse = WireAction::Refuse { status: 400, substatus: None, retry_after: None };
    let refused = WireRule::new(refuse).on(RequestKind::Create).matching(|r| goes_to(r, CHILDREN[1]));
    let refused = scene.account.wire().add(refused);
    begin(&a, PARENT, Vec::new(), CHILDREN.iter().map(|child| start_child(child, Some(PARENT))).collect()).await;
    a.shutdown().await;
    let kept = intents(&scene).await;
    assert_eq!(kept.len(), 1);
    assert_eq!(kept[0]["target"], CHILDREN[1]);
    assert!(kept[0]["poisoned"].as_str().unwrap().contains("400"), "{}", kept[0]["poisoned"]);
    let b = scene.provider("b").await;
    assert_eq!(run_all(&b).await, each_once(&[CHILDREN[0], CHILDREN[2], CHILDREN[3]]));
    // Nobody tries it again by himself.
    let hits = refused.hits();
    assert_eq!(b.reconcile().await.unwrap(), 0);
    assert_eq!(refused.hits(), hits);
}

#[tokio::test]
async fn an_answer_that_nobody_knows_poisons_no_message() {
    for status in [405, 407] {
        let scene = Scene::new(1);
        let a = scene.provider("a").await;
        let unknown = WireAction::Refuse { status, substatus: None, retry_after: None };
        let blocked = block(&scene, "a", unknown);
        begin(&a, PARENT, Vec::new(), vec![start_child(CHILDREN[0], Some(PARENT))]).await;
        blocked.wait_for_hits(2).await;
        blocked.remove();
        a.shutdown().await;
        let b = scene.provider_with("b", an_hour_later()).await;
        b.reconcile().await.unwrap();
        until_delivered(&scene).await;
        assert_eq!(run_all(&b).await, each_once(&CHILDREN[..1]), "{status}");
    }
}

#[tokio::test]
async fn a_role_that_is_missing_for_a_while_poisons_no_message() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", an_hour_later()).await);
    let denied = block(&scene, "a", WireAction::Refuse { status: 403, substatus: None, retry_after: None });
    two_turns(&a).await;
    denied.wait_for_hits(4).await;
    a.shutdown().await;
    assert!(intents(&scene).await.iter().all(|intent| intent.get("poisoned").is_none()));
    assert_eq!(b.reconcile().await.unwrap(), 4);
    assert_eq!(run_all(&b).await, each_once(&CHILDREN));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_find_the_same_late_messages_share_them() {
    const LATE: usize = 50;
    for processes in [2, 8] {
        let scene = Scene::new(1);
        owe(&scene, PARENT, (0..LATE).map(child)).await;
        assert_eq!(intents(&scene).await.len(), LATE);
        let deliveries = count_deliveries(&scene, "p");
        let names: Vec<String> = (0..processes).map(|number| format!("p{number}")).collect();
        let mut providers = Vec::new();
        for name in &names {
            providers.push(scene.provider(name).await);
        }
        let sent = || -> u64 { names.iter().map(|name| scene.account.stats_of(name).items().requests).sum() };
        let before = sent();
        let mut rounds = 0;
        while !intents(&scene).await.is_empty() {
            let looks = join_all(providers.iter().map(CosmosDBProvider::reconcile)).await;
            assert!(looks.iter().all(Result::is_ok));
            rounds += 1;
        }
        assert!(rounds <= 2, "{rounds} rounds");
        assert_eq!(deliveries.load(Ordering::Relaxed), LATE as u64, "each is delivered once");
        // A claim, a delivery, a deletion; for each process a query a round, the claim that it loses, and a look at who is there.
        let requests = sent() - before;
        assert!(requests <= (3 * LATE + 4 * processes * rounds) as u64, "{processes} processes: {requests} requests");
        let children: Vec<String> = (0..LATE).map(child).collect();
        let names: Vec<&str> = children.iter().map(String::as_str).collect();
        assert_eq!(run_all(&providers[0]).await, each_once(&names));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_can_not_be_delivered_keep_no_other_from_arriving_and_are_tried_less_and_less_often() {
    const STUCK: usize = 150;
    let scene = Scene::new(1);
    owe(&scene, PARENT, (0..STUCK).map(child)).await;
    owe(&scene, "later", std::iter::once("arrives".to_owned())).await;
    let to_children = |r: &WireRequest<'_>| r.partition_key.is_some_and(|key| key.contains("child"));
    let rule = WireRule::new(unavailable()).on(RequestKind::Create).on(RequestKind::Batch).matching(to_children);
    let stuck = scene.account.wire().add(rule);
    let deliveries = count_deliveries(&scene, "b");
    let by = Arc::new(AtomicU64::new(0));
    let b = scene.provider_with("b", ahead(&by)).await;
    assert_eq!(b.reconcile().await.unwrap(), 100, "the oldest");
    b.reconcile().await.unwrap();
    assert_eq!(scene.of_kind("arrives", "message").await.len(), 1);
    let left = intents(&scene).await;
    assert_eq!(left.len(), STUCK);
    // The process that made them may have some in its hands.
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
    assert_eq!(intents(&scene).await, Vec::<Value>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_message_whose_deliverer_dies_is_delivered_by_another_when_its_time_is_up() {
    for delivered in [false, true] {
        let scene = Scene::new(1);
        owe(&scene, PARENT, (0..4).map(child)).await;
        let b = scene.provider("b").await;
        // The query; then a claim, and its message. It dies with one of the two.
        let cut = scene.cut_after("b", 1 + u64::from(delivered));
        assert!(matches!(until_cut(b.reconcile(), &cut).await, Ended::Cut));
        drop(b);
        let by = Arc::new(AtomicU64::new(0));
        let c = scene.provider_with("c", ahead(&by)).await;
        let taken = intents(&scene).await.iter().filter(|intent| intent["due"].as_u64() > Some(now())).count();
        assert!((1..=2).contains(&taken), "{taken}");
        assert_eq!(c.reconcile().await.unwrap(), 4 - taken, "what is taken is left alone");
        by.store(8_000, Ordering::Relaxed);
        assert_eq!(c.reconcile().await.unwrap(), 0);
        by.store(11_000, Ordering::Relaxed);
        assert_eq!(c.reconcile().await.unwrap(), taken);
        assert_eq!(intents(&scene).await, Vec::<Value>::new());
        assert_eq!(run_all(&c).await, each_once(&["child 0", "child 1", "child 2", "child 3"]));
    }
}
