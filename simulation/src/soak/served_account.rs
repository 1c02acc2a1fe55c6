//! A local account that is served over HTTP.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served, WireAnswer, WireRequest, EMULATOR_KEY};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use crate::soak::control::Control;
use crate::transcript::Transcript;
use crate::{fault_schedule, run};

/// The number of physical partitions. The emulator copies a whole partition for every batch, so many small ones are
/// faster.
const PARTITIONS: u32 = 16;
/// The time that every request takes.
const LATENCY: Duration = Duration::from_millis(2);
/// The name of the database and of the container: the default of the provider.
const NAME: &str = "duroxide";

/// An account that is served over HTTP on threads of its own. So it slows its clients only by the time of its answers.
pub struct ServedAccount {
    account: LocalAccount,
    served: Served,
    runtime: Runtime,
}

impl ServedAccount {
    /// Serves an empty account, and writes its exchanges to the transcript.
    pub async fn open(transcript: &Arc<Transcript>) -> Result<Self> {
        let account = LocalAccount::builder().with_partitions(PARTITIONS).with_latency(LATENCY).build();
        let transcript = transcript.clone();
        account.wire().observe(move |request, answer| observe(&transcript, request, answer));
        let runtime = Builder::new_multi_thread().worker_threads(2).thread_name("account").enable_all().build()?;
        let serving = account.clone();
        let served = runtime.spawn(async move { serving.serve(([127, 0, 0, 1], 0).into()).await });
        let served = served.await?.context("no port is free")?;
        Ok(Self { account, served, runtime })
    }

    /// The endpoint of the account.
    pub fn endpoint(&self) -> String {
        self.served.endpoint()
    }

    /// The control endpoint of the account.
    pub fn control(&self) -> Control {
        Control::at(self.served.addr())
    }

    /// Opens a provider on the account over HTTP.
    pub async fn provider(&self, name: &str) -> Result<Arc<CosmosDBProvider>> {
        let provider = CosmosDBProvider::new_with_config(config(&self.endpoint(), name)).await;
        Ok(Arc::new(provider.context("the account can't be opened")?))
    }

    /// All stored documents.
    pub fn documents(&self) -> Vec<Value> {
        self.account.documents(NAME, NAME)
    }

    /// The ids of the physical partitions.
    pub fn partitions(&self) -> Vec<u32> {
        self.account.partitions(NAME, NAME)
    }

    /// Splits a physical partition.
    pub async fn split(&self, partition: u32) -> Result<()> {
        self.control().split(NAME, NAME, partition).await
    }

    /// The number of requests that the account has received.
    pub fn requests(&self) -> u64 {
        self.account.stats().total().requests
    }

    /// Stops serving.
    pub async fn close(self) {
        self.served.shutdown().await;
        self.runtime.shutdown_background();
    }
}

/// The configuration of a provider for a process of this name.
pub fn config(endpoint: &str, name: &str) -> CosmosDBProviderConfig {
    CosmosDBProviderConfig::default()
        .with_endpoint(endpoint)
        .with_credential(Credential::account_key(EMULATOR_KEY.to_owned()))
        .with_request_timeout(Duration::from_secs(2))
        .with_user_agent_suffix(name)
}

/// Writes exchanges of one logical partition to the transcript. Queries of the whole container would hide the rest.
fn observe(transcript: &Transcript, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
    let Some(partition) = fault_schedule::partition(request) else { return };
    let detail = run::describe(request);
    let event = format!("#{} {} {detail}-> {}", request.sequence, request.kind, answer.status);
    transcript.record(request.client.unwrap_or("?"), Some(&partition), event);
}
