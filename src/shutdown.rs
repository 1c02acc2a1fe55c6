//! Leaving: what this process holds is given back, so that others need not wait for its locks to expire.
//!
//! Everything is bounded by the caller's time, also in an outage: what could not be given back by then expires.

use crate::{
    dispatch,
    engine::Engine,
    store::{Deadline, StoreError},
    turn::{release, Phase},
    work::{claim, session},
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
    let giving_work_back = async {
        // An activity that can't be reached takes half of the time at most: the sessions come after it.
        let work = give_work_back(engine, Deadline::after(limit / 2)).await;
        let sessions = is_given_back(session::give_all_back(engine, deadline).await);
        work && sessions
    };
    let leaving = async {
        // Beside each other: where one partition does not answer, the others do.
        let turns = give_turns_back(engine, deadline);
        let (left, turns, work) = tokio::join!(dispatch::leave(engine, deadline), turns, giving_work_back);
        engine.tasks.close();
        engine.tasks.wait().await;
        is_given_back(left) && turns && work
    };
    tokio::time::timeout_at(deadline.instant(), leaving).await.unwrap_or_else(|_| {
        warn!(?limit, "the time was up before everything was given back: the rest expires");
        false
    })
}

/// Turns are given back uncounted. One that is being committed is left to that.
async fn give_turns_back(engine: &Arc<Engine>, deadline: Deadline) -> bool {
    let mut held: Vec<_> = engine.turns.iter().map(|entry| entry.value().clone()).collect();
    held.sort_by(|a, b| a.token.cmp(&b.token));
    debug!(turns = held.len(), "giving turns back");
    let giving = stream::iter(held).map(|handle| async move {
        let mut state = handle.state.lock().await;
        if state.phase != Phase::Open {
            return true;
        }
        state.phase = Phase::Closed;
        is_given_back(release::give_back(engine, &handle.partition, &handle.token, deadline).await)
    });
    giving.buffer_unordered(CONCURRENCY).fold(true, |all, given| async move { all && given }).await
}

/// Activities are given back uncounted. One that is being completed is left to that.
async fn give_work_back(engine: &Arc<Engine>, deadline: Deadline) -> bool {
    let mut held: Vec<_> = engine.works.iter().map(|entry| entry.value().clone()).collect();
    held.sort_by(|a, b| a.token.cmp(&b.token));
    debug!(activities = held.len(), "giving activities back");
    let giving = stream::iter(held).map(|handle| async move {
        let mut state = handle.state.lock().await;
        if state.closed {
            return true;
        }
        state.closed = true;
        engine.works.remove(&handle.token);
        is_given_back(claim::give_back(engine, &state.document, &handle.token, deadline).await)
    });
    giving.buffer_unordered(CONCURRENCY).fold(true, |all, given| async move { all && given }).await
}

fn is_given_back(outcome: Result<(), StoreError>) -> bool {
    if let Err(error) = &outcome {
        warn!(%error, "what was held here could not be given back: its lock expires");
    }
    outcome.is_ok()
}
