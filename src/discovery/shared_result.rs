//! What every runtime asks for now and then, and what is the same for all: worked out by one process, kept for the others.
//!
//! duroxide asks for the metrics and the queues' depths every minute and has sessions cleaned up every five, in every
//! process. A member of a fleet takes what another has kept lately; who finds nothing young enough activities it out and keeps it.
//! So the cost does not grow with their number.
//!
//! Invariant: none. It is a candidate that grows old: two that work it out at once overwrite each other, one that dies before it
//! has kept it leaves that to the next. A process that is alone, or that only calls, activities everything out: its answer is exact.

use crate::{
    cosmos::StoreError,
    engine::Engine,
    model::{clock::millis, Millis, SharedResult},
};
use serde::{de::DeserializeOwned, Serialize};
use std::{future::Future, time::Duration};
use tracing::debug;

/// For how long the answer to a question serves others.
#[derive(Clone, Copy)]
pub(crate) struct SharedTask {
    pub(crate) name: &'static str,
    /// Less than the pause after which duroxide asks again.
    pub(crate) valid_for: Duration,
}

pub(crate) const SYSTEM_METRICS: SharedTask = SharedTask { name: "metrics", valid_for: Duration::from_secs(45) };
pub(crate) const QUEUE_DEPTHS: SharedTask = SharedTask { name: "depths", valid_for: Duration::from_secs(45) };
pub(crate) const RETENTION: SharedTask = SharedTask { name: "retention", valid_for: Duration::from_secs(25) };
pub(crate) const SESSIONS: SharedTask = SharedTask { name: "sessions", valid_for: Duration::from_secs(240) };

/// Whether `who` does, or goes on with, what one of all does now and then: not where another has said so lately. Who does says so first.
pub(crate) async fn is_elected(engine: &Engine, question: SharedTask, who: &str) -> bool {
    if !engine.discovery.shares_the_container() {
        return true;
    }
    if kept::<String>(engine, question).await.is_some_and(|whose| whose != who) {
        return false;
    }
    keep(engine, question, who).await;
    true
}

/// What another process has worked out lately, or what `work_out` says.
pub(crate) async fn get_or_compute<T, E, W>(
    engine: &Engine,
    question: SharedTask,
    work_out: W,
) -> Result<Computed<T>, E>
where
    T: Clone + Serialize + DeserializeOwned + Send + Sync,
    W: Future<Output = Result<T, E>>,
{
    if !engine.discovery.shares_the_container() {
        return work_out.await.map(Computed::Own);
    }
    if let Some(kept) = kept(engine, question).await {
        return Ok(Computed::Others(kept));
    }
    let answer = work_out.await?;
    keep(engine, question, answer.clone()).await;
    Ok(Computed::Own(answer))
}

/// Who has worked it out.
pub(crate) enum Computed<T> {
    Own(T),
    Others(T),
}

impl<T> Computed<T> {
    pub(crate) fn into_inner(self) -> T {
        match self {
            Self::Own(answer) | Self::Others(answer) => answer,
        }
    }

    /// What this process has done itself.
    pub(crate) fn own(self) -> Option<T> {
        match self {
            Self::Own(answer) => Some(answer),
            Self::Others(_) => None,
        }
    }
}

async fn kept<T: DeserializeOwned>(engine: &Engine, question: SharedTask) -> Option<T> {
    let (partition, id) = (SharedResult::<T>::partition(), SharedResult::<T>::document_id(question.name));
    let found = engine.store.read_eventual::<SharedResult<T>>(&partition, &id, engine.deadline()).await;
    let found = found.map_err(unimportant).ok()??.document;
    is_young(found.at, engine.now(), question.valid_for).then_some(found.answer)
}

/// Clocks may be off, to either side: what seems to be of the future is as old.
fn is_young(at: Millis, now: Millis, valid_for: Duration) -> bool {
    at.abs_diff(now) < millis(valid_for)
}

async fn keep<T: Serialize + Sync>(engine: &Engine, question: SharedTask, answer: T) {
    let kept = SharedResult::new(question.name, engine.now(), answer);
    let written = engine.store.upsert(&kept.instance_id, &kept.id, &kept, None, engine.deadline()).await;
    written.map_err(unimportant).ok();
}

/// Others work it out for themselves.
fn unimportant(error: StoreError) {
    debug!(%error, "what all members ask for could not be shared");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_serves_for_a_while_whatever_the_clocks_say() {
        let valid_for = Duration::from_secs(45);
        assert!(is_young(100_000, 144_999, valid_for));
        assert!(is_young(144_999, 100_000, valid_for), "its clock is ahead");
        assert!(!is_young(100_000, 145_000, valid_for));
        assert!(!is_young(200_000, 100_000, valid_for), "it would never grow old");
    }

    #[test]
    fn answers_are_younger_than_the_next_question_of_the_one_who_worked_them_out() {
        assert!(SYSTEM_METRICS.valid_for < Duration::from_secs(60) && QUEUE_DEPTHS.valid_for < Duration::from_secs(60));
        assert!(SESSIONS.valid_for < Duration::from_secs(300));
    }
}
