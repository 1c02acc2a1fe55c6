//! The documents of the container. SPEC.md shows an example of each.
//!
//! - Every document has `id`, `instanceId` (the partition key) and `type`.
//! - A document that a worker must handle by some time has `due`. A poll finds no document without `due`.
//! - Payloads stay strings, since Cosmos DB turns large integers into floats and `1.0` into `1`.

mod activity;
mod counters;
mod deletion;
mod format;
mod history;
mod instance;
mod message;
mod outbox;
mod session;
mod staging;
mod values;

pub(crate) use activity::{ActivityDocument, PayloadDocument};
pub(crate) use counters::{CountedFigures, CountersDocument, FoldStep, Totals};
pub(crate) use deletion::{Deleting, DeletionState, PlanDocument};
pub(crate) use format::{FormatDocument, FORMAT};
pub(crate) use history::{ExecutionDocument, HistoryDocument};
pub(crate) use instance::InstanceDocument;
pub(crate) use message::{DeliveredDocument, MessageDocument};
pub(crate) use outbox::IntentDocument;
pub(crate) use session::SessionDocument;
pub(crate) use staging::{RollForwardProgress, StagedDocument, Staging};
pub(crate) use values::{KvBase, KvDocument, StatusDocument};

use super::Millis;
use serde::{Deserialize, Serialize};

/// Values of the property `type`.
pub(crate) mod kind {
    pub(crate) const INSTANCE: &str = "instance";
    pub(crate) const MESSAGE: &str = "message";
    pub(crate) const DELIVERED: &str = "delivered";
    pub(crate) const ACTIVITY: &str = "activity";
    pub(crate) const PAYLOAD: &str = "payload";
    pub(crate) const HISTORY: &str = "history";
    pub(crate) const EXECUTION: &str = "execution";
    pub(crate) const KV: &str = "kv";
    pub(crate) const STATUS: &str = "customStatus";
    pub(crate) const INTENT: &str = "intent";
    pub(crate) const STAGED: &str = "staged";
    pub(crate) const SESSION: &str = "session";
    pub(crate) const COUNTERS: &str = "counters";
    pub(crate) const PLAN: &str = "plan";
    pub(crate) const MEMBER: &str = "member";
    pub(crate) const WAKEUP: &str = "wakeup";
    pub(crate) const FORMAT: &str = "format";
    pub(crate) const SHARED_RESULT: &str = "sharedResult";
}

/// Statuses of an execution.
pub(crate) mod status {
    pub(crate) const RUNNING: &str = "Running";
    pub(crate) const COMPLETED: &str = "Completed";
    pub(crate) const FAILED: &str = "Failed";
    pub(crate) const CONTINUED: &str = "ContinuedAsNew";

    /// Whether an execution with this status has ended. Its instance may continue with the next execution.
    pub(crate) fn execution_has_ended(status: &str) -> bool {
        matches!(status, COMPLETED | FAILED | CONTINUED)
    }

    /// Whether an instance whose current execution has this status has ended. An instance that continues as new has
    /// not: its next execution is about to begin.
    pub(crate) fn instance_has_ended(status: &str) -> bool {
        matches!(status, COMPLETED | FAILED)
    }
}

/// The lock of an instance or an activity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Lock {
    /// The holder: the lock token that duroxide's runtime has.
    pub(crate) token: String,
    /// The end of the lock, by the holder's clock.
    pub(crate) until: Millis,
}

/// For fields that are not serialised while they are zero.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}
