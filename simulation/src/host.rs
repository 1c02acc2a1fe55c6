//! A simulated process: a tokio runtime of its own that can be stopped, continued and killed, with a clock that can be
//! wrong.

use std::future::Future;
use std::time::Duration;

use tokio::runtime::{Builder, Handle, Runtime};
use tokio::time::Instant;

use crate::virtual_time;

/// A simulated process. Dropping it kills it: its tasks end at the await point that they have reached.
pub struct Host {
    runtime: Runtime,
    /// The runtime's own time when the run began.
    zero: Instant,
    skew: i64,
    stopped_until: Option<Duration>,
}

impl Host {
    /// A process that starts now.
    pub fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime without I/O needs nothing that could be missing");
        let zero = runtime.block_on(async { Instant::now() }) - virtual_time::now();
        Self { runtime, zero, skew: 0, stopped_until: None }
    }

    /// The handle that spawns tasks in this process.
    pub fn handle(&self) -> &Handle {
        self.runtime.handle()
    }

    /// Sets the error of its wall clock, in milliseconds.
    pub fn set_skew(&mut self, millis: i64) {
        self.skew = millis;
    }

    /// The error of its wall clock, in milliseconds.
    pub fn skew(&self) -> i64 {
        self.skew
    }

    /// Stops it, as SIGSTOP does, until the time of the run is `until`.
    pub fn stop_until(&mut self, until: Duration) {
        self.stopped_until = Some(until);
    }

    /// Whether it is stopped.
    pub fn is_stopped(&self) -> bool {
        self.stopped_until.is_some()
    }

    /// Runs it until the time of the run is `until`. A process that was stopped finds all its timers due when it
    /// continues.
    pub fn run_until(&mut self, until: Duration) {
        if self.stopped_until.is_some_and(|end| until < end) {
            return;
        }
        self.stopped_until = None;
        virtual_time::set_skew(self.skew);
        let target = self.zero + until;
        self.runtime.block_on(async {
            let behind = target - Instant::now();
            if behind > Duration::from_secs(1) {
                tokio::time::advance(behind).await;
            }
            tokio::time::sleep_until(target).await;
        });
        virtual_time::set_skew(0);
    }

    /// Runs `task` in this process while all other processes of the run stand still.
    pub fn block_on<T>(&mut self, task: impl Future<Output = T>) -> T {
        self.runtime.block_on(task)
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}
