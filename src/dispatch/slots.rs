//! Slots: 256 equal ranges of the partition key's own hash, leased to dispatchers.
//!
//! A slot comes from the hash that the service itself places a partition by, which never changes, so that a range of slots is
//! a range of the container. A dispatcher prefers the slots that it leases and takes from others when it has nothing to
//! do, so that no slot is ever unserved.

use crate::model::Partition;
use azure_data_cosmos::{
    feed::FeedRange,
    models::{PartitionKeyDefinition, PartitionKeyVersion},
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

/// How many slots there are.
pub const SLOTS: usize = 256;

/// One of [`SLOTS`] ranges of the partition key's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u8);

impl Slot {
    /// The slot of a partition.
    pub(crate) fn of(partition: &Partition) -> Self {
        let definition = PartitionKeyDefinition::from("/instanceId").with_version(PartitionKeyVersion::V2);
        let range = FeedRange::for_partition(partition.into(), &definition);
        Self::of_hash(&range.min_inclusive().to_string())
    }

    /// The slot of a hash in hex: its upper bits, without the two that version 2 leaves empty.
    fn of_hash(hash: &str) -> Self {
        let byte = |at: usize| hash.get(at..at + 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()).unwrap_or(0);
        Self((byte(0) & 0x3f) << 2 | byte(2) >> 6)
    }

    /// The slot's number.
    pub fn number(self) -> u8 {
        self.0
    }
}

/// Divides the slots among those who look for work.
///
/// The implementation in memory splits them among the dispatchers of one runtime. One that leases them through documents of
/// the container would split them among runtimes.
pub trait LeaseProvider: Send + Sync {
    /// Leases slots to a caller until the lease is dropped.
    fn lease(&self) -> SlotLease;
}

/// The slots that a caller has, until it is dropped.
pub struct SlotLease {
    registry: Arc<Mutex<Registry>>,
    place: usize,
    expected: usize,
}

#[derive(Default)]
struct Registry {
    /// How many callers share each place.
    places: BTreeMap<usize, usize>,
}

/// Leases in memory, for the dispatchers of one runtime.
pub struct InMemoryLeases {
    registry: Arc<Mutex<Registry>>,
    expected: usize,
}

impl InMemoryLeases {
    /// Splits the slots among `expected` dispatchers; more than that share.
    pub fn new(expected: usize) -> Self {
        Self { registry: Arc::default(), expected: expected.clamp(1, SLOTS) }
    }
}

impl LeaseProvider for InMemoryLeases {
    fn lease(&self) -> SlotLease {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        // The place that the fewest have, the first of those.
        let place = (0..self.expected)
            .min_by_key(|place| (registry.places.get(place).copied().unwrap_or(0), *place))
            .unwrap_or(0);
        *registry.places.entry(place).or_default() += 1;
        SlotLease { registry: self.registry.clone(), place, expected: self.expected }
    }
}

impl SlotLease {
    /// Whether the caller has this slot: its own place's, and those of places that nobody has.
    pub fn has(&self, slot: Slot) -> bool {
        let place = usize::from(slot.0) * self.expected / SLOTS;
        if place == self.place {
            return true;
        }
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let vacant = !registry.places.contains_key(&place);
        // A vacant place is served by the first that is taken.
        vacant && registry.places.keys().next() == Some(&self.place)
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = registry.places.get_mut(&self.place) {
            *count -= 1;
            if *count == 0 {
                registry.places.remove(&self.place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served_by(leases: &[SlotLease]) -> Vec<usize> {
        (0..SLOTS).map(|n| leases.iter().filter(|l| l.has(Slot(n as u8))).count()).collect()
    }

    #[test]
    fn every_slot_is_served_by_however_many_callers() {
        let provider = InMemoryLeases::new(4);
        let mut leases = Vec::new();
        for _ in 0..9 {
            leases.push(provider.lease());
            assert!(served_by(&leases).iter().all(|count| *count >= 1), "{} callers", leases.len());
        }
        assert!(served_by(&leases[..4]).iter().all(|count| *count == 1));
    }

    #[test]
    fn a_caller_that_ends_gives_its_slots_back() {
        let provider = InMemoryLeases::new(2);
        let first = provider.lease();
        let second = provider.lease();
        assert_eq!((0..SLOTS).filter(|n| first.has(Slot(*n as u8))).count(), SLOTS / 2);
        drop(second);
        assert_eq!((0..SLOTS).filter(|n| first.has(Slot(*n as u8))).count(), SLOTS);
    }

    #[test]
    fn slots_come_from_a_hash_that_never_changes_and_spread_evenly() {
        let slot = |name: &str| Slot::of(&Partition::instance(name).unwrap()).number();
        assert_eq!(["order-1", "order-2", "", "🦀"].map(slot), [224, 101, 203, 120]);
        let mut counts = [0usize; SLOTS];
        for n in 0..25_600 {
            counts[usize::from(slot(&format!("instance-{n}")))] += 1;
        }
        assert!(counts.iter().all(|count| (40..200).contains(count)), "{counts:?}");
    }
}
