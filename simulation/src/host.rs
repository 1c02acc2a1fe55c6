//! A process of the world: a runtime of its own, which can be stopped, continued and killed, with a clock that can be off.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::Instant;

use crate::seams;

/// A process. Dropping it kills it: whatever runs in it is gone, at whatever await point it was.
pub struct Host {
    runtime: Runtime,
    /// The runtime's own time when the world's was zero.
    zero: Instant,
    skew: i64,
    stopped_until: Option<Duration>,
}

impl Host {
    /// A process that starts now.
    pub fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime without I/O needs nothing that could be missing");
        let zero = runtime.block_on(async { Instant::now() }) - seams::now();
        Self { runtime, zero, skew: 0, stopped_until: None }
    }

    /// Where to spawn what runs in it.
    pub fn handle(&self) -> &Handle {
        self.runtime.handle()
    }

    /// Sets its wall clock off by this many milliseconds.
    pub fn set_skew(&mut self, millis: i64) {
        self.skew = millis;
    }

    /// By how many milliseconds its wall clock is off.
    pub fn skew(&self) -> i64 {
        self.skew
    }

    /// Stops it, as SIGSTOP does, until the world's time is `until`.
    pub fn stop_until(&mut self, until: Duration) {
        self.stopped_until = Some(until);
    }

    /// Whether it is stopped.
    pub fn is_stopped(&self) -> bool {
        self.stopped_until.is_some()
    }

    /// Runs it until the world's time is `until`. One that has been stopped finds all its timers due when it goes on.
    pub fn run_until(&mut self, until: Duration) {
        if self.stopped_until.is_some_and(|end| until < end) {
            return;
        }
        self.stopped_until = None;
        seams::set_skew(self.skew);
        let target = self.zero + until;
        self.runtime.block_on(async {
            let behind = target - Instant::now();
            if behind > Duration::from_secs(1) {
                tokio::time::advance(behind).await;
            }
            tokio::time::sleep_until(target).await;
        });
        seams::set_skew(0);
    }

    /// Runs `task` in it, with nothing else of the world going on.
    pub fn block_on<T>(&mut self, task: impl Future<Output = T>) -> T {
        self.runtime.block_on(task)
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}
