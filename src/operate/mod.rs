//! Calls for operators and tools: lists of instances, queues, workers, undelivered messages, the doctor, checks of an
//! account.
//!
//! duroxide's `Client` reports on one instance at a time, or on all of them at once. The calls here are for containers
//! with many instances. Each call costs one query or a few reads, however many documents the container holds. A call
//! changes nothing unless its documentation says so.
//!
//! ```no_run
//! # async fn list(provider: duroxide_cosmos::CosmosDBProvider) -> Result<(), duroxide_cosmos::StoreError> {
//! use duroxide_cosmos::operate::InstanceQuery;
//!
//! let mut failed = InstanceQuery::default();
//! failed.status = Some("Failed".to_owned());
//! let page = provider.instances(&failed, None, 20).await?;
//! for instance in &page.instances {
//!     println!("{} {}", instance.id, instance.name);
//! }
//! // The next page, if there is one.
//! let next = provider.instances(&failed, page.cursor.as_deref(), 20).await?;
//! # let _ = next;
//! # Ok(())
//! # }
//! ```

mod check;
mod doctor;
pub(crate) mod inspect;
pub(crate) mod intents;
pub(crate) mod list;
pub(crate) mod metrics;
pub(crate) mod queues;
pub(crate) mod starts;
pub(crate) mod workers;

use crate::{config::CosmosDBProviderConfig, cosmos::CheckDepth};

pub use check::{Check, CheckStatus};
pub use doctor::{Diagnosis, Doctor, Finding, Reason, Remedy, Repair, Scan};
pub use intents::{Intent, IntentState};
pub use list::{InstancePage, InstanceQuery, InstanceSummary, UnreadableInstance};
pub use queues::{ActivityQueue, QueueReport, TurnQueue};
pub use starts::QueuedStart;
pub use workers::{ActivityCapabilities, Member, TurnCapabilities};

/// Checks whether an account can be used with this configuration. It returns one line for each requirement, up to the
/// first failure that prevents further checks. It creates and changes nothing, whatever `create_if_missing` says.
pub async fn check(config: &CosmosDBProviderConfig) -> Vec<Check> {
    check::run(config, CheckDepth::Opening).await
}

/// Tests every assumption of the provider about Cosmos DB, one line for each. It runs [`check`] and then every query,
/// every kind of write and batch, reads of each consistency, expiry, hash ranges and prices.
///
/// It takes some seconds and about 2,100 RU (estimate from published prices, not measured on Azure). **Changes** the
/// container: it writes to a partition of its own, and deletes those documents.
pub async fn check_deep(config: &CosmosDBProviderConfig) -> Vec<Check> {
    check::run(config, CheckDepth::Deep).await
}
