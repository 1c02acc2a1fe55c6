//! Shutdown: the process releases its locks, so that other workers need not wait for them to expire.
//!
//! The caller's time limit bounds everything, even in an outage. A lock that is not released by then expires.

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

/// Requests that are in flight at once.
const CONCURRENCY: usize = 16;

/// Stops background work, releases turns, activities and sessions, and waits for requests in flight. Returns `false` if
/// the time is up before that, or if a release fails.
pub(crate) async fn shut_down(engine: &Arc<Engine>, limit: Duration) -> bool {
    engine.stopping.cancel();
    let deadline = Deadline::after(limit);
    let releasing_activities = async {
        // An unreachable activity takes half of the time at most, so that the sessions can follow.
        let work = release_activities(engine, Deadline::after(limit / 2)).await;
        let sessions = is_released(session::release_all(engine, deadline).await);
        work && sessions
    };
    let releasing = async {
        // The releases run concurrently: if one partition does not answer, the others do.
        let turns = release_turns(engine, deadline);
        let (left, turns, work) = tokio::join!(discovery::leave(engine, deadline), turns, releasing_activities);
        engine.tasks.close();
        engine.tasks.wait().await;
        is_released(left) && turns && work
    };
    tokio::time::timeout_at(deadline.instant(), releasing).await.unwrap_or_else(|_| {
        warn!(?limit, "shutdown timed out before all locks were released, the remaining locks will expire");
        false
    })
}

/// Releases the turns without counting an attempt. A turn that is being committed is left to its commit.
async fn release_turns(engine: &Arc<Engine>, deadline: Deadline) -> bool {
    let mut held: Vec<_> = engine.turns.iter().map(|entry| entry.value().clone()).collect();
    held.sort_by(|a, b| a.token.cmp(&b.token));
    debug!(turns = held.len(), "releasing turns");
    let releasing = stream::iter(held).map(|handle| async move {
        let mut state = handle.state.lock().await;
        if state.phase != TurnPhase::Open {
            return true;
        }
        state.phase = TurnPhase::Closed;
        is_released(release::release_claim(engine, &handle.partition, &handle.token, deadline).await)
    });
    releasing.buffer_unordered(CONCURRENCY).fold(true, |all, released| async move { all && released }).await
}

/// Releases the activities without counting an attempt. An activity that is being completed is left to its completion.
async fn release_activities(engine: &Arc<Engine>, deadline: Deadline) -> bool {
    let mut held: Vec<_> = engine.activities.iter().map(|entry| entry.value().clone()).collect();
    held.sort_by(|a, b| a.token.cmp(&b.token));
    debug!(activities = held.len(), "releasing activities");
    let releasing = stream::iter(held).map(|handle| async move {
        let mut state = handle.state.lock().await;
        if state.closed {
            return true;
        }
        state.closed = true;
        engine.activities.remove(&handle.token);
        is_released(claim::release_claim(engine, &state.document, &handle.token, deadline).await)
    });
    releasing.buffer_unordered(CONCURRENCY).fold(true, |all, released| async move { all && released }).await
}

fn is_released(outcome: Result<(), StoreError>) -> bool {
    if let Err(error) = &outcome {
        warn!(%error, "a release failed during shutdown, the lock will expire");
    }
    outcome.is_ok()
}
