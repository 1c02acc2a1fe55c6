//! The history of an instance: events, and past executions.

use super::{kind, status, InstanceDocument};
use crate::model::{DocumentId, EventSet, Fingerprints, Millis, Partition};
use serde::{Deserialize, Serialize};

/// Events that one turn appended to one execution.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct HistoryDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) execution: u64,
    /// Events as JSON, in order.
    pub(crate) events: Vec<String>,
    /// The id of the first event. The history documents of an execution are sorted by it.
    pub(crate) first: u64,
    /// The fingerprints of the messages from outside that the turn consumed. They identify a copy that a repeated
    /// request writes.
    #[serde(default, skip_serializing_if = "Fingerprints::is_empty")]
    pub(crate) consumed: Fingerprints,
}

impl HistoryDocument {
    pub(crate) fn new(
        partition: Partition,
        execution: u64,
        turn: &str,
        part: usize,
        first: u64,
        events: Vec<String>,
    ) -> Self {
        Self {
            id: DocumentId::new("h", &[&execution.to_string(), turn, &part.to_string()]),
            instance_id: partition,
            kind: kind::HISTORY.to_owned(),
            execution,
            events,
            first,
            consumed: Fingerprints::default(),
        }
    }
}

/// An execution that has ended, or that a newer one has superseded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ExecutionDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) execution: u64,
    pub(crate) status: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) output: Option<String>,
    pub(crate) started_at: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ended_at: Option<Millis>,
    #[serde(default)]
    pub(crate) events: EventSet,
}

impl ExecutionDocument {
    /// The largest output that stays in the instance's document, in bytes. A finished instance is hardly ever claimed
    /// again.
    pub(crate) const INLINE: usize = 512;

    pub(crate) fn document_id(execution: u64) -> DocumentId {
        DocumentId::new("x", &[&execution.to_string()])
    }

    /// The current execution of an instance.
    pub(crate) fn of(instance: &InstanceDocument, output: Option<String>) -> Self {
        Self {
            id: Self::document_id(instance.current.execution),
            instance_id: instance.instance_id.clone(),
            kind: kind::EXECUTION.to_owned(),
            execution: instance.current.execution,
            status: instance.current.status.clone().unwrap_or_else(|| status::RUNNING.to_owned()),
            output,
            started_at: instance.current.started_at,
            ended_at: instance.current.completed_at,
            events: instance.current.events.clone(),
        }
    }
}
