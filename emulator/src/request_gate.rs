//! A gate that holds requests until a test opens it.

use std::sync::Arc;

use tokio::sync::watch;

/// Holds every request that reaches it until a test calls [`open`](Gate::open), and counts the requests.
///
/// Clones share the same gate. An open gate stays open.
#[derive(Clone, Debug)]
pub struct Gate {
    state: Arc<GateState>,
}

#[derive(Debug)]
struct GateState {
    reached: watch::Sender<u64>,
    open: watch::Sender<bool>,
}

impl Gate {
    /// Creates a closed gate.
    pub fn new() -> Self {
        let state = GateState { reached: watch::Sender::new(0), open: watch::Sender::new(false) };
        Self { state: Arc::new(state) }
    }

    /// Waits until at least one request has reached this gate.
    pub async fn reached(&self) {
        self.reached_by(1).await;
    }

    /// Waits until at least `count` requests have reached this gate.
    pub async fn reached_by(&self, count: u64) {
        await_at_least(&self.state.reached, count).await;
    }

    /// Returns the number of requests that have reached this gate so far, held or passed.
    pub fn count(&self) -> u64 {
        *self.state.reached.borrow()
    }

    /// Opens this gate: held requests continue, and later requests pass.
    pub fn open(&self) {
        self.state.open.send_replace(true);
    }

    /// Counts a request at this gate and waits until it is open.
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

/// Waits until a counter has reached `count`. The caller keeps its sender alive.
pub(crate) async fn await_at_least(counter: &watch::Sender<u64>, count: u64) {
    let _ = counter.subscribe().wait_for(|seen| *seen >= count).await;
}
