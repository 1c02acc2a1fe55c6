//! The engine: state that the protocols share. It has the container, the clock, the caches, and the turns and
//! activities that this process holds.

use crate::{
    activity::ActivityHandle,
    config::CosmosDBProviderConfig,
    cosmos::{Deadline, Freshness, QueryTimeout, Store, StoreError, Versioned},
    discovery::Discovery,
    model::{Clock, DocumentId, InstanceDocument, Millis, Partition, Sequencer},
    queue::LocalQueue,
    turn::{cache::InstanceCache, reads::HistoryReads, staging::RollForwards, TurnHandle},
};
use async_trait::async_trait;
use azure_core::http::Etag;
use dashmap::DashMap;
use std::{
    any::{Any, TypeId},
    collections::HashMap,
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How long one attempt to release a lock may take, with all its requests.
const RELEASE_TIME: Duration = Duration::from_secs(60);
/// The pause between two such attempts.
const RELEASE_PAUSE: Duration = Duration::from_secs(10);

/// The duties of the layer above the protocols. `lifecycle` implements it, so that no protocol depends on that layer.
#[async_trait]
pub(crate) trait Lifecycle: Send + Sync {
    /// Finishes or aborts the deletion that an instance document names. Returns whether there was anything to do.
    async fn recover_deletion(
        &self,
        engine: &Arc<Engine>,
        document: &InstanceDocument,
        deadline: Deadline,
    ) -> Result<bool, StoreError>;

    /// Whether the deletion that an instance document names is committed, so that the instance no longer exists.
    async fn is_deleted(
        &self,
        engine: &Arc<Engine>,
        document: &InstanceDocument,
        deadline: Deadline,
    ) -> Result<bool, StoreError>;

    /// Prunes old executions in the background, if the retention setting asks for it at this execution.
    fn prune_soon(&self, engine: &Arc<Engine>, partition: &Partition, execution: u64);

    /// Applies retention in the background, if it is this process's turn.
    fn apply_retention_soon(&self, engine: &Arc<Engine>);
}

/// One value for each type.
#[derive(Default)]
struct States(Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl States {
    fn get<T: Any + Default + Send + Sync>(&self) -> Arc<T> {
        let mut states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let state = states.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(T::default())).clone();
        drop(states);
        state.downcast().unwrap_or_default()
    }
}

/// The inside of a provider. Tasks that outlive a call hold a reference to it.
pub(crate) struct Engine {
    pub(crate) store: Store,
    pub(crate) config: CosmosDBProviderConfig,
    pub(crate) clock: Clock,
    pub(crate) sequencer: Sequencer,
    /// Turns that this process holds, by token.
    pub(crate) turns: DashMap<String, Arc<TurnHandle>>,
    /// Activities that this process holds, by token.
    pub(crate) activities: DashMap<String, Arc<ActivityHandle>>,
    /// Sessions that workers of this process have claimed, with their owner. The time is the earliest end of the lock.
    pub(crate) sessions: DashMap<String, (String, Millis)>,
    pub(crate) cache: InstanceCache,
    pub(crate) reads: HistoryReads,
    pub(crate) roll_forwards: RollForwards,
    pub(crate) discovery: Discovery,
    /// Waiting dispatchers, and the items that inline claims have made ready for them.
    pub(crate) queue: LocalQueue,
    /// The state of modules above this one. Each module has a type of its own here.
    states: States,
    lifecycle: Box<dyn Lifecycle>,
    /// Cancelled when the provider is dropped.
    pub(crate) stopping: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

impl Engine {
    pub(crate) fn new(store: Store, config: CosmosDBProviderConfig, lifecycle: Box<dyn Lifecycle>) -> Arc<Self> {
        let clock = config.clock().clone();
        Arc::new(Self {
            sequencer: Sequencer::new(clock.clone(), config.randomness()),
            cache: InstanceCache::new(config.history_cache_bytes()),
            discovery: Discovery::new(&config),
            queue: LocalQueue::default(),
            reads: HistoryReads::default(),
            roll_forwards: RollForwards::default(),
            turns: DashMap::new(),
            activities: DashMap::new(),
            sessions: DashMap::new(),
            states: States::default(),
            lifecycle,
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
            store,
            config,
            clock,
        })
    }

    /// The layer above the protocols.
    pub(crate) fn lifecycle(&self) -> &dyn Lifecycle {
        self.lifecycle.as_ref()
    }

    /// The state of type `T`, created on first use. The type is private to the module that owns the state.
    pub(crate) fn state<T: Any + Default + Send + Sync>(&self) -> Arc<T> {
        self.states.get()
    }

    /// Reads the instance document in the write region.
    pub(crate) async fn read_latest(
        &self,
        partition: &Partition,
        deadline: Deadline,
    ) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
        self.store.read(partition, &InstanceDocument::document_id(), Freshness::Authoritative, deadline).await
    }

    /// The present time by the provider's clock.
    pub(crate) fn now(&self) -> Millis {
        self.clock.now()
    }

    /// The deadline of a call that has no lock of its own.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.config.operation_timeout())
    }

    /// The time limit of a query that may have many pages. Each page has as much time as a call without a lock.
    pub(crate) fn per_page(&self) -> QueryTimeout {
        QueryTimeout::PerPage(self.config.operation_timeout())
    }

    /// The deadline of a call under a lock that ends at `until`.
    pub(crate) fn deadline_at(&self, until: Millis) -> Deadline {
        Deadline::after(Duration::from_millis(until.saturating_sub(self.now())))
    }

    /// A new unique token.
    pub(crate) fn new_token(&self) -> String {
        self.config.randomness().token()
    }

    /// Forgets turns and activities whose locks expired long ago. Their callers are gone without an ack.
    pub(crate) fn forget_expired(&self) {
        const LONG_AGO: Millis = 10 * 60 * 1_000;
        let before = self.now().saturating_sub(LONG_AGO);
        // An entry whose state is in use is kept.
        self.turns.retain(|_, turn| turn.state.try_lock().map_or(true, |state| state.until > before));
        self.activities.retain(|_, activity| activity.state.try_lock().map_or(true, |state| state.until > before));
    }

    /// Waits while a write of unknown outcome may still arrive. It returns
    ///
    /// - when the lock that the write would set ends,
    /// - when the document is no longer the one on which the write depends, or
    /// - after a minute, because a request does not arrive later than that.
    ///
    /// `condition` is `None` if the write depends on the absence of the document.
    pub(crate) async fn until_settled(
        &self,
        partition: &Partition,
        id: &DocumentId,
        condition: Option<&Etag>,
        until: Millis,
    ) {
        let deadline = Deadline::after(RELEASE_TIME);
        let mut pause = Duration::from_millis(250);
        loop {
            let found = self.store.read::<serde_json::Value>(partition, id, Freshness::Authoritative, deadline).await;
            let may_still_land = found.map_or(true, |found| found.as_ref().map(|found| &found.etag) == condition);
            if !may_still_land || self.now() >= until || deadline.passed() {
                return;
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    /// Releases a lock that ends at `until` or earlier. During an outage it tries again until then. After that time
    /// there is nothing to release.
    pub(crate) async fn until_released<F: Future<Output = Result<(), StoreError>>>(
        &self,
        until: Millis,
        release: impl Fn(Deadline) -> F,
    ) -> Result<(), StoreError> {
        until_released(&self.clock, until, release).await
    }

    /// Runs a task that outlives the call that started it.
    pub(crate) fn spawn<F>(&self, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        // After the end of the tokio runtime no task can run any more.
        if tokio::runtime::Handle::try_current().is_ok() {
            // Boxed, because a task has kilobytes of state, which the runtime would move several times.
            self.tasks.spawn(Box::pin(task));
        }
    }
}

async fn until_released<F: Future<Output = Result<(), StoreError>>>(
    clock: &Clock,
    until: Millis,
    release: impl Fn(Deadline) -> F,
) -> Result<(), StoreError> {
    loop {
        match release(Deadline::after(RELEASE_TIME)).await {
            Err(error) if error.is_retryable() && clock.now() < until => tokio::time::sleep(RELEASE_PAUSE).await,
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn a_lock_is_released_after_an_outage_of_any_length_while_it_lasts() {
        const OUTAGE: Duration = Duration::from_secs(600);
        let begin = Instant::now();
        let clock = Clock::from_fn(move || u64::try_from(begin.elapsed().as_millis()).unwrap());
        let release = |deadline: Deadline| async move {
            if begin.elapsed() >= OUTAGE {
                return Ok(());
            }
            tokio::time::sleep_until(deadline.instant()).await;
            Err(StoreError::Unavailable { detail: "an outage".to_owned() })
        };
        assert!(until_released(&clock, 300_000, release).await.is_err(), "the lock has ended");
        assert!(until_released(&clock, 3_600_000, release).await.is_ok());
        let refuse = |_| async { Err(StoreError::Malformed { detail: "a permanent error".to_owned() }) };
        assert!(until_released(&clock, u64::MAX, refuse).await.is_err(), "a permanent error is not retried");
    }
}
