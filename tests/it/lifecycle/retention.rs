//! Retention deletes whole instance trees in the background, by the present setting, once they ended long enough ago.

use crate::fixture::*;
use duroxide::{
    providers::{ExecutionMetadata, Provider},
    AppErrorKind, ErrorDetails, EventKind,
};
use duroxide_cosmos::{Clock, CosmosDBProvider, Retention};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
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

    async fn provider(&self, fixture: &Fixture, name: &str, retention: Retention) -> CosmosDBProvider {
        let time = self.0.clone();
        let clock = Clock::from_fn(move || time.load(Ordering::Relaxed));
        fixture.provider_with(name, test_config().with_clock(clock).with_retention(retention)).await
    }
}

fn hours(count: u64) -> Duration {
    Duration::from_millis(HOUR * count)
}

/// Completed instances are deleted at once.
fn at_once() -> Retention {
    Retention::default().with_completed(Duration::ZERO)
}

/// The way in which an instance ends.
#[derive(Clone, Copy)]
enum How {
    Completed,
    Failed,
    Cancelled,
}

/// Runs an instance with one turn.
async fn run_instance(provider: &CosmosDBProvider, instance: &str, how: How) {
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

/// Writes the time of Cosmos DB at which these instances ended: its clock cannot be set.
async fn set_end_times(fixture: &Fixture, instances: &[&str]) {
    for instance in instances {
        let mut document = fixture.documents_of_type(instance, "instance").await.remove(0);
        document["ended"] = format!("{}s", document["ended"].as_str().unwrap()).into();
        let container = fixture.container().await;
        container.upsert_item((*instance).to_owned(), "instance", &document, None).await.unwrap();
    }
}

async fn there(provider: &CosmosDBProvider) -> Vec<String> {
    let mut there = admin(provider).list_instances().await.unwrap();
    there.sort();
    there
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_way_to_end_has_its_retention_time_and_without_a_setting_instances_stay() {
    let (fixture, time) = (Fixture::new(2), Time::new());
    let retention = Retention::default().with_completed(hours(1)).with_cancelled(hours(10));
    let provider = time.provider(&fixture, "p", retention).await;
    run_instance(&provider, "completed", How::Completed).await;
    run_instance(&provider, "failed", How::Failed).await;
    run_instance(&provider, "cancelled", How::Cancelled).await;
    begin(&provider, "running", Vec::new(), Vec::new()).await;
    set_end_times(&fixture, &["completed", "failed", "cancelled"]).await;
    time.pass(HOUR - 1);
    assert_eq!(provider.apply_retention().await.unwrap(), 0);
    time.pass(2);
    assert_eq!(provider.apply_retention().await.unwrap(), 1);
    assert_eq!(there(&provider).await, ["cancelled", "failed", "running"]);
    assert!(fixture.partition("completed").await.is_empty());
    time.pass(HOUR * 10);
    assert_eq!(provider.apply_retention().await.unwrap(), 1);
    assert_eq!(there(&provider).await, ["failed", "running"]);
    let metrics = admin(&provider).get_system_metrics().await.unwrap();
    assert_eq!((metrics.total_instances, metrics.failed_instances, metrics.completed_instances), (2, 1, 0));
    // Another setting also applies to instances that ended before.
    let provider = time.provider(&fixture, "q", Retention::default().with_failed(hours(1))).await;
    assert_eq!(provider.apply_retention().await.unwrap(), 1);
    assert_eq!(there(&provider).await, ["running"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_tree_is_deleted_as_a_whole_and_only_when_all_of_it_has_ended() {
    let (fixture, time) = (Fixture::new(1), Time::new());
    let provider = time.provider(&fixture, "p", Retention::default().with_completed(hours(1))).await;
    begin(&provider, "parent", Vec::new(), vec![start_child("child", Some("parent"))]).await;
    let (_, child, _) = next_turn(&provider, LONG).await;
    let of_parent =
        |metadata: ExecutionMetadata| ExecutionMetadata { parent_instance_id: Some("parent".to_owned()), ..metadata };
    commit(&provider, &child, vec![started("child", 1)], Vec::new(), Vec::new(), of_parent(running())).await.unwrap();
    // The parent does not wait for the child.
    provider.enqueue_for_orchestrator(external("parent", "enough"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    commit(&provider, &token, vec![completed("parent", 1, 2)], Vec::new(), Vec::new(), ended("Completed"))
        .await
        .unwrap();
    run_instance(&provider, "behind", How::Completed).await;
    set_end_times(&fixture, &["parent", "behind"]).await;
    time.pass(HOUR * 2);
    assert_eq!(provider.apply_retention().await.unwrap(), 1, "what is behind it is not kept waiting");
    assert_eq!(there(&provider).await, ["child", "parent"]);
    provider.enqueue_for_orchestrator(external("child", "enough"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let events = vec![completed("child", 1, 2)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), of_parent(ended("Completed"))).await.unwrap();
    // Retention examines the tree again after a while.
    time.pass(HOUR);
    assert_eq!(provider.apply_retention().await.unwrap(), 2);
    assert!(there(&provider).await.is_empty());
    assert!(fixture.partition("parent").await.is_empty());
    // The marker of the child's start stays for a day: the start may be delivered again.
    let left = fixture.partition("child").await;
    assert!(left.iter().all(|document| document["type"] == "delivered"), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_round_deletes_hundreds_and_the_next_round_deletes_the_rest() {
    let (fixture, time) = (Fixture::new(2), Time::new());
    let provider = time.provider(&fixture, "p", at_once()).await;
    for n in 0..250 {
        run_instance(&provider, &format!("i{n}"), How::Completed).await;
    }
    time.pass(1);
    // The process crashes in the middle of the round.
    let crashing = time.provider(&fixture, "crashing", at_once()).await;
    let cut = fixture.cut("crashing", 900);
    let ended = until_cut(crashing.apply_retention(), &cut).await;
    assert!(matches!(ended, Ended::Cut), "it is cut");
    let left = there(&provider).await.len();
    assert!(left < 250, "some have gone");
    time.pass(HOUR);
    while provider.apply_retention().await.unwrap() > 0 {}
    assert!(there(&provider).await.is_empty());
    let documents = fixture.documents().await;
    let of_instances: Vec<_> =
        documents.iter().filter(|d| !d["instanceId"].as_str().unwrap_or_default().starts_with('$')).collect();
    assert!(of_instances.is_empty(), "{of_instances:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ended_instance_is_deleted_with_four_requests() {
    const COUNT: u64 = 300;
    let (fixture, time) = (Fixture::new(1), Time::new());
    let provider = time.provider(&fixture, "p", at_once()).await;
    run_instance(&provider, "i0", How::Completed).await;
    fixture.copy_instance("i0", (1..COUNT).map(|n| format!("i{n}"))).await;
    time.pass(1);
    let before = fixture.account.stats();
    assert_eq!(provider.apply_retention().await.unwrap(), COUNT);
    let requests = (fixture.account.stats() - before).total().requests;
    // The preparation, a query for its documents, the batch that deletes them, and one more query. Besides, about
    // thirty requests for each two hundred instances.
    assert!(requests <= 4 * COUNT + 100, "{requests} requests");
    assert!(there(&provider).await.is_empty());
}

/// Three instances have ended. One of them runs again between the query and its preparation. Returns the instances that
/// stay.
async fn run_again(instance: &'static str, metadata: ExecutionMetadata) -> Vec<String> {
    let (fixture, time) = (Fixture::new(1), Time::new());
    let provider = time.provider(&fixture, "p", Retention::default().with_completed(hours(1))).await;
    for instance in ["a", "b", "c"] {
        run_instance(&provider, instance, How::Completed).await;
    }
    set_end_times(&fixture, &["a", "b", "c"]).await;
    time.pass(2 * HOUR);
    let gate = Gate::new();
    // The first instance of a set is read before it is prepared, and the others are not.
    let preparation = WireRule::new(WireAction::HoldBefore(gate.clone())).client("p").times(1);
    let preparation =
        if instance == "a" { preparation.on(RequestKind::Read) } else { preparation.on(RequestKind::Replace) };
    fixture.account.wire().add(preparation.matching(move |request| goes_to(request, instance)));
    let round = tokio::spawn(async move { provider.apply_retention().await });
    gate.reached().await;
    let other = time.provider(&fixture, "other", Retention::default()).await;
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
async fn an_instance_that_runs_again_between_query_and_preparation_stays() {
    for instance in ["a", "b"] {
        assert_eq!(run_again(instance, running()).await, [instance]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_ends_again_between_query_and_preparation_gets_its_whole_time_again() {
    for instance in ["a", "b"] {
        assert_eq!(run_again(instance, ended("Completed")).await, [instance]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_waits_for_work_applies_retention_and_yields_to_other_requests() {
    let fixture = Fixture::new(1);
    let retention = at_once();
    let provider = Arc::new(fixture.provider_with("p", test_config().with_retention(retention)).await);
    run_instance(&provider, "i", How::Completed).await;
    let low = Arc::new(AtomicU64::new(0));
    let low_too = low.clone();
    fixture.account.wire().observe(move |request, _| {
        let is_low =
            request.header("x-ms-cosmos-priority-level").is_some_and(|level| level.eq_ignore_ascii_case("low"));
        if is_low && goes_to(request, "i") {
            low_too.fetch_add(1, Ordering::Relaxed);
        }
    });
    let waiting = provider.clone();
    let task = tokio::spawn(async move { waiting.fetch_orchestration_item(LONG, PATIENCE, None).await });
    let gone = async {
        while !fixture.partition("i").await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("it goes");
    assert!(low.load(Ordering::Relaxed) > 0, "its requests say that they can wait");
    task.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_retention_setting_no_request_is_sent() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("p").await;
    run_instance(&provider, "i", How::Completed).await;
    let before = fixture.account.stats().total().requests;
    assert_eq!(provider.apply_retention().await.unwrap(), 0);
    assert_eq!(fixture.account.stats().total().requests, before);
    assert_eq!(there(&provider).await, ["i"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_in_the_middle_of_a_round_leaves_no_instance_half_deleted() {
    let (fixture, time) = (Fixture::new(1), Time::new());
    let provider = time.provider(&fixture, "p", at_once()).await;
    for n in 0..10 {
        run_instance(&provider, &format!("i{n}"), How::Completed).await;
    }
    time.pass(1);
    let lost = WireRule::new(WireAction::LoseAnswer).client("p").on(RequestKind::Batch).skip(1).times(3);
    let lost = fixture.account.wire().add(lost);
    let gone = provider.apply_retention().await.unwrap();
    assert!(lost.hits() > 0);
    time.pass(HOUR);
    while provider.apply_retention().await.unwrap() > 0 {}
    assert!(gone <= 10);
    assert!(there(&provider).await.is_empty());
    assert_eq!(admin(&provider).get_system_metrics().await.unwrap().total_instances, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_executions_of_an_endless_instance_are_pruned_from_time_to_time() {
    let fixture = Fixture::new(1);
    let provider =
        fixture.provider_with("p", test_config().with_retention(Retention::default().with_executions(3))).await;
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let mut most = 0;
    for execution in 1..=40 {
        let (_, token, _) = next_turn(&provider, LONG).await;
        let events = vec![started("i", execution), completed("i", execution, 2)];
        let metadata = ended("ContinuedAsNew");
        provider
            .ack_orchestration_item(
                &token,
                execution,
                events,
                Vec::new(),
                vec![continue_as_new("i")],
                metadata,
                Vec::new(),
            )
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
