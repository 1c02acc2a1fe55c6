//! Messages for an instance without a start: after one claim they cost nothing, and the start finds all of them in
//! order and once, whatever happens in between.

use crate::fixture::*;
use duroxide::providers::{Provider, ProviderAdmin, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use serde_json::Value;
use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

const UNSTARTED: &str = "not started";

/// More messages than two batches can take.
const MANY: usize = 250;

async fn send(provider: &CosmosDBProvider, numbers: std::ops::Range<usize>) {
    for number in numbers {
        provider.enqueue_for_orchestrator(external(UNSTARTED, &number.to_string()), None).await.unwrap();
    }
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

/// The instance starts once and gets these events in order. Either all of them are deferred, or none: a turn on a start
/// that this process has enqueued itself leaves visible messages to the next turn.
async fn assert_starts_with(provider: &CosmosDBProvider, events: std::ops::Range<usize>, most_attempts: u32) {
    let (mut turns, mut started_here, mut seen) = (0, 0, Vec::new());
    while started_here == 0 || seen.len() < events.len() {
        let (item, token, attempts) = next_turn(provider, LONG).await;
        assert_eq!(item.instance, UNSTARTED);
        assert!(attempts <= most_attempts, "{attempts}");
        started_here += starts(&item.messages);
        seen.extend(numbers(&item.messages));
        turns += 1;
        let event = if turns == 1 { started(UNSTARTED, 1) } else { filler(UNSTARTED, 1, turns) };
        commit(provider, &token, vec![event], Vec::new(), Vec::new(), running()).await.unwrap();
    }
    assert_eq!((started_here, seen), (1, events.collect()));
    assert!(turns <= 2, "{turns} turns");
    assert_no_turn(provider).await;
}

async fn shell(fixture: &Fixture) -> Option<Value> {
    fixture.documents_of_type(UNSTARTED, "instance").await.pop()
}

async fn assert_deferred(fixture: &Fixture, messages: usize) {
    let shell = shell(fixture).await.expect("a document in the partition");
    assert!(shell["deferred"] == true && shell["lock"].is_null() && shell["claims"].is_null(), "{shell}");
    let waiting = fixture.documents_of_type(UNSTARTED, "message").await;
    assert_eq!(waiting.len(), messages);
    assert!(waiting.iter().all(|message| message["due"] == 9_007_199_254_740_991_u64), "{}", waiting[0]);
}

async fn assert_nothing_is_deferred(fixture: &Fixture) {
    let instance = shell(fixture).await.expect("the instance");
    assert!(
        instance["deferred"].is_null() && instance["due"].is_null() && instance["status"] == "Running",
        "{instance}"
    );
    assert!(fixture.documents_of_type(UNSTARTED, "message").await.is_empty());
}

/// Whether a request defers messages.
fn defers_messages(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let due = |operation: &Value| operation["resourceBody"]["due"] == 9_007_199_254_740_991_u64;
    body.as_array().is_some_and(|operations| operations.iter().any(due))
}

/// Counts the requests to the partition.
fn count_requests(fixture: &Fixture) -> Arc<AtomicU64> {
    let counted = Arc::new(AtomicU64::new(0));
    let counting = counted.clone();
    fixture.account.wire().observe(move |request, _| {
        if goes_to(request, UNSTARTED) {
            counting.fetch_add(1, Ordering::Relaxed);
        }
    });
    counted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_without_an_instance_is_claimed_once_and_costs_nothing_from_then_on() {
    let fixture = Fixture::new(2);
    let fast = |config: CosmosDBProviderConfig| {
        config.with_wakeup_interval(Duration::from_millis(5)).with_poll_interval(Duration::from_millis(20))
    };
    let (a, b) = (
        fixture.provider_with("a", fast(test_config())).await,
        fixture.provider_with("b", fast(config_ahead_by(3_600_000))).await,
    );
    let requests = count_requests(&fixture);
    send(&a, 0..1).await;
    assert_no_turn(&a).await;
    let at_first = requests.load(Ordering::Relaxed);
    // The message itself, a read of the document, the claim, two queries, and the batch that defers.
    assert!(at_first <= 6, "{at_first} requests");
    assert_deferred(&fixture, 1).await;
    let looked = fixture.account.stats_of("b").of(RequestKind::Query).requests;
    let before = requests.load(Ordering::Relaxed);
    for _ in 0..5 {
        assert_no_turn(&a).await;
        assert_no_turn(&b).await;
        for provider in [&a, &b] {
            let fetched = provider.fetch_orchestration_item(LONG, Duration::from_millis(100), None).await.unwrap();
            assert!(fetched.is_none());
        }
    }
    assert_eq!(requests.load(Ordering::Relaxed), before, "no process asks for it");
    assert!(fixture.account.stats_of("b").of(RequestKind::Query).requests > looked + 5, "they did poll");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_comes_later_has_every_message_before_it_in_order_and_once() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    send(&a, 0..3).await;
    assert_no_turn(&b).await;
    assert_deferred(&fixture, 3).await;
    // The next poll defers further messages for the same name, messages for an event queue too.
    send(&a, 3..5).await;
    let queued = WorkItem::QueueMessage { instance: UNSTARTED.to_owned(), name: "q".to_owned(), data: "d".to_owned() };
    a.enqueue_for_orchestrator(queued.clone(), None).await.unwrap();
    assert_no_turn(&a).await;
    assert_deferred(&fixture, 6).await;
    // These messages are visible when the start arrives.
    send(&b, 5..7).await;
    a.enqueue_for_orchestrator(start(UNSTARTED), None).await.unwrap();
    let (item, token, attempts) = next_turn(&a, LONG).await;
    assert_eq!((item.messages.len(), starts(&item.messages), attempts), (9, 1, 1));
    assert_eq!(numbers(&item.messages), (0..7).collect::<Vec<_>>());
    assert_eq!(item.messages[5], queued);
    commit(&a, &token, vec![started(UNSTARTED, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_no_turn(&a).await;
    assert_no_turn(&b).await;
    assert_nothing_is_deferred(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_is_released_or_lost_gets_its_deferred_messages_again() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(3_600_000)).await);
    send(&a, 0..3).await;
    assert_no_turn(&a).await;
    a.enqueue_for_orchestrator(start(UNSTARTED), None).await.unwrap();
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
    // The process of "a" crashes.
    fixture.cut("a", 0);
    let (item, token, attempts) = next_turn(&b, LONG).await;
    assert_eq!((numbers(&item.messages), starts(&item.messages), attempts), (vec![0, 1, 2], 1, 4));
    commit(&b, &token, vec![started(UNSTARTED, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_no_turn(&b).await;
    assert_nothing_is_deferred(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_wait_for_a_delayed_start_and_so_do_queue_messages() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(3_600_000)).await);
    let queued = WorkItem::QueueMessage { instance: UNSTARTED.to_owned(), name: "q".to_owned(), data: "d".to_owned() };
    a.enqueue_for_orchestrator(queued.clone(), None).await.unwrap();
    a.enqueue_for_orchestrator(start(UNSTARTED), Some(Duration::from_secs(600))).await.unwrap();
    assert_no_turn(&a).await;
    let (item, _, attempts) = next_turn(&b, LONG).await;
    assert_eq!((item.messages, attempts), (vec![queued, start(UNSTARTED)], 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_names_without_an_instance_do_not_hide_a_start() {
    const NAMES: usize = 700;
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    for name in 0..NAMES {
        a.enqueue_for_orchestrator(external(&format!("not started {name}"), "news"), None).await.unwrap();
    }
    assert_no_turn(&a).await;
    let documents = fixture.documents().await;
    assert_eq!(documents.iter().filter(|document| document["deferred"] == true).count(), NAMES);
    a.enqueue_for_orchestrator(start("started"), None).await.unwrap();
    let before = fixture.account.stats_of("b").items().requests;
    let (item, ..) = b.fetch_orchestration_item(LONG, NOW, None).await.unwrap().expect("the start at the first poll");
    assert_eq!(item.instance, "started");
    let requests = fixture.account.stats_of("b").items().requests - before;
    assert!(requests <= 4, "{requests} requests");
}

/// "a" defers messages and crashes before or after any of its requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_defers_may_crash_at_any_request_and_the_start_gets_every_message() {
    for carried_out in [false, true] {
        for passing in 0.. {
            let fixture = Fixture::new(1);
            let (maker, a) = (fixture.provider("maker").await, fixture.provider("a").await);
            send(&maker, 0..MANY).await;
            let cut = fixture.cut_at("a", passing, carried_out);
            let ended = until_cut(a.fetch_orchestration_item(LONG, NOW, None), &cut).await;
            if let Ended::Returned(fetched) = ended {
                assert!(passing >= 6, "a poll, a read, a claim, a query and three batches are cut: {passing}");
                assert!(fetched.unwrap().is_none());
                assert_deferred(&fixture, MANY).await;
                break;
            }
            drop(a);
            let b = fixture.provider_with("b", config_ahead_by(3_600_000)).await;
            // Half of the cases poll before the start.
            if passing % 2 == 0 {
                assert_no_turn(&b).await;
                assert_deferred(&fixture, MANY).await;
            }
            b.enqueue_for_orchestrator(start(UNSTARTED), None).await.unwrap();
            // The claim of a process that crashed counts as an attempt.
            assert_starts_with(&b, 0..MANY, 2).await;
            assert_nothing_is_deferred(&fixture).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_defers_messages_and_loses_its_answer_is_recognised_as_done() {
    for lost in 0..3 {
        let fixture = Fixture::new(1);
        let a = fixture.provider("a").await;
        send(&a, 0..MANY).await;
        let rule =
            WireRule::new(WireAction::LoseAnswer).on(RequestKind::Batch).matching(defers_messages).skip(lost).times(1);
        let rule = fixture.account.wire().add(rule);
        let before = fixture.account.stats_of("a").of(RequestKind::Batch).requests;
        assert_no_turn(&a).await;
        assert_eq!(rule.hits(), 1);
        assert_deferred(&fixture, MANY).await;
        let batches = fixture.account.stats_of("a").of(RequestKind::Batch).requests - before;
        // Three batches that defer, and the SDK's own repetition.
        assert_eq!(batches, 4);
        a.enqueue_for_orchestrator(start(UNSTARTED), None).await.unwrap();
        assert_starts_with(&a, 0..MANY, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_processes_that_poll_at_once_defer_every_message_once() {
    let fixture = Fixture::new(1);
    let maker = fixture.provider("maker").await;
    let mut providers = Vec::new();
    for name in ["a", "b", "c"] {
        providers.push(Arc::new(fixture.provider(name).await));
    }
    send(&maker, 0..MANY).await;
    let polls = providers.iter().cloned().map(|provider| {
        tokio::spawn(async move {
            // A process that finds the instance locked polls again while it waits.
            let fetched = provider.fetch_orchestration_item(LONG, Duration::from_secs(3), None).await.unwrap();
            assert!(fetched.is_none());
        })
    });
    for poll in polls.collect::<Vec<_>>() {
        poll.await.unwrap();
    }
    assert_deferred(&fixture, MANY).await;
    // The start is visible to all of them at once, too.
    maker.enqueue_for_orchestrator(start(UNSTARTED), None).await.unwrap();
    let fetching = providers.iter().map(|provider| provider.fetch_orchestration_item(LONG, NOW, None));
    let fetched = futures::future::join_all(fetching).await;
    let turns: Vec<_> = fetched.into_iter().filter_map(|turn| turn.unwrap()).collect();
    assert_eq!(turns.len(), 1);
    assert_eq!((numbers(&turns[0].0.messages), turns[0].2), ((0..MANY).collect(), 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_deferred_messages_than_fit_a_turn_arrive_in_order_although_their_process_crashes() {
    const ALL: usize = 1_200;
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(3_600_000)).await);
    send(&a, 0..ALL).await;
    assert_no_turn(&a).await;
    assert_deferred(&fixture, ALL).await;
    a.enqueue_for_orchestrator(start(UNSTARTED), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(starts(&item.messages), 1);
    let mut seen = numbers(&item.messages);
    commit(&a, &token, vec![started(UNSTARTED, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    // The process crashes after its first turn. Another one continues without a wake-up.
    fixture.cut("a", 0);
    drop(a);
    let mut turns = 1;
    while seen.len() < ALL {
        let (item, token, attempts) = next_turn(&b, LONG).await;
        assert_eq!((item.instance.as_str(), attempts), (UNSTARTED, 1));
        seen.extend(numbers(&item.messages));
        turns += 1;
        let events = vec![filler(UNSTARTED, 1, turns)];
        commit(&b, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
    }
    assert_eq!(seen, (0..ALL).collect::<Vec<_>>());
    assert_eq!(turns, 3);
    assert_no_turn(&b).await;
    assert_nothing_is_deferred(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_with_only_deferred_messages_is_no_instance() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    send(&a, 0..3).await;
    assert_no_turn(&a).await;
    assert!(a.list_instances().await.unwrap().is_empty());
    assert!(a.get_instance_info(UNSTARTED).await.is_err());
    assert!(a.read(UNSTARTED).await.unwrap().is_empty());
    assert_eq!(a.get_system_metrics().await.unwrap().total_instances, 0);
    assert_eq!(a.get_queue_depths().await.unwrap().orchestrator_queue, 3);
    let refused = a.delete_instance(UNSTARTED, true).await.expect_err("there is none");
    assert!(refused.to_string().contains("not found"), "{refused}");
    let deleted = a.delete_instances_atomic(&[UNSTARTED.to_owned()], true).await.unwrap();
    assert_eq!((deleted.instances_deleted, deleted.queue_messages_deleted), (0, 0));
    assert_deferred(&fixture, 3).await;
    // The deletion of an instance also deletes its deferred messages that no turn has consumed.
    send(&a, 3..700).await;
    a.enqueue_for_orchestrator(start(UNSTARTED), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(numbers(&item.messages), (0..500).collect::<Vec<_>>());
    commit(&a, &token, vec![started(UNSTARTED, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_eq!(a.delete_instance(UNSTARTED, true).await.unwrap().instances_deleted, 1);
    assert!(fixture.partition(UNSTARTED).await.is_empty());
}

const NAME: &str = "name";

const HOUR: i64 = 3_600_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_deferred_message_is_lost_if_the_start_is_the_oldest_message() {
    const MANY: usize = 620;
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(HOUR)).await);
    a.enqueue_for_orchestrator(start(NAME), Some(Duration::from_secs(600))).await.unwrap();
    let messages: Vec<WorkItem> = (0..MANY).map(|number| external(NAME, &number.to_string())).collect();
    for message in &messages {
        a.enqueue_for_orchestrator(message.clone(), None).await.unwrap();
    }
    assert_no_turn(&a).await;
    let mut seen = Vec::new();
    for turn in 1.. {
        let Some((item, token, _)) = b.fetch_orchestration_item(LONG, NOW, None).await.unwrap() else { break };
        seen.extend(item.messages);
        let event = if turn == 1 { started(NAME, 1) } else { filler(NAME, 1, turn) };
        commit(&b, &token, vec![event], Vec::new(), Vec::new(), running()).await.unwrap();
    }
    assert_eq!(fixture.documents_of_type(NAME, "message").await.len(), 0, "{} were seen", seen.len());
    assert_eq!(seen, [vec![start(NAME)], messages].concat());
    let instance = fixture.documents_of_type(NAME, "instance").await.pop().unwrap();
    assert!(instance["deferred"].is_null() && instance["due"].is_null(), "{instance}");
}
