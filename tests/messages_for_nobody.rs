//! Messages for an instance that nobody has started: after one look they cost nothing, and when their start comes they are
//! there, in order and once, whatever happened in between.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, ProviderAdmin, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use scene::*;
use serde_json::Value;
use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

const NOBODY: &str = "nobody yet";
/// More than two batches take.
const MANY: usize = 250;

/// A process whose clock is an hour ahead: every lock has expired for it, and everything that is put off has come.
fn an_hour_later() -> CosmosDBProviderConfig {
    quiet().with_clock(off_by(3_600_000))
}

async fn send(provider: &CosmosDBProvider, numbers: std::ops::Range<usize>) {
    for number in numbers {
        provider.enqueue_for_orchestrator(external(NOBODY, &number.to_string()), None).await.unwrap();
    }
}

/// A look at everything that there is, which finds no turn.
async fn look(provider: &CosmosDBProvider) {
    let fetched = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(fetched.is_none(), "there is nothing to run: {fetched:?}");
}

/// The numbers of the events among some messages, in order.
fn numbers(messages: &[WorkItem]) -> Vec<usize> {
    let number = |message: &WorkItem| match message {
        WorkItem::ExternalRaised { data, .. } => data.parse().ok(),
        _ => None,
    };
    messages.iter().filter_map(number).collect()
}

fn starts(messages: &[WorkItem]) -> usize {
    messages.iter().filter(|m| matches!(m, WorkItem::StartOrchestration { .. })).count()
}

/// The instance starts once and has these events in order, all of them parked or none: a turn on the start that this process
/// has put into the queue itself leaves what is visible to the next one.
async fn assert_starts_with(provider: &CosmosDBProvider, events: std::ops::Range<usize>, most_attempts: u32) {
    let (mut turns, mut started_here, mut seen) = (0, 0, Vec::new());
    while started_here == 0 || seen.len() < events.len() {
        let (item, token, attempts) = next_turn(provider, LONG).await;
        assert_eq!(item.instance, NOBODY);
        assert!(attempts <= most_attempts, "{attempts}");
        started_here += starts(&item.messages);
        seen.extend(numbers(&item.messages));
        turns += 1;
        let event = if turns == 1 { started(NOBODY, 1) } else { note(NOBODY, 1, turns) };
        commit(provider, &token, vec![event], Vec::new(), Vec::new(), running()).await.unwrap();
    }
    assert_eq!((started_here, seen), (1, events.collect()));
    assert!(turns <= 2, "{turns} turns");
    look(provider).await;
}

async fn shell(scene: &Scene) -> Option<Value> {
    scene.of_kind(NOBODY, "instance").await.pop()
}

async fn assert_parked(scene: &Scene, messages: usize) {
    let shell = shell(scene).await.expect("a mark in the partition");
    assert!(shell["deferred"] == true && shell["lock"].is_null() && shell["claims"].is_null(), "{shell}");
    let waiting = scene.of_kind(NOBODY, "message").await;
    assert_eq!(waiting.len(), messages);
    assert!(waiting.iter().all(|message| message["due"] == 9_007_199_254_740_991_u64), "{}", waiting[0]);
}

async fn assert_nothing_is_parked(scene: &Scene) {
    let instance = shell(scene).await.expect("the instance");
    assert!(
        instance["deferred"].is_null() && instance["due"].is_null() && instance["status"] == "Running",
        "{instance}"
    );
    assert!(scene.of_kind(NOBODY, "message").await.is_empty());
}

/// Whether a request parks messages.
fn parks(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let due = |operation: &Value| operation["resourceBody"]["due"] == 9_007_199_254_740_991_u64;
    body.as_array().is_some_and(|operations| operations.iter().any(due))
}

/// How many requests have gone to the partition.
fn count_requests(scene: &Scene) -> Arc<AtomicU64> {
    let counted = Arc::new(AtomicU64::new(0));
    let counting = counted.clone();
    scene.account.wire().observe(move |request, _| {
        if goes_to(request, NOBODY) {
            counting.fetch_add(1, Ordering::Relaxed);
        }
    });
    counted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_for_nobody_is_looked_at_once_and_costs_nothing_from_then_on() {
    let scene = Scene::new(2);
    let fast = |config: CosmosDBProviderConfig| {
        config.with_wakeup_interval(Duration::from_millis(5)).with_poll_interval(Duration::from_millis(20))
    };
    let (a, b) = (scene.provider_with("a", fast(quiet())).await, scene.provider_with("b", fast(an_hour_later())).await);
    let requests = count_requests(&scene);
    send(&a, 0..1).await;
    look(&a).await;
    let at_first = requests.load(Ordering::Relaxed);
    // The message; then a look at the document, the claim, two queries, the batch that parks.
    assert!(at_first <= 6, "{at_first} requests");
    assert_parked(&scene, 1).await;
    let looked = scene.account.stats_of("b").of(RequestKind::Query).requests;
    let before = requests.load(Ordering::Relaxed);
    for _ in 0..5 {
        look(&a).await;
        look(&b).await;
        for provider in [&a, &b] {
            let fetched = provider.fetch_orchestration_item(LONG, Duration::from_millis(100), None).await.unwrap();
            assert!(fetched.is_none());
        }
    }
    assert_eq!(requests.load(Ordering::Relaxed), before, "nobody asks for it");
    assert!(scene.account.stats_of("b").of(RequestKind::Query).requests > looked + 5, "they did poll");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_comes_later_has_every_message_before_it_in_order_and_once() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    send(&a, 0..3).await;
    look(&b).await;
    assert_parked(&scene, 3).await;
    // What comes for a parked name is parked with the next look, a message of a queue too.
    send(&a, 3..5).await;
    let queued = WorkItem::QueueMessage { instance: NOBODY.to_owned(), name: "q".to_owned(), data: "d".to_owned() };
    a.enqueue_for_orchestrator(queued.clone(), None).await.unwrap();
    look(&a).await;
    assert_parked(&scene, 6).await;
    // These are visible when the start comes.
    send(&b, 5..7).await;
    a.enqueue_for_orchestrator(start(NOBODY), None).await.unwrap();
    let (item, token, attempts) = next_turn(&a, LONG).await;
    assert_eq!((item.messages.len(), starts(&item.messages), attempts), (9, 1, 1));
    assert_eq!(numbers(&item.messages), (0..7).collect::<Vec<_>>());
    assert_eq!(item.messages[5], queued);
    commit(&a, &token, vec![started(NOBODY, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    look(&a).await;
    look(&b).await;
    assert_nothing_is_parked(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_is_given_back_or_lost_has_its_parked_messages_again() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", an_hour_later()).await);
    send(&a, 0..3).await;
    look(&a).await;
    a.enqueue_for_orchestrator(start(NOBODY), None).await.unwrap();
    for attempt in 1..=2 {
        let (item, token, attempts) = next_turn(&a, LONG).await;
        assert_eq!((numbers(&item.messages), attempts), (vec![0, 1, 2], attempt));
        a.renew_orchestration_item_lock(&token, LONG).await.unwrap();
        a.abandon_orchestration_item(&token, None, false).await.unwrap();
    }
    let (_, token, attempts) = next_turn(&a, LONG).await;
    assert_eq!(attempts, 3);
    a.abandon_orchestration_item(&token, Some(Duration::from_millis(50)), true).await.unwrap();
    let (_, _, attempts) = next_turn(&a, LONG).await;
    assert_eq!(attempts, 3);
    // Its process dies.
    scene.cut("a", 0);
    let (item, token, attempts) = next_turn(&b, LONG).await;
    assert_eq!((numbers(&item.messages), starts(&item.messages), attempts), (vec![0, 1, 2], 1, 4));
    commit(&b, &token, vec![started(NOBODY, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    look(&b).await;
    assert_nothing_is_parked(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_wait_for_a_start_that_is_put_off_those_of_a_queue_too() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", an_hour_later()).await);
    let queued = WorkItem::QueueMessage { instance: NOBODY.to_owned(), name: "q".to_owned(), data: "d".to_owned() };
    a.enqueue_for_orchestrator(queued.clone(), None).await.unwrap();
    a.enqueue_for_orchestrator(start(NOBODY), Some(Duration::from_secs(600))).await.unwrap();
    look(&a).await;
    let (item, _, attempts) = next_turn(&b, LONG).await;
    assert_eq!((item.messages, attempts), (vec![queued, start(NOBODY)], 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_names_that_nobody_has_do_not_hide_a_start() {
    const NAMES: usize = 700;
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    for name in 0..NAMES {
        a.enqueue_for_orchestrator(external(&format!("nobody {name}"), "news"), None).await.unwrap();
    }
    look(&a).await;
    let documents = scene.documents().await;
    assert_eq!(documents.iter().filter(|document| document["deferred"] == true).count(), NAMES);
    a.enqueue_for_orchestrator(start("somebody"), None).await.unwrap();
    let before = scene.account.stats_of("b").items().requests;
    let (item, ..) = b.fetch_orchestration_item(LONG, NOW, None).await.unwrap().expect("the start at the first look");
    assert_eq!(item.instance, "somebody");
    let requests = scene.account.stats_of("b").items().requests - before;
    assert!(requests <= 4, "{requests} requests");
}

/// "a" parks, and dies before or after any of its requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_parks_may_die_at_any_request_and_the_start_has_every_message() {
    for carried_out in [false, true] {
        for passing in 0.. {
            let scene = Scene::new(1);
            let (maker, a) = (scene.provider("maker").await, scene.provider("a").await);
            send(&maker, 0..MANY).await;
            let cut = if carried_out { scene.cut_after("a", passing) } else { scene.cut("a", passing) };
            let ended = until_cut(a.fetch_orchestration_item(LONG, NOW, None), &cut).await;
            if let Ended::Returned(fetched) = ended {
                assert!(passing >= 6, "a poll, a look, a claim, a query and three batches are cut: {passing}");
                assert!(fetched.unwrap().is_none());
                assert_parked(&scene, MANY).await;
                break;
            }
            drop(a);
            let b = scene.provider_with("b", an_hour_later()).await;
            // With and without a look before the start.
            if passing % 2 == 0 {
                look(&b).await;
                assert_parked(&scene, MANY).await;
            }
            b.enqueue_for_orchestrator(start(NOBODY), None).await.unwrap();
            // The claim of a process that died counts, as ever.
            assert_starts_with(&b, 0..MANY, 2).await;
            assert_nothing_is_parked(&scene).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_parks_and_whose_answer_is_lost_is_known_to_be_done() {
    for lost in 0..3 {
        let scene = Scene::new(1);
        let a = scene.provider("a").await;
        send(&a, 0..MANY).await;
        let rule = WireRule::new(WireAction::LoseAnswer).on(RequestKind::Batch).matching(parks).skip(lost).times(1);
        let rule = scene.account.wire().add(rule);
        let before = scene.account.stats_of("a").of(RequestKind::Batch).requests;
        look(&a).await;
        assert_eq!(rule.hits(), 1);
        assert_parked(&scene, MANY).await;
        let batches = scene.account.stats_of("a").of(RequestKind::Batch).requests - before;
        // Three that park, and the SDK's own repetition.
        assert_eq!(batches, 4);
        a.enqueue_for_orchestrator(start(NOBODY), None).await.unwrap();
        assert_starts_with(&a, 0..MANY, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_processes_that_look_at_once_park_every_message_once() {
    let scene = Scene::new(1);
    let maker = scene.provider("maker").await;
    let mut providers = Vec::new();
    for name in ["a", "b", "c"] {
        providers.push(Arc::new(scene.provider(name).await));
    }
    send(&maker, 0..MANY).await;
    let looks = providers.iter().cloned().map(|provider| {
        tokio::spawn(async move {
            // Who finds it locked looks again while it waits.
            let fetched = provider.fetch_orchestration_item(LONG, Duration::from_secs(3), None).await.unwrap();
            assert!(fetched.is_none());
        })
    });
    for look in looks.collect::<Vec<_>>() {
        look.await.unwrap();
    }
    assert_parked(&scene, MANY).await;
    // The start comes to all of them at once, too.
    maker.enqueue_for_orchestrator(start(NOBODY), None).await.unwrap();
    let fetching = providers.iter().map(|provider| provider.fetch_orchestration_item(LONG, NOW, None));
    let fetched = futures::future::join_all(fetching).await;
    let turns: Vec<_> = fetched.into_iter().filter_map(|turn| turn.unwrap()).collect();
    assert_eq!(turns.len(), 1);
    assert_eq!((numbers(&turns[0].0.messages), turns[0].2), ((0..MANY).collect(), 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_parked_messages_than_a_turn_takes_come_in_order_although_their_process_dies() {
    const ALL: usize = 1_200;
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", an_hour_later()).await);
    send(&a, 0..ALL).await;
    look(&a).await;
    assert_parked(&scene, ALL).await;
    a.enqueue_for_orchestrator(start(NOBODY), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(starts(&item.messages), 1);
    let mut seen = numbers(&item.messages);
    commit(&a, &token, vec![started(NOBODY, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    // The process is gone after its first turn: another one goes on, without any news.
    scene.cut("a", 0);
    drop(a);
    let mut turns = 1;
    while seen.len() < ALL {
        let (item, token, attempts) = next_turn(&b, LONG).await;
        assert_eq!((item.instance.as_str(), attempts), (NOBODY, 1));
        seen.extend(numbers(&item.messages));
        turns += 1;
        let events = vec![note(NOBODY, 1, turns)];
        commit(&b, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
    }
    assert_eq!(seen, (0..ALL).collect::<Vec<_>>());
    assert_eq!(turns, 3);
    look(&b).await;
    assert_nothing_is_parked(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_only_has_parked_messages_is_no_instance() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    send(&a, 0..3).await;
    look(&a).await;
    assert!(a.list_instances().await.unwrap().is_empty());
    assert!(a.get_instance_info(NOBODY).await.is_err());
    assert!(a.read(NOBODY).await.unwrap().is_empty());
    assert_eq!(a.get_system_metrics().await.unwrap().total_instances, 0);
    assert_eq!(a.get_queue_depths().await.unwrap().orchestrator_queue, 3);
    let refused = a.delete_instance(NOBODY, true).await.expect_err("there is none");
    assert!(refused.to_string().contains("not found"), "{refused}");
    let deleted = a.delete_instances_atomic(&[NOBODY.to_owned()], true).await.unwrap();
    assert_eq!((deleted.instances_deleted, deleted.queue_messages_deleted), (0, 0));
    assert_parked(&scene, 3).await;
    // An instance that is deleted takes along what was parked for it and has not had a turn yet.
    send(&a, 3..700).await;
    a.enqueue_for_orchestrator(start(NOBODY), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(numbers(&item.messages), (0..500).collect::<Vec<_>>());
    commit(&a, &token, vec![started(NOBODY, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_eq!(a.delete_instance(NOBODY, true).await.unwrap().instances_deleted, 1);
    assert!(scene.partition(NOBODY).await.is_empty());
}
