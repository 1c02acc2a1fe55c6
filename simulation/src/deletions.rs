//! Deletions as the wire sees them: which instances are there, who deletes them, and which of them must not be deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::ledger::Broken;

/// Why a client of the wire deletes instances, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Retention: an instance tree goes once all of it has ended.
    Retention,
    /// A bulk deletion: a root goes once it has ended, with all that descends from it.
    Bulk,
    /// A caller that has named the instance.
    Named,
}

/// How the names of administrators on the wire begin that apply retention.
pub const RETENTION: &str = "retention";
/// How the names of administrators on the wire begin that delete in bulk.
pub const BULK: &str = "bulk";

fn purpose(client: &str) -> Purpose {
    match client {
        client if client.starts_with(RETENTION) || client.contains("heir") => Purpose::Retention,
        client if client.starts_with(BULK) => Purpose::Bulk,
        _ => Purpose::Named,
    }
}

/// The document of an instance, as the wire has last seen it written.
#[derive(Clone, Debug)]
struct Seen {
    status: Option<String>,
    parent: Option<String>,
    execution: u64,
    /// The deletion that has marked it.
    plan: Option<String>,
}

impl Seen {
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
struct State {
    instances: BTreeMap<String, Seen>,
    /// Which client has begun each deletion. Others may finish it.
    begun_by: BTreeMap<String, String>,
    /// With which status each instance of a name was deleted, in order.
    gone: BTreeMap<String, Vec<String>>,
    /// Instances that a caller deletes whether they run or not.
    forced: BTreeSet<String>,
    /// The deletion that has last marked an instance of each name.
    last_plan: BTreeMap<String, String>,
}

/// What is known of deletions.
#[derive(Debug, Default)]
pub struct Deletions(Mutex<State>);

impl Deletions {
    /// A caller deletes this instance whether it runs or not.
    pub fn will_be_forced(&self, instance: &str) {
        self.with(|state| state.forced.insert(instance.to_owned()));
    }

    /// Whether one deletion has taken both.
    pub fn go_together(&self, one: &str, other: &str) -> bool {
        self.with(|state| {
            let plan = |instance: &str| state.last_plan.get(instance);
            plan(one).is_some() && plan(one) == plan(other)
        })
    }

    /// How many instances of this name were deleted.
    pub fn times(&self, instance: &str) -> usize {
        self.with(|state| state.gone.get(instance).map_or(0, Vec::len))
    }

    /// The names of which an instance was deleted.
    pub fn names(&self) -> BTreeSet<String> {
        self.with(|state| state.gone.keys().cloned().collect())
    }

    /// The status that the last instance of this name was deleted with; none where one is there.
    pub fn last_status(&self, instance: &str) -> Option<String> {
        self.with(|state| {
            let is_there = state.instances.get(instance).is_some_and(|seen| seen.status.is_some());
            state.gone.get(instance)?.last().filter(|_| !is_there).cloned()
        })
    }

    /// A client has written the document of an instance.
    pub fn written(&self, client: &str, instance: &str, document: &Value) -> Option<Broken> {
        let seen = Seen::of(document);
        let pruned = document["pruning"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        let pruned = pruned.filter(|execution| *execution >= seen.execution && seen.status.is_some()).max();
        let broken = pruned.map(|pruned| Broken {
            invariant: "the current execution is never pruned",
            instance: instance.to_owned(),
            detail: format!("{client} prunes execution {pruned} while execution {} is the current one", seen.execution),
        });
        self.with(|state| {
            if let Some(plan) = &seen.plan {
                state.begun_by.entry(plan.clone()).or_insert_with(|| client.to_owned());
                state.last_plan.insert(instance.to_owned(), plan.clone());
            }
            state.instances.insert(instance.to_owned(), seen);
        });
        broken
    }

    /// The document of an instance was deleted.
    pub fn deleted(&self, instance: &str) -> Option<Broken> {
        self.with(|state| {
            let seen = state.instances.remove(instance)?;
            let status = seen.status.clone()?;
            state.gone.entry(instance.to_owned()).or_default().push(status);
            state.wrongly_deleted(instance, &seen).or_else(|| state.left_alone(instance, &seen))
        })
    }

    fn with<R>(&self, use_it: impl FnOnce(&mut State) -> R) -> R {
        use_it(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl State {
    /// What is wrong if this instance goes.
    fn wrongly_deleted(&self, instance: &str, seen: &Seen) -> Option<Broken> {
        let client = seen.plan.as_ref().and_then(|plan| self.begun_by.get(plan)).map_or("", String::as_str);
        let root = instance.split("::").next().unwrap_or(instance);
        let purpose = purpose(client);
        let may_go = match purpose {
            Purpose::Retention => seen.has_ended(),
            Purpose::Bulk => seen.parent.is_some() || seen.has_ended(),
            Purpose::Named => seen.has_ended() || self.forced.contains(root),
        };
        (!may_go).then(|| Broken {
            invariant: "nothing is deleted that has not ended",
            instance: instance.to_owned(),
            detail: format!("{purpose:?} of {client:?} has deleted it while its status was {:?}", seen.status),
        })
    }

    /// A child that stays although its parent goes.
    fn left_alone(&self, parent: &str, seen: &Seen) -> Option<Broken> {
        let is_left = |child: &Seen| child.parent.as_deref() == Some(parent) && child.plan != seen.plan;
        let (child, its) = self.instances.iter().find(|(_, child)| is_left(child))?;
        Some(Broken {
            invariant: "no child is left without its parent",
            instance: child.clone(),
            detail: format!("{parent:?} was deleted while the status of its child was {:?}", its.status),
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
    fn may_go(client: &str, status: &str, parent: Option<&str>) -> bool {
        let deletions = Deletions::default();
        written(&deletions, "w0#1", "i", status, parent, "");
        written(&deletions, client, "i", status, parent, "p");
        let broken = deletions.deleted("i");
        assert_eq!((deletions.times("i"), deletions.last_status("i").as_deref()), (1, Some(status)));
        broken.is_none()
    }

    #[test]
    fn only_what_has_ended_goes_unless_a_caller_insists() {
        assert!(may_go("retention 0", "Completed", None) && may_go("last heir", "Failed", Some("p")));
        assert!(!may_go("retention 0", "ContinuedAsNew", Some("p")) && !may_go("heir 1", "Running", None));
        assert!(may_go("bulk 0", "Failed", None) && may_go("bulk 0", "Running", Some("p")));
        assert!(
            !may_go("bulk 0", "Running", None)
                && !may_go("bulk 0", "ContinuedAsNew", None)
                && !may_go("client 0", "ContinuedAsNew", None)
        );
        let deletions = Deletions::default();
        deletions.will_be_forced("i");
        written(&deletions, "client 0", "i::sub::2", "Running", None, "p");
        assert_eq!(deletions.deleted("i::sub::2"), None);
    }

    #[test]
    fn a_child_goes_with_its_parent() {
        let deletions = Deletions::default();
        for child in ["a", "b"] {
            written(&deletions, "retention 0", child, "Completed", Some("root"), "p");
        }
        written(&deletions, "retention 0", "root", "Completed", None, "p");
        assert_eq!((deletions.deleted("a"), deletions.deleted("root")), (None, None));
        written(&deletions, "retention 0", "root", "Completed", None, "q");
        assert!(deletions.deleted("root").is_some_and(|broken| broken.instance == "b"));
    }

    #[test]
    fn the_current_execution_and_later_ones_are_not_pruned() {
        let document = |pruning: &[u64]| json!({"status": "Running", "execution": 3, "pruning": pruning});
        let deletions = Deletions::default();
        assert_eq!(deletions.written("w0#1", "i", &document(&[1, 2])), None);
        assert!(deletions.written("w0#1", "i", &document(&[1, 3])).is_some());
    }
}
