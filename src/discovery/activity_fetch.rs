//! The fetch of an activity.

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
        activity::{ActivityFilter, ActivityItem},
        FetchTerms, WaitingFetches,
    },
    turn::open::claim_time,
};
use duroxide::providers::{ProviderError, SessionFetchConfig, TagFilter};
use std::{collections::BTreeSet, sync::Arc, time::Duration};

/// The next activity, or `None` if there is none within `poll_timeout`.
pub(crate) async fn next_activity(
    engine: &Arc<Engine>,
    lock_timeout: Duration,
    poll_timeout: Duration,
    session: Option<&SessionFetchConfig>,
    tags: &TagFilter,
) -> Result<Option<ActivityItem>, ProviderError> {
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
    type Candidate = ActivityCandidate;
    type Item = ActivityItem;
    type FetchFilter = ActivityFilter;

    fn queue<'a>(&self, discovery: &'a Discovery) -> &'a ReadyQueue<String, ActivityCandidate> {
        &discovery.work
    }

    fn waiting_fetches<'a>(&self, engine: &'a Engine) -> &'a WaitingFetches<ActivityFilter, ActivityItem> {
        &engine.queue.activities
    }

    fn terms(&self) -> FetchTerms<ActivityFilter> {
        FetchTerms { lock_timeout: self.lock_timeout, patient: self.patient, filter: ActivityFilter(self.tags.clone()) }
    }

    fn received(&self, engine: &Engine, (_, token, _): &ActivityItem) {
        if let Some(handle) = engine.activities.get(token) {
            starts(engine, &handle.partition, &handle.id);
        }
    }

    fn record_fetch(&self, discovery: &Discovery) -> bool {
        discovery.fleet.asks_for_work(self.tags, self.session)
    }

    async fn poll(
        &self,
        engine: &Arc<Engine>,
        request: &PollRequest<'_>,
        rest: &mut Rest,
    ) -> Result<PollResult, StoreError> {
        poll::work(engine, request, &Tags::from(self.tags), rest).await
    }

    fn idle_guard(&self, discovery: &Discovery) -> Option<IdleWorker> {
        Some(discovery.fleet.worker_waits())
    }

    /// Also accepts an activity whose session another worker owns, if that worker has not been informed of it yet.
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

    /// A runtime with its maximum number of sessions fetches without one, and fetches with one as soon as it has fewer.
    /// So a fetch without a session returns early if only activities of sessions are ready.
    fn should_return_early(&self, engine: &Engine) -> bool {
        let bound = |candidate: &ActivityCandidate| {
            candidate.document.session_id.is_some() && self.tags.matches(candidate.document.tag.as_deref())
        };
        self.session.is_none() && engine.discovery.work.has_ready(1, engine.now(), bound)
    }

    async fn attempt(
        &self,
        engine: &Arc<Engine>,
        taken: TakenCandidate<String, ActivityCandidate>,
    ) -> Result<Option<ActivityItem>, StoreError> {
        let (work, TakenCandidate { key, candidate, seq }) = (&engine.discovery.work, taken);
        if let Some(owner) = engine.discovery.held.by_another(&candidate, self.owner(), engine.now()) {
            let candidate = tell(engine, candidate, owner);
            put_back(engine, key, candidate, seq, engine.now());
            return Ok(None);
        }
        match self.claim(engine, &candidate).await {
            Ok(ActivityClaim::Claimed(taken, _)) => {
                work.set_free(&key, engine.now());
                starts(engine, &candidate.document.instance_id, &candidate.document.id);
                return Ok(Some(*taken));
            }
            Ok(ActivityClaim::Gone) => work.set_free(&key, engine.now()),
            Ok(ActivityClaim::Locked(until)) => put_back(engine, key, candidate, seq, until),
            Ok(ActivityClaim::SessionLocked(owner, until)) => {
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
    /// The caller's name as an owner of sessions, if it may own any.
    fn owner(&self) -> Option<&str> {
        self.session.map(|session| session.owner_id.as_str())
    }

    /// Claims the candidate in a task of its own.
    async fn claim(&self, engine: &Arc<Engine>, candidate: &ActivityCandidate) -> Result<ActivityClaim, StoreError> {
        let (engine_too, candidate_too, session) = (engine.clone(), candidate.clone(), self.session.cloned());
        let terms = self.terms();
        let claiming = async move {
            let deadline = Deadline::after(claim_time(&engine_too, terms.lock_timeout));
            claim::claim(&engine_too, &candidate_too, &terms, session.as_ref(), deadline).await
        };
        let (engine_too, document, lock_timeout) = (engine.clone(), candidate.document.clone(), self.lock_timeout);
        let release_claim = move |outcome| {
            engine_too.discovery.work.set_free(&document.seq, engine_too.now());
            if let Ok(ActivityClaim::Claimed(work, hold)) = outcome {
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

/// Announces the read of the history with which an activity begins.
fn starts(engine: &Engine, partition: &Partition, id: &DocumentId) {
    if let Some((execution, activity)) = ActivityDocument::identity(id) {
        engine.reads.activity_starts(partition, execution, activity);
    }
}

/// Sends a wake-up to the process whose worker owns the session, for all local candidates of the session of which it
/// was not informed yet. Sends none if that is this process.
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
    // The cached document may be stale now.
    candidate.document.etag = None;
    engine.discovery.work.put_back(key, candidate, seq, due, engine.now(), |old, new| *old = new);
}
