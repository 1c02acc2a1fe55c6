//! What the commit of a turn claims: its activities for workers that wait, and the next turn of the instance.

use super::{activity::ScheduledClaims, retained_lock::RetainedLock};
use crate::{
    cosmos::Committed,
    engine::Engine,
    model::{InstanceDocument, Millis, Operation},
    turn::{cache::Contents, plan::Ack, TurnHandle, TurnState},
};
use azure_core::http::Etag;
use std::sync::Arc;

/// Claims that go with a commit. Dropped after they were sent, they are given back.
pub(crate) struct CommitClaims {
    pub(crate) activities: ScheduledClaims,
    next: Option<RetainedLock>,
}

impl CommitClaims {
    pub(crate) fn new(engine: &Arc<Engine>, handle: &TurnHandle, state: &TurnState, ack: &Ack) -> Self {
        let activities = ScheduledClaims::new(engine, &handle.partition, ack);
        Self { activities, next: RetainedLock::new(engine, handle, state, ack) }
    }

    /// Locks the document that the commit leaves, if the next turn goes with it. What was sent before was refused.
    pub(crate) fn lock(&mut self, document: &mut InstanceDocument, operations: &mut Vec<Operation>) {
        if let Some(next) = &mut self.next {
            next.lock(document, operations);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.activities.is_empty() && self.next.is_none()
    }

    /// The commit is about to be sent with this document: it depends on this state of the instance, and can't happen after `until`.
    pub(crate) fn sent(&mut self, document: &InstanceDocument, condition: &Etag, until: Millis) {
        self.activities.sent(condition, until);
        if let Some(next) = &mut self.next {
            next.sent(document, condition);
        }
    }

    /// The commit did not happen, or is to be planned without them.
    pub(crate) fn withdraw(&mut self) {
        self.activities.withdraw();
        if let Some(mut next) = self.next.take() {
            next.withdraw();
        }
    }

    /// The commit is there, and what it claims is ours. `offset` is where `operations` begin in the batch.
    pub(crate) fn done(&mut self, operations: &[Operation], committed: &Committed, offset: usize) {
        self.activities.done(operations, committed, offset);
    }

    /// Whoever waits gets what is claimed; `instance` is the ETag that the commit has left and what is known by now, if anything is. Whether the next
    /// turn is among it.
    pub(crate) fn serve(self, instance: Option<(Etag, Option<Contents>)>) -> bool {
        self.activities.serve();
        match (self.next, instance) {
            (Some(next), Some((etag, contents))) => next.serve(etag, contents),
            _ => false,
        }
    }
}
