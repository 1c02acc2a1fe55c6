//! Reads of one history at the same time are one read.
//!
//! A fan-out starts many activities of an instance in the same moment, in processes that don't have its turns, and its history
//! changes with every turn. What one of them reads serves all that ask within `read_staleness`. duroxide reads once for each
//! activity that it starts, to learn the orchestration's name and version: for that an answer serves for [`NAME`] that has the activity in it, since
//! these stay for an execution.
//!
//! Invariant: a caller is never shown less than this process has seen: an answer is good only as long as the state that this process knows is
//! the one that it was read with. Who waited for a read that serves nobody else reads for itself, beside the others.

use super::cache::InstanceCache;
use crate::{
    cosmos::{Deadline, StoreError},
    model::Partition,
};
use azure_core::http::Etag;
use dashmap::DashMap;
use duroxide::Event;
use std::{
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc, PoisonError,
    },
    time::Duration,
};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::Instant;

/// What an activity that starts filter to know of its orchestration does not change sooner.
const NAME: Duration = Duration::from_secs(1);
/// An activity that was handed out reads by then: what reads later is somebody else.
const READS_WITHIN: Duration = Duration::from_millis(200);
/// How often those are forgotten whose answers serve nobody any more.
const SWEEP: Duration = Duration::from_secs(1);
/// What all answers may take, by the text of their events; one counts for this much at least.
const MOST_BYTES: usize = 16 << 20;
const LEAST: usize = 1_024;

/// What the last reads of an instance came to.
#[derive(Default)]
struct Last {
    answer: Option<CachedRead>,
    /// When one began that serves nobody else.
    in_vain: Option<Instant>,
}

/// A history as it was read.
struct CachedRead {
    /// When the read began.
    began: Instant,
    /// Since when something else may be there.
    of: Instant,
    /// The state of the instance that it was read with.
    etag: Etag,
    events: Arc<Vec<Event>>,
    _bytes: Bytes,
}

/// What an answer takes, as long as it is kept.
struct Bytes(Arc<AtomicUsize>, usize);

impl Bytes {
    /// Room for so many, if there is.
    fn of(all: &Arc<AtomicUsize>, bytes: usize) -> Option<Self> {
        let bytes = Self(all.clone(), bytes.max(LEAST));
        (all.fetch_add(bytes.1, Ordering::SeqCst) + bytes.1 <= MOST_BYTES).then_some(bytes)
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::SeqCst);
    }
}

/// The last answer for each instance whose history is read.
#[derive(Default)]
pub(crate) struct Reads {
    entries: DashMap<Partition, InstanceReads>,
    bytes: Arc<AtomicUsize>,
    swept: std::sync::Mutex<Option<Instant>>,
}

#[derive(Default)]
struct InstanceReads {
    last: Arc<Mutex<Last>>,
    started: std::sync::Mutex<Started>,
}

/// Activities that were handed out and have not read yet: of the last execution that had any.
#[derive(Default)]
struct Started {
    execution: u64,
    /// The last event that scheduled one of them.
    last: u64,
    count: usize,
    /// When the last of them was handed out.
    at: Option<Instant>,
}

/// How old an answer may be.
#[derive(Clone, Copy)]
pub(crate) struct Allowed {
    staleness: Duration,
    /// The execution of an activity that starts, and an event that it must have, if one does.
    starts: Option<(u64, u64)>,
}

/// The turn of one who reads: it has the last answer, and room for the next.
pub(crate) struct Reading {
    /// None for one that reads beside others.
    last: Option<OwnedMutexGuard<Last>>,
    bytes: Arc<AtomicUsize>,
    allowed: Allowed,
    /// Since when it waits, and when it began to read.
    since: Instant,
    began: Instant,
}

impl Reads {
    /// An activity of this instance is handed out: it will read once.
    pub(crate) fn activity_starts(&self, partition: &Partition, execution: u64, scheduled: u64) {
        self.forget_old();
        let entry = self.entries.entry(partition.clone()).or_default();
        let mut started = entry.started.lock().unwrap_or_else(PoisonError::into_inner);
        if started.execution != execution || !started.is_young() {
            // Those that have not read by now never will.
            *started = Started { execution, ..Started::default() };
        }
        started.last = started.last.max(scheduled);
        started.count += 1;
        started.at = Some(Instant::now());
    }

    /// Somebody reads: how old the answer may be. One of the activities that were handed out a moment ago is taken to be the one.
    pub(crate) fn allowed(&self, partition: &Partition, staleness: Duration) -> Allowed {
        let starts = self.entries.get(partition).filter(|_| !staleness.is_zero()).and_then(|entry| {
            let mut started = entry.started.lock().unwrap_or_else(PoisonError::into_inner);
            started.count = started.count.checked_sub(1)?;
            started.is_young().then_some((started.execution, started.last))
        });
        Allowed { staleness, starts }
    }

    /// Waits while another reads the history of this instance.
    pub(crate) async fn join(
        &self,
        partition: &Partition,
        allowed: Allowed,
        deadline: Deadline,
    ) -> Result<Reading, StoreError> {
        self.forget_old();
        let since = Instant::now();
        let last = self.entries.entry(partition.clone()).or_default().last.clone();
        let waited = tokio::time::timeout_at(deadline.instant(), last.lock_owned()).await;
        let unavailable = |_| StoreError::Unavailable { detail: "a read of the same history does not end".to_owned() };
        let (last, began) = (Some(waited.map_err(unavailable)?), Instant::now());
        Ok(Reading { last, bytes: self.bytes.clone(), allowed, since, began })
    }

    /// What was read of this instance may be of before: it serves nobody.
    pub(crate) fn doubt(&self, partition: &Partition) {
        self.entries.remove(partition);
    }

    fn forget_old(&self) {
        let now = Instant::now();
        {
            let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
            if swept.is_some_and(|swept| swept + SWEEP > now) {
                return;
            }
            *swept = Some(now);
        }
        let serves = |last: &Last| last.answer.as_ref().is_some_and(|answer| answer.of.elapsed() < NAME);
        self.entries.retain(|_, InstanceReads { last, .. }| {
            Arc::strong_count(last) > 1 || last.try_lock().is_ok_and(|last| serves(&last))
        });
    }
}

impl Started {
    fn is_young(&self) -> bool {
        self.at.is_some_and(|at| at.elapsed() < READS_WITHIN)
    }
}

impl Reading {
    /// The history, if it may still be shown. Where this caller has waited for one that may not, it waits for no other.
    pub(crate) fn events(&mut self, cache: &InstanceCache, partition: &Partition) -> Option<Vec<Event>> {
        let last = self.last.as_ref()?;
        // One that was begun while this caller waited is as good as its own.
        let is_mine = |began: Instant| began >= self.since;
        let shown = last.answer.as_ref().filter(|answer| {
            let is_current = cache.etag(partition).as_ref() == Some(&answer.etag);
            (is_mine(answer.began) || self.allowed.takes(answer.of, &answer.events)) && is_current
        });
        let shown = shown.map(|answer| answer.events.as_ref().clone());
        let waited_in_vain =
            last.answer.as_ref().map(|answer| answer.began).into_iter().chain(last.in_vain).any(is_mine);
        if shown.is_some() || waited_in_vain {
            // It reads nothing, or beside the others.
            self.last = None;
        }
        shown
    }

    /// A history, whose text has so many bytes, was read with this state of the instance, which was there at `of`. It serves
    /// others if that is what this process still knows: otherwise it could not tell when it learns of something else.
    pub(crate) fn note(
        mut self,
        cache: &InstanceCache,
        partition: &Partition,
        of: Instant,
        etag: &Etag,
        (events, bytes): (Arc<Vec<Event>>, usize),
    ) {
        let Some(last) = &mut self.last else { return };
        // What is replaced takes no room any more.
        **last = Last::default();
        let is_current = cache.etag(partition).as_ref() == Some(etag);
        let (began, bytes) = (self.began, Bytes::of(&self.bytes, bytes).filter(|_| is_current));
        last.answer = bytes.map(|bytes| CachedRead { began, of, etag: etag.clone(), events, _bytes: bytes });
        if last.answer.is_some() {
            self.last = None;
        }
    }
}

impl Drop for Reading {
    /// A read that came to nothing serves nobody: who waited for it reads beside the others.
    fn drop(&mut self) {
        if let Some(last) = &mut self.last {
            last.in_vain = Some(self.began);
        }
    }
}

impl Allowed {
    /// Whether an answer may be shown that was true then.
    fn takes(&self, of: Instant, events: &[Event]) -> bool {
        let last = events.last().map(|event| (event.execution_id, event.event_id));
        let has_it = self.starts.zip(last).is_some_and(|(starts, last)| starts.0 == last.0 && starts.1 <= last.1);
        of.elapsed() < if has_it { self.staleness.max(NAME) } else { self.staleness }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::cache::Known;
    use duroxide::EventKind;

    const STALENESS: Duration = Duration::from_millis(50);

    struct ReadsFixture {
        reads: Reads,
        cache: InstanceCache,
        partition: Partition,
    }

    impl ReadsFixture {
        async fn new() -> Self {
            let partition = Partition::instance("i").unwrap();
            let scene = Self { reads: Reads::default(), cache: InstanceCache::new(1 << 20), partition };
            let kind = EventKind::OrchestrationCompleted { output: String::new() };
            let events = [Event::with_event_id(1, "i", 1, None, kind)];
            scene.know("old");
            scene.note(scene.join().await, "old", &events, 100);
            scene
        }

        fn note(&self, reading: Reading, etag: &'static str, events: &[Event], bytes: usize) {
            let read = (Arc::new(events.to_vec()), bytes);
            reading.note(&self.cache, &self.partition, Instant::now(), &Etag::from(etag), read);
        }

        fn know(&self, etag: &'static str) {
            let document = crate::model::InstanceDocument::new(self.partition.clone(), "token", 0);
            self.cache.put(&self.partition, Known { document, etag: Etag::from(etag), contents: None });
        }

        async fn join(&self) -> Reading {
            let allowed = self.reads.allowed(&self.partition, STALENESS);
            self.reads.join(&self.partition, allowed, Deadline::after(STALENESS)).await.unwrap()
        }

        async fn is_answered(&self) -> bool {
            self.join().await.events(&self.cache, &self.partition).is_some()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_serves_for_a_moment_and_an_activity_that_starts_for_longer() {
        let scene = ReadsFixture::new().await;
        assert!(scene.is_answered().await);
        tokio::time::advance(STALENESS).await;
        assert!(!scene.is_answered().await);
        scene.reads.activity_starts(&scene.partition, 1, 1);
        assert!(scene.is_answered().await && !scene.is_answered().await, "it reads once");
        scene.reads.activity_starts(&scene.partition, 1, 2);
        assert!(!scene.is_answered().await, "it was scheduled later");
        scene.reads.activity_starts(&scene.partition, 2, 1);
        assert!(!scene.is_answered().await, "the next execution may have another version");
        tokio::time::advance(NAME).await;
        scene.reads.activity_starts(&scene.partition, 1, 1);
        assert!(!scene.is_answered().await);
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_activity_may_be_told_is_not_what_others_are_told_later() {
        let scene = ReadsFixture::new().await;
        tokio::time::advance(STALENESS).await;
        (0..10).for_each(|_| scene.reads.activity_starts(&scene.partition, 1, 1));
        assert!(scene.is_answered().await);
        tokio::time::advance(READS_WITHIN).await;
        assert!(!scene.is_answered().await, "those that have not read never will");
        scene.reads.activity_starts(&scene.partition, 1, 1);
        assert!(scene.is_answered().await && !scene.is_answered().await);
        scene.reads.activity_starts(&scene.partition, 1, 1);
        let never = scene.reads.allowed(&scene.partition, Duration::ZERO);
        let mut reading = scene.reads.join(&scene.partition, never, Deadline::after(NAME)).await.unwrap();
        assert!(reading.events(&scene.cache, &scene.partition).is_none(), "nothing is shown from memory then");
    }

    #[tokio::test(start_paused = true)]
    async fn what_this_process_has_learnt_since_is_not_hidden_by_an_answer() {
        let scene = ReadsFixture::new().await;
        scene.know("new");
        scene.reads.activity_starts(&scene.partition, 1, 1);
        assert!(!scene.is_answered().await);
        let scene = ReadsFixture::new().await;
        scene.reads.doubt(&scene.partition);
        assert!(!scene.is_answered().await);
        let scene = ReadsFixture::new().await;
        scene.cache.forget(&scene.partition);
        assert!(!scene.is_answered().await);
    }

    #[tokio::test(start_paused = true)]
    async fn one_reads_at_a_time_and_what_serves_nobody_is_forgotten() {
        let scene = ReadsFixture::new().await;
        let (reading, allowed) = (scene.join().await, scene.reads.allowed(&scene.partition, STALENESS));
        assert!(scene.reads.join(&scene.partition, allowed, Deadline::after(STALENESS)).await.is_err());
        drop(reading);
        for n in 0..100 {
            scene.reads.activity_starts(&Partition::instance(&n.to_string()).unwrap(), 1, 1);
        }
        tokio::time::advance(SWEEP).await;
        scene.reads.activity_starts(&scene.partition, 1, 1);
        assert_eq!(scene.reads.entries.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_slow_read_is_served_by_it() {
        let scene = ReadsFixture::new().await;
        let reading = scene.join().await;
        let waits = scene.reads.join(&scene.partition, reading.allowed, Deadline::after(NAME));
        tokio::pin!(waits);
        assert!(futures::poll!(&mut waits).is_pending());
        let of = Instant::now();
        tokio::time::advance(STALENESS * 2).await;
        // However long it is.
        let read = (Arc::new(Vec::new()), 2 << 20);
        reading.note(&scene.cache, &scene.partition, of, &Etag::from("old"), read);
        assert!(waits.await.unwrap().events(&scene.cache, &scene.partition).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_that_a_commit_has_overtaken_serves_nobody_and_who_waited_for_it_reads_beside_the_others() {
        let scene = ReadsFixture::new().await;
        let reading = scene.join().await;
        let waits = || scene.reads.join(&scene.partition, reading.allowed, Deadline::after(NAME));
        let (first, second) = (waits(), waits());
        tokio::pin!(first, second);
        assert!(futures::poll!(&mut first).is_pending() && futures::poll!(&mut second).is_pending());
        scene.know("new");
        scene.note(reading, "old", &[], 100);
        let mut first = first.await.unwrap();
        assert!(first.events(&scene.cache, &scene.partition).is_none());
        let mut second = second.await.expect("the first one reads, and holds nobody up");
        assert!(second.events(&scene.cache, &scene.partition).is_none());
        scene.note(first, "new", &[], 100);
        assert!(!scene.is_answered().await, "who reads beside others keeps nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn who_waited_for_a_read_that_failed_waits_for_no_other() {
        let scene = ReadsFixture::new().await;
        tokio::time::advance(STALENESS).await;
        let mut reading = scene.join().await;
        assert!(reading.events(&scene.cache, &scene.partition).is_none());
        let waits = || scene.reads.join(&scene.partition, reading.allowed, Deadline::after(NAME));
        let (first, second) = (waits(), waits());
        tokio::pin!(first, second);
        assert!(futures::poll!(&mut first).is_pending() && futures::poll!(&mut second).is_pending());
        drop(reading);
        let mut first = first.await.unwrap();
        assert!(first.events(&scene.cache, &scene.partition).is_none());
        assert!(second.await.expect("the first one holds nobody up").events(&scene.cache, &scene.partition).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn all_answers_together_take_no_more_than_they_may() {
        let scene = ReadsFixture::new().await;
        let reading = scene.join().await;
        scene.note(reading, "old", &[], MOST_BYTES + 1);
        assert!(!scene.is_answered().await);
        assert_eq!(scene.reads.bytes.load(Ordering::SeqCst), 0);
        let reading = scene.join().await;
        scene.note(reading, "old", &[], MOST_BYTES);
        assert!(scene.is_answered().await);
        scene.reads.doubt(&scene.partition);
        assert_eq!(scene.reads.bytes.load(Ordering::SeqCst), 0);
    }
}
