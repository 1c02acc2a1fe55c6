//! Claims that this process has begun and whose outcome nobody has yet.
//!
//! A caller that does not wait filter the present state. While another caller's claim is under way there is none: the claim
//! may come to nothing, or its caller go away so that it is given back, and "nothing to do" would have been wrong.

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
