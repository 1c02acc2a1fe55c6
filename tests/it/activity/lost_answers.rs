//! If the answer to a write of an activity is lost, the call reports the outcome, and the activity is completed once.

use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};
use std::time::Duration;

const INSTANCE: &str = "order";

/// The number of answers in a row that are lost. The SDK repeats a write by itself, so one call loses all of them.
const TIMES: [u64; 2] = [1, 5];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_answer_is_lost_is_in_the_queue_once() {
    for times in TIMES {
        let (fixture, a, b) = Fixture::with_two_providers().await;
        let lost = fixture.lose(RequestKind::Batch, times);
        a.enqueue_for_worker(activity(INSTANCE, 2)).await.expect("it is in the queue");
        assert_eq!(lost.hits(), times);
        assert_eq!(fixture.documents_of_type(INSTANCE, "activity").await.len(), 1);
        let (item, token) = fetch_activity(&b, LONG).await;
        assert_eq!(item, activity(INSTANCE, 2));
        b.ack_work_item(&token, None).await.expect("it is done");
        assert!(fetch_activity_now(&a, LONG).await.is_none() && fetch_activity_now(&b, LONG).await.is_none());
    }
}

/// An instance that waits for an activity, which is in the queue.
async fn an_activity() -> (Fixture, CosmosDBProvider, CosmosDBProvider) {
    let (fixture, a, b) = Fixture::with_two_providers().await;
    begin_with_activities(&a, INSTANCE, 1).await;
    (fixture, a, b)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_claim_whose_answer_is_lost_is_valid_and_counts_one_attempt() {
    for times in TIMES {
        let (fixture, a, b) = an_activity().await;
        let lost = fixture.lose(RequestKind::Replace, times);
        let tags = duroxide::providers::TagFilter::Any;
        let fetched = a.fetch_work_item(LONG, PATIENCE, None, &tags).await.expect("a fetch");
        let (item, token, attempts) = fetched.expect("an activity");
        assert_eq!((lost.hits(), activity_id(&item), attempts), (times, 2, 1));
        assert!(fetch_activity_now(&b, LONG).await.is_none(), "two owners");
        a.ack_work_item(&token, Some(completion(INSTANCE, 2, "done"))).await.expect("it is done");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_whose_answer_is_lost_succeeds_and_is_stored_once() {
    for times in TIMES {
        let (fixture, a, b) = an_activity().await;
        let (_, token) = fetch_activity(&a, LONG).await;
        let lost = fixture.lose(RequestKind::Batch, times);
        a.ack_work_item(&token, Some(completion(INSTANCE, 2, "done"))).await.expect("it is done");
        assert_eq!(lost.hits(), times);
        assert_refused(a.ack_work_item(&token, Some(completion(INSTANCE, 2, "again"))).await);
        let (item, _) = fetch_turn(&b, LONG).await;
        assert_eq!(item.messages, [completion(INSTANCE, 2, "done")]);
        assert!(fetch_activity_now(&b, LONG).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_whose_answer_is_lost_succeeds_even_if_a_turn_has_consumed_it() {
    let (fixture, a, b) = an_activity().await;
    let (_, token) = fetch_activity(&a, LONG).await;
    fixture.lose(RequestKind::Batch, 1);
    let gate = Gate::new();
    fixture.account.wire().add(fixture.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch));
    let done = completion(INSTANCE, 2, "done");
    let message = done.clone();
    let ack = tokio::spawn(async move { a.ack_work_item(&token, Some(message)).await });
    within("the repetition", gate.reached()).await;
    let (item, turn) = fetch_turn(&b, LONG).await;
    assert_eq!(item.messages, [done]);
    let events = vec![activity_completed(INSTANCE, 3, 2, "done")];
    Delta { events, ..Delta::default() }.ack(&b, &turn).await.expect("the turn commits");
    gate.open();
    within("the ack", ack).await.expect("no panic").expect("it is done");
    assert!(fixture.documents_of_type(INSTANCE, "message").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_renewal_whose_answer_is_lost_is_valid() {
    for times in TIMES {
        let (fixture, a, b) = an_activity().await;
        let (_, token) = fetch_activity(&a, Duration::from_secs(20)).await;
        let lost = fixture.lose(RequestKind::Replace, times);
        a.renew_work_item_lock(&token, LONG).await.expect("the lock is extended");
        assert_eq!(lost.hits(), times);
        assert!(fetch_activity_now(&b, LONG).await.is_none(), "two owners");
        a.renew_work_item_lock(&token, LONG).await.expect("the lock is extended again");
        a.ack_work_item(&token, Some(completion(INSTANCE, 2, "done"))).await.expect("it is done");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_renewal_failed_is_not_removed_by_the_ack_that_follows() {
    let (fixture, a, b) = an_activity().await;
    let (_, token) = fetch_activity(&a, SHORT).await;
    fixture.outage(a.renew_work_item_lock(&token, LONG)).await;
    // duroxide's runtime makes this call after a renewal that failed.
    assert_refused(a.ack_work_item(&token, None).await);
    let (item, _) = fetch_activity(&b, LONG).await;
    assert_eq!(activity_id(&item), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_release_lost_its_answer_can_be_fetched_at_once() {
    for times in TIMES {
        let (fixture, a, b) = an_activity().await;
        let (_, token) = fetch_activity(&a, LONG).await;
        let lost = fixture.lose(RequestKind::Replace, times);
        a.abandon_work_item(&token, None, true).await.expect("it is released");
        assert_eq!(lost.hits(), times);
        let tags = duroxide::providers::TagFilter::Any;
        let fetched = b.fetch_work_item(LONG, PATIENCE, None, &tags).await.expect("a fetch");
        let (_, _, attempts) = fetched.expect("an activity");
        assert_eq!(attempts, 1);
        assert!(fetch_activity_now(&a, LONG).await.is_none(), "two owners");
    }
}
