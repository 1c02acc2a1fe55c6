//! The fixture of a workload: a new local account over HTTP, with a provider, a runtime and a client.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use azure_data_cosmos::clients::ContainerClient;
use azure_data_cosmos::{FeedScope, Query, TransactionalBatch};
use clap::ValueEnum;
use duroxide::providers::Provider;
use duroxide::runtime::{Runtime, RuntimeOptions};
use duroxide::Client;
use duroxide_cosmos::{CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served, EMULATOR_KEY};
use futures::{StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use serde_json::{json, Value};

use crate::measure::Reading;
use crate::orchestrations::{self, RunCounters};

/// The number of orchestration dispatchers, and of activity dispatchers.
pub const DISPATCHERS: usize = 4;

/// The name of the client whose requests are not counted.
const OBSERVER: &str = "observer";

/// The provider of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ProviderKind {
    /// duroxide-cosmos.
    Cosmos,
    /// duroxide-cosmos without inline claims.
    NoInlineClaims,
    /// duroxide-cdb.
    Cdb,
}

impl ProviderKind {
    /// All providers.
    pub const ALL: [Self; 3] = [Self::Cosmos, Self::NoInlineClaims, Self::Cdb];

    /// Returns the name in JSON and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cosmos => "cosmos",
            Self::NoInlineClaims => "no-inline-claims",
            Self::Cdb => "cdb",
        }
    }

    /// Returns the name of the crate, with the variant or the version.
    pub fn package(self) -> &'static str {
        match self {
            Self::Cosmos => "duroxide-cosmos",
            Self::NoInlineClaims => "duroxide-cosmos without inline claims",
            Self::Cdb => "duroxide-cdb 0.1.10",
        }
    }
}

/// The settings of the local account.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Setting {
    /// Milliseconds that are added to every request.
    pub latency_ms: u64,
    /// Physical partitions of the container.
    pub partitions: u32,
}

impl Setting {
    /// Creates an empty account with these settings.
    pub fn account(self) -> LocalAccount {
        LocalAccount::builder()
            .with_partitions(self.partitions)
            .with_latency(Duration::from_millis(self.latency_ms))
            // duroxide-cdb filters by `tag`, which it does not index. The account scans for such filters.
            .with_unindexed_filters(true)
            .build()
    }
}

/// An open provider that can be closed.
pub enum OpenProvider {
    /// duroxide-cosmos.
    Cosmos(Arc<duroxide_cosmos::CosmosDBProvider>),
    /// duroxide-cdb.
    Cdb(Arc<duroxide_cdb::CosmosDBProvider>),
}

impl OpenProvider {
    /// Opens the container of the account at `endpoint`, and creates it if it is missing.
    pub async fn at(kind: ProviderKind, endpoint: &str) -> Result<Self> {
        Self::with(kind, endpoint, CosmosDBProviderConfig::default()).await
    }

    async fn with(kind: ProviderKind, endpoint: &str, config: CosmosDBProviderConfig) -> Result<Self> {
        Ok(match kind {
            ProviderKind::Cosmos | ProviderKind::NoInlineClaims => {
                let config = config
                    .with_inline_claims(kind == ProviderKind::Cosmos)
                    .with_endpoint(endpoint)
                    .with_credential(Credential::account_key(EMULATOR_KEY.to_owned()));
                let provider = duroxide_cosmos::CosmosDBProvider::new_with_config(config).await?;
                Self::Cosmos(Arc::new(provider))
            }
            ProviderKind::Cdb => {
                // The slots are divided among the dispatchers, as the README of duroxide-cdb recommends. It is faster
                // so than with its defaults.
                let config = duroxide_cdb::CosmosDBProviderConfig {
                    endpoint: endpoint.to_owned(),
                    key: EMULATOR_KEY.to_owned(),
                    orch_concurrency: DISPATCHERS as u32,
                    worker_concurrency: DISPATCHERS as u32,
                    ..Default::default()
                };
                let provider = duroxide_cdb::CosmosDBProvider::new_with_config(config).await;
                Self::Cdb(Arc::new(provider.map_err(|error| anyhow::anyhow!("{error}"))?))
            }
        })
    }

    /// Returns the provider as duroxide's trait object.
    pub fn provider(&self) -> Arc<dyn Provider> {
        match self {
            Self::Cosmos(provider) => provider.clone(),
            Self::Cdb(provider) => provider.clone(),
        }
    }

    /// Creates a client of the provider.
    pub fn client(&self) -> Client {
        Client::new(self.provider())
    }

    /// Starts a runtime on the provider, with duroxide's defaults except for the number of dispatchers of each kind.
    pub async fn runtime(&self, counters: &Arc<RunCounters>, dispatchers: usize) -> Arc<Runtime> {
        let options = RuntimeOptions {
            orchestration_concurrency: dispatchers,
            worker_concurrency: dispatchers,
            ..RuntimeOptions::default()
        };
        self.runtime_with(counters, options).await
    }

    async fn runtime_with(&self, counters: &Arc<RunCounters>, options: RuntimeOptions) -> Arc<Runtime> {
        let (activities, orchestrations) = orchestrations::registries(counters);
        Runtime::start_with_options(self.provider(), activities, orchestrations, options).await
    }

    /// Stops the provider's background work in a process that is about to end. The container stays.
    pub async fn leave(self) {
        if let Self::Cosmos(provider) = self {
            provider.shutdown().await;
        }
    }

    /// Stops the provider's background work.
    async fn close(self) {
        match self {
            Self::Cosmos(provider) => provider.shutdown().await,
            // The reconciler of duroxide-cdb ends only when its container is removed. The account is about to end
            // anyway.
            Self::Cdb(provider) => {
                if let Err(error) = provider.cleanup().await {
                    tracing::debug!(%error, "can't remove the container of duroxide-cdb");
                }
            }
        }
    }
}

/// A separate account with a provider on it, and a runtime if one is started.
pub struct Fixture {
    /// The provider.
    pub kind: ProviderKind,
    /// The counters of the orchestrations in this process.
    pub counters: Arc<RunCounters>,
    account: LocalAccount,
    served: Served,
    provider: OpenProvider,
    runtime: Option<Arc<Runtime>>,
}

impl Fixture {
    /// Creates an empty account and opens a provider on it. No runtime is started.
    pub async fn open(kind: ProviderKind, setting: Setting) -> Result<Self> {
        Self::open_with(kind, setting, CosmosDBProviderConfig::default()).await
    }

    /// Like [`open`](Self::open). duroxide-cosmos has this configuration, and duroxide-cdb ignores it.
    pub async fn open_with(kind: ProviderKind, setting: Setting, config: CosmosDBProviderConfig) -> Result<Self> {
        let account = setting.account();
        let served = account.serve(([127, 0, 0, 1], 0).into()).await.context("no loopback port is free")?;
        let provider = OpenProvider::with(kind, &served.endpoint(), config).await?;
        Ok(Self { kind, counters: Arc::default(), account, served, provider, runtime: None })
    }

    /// Starts a runtime in this process.
    pub async fn start(&mut self) {
        self.start_with(DISPATCHERS).await;
    }

    /// Starts a runtime in this process with this many dispatchers of each kind.
    pub async fn start_with(&mut self, dispatchers: usize) {
        self.runtime = Some(self.provider.runtime(&self.counters, dispatchers).await);
    }

    /// Starts a runtime that reads the metrics only once, when it starts.
    pub async fn start_without_metrics(&mut self) {
        let mut options = RuntimeOptions::default();
        options.observability.gauge_poll_interval = Duration::from_secs(24 * 60 * 60);
        self.runtime = Some(self.provider.runtime_with(&self.counters, options).await);
    }

    /// Returns the account's endpoint, for another process.
    pub fn endpoint(&self) -> String {
        self.served.endpoint()
    }

    /// Creates a client of the runtime's provider.
    pub fn client(&self) -> Client {
        self.provider.client()
    }

    /// Returns the runtime's provider.
    pub fn provider(&self) -> Arc<dyn Provider> {
        self.provider.provider()
    }

    /// Opens the container without the provider. The account knows the client by this name.
    async fn container(&self, name: &str) -> Result<ContainerClient> {
        let client = self.account.client_named(name).await;
        Ok(client.database_client("duroxide").container_client("duroxide", None).await?)
    }

    /// Creates a copier of an instance. Copies under other names look like completed runs and are cheaper than runs.
    pub async fn copier(&self, instance: &str) -> Result<InstanceCopier> {
        let container = self.container(OBSERVER).await?;
        let scope = FeedScope::partition(instance.to_owned());
        let everything = container.query_items::<Value>(Query::from("SELECT * FROM c"), scope, None).await?;
        Ok(InstanceCopier { instance: instance.to_owned(), documents: everything.try_collect().await?, container })
    }

    /// Counts the instances in the container without the provider.
    pub async fn instances(&self) -> Result<u64> {
        let container = self.container(OBSERVER).await?;
        let query = Query::from("SELECT c.type FROM c WHERE c.type = 'instance'");
        let found = container.query_items::<Value>(query, FeedScope::full_container(), None).await?;
        Ok(found.try_fold(0, |count, _| async move { Ok(count + 1) }).await?)
    }

    /// Applies retention once and returns the number of deleted instances.
    pub async fn apply_retention(&self) -> Result<u64> {
        match &self.provider {
            OpenProvider::Cosmos(provider) => Ok(provider.apply_retention().await?),
            OpenProvider::Cdb(_) => Ok(0),
        }
    }

    /// Opens another provider on the same container, as another process would.
    pub async fn open_second(&self) -> Result<OpenProvider> {
        OpenProvider::at(self.kind, &self.served.endpoint()).await
    }

    /// Opens a provider that only reads and whose requests are not counted. It works as long as the returned server
    /// exists.
    pub async fn observer(&self) -> Result<(OpenProvider, Served)> {
        let server = self
            .account
            .serve_client(([127, 0, 0, 1], 0).into(), OBSERVER)
            .await
            .context("no loopback port is free")?;
        // The observer must not use cached reads.
        let config = CosmosDBProviderConfig::default().with_read_staleness(Duration::ZERO);
        Ok((OpenProvider::with(self.kind, &server.endpoint(), config).await?, server))
    }

    /// Adds padding documents, which no provider reads, so that the container has as many documents as another one.
    pub async fn pad(&self, documents: u64) -> Result<()> {
        // Both providers use these names of database and container by default.
        let container = self.container("padding").await?;
        let filling = "x".repeat(400);
        for number in 0..documents {
            let id = format!("padding-{number}");
            let document = json!({ "id": id, "instanceId": id, "type": "padding", "filling": filling });
            container.create_item(id.clone(), &id, &document, None).await?;
        }
        Ok(())
    }

    /// Returns the counters so far, without those of the observer.
    pub fn reading(&self) -> Reading {
        Reading::of(self.account.stats() - self.account.stats_of(OBSERVER))
    }

    /// Stops the runtime. The account and the provider stay.
    pub async fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown(Some(500)).await;
        }
    }

    /// Stops the runtime, the provider and the server.
    pub async fn close(mut self) {
        self.stop().await;
        self.provider.close().await;
        self.served.shutdown().await;
    }
}

/// Creates copies of one instance.
pub struct InstanceCopier {
    instance: String,
    documents: Vec<Value>,
    container: ContainerClient,
}

impl InstanceCopier {
    /// Creates the copies with these numbers, several concurrently.
    pub async fn make(&self, numbers: Range<u64>) -> Result<()> {
        let copying = futures::stream::iter(numbers).map(|number| self.make_one(number));
        copying.buffer_unordered(16).try_collect().await
    }

    async fn make_one(&self, number: u64) -> Result<()> {
        let name = format!("{}{number}", self.instance);
        let mut batch = TransactionalBatch::new(name.clone());
        for document in &self.documents {
            let mut copy = document.clone();
            copy["instanceId"] = json!(name);
            let fields = copy.as_object_mut().context("a document is an object")?;
            fields.retain(|field, _| !field.starts_with('_'));
            batch = batch.create_item(copy)?;
        }
        self.container.execute_transactional_batch(batch, None).await?;
        Ok(())
    }
}
