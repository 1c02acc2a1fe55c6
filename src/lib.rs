//! A [duroxide](https://docs.rs/duroxide) storage provider on Azure Cosmos DB.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod admin;
mod config;
mod credential;
mod dispatch;
mod engine;
mod enqueue;
mod model;
mod outbox;
mod provider;
mod store;
mod turn;
mod work;

pub use config::{ConfigError, CosmosDBProviderConfig, Throughput};
#[cfg(feature = "key_auth")]
pub use credential::ConnectionString;
pub use credential::{Cloud, Credential, ManagedIdentity, WorkloadIdentity};
pub use dispatch::slots::{InMemoryLeases, LeaseProvider, Slot, SlotLease, SLOTS};
pub use provider::CosmosDBProvider;
pub use store::{connect::ConnectError, OperationKind, OperationStatistics, RequestStatistics, StoreError};
