//! The state that all parts of a soak share: phase, transcript, summary and violations.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{watch, Notify};

use crate::oracle::Violation;
use crate::soak::summary::SharedSummary;
use crate::transcript::Transcript;

/// The number of transcript lines that are retained: some minutes.
const TRANSCRIPT_LINES: usize = 300_000;

/// The phase of a soak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Faults happen.
    Faults,
    /// No fault happens any more, and the workload ends.
    Drain,
    /// Workers shut down.
    Shutdown,
}

/// The shared state of a soak.
#[derive(Debug)]
pub struct SoakState {
    phase: watch::Sender<Phase>,
    /// The last events.
    pub transcript: Arc<Transcript>,
    /// The counters.
    pub summary: SharedSummary,
    violations: Mutex<Vec<Violation>>,
    failed: Notify,
}

impl Default for SoakState {
    fn default() -> Self {
        Self {
            phase: watch::Sender::new(Phase::Faults),
            transcript: Arc::new(Transcript::with_limit(TRANSCRIPT_LINES)),
            summary: SharedSummary::default(),
            violations: Mutex::default(),
            failed: Notify::new(),
        }
    }
}

impl SoakState {
    /// Enters a phase.
    pub fn enter(&self, phase: Phase) {
        self.transcript.record("soak", None, format!("{phase:?}"));
        self.phase.send_replace(phase);
    }

    /// Whether faults may happen.
    pub fn has_faults(&self) -> bool {
        *self.phase.borrow() == Phase::Faults
    }

    /// Waits until the soak reaches a phase.
    pub async fn reached(&self, phase: Phase) {
        // Waiting fails if the sender is dropped. The sender lives as long as `self`.
        let _ = self.phase.subscribe().wait_for(|now| *now >= phase).await;
    }

    /// Sleeps, but not longer than the phase of faults lasts.
    pub async fn sleep_while_faulty(&self, time: Duration) {
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            () = self.reached(Phase::Drain) => {}
        }
    }

    /// Adds a violation.
    pub fn report(&self, violation: Violation) {
        self.transcript.record("soak", Some(&violation.instance), format!("VIOLATED {violation}"));
        self.with_violations(|all| all.push(violation));
        self.failed.notify_one();
    }

    /// Waits for the first violation, which ends the soak early.
    pub async fn failed(&self) {
        self.failed.notified().await;
    }

    /// All violations.
    pub fn violations(&self) -> Vec<Violation> {
        self.with_violations(|all| all.clone())
    }

    fn with_violations<R>(&self, use_them: impl FnOnce(&mut Vec<Violation>) -> R) -> R {
        use_them(&mut self.violations.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
