//! The same seed, clock and calls produce the same requests, with the same bodies and in the same order.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, WorkItem},
    Event, EventKind,
};
use duroxide_cosmos::{Clock, CosmosDBProvider, Randomness};
use serde_json::Value;
use std::sync::{Arc, Mutex};

const KEYS: u64 = 20;

const CHILDREN: u64 = 5;

/// The requests about items: method, path, partition and body.
type Requests = Vec<(String, String, Option<String>, Option<Value>)>;

/// Runs a fixed scenario: values that are set and cleared, children, activities, and a shutdown with locks held.
async fn run_scenario(seed: u64) -> Requests {
    let fixture = Fixture::new(1);
    let config =
        test_config().with_clock(Clock::from_fn(|| 1_763_256_000_000)).with_randomness(Randomness::seeded(seed));
    let provider = fixture.provider_with("a", config).await;
    let story = Arc::new(Mutex::new(Requests::new()));
    let heard = story.clone();
    fixture.account.wire().observe(move |request, _| {
        if about_items(request) {
            let body = request.json().map(without_etags);
            let sent = (request.method.to_owned(), request.path.to_owned());
            heard.lock().unwrap().push((sent.0, sent.1, request.partition_key.map(ToOwned::to_owned), body));
        }
    });
    act(&provider).await;
    assert!(provider.shutdown_within(PATIENCE).await);
    let story = story.lock().unwrap().clone();
    story
}

async fn act(provider: &CosmosDBProvider) {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let set = |n: u64| EventKind::KeyValueSet { key: format!("key {n}"), value: "v".into(), last_updated_at_ms: n };
    let sets = (0..KEYS).map(|n| event("i", 1, 2 + n, set(n)));
    let events = without_time(std::iter::once(started("i", 1)).chain(sets));
    let activities = (0..CHILDREN).map(|n| activity("i", 100 + n)).collect();
    let children: Vec<WorkItem> = (0..CHILDREN).map(|n| start_child(&format!("child {n}"), Some("i"))).collect();
    commit(provider, &token, events, activities, children, running()).await.unwrap();

    provider.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..=CHILDREN {
        held.push(next_turn(provider, LONG).await);
    }
    let (_, token, _) = held.iter().find(|(item, ..)| item.instance == "i").unwrap();
    let cleared = event("i", 1, 200, EventKind::KeyValuesCleared);
    commit(provider, token, without_time([cleared]), Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
    for _ in 0..CHILDREN {
        next_activity(provider, LONG).await;
    }
}

/// Removes the time at which the runtime made the event, which it takes from the system.
fn without_time(events: impl IntoIterator<Item = Event>) -> Vec<Event> {
    events.into_iter().map(|event| Event { timestamp_ms: 0, ..event }).collect()
}

/// Removes ETags, which Cosmos DB sets.
fn without_etags(mut body: Value) -> Value {
    match &mut body {
        Value::Object(fields) => {
            fields.retain(|name, _| name != "ifMatch" && name != "_etag");
            fields.values_mut().for_each(|value| *value = without_etags(value.take()));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = without_etags(item.take())),
        _ => {}
    }
    body
}

#[tokio::test(flavor = "current_thread", start_paused = true)]
async fn a_provider_sends_the_same_requests_again_for_the_same_seed() {
    let story = run_scenario(1).await;
    for _ in 0..5 {
        let again = run_scenario(1).await;
        for (number, (one, other)) in story.iter().zip(&again).enumerate() {
            assert_eq!(one, other, "request {number}");
        }
        assert_eq!(story.len(), again.len());
    }
    assert_ne!(story, run_scenario(2).await, "another seed has other tokens");
}
