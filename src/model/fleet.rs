//! The documents of the fleet: the workers, their wake-up documents, and results that one worker computes for all.

use super::{kind, DocumentId, Millis, Partition, Slot, SlotRange};
use duroxide::providers::{DispatcherCapabilityFilter, TagFilter};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A worker: a process that looks for work. Other workers judge by Cosmos DB's clock whether it is alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MemberDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The name of the worker. Its wake-up document has the same name.
    pub(crate) member: String,
    /// Present while a dispatcher of the worker fetches turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) turns: Option<Capabilities<Versions>>,
    /// Present while a dispatcher of the worker fetches activities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) activities: Option<Capabilities<Tags>>,
    /// The owner ids under which the worker holds sessions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) owners: Vec<String>,
    /// Cosmos DB's time of the last write of the document, in seconds.
    #[serde(rename = "_ts", default, skip_serializing)]
    pub(crate) renewed: u64,
}

/// The work that a worker takes from a queue, and the slots that it polls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capabilities<N> {
    pub(crate) need: N,
    pub(crate) slots: SlotRange,
}

/// The work that dispatchers take from a queue.
pub(crate) trait Need: Clone + PartialEq {
    /// The union of both, or a little more. It only selects the workers that receive a wake-up.
    fn and(self, other: Self) -> Self;
}

/// The versions of duroxide whose turns a worker can run. `None` stands for all versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Versions(pub(crate) Option<(String, String)>);

/// The activities that a worker runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Tags {
    /// All activities, whatever their tag.
    pub(crate) any: bool,
    /// Activities without a tag.
    pub(crate) untagged: bool,
    /// Activities with one of these tags.
    pub(crate) tags: BTreeSet<String>,
}

impl MemberDocument {
    pub(crate) fn partition() -> Partition {
        Partition::system("fleet")
    }

    pub(crate) fn document_id(member: &str) -> DocumentId {
        DocumentId::new("member", &[member])
    }

    pub(crate) fn new(member: &str) -> Self {
        Self {
            id: Self::document_id(member),
            instance_id: Self::partition(),
            kind: kind::MEMBER.to_owned(),
            member: member.to_owned(),
            turns: None,
            activities: None,
            owners: Vec::new(),
            renewed: 0,
        }
    }
}

impl From<Option<&DispatcherCapabilityFilter>> for Versions {
    /// Only the first range of the capability filter counts.
    fn from(filter: Option<&DispatcherCapabilityFilter>) -> Self {
        let range = filter.and_then(|filter| filter.supported_duroxide_versions.first());
        Self(range.map(|range| (range.min.to_string(), range.max.to_string())))
    }
}

impl Need for Versions {
    fn and(self, other: Self) -> Self {
        let parse = |version: &String| semver::Version::parse(version).ok();
        let lower = |a: String, b: String| if parse(&a) <= parse(&b) { a } else { b };
        let higher = |a: String, b: String| if parse(&a) >= parse(&b) { a } else { b };
        let both = self.0.zip(other.0);
        Self(both.map(|((min, max), (other_min, other_max))| (lower(min, other_min), higher(max, other_max))))
    }
}

impl Need for Tags {
    fn and(mut self, other: Self) -> Self {
        self.tags.extend(other.tags);
        Self { any: self.any || other.any, untagged: self.untagged || other.untagged, tags: self.tags }
    }
}

impl Versions {
    /// Whether the worker can run a turn that is pinned to this version.
    pub(crate) fn run(&self, pinned: Option<&semver::Version>) -> bool {
        let parse = |version: &String| semver::Version::parse(version).ok();
        match (&self.0, pinned) {
            (Some((min, max)), Some(pinned)) => {
                parse(min).is_none_or(|min| min <= *pinned) && parse(max).is_none_or(|max| *pinned <= max)
            }
            _ => true,
        }
    }
}

impl From<&TagFilter> for Tags {
    fn from(filter: &TagFilter) -> Self {
        let some = |tags: &std::collections::HashSet<String>| tags.iter().cloned().collect();
        let (any, untagged, tags) = match filter {
            TagFilter::Any => (true, true, BTreeSet::new()),
            TagFilter::DefaultOnly => (false, true, BTreeSet::new()),
            TagFilter::DefaultAnd(tags) => (false, true, some(tags)),
            TagFilter::Tags(tags) => (false, false, some(tags)),
            TagFilter::None => (false, false, BTreeSet::new()),
        };
        Self { any, untagged, tags }
    }
}

impl Tags {
    /// Whether the worker runs an activity with this tag.
    pub(crate) fn run(&self, tag: Option<&str>) -> bool {
        match tag {
            _ if self.any => true,
            None => self.untagged,
            Some(tag) => self.tags.contains(tag),
        }
    }
}

/// The wake-up document of a worker. The worker reads it several times a second, so it is small and alone in its
/// partition. Each wake-up replaces it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WakeupDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The id of the last wake-up.
    pub(crate) wakeup_id: String,
    /// The sender of the last wake-up.
    pub(crate) from: String,
    /// The slots that have new turns.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) turns: BTreeSet<Slot>,
    /// The slots that have new activities.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) activities: BTreeSet<Slot>,
    /// The slots that have more activities than the workers that know of them can start soon.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) help: BTreeSet<Slot>,
    /// Whether a worker has joined or left.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) list: bool,
}

impl WakeupDocument {
    pub(crate) fn partition(member: &str) -> Partition {
        Partition::wakeup(member)
    }

    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("wakeup", &[])
    }

    /// A document without a wake-up.
    pub(crate) fn new(member: &str, from: &str, wakeup_id: String) -> Self {
        Self {
            id: Self::document_id(),
            instance_id: Self::partition(member),
            kind: kind::WAKEUP.to_owned(),
            wakeup_id,
            from: from.to_owned(),
            turns: BTreeSet::new(),
            activities: BTreeSet::new(),
            help: BTreeSet::new(),
            list: false,
        }
    }
}

/// A result that one worker computed for all workers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SharedResult<T> {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The time of the computation, by the clock of the worker that computed it.
    pub(crate) at: Millis,
    pub(crate) result: T,
}

impl<T> SharedResult<T> {
    pub(crate) fn partition() -> Partition {
        Partition::system("sharedResult")
    }

    pub(crate) fn document_id(name: &str) -> DocumentId {
        DocumentId::new("sharedResult", &[name])
    }

    pub(crate) fn new(name: &str, at: Millis, result: T) -> Self {
        let (id, instance_id) = (Self::document_id(name), Self::partition());
        Self { id, instance_id, kind: kind::SHARED_RESULT.to_owned(), at, result }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_union_of_two_needs_takes_the_work_of_both() {
        let range = |min: &str, max: &str| Versions(Some((min.to_owned(), max.to_owned())));
        assert_eq!(range("0.1.9", "0.1.20").and(range("0.1.10", "0.2.0")), range("0.1.9", "0.2.0"));
        assert_eq!(range("0.1.0", "0.2.0").and(Versions(None)), Versions(None), "one of them runs all versions");
        let tags = |names: &[&str]| TagFilter::Tags(names.iter().map(|name| (*name).to_owned()).collect());
        let both = Tags::from(&tags(&["gpu"])).and(Tags::from(&TagFilter::DefaultOnly));
        assert!(both.run(Some("gpu")) && both.run(None) && !both.run(Some("cpu")));
        assert!(both.and(Tags::from(&TagFilter::Any)).run(Some("cpu")));
    }

    #[test]
    fn a_document_takes_the_same_tags_as_its_filter() {
        let tags = |names: &[&str]| -> HashSet<String> { names.iter().map(|name| (*name).to_owned()).collect() };
        let filters = [
            TagFilter::Any,
            TagFilter::None,
            TagFilter::DefaultOnly,
            TagFilter::DefaultAnd(tags(&["gpu"])),
            TagFilter::Tags(tags(&["gpu", "cpu"])),
        ];
        for filter in filters {
            let said = Tags::from(&filter);
            for tag in [None, Some("gpu"), Some("cpu"), Some("other")] {
                assert_eq!(said.run(tag), filter.matches(tag), "{filter:?} and {tag:?}");
            }
        }
    }
}
