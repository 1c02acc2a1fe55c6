//! Messages for orchestrations, and the markers of messages that were delivered.

use super::{kind, InstanceDocument};
use crate::model::{item, operation::MAX_DOCUMENT_BYTES, DocumentId, Millis, Operation, Partition, Slot, Unknown};
use duroxide::providers::WorkItem;
use serde::{Deserialize, Serialize};

/// A message for an orchestration. A claim does not write it, since the lock is in the instance's document.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MessageDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The time when the message becomes visible.
    pub(crate) due: Millis,
    /// The position of the message in the queue.
    pub(crate) seq: String,
    /// The time when the message was made. Claims before this time are no attempts of the message.
    pub(crate) created_at: Millis,
    /// The slot of the partition. Workers that share a physical partition divide its rows by slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) slot: Option<Slot>,
    /// The worker that knows of the message since it was written, without a poll.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) known_by: Option<String>,
    /// Attempts that the claims of the instance do not contain any more.
    #[serde(default)]
    pub(crate) attempts: u32,
    /// Whether the message can start an instance. A poll sees this without reading the work item.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) starts: bool,
    /// Whether the message came from another partition. The turn that consumes such a message leaves a marker, which
    /// identifies a second copy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) delivered: bool,
    /// The incarnation that the message concerns: for a start, that of its sender; for any other message, that of its
    /// receiver.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) incarnation: Option<String>,
    /// The sender of a start, if another instance sent it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sender: Option<String>,
    /// The time when a worker found this queue message without an instance and without a start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) orphan_since: Option<Millis>,
    /// The work item as JSON.
    pub(crate) item: String,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

impl MessageDocument {
    /// The largest size of a message. The message becomes an event, which is larger and must fit a document, too.
    pub(crate) const MAX_BYTES: usize = MAX_DOCUMENT_BYTES - 16 * 1024;
    /// The `due` of a deferred message. It is the largest integer that Cosmos DB stores exactly, so no poll asks for
    /// it.
    pub(crate) const DEFERRED: Millis = (1 << 53) - 1;

    /// The key of a message that was enqueued outside any turn or activity.
    pub(crate) fn outside_key(token: &str) -> String {
        format!("e:{token}")
    }

    /// The key of the completion of an activity that was locked under this token.
    pub(crate) fn completion_key(token: &str) -> String {
        format!("a:{token}")
    }

    /// Whether a message with this id is the completion of an activity.
    pub(crate) fn is_completion(id: &DocumentId) -> bool {
        id.as_str().starts_with("m:a:")
    }

    /// Whether a message with this id came from outside any turn or activity. Only such a message has these properties:
    ///
    /// - it can be meant for a new instance with the id of an instance that is being deleted;
    /// - a repeated request can write it again.
    pub(crate) fn is_from_outside(id: &DocumentId) -> bool {
        Self::outside_token(id).is_some()
    }

    /// A message that becomes visible at `due`.
    pub(crate) fn new(
        partition: Partition,
        key: &str,
        work_item: &WorkItem,
        seq: String,
        now: Millis,
        due: Millis,
    ) -> Result<Self, serde_json::Error> {
        let text = serde_json::to_string(work_item)?;
        let message = Self::with_item(partition, DocumentId::new("m", &[key]), text, seq, now, due);
        Ok(Self { starts: item::starts(work_item), ..message })
    }

    /// A message whose work item is given as JSON.
    pub(crate) fn with_item(
        partition: Partition,
        id: DocumentId,
        item: String,
        seq: String,
        now: Millis,
        due: Millis,
    ) -> Self {
        Self {
            id,
            slot: Some(Slot::of(&partition)),
            instance_id: partition,
            kind: kind::MESSAGE.to_owned(),
            due,
            seq,
            created_at: now,
            known_by: None,
            attempts: 0,
            starts: false,
            delivered: false,
            incarnation: None,
            sender: None,
            orphan_since: None,
            item,
            unknown: Unknown::default(),
        }
    }

    /// Records that an instance sends the message to another one, and the incarnation of the receiver. A start names
    /// the sender and its incarnation instead, so that no other instance hears of its end.
    pub(crate) fn send(&mut self, sender: &InstanceDocument, receiver: Option<String>) {
        self.delivered = true;
        self.incarnation = receiver;
        if self.starts {
            self.incarnation = Some(sender.origin.incarnation.clone());
            self.sender = sender.instance_id.instance_id().map(ToOwned::to_owned);
        }
    }

    /// The time when the sender enqueued the message, by the sender's clock. `seq` begins with it.
    pub(crate) fn sent_at(&self) -> Millis {
        self.seq.get(..15).and_then(|sent| sent.parse().ok()).unwrap_or(0)
    }

    /// Whether the message is deferred: it waits for the start of its instance, and no poll finds it.
    pub(crate) fn is_deferred(&self) -> bool {
        self.due == Self::DEFERRED
    }

    /// The size of the message if it is too large for the event that it becomes.
    pub(crate) fn oversize(&self) -> Option<usize> {
        // Escaping makes a character at most six bytes long, so a short item is never too large. Most items are short.
        const SHORT: usize = MessageDocument::MAX_BYTES / 8;
        if self.item.len() <= SHORT {
            return None;
        }
        let bytes = Operation::create(self).map_or(usize::MAX, |operation| operation.size());
        (bytes > Self::MAX_BYTES).then_some(bytes)
    }

    /// The token of a message from outside.
    pub(crate) fn outside_token(id: &DocumentId) -> Option<&str> {
        id.as_str().strip_prefix("m:e:")
    }
}

/// The marker of a delivered message that was consumed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeliveredDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Seconds until Cosmos DB deletes the marker, if the container has time to live turned on.
    pub(crate) ttl: u32,
}

impl DeliveredDocument {
    /// One day, which is far longer than a delivery can still be in flight.
    const TTL: u32 = 24 * 60 * 60;

    pub(crate) fn new(id: DocumentId, partition: Partition) -> Self {
        Self { id, instance_id: partition, kind: kind::DELIVERED.to_owned(), ttl: Self::TTL }
    }
}
