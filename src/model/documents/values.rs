//! Values of an instance: the KV store and the custom status.

use super::kind;
use crate::model::{id, DocumentId, Millis, Partition, Unknown};
use serde::{Deserialize, Serialize};

/// A value of the KV store: the latest value, and the value before the running execution.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct KvDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The key as the user wrote it. The id holds it encoded.
    pub(crate) key: String,
    /// The latest value. A key that was cleared has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<String>,
    #[serde(default)]
    pub(crate) at: Millis,
    /// The instance's epoch in which the latest value was written.
    pub(crate) epoch: u64,
    /// The value before that epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) base: Option<KvBase>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

/// The value that a key had when the running execution began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KvBase {
    pub(crate) value: String,
    pub(crate) at: Millis,
}

impl KvDocument {
    pub(crate) fn document_id(key: &str) -> DocumentId {
        DocumentId::new("k", &[&id::encode(key)])
    }

    /// The document after a write of `value` in `epoch`, given the document before.
    pub(crate) fn written(
        partition: &Partition,
        key: &str,
        before: Option<&Self>,
        value: Option<String>,
        at: Millis,
        epoch: u64,
    ) -> Self {
        let base = before.and_then(|b| b.snapshot(epoch));
        Self {
            id: Self::document_id(key),
            instance_id: partition.clone(),
            kind: kind::KV.to_owned(),
            key: key.to_owned(),
            value,
            at,
            epoch,
            base,
            unknown: before.map(|before| before.unknown.clone()).unwrap_or_default(),
        }
    }

    /// Whether the document of a cleared key can be deleted. `ends` says that `epoch` is ending.
    pub(crate) fn is_forgotten(&self, epoch: u64, ends: bool) -> bool {
        self.value.is_none() && (ends || self.snapshot(epoch).is_none())
    }

    /// The value of the key when the execution of `epoch` began.
    pub(crate) fn snapshot(&self, epoch: u64) -> Option<KvBase> {
        if self.epoch == epoch {
            return self.base.clone();
        }
        self.value.clone().map(|value| KvBase { value, at: self.at })
    }
}

/// The custom status of an instance. It may be large, and few turns change it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatusDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<String>,
    pub(crate) version: u64,
}

impl StatusDocument {
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("status", &[])
    }

    pub(crate) fn new(partition: Partition, value: Option<String>, version: u64) -> Self {
        Self { id: Self::document_id(), instance_id: partition, kind: kind::STATUS.to_owned(), value, version }
    }
}
