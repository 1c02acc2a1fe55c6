//! What has ended long enough ago goes by itself: whole families, by the present setting, in the background.

#[path = "common/scene.rs"]
mod scene;

use duroxide::{
    providers::{ExecutionMetadata, Provider},
    AppErrorKind, ErrorDetails, EventKind,
};
use duroxide_cosmos::{Clock, CosmosDBProvider, Retention};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use scene::*;
use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

const HOUR: u64 = 3_600_000;

/// A time that the test sets.
#[derive(Clone)]
struct Time(Arc<AtomicU64>);

impl Time {
    fn new() -> Self {
        Self(Arc::new(AtomicU64::new(1_000 * HOUR)))
    }

    fn pass(&self, millis: u64) {
        self.0.fetch_add(millis, Ordering::Relaxed);
    }

    async fn provider(&self, scene: &Scene, name: &str, retention: Retention) -> CosmosDBProvider {
        let time = self.0.clone();
        let clock = Clock::from_fn(move || time.load(Ordering::Relaxed));
        scene.provider_with(name, quiet().with_clock(clock).with_retention(retention)).await
    }
}

fn hours(count: u64) -> Duration {
    Duration::from_millis(HOUR * count)
}

/// What has completed goes at once.
fn at_once() -> Retention {
    Retention::default().with_completed(Duration::ZERO)
}

/// How an instance ends.
#[derive(Clone, Copy)]
enum How {
    Completed,
    Failed,
    Cancelled,
}

/// Plays an instance with one turn.
async fn play(provider: &CosmosDBProvider, instance: &str, how: How) {
    provider.enqueue_for_orchestrator(start(instance), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let failed = |kind| EventKind::OrchestrationFailed {
        details: ErrorDetails::Application { kind, message: String::new(), retryable: false },
    };
    let (last, metadata) = match how {
        How::Completed => (completed(instance, 1, 2), ended("Completed")),
        How::Failed => (event(instance, 1, 2, failed(AppErrorKind::OrchestrationFailed)), ended("Failed")),
        How::Cancelled => {
            let kind = AppErrorKind::Cancelled { reason: "enough".to_owned() };
            (event(instance, 1, 2, failed(kind)), ended("Failed"))
        }
    };
    commit(provider, &token, vec![started(instance, 1), last], Vec::new(), Vec::new(), metadata).await.unwrap();
}

/// As if the service had told when these have ended: its own clock can't be set.
async fn prove(scene: &Scene, instances: &[&str]) {
    for instance in instances {
        let mut document = scene.of_kind(instance, "instance").await.remove(0);
        document["ended"] = format!("{}s", document["ended"].as_str().unwrap()).into();
        let container = scene.container().await;
        container.upsert_item((*instance).to_owned(), "instance", &document, None).await.unwrap();
    }
}

async fn there(provider: &CosmosDBProvider) -> Vec<String> {
    let mut there = admin(provider).list_instances().await.unwrap();
    there.sort();
    there
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_way_to_end_has_its_time_and_what_is_not_named_stays() {
    let (scene, time) = (Scene::new(2), Time::new());
    let retention = Retention::default().with_completed(hours(1)).with_cancelled(hours(10));
    let provider = time.provider(&scene, "p", retention).await;
    play(&provider, "completed", How::Completed).await;
    play(&provider, "failed", How::Failed).await;
    play(&provider, "cancelled", How::Cancelled).await;
    begin(&provider, "running", Vec::new(), Vec::new()).await;
    prove(&scene, &["completed", "failed", "cancelled"]).await;
    time.pass(HOUR - 1);
    assert_eq!(provider.apply_retention().await.unwrap(), 0);
    time.pass(2);
    assert_eq!(provider.apply_retention().await.unwrap(), 1);
    assert_eq!(there(&provider).await, ["cancelled", "failed", "running"]);
    assert!(scene.partition("completed").await.is_empty());
    time.pass(HOUR * 10);
    assert_eq!(provider.apply_retention().await.unwrap(), 1);
    assert_eq!(there(&provider).await, ["failed", "running"]);
    let metrics = admin(&provider).get_system_metrics().await.unwrap();
    assert_eq!((metrics.total_instances, metrics.failed_instances, metrics.completed_instances), (2, 1, 0));
    // Another setting holds for what ended before.
    let provider = time.provider(&scene, "q", Retention::default().with_failed(hours(1))).await;
    assert_eq!(provider.apply_retention().await.unwrap(), 1);
    assert_eq!(there(&provider).await, ["running"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_family_goes_as_a_whole_and_only_when_all_of_it_has_ended() {
    let (scene, time) = (Scene::new(1), Time::new());
    let provider = time.provider(&scene, "p", Retention::default().with_completed(hours(1))).await;
    begin(&provider, "parent", Vec::new(), vec![start_child("child", Some("parent"))]).await;
    let (_, child, _) = next_turn(&provider, LONG).await;
    let of_parent =
        |metadata: ExecutionMetadata| ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..metadata };
    commit(&provider, &child, vec![started("child", 1)], Vec::new(), Vec::new(), of_parent(running())).await.unwrap();
    // The parent does not wait for it.
    provider.enqueue_for_orchestrator(external("parent", "enough"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    commit(&provider, &token, vec![completed("parent", 1, 2)], Vec::new(), Vec::new(), ended("Completed"))
        .await
        .unwrap();
    play(&provider, "behind", How::Completed).await;
    prove(&scene, &["parent", "behind"]).await;
    time.pass(HOUR * 2);
    assert_eq!(provider.apply_retention().await.unwrap(), 1, "what is behind it is not kept waiting");
    assert_eq!(there(&provider).await, ["child", "parent"]);
    provider.enqueue_for_orchestrator(external("child", "enough"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let events = vec![completed("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), of_parent(ended("Completed"))).await.unwrap();
    // It is looked at again after a while.
    time.pass(HOUR);
    assert_eq!(provider.apply_retention().await.unwrap(), 2);
    assert!(there(&provider).await.is_empty());
    assert!(scene.partition("parent").await.is_empty());
    // The marker of its start stays for a day: the start may be delivered again.
    let left = scene.partition("child").await;
    assert!(left.iter().all(|document| document["type"] == "delivered"), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_go_in_one_round_and_what_a_round_has_left_goes_in_the_next() {
    let (scene, time) = (Scene::new(2), Time::new());
    let provider = time.provider(&scene, "p", at_once()).await;
    for n in 0..250 {
        play(&provider, &format!("i{n}"), How::Completed).await;
    }
    time.pass(1);
    // The process dies in the middle of it.
    let doomed = time.provider(&scene, "doomed", at_once()).await;
    let cut = scene.cut("doomed", 900);
    let ended = until_cut(doomed.apply_retention(), &cut).await;
    assert!(matches!(ended, Ended::Cut), "it is cut");
    let left = there(&provider).await.len();
    assert!(left < 250, "some have gone");
    time.pass(HOUR);
    while provider.apply_retention().await.unwrap() > 0 {}
    assert!(there(&provider).await.is_empty());
    let documents = scene.documents().await;
    let of_instances: Vec<_> =
        documents.iter().filter(|d| !d["instanceId"].as_str().unwrap_or_default().starts_with('$')).collect();
    assert!(of_instances.is_empty(), "{of_instances:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_ended_goes_with_four_requests_each() {
    const COUNT: u64 = 300;
    let (scene, time) = (Scene::new(1), Time::new());
    let provider = time.provider(&scene, "p", at_once()).await;
    play(&provider, "i0", How::Completed).await;
    scene.copy("i0", (1..COUNT).map(|n| format!("i{n}"))).await;
    time.pass(1);
    let before = scene.account.stats();
    assert_eq!(provider.apply_retention().await.unwrap(), COUNT);
    let requests = (scene.account.stats() - before).total().requests;
    // Its mark, a look at what it has, the batch that deletes it, one more look; and some thirty for each two hundred.
    assert!(requests <= 4 * COUNT + 100, "{requests} requests");
    assert!(there(&provider).await.is_empty());
}

/// Three instances have ended. One of them is run again between the look and its mark; which of them go.
async fn run_again(instance: &'static str, metadata: ExecutionMetadata) -> Vec<String> {
    let (scene, time) = (Scene::new(1), Time::new());
    let provider = time.provider(&scene, "p", Retention::default().with_completed(hours(1))).await;
    for instance in ["a", "b", "c"] {
        play(&provider, instance, How::Completed).await;
    }
    prove(&scene, &["a", "b", "c"]).await;
    time.pass(2 * HOUR);
    let gate = Gate::new();
    // The first of a set is read before it is marked, the others are not.
    let mark = WireRule::new(WireAction::HoldBefore(gate.clone())).client("p").times(1);
    let mark = if instance == "a" { mark.on(RequestKind::Read) } else { mark.on(RequestKind::Replace) };
    scene.account.wire().add(mark.matching(move |request| goes_to(request, instance)));
    let round = tokio::spawn(async move { provider.apply_retention().await });
    gate.reached().await;
    let other = time.provider(&scene, "other", Retention::default()).await;
    other.enqueue_for_orchestrator(start(instance), None).await.unwrap();
    let (_, token, _) = next_turn(&other, LONG).await;
    commit(&other, &token, vec![started(instance, 2)], Vec::new(), Vec::new(), metadata).await.unwrap();
    gate.open();
    let gone = round.await.unwrap().unwrap();
    let left = there(&other).await;
    assert_eq!(gone, 3 - left.len() as u64);
    if left.contains(&instance.to_owned()) {
        assert_eq!(admin(&other).list_executions(instance).await.unwrap(), [1, 2], "it has lost nothing");
    }
    left
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_runs_again_between_the_look_and_the_mark_stays() {
    for instance in ["a", "b"] {
        assert_eq!(run_again(instance, running()).await, [instance]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_ended_again_between_the_look_and_the_mark_has_its_time_again() {
    for instance in ["a", "b"] {
        assert_eq!(run_again(instance, ended("Completed")).await, [instance]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_waits_for_work_does_it_by_itself_and_lets_others_go_first() {
    let scene = Scene::new(1);
    let retention = at_once();
    let provider = Arc::new(scene.provider_with("p", quiet().with_retention(retention)).await);
    play(&provider, "i", How::Completed).await;
    let low = Arc::new(AtomicU64::new(0));
    let low_too = low.clone();
    scene.account.wire().observe(move |request, _| {
        let is_low =
            request.header("x-ms-cosmos-priority-level").is_some_and(|level| level.eq_ignore_ascii_case("low"));
        if is_low && goes_to(request, "i") {
            low_too.fetch_add(1, Ordering::Relaxed);
        }
    });
    let waiting = provider.clone();
    let task = tokio::spawn(async move { waiting.fetch_orchestration_item(LONG, PATIENCE, None).await });
    let gone = async {
        while !scene.partition("i").await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("it goes");
    assert!(low.load(Ordering::Relaxed) > 0, "its requests say that they can wait");
    task.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_asked_for_where_nothing_is_to_go() {
    let scene = Scene::new(1);
    let provider = scene.provider("p").await;
    play(&provider, "i", How::Completed).await;
    let before = scene.account.stats().total().requests;
    assert_eq!(provider.apply_retention().await.unwrap(), 0);
    assert_eq!(scene.account.stats().total().requests, before);
    assert_eq!(there(&provider).await, ["i"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trouble_in_the_middle_of_a_round_leaves_nothing_half_gone() {
    let (scene, time) = (Scene::new(1), Time::new());
    let provider = time.provider(&scene, "p", at_once()).await;
    for n in 0..10 {
        play(&provider, &format!("i{n}"), How::Completed).await;
    }
    time.pass(1);
    let lost = WireRule::new(WireAction::LoseAnswer).client("p").on(RequestKind::Batch).skip(1).times(3);
    let lost = scene.account.wire().add(lost);
    let gone = provider.apply_retention().await.unwrap();
    assert!(lost.hits() > 0);
    time.pass(HOUR);
    while provider.apply_retention().await.unwrap() > 0 {}
    assert!(gone <= 10);
    assert!(there(&provider).await.is_empty());
    assert_eq!(admin(&provider).get_system_metrics().await.unwrap().total_instances, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_executions_of_what_goes_on_for_ever_are_pruned_now_and_then() {
    let scene = Scene::new(1);
    let provider = scene.provider_with("p", quiet().with_retention(Retention::default().with_executions(3))).await;
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let mut most = 0;
    for execution in 1..=40 {
        let (_, token, _) = next_turn(&provider, LONG).await;
        let events = vec![started("i", execution), completed("i", execution, 2)];
        let metadata = ended("ContinuedAsNew");
        provider
            .ack_orchestration_item(&token, execution, events, Vec::new(), vec![again("i")], metadata, Vec::new())
            .await
            .unwrap();
        most = most.max(admin(&provider).list_executions("i").await.unwrap().len());
    }
    let few = async {
        loop {
            let executions = admin(&provider).list_executions("i").await.unwrap();
            if executions.len() <= 14 {
                return executions;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let executions = tokio::time::timeout(PATIENCE, few).await.expect("old ones go");
    assert_eq!(executions.last(), Some(&40), "the last ones stay");
    assert!(most < 40, "they went meanwhile");
}
