//! A [duroxide](https://docs.rs/duroxide) storage provider on Azure Cosmos DB.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod config;
mod credential;
mod model;
mod provider;
mod store;

pub use config::{ConfigError, CosmosDBProviderConfig, Throughput};
pub use credential::{Cloud, Credential, ManagedIdentity, WorkloadIdentity};
pub use provider::CosmosDBProvider;
pub use store::{
    connect::ConnectError, OperationKind, OperationStatistics, RequestStatistics, StoreError,
};
