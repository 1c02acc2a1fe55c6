//! The order for an activity.

use super::{
    fetch_loop::{self, FetchKind, TakenCandidate},
    members::IdleWorker,
    poll::{self, PollRequest, PollResult, Rest},
    queue::ReadyQueue,
    wakeup, ActivityCandidate, Discovery,
};
use crate::{
    activity::{
        claim::{self, ActivityClaim},
        session,
    },
    cosmos::{Deadline, StoreError},
    engine::Engine,
    model::{ActivityDocument, DocumentId, Millis, Partition, Slot, Tags},
    queue::{
        activity::{ActivityFilter, Work},
        FetchTerms, WaitingFetches,
    },
    turn::open::claim_time,
};
use duroxide::providers::{ProviderError, SessionFetchConfig, TagFilter};
use std::{collections::BTreeSet, sync::Arc, time::Duration};

/// The next activity, or nothing within `poll_timeout`.
pub(crate) async fn next_activity(
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
    fetch_loop::next(engine, &ActivityFetch { lock_timeout, patient, session, tags }, poll_timeout).await
}

struct ActivityFetch<'a> {
    lock_timeout: Duration,
    patient: bool,
    session: Option<&'a SessionFetchConfig>,
    tags: &'a TagFilter,
}

impl FetchKind for ActivityFetch<'_> {
    const OPERATION: &'static str = "fetch_work_item";
    type Key = String;
    type Hint = ActivityCandidate;
    type Item = Work;
    type FetchFilter = ActivityFilter;

    fn queue<'a>(&self, discovery: &'a Discovery) -> &'a ReadyQueue<String, ActivityCandidate> {
        &discovery.work
    }

    fn counter<'a>(&self, engine: &'a Engine) -> &'a WaitingFetches<ActivityFilter, Work> {
        &engine.queue.work
    }

    fn terms(&self) -> FetchTerms<ActivityFilter> {
        FetchTerms { lock_timeout: self.lock_timeout, patient: self.patient, filter: ActivityFilter(self.tags.clone()) }
    }

    fn received(&self, engine: &Engine, (_, token, _): &Work) {
        if let Some(handle) = engine.activities.get(token) {
            starts(engine, &handle.partition, &handle.id);
        }
    }

    fn asks(&self, discovery: &Discovery) -> bool {
        discovery.fleet.asks_for_work(self.tags, self.session)
    }

    async fn look(
        &self,
        engine: &Arc<Engine>,
        look: &PollRequest<'_>,
        rest: &mut Rest,
    ) -> Result<PollResult, StoreError> {
        poll::work(engine, look, &Tags::from(self.tags), rest).await
    }

    fn waiting(&self, discovery: &Discovery) -> Option<IdleWorker> {
        Some(discovery.fleet.worker_waits())
    }

    /// One whose session another worker owns is taken, too, where that one is to be told of it.
    fn fits(&self, discovery: &Discovery, candidate: &ActivityCandidate, now: Millis) -> bool {
        if !self.tags.matches(candidate.document.tag.as_deref()) {
            return false;
        }
        let Some(owner) = self.owner() else { return candidate.document.session_id.is_none() };
        discovery
            .held
            .look(candidate, Some(owner), now, |other| candidate.told.as_deref() != Some(other))
            .unwrap_or(true)
    }

    /// A runtime that has as many sessions as it may asks with a session as soon as it has fewer: if it is told soon.
    fn should_ask_otherwise(&self, engine: &Engine) -> bool {
        let bound = |candidate: &ActivityCandidate| {
            candidate.document.session_id.is_some() && self.tags.matches(candidate.document.tag.as_deref())
        };
        self.session.is_none() && engine.discovery.work.has_ready(1, engine.now(), bound)
    }

    async fn attempt(
        &self,
        engine: &Arc<Engine>,
        taken: TakenCandidate<String, ActivityCandidate>,
    ) -> Result<Option<Work>, StoreError> {
        let (work, TakenCandidate { key, candidate, seq }) = (&engine.discovery.work, taken);
        if let Some(owner) = engine.discovery.held.by_another(&candidate, self.owner(), engine.now()) {
            let candidate = tell(engine, candidate, owner);
            put_back(engine, key, candidate, seq, engine.now());
            return Ok(None);
        }
        match self.claim(engine, &candidate).await {
            Ok(ActivityClaim::Work(taken, _)) => {
                work.set_free(&key, engine.now());
                starts(engine, &candidate.document.instance_id, &candidate.document.id);
                return Ok(Some(*taken));
            }
            Ok(ActivityClaim::Gone) => work.set_free(&key, engine.now()),
            Ok(ActivityClaim::Held(until)) => put_back(engine, key, candidate, seq, until),
            Ok(ActivityClaim::SessionHeld(owner, until)) => {
                engine.discovery.held.note(&candidate, &owner, until, engine.now());
                let candidate = tell(engine, candidate, owner);
                work.wake_at(until);
                put_back(engine, key, candidate, seq, engine.now());
            }
            Err(error) => {
                put_back(engine, key, candidate, seq, engine.clock.after(error.pause()));
                return Err(error);
            }
        }
        Ok(None)
    }
}

impl ActivityFetch<'_> {
    /// As whom the caller owns sessions, if it may.
    fn owner(&self) -> Option<&str> {
        self.session.map(|session| session.owner_id.as_str())
    }

    /// Claims in a task of its own.
    async fn claim(&self, engine: &Arc<Engine>, candidate: &ActivityCandidate) -> Result<ActivityClaim, StoreError> {
        let (engine_too, hint_too, session) = (engine.clone(), candidate.clone(), self.session.cloned());
        let terms = self.terms();
        let claiming = async move {
            let deadline = Deadline::after(claim_time(&engine_too, terms.lock_timeout));
            claim::claim(&engine_too, &hint_too, &terms, session.as_ref(), deadline).await
        };
        let (engine_too, document, lock_timeout) = (engine.clone(), candidate.document.clone(), self.lock_timeout);
        let release_claim = move |outcome| {
            engine_too.discovery.work.set_free(&document.seq, engine_too.now());
            if let Ok(ActivityClaim::Work(work, hold)) = outcome {
                let until = engine_too.clock.after(lock_timeout);
                claim::release_claim_later(&engine_too, document, work.1, until);
                if let Some(hold) = hold {
                    session::release_claim_later(&engine_too, hold);
                }
            }
        };
        fetch_loop::claim_apart(engine, claiming, release_claim).await
    }
}

/// An activity is about to run: it reads its orchestration's history first.
fn starts(engine: &Engine, partition: &Partition, id: &DocumentId) {
    if let Some((execution, activity)) = ActivityDocument::identity(id) {
        engine.reads.activity_starts(partition, execution, activity);
    }
}

/// The process whose worker owns the session is told that there is something for it, unless it was or that is this one: of all
/// activities of the session that are known here.
fn tell(engine: &Arc<Engine>, mut candidate: ActivityCandidate, owner: String) -> ActivityCandidate {
    let (session, mut slots) = (candidate.document.session_id.clone(), BTreeSet::new());
    let mut tell = |candidate: &mut ActivityCandidate| {
        if candidate.document.session_id == session && candidate.told.as_ref() != Some(&owner) {
            candidate.told = Some(owner.clone());
            slots.insert(Slot::of(&candidate.document.instance_id));
        }
    };
    tell(&mut candidate);
    engine.discovery.work.change_all(tell);
    if !slots.is_empty() {
        let engine_too = engine.clone();
        engine.spawn(async move {
            for slot in slots {
                wakeup::call_owner(&engine_too, slot, &owner).await;
            }
        });
    }
    candidate
}

fn put_back(engine: &Engine, key: String, mut candidate: ActivityCandidate, seq: String, due: Millis) {
    // What the candidate says of the document is not current any more.
    candidate.document.etag = None;
    engine.discovery.work.put_back(key, candidate, seq, due, engine.now(), |old, new| *old = new);
}
