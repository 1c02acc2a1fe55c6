//! The event ids of an execution, as a few ranges. A history is contiguous except for a poison event.

use serde::{Deserialize, Serialize};

/// A set of event ids as sorted ranges, both ends included.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct EventSet(Vec<(u64, u64)>);

impl FromIterator<u64> for EventSet {
    fn from_iter<I: IntoIterator<Item = u64>>(ids: I) -> Self {
        let mut set = Self::default();
        for id in ids {
            set.insert(id);
        }
        set
    }
}

impl EventSet {
    /// Whether the id is in the set.
    pub(crate) fn contains(&self, id: u64) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&id))
    }

    /// Adds an id. Returns `false` if the set already has it.
    pub(crate) fn insert(&mut self, id: u64) -> bool {
        if self.contains(id) {
            return false;
        }
        let at = self.0.partition_point(|(first, _)| *first < id);
        self.0.insert(at, (id, id));
        self.merge();
        true
    }

    /// The highest id, or 0 for an empty set.
    pub(crate) fn last(&self) -> u64 {
        self.0.last().map_or(0, |(_, last)| *last)
    }

    /// The number of ids.
    pub(crate) fn len(&self) -> u64 {
        self.0.iter().map(|(first, last)| last - first + 1).sum()
    }

    fn merge(&mut self) {
        self.0.dedup_by(|next, before| {
            let adjacent = before.1 + 1 == next.0;
            if adjacent {
                before.1 = next.1;
            }
            adjacent
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_contiguous_history_is_one_range_and_a_poison_event_another() {
        let mut set = EventSet::default();
        for id in 1..=1_000 {
            assert!(set.insert(id));
        }
        assert!(set.insert(99_999));
        assert!(!set.insert(99_999));
        assert_eq!(serde_json::to_string(&set).unwrap(), "[[1,1000],[99999,99999]]");
    }

    proptest! {
        #[test]
        fn it_is_a_set(ids in proptest::collection::vec(1u64..60, 0..80)) {
            let mut set = EventSet::default();
            let mut reference = std::collections::BTreeSet::new();
            for id in ids {
                prop_assert_eq!(set.insert(id), reference.insert(id));
            }
            prop_assert_eq!(set.len(), reference.len() as u64);
            prop_assert_eq!(set.last(), reference.last().copied().unwrap_or(0));
            for id in 0..61 {
                prop_assert_eq!(set.contains(id), reference.contains(&id));
            }
        }
    }
}
