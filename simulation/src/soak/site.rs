//! The served account, and how to reach it.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served, WireAnswer, WireRequest, EMULATOR_KEY};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use crate::soak::control::Control;
use crate::story::Story;
use crate::{weather, world};

/// The emulator copies a whole physical partition for every batch: many small ones are faster.
const PARTITIONS: u32 = 16;
/// What requests take, as they would anywhere.
const LATENCY: Duration = Duration::from_millis(2);
/// The database and the container have the provider's default names.
const NAME: &str = "duroxide";

/// An account that is served over HTTP on threads of its own: what it does holds up none of its clients but by its answers.
pub struct Site {
    account: LocalAccount,
    served: Served,
    runtime: Runtime,
}

impl Site {
    /// Serves an empty account, whose exchanges become part of the story.
    pub async fn open(story: &Arc<Story>) -> Result<Self> {
        let account = LocalAccount::builder().with_partitions(PARTITIONS).with_latency(LATENCY).build();
        let told = story.clone();
        account.wire().observe(move |request, answer| observe(&told, request, answer));
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("account").enable_all().build()?;
        let serving = account.clone();
        let served = runtime.spawn(async move { serving.serve(([127, 0, 0, 1], 0).into()).await });
        let served = served.await?.context("no port is free")?;
        Ok(Self { account, served, runtime })
    }

    /// The account's address, for a process.
    pub fn endpoint(&self) -> String {
        self.served.endpoint()
    }

    /// The account's control endpoint.
    pub fn control(&self) -> Control {
        Control::at(self.served.addr())
    }

    /// A provider on the account, over HTTP like everybody's.
    pub async fn provider(&self, name: &str) -> Result<Arc<CosmosDBProvider>> {
        let provider = CosmosDBProvider::new_with_config(config(&self.endpoint(), name)).await;
        Ok(Arc::new(provider.context("the account can't be opened")?))
    }

    /// Everything that is stored.
    pub fn documents(&self) -> Vec<Value> {
        self.account.documents(NAME, NAME)
    }

    /// The physical partitions.
    pub fn partitions(&self) -> Vec<u32> {
        self.account.partitions(NAME, NAME)
    }

    /// Splits one of them.
    pub async fn split(&self, partition: u32) -> Result<()> {
        self.control().split(NAME, NAME, partition).await
    }

    /// How many requests came.
    pub fn requests(&self) -> u64 {
        self.account.stats().total().requests
    }

    /// Serves no longer.
    pub async fn close(self) {
        self.served.shutdown().await;
        self.runtime.shutdown_background();
    }
}

/// How a process of this name opens the account.
pub fn config(endpoint: &str, name: &str) -> CosmosDBProviderConfig {
    CosmosDBProviderConfig::default()
        .with_endpoint(endpoint)
        .with_credential(Credential::account_key(EMULATOR_KEY.to_owned()))
        .with_request_timeout(Duration::from_secs(2))
        .with_user_agent_suffix(name)
}

/// Tells of exchanges about one instance; what polls the whole container would drown the rest.
fn observe(story: &Story, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
    let Some(partition) = weather::partition(request) else { return };
    let detail = world::describe(request);
    let told = format!("#{} {} {detail}-> {}", request.sequence, request.kind, answer.status);
    story.tell(request.client.unwrap_or("?"), Some(&partition), told);
}
