//! How long a caller can wait.

use std::time::Duration;
use tokio::time::Instant;

/// The moment by which a caller must hear, whatever happened.
///
/// It is passed down from the provider's methods, which know their lock, to the store, which rides out trouble until then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    /// The moment after `duration` from now.
    pub(crate) fn after(duration: Duration) -> Self {
        Self(after(duration))
    }

    /// What is left, zero when the moment has passed.
    pub(crate) fn remaining(self) -> Duration {
        self.0.saturating_duration_since(Instant::now())
    }

    /// Whether the moment has passed.
    pub(crate) fn passed(self) -> bool {
        self.remaining().is_zero()
    }

    /// The earlier of the two.
    pub(crate) fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// The moment itself, for timers.
    pub(crate) fn instant(self) -> Instant {
        self.0
    }
}

/// The instant after `duration` from now. A duration without end, such as `Duration::MAX`, is 30 years: an instant can't tell more
/// on every system, and timers take no more.
pub(crate) fn after(duration: Duration) -> Instant {
    const WITHOUT_END: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    Instant::now() + duration.min(WITHOUT_END)
}
