//! When to ask the service: rarely while idle, often under load.

use std::time::Duration;
use tokio::time::Instant;

/// The state of one queue's poller. Whoever holds it polls for everybody.
pub(super) struct Pace {
    min: Duration,
    max: Duration,
    interval: Duration,
    next: Instant,
    /// The last page was full: the next one leaves out what is known.
    pub(super) full: bool,
}

impl Pace {
    pub(super) fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, interval: min, next: Instant::now(), full: false }
    }

    /// When the next poll is due.
    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Notes what a poll has found: news shorten the interval at once, silence stretches it.
    pub(super) fn polled(&mut self, news: usize, full: bool) {
        self.full = full;
        self.interval = if news > 0 { self.min } else { self.interval.mul_f64(1.5).min(self.max) };
        self.next = Instant::now() + self.interval;
    }

    /// Notes that a poll failed: the interval stretches, so that an outage is not made worse.
    pub(super) fn failed(&mut self) {
        self.polled(0, self.full);
    }
}
