//! When this process last queried the messages of an instance.
//!
//! A turn on messages that this process has enqueued itself needs no query. An instance that always has such messages
//! would never see those of other processes, such as a cancellation. So the process queries once a second.

use super::memory::Memory;
use crate::model::{Millis, Partition};
use std::sync::{Mutex, PoisonError};

/// How long an answer holds.
const FRESH: Millis = 1_000;

/// The last instances whose queues were asked for; who is forgotten asks once more than it need.
#[derive(Default)]
pub(super) struct Asked(Mutex<Memory<Partition, Millis>>);

impl Asked {
    /// The queue of an instance was asked for then.
    pub(super) fn note(&self, partition: &Partition, now: Millis) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note(partition.clone(), |at| *at = now);
    }

    /// Whether what was known then still holds.
    pub(super) fn is_fresh(&self, partition: &Partition, now: Millis) -> bool {
        let at = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(partition);
        at.is_some_and(|at| at + FRESH > now)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::memory::LIMIT, *};

    #[test]
    fn it_holds_for_a_second_and_for_the_last_instances() {
        let asked = Asked::default();
        let partition = |n: usize| Partition::instance(&n.to_string()).unwrap();
        asked.note(&partition(0), 10);
        assert!(asked.is_fresh(&partition(0), 9 + FRESH) && !asked.is_fresh(&partition(0), 10 + FRESH));
        asked.note(&partition(0), 500);
        assert!(asked.is_fresh(&partition(0), 10 + FRESH));
        (1..=LIMIT).for_each(|n| asked.note(&partition(n), 500));
        assert!(!asked.is_fresh(&partition(0), 500) && asked.is_fresh(&partition(LIMIT), 500));
    }
}
