//! Instances share a session, and one worker at a time owns it, whichever provider it works with.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, SessionFetchConfig, TagFilter, WorkItem};
use duroxide_cosmos::{Clock, CosmosDBProvider};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule};
use scene::*;
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

async fn fetch(provider: &CosmosDBProvider, owner: &SessionFetchConfig, patience: Duration) -> Option<Work> {
    provider.fetch_work_item(LONG, patience, Some(owner), &TagFilter::Any).await.unwrap()
}

fn identity(item: &WorkItem) -> (String, u64) {
    match item {
        WorkItem::ActivityExecute { instance, id, .. } => (instance.clone(), *id),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn while_one_worker_owns_a_session_another_gets_none_of_it_from_any_instance() {
    let scene = Scene::new(4);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    prepare(&a, 2).await;
    let (mine, theirs) = (owner("mine", LONG), owner("theirs", LONG));
    let mut seen = BTreeSet::new();
    for _ in 0..4 {
        let (item, ..) = fetch(&a, &mine, PATIENCE).await.expect("an item of a session that is ours");
        seen.insert(identity(&item));
        assert!(fetch(&b, &theirs, NOW).await.is_none());
    }
    assert_eq!(seen.len(), 4, "the owner gets those of both instances: {seen:?}");
    assert_eq!(scene.documents().await.iter().filter(|d| d["type"] == "session").count(), 1);
}

#[tokio::test]
async fn a_session_whose_owner_is_gone_is_taken_over_when_its_lock_expires() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    prepare(&a, 1).await;
    fetch(&a, &owner("gone", Duration::from_millis(300)), PATIENCE).await.expect("an item");
    let (item, ..) = fetch(&b, &owner("next", LONG), PATIENCE).await.expect("the other instance's item");
    assert_eq!(identity(&item).1, 2);
    // The former owner does not own it any more.
    assert!(fetch(&a, &owner("gone", LONG), NOW).await.is_none());
}

#[tokio::test]
async fn a_renewal_that_was_overtaken_does_not_shorten_the_lock() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    prepare(&a, 1).await;
    let brief = Duration::from_secs(5);
    fetch(&a, &owner("mine", brief), PATIENCE).await.expect("an item");
    // The renewal is on its way while the same owner takes the session again, for longer.
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).on(RequestKind::Replace).client("a").times(1);
    scene.account.wire().add(held);
    let renewal = a.renew_session_lock(&["mine"], brief, LONG);
    let meanwhile = async {
        gate.reached().await;
        fetch(&a, &owner("mine", LONG), PATIENCE).await.expect("the other instance's item");
        gate.open();
    };
    let (renewed, ()) = tokio::join!(renewal, meanwhile);
    assert_eq!(renewed.unwrap(), 1);
    let sessions = scene.of_kind("$s:shared", "session").await;
    let left = sessions[0]["lockedUntil"].as_u64().unwrap() - sessions[0]["lastActivity"].as_u64().unwrap();
    assert!(left > 500_000, "the lock lasts {left} ms");
    assert!(fetch(&b, &owner("theirs", LONG), NOW).await.is_none());
}

/// A time in which an owner held an item of the session under a session lock that was certainly valid.
struct Held {
    owner: usize,
    from: Instant,
    until: Instant,
}

/// A worker that takes items until all are done. Now and then it works longer than the session's lock lasts.
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
        // The lock was written at some time after the fetch began.
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
    let scene = Scene::new(2);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
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
        assert_eq!(scene.of_kind(instance, "message").await.len(), ROUNDS / 2);
        assert!(scene.of_kind(instance, "activity").await.is_empty());
    }
}

/// Sessions whose locks expired long ago, written past any provider.
async fn expired_sessions(scene: &Scene, count: usize) {
    let container = scene.container().await;
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
async fn cleaning_expired_sessions_up_takes_about_a_request_each_and_leaves_those_that_work_waits_for() {
    let scene = Scene::new(4);
    let a = scene.provider("a").await;
    // Activities wait for ten of them, five of which are the oldest.
    let wanted: BTreeSet<String> = (0..5).chain(515..520).map(|n| format!("s{n}")).collect();
    let work = wanted.iter().zip(2..).map(|(session, id)| activity_with("i", id, Some(session), None)).collect();
    begin(&a, "i", work, Vec::new()).await;
    expired_sessions(&scene, 620).await;
    let before = scene.account.stats_of("a");
    assert_eq!(a.cleanup_orphaned_sessions(Duration::from_secs(1)).await.unwrap(), 610);
    let spent = (scene.account.stats_of("a") - before).items().requests;
    assert!(spent <= 671 + 30, "{spent} requests for 620 sessions");
    let left: BTreeSet<String> = scene
        .documents()
        .await
        .iter()
        .filter(|d| d["type"] == "session")
        .map(|d| d["sessionId"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(left, wanted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_stalls_after_it_took_a_session_takes_no_activity_of_what_is_another_s_by_then() {
    let scene = Scene::new(1);
    let later = Arc::new(AtomicU64::new(0));
    let late = later.clone();
    let system = || u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let clock = move || {
        Clock::from_fn({
            let late = late.clone();
            move || system() + late.load(Ordering::Relaxed)
        })
    };
    let a = Arc::new(scene.provider_with("a", quiet().with_clock(clock())).await);
    let b = scene.provider_with("b", quiet().with_clock(clock())).await;
    // The two don't want the same activity.
    for (instance, tag) in [("i1", "first"), ("i2", "second")] {
        begin(a.as_ref(), instance, vec![activity_with(instance, 2, Some(SESSION), Some(tag))], Vec::new()).await;
    }
    let second = TagFilter::tags(["second"]);
    let taken = Gate::new();
    let takes = |request: &WireRequest<'_>| goes_to(request, "$s:shared") && request.kind == RequestKind::Create;
    let rule = WireRule::new(WireAction::HoldAfter(taken.clone())).client("a").matching(takes).times(1);
    scene.account.wire().add(rule);
    let a_too = a.clone();
    let stalled = tokio::spawn(async move { fetch(&a_too, &owner("mine", LONG), Duration::from_millis(300)).await });
    taken.reached().await;
    later.store(7_200_000, Ordering::Relaxed);
    let theirs = owner("theirs", LONG);
    let took = b.fetch_work_item(LONG, PATIENCE, Some(&theirs), &second).await.unwrap();
    let (item, ..) = took.expect("the session is nobody's any more");
    taken.open();
    let got = stalled.await.unwrap();
    assert!(got.is_none(), "{got:?} although another has {item:?} of the same session");
    // What it took by then is given back, uncounted, to the one who owns the session.
    let (other, _, attempts) = fetch(&b, &theirs, PATIENCE).await.expect("the other activity");
    assert_ne!(identity(&other), identity(&item));
    assert_eq!(attempts, 1);
}
