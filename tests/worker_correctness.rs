//! Promises to the workers of a process: their sessions are renewed, their wake-ups are sent, and their settings hold at the limits.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{DispatcherCapabilityFilter, Provider, SessionFetchConfig, TagFilter};
use duroxide_cosmos::{Clock, CosmosDBProvider, LeaseProvider, MemberPosition, Slot, SlotRange};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use scene::*;
use std::{
    collections::BTreeSet,
    future::Future,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

const OWNER: &str = "worker";

fn now() -> u64 {
    u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap()
}

fn session_key(n: usize) -> String {
    format!("$s:s{n}")
}

/// Writes sessions that [`OWNER`] holds for ten minutes and has used a moment ago.
async fn sessions_in_use(scene: &Scene, count: usize) {
    for n in 0..count {
        let session = serde_json::json!({
            "id": "session", "instanceId": session_key(n), "type": "session", "sessionId": format!("s{n}"),
            "owner": OWNER, "lockedUntil": now() + 600_000, "lastActivity": now(),
        });
        scene.container().await.create_item(session_key(n), "session", &session, None).await.unwrap();
    }
}

/// Renews the sessions of [`OWNER`] for an hour.
async fn renew(provider: &CosmosDBProvider) -> Result<usize, duroxide::providers::ProviderError> {
    provider.renew_session_lock(&[OWNER], Duration::from_secs(3_600), LONG).await
}

/// The sessions whose locks last for more than half an hour.
async fn renewed(scene: &Scene) -> BTreeSet<String> {
    let documents = scene.documents().await;
    let long =
        documents.iter().filter(|d| d["type"] == "session" && d["lockedUntil"].as_u64().unwrap() > now() + 1_800_000);
    long.map(|d| d["sessionId"].as_str().unwrap().to_owned()).collect()
}

fn unreachable(client: &str, key: String) -> WireRule {
    WireRule::new(WireAction::FailConnection).client(client).matching(move |request| goes_to(request, &key))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_one_of_1200_sessions_is_renewed_although_each_takes_its_time() {
    let scene = Scene::new(2);
    let a = scene.provider_with("a", quiet().with_operation_timeout(Duration::from_secs(10))).await;
    sessions_in_use(&scene, 1_200).await;
    let slow = WireRule::new(WireAction::Delay(Duration::from_millis(20))).on(RequestKind::Replace).client("a");
    scene.account.wire().add(slow);
    assert_eq!(renew(&a).await.unwrap(), 1_200);
    assert_eq!(renewed(&scene).await.len(), 1_200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_can_not_be_reached_costs_no_other_its_renewal() {
    let scene = Scene::new(1);
    let a = scene.provider_with("a", quiet().with_operation_timeout(Duration::from_secs(4))).await;
    sessions_in_use(&scene, 8).await;
    let out_of_reach = scene.account.wire().add(unreachable("a", session_key(0)));
    assert_eq!(renew(&a).await.unwrap(), 7);
    assert_eq!(renewed(&scene).await, (1..8).map(|n| format!("s{n}")).collect());
    assert!(out_of_reach.hits() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_fails_if_no_session_could_be_renewed() {
    let scene = Scene::new(1);
    let a = scene.provider_with("a", quiet().with_operation_timeout(Duration::from_secs(4))).await;
    assert_eq!(renew(&a).await.unwrap(), 0, "nothing to renew is no failure");
    sessions_in_use(&scene, 2).await;
    for n in 0..2 {
        scene.account.wire().add(unreachable("a", session_key(n)));
    }
    let error = renew(&a).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_this_process_has_taken_are_renewed_although_they_can_not_be_listed() {
    let scene = Scene::new(4);
    let a = scene.provider_with("a", quiet().with_operation_timeout(Duration::from_secs(4))).await;
    let work = (0..4u64).map(|n| activity_with("i", 2 + n, Some(&format!("s{n}")), None)).collect();
    begin(&a, "i", work, Vec::new()).await;
    let owner = SessionFetchConfig { owner_id: OWNER.to_owned(), lock_timeout: LONG };
    for _ in 0..4 {
        a.fetch_work_item(LONG, PATIENCE, Some(&owner), &TagFilter::Any).await.unwrap().expect("an activity");
    }
    let lists = |request: &duroxide_cosmos_emulator::WireRequest<'_>| request.partition_range.is_some();
    let unlisted = WireRule::new(WireAction::FailConnection).on(RequestKind::Query).client("a").matching(lists);
    scene.account.wire().add(unlisted);
    assert_eq!(renew(&a).await.unwrap(), 4);
    assert_eq!(renewed(&scene).await.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_can_not_be_read_costs_no_other_its_renewal() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    sessions_in_use(&scene, 2).await;
    let broken = serde_json::json!({
        "id": "session", "instanceId": "$s:odd", "type": "session", "sessionId": 7, "owner": OWNER,
        "lockedUntil": now() + 600_000, "lastActivity": now(),
    });
    scene.container().await.create_item("$s:odd", "session", &broken, None).await.unwrap();
    assert_eq!(renew(&a).await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutting_down_gives_sessions_back_although_an_activity_can_not_be_reached() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    begin(&a, "i", vec![activity("i", 2)], Vec::new()).await;
    begin(&a, "j", (2..22u64).map(|n| activity_with("j", n, Some(&format!("s{n}")), None)).collect(), Vec::new()).await;
    let owner = SessionFetchConfig { owner_id: OWNER.to_owned(), lock_timeout: LONG };
    for _ in 0..21 {
        a.fetch_work_item(LONG, PATIENCE, Some(&owner), &TagFilter::Any).await.unwrap().expect("an activity");
    }
    scene.account.wire().add(unreachable("a", "i".to_owned()));
    // A session whose deletion is refused for good costs no other either.
    let refuse = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    let refused = WireRule::new(refuse).client("a").matching(|request| goes_to(request, &session_key(2)));
    scene.account.wire().add(refused);
    assert!(!a.shutdown_within(Duration::from_secs(8)).await, "not everything could be given back");
    let documents = scene.documents().await;
    let left: Vec<_> = documents.iter().filter(|d| d["type"] == "session").map(|d| &d["sessionId"]).collect();
    assert_eq!(left, ["s2"]);
}

/// Runs something on a runtime of its own, which is shut down right after it with all that it has spawned.
async fn on_a_runtime_that_ends<F: Future<Output = ()>>(make: impl FnOnce() -> F + Send + 'static) {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(make());
    };
    tokio::task::spawn_blocking(run).await.unwrap();
}

/// An instance whose slot is this one.
fn instance_in(slot: u8) -> String {
    (0..).map(|n| format!("i{n}")).find(|name| Slot::of_instance(name).number() == slot).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_sends_wake_ups_after_the_runtime_that_sent_the_first_ones_was_shut_down() {
    const MEMBERS: u8 = 40;
    let scene = Scene::new(1);
    let client = Arc::new(scene.provider("client").await);
    // More members than a process may wake at once, each with one slot.
    for n in 0..MEMBERS {
        let name = format!("member{n:02}");
        let member = serde_json::json!({
            "id": format!("member:{name}"), "instanceId": "$d:fleet", "type": "member", "member": name,
            "turns": { "need": null, "slots": { "from": n, "to": n + 1 } }, "owners": [],
        });
        scene.container().await.create_item("$d:fleet", &format!("member:{name}"), &member, None).await.unwrap();
        let key = format!("$b:{name}");
        let bell = serde_json::json!({ "id": "wakeup", "instanceId": key, "type": "wakeup", "ring": "", "from": name });
        scene.container().await.create_item(key.clone(), "wakeup", &bell, None).await.unwrap();
    }
    let enqueues = client.clone();
    on_a_runtime_that_ends(move || async move {
        for n in 0..MEMBERS {
            enqueues.enqueue_for_orchestrator(start(&instance_in(n)), None).await.unwrap();
        }
    })
    .await;
    let silent = || async {
        let documents = scene.documents().await;
        documents.iter().filter(|d| d["type"] == "wakeup" && d["ring"] == "").count()
    };
    assert!(silent().await > 0, "all wake-ups were sent by the first runtime: the test shows nothing");
    client.enqueue_for_orchestrator(external(&instance_in(MEMBERS - 1), "news"), None).await.unwrap();
    let all_sent = async {
        while silent().await > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), all_sent).await.expect("every member is woken");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_was_claimed_for_a_dispatcher_of_a_dead_runtime_is_not_handed_out_after_its_lock() {
    let scene = Scene::new(1);
    let a = Arc::new(scene.provider("a").await);
    let b = scene.provider("b").await;
    let lock = Duration::from_secs(2);
    let waits = a.clone();
    on_a_runtime_that_ends(move || async move {
        let mut fetch = Box::pin(waits.fetch_orchestration_item(lock, PATIENCE, None));
        // Until the dispatcher has looked for work and sleeps.
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut fetch).await.is_err());
        waits.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        // The claim is made ready for it, and nobody takes it.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let (taken, ..) = next_turn(&b, LONG).await;
    assert_eq!(taken.instance, "i");
    let stale = a.fetch_orchestration_item(lock, NOW, None).await.unwrap();
    assert!(stale.is_none(), "another worker has this turn: {stale:?}");
}

/// Lease providers of applications that went wrong.
#[derive(Debug)]
enum Broken {
    Panics,
    Blocks,
}

impl LeaseProvider for Broken {
    fn slots(&self, _place: MemberPosition) -> SlotRange {
        match self {
            Self::Panics => panic!("a panic that the test asked for"),
            Self::Blocks => loop {
                std::thread::park();
            },
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_is_found_although_the_lease_provider_panics_or_blocks() {
    for broken in [Broken::Panics, Broken::Blocks] {
        let scene = Scene::new(2);
        let worker = Arc::new(scene.provider_with("worker", quiet().with_leases(broken)).await);
        let client = scene.provider("client").await;
        let waits = worker.clone();
        let waiting = tokio::spawn(async move { waits.fetch_orchestration_item(LONG, PATIENCE, None).await });
        // The worker is there, by its own document: it has asked its lease provider.
        let is_listed = |request: &duroxide_cosmos_emulator::WireRequest<'_>| goes_to(request, "$d:fleet");
        let listed = WireRule::new(WireAction::Delay(Duration::ZERO)).on(RequestKind::Query).client("worker");
        scene.account.wire().add(listed.matching(is_listed)).wait_for_hits(1).await;
        client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        let found = tokio::time::timeout(PATIENCE / 2, waiting).await.expect("the fetch ends");
        let (found, ..) = found.unwrap().unwrap().expect("a turn");
        assert_eq!(found.instance, "i");
    }
}

/// The largest number in a document.
fn largest(value: &serde_json::Value) -> u64 {
    match value {
        serde_json::Value::Array(values) => values.iter().map(largest).max().unwrap_or(0),
        serde_json::Value::Object(fields) => fields.values().map(largest).max().unwrap_or(0),
        value => value.as_u64().unwrap_or(0),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_timers_and_waits_may_be_endless() {
    let scene = Scene::new(1);
    let endless = quiet().with_poll_interval(Duration::MAX).with_wakeup_interval(Duration::MAX);
    let a = Arc::new(scene.provider_with("a", endless.with_operation_timeout(Duration::MAX)).await);
    let waits = a.clone();
    let waiting = tokio::spawn(async move { waits.fetch_orchestration_item(Duration::MAX, Duration::MAX, None).await });
    a.enqueue_for_orchestrator(start("i"), Some(Duration::ZERO)).await.unwrap();
    let (_, token, _) = waiting.await.unwrap().unwrap().expect("a turn");
    let timer = duroxide::providers::WorkItem::TimerFired {
        instance: "i".to_owned(),
        execution_id: 1,
        id: 9,
        fire_at_ms: u64::MAX,
    };
    let work = vec![activity_with("i", 2, Some("s"), None)];
    commit(a.as_ref(), &token, vec![started("i", 1)], work, vec![timer], running()).await.unwrap();
    a.enqueue_for_orchestrator(external("i", "never"), Some(Duration::MAX)).await.unwrap();
    let owner = SessionFetchConfig { owner_id: OWNER.to_owned(), lock_timeout: Duration::MAX };
    let fetched = a.fetch_work_item(Duration::MAX, Duration::MAX, Some(&owner), &TagFilter::Any).await.unwrap();
    let (_, token, _) = fetched.expect("an activity");
    assert_eq!(a.renew_session_lock(&[OWNER], Duration::MAX, Duration::MAX).await.unwrap(), 1);
    a.renew_work_item_lock(&token, Duration::MAX).await.unwrap();
    // The service turns larger integers into floats, and 2^53 - 1 marks a message without an instance.
    for document in scene.documents().await {
        assert!(largest(&document) < (1 << 53) - 1, "{document:#}");
    }
    // A process that knows nothing of them reads all of it, and finds nothing to do now.
    let b = scene.provider("b").await;
    assert!(b.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    a.ack_work_item(&token, Some(done("i", 2))).await.unwrap();
    let (item, ..) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [done("i", 2)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filter_without_version_ranges_takes_nothing_even_what_is_not_pinned() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    let nothing = DispatcherCapabilityFilter { supported_duroxide_versions: Vec::new() };
    a.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    for patience in [NOW, Duration::MAX] {
        let fetched = a.fetch_orchestration_item(LONG, patience, Some(&nothing)).await.unwrap();
        assert!(fetched.is_none(), "{fetched:?}");
    }
    assert!(scene.of_kind("i", "instance").await.is_empty(), "it was not claimed");
    assert_eq!(next_turn(&a, LONG).await.2, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_of_another_process_is_overtaken_for_a_second_at_most() {
    let scene = Scene::new(1);
    let time = Arc::new(AtomicU64::new(now()));
    let clock = |time: &Arc<AtomicU64>| {
        let time = time.clone();
        Clock::from_fn(move || time.load(Ordering::SeqCst))
    };
    let config = || quiet().with_clock(clock(&time)).with_inline_claims(false);
    let (a, b) = (scene.provider_with("a", config()).await, scene.provider_with("b", config()).await);
    begin(&a, "i", Vec::new(), Vec::new()).await;
    // This turn asks for the queue, and so has everything.
    time.fetch_add(1_000, Ordering::SeqCst);
    a.enqueue_for_orchestrator(external("i", "asks"), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external("i", "asks")]);
    commit(&a, &token, vec![note("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();

    time.fetch_add(1, Ordering::SeqCst);
    b.enqueue_for_orchestrator(external("i", "first, of b"), None).await.unwrap();
    time.fetch_add(1, Ordering::SeqCst);
    a.enqueue_for_orchestrator(external("i", "second, of a"), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external("i", "second, of a")], "README: a process runs on its own messages at once");
    commit(&a, &token, vec![note("i", 1, 3)], Vec::new(), Vec::new(), running()).await.unwrap();

    time.fetch_add(1_000, Ordering::SeqCst);
    a.enqueue_for_orchestrator(external("i", "third, of a"), None).await.unwrap();
    let (item, ..) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external("i", "first, of b"), external("i", "third, of a")]);
}
