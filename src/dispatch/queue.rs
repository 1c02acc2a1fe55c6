//! The ready queue: hints about what may be taken, in memory. A hint is never the truth: the claim decides.
//!
//! A key is in the queue once. Hints that can be tried now wait in the order of their sequence keys, others until they are
//! due. While a key is busy (a claim is under way, or this process holds what it names), hints for it are kept but not
//! handed out.

use crate::model::Millis;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
    sync::{Mutex, PoisonError},
};
use tokio::sync::Notify;

/// Hints of one kind.
pub(super) struct Queue<K, H> {
    inner: Mutex<Inner<K, H>>,
    /// Told when something may have become ready.
    pub(super) changed: Notify,
}

struct Inner<K, H> {
    entries: HashMap<K, Entry<H>>,
    /// What can be tried now, oldest first.
    ready: BTreeSet<(String, K)>,
    /// What can be tried later, soonest first.
    later: BTreeSet<(Millis, K)>,
    /// Keys that are not handed out until then.
    busy: BTreeMap<K, Millis>,
    /// When a hint that fits nobody now may fit somebody.
    alarms: BTreeSet<Millis>,
}

struct Entry<H> {
    hint: H,
    seq: String,
    /// When it becomes visible.
    due: Millis,
    /// An attempt said to come back then; only news of another kind makes it earlier.
    not_before: Millis,
}

/// A hint as it is offered.
pub(super) struct Offer<K, H> {
    pub(super) key: K,
    pub(super) hint: H,
    pub(super) seq: String,
    pub(super) due: Millis,
    /// Overrides what an earlier attempt said about coming back.
    pub(super) urgent: bool,
}

impl<K: Clone + Eq + Hash + Ord, H> Queue<K, H> {
    pub(super) fn new() -> Self {
        let inner = Inner {
            entries: HashMap::new(),
            ready: BTreeSet::new(),
            later: BTreeSet::new(),
            busy: BTreeMap::new(),
            alarms: BTreeSet::new(),
        };
        Self { inner: Mutex::new(inner), changed: Notify::new() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner<K, H>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a hint, or brings one that is there forward. `merge` puts the new hint into the old one.
    pub(super) fn offer(&self, offer: Offer<K, H>, now: Millis, merge: impl FnOnce(&mut H, H)) {
        self.lock().offer(offer, now, merge);
        self.changed.notify_waiters();
    }

    /// Takes the oldest hint that can be tried now and that fits; it is busy until `busy_until`.
    pub(super) fn take(
        &self,
        now: Millis,
        busy_until: Millis,
        fits: impl Fn(&K, &H) -> bool,
    ) -> Option<(K, H, String)> {
        self.lock().take(now, busy_until, fits)
    }

    /// Whether a hint that can be tried now is such a one.
    pub(super) fn has_ready(&self, now: Millis, such: impl Fn(&H) -> bool) -> bool {
        let mut inner = self.lock();
        inner.promote(now);
        let inner = &*inner;
        inner.ready.iter().any(|(_, key)| inner.entries.get(key).is_some_and(|entry| such(&entry.hint)))
    }

    /// Puts a hint back after an attempt that did not succeed, to be tried again at `not_before`, or earlier when the key
    /// becomes free.
    pub(super) fn put_back(
        &self,
        key: K,
        hint: H,
        seq: String,
        not_before: Millis,
        now: Millis,
        merge: impl FnOnce(&mut H, H),
    ) {
        {
            let mut inner = self.lock();
            inner.busy.remove(&key);
            inner.offer(Offer { key: key.clone(), hint, seq, due: 0, urgent: false }, now, merge);
            if let Some(mut entry) = inner.remove(&key) {
                entry.not_before = not_before;
                inner.insert(key, entry, now);
            }
        }
        self.changed.notify_waiters();
    }

    /// Keeps a key from being handed out until then.
    pub(super) fn set_busy(&self, key: &K, until: Millis, now: Millis) {
        let mut inner = self.lock();
        inner.busy.insert(key.clone(), until);
        inner.refile(key, now);
    }

    /// Nobody here has a key any more; what an attempt said about coming back still holds.
    pub(super) fn set_idle(&self, key: &K, now: Millis) {
        let mut inner = self.lock();
        inner.busy.remove(key);
        inner.refile(key, now);
    }

    /// A key is free again: hints that came in the meantime can be tried.
    pub(super) fn set_free(&self, key: &K, now: Millis) {
        {
            let mut inner = self.lock();
            inner.busy.remove(key);
            // What an attempt said about coming back was about this process's own hold on it.
            if let Some(mut entry) = inner.remove(key) {
                entry.not_before = 0;
                inner.insert(key.clone(), entry, now);
            }
        }
        self.changed.notify_waiters();
    }

    /// When the next hint becomes ready, or may fit somebody, if one will.
    pub(super) fn next_due(&self) -> Option<Millis> {
        let inner = self.lock();
        let later = inner.later.first().map(|(due, _)| *due);
        later.into_iter().chain(inner.alarms.first().copied()).min()
    }

    /// Wakes waiters then, for a hint that fits nobody until then.
    pub(super) fn wake_at(&self, time: Millis) {
        self.lock().alarms.insert(time);
    }

    /// The keys that are known, so that a poll need not return them again: those that it would return first come first.
    pub(super) fn known(&self, limit: usize, now: Millis) -> Vec<K> {
        let mut inner = self.lock();
        inner.busy.retain(|_, until| *until > now);
        let waiting = inner.ready.iter().map(|(_, key)| key).chain(inner.later.iter().map(|(_, key)| key));
        inner.busy.keys().chain(waiting).take(limit).cloned().collect()
    }

    /// Whether a key is busy.
    pub(super) fn is_busy(&self, key: &K, now: Millis) -> bool {
        self.lock().busy.get(key).is_some_and(|until| *until > now)
    }

    /// The hint for a key, if it is in the queue.
    pub(super) fn peek<R>(&self, key: &K, look: impl FnOnce(&H) -> R) -> Option<R> {
        self.lock().entries.get(key).map(|entry| look(&entry.hint))
    }

    /// How many hints there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().entries.len()
    }
}

impl<K: Clone + Eq + Hash + Ord, H> Inner<K, H> {
    fn offer(&mut self, offer: Offer<K, H>, now: Millis, merge: impl FnOnce(&mut H, H)) {
        let Offer { key, hint, seq, due, urgent } = offer;
        let entry = match self.remove(&key) {
            None => Entry { hint, seq, due, not_before: 0 },
            Some(mut entry) => {
                merge(&mut entry.hint, hint);
                entry.seq = entry.seq.min(seq);
                if urgent {
                    entry.not_before = 0;
                }
                entry.due = entry.due.min(due);
                entry
            }
        };
        self.insert(key, entry, now);
    }

    fn insert(&mut self, key: K, entry: Entry<H>, now: Millis) {
        let busy_until = self.busy.get(&key).copied().unwrap_or(0);
        let from = entry.due.max(entry.not_before).max(busy_until);
        if from <= now {
            self.ready.insert((entry.seq.clone(), key.clone()));
        } else {
            self.later.insert((from, key.clone()));
        }
        self.entries.insert(key, entry);
    }

    fn remove(&mut self, key: &K) -> Option<Entry<H>> {
        let entry = self.entries.remove(key)?;
        if !self.ready.remove(&(entry.seq.clone(), key.clone())) {
            // The time under which it was filed is not kept, and few wait.
            self.later.retain(|(_, k)| k != key);
        }
        Some(entry)
    }

    fn refile(&mut self, key: &K, now: Millis) {
        if let Some(entry) = self.remove(key) {
            self.insert(key.clone(), entry, now);
        }
    }

    fn promote(&mut self, now: Millis) {
        while self.alarms.first().is_some_and(|time| *time <= now) {
            self.alarms.pop_first();
        }
        while let Some((_, key)) = self.later.first().filter(|(due, _)| *due <= now).cloned() {
            self.later.pop_first();
            if self.busy.get(&key).is_some_and(|until| *until <= now) {
                self.busy.remove(&key);
            }
            if let Some(entry) = self.entries.get(&key) {
                self.ready.insert((entry.seq.clone(), key));
            }
        }
    }

    fn take(&mut self, now: Millis, busy_until: Millis, fits: impl Fn(&K, &H) -> bool) -> Option<(K, H, String)> {
        self.promote(now);
        let (_, key) = self
            .ready
            .iter()
            .find(|(_, key)| self.entries.get(key).is_some_and(|entry| fits(key, &entry.hint)))?
            .clone();
        let entry = self.remove(&key)?;
        self.busy.insert(key.clone(), busy_until);
        Some((key, entry.hint, entry.seq))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(queue: &Queue<&'static str, u32>, key: &'static str, seq: &str, due: Millis, now: Millis) {
        let offer = Offer { key, hint: 0, seq: seq.to_owned(), due, urgent: false };
        queue.offer(offer, now, |_, _| {});
    }

    fn take(queue: &Queue<&'static str, u32>, now: Millis) -> Option<&'static str> {
        queue.take(now, now + 1_000, |_, _| true).map(|(key, _, _)| key)
    }

    #[test]
    fn what_went_in_first_comes_out_first_whenever_it_became_due() {
        let queue = Queue::new();
        offer(&queue, "timer", "1", 500, 0);
        offer(&queue, "late", "3", 0, 0);
        offer(&queue, "early", "2", 0, 0);
        assert_eq!(take(&queue, 10), Some("early"));
        assert_eq!(take(&queue, 500), Some("timer"));
        assert_eq!(take(&queue, 500), Some("late"));
        assert_eq!(take(&queue, 500), None);
    }

    #[test]
    fn a_busy_key_is_not_handed_out_until_it_is_free_or_its_time_is_up() {
        let queue = Queue::new();
        offer(&queue, "a", "1", 0, 0);
        assert_eq!(take(&queue, 0), Some("a"));
        offer(&queue, "a", "2", 0, 0);
        assert_eq!(take(&queue, 10), None);
        queue.set_free(&"a", 20);
        assert_eq!(take(&queue, 20), Some("a"));
        offer(&queue, "a", "3", 0, 30);
        assert_eq!(queue.next_due(), Some(1_020));
        assert_eq!(take(&queue, 1_020), Some("a"));
    }

    #[test]
    fn a_hint_that_fits_nobody_neither_vanishes_nor_blocks() {
        let queue = Queue::new();
        offer(&queue, "odd", "1", 0, 0);
        offer(&queue, "even", "2", 0, 0);
        let taken = queue.take(0, 100, |key, _| *key == "even");
        assert_eq!(taken.map(|(key, _, _)| key), Some("even"));
        assert_eq!(queue.take(0, 100, |key, _| *key == "even").map(|t| t.0), None);
        assert_eq!(take(&queue, 0), Some("odd"));
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn what_is_known_is_told_in_the_same_order_every_time_oldest_first() {
        let queue = Queue::new();
        for (key, seq, due) in [("timer", "1", 500), ("young", "5", 0), ("held", "2", 0), ("old", "3", 0)] {
            offer(&queue, key, seq, due, 0);
        }
        assert_eq!(take(&queue, 0), Some("held"));
        assert_eq!(queue.known(10, 0), ["held", "old", "young", "timer"]);
        assert_eq!(queue.known(2, 0), ["held", "old"]);
    }

    #[test]
    fn a_poll_does_not_bring_forward_what_an_attempt_put_off_but_news_do() {
        let queue = Queue::new();
        offer(&queue, "a", "1", 0, 0);
        let (key, hint, seq) = queue.take(0, 100, |_, _| true).unwrap();
        queue.put_back(key, hint, seq, 50, 0, |_, _| {});
        offer(&queue, "a", "1", 0, 10);
        assert_eq!(take(&queue, 10), None);
        queue.offer(Offer { key: "a", hint: 0, seq: "2".into(), due: 0, urgent: true }, 20, |_, _| {});
        assert_eq!(take(&queue, 20), Some("a"));
    }
}
