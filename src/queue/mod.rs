//! Handed over: the write that makes work carries the claim for a dispatcher that waits for it.
//!
//! A dispatcher that waits is a standing order: it says how long it would lock and what it takes. Whoever is about to write what
//! such a dispatcher would claim next (a start, the end of an activity, a turn with activities, a delivery) *reserves* an order,
//! and puts the claim into the same batch ([`turn`], [`work`]); a commit keeps the lock for the next turn ([`kept`]). Once the
//! batch is done, what was claimed lies on the *counter*, and the dispatcher that was reserved, or any other that fits, takes it without a request.
//!
//! Invariants.
//! 1. A hand-over is a claim like any other: conditional on the document that it locks, counted, fenced by the ETag that the batch
//!    returns. A batch whose condition fails is sent again without it.
//! 2. *First come.* An order is reserved only while nothing is ready in the queue that fits it.
//! 3. What is claimed for nobody is given back, uncounted: an offer that is dropped after it was sent, whatever became of its batch; and
//!    what nobody has taken from the counter for [`KEPT_FOR`].
//!
//! Crash points: as those of a claim. The lock of what was handed over by a process that died expires.

pub(crate) mod activity;
pub(crate) mod commit_claims;
pub(crate) mod release_on_drop;
mod retained_lock;
pub(crate) mod turn;

use crate::{engine::Engine, queue::release_on_drop::ReleaseOnDrop};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::Notify;
use tokio::time::Instant;

/// So long something lies on the counter before it is given back: dispatchers come back at once, or are busy.
const KEPT_FOR: Duration = Duration::from_millis(200);
/// A hand-over may take this part of the lock, then the plain way is taken.
const PART_OF_LOCK: u32 = 4;

/// What a dispatcher takes.
pub(crate) trait FetchFilter: Clone + Send {
    /// What is said of something that lies on the counter.
    type Label: Send;

    fn takes(&self, label: &Self::Label) -> bool;
}

/// How a dispatcher would claim.
#[derive(Clone, Debug)]
pub(crate) struct FetchTerms<W> {
    pub(crate) lock_timeout: Duration,
    /// It waits for something, and so comes back when what it gets has ended.
    pub(crate) patient: bool,
    pub(crate) filter: W,
}

impl<W: FetchFilter> FetchTerms<W> {
    /// Whether a dispatcher takes what was locked for so long.
    fn take(&self, label: &W::Label, lock_timeout: Duration) -> bool {
        self.lock_timeout <= lock_timeout && self.filter.takes(label)
    }
}

/// Where dispatchers of one kind wait, and what was claimed for them.
pub(crate) struct WaitingFetches<W: FetchFilter, G>(Arc<Mutex<FetchState<W, G>>>);

struct FetchState<W: FetchFilter, G> {
    /// Those who wait, by when they came.
    waiting: BTreeMap<u64, Waiting<W>>,
    /// What was claimed, in the order in which it was.
    claimed: BTreeMap<u64, ClaimedItem<W, G>>,
    next: u64,
}

struct Waiting<W> {
    terms: FetchTerms<W>,
    /// It has looked at the queue, found nothing, and mark_idle.
    asleep: bool,
    reserved: bool,
    called: Arc<Notify>,
}

struct ClaimedItem<W: FetchFilter, G> {
    label: W::Label,
    /// For how long it was locked.
    lock_timeout: Duration,
    laid: Instant,
    parcel: ReleaseOnDrop<G>,
    /// Its dispatcher is not offered anything else meanwhile.
    reserved: Option<Reserved<W, G>>,
}

impl<W: FetchFilter, G> FetchState<W, G> {
    /// Removes things whose lock was taken a quarter of its time ago. Dropping them gives them back, which must not happen under the
    /// lock of the counter.
    fn remove_old(&mut self) -> Vec<ClaimedItem<W, G>> {
        let is_old = |good: &ClaimedItem<W, G>| good.laid.elapsed() > good.lock_timeout / 4;
        let old: Vec<u64> = self.claimed.iter().filter(|(_, good)| is_old(good)).map(|(number, _)| *number).collect();
        old.iter().filter_map(|number| self.claimed.remove(number)).collect()
    }
}

impl<W: FetchFilter, G> Default for WaitingFetches<W, G> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(FetchState { waiting: BTreeMap::new(), claimed: BTreeMap::new(), next: 0 })))
    }
}

impl<W: FetchFilter, G> Clone for WaitingFetches<W, G> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<W: FetchFilter, G: Send + 'static> WaitingFetches<W, G>
where
    W: 'static,
{
    fn lock(&self) -> MutexGuard<'_, FetchState<W, G>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A dispatcher comes to the counter, for as long as what this returns is kept.
    pub(crate) fn register(&self, terms: FetchTerms<W>) -> WaitingFetch<W, G> {
        let mut inner = self.lock();
        inner.next += 1;
        let (number, called) = (inner.next, Arc::new(Notify::new()));
        let waiting = Waiting { terms, asleep: false, reserved: false, called: called.clone() };
        inner.waiting.insert(number, waiting);
        WaitingFetch { counter: self.clone(), number, called }
    }

    /// Reserves a dispatcher that mark_idle and takes this; `comes_first` tells of one with these terms that something older waits for it.
    fn reserve(&self, label: &W::Label, comes_first: impl Fn(&FetchTerms<W>) -> bool) -> Option<Reserved<W, G>> {
        let mut inner = self.lock();
        let is_free = |waiting: &&mut Waiting<W>| {
            waiting.asleep && !waiting.reserved && waiting.terms.filter.takes(label) && !comes_first(&waiting.terms)
        };
        let (number, waiting) =
            inner.waiting.iter_mut().map(|(number, waiting)| (*number, waiting)).find(|(_, w)| is_free(w))?;
        waiting.reserved = true;
        let (terms, called) = (waiting.terms.clone(), waiting.called.clone());
        Some(Reserved { counter: self.clone(), number, terms, called })
    }

    /// Whether somebody waits whom nobody has reserved.
    fn has_idle(&self) -> bool {
        self.lock().waiting.values().any(|waiting| waiting.asleep && !waiting.reserved)
    }

    /// Lays something on the counter that was claimed as `terms` say, and calls the dispatcher that was reserved for it, or, where there is
    /// none or it has gone, another that takes it. Where nobody comes for it, it is given back.
    fn put_claimed(
        &self,
        engine: &Arc<Engine>,
        (label, terms): (W::Label, &FetchTerms<W>),
        parcel: ReleaseOnDrop<G>,
        reserved: Option<Reserved<W, G>>,
    ) where
        G: 'static,
        W::Label: 'static,
    {
        let lock_timeout = terms.lock_timeout;
        let (number, called) = {
            let mut inner = self.lock();
            let is_there = reserved.as_ref().filter(|reserved| inner.waiting.contains_key(&reserved.number));
            let called = is_there.map(|reserved| reserved.called.clone()).or_else(|| {
                let takes = |waiting: &&Waiting<W>| {
                    waiting.asleep && !waiting.reserved && waiting.terms.take(&label, lock_timeout)
                };
                inner.waiting.values().find(takes).map(|waiting| waiting.called.clone())
            });
            inner.next += 1;
            let number = inner.next;
            inner.claimed.insert(number, ClaimedItem { label, lock_timeout, laid: Instant::now(), parcel, reserved });
            (number, called)
        };
        if let Some(called) = called {
            called.notify_one();
        }
        let (counter, stopping) = (self.clone(), engine.stopping.clone());
        engine.spawn(async move {
            tokio::select! {
                biased;
                () = stopping.cancelled() => {}
                () = tokio::time::sleep(KEPT_FOR.min(lock_timeout / 8)) => {}
            }
            // It is given back where it is dropped, which must not happen under the lock.
            let left = counter.lock().claimed.remove(&number);
            drop(left);
        });
    }

    /// The first thing on the counter that fits. One that locks for longer would renew too late. If the task that removes things ended
    /// with its runtime, they may lie here for longer than their locks last: those are given back.
    pub(crate) fn take(&self, terms: &FetchTerms<W>) -> Option<G> {
        let (good, _old) = {
            let mut inner = self.lock();
            let old = inner.remove_old();
            let fits = |good: &ClaimedItem<W, G>| terms.take(&good.label, good.lock_timeout);
            let number = inner.claimed.iter().find(|(_, good)| fits(good)).map(|(number, _)| *number);
            (number.and_then(|number| inner.claimed.remove(&number)), old)
        };
        let ClaimedItem { parcel, reserved, .. } = good?;
        drop(reserved);
        parcel.open()
    }
}

/// A dispatcher at the counter. It leaves when this is dropped.
pub(crate) struct WaitingFetch<W: FetchFilter + 'static, G: Send + 'static> {
    counter: WaitingFetches<W, G>,
    number: u64,
    called: Arc<Notify>,
}

impl<W: FetchFilter, G: Send> WaitingFetch<W, G> {
    /// It has nothing to do until what this returns is dropped.
    pub(crate) fn mark_idle(&self) -> Asleep<'_, W, G> {
        self.set_asleep(true);
        Asleep(self)
    }

    fn set_asleep(&self, asleep: bool) {
        if let Some(waiting) = self.counter.lock().waiting.get_mut(&self.number) {
            waiting.asleep = asleep;
        }
    }

    /// Something lies on the counter for it.
    pub(crate) async fn called(&self) {
        self.called.notified().await;
    }
}

impl<W: FetchFilter, G: Send> Drop for WaitingFetch<W, G> {
    fn drop(&mut self) {
        self.counter.lock().waiting.remove(&self.number);
    }
}

/// A dispatcher that mark_idle.
pub(crate) struct Asleep<'a, W: FetchFilter + 'static, G: Send + 'static>(&'a WaitingFetch<W, G>);

impl<W: FetchFilter, G: Send> Drop for Asleep<'_, W, G> {
    fn drop(&mut self) {
        self.0.set_asleep(false);
    }
}

/// A dispatcher that nobody else may offer anything, until this is dropped.
struct Reserved<W: FetchFilter, G> {
    counter: WaitingFetches<W, G>,
    number: u64,
    terms: FetchTerms<W>,
    called: Arc<Notify>,
}

impl<W: FetchFilter, G> Drop for Reserved<W, G> {
    fn drop(&mut self) {
        let mut inner = self.counter.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waiting) = inner.waiting.get_mut(&self.number) {
            waiting.reserved = false;
        }
    }
}

/// The counters of a process.
#[derive(Default)]
pub(crate) struct LocalQueue {
    pub(crate) turns: WaitingFetches<turn::TurnFilter, turn::Turn>,
    pub(crate) work: WaitingFetches<activity::ActivityFilter, activity::Work>,
}

#[cfg(test)]
mod tests;
