//! A worker: a duroxide runtime on a provider of its own.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use azure_data_cosmos::options::ConnectionPoolOptions;
use azure_data_cosmos::{CosmosClient, CosmosClientBuilder, RoutingStrategy};
use duroxide::providers::{Provider, TagFilter};
use duroxide::runtime::registry::ActivityRegistry;
use duroxide::runtime::{ObservabilityConfig, Runtime, RuntimeOptions, UnregisteredBackoffConfig};
use duroxide::OrchestrationRegistry;
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::LocalAccount;

use crate::bank;
use crate::script;

/// The name of an orchestration that no worker has registered.
pub const UNKNOWN: &str = "Unknown";

/// The settings of a worker.
#[derive(Clone, Debug)]
pub struct WorkerSettings {
    /// The number of turn dispatchers.
    pub turns: usize,
    /// The number of activity dispatchers.
    pub activities: usize,
    /// The tags of activities that it serves. It also serves activities without a tag.
    pub tags: Vec<String>,
    /// The lock timeout of turns.
    pub turn_lock: Duration,
    /// The lock timeout of activities.
    pub activity_lock: Duration,
    /// The lock timeout of sessions.
    pub session_lock: Duration,
    /// The longest time that a fetch waits.
    pub long_poll: Duration,
    /// The number of attempts after which duroxide fails a poison message.
    pub max_attempts: u32,
    /// The largest number of sessions that it owns at once.
    pub sessions: usize,
}

impl WorkerSettings {
    /// The runtime options of a worker of this name.
    pub fn options(&self, name: &str) -> RuntimeOptions {
        let tags: HashSet<String> = self.tags.iter().cloned().collect();
        RuntimeOptions {
            orchestration_concurrency: self.turns,
            worker_concurrency: self.activities,
            worker_tag_filter: if tags.is_empty() { TagFilter::DefaultOnly } else { TagFilter::DefaultAnd(tags) },
            orchestrator_lock_timeout: self.turn_lock,
            orchestrator_lock_renewal_buffer: self.turn_lock / 2,
            worker_lock_timeout: self.activity_lock,
            worker_lock_renewal_buffer: self.activity_lock / 2,
            session_lock_timeout: self.session_lock,
            session_lock_renewal_buffer: self.session_lock / 2,
            session_idle_timeout: self.session_lock * 4,
            session_cleanup_interval: Duration::from_secs(20),
            dispatcher_long_poll_timeout: self.long_poll,
            unregistered_backoff: UnregisteredBackoffConfig {
                base_delay: Duration::from_millis(100),
                max_delay: Duration::from_millis(800),
            },
            max_attempts: self.max_attempts,
            max_sessions_per_runtime: self.sessions,
            worker_node_id: Some(name.to_owned()),
            observability: ObservabilityConfig { log_level: "off".to_owned(), ..ObservabilityConfig::default() },
            ..RuntimeOptions::default()
        }
    }
}

/// The activities that every worker registers.
pub fn activities() -> ActivityRegistry {
    ActivityRegistry::builder()
        .register("Echo", script::echo)
        .register("Flaky", script::flaky)
        .register(script::INFORM, script::inform)
        .register(bank::PAY, bank::pay)
        .build()
}

/// The orchestrations that every worker registers.
pub fn orchestrations() -> OrchestrationRegistry {
    OrchestrationRegistry::builder()
        .register(script::SCRIPT, script::run)
        .register(bank::ACCOUNT, bank::account)
        .build()
}

/// Starts the runtime of a worker on `provider`.
pub async fn start(provider: Arc<dyn Provider>, name: &str, settings: &WorkerSettings) -> Arc<Runtime> {
    Runtime::start_with_options(provider, activities(), orchestrations(), settings.options(name)).await
}

/// Opens a provider on the account with a client of its own, and repeats that until it succeeds. Its reads go to the
/// preferred regions of the configuration.
pub async fn open(account: &LocalAccount, name: &str, config: &CosmosDBProviderConfig) -> CosmosDBProvider {
    loop {
        if let Ok(client) = connect(account, name, config).await {
            if let Ok(provider) = CosmosDBProvider::new_with_client(&client, config.clone()).await {
                return provider;
            }
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn connect(
    account: &LocalAccount,
    name: &str,
    config: &CosmosDBProviderConfig,
) -> Result<CosmosClient, azure_data_cosmos::CosmosError> {
    let pool = ConnectionPoolOptions::builder().with_max_dataplane_request_timeout(config.request_timeout()).build()?;
    let runtime = account.runtime_builder(name).with_connection_pool(pool).build().await?;
    let routing = RoutingStrategy::PreferredRegions(config.preferred_regions().to_vec());
    CosmosClientBuilder::new().with_runtime(runtime).build(account.reference(), routing).await
}
