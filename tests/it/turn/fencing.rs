//! A worker that has lost its lock changes nothing any more, whatever the clocks say. The lock was taken over, has
//! expired or was released.

use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};
use std::{sync::Arc, time::Duration};

const INSTANCE: &str = "order";

/// The way in which the first owner loses its lock.
#[derive(Clone, Copy, Debug)]
enum End {
    /// The lock expires for all workers.
    Expires,
    /// The owner's clock is behind, so the lock is still valid for the owner.
    ExpiresForOthers,
}

/// The progress of the new owner when the former owner continues.
#[derive(Clone, Copy, Debug, PartialEq)]
enum NewOwner {
    HasClaimed,
    HasCommitted,
}

/// An instance whose first turn "a" has fetched, and a provider "b" that takes it over.
struct Takeover {
    fixture: Fixture,
    a: Arc<CosmosDBProvider>,
    b: CosmosDBProvider,
    token: String,
    end: End,
}

impl Takeover {
    async fn prepare(end: End) -> Self {
        let fixture = Fixture::with_container().await;
        let (a, b) = (fixture.impatient_provider("a").await, fixture.impatient_provider("b").await);
        a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
        let lock = if matches!(end, End::Expires) { SHORT } else { LONG };
        let (_, token) = fetch_turn(&a, lock).await;
        Self { fixture, a: Arc::new(a), b, token, end }
    }

    /// "b" takes the instance over, and commits if `new_owner` says so. Returns its token.
    async fn take_over(&self, new_owner: NewOwner) -> String {
        if matches!(self.end, End::ExpiresForOthers) {
            self.fixture.expire_lock_for_others(INSTANCE).await;
        }
        let (item, token) = fetch_turn(&self.b, LONG).await;
        assert_eq!(item.messages, [start(INSTANCE)]);
        assert_eq!(item.history, []);
        if new_owner == NewOwner::HasCommitted {
            new_turn().ack(&self.b, &token).await.expect("the new owner commits");
        }
        token
    }

    /// The turn of the new owner is the only one that is stored or can be stored.
    async fn belongs_to_the_new_owner(&self, token: &str, new_owner: NewOwner) {
        if new_owner == NewOwner::HasClaimed {
            new_turn().ack(&self.b, token).await.expect("the new owner commits");
        }
        for provider in [self.a.as_ref(), &self.fixture.impatient_provider("c").await] {
            assert_eq!(provider.read(INSTANCE).await.expect("a history"), new_turn().events);
            assert!(fetch_turn_now(provider, LONG).await.is_none(), "a message was handled twice");
        }
        let work = self.fixture.documents_of_type(INSTANCE, "activity").await;
        assert_eq!(work.len(), new_turn().activities.len());
        assert!(self.fixture.documents_of_type(INSTANCE, "staged").await.is_empty());
    }
}

fn new_turn() -> Delta {
    let mut delta = Delta::start(INSTANCE, 2);
    // Events get their time when they are made. A fixed time makes them equal everywhere.
    for event in &mut delta.events {
        event.timestamp_ms = 1;
    }
    delta
}

/// The batch of the former owner that is on its way during the takeover.
#[derive(Clone, Copy, Debug)]
enum Late {
    /// The only batch of a turn that fits one.
    Whole,
    /// A batch with a part of a large turn.
    Part(u64),
    /// The commit of a large turn.
    Commit,
}

async fn a_late_batch_changes_nothing(late: Late, end: End, new_owner: NewOwner) {
    // On a busy machine the short lock may expire before its owner sends the batch.
    while !a_batch_comes_late(late, end, new_owner).await {}
}

/// Runs one case. Returns `false` if the lock expired too early.
async fn a_batch_comes_late(late: Late, end: End, new_owner: NewOwner) -> bool {
    println!("{late:?}, {end:?}, {new_owner:?}");
    let takeover = Takeover::prepare(end).await;
    let Takeover { fixture, a, token, .. } = &takeover;
    let gate = Gate::new();
    let held = fixture.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch);
    let (held, activities) = match late {
        Late::Whole => (held, 10),
        Late::Part(part) => (held.skip(part), 1_000),
        Late::Commit => (held.matching(commits_parts), 1_000),
    };
    fixture.account.wire().add(held);
    let (owner, stale) = (a.clone(), token.clone());
    let mut ack = tokio::spawn(async move { Delta::start(INSTANCE, activities).ack(&owner, &stale).await });
    tokio::select! {
        biased;
        () = within("the late batch", gate.reached()) => {}
        outcome = &mut ack => {
            let error = outcome.expect("no panic").expect_err("an ack that never sent its batch");
            assert!(matches!(end, End::Expires), "{error:?}");
            return false;
        }
    }

    let new_token = takeover.take_over(new_owner).await;
    let before = fixture.partition(INSTANCE).await;
    let answered = fixture.account.stats_of("a").of(RequestKind::Batch).response_bytes;
    gate.open();
    let outcome = within("the stale ack", ack).await.expect("no panic");
    until("the late batch's answer", || fixture.account.stats_of("a").of(RequestKind::Batch).response_bytes > answered)
        .await;

    let error = outcome.expect_err("a stale ack");
    match end {
        End::ExpiresForOthers => assert!(!error.is_retryable(), "{error:?}"),
        End::Expires => {}
    }
    assert_eq!(fixture.partition(INSTANCE).await, before);
    assert_refused(Delta::start(INSTANCE, activities).ack(a, token).await);
    assert_refused(Delta::failure(INSTANCE, 1).ack(a, token).await);
    assert_eq!(fixture.partition(INSTANCE).await, before);
    takeover.belongs_to_the_new_owner(&new_token, new_owner).await;
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_of_the_former_owner_that_arrives_after_the_takeover_changes_nothing() {
    for end in [End::Expires, End::ExpiresForOthers] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            a_late_batch_changes_nothing(Late::Whole, end, new_owner).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_staged_part_of_the_former_owner_that_arrives_after_the_takeover_changes_nothing() {
    for part in [0, 5] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            a_late_batch_changes_nothing(Late::Part(part), End::ExpiresForOthers, new_owner).await;
        }
    }
    a_late_batch_changes_nothing(Late::Part(3), End::Expires, NewOwner::HasCommitted).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_staged_turn_of_the_former_owner_is_not_committed_after_the_takeover() {
    for end in [End::Expires, End::ExpiresForOthers] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            a_late_batch_changes_nothing(Late::Commit, end, new_owner).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_after_the_takeover_is_refused_and_changes_nothing() {
    for end in [End::Expires, End::ExpiresForOthers] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            let takeover = Takeover::prepare(end).await;
            let new_token = takeover.take_over(new_owner).await;
            let before = takeover.fixture.partition(INSTANCE).await;
            assert_refused(takeover.a.renew_orchestration_item_lock(&takeover.token, LONG).await);
            assert_eq!(takeover.fixture.partition(INSTANCE).await, before);
            takeover.belongs_to_the_new_owner(&new_token, new_owner).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandon_after_the_takeover_is_refused_and_changes_nothing() {
    for end in [End::Expires, End::ExpiresForOthers] {
        for new_owner in [NewOwner::HasClaimed, NewOwner::HasCommitted] {
            for (delay, ignore_attempt) in [(None, false), (None, true), (Some(LONG), false), (Some(LONG), true)] {
                println!("{end:?}, {new_owner:?}, delay {delay:?}, ignore the attempt: {ignore_attempt}");
                let takeover = Takeover::prepare(end).await;
                let new_token = takeover.take_over(new_owner).await;
                let before = takeover.fixture.partition(INSTANCE).await;
                let token = &takeover.token;
                assert_refused(takeover.a.abandon_orchestration_item(token, delay, ignore_attempt).await);
                assert_eq!(takeover.fixture.partition(INSTANCE).await, before);
                takeover.belongs_to_the_new_owner(&new_token, new_owner).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_token_is_refused_by_ack_and_renew_but_not_by_abandon_even_without_a_takeover() {
    for delay in [None, Some(Duration::from_millis(1))] {
        let fixture = Fixture::with_container().await;
        let a = fixture.impatient_provider("a").await;
        begin_with_activities(&a, INSTANCE, 0).await;
        a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let lock = Duration::from_millis(300);
        let (_, token) = fetch_turn(&a, lock).await;
        expiry(lock).await;
        let before = fixture.partition(INSTANCE).await;
        assert_refused(Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await);
        assert_refused(a.renew_orchestration_item_lock(&token, LONG).await);
        assert_refused(Delta::failure(INSTANCE, 2).ack(&a, &token).await);
        assert_eq!(fixture.partition(INSTANCE).await, before);
        a.abandon_orchestration_item(&token, delay, false).await.expect("an expired token can be released");

        let (item, token) = fetch_turn(&fixture.impatient_provider("b").await, LONG).await;
        assert_eq!(item.messages, [raised(INSTANCE, "paid")]);
        assert_refused(Delta::event(INSTANCE, 2, "paid").ack(&a, &token).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_identical_acks_exactly_one_succeeds() {
    for activities in [3, 300] {
        for at_once in [false, true] {
            let fixture = Fixture::with_container().await;
            let a = fixture.impatient_provider("a").await;
            a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
            let (_, token) = fetch_turn(&a, LONG).await;
            let delta = Delta::start(INSTANCE, activities);
            let (first, second) = if at_once {
                tokio::join!(delta.ack(&a, &token), delta.ack(&a, &token))
            } else {
                (delta.ack(&a, &token).await, delta.ack(&a, &token).await)
            };
            first.expect("the first");
            assert_refused(second);
            assert_eq!(fixture.impatient_provider("b").await.read(INSTANCE).await.expect("a history"), delta.events);
            assert_eq!(fixture.documents_of_type(INSTANCE, "activity").await.len() as u64, activities);
        }
    }
}
