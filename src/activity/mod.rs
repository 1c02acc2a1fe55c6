//! An activity: claimed, completed, released, renewed. And the sessions that bind activities to a worker.
//!
//! Invariants: every write is conditional on the activity's document as this token last wrote it; the completion is created
//! in the batch that deletes the activity, so that neither can be without the other; a cancelled activity's document is
//! gone, and whoever renews or completes it is told so.

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
    /// How the worker that has it claims: it comes back for the next when this one has ended.
    pub(crate) terms: FetchTerms<ActivityFilter>,
    pub(crate) state: tokio::sync::Mutex<ActivityState>,
}

/// What is known of an activity that is under way.
pub(crate) struct ActivityState {
    pub(crate) document: ActivityDocument,
    pub(crate) etag: Etag,
    pub(crate) until: Millis,
    /// The activity's execution and id, for finding out whether it was completed.
    pub(crate) identity: Option<(u64, u64)>,
    /// Completed, released, cancelled or lost.
    pub(crate) closed: bool,
    /// Until it is closed.
    pub(crate) here: Option<LocalActivity>,
}

impl ActivityState {
    pub(crate) fn close(&mut self) {
        self.closed = true;
        self.here = None;
    }
}

/// The error for an activity that is not, or no longer, held.
pub(crate) fn not_held(operation: &str, why: &str) -> ProviderError {
    ProviderError::permanent(operation, format!("Work item not found: {why}"))
}
