//! Waiting for work: hints first, then the service, then time.

use super::{
    parcel::Parcel,
    poll::{self, Pace},
    queue::Queue,
    slots::LeaseProvider,
    Dispatch, OrchestrationHint, SessionHeld, WorkHint,
};
use crate::{
    engine::Engine,
    model::{Millis, Partition},
    store::{Deadline, StoreError},
    turn::{claim as turn_claim, open::claim_time, release},
    work::{claim as work_claim, session},
};
use duroxide::providers::{
    DispatcherCapabilityFilter, OrchestrationItem, ProviderError, SessionFetchConfig, TagFilter, WorkItem,
};
use std::{hash::Hash, sync::Arc, time::Duration};
use tokio::time::Instant;
use tracing::warn;

/// A claim takes no longer: then the hint can be tried by another waiter.
const CLAIM_TIME: Millis = 10_000;
/// A caller that does not wait is kept no longer by claims that are under way.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// A turn that another process holds is looked at again then: it may have ended long before its lock does.
const LOOK_AGAIN: Millis = 1_000;

type Turn = (OrchestrationItem, String, u32);
type Work = (WorkItem, String, u32);

/// The next turn, or nothing within `poll_timeout`.
pub(crate) async fn next_turn(
    engine: &Arc<Engine>,
    lock_timeout: Duration,
    poll_timeout: Duration,
    filter: Option<&DispatcherCapabilityFilter>,
) -> Result<Option<Turn>, ProviderError> {
    const OPERATION: &str = "fetch_orchestration_item";
    let dispatch = &engine.dispatch;
    let lease = dispatch.turn_leases.lease();
    let fits = |hint: &OrchestrationHint| match (&hint.pinned, filter) {
        (Some(pinned), Some(filter)) => turn_claim::supports(filter, pinned),
        _ => true,
    };
    let mut wait = Wait::new(poll_timeout);
    while !engine.stopping.is_cancelled() {
        let notified = dispatch.turns.changed.notified();
        tokio::pin!(notified);
        notified.as_mut().enable();
        let taken = take_hint(engine, &dispatch.turns, |hint| lease.has(hint.slot) && fits(hint))
            .or_else(|| take_hint(engine, &dispatch.turns, fits));
        if let Some((partition, hint, seq)) = taken {
            poll_if_overdue(engine);
            // While the claim is under way, a poll that returns these messages brings no news.
            dispatch.recent.taken(&partition, hint.ids(), engine.now() + CLAIM_TIME);
            match try_turn(engine, &hint, lock_timeout, filter).await {
                Ok(turn_claim::Claimed::Turn(turn)) => {
                    let until = engine.clock.after(lock_timeout);
                    dispatch.turn_holds(&partition, until);
                    return Ok(Some(*turn));
                }
                Ok(other) => settle_turn(engine, partition, hint, seq, other),
                Err(error) => {
                    dispatch.recent.returned(&partition, hint.ids());
                    let due = engine.clock.after(error.pause());
                    dispatch.turns.put_back(partition, hint, seq, due, engine.now(), OrchestrationHint::merge);
                    wait.trouble(error, OPERATION)?;
                }
            }
            continue;
        }
        match wait.next(dispatch, dispatch.turns.next_due(), engine.now()) {
            Next::GiveUp => return Ok(None),
            Next::Poll(mut pace) => {
                if let Err(error) = poll::poll(engine, &mut pace, !wait.patient).await {
                    wait.trouble(error, OPERATION)?;
                }
            }
            Next::Sleep(until) => {
                tokio::select! {
                    biased;
                    () = notified => {}
                    () = tokio::time::sleep_until(until) => {}
                    () = engine.stopping.cancelled() => {}
                }
            }
        }
    }
    Ok(None)
}

/// Under load nobody waits, and so nobody would poll: what others enqueue is asked for all the same, now and then.
fn poll_if_overdue(engine: &Arc<Engine>) {
    let overdue = engine.dispatch.pace.try_lock().is_ok_and(|pace| pace.overdue() <= Instant::now());
    if !overdue {
        return;
    }
    let engine_too = engine.clone();
    engine.spawn(async move {
        let Ok(mut pace) = engine_too.dispatch.pace.try_lock() else { return };
        if let Err(error) = poll::poll(&engine_too, &mut pace, false).await {
            warn!(%error, "a poll failed");
        }
    });
}

fn take_hint<K: Clone + Eq + Hash + Ord, H>(
    engine: &Engine,
    queue: &Queue<K, H>,
    fits: impl Fn(&H) -> bool,
) -> Option<(K, H, String)> {
    let now = engine.now();
    queue.take(now, now + CLAIM_TIME, |_, hint| fits(hint))
}

/// Claims in a task of its own: a caller that goes away leaves a claim to be finished and given back.
async fn try_turn(
    engine: &Arc<Engine>,
    hint: &OrchestrationHint,
    lock_timeout: Duration,
    filter: Option<&DispatcherCapabilityFilter>,
) -> Result<turn_claim::Claimed, StoreError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let (engine_too, hint, filter) = (engine.clone(), hint.clone(), filter.cloned());
    let begun = engine.dispatch.under_way.begin();
    engine.spawn(async move {
        let deadline = Deadline::after(claim_time(&engine_too, lock_timeout));
        let outcome = turn_claim::claim(&engine_too, &hint, lock_timeout, filter.as_ref(), deadline).await;
        let parcel = Parcel::new(outcome, move |outcome| {
            let _begun = begun;
            if let Ok(turn_claim::Claimed::Turn(turn)) = outcome {
                release::give_back_later(&engine_too, &hint.partition, turn.1, 0);
            } else {
                engine_too.dispatch.turn_returned(&hint.partition, 0);
            }
        });
        // Where the receiver is gone, the parcel comes back and gives back what it holds.
        drop(sender.send(parcel));
    });
    let parcel = receiver.await.ok().and_then(Parcel::open);
    parcel.unwrap_or_else(|| Err(StoreError::Unavailable { detail: "the claim was interrupted".to_owned() }))
}

fn settle_turn(
    engine: &Engine,
    partition: Partition,
    mut hint: OrchestrationHint,
    seq: String,
    outcome: turn_claim::Claimed,
) {
    let now = engine.now();
    let turns = &engine.dispatch.turns;
    engine.dispatch.recent.returned(&partition, hint.ids());
    let due = match outcome {
        turn_claim::Claimed::Locked(until) => until.min(now + LOOK_AGAIN),
        turn_claim::Claimed::Incompatible(pinned) => {
            hint.pinned = Some(pinned);
            now
        }
        turn_claim::Claimed::Nothing | turn_claim::Claimed::Waiting | turn_claim::Claimed::Turn(_) => {
            turns.set_free(&partition, now);
            return;
        }
    };
    turns.put_back(partition, hint, seq, due, now, OrchestrationHint::merge);
}

/// The next activity, or nothing within `poll_timeout`.
pub(crate) async fn next_work(
    engine: &Arc<Engine>,
    lock_timeout: Duration,
    poll_timeout: Duration,
    session: Option<&SessionFetchConfig>,
    tags: &TagFilter,
) -> Result<Option<Work>, ProviderError> {
    const OPERATION: &str = "fetch_work_item";
    if matches!(tags, TagFilter::None) {
        tokio::time::sleep(poll_timeout).await;
        return Ok(None);
    }
    let dispatch = &engine.dispatch;
    let lease = dispatch.work_leases.lease();
    let owner = session.map(|session| session.owner_id.as_str());
    let fits = |hint: &WorkHint| tags.matches(hint.document.tag.as_deref()) && hint.session_fits(owner, engine.now());
    let mut wait = Wait::new(poll_timeout);
    while !engine.stopping.is_cancelled() {
        let notified = dispatch.work.changed.notified();
        tokio::pin!(notified);
        notified.as_mut().enable();
        let taken = take_hint(engine, &dispatch.work, |hint| lease.has(hint.slot) && fits(hint))
            .or_else(|| take_hint(engine, &dispatch.work, fits));
        if let Some((key, hint, seq)) = taken {
            poll_if_overdue(engine);
            match try_work(engine, &hint, lock_timeout, session).await {
                Ok(work_claim::Claimed::Work(work, _)) => {
                    dispatch.work.set_free(&key, engine.now());
                    return Ok(Some(*work));
                }
                Ok(work_claim::Claimed::Gone) => dispatch.work.set_free(&key, engine.now()),
                Ok(work_claim::Claimed::Held(until)) => put_work_back(engine, key, hint, seq, until),
                Ok(work_claim::Claimed::SessionHeld(owner, until)) => {
                    let held = SessionHeld { owner, until, seen: engine.now() };
                    let hint = WorkHint { session_held: Some(held), ..hint };
                    dispatch.work.wake_at(until);
                    put_work_back(engine, key, hint, seq, engine.now());
                }
                Err(error) => {
                    put_work_back(engine, key, hint, seq, engine.clock.after(error.pause()));
                    wait.trouble(error, OPERATION)?;
                }
            }
            continue;
        }
        let bound = |hint: &WorkHint| hint.document.session_id.is_some() && tags.matches(hint.document.tag.as_deref());
        if owner.is_none() && dispatch.work.has_ready(engine.now(), bound) {
            // Its runtime has as many sessions as it may, and asks with a session as soon as it has fewer: if it is told soon.
            wait.hurry();
        }
        match wait.next(dispatch, dispatch.work.next_due(), engine.now()) {
            Next::GiveUp => return Ok(None),
            Next::Poll(mut pace) => {
                if let Err(error) = poll::poll(engine, &mut pace, !wait.patient).await {
                    wait.trouble(error, OPERATION)?;
                }
            }
            Next::Sleep(until) => {
                tokio::select! {
                    biased;
                    () = notified => {}
                    () = tokio::time::sleep_until(until) => {}
                    () = engine.stopping.cancelled() => {}
                }
            }
        }
    }
    Ok(None)
}

fn put_work_back(engine: &Engine, key: String, mut hint: WorkHint, seq: String, due: Millis) {
    // What the hint says of the document is not current any more.
    hint.document.etag = None;
    engine.dispatch.work.put_back(key, hint, seq, due, engine.now(), |old, new| *old = new);
}

async fn try_work(
    engine: &Arc<Engine>,
    hint: &WorkHint,
    lock_timeout: Duration,
    session: Option<&SessionFetchConfig>,
) -> Result<work_claim::Claimed, StoreError> {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let (engine_too, hint, session) = (engine.clone(), hint.clone(), session.cloned());
    let begun = engine.dispatch.under_way.begin();
    engine.spawn(async move {
        let deadline = Deadline::after(claim_time(&engine_too, lock_timeout));
        let outcome = work_claim::claim(&engine_too, &hint, lock_timeout, session.as_ref(), deadline).await;
        let parcel = Parcel::new(outcome, move |outcome| {
            let _begun = begun;
            engine_too.dispatch.work.set_free(&hint.document.seq, engine_too.now());
            if let Ok(work_claim::Claimed::Work(work, hold)) = outcome {
                work_claim::give_back_later(&engine_too, hint.document, work.1);
                if let Some(hold) = hold {
                    session::give_back_later(&engine_too, hold);
                }
            }
        });
        drop(sender.send(parcel));
    });
    let parcel = receiver.await.ok().and_then(Parcel::open);
    parcel.unwrap_or_else(|| Err(StoreError::Unavailable { detail: "the claim was interrupted".to_owned() }))
}

/// How long a caller waits, and what for.
struct Wait {
    until: Instant,
    /// A caller that does not wait wants the store's present state: it is asked once.
    must_ask: bool,
    patient: bool,
}

enum Next<'a> {
    GiveUp,
    Poll(tokio::sync::MutexGuard<'a, Pace>),
    Sleep(Instant),
}

impl Wait {
    fn new(poll_timeout: Duration) -> Self {
        let patient = !poll_timeout.is_zero();
        Self { until: Instant::now() + poll_timeout, must_ask: !patient, patient }
    }

    /// The caller can't take what is there and may be able to when it asks again.
    fn hurry(&mut self) {
        const SOON: Duration = Duration::from_millis(100);
        self.until = self.until.min(Instant::now() + SOON);
    }

    /// What to do when nothing is ready.
    fn next<'a>(&mut self, dispatch: &'a Dispatch, next_due: Option<Millis>, now: Millis) -> Next<'a> {
        let pace = &dispatch.pace;
        if self.must_ask {
            match pace.try_lock() {
                Ok(pace) => {
                    self.must_ask = false;
                    return Next::Poll(pace);
                }
                // Somebody else is asking: its answer is as good.
                Err(_) => return Next::Sleep(Instant::now() + Duration::from_millis(2)),
            }
        }
        let instant = Instant::now();
        if !self.patient && dispatch.under_way.any() && instant < self.until + SETTLE_TIME {
            return Next::Sleep(instant + Duration::from_millis(2));
        }
        if instant >= self.until {
            return Next::GiveUp;
        }
        let mut wake = self.until;
        match pace.try_lock() {
            Ok(pace) if pace.next() <= instant => return Next::Poll(pace),
            Ok(pace) => wake = wake.min(pace.next()),
            Err(_) => wake = wake.min(instant + Duration::from_millis(50)),
        }
        if let Some(due) = next_due {
            wake = wake.min(instant + Duration::from_millis(due.saturating_sub(now).max(1)));
        }
        Next::Sleep(wake)
    }

    /// A caller that waits sits an outage out; one that doesn't is told.
    fn trouble(&self, error: StoreError, operation: &str) -> Result<(), ProviderError> {
        // What can't be understood of one instance or activity is its own trouble, and no reason to stop waiting for others.
        let of_one = matches!(error, StoreError::Malformed { .. });
        if !self.patient || !(error.is_passing() || of_one) {
            return Err(error.into_provider_error(operation));
        }
        warn!(%error, operation, "trouble while waiting for work");
        Ok(())
    }
}
