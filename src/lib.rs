//! A [duroxide](https://docs.rs/duroxide) storage provider on Azure Cosmos DB.
//!
//! duroxide runs orchestrations that survive crashes. It replays their history, and the provider stores that history
//! and the queues of messages and activities. This provider stores all of it in one container of an Azure Cosmos DB
//! account, through Microsoft's SDK. It signs in with Entra ID or an account key. Any number of processes share a
//! container.
//!
//! **Status:** unreleased. Tested on a local account. Nothing has run on Azure yet.
//!
//! # Getting started
//!
//! ```toml
//! [dependencies]
//! duroxide = "0.1.32"
//! duroxide-cosmos = "0.1"
//! tokio = { version = "1", features = ["macros", "rt-multi-thread"] }
//! ```
//!
//! An orchestration is deterministic code that calls activities. Activities do the work. A runtime runs both. A client
//! starts orchestrations, in the same process or in another:
//!
#![cfg_attr(feature = "key_auth", doc = "```")]
#![cfg_attr(not(feature = "key_auth"), doc = "```no_run")]
//! use std::{error::Error, sync::Arc, time::Duration};
//!
//! use duroxide::{
//!     runtime::{registry::ActivityRegistry, Runtime},
//!     ActivityContext, Client, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus,
//! };
//! use duroxide_cosmos::CosmosDBProvider;
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn Error>> {
//! #     use duroxide_cosmos_emulator::{LocalAccount, EMULATOR_KEY};
//! #     let account = LocalAccount::new();
//! #     let served = account.serve("127.0.0.1:0".parse()?).await?;
//! #     std::env::set_var("COSMOS_ENDPOINT", served.endpoint());
//! #     std::env::set_var("COSMOS_KEY", EMULATOR_KEY);
//!     // COSMOS_ENDPOINT names the account. "Signing in" below describes the other variables.
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
//!     let status = client.wait_for_orchestration("hello-1", Duration::from_secs(30)).await?;
//!     assert!(matches!(status, OrchestrationStatus::Completed { output, .. } if output == "Hello, Cosmos!"));
//!
//!     runtime.shutdown(None).await;
//!     provider.shutdown().await;
//!     Ok(())
//! }
//! ```
//!
//! The repository runs the same example without Azure, on an account in memory: `cargo run --example hello_world`. The
//! example `worker` is a process to deploy, with a health check, metrics and graceful shutdown. The folder
//! `examples/azure` has a Bicep template for it.
//!
//! # Signing in
//!
//! [`CosmosDBProvider::from_env`] takes the endpoint and the credential from environment variables.
//! [`CosmosDBProviderConfig::from_env`] lists them. In code, [`CosmosDBProviderConfig`] accepts any [`Credential`]:
//!
//! ```no_run
//! use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
//!
//! # async fn open() -> Result<(), duroxide_cosmos::ConnectError> {
//! let config = CosmosDBProviderConfig::default()
//!     .with_endpoint("https://my-account.documents.azure.com/")
//!     .with_credential(Credential::managed_identity());
//! let provider = CosmosDBProvider::new_with_config(config).await?;
//! # Ok(())
//! # }
//! ```
//!
//! With an account key the provider creates the database and the container if they do not exist. **An Entra ID identity
//! cannot create them**, whatever its role. Create them first, with [`container_properties`] or the templates in the
//! repository, and give the identity the role *Cosmos DB Built-in Data Contributor*. If the container does not fit, the
//! provider returns an error with the command that repairs it.
//!
//! # Guarantees
//!
//! - A turn commits as a whole or not at all, at any size, exactly once, even if the answer to the commit is lost.
//! - A worker that lost its lock cannot commit, whatever its clock says. Every write of a turn is conditional on the
//!   instance document as that worker last wrote it.
//! - A message between instances arrives exactly once, even if the sending process dies. Activities run at least once.
//! - The provider retries throttled and failed requests while the caller's lock lasts. Every other error names the
//!   remedy.
//! - No error, log line or `Debug` output contains a key, a token or a connection string.
//!
//! The account must have **one write region**. With several, Cosmos DB merges conflicting writes after they were
//! accepted.
//!
//! # Cost
//!
//! [`CosmosDBProvider::request_statistics`] counts requests and request units by kind of operation. The provider also
//! reports them to the recorder of the [`metrics`](https://docs.rs/metrics) facade, with retries, claim races and the
//! age of undelivered messages. Their names begin with `duroxide_cosmos_`, beside duroxide's own `duroxide_`.
//!
//! # Features
//!
//! `key_auth`, on by default, allows account keys and connection strings. Without it only Entra ID can sign in.
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![warn(unreachable_pub)]
// Time and randomness come from the configuration: see `clippy.toml`.
#![warn(clippy::disallowed_methods)]

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
pub use cosmos::{client, ConnectError, OperationKind, OperationStatistics, RequestStatistics, StoreError};
#[cfg(feature = "key_auth")]
pub use credential::ConnectionString;
pub use credential::{Cloud, Credential, ManagedIdentity, WorkloadIdentity};
pub use model::{Clock, Randomness, Slot, SlotRange, SLOTS};
pub use model::{EqualShares, LeaseProvider, MemberPosition};
pub use provider::CosmosDBProvider;

/// Returns the properties that the provider's container must have: partition key, indexing policy and time to live.
///
/// Use it to create the container yourself, which is necessary with Entra ID. The provider creates a container with the
/// same properties if it is allowed to, and checks them in an existing one.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), azure_data_cosmos::CosmosError> {
/// # let client = duroxide_cosmos_emulator::LocalAccount::new().client().await;
/// // This needs a client that signs in with the account key, and the SDK's feature `control_plane`.
/// client.create_database("duroxide", None).await?;
/// let database = client.database_client("duroxide");
/// database.create_container(duroxide_cosmos::container_properties("duroxide"), None).await?;
/// # Ok(())
/// # }
/// ```
pub fn container_properties(name: &str) -> azure_data_cosmos::models::ContainerProperties {
    cosmos::container_properties(name)
}

/// Compiles the code blocks of the README as doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
