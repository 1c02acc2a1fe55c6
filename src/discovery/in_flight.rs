//! Claims that this process has started and whose outcome is not known yet.
//!
//! A fetch without a wait time must see the present state. While the claim of another fetch is in flight, that state is
//! not known: the claim may fail, or its caller may go away so that the claim is released. "Nothing to do" would then
//! be wrong.

use std::sync::{
    atomic::{AtomicUsize, Ordering},
    Arc,
};

/// How many claims are under way.
#[derive(Clone, Default)]
pub(super) struct ClaimsInFlight(Arc<AtomicUsize>);

/// One of them, until it is dropped.
pub(super) struct Begun(ClaimsInFlight);

impl ClaimsInFlight {
    pub(super) fn begin(&self) -> Begun {
        self.0.fetch_add(1, Ordering::SeqCst);
        Begun(self.clone())
    }

    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.0 .0.fetch_sub(1, Ordering::SeqCst);
    }
}
