//! The fetch of a turn.

use super::{
    fetch_loop::{self, FetchKind, TakenCandidate},
    poll::{self, PollRequest, PollResult, Rest},
    queue::ReadyQueue,
    wakeup, Discovery, TurnCandidate,
};
use crate::{
    cosmos::{Deadline, StoreError},
    engine::Engine,
    model::{Millis, Partition, Slot},
    queue::{
        turn::{takes, Turn, TurnFilter},
        FetchTerms, WaitingFetches,
    },
    turn::{
        claim::{self, TurnClaim},
        open::claim_time,
        release,
    },
};
use duroxide::providers::{DispatcherCapabilityFilter, ProviderError};
use std::{sync::Arc, time::Duration};

/// When to try again a turn that another process holds. It may end long before its lock does.
const RECHECK_AFTER: Millis = 1_000;

/// The next turn, or `None` if there is none within `poll_timeout`.
pub(crate) async fn next_turn(
    engine: &Arc<Engine>,
    lock_timeout: Duration,
    poll_timeout: Duration,
    filter: Option<&DispatcherCapabilityFilter>,
) -> Result<Option<Turn>, ProviderError> {
    if !takes(filter, None) {
        return Ok(None);
    }
    let patient = !poll_timeout.is_zero();
    fetch_loop::next(engine, &TurnFetch { lock_timeout, patient, filter }, poll_timeout).await
}

struct TurnFetch<'a> {
    lock_timeout: Duration,
    patient: bool,
    filter: Option<&'a DispatcherCapabilityFilter>,
}

impl FetchKind for TurnFetch<'_> {
    const OPERATION: &'static str = "fetch_orchestration_item";
    type Key = Partition;
    type Candidate = TurnCandidate;
    type Item = Turn;
    type FetchFilter = TurnFilter;

    fn queue<'a>(&self, discovery: &'a Discovery) -> &'a ReadyQueue<Partition, TurnCandidate> {
        &discovery.turns
    }

    fn waiting_fetches<'a>(&self, engine: &'a Engine) -> &'a WaitingFetches<TurnFilter, Turn> {
        &engine.queue.turns
    }

    fn terms(&self) -> FetchTerms<TurnFilter> {
        FetchTerms { lock_timeout: self.lock_timeout, patient: self.patient, filter: TurnFilter(self.filter.cloned()) }
    }

    fn record_fetch(&self, discovery: &Discovery) -> bool {
        discovery.fleet.asks_for_turns(self.filter)
    }

    async fn poll(
        &self,
        engine: &Arc<Engine>,
        request: &PollRequest<'_>,
        rest: &mut Rest,
    ) -> Result<PollResult, StoreError> {
        poll::turns(engine, request, rest).await
    }

    fn fits(&self, _discovery: &Discovery, candidate: &TurnCandidate, _now: Millis) -> bool {
        takes(self.filter, candidate.pinned.as_ref())
    }

    async fn attempt(
        &self,
        engine: &Arc<Engine>,
        taken: TakenCandidate<Partition, TurnCandidate>,
    ) -> Result<Option<Turn>, StoreError> {
        let (discovery, TakenCandidate { key: partition, candidate, seq }) = (&engine.discovery, taken);
        // During the claim a poll that returns these messages brings nothing new.
        discovery.recent.taken(&partition, candidate.ids(), engine.now() + fetch_loop::CLAIM_TIME);
        match self.claim(engine, &candidate).await {
            Ok(TurnClaim::Turn(turn)) => {
                discovery.turn_holds(&partition, engine.clock.after(self.lock_timeout));
                Ok(Some(*turn))
            }
            Ok(other) => {
                settle(engine, partition, candidate, seq, other);
                Ok(None)
            }
            Err(error) => {
                discovery.recent.returned(&partition, candidate.ids());
                let due = engine.clock.after(error.pause());
                discovery.turns.put_back(partition, candidate, seq, due, engine.now(), TurnCandidate::merge);
                Err(error)
            }
        }
    }
}

impl TurnFetch<'_> {
    /// Claims the candidate in a task of its own.
    async fn claim(&self, engine: &Arc<Engine>, candidate: &TurnCandidate) -> Result<TurnClaim, StoreError> {
        let (engine_too, candidate_too, terms) = (engine.clone(), candidate.clone(), self.terms());
        let claiming = async move {
            let deadline = Deadline::after(claim_time(&engine_too, terms.lock_timeout));
            claim::claim(&engine_too, &candidate_too, &terms, deadline).await
        };
        let (engine_too, partition, lock_timeout) = (engine.clone(), candidate.partition.clone(), self.lock_timeout);
        let release_claim = move |outcome| {
            if let Ok(TurnClaim::Turn(turn)) = outcome {
                let until = engine_too.clock.after(lock_timeout);
                release::release_claim_later(&engine_too, &partition, turn.1, until, 0);
            } else {
                engine_too.discovery.turn_returned(&partition, 0);
            }
        };
        fetch_loop::claim_apart(engine, claiming, release_claim).await
    }
}

/// Decides about a candidate whose claim returned no turn.
fn settle(engine: &Arc<Engine>, partition: Partition, mut candidate: TurnCandidate, seq: String, outcome: TurnClaim) {
    let now = engine.now();
    let turns = &engine.discovery.turns;
    engine.discovery.recent.returned(&partition, candidate.ids());
    let due = match outcome {
        TurnClaim::Locked(until) => until.min(now + RECHECK_AFTER),
        TurnClaim::Incompatible(pinned) => {
            let (engine_too, slot, version) = (engine.clone(), Slot::of(&partition), pinned.clone());
            engine.spawn(async move { wakeup::call_runners(&engine_too, slot, Some(&version), None).await });
            candidate.pinned = Some(pinned);
            now
        }
        TurnClaim::Nothing | TurnClaim::Deferred | TurnClaim::Turn(_) => {
            turns.set_free(&partition, now);
            engine.discovery.keep_undue(&candidate, now);
            return;
        }
    };
    turns.put_back(partition, candidate, seq, due, now, TurnCandidate::merge);
}
