//! A claim leaves the worker enough of its lock. A claim that no fetch picks up is released without counting an
//! attempt.

use crate::fixture::*;
use duroxide::{
    providers::{DispatcherCapabilityFilter, Provider, ProviderAdmin, SemverRange, TagFilter, WorkItem},
    EventKind,
};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule};
use std::time::Duration;

const INSTANCE: &str = "i";

/// A lock most of which passes before a slow answer arrives.
const LOCK: Duration = Duration::from_secs(4);

const SLOW: Duration = Duration::from_secs(3);

/// Delays the next answer to "a" of this kind about the instance.
fn slow_down(fixture: &Fixture, kind: RequestKind) {
    let rule = WireRule::new(WireAction::Delay(SLOW)).on(kind).client("a").times(1);
    fixture.account.wire().add(rule.matching(|request| goes_to(request, INSTANCE)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_whose_claim_was_slow_has_at_least_half_of_its_lock_left() {
    for slow in [RequestKind::Query, RequestKind::Replace] {
        let fixture = Fixture::new(1);
        let (maker, a) = (fixture.provider("maker").await, fixture.provider("a").await);
        begin(&maker, INSTANCE, Vec::new(), Vec::new()).await;
        maker.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
        slow_down(&fixture, slow);
        let (_, token, attempts) = next_turn(&a, LOCK).await;
        let returned = now();
        assert_eq!(attempts, 1);
        let lock =
            fixture.documents_of_type(INSTANCE, "instance").await.pop().unwrap()["lock"]["until"].as_u64().unwrap();
        let left = Duration::from_millis(lock.saturating_sub(returned));
        // The test itself needs some of this time, between the fetch and its look at the clock.
        assert!(left > LOCK / 2 - Duration::from_millis(500), "{slow:?}: {left:?}");
        commit(&a, &token, vec![filler(INSTANCE, 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_claim_was_slow_is_released_without_counting_an_attempt() {
    let fixture = Fixture::new(1);
    let (maker, a) = (fixture.provider("maker").await, fixture.provider("a").await);
    begin(&maker, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    slow_down(&fixture, RequestKind::Replace);
    let (_, _, attempts) = next_activity(&a, LOCK).await;
    let returned = now();
    assert_eq!(attempts, 1);
    let work = fixture.documents_of_type(INSTANCE, "activity").await.pop().unwrap();
    let left = Duration::from_millis(work["lock"]["until"].as_u64().unwrap().saturating_sub(returned));
    assert!(left > LOCK / 2 - Duration::from_millis(500), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_without_a_delay_is_visible_at_once_even_if_it_is_a_timer() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    begin(&a, INSTANCE, Vec::new(), Vec::new()).await;
    let fired =
        WorkItem::TimerFired { instance: INSTANCE.to_owned(), execution_id: 1, id: 2, fire_at_ms: now() + 3_600_000 };
    a.enqueue_for_orchestrator(fired.clone(), None).await.unwrap();
    let (item, _, _) = a.fetch_orchestration_item(LONG, NOW, None).await.unwrap().expect("a turn");
    assert_eq!(item.messages, [fired]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_instance_of_a_deleted_name_does_not_inherit_what_was_cached_about_the_old_one() {
    let old = semver::Version::new(0, 1, 0);
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    b.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let (_, token, _) = next_turn(&b, LONG).await;
    let mut metadata = running();
    metadata.pinned_duroxide_version = Some(semver::Version::new(9, 9, 9));
    commit(&b, &token, vec![started(INSTANCE, 1)], Vec::new(), Vec::new(), metadata).await.unwrap();
    b.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    // "a" runs only older versions, and learns that it cannot run this one.
    let range = SemverRange::new(old.clone(), old);
    let filter = DispatcherCapabilityFilter { supported_duroxide_versions: vec![range] };
    assert!(a.fetch_orchestration_item(LONG, NOW, Some(&filter)).await.unwrap().is_none());
    b.delete_instance(INSTANCE, true).await.unwrap();
    b.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let (item, _, _) = a.fetch_orchestration_item(LONG, PATIENCE, Some(&filter)).await.unwrap().expect("the new one");
    assert!(item.history.is_empty() && matches!(item.messages[..], [WorkItem::StartOrchestration { .. }]));
    assert!(!matches!(item.history.first().map(|e| &e.kind), Some(EventKind::OrchestrationStarted { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_arrives_after_its_caller_has_given_up_is_released_without_counting_an_attempt() {
    for turn in [true, false] {
        let fixture = Fixture::new(1);
        let maker = fixture.provider("maker").await;
        let hasty =
            test_config().with_request_timeout(Duration::from_secs(1)).with_operation_timeout(Duration::from_secs(1));
        let (a, b) = (fixture.provider_with("a", hasty).await, fixture.provider("b").await);
        begin(&maker, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
        maker.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
        let gate = Gate::new();
        let held = WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Replace).client("a").times(1);
        fixture.account.wire().add(held);
        // The caller gives up while the write of the claim is on its way.
        if turn {
            assert!(a.fetch_orchestration_item(LONG, NOW, None).await.is_err());
        } else {
            assert!(a.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.is_err());
        }
        gate.open();
        let attempts = if turn { next_turn(&b, LONG).await.2 } else { next_activity(&b, LONG).await.2 };
        assert_eq!(attempts, 1, "a turn: {turn}");
    }
}

/// A worker crashes between its claim and the query that would show that no turn can run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_poll_removes_a_lock_that_a_dead_worker_left_on_a_name_without_an_instance() {
    const UNSTARTED: &str = "not started";
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    b.enqueue_for_orchestrator(external(UNSTARTED, "news"), None).await.unwrap();
    let claimed = Gate::new();
    let hold = WireRule::new(WireAction::HoldAfter(claimed.clone())).on(RequestKind::Create).client("a");
    fixture.account.wire().add(hold);
    let dies = tokio::spawn(async move { a.fetch_orchestration_item(Duration::from_secs(1), PATIENCE, None).await });
    claimed.reached().await;
    fixture.cut("a", 0);
    dies.abort();
    assert_eq!(fixture.documents_of_type(UNSTARTED, "instance").await.len(), 1, "what the claim has made");
    let is_locked = || async {
        let document =
            fixture.documents_of_type(UNSTARTED, "instance").await.pop().expect("it says that a message is deferred");
        !document["lock"].is_null()
    };
    let gone = async {
        while is_locked().await {
            let fetched = b.fetch_orchestration_item(LONG, Duration::from_millis(200), None).await.unwrap();
            assert!(fetched.is_none(), "there is nothing to run: {fetched:?}");
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the lock that was left goes");
    b.enqueue_for_orchestrator(start(UNSTARTED), None).await.unwrap();
    let (item, _, attempts) = next_turn(&b, LONG).await;
    assert_eq!((item.messages.len(), attempts), (2, 1), "{:?}", item.messages);
}

/// A worker crashes between its claim of a start and the query that shows that the start is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lock_that_a_dead_worker_left_for_a_removed_start_is_found_and_removed() {
    let fixture = Fixture::new(2);
    let a = fixture.provider("a").await;
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let claimed = Gate::new();
    let hold = WireRule::new(WireAction::HoldAfter(claimed.clone())).on(RequestKind::Create).client("a");
    fixture.account.wire().add(hold.matching(|request| goes_to(request, INSTANCE)));
    let dies = tokio::spawn(async move { a.fetch_orchestration_item(LOCK, PATIENCE, None).await });
    claimed.reached().await;
    fixture.cut("a", 0);
    dies.abort();
    let message =
        fixture.documents_of_type(INSTANCE, "message").await.pop().unwrap()["id"].as_str().unwrap().to_owned();
    fixture.container().await.delete_item(INSTANCE.to_owned(), &message, None).await.unwrap();
    assert_eq!(fixture.documents_of_type(INSTANCE, "instance").await.len(), 1, "what the claim has made");

    let ahead = test_config().with_clock(off_by(60_000));
    let b = fixture.provider_with("b", ahead).await;
    let gone = async {
        while !fixture.documents_of_type(INSTANCE, "instance").await.is_empty() {
            let fetched = b.fetch_orchestration_item(LONG, Duration::from_millis(200), None).await.unwrap();
            assert!(fetched.is_none(), "there is nothing to run: {fetched:?}");
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the document that was left goes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claimed_start_is_polled_after_its_lock_or_its_delay_until_a_turn_is_committed() {
    const DELAY: Duration = Duration::from_secs(3_600);
    let fixture = Fixture::new(1);
    let ahead = test_config().with_clock(off_by(7_200_000));
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", ahead).await);
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let claim = |document: &serde_json::Value| (document["lock"]["until"].as_u64(), document["due"].as_u64());
    let instance =
        || async { fixture.documents_of_type(INSTANCE, "instance").await.pop().expect("the instance's document") };

    let (_, token, _) = next_turn(&a, LOCK).await;
    let (claimed, due) = claim(&instance().await);
    assert!(due > claimed, "{due:?} {claimed:?}");
    a.renew_orchestration_item_lock(&token, LONG).await.unwrap();
    let (renewed, due) = claim(&instance().await);
    assert!(renewed > claimed && due > renewed, "{due:?} {renewed:?}");
    a.abandon_orchestration_item(&token, Some(DELAY), false).await.unwrap();
    let message = fixture.documents_of_type(INSTANCE, "message").await.pop().expect("the start");
    let (lock, due) = claim(&instance().await);
    assert!(lock.is_none() && due > message["due"].as_u64(), "no poll before the start is due: {due:?} {message}");

    let (_, token, attempts) = next_turn(&b, LONG).await;
    assert_eq!(attempts, 2);
    commit(&b, &token, vec![started(INSTANCE, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_eq!(claim(&instance().await), (None, None), "there is an instance now");
}

/// The answer to the claim is lost, and Cosmos DB refuses its repetition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_unknown_outcome_is_released() {
    for (status, substatus) in [(403u16, Some(1014)), (403, None), (400, None)] {
        let fixture = Fixture::new(1);
        let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
        begin(&b, "i", Vec::new(), Vec::new()).await;
        b.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
        let is_claim = |request: &WireRequest<'_>| goes_to(request, "i") && request.document_id == Some("instance");
        let lost =
            WireRule::new(WireAction::LoseAnswer).client("a").on(RequestKind::Replace).matching(is_claim).times(1);
        let lost = fixture.account.wire().add(lost);
        let refuse = WireAction::Refuse { status, substatus, retry_after: None };
        let refused = WireRule::new(refuse).client("a").on(RequestKind::Replace).matching(is_claim).times(1);
        let refused = fixture.account.wire().add(refused);
        a.fetch_orchestration_item(LONG, NOW, None).await.expect_err("the second attempt is refused");
        assert_eq!((lost.hits(), refused.hits()), (1, 1));
        let released = async {
            while !fixture.documents_of_type("i", "instance").await[0]["lock"].is_null() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, released).await.expect("the lock of the first attempt is released");
    }
}
