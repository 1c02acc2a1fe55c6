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

/// The name of an orchestration that no worker knows.
pub const UNKNOWN: &str = "Unknown";

/// How a worker is set up.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Dispatchers of turns.
    pub turns: usize,
    /// Dispatchers of activities.
    pub activities: usize,
    /// The activities' tags that it serves, beside those without.
    pub tags: Vec<String>,
    /// How long turns are locked.
    pub turn_lock: Duration,
    /// How long activities are locked.
    pub activity_lock: Duration,
    /// How long sessions are locked.
    pub session_lock: Duration,
    /// How long a fetch waits.
    pub long_poll: Duration,
    /// After how many attempts something is given up.
    pub max_attempts: u32,
    /// How many sessions it owns at once, at most.
    pub sessions: usize,
}

impl Setup {
    /// The runtime's options, for a worker of this name.
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

/// The activities that every worker knows.
pub fn activities() -> ActivityRegistry {
    ActivityRegistry::builder()
        .register("Echo", script::echo)
        .register("Flaky", script::flaky)
        .register(script::INFORM, script::inform)
        .register(bank::PAY, bank::pay_in)
        .build()
}

/// The orchestrations that every worker knows.
pub fn orchestrations() -> OrchestrationRegistry {
    OrchestrationRegistry::builder()
        .register(script::SCRIPT, script::run)
        .register(bank::ACCOUNT, bank::account)
        .build()
}

/// Starts the runtime of a worker on `provider`.
pub async fn start(provider: Arc<dyn Provider>, name: &str, setup: &Setup) -> Arc<Runtime> {
    Runtime::start_with_options(provider, activities(), orchestrations(), setup.options(name)).await
}

/// A provider on the account, as one that makes its own client would be: tried until it works. Its reads go to the regions that the
/// configuration prefers.
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
