//! What everybody in a soak shares: how far it is, what happened, what was counted, and what does not hold.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{watch, Notify};

use crate::ledger::Broken;
use crate::soak::tally::Tally;
use crate::story::Story;

/// Lines of the story that are kept: some minutes.
const STORY: usize = 300_000;

/// How far a soak is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Whatever can go wrong goes wrong.
    Rough,
    /// Nothing bad happens any more, and what was begun ends.
    Calm,
    /// Workers leave.
    Over,
}

/// The shared part of a soak.
#[derive(Debug)]
pub struct Stage {
    phase: watch::Sender<Phase>,
    /// What happened last.
    pub story: Arc<Story>,
    /// What was counted.
    pub tally: Tally,
    broken: Mutex<Vec<Broken>>,
    failed: Notify,
}

impl Default for Stage {
    fn default() -> Self {
        Self {
            phase: watch::Sender::new(Phase::Rough),
            story: Arc::new(Story::of_the_last(STORY)),
            tally: Tally::default(),
            broken: Mutex::default(),
            failed: Notify::new(),
        }
    }
}

impl Stage {
    /// The soak is so far.
    pub fn enter(&self, phase: Phase) {
        self.story.tell("soak", None, format!("{phase:?}"));
        self.phase.send_replace(phase);
    }

    /// Whether whatever can go wrong does.
    pub fn is_rough(&self) -> bool {
        *self.phase.borrow() == Phase::Rough
    }

    /// Waits until the soak is so far.
    pub async fn reached(&self, phase: Phase) {
        // It fails when the sender is gone, which lives as long as this.
        let _ = self.phase.subscribe().wait_for(|now| *now >= phase).await;
    }

    /// Waits, but not longer than the rough part lasts.
    pub async fn rough_for(&self, time: Duration) {
        tokio::select! {
            () = tokio::time::sleep(time) => {}
            () = self.reached(Phase::Calm) => {}
        }
    }

    /// Something does not hold.
    pub fn report(&self, broken: Broken) {
        self.story.tell("soak", Some(&broken.instance), format!("BROKEN {broken}"));
        self.with_broken(|all| all.push(broken));
        self.failed.notify_one();
    }

    /// Waits until something does not hold: there is no need to go on then.
    pub async fn failed(&self) {
        self.failed.notified().await;
    }

    /// Everything that does not hold.
    pub fn broken(&self) -> Vec<Broken> {
        self.with_broken(|all| all.clone())
    }

    fn with_broken<R>(&self, use_it: impl FnOnce(&mut Vec<Broken>) -> R) -> R {
        use_it(&mut self.broken.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
