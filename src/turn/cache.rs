//! A cache of instances: the instance document, and the history and values that belong to it.
//!
//! An entry is only as good as its ETag. A claim that succeeds on it, or a read that returns it, proves that nothing
//! has changed since. The memory is bounded; the least recently used entries are removed first.

use crate::model::{Fingerprints, InstanceDocument, KvDocument, Partition};
use azure_core::http::Etag;
use duroxide::Event;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// The cached state of an instance.
#[derive(Clone)]
pub(crate) struct CachedInstance {
    pub(crate) document: InstanceDocument,
    pub(crate) etag: Etag,
    pub(crate) contents: Option<Contents>,
}

/// The history of the current execution and the values, as of the document's ETag.
#[derive(Clone)]
pub(crate) struct Contents {
    pub(crate) history: Arc<Vec<Event>>,
    /// `None` if a client read only the history. A turn then loads both.
    pub(crate) kv: Option<Arc<BTreeMap<String, KvDocument>>>,
    /// The fingerprints of messages from outside that this execution, and the last turns before it, have consumed.
    pub(crate) consumed: Arc<Fingerprints>,
    /// The size of the events' text.
    pub(crate) text: usize,
    /// The approximate size of all contents in memory.
    pub(crate) bytes: usize,
}

impl Contents {
    /// Makes contents and computes their size in memory.
    pub(crate) fn new(
        history: impl Into<Arc<Vec<Event>>>,
        text: usize,
        kv: Option<BTreeMap<String, KvDocument>>,
        consumed: Fingerprints,
    ) -> Self {
        // An event in memory takes about twice its text: the strings, and the struct around them.
        let history = history.into();
        let values: usize = kv.iter().flat_map(BTreeMap::values).map(value_bytes).sum();
        let bytes = 2 * text + history.len() * std::mem::size_of::<Event>() + values + consumed.bytes();
        Self { history, kv: kv.map(Arc::new), consumed: Arc::new(consumed), text, bytes }
    }
}

impl Contents {
    /// The contents after a turn of the same execution that appended `events`, whose text has `text` bytes.
    pub(crate) fn after_turn(
        &self,
        events: &[Event],
        text: usize,
        kv: BTreeMap<String, KvDocument>,
        consumed: &Fingerprints,
    ) -> Self {
        let mut history = self.history.as_ref().clone();
        let known: HashSet<u64> = history.iter().map(|event| event.event_id).collect();
        history.extend(events.iter().filter(|event| !known.contains(&event.event_id)).cloned());
        history.sort_by_key(|event| event.event_id);
        let mut fingerprints = self.consumed.as_ref().clone();
        fingerprints.extend(consumed);
        Self::new(history, self.text + text, Some(kv), fingerprints)
    }
}

/// The approximate size of a value in memory.
fn value_bytes(value: &KvDocument) -> usize {
    let base = value.base.as_ref().map_or(0, |b| b.value.len());
    256 + 2 * value.key.len() + value.value.as_ref().map_or(0, String::len) + base
}

/// A cache with a size limit that removes the least recently used entries first.
pub(crate) struct InstanceCache {
    limit: usize,
    entries: Mutex<CacheEntries>,
}

#[derive(Default)]
struct CacheEntries {
    by_partition: HashMap<Partition, (u64, CachedInstance)>,
    /// When each entry was last known to be current.
    seen: HashMap<Partition, Instant>,
    /// When an instance was last known not to exist.
    absent: HashMap<Partition, Instant>,
    by_age: BTreeMap<u64, Partition>,
    clock: u64,
    bytes: usize,
}

/// The cache remembers at most this many instances that do not exist.
const MAX_ABSENT: usize = 10_000;
/// The assumed size of an entry without its contents.
const DOCUMENT_BYTES: usize = 1_024;

impl InstanceCache {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, entries: Mutex::default() }
    }

    pub(crate) fn get(&self, partition: &Partition) -> Option<CachedInstance> {
        let mut entries = self.lock();
        let (age, known) = entries.by_partition.get(partition).map(|(age, known)| (*age, known.clone()))?;
        entries.touch(partition, age);
        Some(known)
    }

    pub(crate) fn put(&self, partition: &Partition, known: CachedInstance) {
        self.lock().put(partition, known, self.limit);
    }

    /// The ETag of the cached document.
    pub(crate) fn etag(&self, partition: &Partition) -> Option<Etag> {
        self.lock().by_partition.get(partition).map(|(_, known)| known.etag.clone())
    }

    /// When the entry was last known to be current.
    pub(crate) fn checked_at(&self, partition: &Partition) -> Option<Instant> {
        self.lock().seen.get(partition).copied()
    }

    /// Adds contents that were read for this ETag, unless the cache has another by now. The entry does not become more
    /// current by that.
    pub(crate) fn add_contents(&self, partition: &Partition, etag: &Etag, contents: Contents) {
        let mut entries = self.lock();
        let known = entries.by_partition.get(partition).map(|(_, known)| known).filter(|known| &known.etag == etag);
        let Some(mut known) = known.cloned() else { return };
        let seen = entries.seen.get(partition).copied();
        known.contents = Some(contents);
        if size(&known) > self.limit {
            return;
        }
        entries.put(partition, known, self.limit);
        match seen.filter(|_| entries.by_partition.contains_key(partition)) {
            Some(seen) => entries.seen.insert(partition.clone(), seen),
            None => entries.seen.remove(partition),
        };
    }

    /// The entry, if it was known to be current within `staleness`. The inner `None` means that the instance did not
    /// exist.
    pub(crate) fn fresh(&self, partition: &Partition, staleness: Duration) -> Option<Option<CachedInstance>> {
        let entries = self.lock();
        let recent =
            |seen: &HashMap<Partition, Instant>| seen.get(partition).is_some_and(|at| at.elapsed() < staleness);
        if recent(&entries.absent) {
            return Some(None);
        }
        if !recent(&entries.seen) {
            return None;
        }
        entries.by_partition.get(partition).map(|(_, known)| Some(known.clone()))
    }

    /// Records the result of a read, unless this process has written since the read began. `before` is the cached ETag
    /// at that time.
    pub(crate) fn record_read(&self, partition: &Partition, before: Option<&Etag>, found: Option<CachedInstance>) {
        let mut entries = self.lock();
        let now = entries.by_partition.get(partition).map(|(_, known)| known.etag.clone());
        if now.as_ref() != before {
            // The cache cannot tell which of the two is newer. The next call reads again.
            entries.seen.remove(partition);
            return;
        }
        match found {
            Some(found) if Some(&found.etag) == before => {
                entries.seen.insert(partition.clone(), Instant::now());
            }
            Some(found) => entries.put(partition, found, self.limit),
            None => {
                entries.remove(partition);
                if entries.absent.len() >= MAX_ABSENT {
                    entries.absent.clear();
                }
                entries.absent.insert(partition.clone(), Instant::now());
            }
        }
    }

    /// Marks the entry as not current, unless `holds` is true for it. The next call then reads. Returns whether it did
    /// so.
    pub(crate) fn invalidate_unless(&self, partition: &Partition, holds: impl FnOnce(&CachedInstance) -> bool) -> bool {
        let mut entries = self.lock();
        let invalidates = !entries.by_partition.get(partition).is_some_and(|(_, known)| holds(known));
        if invalidates {
            entries.absent.remove(partition);
            entries.seen.remove(partition);
        }
        invalidates
    }

    pub(crate) fn forget(&self, partition: &Partition) {
        self.lock().remove(partition);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, CacheEntries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CacheEntries {
    fn put(&mut self, partition: &Partition, known: CachedInstance, limit: usize) {
        self.remove(partition);
        if size(&known) > limit {
            return;
        }
        self.insert(partition.clone(), known);
        while self.bytes > limit {
            let Some(oldest) = self.by_age.values().next().cloned() else { break };
            self.remove(&oldest);
        }
    }

    fn insert(&mut self, partition: Partition, known: CachedInstance) {
        self.clock += 1;
        self.bytes += size(&known);
        self.by_age.insert(self.clock, partition.clone());
        self.seen.insert(partition.clone(), Instant::now());
        self.by_partition.insert(partition, (self.clock, known));
    }

    fn remove(&mut self, partition: &Partition) {
        self.absent.remove(partition);
        self.seen.remove(partition);
        if let Some((age, known)) = self.by_partition.remove(partition) {
            self.by_age.remove(&age);
            self.bytes -= size(&known);
        }
    }

    fn touch(&mut self, partition: &Partition, age: u64) {
        self.clock += 1;
        let now = self.clock;
        self.by_age.remove(&age);
        self.by_age.insert(now, partition.clone());
        if let Some(entry) = self.by_partition.get_mut(partition) {
            entry.0 = now;
        }
    }
}

fn size(known: &CachedInstance) -> usize {
    DOCUMENT_BYTES + known.contents.as_ref().map_or(0, |contents| contents.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(bytes: usize) -> CachedInstance {
        let partition = Partition::instance("a").unwrap();
        CachedInstance {
            document: InstanceDocument::new(partition, "token", 0),
            etag: Etag::from("e"),
            contents: Some(Contents { bytes, ..Contents::new(Vec::new(), 0, None, Fingerprints::default()) }),
        }
    }

    fn partition(name: &str) -> Partition {
        Partition::instance(name).unwrap()
    }

    #[test]
    fn the_least_recently_used_entry_is_removed_first_and_the_limit_holds() {
        let cache = InstanceCache::new(3 * (DOCUMENT_BYTES + 1_000));
        for name in ["a", "b", "c"] {
            cache.put(&partition(name), known(1_000));
        }
        assert!(cache.get(&partition("a")).is_some());
        cache.put(&partition("d"), known(1_000));
        assert!(cache.get(&partition("b")).is_none());
        assert!(cache.get(&partition("a")).is_some() && cache.get(&partition("d")).is_some());
        assert!(cache.lock().bytes <= cache.limit);
    }

    #[test]
    fn the_computed_size_depends_on_the_contents_and_not_on_the_number_of_turns() {
        let kind = duroxide::EventKind::ExternalSubscribed { name: "x".repeat(500) };
        let event = |id| Event::with_event_id(id, "a", 1, None, kind.clone());
        let value = KvDocument::written(&partition("a"), "key", None, Some("v".repeat(10_000)), 0, 0);
        let kv = BTreeMap::from([("key".to_owned(), value)]);
        let mut grown = Contents::new(Vec::new(), 0, Some(kv.clone()), Fingerprints::default());
        for id in 1..=200 {
            grown = grown.after_turn(&[event(id)], 600, kv.clone(), &Fingerprints::default());
        }
        let whole =
            Contents::new((1..=200).map(event).collect::<Vec<_>>(), 200 * 600, Some(kv), Fingerprints::default());
        assert_eq!((grown.bytes, grown.history.len()), (whole.bytes, 200));
    }

    #[test]
    fn contents_are_added_only_to_their_own_etag_and_do_not_make_an_entry_current() {
        let (cache, a) = (InstanceCache::new(100_000), partition("a"));
        let contents = || Contents::new(Vec::new(), 100, None, Fingerprints::default());
        let text = || cache.get(&a).unwrap().contents.map(|contents| contents.text);
        cache.add_contents(&a, &Etag::from("e"), contents());
        assert!(cache.get(&a).is_none(), "a removed entry does not come back");
        cache.put(&a, CachedInstance { contents: None, ..known(0) });
        cache.add_contents(&a, &Etag::from("older"), contents());
        assert_eq!(text(), None);
        cache.invalidate_unless(&a, |_| false);
        cache.add_contents(&a, &Etag::from("e"), contents());
        assert_eq!(text(), Some(100));
        let large = Contents { bytes: 200_000, ..contents() };
        cache.add_contents(&a, &Etag::from("e"), large);
        assert_eq!(text(), Some(100), "contents that do not fit leave the entry as it is");
        assert!(cache.fresh(&a, Duration::from_secs(60)).is_none());
    }

    #[test]
    fn an_invalidated_entry_is_kept_but_not_returned_as_current() {
        let (cache, long) = (InstanceCache::new(10_000), Duration::from_secs(60));
        cache.record_read(&partition("absent"), None, None);
        cache.put(&partition("old"), known(0));
        cache.put(&partition("current"), known(0));
        for name in ["absent", "old"] {
            assert!(cache.fresh(&partition(name), long).is_some());
            cache.invalidate_unless(&partition(name), |_| false);
            assert!(cache.fresh(&partition(name), long).is_none());
        }
        cache.invalidate_unless(&partition("current"), |_| true);
        assert!(cache.fresh(&partition("current"), long).is_some());
        assert!(cache.get(&partition("old")).is_some());
    }

    #[test]
    fn an_entry_that_does_not_fit_is_not_cached_and_a_limit_of_zero_disables_the_cache() {
        let cache = InstanceCache::new(10_000);
        cache.put(&partition("a"), known(100));
        cache.put(&partition("a"), known(20_000));
        assert!(cache.get(&partition("a")).is_none());
        let off = InstanceCache::new(0);
        off.put(&partition("a"), known(0));
        assert!(off.get(&partition("a")).is_none());
    }
}
