//! Messages between instances as the wire shows them: sent messages and arrived messages.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::deletions::Deletions;
use crate::oracle::Violation;

/// The logical partition and the id of a document.
type DocumentKey = (String, String);

#[derive(Debug, Default)]
struct DeliveryState {
    /// The message document of each intent.
    sent: BTreeMap<DocumentKey, DocumentKey>,
    arrived: BTreeSet<DocumentKey>,
}

/// The messages between instances that the wire has shown.
#[derive(Debug, Default)]
pub struct Deliveries(Mutex<DeliveryState>);

impl Deliveries {
    /// A document was written.
    pub fn written(&self, document: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let key = (text(&document["instanceId"]), text(&document["id"]));
        self.with(|state| match document["type"].as_str() {
            // A message that can't be delivered stays with its sender and is deleted with it.
            Some("intent") if !document["poisoned"].is_null() => drop(state.sent.remove(&key)),
            Some("intent") => {
                let message = (text(&document["target"]), text(&document["document"]["id"]));
                state.sent.insert(key, message);
            }
            Some("message" | "delivered") => drop(state.arrived.insert(key)),
            Some("instance") if !document["inlined"].is_null() => {
                state.arrived.insert((key.0, text(&document["inlined"]["id"])));
            }
            _ => {}
        });
    }

    /// A document was deleted. One deletion may remove both instances of a message together with the message.
    pub fn deleted(&self, partition: &str, id: &str, deletions: &Deletions) -> Option<Violation> {
        self.with(|state| {
            let message = state.sent.remove(&(partition.to_owned(), id.to_owned()))?;
            let is_gone = deletions.are_deleted_together(partition, &message.0);
            (!is_gone && !state.arrived.contains(&message)).then(|| Violation {
                invariant: "a committed message arrives",
                instance: message.0.clone(),
                detail: format!("{partition:?} deleted the intent {id:?} before its message {:?} arrived", message.1),
            })
        })
    }

    fn with<R>(&self, use_state: impl FnOnce(&mut DeliveryState) -> R) -> R {
        use_state(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sent() -> Deliveries {
        let deliveries = Deliveries::default();
        let document = json!({ "id": "m:1:0", "type": "message" });
        deliveries.written(
            &json!({ "id": "i:1:0", "instanceId": "a", "type": "intent", "target": "b", "document": document }),
        );
        deliveries
    }

    #[test]
    fn an_intent_is_deleted_after_its_message_has_arrived() {
        let (lost, written, consumed, inlined) = (sent(), sent(), sent(), sent());
        assert!(lost.deleted("a", "i:1:0", &Deletions::default()).is_some_and(|violation| violation.instance == "b"));
        written.written(&json!({ "id": "m:1:0", "instanceId": "b", "type": "message" }));
        consumed.written(&json!({ "id": "m:1:0", "instanceId": "b", "type": "delivered" }));
        inlined
            .written(&json!({ "id": "instance", "instanceId": "b", "type": "instance", "inlined": { "id": "m:1:0" } }));
        for arrived in [written, consumed, inlined] {
            assert_eq!(arrived.deleted("a", "i:1:0", &Deletions::default()), None);
        }
    }

    #[test]
    fn a_message_between_two_instances_of_one_deletion_is_deleted_with_them() {
        let (deliveries, deletions) = (sent(), Deletions::default());
        for instance in ["a", "b"] {
            deletions.written("client", instance, &json!({ "status": "Completed", "deleting": { "plan": "p" } }));
        }
        assert_eq!(deliveries.deleted("a", "i:1:0", &deletions), None);
    }

    #[test]
    fn an_intent_that_can_not_be_delivered_is_deleted_with_its_sender() {
        let deliveries = sent();
        deliveries.written(&json!({ "id": "i:1:0", "instanceId": "a", "type": "intent", "poisoned": "too large" }));
        assert_eq!(deliveries.deleted("a", "i:1:0", &Deletions::default()), None);
        assert_eq!(deliveries.deleted("a", "m:1:1", &Deletions::default()), None, "a document that is no intent");
    }
}
