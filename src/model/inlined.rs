//! A message inside the instance's document: it was written with the claim of the turn that takes it, and needs no document of its own.
//!
//! SPEC.md, "Enclosed messages", has the invariants: it is in the queue, it is seen by its instance's `due`, and whoever takes the lock off
//! without a commit writes it out.

use super::{DocumentId, InstanceDocument, MessageDocument, Millis, Unknown};
use serde::{Deserialize, Serialize};

/// A message, without what its instance's document says already.
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
    /// A larger one has a document of its own: renewals would pay for it again and again.
    const MAX_BYTES: usize = 4 * 1024;
}

impl InstanceDocument {
    /// Puts a message into it; `false` where that is too large. It is locked, or due, next.
    pub(crate) fn inline_message(&mut self, message: &MessageDocument) -> bool {
        if message.item.len() > InlinedMessage::MAX_BYTES || message.attempts > 0 {
            return false;
        }
        let MessageDocument { id, due, seq, created_at, starts, delivered, incarnation, sender, item, unknown, .. } =
            message.clone();
        let inlined =
            InlinedMessage { id, due, seq, created_at, starts, delivered, incarnation, sender, item, unknown };
        self.inlined = Some(Box::new(inlined));
        true
    }

    /// Whether this message is in it.
    pub(crate) fn has_inlined(&self, id: &DocumentId) -> bool {
        self.inlined.as_ref().is_some_and(|inlined| &inlined.id == id)
    }

    /// The message that is in it.
    pub(crate) fn inlined_message(&self) -> Option<MessageDocument> {
        let InlinedMessage { id, due, seq, created_at, starts, delivered, incarnation, sender, item, unknown } =
            *self.inlined.clone()?;
        let message = MessageDocument::with_item(self.instance_id.clone(), id, item, seq, created_at, due);
        Some(MessageDocument { starts, delivered, incarnation, sender, unknown, ..message })
    }

    /// Takes the message out: it is consumed, or written as a document of its own in the same batch.
    pub(crate) fn take_inlined(&mut self) -> Option<MessageDocument> {
        let message = self.inlined_message()?;
        self.inlined = None;
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
    fn what_is_taken_out_is_what_was_put_in_after_a_trip_to_the_service() {
        let (mut document, message) = (instance(), message(10));
        assert!(document.inline_message(&message));
        document.hold("token", 1_000);
        assert_eq!(document.due, Some(1_000), "it is looked at as soon as the lock has ended");
        let text = serde_json::to_string(&document).unwrap();
        let mut again: InstanceDocument = serde_json::from_str(&text).unwrap();
        assert!(again.has_inlined(&message.id) && again.needs_recovery());
        let out = again.take_inlined().unwrap();
        assert_eq!(serde_json::to_value(&out).unwrap(), serde_json::to_value(&message).unwrap());
        assert!(again.inlined.is_none() && again.take_inlined().is_none());
    }

    #[test]
    fn an_instance_that_runs_is_not_due_any_more_once_the_message_is_out() {
        let mut document = instance();
        document.status = Some("Running".to_owned());
        document.inline_message(&message(10));
        document.hold("token", 1_000);
        assert_eq!(document.due, Some(1_000));
        document.take_inlined();
        assert_eq!(document.due, None);
    }

    #[test]
    fn a_large_message_has_a_document_of_its_own() {
        let mut document = instance();
        assert!(!document.inline_message(&message(InlinedMessage::MAX_BYTES)));
        assert!(document.inlined.is_none());
    }
}
