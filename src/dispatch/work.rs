//! The order for an activity.

use super::{
    bell,
    lane::{self, Order, Taken},
    members::IdleWorker,
    poll,
    queue::Queue,
    Dispatch, SessionHeld, WorkHint,
};
use crate::{
    engine::Engine,
    model::{Millis, Slot},
    store::{Deadline, StoreError},
    turn::open::claim_time,
    work::{
        claim::{self, Claimed},
        session,
    },
};
use duroxide::providers::{ProviderError, SessionFetchConfig, TagFilter, WorkItem};
use std::{sync::Arc, time::Duration};

type Work = (WorkItem, String, u32);

/// The next activity, or nothing within `poll_timeout`.
pub(crate) async fn next_work(
    engine: &Arc<Engine>,
    lock_timeout: Duration,
    poll_timeout: Duration,
    session: Option<&SessionFetchConfig>,
    tags: &TagFilter,
) -> Result<Option<Work>, ProviderError> {
    if matches!(tags, TagFilter::None) {
        tokio::time::sleep(poll_timeout).await;
        return Ok(None);
    }
    lane::next(engine, &WorkOrder { lock_timeout, session, tags }, poll_timeout).await
}

struct WorkOrder<'a> {
    lock_timeout: Duration,
    session: Option<&'a SessionFetchConfig>,
    tags: &'a TagFilter,
}

impl Order for WorkOrder<'_> {
    const OPERATION: &'static str = "fetch_work_item";
    const QUEUE: poll::Queue = poll::Queue::Work;
    type Key = String;
    type Hint = WorkHint;
    type Goods = Work;

    fn queue<'a>(&self, dispatch: &'a Dispatch) -> &'a Queue<String, WorkHint> {
        &dispatch.work
    }

    fn asks(&self, dispatch: &Dispatch) -> bool {
        dispatch.fleet.asks_for_work(self.tags, self.session)
    }

    fn waiting(&self, dispatch: &Dispatch) -> Option<IdleWorker> {
        Some(dispatch.fleet.worker_waits())
    }

    fn fits(&self, hint: &WorkHint, now: Millis) -> bool {
        let owner = self.session.map(|session| session.owner_id.as_str());
        self.tags.matches(hint.document.tag.as_deref()) && hint.session_fits(owner, now)
    }

    /// A runtime that has as many sessions as it may asks with a session as soon as it has fewer: if it is told soon.
    fn should_ask_otherwise(&self, engine: &Engine) -> bool {
        let bound =
            |hint: &WorkHint| hint.document.session_id.is_some() && self.tags.matches(hint.document.tag.as_deref());
        self.session.is_none() && engine.dispatch.work.has_ready(engine.now(), bound)
    }

    async fn attempt(&self, engine: &Arc<Engine>, taken: Taken<String, WorkHint>) -> Result<Option<Work>, StoreError> {
        let (work, Taken { key, hint, seq }) = (&engine.dispatch.work, taken);
        match self.claim(engine, &hint).await {
            Ok(Claimed::Work(taken, _)) => {
                work.set_free(&key, engine.now());
                return Ok(Some(*taken));
            }
            Ok(Claimed::Gone) => work.set_free(&key, engine.now()),
            Ok(Claimed::Held(until)) => put_back(engine, key, hint, seq, until),
            Ok(Claimed::SessionHeld(owner, until)) => {
                call_owner(engine, &hint, &owner);
                let held = SessionHeld { owner, until, seen: engine.now() };
                let hint = WorkHint { session_held: Some(held), ..hint };
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
    /// Claims in a task of its own.
    async fn claim(&self, engine: &Arc<Engine>, hint: &WorkHint) -> Result<Claimed, StoreError> {
        let (engine_too, hint_too, session) = (engine.clone(), hint.clone(), self.session.cloned());
        let lock_timeout = self.lock_timeout;
        let claiming = async move {
            let deadline = Deadline::after(claim_time(&engine_too, lock_timeout));
            claim::claim(&engine_too, &hint_too, lock_timeout, session.as_ref(), deadline).await
        };
        let (engine_too, document) = (engine.clone(), hint.document.clone());
        let give_back = move |outcome| {
            engine_too.dispatch.work.set_free(&document.seq, engine_too.now());
            if let Ok(Claimed::Work(work, hold)) = outcome {
                claim::give_back_later(&engine_too, document, work.1);
                if let Some(hold) = hold {
                    session::give_back_later(&engine_too, hold);
                }
            }
        };
        lane::claim_apart(engine, claiming, give_back).await
    }
}

/// The process whose worker owns the session is told that there is something for it, unless that is this one.
fn call_owner(engine: &Arc<Engine>, hint: &WorkHint, owner: &str) {
    if hint.session_held.as_ref().is_some_and(|held| held.owner == owner) {
        return;
    }
    let (engine_too, slot, owner) = (engine.clone(), Slot::of(&hint.document.instance_id), owner.to_owned());
    engine.spawn(async move { bell::call_owner(&engine_too, slot, &owner).await });
}

fn put_back(engine: &Engine, key: String, mut hint: WorkHint, seq: String, due: Millis) {
    // What the hint says of the document is not current any more.
    hint.document.etag = None;
    engine.dispatch.work.put_back(key, hint, seq, due, engine.now(), |old, new| *old = new);
}
