//! The ready queue: candidates in memory. A candidate decides nothing, the claim decides.
//!
//! The queue has each key once. Candidates that can be tried now are ordered by their sequence keys. The others wait
//! until they are due. A key is busy while a claim is in flight or this process holds its instance or activity. The
//! queue keeps candidates for a busy key but does not hand them out.
//!
//! The queue is bounded. It forgets a candidate that no fetch takes for a while. If it is full, it drops the candidates
//! that are due last. The work stays in the container, and a poll finds it again.

use crate::model::Millis;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::Hash,
    sync::{Mutex, PoisonError},
};
use tokio::sync::Notify;

/// Hints that are kept, and what they may take.
const MOST: usize = 10_000;
const MOST_BYTES: usize = 32 << 20;
/// A candidate that could be tried for so long and fitted nobody is forgotten.
const LIFE: Millis = 60_000;

/// What a candidate takes in memory.
pub(super) trait Weight {
    /// Roughly, in bytes.
    fn bytes(&self) -> usize;
}

/// Hints of one kind.
pub(super) struct ReadyQueue<K, H> {
    inner: Mutex<QueueState<K, H>>,
    /// Told when something may have become ready.
    pub(super) changed: Notify,
}

struct QueueState<K, H> {
    entries: HashMap<K, Entry<H>>,
    /// What can be tried now, oldest first.
    ready: BTreeSet<(String, K)>,
    /// What can be tried later, soonest first.
    later: BTreeSet<(Millis, K)>,
    /// Since when each of the ready ones can be tried.
    since: BTreeSet<(Millis, K)>,
    bytes: usize,
    /// Keys that are not handed out until then.
    busy: BTreeMap<K, Millis>,
    /// When a candidate that fits nobody now may fit somebody.
    alarms: BTreeSet<Millis>,
}

struct Entry<H> {
    candidate: H,
    seq: String,
    /// When it becomes visible.
    due: Millis,
    /// An attempt said to come back then; only news of another kind makes it earlier.
    not_before: Millis,
    filed: Filed,
    bytes: usize,
}

/// Where an entry is.
#[derive(Clone, Copy)]
enum Filed {
    /// Among what can be tried, since then.
    Ready(Millis),
    /// Among what can be tried from then on.
    Later(Millis),
}

/// What becomes of the candidate for a key that somebody begins with.
pub(super) enum Begin {
    /// Nobody begins.
    No,
    /// It stays in the queue.
    Leave,
    /// It is taken out.
    Take,
}

/// When a candidate can be tried whose key is free again.
#[derive(Default)]
pub(super) struct Free {
    pub(super) not_before: Millis,
    /// It is due by then.
    pub(super) due: Option<Millis>,
}

/// A candidate as it is offered.
pub(super) struct Offer<K, H> {
    pub(super) key: K,
    pub(super) candidate: H,
    pub(super) seq: String,
    pub(super) due: Millis,
    /// Overrides what an earlier attempt said about coming back.
    pub(super) urgent: bool,
}

impl<K: Clone + Eq + Hash + Ord, H: Weight> ReadyQueue<K, H> {
    pub(super) fn new() -> Self {
        let inner = QueueState {
            entries: HashMap::new(),
            ready: BTreeSet::new(),
            later: BTreeSet::new(),
            since: BTreeSet::new(),
            bytes: 0,
            busy: BTreeMap::new(),
            alarms: BTreeSet::new(),
        };
        Self { inner: Mutex::new(inner), changed: Notify::new() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, QueueState<K, H>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a candidate, or brings one that is there forward. `merge` puts the new candidate into the old one.
    pub(super) fn offer(&self, offer: Offer<K, H>, now: Millis, merge: impl FnOnce(&mut H, H)) {
        self.lock().offer(offer, now, merge);
        self.changed.notify_waiters();
    }

    /// Takes the oldest candidate that can be tried now and that fits; it is busy until `busy_until`.
    pub(super) fn take(
        &self,
        now: Millis,
        busy_until: Millis,
        fits: impl Fn(&K, &H) -> bool,
    ) -> Option<(K, H, String)> {
        self.lock().take(now, busy_until, fits)
    }

    /// Takes the oldest candidate that can be tried now and that fits, if it is such; it is busy until `busy_until`.
    pub(super) fn take_first(
        &self,
        now: Millis,
        busy_until: Millis,
        fits: impl Fn(&H) -> bool,
        such: impl Fn(&H) -> bool,
    ) -> Option<(K, H, String)> {
        let mut inner = self.lock();
        inner.promote(now);
        let first =
            inner.ready.iter().find(|(_, key)| inner.entries.get(key).is_some_and(|entry| fits(&entry.candidate)));
        let first = first.map(|(_, key)| key.clone())?;
        inner.take(now, busy_until, |key, candidate| *key == first && such(candidate))
    }

    /// Keeps a key from being handed out until then, if it is not busy and `how` agrees, which sees its candidate. The candidate, if it is taken.
    pub(super) fn begin(
        &self,
        key: &K,
        until: Millis,
        now: Millis,
        how: impl FnOnce(Option<&H>) -> Begin,
    ) -> Option<Option<H>> {
        let mut inner = self.lock();
        if inner.busy.get(key).is_some_and(|until| *until > now) {
            return None;
        }
        let taken = match how(inner.entries.get(key).map(|entry| &entry.candidate)) {
            Begin::No => return None,
            Begin::Leave => None,
            Begin::Take => inner.remove(key).map(|entry| entry.candidate),
        };
        inner.busy.insert(key.clone(), until);
        inner.refile(key, now);
        Some(taken)
    }

    /// Whether so many candidates that can be tried now are such.
    pub(super) fn has_ready(&self, count: usize, now: Millis, such: impl Fn(&H) -> bool) -> bool {
        self.count_ready(usize::MAX, count, now, such) == count
    }

    /// How many of the first `among` candidates that can be tried now are such, counted up to `most`.
    pub(super) fn count_ready(&self, among: usize, most: usize, now: Millis, such: impl Fn(&H) -> bool) -> usize {
        let mut inner = self.lock();
        inner.promote(now);
        let inner = &*inner;
        let ready = inner.ready.iter().take(among).filter_map(|(_, key)| inner.entries.get(key));
        ready.filter(|entry| such(&entry.candidate)).take(most).count()
    }

    /// Until when an attempt has put off the candidate for a key, if it is in the queue.
    pub(super) fn put_off_until(&self, key: &K) -> Option<Millis> {
        self.lock().entries.get(key).map(|entry| entry.not_before)
    }

    /// Puts a candidate back after an attempt that did not succeed, to be tried again at `not_before`, or earlier when the key
    /// becomes free.
    pub(super) fn put_back(
        &self,
        key: K,
        candidate: H,
        seq: String,
        not_before: Millis,
        now: Millis,
        merge: impl FnOnce(&mut H, H),
    ) {
        {
            let mut inner = self.lock();
            inner.busy.remove(&key);
            inner.offer(Offer { key: key.clone(), candidate, seq, due: 0, urgent: false }, now, merge);
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

    /// A key is free again: candidates that came in the meantime can be tried.
    pub(super) fn set_free(&self, key: &K, now: Millis) {
        self.set_free_from(key, now, |_| Free::default());
    }

    /// A key is free again: a candidate that came in the meantime can be tried when `from` says.
    pub(super) fn set_free_from(&self, key: &K, now: Millis, from: impl Fn(&H) -> Free) {
        {
            let mut inner = self.lock();
            inner.busy.remove(key);
            // What an attempt said about coming back was about this process's own hold on it.
            let Some(mut entry) = inner.remove(key) else { return };
            let Free { not_before, due } = from(&entry.candidate);
            entry.not_before = not_before;
            entry.due = due.map_or(entry.due, |due| entry.due.min(due));
            inner.insert(key.clone(), entry, now);
        }
        self.changed.notify_waiters();
    }

    /// When the next candidate becomes ready, or may fit somebody, if one will.
    pub(super) fn next_due(&self) -> Option<Millis> {
        let inner = self.lock();
        let later = inner.later.first().map(|(due, _)| *due);
        later.into_iter().chain(inner.alarms.first().copied()).min()
    }

    /// Wakes waiters then, for a candidate that fits nobody until then.
    pub(super) fn wake_at(&self, time: Millis) {
        self.lock().alarms.insert(time);
    }

    /// How many can be tried now.
    #[cfg(test)]
    pub(super) fn ready(&self, now: Millis) -> usize {
        let mut inner = self.lock();
        inner.promote(now);
        inner.ready.len()
    }

    /// Changes every candidate.
    pub(super) fn change_all(&self, mut change: impl FnMut(&mut H)) {
        self.lock().entries.values_mut().for_each(|entry| change(&mut entry.candidate));
    }

    /// Forgets such candidates.
    pub(super) fn forget(&self, such: impl Fn(&H) -> bool) {
        let mut inner = self.lock();
        let gone: Vec<K> =
            inner.entries.iter().filter(|(_, entry)| such(&entry.candidate)).map(|(key, _)| key.clone()).collect();
        for key in gone {
            inner.remove(&key);
        }
    }

    /// Forgets everything: nobody here takes any of it.
    pub(super) fn clear(&self) {
        let mut inner = self.lock();
        inner.entries.clear();
        inner.ready.clear();
        inner.later.clear();
        inner.since.clear();
        inner.bytes = 0;
    }

    /// Whether a key is busy, or its candidate is such and can be tried.
    pub(super) fn is_at_hand(&self, key: &K, now: Millis, such: impl Fn(&H) -> bool) -> bool {
        let inner = self.lock();
        let is_ready = |entry: &Entry<H>| matches!(entry.filed, Filed::Ready(_)) && such(&entry.candidate);
        inner.busy.get(key).is_some_and(|until| *until > now) || inner.entries.get(key).is_some_and(is_ready)
    }

    /// Takes out the candidate for a key, whether it can be tried or not; it is busy until then.
    pub(super) fn take_out(&self, key: &K, busy_until: Millis, now: Millis) -> Option<H> {
        let mut inner = self.lock();
        let entry = inner.remove(key);
        inner.busy.insert(key.clone(), busy_until);
        inner.refile(key, now);
        entry.map(|entry| entry.candidate)
    }

    /// Whether a key is busy.
    pub(super) fn is_busy(&self, key: &K, now: Millis) -> bool {
        self.lock().busy.get(key).is_some_and(|until| *until > now)
    }

    /// The candidate for a key, if it is in the queue.
    pub(super) fn peek<R>(&self, key: &K, look: impl FnOnce(&H) -> R) -> Option<R> {
        self.lock().entries.get(key).map(|entry| look(&entry.candidate))
    }

    /// How many candidates there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.lock().entries.len()
    }
}

impl<K: Clone + Eq + Hash + Ord, H: Weight> QueueState<K, H> {
    fn offer(&mut self, offer: Offer<K, H>, now: Millis, merge: impl FnOnce(&mut H, H)) {
        let Offer { key, candidate, seq, due, urgent } = offer;
        let entry = match self.remove(&key) {
            None => Entry { candidate, seq, due, not_before: 0, filed: Filed::Ready(0), bytes: 0 },
            Some(mut entry) => {
                merge(&mut entry.candidate, candidate);
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

    fn insert(&mut self, key: K, mut entry: Entry<H>, now: Millis) {
        let busy_until = self.busy.get(&key).copied().unwrap_or(0);
        let from = entry.due.max(entry.not_before).max(busy_until);
        entry.bytes = entry.candidate.bytes();
        self.bytes += entry.bytes;
        if from <= now {
            entry.filed = Filed::Ready(now);
            self.ready.insert((entry.seq.clone(), key.clone()));
            self.since.insert((now, key.clone()));
        } else {
            entry.filed = Filed::Later(from);
            self.later.insert((from, key.clone()));
        }
        self.entries.insert(key, entry);
        while self.entries.len() > MOST || self.bytes > MOST_BYTES {
            let last = self.later.last().map(|(_, key)| key).or_else(|| self.ready.last().map(|(_, key)| key));
            let Some(last) = last.cloned() else { return };
            self.remove(&last);
        }
    }

    fn remove(&mut self, key: &K) -> Option<Entry<H>> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.bytes;
        match entry.filed {
            Filed::Ready(since) => {
                self.ready.remove(&(entry.seq.clone(), key.clone()));
                self.since.remove(&(since, key.clone()));
            }
            Filed::Later(from) => {
                self.later.remove(&(from, key.clone()));
            }
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
            if self.busy.get(&key).is_some_and(|until| *until <= now) {
                self.busy.remove(&key);
            }
            let Some(entry) = self.remove(&key) else { return };
            self.insert(key, entry, now);
        }
        while let Some((_, key)) = self.since.first().filter(|(since, _)| since + LIFE <= now).cloned() {
            self.remove(&key);
        }
        if self.busy.len() > MOST {
            self.busy.retain(|_, until| *until > now);
        }
    }

    fn take(&mut self, now: Millis, busy_until: Millis, fits: impl Fn(&K, &H) -> bool) -> Option<(K, H, String)> {
        self.promote(now);
        let (_, key) = self
            .ready
            .iter()
            .find(|(_, key)| self.entries.get(key).is_some_and(|entry| fits(key, &entry.candidate)))?
            .clone();
        let entry = self.remove(&key)?;
        self.busy.insert(key.clone(), busy_until);
        Some((key, entry.candidate, entry.seq))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Weight for u32 {
        fn bytes(&self) -> usize {
            *self as usize
        }
    }

    fn offer(queue: &ReadyQueue<&'static str, u32>, key: &'static str, seq: &str, due: Millis, now: Millis) {
        let offer = Offer { key, candidate: 0u32, seq: seq.to_owned(), due, urgent: false };
        queue.offer(offer, now, |_, _| {});
    }

    fn take(queue: &ReadyQueue<&'static str, u32>, now: Millis) -> Option<&'static str> {
        queue.take(now, now + 1_000, |_, _| true).map(|(key, _, _)| key)
    }

    #[test]
    fn what_went_in_first_comes_out_first_whenever_it_became_due() {
        let queue = ReadyQueue::new();
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
        let queue = ReadyQueue::new();
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
        let queue = ReadyQueue::new();
        offer(&queue, "odd", "1", 0, 0);
        offer(&queue, "even", "2", 0, 0);
        let taken = queue.take(0, 100, |key, _| *key == "even");
        assert_eq!(taken.map(|(key, _, _)| key), Some("even"));
        assert_eq!(queue.take(0, 100, |key, _| *key == "even").map(|t| t.0), None);
        assert_eq!(take(&queue, 0), Some("odd"));
        assert_eq!(queue.len(), 0);
    }

    #[test]
    fn what_nobody_takes_is_forgotten_but_a_timer_is_not() {
        let queue = ReadyQueue::new();
        offer(&queue, "odd", "1", 0, 0);
        offer(&queue, "timer", "2", LIFE * 2, 0);
        assert_eq!(queue.ready(LIFE - 1), 1);
        assert_eq!((queue.ready(LIFE), queue.len()), (0, 1));
        assert_eq!(take(&queue, LIFE * 2), Some("timer"));
    }

    #[test]
    fn where_there_are_too_many_those_that_are_due_last_go_first() {
        let queue: ReadyQueue<u64, u32> = ReadyQueue::new();
        let many = MOST as u64 + 100;
        for n in 0..many {
            queue.offer(
                Offer { key: n, candidate: 0, seq: format!("{n:09}"), due: 1_000 + n, urgent: false },
                0,
                |_, _| {},
            );
        }
        assert_eq!(queue.len(), MOST);
        assert_eq!(queue.next_due(), Some(1_000));
        assert_eq!(queue.ready(1_000 + many), MOST);
        let large = Offer { key: many, candidate: u32::MAX, seq: String::new(), due: 0, urgent: false };
        queue.offer(large, 2_000_000, |_, _| {});
        assert!(queue.len() < 2, "a candidate that takes all room leaves none to others");
        let inner = queue.lock();
        assert_eq!(inner.since.len(), inner.ready.len());
    }

    #[test]
    fn a_poll_does_not_bring_forward_what_an_attempt_put_off_but_news_do() {
        let queue = ReadyQueue::new();
        offer(&queue, "a", "1", 0, 0);
        let (key, candidate, seq) = queue.take(0, 100, |_, _| true).unwrap();
        queue.put_back(key, candidate, seq, 50, 0, |_, _| {});
        offer(&queue, "a", "1", 0, 10);
        assert_eq!(take(&queue, 10), None);
        queue.offer(Offer { key: "a", candidate: 0, seq: "2".into(), due: 0, urgent: true }, 20, |_, _| {});
        assert_eq!(take(&queue, 20), Some("a"));
    }
}
