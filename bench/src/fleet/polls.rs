//! The sizes of the answers to polls, which are queries across instances.

use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use duroxide_cosmos_emulator::{RequestKind, WireAnswer, WireRequest};

/// The largest sizes so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct LargestSizes {
    /// Bytes of one answer.
    pub answer: usize,
    /// Bytes of one poll: the same query on every physical partition that it reads, with all pages.
    pub poll: usize,
}

/// The sizes of the polls on an account, by query.
#[derive(Default)]
pub struct PollSizes {
    largest: LargestSizes,
    /// The polls in progress, by client and query. A query on a partition that it has already read begins a new poll.
    in_progress: HashMap<u64, Poll>,
}

#[derive(Default)]
struct Poll {
    partitions: HashSet<Option<String>>,
    bytes: usize,
}

impl PollSizes {
    /// Records a request and its answer.
    pub fn record(&mut self, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
        let across = request.kind == RequestKind::Query && request.partition_key.is_none();
        if !across || answer.status >= 400 {
            return;
        }
        let mut hasher = DefaultHasher::new();
        (request.client, request.body).hash(&mut hasher);
        let is_first = request.continuation.is_none();
        self.add(hasher.finish(), request.partition_range, is_first, answer.body.len());
    }

    /// Adds a page of a query on a partition. `is_first` tells whether it is the first page.
    fn add(&mut self, query: u64, partition: Option<&str>, is_first: bool, bytes: usize) {
        let poll = self.in_progress.entry(query).or_default();
        let partition = partition.map(str::to_owned);
        if is_first && !poll.partitions.insert(partition.clone()) {
            *poll = Poll { partitions: HashSet::from([partition]), bytes: 0 };
        }
        poll.bytes += bytes;
        self.largest.poll = self.largest.poll.max(poll.bytes);
        self.largest.answer = self.largest.answer.max(bytes);
    }

    /// Returns the largest sizes since the last call.
    pub fn take(&mut self) -> LargestSizes {
        std::mem::take(self).largest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poll_is_the_same_query_on_every_partition_with_all_pages() {
        let mut polls = PollSizes::default();
        for (partition, is_first, bytes) in [("0", true, 10), ("0", false, 5), ("1", true, 7), ("0", true, 20)] {
            polls.add(1, Some(partition), is_first, bytes);
        }
        polls.add(2, None, true, 9);
        let largest = polls.take();
        assert_eq!((largest.answer, largest.poll), (20, 22));
        assert_eq!(polls.take().poll, 0);
    }
}
