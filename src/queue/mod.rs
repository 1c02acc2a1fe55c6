//! The local queue: waiting fetches, and items that are already claimed for them.
//!
//! *Inline claims.* A write that creates work also claims it, if a local dispatcher is waiting. Such a write is a
//! start, a completion, a turn with activities, or a delivery.
//!
//! 1. A waiting dispatcher registers how long it would lock and which work it accepts.
//! 2. The process reserves a waiting fetch and puts the claim into the batch of the write ([`turn`], [`activity`]). A
//!    commit retains the lock for the next turn ([`retained_lock`]).
//! 3. After the batch the claimed item is in the local queue. The reserved dispatcher, or any other that fits, takes it
//!    without a request.
//!
//! Invariants:
//!
//! 1. An inline claim is a claim like any other: conditional on the document that it locks, counted, and fenced by the
//!    ETag that the batch returns. If the condition fails, the batch is sent again without the claim.
//! 2. *First come.* A fetch is reserved only while nothing that fits it is ready in the ready queue.
//! 3. A claim that no fetch picks up is released without counting an attempt. This applies to a claim that is dropped
//!    after it was sent, whatever the outcome of its batch. It also applies to an item that no fetch has taken within
//!    [`MAX_WAIT`].
//!
//! Crash points: as those of a claim. If the process dies, the locks of its inline claims expire.

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

/// How long a claimed item waits for a fetch before it is released. Dispatchers fetch again at once, or they are busy.
const MAX_WAIT: Duration = Duration::from_millis(200);
/// A batch with an inline claim may take this part of the lock timeout. After that the batch is sent without the claim.
const PART_OF_LOCK: u32 = 4;

/// The filter of a dispatcher.
pub(crate) trait FetchFilter: Clone + Send {
    /// The properties of a claimed item that the filter examines.
    type Label: Send;

    fn takes(&self, label: &Self::Label) -> bool;
}

/// How a dispatcher would claim.
#[derive(Clone, Debug)]
pub(crate) struct FetchTerms<W> {
    pub(crate) lock_timeout: Duration,
    /// The dispatcher waits for work, so it fetches again when its item has ended.
    pub(crate) patient: bool,
    pub(crate) filter: W,
}

impl<W: FetchFilter> FetchTerms<W> {
    /// Whether a dispatcher accepts an item that is locked for `lock_timeout`.
    fn take(&self, label: &W::Label, lock_timeout: Duration) -> bool {
        self.lock_timeout <= lock_timeout && self.filter.takes(label)
    }
}

/// The waiting fetches of one kind, and the items that are claimed for them.
pub(crate) struct WaitingFetches<W: FetchFilter, G>(Arc<Mutex<FetchState<W, G>>>);

struct FetchState<W: FetchFilter, G> {
    /// The waiting fetches, in order of arrival.
    waiting: BTreeMap<u64, Waiting<W>>,
    /// The claimed items, in the order of their claims.
    claimed: BTreeMap<u64, ClaimedItem<W, G>>,
    next: u64,
}

struct Waiting<W> {
    terms: FetchTerms<W>,
    /// The fetch has found nothing in the ready queue and sleeps.
    asleep: bool,
    reserved: bool,
    called: Arc<Notify>,
}

struct ClaimedItem<W: FetchFilter, G> {
    label: W::Label,
    /// The lock timeout of the claim.
    lock_timeout: Duration,
    claimed_at: Instant,
    item: ReleaseOnDrop<G>,
    /// Its dispatcher gets no other item meanwhile.
    reserved: Option<Reserved<W, G>>,
}

impl<W: FetchFilter, G> FetchState<W, G> {
    /// Removes items whose lock was taken more than a quarter of its time ago. Dropping an item releases its claim,
    /// which must not happen under this mutex.
    fn remove_old(&mut self) -> Vec<ClaimedItem<W, G>> {
        let is_old = |claimed: &ClaimedItem<W, G>| claimed.claimed_at.elapsed() > claimed.lock_timeout / 4;
        let old: Vec<u64> =
            self.claimed.iter().filter(|(_, claimed)| is_old(claimed)).map(|(number, _)| *number).collect();
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

    /// Registers a waiting fetch, until the returned guard is dropped.
    pub(crate) fn register(&self, terms: FetchTerms<W>) -> WaitingFetch<W, G> {
        let mut inner = self.lock();
        inner.next += 1;
        let (number, called) = (inner.next, Arc::new(Notify::new()));
        let waiting = Waiting { terms, asleep: false, reserved: false, called: called.clone() };
        inner.waiting.insert(number, waiting);
        WaitingFetch { waiting_fetches: self.clone(), number, called }
    }

    /// Reserves a sleeping fetch that accepts an item with this label. `comes_first` tells whether older work is ready
    /// for a fetch with these terms.
    fn reserve(&self, label: &W::Label, comes_first: impl Fn(&FetchTerms<W>) -> bool) -> Option<Reserved<W, G>> {
        let mut inner = self.lock();
        let is_free = |waiting: &&mut Waiting<W>| {
            waiting.asleep && !waiting.reserved && waiting.terms.filter.takes(label) && !comes_first(&waiting.terms)
        };
        let (number, waiting) =
            inner.waiting.iter_mut().map(|(number, waiting)| (*number, waiting)).find(|(_, w)| is_free(w))?;
        waiting.reserved = true;
        let (terms, called) = (waiting.terms.clone(), waiting.called.clone());
        Some(Reserved { waiting_fetches: self.clone(), number, terms, called })
    }

    /// Whether a fetch sleeps and is not reserved.
    fn has_idle(&self) -> bool {
        self.lock().waiting.values().any(|waiting| waiting.asleep && !waiting.reserved)
    }

    /// Adds an item that was claimed with these terms, and wakes the fetch that was reserved for it. If there is none,
    /// or it has gone, another fetch that accepts the item is woken. If no fetch takes the item, it is released.
    fn put_claimed(
        &self,
        engine: &Arc<Engine>,
        (label, terms): (W::Label, &FetchTerms<W>),
        item: ReleaseOnDrop<G>,
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
            inner
                .claimed
                .insert(number, ClaimedItem { label, lock_timeout, claimed_at: Instant::now(), item, reserved });
            (number, called)
        };
        if let Some(called) = called {
            called.notify_one();
        }
        let (waiting_fetches, stopping) = (self.clone(), engine.stopping.clone());
        engine.spawn(async move {
            tokio::select! {
                biased;
                () = stopping.cancelled() => {}
                () = tokio::time::sleep(MAX_WAIT.min(lock_timeout / 8)) => {}
            }
            // Dropping the item releases its claim, which must not happen under the mutex.
            let left = waiting_fetches.lock().claimed.remove(&number);
            drop(left);
        });
    }

    /// Takes the first claimed item that fits. A fetch with a longer lock timeout would renew the lock too late, so it
    /// does not fit. The task that removes items may have ended with its tokio runtime. So this also releases items
    /// that are too old.
    pub(crate) fn take(&self, terms: &FetchTerms<W>) -> Option<G> {
        let (claimed, _old) = {
            let mut inner = self.lock();
            let old = inner.remove_old();
            let fits = |claimed: &ClaimedItem<W, G>| terms.take(&claimed.label, claimed.lock_timeout);
            let number = inner.claimed.iter().find(|(_, claimed)| fits(claimed)).map(|(number, _)| *number);
            (number.and_then(|number| inner.claimed.remove(&number)), old)
        };
        let ClaimedItem { item, reserved, .. } = claimed?;
        drop(reserved);
        item.open()
    }
}

/// The registration of a waiting fetch. Dropping it ends the registration.
pub(crate) struct WaitingFetch<W: FetchFilter + 'static, G: Send + 'static> {
    waiting_fetches: WaitingFetches<W, G>,
    number: u64,
    called: Arc<Notify>,
}

impl<W: FetchFilter, G: Send> WaitingFetch<W, G> {
    /// Marks the fetch as sleeping until the returned guard is dropped.
    pub(crate) fn mark_idle(&self) -> IdleGuard<'_, W, G> {
        self.set_asleep(true);
        IdleGuard(self)
    }

    fn set_asleep(&self, asleep: bool) {
        if let Some(waiting) = self.waiting_fetches.lock().waiting.get_mut(&self.number) {
            waiting.asleep = asleep;
        }
    }

    /// Waits until an item is claimed for this fetch.
    pub(crate) async fn called(&self) {
        self.called.notified().await;
    }
}

impl<W: FetchFilter, G: Send> Drop for WaitingFetch<W, G> {
    fn drop(&mut self) {
        self.waiting_fetches.lock().waiting.remove(&self.number);
    }
}

/// A fetch that is marked as sleeping.
pub(crate) struct IdleGuard<'a, W: FetchFilter + 'static, G: Send + 'static>(&'a WaitingFetch<W, G>);

impl<W: FetchFilter, G: Send> Drop for IdleGuard<'_, W, G> {
    fn drop(&mut self) {
        self.0.set_asleep(false);
    }
}

/// A reserved fetch. No other claim can reserve it until this is dropped.
struct Reserved<W: FetchFilter, G> {
    waiting_fetches: WaitingFetches<W, G>,
    number: u64,
    terms: FetchTerms<W>,
    called: Arc<Notify>,
}

impl<W: FetchFilter, G> Drop for Reserved<W, G> {
    fn drop(&mut self) {
        let mut inner = self.waiting_fetches.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waiting) = inner.waiting.get_mut(&self.number) {
            waiting.reserved = false;
        }
    }
}

/// The waiting fetches of a process, and the items that are claimed for them.
#[derive(Default)]
pub(crate) struct LocalQueue {
    pub(crate) turns: WaitingFetches<turn::TurnFilter, turn::Turn>,
    pub(crate) activities: WaitingFetches<activity::ActivityFilter, activity::ActivityItem>,
}

#[cfg(test)]
mod tests;
