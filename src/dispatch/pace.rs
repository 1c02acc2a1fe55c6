//! How soon an instance has its next turn: the ends of activities that come close together share one.
//!
//! A turn costs three requests however many ends it takes in. While many activities of an instance are under way, its next turn
//! may as well wait for some more of them: half a millisecond for each, 50 ms at most, from the end of the turn before. So the last
//! ones hardly wait, an instance with one activity at a time never does, and nothing but the end of an activity is held up.

use super::memory::Memory;
use crate::model::{Millis, Partition};
use duroxide::{Event, EventKind};
use std::sync::{Mutex, PoisonError};

/// The longest wait.
pub(super) const LONGEST: Millis = 50;

/// Until when the ends of activities wait, for the last instances.
#[derive(Default)]
pub(super) struct Pace(Mutex<Memory<Partition, Millis>>);

impl Pace {
    /// A turn has ended that leaves so many activities under way. Until when their ends wait.
    pub(super) fn turn_ended(&self, partition: &Partition, open: usize, now: Millis) -> Millis {
        let until = now + (open as Millis / 2).min(LONGEST);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).note(partition.clone(), |known| *known = until);
        until
    }

    /// Until when the ends of its activities wait, if they do. A clock that was set back makes nobody wait longer.
    pub(super) fn waits_until(&self, partition: &Partition, now: Millis) -> Option<Millis> {
        let until = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(partition)?;
        (until > now && until <= now + LONGEST).then_some(until)
    }
}

/// How many activities of a history have not ended.
pub(super) fn open(history: &[Event]) -> usize {
    let count = |such: fn(&EventKind) -> bool| history.iter().filter(|event| such(&event.kind)).count();
    let scheduled = count(|kind| matches!(kind, EventKind::ActivityScheduled { .. }));
    let ended = count(|kind| {
        matches!(
            kind,
            EventKind::ActivityCompleted { .. }
                | EventKind::ActivityFailed { .. }
                | EventKind::ActivityCancelRequested { .. }
        )
    });
    scheduled.saturating_sub(ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_wait_for_each_other_and_one_for_nobody() {
        let (pace, partition) = (Pace::default(), Partition::instance("a").unwrap());
        assert_eq!(pace.waits_until(&partition, 0), None);
        for (open, wait) in [(0, 0), (1, 0), (4, 2), (20, 10), (100, 50), (10_000, LONGEST)] {
            assert_eq!(pace.turn_ended(&partition, open, 1_000), 1_000 + wait);
            assert_eq!(pace.waits_until(&partition, 1_000), (wait > 0).then_some(1_000 + wait));
        }
        assert_eq!(pace.waits_until(&partition, 1_000 + LONGEST), None);
        assert_eq!(pace.waits_until(&partition, 900), None, "the clock was set back");
    }

    #[test]
    fn what_has_ended_or_was_cancelled_is_not_open() {
        let event = |id: u64, source: Option<u64>, kind| Event::with_event_id(id, "i", 1, source, kind);
        let scheduled = |id| {
            let (name, input) = ("a".to_owned(), String::new());
            event(id, None, EventKind::ActivityScheduled { name, input, session_id: None, tag: None })
        };
        let mut history: Vec<Event> = (2..6).map(scheduled).collect();
        assert_eq!(open(&history), 4);
        history.push(event(6, Some(2), EventKind::ActivityCompleted { result: String::new() }));
        history.push(event(7, Some(3), EventKind::ActivityCancelRequested { reason: String::new() }));
        assert_eq!(open(&history), 2);
    }
}
