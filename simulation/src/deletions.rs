//! Deletions as the wire shows them: the instances that exist, the clients that delete them, and the instances that
//! must stay.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::oracle::Violation;

/// The reason for which a client deletes instances. The name of the client implies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeletionPurpose {
    /// Retention deletes an instance tree after all of it has ended.
    Retention,
    /// A bulk deletion deletes a root that has ended, with all its descendants.
    Bulk,
    /// A caller has named the instance.
    Named,
}

/// The beginning of the wire names of administrators that apply retention.
pub const RETENTION: &str = "retention";
/// The beginning of the wire names of administrators that delete in bulk.
pub const BULK: &str = "bulk";
/// A part of the wire names of clean-up workers.
pub const CLEAN_UP: &str = "clean-up";

fn purpose(client: &str) -> DeletionPurpose {
    match client {
        client if client.starts_with(RETENTION) || client.contains(CLEAN_UP) => DeletionPurpose::Retention,
        client if client.starts_with(BULK) => DeletionPurpose::Bulk,
        _ => DeletionPurpose::Named,
    }
}

/// An instance document, as the wire has last shown it.
#[derive(Clone, Debug)]
struct ObservedInstance {
    status: Option<String>,
    parent: Option<String>,
    execution: u64,
    /// The deletion for which the instance is prepared.
    plan: Option<String>,
}

impl ObservedInstance {
    fn of(document: &Value) -> Self {
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        Self {
            status: text(&document["status"]),
            parent: text(&document["parent"]),
            execution: document["execution"].as_u64().unwrap_or(0),
            plan: text(&document["deleting"]["plan"]),
        }
    }

    fn has_ended(&self) -> bool {
        matches!(self.status.as_deref(), Some("Completed" | "Failed"))
    }
}

#[derive(Debug, Default)]
struct DeletionState {
    instances: BTreeMap<String, ObservedInstance>,
    /// The client that began each deletion. Other clients may finish it.
    begun_by: BTreeMap<String, String>,
    /// The statuses with which the instances of a name were deleted, in order.
    deleted_with: BTreeMap<String, Vec<String>>,
    /// Instances that a caller deletes by force.
    forced: BTreeSet<String>,
    /// The last deletion that prepared an instance of each name.
    last_plan: BTreeMap<String, String>,
}

/// The deletions that the wire has shown.
#[derive(Debug, Default)]
pub struct Deletions(Mutex<DeletionState>);

impl Deletions {
    /// A caller is going to delete this instance by force.
    pub fn will_be_forced(&self, instance: &str) {
        self.with(|state| state.forced.insert(instance.to_owned()));
    }

    /// Whether one deletion has prepared both instances.
    pub fn are_deleted_together(&self, one: &str, other: &str) -> bool {
        self.with(|state| {
            let plan = |instance: &str| state.last_plan.get(instance);
            plan(one).is_some() && plan(one) == plan(other)
        })
    }

    /// The number of instances of this name that were deleted.
    pub fn times(&self, instance: &str) -> usize {
        self.with(|state| state.deleted_with.get(instance).map_or(0, Vec::len))
    }

    /// The names of all deleted instances.
    pub fn names(&self) -> BTreeSet<String> {
        self.with(|state| state.deleted_with.keys().cloned().collect())
    }

    /// The status with which the last instance of this name was deleted. `None` if an instance of this name exists.
    pub fn last_status(&self, instance: &str) -> Option<String> {
        self.with(|state| {
            let exists = state.instances.get(instance).is_some_and(|observed| observed.status.is_some());
            state.deleted_with.get(instance)?.last().filter(|_| !exists).cloned()
        })
    }

    /// A client has written an instance document.
    pub fn written(&self, client: &str, instance: &str, document: &Value) -> Option<Violation> {
        let observed = ObservedInstance::of(document);
        let pruned = document["pruning"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        let pruned = pruned.filter(|execution| *execution >= observed.execution && observed.status.is_some()).max();
        let violation = pruned.map(|pruned| Violation {
            invariant: "the current execution is never pruned",
            instance: instance.to_owned(),
            detail: format!("{client} prunes execution {pruned} while {} is the current one", observed.execution),
        });
        self.with(|state| {
            if let Some(plan) = &observed.plan {
                state.begun_by.entry(plan.clone()).or_insert_with(|| client.to_owned());
                state.last_plan.insert(instance.to_owned(), plan.clone());
            }
            state.instances.insert(instance.to_owned(), observed);
        });
        violation
    }

    /// An instance document was deleted.
    pub fn deleted(&self, instance: &str) -> Option<Violation> {
        self.with(|state| {
            let observed = state.instances.remove(instance)?;
            let status = observed.status.clone()?;
            state.deleted_with.entry(instance.to_owned()).or_default().push(status);
            state.deleted_too_early(instance, &observed).or_else(|| state.orphaned_child(instance, &observed))
        })
    }

    fn with<R>(&self, use_state: impl FnOnce(&mut DeletionState) -> R) -> R {
        use_state(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl DeletionState {
    /// The violation if this instance must not be deleted.
    fn deleted_too_early(&self, instance: &str, observed: &ObservedInstance) -> Option<Violation> {
        let client = observed.plan.as_ref().and_then(|plan| self.begun_by.get(plan)).map_or("", String::as_str);
        let root = instance.split("::").next().unwrap_or(instance);
        let purpose = purpose(client);
        let is_allowed = match purpose {
            DeletionPurpose::Retention => observed.has_ended(),
            DeletionPurpose::Bulk => observed.parent.is_some() || observed.has_ended(),
            DeletionPurpose::Named => observed.has_ended() || self.forced.contains(root),
        };
        (!is_allowed).then(|| Violation {
            invariant: "only ended instances are deleted",
            instance: instance.to_owned(),
            detail: format!("{purpose:?} of {client:?} has deleted it while its status was {:?}", observed.status),
        })
    }

    /// The violation if a child remains after the deletion of its parent.
    fn orphaned_child(&self, parent: &str, observed: &ObservedInstance) -> Option<Violation> {
        let remains = |child: &ObservedInstance| child.parent.as_deref() == Some(parent) && child.plan != observed.plan;
        let (name, child) = self.instances.iter().find(|(_, child)| remains(child))?;
        Some(Violation {
            invariant: "no child remains without its parent",
            instance: name.clone(),
            detail: format!("{parent:?} was deleted while the status of its child was {:?}", child.status),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn written(deletions: &Deletions, client: &str, instance: &str, status: &str, parent: Option<&str>, plan: &str) {
        let deleting = (!plan.is_empty()).then(|| json!({ "plan": plan }));
        let document = json!({"status": status, "parent": parent, "execution": 1, "deleting": deleting});
        assert!(deletions.written(client, instance, &document).is_none());
    }

    /// Whether an instance with this status may be deleted by this client.
    fn may_delete(client: &str, status: &str, parent: Option<&str>) -> bool {
        let deletions = Deletions::default();
        written(&deletions, "w0#1", "i", status, parent, "");
        written(&deletions, client, "i", status, parent, "p");
        let violation = deletions.deleted("i");
        assert_eq!((deletions.times("i"), deletions.last_status("i").as_deref()), (1, Some(status)));
        violation.is_none()
    }

    #[test]
    fn only_ended_instances_are_deleted_unless_a_caller_forces_it() {
        assert!(may_delete("retention 0", "Completed", None) && may_delete("final clean-up", "Failed", Some("p")));
        assert!(!may_delete("retention 0", "ContinuedAsNew", Some("p")) && !may_delete("clean-up 1", "Running", None));
        assert!(may_delete("bulk 0", "Failed", None) && may_delete("bulk 0", "Running", Some("p")));
        assert!(
            !may_delete("bulk 0", "Running", None)
                && !may_delete("bulk 0", "ContinuedAsNew", None)
                && !may_delete("client 0", "ContinuedAsNew", None)
        );
        let deletions = Deletions::default();
        deletions.will_be_forced("i");
        written(&deletions, "client 0", "i::sub::2", "Running", None, "p");
        assert_eq!(deletions.deleted("i::sub::2"), None);
    }

    #[test]
    fn a_child_is_deleted_with_its_parent() {
        let deletions = Deletions::default();
        for child in ["a", "b"] {
            written(&deletions, "retention 0", child, "Completed", Some("root"), "p");
        }
        written(&deletions, "retention 0", "root", "Completed", None, "p");
        assert_eq!((deletions.deleted("a"), deletions.deleted("root")), (None, None));
        written(&deletions, "retention 0", "root", "Completed", None, "q");
        assert!(deletions.deleted("root").is_some_and(|violation| violation.instance == "b"));
    }

    #[test]
    fn the_current_execution_and_later_ones_are_never_pruned() {
        let document = |pruning: &[u64]| json!({"status": "Running", "execution": 3, "pruning": pruning});
        let deletions = Deletions::default();
        assert_eq!(deletions.written("w0#1", "i", &document(&[1, 2])), None);
        assert!(deletions.written("w0#1", "i", &document(&[1, 3])).is_some());
    }
}
