//! A [duroxide](https://docs.rs/duroxide) storage provider on Azure Cosmos DB.
//!
//! duroxide runs orchestrations that survive crashes: it replays their history, and the provider keeps it, with the queues
//! of messages and activities. This one keeps all of it in one container of an Azure Cosmos DB account, through
//! Microsoft's SDK, and signs in with Entra ID or an account key. Any number of processes share a container.
//!
//! # From nothing to a running worker
//!
//! ```toml
//! [dependencies]
//! duroxide = "0.1.32"
//! duroxide-cosmos = "0.1"
//! tokio = { version = "1", features = ["macros", "rt-multi-thread"] }
//! ```
//!
//! An orchestration is deterministic code that calls activities, which do the work; a runtime runs both, and a client
//! starts them, from this process or another:
//!
//! ```no_run
//! use std::{error::Error, sync::Arc, time::Duration};
//!
//! use duroxide::{
//!     runtime::{registry::ActivityRegistry, Runtime},
//!     ActivityContext, Client, OrchestrationContext, OrchestrationRegistry,
//! };
//! use duroxide_cosmos::CosmosDBProvider;
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn Error>> {
//!     // COSMOS_ENDPOINT and how to sign in: see below.
//!     let provider = Arc::new(CosmosDBProvider::from_env().await?);
//!
//!     let activities = ActivityRegistry::builder()
//!         .register("Greet", |_: ActivityContext, name: String| async move { Ok(format!("Hello, {name}!")) })
//!         .build();
//!     let orchestrations = OrchestrationRegistry::builder()
//!         .register("Hello", |ctx: OrchestrationContext, name: String| async move {
//!             ctx.schedule_activity("Greet", name).await
//!         })
//!         .build();
//!     let runtime = Runtime::start_with_store(provider.clone(), activities, orchestrations).await;
//!
//!     let client = Client::new(provider.clone());
//!     client.start_orchestration("hello-1", "Hello", "Cosmos").await?;
//!     println!("{:?}", client.wait_for_orchestration("hello-1", Duration::from_secs(30)).await?);
//!
//!     runtime.shutdown(None).await;
//!     provider.shutdown().await;
//!     Ok(())
//! }
//! ```
//!
//! The repository runs the same without Azure, on an account in memory: `cargo run --example hello_world`. Its `worker`
//! example is a process to deploy, with health check, metrics and graceful shutdown, and `examples/azure` has the Bicep
//! template that goes with it.
//!
//! # Signing in
//!
//! [`CosmosDBProvider::from_env`] takes the endpoint and the credential from the environment; the table of variables is at
//! [`CosmosDBProviderConfig::from_env`]. In code, [`CosmosDBProviderConfig`] takes any [`Credential`]:
//!
//! ```no_run
//! use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
//!
//! # async fn open() -> Result<(), duroxide_cosmos::ConnectError> {
//! let config = CosmosDBProviderConfig::default()
//!     .with_endpoint("https://myaccount.documents.azure.com/")
//!     .with_credential(Credential::managed_identity());
//! let provider = CosmosDBProvider::new_with_config(config).await?;
//! # Ok(())
//! # }
//! ```
//!
//! With an account key the provider creates the database and the container where they are missing. **Entra ID can't**,
//! whatever its role: create them first, with [`container_properties`] or the templates in the repository, and give the
//! identity the role *Cosmos DB Built-in Data Contributor*. A container that does not fit is refused with the command that
//! mends it.
//!
//! # What it promises
//!
//! - A turn commits whole or not at all, at any size, and exactly once, also when the answer to the commit is lost.
//! - A worker that lost its lock can't commit, whatever its clock says: every write of a turn is conditional on the instance's
//!   document as that worker last wrote it.
//! - Messages between instances arrive exactly once, also when the process that sent them dies.
//! - Throttling and short outages are ridden out inside; what can't be is an error that says what to do. No message, and
//!   no `Debug`, shows a key, a token or a connection string.
//!
//! The account must have **one write region**: with several, conflicting writes are merged after the fact.
//!
//! # What it costs
//!
//! [`CosmosDBProvider::request_statistics`] counts requests and request units by kind of operation. The same, with retries, races
//! and the age of undelivered messages, goes to whatever recorder of the [`metrics`](https://docs.rs/metrics) facade is
//! installed, as `duroxide_cosmos_*` beside duroxide's own `duroxide_*`.
//!
//! # Features
//!
//! `key_auth`, on by default, allows account keys and connection strings. Without it only Entra ID signs in.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod activity;
mod config;
mod cosmos;
mod credential;
mod discovery;
mod engine;
mod lifecycle;
mod model;
pub mod operate;
mod outbox;
mod provider;
mod queue;
mod telemetry;
mod turn;

pub use config::{ConfigError, CosmosDBProviderConfig, Retention, Throughput};
pub use cosmos::{
    connect::{client, ConnectError},
    OperationKind, OperationStatistics, RequestStatistics, StoreError,
};
#[cfg(feature = "key_auth")]
pub use credential::ConnectionString;
pub use credential::{Cloud, Credential, ManagedIdentity, WorkloadIdentity};
pub use model::{Clock, Randomness, Slot, SlotRange, SLOTS};
pub use model::{EqualShares, LeaseProvider, MemberPosition};
pub use provider::CosmosDBProvider;

/// The properties that the provider's container must have: partition key, index and time to live.
///
/// For those who create the container themselves, as is needed with Entra ID. The provider makes one with the same
/// properties where it may, and checks them in one that is there.
///
/// ```no_run
/// # async fn create(client: azure_data_cosmos::CosmosClient) -> Result<(), azure_data_cosmos::CosmosError> {
/// // With a client that signs in with the account's key, and the SDK's feature `control_plane`.
/// client.create_database("duroxide", None).await?;
/// let database = client.database_client("duroxide");
/// database.create_container(duroxide_cosmos::container_properties("duroxide"), None).await?;
/// # Ok(())
/// # }
/// ```
pub fn container_properties(name: &str) -> azure_data_cosmos::models::ContainerProperties {
    cosmos::bootstrap::properties(name)
}

/// The README's code, which compiles as long as this does.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
