//! The write that makes work carries the claim for a dispatcher that waits: what it saves, and that nothing is lost by it, whatever
//! becomes of the write, the dispatcher or the process.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, TagFilter, WorkItem};
use duroxide_cosmos::{Clock, CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule, WireRuleHandle};
use scene::*;
use serde_json::Value;
use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{sync::mpsc, task::JoinHandle};

const INSTANCE: &str = "i";
const CHILD: &str = "child";

/// Nothing is found by a sweep, and nobody delivers what another is delivering.
fn no_sweeps() -> CosmosDBProviderConfig {
    let hour = Duration::from_secs(3_600);
    quiet().with_sweep_interval(hour).with_reconciler_age_threshold(hour)
}

/// A provider whose dispatchers wait, and what they get.
struct Crew {
    provider: Arc<CosmosDBProvider>,
    turns: mpsc::UnboundedReceiver<Turn>,
    work: mpsc::UnboundedReceiver<Work>,
    waiting: Vec<JoinHandle<()>>,
}

impl Crew {
    /// Waits until so many dispatchers of each kind have nothing to do.
    async fn begin(scene: &Scene, config: CosmosDBProviderConfig, runners: usize, workers: usize) -> Self {
        let provider = Arc::new(scene.provider_with("crew", config).await);
        let ((send_turn, turns), (send_work, work)) = (mpsc::unbounded_channel(), mpsc::unbounded_channel());
        let mut waiting = Vec::new();
        for _ in 0..runners {
            let (provider, send) = (provider.clone(), send_turn.clone());
            waiting.push(tokio::spawn(async move {
                while let Ok(turn) = provider.fetch_orchestration_item(LONG, PATIENCE, None).await {
                    if turn.is_some_and(|turn| send.send(turn).is_err()) {
                        return;
                    }
                }
            }));
        }
        for _ in 0..workers {
            let (provider, send) = (provider.clone(), send_work.clone());
            waiting.push(tokio::spawn(async move {
                while let Ok(work) = provider.fetch_work_item(LONG, PATIENCE, None, &TagFilter::Any).await {
                    if work.is_some_and(|work| send.send(work).is_err()) {
                        return;
                    }
                }
            }));
        }
        // Who waits for half a second says so.
        let is_there = |member: &Value| {
            (runners == 0 || !member["turns"].is_null()) && (workers == 0 || !member["work"].is_null())
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

/// What the crew sends to instances.
#[derive(Clone, Default)]
struct Sent(Arc<Mutex<Vec<(&'static str, RequestKind)>>>);

impl Sent {
    /// From now on.
    fn record(scene: &Scene) -> Self {
        let sent = Self::default();
        let sent_too = sent.clone();
        scene.account.wire().observe(move |request, _| {
            let instance = [INSTANCE, CHILD].into_iter().find(|instance| goes_to(request, instance));
            if let Some(instance) = instance.filter(|_| request.client == Some("crew")) {
                sent_too.0.lock().unwrap().push((instance, request.kind));
            }
        });
        sent
    }

    /// What was sent to an instance; intents are deleted beside that.
    fn to(&self, instance: &str) -> Vec<RequestKind> {
        let sent = self.0.lock().unwrap();
        let such = |(to, kind): &&(&str, RequestKind)| *to == instance && *kind != RequestKind::Delete;
        sent.iter().filter(such).map(|(_, kind)| *kind).collect()
    }
}

/// Whether a request claims an instance or an activity together with something else.
fn hands_over(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let locks = |operation: &Value| !operation["resourceBody"]["lock"].is_null();
    goes_to(request, INSTANCE)
        && request.kind == RequestKind::Batch
        && body.as_array().is_some_and(|operations| operations.len() > 1 && operations.iter().any(locks))
}

/// The next hand-over meets this.
fn next_hand_over(scene: &Scene, action: WireAction) -> WireRuleHandle {
    scene.account.wire().add(WireRule::new(action).client("crew").matching(hands_over).times(1))
}

fn hours_ahead() -> CosmosDBProviderConfig {
    let now = || u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    quiet().with_clock(Clock::from_fn(move || now() + 7_200_000))
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
    let left = documents.iter().find(|document| ["work", "message"].iter().any(|kind| document["type"] == *kind));
    assert!(left.is_none(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_step_of_an_orchestration_is_one_request_with_the_claim_of_the_next() {
    use RequestKind::{Batch, Create, Replace};
    for (on, expected) in [(true, vec![Batch; 4]), (false, vec![Create, Create, Batch, Replace, Batch, Replace, Batch])]
    {
        let scene = Scene::new(1);
        let mut crew = Crew::begin(&scene, no_sweeps().with_hand_over(on), 3, 3).await;
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
    held.reached().await;
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
        held.reached().await;
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
                () = held.reached() => {}
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
    let sent = Sent::record(&scene);
    let mut token = first;
    for id in 2..5 {
        worker.ack_work_item(&token, Some(done(INSTANCE, id))).await.unwrap();
        if id < 4 {
            let (item, next, attempts) = next_work(worker.as_ref(), LONG).await;
            assert_eq!((item, attempts), (activity(INSTANCE, id + 1), 1));
            token = next;
        }
    }
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch; 3]);
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
        while locked(&scene.of_kind(INSTANCE, "work").await) {
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
    let end = WorkItem::SubOrchCompleted {
        parent_instance: INSTANCE.to_owned(),
        parent_execution_id: 1,
        parent_id: 2,
        result: "done".to_owned(),
    };
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
            let cut = scene.cut_after("crew", 0);
            let Ended::Cut = until_cut(crew.continue_as_new(&token, 1), &cut).await else { panic!("it is cut") };
        } else {
            crew.continue_as_new(&token, 1).await.unwrap();
        }
        let config = if dies { hours_ahead() } else { quiet() };
        let other = scene.provider_with("other", config).await;
        let (turn, _, attempts) = next_turn(&other, LONG).await;
        assert_eq!((turn.messages, attempts), (vec![again(INSTANCE)], 1 + u32::from(dies)), "{dies}");
    }
}
