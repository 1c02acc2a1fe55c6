//! The clock, and sequence keys that order messages.

use super::Randomness;
use std::{
    fmt,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Milliseconds since the Unix epoch.
pub(crate) type Millis = u64;

/// The source of the time of day: the system clock, or a function.
///
/// Locks expire and timers fire by this clock. Durations are measured by tokio's clock instead. A test that pauses
/// tokio's clock can supply a clock that follows it.
///
/// ```
/// use duroxide_cosmos::Clock;
/// use std::time::Duration;
/// use tokio::time::{advance, Instant};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let start = Instant::now();
/// let clock = Clock::from_fn(move || 1_763_256_000_000 + start.elapsed().as_millis() as u64);
/// advance(Duration::from_secs(5)).await;
/// assert_eq!(clock.now(), 1_763_256_005_000);
/// # }
/// ```
#[derive(Clone)]
pub struct Clock(ClockSource);

#[derive(Clone)]
enum ClockSource {
    System,
    Given(Arc<dyn Fn() -> Millis + Send + Sync>),
}

impl Clock {
    /// The system clock.
    pub fn system() -> Self {
        Self(ClockSource::System)
    }

    /// A clock that reads `now`, in milliseconds since the Unix epoch, for tests and simulations. The time may step
    /// back, as the system clock does.
    pub fn from_fn(now: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(ClockSource::Given(Arc::new(now)))
    }

    /// The current time, in milliseconds since the Unix epoch.
    #[allow(clippy::disallowed_methods, reason = "the only place that reads the system clock")]
    pub fn now(&self) -> u64 {
        match &self.0 {
            ClockSource::System => millis(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()),
            ClockSource::Given(now) => now(),
        }
    }

    /// The time `duration` from now.
    pub(crate) fn after(&self, duration: Duration) -> Millis {
        self.now().saturating_add(millis(duration))
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            ClockSource::System => "Clock(system)",
            ClockSource::Given(_) => "Clock(given)",
        })
    }
}

/// About 140,000 years. Cosmos DB stores whole numbers exactly up to 2^53. The current time plus this is below that
/// limit, and below the `due` of a deferred message.
const LONGEST: Millis = 1 << 52;

/// A duration in whole milliseconds, at most [`LONGEST`].
pub(crate) fn millis(duration: Duration) -> Millis {
    u64::try_from(duration.as_millis()).map_or(LONGEST, |millis| millis.min(LONGEST))
}

/// A time that the application chose, such as that of a timer, limited to the times that Cosmos DB stores exactly.
pub(crate) fn storable(moment: Millis) -> Millis {
    moment.min(LONGEST)
}

/// Makes sequence keys: strings that sort in the order in which this process made them. The order holds within one
/// millisecond, and if the clock steps back. Keys of two processes sort by their clocks.
pub(crate) struct Sequencer {
    clock: Clock,
    process: String,
    last: Mutex<(Millis, u32)>,
}

impl Sequencer {
    pub(crate) fn new(clock: Clock, randomness: &Randomness) -> Self {
        let mut process = randomness.token();
        process.truncate(10);
        Self { clock, process, last: Mutex::new((0, 0)) }
    }

    /// The next key.
    pub(crate) fn next(&self) -> String {
        let now = self.clock.now();
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if now > last.0 {
            *last = (now, 0);
        } else if last.1 == 999_999 {
            *last = (last.0 + 1, 0);
        } else {
            last.1 += 1;
        }
        format!("{:015}-{:06}-{}", last.0, last.1, self.process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn an_endless_duration_becomes_a_time_that_cosmos_db_stores_exactly() {
        let clock = Clock::from_fn(|| 4_102_444_800_000);
        let deferred = crate::model::MessageDocument::DEFERRED;
        assert!(clock.after(Duration::MAX) < deferred && storable(u64::MAX) < deferred);
        assert_eq!(clock.after(Duration::from_millis(5)), 4_102_444_800_005);
    }

    #[test]
    fn keys_sort_in_the_order_in_which_they_were_made_even_when_the_clock_steps_back() {
        let time = Arc::new(AtomicU64::new(1_000));
        let seen = time.clone();
        let clock = Clock::from_fn(move || seen.load(Ordering::SeqCst));
        let sequencer = Sequencer::new(clock, &Randomness::seeded(0));
        let mut keys = vec![sequencer.next(), sequencer.next()];
        time.store(900, Ordering::SeqCst);
        keys.push(sequencer.next());
        time.store(1_001, Ordering::SeqCst);
        keys.push(sequencer.next());
        let mut sorted = keys.clone();
        sorted.sort();
        assert_eq!(keys, sorted);
        sorted.dedup();
        assert_eq!(sorted.len(), 4);
    }
}
