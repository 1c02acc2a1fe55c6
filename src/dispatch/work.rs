//! The order for an activity.

use super::{
    bell,
    lane::{self, Order, Taken},
    members::IdleWorker,
    poll::{self, Found, Look, Rest},
    queue::Queue,
    Dispatch, WorkHint,
};
use crate::{
    engine::Engine,
    model::{DocumentId, Millis, Partition, Slot, Tags, WorkDocument},
    orders::{
        work::{Work, WorkWants},
        Counter, Terms,
    },
    store::{Deadline, StoreError},
    turn::open::claim_time,
    work::{
        claim::{self, Claimed},
        session,
    },
};
use duroxide::providers::{ProviderError, SessionFetchConfig, TagFilter};
use std::{collections::BTreeSet, sync::Arc, time::Duration};

/// The next activity, or nothing within `poll_timeout`.
pub(crate) async fn next_work(
    engine: &Arc<Engine>,
    lock_timeout: Duration,
    poll_timeout: Duration,
    session: Option<&SessionFetchConfig>,
    tags: &TagFilter,
) -> Result<Option<Work>, ProviderError> {
    if matches!(tags, TagFilter::None) {
        return Ok(None);
    }
    let patient = !poll_timeout.is_zero();
    lane::next(engine, &WorkOrder { lock_timeout, patient, session, tags }, poll_timeout).await
}

struct WorkOrder<'a> {
    lock_timeout: Duration,
    patient: bool,
    session: Option<&'a SessionFetchConfig>,
    tags: &'a TagFilter,
}

impl Order for WorkOrder<'_> {
    const OPERATION: &'static str = "fetch_work_item";
    type Key = String;
    type Hint = WorkHint;
    type Goods = Work;
    type Wants = WorkWants;

    fn queue<'a>(&self, dispatch: &'a Dispatch) -> &'a Queue<String, WorkHint> {
        &dispatch.work
    }

    fn counter<'a>(&self, engine: &'a Engine) -> &'a Counter<WorkWants, Work> {
        &engine.orders.work
    }

    fn terms(&self) -> Terms<WorkWants> {
        Terms { lock_timeout: self.lock_timeout, patient: self.patient, wants: WorkWants(self.tags.clone()) }
    }

    fn received(&self, engine: &Engine, (_, token, _): &Work) {
        if let Some(handle) = engine.works.get(token) {
            starts(engine, &handle.partition, &handle.id);
        }
    }

    fn asks(&self, dispatch: &Dispatch) -> bool {
        dispatch.fleet.asks_for_work(self.tags, self.session)
    }

    async fn look(&self, engine: &Arc<Engine>, look: &Look<'_>, rest: &mut Rest) -> Result<Found, StoreError> {
        poll::work(engine, look, &Tags::from(self.tags), rest).await
    }

    fn waiting(&self, dispatch: &Dispatch) -> Option<IdleWorker> {
        Some(dispatch.fleet.worker_waits())
    }

    /// One whose session another worker owns is taken, too, where that one is to be told of it.
    fn fits(&self, dispatch: &Dispatch, hint: &WorkHint, now: Millis) -> bool {
        if !self.tags.matches(hint.document.tag.as_deref()) {
            return false;
        }
        let Some(owner) = self.owner() else { return hint.document.session_id.is_none() };
        dispatch.held.look(hint, Some(owner), now, |other| hint.told.as_deref() != Some(other)).unwrap_or(true)
    }

    /// A runtime that has as many sessions as it may asks with a session as soon as it has fewer: if it is told soon.
    fn should_ask_otherwise(&self, engine: &Engine) -> bool {
        let bound =
            |hint: &WorkHint| hint.document.session_id.is_some() && self.tags.matches(hint.document.tag.as_deref());
        self.session.is_none() && engine.dispatch.work.has_ready(1, engine.now(), bound)
    }

    async fn attempt(&self, engine: &Arc<Engine>, taken: Taken<String, WorkHint>) -> Result<Option<Work>, StoreError> {
        let (work, Taken { key, hint, seq }) = (&engine.dispatch.work, taken);
        if let Some(owner) = engine.dispatch.held.by_another(&hint, self.owner(), engine.now()) {
            let hint = tell(engine, hint, owner);
            put_back(engine, key, hint, seq, engine.now());
            return Ok(None);
        }
        match self.claim(engine, &hint).await {
            Ok(Claimed::Work(taken, _)) => {
                work.set_free(&key, engine.now());
                starts(engine, &hint.document.instance_id, &hint.document.id);
                return Ok(Some(*taken));
            }
            Ok(Claimed::Gone) => work.set_free(&key, engine.now()),
            Ok(Claimed::Held(until)) => put_back(engine, key, hint, seq, until),
            Ok(Claimed::SessionHeld(owner, until)) => {
                engine.dispatch.held.note(&hint, &owner, until, engine.now());
                let hint = tell(engine, hint, owner);
                work.wake_at(until);
                put_back(engine, key, hint, seq, engine.now());
            }
            Err(error) => {
                put_back(engine, key, hint, seq, engine.clock.after(error.pause()));
                return Err(error);
            }
        }
        Ok(None)
    }
}

impl WorkOrder<'_> {
    /// As whom the caller owns sessions, if it may.
    fn owner(&self) -> Option<&str> {
        self.session.map(|session| session.owner_id.as_str())
    }

    /// Claims in a task of its own.
    async fn claim(&self, engine: &Arc<Engine>, hint: &WorkHint) -> Result<Claimed, StoreError> {
        let (engine_too, hint_too, session) = (engine.clone(), hint.clone(), self.session.cloned());
        let terms = self.terms();
        let claiming = async move {
            let deadline = Deadline::after(claim_time(&engine_too, terms.lock_timeout));
            claim::claim(&engine_too, &hint_too, &terms, session.as_ref(), deadline).await
        };
        let (engine_too, document, lock_timeout) = (engine.clone(), hint.document.clone(), self.lock_timeout);
        let give_back = move |outcome| {
            engine_too.dispatch.work.set_free(&document.seq, engine_too.now());
            if let Ok(Claimed::Work(work, hold)) = outcome {
                let until = engine_too.clock.after(lock_timeout);
                claim::give_back_later(&engine_too, document, work.1, until);
                if let Some(hold) = hold {
                    session::give_back_later(&engine_too, hold);
                }
            }
        };
        lane::claim_apart(engine, claiming, give_back).await
    }
}

/// An activity is about to run: it reads its orchestration's history first.
fn starts(engine: &Engine, partition: &Partition, id: &DocumentId) {
    if let Some((execution, activity)) = WorkDocument::identity(id) {
        engine.reads.activity_starts(partition, execution, activity);
    }
}

/// The process whose worker owns the session is told that there is something for it, unless it was or that is this one: of all
/// activities of the session that are known here.
fn tell(engine: &Arc<Engine>, mut hint: WorkHint, owner: String) -> WorkHint {
    let (session, mut slots) = (hint.document.session_id.clone(), BTreeSet::new());
    let mut tell = |hint: &mut WorkHint| {
        if hint.document.session_id == session && hint.told.as_ref() != Some(&owner) {
            hint.told = Some(owner.clone());
            slots.insert(Slot::of(&hint.document.instance_id));
        }
    };
    tell(&mut hint);
    engine.dispatch.work.change_all(tell);
    if !slots.is_empty() {
        let engine_too = engine.clone();
        engine.spawn(async move {
            for slot in slots {
                bell::call_owner(&engine_too, slot, &owner).await;
            }
        });
    }
    hint
}

fn put_back(engine: &Engine, key: String, mut hint: WorkHint, seq: String, due: Millis) {
    // What the hint says of the document is not current any more.
    hint.document.etag = None;
    engine.dispatch.work.put_back(key, hint, seq, due, engine.now(), |old, new| *old = new);
}
