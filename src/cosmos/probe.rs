//! Probes the transactional batches of an account: they must be atomic and honour `ifMatch`.
//!
//! Gateway 2.0 may drop the flag that makes a batch atomic. Some emulators are reported to ignore conditions inside
//! batches. Either fault would let two workers commit the same turn. So opening sends one batch that must be rolled
//! back, and reads whether a part of it was applied. On a sound account the probe writes nothing.

use super::{BatchOutcome, Deadline, Freshness, Store, StoreError};
use crate::model::{DocumentId, FormatDocument, Operation, Partition};
use azure_core::http::Etag;
use serde::Serialize;
use serde_json::{json, Value};

/// A fault of an account's batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// A batch was applied although a document had another ETag than its condition.
    IgnoresConditions,
    /// A batch was refused, but a part of it was applied.
    NotAtomic,
}

impl Flaw {
    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::IgnoresConditions => "its account ignores ifMatch inside transactional batches",
            Self::NotAtomic => "its account does not roll back a transactional batch that failed",
        }
    }
}

/// No document has this ETag.
pub(super) const NO_ETAG: &str = "\"00000000-0000-0000-0000-000000000000\"";

/// Sends a batch that must be rolled back to the partition of the format document. That document must exist.
pub(super) async fn batches(store: &Store, deadline: Deadline) -> Result<Option<Flaw>, StoreError> {
    let format = FormatDocument::new();
    batches_with(store, (&format.instance_id, &format.id, &format), deadline).await
}

/// The same probe with another existing document. An account that ignores conditions replaces it.
pub(super) async fn batches_with(
    store: &Store,
    (partition, existing, unchanged): (&Partition, &DocumentId, &(impl Serialize + Sync)),
    deadline: Deadline,
) -> Result<Option<Flaw>, StoreError> {
    let id = DocumentId::new("probe", &[&store.inner.randomness.token()]);
    // On a faulty account the process may die before it deletes this document. Then its time to live removes it.
    let document = json!({ "id": id, "instanceId": partition, "type": "probe", "ttl": 60 });
    let operations =
        [Operation::create(&document)?, Operation::replace(existing.clone(), unchanged, Some(&Etag::from(NO_ETAG)))?];
    let flaw = match store.batch(partition, &operations, deadline).await? {
        BatchOutcome::Committed(_) => Some(Flaw::IgnoresConditions),
        BatchOutcome::RolledBack(back) if (back.index, back.status) == (1, 412) => None,
        BatchOutcome::RolledBack(back) => {
            let detail = format!("operation {} of the probe batch was answered {}", back.index, back.status);
            return Err(StoreError::Malformed { detail });
        }
    };
    let left = store.read::<Value>(partition, &id, Freshness::Authoritative, deadline).await?.is_some();
    if left {
        store.delete(partition, &id, None, deadline).await?;
    }
    Ok(flaw.or(left.then_some(Flaw::NotAtomic)))
}
