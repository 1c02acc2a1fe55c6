//! Turns for tests that break things: several providers on one account, what a turn writes, and what is left of it.
#![allow(dead_code)]

#[path = "log.rs"]
mod log;

use azure_data_cosmos::{ContainerClient, FeedScope, Query};
use duroxide::{
    providers::{ExecutionMetadata, OrchestrationItem, Provider, ProviderError, ScheduledActivityIdentifier, WorkItem},
    Event, EventKind,
};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{LocalAccount, WireAction, WireRequest, WireRule};
use futures::TryStreamExt;
use serde_json::Value;
use std::{future::Future, time::Duration};

/// A lock that a test lets expire.
pub const SHORT: Duration = Duration::from_secs(1);
/// A lock that no test outlives.
pub const LONG: Duration = Duration::from_secs(3_600);
/// How long a test waits for something that must come.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// An account with providers on it, each with a client of its own name.
pub struct Site {
    pub account: LocalAccount,
    hook: ContainerClient,
}

impl Site {
    pub async fn new() -> Self {
        log::keep();
        let account = LocalAccount::new();
        // The first provider makes the container.
        provider(&account, "maker", config()).await;
        let client = account.client_named("hook").await;
        let hook = client.database_client("duroxide").container_client("duroxide", None).await.expect("the container");
        Self { account, hook }
    }

    /// A provider whose requests are those of the client `name`.
    pub async fn provider(&self, name: &str) -> CosmosDBProvider {
        provider(&self.account, name, config()).await
    }

    /// The same for one that nothing gets in the way of: a busy machine is no outage.
    pub async fn patient_provider(&self, name: &str) -> CosmosDBProvider {
        provider(&self.account, name, config().with_operation_timeout(PATIENCE)).await
    }

    /// Every document of an instance, with its ETag.
    pub async fn documents(&self, instance: &str) -> Vec<Value> {
        let scope = FeedScope::partition(instance.to_owned());
        let items = self.hook.query_items(Query::from("SELECT * FROM c"), scope, None).await.expect("documents");
        let mut documents: Vec<Value> = items.try_collect().await.expect("documents");
        documents.sort_by_key(|document| document["id"].to_string());
        documents
    }

    /// The documents of one kind.
    pub async fn documents_of(&self, instance: &str, kind: &str) -> Vec<Value> {
        let documents = self.documents(instance).await;
        documents.into_iter().filter(|document| document["type"] == kind).collect()
    }

    /// The instance's document.
    pub async fn instance(&self, instance: &str) -> Value {
        self.documents_of(instance, "instance").await.pop().expect("an instance")
    }

    /// Makes the instance's lock expire for everybody but its owner, as when the owner's clock is behind.
    pub async fn expire_lock_for_others(&self, instance: &str) {
        let mut document = self.instance(instance).await;
        assert!(document["lock"].is_object(), "{document} is not locked");
        document["lock"]["until"] = Value::from(1);
        let id = document["id"].as_str().expect("an id").to_owned();
        self.hook.replace_item(instance.to_owned(), &id, &document, None).await.expect("the lock is changed");
    }

    /// Deletes a document behind every provider's back.
    pub async fn delete(&self, instance: &str, id: &str) {
        self.hook.delete_item(instance.to_owned(), id, None).await.expect("the document is deleted");
    }

    /// A rule for what this client asks of items, not of the account.
    pub fn rule(&self, client: &str, action: WireAction) -> WireRule {
        WireRule::new(action).client(client).matching(|request| !request.kind.is_metadata())
    }

    /// How many requests about items the client has sent.
    pub fn requests(&self, client: &str) -> u64 {
        self.account.stats_of(client).items().requests
    }
}

fn config() -> CosmosDBProviderConfig {
    CosmosDBProviderConfig::default()
        .with_create_if_missing(true)
        // Tests call the reconciler themselves; what is left for it may be taken over at once.
        .with_poll_interval(Duration::from_millis(300))
        .with_reconciler_age_threshold(Duration::from_millis(1))
        // What another provider has committed is to be seen at once.
        .with_read_staleness(Duration::ZERO)
}

async fn provider(account: &LocalAccount, name: &str, config: CosmosDBProviderConfig) -> CosmosDBProvider {
    let client = account.client_named(name).await;
    CosmosDBProvider::new_with_client(&client, config).await.expect("a provider")
}

/// Whether a request is about the partition of an instance.
pub fn concerns(request: &WireRequest<'_>, instance: &str) -> bool {
    let header = request.partition_key.and_then(|header| serde_json::from_str::<Vec<String>>(header).ok());
    header.is_some_and(|header| header == [instance])
}

/// Waits for what must come.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited in vain for {what}"),
    }
}

/// Waits until a condition holds that nothing tells us about.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    within(what, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// What one ack carries.
#[derive(Clone, Default)]
pub struct Delta {
    pub events: Vec<Event>,
    pub activities: Vec<WorkItem>,
    pub messages: Vec<WorkItem>,
    pub cancelled: Vec<ScheduledActivityIdentifier>,
    pub metadata: ExecutionMetadata,
}

impl Delta {
    /// The first turn of an instance, with activities whose ids are those of their events.
    pub fn start(instance: &str, activities: u64) -> Self {
        let ids = 2..2 + activities;
        let mut events = vec![started(instance)];
        events.extend(ids.clone().map(|id| scheduled(instance, id)));
        Self { events, activities: ids.map(|id| activity(instance, id)).collect(), ..Self::named() }
    }

    /// A turn that appends one event.
    pub fn event(instance: &str, id: u64, name: &str) -> Self {
        Self { events: vec![external(instance, id, name)], ..Self::default() }
    }

    /// The ack that the runtime sends after one that failed.
    pub fn failure(instance: &str, id: u64) -> Self {
        let details = duroxide::ErrorDetails::Infrastructure {
            operation: "ack_orchestration_item".to_owned(),
            message: "the turn could not be stored".to_owned(),
            retryable: false,
        };
        let event = Event::with_event_id(id, instance, 1, None, EventKind::OrchestrationFailed { details });
        let metadata = ExecutionMetadata { status: Some("Failed".to_owned()), ..ExecutionMetadata::default() };
        Self { events: vec![event], metadata, ..Self::default() }
    }

    fn named() -> Self {
        let metadata = ExecutionMetadata {
            orchestration_name: Some("Order".to_owned()),
            orchestration_version: Some("1.0.0".to_owned()),
            ..ExecutionMetadata::default()
        };
        Self { metadata, ..Self::default() }
    }

    /// Commits it.
    pub async fn ack(&self, provider: &CosmosDBProvider, token: &str) -> Result<(), ProviderError> {
        let Self { events, activities, messages, cancelled, metadata } = self.clone();
        provider.ack_orchestration_item(token, 1, events, activities, messages, metadata, cancelled).await
    }
}

pub fn started(instance: &str) -> Event {
    let kind = EventKind::OrchestrationStarted {
        name: "Order".to_owned(),
        version: "1.0.0".to_owned(),
        input: "{}".to_owned(),
        parent_instance: None,
        parent_id: None,
        parent_execution_id: None,
        carry_forward_events: None,
        initial_custom_status: None,
    };
    Event::with_event_id(1, instance, 1, None, kind)
}

pub fn scheduled(instance: &str, id: u64) -> Event {
    let kind =
        EventKind::ActivityScheduled { name: "Pack".to_owned(), input: "{}".to_owned(), session_id: None, tag: None };
    Event::with_event_id(id, instance, 1, None, kind)
}

pub fn completed(instance: &str, id: u64, activity: u64, result: &str) -> Event {
    Event::with_event_id(id, instance, 1, Some(activity), EventKind::ActivityCompleted { result: result.to_owned() })
}

pub fn external(instance: &str, id: u64, name: &str) -> Event {
    let kind = EventKind::ExternalEvent { name: name.to_owned(), data: "{}".to_owned() };
    Event::with_event_id(id, instance, 1, None, kind)
}

pub fn start(instance: &str) -> WorkItem {
    WorkItem::StartOrchestration {
        instance: instance.to_owned(),
        orchestration: "Order".to_owned(),
        input: "{}".to_owned(),
        version: Some("1.0.0".to_owned()),
        parent_instance: None,
        parent_id: None,
        parent_execution_id: None,
        execution_id: 1,
    }
}

pub fn raised(instance: &str, name: &str) -> WorkItem {
    WorkItem::ExternalRaised { instance: instance.to_owned(), name: name.to_owned(), data: "{}".to_owned() }
}

pub fn activity(instance: &str, id: u64) -> WorkItem {
    WorkItem::ActivityExecute {
        instance: instance.to_owned(),
        execution_id: 1,
        id,
        name: "Pack".to_owned(),
        input: "{}".to_owned(),
        session_id: None,
        tag: None,
    }
}

pub fn completion(instance: &str, id: u64, result: &str) -> WorkItem {
    WorkItem::ActivityCompleted { instance: instance.to_owned(), execution_id: 1, id, result: result.to_owned() }
}

pub fn cancelled(instance: &str, id: u64) -> ScheduledActivityIdentifier {
    ScheduledActivityIdentifier { instance: instance.to_owned(), execution_id: 1, activity_id: id }
}

/// The next turn, which must come.
pub async fn fetch(provider: &CosmosDBProvider, lock: Duration) -> (OrchestrationItem, String) {
    let fetched = provider.fetch_orchestration_item(lock, PATIENCE, None).await.expect("a fetch");
    let (item, token, _) = fetched.expect("a turn");
    (item, token)
}

/// The next turn as the store is now.
pub async fn fetch_now(provider: &CosmosDBProvider, lock: Duration) -> Option<(OrchestrationItem, String)> {
    let fetched = provider.fetch_orchestration_item(lock, Duration::ZERO, None).await.expect("a fetch");
    fetched.map(|(item, token, _)| (item, token))
}

/// The next activity, which must come.
pub async fn fetch_work(provider: &CosmosDBProvider, lock: Duration) -> (WorkItem, String) {
    let tags = duroxide::providers::TagFilter::Any;
    let fetched = provider.fetch_work_item(lock, PATIENCE, None, &tags).await.expect("a fetch");
    let (item, token, _) = fetched.expect("an activity");
    (item, token)
}

/// The next activity as the store is now.
pub async fn fetch_work_now(provider: &CosmosDBProvider, lock: Duration) -> Option<(WorkItem, String)> {
    let tags = duroxide::providers::TagFilter::Any;
    let fetched = provider.fetch_work_item(lock, Duration::ZERO, None, &tags).await.expect("a fetch");
    fetched.map(|(item, token, _)| (item, token))
}

/// Takes every activity that there is; their ids in order.
pub async fn drain_activities(provider: &CosmosDBProvider) -> Vec<u64> {
    let mut ids = std::collections::BTreeSet::new();
    while let Some((item, _)) = fetch_work_now(provider, LONG).await {
        assert!(ids.insert(activity_id(&item)), "{item:?} was handed out twice");
    }
    ids.into_iter().collect()
}

pub fn activity_id(item: &WorkItem) -> u64 {
    match item {
        WorkItem::ActivityExecute { id, .. } => *id,
        other => panic!("{other:?} is not an activity"),
    }
}

/// An instance that has run its first turn, with nothing left in its queue.
pub async fn begun(provider: &CosmosDBProvider, instance: &str, activities: u64) -> Vec<Event> {
    provider.enqueue_for_orchestrator(start(instance), None).await.expect("a start");
    let (item, token) = fetch(provider, LONG).await;
    assert_eq!(item.instance, instance);
    let delta = Delta::start(instance, activities);
    delta.ack(provider, &token).await.expect("the first turn");
    delta.events
}

/// The ids of events, in order.
pub fn ids(events: &[Event]) -> Vec<u64> {
    events.iter().map(|event| event.event_id).collect()
}

/// Asserts that an error says that the token is not good, and is not worth repeating.
#[track_caller]
pub fn assert_refused(result: Result<(), ProviderError>) {
    let error = result.expect_err("a refusal");
    assert!(!error.is_retryable(), "{error:?}");
    assert!(error.message.contains("Invalid lock token") || error.message.contains("Work item not found"), "{error:?}");
}
