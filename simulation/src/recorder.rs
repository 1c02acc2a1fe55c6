//! A provider between a runtime and its real provider. It records every call for the oracle and drops some calls, as a
//! caller that goes away.
#![deny(clippy::missing_trait_methods)]

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use duroxide::providers::{
    DispatcherCapabilityFilter, ExecutionMetadata, OrchestrationItem, Provider, ProviderAdmin, ProviderError,
    ScheduledActivityIdentifier, SessionFetchConfig, TagFilter, WorkItem,
};
use duroxide::{Event, SystemStats};
use duroxide_cosmos::CosmosDBProvider;

use crate::oracle::{LockTarget, Oracle, Violation};
use crate::rng::SeededRng;
use crate::transcript::Transcript;
use crate::virtual_time;

/// A provider whose calls are recorded.
pub struct Recorder {
    provider: Arc<CosmosDBProvider>,
    name: String,
    oracle: Arc<Oracle>,
    transcript: Arc<Transcript>,
    /// One call in this many is dropped before it returns. 0: none.
    drop_one_in: u32,
    rng: Mutex<SeededRng>,
    turns: Mutex<BTreeMap<String, OrchestrationItem>>,
    activities: Mutex<BTreeMap<String, WorkItem>>,
}

impl Recorder {
    /// A recorder for the provider of the worker `name`.
    pub fn new(
        provider: Arc<CosmosDBProvider>,
        name: &str,
        oracle: Arc<Oracle>,
        transcript: Arc<Transcript>,
        drop_one_in: u32,
        rng: SeededRng,
    ) -> Self {
        Self {
            provider,
            name: name.to_owned(),
            oracle,
            transcript,
            drop_one_in,
            rng: Mutex::new(rng),
            turns: Mutex::default(),
            activities: Mutex::default(),
        }
    }

    /// Runs a call, or drops it at some await point. A dropped call has no answer.
    async fn or_dropped<T>(&self, name: &str, call: impl Future<Output = T>) -> Option<T> {
        let drop_after = {
            let mut rng = lock(&self.rng);
            (self.drop_one_in > 0 && rng.one_in(self.drop_one_in)).then(|| rng.mostly_small(0..=400))
        };
        let Some(drop_after) = drop_after else {
            return Some(call.await);
        };
        let outcome = tokio::time::timeout(Duration::from_millis(drop_after), call).await.ok();
        if outcome.is_none() {
            self.transcript.record(&self.name, None, format!("drops {name} after {drop_after} ms"));
        }
        outcome
    }

    /// The worker shuts down. Its provider releases all claims without counting an attempt.
    pub fn shuts_down(&self) {
        // The worker also owns sessions, under its name.
        self.oracle.ended(&self.name);
        for (token, item) in std::mem::take(&mut *lock(&self.turns)) {
            self.oracle.ended(&self.holder(&token));
            self.oracle.turn_not_counted(&item, &token);
        }
        for (token, item) in std::mem::take(&mut *lock(&self.activities)) {
            self.oracle.ended(&self.holder(&token));
            self.oracle.activity_not_counted(&item, &token);
        }
    }

    fn holder(&self, token: &str) -> String {
        format!("{}/{token}", self.name)
    }

    fn record(&self, instance: &str, event: String) {
        self.transcript.record(&self.name, Some(instance), event);
    }

    fn turn_fetched(&self, item: &OrchestrationItem, token: &str, attempt: u32) {
        let kinds: Vec<&str> = item.messages.iter().map(kind).collect();
        self.record(&item.instance, format!("has turn {token}, attempt {attempt}: {}", kinds.join(", ")));
        self.oracle.held(LockTarget::Turn(item.instance.clone()), &self.holder(token), token);
        self.oracle.turn_returned(item, token, attempt);
        if let Some(gap) = gap(&item.history) {
            let detail = format!("the history of a turn has {gap}");
            let instance = item.instance.clone();
            self.oracle.report(Violation { invariant: "event ids have no gap or repeat", instance, detail });
        }
        lock(&self.turns).insert(token.to_owned(), item.clone());
    }

    fn activity_fetched(&self, item: &WorkItem, token: &str, attempt: u32) {
        if let WorkItem::ActivityExecute { instance, execution_id, id, .. } = item {
            self.record(instance, format!("has activity {execution_id}/{id} {token}, attempt {attempt}"));
            let target = LockTarget::Activity(instance.clone(), *execution_id, *id);
            self.oracle.held(target, &self.holder(token), token);
        }
        self.oracle.activity_returned(item, token, attempt);
        lock(&self.activities).insert(token.to_owned(), item.clone());
    }
}

/// The first event whose id is not its position. Event ids must be 1, 2, 3 and so on.
pub fn gap(history: &[Event]) -> Option<String> {
    let ids: Vec<u64> = history.iter().map(|event| event.event_id).collect();
    let wrong = ids.iter().enumerate().find(|(position, id)| **id != *position as u64 + 1);
    wrong.map(|(position, id)| format!("event {id} at position {}", position + 1))
}

/// The cancelled activities of this instance that the commit itself removes. A large turn may be staged: its
/// roll-forward removes them later.
fn removed_at_once(instance: &str, size: usize, cancelled: &[ScheduledActivityIdentifier]) -> Vec<(u64, u64)> {
    const SMALL: usize = 40;
    let own = cancelled.iter().filter(|activity| activity.instance == instance && size + cancelled.len() < SMALL);
    own.map(|activity| (activity.execution_id, activity.activity_id)).collect()
}

fn kind(message: &WorkItem) -> &'static str {
    duroxide::runtime::kind_of(message)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The answer of a dropped call.
fn dropped<T>() -> Result<T, ProviderError> {
    Err(ProviderError::retryable("recorder", "the caller dropped the call"))
}

#[async_trait]
impl Provider for Recorder {
    fn name(&self) -> &str {
        self.provider.name()
    }

    fn version(&self) -> &str {
        self.provider.version()
    }

    async fn fetch_orchestration_item(
        &self,
        lock_timeout: Duration,
        poll_timeout: Duration,
        filter: Option<&DispatcherCapabilityFilter>,
    ) -> Result<Option<(OrchestrationItem, String, u32)>, ProviderError> {
        let call = self.provider.fetch_orchestration_item(lock_timeout, poll_timeout, filter);
        let fetched = self.or_dropped("a fetch of a turn", call).await.unwrap_or(Ok(None))?;
        if let Some((item, token, attempt)) = &fetched {
            self.turn_fetched(item, token, *attempt);
        }
        Ok(fetched)
    }

    async fn ack_orchestration_item(
        &self,
        token: &str,
        execution: u64,
        events: Vec<Event>,
        work: Vec<WorkItem>,
        messages: Vec<WorkItem>,
        metadata: ExecutionMetadata,
        cancelled: Vec<ScheduledActivityIdentifier>,
    ) -> Result<(), ProviderError> {
        // After a failed ack, another ack of the same turn may follow.
        let item = lock(&self.turns).get(token).cloned();
        self.oracle.ended(&self.holder(token));
        let instance = item.as_ref().map_or("?", |item| &item.instance).to_owned();
        let written = format!("{} events, {} activities, {} messages", events.len(), work.len(), messages.len());
        let removed = removed_at_once(&instance, events.len() + work.len() + messages.len(), &cancelled);
        let call = self.provider.ack_orchestration_item(token, execution, events, work, messages, metadata, cancelled);
        let acked = self.or_dropped("an ack of a turn", call).await.unwrap_or_else(dropped);
        match &acked {
            Ok(()) => {
                self.record(&instance, format!("has committed turn {token}: {written}"));
                lock(&self.turns).remove(token);
                if let Some(item) = item {
                    self.oracle.committed(&item, token);
                }
                removed.iter().for_each(|(execution, id)| self.oracle.cancelled(&instance, *execution, *id));
            }
            Err(error) => {
                self.record(&instance, format!("could not commit turn {token}: {error}"));
                if let Some(item) = item.filter(|_| error.message.contains("without counting an attempt")) {
                    self.oracle.turn_not_counted(&item, token);
                }
            }
        }
        acked
    }

    async fn abandon_orchestration_item(
        &self,
        token: &str,
        delay: Option<Duration>,
        ignore_attempt: bool,
    ) -> Result<(), ProviderError> {
        self.oracle.ended(&self.holder(token));
        let item = lock(&self.turns).remove(token);
        if let Some(item) = item {
            self.record(&item.instance, format!("abandons turn {token}"));
            if ignore_attempt {
                self.oracle.turn_not_counted(&item, token);
            }
        }
        self.provider.abandon_orchestration_item(token, delay, ignore_attempt).await
    }

    async fn read(&self, instance: &str) -> Result<Vec<Event>, ProviderError> {
        self.provider.read(instance).await
    }

    async fn read_with_execution(&self, instance: &str, execution: u64) -> Result<Vec<Event>, ProviderError> {
        self.provider.read_with_execution(instance, execution).await
    }

    async fn append_with_execution(
        &self,
        instance: &str,
        execution: u64,
        events: Vec<Event>,
    ) -> Result<(), ProviderError> {
        self.provider.append_with_execution(instance, execution, events).await
    }

    async fn enqueue_for_worker(&self, item: WorkItem) -> Result<(), ProviderError> {
        self.provider.enqueue_for_worker(item).await
    }

    async fn fetch_work_item(
        &self,
        lock_timeout: Duration,
        poll_timeout: Duration,
        session: Option<&SessionFetchConfig>,
        tags: &TagFilter,
    ) -> Result<Option<(WorkItem, String, u32)>, ProviderError> {
        let call = self.provider.fetch_work_item(lock_timeout, poll_timeout, session, tags);
        let fetched = self.or_dropped("a fetch of an activity", call).await.unwrap_or(Ok(None))?;
        if let Some((item, token, attempt)) = &fetched {
            self.activity_fetched(item, token, *attempt);
            if let (WorkItem::ActivityExecute { session_id: Some(id), .. }, Some(session)) = (item, session) {
                self.oracle.held(LockTarget::Session(id.clone()), &session.owner_id, &session.owner_id);
            }
        }
        Ok(fetched)
    }

    async fn ack_work_item(&self, token: &str, completion: Option<WorkItem>) -> Result<(), ProviderError> {
        self.oracle.ended(&self.holder(token));
        let ended = completion.as_ref().map_or("nothing", kind);
        let item = lock(&self.activities).get(token).cloned();
        let call = self.provider.ack_work_item(token, completion);
        let acked = self.or_dropped("an ack of an activity", call).await.unwrap_or_else(dropped);
        if acked.is_ok() {
            lock(&self.activities).remove(token);
        }
        if let Some(WorkItem::ActivityExecute { instance, execution_id, id, .. }) = item {
            if acked.is_ok() {
                let target = LockTarget::Activity(instance.clone(), execution_id, id);
                self.oracle.completed(&target, &self.holder(token));
            }
            let outcome = acked.as_ref().map_or_else(ToString::to_string, |()| "done".to_owned());
            self.record(&instance, format!("ends activity {execution_id}/{id} {token} with {ended}: {outcome}"));
        }
        acked
    }

    async fn renew_work_item_lock(&self, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
        let asked = virtual_time::now();
        self.provider.renew_work_item_lock(token, extend_for).await?;
        self.oracle.renewed(&self.holder(token), asked, extend_for);
        Ok(())
    }

    async fn renew_session_lock(
        &self,
        owners: &[&str],
        extend_for: Duration,
        idle_timeout: Duration,
    ) -> Result<usize, ProviderError> {
        let renewal = self.oracle.sessions.renewal(&self.name, owners, extend_for, idle_timeout);
        let renewed = self.provider.renew_session_lock(owners, extend_for, idle_timeout).await;
        self.transcript.record(&self.name, None, format!("renews its sessions: {renewed:?}"));
        if self.oracle.is_exact() {
            self.oracle.sessions.not_renewed(&renewal).into_iter().for_each(|violation| self.oracle.report(violation));
        }
        renewed
    }

    async fn cleanup_orphaned_sessions(&self, idle_timeout: Duration) -> Result<usize, ProviderError> {
        self.provider.cleanup_orphaned_sessions(idle_timeout).await
    }

    async fn abandon_work_item(
        &self,
        token: &str,
        delay: Option<Duration>,
        ignore_attempt: bool,
    ) -> Result<(), ProviderError> {
        self.oracle.ended(&self.holder(token));
        let item = lock(&self.activities).remove(token);
        if let Some(item) = item.filter(|_| ignore_attempt) {
            self.oracle.activity_not_counted(&item, token);
        }
        self.provider.abandon_work_item(token, delay, ignore_attempt).await
    }

    async fn renew_orchestration_item_lock(&self, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
        let asked = virtual_time::now();
        self.provider.renew_orchestration_item_lock(token, extend_for).await?;
        self.oracle.renewed(&self.holder(token), asked, extend_for);
        Ok(())
    }

    async fn enqueue_for_orchestrator(&self, item: WorkItem, delay: Option<Duration>) -> Result<(), ProviderError> {
        self.provider.enqueue_for_orchestrator(item, delay).await
    }

    fn as_management_capability(&self) -> Option<&dyn ProviderAdmin> {
        self.provider.as_management_capability()
    }

    async fn get_custom_status(
        &self,
        instance: &str,
        last_seen: u64,
    ) -> Result<Option<(Option<String>, u64)>, ProviderError> {
        self.provider.get_custom_status(instance, last_seen).await
    }

    async fn get_kv_value(&self, instance: &str, key: &str) -> Result<Option<String>, ProviderError> {
        self.provider.get_kv_value(instance, key).await
    }

    async fn get_kv_all_values(&self, instance: &str) -> Result<HashMap<String, String>, ProviderError> {
        self.provider.get_kv_all_values(instance).await
    }

    async fn get_instance_stats(&self, instance: &str) -> Result<Option<SystemStats>, ProviderError> {
        self.provider.get_instance_stats(instance).await
    }
}
