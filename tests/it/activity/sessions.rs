//! Instances share a session, and one worker at a time owns it, whichever provider it uses.

use crate::fixture::*;
use duroxide::providers::{Provider, SessionFetchConfig, TagFilter, WorkItem};
use duroxide_cosmos::{Clock, CosmosDBProvider};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule};
use std::{
    collections::BTreeSet,
    sync::{
        atomic::{AtomicU64, AtomicUsize, Ordering},
        Arc, Mutex,
    },
    time::{Duration, Instant},
};

const SESSION: &str = "shared";

fn owner(name: &str, lock: Duration) -> SessionFetchConfig {
    SessionFetchConfig { owner_id: name.to_owned(), lock_timeout: lock }
}

/// Two instances, each with so many activities in the session.
async fn prepare(provider: &CosmosDBProvider, each: u64) {
    for instance in ["i1", "i2"] {
        let work = (2..2 + each).map(|id| activity_with(instance, id, Some(SESSION), None)).collect();
        begin(provider, instance, work, Vec::new()).await;
    }
}

async fn fetch(provider: &CosmosDBProvider, owner: &SessionFetchConfig, patience: Duration) -> Option<FetchedActivity> {
    provider.fetch_work_item(LONG, patience, Some(owner), &TagFilter::Any).await.unwrap()
}

fn identity(item: &WorkItem) -> (String, u64) {
    match item {
        WorkItem::ActivityExecute { instance, id, .. } => (instance.clone(), *id),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn while_one_worker_owns_a_session_another_worker_gets_no_activity_of_it() {
    let fixture = Fixture::new(4);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    prepare(&a, 2).await;
    let (mine, theirs) = (owner("mine", LONG), owner("theirs", LONG));
    let mut seen = BTreeSet::new();
    for _ in 0..4 {
        let (item, ..) = fetch(&a, &mine, PATIENCE).await.expect("an item of a session that is ours");
        seen.insert(identity(&item));
        assert!(fetch(&b, &theirs, NOW).await.is_none());
    }
    assert_eq!(seen.len(), 4, "the owner gets those of both instances: {seen:?}");
    assert_eq!(fixture.documents().await.iter().filter(|d| d["type"] == "session").count(), 1);
}

#[tokio::test]
async fn a_session_of_a_dead_owner_is_taken_over_when_its_lock_expires() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    prepare(&a, 1).await;
    fetch(&a, &owner("gone", Duration::from_millis(300)), PATIENCE).await.expect("an item");
    let (item, ..) = fetch(&b, &owner("next", LONG), PATIENCE).await.expect("the other instance's item");
    assert_eq!(identity(&item).1, 2);
    // The former owner has lost the session.
    assert!(fetch(&a, &owner("gone", LONG), NOW).await.is_none());
}

#[tokio::test]
async fn a_late_renewal_does_not_shorten_the_lock() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    prepare(&a, 1).await;
    let brief = Duration::from_secs(5);
    fetch(&a, &owner("mine", brief), PATIENCE).await.expect("an item");
    // The renewal is on its way when the same owner takes the session again, for longer.
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Replace).client("a").times(1);
    fixture.account.wire().add(held);
    let renewal = a.renew_session_lock(&["mine"], brief, LONG);
    let meanwhile = async {
        gate.reached().await;
        fetch(&a, &owner("mine", LONG), PATIENCE).await.expect("the other instance's item");
        gate.open();
    };
    let (renewed, ()) = tokio::join!(renewal, meanwhile);
    assert_eq!(renewed.unwrap(), 1);
    let sessions = fixture.documents_of_type("$s:shared", "session").await;
    let left = sessions[0]["lockedUntil"].as_u64().unwrap() - sessions[0]["lastActivity"].as_u64().unwrap();
    assert!(left > 500_000, "the lock lasts {left} ms");
    assert!(fetch(&b, &owner("theirs", LONG), NOW).await.is_none());
}

/// A period in which an owner held an item of the session under a session lock that was certainly valid.
struct Held {
    owner: usize,
    from: Instant,
    until: Instant,
}

/// A worker that runs items until all are done. Sometimes it works longer than the session's lock lasts.
async fn work(
    worker: usize,
    provider: &CosmosDBProvider,
    rounds: usize,
    done_so_far: &AtomicUsize,
    held: &Mutex<Vec<Held>>,
    seen: &Mutex<BTreeSet<(String, u64)>>,
) -> usize {
    const LOCK: Duration = Duration::from_millis(60);
    let config = owner(&format!("worker {worker}"), LOCK);
    let mut mine = 0;
    while done_so_far.load(Ordering::SeqCst) < rounds {
        let asked = Instant::now();
        let Some((item, token, attempts)) = fetch(provider, &config, Duration::from_millis(200)).await else {
            continue;
        };
        let from = Instant::now();
        assert_eq!(attempts, 1);
        let (instance, id) = identity(&item);
        assert!(seen.lock().unwrap().insert((instance.clone(), id)), "{instance} {id} was handed out twice");
        mine += 1;
        if mine % 4 == 0 {
            tokio::time::sleep(LOCK * 2).await;
        } else {
            tokio::task::yield_now().await;
        }
        // The lock was written after the fetch began.
        let until = Instant::now().min(asked + LOCK);
        if from < until {
            held.lock().unwrap().push(Held { owner: worker, from, until });
        }
        provider.ack_work_item(&token, Some(done(&instance, id))).await.unwrap();
        done_so_far.fetch_add(1, Ordering::SeqCst);
    }
    mine
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_workers_that_compete_for_a_session_never_own_it_at_the_same_time() {
    const ROUNDS: usize = 100;
    let fixture = Fixture::new(2);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    prepare(&a, ROUNDS as u64 / 2).await;
    let (held, seen, count) = (Mutex::default(), Mutex::default(), AtomicUsize::new(0));
    let (of_a, of_b) =
        tokio::join!(work(1, &a, ROUNDS, &count, &held, &seen), work(2, &b, ROUNDS, &count, &held, &seen),);
    assert_eq!(of_a + of_b, ROUNDS);
    assert!(of_a > 0 && of_b > 0, "{of_a} and {of_b}: the session changed hands");
    let held = held.into_inner().unwrap();
    assert!(held.len() > ROUNDS / 2);
    for (n, one) in held.iter().enumerate() {
        for other in held[n + 1..].iter().filter(|other| other.owner != one.owner) {
            assert!(one.until <= other.from || other.until <= one.from, "two owners at once");
        }
    }
    // Both instances have all their completions.
    for instance in ["i1", "i2"] {
        assert_eq!(fixture.documents_of_type(instance, "message").await.len(), ROUNDS / 2);
        assert!(fixture.documents_of_type(instance, "activity").await.is_empty());
    }
}

/// Writes sessions whose locks expired long ago, past the providers.
async fn expired_sessions(fixture: &Fixture, count: usize) {
    let container = fixture.container().await;
    for n in 0..count {
        let key = format!("$s:s{n}");
        let session = serde_json::json!({
            "id": "session", "instanceId": key, "type": "session", "sessionId": format!("s{n}"), "owner": "gone",
            "lockedUntil": 1_000 + n / 100, "lastActivity": 1_000,
        });
        container.create_item(key, "session", &session, None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleting_expired_sessions_takes_about_a_request_each_and_spares_those_with_waiting_activities() {
    let fixture = Fixture::new(4);
    let a = fixture.provider("a").await;
    // Activities wait for ten of them, five of which are the oldest.
    let wanted: BTreeSet<String> = (0..5).chain(515..520).map(|n| format!("s{n}")).collect();
    let work = wanted.iter().zip(2..).map(|(session, id)| activity_with("i", id, Some(session), None)).collect();
    begin(&a, "i", work, Vec::new()).await;
    expired_sessions(&fixture, 620).await;
    let before = fixture.account.stats_of("a");
    assert_eq!(a.cleanup_orphaned_sessions(Duration::from_secs(1)).await.unwrap(), 610);
    let spent = (fixture.account.stats_of("a") - before).items().requests;
    assert!(spent <= 671 + 30, "{spent} requests for 620 sessions");
    let left: BTreeSet<String> = fixture
        .documents()
        .await
        .iter()
        .filter(|d| d["type"] == "session")
        .map(|d| d["sessionId"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(left, wanted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_stalls_after_it_took_a_session_takes_no_activity_once_another_owns_it() {
    let fixture = Fixture::new(1);
    let later = Arc::new(AtomicU64::new(0));
    let late = later.clone();
    let system = || u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let clock = move || {
        Clock::from_fn({
            let late = late.clone();
            move || system() + late.load(Ordering::Relaxed)
        })
    };
    let a = Arc::new(fixture.provider_with("a", test_config().with_clock(clock())).await);
    let b = fixture.provider_with("b", test_config().with_clock(clock())).await;
    // The two workers ask for different activities.
    for (instance, tag) in [("i1", "first"), ("i2", "second")] {
        begin(a.as_ref(), instance, vec![activity_with(instance, 2, Some(SESSION), Some(tag))], Vec::new()).await;
    }
    let second = TagFilter::tags(["second"]);
    let taken = Gate::new();
    let takes = |request: &WireRequest<'_>| goes_to(request, "$s:shared") && request.kind == RequestKind::Create;
    let rule = WireRule::new(WireAction::HoldAfter(taken.clone())).client("a").matching(takes).times(1);
    fixture.account.wire().add(rule);
    let a_too = a.clone();
    let stalled = tokio::spawn(async move { fetch(&a_too, &owner("mine", LONG), Duration::from_millis(300)).await });
    taken.reached().await;
    later.store(7_200_000, Ordering::Relaxed);
    let theirs = owner("theirs", LONG);
    let took = b.fetch_work_item(LONG, PATIENCE, Some(&theirs), &second).await.unwrap();
    let (item, ..) = took.expect("the session has no owner any more");
    taken.open();
    let got = stalled.await.unwrap();
    assert!(got.is_none(), "{got:?} although another has {item:?} of the same session");
    // The claim of the stalled worker is released without counting an attempt, for the owner of the session.
    let (other, _, attempts) = fetch(&b, &theirs, PATIENCE).await.expect("the other activity");
    assert_ne!(identity(&other), identity(&item));
    assert_eq!(attempts, 1);
}

const NAME: &str = "name";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_taken_again_keeps_unknown_fields_of_a_newer_version() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    let owner = SessionFetchConfig { owner_id: "owner".to_owned(), lock_timeout: LONG };
    begin(&a, NAME, (2..4).map(|id| activity_with(NAME, id, Some("s"), None)).collect(), Vec::new()).await;
    let tags = TagFilter::default();
    let next = || a.fetch_work_item(LONG, NOW, Some(&owner), &tags);
    assert!(next().await.unwrap().is_some());
    let container = fixture.container().await;
    let mut session = fixture.documents().await.into_iter().find(|document| document["type"] == "session").unwrap();
    let (key, id) = (session["instanceId"].as_str().unwrap().to_owned(), session["id"].as_str().unwrap().to_owned());
    session["newer"] = "kept".into();
    container.replace_item(key.clone(), &id, &session, None).await.unwrap();
    assert!(next().await.unwrap().is_some());
    let session = fixture.documents_of_type(&key, "session").await.pop().unwrap();
    assert_eq!(session["newer"], "kept", "{session}");
}

const INSTANCE: &str = "i";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_without_sessions_returns_soon_if_all_activities_belong_to_sessions() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    begin(&a, INSTANCE, vec![activity_with(INSTANCE, 2, Some("s"), None)], Vec::new()).await;
    let waiting = a.fetch_work_item(LONG, LONG, None, &TagFilter::Any);
    let told = tokio::time::timeout(PATIENCE, waiting).await.expect("an answer long before the caller's time is up");
    assert!(told.unwrap().is_none());
    // With room for one session, the worker gets it.
    assert!(a.fetch_work_item(LONG, NOW, Some(&session_owner("a")), &TagFilter::Any).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_session_is_taken_long_before_its_lock_would_have_expired() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    let work = vec![activity_with(INSTANCE, 2, Some("s"), None), activity_with(INSTANCE, 3, Some("s"), None)];
    begin(&b, INSTANCE, work, Vec::new()).await;
    b.fetch_work_item(LONG, PATIENCE, Some(&session_owner("b")), &TagFilter::Any).await.unwrap().expect("an activity");
    // "a" learns that another worker owns the session.
    assert!(a.fetch_work_item(LONG, NOW, Some(&session_owner("a")), &TagFilter::Any).await.unwrap().is_none());
    assert!(b.shutdown_within(PATIENCE).await);
    let taken = a.fetch_work_item(LONG, PATIENCE, Some(&session_owner("a")), &TagFilter::Any).await.unwrap();
    assert!(taken.is_some());
}
