//! Shutting down drops fetches at any await point. Whatever such a fetch had begun to take is given back at once, and the
//! attempt is not counted.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, ProviderError, SessionFetchConfig, TagFilter};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use futures::future::BoxFuture;
use scene::*;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

/// What is fetched, and dropped.
#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    /// The first turn of an instance: the claim makes its document.
    FirstTurn,
    /// A later turn: the claim changes its document.
    LaterTurn,
    Activity,
    /// An activity with a session: two locks in two partitions.
    SessionActivity,
}

const ALL: [What; 4] = [What::FirstTurn, What::LaterTurn, What::Activity, What::SessionActivity];

fn session(owner: &str) -> SessionFetchConfig {
    SessionFetchConfig { owner_id: owner.to_owned(), lock_timeout: LONG }
}

/// Puts one thing into the store, by a provider that takes no part in what follows.
async fn prepare(scene: &Scene, what: What) {
    let maker = scene.provider("maker").await;
    match what {
        What::FirstTurn => maker.enqueue_for_orchestrator(start("i"), None).await.unwrap(),
        What::LaterTurn => {
            begin(&maker, "i", Vec::new(), Vec::new()).await;
            maker.enqueue_for_orchestrator(external("i", "news"), None).await.unwrap();
        }
        What::Activity => begin(&maker, "i", vec![activity("i", 2)], Vec::new()).await,
        What::SessionActivity => {
            begin(&maker, "i", vec![activity_with("i", 2, Some("s"), None)], Vec::new()).await;
        }
    }
    maker.shutdown().await;
}

/// A fetch; the attempts that it tells of.
fn fetch<'a>(
    provider: &'a CosmosDBProvider,
    what: What,
    owner: &'a SessionFetchConfig,
    patience: std::time::Duration,
) -> BoxFuture<'a, Result<Option<u32>, ProviderError>> {
    Box::pin(async move {
        Ok(match what {
            What::FirstTurn | What::LaterTurn => {
                provider.fetch_orchestration_item(LONG, patience, None).await?.map(|(_, _, attempts)| attempts)
            }
            What::Activity => {
                let fetched = provider.fetch_work_item(LONG, patience, None, &TagFilter::Any).await?;
                fetched.map(|(_, _, attempts)| attempts)
            }
            What::SessionActivity => {
                let fetched = provider.fetch_work_item(LONG, patience, Some(owner), &TagFilter::Any).await?;
                fetched.map(|(_, _, attempts)| attempts)
            }
        })
    })
}

/// Polls a future so many times at most, then drops it.
struct Polls<'a, T> {
    future: Option<BoxFuture<'a, T>>,
    left: usize,
}

impl<T> Future for Polls<'_, T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        if self.left == 0 {
            self.future = None;
            return Poll::Ready(None);
        }
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

/// After `a` has done what it owed, `b` gets the thing at once, as if nobody had ever touched it.
async fn is_free(a: &CosmosDBProvider, b: &CosmosDBProvider, what: What, case: &str) {
    a.shutdown().await;
    let owner = session("worker of b");
    let fetched = fetch(b, what, &owner, NOW).await.unwrap();
    assert_eq!(fetched, Some(1), "{what:?}, {case}: locked, or an attempt was counted");
}

#[tokio::test]
async fn a_fetch_dropped_after_any_number_of_polls_leaves_nothing_locked_and_nothing_counted() {
    for what in ALL {
        for polls in 1.. {
            let scene = Scene::new(1);
            let (a, b) = (scene.provider("a").await, scene.provider("b").await);
            prepare(&scene, what).await;
            let owner = session("worker of a");
            let future = Some(fetch(&a, what, &owner, PATIENCE));
            if (Polls { future, left: polls }).await.is_some() {
                assert!(polls > 1, "a fetch that never waits was not dropped at all");
                break;
            }
            is_free(&a, &b, what, &format!("dropped after {polls} polls")).await;
        }
    }
}

/// Drops a fetch while the request after `passing` others is held; whether there was such a request.
async fn drop_at(what: What, passing: u64, before: bool) -> bool {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    prepare(&scene, what).await;
    let gate = Gate::new();
    let hold = if before { WireAction::HoldBefore(gate.clone()) } else { WireAction::HoldAfter(gate.clone()) };
    scene.account.wire().add(WireRule::new(hold).client("a").matching(about_items).skip(passing).times(1));
    let owner = session("worker of a");
    tokio::select! {
        biased;
        () = gate.reached() => {}
        fetched = fetch(&a, what, &owner, PATIENCE) => {
            assert_eq!(fetched.unwrap(), Some(1));
            return false;
        }
    }
    gate.open();
    is_free(&a, &b, what, &format!("dropped with request {} held, before the store: {before}", passing + 1)).await;
    true
}

#[tokio::test]
async fn a_fetch_dropped_while_any_of_its_requests_is_on_its_way_leaves_nothing_locked_and_nothing_counted() {
    for what in ALL {
        let mut held = 0;
        while drop_at(what, held, true).await {
            assert!(drop_at(what, held, false).await);
            held += 1;
        }
        assert!(held >= 2, "{what:?}: a poll and a claim at least, not {held} requests");
    }
}

#[tokio::test]
async fn what_a_dropped_fetch_gave_back_is_fetched_again_by_the_same_provider() {
    for what in ALL {
        let scene = Scene::new(1);
        let a = scene.provider("a").await;
        prepare(&scene, what).await;
        let gate = Gate::new();
        let hold = WireRule::new(WireAction::HoldAfter(gate.clone())).client("a").matching(about_items);
        scene.account.wire().add(hold.skip(1).times(1));
        let owner = session("worker of a");
        tokio::select! {
            biased;
            () = gate.reached() => {}
            _ = fetch(&a, what, &owner, PATIENCE) => panic!("the claim was to be held"),
        }
        gate.open();
        assert_eq!(fetch(&a, what, &owner, PATIENCE).await.unwrap(), Some(1), "{what:?}");
    }
}

#[tokio::test]
async fn a_provider_that_met_the_claim_of_a_dropped_fetch_does_not_wait_for_its_lock_to_expire() {
    for what in [What::FirstTurn, What::LaterTurn, What::Activity] {
        let scene = Scene::new(1);
        let (a, b) = (scene.provider("a").await, scene.provider("b").await);
        prepare(&scene, what).await;
        // The claim is made, and its answer is held.
        let gate = Gate::new();
        let claim = WireRule::new(WireAction::HoldAfter(gate.clone())).client("a").times(1);
        let claim = claim.on(RequestKind::Create).on(RequestKind::Replace).matching(|r| goes_to(r, "i"));
        scene.account.wire().add(claim);
        let (owner, other) = (session("worker of a"), session("worker of b"));
        tokio::select! {
            biased;
            () = gate.reached() => {}
            _ = fetch(&a, what, &owner, PATIENCE) => panic!("the claim was to be held"),
        }
        // Now it is locked by nobody, and `b` sees that it is locked.
        assert_eq!(fetch(&b, what, &other, NOW).await.unwrap(), None, "{what:?}: not claimed yet");
        gate.open();
        assert_eq!(fetch(&b, what, &other, PATIENCE).await.unwrap(), Some(1), "{what:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_ended_too_late_counts_also_when_its_worker_leaves() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    begin(&a, "i", vec![activity("i", 2)], Vec::new()).await;
    let lock = Duration::from_millis(300);
    let (_, token, attempts) = next_work(&a, lock).await;
    assert_eq!(attempts, 1);
    // The lock is over when the answer says so.
    let too_late = async {
        while a.renew_work_item_lock(&token, Duration::from_millis(1)).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, too_late).await.expect("it expires");
    a.ack_work_item(&token, Some(done("i", 2))).await.unwrap_err();
    a.shutdown().await;
    let (_, _, attempts) = next_work(&scene.provider("b").await, LONG).await;
    assert_eq!(attempts, 2, "it has run once");
}
