//! If the answer to a write is lost, the provider reads the result. Each call reports the outcome, and no write is made
//! twice.

use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};
use std::{sync::Arc, time::Duration};

const INSTANCE: &str = "order";

/// The number of answers in a row that are lost. The SDK repeats a write by itself, so one call loses all of them.
const TIMES: [u64; 2] = [1, 5];

/// An instance whose second turn "a" has fetched.
async fn second_turn(lock: Duration) -> (Fixture, CosmosDBProvider, CosmosDBProvider, String) {
    let (fixture, a, b) = Fixture::with_two_providers().await;
    begin_with_activities(&a, INSTANCE, 0).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
    let (_, token) = fetch_turn(&a, lock).await;
    (fixture, a, b, token)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answers_are_lost_succeeds_and_is_stored_once() {
    for (times, activities) in [(1, 3), (5, 3), (1, 300), (5, 300)] {
        let (fixture, a, b) = Fixture::with_two_providers().await;
        a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
        let (_, token) = fetch_turn(&a, LONG).await;
        let lost = fixture.lose(RequestKind::Batch, times);
        let delta = Delta::start(INSTANCE, activities);
        delta.ack(&a, &token).await.expect("the commit happened");
        assert_eq!(lost.hits(), times);
        assert_refused(delta.ack(&a, &token).await);
        assert_eq!(b.read(INSTANCE).await.expect("a history"), delta.events);
        assert_eq!(fixture.documents_of_type(INSTANCE, "activity").await.len() as u64, activities);
        assert!(fixture.instance(INSTANCE).await["lock"].is_null());
        assert!(fetch_turn_now(&b, LONG).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_succeeds_even_if_others_have_committed_since() {
    let (fixture, a, b, token) = second_turn(LONG).await;
    fixture.lose(RequestKind::Batch, 1);
    let gate = Gate::new();
    let again = fixture.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch);
    fixture.account.wire().add(again);
    let ack = tokio::spawn(async move { Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await });
    within("the repetition", gate.reached()).await;
    // The first turn is stored, and other workers continue with the instance.
    b.enqueue_for_orchestrator(raised(INSTANCE, "shipped"), None).await.expect("a message");
    let (item, next) = fetch_turn(&b, LONG).await;
    assert_eq!(item.messages, [raised(INSTANCE, "shipped")]);
    Delta::event(INSTANCE, 3, "shipped").ack(&b, &next).await.expect("the turn after it");
    gate.open();
    within("the ack", ack).await.expect("no panic").expect("the commit happened");
    assert_eq!(ids(&b.read(INSTANCE).await.expect("a history")), [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_does_not_remove_the_lock_of_the_next_owner() {
    let (fixture, a, b, token) = second_turn(LONG).await;
    fixture.lose(RequestKind::Batch, 1);
    let gate = Gate::new();
    let again = fixture.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch);
    fixture.account.wire().add(again);
    let a = Arc::new(a);
    let owner = a.clone();
    let ack = tokio::spawn(async move { Delta::event(INSTANCE, 2, "paid").ack(&owner, &token).await });
    within("the repetition", gate.reached()).await;
    b.enqueue_for_orchestrator(raised(INSTANCE, "shipped"), None).await.expect("a message");
    let (_, next) = fetch_turn(&b, LONG).await;
    gate.open();
    within("the ack", ack).await.expect("no panic").expect("the commit happened");

    let before = fixture.instance(INSTANCE).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "returned"), None).await.expect("a message");
    assert!(fetch_turn_now(&a, LONG).await.is_none(), "two owners");
    assert_eq!(fixture.instance(INSTANCE).await, before);
    Delta::event(INSTANCE, 3, "shipped").ack(&b, &next).await.expect("the lock is the next owner's");
    assert_eq!(ids(&a.read(INSTANCE).await.expect("a history")), [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_that_failed_in_an_outage_makes_its_token_invalid_and_the_turn_runs_again() {
    for activities in [0, 300] {
        let (fixture, a, b, token) = second_turn(SHORT).await;
        let mut delta = Delta::start(INSTANCE, activities);
        delta.events[0] = external_event(INSTANCE, 1_000, "paid");
        let error = fixture.outage(delta.ack(&a, &token)).await;
        assert!(error.is_retryable(), "{error:?}");
        let before = fixture.partition(INSTANCE).await;
        assert_refused(delta.ack(&a, &token).await);
        assert_refused(Delta::failure(INSTANCE, 2).ack(&a, &token).await);
        assert_refused(a.renew_orchestration_item_lock(&token, LONG).await);
        assert_eq!(fixture.partition(INSTANCE).await, before);

        let (item, token) = fetch_turn(&b, LONG).await;
        assert_eq!((item.messages.as_slice(), item.history.len()), ([raised(INSTANCE, "paid")].as_slice(), 1));
        delta.ack(&b, &token).await.expect("the turn runs again");
        assert_eq!(b.read(INSTANCE).await.expect("a history").len() as u64, 2 + activities);
        assert_eq!(fixture.documents_of_type(INSTANCE, "activity").await.len() as u64, activities);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_that_failed_although_it_was_stored_says_so_when_it_is_repeated() {
    let (fixture, a, b, token) = second_turn(SHORT).await;
    // Cosmos DB carries out the commit, and then no answer arrives any more.
    let lost = fixture.lose(RequestKind::Batch, 1);
    let error = fixture.outage(Delta::event(INSTANCE, 2, "paid").ack(&a, &token)).await;
    assert!(error.is_retryable(), "{error:?}");
    assert_eq!(lost.hits(), 1);
    Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await.expect("it happened");
    assert_refused(Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await);
    assert_eq!(ids(&b.read(INSTANCE).await.expect("a history")), [1, 2]);
    assert!(fetch_turn_now(&b, LONG).await.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_a_new_instance_whose_answer_is_lost_is_valid() {
    for times in TIMES {
        let (fixture, a, b) = Fixture::with_two_providers().await;
        a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
        let lost = fixture.lose(RequestKind::Create, times);
        let (item, token) = fetch_turn(&a, LONG).await;
        assert_eq!((lost.hits(), item.messages), (times, vec![start(INSTANCE)]));
        assert!(fetch_turn_now(&b, LONG).await.is_none(), "two owners");
        Delta::start(INSTANCE, 0).ack(&a, &token).await.expect("the turn commits");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_answer_is_lost_is_valid_and_counts_one_attempt() {
    for times in TIMES {
        let (fixture, a, b) = Fixture::with_two_providers().await;
        begin_with_activities(&a, INSTANCE, 0).await;
        a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let lost = fixture.lose(RequestKind::Replace, times);
        let fetched = a.fetch_orchestration_item(LONG, PATIENCE, None).await.expect("a fetch");
        let (item, token, attempts) = fetched.expect("a turn");
        assert_eq!((lost.hits(), item.messages, attempts), (times, vec![raised(INSTANCE, "paid")], 1));
        assert!(fetch_turn_now(&b, LONG).await.is_none(), "two owners");
        Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await.expect("the turn commits");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_caller_has_gone_is_released_without_counting_an_attempt() {
    let (fixture, a, b) = Fixture::with_two_providers().await;
    begin_with_activities(&a, INSTANCE, 0).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
    let gate = Gate::new();
    let held = fixture.rule("a", WireAction::HoldAfter(gate.clone())).on(RequestKind::Replace).times(1);
    fixture.account.wire().add(held);
    let a = Arc::new(a);
    let caller = a.clone();
    let fetching = tokio::spawn(async move { fetch_turn(&caller, LONG).await });
    within("the claim", gate.reached()).await;
    fetching.abort();
    gate.open();
    let fetched = b.fetch_orchestration_item(LONG, PATIENCE, None).await.expect("a fetch");
    let (item, token, attempts) = fetched.expect("a turn without a lock");
    assert_eq!((item.messages, attempts), (vec![raised(INSTANCE, "paid")], 1));
    Delta::event(INSTANCE, 2, "paid").ack(&b, &token).await.expect("the turn commits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whose_answer_is_lost_is_in_the_queue_once() {
    for times in TIMES {
        let (fixture, a, b) = Fixture::with_two_providers().await;
        let lost = fixture.lose(RequestKind::Create, times);
        a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("it is in the queue");
        assert_eq!(lost.hits(), times);
        assert_eq!(fixture.documents_of_type(INSTANCE, "message").await.len(), 1);
        let (item, token) = fetch_turn(&b, LONG).await;
        assert_eq!(item.messages, [start(INSTANCE)]);
        Delta::start(INSTANCE, 0).ack(&b, &token).await.expect("the turn commits");
        assert!(fetch_turn_now(&a, LONG).await.is_none() && fetch_turn_now(&b, LONG).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_whose_answer_is_lost_is_valid() {
    for times in TIMES {
        let (fixture, a, b, token) = second_turn(Duration::from_secs(20)).await;
        let lost = fixture.lose(RequestKind::Replace, times);
        a.renew_orchestration_item_lock(&token, LONG).await.expect("the lock is extended");
        assert_eq!(lost.hits(), times);
        assert!(fetch_turn_now(&b, LONG).await.is_none(), "two owners");
        a.renew_orchestration_item_lock(&token, LONG).await.expect("the lock is extended again");
        Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await.expect("the turn commits");
        assert_eq!(ids(&b.read(INSTANCE).await.expect("a history")), [1, 2]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_whose_release_lost_its_answer_can_be_fetched_when_it_is_due() {
    let soon = Some(Duration::from_millis(50));
    for (times, delay, kind) in [
        (1, None, RequestKind::Replace),
        (5, None, RequestKind::Replace),
        (1, soon, RequestKind::Batch),
        (5, soon, RequestKind::Batch),
    ] {
        let (fixture, a, b, token) = second_turn(LONG).await;
        let lost = fixture.lose(kind, times);
        a.abandon_orchestration_item(&token, delay, true).await.expect("it is released");
        assert_eq!(lost.hits(), times);
        assert_refused(Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await);
        let fetched = b.fetch_orchestration_item(LONG, PATIENCE, None).await.expect("a fetch");
        let (item, token, attempts) = fetched.expect("a turn without a lock");
        assert_eq!((item.messages, attempts), (vec![raised(INSTANCE, "paid")], 1));
        Delta::event(INSTANCE, 2, "paid").ack(&b, &token).await.expect("the turn commits");
        assert!(fetch_turn_now(&a, LONG).await.is_none(), "a message was handled twice");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_answer_was_lost_in_an_outage_is_released_after_the_outage() {
    let (fixture, a, b) = Fixture::with_two_providers().await;
    begin_with_activities(&a, INSTANCE, 0).await;
    b.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
    let gate = Gate::new();
    let claim = fixture.rule("a", WireAction::HoldAfter(gate.clone())).on(RequestKind::Replace).times(1);
    fixture.account.wire().add(claim);
    let outage = fixture.account.wire().add(fixture.rule("a", WireAction::FailConnection).on(RequestKind::Replace));
    let unread = fixture.account.wire().add(fixture.rule("a", WireAction::FailConnection).on(RequestKind::Read));
    let a = Arc::new(a);
    let caller = a.clone();
    let fetching = tokio::spawn(async move { fetch_turn(&caller, LONG).await });
    within("the claim", gate.reached()).await;
    assert!(fixture.instance(INSTANCE).await["lock"].is_object(), "the claim was carried out");
    until("an attempt that fails", || outage.hits() + unread.hits() > 0).await;
    fetching.abort();
    outage.remove();
    unread.remove();
    gate.open();
    let (item, token) = fetch_turn(&b, LONG).await;
    assert_eq!(item.messages, [raised(INSTANCE, "paid")]);
    Delta::event(INSTANCE, 2, "paid").ack(&b, &token).await.expect("the turn commits");
}
