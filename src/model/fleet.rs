//! The documents of the fleet: who is there, the bell that each can be woken with, and what one has worked out for all.

use super::{kind, DocumentId, Millis, Partition, Slot, SlotRange};
use duroxide::providers::{DispatcherCapabilityFilter, TagFilter};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A process that looks for work. Who is alive is judged by the service's own clock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MemberDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// The name of its bell.
    pub(crate) member: String,
    /// Present while somebody there waits for turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) turns: Option<Capabilities<Versions>>,
    /// Present while somebody there waits for activities.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) work: Option<Capabilities<Tags>>,
    /// As whom its workers own sessions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) owners: Vec<String>,
    /// When the service last took it, in seconds.
    #[serde(rename = "_ts", default, skip_serializing)]
    pub(crate) renewed: u64,
}

/// What a member takes of a queue, and which slots it looks after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Capabilities<N> {
    pub(crate) need: N,
    pub(crate) slots: SlotRange,
}

/// What dispatchers take of a queue.
pub(crate) trait Need: Clone + PartialEq {
    /// What this one and another take together, or a little more: it only decides who is told of what.
    fn and(self, other: Self) -> Self;
}

/// The versions of duroxide whose turns a process can run; none where it runs all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Versions(pub(crate) Option<(String, String)>);

/// The activities that a process runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Tags {
    /// All of them, whatever their tag.
    pub(crate) any: bool,
    /// Those without a tag.
    pub(crate) untagged: bool,
    /// Those with one of these.
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
            work: None,
            owners: Vec::new(),
            renewed: 0,
        }
    }
}

impl From<Option<&DispatcherCapabilityFilter>> for Versions {
    /// Of the capability filter only the first range counts.
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
    /// Whether a turn pinned to this version can be run.
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
    /// Whether an activity with this tag is run.
    pub(crate) fn run(&self, tag: Option<&str>) -> bool {
        match tag {
            _ if self.any => true,
            None => self.untagged,
            Some(tag) => self.tags.contains(tag),
        }
    }
}

/// What wakes a member: looked at several times a second, so it is small and alone in its partition. Each ring replaces it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct WakeupDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Different with every ring.
    pub(crate) ring: String,
    /// Who rang.
    pub(crate) from: String,
    /// Where there is something to take.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) turns: BTreeSet<Slot>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) work: BTreeSet<Slot>,
    /// Where there are more activities than those who know of them can run soon.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) help: BTreeSet<Slot>,
    /// Somebody has come or gone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) list: bool,
}

impl WakeupDocument {
    pub(crate) fn partition(member: &str) -> Partition {
        Partition::bell(member)
    }

    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("wakeup", &[])
    }

    /// A bell that nobody has rung yet.
    pub(crate) fn new(member: &str, from: &str, ring: String) -> Self {
        Self {
            id: Self::document_id(),
            instance_id: Self::partition(member),
            kind: kind::WAKEUP.to_owned(),
            ring,
            from: from.to_owned(),
            turns: BTreeSet::new(),
            work: BTreeSet::new(),
            help: BTreeSet::new(),
            list: false,
        }
    }
}

/// What one process has worked out for all.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SharedResult<T> {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// When, by the clock of the one that did.
    pub(crate) at: Millis,
    pub(crate) answer: T,
}

impl<T> SharedResult<T> {
    pub(crate) fn partition() -> Partition {
        Partition::system("sharedResult")
    }

    pub(crate) fn document_id(name: &str) -> DocumentId {
        DocumentId::new("sharedResult", &[name])
    }

    pub(crate) fn new(name: &str, at: Millis, answer: T) -> Self {
        let (id, instance_id) = (Self::document_id(name), Self::partition());
        Self { id, instance_id, kind: kind::SHARED_RESULT.to_owned(), at, answer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn two_that_take_different_things_take_both_together() {
        let range = |min: &str, max: &str| Versions(Some((min.to_owned(), max.to_owned())));
        assert_eq!(range("0.1.9", "0.1.20").and(range("0.1.10", "0.2.0")), range("0.1.9", "0.2.0"));
        assert_eq!(range("0.1.0", "0.2.0").and(Versions(None)), Versions(None), "one of them runs all");
        let tags = |names: &[&str]| TagFilter::Tags(names.iter().map(|name| (*name).to_owned()).collect());
        let both = Tags::from(&tags(&["gpu"])).and(Tags::from(&TagFilter::DefaultOnly));
        assert!(both.run(Some("gpu")) && both.run(None) && !both.run(Some("cpu")));
        assert!(both.and(Tags::from(&TagFilter::Any)).run(Some("cpu")));
    }

    #[test]
    fn what_a_filter_takes_is_what_its_document_says() {
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
