//! The dispatchers of a process, which wait for work, and a recorder of the requests that they send.

use crate::fixture::*;
use duroxide::providers::{Provider, TagFilter, WorkItem};
use duroxide_cosmos::{Clock, CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireAnswer, WireRequest, WireRule, WireRuleHandle};
use serde_json::Value;
use std::{
    future::Future,
    pin::pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};
use tokio::{sync::mpsc, task::JoinHandle};

pub const INSTANCE: &str = "i";

pub const CHILD: &str = "child";

/// A configuration in which no poll finds work and no process takes over a delivery.
pub fn no_polls() -> CosmosDBProviderConfig {
    let hour = Duration::from_secs(3_600);
    test_config().with_poll_interval(hour).with_reconciler_age_threshold(hour)
}

/// A provider with dispatchers that wait, and the items that they fetch.
pub struct Dispatchers {
    pub provider: Arc<CosmosDBProvider>,
    pub turns: mpsc::UnboundedReceiver<FetchedTurn>,
    pub work: mpsc::UnboundedReceiver<FetchedActivity>,
    pub waiting: Vec<JoinHandle<()>>,
}

impl Dispatchers {
    /// Starts so many dispatchers of each kind and waits until they are idle. Their clock stands still, so that
    /// intervals do not depend on the load of the machine.
    pub async fn begin(fixture: &Fixture, config: CosmosDBProviderConfig, runners: usize, workers: usize) -> Self {
        let now = now();
        let config = config.with_clock(Clock::from_fn(move || now));
        let provider = Arc::new(fixture.provider_with("dispatchers", config).await);
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
        // A dispatcher that waits for half a second is listed as a member.
        let is_there = |member: &Value| {
            (runners == 0 || !member["turns"].is_null()) && (workers == 0 || !member["activities"].is_null())
        };
        let looking = async {
            while !fixture.documents_of_type("$d:fleet", "member").await.iter().any(is_there) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, looking).await.expect("they wait");
        Self { provider, turns, work, waiting }
    }

    pub async fn turn(&mut self) -> FetchedTurn {
        tokio::time::timeout(PATIENCE, self.turns.recv()).await.expect("a turn in time").expect("a turn")
    }

    pub async fn activity(&mut self) -> FetchedActivity {
        tokio::time::timeout(PATIENCE, self.work.recv()).await.expect("an activity in time").expect("an activity")
    }

    pub async fn start(&self) {
        self.provider.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    }

    pub async fn commit(&self, token: &str, first: bool, work: Vec<WorkItem>) {
        let events = if first { scheduled(&work) } else { vec![completed(INSTANCE, 1, 50)] };
        let metadata = if first { running() } else { ended("Completed") };
        commit(self.provider.as_ref(), token, events, work, Vec::new(), metadata).await.unwrap();
    }

    /// Stops the dispatchers.
    pub async fn stop(&mut self) {
        for waiting in self.waiting.drain(..) {
            waiting.abort();
            waiting.await.expect_err("it waits until it is stopped");
        }
    }
}

/// Fetches one item after the other. It passes an item on once its dispatcher waits for the next one, so a test that
/// has an item knows that a dispatcher waits.
pub async fn dispatch<T, F>(fetch: impl Fn() -> F, send: mpsc::UnboundedSender<T>)
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

/// The events of a first turn that schedules these activities.
pub fn scheduled(work: &[WorkItem]) -> Vec<duroxide::Event> {
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

/// The writes of the dispatchers to instances. An idle dispatcher may claim an instance that a poll saw as due, and
/// release it: such a claim does not count.
#[derive(Clone, Default)]
pub struct Sent(pub Arc<Mutex<Vec<(&'static str, RequestKind)>>>);

impl Sent {
    /// Records from now on.
    pub fn record(fixture: &Fixture) -> Self {
        let sent = Self::default();
        let sent_too = sent.clone();
        fixture.account.wire().observe(move |request, answer| {
            let instance = [INSTANCE, CHILD].into_iter().find(|instance| goes_to(request, instance));
            let is_write = matches!(request.kind, RequestKind::Create | RequestKind::Replace | RequestKind::Batch);
            let counts = request.client == Some("dispatchers") && is_write && is_done(answer);
            let Some(instance) = instance.filter(|_| counts) else { return };
            let mut sent = sent_too.0.lock().unwrap();
            match only_releases(request) {
                true => drop(sent.iter().rposition(|(to, _)| *to == instance).map(|claim| sent.remove(claim))),
                false => sent.push((instance, request.kind)),
            }
        });
        sent
    }

    pub fn to(&self, instance: &str) -> Vec<RequestKind> {
        let sent = self.0.lock().unwrap();
        sent.iter().filter(|(to, _)| *to == instance).map(|(_, kind)| *kind).collect()
    }
}

/// Whether a request only removes a lock.
pub fn only_releases(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let operation = body.as_array().filter(|operations| operations.len() == 1).map(|operations| &operations[0]);
    operation.is_some_and(|operation| operation["id"] == "instance" && operation["resourceBody"]["lock"].is_null())
}

/// Whether an answer reports success for the whole request.
pub fn is_done(answer: &WireAnswer<'_>) -> bool {
    let parts = answer.json().and_then(|body| body.as_array().cloned()).unwrap_or_default();
    answer.status < 300 && parts.iter().all(|part| part["statusCode"].as_u64().is_none_or(|status| status < 300))
}

/// Whether a request claims an instance or an activity together with another write.
pub fn claims_inline(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let operations = body.as_array().map(Vec::as_slice).unwrap_or_default();
    let locks = |operation: &Value| !operation["resourceBody"]["lock"].is_null();
    let inlines = |operation: &Value| !operation["resourceBody"]["inlined"].is_null();
    let with_something = operations.len() > 1 || operations.iter().any(inlines);
    goes_to(request, INSTANCE) && request.kind == RequestKind::Batch && with_something && operations.iter().any(locks)
}

/// Applies `action` to the next inline claim.
pub fn on_next_inline_claim(fixture: &Fixture, action: WireAction) -> WireRuleHandle {
    fixture.account.wire().add(WireRule::new(action).client("dispatchers").matching(claims_inline).times(1))
}

pub fn hours_ahead() -> CosmosDBProviderConfig {
    test_config().with_clock(off_by(7_200_000))
}

/// Runs an orchestration with one activity. Returns the attempts of its turns and its activity.
pub async fn hello(dispatchers: &mut Dispatchers) -> [u32; 3] {
    dispatchers.start().await;
    let (_, token, first) = dispatchers.turn().await;
    dispatchers.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let (_, token, ran) = dispatchers.activity().await;
    dispatchers.provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
    let (turn, token, last) = dispatchers.turn().await;
    assert_eq!(turn.messages, [done(INSTANCE, 2)]);
    dispatchers.commit(&token, false, Vec::new()).await;
    [first, ran, last]
}

pub async fn nothing_is_left(fixture: &Fixture) {
    // After a lost answer a dispatcher may poll once more.
    let settled = async {
        loop {
            let documents = fixture.partition(INSTANCE).await;
            if documents.iter().all(|document| document["lock"].is_null()) {
                return documents;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let documents = tokio::time::timeout(PATIENCE, settled).await.expect("no document is locked");
    let instance = documents.iter().find(|document| document["type"] == "instance").expect("the instance");
    assert!(instance["due"].is_null(), "{instance}");
    assert_eq!(instance["status"], "Completed");
    let left = documents.iter().find(|document| ["activity", "message"].iter().any(|kind| document["type"] == *kind));
    assert!(left.is_none(), "{left:?}");
}

/// Runs an orchestration until its activity has ended.
pub async fn hello_until_its_activity_has_ended(dispatchers: &mut Dispatchers) {
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    dispatchers.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let (_, token, _) = dispatchers.activity().await;
    dispatchers.provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
}

/// The completion that a child sends to its parent.
pub fn child_completion() -> WorkItem {
    WorkItem::SubOrchCompleted {
        parent_instance: INSTANCE.to_owned(),
        parent_execution_id: 1,
        parent_id: 2,
        result: "done".to_owned(),
    }
}

impl Dispatchers {
    /// Ends an execution that continues as new.
    pub async fn continue_as_new(&self, token: &str, execution: u64) -> Result<(), duroxide::providers::ProviderError> {
        let events = vec![started(INSTANCE, execution), completed(INSTANCE, execution, 2)];
        let (provider, again) = (self.provider.as_ref(), vec![continue_as_new(INSTANCE)]);
        commit(provider, token, events, Vec::new(), again, ended("ContinuedAsNew")).await
    }

    /// Ends the instance.
    pub async fn complete(&self, token: &str, execution: u64) {
        let events = vec![started(INSTANCE, execution), completed(INSTANCE, execution, 2)];
        let (provider, nothing) = (self.provider.as_ref(), Vec::new());
        commit(provider, token, events, Vec::new(), nothing, ended("Completed")).await.unwrap();
    }
}
