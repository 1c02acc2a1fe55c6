//! The counters: the figures of finished instances.

use super::{kind, status, Lock};
use crate::model::{DocumentId, Partition, Unknown};
use serde::{Deserialize, Serialize};

/// The figures of an instance that the metrics sum up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Totals {
    pub(crate) executions: u64,
    pub(crate) events: u64,
}

/// The figures of a finished instance that the counters hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CountedFigures {
    pub(crate) status: String,
    #[serde(flatten)]
    pub(crate) totals: Totals,
    /// The round that folded the figures in. It tells this step from a step that an earlier round has counted.
    pub(crate) round: String,
}

/// A step: one change of the figures that the counters hold of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FoldStep {
    /// The figures before the step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) was: Option<CountedFigures>,
    /// The figures after the step. An erased instance has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) now: Option<CountedFigures>,
}

/// The sum of the figures of all instances that were folded into the counters.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct CountersDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) completed: i64,
    pub(crate) failed: i64,
    pub(crate) other: i64,
    pub(crate) executions: i64,
    pub(crate) events: i64,
    /// The pending steps: instances that are being folded in, or counted out after an erasure.
    #[serde(default)]
    pub(crate) folding: std::collections::BTreeMap<String, FoldStep>,
    /// The process that folds finished instances. The lease keeps other processes from doing the same work. The
    /// counters are right without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fold_lease: Option<Lock>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

impl CountersDocument {
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("counters", &[])
    }

    pub(crate) fn partition() -> Partition {
        Partition::system("metrics")
    }

    pub(crate) fn new() -> Self {
        Self {
            id: Self::document_id(),
            instance_id: Self::partition(),
            kind: kind::COUNTERS.to_owned(),
            completed: 0,
            failed: 0,
            other: 0,
            executions: 0,
            events: 0,
            folding: Default::default(),
            fold_lease: None,
            unknown: Unknown::default(),
        }
    }

    /// Counts a step that the instance's document has taken.
    pub(crate) fn count_step(&mut self, step: &FoldStep) {
        if let Some(now) = &step.now {
            self.count(now, 1);
        }
        if let Some(was) = &step.was {
            self.count(was, -1);
        }
    }

    /// Adds or subtracts the figures of one instance.
    pub(crate) fn count(&mut self, counted: &CountedFigures, sign: i64) {
        match counted.status.as_str() {
            status::COMPLETED => self.completed += sign,
            status::FAILED => self.failed += sign,
            _ => self.other += sign,
        }
        self.executions += sign * counted.totals.executions as i64;
        self.events += sign * counted.totals.events as i64;
    }
}
