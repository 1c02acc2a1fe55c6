//! A local Azure Cosmos DB account for tests, examples and benchmarks.
//!
//! It is the in-memory emulator of Microsoft's own SDK behind a *wire* of ours. The wire refuses what the service
//! refuses and the emulator lets through, counts every request, and can be told to misbehave: refuse, delay, hold a
//! request or lose its answer, below the SDK's retries. It can also behave as some live accounts and other emulators do
//! ([`Misbehaviour`]). Clients reach the account in process, through the SDK's own pipeline, or over HTTP on loopback
//! ([`LocalAccount::serve`]). Nothing is kept on disk.
//!
//! Charges follow the prices that Microsoft publishes for reads, writes and index terms. Queries have no published
//! prices: theirs are an estimate, 2.5 RU for each physical partition that a page visits and 0.15 RU for each KB.
//!
//! ```
//! use duroxide_cosmos_emulator::{LocalAccount, RequestKind, WireAction, WireRule};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let account = LocalAccount::builder().with_partitions(4).build();
//! let client = account.client().await;
//!
//! // The first database creation is throttled; the SDK sends it again.
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
mod answer;
mod auth;
mod batches;
mod builder;
mod catalog;
mod conduct;
mod control;
mod expiry;
mod gate;
mod indexing;
mod ledger;
mod misbehaviour;
mod observe;
mod pages;
mod prices;
mod provision;
mod queries;
mod ranges;
mod records;
mod request;
mod rules;
mod serve;
mod service;
pub mod sql;
mod stats;
mod terms;
mod transport;
mod validate;
mod wire;

pub use account::LocalAccount;
pub use builder::{LocalAccountBuilder, EMULATOR_KEY};
pub use gate::Gate;
pub use misbehaviour::{Misbehaviour, MisbehaviourHandle, UnknownMisbehaviour, Until};
pub use observe::WireAnswer;
pub use request::{RequestKind, WireRequest};
pub use rules::{WireAction, WireRule, WireRuleHandle};
pub use serve::Served;
pub use stats::{KindStats, Stats};
pub use wire::Wire;

pub use azure_data_cosmos::fault_injection;
pub use azure_data_cosmos_driver::in_memory_emulator::{ConsistencyLevel, EmulatorStore, ReplicationConfig, WriteMode};
