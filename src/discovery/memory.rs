//! A bounded memory of the most recent keys.

use std::{
    collections::{HashMap, VecDeque},
    hash::Hash,
};

/// What is known of the last `LIMIT` keys that were noted first.
pub(super) struct Memory<K, V> {
    known: HashMap<K, V>,
    order: VecDeque<K>,
}

/// As many as are under way here at once, many times over.
pub(super) const LIMIT: usize = 8_192;

impl<K, V> Default for Memory<K, V> {
    fn default() -> Self {
        Self { known: HashMap::new(), order: VecDeque::new() }
    }
}

impl<K: Clone + Eq + Hash, V: Copy + Default> Memory<K, V> {
    /// Changes what is known of a key; the one that was noted first is forgotten where there are too many.
    pub(super) fn note(&mut self, key: K, change: impl FnOnce(&mut V)) {
        if !self.known.contains_key(&key) {
            self.order.push_back(key.clone());
        }
        change(self.known.entry(key).or_default());
        if self.order.len() > LIMIT {
            if let Some(oldest) = self.order.pop_front() {
                self.known.remove(&oldest);
            }
        }
    }

    /// What is known of a key.
    pub(super) fn get(&self, key: &K) -> Option<V> {
        self.known.get(key).copied()
    }
}
