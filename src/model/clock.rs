//! Time, and the order in which things went in.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Milliseconds since the Unix epoch.
pub(crate) type Millis = u64;

/// Where the time comes from: the system, or a test.
#[derive(Clone)]
pub(crate) struct Clock(Arc<dyn Fn() -> Millis + Send + Sync>);

impl Clock {
    /// The system's clock.
    pub(crate) fn system() -> Self {
        Self(Arc::new(|| {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        }))
    }

    /// A clock that tells what `now` returns.
    #[cfg(test)]
    pub(crate) fn from_fn(now: impl Fn() -> Millis + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The present.
    pub(crate) fn now(&self) -> Millis {
        (self.0)()
    }

    /// The moment after `duration` from now.
    pub(crate) fn after(&self, duration: Duration) -> Millis {
        self.now().saturating_add(millis(duration))
    }
}

/// A duration in whole milliseconds.
pub(crate) fn millis(duration: Duration) -> Millis {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Hands out sequence keys: strings that sort in the order in which they were made, also within one millisecond and when
/// the clock steps back. Keys of two processes sort by their clocks.
pub(crate) struct Sequencer {
    clock: Clock,
    process: String,
    last: Mutex<(Millis, u32)>,
}

impl Sequencer {
    pub(crate) fn new(clock: Clock) -> Self {
        let mut process = uuid::Uuid::new_v4().simple().to_string();
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
    fn keys_sort_in_the_order_in_which_they_were_made_even_when_the_clock_steps_back() {
        let time = Arc::new(AtomicU64::new(1_000));
        let seen = time.clone();
        let sequencer = Sequencer::new(Clock::from_fn(move || seen.load(Ordering::SeqCst)));
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
