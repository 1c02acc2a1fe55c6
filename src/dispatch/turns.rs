//! The order for a turn.

use super::{
    bell,
    lane::{self, Order, Taken},
    poll::{self, Found, Look, Rest},
    queue::Queue,
    Dispatch, OrchestrationHint,
};
use crate::{
    engine::Engine,
    model::{Millis, Partition, Slot},
    orders::{
        turn::{takes, Turn, TurnWants},
        Counter, Terms,
    },
    store::{Deadline, StoreError},
    turn::{
        claim::{self, Claimed},
        open::claim_time,
        release,
    },
};
use duroxide::providers::{DispatcherCapabilityFilter, ProviderError};
use std::{sync::Arc, time::Duration};

/// A turn that another process holds is looked at again then: it may have ended long before its lock does.
const LOOK_AGAIN: Millis = 1_000;

/// The next turn, or nothing within `poll_timeout`.
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
    lane::next(engine, &TurnOrder { lock_timeout, patient, filter }, poll_timeout).await
}

struct TurnOrder<'a> {
    lock_timeout: Duration,
    patient: bool,
    filter: Option<&'a DispatcherCapabilityFilter>,
}

impl Order for TurnOrder<'_> {
    const OPERATION: &'static str = "fetch_orchestration_item";
    type Key = Partition;
    type Hint = OrchestrationHint;
    type Goods = Turn;
    type Wants = TurnWants;

    fn queue<'a>(&self, dispatch: &'a Dispatch) -> &'a Queue<Partition, OrchestrationHint> {
        &dispatch.turns
    }

    fn counter<'a>(&self, engine: &'a Engine) -> &'a Counter<TurnWants, Turn> {
        &engine.orders.turns
    }

    fn terms(&self) -> Terms<TurnWants> {
        Terms { lock_timeout: self.lock_timeout, patient: self.patient, wants: TurnWants(self.filter.cloned()) }
    }

    fn asks(&self, dispatch: &Dispatch) -> bool {
        dispatch.fleet.asks_for_turns(self.filter)
    }

    async fn look(&self, engine: &Arc<Engine>, look: &Look<'_>, rest: &mut Rest) -> Result<Found, StoreError> {
        poll::turns(engine, look, rest).await
    }

    fn fits(&self, _dispatch: &Dispatch, hint: &OrchestrationHint, _now: Millis) -> bool {
        takes(self.filter, hint.pinned.as_ref())
    }

    async fn attempt(
        &self,
        engine: &Arc<Engine>,
        taken: Taken<Partition, OrchestrationHint>,
    ) -> Result<Option<Turn>, StoreError> {
        let (dispatch, Taken { key: partition, hint, seq }) = (&engine.dispatch, taken);
        // While the claim is under way, a look that returns these messages brings no news.
        dispatch.recent.taken(&partition, hint.ids(), engine.now() + lane::CLAIM_TIME);
        match self.claim(engine, &hint).await {
            Ok(Claimed::Turn(turn)) => {
                dispatch.turn_holds(&partition, engine.clock.after(self.lock_timeout));
                Ok(Some(*turn))
            }
            Ok(other) => {
                settle(engine, partition, hint, seq, other);
                Ok(None)
            }
            Err(error) => {
                dispatch.recent.returned(&partition, hint.ids());
                let due = engine.clock.after(error.pause());
                dispatch.turns.put_back(partition, hint, seq, due, engine.now(), OrchestrationHint::merge);
                Err(error)
            }
        }
    }
}

impl TurnOrder<'_> {
    /// Claims in a task of its own.
    async fn claim(&self, engine: &Arc<Engine>, hint: &OrchestrationHint) -> Result<Claimed, StoreError> {
        let (engine_too, hint_too, terms) = (engine.clone(), hint.clone(), self.terms());
        let claiming = async move {
            let deadline = Deadline::after(claim_time(&engine_too, terms.lock_timeout));
            claim::claim(&engine_too, &hint_too, &terms, deadline).await
        };
        let (engine_too, partition, lock_timeout) = (engine.clone(), hint.partition.clone(), self.lock_timeout);
        let give_back = move |outcome| {
            if let Ok(Claimed::Turn(turn)) = outcome {
                let until = engine_too.clock.after(lock_timeout);
                release::give_back_later(&engine_too, &partition, turn.1, until, 0);
            } else {
                engine_too.dispatch.turn_returned(&partition, 0);
            }
        };
        lane::claim_apart(engine, claiming, give_back).await
    }
}

/// What becomes of a hint whose claim came to nothing.
fn settle(engine: &Arc<Engine>, partition: Partition, mut hint: OrchestrationHint, seq: String, outcome: Claimed) {
    let now = engine.now();
    let turns = &engine.dispatch.turns;
    engine.dispatch.recent.returned(&partition, hint.ids());
    let due = match outcome {
        Claimed::Locked(until) => until.min(now + LOOK_AGAIN),
        Claimed::Incompatible(pinned) => {
            let (engine_too, slot, version) = (engine.clone(), Slot::of(&partition), pinned.clone());
            engine.spawn(async move { bell::call_runners(&engine_too, slot, Some(&version), None).await });
            hint.pinned = Some(pinned);
            now
        }
        Claimed::Nothing | Claimed::Waiting | Claimed::Turn(_) => {
            turns.set_free(&partition, now);
            engine.dispatch.keep_rest(&hint, now);
            return;
        }
    };
    turns.put_back(partition, hint, seq, due, now, OrchestrationHint::merge);
}
