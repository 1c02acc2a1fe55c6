//! Turns that do not fit one batch: their staged operations, and the progress of applying them.

use super::kind;
use crate::model::{DocumentId, Operation, Partition};
use serde::{Deserialize, Serialize};

/// The staged parts of a turn that does not fit one batch. The batch that writes a part also counts it here, so that no
/// part is unknown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Staging {
    /// The key in the ids of the parts.
    pub(crate) key: String,
    /// The number of parts that were written.
    pub(crate) parts: usize,
}

/// How far the staged parts of a committed turn are applied. The parts are applied in order. Each batch that applies a
/// part also moves `next`, so a missing part is never taken for an applied one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RollForwardProgress {
    /// The key in the ids of the parts.
    pub(crate) key: String,
    /// The number of parts of the turn.
    pub(crate) parts: usize,
    /// The first part that is not applied yet.
    pub(crate) next: usize,
}

/// Operations of a turn that did not fit its batch. They have no effect before the turn is committed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StagedDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) operations: Vec<Operation>,
}

impl StagedDocument {
    /// The id of a part of the turn that is staged under `key`.
    pub(crate) fn document_id(key: &str, part: usize) -> DocumentId {
        DocumentId::new("s", &[key, &part.to_string()])
    }

    pub(crate) fn new(partition: Partition, key: &str, part: usize, operations: Vec<Operation>) -> Self {
        Self { id: Self::document_id(key, part), instance_id: partition, kind: kind::STAGED.to_owned(), operations }
    }
}
