//! Completion batching: completions of activities and children that arrive close together share one turn.
//!
//! A turn costs two or three requests, however many completions it takes. While many activities or children of an
//! instance are open, its next turn waits for more completions:
//!
//! - half a millisecond for each open activity, and two for each child, which needs more requests,
//! - at most 50 ms,
//! - counted from the end of the last turn, or from the first completion if that is later.
//!
//! So the last completions wait hardly at all, and an instance with one open activity never waits. Only completions are
//! delayed.

use super::memory::Memory;
use crate::model::{Millis, Partition};
use duroxide::{Event, EventKind};
use std::sync::{Mutex, PoisonError};

/// The longest wait.
pub(super) const LONGEST: Millis = 50;

/// For the last instances, until when ends wait after the last turn, and what was under way then.
#[derive(Default)]
pub(super) struct CompletionBatching(Mutex<Memory<Partition, (Millis, OpenWork)>>);

/// What an instance has under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OpenWork {
    activities: usize,
    children: usize,
}

impl OpenWork {
    #[cfg(test)]
    pub(super) fn of_activities(activities: usize) -> Self {
        Self { activities, ..Self::default() }
    }

    pub(crate) fn count(self) -> usize {
        self.activities + self.children
    }

    /// How long an end waits for the others.
    fn wait(self) -> Millis {
        match self.count() {
            0 | 1 => 0,
            _ => (self.activities as Millis / 2 + self.children as Millis * 2).min(LONGEST),
        }
    }
}

impl CompletionBatching {
    /// A turn has ended that leaves these under way. Until when their ends wait.
    pub(super) fn turn_ended(&self, partition: &Partition, open: OpenWork, now: Millis) -> Millis {
        let until = now + open.wait();
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note(partition.clone(), |known| *known = (until, open));
        until
    }

    /// Until when an end waits that comes now, beside so many others that wait already. The last one waits for nobody. A clock that was set back
    /// makes nobody wait longer.
    pub(super) fn waits_until(&self, partition: &Partition, others: usize, now: Millis) -> Option<Millis> {
        let (until, open) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(partition)?;
        let wait = open.wait();
        (wait > 0 && others + 1 < open.count()).then_some(if until > now { until.min(now + wait) } else { now + wait })
    }
}

/// The activities and children of a history that have not ended.
pub(crate) fn open<'a>(history: impl IntoIterator<Item = &'a Event>) -> OpenWork {
    let (mut scheduled, mut ended) = (OpenWork::default(), OpenWork::default());
    for event in history {
        match event.kind {
            EventKind::ActivityScheduled { .. } => scheduled.activities += 1,
            EventKind::SubOrchestrationScheduled { .. } => scheduled.children += 1,
            EventKind::ActivityCompleted { .. }
            | EventKind::ActivityFailed { .. }
            | EventKind::ActivityCancelRequested { .. } => ended.activities += 1,
            EventKind::SubOrchestrationCompleted { .. }
            | EventKind::SubOrchestrationFailed { .. }
            | EventKind::SubOrchestrationCancelRequested { .. } => ended.children += 1,
            _ => {}
        }
    }
    OpenWork {
        activities: scheduled.activities.saturating_sub(ended.activities),
        children: scheduled.children.saturating_sub(ended.children),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_wait_for_each_other_and_one_for_nobody() {
        let (completion_batching, partition) = (CompletionBatching::default(), Partition::instance("a").unwrap());
        assert_eq!(completion_batching.waits_until(&partition, 0, 0), None);
        let activities = [(0, 0), (1, 0), (4, 2), (20, 10), (100, 50), (10_000, LONGEST)];
        let activities = activities.map(|(activities, wait)| (OpenWork { activities, children: 0 }, wait));
        let children = [(0, 1, 0), (0, 5, 10), (1, 1, 2), (4, 5, 12), (0, 10_000, LONGEST)];
        let children = children.map(|(activities, children, wait)| (OpenWork { activities, children }, wait));
        for (open, wait) in children.into_iter().chain(activities) {
            assert_eq!(completion_batching.turn_ended(&partition, open, 1_000), 1_000 + wait);
            assert_eq!(completion_batching.waits_until(&partition, 0, 1_000), (wait > 0).then_some(1_000 + wait));
            assert_eq!(
                completion_batching.waits_until(&partition, 0, 2_000),
                (wait > 0).then_some(2_000 + wait),
                "it is the first"
            );
            assert_eq!(
                completion_batching.waits_until(&partition, open.count().saturating_sub(1), 1_000),
                None,
                "it is the last"
            );
        }
        assert_eq!(completion_batching.waits_until(&partition, 0, 900), Some(900 + LONGEST), "the clock was set back");
    }

    #[test]
    fn what_has_ended_or_was_cancelled_is_not_open() {
        let event = |id: u64, source: Option<u64>, kind| Event::with_event_id(id, "i", 1, source, kind);
        let scheduled = |id| {
            let (name, input) = ("a".to_owned(), String::new());
            event(id, None, EventKind::ActivityScheduled { name, input, session_id: None, tag: None })
        };
        let mut history: Vec<Event> = (2..6).map(scheduled).collect();
        assert_eq!(open(&history), OpenWork { activities: 4, children: 0 });
        history.push(event(6, Some(2), EventKind::ActivityCompleted { result: String::new() }));
        history.push(event(7, Some(3), EventKind::ActivityCancelRequested { reason: String::new() }));
        let (name, instance, input) = ("c".to_owned(), "c".to_owned(), String::new());
        history.push(event(8, None, EventKind::SubOrchestrationScheduled { name, instance, input }));
        assert_eq!(open(&history), OpenWork { activities: 2, children: 1 });
        history.push(event(9, Some(8), EventKind::SubOrchestrationCompleted { result: String::new() }));
        assert_eq!(open(&history), OpenWork { activities: 2, children: 0 });
    }
}
