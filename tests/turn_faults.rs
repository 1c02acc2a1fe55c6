//! A turn that is cut at any request that it makes is wholly there or wholly absent, and can be finished.
//!
//! The wide turn needs several parts as it is; `ACTIVITIES=1000 cargo test --release --test turn_faults` cuts a wider one
//! everywhere.

#[path = "common/turns.rs"]
mod turns;

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
use turns::{
    activity_id, begun, completed, completion, drain_activities, fetch, fetch_now, ids, raised, start, until, within,
    Delta, Site, LONG,
};

const INSTANCE: &str = "order";
/// Runs at once, of all tests together, each on an account of its own: they compute rather than wait, and with more of them
/// than that a request takes longer than its deadline on a busy machine.
static AT_ONCE: Semaphore = Semaphore::const_new(4);
/// Activities of the wide turn: three parts of at most 100 operations, so that there is a part between the first and the last.
const WIDE: u64 = 250;

fn wide() -> Shape {
    let activities = std::env::var("ACTIVITIES").ok().and_then(|activities| activities.parse().ok());
    Shape::Wide(activities.unwrap_or(WIDE))
}

/// A turn to be cut: what the instance had before it, what woke it, and what it writes.
struct Turn {
    site: Site,
    /// The provider that will be cut off, on the client "a".
    first: CosmosDBProvider,
    before: Vec<Event>,
    messages: Vec<WorkItem>,
    token: String,
    delta: Delta,
    children: Vec<String>,
}

/// What the turns are made of.
#[derive(Clone, Copy)]
enum Shape {
    /// One batch.
    Small,
    /// So many activities and as many events, three children and a message to itself.
    Wide(u64),
    /// 12 results of 200 KB: more than one batch may carry.
    Heavy,
}

impl Shape {
    /// Whether there is time to try everything at every request.
    fn is_quick(self) -> bool {
        !matches!(self, Self::Wide(activities) if activities > WIDE)
    }

    /// Whether its activities are taken in the run about this request: of many, a look will do for most.
    fn drains(self, request: u64) -> bool {
        !matches!(self, Self::Wide(_)) || request.is_multiple_of(10)
    }
}

impl Turn {
    /// Fetched by "a" and ready to be acked.
    async fn fetched(shape: Shape) -> Self {
        let site = Site::new().await;
        let first = site.provider("a").await;
        let (before, messages, mut delta) = match shape {
            Shape::Small => (Vec::new(), vec![start(INSTANCE)], Delta::start(INSTANCE, 3)),
            Shape::Wide(activities) => (Vec::new(), vec![start(INSTANCE)], Delta::start(INSTANCE, activities)),
            Shape::Heavy => {
                let setup = site.patient_provider("setup").await;
                let before = begun(&setup, INSTANCE, 12).await;
                assert_eq!(drain_activities(&setup).await.len(), 12);
                let result = "r".repeat(200_000);
                let messages = (2..14).map(|id| completion(INSTANCE, id, &result)).collect();
                let events = (2..14).map(|id| completed(INSTANCE, id + 12, id, &result)).collect();
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
        let (item, token) = fetch(&first, LONG).await;
        assert_eq!(item.messages, messages);
        Self { site, first, before, messages, token, delta, children }
    }

    fn after(&self) -> Vec<Event> {
        self.before.iter().chain(&self.delta.events).cloned().collect()
    }

    /// The requests of an undisturbed ack, deliveries included.
    async fn requests(shape: Shape) -> u64 {
        let turn = Self::fetched(shape).await;
        let before = turn.site.requests("a");
        turn.delta.ack(&turn.first, &turn.token).await.expect("nothing is in the way");
        turn.first.shutdown().await;
        let requests = turn.site.requests("a") - before;
        turn.is_wholly_there_and_done_once(shape.drains(requests)).await;
        requests
    }

    /// Acks until the provider is cut off, then drops the ack; whether it had returned by then.
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

    /// What a second process finds, and that it can finish the turn.
    async fn is_finished_by_a_second_process(&self, acked: bool, drain: bool) {
        let second = self.site.patient_provider("b").await;
        let history = second.read(INSTANCE).await.expect("a history");
        if history == self.before {
            assert!(!acked, "the ack returned, but the turn is not there");
            let work = self.site.documents_of(INSTANCE, "activity").await.len();
            let expected = if self.before.is_empty() { 0 } else { self.before.len() - 1 };
            assert_eq!(work, expected, "activities of a turn that is not there");
            self.site.expire_lock_for_others(INSTANCE).await;
            let (item, token) = fetch(&second, LONG).await;
            assert_eq!((item.instance.as_str(), &item.messages), (INSTANCE, &self.messages));
            assert_eq!(item.history, self.before);
            self.delta.ack(&second, &token).await.expect("the turn is finished");
            second.shutdown().await;
        }
        self.is_wholly_there_and_done_once(drain).await;
    }

    /// Everything that the turn wrote is there, and nothing twice.
    async fn is_wholly_there_and_done_once(&self, drain: bool) {
        let last = self.site.patient_provider("last").await;
        assert_eq!(last.read(INSTANCE).await.expect("a history"), self.after());
        while last.reconcile().await.expect("a reconciler") > 0 {}
        let documents = self.site.documents(INSTANCE).await;
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

    /// Takes every message that there is, and ends the turn that it wakes.
    async fn drain_messages(&self, provider: &CosmosDBProvider) -> Vec<(String, Vec<WorkItem>)> {
        let mut queues = Vec::new();
        while let Some((item, token)) = fetch_now(provider, LONG).await {
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

/// The ids of the activities that can be taken, by a look: taking hundreds takes long.
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
    /// From this request on nothing gets through.
    Dies(u64),
    /// This request is carried out, but its answer is lost, and nothing gets through any more.
    DiesUnanswered(u64),
}

async fn cut(shape: Shape, cut: Cut) {
    let turn = Turn::fetched(shape).await;
    let wire = turn.site.account.wire();
    let rule = |action| turn.site.rule("a", action);
    let (acked, request) = match cut {
        Cut::Dies(request) => {
            let failing = wire.add(rule(WireAction::FailConnection).skip(request));
            (turn.ack_until(failing.wait_for_hits(1)).await, request)
        }
        Cut::DiesUnanswered(request) => {
            // Held for ever once it is carried out, so that there is a moment to wait for.
            let unanswered = Gate::new();
            wire.add(rule(WireAction::HoldAfter(unanswered.clone())).skip(request).times(1));
            wire.add(rule(WireAction::FailConnection).skip(request));
            (turn.ack_until(unanswered.reached()).await, request)
        }
    };
    turn.is_finished_by_a_second_process(acked, shape.drains(request)).await;
}

async fn cut_everywhere(shape: Shape) {
    let requests = Turn::requests(shape).await;
    println!("an undisturbed turn makes {requests} requests");
    let dies = (0..requests).map(Cut::Dies);
    // What is stored then is what is stored when the next request fails: of a slow turn a few will do.
    let unanswered =
        (0..requests).filter(|request| shape.is_quick() || request.is_multiple_of(8)).map(Cut::DiesUnanswered);
    let cuts = dies.chain(unanswered).map(|at| async move {
        println!("{at:?}");
        cut(shape, at).await;
    });
    all(cuts).await;
}

/// Runs them all, several at once.
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
async fn a_small_turn_cut_at_any_request_is_wholly_there_or_wholly_absent() {
    cut_everywhere(Shape::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wide_turn_cut_at_any_request_is_wholly_there_or_wholly_absent() {
    cut_everywhere(wide()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_of_more_results_than_a_batch_may_carry_cut_at_any_request_is_wholly_there_or_wholly_absent() {
    cut_everywhere(Shape::Heavy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_of_1000_activities_cut_at_any_stage_is_wholly_there_or_wholly_absent() {
    // Eleven parts are staged, the commit decides, then they are applied.
    let cuts = [Cut::Dies(5), Cut::Dies(11), Cut::DiesUnanswered(11), Cut::Dies(18)];
    all(cuts.into_iter().map(|at| cut(Shape::Wide(1_000), at))).await;
}

/// One request in trouble is ridden out: the ack succeeds and everything is there once.
async fn trouble_anywhere_is_ridden_out(shape: Shape) {
    let requests = Turn::requests(shape).await;
    let refuse = |status, substatus| WireAction::Refuse { status, substatus, retry_after: None };
    let troubles = [
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
    // Every request loses its answer once; the other troubles take turns, where there is time for them.
    let lost = (0..requests).map(|request| (request, WireAction::LoseAnswer));
    let others = (0..requests).map(|request| (request, troubles[request as usize % troubles.len()].clone()));
    let others: Vec<_> = others.filter(|(request, _)| shape.is_quick() || request.is_multiple_of(8)).collect();
    let runs = lost.chain(others).map(|(request, trouble)| async move {
        println!("{trouble:?} at request {request}");
        let turn = Turn::fetched(shape).await;
        let wire = turn.site.account.wire();
        let rule = wire.add(turn.site.rule("a", trouble).skip(request).times(1));
        turn.delta.ack(&turn.first, &turn.token).await.expect("trouble that passes is ridden out");
        until("the trouble", || rule.hits() == 1).await;
        turn.first.shutdown().await;
        turn.is_wholly_there_and_done_once(shape.drains(request)).await;
    });
    all(runs).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_small_turn_rides_out_trouble_at_any_request() {
    trouble_anywhere_is_ridden_out(Shape::Small).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wide_turn_rides_out_trouble_at_any_request() {
    trouble_anywhere_is_ridden_out(wide()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_of_more_results_than_a_batch_may_carry_rides_out_trouble_at_any_request() {
    trouble_anywhere_is_ridden_out(Shape::Heavy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_whose_process_died_right_after_the_commit_is_rolled_forward_by_one_that_only_polls() {
    let requests = Turn::requests(Shape::Wide(1_000)).await;
    let turn = Turn::fetched(Shape::Wide(1_000)).await;
    // The commit is the last write before the parts are applied: they are as many as were staged.
    let staged = 11;
    assert!(requests > 2 * staged);
    let rule = turn.site.rule("a", WireAction::FailConnection).skip(staged + 1);
    let dead = turn.site.account.wire().add(rule);
    turn.ack_until(dead.wait_for_hits(1)).await;
    assert_eq!(turn.site.documents_of(INSTANCE, "staged").await.len(), staged as usize);
    assert_eq!(turn.site.documents_of(INSTANCE, "activity").await.len(), 0);

    let second = turn.site.patient_provider("b").await;
    let (item, _) = fetch(&second, LONG).await;
    assert_eq!((item.instance.as_str(), item.messages), (INSTANCE, vec![raised(INSTANCE, "to myself")]));
    assert_eq!(ids(&item.history), ids(&turn.after()));
    assert_eq!(drain_activities(&second).await.len(), 1_000);
}
