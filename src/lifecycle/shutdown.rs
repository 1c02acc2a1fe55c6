//! Leaving: what this process holds is given back, so that others need not wait for its locks to expire.
//!
//! Everything is bounded by the caller's time, also in an outage: what could not be given back by then expires.

use crate::{
    activity::{claim, session},
    cosmos::{Deadline, StoreError},
    discovery,
    engine::Engine,
    turn::{release, TurnPhase},
};
use futures::{stream, StreamExt};
use std::{sync::Arc, time::Duration};
use tracing::{debug, warn};

/// Requests that are under way at once.
const CONCURRENCY: usize = 16;

/// Stops background work, gives turns, activities and sessions back, and waits for what is under way; `false` where the time
/// was up before that.
pub(crate) async fn shut_down(engine: &Arc<Engine>, limit: Duration) -> bool {
    engine.stopping.cancel();
    let deadline = Deadline::after(limit);
    let releasing_activities = async {
        // An activity that can't be reached takes half of the time at most: the sessions come after it.
        let work = release_activities(engine, Deadline::after(limit / 2)).await;
        let sessions = is_released(session::release_all(engine, deadline).await);
        work && sessions
    };
    let leaving = async {
        // Beside each other: where one partition does not answer, the others do.
        let turns = release_turns(engine, deadline);
        let (left, turns, work) = tokio::join!(discovery::leave(engine, deadline), turns, releasing_activities);
        engine.tasks.close();
        engine.tasks.wait().await;
        is_released(left) && turns && work
    };
    tokio::time::timeout_at(deadline.instant(), leaving).await.unwrap_or_else(|_| {
        warn!(?limit, "the time was up before everything was given back: the rest expires");
        false
    })
}

/// Turns are given back uncounted. One that is being committed is left to that.
async fn release_turns(engine: &Arc<Engine>, deadline: Deadline) -> bool {
    let mut held: Vec<_> = engine.turns.iter().map(|entry| entry.value().clone()).collect();
    held.sort_by(|a, b| a.token.cmp(&b.token));
    debug!(turns = held.len(), "giving turns back");
    let giving = stream::iter(held).map(|handle| async move {
        let mut state = handle.state.lock().await;
        if state.phase != TurnPhase::Open {
            return true;
        }
        state.phase = TurnPhase::Closed;
        is_released(release::release_claim(engine, &handle.partition, &handle.token, deadline).await)
    });
    giving.buffer_unordered(CONCURRENCY).fold(true, |all, given| async move { all && given }).await
}

/// Activities are given back uncounted. One that is being completed is left to that.
async fn release_activities(engine: &Arc<Engine>, deadline: Deadline) -> bool {
    let mut held: Vec<_> = engine.activities.iter().map(|entry| entry.value().clone()).collect();
    held.sort_by(|a, b| a.token.cmp(&b.token));
    debug!(activities = held.len(), "giving activities back");
    let giving = stream::iter(held).map(|handle| async move {
        let mut state = handle.state.lock().await;
        if state.closed {
            return true;
        }
        state.closed = true;
        engine.activities.remove(&handle.token);
        is_released(claim::release_claim(engine, &state.document, &handle.token, deadline).await)
    });
    giving.buffer_unordered(CONCURRENCY).fold(true, |all, given| async move { all && given }).await
}

fn is_released(outcome: Result<(), StoreError>) -> bool {
    if let Err(error) = &outcome {
        warn!(%error, "what was held here could not be given back: its lock expires");
    }
    outcome.is_ok()
}
