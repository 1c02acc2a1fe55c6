//! The only module that knows the SDK: operations, batches, queries, paging, errors and RU accounting.
//!
//! Every operation takes a [`Deadline`] and returns a typed outcome. The store repeats attempts that were throttled or
//! failed transiently, until the deadline. A write ends in one of three ways:
//!
//! - **Done**: the service confirmed the write.
//! - **Refused** (404, 409, 412, or a batch that was rolled back): the service did not apply the last attempt. An
//!   earlier attempt of the same call may have been applied with its answer lost. So a caller reads the document
//!   before it concludes that it lost a race.
//! - **Unknown** ([`StoreError::OutcomeUnknown`]): the deadline passed while an attempt was in flight.

mod accounting;
mod batch;
mod bootstrap;
mod call;
mod check;
mod connect;
mod deadline;
mod deep_check;
mod denied;
mod error;
mod format;
mod indexing;
mod pages;
mod physical;
mod probe;
pub(crate) mod queries;
mod read;
mod regions;
mod request_options;
mod rows;
#[cfg(test)]
mod tests;
mod write;
mod write_regions;

pub use accounting::{OperationKind, OperationStatistics, RequestStatistics};
pub(crate) use batch::{BatchOutcome, Committed, RolledBack};
pub(crate) use bootstrap::{container_properties, open};
pub(crate) use check::{check_account, CheckDepth, CheckLine};
pub(crate) use connect::connect;
pub use connect::{client, ConnectError};
pub(crate) use deadline::{after, Deadline};
pub(crate) use error::Applied;
pub use error::StoreError;
pub(crate) use pages::{Pages, QueryTimeout};
pub(crate) use queries::Statement;
pub(crate) use read::{Freshness, Versioned};
pub(crate) use request_options::in_background;
pub(crate) use rows::{or_default, Rows, Unreadable};
pub(crate) use write::{Refusal, WriteOutcome};

use crate::{config::CosmosDBProviderConfig, credential::TokenCache, model::Randomness};
use accounting::Accounting;
use azure_data_cosmos::ContainerClient;
use regions::Regions;
use std::{sync::Arc, time::Duration};

/// The least time that one attempt of a query gets. The service works on a page for up to 5 s. A shorter limit would
/// cut off the same page again and again.
pub(crate) const QUERY_TIME: Duration = Duration::from_secs(7);

/// The container, as the rest of the provider sees it.
#[derive(Clone)]
pub(crate) struct Store {
    inner: Arc<StoreInner>,
}

struct StoreInner {
    container: ContainerClient,
    accounting: Accounting,
    location: ContainerLocation,
    /// The source of the jitter of pauses.
    randomness: Randomness,
    /// The largest number of physical partitions that one query asks.
    max_fan_out: u32,
    /// The longest time of one attempt of any operation except a query.
    attempt_time: Duration,
    regions: Regions,
    /// The token cache of the client. A client that the caller made has none.
    tokens: Option<TokenCache>,
    unreadable_log: rows::UnreadableLog,
}

/// The account, database and container, and the kind of credential. Error messages name them.
#[derive(Clone, Debug)]
struct ContainerLocation {
    account: String,
    database: String,
    container: String,
    credential: String,
}

impl Store {
    fn new(
        container: ContainerClient,
        location: ContainerLocation,
        config: &CosmosDBProviderConfig,
        tokens: Option<TokenCache>,
    ) -> Self {
        let inner = StoreInner {
            container,
            accounting: Accounting::default(),
            location,
            randomness: config.randomness().clone(),
            max_fan_out: 10_000,
            attempt_time: config.request_timeout(),
            regions: Regions::default(),
            tokens,
            unreadable_log: rows::UnreadableLog::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Requests and charge by kind of operation.
    pub(crate) fn statistics(&self) -> RequestStatistics {
        self.inner.accounting.statistics()
    }
}

impl ContainerLocation {
    /// The error for a container that does not exist, with the command that creates it.
    fn missing(&self) -> StoreError {
        StoreError::Missing {
            what: format!("the container {} in database {}", self.container, self.database),
            command: bootstrap::create_command(self),
        }
    }
}
