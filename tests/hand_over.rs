//! The write that makes work carries the claim for a dispatcher that waits: what it saves, and that nothing is lost by it, whatever
//! becomes of the write, the dispatcher or the process.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, TagFilter, WorkItem};
use duroxide_cosmos::{Clock, CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireAnswer, WireRequest, WireRule, WireRuleHandle};
use scene::*;
use serde_json::Value;
use std::{
    future::Future,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};
use tokio::{sync::mpsc, task::JoinHandle};

const INSTANCE: &str = "i";
const CHILD: &str = "child";

/// Nothing is found by a sweep, and nobody delivers what another is delivering.
fn no_sweeps() -> CosmosDBProviderConfig {
    let hour = Duration::from_secs(3_600);
    quiet().with_poll_interval(hour).with_reconciler_age_threshold(hour)
}

/// A provider whose dispatchers wait, and what they get.
struct Crew {
    provider: Arc<CosmosDBProvider>,
    turns: mpsc::UnboundedReceiver<Turn>,
    work: mpsc::UnboundedReceiver<Work>,
    waiting: Vec<JoinHandle<()>>,
}

impl Crew {
    /// Waits until so many dispatchers of each kind have nothing to do. Their clock stands still: what was asked a moment ago was asked a
    /// moment ago, however busy the machine is.
    async fn begin(scene: &Scene, config: CosmosDBProviderConfig, runners: usize, workers: usize) -> Self {
        let now = system();
        let config = config.with_clock(Clock::from_fn(move || now));
        let provider = Arc::new(scene.provider_with("crew", config).await);
        let ((send_turn, turns), (send_work, work)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let mut waiting = Vec::new();
        for _ in 0..runners {
            let provider = provider.clone();
            let fetch = move || {
                let provider = provider.clone();
                async move { provider.fetch_orchestration_item(LONG, PATIENCE, None).await.ok() }
            };
            waiting.push(tokio::spawn(dispatch(fetch, send_turn.clone())));
        }
        for _ in 0..workers {
            let provider = provider.clone();
            let fetch = move || {
                let provider = provider.clone();
                async move { provider.fetch_work_item(LONG, PATIENCE, None, &TagFilter::Any).await.ok() }
            };
            waiting.push(tokio::spawn(dispatch(fetch, send_work.clone())));
        }
        // Who waits for half a second says so.
        let is_there = |member: &Value| {
            (runners == 0 || !member["turns"].is_null()) && (workers == 0 || !member["activity"].is_null())
        };
        let looking = async {
            while !scene.of_kind("$d:fleet", "member").await.iter().any(is_there) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, looking).await.expect("they wait");
        Self { provider, turns, work, waiting }
    }

    async fn turn(&mut self) -> Turn {
        tokio::time::timeout(PATIENCE, self.turns.recv()).await.expect("a turn in time").expect("a turn")
    }

    async fn activity(&mut self) -> Work {
        tokio::time::timeout(PATIENCE, self.work.recv()).await.expect("an activity in time").expect("an activity")
    }

    async fn start(&self) {
        self.provider.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    }

    async fn commit(&self, token: &str, first: bool, work: Vec<WorkItem>) {
        let events = if first { scheduled(&work) } else { vec![completed(INSTANCE, 1, 50)] };
        let metadata = if first { running() } else { ended("Completed") };
        commit(self.provider.as_ref(), token, events, work, Vec::new(), metadata).await.unwrap();
    }

    /// The dispatchers go away.
    async fn stop(&mut self) {
        for waiting in self.waiting.drain(..) {
            waiting.abort();
            waiting.await.expect_err("it waits until it is stopped");
        }
    }
}

/// Fetches one thing after the other. A thing is passed on once its dispatcher waits for the next one: a test that has it
/// knows that somebody waits.
async fn dispatch<T, F>(fetch: impl Fn() -> F, send: mpsc::UnboundedSender<T>)
where
    F: Future<Output = Option<Option<T>>>,
{
    let mut last = None;
    loop {
        let mut fetching = pin!(fetch());
        let polled = futures::poll!(&mut fetching);
        if last.take().is_some_and(|last| send.send(last).is_err()) {
            return;
        }
        let fetched = match polled {
            Poll::Ready(fetched) => fetched,
            Poll::Pending => fetching.await,
        };
        let Some(fetched) = fetched else { return };
        last = fetched;
    }
}

/// The events of a first turn that schedules these.
fn scheduled(work: &[WorkItem]) -> Vec<duroxide::Event> {
    let schedule = work.iter().filter_map(|item| match item {
        WorkItem::ActivityExecute { id, name, input, .. } => {
            let (name, input) = (name.clone(), input.clone());
            let kind = duroxide::EventKind::ActivityScheduled { name, input, session_id: None, tag: None };
            Some(event(INSTANCE, 1, *id, kind))
        }
        _ => None,
    });
    std::iter::once(started(INSTANCE, 1)).chain(schedule).collect()
}

/// What the crew writes to instances. Who waits may look at one that a poll has seen to be due: where that comes to nothing, it does not count.
#[derive(Clone, Default)]
struct Sent(Arc<Mutex<Vec<(&'static str, RequestKind)>>>);

impl Sent {
    /// From now on.
    fn record(scene: &Scene) -> Self {
        let sent = Self::default();
        let sent_too = sent.clone();
        scene.account.wire().observe(move |request, answer| {
            let instance = [INSTANCE, CHILD].into_iter().find(|instance| goes_to(request, instance));
            let is_write = matches!(request.kind, RequestKind::Create | RequestKind::Replace | RequestKind::Batch);
            let counts = request.client == Some("crew") && is_write && is_done(answer);
            let Some(instance) = instance.filter(|_| counts) else { return };
            let mut sent = sent_too.0.lock().unwrap();
            match takes_a_claim_back(request) {
                true => drop(sent.iter().rposition(|(to, _)| *to == instance).map(|claim| sent.remove(claim))),
                false => sent.push((instance, request.kind)),
            }
        });
        sent
    }

    fn to(&self, instance: &str) -> Vec<RequestKind> {
        let sent = self.0.lock().unwrap();
        sent.iter().filter(|(to, _)| *to == instance).map(|(_, kind)| *kind).collect()
    }
}

/// Whether a request does nothing but take a lock off.
fn takes_a_claim_back(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let operation = body.as_array().filter(|operations| operations.len() == 1).map(|operations| &operations[0]);
    operation.is_some_and(|operation| operation["id"] == "instance" && operation["resourceBody"]["lock"].is_null())
}

/// Whether an answer says that it was done, all of it.
fn is_done(answer: &WireAnswer<'_>) -> bool {
    let parts = answer.json().and_then(|body| body.as_array().cloned()).unwrap_or_default();
    answer.status < 300 && parts.iter().all(|part| part["statusCode"].as_u64().is_none_or(|status| status < 300))
}

/// Whether a request claims an instance or an activity together with something else.
fn hands_over(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let operations = body.as_array().map(Vec::as_slice).unwrap_or_default();
    let locks = |operation: &Value| !operation["resourceBody"]["lock"].is_null();
    let encloses = |operation: &Value| !operation["resourceBody"]["inlined"].is_null();
    let with_something = operations.len() > 1 || operations.iter().any(encloses);
    goes_to(request, INSTANCE) && request.kind == RequestKind::Batch && with_something && operations.iter().any(locks)
}

/// The next hand-over meets this.
fn next_hand_over(scene: &Scene, action: WireAction) -> WireRuleHandle {
    scene.account.wire().add(WireRule::new(action).client("crew").matching(hands_over).times(1))
}

fn system() -> u64 {
    u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap()
}

fn hours_ahead() -> CosmosDBProviderConfig {
    quiet().with_clock(off_by(7_200_000))
}

/// Waits until a request has come to the gate.
async fn reached(gate: &Gate) {
    tokio::time::timeout(PATIENCE, gate.reached()).await.expect("it comes to the gate");
}

/// Runs an orchestration with one activity; how often turns and activities were tried.
async fn hello(crew: &mut Crew) -> [u32; 3] {
    crew.start().await;
    let (_, token, first) = crew.turn().await;
    crew.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let (_, token, ran) = crew.activity().await;
    crew.provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
    let (turn, token, last) = crew.turn().await;
    assert_eq!(turn.messages, [done(INSTANCE, 2)]);
    crew.commit(&token, false, Vec::new()).await;
    [first, ran, last]
}

async fn nothing_is_left(scene: &Scene) {
    // After a lost answer somebody may look once more whether there is something to do.
    let settled = async {
        loop {
            let documents = scene.partition(INSTANCE).await;
            if documents.iter().all(|document| document["lock"].is_null()) {
                return documents;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let documents = tokio::time::timeout(PATIENCE, settled).await.expect("nobody holds anything");
    let instance = documents.iter().find(|document| document["type"] == "instance").expect("the instance");
    assert!(instance["due"].is_null(), "{instance}");
    assert_eq!(instance["status"], "Completed");
    let left = documents.iter().find(|document| ["activity", "message"].iter().any(|kind| document["type"] == *kind));
    assert!(left.is_none(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_step_of_an_orchestration_is_one_request_with_the_claim_of_the_next() {
    use RequestKind::{Batch, Create, Replace};
    for (on, expected) in [(true, vec![Batch; 4]), (false, vec![Create, Create, Batch, Replace, Batch, Replace, Batch])]
    {
        let scene = Scene::new(1);
        let mut crew = Crew::begin(&scene, no_sweeps().with_inline_claims(on), 3, 3).await;
        let sent = Sent::record(&scene);
        assert_eq!(hello(&mut crew).await, [1, 1, 1]);
        assert_eq!(sent.to(INSTANCE), expected, "{on}");
        nothing_is_left(&scene).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_whose_answer_is_lost_is_read_and_counted_once() {
    // The start, the commit with an activity, the end of the activity.
    for step in 0..3 {
        let scene = Scene::new(1);
        let mut crew = Crew::begin(&scene, quiet(), 3, 3).await;
        let rule = WireRule::new(WireAction::LoseAnswer).client("crew").matching(hands_over).skip(step).times(1);
        let lost = scene.account.wire().add(rule);
        assert_eq!(hello(&mut crew).await, [1, 1, 1], "step {step}");
        assert_eq!(lost.hits(), 1, "step {step}");
        nothing_is_left(&scene).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_refused_because_of_the_claim_is_written_without_it() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, quiet(), 3, 3).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    crew.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let (_, token, _) = crew.activity().await;
    // Another process has had a turn meanwhile.
    let held = Gate::new();
    next_hand_over(&scene, WireAction::HoldBefore(held.clone()));
    let provider = crew.provider.clone();
    let ending = tokio::spawn(async move { provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await });
    reached(&held).await;
    let other = scene.provider("other").await;
    other.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    let (_, token, _) = next_turn(&other, LONG).await;
    commit(&other, &token, vec![note(INSTANCE, 1, 3)], Vec::new(), Vec::new(), running()).await.unwrap();
    held.open();
    ending.await.unwrap().unwrap();
    let (turn, token, attempts) = crew.turn().await;
    assert_eq!((turn.messages, turn.history.len(), attempts), (vec![done(INSTANCE, 2)], 3, 1));
    crew.commit(&token, false, Vec::new()).await;
    nothing_is_left(&scene).await;
}

/// Runs an orchestration up to the end of its activity.
async fn hello_until_its_activity_has_ended(crew: &mut Crew) {
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    crew.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let (_, token, _) = crew.activity().await;
    crew.provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_handed_over_to_a_dispatcher_that_has_gone_is_given_back_uncounted() {
    for step in 0..3 {
        let scene = Scene::new(1);
        let mut crew = Crew::begin(&scene, quiet(), 3, 3).await;
        let waiting: Vec<_> = crew.waiting.iter().map(JoinHandle::abort_handle).collect();
        let held = Gate::new();
        let rule = WireRule::new(WireAction::HoldAfter(held.clone())).client("crew").matching(hands_over);
        scene.account.wire().add(rule.skip(step).times(1));
        // The call itself goes on: only those who wait for what it makes have gone.
        let steps = tokio::spawn(async move { hello_until_its_activity_has_ended(&mut crew).await });
        reached(&held).await;
        waiting.iter().for_each(tokio::task::AbortHandle::abort);
        held.open();
        let given_back = async {
            while scene.partition(INSTANCE).await.iter().any(|document| !document["lock"].is_null()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, given_back).await.expect("it is given back");
        let other = scene.provider("other").await;
        let attempts = match step {
            1 => next_work(&other, LONG).await.2,
            _ => next_turn(&other, LONG).await.2,
        };
        assert_eq!(attempts, 1, "step {step}");
        steps.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_process_that_died_had_handed_over_is_another_s_when_the_lock_has_ended() {
    for step in 0..3 {
        let scene = Scene::new(1);
        let mut crew = Crew::begin(&scene, quiet(), 3, 3).await;
        let held = Gate::new();
        let rule = WireRule::new(WireAction::HoldAfter(held.clone())).client("crew").matching(hands_over);
        scene.account.wire().add(rule.skip(step).times(1));
        {
            let mut steps = pin!(hello_until_its_activity_has_ended(&mut crew));
            tokio::select! {
                () = &mut steps => panic!("it is cut"),
                () = reached(&held) => {}
            }
            // While the step is under way: who goes away from one that is alive gives back what that has claimed.
            scene.cut("crew", 0);
        }
        crew.stop().await;
        let other = scene.provider_with("other", hours_ahead()).await;
        if step == 1 {
            let (_, _, attempts) = next_work(&other, LONG).await;
            assert_eq!(attempts, 2, "it was claimed once");
        } else {
            let (turn, _, attempts) = next_turn(&other, LONG).await;
            assert_eq!((turn.messages.len(), attempts), (1, 2), "it was claimed once");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_activity_is_claimed_by_the_end_of_the_one_before() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 1, 1).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    crew.stop().await;
    let worker = crew.provider.clone();
    let work = (2..5).map(|id| activity(INSTANCE, id)).collect();
    crew.commit(&token, true, work).await;
    let (_, first, _) = next_work(worker.as_ref(), LONG).await;
    let carried = Arc::new(Mutex::new(0));
    let carried_too = carried.clone();
    scene.account.wire().observe(move |request, _| *carried_too.lock().unwrap() += usize::from(hands_over(request)));
    let mut token = first;
    for id in 2..5 {
        worker.ack_work_item(&token, Some(done(INSTANCE, id))).await.unwrap();
        if id < 4 {
            let (item, next, attempts) = next_work(worker.as_ref(), LONG).await;
            assert_eq!((item, attempts), (activity(INSTANCE, id + 1), 1));
            token = next;
        }
    }
    // Two, unless the machine is so busy that one was given back meanwhile.
    assert!(*carried.lock().unwrap() > 0, "the end of one claims the next");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_nobody_comes_back_for_is_given_back() {
    let scene = Scene::new(1);
    let provider = scene.provider("crew").await;
    begin(&provider, INSTANCE, (2..4).map(|id| activity(INSTANCE, id)).collect(), Vec::new()).await;
    let (_, token, _) = next_work(&provider, LONG).await;
    provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
    let locked = |documents: &[Value]| documents.iter().any(|document| !document["lock"].is_null());
    let given_back = async {
        while locked(&scene.of_kind(INSTANCE, "activity").await) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, given_back).await.expect("it is given back");
    let (_, _, attempts) = next_work(&scene.provider("other").await, LONG).await;
    assert_eq!(attempts, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_an_activity_claims_no_turn_while_others_are_under_way() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, quiet(), 3, 3).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    crew.commit(&token, true, vec![activity(INSTANCE, 2), activity(INSTANCE, 3)]).await;
    let (first, second) = (crew.activity().await, crew.activity().await);
    let claims = Arc::new(Mutex::new(0));
    let claims_too = claims.clone();
    scene.account.wire().observe(move |request, _| *claims_too.lock().unwrap() += usize::from(hands_over(request)));
    let mut ended = 0;
    for (item, token, _) in [first, second] {
        let WorkItem::ActivityExecute { id, .. } = item else { panic!("{item:?}") };
        crew.provider.ack_work_item(&token, Some(done(INSTANCE, id))).await.unwrap();
        ended += 1;
        assert!(*claims.lock().unwrap() < ended, "the first waits for the second");
    }
    let (turn, ..) = crew.turn().await;
    assert!(!turn.messages.is_empty());
}

/// What a child tells its parent.
fn child_s_end() -> WorkItem {
    WorkItem::SubOrchCompleted {
        parent_instance: INSTANCE.to_owned(),
        parent_execution_id: 1,
        parent_id: 2,
        result: "done".to_owned(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_s_start_and_its_end_carry_the_claims_of_child_and_parent() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 3, 0).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    let kind = duroxide::EventKind::SubOrchestrationScheduled {
        name: "C".to_owned(),
        instance: CHILD.to_owned(),
        input: String::new(),
    };
    let events = vec![started(INSTANCE, 1), event(INSTANCE, 1, 2, kind)];
    let sent = Sent::record(&scene);
    let child_start = start_child(CHILD, Some(INSTANCE));
    commit(crew.provider.as_ref(), &token, events, Vec::new(), vec![child_start], running()).await.unwrap();
    let (turn, token, attempts) = crew.turn().await;
    assert_eq!((turn.instance.as_str(), attempts), (CHILD, 1));
    let end = child_s_end();
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some(INSTANCE.to_owned()), ..ended("Completed") };
    let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
    commit(crew.provider.as_ref(), &token, events, Vec::new(), vec![end.clone()], metadata).await.unwrap();
    let (turn, token, attempts) = crew.turn().await;
    assert_eq!((turn.instance.as_str(), turn.messages.as_slice(), attempts), (INSTANCE, [end].as_slice(), 1));
    crew.commit(&token, false, Vec::new()).await;
    assert_eq!(sent.to(CHILD), [RequestKind::Batch; 2]);
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch; 3], "its turn, the end of the child, its last turn");
}

impl Crew {
    /// Ends an execution that continues as new.
    async fn continue_as_new(&self, token: &str, execution: u64) -> Result<(), duroxide::providers::ProviderError> {
        let events = vec![started(INSTANCE, execution), completed(INSTANCE, execution, 2)];
        let (provider, again) = (self.provider.as_ref(), vec![again(INSTANCE)]);
        commit(provider, token, events, Vec::new(), again, ended("ContinuedAsNew")).await
    }

    /// Ends the instance.
    async fn complete(&self, token: &str, execution: u64) {
        let events = vec![started(INSTANCE, execution), completed(INSTANCE, execution, 2)];
        let (provider, nothing) = (self.provider.as_ref(), Vec::new());
        commit(provider, token, events, Vec::new(), nothing, ended("Completed")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_continues_as_new_keeps_the_lock_but_not_for_ever() {
    use RequestKind::{Batch, Replace};
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 3, 0).await;
    let sent = Sent::record(&scene);
    crew.start().await;
    for execution in 1..=10 {
        let (turn, token, attempts) = crew.turn().await;
        assert_eq!((turn.execution_id, turn.messages.len(), attempts), (execution.max(2) - 1, 1, 1));
        crew.continue_as_new(&token, execution).await.unwrap();
    }
    let (_, token, _) = crew.turn().await;
    crew.complete(&token, 11).await;
    // The start, then the commits; one of them has let go, so that the turn after it was claimed.
    let mut expected = vec![Batch; 12];
    expected.insert(10, Replace);
    assert_eq!(sent.to(INSTANCE), expected);
    nothing_is_left(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_came_during_a_turn_is_claimed_by_its_commit() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 1, 0).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    crew.provider.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    let sent = Sent::record(&scene);
    commit(crew.provider.as_ref(), &token, vec![started(INSTANCE, 1)], Vec::new(), Vec::new(), running())
        .await
        .unwrap();
    let (turn, token, attempts) = crew.turn().await;
    assert_eq!((turn.messages.as_slice(), attempts), ([external(INSTANCE, "news")].as_slice(), 1));
    crew.commit(&token, false, Vec::new()).await;
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch; 2]);
    nothing_is_left(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_was_there_before_comes_first() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 1, 0).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    crew.stop().await;
    // It waits for the only dispatcher.
    crew.provider.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
    let sent = Sent::record(&scene);
    crew.continue_as_new(&token, 1).await.unwrap();
    let (turn, token, _) = next_turn(crew.provider.as_ref(), LONG).await;
    assert_eq!(turn.instance, CHILD);
    commit(crew.provider.as_ref(), &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let (turn, ..) = next_turn(crew.provider.as_ref(), LONG).await;
    assert_eq!(turn.instance, INSTANCE);
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch, RequestKind::Replace]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_was_kept_by_a_commit_whose_answer_is_lost_is_counted_once() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, quiet(), 3, 0).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    let lost = next_hand_over(&scene, WireAction::LoseAnswer);
    crew.continue_as_new(&token, 1).await.unwrap();
    assert_eq!(lost.hits(), 1);
    let (turn, token, attempts) = crew.turn().await;
    assert_eq!((turn.messages.as_slice(), attempts), ([again(INSTANCE)].as_slice(), 1));
    crew.complete(&token, 2).await;
    nothing_is_left(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_was_kept_for_nobody_is_given_back_and_that_of_the_dead_expires() {
    for dies in [false, true] {
        let scene = Scene::new(1);
        let mut crew = Crew::begin(&scene, quiet(), 1, 0).await;
        crew.start().await;
        let (_, token, _) = crew.turn().await;
        crew.stop().await;
        if dies {
            let held = Gate::new();
            next_hand_over(&scene, WireAction::HoldAfter(held.clone()));
            let mut step = pin!(crew.continue_as_new(&token, 1));
            tokio::select! {
                _ = &mut step => panic!("it is cut"),
                () = reached(&held) => {}
            }
            // While the step is under way: who goes away from one that is alive gives back what that has claimed.
            scene.cut("crew", 0);
        } else {
            crew.continue_as_new(&token, 1).await.unwrap();
        }
        let config = if dies { hours_ahead() } else { quiet() };
        let other = scene.provider_with("other", config).await;
        let (turn, _, attempts) = next_turn(&other, LONG).await;
        assert_eq!((turn.messages, attempts), (vec![again(INSTANCE)], 1 + u32::from(dies)), "{dies}");
    }
}

/// The instance's document.
async fn document(scene: &Scene, instance: &str) -> Value {
    scene.of_kind(instance, "instance").await.pop().expect("the instance's document")
}

/// Messages and markers of an instance, by type.
async fn letters(scene: &Scene, instance: &str) -> Vec<String> {
    let documents = scene.partition(instance).await;
    let such = documents.iter().filter(|document| document["id"].as_str().is_some_and(|id| id.starts_with("m:")));
    such.map(|document| document["type"].as_str().unwrap_or_default().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_handed_over_is_in_the_instance_s_document_until_its_turn_is_committed() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 3, 3).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    let instance = document(&scene, INSTANCE).await;
    assert!(instance["inlined"]["item"].as_str().unwrap().contains("StartOrchestration"), "{instance}");
    assert_eq!(instance["due"], instance["lock"]["until"], "a poll finds it when the lock has ended");
    assert!(letters(&scene, INSTANCE).await.is_empty());
    crew.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let instance = document(&scene, INSTANCE).await;
    assert!(instance["inlined"].is_null() && instance["due"].is_null(), "{instance}");
    let (_, token, _) = crew.activity().await;
    crew.provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
    let (turn, token, _) = crew.turn().await;
    assert_eq!(turn.messages, [done(INSTANCE, 2)]);
    let instance = document(&scene, INSTANCE).await;
    assert!(instance["inlined"]["item"].as_str().unwrap().contains("ActivityCompleted"), "{instance}");
    assert_eq!(instance["due"], instance["lock"]["until"]);
    crew.commit(&token, false, Vec::new()).await;
    nothing_is_left(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_message_has_a_document_of_its_own() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 3, 3).await;
    let mut large = start(INSTANCE);
    if let WorkItem::StartOrchestration { input, .. } = &mut large {
        *input = "x".repeat(5_000);
    }
    let sent = Sent::record(&scene);
    crew.provider.enqueue_for_orchestrator(large.clone(), None).await.unwrap();
    let (turn, token, _) = crew.turn().await;
    assert_eq!(turn.messages, [large]);
    assert!(document(&scene, INSTANCE).await["inlined"].is_null());
    assert_eq!(letters(&scene, INSTANCE).await, ["message"]);
    crew.complete(&token, 1).await;
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch; 2]);
    nothing_is_left(&scene).await;
}

/// Takes a turn with an enclosed message: the start, or the end of an activity.
async fn enclosed_turn(crew: &mut Crew, is_first: bool) -> String {
    crew.start().await;
    let (_, token, attempts) = crew.turn().await;
    assert_eq!(attempts, 1);
    if is_first {
        return token;
    }
    crew.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let (_, token, _) = crew.activity().await;
    crew.provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
    crew.turn().await.1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_turn_writes_its_message_out_and_counts_as_any_other() {
    for is_first in [true, false] {
        for delay in [None, Some(Duration::from_millis(50))] {
            for ignored in [false, true] {
                let case = format!("first {is_first}, delay {delay:?}, ignored {ignored}");
                let scene = Scene::new(1);
                let mut crew = Crew::begin(&scene, no_sweeps(), 3, 3).await;
                let token = enclosed_turn(&mut crew, is_first).await;
                crew.stop().await;
                crew.provider.abandon_orchestration_item(&token, delay, ignored).await.unwrap();
                let instance = document(&scene, INSTANCE).await;
                assert!(instance["inlined"].is_null() && instance["lock"].is_null(), "{case}: {instance}");
                assert_eq!(letters(&scene, INSTANCE).await, ["message"], "{case}");
                // Whoever takes it, and the one after that, counts the attempts so far.
                let other = scene.provider_with("other", hours_ahead()).await;
                for again in 0..2 {
                    let (turn, token, attempts) = next_turn(&other, LONG).await;
                    assert_eq!((turn.messages.len(), attempts), (1, 2 + again - u32::from(ignored)), "{case}");
                    other.abandon_orchestration_item(&token, None, false).await.unwrap();
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_whose_answer_is_lost_writes_its_message_out_once() {
    for is_first in [true, false] {
        let scene = Scene::new(1);
        let mut crew = Crew::begin(&scene, no_sweeps(), 3, 3).await;
        let token = enclosed_turn(&mut crew, is_first).await;
        crew.stop().await;
        let is_release = |request: &WireRequest<'_>| goes_to(request, INSTANCE) && request.kind == RequestKind::Batch;
        let rule = WireRule::new(WireAction::LoseAnswer).client("crew").matching(is_release).times(1);
        let lost = scene.account.wire().add(rule);
        crew.provider.abandon_orchestration_item(&token, None, false).await.unwrap();
        assert_eq!(lost.hits(), 1);
        let (turn, token, attempts) = next_turn(crew.provider.as_ref(), LONG).await;
        assert_eq!((turn.messages.len(), attempts), (1, 2));
        match is_first {
            true => crew.complete(&token, 1).await,
            false => crew.commit(&token, false, Vec::new()).await,
        }
        nothing_is_left(&scene).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_is_renewed_keeps_its_message_in_sight() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 3, 3).await;
    let token = enclosed_turn(&mut crew, false).await;
    let before = document(&scene, INSTANCE).await;
    crew.provider.renew_orchestration_item_lock(&token, LONG * 2).await.unwrap();
    let after = document(&scene, INSTANCE).await;
    assert_eq!(after["inlined"], before["inlined"]);
    assert_eq!(after["due"], after["lock"]["until"]);
    assert!(after["due"].as_u64() > before["due"].as_u64());
    crew.commit(&token, false, Vec::new()).await;
    nothing_is_left(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_in_parts_consumes_an_enclosed_message() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 1, 0).await;
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    crew.commit(&token, true, (2..252).map(|id| activity(INSTANCE, id)).collect()).await;
    let instance = document(&scene, INSTANCE).await;
    assert!(
        instance["inlined"].is_null() && instance["due"].is_null() && instance["rollForward"].is_null(),
        "{instance}"
    );
    assert_eq!(scene.of_kind(INSTANCE, "activity").await.len(), 250);
    assert!(letters(&scene, INSTANCE).await.is_empty());
}

/// A parent whose child was handed over: the child's turn is under way.
async fn with_child(crew: &mut Crew) -> String {
    crew.start().await;
    let (_, token, _) = crew.turn().await;
    let child = vec![start_child(CHILD, Some(INSTANCE))];
    commit(crew.provider.as_ref(), &token, vec![started(INSTANCE, 1)], Vec::new(), child, running()).await.unwrap();
    let (turn, token, _) = crew.turn().await;
    assert_eq!(turn.instance, CHILD);
    token
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_an_enclosed_delivery_is_known_before_the_commit_and_after_it() {
    for late in [false, true] {
        let scene = Scene::new(1);
        // Who has delivered can't say so.
        let is_forgotten = |request: &WireRequest<'_>| {
            goes_to(request, INSTANCE) && request.kind == RequestKind::Delete && request.client == Some("crew")
        };
        scene.account.wire().add(WireRule::new(WireAction::HoldBefore(Gate::new())).matching(is_forgotten));
        let mut crew = Crew::begin(&scene, no_sweeps(), 1, 0).await;
        let token = with_child(&mut crew).await;
        assert_eq!(scene.of_kind(INSTANCE, "intent").await.len(), 1, "it is delivered again");
        let other = scene.provider_with("other", hours_ahead()).await;
        assert_eq!(letters(&scene, CHILD).await, ["delivered"], "its marker is there already");
        if !late {
            other.reconcile().await.unwrap();
        }
        commit(crew.provider.as_ref(), &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running())
            .await
            .unwrap();
        if late {
            other.reconcile().await.unwrap();
        }
        assert_eq!(letters(&scene, CHILD).await, ["delivered"], "late {late}");
        assert!(scene.of_kind(INSTANCE, "intent").await.is_empty());
        let nothing = other.fetch_orchestration_item(LONG, Duration::ZERO, None).await.unwrap();
        assert!(nothing.is_none(), "{nothing:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_beside_an_enclosed_message_of_the_dead_is_not_in_the_turn_twice() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 3, 3).await;
    enclosed_turn(&mut crew, true).await;
    scene.cut("crew", 0);
    crew.stop().await;
    // The message was written again, as by a client whose answer was lost.
    let instance = document(&scene, INSTANCE).await;
    let mut copy = instance["inlined"].clone();
    (copy["instanceId"], copy["type"]) = (instance["instanceId"].clone(), "message".into());
    let id = copy["id"].as_str().expect("its id").to_owned();
    scene.container().await.create_item(INSTANCE, &id, copy, None).await.unwrap();
    let other = scene.provider_with("other", hours_ahead()).await;
    let (turn, token, attempts) = next_turn(&other, LONG).await;
    assert_eq!((turn.messages, attempts), (vec![start(INSTANCE)], 2));
    let events = vec![started(INSTANCE, 1), completed(INSTANCE, 1, 2)];
    commit(&other, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
    nothing_is_left(&scene).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_takes_an_enclosed_message_along() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 3, 3).await;
    let token = enclosed_turn(&mut crew, false).await;
    let other = scene.provider("other").await;
    let gone = admin(&other).delete_instance(INSTANCE, true).await.unwrap();
    assert_eq!(gone.instances_deleted, 1);
    assert!(scene.partition(INSTANCE).await.is_empty());
    let events = vec![completed(INSTANCE, 1, 50)];
    commit(crew.provider.as_ref(), &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap_err();
    assert!(scene.partition(INSTANCE).await.is_empty(), "nothing comes back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delivery_that_was_consumed_is_not_enclosed_again() {
    let scene = Scene::new(1);
    let mut crew = Crew::begin(&scene, no_sweeps(), 3, 0).await;
    let token = with_child(&mut crew).await;
    // Who has delivered the end can't say so.
    let is_forgotten = |request: &WireRequest<'_>| goes_to(request, CHILD) && request.kind == RequestKind::Delete;
    scene.account.wire().add(WireRule::new(WireAction::HoldBefore(Gate::new())).matching(is_forgotten).times(1));
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some(INSTANCE.to_owned()), ..ended("Completed") };
    let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
    commit(crew.provider.as_ref(), &token, events, Vec::new(), vec![child_s_end()], metadata).await.unwrap();
    let (turn, token, _) = crew.turn().await;
    assert_eq!(turn.messages, [child_s_end()]);
    commit(crew.provider.as_ref(), &token, vec![note(INSTANCE, 1, 2)], Vec::new(), Vec::new(), running())
        .await
        .unwrap();
    // It is delivered again, by the process that has the parent at hand and dispatchers that wait for it.
    let intent = scene.of_kind(CHILD, "intent").await.pop().expect("it is not forgotten");
    let sent = Sent::record(&scene);
    let mut late = intent.clone();
    late["due"] = 1.into();
    let id = late["id"].as_str().unwrap().to_owned();
    scene.container().await.replace_item(CHILD, &id, late, None).await.unwrap();
    assert_eq!(crew.provider.reconcile().await.unwrap(), 1);
    assert_eq!(letters(&scene, INSTANCE).await, ["delivered"]);
    assert!(sent.to(INSTANCE).is_empty(), "nothing is written");
    let instance = document(&scene, INSTANCE).await;
    assert!(instance["inlined"].is_null() && instance["lock"].is_null(), "{instance}");
}
