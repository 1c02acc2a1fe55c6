//! How and when a root instance ended, as one text. Texts of the same ending sort by time, so retention can query a
//! range.

use super::{status, Millis};
use duroxide::{AppErrorKind, ErrorDetails, Event, EventKind};

/// The last character of a text whose time is Cosmos DB's.
const PROVED: char = 's';

/// How an instance ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Completed,
    Failed,
    Cancelled,
}

impl Ending {
    /// The ending of an instance after a turn with this status and these events. An instance that continues has none.
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

    /// The text for an end at this time, by the clock of a worker.
    pub(crate) fn at(self, time: Millis) -> String {
        format!("{}{time:015}", self.letter())
    }

    /// The text for an end at this time, by Cosmos DB's clock. It sorts like a time of any other clock.
    pub(crate) fn proved_at(self, time: Millis) -> String {
        format!("{}{PROVED}", self.at(time))
    }

    /// The text with another time, by Cosmos DB's clock.
    pub(crate) fn proved(text: &str, time: Millis) -> String {
        let letter = text.chars().next().unwrap_or_default();
        format!("{letter}{time:015}{PROVED}")
    }

    /// Whether the time of a text is Cosmos DB's.
    pub(crate) fn is_proved(text: &str) -> bool {
        text.ends_with(PROVED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_one_ending_sort_by_time_and_apart_from_other_endings() {
        let (early, late) = (Ending::Completed.at(999), Ending::Completed.at(1_763_256_000_000));
        assert!(
            early < late && late < Ending::Failed.at(0) && Ending::Failed.at(u64::MAX >> 20) < Ending::Cancelled.at(0)
        );
    }

    #[test]
    fn a_time_of_cosmos_db_sorts_like_any_other() {
        let proved = Ending::Failed.proved_at(5);
        assert!(Ending::is_proved(&proved) && !Ending::is_proved(&Ending::Failed.at(5)));
        assert!(Ending::Failed.at(5) < proved && proved < Ending::Failed.at(6));
        assert_eq!(Ending::proved(&Ending::Failed.at(9), 5), proved);
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
        assert_eq!(Ending::of("ContinuedAsNew", &[]), None, "the instance continues");
        assert_eq!(Ending::of("Running", &[]), None);
    }
}
