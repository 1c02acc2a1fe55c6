//! Shares one read of a history among calls that need it at the same time.
//!
//! A fan-out starts many activities of an instance at once, also in processes that do not run its turns, and its
//! history changes with every turn. The result of one read serves all calls within `read_staleness`.
//!
//! duroxide reads the history once for each activity that it starts, to learn the orchestration's name and version.
//! These stay the same for an execution. So a result that contains the scheduling event of the activity serves this
//! purpose for [`NAME_VALIDITY`].
//!
//! Invariant: a caller never gets less than this process has seen. A result is valid only while the cached ETag of the
//! instance is the one with which it was read. If a shared read is stale when it returns, each waiter reads for itself.

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

/// How long the name and version in a result serve an activity that starts.
const NAME_VALIDITY: Duration = Duration::from_secs(1);
/// An activity reads within this time after it was handed out. A later read belongs to another caller.
const READS_WITHIN: Duration = Duration::from_millis(200);
/// How often results that are no longer valid are removed.
const CLEAN_UP_INTERVAL: Duration = Duration::from_secs(1);
/// The limit for all results together, by the text of their events. A result counts for at least the minimum.
const MAX_RESULT_BYTES: usize = 16 << 20;
const MIN_RESULT_BYTES: usize = 1_024;

/// The last reads of an instance.
#[derive(Default)]
struct LastReads {
    result: Option<ReadResult>,
    /// When a read began whose result cannot be shared.
    not_shared: Option<Instant>,
}

/// A history as it was read.
struct ReadResult {
    /// When the read began.
    began: Instant,
    /// When the result was known to be current. A change may have happened since.
    of: Instant,
    /// The instance document's ETag with which it was read.
    etag: Etag,
    events: Arc<Vec<Event>>,
    _bytes: ByteReservation,
}

/// The bytes that a result uses. They are free again when this is dropped.
struct ByteReservation(Arc<AtomicUsize>, usize);

impl ByteReservation {
    /// Reserves bytes. Returns `None` if the limit is reached.
    fn of(all: &Arc<AtomicUsize>, bytes: usize) -> Option<Self> {
        let bytes = Self(all.clone(), bytes.max(MIN_RESULT_BYTES));
        (all.fetch_add(bytes.1, Ordering::SeqCst) + bytes.1 <= MAX_RESULT_BYTES).then_some(bytes)
    }
}

impl Drop for ByteReservation {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::SeqCst);
    }
}

/// The last result for each instance whose history is read.
#[derive(Default)]
pub(crate) struct HistoryReads {
    entries: DashMap<Partition, InstanceReads>,
    bytes: Arc<AtomicUsize>,
    cleaned_at: std::sync::Mutex<Option<Instant>>,
}

#[derive(Default)]
struct InstanceReads {
    last: Arc<Mutex<LastReads>>,
    started: std::sync::Mutex<StartedActivities>,
}

/// Activities that were handed out and have not read the history yet, all of one execution.
#[derive(Default)]
struct StartedActivities {
    execution: u64,
    /// The event id of the last of them that was scheduled.
    last: u64,
    count: usize,
    /// When the last of them was handed out.
    at: Option<Instant>,
}

/// How old a result may be for one call.
#[derive(Clone, Copy)]
pub(crate) struct AllowedStaleness {
    staleness: Duration,
    /// For an activity that starts: its execution, and the event that the history must contain.
    starts: Option<(u64, u64)>,
}

/// The permission to read: it gives access to the last result and stores the next.
pub(crate) struct ReadPermit {
    /// `None` for a call that reads by itself, beside others.
    last: Option<OwnedMutexGuard<LastReads>>,
    bytes: Arc<AtomicUsize>,
    allowed: AllowedStaleness,
    /// When the call began to wait, and when it got the permission.
    since: Instant,
    began: Instant,
}

impl HistoryReads {
    /// Records that an activity of this instance is handed out and will read the history once.
    pub(crate) fn activity_starts(&self, partition: &Partition, execution: u64, scheduled: u64) {
        self.forget_old();
        let entry = self.entries.entry(partition.clone()).or_default();
        let mut started = entry.started.lock().unwrap_or_else(PoisonError::into_inner);
        if started.execution != execution || !started.is_recent() {
            // The earlier ones have not read within their time, and never will.
            *started = StartedActivities { execution, ..StartedActivities::default() };
        }
        started.last = started.last.max(scheduled);
        started.count += 1;
        started.at = Some(Instant::now());
    }

    /// How old the result for a call may be. The call is taken for one of the activities that were handed out a moment
    /// ago, if there are any.
    pub(crate) fn allowed(&self, partition: &Partition, staleness: Duration) -> AllowedStaleness {
        let starts = self.entries.get(partition).filter(|_| !staleness.is_zero()).and_then(|entry| {
            let mut started = entry.started.lock().unwrap_or_else(PoisonError::into_inner);
            started.count = started.count.checked_sub(1)?;
            started.is_recent().then_some((started.execution, started.last))
        });
        AllowedStaleness { staleness, starts }
    }

    /// Waits until no other call reads the history of this instance.
    pub(crate) async fn join(
        &self,
        partition: &Partition,
        allowed: AllowedStaleness,
        deadline: Deadline,
    ) -> Result<ReadPermit, StoreError> {
        self.forget_old();
        let since = Instant::now();
        let last = self.entries.entry(partition.clone()).or_default().last.clone();
        let waited = tokio::time::timeout_at(deadline.instant(), last.lock_owned()).await;
        let unavailable =
            |_| StoreError::Unavailable { detail: "another read of the same history takes too long".to_owned() };
        let (last, began) = (Some(waited.map_err(unavailable)?), Instant::now());
        Ok(ReadPermit { last, bytes: self.bytes.clone(), allowed, since, began })
    }

    /// Removes the result for this instance, because it may be stale.
    pub(crate) fn invalidate(&self, partition: &Partition) {
        self.entries.remove(partition);
    }

    /// Removes results that are no longer valid, at most once per interval.
    fn forget_old(&self) {
        let now = Instant::now();
        {
            let mut cleaned_at = self.cleaned_at.lock().unwrap_or_else(PoisonError::into_inner);
            if cleaned_at.is_some_and(|cleaned_at| cleaned_at + CLEAN_UP_INTERVAL > now) {
                return;
            }
            *cleaned_at = Some(now);
        }
        let serves = |last: &LastReads| last.result.as_ref().is_some_and(|result| result.of.elapsed() < NAME_VALIDITY);
        self.entries.retain(|_, InstanceReads { last, .. }| {
            Arc::strong_count(last) > 1 || last.try_lock().is_ok_and(|last| serves(&last))
        });
    }
}

impl StartedActivities {
    fn is_recent(&self) -> bool {
        self.at.is_some_and(|at| at.elapsed() < READS_WITHIN)
    }
}

impl ReadPermit {
    /// The shared history, if it is valid for this call. If the call has waited for an invalid result, it reads for
    /// itself and waits no more.
    pub(crate) fn events(&mut self, cache: &InstanceCache, partition: &Partition) -> Option<Vec<Event>> {
        let last = self.last.as_ref()?;
        // A read that began while this call waited is as good as its own.
        let is_own = |began: Instant| began >= self.since;
        let shown = last.result.as_ref().filter(|result| {
            let is_current = cache.etag(partition).as_ref() == Some(&result.etag);
            (is_own(result.began) || self.allowed.accepts(result.of, &result.events)) && is_current
        });
        let shown = shown.map(|result| result.events.as_ref().clone());
        let waited_for_invalid =
            last.result.as_ref().map(|result| result.began).into_iter().chain(last.not_shared).any(is_own);
        if shown.is_some() || waited_for_invalid {
            // The call reads nothing, or it reads beside the others.
            self.last = None;
        }
        shown
    }

    /// Shares a history that was read with this ETag of the instance document, which was current at `of`. `bytes` is
    /// the size of its text. The result is not shared if the cache has another ETag by now: the process could not tell
    /// later whether the result is stale.
    pub(crate) fn share(
        mut self,
        cache: &InstanceCache,
        partition: &Partition,
        of: Instant,
        etag: &Etag,
        (events, bytes): (Arc<Vec<Event>>, usize),
    ) {
        let Some(last) = &mut self.last else { return };
        // The replaced result frees its bytes first.
        **last = LastReads::default();
        let is_current = cache.etag(partition).as_ref() == Some(etag);
        let (began, bytes) = (self.began, ByteReservation::of(&self.bytes, bytes).filter(|_| is_current));
        last.result = bytes.map(|bytes| ReadResult { began, of, etag: etag.clone(), events, _bytes: bytes });
        if last.result.is_some() {
            self.last = None;
        }
    }
}

impl Drop for ReadPermit {
    /// A read that failed serves no other call. Each waiter reads for itself.
    fn drop(&mut self) {
        if let Some(last) = &mut self.last {
            last.not_shared = Some(self.began);
        }
    }
}

impl AllowedStaleness {
    /// Whether a result that was current at `of` is valid for this call.
    fn accepts(&self, of: Instant, events: &[Event]) -> bool {
        let last = events.last().map(|event| (event.execution_id, event.event_id));
        let has_it = self.starts.zip(last).is_some_and(|(starts, last)| starts.0 == last.0 && starts.1 <= last.1);
        of.elapsed() < if has_it { self.staleness.max(NAME_VALIDITY) } else { self.staleness }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::cache::CachedInstance;
    use duroxide::EventKind;

    const STALENESS: Duration = Duration::from_millis(50);

    struct ReadsFixture {
        reads: HistoryReads,
        cache: InstanceCache,
        partition: Partition,
    }

    impl ReadsFixture {
        async fn new() -> Self {
            let partition = Partition::instance("i").unwrap();
            let fixture = Self { reads: HistoryReads::default(), cache: InstanceCache::new(1 << 20), partition };
            let kind = EventKind::OrchestrationCompleted { output: String::new() };
            let events = [Event::with_event_id(1, "i", 1, None, kind)];
            fixture.know("old");
            fixture.share(fixture.join().await, "old", &events, 100);
            fixture
        }

        fn share(&self, reading: ReadPermit, etag: &'static str, events: &[Event], bytes: usize) {
            let read = (Arc::new(events.to_vec()), bytes);
            reading.share(&self.cache, &self.partition, Instant::now(), &Etag::from(etag), read);
        }

        fn know(&self, etag: &'static str) {
            let document = crate::model::InstanceDocument::new(self.partition.clone(), "token", 0);
            self.cache.put(&self.partition, CachedInstance { document, etag: Etag::from(etag), contents: None });
        }

        async fn join(&self) -> ReadPermit {
            let allowed = self.reads.allowed(&self.partition, STALENESS);
            self.reads.join(&self.partition, allowed, Deadline::after(STALENESS)).await.unwrap()
        }

        async fn is_shared(&self) -> bool {
            self.join().await.events(&self.cache, &self.partition).is_some()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_result_is_valid_for_the_staleness_and_for_a_starting_activity_for_longer() {
        let fixture = ReadsFixture::new().await;
        assert!(fixture.is_shared().await);
        tokio::time::advance(STALENESS).await;
        assert!(!fixture.is_shared().await);
        fixture.reads.activity_starts(&fixture.partition, 1, 1);
        assert!(fixture.is_shared().await && !fixture.is_shared().await, "it reads once");
        fixture.reads.activity_starts(&fixture.partition, 1, 2);
        assert!(!fixture.is_shared().await, "it was scheduled later");
        fixture.reads.activity_starts(&fixture.partition, 2, 1);
        assert!(!fixture.is_shared().await, "the next execution may have another version");
        tokio::time::advance(NAME_VALIDITY).await;
        fixture.reads.activity_starts(&fixture.partition, 1, 1);
        assert!(!fixture.is_shared().await);
    }

    #[tokio::test(start_paused = true)]
    async fn the_longer_validity_for_activities_does_not_extend_to_other_calls() {
        let fixture = ReadsFixture::new().await;
        tokio::time::advance(STALENESS).await;
        (0..10).for_each(|_| fixture.reads.activity_starts(&fixture.partition, 1, 1));
        assert!(fixture.is_shared().await);
        tokio::time::advance(READS_WITHIN).await;
        assert!(!fixture.is_shared().await, "those that have not read never will");
        fixture.reads.activity_starts(&fixture.partition, 1, 1);
        assert!(fixture.is_shared().await && !fixture.is_shared().await);
        fixture.reads.activity_starts(&fixture.partition, 1, 1);
        let never = fixture.reads.allowed(&fixture.partition, Duration::ZERO);
        let mut reading = fixture.reads.join(&fixture.partition, never, Deadline::after(NAME_VALIDITY)).await.unwrap();
        assert!(reading.events(&fixture.cache, &fixture.partition).is_none(), "nothing is shown from memory then");
    }

    #[tokio::test(start_paused = true)]
    async fn a_result_never_hides_a_newer_state_that_this_process_has_seen() {
        let fixture = ReadsFixture::new().await;
        fixture.know("new");
        fixture.reads.activity_starts(&fixture.partition, 1, 1);
        assert!(!fixture.is_shared().await);
        let fixture = ReadsFixture::new().await;
        fixture.reads.invalidate(&fixture.partition);
        assert!(!fixture.is_shared().await);
        let fixture = ReadsFixture::new().await;
        fixture.cache.forget(&fixture.partition);
        assert!(!fixture.is_shared().await);
    }

    #[tokio::test(start_paused = true)]
    async fn one_call_reads_at_a_time_and_old_results_are_removed() {
        let fixture = ReadsFixture::new().await;
        let (reading, allowed) = (fixture.join().await, fixture.reads.allowed(&fixture.partition, STALENESS));
        assert!(fixture.reads.join(&fixture.partition, allowed, Deadline::after(STALENESS)).await.is_err());
        drop(reading);
        for n in 0..100 {
            fixture.reads.activity_starts(&Partition::instance(&n.to_string()).unwrap(), 1, 1);
        }
        tokio::time::advance(CLEAN_UP_INTERVAL).await;
        fixture.reads.activity_starts(&fixture.partition, 1, 1);
        assert_eq!(fixture.reads.entries.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_read_serves_the_calls_that_wait_for_it() {
        let fixture = ReadsFixture::new().await;
        let reading = fixture.join().await;
        let waits = fixture.reads.join(&fixture.partition, reading.allowed, Deadline::after(NAME_VALIDITY));
        tokio::pin!(waits);
        assert!(futures::poll!(&mut waits).is_pending());
        let of = Instant::now();
        tokio::time::advance(STALENESS * 2).await;
        // The result may have any length.
        let read = (Arc::new(Vec::new()), 2 << 20);
        reading.share(&fixture.cache, &fixture.partition, of, &Etag::from("old"), read);
        assert!(waits.await.unwrap().events(&fixture.cache, &fixture.partition).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_that_a_commit_made_stale_is_not_shared_and_its_waiters_read_for_themselves() {
        let fixture = ReadsFixture::new().await;
        let reading = fixture.join().await;
        let waits = || fixture.reads.join(&fixture.partition, reading.allowed, Deadline::after(NAME_VALIDITY));
        let (first, second) = (waits(), waits());
        tokio::pin!(first, second);
        assert!(futures::poll!(&mut first).is_pending() && futures::poll!(&mut second).is_pending());
        fixture.know("new");
        fixture.share(reading, "old", &[], 100);
        let mut first = first.await.unwrap();
        assert!(first.events(&fixture.cache, &fixture.partition).is_none());
        let mut second = second.await.expect("the first one reads and blocks no other");
        assert!(second.events(&fixture.cache, &fixture.partition).is_none());
        fixture.share(first, "new", &[], 100);
        assert!(!fixture.is_shared().await, "a call that reads beside others shares nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_waited_for_a_failed_read_does_not_wait_again() {
        let fixture = ReadsFixture::new().await;
        tokio::time::advance(STALENESS).await;
        let mut reading = fixture.join().await;
        assert!(reading.events(&fixture.cache, &fixture.partition).is_none());
        let waits = || fixture.reads.join(&fixture.partition, reading.allowed, Deadline::after(NAME_VALIDITY));
        let (first, second) = (waits(), waits());
        tokio::pin!(first, second);
        assert!(futures::poll!(&mut first).is_pending() && futures::poll!(&mut second).is_pending());
        drop(reading);
        let mut first = first.await.unwrap();
        assert!(first.events(&fixture.cache, &fixture.partition).is_none());
        assert!(second
            .await
            .expect("the first one blocks no other")
            .events(&fixture.cache, &fixture.partition)
            .is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn all_results_together_stay_within_the_limit() {
        let fixture = ReadsFixture::new().await;
        let reading = fixture.join().await;
        fixture.share(reading, "old", &[], MAX_RESULT_BYTES + 1);
        assert!(!fixture.is_shared().await);
        assert_eq!(fixture.reads.bytes.load(Ordering::SeqCst), 0);
        let reading = fixture.join().await;
        fixture.share(reading, "old", &[], MAX_RESULT_BYTES);
        assert!(fixture.is_shared().await);
        fixture.reads.invalidate(&fixture.partition);
        assert_eq!(fixture.reads.bytes.load(Ordering::SeqCst), 0);
    }
}
