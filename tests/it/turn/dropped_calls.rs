//! A caller may drop the future of an ack, a release or a renewal at any await point, as in a timeout or a shutdown.
//! The provider finishes the call all the same, and the same provider continues with the instance at once. Locks last
//! longer than any test, and no recovery delivers pending messages: no result here comes from an expired lock or a
//! recovery.

use crate::fixture::*;
use duroxide::providers::{Provider, ProviderError};
use duroxide_cosmos::{Clock, CosmosDBProvider};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use futures::future::BoxFuture;
use std::{
    sync::{
        atomic::{AtomicI64, Ordering},
        Arc,
    },
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
    /// The ack also writes the session.
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

/// Every call, with and without inline claims.
fn every() -> impl Iterator<Item = (Call, bool)> {
    ALL.into_iter().flat_map(|call| [(call, false), (call, true)])
}

/// The delay of an abandoned turn.
const MOMENT: Duration = Duration::from_millis(20);

/// A provider whose messages only the turn that sends them delivers, and no recovery.
async fn provider(fixture: &Fixture, name: &str, inline_claims: bool) -> CosmosDBProvider {
    fixture
        .provider_with(name, test_config().with_reconciler_age_threshold(LONG).with_inline_claims(inline_claims))
        .await
}

type Calling<'a> = BoxFuture<'a, Result<(), ProviderError>>;

/// Writes the documents that the call needs, fetches them with `a`, and returns the call.
async fn prepare(a: &CosmosDBProvider, call: Call) -> Calling<'_> {
    match call {
        Call::Ack | Call::StagedAck | Call::Abandon | Call::DelayedAbandon => {
            begin(a, "i", Vec::new(), Vec::new()).await;
            a.enqueue_for_orchestrator(external("i", "first"), None).await.unwrap();
            let (_, token, attempts) = next_turn(a, LONG).await;
            assert_eq!(attempts, 1);
            if call != Call::DelayedAbandon {
                // The next message of the instance. The process knows of it and holds it until the turn has ended.
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
                    let (events, messages) = (vec![filler("i", 1, 2)], vec![start_child("child", Some("i"))]);
                    Box::pin(async move { commit(a, &token, events, work, messages, running()).await })
                }
            }
        }
        Call::AckOfWork | Call::AckOfSessionWork | Call::AbandonOfWork => {
            let session = (call == Call::AckOfSessionWork).then_some("s");
            begin(a, "i", vec![activity_with("i", 2, session, None)], Vec::new()).await;
            let token = take_activity(a).await.0;
            match call {
                Call::AbandonOfWork => Box::pin(async move { a.abandon_work_item(&token, None, false).await }),
                _ => Box::pin(async move { a.ack_work_item(&token, Some(done("i", 2))).await }),
            }
        }
    }
}

/// The next activity, of a session or not: its token and its attempts.
async fn take_activity(provider: &CosmosDBProvider) -> (String, u32) {
    let owner = duroxide::providers::SessionFetchConfig { owner_id: "worker".to_owned(), lock_timeout: LONG };
    let tags = duroxide::providers::TagFilter::Any;
    let fetched = provider.fetch_work_item(LONG, PATIENCE, Some(&owner), &tags).await.unwrap();
    let (_, token, attempts) = fetched.expect("an activity");
    (token, attempts)
}

/// Fetches turns of one provider until each of these instances has had one. Returns their messages and attempts.
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

/// The same provider gets the results of the call, once.
async fn goes_on(a: &CosmosDBProvider, call: Call, case: &str) {
    match call {
        Call::Ack | Call::StagedAck => {
            // The next message, and the start of the child, which is an outbox message of the turn.
            assert_eq!(turns_of(a, case, &["i", "child"]).await, [(1, 1), (1, 1)], "{case}");
            assert_eq!(take_activity(a).await.1, 1, "{case}");
            let history = a.read("i").await.unwrap();
            assert_eq!(history.iter().map(|event| event.event_id).collect::<Vec<_>>(), [1, 2], "{case}");
        }
        Call::AckOfWork | Call::AckOfSessionWork => {
            assert_eq!(turns_of(a, case, &["i"]).await, [(1, 1)], "{case}");
        }
        Call::Abandon => assert_eq!(turns_of(a, case, &["i"]).await, [(2, 2)], "{case}"),
        Call::DelayedAbandon => assert_eq!(turns_of(a, case, &["i"]).await, [(1, 2)], "{case}"),
        Call::AbandonOfWork => assert_eq!(take_activity(a).await.1, 2, "{case}"),
    }
}

#[tokio::test]
async fn a_call_dropped_after_any_number_of_polls_is_finished() {
    for (call, inline_claims) in every() {
        for polls in 1.. {
            let fixture = Fixture::new(1);
            let a = provider(&fixture, "a", inline_claims).await;
            let calling = prepare(&a, call).await;
            if let Some(returned) = (Polls { future: Some(calling), left: polls }).await {
                returned.unwrap();
                assert!(polls > 1, "{call:?}: a call that never waits was not dropped at all");
                break;
            }
            goes_on(&a, call, &format!("{call:?}, inline claims: {inline_claims}, dropped after {polls} polls")).await;
        }
    }
}

/// Drops a call while the request after `passing` others is held. Returns whether there was such a request.
async fn drop_at((call, inline_claims): (Call, bool), passing: u64, before: bool) -> bool {
    let fixture = Fixture::new(1);
    let a = provider(&fixture, "a", inline_claims).await;
    let calling = prepare(&a, call).await;
    let gate = Gate::new();
    let hold = if before { WireAction::HoldBefore(gate.clone()) } else { WireAction::HoldAfter(gate.clone()) };
    // The provider's own polls are no part of the call.
    let of_the_call = WireRule::new(hold).client("a").matching(|r| about_items(r) && r.kind != RequestKind::Query);
    fixture.account.wire().add(of_the_call.skip(passing).times(1));
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
    let case = format!(
        "{call:?}, inline claims: {inline_claims}, dropped with request {number} held, before the store: {before}"
    );
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
async fn a_dropped_renewal_is_valid_if_it_was_written() {
    for of_work in [false, true] {
        let ahead = Arc::new(AtomicI64::new(0));
        let shift = ahead.clone();
        let system = || i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
        let clock = Clock::from_fn(move || u64::try_from(system() + shift.load(Ordering::SeqCst)).unwrap());
        let fixture = Fixture::new(1);
        let a = fixture.provider_with("a", test_config().with_clock(clock)).await;
        let work = if of_work { vec![activity("i", 2)] } else { Vec::new() };
        begin(&a, "i", work, Vec::new()).await;
        a.enqueue_for_orchestrator(external("i", "news"), None).await.unwrap();
        let token = if of_work { next_activity(&a, LONG).await.1 } else { next_turn(&a, LONG).await.1 };
        let gate = Gate::new();
        let renewal = WireRule::new(WireAction::HoldAfter(gate.clone())).client("a").on(RequestKind::Replace);
        fixture.account.wire().add(renewal.matching(|r| goes_to(r, "i")).times(1));
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
        // All other workers see the renewed lock, and its owner must rely on it, too.
        ahead.store(i64::try_from(2 * LONG.as_millis()).unwrap(), Ordering::SeqCst);
        let acked = match of_work {
            true => a.ack_work_item(&token, Some(done("i", 2))).await,
            false => commit(&a, &token, vec![filler("i", 1, 2)], Vec::new(), Vec::new(), running()).await,
        };
        acked.unwrap_or_else(|error| panic!("of work: {of_work}: {error}"));
    }
}

#[tokio::test]
async fn a_shutdown_waits_for_an_ack_that_was_dropped() {
    for before in [true, false] {
        let fixture = Fixture::new(1);
        let (a, b) = (provider(&fixture, "a", true).await, provider(&fixture, "b", true).await);
        let calling = prepare(&a, Call::Ack).await;
        let gate = Gate::new();
        let hold = if before { WireAction::HoldBefore(gate.clone()) } else { WireAction::HoldAfter(gate.clone()) };
        fixture.account.wire().add(WireRule::new(hold).client("a").on(RequestKind::Batch).times(1));
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
