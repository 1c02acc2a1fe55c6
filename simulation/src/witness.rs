//! Between a runtime and its provider: sees every promise, and sometimes is a caller who goes away.
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

use crate::dice::Dice;
use crate::ledger::{Broken, Ledger, Thing};
use crate::seams;
use crate::story::Story;

/// A provider whose promises are watched.
pub struct Witness {
    provider: Arc<CosmosDBProvider>,
    name: String,
    ledger: Arc<Ledger>,
    story: Arc<Story>,
    /// One call in so many is dropped before it returns; none where this is zero.
    drops: u32,
    dice: Mutex<Dice>,
    turns: Mutex<BTreeMap<String, OrchestrationItem>>,
    activities: Mutex<BTreeMap<String, WorkItem>>,
}

impl Witness {
    /// Watches the provider of the worker `name`.
    pub fn new(
        provider: Arc<CosmosDBProvider>,
        name: &str,
        ledger: Arc<Ledger>,
        story: Arc<Story>,
        drops: u32,
        dice: Dice,
    ) -> Self {
        Self {
            provider,
            name: name.to_owned(),
            ledger,
            story,
            drops,
            dice: Mutex::new(dice),
            turns: Mutex::default(),
            activities: Mutex::default(),
        }
    }

    /// Runs a call, or drops it somewhere on its way: then there is no answer.
    async fn or_dropped<T>(&self, what: &str, call: impl Future<Output = T>) -> Option<T> {
        let patience = {
            let mut dice = lock(&self.dice);
            (self.drops > 0 && dice.one_in(self.drops)).then(|| dice.mostly_small(0..=400))
        };
        let Some(patience) = patience else {
            return Some(call.await);
        };
        let outcome = tokio::time::timeout(Duration::from_millis(patience), call).await.ok();
        if outcome.is_none() {
            self.story.tell(&self.name, None, format!("drops {what} after {patience} ms"));
        }
        outcome
    }

    /// The worker is told to leave: its provider gives back what it has, uncounted.
    pub fn leaves(&self) {
        // Its sessions, too: it is their owner by its name.
        self.ledger.ended(&self.name);
        for (token, item) in std::mem::take(&mut *lock(&self.turns)) {
            self.ledger.ended(&self.holder(&token));
            self.ledger.uncounted_turn(&item, &token);
        }
        for (token, item) in std::mem::take(&mut *lock(&self.activities)) {
            self.ledger.ended(&self.holder(&token));
            self.ledger.uncounted_activity(&item, &token);
        }
    }

    fn holder(&self, token: &str) -> String {
        format!("{}/{token}", self.name)
    }

    fn tell(&self, instance: &str, what: String) {
        self.story.tell(&self.name, Some(instance), what);
    }

    fn has_turn(&self, item: &OrchestrationItem, token: &str, attempt: u32) {
        let kinds: Vec<&str> = item.messages.iter().map(kind).collect();
        self.tell(&item.instance, format!("has turn {token}, attempt {attempt}: {}", kinds.join(", ")));
        self.ledger.promised(Thing::Turn(item.instance.clone()), &self.holder(token), token);
        self.ledger.handed_turn(item, token, attempt);
        if let Some(gap) = gap(&item.history) {
            let detail = format!("the history of a turn has {gap}");
            let instance = item.instance.clone();
            self.ledger.report(Broken { invariant: "event ids have no gap or repeat", instance, detail });
        }
        lock(&self.turns).insert(token.to_owned(), item.clone());
    }

    fn has_activity(&self, item: &WorkItem, token: &str, attempt: u32) {
        if let WorkItem::ActivityExecute { instance, execution_id, id, .. } = item {
            self.tell(instance, format!("has activity {execution_id}/{id} {token}, attempt {attempt}"));
            let thing = Thing::Activity(instance.clone(), *execution_id, *id);
            self.ledger.promised(thing, &self.holder(token), token);
        }
        self.ledger.handed_activity(item, token, attempt);
        lock(&self.activities).insert(token.to_owned(), item.clone());
    }
}

/// The ids of the events must be 1, 2, 3 …; what is not so.
pub fn gap(history: &[Event]) -> Option<String> {
    let ids: Vec<u64> = history.iter().map(|event| event.event_id).collect();
    let wrong = ids.iter().enumerate().find(|(position, id)| **id != *position as u64 + 1);
    wrong.map(|(position, id)| format!("event {id} at position {}", position + 1))
}

/// The activities of the instance that are gone once the turn that cancels them is committed. Those of a large turn, which
/// may be staged, go a while later.
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

/// What a caller who has gone away would have been told.
fn gone<T>() -> Result<T, ProviderError> {
    Err(ProviderError::retryable("witness", "the caller went away"))
}

#[async_trait]
impl Provider for Witness {
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
            self.has_turn(item, token, *attempt);
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
        // A failed ack may be followed by another one.
        let item = lock(&self.turns).get(token).cloned();
        self.ledger.ended(&self.holder(token));
        let instance = item.as_ref().map_or("?", |item| &item.instance).to_owned();
        let written = format!("{} events, {} activities, {} messages", events.len(), work.len(), messages.len());
        let removed = removed_at_once(&instance, events.len() + work.len() + messages.len(), &cancelled);
        let call = self.provider.ack_orchestration_item(token, execution, events, work, messages, metadata, cancelled);
        let acked = self.or_dropped("an ack of a turn", call).await.unwrap_or_else(gone);
        match &acked {
            Ok(()) => {
                self.tell(&instance, format!("has committed turn {token}: {written}"));
                lock(&self.turns).remove(token);
                if let Some(item) = item {
                    self.ledger.committed(&item, token);
                }
                removed.iter().for_each(|(execution, id)| self.ledger.cancelled(&instance, *execution, *id));
            }
            Err(error) => {
                self.tell(&instance, format!("could not commit turn {token}: {error}"));
                if let Some(item) = item.filter(|_| error.message.contains("uncounted")) {
                    self.ledger.uncounted_turn(&item, token);
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
        self.ledger.ended(&self.holder(token));
        let item = lock(&self.turns).remove(token);
        if let Some(item) = item {
            self.tell(&item.instance, format!("abandons turn {token}"));
            if ignore_attempt {
                self.ledger.uncounted_turn(&item, token);
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
            self.has_activity(item, token, *attempt);
            if let (WorkItem::ActivityExecute { session_id: Some(id), .. }, Some(session)) = (item, session) {
                self.ledger.promised(Thing::Session(id.clone()), &session.owner_id, &session.owner_id);
            }
        }
        Ok(fetched)
    }

    async fn ack_work_item(&self, token: &str, completion: Option<WorkItem>) -> Result<(), ProviderError> {
        self.ledger.ended(&self.holder(token));
        let ended = completion.as_ref().map_or("nothing", kind);
        let item = lock(&self.activities).get(token).cloned();
        let call = self.provider.ack_work_item(token, completion);
        let acked = self.or_dropped("an ack of an activity", call).await.unwrap_or_else(gone);
        if acked.is_ok() {
            lock(&self.activities).remove(token);
        }
        if let Some(WorkItem::ActivityExecute { instance, execution_id, id, .. }) = item {
            if acked.is_ok() {
                let thing = Thing::Activity(instance.clone(), execution_id, id);
                self.ledger.done(&thing, &self.holder(token));
            }
            let outcome = acked.as_ref().map_or_else(ToString::to_string, |()| "done".to_owned());
            self.tell(&instance, format!("ends activity {execution_id}/{id} {token} with {ended}: {outcome}"));
        }
        acked
    }

    async fn renew_work_item_lock(&self, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
        let asked = seams::now();
        self.provider.renew_work_item_lock(token, extend_for).await?;
        self.ledger.prolonged(&self.holder(token), asked, extend_for);
        Ok(())
    }

    async fn renew_session_lock(
        &self,
        owners: &[&str],
        extend_for: Duration,
        idle_timeout: Duration,
    ) -> Result<usize, ProviderError> {
        let renewal = self.ledger.sessions.renewal(&self.name, owners, extend_for, idle_timeout);
        let renewed = self.provider.renew_session_lock(owners, extend_for, idle_timeout).await;
        self.story.tell(&self.name, None, format!("renews its sessions: {renewed:?}"));
        if self.ledger.is_exact() {
            self.ledger.sessions.not_renewed(&renewal).into_iter().for_each(|broken| self.ledger.report(broken));
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
        self.ledger.ended(&self.holder(token));
        let item = lock(&self.activities).remove(token);
        if let Some(item) = item.filter(|_| ignore_attempt) {
            self.ledger.uncounted_activity(&item, token);
        }
        self.provider.abandon_work_item(token, delay, ignore_attempt).await
    }

    async fn renew_orchestration_item_lock(&self, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
        let asked = seams::now();
        self.provider.renew_orchestration_item_lock(token, extend_for).await?;
        self.ledger.prolonged(&self.holder(token), asked, extend_for);
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
