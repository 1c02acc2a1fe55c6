//! A caller may drop the ack, the release or the renewal of what it holds: a timeout or a shutdown does that, at any
//! await point. The call is finished all the same, and the same provider goes on with the instance at once. Locks last
//! longer than any test, and nobody delivers left-over messages: nothing here comes from a lock's end or from a recovery.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, ProviderError};
use duroxide_cosmos::{Clock, CosmosDBProvider};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use futures::future::BoxFuture;
use scene::*;
use std::{
    future::Future,
    pin::Pin,
    sync::{
        atomic::{AtomicI64, Ordering},
        Arc,
    },
    task::{Context, Poll},
    time::Duration,
};

/// The call that is dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    /// The commit of a turn that fits one batch.
    Ack,
    /// The commit of a turn that is staged: 120 activities.
    StagedAck,
    AckOfWork,
    /// Its session is written, too.
    AckOfSessionWork,
    Abandon,
    DelayedAbandon,
    AbandonOfWork,
}

const ALL: [Call; 7] = [
    Call::Ack,
    Call::StagedAck,
    Call::AckOfWork,
    Call::AckOfSessionWork,
    Call::Abandon,
    Call::DelayedAbandon,
    Call::AbandonOfWork,
];

/// Every call, with and without claims that go with it.
fn every() -> impl Iterator<Item = (Call, bool)> {
    ALL.into_iter().flat_map(|call| [(call, false), (call, true)])
}

/// The delay of a turn that is abandoned.
const MOMENT: Duration = Duration::from_millis(20);

/// A provider whose messages are delivered by the turn that sends them, and by no recovery.
async fn provider(scene: &Scene, name: &str, inline_claims: bool) -> CosmosDBProvider {
    scene.provider_with(name, quiet().with_reconciler_age_threshold(LONG).with_inline_claims(inline_claims)).await
}

type Calling<'a> = BoxFuture<'a, Result<(), ProviderError>>;

/// Puts what the call needs into the store, takes it with `a`, and returns the call.
async fn prepare(a: &CosmosDBProvider, call: Call) -> Calling<'_> {
    match call {
        Call::Ack | Call::StagedAck | Call::Abandon | Call::DelayedAbandon => {
            begin(a, "i", Vec::new(), Vec::new()).await;
            a.enqueue_for_orchestrator(external("i", "first"), None).await.unwrap();
            let (_, token, attempts) = next_turn(a, LONG).await;
            assert_eq!(attempts, 1);
            if call != Call::DelayedAbandon {
                // The instance's next message, which the process knows of and keeps until the turn has ended.
                a.enqueue_for_orchestrator(external("i", "second"), None).await.unwrap();
            }
            match call {
                Call::Abandon => Box::pin(async move { a.abandon_orchestration_item(&token, None, false).await }),
                Call::DelayedAbandon => {
                    Box::pin(async move { a.abandon_orchestration_item(&token, Some(MOMENT), false).await })
                }
                _ => {
                    let activities = if call == Call::StagedAck { 120 } else { 1 };
                    let work = (10..10 + activities).map(|id| activity("i", id)).collect();
                    let (events, messages) = (vec![note("i", 1, 2)], vec![start_child("child", Some("i"))]);
                    Box::pin(async move { commit(a, &token, events, work, messages, running()).await })
                }
            }
        }
        Call::AckOfWork | Call::AckOfSessionWork | Call::AbandonOfWork => {
            let session = (call == Call::AckOfSessionWork).then_some("s");
            begin(a, "i", vec![activity_with("i", 2, session, None)], Vec::new()).await;
            let token = take_work(a).await.0;
            match call {
                Call::AbandonOfWork => Box::pin(async move { a.abandon_work_item(&token, None, false).await }),
                _ => Box::pin(async move { a.ack_work_item(&token, Some(done("i", 2))).await }),
            }
        }
    }
}

/// The next activity, of a session or not: its token, and its attempts.
async fn take_work(provider: &CosmosDBProvider) -> (String, u32) {
    let owner = duroxide::providers::SessionFetchConfig { owner_id: "worker".to_owned(), lock_timeout: LONG };
    let tags = duroxide::providers::TagFilter::Any;
    let fetched = provider.fetch_work_item(LONG, PATIENCE, Some(&owner), &tags).await.unwrap();
    let (_, token, attempts) = fetched.expect("an activity");
    (token, attempts)
}

/// The next turns of one provider, until each of these instances has had one: its messages, and their attempts.
async fn turns_of(a: &CosmosDBProvider, case: &str, instances: &[&str]) -> Vec<(usize, u32)> {
    let mut found = vec![None; instances.len()];
    while found.iter().any(Option::is_none) {
        let fetched = a.fetch_orchestration_item(LONG, PATIENCE, None).await.unwrap();
        let missing: Vec<_> = instances.iter().zip(&found).filter(|(_, found)| found.is_none()).collect();
        let (item, _, attempts) = fetched.unwrap_or_else(|| panic!("{case}: no turn came for {missing:?}"));
        let at = instances.iter().position(|instance| *instance == item.instance).expect("one of them");
        found[at] = Some((item.messages.len(), attempts));
    }
    found.into_iter().flatten().collect()
}

/// The same provider gets the consequences of the call, once.
async fn goes_on(a: &CosmosDBProvider, call: Call, case: &str) {
    match call {
        Call::Ack | Call::StagedAck => {
            // The next message, and the start of the child, which is an outbox message of the turn.
            assert_eq!(turns_of(a, case, &["i", "child"]).await, [(1, 1), (1, 1)], "{case}");
            assert_eq!(take_work(a).await.1, 1, "{case}");
            let history = a.read("i").await.unwrap();
            assert_eq!(history.iter().map(|event| event.event_id).collect::<Vec<_>>(), [1, 2], "{case}");
        }
        Call::AckOfWork | Call::AckOfSessionWork => {
            assert_eq!(turns_of(a, case, &["i"]).await, [(1, 1)], "{case}");
        }
        Call::Abandon => assert_eq!(turns_of(a, case, &["i"]).await, [(2, 2)], "{case}"),
        Call::DelayedAbandon => assert_eq!(turns_of(a, case, &["i"]).await, [(1, 2)], "{case}"),
        Call::AbandonOfWork => assert_eq!(take_work(a).await.1, 2, "{case}"),
    }
}

/// Polls a future so many times at most, then drops it.
struct Polls<'a, T> {
    future: Option<BoxFuture<'a, T>>,
    left: usize,
}

impl<T> Future for Polls<'_, T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        self.left -= 1;
        let Some(future) = &mut self.future else { return Poll::Ready(None) };
        let polled = future.as_mut().poll(context).map(Some);
        if polled.is_pending() && self.left == 0 {
            self.future = None;
            return Poll::Ready(None);
        }
        polled
    }
}

#[tokio::test]
async fn a_call_dropped_after_any_number_of_polls_is_finished() {
    for (call, inline_claims) in every() {
        for polls in 1.. {
            let scene = Scene::new(1);
            let a = provider(&scene, "a", inline_claims).await;
            let calling = prepare(&a, call).await;
            if let Some(returned) = (Polls { future: Some(calling), left: polls }).await {
                returned.unwrap();
                assert!(polls > 1, "{call:?}: a call that never waits was not dropped at all");
                break;
            }
            goes_on(&a, call, &format!("{call:?}, hand-over: {inline_claims}, dropped after {polls} polls")).await;
        }
    }
}

/// Drops a call while the request after `passing` others is held; whether there was such a request.
async fn drop_at((call, inline_claims): (Call, bool), passing: u64, before: bool) -> bool {
    let scene = Scene::new(1);
    let a = provider(&scene, "a", inline_claims).await;
    let calling = prepare(&a, call).await;
    let gate = Gate::new();
    let hold = if before { WireAction::HoldBefore(gate.clone()) } else { WireAction::HoldAfter(gate.clone()) };
    // The provider's own looks for work are no part of the call.
    let of_the_call = WireRule::new(hold).client("a").matching(|r| about_items(r) && r.kind != RequestKind::Query);
    scene.account.wire().add(of_the_call.skip(passing).times(1));
    tokio::select! {
        biased;
        () = gate.reached() => {}
        returned = calling => {
            returned.unwrap();
            return false;
        }
    }
    gate.open();
    let number = passing + 1;
    let case =
        format!("{call:?}, hand-over: {inline_claims}, dropped with request {number} held, before the store: {before}");
    goes_on(&a, call, &case).await;
    true
}

#[tokio::test]
async fn a_call_dropped_while_any_of_its_requests_is_on_its_way_is_finished() {
    for call in every() {
        let mut held = 0;
        while drop_at(call, held, true).await {
            assert!(drop_at(call, held, false).await);
            held += 1;
        }
        assert!(held >= 1, "{call:?}: one request at least");
    }
}

#[tokio::test]
async fn a_renewal_that_was_dropped_counts_if_it_was_written() {
    for of_work in [false, true] {
        let ahead = Arc::new(AtomicI64::new(0));
        let shift = ahead.clone();
        let system = || i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
        let clock = Clock::from_fn(move || u64::try_from(system() + shift.load(Ordering::SeqCst)).unwrap());
        let scene = Scene::new(1);
        let a = scene.provider_with("a", quiet().with_clock(clock)).await;
        let work = if of_work { vec![activity("i", 2)] } else { Vec::new() };
        begin(&a, "i", work, Vec::new()).await;
        a.enqueue_for_orchestrator(external("i", "news"), None).await.unwrap();
        let token = if of_work { next_work(&a, LONG).await.1 } else { next_turn(&a, LONG).await.1 };
        let gate = Gate::new();
        let renewal = WireRule::new(WireAction::HoldAfter(gate.clone())).client("a").on(RequestKind::Replace);
        scene.account.wire().add(renewal.matching(|r| goes_to(r, "i")).times(1));
        let renewing: Calling<'_> = match of_work {
            true => Box::pin(a.renew_work_item_lock(&token, 3 * LONG)),
            false => Box::pin(a.renew_orchestration_item_lock(&token, 3 * LONG)),
        };
        tokio::select! {
            biased;
            () = gate.reached() => {}
            _ = renewing => panic!("the renewal was to be held"),
        }
        gate.open();
        // The lock is the renewed one for everybody else, and so it must be for its owner.
        ahead.store(i64::try_from(2 * LONG.as_millis()).unwrap(), Ordering::SeqCst);
        let acked = match of_work {
            true => a.ack_work_item(&token, Some(done("i", 2))).await,
            false => commit(&a, &token, vec![note("i", 1, 2)], Vec::new(), Vec::new(), running()).await,
        };
        acked.unwrap_or_else(|error| panic!("of work: {of_work}: {error}"));
    }
}

#[tokio::test]
async fn a_shutdown_waits_for_an_ack_that_was_dropped() {
    for before in [true, false] {
        let scene = Scene::new(1);
        let (a, b) = (provider(&scene, "a", true).await, provider(&scene, "b", true).await);
        let calling = prepare(&a, Call::Ack).await;
        let gate = Gate::new();
        let hold = if before { WireAction::HoldBefore(gate.clone()) } else { WireAction::HoldAfter(gate.clone()) };
        scene.account.wire().add(WireRule::new(hold).client("a").on(RequestKind::Batch).times(1));
        tokio::select! {
            biased;
            () = gate.reached() => {}
            _ = calling => panic!("the commit was to be held"),
        }
        let (stopped, ()) = tokio::join!(a.shutdown_within(PATIENCE), async { gate.open() });
        assert!(stopped);
        goes_on(&b, Call::Ack, &format!("another provider, dropped before the store: {before}")).await;
    }
}
