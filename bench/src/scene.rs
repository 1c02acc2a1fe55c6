//! A fresh account over HTTP, and a provider, runtime and client on it.

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
use crate::orchestrations::{self, Tally};

/// Orchestration and activity dispatchers, each.
pub const DISPATCHERS: usize = 4;

/// Whom the account knows as one whose requests are not counted.
const WATCHER: &str = "watcher";

/// Whose provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// duroxide-cosmos.
    Ours,
    /// duroxide-cosmos with nothing handed over.
    Plain,
    /// duroxide-cdb.
    Peer,
}

impl Which {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Ours, Self::Plain, Self::Peer];

    /// The name in JSON and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Plain => "plain",
            Self::Peer => "peer",
        }
    }

    /// The crate's name.
    pub fn package(self) -> &'static str {
        match self {
            Self::Ours => "duroxide-cosmos",
            Self::Plain => "duroxide-cosmos with nothing handed over",
            Self::Peer => "duroxide-cdb 0.1.10",
        }
    }
}

/// What the account is like.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Setting {
    /// What every request takes on top.
    pub latency_ms: u64,
    /// Physical partitions of the container.
    pub partitions: u32,
}

impl Setting {
    /// An empty account that is like this.
    pub fn account(self) -> LocalAccount {
        LocalAccount::builder()
            .with_partitions(self.partitions)
            .with_latency(Duration::from_millis(self.latency_ms))
            // duroxide-cdb filters by `tag`, which it does not index: here that is served by a scan.
            .with_unindexed_filters(true)
            .build()
    }
}

/// A provider that is open, and that can be closed.
pub enum Opened {
    /// This project's.
    Ours(Arc<duroxide_cosmos::CosmosDBProvider>),
    /// The peer's.
    Peer(Arc<duroxide_cdb::CosmosDBProvider>),
}

impl Opened {
    /// Opens the container of the account at `endpoint`, and makes it if it is missing.
    pub async fn at(which: Which, endpoint: &str) -> Result<Self> {
        Self::with(which, endpoint, CosmosDBProviderConfig::default()).await
    }

    async fn with(which: Which, endpoint: &str, ours: CosmosDBProviderConfig) -> Result<Self> {
        Ok(match which {
            Which::Ours | Which::Plain => {
                let config = ours
                    .with_inline_claims(which == Which::Ours)
                    .with_endpoint(endpoint)
                    .with_credential(Credential::account_key(EMULATOR_KEY.to_owned()));
                let provider = duroxide_cosmos::CosmosDBProvider::new_with_config(config).await?;
                Self::Ours(Arc::new(provider))
            }
            Which::Peer => {
                // Slots shared out among the dispatchers, as its README advises: better for it than its default.
                let config = duroxide_cdb::CosmosDBProviderConfig {
                    endpoint: endpoint.to_owned(),
                    key: EMULATOR_KEY.to_owned(),
                    orch_concurrency: DISPATCHERS as u32,
                    worker_concurrency: DISPATCHERS as u32,
                    ..Default::default()
                };
                let provider = duroxide_cdb::CosmosDBProvider::new_with_config(config).await;
                Self::Peer(Arc::new(provider.map_err(|error| anyhow::anyhow!("{error}"))?))
            }
        })
    }

    /// The provider as duroxide sees it.
    pub fn store(&self) -> Arc<dyn Provider> {
        match self {
            Self::Ours(provider) => provider.clone(),
            Self::Peer(provider) => provider.clone(),
        }
    }

    /// A client of it.
    pub fn client(&self) -> Client {
        Client::new(self.store())
    }

    /// A runtime on the provider: duroxide's defaults, but for the number of dispatchers of each kind.
    pub async fn runtime(&self, tally: &Arc<Tally>, dispatchers: usize) -> Arc<Runtime> {
        let options = RuntimeOptions {
            orchestration_concurrency: dispatchers,
            worker_concurrency: dispatchers,
            ..RuntimeOptions::default()
        };
        self.runtime_with(tally, options).await
    }

    async fn runtime_with(&self, tally: &Arc<Tally>, options: RuntimeOptions) -> Arc<Runtime> {
        let (activities, orchestrations) = orchestrations::registries(tally);
        Runtime::start_with_options(self.store(), activities, orchestrations, options).await
    }

    /// Ends the provider's background work in a process that is about to end; the container stays.
    pub async fn leave(self) {
        if let Self::Ours(provider) = self {
            provider.shutdown().await;
        }
    }

    /// Ends the provider's background work.
    async fn close(self) {
        match self {
            Self::Ours(provider) => provider.shutdown().await,
            // The peer's reconciler ends only with its container; the account is about to go anyway.
            Self::Peer(provider) => {
                if let Err(error) = provider.cleanup().await {
                    tracing::debug!(%error, "the peer's container stays");
                }
            }
        }
    }
}

/// An account of its own with a provider on it, and what runs there.
pub struct Scene {
    /// Whose provider it is.
    pub which: Which,
    /// What the orchestrations of this process report.
    pub tally: Arc<Tally>,
    account: LocalAccount,
    served: Served,
    provider: Opened,
    runtime: Option<Arc<Runtime>>,
}

impl Scene {
    /// An empty account, and a provider on it. Nothing runs yet.
    pub async fn open(which: Which, setting: Setting) -> Result<Self> {
        Self::open_with(which, setting, CosmosDBProviderConfig::default()).await
    }

    /// The same, where the provider is ours, with this configuration.
    pub async fn open_with(which: Which, setting: Setting, ours: CosmosDBProviderConfig) -> Result<Self> {
        let account = setting.account();
        let served = account.serve(([127, 0, 0, 1], 0).into()).await.context("no port is free")?;
        let provider = Opened::with(which, &served.endpoint(), ours).await?;
        Ok(Self { which, tally: Arc::default(), account, served, provider, runtime: None })
    }

    /// Starts a runtime in this process.
    pub async fn start(&mut self) {
        self.start_with(DISPATCHERS).await;
    }

    /// The same with so many dispatchers of each kind.
    pub async fn start_with(&mut self, dispatchers: usize) {
        self.runtime = Some(self.provider.runtime(&self.tally, dispatchers).await);
    }

    /// The same with one that asks for the metrics only when it starts.
    pub async fn start_without_metrics(&mut self) {
        let mut options = RuntimeOptions::default();
        options.observability.gauge_poll_interval = Duration::from_secs(24 * 60 * 60);
        self.runtime = Some(self.provider.runtime_with(&self.tally, options).await);
    }

    /// The account's address, for another process.
    pub fn endpoint(&self) -> String {
        self.served.endpoint()
    }

    /// A client of the runtime's own provider.
    pub fn client(&self) -> Client {
        self.provider.client()
    }

    /// The runtime's own provider.
    pub fn store(&self) -> Arc<dyn Provider> {
        self.provider.store()
    }

    /// The container, past the provider, for one whom the account knows by this name.
    async fn container(&self, name: &str) -> Result<ContainerClient> {
        let client = self.account.client_named(name).await;
        Ok(client.database_client("duroxide").container_client("duroxide", None).await?)
    }

    /// What makes copies of an instance under other names, as if each had been run: cheaper than running them.
    pub async fn copier(&self, instance: &str) -> Result<Copier> {
        let container = self.container(WATCHER).await?;
        let scope = FeedScope::partition(instance.to_owned());
        let everything = container.query_items::<Value>(Query::from("SELECT * FROM c"), scope, None).await?;
        Ok(Copier { instance: instance.to_owned(), documents: everything.try_collect().await?, container })
    }

    /// How many instances the container holds, by a look past the provider.
    pub async fn instances(&self) -> Result<u64> {
        let container = self.container(WATCHER).await?;
        let question = Query::from("SELECT c.type FROM c WHERE c.type = 'instance'");
        let found = container.query_items::<Value>(question, FeedScope::full_container(), None).await?;
        Ok(found.try_fold(0, |count, _| async move { Ok(count + 1) }).await?)
    }

    /// One round of retention; how many instances went.
    pub async fn apply_retention(&self) -> Result<u64> {
        match &self.provider {
            Opened::Ours(provider) => Ok(provider.apply_retention().await?),
            Opened::Peer(_) => Ok(0),
        }
    }

    /// Another provider on the same container, as in another process.
    pub async fn second(&self) -> Result<Opened> {
        Opened::at(self.which, &self.served.endpoint()).await
    }

    /// Somebody who only looks: what it sends is not counted. It is there for as long as the door is kept.
    pub async fn watcher(&self) -> Result<(Opened, Served)> {
        let door = self.account.serve_client(([127, 0, 0, 1], 0).into(), WATCHER).await.context("no port is free")?;
        // It believes nothing that it has seen before.
        let config = CosmosDBProviderConfig::default().with_read_staleness(Duration::ZERO);
        Ok((Opened::with(self.which, &door.endpoint(), config).await?, door))
    }

    /// Puts documents into the container that are nobody's work, so that it holds as much as another one.
    pub async fn pad(&self, documents: u64) -> Result<()> {
        // The names are both providers' defaults.
        let container = self.container("padding").await?;
        let filling = "x".repeat(400);
        for number in 0..documents {
            let id = format!("padding-{number}");
            let document = json!({ "id": id, "instanceId": id, "type": "padding", "filling": filling });
            container.create_item(id.clone(), &id, &document, None).await?;
        }
        Ok(())
    }

    /// What went over the wire so far, but for what a watcher has sent.
    pub fn reading(&self) -> Reading {
        Reading::of(self.account.stats() - self.account.stats_of(WATCHER))
    }

    /// Stops the runtime; the account and the provider stay.
    pub async fn stop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown(Some(500)).await;
        }
    }

    /// Stops everything.
    pub async fn close(mut self) {
        self.stop().await;
        self.provider.close().await;
        self.served.shutdown().await;
    }
}

/// Makes copies of one instance.
pub struct Copier {
    instance: String,
    documents: Vec<Value>,
    container: ContainerClient,
}

impl Copier {
    /// Makes those with these numbers, some at a time.
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
