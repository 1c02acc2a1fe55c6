//! Messages between instances as the wire sees them: which were sent, and which have arrived.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::deletions::Deletions;
use crate::ledger::Broken;

/// A document, by its partition and its id.
type Place = (String, String);

#[derive(Debug, Default)]
struct State {
    /// Where the message of each intent is to be.
    sent: BTreeMap<Place, Place>,
    arrived: BTreeSet<Place>,
}

/// The messages between instances that the wire has seen.
#[derive(Debug, Default)]
pub struct Owed(Mutex<State>);

impl Owed {
    /// A document was written.
    pub fn written(&self, document: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let place = (text(&document["instanceId"]), text(&document["id"]));
        self.with(|state| match document["type"].as_str() {
            // A message that can't be delivered stays with its sender, and goes with it.
            Some("intent") if !document["poisoned"].is_null() => drop(state.sent.remove(&place)),
            Some("intent") => {
                let message = (text(&document["target"]), text(&document["document"]["id"]));
                state.sent.insert(place, message);
            }
            Some("message" | "delivered") => drop(state.arrived.insert(place)),
            Some("instance") if !document["inlined"].is_null() => {
                state.arrived.insert((place.0, text(&document["inlined"]["id"])));
            }
            _ => {}
        });
    }

    /// A document was deleted. A message between two instances of one deletion goes with them.
    pub fn deleted(&self, partition: &str, id: &str, deletions: &Deletions) -> Option<Broken> {
        self.with(|state| {
            let message = state.sent.remove(&(partition.to_owned(), id.to_owned()))?;
            let is_gone = deletions.go_together(partition, &message.0);
            (!is_gone && !state.arrived.contains(&message)).then(|| Broken {
                invariant: "a committed message arrives",
                instance: message.0.clone(),
                detail: format!("{partition:?} has sent {:?}, and {id:?} is gone before it has arrived", message.1),
            })
        })
    }

    fn with<R>(&self, use_it: impl FnOnce(&mut State) -> R) -> R {
        use_it(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sent() -> Owed {
        let owed = Owed::default();
        let document = json!({ "id": "m:1:0", "type": "message" });
        owed.written(
            &json!({ "id": "i:1:0", "instanceId": "a", "type": "intent", "target": "b", "document": document }),
        );
        owed
    }

    #[test]
    fn an_intent_goes_after_its_message_has_arrived() {
        let (lost, written, consumed, enclosed) = (sent(), sent(), sent(), sent());
        assert!(lost.deleted("a", "i:1:0", &Deletions::default()).is_some_and(|broken| broken.instance == "b"));
        written.written(&json!({ "id": "m:1:0", "instanceId": "b", "type": "message" }));
        consumed.written(&json!({ "id": "m:1:0", "instanceId": "b", "type": "delivered" }));
        enclosed
            .written(&json!({ "id": "instance", "instanceId": "b", "type": "instance", "inlined": { "id": "m:1:0" } }));
        for arrived in [written, consumed, enclosed] {
            assert_eq!(arrived.deleted("a", "i:1:0", &Deletions::default()), None);
        }
    }

    #[test]
    fn a_message_between_two_instances_of_one_deletion_goes_with_them() {
        let (owed, deletions) = (sent(), Deletions::default());
        for instance in ["a", "b"] {
            deletions.written("client", instance, &json!({ "status": "Completed", "deleting": { "plan": "p" } }));
        }
        assert_eq!(owed.deleted("a", "i:1:0", &deletions), None);
    }

    #[test]
    fn an_intent_that_can_not_be_delivered_goes_with_its_sender() {
        let owed = sent();
        owed.written(&json!({ "id": "i:1:0", "instanceId": "a", "type": "intent", "poisoned": "too large" }));
        assert_eq!(owed.deleted("a", "i:1:0", &Deletions::default()), None);
        assert_eq!(owed.deleted("a", "m:1:1", &Deletions::default()), None, "anything else");
    }
}
