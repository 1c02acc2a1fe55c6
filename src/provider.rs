//! The provider: how it is opened and closed, and duroxide's provider traits. Each trait method delegates to a
//! protocol.

use crate::{
    activity::{self, complete, session},
    config::CosmosDBProviderConfig,
    cosmos::{self, queries, ConnectError, RequestStatistics, StoreError},
    credential::TokenCache,
    discovery,
    engine::Engine,
    lifecycle::{delete, delete_bulk, prune, retention, shutdown, trees, LifecycleTasks},
    operate::{inspect, metrics},
    outbox,
    turn::{self, commit, plan::Ack, release},
};

mod operations;
mod run_to_completion;

use async_trait::async_trait;
use azure_data_cosmos::CosmosClient;
use duroxide::{
    providers::{
        DeleteInstanceResult, DispatcherCapabilityFilter, ExecutionInfo, ExecutionMetadata, InstanceFilter,
        InstanceInfo, InstanceTree, OrchestrationItem, Provider, ProviderAdmin, ProviderError, PruneOptions,
        PruneResult, QueueDepths, ScheduledActivityIdentifier, SessionFetchConfig, SystemMetrics, TagFilter, WorkItem,
    },
    Event, SystemStats,
};
use run_to_completion::RunToCompletion;
use std::{collections::HashMap, fmt, future::Future, sync::Arc, time::Duration};

/// A duroxide storage provider on one container of an Azure Cosmos DB account.
///
/// Any number of providers share a container, in one process or in many. Dropping a provider stops its background work.
/// The locks that it holds then expire. Call [`shutdown`](Self::shutdown) to release them at once.
///
/// ```
/// # use duroxide_cosmos_emulator::LocalAccount;
/// use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
///
/// # #[tokio::main]
/// # async fn main() -> Result<(), duroxide_cosmos::ConnectError> {
/// # let client = LocalAccount::new().client().await;
/// // `client` is an `azure_data_cosmos::CosmosClient`.
/// let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
/// let provider = CosmosDBProvider::new_with_client(&client, config).await?;
/// println!("{} requests so far", provider.request_statistics().requests());
/// provider.shutdown().await;
/// # Ok(())
/// # }
/// ```
pub struct CosmosDBProvider {
    engine: Arc<Engine>,
}

impl CosmosDBProvider {
    /// Signs in with an account key and opens the container `duroxide` of `database`. Creates both if they do not
    /// exist.
    ///
    /// ```
    /// # use duroxide_cosmos_emulator::{LocalAccount, EMULATOR_KEY};
    /// use duroxide_cosmos::CosmosDBProvider;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let served = LocalAccount::new().serve("127.0.0.1:0".parse()?).await?;
    /// # let (endpoint, key) = (served.endpoint(), EMULATOR_KEY.to_owned());
    /// // `endpoint` is such as https://my-account.documents.azure.com/
    /// let provider = CosmosDBProvider::new(endpoint, key, "my-database").await?;
    /// # provider.shutdown().await;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "key_auth")]
    pub async fn new(
        endpoint: impl Into<String>,
        key: impl Into<azure_core::credentials::Secret>,
        database: impl Into<String>,
    ) -> Result<Self, ConnectError> {
        let config = CosmosDBProviderConfig::default()
            .with_endpoint(endpoint)
            .with_credential(crate::Credential::account_key(key))
            .with_database(database);
        Self::new_with_config(config).await
    }

    /// Opens the container that `config` names.
    ///
    /// ```no_run
    /// use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
    ///
    /// # async fn open() -> Result<(), duroxide_cosmos::ConnectError> {
    /// let config = CosmosDBProviderConfig::default()
    ///     .with_endpoint("https://my-account.documents.azure.com/")
    ///     .with_credential(Credential::managed_identity());
    /// let provider = CosmosDBProvider::new_with_config(config).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn new_with_config(config: CosmosDBProviderConfig) -> Result<Self, ConnectError> {
        config.validate()?;
        let (client, tokens) = cosmos::connect(&config).await?;
        Self::open(&client, config, tokens).await
    }

    /// Opens the container that the environment variables name. [`CosmosDBProviderConfig::from_env`] lists them.
    ///
    /// ```no_run
    /// # async fn open() -> Result<(), duroxide_cosmos::ConnectError> {
    /// let provider = duroxide_cosmos::CosmosDBProvider::from_env().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn from_env() -> Result<Self, ConnectError> {
        Self::new_with_config(CosmosDBProviderConfig::from_env()?).await
    }

    /// Opens the container with a client that the caller has configured. The client determines endpoint, credential and
    /// regions. The provider checks all other settings of `config` as in [`new_with_config`](Self::new_with_config).
    ///
    /// The type [`CosmosDBProvider`] has an example.
    pub async fn new_with_client(client: &CosmosClient, config: CosmosDBProviderConfig) -> Result<Self, ConnectError> {
        config.validate_for_client()?;
        Self::open(client, config, None).await
    }

    /// Opens the container and starts the engine. `tokens` is the token cache of a client that the provider has made.
    async fn open(
        client: &CosmosClient,
        config: CosmosDBProviderConfig,
        tokens: Option<TokenCache>,
    ) -> Result<Self, ConnectError> {
        let store = cosmos::open(client, &config, tokens).await?;
        let engine = Engine::new(store, config, Box::new(LifecycleTasks));
        Ok(Self { engine })
    }

    /// Runs a call on the turn or activity that this process holds under a token. The call ends even if its caller
    /// drops it.
    async fn finish<F>(&self, token: &str, call: impl FnOnce(Arc<Engine>, String) -> F) -> Result<(), ProviderError>
    where
        F: Future<Output = Result<(), ProviderError>> + Send + 'static,
    {
        RunToCompletion::new(&self.engine, call(self.engine.clone(), token.to_owned())).await
    }

    /// The number and the charge of all requests of this provider, by kind of operation.
    ///
    /// ```
    /// # use duroxide_cosmos::CosmosDBProvider;
    /// fn report(provider: &CosmosDBProvider) {
    ///     let spent = provider.request_statistics();
    ///     println!("{} requests, {:.1} RU", spent.requests(), spent.charge());
    /// }
    /// ```
    pub fn request_statistics(&self) -> RequestStatistics {
        self.engine.store.statistics()
    }

    /// Delivers messages of committed turns to other instances, if the committing process has not delivered them in
    /// time. Returns the number of messages found.
    ///
    /// Every process that fetches work does this by itself. Call it in a process that does not, such as a scheduled
    /// job.
    pub async fn reconcile(&self) -> Result<usize, StoreError> {
        outbox::reconcile(&self.engine, None).await
    }

    /// Deletes instances that ended longer ago than the age of
    /// [`with_retention`](CosmosDBProviderConfig::with_retention), for up to 20 s. Returns the number of deleted
    /// instances.
    ///
    /// One of the processes that fetch work does this by itself. Call it where no such process runs, such as in a
    /// nightly job.
    pub async fn apply_retention(&self) -> Result<u64, StoreError> {
        retention::apply(&self.engine).await
    }

    /// Shuts the provider down within ten seconds. See [`shutdown_within`](Self::shutdown_within).
    pub async fn shutdown(&self) {
        const LIMIT: Duration = Duration::from_secs(10);
        self.shutdown_within(LIMIT).await;
    }

    /// Shuts the provider down, within `limit` even during an outage. Call it after the duroxide runtime has stopped.
    ///
    /// The provider
    ///
    /// - stops its background work,
    /// - releases the turns, activities and sessions that this process holds, without counting an attempt, and
    /// - waits for calls and deliveries in flight.
    ///
    /// Returns `false` if the time was up first. The locks that are still held then expire.
    ///
    /// ```
    /// # use duroxide_cosmos::CosmosDBProvider;
    /// # use std::time::Duration;
    /// async fn stop(runtime: std::sync::Arc<duroxide::runtime::Runtime>, provider: &CosmosDBProvider) {
    ///     runtime.shutdown(None).await;
    ///     if !provider.shutdown_within(Duration::from_secs(20)).await {
    ///         eprintln!("shutdown timed out, the remaining locks will expire");
    ///     }
    /// }
    /// ```
    pub async fn shutdown_within(&self, limit: Duration) -> bool {
        shutdown::shut_down(&self.engine, limit).await
    }
}

impl Drop for CosmosDBProvider {
    fn drop(&mut self) {
        self.engine.stopping.cancel();
    }
}

impl fmt::Debug for CosmosDBProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CosmosDBProvider").field("config", &self.engine.config).finish_non_exhaustive()
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Provider for CosmosDBProvider {
    fn name(&self) -> &str {
        "cosmos-db"
    }

    fn version(&self) -> &str {
        env!("CARGO_PKG_VERSION")
    }

    async fn fetch_orchestration_item(
        &self,
        lock_timeout: Duration,
        poll_timeout: Duration,
        filter: Option<&DispatcherCapabilityFilter>,
    ) -> Result<Option<(OrchestrationItem, String, u32)>, ProviderError> {
        discovery::next_turn(&self.engine, lock_timeout, poll_timeout, filter).await
    }

    async fn ack_orchestration_item(
        &self,
        lock_token: &str,
        execution_id: u64,
        history_delta: Vec<Event>,
        worker_items: Vec<WorkItem>,
        orchestrator_items: Vec<WorkItem>,
        metadata: ExecutionMetadata,
        cancelled_activities: Vec<ScheduledActivityIdentifier>,
    ) -> Result<(), ProviderError> {
        let ack = Ack {
            execution: execution_id,
            events: history_delta,
            worker_items,
            orchestrator_items,
            metadata,
            cancelled: cancelled_activities,
        };
        self.finish(lock_token, |engine, token| async move { commit::commit(&engine, &token, ack).await }).await
    }

    async fn abandon_orchestration_item(
        &self,
        lock_token: &str,
        delay: Option<Duration>,
        ignore_attempt: bool,
    ) -> Result<(), ProviderError> {
        self.finish(lock_token, |engine, token| async move {
            release::abandon(&engine, &token, delay, ignore_attempt).await
        })
        .await
    }

    async fn read(&self, instance: &str) -> Result<Vec<Event>, ProviderError> {
        inspect::latest_history(&self.engine, instance, "read").await
    }

    async fn read_with_execution(&self, instance: &str, execution_id: u64) -> Result<Vec<Event>, ProviderError> {
        inspect::history(&self.engine, instance, execution_id, "read_with_execution").await
    }

    async fn append_with_execution(
        &self,
        instance: &str,
        execution_id: u64,
        new_events: Vec<Event>,
    ) -> Result<(), ProviderError> {
        turn::enqueue::events(&self.engine, instance, execution_id, &new_events).await
    }

    async fn enqueue_for_worker(&self, item: WorkItem) -> Result<(), ProviderError> {
        activity::enqueue::enqueue(&self.engine, &item).await
    }

    async fn fetch_work_item(
        &self,
        lock_timeout: Duration,
        poll_timeout: Duration,
        session: Option<&SessionFetchConfig>,
        tag_filter: &TagFilter,
    ) -> Result<Option<(WorkItem, String, u32)>, ProviderError> {
        discovery::next_activity(&self.engine, lock_timeout, poll_timeout, session, tag_filter).await
    }

    async fn ack_work_item(&self, token: &str, completion: Option<WorkItem>) -> Result<(), ProviderError> {
        self.finish(token, |engine, token| async move { complete::complete(&engine, &token, completion).await }).await
    }

    async fn renew_work_item_lock(&self, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
        self.finish(token, |engine, token| async move { complete::renew(&engine, &token, extend_for).await }).await
    }

    async fn renew_session_lock(
        &self,
        owner_ids: &[&str],
        extend_for: Duration,
        idle_timeout: Duration,
    ) -> Result<usize, ProviderError> {
        session::renew(&self.engine, owner_ids, extend_for, idle_timeout).await
    }

    async fn cleanup_orphaned_sessions(&self, _idle_timeout: Duration) -> Result<usize, ProviderError> {
        session::clean_up(&self.engine).await
    }

    async fn abandon_work_item(
        &self,
        token: &str,
        delay: Option<Duration>,
        ignore_attempt: bool,
    ) -> Result<(), ProviderError> {
        self.finish(
            token,
            |engine, token| async move { complete::abandon(&engine, &token, delay, ignore_attempt).await },
        )
        .await
    }

    async fn renew_orchestration_item_lock(&self, token: &str, extend_for: Duration) -> Result<(), ProviderError> {
        self.finish(token, |engine, token| async move { release::renew(&engine, &token, extend_for).await }).await
    }

    async fn enqueue_for_orchestrator(&self, item: WorkItem, delay: Option<Duration>) -> Result<(), ProviderError> {
        turn::enqueue::message(&self.engine, &item, delay).await
    }

    fn as_management_capability(&self) -> Option<&dyn ProviderAdmin> {
        Some(self)
    }

    async fn get_custom_status(
        &self,
        instance: &str,
        last_seen_version: u64,
    ) -> Result<Option<(Option<String>, u64)>, ProviderError> {
        inspect::custom_status(&self.engine, instance, last_seen_version).await
    }

    async fn get_kv_value(&self, instance: &str, key: &str) -> Result<Option<String>, ProviderError> {
        inspect::value(&self.engine, instance, key).await
    }

    async fn get_kv_all_values(&self, instance: &str) -> Result<HashMap<String, String>, ProviderError> {
        inspect::values(&self.engine, instance).await
    }

    async fn get_instance_stats(&self, instance: &str) -> Result<Option<SystemStats>, ProviderError> {
        inspect::stats(&self.engine, instance).await
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl ProviderAdmin for CosmosDBProvider {
    async fn list_instances(&self) -> Result<Vec<String>, ProviderError> {
        inspect::list(&self.engine, queries::INSTANCES.statement(), "list_instances").await
    }

    async fn list_instances_by_status(&self, status: &str) -> Result<Vec<String>, ProviderError> {
        let statement = queries::INSTANCES_BY_STATUS.statement().bind("@status", status);
        inspect::list(&self.engine, statement, "list_instances_by_status").await
    }

    async fn list_executions(&self, instance: &str) -> Result<Vec<u64>, ProviderError> {
        inspect::executions(&self.engine, instance).await
    }

    async fn read_history_with_execution_id(
        &self,
        instance: &str,
        execution_id: u64,
    ) -> Result<Vec<Event>, ProviderError> {
        inspect::history(&self.engine, instance, execution_id, "read_history_with_execution_id").await
    }

    async fn read_history(&self, instance: &str) -> Result<Vec<Event>, ProviderError> {
        inspect::latest_history(&self.engine, instance, "read_history").await
    }

    async fn latest_execution_id(&self, instance: &str) -> Result<u64, ProviderError> {
        inspect::latest_execution(&self.engine, instance).await
    }

    async fn get_instance_info(&self, instance: &str) -> Result<InstanceInfo, ProviderError> {
        inspect::instance_info(&self.engine, instance).await
    }

    async fn get_execution_info(&self, instance: &str, execution_id: u64) -> Result<ExecutionInfo, ProviderError> {
        inspect::execution_info(&self.engine, instance, execution_id).await
    }

    async fn get_system_metrics(&self) -> Result<SystemMetrics, ProviderError> {
        metrics::shared_system(&self.engine).await.map_err(|e| e.into_provider_error("get_system_metrics"))
    }

    async fn get_queue_depths(&self) -> Result<QueueDepths, ProviderError> {
        metrics::shared_queue_depths(&self.engine).await.map_err(|e| e.into_provider_error("get_queue_depths"))
    }

    async fn list_children(&self, instance_id: &str) -> Result<Vec<String>, ProviderError> {
        let rows = trees::children(&self.engine, &[instance_id.to_owned()]).await;
        let rows = rows.map_err(|e| e.into_provider_error("list_children"))?;
        Ok(rows.iter().filter_map(|row| row.id()).collect())
    }

    async fn get_parent_id(&self, instance_id: &str) -> Result<Option<String>, ProviderError> {
        let found = inspect::existing(&self.engine, instance_id, "get_parent_id").await?;
        Ok(found.document.origin.parent)
    }

    async fn delete_instances_atomic(
        &self,
        ids: &[String],
        force: bool,
    ) -> Result<DeleteInstanceResult, ProviderError> {
        delete::delete_all(&self.engine, ids, force).await
    }

    async fn get_instance_tree(&self, instance_id: &str) -> Result<InstanceTree, ProviderError> {
        let all_ids = inspect::tree(&self.engine, instance_id).await;
        let all_ids = all_ids.map_err(|e| e.into_provider_error("get_instance_tree"))?;
        Ok(InstanceTree { root_id: instance_id.to_owned(), all_ids })
    }

    async fn delete_instance(&self, instance_id: &str, force: bool) -> Result<DeleteInstanceResult, ProviderError> {
        delete::delete_tree(&self.engine, instance_id, force).await
    }

    async fn delete_instance_bulk(&self, filter: InstanceFilter) -> Result<DeleteInstanceResult, ProviderError> {
        delete_bulk::delete_bulk(&self.engine, &filter).await
    }

    async fn prune_executions(&self, instance_id: &str, options: PruneOptions) -> Result<PruneResult, ProviderError> {
        prune::prune(&self.engine, instance_id, &options).await
    }

    async fn prune_executions_bulk(
        &self,
        filter: InstanceFilter,
        options: PruneOptions,
    ) -> Result<PruneResult, ProviderError> {
        prune::prune_bulk(&self.engine, &filter, &options).await
    }
}
