//! Waiting for work, the same way for turns and activities: candidates first, then the service, then time.
//!
//! A caller is an [`FetchKind`]: what it takes, and how a candidate becomes that. A claim runs in a task of its own, so that a caller which goes
//! away leaves one to be finished and given back.

use super::{
    poll::{PollRequest, PollResult, Rest},
    queue::{ReadyQueue, Weight},
    watch, Discovery,
};
use crate::{
    cosmos::{self, StoreError},
    engine::Engine,
    model::{Millis, SlotRange},
    queue::release_on_drop::ReleaseOnDrop,
    queue::{FetchFilter, FetchTerms, WaitingFetch, WaitingFetches},
};
use duroxide::providers::ProviderError;
use std::{
    future::Future,
    hash::Hash,
    sync::{atomic::Ordering, Arc},
    time::Duration,
};
use tokio::time::Instant;
use tracing::warn;

/// A claim takes no longer: then the candidate can be tried by another waiter.
pub(super) const CLAIM_TIME: Millis = 10_000;
/// A caller that does not wait is kept no longer by claims that are under way.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// A caller waits so long after the task that looks for work has panicked.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// A caller that does not wait looks through no more pages than that.
const MOST_LOOKS: usize = 50;

/// A candidate that was taken out of its queue.
pub(super) struct TakenCandidate<K, H> {
    pub(super) key: K,
    pub(super) candidate: H,
    pub(super) seq: String,
}

/// What a caller of `fetch` filter.
pub(super) trait FetchKind: Sync {
    /// The name of the operation, for errors.
    const OPERATION: &'static str;
    type Key: Clone + Eq + Hash + Ord + Send;
    type Hint: Weight + Send;
    /// What the caller gets.
    type Item: Send + 'static;
    /// What it says of that at the counter.
    type FetchFilter: FetchFilter + 'static;

    fn queue<'a>(&self, discovery: &'a Discovery) -> &'a ReadyQueue<Self::Key, Self::Hint>;

    /// Where what others have claimed for such a caller lies.
    fn counter<'a>(&self, engine: &'a Engine) -> &'a WaitingFetches<Self::FetchFilter, Self::Item>;

    /// How the caller would claim.
    fn terms(&self) -> FetchTerms<Self::FetchFilter>;

    /// The caller has taken this from the counter.
    fn received(&self, _engine: &Engine, _goods: &Self::Item) {}

    /// The caller asks: whoever would ring somebody knows that it need not. Whether nobody here has asked so for a while.
    fn asks(&self, discovery: &Discovery) -> bool;

    /// Looks for what this caller takes.
    async fn look(
        &self,
        engine: &Arc<Engine>,
        look: &PollRequest<'_>,
        rest: &mut Rest,
    ) -> Result<PollResult, StoreError>;

    /// Whether a candidate is for this caller.
    fn fits(&self, discovery: &Discovery, candidate: &Self::Hint, now: Millis) -> bool;

    /// Tries a candidate, and puts it back or drops it where it comes to nothing.
    async fn attempt(
        &self,
        engine: &Arc<Engine>,
        taken: TakenCandidate<Self::Key, Self::Hint>,
    ) -> Result<Option<Self::Item>, StoreError>;

    /// Whether something is ready that this caller could take if it asked otherwise.
    fn should_ask_otherwise(&self, _engine: &Engine) -> bool {
        false
    }

    /// What is kept while the caller waits.
    fn waiting(&self, _dispatch: &Discovery) -> Option<super::members::IdleWorker> {
        None
    }
}

/// What an order gets next, or nothing within `poll_timeout`.
pub(super) async fn next<O: FetchKind>(
    engine: &Arc<Engine>,
    order: &O,
    poll_timeout: Duration,
) -> Result<Option<O::Item>, ProviderError> {
    let discovery = &engine.discovery;
    let queue = order.queue(discovery);
    let mut wait = Wait::new(poll_timeout);
    let (counter, terms) = (order.counter(engine), order.terms());
    let standing = (terms.patient && engine.config.inline_claims()).then(|| counter.register(terms.clone()));
    let called = async || match &standing {
        Some(standing) => standing.called().await,
        None => std::future::pending().await,
    };
    while !engine.stopping.is_cancelled() {
        if order.asks(discovery) {
            discovery.asked_anew.store(true, Ordering::SeqCst);
        }
        let notified = queue.changed.notified();
        tokio::pin!(notified);
        notified.as_mut().enable();
        if let Some(claimed) = counter.take(&terms) {
            watch::work_off_if_overdue(engine);
            discovery.took_something();
            order.received(engine, &claimed);
            return Ok(Some(claimed));
        }
        let now = engine.now();
        if let Some((key, candidate, seq)) =
            queue.take(now, now + CLAIM_TIME, |_, candidate| order.fits(discovery, candidate, now))
        {
            watch::work_off_if_overdue(engine);
            discovery.took_something();
            match order.attempt(engine, TakenCandidate { key, candidate, seq }).await {
                Ok(Some(claimed)) => return Ok(Some(claimed)),
                Ok(None) => {}
                Err(error) => wait.trouble(error, O::OPERATION)?,
            }
            continue;
        }
        if order.should_ask_otherwise(engine) {
            wait.hurry();
        }
        match wait.next(discovery, queue.next_due(), now) {
            LoopStep::GiveUp => return Ok(None),
            LoopStep::Ask(guard) => {
                let asked = ask(engine, order, &mut wait.rest).await;
                drop(guard);
                match asked {
                    Ok(more) => wait.answered(more),
                    Err(error) => wait.trouble(error, O::OPERATION)?,
                }
            }
            LoopStep::WorkOff => {
                let _idle = (order.waiting(discovery), standing.as_ref().map(WaitingFetch::mark_idle));
                let worked_off = watch::work_off_apart(engine);
                tokio::select! {
                    biased;
                    () = called() => {}
                    () = notified => {}
                    worked_off = worked_off => match worked_off {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => wait.trouble(error, O::OPERATION)?,
                        // It panicked and would again: asking at once would only keep the service busy.
                        Err(_) => tokio::time::sleep_until(wait.until.min(Instant::now() + AFTER_PANIC)).await,
                    },
                    () = tokio::time::sleep_until(wait.until) => {}
                    () = engine.stopping.cancelled() => {}
                }
            }
            LoopStep::Sleep(until) => {
                let _idle = (order.waiting(discovery), standing.as_ref().map(WaitingFetch::mark_idle));
                tokio::select! {
                    biased;
                    () = called() => {}
                    () = notified => {}
                    () = tokio::time::sleep_until(until) => {}
                    () = engine.stopping.cancelled() => {}
                }
            }
        }
    }
    // A caller that does not know yet that the provider has been shut down must not ask without end.
    tokio::time::sleep_until(wait.until.min(Instant::now() + Duration::from_secs(1))).await;
    Ok(None)
}

/// Asks the whole container for the caller's queue: for one that does not wait, and so filter the present state. Whether there is
/// more than was looked at; `rest` tells from where on.
async fn ask<O: FetchKind>(engine: &Arc<Engine>, order: &O, rest: &mut Rest) -> Result<bool, StoreError> {
    let look = PollRequest { eager: true, ..PollRequest::at(None, SlotRange::ALL) };
    for _ in 0..MOST_LOOKS {
        let found = order.look(engine, &look, rest).await?;
        let (queue, now) = (order.queue(&engine.discovery), engine.now());
        if !found.more {
            return Ok(false);
        }
        if queue.has_ready(1, now, |candidate| order.fits(&engine.discovery, candidate, now)) {
            break;
        }
    }
    Ok(true)
}

/// How long a caller waits, and what for.
struct Wait {
    until: Instant,
    /// A caller that does not wait filter the store's present state: it is asked once, and again where what was found comes to
    /// nothing and there was more.
    must_ask: bool,
    may_ask: usize,
    /// Where the last question has ended: what comes to nothing again and again must not be all that is ever looked at.
    rest: Rest,
    patient: bool,
}

enum LoopStep<'a> {
    GiveUp,
    Ask(tokio::sync::MutexGuard<'a, ()>),
    WorkOff,
    Sleep(Instant),
}

impl Wait {
    fn new(poll_timeout: Duration) -> Self {
        let patient = !poll_timeout.is_zero();
        Self { until: cosmos::after(poll_timeout), must_ask: !patient, may_ask: MOST_LOOKS, rest: None, patient }
    }

    /// The caller has asked, and there was more than it looked at.
    fn answered(&mut self, more: bool) {
        self.may_ask = self.may_ask.saturating_sub(1);
        self.must_ask = more && self.may_ask > 0;
    }

    /// The caller can't take what is there and may be able to when it asks again.
    fn hurry(&mut self) {
        const SOON: Duration = Duration::from_millis(100);
        self.until = self.until.min(Instant::now() + SOON);
    }

    /// What to do when nothing is ready.
    fn next<'a>(&mut self, discovery: &'a Discovery, next_due: Option<Millis>, now: Millis) -> LoopStep<'a> {
        if self.must_ask {
            match discovery.asking.try_lock() {
                Ok(asking) => {
                    self.must_ask = false;
                    return LoopStep::Ask(asking);
                }
                // Somebody else is asking: what it finds may do.
                Err(_) => return LoopStep::Sleep(Instant::now() + Duration::from_millis(2)),
            }
        }
        let instant = Instant::now();
        if !self.patient && discovery.in_flight.any() && instant < self.until + SETTLE_TIME {
            return LoopStep::Sleep(instant + Duration::from_millis(2));
        }
        if instant >= self.until {
            return LoopStep::GiveUp;
        }
        let mut wake = self.until;
        match discovery.watch.try_lock() {
            Ok(watch) if watch.next() <= instant || discovery.asked_anew.load(Ordering::SeqCst) => {
                return LoopStep::WorkOff
            }
            Ok(watch) => wake = wake.min(watch.next()),
            Err(_) => wake = wake.min(instant + Duration::from_millis(50)),
        }
        if let Some(due) = next_due {
            wake = wake.min(instant + Duration::from_millis(due.saturating_sub(now).max(1)));
        }
        LoopStep::Sleep(wake)
    }

    /// A caller that waits sits an outage out; one that doesn't is told.
    fn trouble(&self, error: StoreError, operation: &str) -> Result<(), ProviderError> {
        // Trouble of one instance or activity is no reason to stop waiting for others.
        if !self.patient || !(error.is_retryable() || error.is_of_one_partition()) {
            return Err(error.into_provider_error(operation));
        }
        warn!(%error, operation, "trouble while waiting for work");
        Ok(())
    }
}

/// Claims in a task of its own: where the caller has gone away meanwhile, what it comes to is given back.
pub(super) async fn claim_apart<T: Send + 'static>(
    engine: &Arc<Engine>,
    claiming: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    release_claim: impl FnOnce(Result<T, StoreError>) + Send + 'static,
) -> Result<T, StoreError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let begun = engine.discovery.in_flight.begin();
    engine.spawn(async move {
        let parcel = ReleaseOnDrop::new(claiming.await, move |outcome| {
            let _begun = begun;
            release_claim(outcome);
        });
        // Where the receiver is gone, the parcel comes back and gives back what it holds.
        drop(sender.send(parcel));
    });
    let interrupted = || Err(StoreError::Unavailable { detail: "the claim was interrupted".to_owned() });
    receiver.await.ok().and_then(ReleaseOnDrop::open).unwrap_or_else(interrupted)
}
