//! A shutdown drops the future of a fetch at any await point. The provider releases the claims of such a fetch at once,
//! without counting an attempt.

use crate::fixture::*;
use duroxide::providers::{Provider, ProviderError, SessionFetchConfig, TagFilter};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use futures::future::BoxFuture;
use std::time::Duration;

/// The item that a dropped fetch claims.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Item {
    /// The first turn of an instance: the claim creates its document.
    FirstTurn,
    /// A later turn: the claim changes the instance's document.
    LaterTurn,
    Activity,
    /// An activity with a session: two locks in two partitions.
    SessionActivity,
}

const ALL: [Item; 4] = [Item::FirstTurn, Item::LaterTurn, Item::Activity, Item::SessionActivity];

/// Enqueues one item with a provider that has no other part in the test.
async fn prepare(fixture: &Fixture, item: Item) {
    let maker = fixture.provider("maker").await;
    match item {
        Item::FirstTurn => maker.enqueue_for_orchestrator(start("i"), None).await.unwrap(),
        Item::LaterTurn => {
            begin(&maker, "i", Vec::new(), Vec::new()).await;
            maker.enqueue_for_orchestrator(external("i", "news"), None).await.unwrap();
        }
        Item::Activity => begin(&maker, "i", vec![activity("i", 2)], Vec::new()).await,
        Item::SessionActivity => {
            begin(&maker, "i", vec![activity_with("i", 2, Some("s"), None)], Vec::new()).await;
        }
    }
    maker.shutdown().await;
}

/// A fetch. It returns the number of attempts.
fn fetch<'a>(
    provider: &'a CosmosDBProvider,
    item: Item,
    owner: &'a SessionFetchConfig,
    patience: std::time::Duration,
) -> BoxFuture<'a, Result<Option<u32>, ProviderError>> {
    Box::pin(async move {
        Ok(match item {
            Item::FirstTurn | Item::LaterTurn => {
                provider.fetch_orchestration_item(LONG, patience, None).await?.map(|(_, _, attempts)| attempts)
            }
            Item::Activity => {
                let fetched = provider.fetch_work_item(LONG, patience, None, &TagFilter::Any).await?;
                fetched.map(|(_, _, attempts)| attempts)
            }
            Item::SessionActivity => {
                let fetched = provider.fetch_work_item(LONG, patience, Some(owner), &TagFilter::Any).await?;
                fetched.map(|(_, _, attempts)| attempts)
            }
        })
    })
}

/// After `a` has released its claims, `b` gets the item at once, with the first attempt.
async fn is_free(a: &CosmosDBProvider, b: &CosmosDBProvider, item: Item, case: &str) {
    a.shutdown().await;
    let owner = session_owner("worker of b");
    let fetched = fetch(b, item, &owner, NOW).await.unwrap();
    assert_eq!(fetched, Some(1), "{item:?}, {case}: locked, or an attempt was counted");
}

#[tokio::test]
async fn a_fetch_dropped_after_any_number_of_polls_leaves_nothing_locked_and_nothing_counted() {
    for item in ALL {
        for polls in 1.. {
            let fixture = Fixture::new(1);
            let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
            prepare(&fixture, item).await;
            let owner = session_owner("worker of a");
            let future = Some(fetch(&a, item, &owner, PATIENCE));
            if (Polls { future, left: polls }).await.is_some() {
                assert!(polls > 1, "a fetch that never waits was not dropped at all");
                break;
            }
            is_free(&a, &b, item, &format!("dropped after {polls} polls")).await;
        }
    }
}

/// Drops a fetch while the request after `passing` others is held. Returns whether there was such a request.
async fn drop_at(item: Item, passing: u64, before: bool) -> bool {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    prepare(&fixture, item).await;
    let gate = Gate::new();
    let hold = if before { WireAction::HoldBefore(gate.clone()) } else { WireAction::HoldAfter(gate.clone()) };
    fixture.account.wire().add(WireRule::new(hold).client("a").matching(about_items).skip(passing).times(1));
    let owner = session_owner("worker of a");
    tokio::select! {
        biased;
        () = gate.reached() => {}
        fetched = fetch(&a, item, &owner, PATIENCE) => {
            assert_eq!(fetched.unwrap(), Some(1));
            return false;
        }
    }
    gate.open();
    is_free(&a, &b, item, &format!("dropped with request {} held, before the store: {before}", passing + 1)).await;
    true
}

#[tokio::test]
async fn a_fetch_dropped_while_any_of_its_requests_is_on_its_way_leaves_nothing_locked_and_nothing_counted() {
    for item in ALL {
        let mut held = 0;
        while drop_at(item, held, true).await {
            assert!(drop_at(item, held, false).await);
            held += 1;
        }
        assert!(held >= 2, "{item:?}: a poll and a claim at least, not {held} requests");
    }
}

#[tokio::test]
async fn an_item_that_a_dropped_fetch_released_is_fetched_again_by_the_same_provider() {
    for item in ALL {
        let fixture = Fixture::new(1);
        let a = fixture.provider("a").await;
        prepare(&fixture, item).await;
        let gate = Gate::new();
        let hold = WireRule::new(WireAction::HoldAfter(gate.clone())).client("a").matching(about_items);
        fixture.account.wire().add(hold.skip(1).times(1));
        let owner = session_owner("worker of a");
        tokio::select! {
            biased;
            () = gate.reached() => {}
            _ = fetch(&a, item, &owner, PATIENCE) => panic!("the claim was to be held"),
        }
        gate.open();
        assert_eq!(fetch(&a, item, &owner, PATIENCE).await.unwrap(), Some(1), "{item:?}");
    }
}

#[tokio::test]
async fn a_provider_that_saw_the_claim_of_a_dropped_fetch_does_not_wait_for_its_lock_to_expire() {
    for item in [Item::FirstTurn, Item::LaterTurn, Item::Activity] {
        let fixture = Fixture::new(1);
        let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
        prepare(&fixture, item).await;
        // The claim is stored, and its answer is held.
        let gate = Gate::new();
        let claim = WireRule::new(WireAction::HoldAfter(gate.clone())).client("a").times(1);
        let claim = claim.on(RequestKind::Create).on(RequestKind::Replace).matching(|r| goes_to(r, "i"));
        fixture.account.wire().add(claim);
        let (owner, other) = (session_owner("worker of a"), session_owner("worker of b"));
        tokio::select! {
            biased;
            () = gate.reached() => {}
            _ = fetch(&a, item, &owner, PATIENCE) => panic!("the claim was to be held"),
        }
        // Now the item is locked without an owner, and `b` sees that it is locked.
        assert_eq!(fetch(&b, item, &other, NOW).await.unwrap(), None, "{item:?}: not claimed yet");
        gate.open();
        assert_eq!(fetch(&b, item, &other, PATIENCE).await.unwrap(), Some(1), "{item:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_ended_too_late_counts_an_attempt_even_when_its_worker_leaves() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    begin(&a, "i", vec![activity("i", 2)], Vec::new()).await;
    let lock = Duration::from_millis(300);
    let (_, token, attempts) = next_activity(&a, lock).await;
    assert_eq!(attempts, 1);
    // The lock has expired when the answer arrives.
    let too_late = async {
        while a.renew_work_item_lock(&token, Duration::from_millis(1)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, too_late).await.expect("it expires");
    a.ack_work_item(&token, Some(done("i", 2))).await.unwrap_err();
    a.shutdown().await;
    let (_, _, attempts) = next_activity(&fixture.provider("b").await, LONG).await;
    assert_eq!(attempts, 2, "it has run once");
}
