//! A turn that is cut at any of its requests is committed as a whole or not at all, and another process can finish it.
//!
//! The wide turn needs several parts. `ACTIVITIES=1000 cargo test --release --test it turn::crashes` cuts a wider turn
//! at every request.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, WorkItem},
    Event,
};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, WireAction};
use futures::future;
use serde_json::Value;
use std::future::Future;
use tokio::sync::Semaphore;

const INSTANCE: &str = "order";

/// The number of runs at a time in all tests of this file, each on an account of its own. They need the processor. With
/// more of them, a request misses its deadline on a busy machine.
static AT_ONCE: Semaphore = Semaphore::const_new(4);

/// Activities of the wide turn. It has three parts of at most 100 operations, so one part is neither the first nor the
/// last.
const WIDE: u64 = 250;

fn wide() -> Shape {
    let activities = std::env::var("ACTIVITIES").ok().and_then(|activities| activities.parse().ok());
    Shape::Wide(activities.unwrap_or(WIDE))
}

/// A turn to be cut: the history before it, the messages that it consumes, and its commit.
struct CutTurn {
    fixture: Fixture,
    /// The provider of the client "a", which the test cuts off.
    first: CosmosDBProvider,
    before: Vec<Event>,
    messages: Vec<WorkItem>,
    token: String,
    delta: Delta,
    children: Vec<String>,
}

/// The size of a turn.
#[derive(Clone, Copy)]
enum Shape {
    /// The turn fits one batch.
    Small,
    /// So many activities and as many events, three children and a message to the instance itself.
    Wide(u64),
    /// 12 results of 200 KB each, which exceed one batch.
    Heavy,
}

impl Shape {
    /// Whether there is time to try every fault at every request.
    fn is_quick(self) -> bool {
        !matches!(self, Self::Wide(activities) if activities > WIDE)
    }

    /// Whether the run for this request fetches the activities. With many activities, most runs only read the
    /// documents.
    fn drains(self, request: u64) -> bool {
        !matches!(self, Self::Wide(_)) || request.is_multiple_of(10)
    }
}

impl CutTurn {
    /// The turn that "a" has fetched and can ack.
    async fn fetched(shape: Shape) -> Self {
        let fixture = Fixture::with_container().await;
        let first = fixture.impatient_provider("a").await;
        let (before, messages, mut delta) = match shape {
            Shape::Small => (Vec::new(), vec![start(INSTANCE)], Delta::start(INSTANCE, 3)),
            Shape::Wide(activities) => (Vec::new(), vec![start(INSTANCE)], Delta::start(INSTANCE, activities)),
            Shape::Heavy => {
                let setup = fixture.provider("setup").await;
                let before = begin_with_activities(&setup, INSTANCE, 12).await;
                assert_eq!(drain_activities(&setup).await.len(), 12);
                let result = "r".repeat(200_000);
                let messages = (2..14).map(|id| completion(INSTANCE, id, &result)).collect();
                let events = (2..14).map(|id| activity_completed(INSTANCE, id + 12, id, &result)).collect();
                (before, messages, Delta { events, ..Delta::default() })
            }
        };
        let children: Vec<String> = match shape {
            Shape::Heavy => Vec::new(),
            Shape::Small | Shape::Wide(_) => (0..3).map(|n| format!("child-{n}")).collect(),
        };
        delta.messages = children.iter().map(|child| start(child)).collect();
        delta.messages.push(raised(INSTANCE, "to myself"));
        for message in &messages {
            first.enqueue_for_orchestrator(message.clone(), None).await.expect("a message");
        }
        let (item, token) = fetch_turn(&first, LONG).await;
        assert_eq!(item.messages, messages);
        Self { fixture, first, before, messages, token, delta, children }
    }

    fn after(&self) -> Vec<Event> {
        self.before.iter().chain(&self.delta.events).cloned().collect()
    }

    /// The number of requests of an undisturbed ack, with its deliveries.
    async fn requests(shape: Shape) -> u64 {
        let turn = Self::fetched(shape).await;
        let before = turn.fixture.requests("a");
        turn.delta.ack(&turn.first, &turn.token).await.expect("nothing is in the way");
        turn.first.shutdown().await;
        let requests = turn.fixture.requests("a") - before;
        turn.is_stored_exactly_once(shape.drains(requests)).await;
        requests
    }

    /// Acks until the provider is cut off, then drops the ack. Returns whether the ack had returned by then.
    async fn ack_until(&self, cut: impl Future<Output = ()>) -> bool {
        let ack = self.delta.ack(&self.first, &self.token);
        tokio::pin!(cut);
        within("the cut", async {
            tokio::select! {
                biased;
                () = &mut cut => false,
                outcome = ack => {
                    outcome.expect("nothing was in the way of the ack");
                    cut.await;
                    true
                }
            }
        })
        .await
    }

    /// A second process reads the result and can finish the turn.
    async fn is_finished_by_a_second_process(&self, acked: bool, drain: bool) {
        let second = self.fixture.provider("b").await;
        let history = second.read(INSTANCE).await.expect("a history");
        if history == self.before {
            assert!(!acked, "the ack returned, but the turn is not there");
            let work = self.fixture.documents_of_type(INSTANCE, "activity").await.len();
            let expected = if self.before.is_empty() { 0 } else { self.before.len() - 1 };
            assert_eq!(work, expected, "activities of a turn that is not there");
            self.fixture.expire_lock_for_others(INSTANCE).await;
            let (item, token) = fetch_turn(&second, LONG).await;
            assert_eq!((item.instance.as_str(), &item.messages), (INSTANCE, &self.messages));
            assert_eq!(item.history, self.before);
            self.delta.ack(&second, &token).await.expect("the turn is finished");
            second.shutdown().await;
        }
        self.is_stored_exactly_once(drain).await;
    }

    /// All writes of the turn are stored, and none is stored twice.
    async fn is_stored_exactly_once(&self, drain: bool) {
        let last = self.fixture.provider("last").await;
        assert_eq!(last.read(INSTANCE).await.expect("a history"), self.after());
        while last.reconcile().await.expect("a reconciler") > 0 {}
        let documents = self.fixture.partition(INSTANCE).await;
        for kind in ["staged", "intent"] {
            assert!(!documents.iter().any(|document| document["type"] == kind), "a document of kind {kind} is left");
        }
        let expected: Vec<u64> = self.delta.activities.iter().map(activity_id).collect();
        let activities = if drain { drain_activities(&last).await } else { free_activities(&documents) };
        assert_eq!(activities, expected);
        let mut queues = self.drain_messages(&last).await;
        queues.sort_by(|a, b| a.0.cmp(&b.0));
        let own = (INSTANCE.to_owned(), vec![raised(INSTANCE, "to myself")]);
        let expected: Vec<_> = self.children.iter().map(|c| (c.clone(), vec![start(c)])).chain([own]).collect();
        assert_eq!(queues, expected);
    }

    /// Fetches every message and ends the turn that it starts.
    async fn drain_messages(&self, provider: &CosmosDBProvider) -> Vec<(String, Vec<WorkItem>)> {
        let mut queues = Vec::new();
        while let Some((item, token)) = fetch_turn_now(provider, LONG).await {
            let delta = if item.instance == INSTANCE {
                assert_eq!(item.history, self.after());
                Delta::event(INSTANCE, 5_000, "to myself")
            } else {
                Delta::start(&item.instance, 0)
            };
            delta.ack(provider, &token).await.expect("the turn after it");
            queues.push((item.instance, item.messages));
        }
        queues
    }
}

/// The ids of the activities without a lock, read from the documents: fetching hundreds of activities is slow.
fn free_activities(documents: &[Value]) -> Vec<u64> {
    let free = documents.iter().filter(|document| document["type"] == "activity" && document["lock"].is_null());
    let items = free.map(|document| document["item"].as_str().expect("an item"));
    let mut ids: Vec<u64> = items.map(|item| activity_id(&serde_json::from_str(item).expect("an item"))).collect();
    ids.sort_unstable();
    ids
}

/// How the first process is cut off.
#[derive(Clone, Copy, Debug)]
enum Cut {
    /// From this request on, all connections fail.
    Crash(u64),
    /// Cosmos DB carries out this request, but its answer is lost, and all connections fail from then on.
    CrashAfterRequest(u64),
}

async fn cut(shape: Shape, cut: Cut) {
    let turn = CutTurn::fetched(shape).await;
    let wire = turn.fixture.account.wire();
    let rule = |action| turn.fixture.rule("a", action);
    let (acked, request) = match cut {
        Cut::Crash(request) => {
            let failing = wire.add(rule(WireAction::FailConnection).skip(request));
            (turn.ack_until(failing.wait_for_hits(1)).await, request)
        }
        Cut::CrashAfterRequest(request) => {
            // The answer is held for ever, so that the test can wait for the request.
            let unanswered = Gate::new();
            wire.add(rule(WireAction::HoldAfter(unanswered.clone())).skip(request).times(1));
            wire.add(rule(WireAction::FailConnection).skip(request));
            (turn.ack_until(unanswered.reached()).await, request)
        }
    };
    turn.is_finished_by_a_second_process(acked, shape.drains(request)).await;
}

async fn cut_everywhere(shape: Shape) {
    let requests = CutTurn::requests(shape).await;
    println!("an undisturbed turn makes {requests} requests");
    let crashes = (0..requests).map(Cut::Crash);
    // The stored state is the same as when the next request fails. Therefore a slow turn tries only some of these cuts.
    let unanswered =
        (0..requests).filter(|request| shape.is_quick() || request.is_multiple_of(8)).map(Cut::CrashAfterRequest);
    let cuts = crashes.chain(unanswered).map(|at| async move {
        println!("{at:?}");
        cut(shape, at).await;
    });
    all(cuts).await;
}

/// Runs all of them, several at a time.
async fn all<F: Future<Output = ()> + Send + 'static>(runs: impl Iterator<Item = F>) {
    let runs = runs.map(|run| {
        tokio::spawn(async {
            let _turn = AT_ONCE.acquire().await.expect("it is never closed");
            run.await;
        })
    });
    future::try_join_all(runs).await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_turn_cut_at_any_request_is_committed_as_a_whole_or_not_at_all() {
    cut_everywhere(Shape::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wide_turn_cut_at_any_request_is_committed_as_a_whole_or_not_at_all() {
    cut_everywhere(wide()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_with_more_results_than_fit_a_batch_cut_at_any_request_is_committed_as_a_whole_or_not_at_all() {
    cut_everywhere(Shape::Heavy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_of_1000_activities_cut_at_any_stage_is_committed_as_a_whole_or_not_at_all() {
    // Eleven parts are staged, the commit makes them valid, and then they are applied.
    let cuts = [Cut::Crash(5), Cut::Crash(11), Cut::CrashAfterRequest(11), Cut::Crash(18)];
    all(cuts.into_iter().map(|at| cut(Shape::Wide(1_000), at))).await;
}

/// One request fails temporarily: the ack succeeds, and every write is stored once.
async fn a_fault_at_any_request_is_retried(shape: Shape) {
    let requests = CutTurn::requests(shape).await;
    let refuse = |status, substatus| WireAction::Refuse { status, substatus, retry_after: None };
    let faults = [
        WireAction::FailConnection,
        WireAction::LoseAnswer,
        refuse(429, Some(3200)),
        refuse(503, None),
        refuse(449, None),
        refuse(408, None),
        refuse(410, Some(1002)),
        refuse(500, None),
        WireAction::RefuseBatchOperation { index: 0, status: 429, substatus: Some(3200) },
    ];
    // Each request loses its answer once. The other faults alternate, as far as there is time.
    let lost = (0..requests).map(|request| (request, WireAction::LoseAnswer));
    let others = (0..requests).map(|request| (request, faults[request as usize % faults.len()].clone()));
    let others: Vec<_> = others.filter(|(request, _)| shape.is_quick() || request.is_multiple_of(8)).collect();
    let runs = lost.chain(others).map(|(request, fault)| async move {
        println!("{fault:?} at request {request}");
        let turn = CutTurn::fetched(shape).await;
        let wire = turn.fixture.account.wire();
        let rule = wire.add(turn.fixture.rule("a", fault).skip(request).times(1));
        turn.delta.ack(&turn.first, &turn.token).await.expect("fault that passes is ridden out");
        until("the fault", || rule.hits() == 1).await;
        turn.first.shutdown().await;
        turn.is_stored_exactly_once(shape.drains(request)).await;
    });
    all(runs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_turn_retries_after_a_fault_at_any_request() {
    a_fault_at_any_request_is_retried(Shape::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wide_turn_retries_after_a_fault_at_any_request() {
    a_fault_at_any_request_is_retried(wide()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_with_more_results_than_fit_a_batch_retries_after_a_fault_at_any_request() {
    a_fault_at_any_request_is_retried(Shape::Heavy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_whose_process_crashed_right_after_the_commit_is_rolled_forward_by_a_process_that_only_polls() {
    let requests = CutTurn::requests(Shape::Wide(1_000)).await;
    let turn = CutTurn::fetched(Shape::Wide(1_000)).await;
    // The commit is the last write before the parts are applied. All parts are still staged then.
    let staged = 11;
    assert!(requests > 2 * staged);
    let rule = turn.fixture.rule("a", WireAction::FailConnection).skip(staged + 1);
    let dead = turn.fixture.account.wire().add(rule);
    turn.ack_until(dead.wait_for_hits(1)).await;
    assert_eq!(turn.fixture.documents_of_type(INSTANCE, "staged").await.len(), staged as usize);
    assert_eq!(turn.fixture.documents_of_type(INSTANCE, "activity").await.len(), 0);

    let second = turn.fixture.provider("b").await;
    let (item, _) = fetch_turn(&second, LONG).await;
    assert_eq!((item.instance.as_str(), item.messages), (INSTANCE, vec![raised(INSTANCE, "to myself")]));
    assert_eq!(ids(&item.history), ids(&turn.after()));
    assert_eq!(drain_activities(&second).await.len(), 1_000);
}
