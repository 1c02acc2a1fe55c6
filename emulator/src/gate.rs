//! A gate that holds requests until a test opens it.

use std::sync::Arc;

use tokio::sync::watch;

/// Holds every request that comes to it until [`open`](Gate::open) is called, and says how many have come.
///
/// Clones are the same gate. Once open it stays open.
#[derive(Clone, Debug)]
pub struct Gate {
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    reached: watch::Sender<u64>,
    open: watch::Sender<bool>,
}

impl Gate {
    /// Creates a closed gate.
    pub fn new() -> Self {
        let state = State { reached: watch::Sender::new(0), open: watch::Sender::new(false) };
        Self { state: Arc::new(state) }
    }

    /// Waits until at least one request has come to the gate.
    pub async fn reached(&self) {
        self.reached_by(1).await;
    }

    /// Waits until at least `count` requests have come to the gate.
    pub async fn reached_by(&self, count: u64) {
        await_at_least(&self.state.reached, count).await;
    }

    /// How many requests have come to the gate so far, held or let through.
    pub fn count(&self) -> u64 {
        *self.state.reached.borrow()
    }

    /// Lets through whoever waits and whoever comes later.
    pub fn open(&self) {
        self.state.open.send_replace(true);
    }

    /// Comes to the gate and waits until it is open.
    pub(crate) async fn pass(&self) {
        self.state.reached.send_modify(|count| *count += 1);
        // The sender lives in `self`, so the wait can't fail.
        let _ = self.state.open.subscribe().wait_for(|open| *open).await;
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

/// Waits until a counter has come to `count`; the caller keeps its sender alive.
pub(crate) async fn await_at_least(counter: &watch::Sender<u64>, count: u64) {
    let _ = counter.subscribe().wait_for(|seen| *seen >= count).await;
}
