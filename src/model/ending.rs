//! How and when a root instance has ended, as one text that sorts by time within each way of ending: what retention asks for.

use super::{status, Millis};
use duroxide::{AppErrorKind, ErrorDetails, Event, EventKind};

/// How an instance has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Completed,
    Failed,
    Cancelled,
}

impl Ending {
    /// How a turn that leaves this status with these events has ended its instance, if it has for good.
    pub(crate) fn of(status: &str, events: &[Event]) -> Option<Self> {
        let is_cancelled = |event: &Event| {
            let EventKind::OrchestrationFailed { details } = &event.kind else { return false };
            matches!(details, ErrorDetails::Application { kind: AppErrorKind::Cancelled { .. }, .. })
        };
        match status {
            status::COMPLETED => Some(Self::Completed),
            status::FAILED if events.iter().any(is_cancelled) => Some(Self::Cancelled),
            status::FAILED => Some(Self::Failed),
            _ => None,
        }
    }

    fn letter(self) -> char {
        match self {
            Self::Completed => 'C',
            Self::Failed => 'F',
            Self::Cancelled => 'X',
        }
    }

    /// That it was then.
    pub(crate) fn at(self, time: Millis) -> String {
        format!("{}{time:015}", self.letter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_sort_by_time_and_not_among_each_other() {
        let (early, late) = (Ending::Completed.at(999), Ending::Completed.at(1_763_256_000_000));
        assert!(
            early < late && late < Ending::Failed.at(0) && Ending::Failed.at(u64::MAX >> 20) < Ending::Cancelled.at(0)
        );
    }

    #[test]
    fn a_cancellation_is_no_failure() {
        let event = |kind| Event::with_event_id(1, "i", 1, None, kind);
        let failed = |kind| {
            let details = ErrorDetails::Application { kind, message: String::new(), retryable: false };
            event(EventKind::OrchestrationFailed { details })
        };
        let cancelled = [failed(AppErrorKind::Cancelled { reason: String::new() })];
        assert_eq!(Ending::of("Failed", &cancelled), Some(Ending::Cancelled));
        assert_eq!(Ending::of("Failed", &[failed(AppErrorKind::OrchestrationFailed)]), Some(Ending::Failed));
        assert_eq!(Ending::of("Failed", &[]), Some(Ending::Failed));
        assert_eq!(Ending::of("Completed", &[]), Some(Ending::Completed));
        assert_eq!(Ending::of("ContinuedAsNew", &[]), None, "it goes on");
        assert_eq!(Ending::of("Running", &[]), None);
    }
}
