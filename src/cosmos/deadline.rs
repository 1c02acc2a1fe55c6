//! Deadlines of calls.

use std::time::Duration;
use tokio::time::Instant;

/// The moment by which a caller must have an answer.
///
/// A method of the provider knows its lock, and so the deadline. It passes the deadline down to the store, which
/// repeats failed attempts until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// The deadline `duration` from now.
    pub(crate) fn after(duration: Duration) -> Self {
        Self(after(duration))
    }

    /// The time that is left. Zero after the deadline.
    pub(crate) fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether the deadline has passed.
    pub(crate) fn passed(self) -> bool {
        self.remaining().is_zero()
    }

    /// The earlier of two deadlines.
    pub(crate) fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// The deadline as an instant, for timers.
    pub(crate) fn instant(self) -> Instant {
        self.0
    }
}

/// The instant `duration` from now. A longer duration than 30 years, such as `Duration::MAX`, counts as 30 years.
/// Longer ones overflow an instant on some systems, and timers don't take them.
pub(crate) fn after(duration: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    Instant::now() + duration.min(LONGEST)
}
