//! When the queue of an instance was last asked for.
//!
//! A turn on messages that this process has put there itself need not ask for others. But an instance that always has such would
//! never see what others send it, a cancellation say: so it asks once a second.

use crate::model::{Millis, Partition};
use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
};

/// As many instances as can be busy here at once, and more; who is forgotten asks once more than it need.
const LIMIT: usize = 8_192;
/// How long an answer holds.
const FRESH: Millis = 1_000;

/// The last instances whose queues were asked for.
#[derive(Default)]
pub(super) struct Asked(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    at: HashMap<Partition, Millis>,
    order: VecDeque<Partition>,
}

impl Asked {
    /// The queue of an instance was asked for then.
    pub(super) fn note(&self, partition: &Partition, now: Millis) {
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.at.insert(partition.clone(), now).is_none() {
            inner.order.push_back(partition.clone());
        }
        while inner.order.len() > LIMIT {
            if let Some(oldest) = inner.order.pop_front() {
                inner.at.remove(&oldest);
            }
        }
    }

    /// Whether what was known then still holds.
    pub(super) fn is_fresh(&self, partition: &Partition, now: Millis) -> bool {
        let inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        inner.at.get(partition).is_some_and(|at| at + FRESH > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
