//! A local Azure Cosmos DB account for tests, examples and benchmarks.
//!
//! It is the in-memory emulator of Microsoft's own SDK behind a *wire* of this project. The wire has four tasks:
//! - it refuses requests that the service refuses and the SDK's emulator accepts;
//! - it counts every request;
//! - it injects faults below the SDK's retries: it refuses, delays or holds a request, or loses its answer;
//! - it imitates known deviations of live accounts and of other emulators ([`Misbehaviour`]).
//!
//! Clients reach the account in process, through the SDK's own pipeline, or over HTTP on loopback
//! ([`LocalAccount::serve`]). The account stores everything in memory and nothing on disk.
//!
//! Charges are estimates from published prices, not measured on Azure. Microsoft publishes prices of reads, writes and
//! index terms. It publishes no price of queries: the account charges 2.5 RU for each physical partition that a page
//! visits and 0.15 RU for each KB.
//!
//! ```
//! use duroxide_cosmos_emulator::{LocalAccount, RequestKind, WireAction, WireRule};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let account = LocalAccount::builder().with_partitions(4).build();
//! let client = account.client().await;
//!
//! // The wire throttles the first database creation. The SDK sends it again.
//! let refuse = WireAction::Refuse { status: 429, substatus: Some(3200), retry_after: None };
//! let throttled = account.wire().add(WireRule::new(refuse).on(RequestKind::Database).times(1));
//! client.create_database("db", None).await?;
//!
//! assert_eq!(throttled.hits(), 1);
//! assert_eq!(account.stats().of(RequestKind::Database).failures, 1);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod account;
mod accounting;
mod active_misbehaviours;
mod answer;
mod auth;
mod batch;
mod builder;
mod container_settings;
mod control;
mod document_terms;
mod expiry;
mod indexing;
mod misbehaviour;
mod names;
mod observer;
mod partition_ranges;
mod prices;
mod provisioning;
mod query_check;
mod query_pages;
mod request;
mod request_gate;
mod rules;
mod serve;
mod service;
pub mod sql;
mod stats;
mod stored_terms;
mod transport;
mod validate;
mod wire;

pub use account::LocalAccount;
pub use builder::{LocalAccountBuilder, EMULATOR_KEY};
pub use misbehaviour::{Misbehaviour, MisbehaviourHandle, UnknownMisbehaviour, Until};
pub use observer::WireAnswer;
pub use request::{RequestKind, WireRequest};
pub use request_gate::Gate;
pub use rules::{WireAction, WireRule, WireRuleHandle};
pub use serve::Served;
pub use stats::{KindStats, Stats};
pub use wire::Wire;

pub use azure_data_cosmos::fault_injection;
pub use azure_data_cosmos_driver::in_memory_emulator::{ConsistencyLevel, EmulatorStore, ReplicationConfig, WriteMode};
