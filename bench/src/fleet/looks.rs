//! How much one look at the queues brings: what the answers to queries across instances weigh.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use duroxide_cosmos_emulator::{RequestKind, WireAnswer, WireRequest};

/// The largest so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Largest {
    /// Bytes of one answer.
    pub answer: usize,
    /// Bytes of one look: the same query on every physical partition that it asks, and all pages.
    pub look: usize,
}

/// The looks at an account's queues, by what is asked.
#[derive(Default)]
pub struct Looks {
    largest: Largest,
    /// By client and query. A query on a partition that it has asked before is a new look.
    under_way: HashMap<u64, Look>,
}

#[derive(Default)]
struct Look {
    partitions: HashSet<Option<String>>,
    bytes: usize,
}

impl Looks {
    /// Takes an exchange into account.
    pub fn note(&mut self, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
        let across = request.kind == RequestKind::Query && request.partition_key.is_none();
        if !across || answer.status >= 400 {
            return;
        }
        let mut hasher = DefaultHasher::new();
        (request.client, request.body).hash(&mut hasher);
        let is_first = request.continuation.is_none();
        self.add(hasher.finish(), request.partition_range, is_first, answer.body.len());
    }

    /// Adds a page of a query on a partition: the first one, or one that follows.
    fn add(&mut self, query: u64, partition: Option<&str>, is_first: bool, bytes: usize) {
        let look = self.under_way.entry(query).or_default();
        let partition = partition.map(str::to_owned);
        if is_first && !look.partitions.insert(partition.clone()) {
            *look = Look { partitions: HashSet::from([partition]), bytes: 0 };
        }
        look.bytes += bytes;
        self.largest.look = self.largest.look.max(look.bytes);
        self.largest.answer = self.largest.answer.max(bytes);
    }

    /// The largest since this was last asked.
    pub fn take(&mut self) -> Largest {
        std::mem::take(self).largest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_is_the_same_query_on_every_partition_and_all_pages() {
        let mut looks = Looks::default();
        for (partition, is_first, bytes) in [("0", true, 10), ("0", false, 5), ("1", true, 7), ("0", true, 20)] {
            looks.add(1, Some(partition), is_first, bytes);
        }
        looks.add(2, None, true, 9);
        let largest = looks.take();
        assert_eq!((largest.answer, largest.look), (20, 22));
        assert_eq!(looks.take().look, 0);
    }
}
