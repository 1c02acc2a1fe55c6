//! Activities that wait for a worker, and their large payloads.

use super::{kind, Lock};
use crate::model::{DocumentId, Millis, Partition, Slot, Unknown};
use azure_core::http::Etag;
use duroxide::providers::WorkItem;
use serde::{Deserialize, Serialize};

/// An activity to run, in the partition of its orchestration.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ActivityDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The time when a worker can claim the activity: at once, after a delay, or when the lock expires.
    pub(crate) due: Millis,
    pub(crate) seq: String,
    #[serde(default)]
    pub(crate) attempts: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) session_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tag: Option<String>,
    /// The slot of the partition. Workers that share a physical partition divide its rows by slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) slot: Option<Slot>,
    /// The worker whose turn scheduled the activity. It knows of the activity without a poll, and receives a wake-up
    /// when the activity is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) known_by: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lock: Option<Lock>,
    /// The work item as JSON. A large one is in a document of its own, so that claims do not rewrite it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) item: Option<String>,
    #[serde(rename = "_etag", default, skip_serializing)]
    pub(crate) etag: Option<Etag>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

/// The work item of an activity whose input is large.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PayloadDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) item: String,
}

impl ActivityDocument {
    /// Locks the activity until a time, and counts an attempt.
    pub(crate) fn claim(&mut self, token: &str, until: Millis) {
        self.lock = Some(Lock { token: token.to_owned(), until });
        self.due = until;
        self.attempts += 1;
    }

    /// The largest work item that stays in the activity's document, in bytes.
    const INLINE: usize = 4 * 1024;

    /// The id of an activity that a turn scheduled. A turn that cancels the activity derives the id without a query.
    pub(crate) fn scheduled_id(execution: u64, activity: u64) -> DocumentId {
        DocumentId::new("w", &[&execution.to_string(), &activity.to_string()])
    }

    /// Whether a document with this id is an activity, or the payload of one.
    pub(crate) fn is_activity_id(id: &DocumentId) -> bool {
        id.as_str().starts_with("w:") || id.as_str().starts_with("p:w:")
    }

    /// The id of the payload document of an activity.
    pub(crate) fn payload_id(id: &DocumentId) -> DocumentId {
        DocumentId::new("p", &[id.as_str()])
    }

    /// Whether this work item stays in the activity's own document.
    pub(crate) fn is_inline(item: &str) -> bool {
        item.len() <= Self::INLINE
    }

    /// The execution and the activity number that an id contains.
    pub(crate) fn identity(id: &DocumentId) -> Option<(u64, u64)> {
        let mut parts = id.as_str().strip_prefix("w:")?.split(':');
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    }

    /// The documents of a new activity: its own, and one for a large payload.
    pub(crate) fn new(
        partition: Partition,
        id: DocumentId,
        work_item: &WorkItem,
        seq: String,
        now: Millis,
    ) -> Result<(Self, Option<PayloadDocument>), serde_json::Error> {
        let (session_id, tag) = match work_item {
            WorkItem::ActivityExecute { session_id, tag, .. } => (session_id.clone(), tag.clone()),
            _ => (None, None),
        };
        let item = serde_json::to_string(work_item)?;
        let mut document = Self {
            id,
            slot: Some(Slot::of(&partition)),
            known_by: None,
            instance_id: partition,
            kind: kind::ACTIVITY.to_owned(),
            due: now,
            seq,
            attempts: 0,
            session_id,
            tag,
            lock: None,
            item: None,
            etag: None,
            unknown: Unknown::default(),
        };
        if Self::is_inline(&item) {
            document.item = Some(item);
            return Ok((document, None));
        }
        let payload = PayloadDocument {
            id: Self::payload_id(&document.id),
            instance_id: document.instance_id.clone(),
            kind: kind::PAYLOAD.to_owned(),
            item,
        };
        Ok((document, Some(payload)))
    }

    /// Whether the payload is in a document of its own.
    pub(crate) fn has_payload_document(&self) -> bool {
        self.item.is_none()
    }

    /// Whether this token holds the lock, expired or not.
    pub(crate) fn held_by(&self, token: &str) -> bool {
        self.lock.as_ref().is_some_and(|lock| lock.token == token)
    }
}
