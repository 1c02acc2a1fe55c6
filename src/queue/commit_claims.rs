//! The inline claims of a commit: activities for waiting workers, and the next turn of the instance.

use super::{activity::ScheduledClaims, retained_lock::RetainedLock};
use crate::{
    cosmos::Committed,
    engine::Engine,
    model::{InstanceDocument, Millis, Operation},
    turn::{cache::Contents, plan::Ack, TurnHandle, TurnState},
};
use azure_core::http::Etag;
use std::sync::Arc;

/// The inline claims in a commit. If they are dropped after they were sent, the claims are released.
pub(crate) struct CommitClaims {
    pub(crate) activities: ScheduledClaims,
    next: Option<RetainedLock>,
}

impl CommitClaims {
    pub(crate) fn new(engine: &Arc<Engine>, handle: &TurnHandle, state: &TurnState, ack: &Ack) -> Self {
        let activities = ScheduledClaims::new(engine, &handle.partition, ack);
        Self { activities, next: RetainedLock::new(engine, handle, state, ack) }
    }

    /// Locks the document that the commit writes, if the commit claims the next turn. An earlier batch with these
    /// claims has failed.
    pub(crate) fn lock(&mut self, document: &mut InstanceDocument, operations: &mut Vec<Operation>) {
        if let Some(next) = &mut self.next {
            next.lock(document, operations);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.activities.is_empty() && self.next.is_none()
    }

    /// The commit is about to be sent with this document. It depends on this ETag of the instance document and cannot
    /// happen after `until`.
    pub(crate) fn sent(&mut self, document: &InstanceDocument, condition: &Etag, until: Millis) {
        self.activities.sent(condition, until);
        if let Some(next) = &mut self.next {
            next.sent(document, condition);
        }
    }

    /// The commit failed, or it is planned without the claims.
    pub(crate) fn withdraw(&mut self) {
        self.activities.withdraw();
        if let Some(mut next) = self.next.take() {
            next.withdraw();
        }
    }

    /// The commit and its claims succeeded. `offset` is the index of the first of `operations` in the batch.
    pub(crate) fn done(&mut self, operations: &[Operation], committed: &Committed, offset: usize) {
        self.activities.done(operations, committed, offset);
    }

    /// Gives the claimed items to the waiting dispatchers. `instance` has the ETag that the commit wrote and the cached
    /// contents, if they are known. Returns whether the next turn is among the items.
    pub(crate) fn serve(self, instance: Option<(Etag, Option<Contents>)>) -> bool {
        self.activities.serve();
        match (self.next, instance) {
            (Some(next), Some((etag, contents))) => next.serve(etag, contents),
            _ => false,
        }
    }
}
