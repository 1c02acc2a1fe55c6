//! Activities: claim, completion, release and renewal. Also the sessions that bind activities to a worker.
//!
//! Invariants:
//!
//! - Every write is conditional on the activity document as this token last wrote it.
//! - The batch that deletes the activity creates its completion, so neither exists without the other.
//! - The document of a cancelled activity is deleted. A worker that renews or completes it gets an error.

pub(crate) mod claim;
pub(crate) mod complete;
pub(crate) mod enqueue;
pub(crate) mod session;
mod unreadable;

use crate::{
    discovery::local_instances::LocalActivity,
    model::{ActivityDocument, DocumentId, Millis, Partition},
    queue::{activity::ActivityFilter, FetchTerms},
};
use azure_core::http::Etag;
use duroxide::providers::ProviderError;

/// An activity that this process holds.
pub(crate) struct ActivityHandle {
    pub(crate) token: String,
    pub(crate) partition: Partition,
    pub(crate) id: DocumentId,
    /// How its worker claims. A patient worker fetches again when this activity has ended.
    pub(crate) terms: FetchTerms<ActivityFilter>,
    pub(crate) state: tokio::sync::Mutex<ActivityState>,
}

/// The state of an activity in progress.
pub(crate) struct ActivityState {
    pub(crate) document: ActivityDocument,
    pub(crate) etag: Etag,
    pub(crate) until: Millis,
    /// The activity's execution and id, which tell whether the history has its completion.
    pub(crate) identity: Option<(u64, u64)>,
    /// The activity is completed, released, cancelled or lost.
    pub(crate) closed: bool,
    /// Marks the instance as local until the activity is closed.
    pub(crate) local: Option<LocalActivity>,
}

impl ActivityState {
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.local = None;
    }
}

/// The error for an activity that is not, or no longer, held.
pub(crate) fn not_held(operation: &str, why: &str) -> ProviderError {
    ProviderError::permanent(operation, format!("Work item not found: {why}"))
}
