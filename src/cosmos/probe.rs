//! Whether batches of this account, by this client, are what the provider relies on: all or nothing, and bound to `ifMatch`.
//!
//! Gateway 2.0 may drop the flag that makes a batch atomic, and emulators were reported to ignore conditions inside batches.
//! Either would let two workers commit the same turn. So opening sends one batch that must be refused and looks whether it
//! left anything behind. On a sound account nothing is written.

use super::{BatchOutcome, Deadline, Freshness, Store, StoreError};
use crate::model::Operation;
use crate::model::{DocumentId, FormatDocument, Partition};
use azure_core::http::Etag;
use serde::Serialize;
use serde_json::{json, Value};

/// What is wrong with an account's batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// A batch was done although a document was not as its condition says.
    IgnoresConditions,
    /// A batch was refused, and a part of it was done.
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

/// Sends a batch that must be rolled back to the partition of the container's format document, which must be there.
pub(super) async fn batches(store: &Store, deadline: Deadline) -> Result<Option<Flaw>, StoreError> {
    let format = FormatDocument::new();
    batches_with(store, (&format.instance_id, &format.id, &format), deadline).await
}

/// The same with another document that is there. On an account that ignores conditions it is replaced.
pub(super) async fn batches_with(
    store: &Store,
    (partition, there, as_it_is): (&Partition, &DocumentId, &(impl Serialize + Sync)),
    deadline: Deadline,
) -> Result<Option<Flaw>, StoreError> {
    let id = DocumentId::new("probe", &[&store.inner.randomness.token()]);
    // Should the process die before it can delete the document of an unsound account, time to live does.
    let document = json!({ "id": id, "instanceId": partition, "type": "probe", "ttl": 60 });
    let operations =
        [Operation::create(&document)?, Operation::replace(there.clone(), as_it_is, Some(&Etag::from(NO_ETAG)))?];
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
