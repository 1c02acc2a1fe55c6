//! A message inside the instance's document. It is written together with the claim of its turn and needs no document of
//! its own.
//!
//! `docs/design/inline-claims.md` has the invariants:
//!
//! - the message is part of the queue;
//! - a poll finds it by the `due` of its instance;
//! - a worker that releases the lock without a commit writes the message as a document of its own.

use super::{DocumentId, InstanceDocument, MessageDocument, Millis, Unknown};
use serde::{Deserialize, Serialize};

/// A message without the fields that the instance's document already has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct InlinedMessage {
    id: DocumentId,
    due: Millis,
    seq: String,
    created_at: Millis,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    starts: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    delivered: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    incarnation: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sender: Option<String>,
    item: String,
    /// Fields of a newer version.
    #[serde(flatten)]
    unknown: Unknown,
}

impl InlinedMessage {
    /// The largest inlined message, in bytes. Each renewal would write a larger one again.
    const MAX_BYTES: usize = 4 * 1024;
}

impl InstanceDocument {
    /// Puts a message into the document. Returns `false` if the message is too large or has attempts. The caller then
    /// locks the instance or sets its `due`.
    pub(crate) fn inline_message(&mut self, message: &MessageDocument) -> bool {
        if message.item.len() > InlinedMessage::MAX_BYTES || message.attempts > 0 {
            return false;
        }
        let MessageDocument { id, due, seq, created_at, starts, delivered, incarnation, sender, item, unknown, .. } =
            message.clone();
        let inlined =
            InlinedMessage { id, due, seq, created_at, starts, delivered, incarnation, sender, item, unknown };
        self.waiting.inlined = Some(Box::new(inlined));
        true
    }

    /// Whether the document holds this message.
    pub(crate) fn has_inlined(&self, id: &DocumentId) -> bool {
        self.waiting.inlined.as_ref().is_some_and(|inlined| &inlined.id == id)
    }

    /// The inlined message.
    pub(crate) fn inlined_message(&self) -> Option<MessageDocument> {
        let InlinedMessage { id, due, seq, created_at, starts, delivered, incarnation, sender, item, unknown } =
            *self.waiting.inlined.clone()?;
        let message = MessageDocument::with_item(self.instance_id.clone(), id, item, seq, created_at, due);
        Some(MessageDocument { starts, delivered, incarnation, sender, unknown, ..message })
    }

    /// Removes the inlined message. The same batch consumes it, or writes it as a document of its own.
    pub(crate) fn take_inlined(&mut self) -> Option<MessageDocument> {
        let message = self.inlined_message()?;
        self.waiting.inlined = None;
        if !self.needs_recovery() {
            self.due = None;
        }
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Partition;
    use duroxide::providers::WorkItem;

    fn message(bytes: usize) -> MessageDocument {
        let item = WorkItem::ExternalRaised { instance: "i".into(), name: "e".into(), data: "d".repeat(bytes) };
        let partition = Partition::instance("i").unwrap();
        let mut message = MessageDocument::new(partition, "e:1", &item, "000001".into(), 7, 8).unwrap();
        (message.delivered, message.incarnation, message.sender) = (true, Some("abc".into()), Some("s".into()));
        message
    }

    fn instance() -> InstanceDocument {
        InstanceDocument::new(Partition::instance("i").unwrap(), "token", 7)
    }

    #[test]
    fn an_inlined_message_comes_back_unchanged_after_a_round_trip() {
        let (mut document, message) = (instance(), message(10));
        assert!(document.inline_message(&message));
        document.lock("token", 1_000);
        assert_eq!(document.due, Some(1_000), "a poll finds it as soon as the lock has ended");
        let text = serde_json::to_string(&document).unwrap();
        let mut again: InstanceDocument = serde_json::from_str(&text).unwrap();
        assert!(again.has_inlined(&message.id) && again.needs_recovery());
        let out = again.take_inlined().unwrap();
        assert_eq!(serde_json::to_value(&out).unwrap(), serde_json::to_value(&message).unwrap());
        assert!(again.waiting.inlined.is_none() && again.take_inlined().is_none());
    }

    #[test]
    fn a_running_instance_without_its_inlined_message_is_not_due() {
        let mut document = instance();
        document.current.status = Some("Running".to_owned());
        document.inline_message(&message(10));
        document.lock("token", 1_000);
        assert_eq!(document.due, Some(1_000));
        document.take_inlined();
        assert_eq!(document.due, None);
    }

    #[test]
    fn a_large_message_has_a_document_of_its_own() {
        let mut document = instance();
        assert!(!document.inline_message(&message(InlinedMessage::MAX_BYTES)));
        assert!(document.waiting.inlined.is_none());
    }
}
