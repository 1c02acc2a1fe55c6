//! Results that every process needs now and then and that are the same for all. One process computes a result and
//! shares it with the others.
//!
//! duroxide asks for the metrics and the queue depths every minute, and for a clean-up of sessions every five minutes,
//! in every process. A worker takes the result that another worker has shared lately. A worker that finds no valid one
//! computes the result and shares it. So the cost does not grow with the number of workers.
//!
//! There is no invariant, because a shared result may be old. Two processes that compute it at once overwrite each
//! other. If a process dies before it has shared the result, the next one computes it. A process without others, or one
//! that fetches no work, always computes the result itself, so its result is exact.

use crate::{
    cosmos::StoreError,
    engine::Engine,
    model::{clock::millis, Millis, SharedResult},
};
use serde::{de::DeserializeOwned, Serialize};
use std::{future::Future, time::Duration};
use tracing::debug;

/// A task whose result is shared, and for how long the result is valid.
#[derive(Clone, Copy)]
pub(crate) struct SharedTask {
    pub(crate) name: &'static str,
    /// Shorter than the interval at which duroxide asks again.
    pub(crate) valid_for: Duration,
}

pub(crate) const SYSTEM_METRICS: SharedTask = SharedTask { name: "metrics", valid_for: Duration::from_secs(45) };
pub(crate) const QUEUE_DEPTHS: SharedTask = SharedTask { name: "depths", valid_for: Duration::from_secs(45) };
pub(crate) const RETENTION: SharedTask = SharedTask { name: "retention", valid_for: Duration::from_secs(25) };
pub(crate) const SESSIONS: SharedTask = SharedTask { name: "sessions", valid_for: Duration::from_secs(240) };

/// Elects one process for a recurring task. Returns whether `who` does the task, or goes on with it: not if another
/// process has been elected lately. The elected process records its name first.
pub(crate) async fn is_elected(engine: &Engine, task: SharedTask, who: &str) -> bool {
    if !engine.discovery.shares_the_container() {
        return true;
    }
    if shared::<String>(engine, task).await.is_some_and(|elected| elected != who) {
        return false;
    }
    share(engine, task, who).await;
    true
}

/// Returns the result that another process has shared lately, or else the result of `compute`.
pub(crate) async fn get_or_compute<T, E, W>(engine: &Engine, task: SharedTask, compute: W) -> Result<Computed<T>, E>
where
    T: Clone + Serialize + DeserializeOwned + Send + Sync,
    W: Future<Output = Result<T, E>>,
{
    if !engine.discovery.shares_the_container() {
        return compute.await.map(Computed::Own);
    }
    if let Some(result) = shared(engine, task).await {
        return Ok(Computed::Others(result));
    }
    let result = compute.await?;
    share(engine, task, result.clone()).await;
    Ok(Computed::Own(result))
}

/// A result, by the process that computed it.
pub(crate) enum Computed<T> {
    Own(T),
    Others(T),
}

impl<T> Computed<T> {
    pub(crate) fn into_inner(self) -> T {
        match self {
            Self::Own(result) | Self::Others(result) => result,
        }
    }

    /// The result, if this process has computed it.
    pub(crate) fn own(self) -> Option<T> {
        match self {
            Self::Own(result) => Some(result),
            Self::Others(_) => None,
        }
    }
}

/// The result that another process has shared, while it is valid.
async fn shared<T: DeserializeOwned>(engine: &Engine, task: SharedTask) -> Option<T> {
    let (partition, id) = (SharedResult::<T>::partition(), SharedResult::<T>::document_id(task.name));
    let found = engine.store.read_eventual::<SharedResult<T>>(&partition, &id, engine.deadline()).await;
    let found = found.map_err(log_failure).ok()??.document;
    is_valid(found.at, engine.now(), task.valid_for).then_some(found.result)
}

/// Whether a result of this time is valid. Clocks may differ in either direction, so a time in the future counts as
/// equally old.
fn is_valid(at: Millis, now: Millis, valid_for: Duration) -> bool {
    at.abs_diff(now) < millis(valid_for)
}

/// Shares a result with the other processes.
async fn share<T: Serialize + Sync>(engine: &Engine, task: SharedTask, result: T) {
    let document = SharedResult::new(task.name, engine.now(), result);
    let written = engine.store.upsert(&document.instance_id, &document.id, &document, None, engine.deadline()).await;
    written.map_err(log_failure).ok();
}

/// A failure is harmless: each process then computes the result itself.
fn log_failure(error: StoreError) {
    debug!(%error, "could not share a result with other workers");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_result_is_valid_for_a_while_whatever_the_clocks_say() {
        let valid_for = Duration::from_secs(45);
        assert!(is_valid(100_000, 144_999, valid_for));
        assert!(is_valid(144_999, 100_000, valid_for), "its clock is ahead");
        assert!(!is_valid(100_000, 145_000, valid_for));
        assert!(!is_valid(200_000, 100_000, valid_for), "it would never become invalid");
    }

    #[test]
    fn a_shared_result_is_invalid_before_the_process_that_computed_it_asks_again() {
        assert!(SYSTEM_METRICS.valid_for < Duration::from_secs(60) && QUEUE_DEPTHS.valid_for < Duration::from_secs(60));
        assert!(SESSIONS.valid_for < Duration::from_secs(300));
    }
}
