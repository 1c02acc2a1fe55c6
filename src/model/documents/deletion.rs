//! The records of a deletion: the `deleting` field of an instance, and the documents that list the instances of a plan.

use super::kind;
use crate::model::{DocumentId, Partition};
use serde::{Deserialize, Serialize};

/// The deletion record of a prepared instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Deleting {
    /// The id of the plan. Each call that deletes has its own.
    pub(crate) plan: String,
    /// The instance whose document alone holds the state of the plan.
    pub(crate) coordinator: String,
    /// The time when the plan began. In the coordinator of a committed plan: the time of the commit. A message made
    /// later may belong to a new instance with the same id.
    pub(crate) before: String,
    /// Only in the coordinator of a committed plan: Cosmos DB's time, in seconds, of the last write before the commit.
    /// A message that Cosmos DB stored in a later second may belong to a new instance with the same id, whatever its
    /// sender's clock says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) committed_after: Option<u64>,
    /// Cosmos DB's time, in seconds, of the commit itself. The next write of the document stores it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) committed_by: Option<u64>,
    /// Cosmos DB's time, in seconds, of the last write before the instance was prepared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) last_written: Option<u64>,
    /// Only in the coordinator: the state of the plan. Nothing is deleted before the plan is committed.
    #[serde(default)]
    pub(crate) state: DeletionState,
    /// Only in the coordinator: the number of plan documents that list the other instances.
    #[serde(default)]
    pub(crate) parts: usize,
    /// Only in the coordinator: the first plan document that is not handled yet.
    #[serde(default)]
    pub(crate) part: usize,
    /// Only in the coordinator: whether a process other than the one that committed the plan may have erased instances
    /// of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) recovered_by_others: bool,
}

impl Deleting {
    /// Whether this plan began before another. All processes agree on this order, even if their clocks are wrong.
    pub(crate) fn began_before(&self, other: &Self) -> bool {
        (&self.before, &self.plan) < (&other.before, &other.plan)
    }
}

/// The state of the plan of a deletion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum DeletionState {
    /// The process is preparing the instances. Nothing is deleted.
    #[default]
    Preparing,
    /// Every instance of the plan is deleted.
    Committed,
    /// No instance of the plan is deleted. The prepared instances lose their deletion records.
    Aborted,
}

/// Some of the instances of a plan. The document is in the coordinator's partition.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PlanDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) members: Vec<String>,
}

impl PlanDocument {
    /// Instances per document. With the longest ids they fill a tenth of the largest document.
    pub(crate) const MEMBERS: usize = 100;

    pub(crate) fn document_id(plan: &str, part: usize) -> DocumentId {
        DocumentId::new("d", &[plan, &part.to_string()])
    }

    pub(crate) fn new(partition: Partition, plan: &str, part: usize, members: Vec<String>) -> Self {
        Self { id: Self::document_id(plan, part), instance_id: partition, kind: kind::PLAN.to_owned(), members }
    }
}
