//! What those who run it ask for: pages of instances, what waits in the queues and for how long, who is there, whether an account
//! fits.
//!
//! duroxide's `Client` answers for one instance at a time, or for all of them at once. The calls here are for people and tools that look at a
//! container with many: each is one query, or a few reads, whatever the container holds, and changes nothing unless it says so.
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
mod intents;
mod list;
pub(crate) mod metrics;
mod queues;
mod starts;
mod workers;

use crate::{cosmos::check::Depth, CosmosDBProvider, CosmosDBProviderConfig, StoreError};

pub use check::{Check, CheckStatus};
pub use doctor::{Diagnosis, Doctor, Finding, Reason, Remedy, Repair, Scan};
pub use intents::{Intent, IntentState};
pub use list::{InstancePage, InstanceQuery, InstanceSummary, UnreadableInstance};
pub use queues::{ActivityQueue, QueueReport, TurnQueue};
pub use starts::QueuedStart;
pub use workers::{ActivityCapabilities, Member, TurnCapabilities};

impl CosmosDBProvider {
    /// A page of instances, newest first: at most `limit` of those that `query` asks for, from where the page before has ended.
    ///
    /// One query. Status, name, parent and age are found by the index. Text is not: a page looks at a thousand instances for it, and its cursor
    /// goes on from there, so that a page may be empty and still have one.
    pub async fn instances(
        &self,
        query: &InstanceQuery,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<InstancePage, StoreError> {
        list::page(self.engine(), query, cursor, limit).await
    }

    /// What a list says of one instance; none where there is no such instance. One point read.
    pub async fn instance(&self, id: &str) -> Result<Option<InstanceSummary>, StoreError> {
        list::one(self.engine(), id).await
    }

    /// What waits in the queues, since when, by tag and session. Exact up to a thousand messages and as many activities; past that, the oldest.
    pub async fn queues(&self) -> Result<QueueReport, StoreError> {
        queues::report(self.engine()).await
    }

    /// The processes that look for work, as the container knows them.
    pub async fn members(&self) -> Result<Vec<Member>, StoreError> {
        workers::members(self.engine(), self.engine().now()).await
    }

    /// Messages that turns owe to other instances and that nobody has delivered yet although it is time, those that could not be delivered so
    /// far, and those that never can. A thousand at most.
    pub async fn late_intents(&self) -> Result<Vec<Intent>, StoreError> {
        intents::late(self.engine()).await
    }

    /// Tries a message again that could not be delivered, or whose time has not come: whoever looks next delivers it. `false` where
    /// there is no such intent any more. **Changes** the container.
    pub async fn retry_intent(&self, instance: &str, intent: &str) -> Result<bool, StoreError> {
        intents::retry(self.engine(), instance, intent).await
    }

    /// Removes a message that was not delivered: its target hears of it only if a delivery is under way at this moment.
    /// `false` where there is no such intent any more. **Changes** the container.
    pub async fn drop_intent(&self, instance: &str, intent: &str) -> Result<bool, StoreError> {
        intents::discard(self.engine(), instance, intent).await
    }

    /// The start that waits for a worker to begin this instance; none where the instance exists, or nobody has started
    /// it.
    pub async fn queued_start(&self, instance: &str) -> Result<Option<QueuedStart>, StoreError> {
        starts::queued(self.engine(), instance).await
    }

    /// The instance that started this one and waits for its end. None for a root, and for an orphan: an instance whose
    /// parent was deleted, although another instance may have the parent's id now.
    pub async fn parent_of(&self, instance: &str) -> Result<Option<String>, StoreError> {
        crate::lifecycle::delete::parent_of(self.engine(), instance).await
    }

    /// Removes the start of an instance that no worker has begun, with every message that waits for it. `false` where
    /// no start waits. An error where a worker is about to begin it. A parent that waits for the instance is not told:
    /// see [`QueuedStart::parent`]. **Changes** the container.
    pub async fn drop_start(&self, instance: &str) -> Result<bool, StoreError> {
        starts::discard(self.engine(), instance).await
    }

    /// Somebody who finds out why instances register still, and mends what can be mended from their histories. It knows who
    /// looks for work now. It writes a document of its own to learn the service's time: this machine's clock may be off.
    /// Somebody who may only read gets a doctor that goes by this machine's clock, and that repairs nothing.
    pub async fn doctor(&self) -> Result<Doctor, StoreError> {
        Doctor::new(self.engine()).await
    }
}

/// Checks whether an account can be used with this configuration: one line for each thing that must be right, up to the first that keeps the
/// others from being looked at. Nothing is made or changed, whatever `create_if_missing` says.
pub async fn check(config: &CosmosDBProviderConfig) -> Vec<Check> {
    check::run(config, Depth::Opening).await
}

/// Tries out every assumption that the provider makes about the service: all that [`check`] looks at, then every query, every
/// kind of write and batch, reads of each consistency, expiry, hash ranges and prices. One line for each. It takes some
/// seconds and about 2,600 RU. **Changes** the container: it writes to a partition of its own, and removes that again.
pub async fn check_deep(config: &CosmosDBProviderConfig) -> Vec<Check> {
    check::run(config, Depth::Deep).await
}
