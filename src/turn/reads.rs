//! Reads of one history at the same time are one read.
//!
//! A fan-out starts many activities of an instance in the same moment, in processes that don't have its turns, and its history
//! changes with every turn. What one of them reads serves all that ask within `read_staleness`. duroxide reads once for each
//! activity that it starts, to learn the orchestration's name and version: for that an answer serves for [`NAME`] that has the activity in it, since
//! these stay for an execution.
//!
//! Invariant: a caller is never shown less than this process has seen: an answer is good only as long as the state that this process knows is
//! the one that it knew when it had the answer.

use super::cache::InstanceCache;
use crate::{
    model::Partition,
    store::{Deadline, StoreError},
};
use azure_core::http::Etag;
use dashmap::DashMap;
use duroxide::Event;
use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::time::Instant;

/// What an activity that starts wants to know of its orchestration does not change sooner.
const NAME: Duration = Duration::from_secs(1);
/// How often those are forgotten whose answers serve nobody any more, and with how many instances nothing more is kept.
const SWEEP: Duration = Duration::from_secs(1);
const MOST: usize = 1_024;
/// Longer histories are not kept, so that all of them stay small beside the cache.
const MOST_BYTES: usize = 64 * 1024;

/// A history as it was read.
pub(crate) struct Answer {
    /// When the read began.
    asked: Instant,
    /// The state that this process knew after it.
    known: Option<Etag>,
    events: Vec<Event>,
}

/// The last answer for each instance whose history is read.
#[derive(Default)]
pub(crate) struct Reads {
    entries: DashMap<Partition, Entry>,
    swept: std::sync::Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Entry {
    answer: Arc<Mutex<Option<Answer>>>,
    started: std::sync::Mutex<Started>,
}

/// Activities that were handed out and have not read yet: of the last execution that had any.
#[derive(Default)]
struct Started {
    execution: u64,
    /// The last event that scheduled one of them.
    last: u64,
    count: usize,
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
    answer: OwnedMutexGuard<Option<Answer>>,
    allowed: Allowed,
    /// Since when it waits.
    since: Instant,
}

impl Reads {
    /// An activity of this instance is handed out: it will read once.
    pub(crate) fn activity_starts(&self, partition: &Partition, execution: u64, scheduled: u64) {
        self.forget_old();
        let entry = self.entries.entry(partition.clone()).or_default();
        let mut started = entry.started.lock().unwrap_or_else(PoisonError::into_inner);
        if started.execution != execution {
            *started = Started { execution, ..Started::default() };
        }
        started.last = started.last.max(scheduled);
        started.count += 1;
    }

    /// Somebody reads: how old the answer may be. One of the activities that were handed out is taken to be the one.
    pub(crate) fn allowed(&self, partition: &Partition, staleness: Duration) -> Allowed {
        let starts = self.entries.get(partition).and_then(|entry| {
            let mut started = entry.started.lock().unwrap_or_else(PoisonError::into_inner);
            started.count = started.count.checked_sub(1)?;
            Some((started.execution, started.last))
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
        let answer = self.entries.entry(partition.clone()).or_default().answer.clone();
        let waited = tokio::time::timeout_at(deadline.instant(), answer.lock_owned()).await;
        let unavailable = |_| StoreError::Unavailable { detail: "a read of the same history does not end".to_owned() };
        Ok(Reading { answer: waited.map_err(unavailable)?, allowed, since })
    }

    /// What was read of this instance may be of before: it serves nobody.
    pub(crate) fn doubt(&self, partition: &Partition) {
        self.entries.remove(partition);
    }

    fn forget_old(&self) {
        let now = Instant::now();
        {
            let mut swept = self.swept.lock().unwrap_or_else(PoisonError::into_inner);
            if swept.is_some_and(|swept| swept + SWEEP > now) && self.entries.len() < MOST {
                return;
            }
            *swept = Some(now);
        }
        let serves = |answer: &Answer| answer.asked.elapsed() < NAME;
        self.entries.retain(|_, Entry { answer, .. }| {
            Arc::strong_count(answer) > 1 || answer.try_lock().is_ok_and(|answer| answer.as_ref().is_some_and(serves))
        });
    }
}

impl Reading {
    /// The history, if it may still be shown.
    pub(crate) fn events(&self, cache: &InstanceCache, partition: &Partition) -> Option<Vec<Event>> {
        let answer = self.answer.as_ref()?;
        let Allowed { staleness, starts } = self.allowed;
        let last = answer.events.last().map(|event| (event.execution_id, event.event_id));
        let has_it = starts.zip(last).is_some_and(|(starts, last)| starts.0 == last.0 && starts.1 <= last.1);
        let is_young = answer.asked.elapsed() < if has_it { staleness.max(NAME) } else { staleness };
        // One that was asked for while this caller waited is as good as its own.
        let is_mine = answer.asked >= self.since;
        let is_current = cache.get(partition).map(|known| known.etag) == answer.known;
        ((is_young || is_mine) && is_current).then(|| answer.events.clone())
    }

    /// A history of so many bytes was read, and this process knows now what it knows. Where it knows nothing, it could not tell
    /// when it learns of something else.
    pub(crate) fn note(
        mut self,
        cache: &InstanceCache,
        partition: &Partition,
        asked: Instant,
        events: &[Event],
        bytes: usize,
    ) {
        let known = cache.get(partition).map(|known| known.etag).filter(|_| bytes <= MOST_BYTES);
        *self.answer = known.map(|etag| Answer { asked, known: Some(etag), events: events.to_vec() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::turn::cache::Known;
    use duroxide::EventKind;

    const STALENESS: Duration = Duration::from_millis(50);

    struct Scene {
        reads: Reads,
        cache: InstanceCache,
        partition: Partition,
    }

    impl Scene {
        async fn new() -> Self {
            let partition = Partition::instance("i").unwrap();
            let scene = Self { reads: Reads::default(), cache: InstanceCache::new(1 << 20), partition };
            let kind = EventKind::OrchestrationCompleted { output: String::new() };
            let events = [Event::with_event_id(1, "i", 1, None, kind)];
            scene.know("old");
            scene.join().await.note(&scene.cache, &scene.partition, Instant::now(), &events, 100);
            scene
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
        let scene = Scene::new().await;
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
    async fn what_this_process_has_learnt_since_is_not_hidden_by_an_answer() {
        let scene = Scene::new().await;
        scene.know("new");
        scene.reads.activity_starts(&scene.partition, 1, 1);
        assert!(!scene.is_answered().await);
        let scene = Scene::new().await;
        scene.reads.doubt(&scene.partition);
        assert!(!scene.is_answered().await);
        let scene = Scene::new().await;
        scene.cache.forget(&scene.partition);
        assert!(!scene.is_answered().await);
    }

    #[tokio::test(start_paused = true)]
    async fn one_reads_at_a_time_and_what_serves_nobody_is_forgotten() {
        let scene = Scene::new().await;
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
        let scene = Scene::new().await;
        let reading = scene.join().await;
        let waits = scene.reads.join(&scene.partition, reading.allowed, Deadline::after(NAME));
        tokio::pin!(waits);
        assert!(futures::poll!(&mut waits).is_pending());
        let (asked, events) = (Instant::now(), reading.answer.as_ref().unwrap().events.clone());
        tokio::time::advance(STALENESS * 2).await;
        reading.note(&scene.cache, &scene.partition, asked, &events, 100);
        assert!(waits.await.unwrap().events(&scene.cache, &scene.partition).is_some());
    }
}
