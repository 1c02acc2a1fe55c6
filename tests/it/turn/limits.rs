//! Turns at the limits: many messages, large messages and many attempts.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, WorkItem},
    Event, EventKind,
};
use duroxide_cosmos::CosmosDBProvider;
use futures::{stream, StreamExt};

const INSTANCE: &str = "i";

const MB: usize = 1024 * 1024;

fn queued(instance: &str, name: &str) -> WorkItem {
    WorkItem::QueueMessage { instance: instance.to_owned(), name: name.to_owned(), data: "{}".to_owned() }
}

/// Enqueues so many messages for the instance.
async fn enqueue_many(provider: &CosmosDBProvider, count: usize, message: impl Fn(&str, &str) -> WorkItem) {
    let numbers: Vec<WorkItem> = (0..count).map(|n| message(INSTANCE, &format!("{n}"))).collect();
    let sending = stream::iter(numbers).map(|message| provider.enqueue_for_orchestrator(message, None));
    let outcomes: Vec<_> = sending.buffer_unordered(16).collect().await;
    assert!(outcomes.iter().all(Result::is_ok));
}

fn starts(messages: &[WorkItem]) -> usize {
    let starts = |m: &&WorkItem| matches!(m, WorkItem::StartOrchestration { .. } | WorkItem::ContinueAsNew { .. });
    messages.iter().filter(starts).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_behind_700_older_messages_is_in_the_first_turn_and_nothing_is_dropped() {
    for message in [external, queued] {
        let fixture = Fixture::new(1);
        let (sender, worker) = (fixture.provider("sender").await, fixture.provider("worker").await);
        enqueue_many(&sender, 700, message).await;
        sender.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
        let (item, token, _) = next_turn(&worker, LONG).await;
        assert_eq!((starts(&item.messages), item.messages.len()), (1, 501));
        commit(&worker, &token, vec![started(INSTANCE, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
        let (item, _, _) = next_turn(&worker, LONG).await;
        assert_eq!(item.messages.len(), 200, "the rest has the next turn");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_start_of_the_next_execution_is_not_hidden_by_older_messages() {
    let fixture = Fixture::new(1);
    let (sender, worker) = (fixture.provider("sender").await, fixture.provider("worker").await);
    begin(&worker, INSTANCE, Vec::new(), Vec::new()).await;
    sender.enqueue_for_orchestrator(external(INSTANCE, "wake up"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    enqueue_many(&sender, 700, external).await;
    let end = vec![event(INSTANCE, 1, 2, EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() })];
    let messages = vec![continue_as_new(INSTANCE)];
    commit(&worker, &token, end, Vec::new(), messages, ended("ContinuedAsNew")).await.unwrap();
    // The first process has the history in memory, and the second one loads all of it.
    for provider in [&worker, &sender] {
        let (item, token, _) = next_turn(provider, LONG).await;
        assert_eq!(starts(&item.messages), 1, "{} messages", item.messages.len());
        provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_fits_the_queue_but_no_event_is_refused_on_enqueue_with_its_size() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("a").await;
    begin(&provider, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    // This size is between the limit of a message and the limit of a document: the queue would take it, and no event
    // would.
    let size = 2 * MB - 90 * 1024;
    let large = "x".repeat(size);
    let (_, work, _) = next_activity(&provider, LONG).await;
    let result =
        WorkItem::ActivityCompleted { instance: INSTANCE.to_owned(), execution_id: 1, id: 2, result: large.clone() };
    let error = provider.enqueue_for_orchestrator(external(INSTANCE, &large), None).await.unwrap_err();
    let says = |text: &str| text.contains("the limit is") && text.contains(&size.to_string()[..3]);
    assert!(!error.is_retryable() && says(&error.message), "{error:?}");
    // If the provider refused the result, the activity would run again.
    provider.ack_work_item(&work, Some(result)).await.unwrap();
    // A slightly smaller message also fits an event.
    let fits = "x".repeat(2 * MB - 100 * 1024);
    provider.enqueue_for_orchestrator(external(INSTANCE, &fits), None).await.unwrap();
    let (item, token, _) = next_turn(&provider, LONG).await;
    let WorkItem::ActivityFailed { details, .. } = &item.messages[0] else { panic!("{:?}", item.messages[0]) };
    assert!(says(&details.display_message()), "{details:?}");
    let kind = EventKind::ExternalEvent { name: "Event".to_owned(), data: fits };
    commit(&provider, &token, vec![event(INSTANCE, 1, 2, kind)], Vec::new(), Vec::new(), running()).await.unwrap();
}

const CHILD: &str = "child";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_whose_text_grows_when_it_is_encoded_are_stored() {
    for text in ["\"".repeat(40_000), "\\".repeat(40_000), "\u{1}".repeat(40_000), "é".repeat(20_000)] {
        let fixture = Fixture::new(1);
        let a = fixture.provider("a").await;
        a.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
        let (_, token, _) = next_turn(&a, LONG).await;
        let noted = |id| event(CHILD, 1, id, EventKind::ExternalSubscribed { name: text.clone() });
        let events: Vec<Event> = std::iter::once(started(CHILD, 1)).chain((2..28).map(noted)).collect();
        commit(&a, &token, events.clone(), Vec::new(), Vec::new(), running()).await.unwrap();
        assert_eq!(fixture.provider("b").await.read(CHILD).await.unwrap().len(), events.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_gets_a_limited_number_of_message_bytes_and_the_next_turn_gets_the_rest_in_order() {
    const MESSAGES: usize = 30;
    const EACH: usize = 500_000;
    const MOST: usize = 5 * 1024 * 1024;
    // Once with the messages that the process has sent itself, and once as another process finds them.
    for name in ["a", "b"] {
        let fixture = Fixture::new(1);
        let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
        begin(&a, CHILD, Vec::new(), Vec::new()).await;
        for number in 0..MESSAGES {
            let data = format!("{number:06}{}", "x".repeat(EACH));
            a.enqueue_for_orchestrator(external(CHILD, &data), None).await.unwrap();
        }
        let provider = if name == "a" { &a } else { &b };
        let (mut seen, mut turns) = (Vec::new(), 1);
        while seen.len() < MESSAGES {
            let (item, token, attempts) = next_turn(provider, LONG).await;
            let data = item.messages.iter().map(|message| match message {
                WorkItem::ExternalRaised { data, .. } => data.clone(),
                other => panic!("{other:?}"),
            });
            let data: Vec<String> = data.collect();
            assert!(data.len() > 1 && data.len() * EACH <= MOST, "{} messages", data.len());
            assert_eq!(attempts, 1);
            seen.extend(data.iter().map(|data| data[..6].parse::<usize>().unwrap()));
            turns += 1;
            commit(provider, &token, vec![filler(CHILD, 1, turns)], Vec::new(), Vec::new(), running()).await.unwrap();
        }
        assert_eq!(seen, (0..MESSAGES).collect::<Vec<_>>());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_with_more_messages_than_fit_a_turn_queues_behind_instances_that_wait_longer() {
    const OTHERS: usize = 29;
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    begin(&a, "loud", Vec::new(), Vec::new()).await;
    a.enqueue_for_orchestrator(external("loud", "first"), None).await.unwrap();
    for number in 0..OTHERS {
        a.enqueue_for_orchestrator(start(&format!("other {number}")), None).await.unwrap();
    }
    for number in 0..1_100 {
        a.enqueue_for_orchestrator(external("loud", &number.to_string()), None).await.unwrap();
    }
    let mut order = Vec::new();
    for turn in 0..OTHERS + 2 {
        let (item, token, _) = next_turn(&b, LONG).await;
        let first = match item.instance.as_str() {
            "loud" => filler("loud", 1, turn as u64 + 2),
            other => started(other, 1),
        };
        order.push(item.instance);
        commit(&b, &token, vec![first], Vec::new(), Vec::new(), running()).await.unwrap();
    }
    let others = (0..OTHERS).map(|number| format!("other {number}"));
    let expected: Vec<String> = ["loud".to_owned()].into_iter().chain(others).chain(["loud".to_owned()]).collect();
    assert_eq!(order, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_are_counted_however_many_there_are() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    a.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
    for attempt in 1..=150 {
        let (_, token, attempts) = next_turn(&a, LONG).await;
        assert_eq!(attempts, attempt);
        if attempt % 50 == 0 {
            // One abandon that does not count an attempt, and a new message in between.
            a.abandon_orchestration_item(&token, None, true).await.unwrap();
            a.enqueue_for_orchestrator(external(CHILD, &attempt.to_string()), None).await.unwrap();
            let (_, token, attempts) = next_turn(&a, LONG).await;
            assert_eq!(attempts, attempt);
            a.abandon_orchestration_item(&token, None, false).await.unwrap();
            continue;
        }
        a.abandon_orchestration_item(&token, None, false).await.unwrap();
    }
    let (_, token, attempts) = next_turn(&a, LONG).await;
    assert_eq!(attempts, 151);
    commit(&a, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    a.enqueue_for_orchestrator(external(CHILD, "next"), None).await.unwrap();
    assert_eq!(next_turn(&a, LONG).await.2, 1, "a commit ends the count");
}
