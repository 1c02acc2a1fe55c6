//! The outbox: messages that a committed turn sends to other partitions.

use super::{is_zero, kind};
use crate::model::{DocumentId, Millis, Partition, Unknown};
use serde::{Deserialize, Serialize};

/// An intent: a document that a committed turn must create in another partition.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct IntentDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The time from which any process may deliver the intent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) due: Option<Millis>,
    pub(crate) created_at: Millis,
    /// The sender. The property has the name that children use for their parent: so one query of a deletion finds the
    /// children and the undelivered intents of an instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parent: Option<String>,
    pub(crate) target: Partition,
    /// The document to create in the target.
    pub(crate) document: serde_json::Value,
    /// The number of deliveries by other processes that failed for a transient reason.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) retries: u32,
    /// The reason why the intent can never be delivered, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) poisoned: Option<String>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

impl IntentDocument {
    /// A new intent. The id and the document contain the turn's token, so they are unique to the turn.
    pub(crate) fn new(
        source: Partition,
        target: Partition,
        token: &str,
        position: usize,
        document: serde_json::Value,
        now: Millis,
        due: Millis,
    ) -> Self {
        Self {
            id: DocumentId::new("i", &[token, &position.to_string()]),
            parent: source.instance_id().map(ToOwned::to_owned),
            instance_id: source,
            kind: kind::INTENT.to_owned(),
            due: Some(due),
            created_at: now,
            target,
            document,
            retries: 0,
            poisoned: None,
            unknown: Unknown::default(),
        }
    }
}
