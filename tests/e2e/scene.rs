//! An account, a provider on it, a runtime and a client, and the audit of what they leave behind.

#[path = "../common/log.rs"]
mod log;

use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry, Runtime},
    Client, ErrorDetails, Event, EventKind, OrchestrationStatus, RuntimeOptions,
};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::LocalAccount;
use std::{
    collections::{BTreeMap, HashSet},
    future::Future,
    sync::{Arc, Mutex},
    time::Duration,
};

/// How long anything is waited for. A test that passes waits for what happens, never for this.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A provider on `account`, as another process would have it: with a client and caches of its own.
pub async fn provider_on(account: &LocalAccount) -> Arc<CosmosDBProvider> {
    log::keep();
    let config = CosmosDBProviderConfig::default()
        .with_create_if_missing(true)
        // What one process does is news to another: tests don't wait seconds for it.
        .with_poll_interval(Duration::from_millis(200))
        .with_reconciler_age_threshold(Duration::from_millis(200));
    let client = account.client().await;
    Arc::new(CosmosDBProvider::new_with_client(&client, config).await.expect("a provider"))
}

/// One process: a runtime, the provider under it and a client beside it.
pub struct Scene {
    pub account: LocalAccount,
    pub provider: Arc<CosmosDBProvider>,
    pub client: Client,
    pub runtime: Arc<Runtime>,
}

impl Scene {
    /// A process alone on an account of four physical partitions.
    pub async fn new(activities: ActivityRegistry, orchestrations: OrchestrationRegistry) -> Self {
        Self::with(RuntimeOptions::default(), activities, orchestrations).await
    }

    /// The same with options.
    pub async fn with(
        options: RuntimeOptions,
        activities: ActivityRegistry,
        orchestrations: OrchestrationRegistry,
    ) -> Self {
        let account = LocalAccount::builder().with_partitions(4).build();
        Self::on(&account, options, activities, orchestrations).await
    }

    /// A process on an account that others use, or have used.
    pub async fn on(
        account: &LocalAccount,
        options: RuntimeOptions,
        activities: ActivityRegistry,
        orchestrations: OrchestrationRegistry,
    ) -> Self {
        let provider = provider_on(account).await;
        let runtime = Runtime::start_with_options(provider.clone(), activities, orchestrations, options).await;
        let client = Client::new(provider.clone());
        Self { account: account.clone(), provider, client, runtime }
    }

    pub async fn start(&self, instance: &str, orchestration: &str, input: &str) {
        self.client.start_orchestration(instance, orchestration, input).await.expect("a start is taken");
    }

    /// Starts an orchestration and returns what it returns.
    pub async fn run(&self, instance: &str, orchestration: &str, input: &str) -> String {
        self.start(instance, orchestration, input).await;
        self.output(instance).await
    }

    /// What an orchestration returned, once it has.
    pub async fn output(&self, instance: &str) -> String {
        match self.outcome(instance).await {
            Ok(output) => output,
            Err(details) => panic!("{instance} failed: {details:?}"),
        }
    }

    /// What an orchestration failed with, once it has.
    pub async fn failure(&self, instance: &str) -> ErrorDetails {
        match self.outcome(instance).await {
            Ok(output) => panic!("{instance} should have failed but returned {output}"),
            Err(details) => details,
        }
    }

    async fn outcome(&self, instance: &str) -> Result<String, ErrorDetails> {
        match self.client.wait_for_orchestration(instance, PATIENCE).await {
            Ok(OrchestrationStatus::Completed { output, .. }) => Ok(output),
            Ok(OrchestrationStatus::Failed { details, .. }) => Err(details),
            other => panic!("{instance} did not end: {other:?}"),
        }
    }

    /// The history of an execution, audited.
    pub async fn history_of(&self, instance: &str, execution: u64) -> Vec<Event> {
        let history = self.client.read_execution_history(instance, execution).await.expect("a history");
        audit(instance, execution, &history);
        history
    }

    /// The history of the only execution, audited.
    pub async fn history(&self, instance: &str) -> Vec<Event> {
        let executions = self.client.list_executions(instance).await.expect("the executions");
        assert_eq!(executions, [1], "{instance} has one execution");
        self.history_of(instance, 1).await
    }

    /// The history of the only execution as the names of its events.
    pub async fn story(&self, instance: &str) -> Vec<String> {
        names(&self.history(instance).await)
    }

    /// Waits until an execution has recorded an event of that name.
    pub async fn recorded(&self, instance: &str, execution: u64, name: &str) {
        eventually(name, || async {
            let history = self.client.read_execution_history(instance, execution).await.unwrap_or_default();
            names(&history).iter().any(|n| n == name)
        })
        .await;
    }

    /// Waits until nothing is left in the queues.
    pub async fn quiet(&self) {
        eventually("the queues are empty", || async {
            let depths = self.client.get_queue_depths().await.expect("the depths");
            depths.orchestrator_queue + depths.worker_queue + depths.timer_queue == 0
        })
        .await;
    }

    /// Stops the runtime as a process does that is told to, and waits for what the provider still does.
    pub async fn stop(self) -> LocalAccount {
        self.runtime.clone().shutdown(None).await;
        self.provider.shutdown().await;
        self.account
    }
}

/// What must be true of every history: it begins with the start, numbers its events without a gap, has one completion at
/// most for what was scheduled, of its kind, and ends once.
fn audit(instance: &str, execution: u64, history: &[Event]) {
    let at = |index: usize| format!("{instance}, execution {execution}, event {index} of {history:#?}");
    assert!(matches!(history.first().map(|e| &e.kind), Some(EventKind::OrchestrationStarted { .. })), "{}", at(0));
    let scheduled: BTreeMap<u64, &EventKind> = history.iter().map(|e| (e.event_id, &e.kind)).collect();
    let mut completed = HashSet::new();
    for (index, event) in history.iter().enumerate() {
        assert_eq!(event.event_id, index as u64 + 1, "{}", at(index));
        assert_eq!((event.instance_id.as_str(), event.execution_id), (instance, execution), "{}", at(index));
        let over = history[..index].iter().any(Event::is_terminal);
        assert!(!over || is_farewell(&event.kind), "after the end: {}", at(index));
        let Some(source) = event.source_event_id else { continue };
        let schedule = scheduled.get(&source).copied();
        match (&event.kind, schedule) {
            (
                EventKind::ActivityCompleted { .. } | EventKind::ActivityFailed { .. },
                Some(EventKind::ActivityScheduled { .. }),
            )
            | (EventKind::TimerFired { .. }, Some(EventKind::TimerCreated { .. }))
            | (
                EventKind::SubOrchestrationCompleted { .. } | EventKind::SubOrchestrationFailed { .. },
                Some(EventKind::SubOrchestrationScheduled { .. }),
            ) => assert!(completed.insert(source), "completed twice: {}", at(index)),
            (
                EventKind::ActivityCancelRequested { .. }
                | EventKind::SubOrchestrationCancelRequested { .. }
                | EventKind::ExternalSubscribedCancelled { .. }
                | EventKind::QueueSubscriptionCancelled { .. },
                Some(_),
            ) => {}
            _ => panic!("completes nothing: {}", at(index)),
        }
    }
}

/// What an execution that has ended still says to those that work for it.
fn is_farewell(kind: &EventKind) -> bool {
    matches!(kind, EventKind::ActivityCancelRequested { .. } | EventKind::SubOrchestrationCancelRequested { .. })
}

/// The events' names, without what is in them. They are the ones that duroxide stores.
pub fn names(history: &[Event]) -> Vec<String> {
    let name = |event: &Event| serde_json::to_value(event).unwrap()["type"].as_str().unwrap().to_owned();
    history.iter().map(name).collect()
}

/// How many events of each name there are.
pub fn census(history: &[Event]) -> BTreeMap<String, usize> {
    let mut census = BTreeMap::new();
    for name in names(history) {
        *census.entry(name).or_default() += 1;
    }
    census
}

/// Asks again and again until the answer is yes.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut ask: impl FnMut() -> F) {
    let asking = async {
        while !ask().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, asking).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// What activities did, in order. Clones are the same notebook.
#[derive(Clone, Default)]
pub struct Notebook(Arc<Mutex<Vec<String>>>);

impl Notebook {
    pub fn write(&self, line: impl Into<String>) {
        self.0.lock().unwrap().push(line.into());
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    pub fn sorted(&self) -> Vec<String> {
        let mut lines = self.lines();
        lines.sort();
        lines
    }

    /// Waits until a line is there.
    pub async fn has(&self, line: &str) {
        eventually(line, || async { self.lines().iter().any(|l| l == line) }).await;
    }
}

/// A gate that activities wait at until a test opens it. Clones are the same gate.
#[derive(Clone)]
pub struct Gate(Arc<tokio::sync::Semaphore>);

impl Gate {
    pub fn closed() -> Self {
        Self(Arc::new(tokio::sync::Semaphore::new(0)))
    }

    pub fn open(&self) {
        self.0.add_permits(tokio::sync::Semaphore::MAX_PERMITS / 2);
    }

    pub async fn pass(&self) {
        self.0.acquire().await.expect("a gate is never closed for good").forget();
    }
}
