//! Slots: 256 equal ranges of the partition key's hash.
//!
//! A slot derives from the hash by which Cosmos DB itself places a partition. That hash never changes, so a range of
//! slots is a range of the container.

use super::Partition;
use azure_data_cosmos::{
    feed::FeedRange,
    models::{PartitionKeyDefinition, PartitionKeyVersion},
};
use serde::{Deserialize, Serialize};

/// The number of slots.
pub const SLOTS: u16 = 256;

/// One of [`SLOTS`] ranges of the partition key's hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slot(u8);

impl Slot {
    /// The slot of an instance.
    pub fn of_instance(instance: &str) -> Self {
        Partition::instance(instance).map_or(Self(0), |partition| Self::of(&partition))
    }

    /// The slot of a partition.
    pub(crate) fn of(partition: &Partition) -> Self {
        let definition = PartitionKeyDefinition::from("/instanceId").with_version(PartitionKeyVersion::V2);
        let range = FeedRange::for_partition(partition.into(), &definition);
        Self::of_hash(&range.min_inclusive().to_string())
    }

    /// The slot of a hash in hex: its upper bits, without the two bits that version 2 of the hash leaves empty.
    fn of_hash(hash: &str) -> Self {
        let byte = |at: usize| hash.get(at..at + 2).and_then(|hex| u8::from_str_radix(hex, 16).ok()).unwrap_or(0);
        Self((byte(0) & 0x3f) << 2 | byte(2) >> 6)
    }

    /// The number of the slot.
    pub fn number(self) -> u8 {
        self.0
    }
}

/// A contiguous range of slots. It may be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotRange {
    from: u16,
    to: u16,
}

impl std::fmt::Display for SlotRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.to.checked_sub(1).filter(|_| self.from < self.to) {
            Some(last) => write!(f, "{} to {last}", self.from),
            None => write!(f, "none"),
        }
    }
}

impl SlotRange {
    /// Every slot.
    pub const ALL: Self = Self { from: 0, to: SLOTS };
    /// No slot.
    pub const NONE: Self = Self { from: 0, to: 0 };

    /// The slots from `from` to before `to`. Numbers beyond the last slot are ignored.
    pub fn new(from: u16, to: u16) -> Self {
        let to = to.min(SLOTS);
        Self { from: from.min(to), to }
    }

    /// One of `parts` ranges that divide all slots equally. Their sizes differ by one slot at most.
    pub fn part(position: usize, parts: usize) -> Self {
        let cut = |position: usize| u16::try_from(usize::from(SLOTS) * position / parts.max(1)).unwrap_or(SLOTS);
        Self::new(cut(position), cut(position.saturating_add(1)))
    }

    /// The first slot, and the slot after the last.
    pub fn bounds(self) -> (u16, u16) {
        (self.from, self.to)
    }

    /// Whether the range has this slot.
    pub fn contains(self, slot: Slot) -> bool {
        (self.from..self.to).contains(&u16::from(slot.0))
    }

    /// Whether the range has no slot.
    pub fn is_empty(self) -> bool {
        self.from >= self.to
    }

    /// Whether both ranges share a slot.
    pub(crate) fn overlaps(self, other: Self) -> bool {
        self.from.max(other.from) < self.to.min(other.to)
    }

    /// The slots that a range of the container holds, including slots that it holds in part.
    pub(crate) fn of_feed_range(range: &FeedRange) -> Self {
        let (min, max) = (range.min_inclusive().to_string(), range.max_exclusive().to_string());
        let from = if min.is_empty() { 0 } else { u16::from(Slot::of_hash(&min).0) };
        let is_end = max.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok()).is_none_or(|byte| byte > 0x3f);
        let to = if is_end { SLOTS } else { u16::from(Slot::of_hash(&max).0) + u16::from(!is_slot_start(&max)) };
        Self::new(from, to)
    }
}

/// Whether a slot begins exactly at this hash.
fn is_slot_start(hash: &str) -> bool {
    let rest = |at: usize| hash.get(at..).unwrap_or_default().chars().all(|digit| digit == '0');
    let second = hash.get(2..4).and_then(|hex| u8::from_str_radix(hex, 16).ok()).unwrap_or(0);
    second & 0x3f == 0 && rest(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_from_a_hash_that_never_changes_and_spread_evenly() {
        let slot = |name: &str| Slot::of_instance(name).number();
        assert_eq!(["order-1", "order-2", "", "🦀"].map(slot), [224, 101, 203, 120]);
        let mut counts = [0usize; SLOTS as usize];
        for n in 0..25_600 {
            counts[usize::from(slot(&format!("instance-{n}")))] += 1;
        }
        assert!(counts.iter().all(|count| (40..200).contains(count)), "{counts:?}");
    }

    #[test]
    fn parts_cover_every_slot_once_and_differ_by_one_at_most() {
        for parts in [1, 2, 3, 7, 8, 255, 256, 300, 1_000] {
            let ranges: Vec<SlotRange> = (0..parts).map(|position| SlotRange::part(position, parts)).collect();
            for slot in 0..=255 {
                assert_eq!(ranges.iter().filter(|range| range.contains(Slot(slot))).count(), 1, "{parts} parts");
            }
            let sizes: Vec<u16> = ranges.iter().map(|range| range.to - range.from).collect();
            assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{parts} parts");
        }
        assert!(SlotRange::part(1, 0).is_empty() && SlotRange::new(300, 400).is_empty());
    }

    #[test]
    fn a_range_of_the_container_is_a_range_of_slots() {
        assert!(is_slot_start("1540") && is_slot_start("15400000") && is_slot_start("15"));
        assert!(!is_slot_start("1541") && !is_slot_start("154001"));
    }
}
