//! A local account with providers on it, turns made by hand, and a look behind the providers.
#![allow(dead_code)]

#[path = "log.rs"]
mod log;

use azure_data_cosmos::{ContainerClient, FeedScope, Query, TransactionalBatch};
use duroxide::{
    providers::{ExecutionMetadata, OrchestrationItem, Provider, ProviderAdmin, ProviderError, TagFilter, WorkItem},
    Event, EventKind,
};
use duroxide_cosmos::{Clock, CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{Gate, LocalAccount, RequestKind, WireAction, WireRequest, WireRule, WireRuleHandle};
use futures::{stream, StreamExt, TryStreamExt};
use serde_json::Value;
use std::{future::Future, time::Duration};
use tokio::sync::OnceCell;

/// Longer than any test lasts: who gets what is locked so did not wait for the lock's end.
pub const LONG: Duration = Duration::from_secs(600);
/// How long a test waits for what must come.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// No wait: the store's present state.
pub const NOW: Duration = Duration::ZERO;

/// What a fetch of a turn returns.
pub type Turn = (OrchestrationItem, String, u32);
/// What a fetch of an activity returns.
pub type Work = (WorkItem, String, u32);

/// An account. Each of its providers has a client of its own, whose name the wire's rules can tell.
pub struct Scene {
    pub account: LocalAccount,
    raw: OnceCell<ContainerClient>,
}

impl Scene {
    pub fn new(partitions: u32) -> Self {
        log::keep();
        Self { account: LocalAccount::builder().with_partitions(partitions).build(), raw: OnceCell::new() }
    }

    /// A provider whose reconciler does not start by itself, so that a test says when.
    pub async fn provider(&self, name: &str) -> CosmosDBProvider {
        self.provider_with(name, quiet()).await
    }

    pub async fn provider_with(&self, name: &str, config: CosmosDBProviderConfig) -> CosmosDBProvider {
        let client = self.account.client_named(name).await;
        let provider = CosmosDBProvider::new_with_client(&client, config).await.expect("a provider");
        // The first requests of a client resolve the container: not part of what a test counts.
        provider.read("nobody").await.expect("nothing to read");
        provider
    }

    /// The container, past any provider.
    pub async fn container(&self) -> &ContainerClient {
        let open = || async {
            let client = self.account.client_named("raw").await;
            client.database_client("duroxide").container_client("duroxide", None).await.expect("the container")
        };
        self.raw.get_or_init(open).await
    }

    /// Every document of one partition.
    pub async fn partition(&self, key: &str) -> Vec<Value> {
        let everything = Query::from("SELECT * FROM c");
        let scope = FeedScope::partition(key.to_owned());
        self.container().await.query_items(everything, scope, None).await.unwrap().try_collect().await.unwrap()
    }

    /// Whether nothing is left of an instance but the markers of messages that it was sent.
    pub async fn is_erased(&self, instance: &str) -> bool {
        self.partition(instance).await.iter().all(|document| document["type"] == "delivered")
    }

    /// Every document of the container.
    pub async fn documents(&self) -> Vec<Value> {
        let everything = Query::from("SELECT * FROM c");
        let scope = FeedScope::full_container();
        self.container().await.query_items(everything, scope, None).await.unwrap().try_collect().await.unwrap()
    }

    /// Copies an instance's documents under other names, as if each had been run: cheaper than running them.
    pub async fn copy(&self, instance: &str, names: impl Iterator<Item = String>) {
        let (container, documents) = (self.container().await, &self.partition(instance).await);
        let copying = stream::iter(names).map(|name| async move {
            for documents in documents.chunks(100) {
                let mut batch = TransactionalBatch::new(name.clone());
                for document in documents {
                    let own = document.as_object().unwrap().iter().filter(|(key, _)| !key.starts_with('_'));
                    let mut copy: Value = own.map(|(key, value)| (key.clone(), value.clone())).collect();
                    copy["instanceId"] = Value::from(name.clone());
                    batch = batch.create_item(copy).unwrap();
                }
                let answer = container.execute_transactional_batch(batch, None).await.unwrap();
                assert_eq!(u16::from(answer.status().status_code()), 200);
            }
        });
        copying.buffer_unordered(16).collect::<Vec<()>>().await;
    }

    /// The documents of one kind in one partition.
    pub async fn of_kind(&self, key: &str, kind: &str) -> Vec<Value> {
        self.partition(key).await.into_iter().filter(|d| d["type"] == kind).collect()
    }

    /// From the request after the next `passing` on, nothing that `client` sends about items arrives any more.
    pub fn cut(&self, client: &str, passing: u64) -> WireRuleHandle {
        let rule = WireRule::new(WireAction::FailConnection).client(client).matching(about_items).skip(passing);
        self.account.wire().add(rule)
    }

    /// Like [`cut`](Self::cut), but the first request that is lost is carried out: only its answer is lost.
    pub fn cut_after(&self, client: &str, passing: u64) -> WireRuleHandle {
        let wire = self.account.wire();
        let lost = WireRule::new(WireAction::LoseAnswer).client(client).matching(about_items).skip(passing).times(1);
        let lost = wire.add(lost);
        self.cut(client, passing);
        lost
    }
}

/// Whether a request is about items, and not about the account's structure.
pub fn about_items(request: &WireRequest<'_>) -> bool {
    !request.kind.is_metadata()
}

/// Whether a request goes to the partition of this key.
pub fn goes_to(request: &WireRequest<'_>, key: &str) -> bool {
    let header = request.partition_key.and_then(|header| serde_json::from_str::<Vec<String>>(header).ok());
    header.is_some_and(|header| header == [key])
}

/// A configuration whose reconciler takes everything over at once, but only when it is called, and whose reads are fresh.
pub fn quiet() -> CosmosDBProviderConfig {
    CosmosDBProviderConfig::default()
        .with_create_if_missing(true)
        .with_poll_interval(Duration::from_millis(300))
        .with_reconciler_age_threshold(Duration::ZERO)
        .with_read_staleness(Duration::ZERO)
        // A busy machine is no outage.
        .with_operation_timeout(PATIENCE)
}

/// A clock that is off by so many milliseconds.
pub fn off_by(millis: i64) -> Clock {
    let system = || u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    Clock::from_fn(move || system().saturating_add_signed(millis))
}

/// What became of a call that the wire may have cut.
pub enum Ended<T> {
    Returned(T),
    /// The caller died at the cut.
    Cut,
}

/// Runs `call` until it returns or the cut is felt; then it is dropped, as when its process dies.
pub async fn until_cut<T>(call: impl Future<Output = T>, cut: &WireRuleHandle) -> Ended<T> {
    tokio::select! {
        biased;
        () = cut.wait_for_hits(1) => Ended::Cut,
        returned = call => Ended::Returned(returned),
    }
}

pub fn start(instance: &str) -> WorkItem {
    start_child(instance, None)
}

pub fn start_child(instance: &str, parent: Option<&str>) -> WorkItem {
    WorkItem::StartOrchestration {
        instance: instance.to_owned(),
        orchestration: "Orchestration".to_owned(),
        input: "{}".to_owned(),
        version: Some("1.0.0".to_owned()),
        parent_instance: parent.map(ToOwned::to_owned),
        parent_id: parent.map(|_| 2),
        parent_execution_id: parent.map(|_| 1),
        execution_id: 1,
    }
}

pub fn again(instance: &str) -> WorkItem {
    WorkItem::ContinueAsNew {
        instance: instance.to_owned(),
        orchestration: "Orchestration".to_owned(),
        input: "{}".to_owned(),
        version: Some("1.0.0".to_owned()),
        parent_instance: None,
        parent_id: None,
        parent_execution_id: None,
        carry_forward_events: Vec::new(),
        initial_custom_status: None,
    }
}

pub fn external(instance: &str, data: &str) -> WorkItem {
    WorkItem::ExternalRaised { instance: instance.to_owned(), name: "Event".to_owned(), data: data.to_owned() }
}

pub fn activity(instance: &str, id: u64) -> WorkItem {
    activity_with(instance, id, None, None)
}

pub fn activity_with(instance: &str, id: u64, session: Option<&str>, tag: Option<&str>) -> WorkItem {
    WorkItem::ActivityExecute {
        instance: instance.to_owned(),
        execution_id: 1,
        id,
        name: "Activity".to_owned(),
        input: "{}".to_owned(),
        session_id: session.map(ToOwned::to_owned),
        tag: tag.map(ToOwned::to_owned),
    }
}

pub fn done(instance: &str, id: u64) -> WorkItem {
    WorkItem::ActivityCompleted { instance: instance.to_owned(), execution_id: 1, id, result: "done".to_owned() }
}

pub fn event(instance: &str, execution: u64, id: u64, kind: EventKind) -> Event {
    Event::with_event_id(id, instance, execution, None, kind)
}

pub fn started(instance: &str, execution: u64) -> Event {
    let kind = EventKind::OrchestrationStarted {
        name: "Orchestration".to_owned(),
        version: "1.0.0".to_owned(),
        input: "{}".to_owned(),
        parent_instance: None,
        parent_id: None,
        parent_execution_id: None,
        carry_forward_events: None,
        initial_custom_status: None,
    };
    event(instance, execution, 1, kind)
}

pub fn completed(instance: &str, execution: u64, id: u64) -> Event {
    event(instance, execution, id, EventKind::OrchestrationCompleted { output: "done".to_owned() })
}

pub fn note(instance: &str, execution: u64, id: u64) -> Event {
    event(instance, execution, id, EventKind::ExternalSubscribed { name: format!("note {id}") })
}

/// What a turn of a running orchestration says of it.
pub fn running() -> ExecutionMetadata {
    ExecutionMetadata {
        orchestration_name: Some("Orchestration".to_owned()),
        orchestration_version: Some("1.0.0".to_owned()),
        ..ExecutionMetadata::default()
    }
}

/// What the last turn of an execution says of it.
pub fn ended(status: &str) -> ExecutionMetadata {
    ExecutionMetadata { status: Some(status.to_owned()), output: Some("done".to_owned()), ..running() }
}

/// The next turn, which must come.
pub async fn next_turn(provider: &dyn Provider, lock: Duration) -> Turn {
    let fetched = provider.fetch_orchestration_item(lock, PATIENCE, None).await;
    fetched.expect("a fetch that works").expect("a turn")
}

/// The next activity, which must come.
pub async fn next_work(provider: &dyn Provider, lock: Duration) -> Work {
    let fetched = provider.fetch_work_item(lock, PATIENCE, None, &TagFilter::Any).await;
    fetched.expect("a fetch that works").expect("an activity")
}

/// Commits a turn that only appends events and schedules and sends.
pub async fn commit(
    provider: &dyn Provider,
    token: &str,
    events: Vec<Event>,
    work: Vec<WorkItem>,
    messages: Vec<WorkItem>,
    metadata: ExecutionMetadata,
) -> Result<(), ProviderError> {
    let execution = events.first().map_or(1, |event| event.execution_id);
    provider.ack_orchestration_item(token, execution, events, work, messages, metadata, Vec::new()).await
}

/// Makes an instance that runs: its first turn is committed with these activities and messages.
pub async fn begin(provider: &dyn Provider, instance: &str, work: Vec<WorkItem>, messages: Vec<WorkItem>) {
    provider.enqueue_for_orchestrator(start(instance), None).await.unwrap();
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!(item.instance, instance);
    commit(provider, &token, vec![started(instance, 1)], work, messages, running()).await.unwrap();
}

/// Makes an instance with so many executions of so many events each; the last one is completed.
pub async fn finish_after(provider: &dyn Provider, instance: &str, executions: u64, events: u64) {
    provider.enqueue_for_orchestrator(start(instance), None).await.unwrap();
    for execution in 1..=executions {
        let (item, token, _) = next_turn(provider, LONG).await;
        assert_eq!(item.instance, instance);
        let mut history = vec![started(instance, execution)];
        history.extend((2..events).map(|id| note(instance, execution, id)));
        let last = execution == executions;
        let (messages, status) =
            if last { (Vec::new(), "Completed") } else { (vec![again(instance)], "ContinuedAsNew") };
        history.push(completed(instance, execution, events));
        commit(provider, &token, history, Vec::new(), messages, ended(status)).await.unwrap();
    }
}

/// Makes an instance that is finished: two events, one execution.
pub async fn finish(provider: &dyn Provider, instance: &str, parent: Option<&str>) {
    provider.enqueue_for_orchestrator(start_child(instance, parent), None).await.unwrap();
    let (item, token, _) = next_turn(provider, LONG).await;
    let instance = item.instance.as_str();
    let events = vec![started(instance, 1), completed(instance, 1, 2)];
    let metadata = ExecutionMetadata { parent_instance_id: parent.map(ToOwned::to_owned), ..ended("Completed") };
    commit(provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
}

/// The management side of a provider.
pub fn admin(provider: &CosmosDBProvider) -> &dyn ProviderAdmin {
    provider
}

/// Waits until a request has come to the gate.
pub async fn reach(gate: &Gate) {
    tokio::time::timeout(PATIENCE, gate.reached()).await.expect("a request at the gate");
}

/// Whether a batch deletes the document of an instance.
pub fn deletes(request: &WireRequest<'_>) -> bool {
    let is_deletion = |operation: &Value| operation["operationType"] == "Delete" && operation["id"] == "instance";
    request.json().and_then(|body| body.as_array().map(|all| all.iter().any(is_deletion))).unwrap_or(false)
}

/// Keeps what a client writes from the partition of an instance.
pub fn block(scene: &Scene, client: &str, target: &str, action: WireAction) -> WireRuleHandle {
    let target = target.to_owned();
    let rule = WireRule::new(action).client(client).on(RequestKind::Create).on(RequestKind::Batch);
    scene.account.wire().add(rule.matching(move |request| goes_to(request, &target)))
}

/// Changes a document behind every provider.
pub async fn mangle(scene: &Scene, instance: &str, id: &str, change: impl Fn(&mut Value)) {
    let documents = scene.partition(instance).await;
    let mut document = documents.into_iter().find(|document| document["id"] == id).expect("the document");
    change(&mut document);
    let container = scene.container().await;
    container.replace_item(instance.to_owned(), id, &document, None).await.expect("the document is changed");
}

/// Waits until the service's time, which has whole seconds, tells what comes from what was.
pub async fn next_second() {
    let second = || std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let now = second();
    while second() <= now {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Makes an instance that has ended and whose messages for `target` are not delivered: its worker dies first.
pub async fn end_owing(scene: &Scene, sender: &str, target: &str, messages: Vec<WorkItem>) {
    let name = format!("worker of {sender}");
    let worker = scene.provider(&name).await;
    let blocked = block(scene, &name, target, WireAction::FailConnection);
    worker.enqueue_for_orchestrator(start(sender), None).await.unwrap();
    let (item, token, _) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, sender);
    let events = vec![started(sender, 1), completed(sender, 1, 2)];
    commit(&worker, &token, events, Vec::new(), messages, ended("Completed")).await.unwrap();
    blocked.wait_for_hits(1).await;
    scene.cut(&name, 0);
    assert!(!scene.of_kind(sender, "intent").await.is_empty(), "{sender} owes a message");
}
