//! The fetch loop: waits for work, in the same way for turns and activities. It looks at claimed items and candidates
//! first, then polls, then sleeps.
//!
//! A [`FetchKind`] describes a caller: the work that it accepts, and how it claims a candidate. A claim runs in a task
//! of its own. If the caller goes away, that task finishes the claim and releases it.

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
    pin::Pin,
    sync::{atomic::Ordering, Arc},
    time::Duration,
};
use tokio::sync::futures::Notified;
use tokio::time::Instant;
use tracing::warn;

/// A claim takes no longer than this. After that another fetch may try the candidate.
pub(super) const CLAIM_TIME: Millis = 10_000;
/// A fetch without a wait time waits at most this long for claims in flight.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// The pause of a fetch after a panic of the task that polls for work.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// The largest number of pages that a fetch without a wait time reads.
const MAX_POLLS: usize = 50;

/// A candidate that was taken out of its queue.
pub(super) struct TakenCandidate<K, H> {
    pub(super) key: K,
    pub(super) candidate: H,
    pub(super) seq: String,
}

/// A kind of fetch: for a turn or for an activity.
pub(super) trait FetchKind: Sync {
    /// The name of the operation, for errors.
    const OPERATION: &'static str;
    type Key: Clone + Eq + Hash + Ord + Send;
    type Candidate: Weight + Send;
    /// The result for the caller.
    type Item: Send + 'static;
    /// The caller's filter, by which an inline claim chooses a waiting fetch.
    type FetchFilter: FetchFilter + 'static;

    fn queue<'a>(&self, discovery: &'a Discovery) -> &'a ReadyQueue<Self::Key, Self::Candidate>;

    /// The waiting fetches of this kind, and the items that are claimed for them.
    fn waiting_fetches<'a>(&self, engine: &'a Engine) -> &'a WaitingFetches<Self::FetchFilter, Self::Item>;

    /// How the caller would claim.
    fn terms(&self) -> FetchTerms<Self::FetchFilter>;

    /// Called when the caller has got an item that was claimed for it.
    fn received(&self, _engine: &Engine, _item: &Self::Item) {}

    /// Records that this process fetches, so that it sends wake-ups to others only for other work. Returns whether it
    /// had not fetched in this way for a while.
    fn record_fetch(&self, discovery: &Discovery) -> bool;

    /// Polls for work that this caller accepts.
    async fn poll(
        &self,
        engine: &Arc<Engine>,
        request: &PollRequest<'_>,
        rest: &mut Rest,
    ) -> Result<PollResult, StoreError>;

    /// Whether the caller accepts a candidate.
    fn fits(&self, discovery: &Discovery, candidate: &Self::Candidate, now: Millis) -> bool;

    /// Tries to claim a candidate. If that fails, puts the candidate back into the queue or drops it.
    async fn attempt(
        &self,
        engine: &Arc<Engine>,
        taken: TakenCandidate<Self::Key, Self::Candidate>,
    ) -> Result<Option<Self::Item>, StoreError>;

    /// Whether work is ready that the caller could take with another kind of fetch.
    fn should_return_early(&self, _engine: &Engine) -> bool {
        false
    }

    /// A guard that marks the caller as idle while it waits.
    fn idle_guard(&self, _discovery: &Discovery) -> Option<super::members::IdleWorker> {
        None
    }
}

/// The next item for a caller, or `None` if there is none within `poll_timeout`.
pub(super) async fn next<F: FetchKind>(
    engine: &Arc<Engine>,
    fetch: &F,
    poll_timeout: Duration,
) -> Result<Option<F::Item>, ProviderError> {
    let discovery = &engine.discovery;
    let queue = fetch.queue(discovery);
    let mut wait = Wait::new(poll_timeout);
    let terms = fetch.terms();
    let register = terms.patient && engine.config.inline_claims();
    let waiting = register.then(|| fetch.waiting_fetches(engine).register(terms.clone()));
    let sleeper = Sleeper { engine, fetch, waiting: waiting.as_ref() };
    while !engine.stopping.is_cancelled() {
        if fetch.record_fetch(discovery) {
            discovery.asked_anew.store(true, Ordering::SeqCst);
        }
        let changed = queue.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let now = engine.now();
        match take_ready(engine, fetch, &terms, now).await {
            Ok(Taken::Item(item)) => return Ok(Some(item)),
            Ok(Taken::Nothing) => {}
            Ok(Taken::FailedClaim) => continue,
            Err(error) => {
                wait.check(error, F::OPERATION)?;
                continue;
            }
        }
        if !sleeper.wait_for_work(&mut wait, changed, now).await? {
            return Ok(None);
        }
    }
    // A caller that does not know yet of the shutdown must not fetch in a tight loop.
    tokio::time::sleep_until(wait.until.min(Instant::now() + Duration::from_secs(1))).await;
    Ok(None)
}

/// The result of one look at the local queue.
enum Taken<T> {
    Item(T),
    /// A candidate was there, and its claim failed.
    FailedClaim,
    Nothing,
}

/// Takes an item that is already claimed for this caller, or claims a candidate.
async fn take_ready<F: FetchKind>(
    engine: &Arc<Engine>,
    fetch: &F,
    terms: &FetchTerms<F::FetchFilter>,
    now: Millis,
) -> Result<Taken<F::Item>, StoreError> {
    let discovery = &engine.discovery;
    if let Some(item) = fetch.waiting_fetches(engine).take(terms) {
        watch::work_off_if_overdue(engine);
        discovery.took_something();
        fetch.received(engine, &item);
        return Ok(Taken::Item(item));
    }
    let taken =
        fetch.queue(discovery).take(now, now + CLAIM_TIME, |_, candidate| fetch.fits(discovery, candidate, now));
    let Some((key, candidate, seq)) = taken else { return Ok(Taken::Nothing) };
    watch::work_off_if_overdue(engine);
    discovery.took_something();
    let claimed = fetch.attempt(engine, TakenCandidate { key, candidate, seq }).await?;
    Ok(claimed.map_or(Taken::FailedClaim, Taken::Item))
}

/// The ways in which a fetch waits until work may be ready.
struct Sleeper<'a, F: FetchKind> {
    engine: &'a Arc<Engine>,
    fetch: &'a F,
    /// The registration of a patient fetch, to which inline claims can give items.
    waiting: Option<&'a WaitingFetch<F::FetchFilter, F::Item>>,
}

impl<F: FetchKind> Sleeper<'_, F> {
    /// Polls, runs tasks or sleeps, whichever is due. Returns `false` if the time of the fetch has passed.
    async fn wait_for_work(
        &self,
        wait: &mut Wait,
        changed: Pin<&mut Notified<'_>>,
        now: Millis,
    ) -> Result<bool, ProviderError> {
        let (engine, fetch, discovery) = (self.engine, self.fetch, &self.engine.discovery);
        if fetch.should_return_early(engine) {
            wait.shorten();
        }
        match wait.next(discovery, fetch.queue(discovery).next_due(), now) {
            LoopStep::TimeOut => return Ok(false),
            LoopStep::PollAll(guard) => {
                let polled = poll_all(engine, fetch, &mut wait.rest).await;
                drop(guard);
                match polled {
                    Ok(more) => wait.polled(more),
                    Err(error) => wait.check(error, F::OPERATION)?,
                }
            }
            LoopStep::RunTasks => {
                if let Err(error) = self.run_tasks(changed, wait.until).await {
                    wait.check(error, F::OPERATION)?;
                }
            }
            LoopStep::Sleep(until) => self.sleep(changed, until).await,
        }
        Ok(true)
    }

    /// Waits until an item is claimed for this fetch.
    async fn called(&self) {
        match self.waiting {
            Some(waiting) => waiting.called().await,
            None => std::future::pending().await,
        }
    }

    /// Runs the due tasks of discovery, such as polls and heartbeats, until they end or work may be ready, at most
    /// until `until`.
    async fn run_tasks(&self, changed: Pin<&mut Notified<'_>>, until: Instant) -> Result<(), StoreError> {
        let engine = self.engine;
        let _idle = (self.fetch.idle_guard(&engine.discovery), self.waiting.map(WaitingFetch::mark_idle));
        let tasks = watch::work_off_apart(engine);
        tokio::select! {
            biased;
            () = self.called() => {}
            () = changed => {}
            ended = tasks => match ended {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(error),
                // The tasks panicked and would panic again. An immediate retry would only load Cosmos DB.
                Err(_) => tokio::time::sleep_until(until.min(Instant::now() + AFTER_PANIC)).await,
            },
            () = tokio::time::sleep_until(until) => {}
            () = engine.stopping.cancelled() => {}
        }
        Ok(())
    }

    /// Sleeps until work may be ready, at most until `until`.
    async fn sleep(&self, changed: Pin<&mut Notified<'_>>, until: Instant) {
        let engine = self.engine;
        let _idle = (self.fetch.idle_guard(&engine.discovery), self.waiting.map(WaitingFetch::mark_idle));
        tokio::select! {
            biased;
            () = self.called() => {}
            () = changed => {}
            () = tokio::time::sleep_until(until) => {}
            () = engine.stopping.cancelled() => {}
        }
    }
}

/// Polls the whole container for a fetch without a wait time, which must see the present state. Returns whether there
/// is more; `rest` is the place to continue.
async fn poll_all<F: FetchKind>(engine: &Arc<Engine>, fetch: &F, rest: &mut Rest) -> Result<bool, StoreError> {
    let request = PollRequest { eager: true, ..PollRequest::at(None, SlotRange::ALL) };
    for _ in 0..MAX_POLLS {
        let found = fetch.poll(engine, &request, rest).await?;
        let (queue, now) = (fetch.queue(&engine.discovery), engine.now());
        if !found.more {
            return Ok(false);
        }
        if queue.has_ready(1, now, |candidate| fetch.fits(&engine.discovery, candidate, now)) {
            break;
        }
    }
    Ok(true)
}

/// How long a fetch waits, and whether it must poll by itself.
struct Wait {
    until: Instant,
    /// A fetch without a wait time must see the present state. It polls once, and again if every claim failed and there
    /// was more.
    must_poll: bool,
    polls_left: usize,
    /// Where the last poll ended. Otherwise candidates whose claims always fail could hide all others.
    rest: Rest,
    patient: bool,
}

/// The next step of a fetch that has found nothing ready.
enum LoopStep<'a> {
    TimeOut,
    PollAll(tokio::sync::MutexGuard<'a, ()>),
    RunTasks,
    Sleep(Instant),
}

impl Wait {
    fn new(poll_timeout: Duration) -> Self {
        let patient = !poll_timeout.is_zero();
        Self { until: cosmos::after(poll_timeout), must_poll: !patient, polls_left: MAX_POLLS, rest: None, patient }
    }

    /// The fetch has polled. `more` tells whether there was more than it read.
    fn polled(&mut self, more: bool) {
        self.polls_left = self.polls_left.saturating_sub(1);
        self.must_poll = more && self.polls_left > 0;
    }

    /// Shortens the wait: the caller cannot take the ready work, but its next fetch may.
    fn shorten(&mut self) {
        const SOON: Duration = Duration::from_millis(100);
        self.until = self.until.min(Instant::now() + SOON);
    }

    /// The next step when nothing is ready.
    fn next<'a>(&mut self, discovery: &'a Discovery, next_due: Option<Millis>, now: Millis) -> LoopStep<'a> {
        if self.must_poll {
            match discovery.asking.try_lock() {
                Ok(asking) => {
                    self.must_poll = false;
                    return LoopStep::PollAll(asking);
                }
                // Another fetch is polling, and may find enough for both.
                Err(_) => return LoopStep::Sleep(Instant::now() + Duration::from_millis(2)),
            }
        }
        let instant = Instant::now();
        if !self.patient && discovery.in_flight.any() && instant < self.until + SETTLE_TIME {
            return LoopStep::Sleep(instant + Duration::from_millis(2));
        }
        if instant >= self.until {
            return LoopStep::TimeOut;
        }
        let mut wake = self.until;
        match discovery.watch.try_lock() {
            Ok(watch) if watch.next() <= instant || discovery.asked_anew.load(Ordering::SeqCst) => {
                return LoopStep::RunTasks
            }
            Ok(watch) => wake = wake.min(watch.next()),
            Err(_) => wake = wake.min(instant + Duration::from_millis(50)),
        }
        if let Some(due) = next_due {
            wake = wake.min(instant + Duration::from_millis(due.saturating_sub(now).max(1)));
        }
        LoopStep::Sleep(wake)
    }

    /// Decides about an error. A patient fetch rides out an outage, another one returns the error.
    fn check(&self, error: StoreError, operation: &str) -> Result<(), ProviderError> {
        // An error of one instance or activity is no reason to stop waiting for others.
        if !self.patient || !(error.is_retryable() || error.is_of_one_partition()) {
            return Err(error.into_provider_error(operation));
        }
        warn!(%error, operation, "error while waiting for work, will retry");
        Ok(())
    }
}

/// Runs a claim in a task of its own. If the caller goes away meanwhile, the task releases the claim.
pub(super) async fn claim_apart<T: Send + 'static>(
    engine: &Arc<Engine>,
    claiming: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    release_claim: impl FnOnce(Result<T, StoreError>) + Send + 'static,
) -> Result<T, StoreError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let begun = engine.discovery.in_flight.begin();
    engine.spawn(async move {
        let claimed = ReleaseOnDrop::new(claiming.await, move |outcome| {
            let _begun = begun;
            release_claim(outcome);
        });
        // If the receiver is gone, `send` returns the guard, and dropping it releases the claim.
        drop(sender.send(claimed));
    });
    let interrupted = || Err(StoreError::Unavailable { detail: "the claim was interrupted".to_owned() });
    receiver.await.ok().and_then(ReleaseOnDrop::open).unwrap_or_else(interrupted)
}
