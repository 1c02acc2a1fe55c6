//! Calls that run to completion even if their caller drops them.
//!
//! The end of a turn or an activity needs several requests. It also updates memory that must agree with them: the owner
//! of the lock, the ready queue, the outbox. A timeout or a shutdown drops such a call at any await point. If the call
//! ended there, this process would treat the instance as busy until the lock ends. The messages of a committed turn
//! would wait for a recovery poll.

use crate::engine::Engine;
use duroxide::providers::ProviderError;
use futures::future::BoxFuture;
use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tracing::{debug, warn};

type CallResult = Result<(), ProviderError>;

/// A call that runs in its caller's task. If the caller drops it after it has begun, a task of the provider continues
/// it.
pub(crate) struct RunToCompletion {
    engine: Arc<Engine>,
    /// `None` once the call has ended, and while it runs: a call that panicked is not resumed.
    call: Option<BoxFuture<'static, CallResult>>,
}

impl RunToCompletion {
    pub(crate) fn new(engine: &Arc<Engine>, call: impl Future<Output = CallResult> + Send + 'static) -> Self {
        Self { engine: engine.clone(), call: Some(Box::pin(call)) }
    }
}

impl Future for RunToCompletion {
    type Output = CallResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<CallResult> {
        let Some(mut call) = self.call.take() else { return Poll::Pending };
        let polled = call.as_mut().poll(context);
        if polled.is_pending() {
            self.call = Some(call);
        }
        polled
    }
}

impl Drop for RunToCompletion {
    fn drop(&mut self) {
        let Some(call) = self.call.take() else { return };
        // A fetch without a wait time waits for this call, because the call may leave work to fetch.
        let in_flight = self.engine.discovery.claim_in_flight();
        self.engine.spawn(async move {
            let _in_flight = in_flight;
            match call.await {
                Ok(()) => debug!("completed a call that its caller had dropped"),
                Err(error) => warn!(%error, "a call that its caller had dropped failed"),
            }
        });
    }
}
