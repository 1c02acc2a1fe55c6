//! What is held is worth something to its holder, and is given back when its holder leaves.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{
    DispatcherCapabilityFilter, Provider, ProviderAdmin, SemverRange, SessionFetchConfig, TagFilter, WorkItem,
};
use duroxide::EventKind;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use scene::*;
use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const INSTANCE: &str = "i";
/// A lock that a slow answer uses most of.
const LOCK: Duration = Duration::from_secs(4);
const SLOW: Duration = Duration::from_secs(3);

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

fn session(owner: &str) -> SessionFetchConfig {
    SessionFetchConfig { owner_id: owner.to_owned(), lock_timeout: LONG }
}

/// The next answer to "a" about the instance of this kind is slow.
fn slow_down(scene: &Scene, kind: RequestKind) {
    let rule = WireRule::new(WireAction::Delay(SLOW)).on(kind).client("a").times(1);
    scene.account.wire().add(rule.matching(|request| goes_to(request, INSTANCE)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_whose_claim_was_slow_is_handed_out_with_half_of_its_lock_at_least() {
    for slow in [RequestKind::Query, RequestKind::Replace] {
        let scene = Scene::new(1);
        let (maker, a) = (scene.provider("maker").await, scene.provider("a").await);
        begin(&maker, INSTANCE, Vec::new(), Vec::new()).await;
        maker.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
        slow_down(&scene, slow);
        let (_, token, attempts) = next_turn(&a, LOCK).await;
        let returned = now();
        assert_eq!(attempts, 1);
        let lock = scene.of_kind(INSTANCE, "instance").await.pop().unwrap()["lock"]["until"].as_u64().unwrap();
        let left = Duration::from_millis(lock.saturating_sub(returned));
        // Some of it is this test's own way from the fetch to the clock.
        assert!(left > LOCK / 2 - Duration::from_millis(500), "{slow:?}: {left:?}");
        commit(&a, &token, vec![note(INSTANCE, 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_claim_was_slow_is_given_back_uncounted() {
    let scene = Scene::new(1);
    let (maker, a) = (scene.provider("maker").await, scene.provider("a").await);
    begin(&maker, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    slow_down(&scene, RequestKind::Replace);
    let (_, _, attempts) = next_work(&a, LOCK).await;
    let returned = now();
    assert_eq!(attempts, 1);
    let work = scene.of_kind(INSTANCE, "activity").await.pop().unwrap();
    let left = Duration::from_millis(work["lock"]["until"].as_u64().unwrap().saturating_sub(returned));
    assert!(left > LOCK / 2 - Duration::from_millis(500), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutting_down_gives_back_turns_activities_and_sessions_uncounted() {
    let scene = Scene::new(2);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    begin(&a, INSTANCE, vec![activity(INSTANCE, 2), activity_with(INSTANCE, 3, Some("s"), None)], Vec::new()).await;
    for _ in 0..2 {
        a.fetch_work_item(LONG, PATIENCE, Some(&session("a")), &TagFilter::Any).await.unwrap().expect("an activity");
    }
    a.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    next_turn(&a, LONG).await;
    assert!(a.shutdown_within(PATIENCE).await);
    assert!(a.fetch_orchestration_item(LONG, PATIENCE, None).await.unwrap().is_none(), "it has left");

    let (item, _, attempts) = b.fetch_orchestration_item(LONG, NOW, None).await.unwrap().expect("the turn");
    assert_eq!((item.messages, attempts), (vec![external(INSTANCE, "news")], 1));
    for _ in 0..2 {
        let fetched = b.fetch_work_item(LONG, NOW, Some(&session("b")), &TagFilter::Any).await.unwrap();
        assert_eq!(fetched.expect("an activity").2, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutting_down_ends_in_an_outage_too_and_says_that_not_everything_was_given_back() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    begin(&a, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    next_work(&a, LONG).await;
    scene.account.wire().add(WireRule::new(WireAction::FailConnection).client("a"));
    let ended = tokio::time::timeout(PATIENCE, a.shutdown_within(Duration::from_millis(300))).await;
    assert!(!ended.expect("it ends by itself"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutting_down_gives_back_what_is_held_although_a_look_gets_no_answer() {
    let scene = Scene::new(1);
    let a = Arc::new(scene.provider("a").await);
    begin(a.as_ref(), INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    next_work(a.as_ref(), LONG).await;
    let (looks, fleet) = (Gate::new(), Gate::new());
    let hold = |gate: &Gate| WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Query).client("a");
    scene.account.wire().add(hold(&looks).matching(|request| request.partition_range.is_some()));
    scene.account.wire().add(hold(&fleet).matching(|request| goes_to(request, "$d:fleet")));
    scene.account.wire().add(WireRule::new(WireAction::Delay(Duration::from_millis(20))).client("a"));
    let waiting = tokio::spawn({
        let a = a.clone();
        async move { a.fetch_orchestration_item(LONG, PATIENCE, None).await }
    });
    looks.reached().await;
    a.shutdown_within(Duration::from_secs(2)).await;
    let work = scene.of_kind(INSTANCE, "activity").await;
    assert!(work[0].get("lock").is_none_or(serde_json::Value::is_null), "{work:?}");
    assert!(waiting.await.unwrap().unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_without_room_for_a_session_is_told_soon_where_all_work_is_of_sessions() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    begin(&a, INSTANCE, vec![activity_with(INSTANCE, 2, Some("s"), None)], Vec::new()).await;
    let waiting = a.fetch_work_item(LONG, LONG, None, &TagFilter::Any);
    let told = tokio::time::timeout(PATIENCE, waiting).await.expect("an answer long before the caller's time is up");
    assert!(told.unwrap().is_none());
    // With room for one, it gets it.
    assert!(a.fetch_work_item(LONG, NOW, Some(&session("a")), &TagFilter::Any).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_was_given_back_is_taken_long_before_its_lock_would_have_expired() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    let work = vec![activity_with(INSTANCE, 2, Some("s"), None), activity_with(INSTANCE, 3, Some("s"), None)];
    begin(&b, INSTANCE, work, Vec::new()).await;
    b.fetch_work_item(LONG, PATIENCE, Some(&session("b")), &TagFilter::Any).await.unwrap().expect("an activity");
    // "a" learns that the session is another's.
    assert!(a.fetch_work_item(LONG, NOW, Some(&session("a")), &TagFilter::Any).await.unwrap().is_none());
    assert!(b.shutdown_within(PATIENCE).await);
    let taken = a.fetch_work_item(LONG, PATIENCE, Some(&session("a")), &TagFilter::Any).await.unwrap();
    assert!(taken.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_without_a_delay_is_visible_at_once_a_timers_too() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    begin(&a, INSTANCE, Vec::new(), Vec::new()).await;
    let fired =
        WorkItem::TimerFired { instance: INSTANCE.to_owned(), execution_id: 1, id: 2, fire_at_ms: now() + 3_600_000 };
    a.enqueue_for_orchestrator(fired.clone(), None).await.unwrap();
    let (item, _, _) = a.fetch_orchestration_item(LONG, NOW, None).await.unwrap().expect("a turn");
    assert_eq!(item.messages, [fired]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_learnt_of_a_deleted_instance_is_not_held_against_a_new_one_of_its_name() {
    let old = semver::Version::new(0, 1, 0);
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    b.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let (_, token, _) = next_turn(&b, LONG).await;
    let mut metadata = running();
    metadata.pinned_duroxide_version = Some(semver::Version::new(9, 9, 9));
    commit(&b, &token, vec![started(INSTANCE, 1)], Vec::new(), Vec::new(), metadata).await.unwrap();
    b.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    // "a" runs older versions only, and learns that it can't run this one.
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
async fn a_claim_that_arrives_after_its_caller_has_given_up_is_given_back_uncounted() {
    for turn in [true, false] {
        let scene = Scene::new(1);
        let maker = scene.provider("maker").await;
        let hasty = quiet().with_request_timeout(Duration::from_secs(1)).with_operation_timeout(Duration::from_secs(1));
        let (a, b) = (scene.provider_with("a", hasty).await, scene.provider("b").await);
        begin(&maker, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
        maker.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
        let gate = Gate::new();
        let held = WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Replace).client("a").times(1);
        scene.account.wire().add(held);
        // The claim's time is up while its write is on its way.
        if turn {
            assert!(a.fetch_orchestration_item(LONG, NOW, None).await.is_err());
        } else {
            assert!(a.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.is_err());
        }
        gate.open();
        let attempts = if turn { next_turn(&b, LONG).await.2 } else { next_work(&b, LONG).await.2 };
        assert_eq!(attempts, 1, "a turn: {turn}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutting_down_leaves_sessions_alone_that_another_process_has_taken_under_the_same_name() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    begin(&a, INSTANCE, vec![activity_with(INSTANCE, 2, Some("s"), None)], Vec::new()).await;
    b.fetch_work_item(LONG, PATIENCE, Some(&session("same")), &TagFilter::Any).await.unwrap().expect("an activity");
    assert!(a.shutdown_within(PATIENCE).await);
    assert_eq!(scene.of_kind("$s:s", "session").await.len(), 1);
    assert!(b.shutdown_within(PATIENCE).await);
    assert!(scene.of_kind("$s:s", "session").await.is_empty());
}

/// A worker dies between its claim and the look that would tell it that there is nothing to run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_a_dead_worker_left_on_a_name_that_nobody_has_goes_with_the_next_look() {
    const NOBODY: &str = "nobody yet";
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    b.enqueue_for_orchestrator(external(NOBODY, "news"), None).await.unwrap();
    let claimed = Gate::new();
    let hold = WireRule::new(WireAction::HoldAfter(claimed.clone())).on(RequestKind::Create).client("a");
    scene.account.wire().add(hold);
    let dies = tokio::spawn(async move { a.fetch_orchestration_item(Duration::from_secs(1), PATIENCE, None).await });
    claimed.reached().await;
    scene.cut("a", 0);
    dies.abort();
    assert_eq!(scene.of_kind(NOBODY, "instance").await.len(), 1, "what the claim has made");
    let is_locked = || async {
        let document = scene.of_kind(NOBODY, "instance").await.pop().expect("it marks that a message is parked");
        !document["lock"].is_null()
    };
    let gone = async {
        while is_locked().await {
            let fetched = b.fetch_orchestration_item(LONG, Duration::from_millis(200), None).await.unwrap();
            assert!(fetched.is_none(), "there is nothing to run: {fetched:?}");
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the lock that was left goes");
    b.enqueue_for_orchestrator(start(NOBODY), None).await.unwrap();
    let (item, _, attempts) = next_turn(&b, LONG).await;
    assert_eq!((item.messages.len(), attempts), (2, 1), "{:?}", item.messages);
}

/// A worker that was killed between its claim of a start and the look that shows that the start has gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_worker_left_for_a_start_that_has_gone_is_found_and_removed() {
    let scene = Scene::new(2);
    let a = scene.provider("a").await;
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let claimed = Gate::new();
    let hold = WireRule::new(WireAction::HoldAfter(claimed.clone())).on(RequestKind::Create).client("a");
    scene.account.wire().add(hold.matching(|request| goes_to(request, INSTANCE)));
    let dies = tokio::spawn(async move { a.fetch_orchestration_item(LOCK, PATIENCE, None).await });
    claimed.reached().await;
    scene.cut("a", 0);
    dies.abort();
    let message = scene.of_kind(INSTANCE, "message").await.pop().unwrap()["id"].as_str().unwrap().to_owned();
    scene.container().await.delete_item(INSTANCE.to_owned(), &message, None).await.unwrap();
    assert_eq!(scene.of_kind(INSTANCE, "instance").await.len(), 1, "what the claim has made");

    let ahead = quiet().with_clock(off_by(60_000));
    let b = scene.provider_with("b", ahead).await;
    let gone = async {
        while !scene.of_kind(INSTANCE, "instance").await.is_empty() {
            let fetched = b.fetch_orchestration_item(LONG, Duration::from_millis(200), None).await.unwrap();
            assert!(fetched.is_none(), "there is nothing to run: {fetched:?}");
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the document that was left goes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claimed_start_is_looked_at_after_its_lock_or_its_delay_until_a_turn_is_committed() {
    const DELAY: Duration = Duration::from_secs(3_600);
    let scene = Scene::new(1);
    let ahead = quiet().with_clock(off_by(7_200_000));
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", ahead).await);
    a.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let claim = |document: &serde_json::Value| (document["lock"]["until"].as_u64(), document["due"].as_u64());
    let instance = || async { scene.of_kind(INSTANCE, "instance").await.pop().expect("the instance's document") };

    let (_, token, _) = next_turn(&a, LOCK).await;
    let (claimed, due) = claim(&instance().await);
    assert!(due > claimed, "{due:?} {claimed:?}");
    a.renew_orchestration_item_lock(&token, LONG).await.unwrap();
    let (renewed, due) = claim(&instance().await);
    assert!(renewed > claimed && due > renewed, "{due:?} {renewed:?}");
    a.abandon_orchestration_item(&token, Some(DELAY), false).await.unwrap();
    let message = scene.of_kind(INSTANCE, "message").await.pop().expect("the start");
    let (lock, due) = claim(&instance().await);
    assert!(
        lock.is_none() && due > message["due"].as_u64(),
        "nobody looks before the start is there: {due:?} {message}"
    );

    let (_, token, attempts) = next_turn(&b, LONG).await;
    assert_eq!(attempts, 2);
    commit(&b, &token, vec![started(INSTANCE, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_eq!(claim(&instance().await), (None, None), "there is an instance now");
}
