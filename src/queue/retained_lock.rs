//! The retained lock: a commit keeps the lock for the next turn, if work already waits for the instance.
//!
//! Such work is a message that arrived during the turn, or the start with which the turn continues as new. The
//! dispatcher whose turn has ended takes the next turn. Completions of activities and children are no reason while more
//! of them are to come, because they share a turn.
//!
//! Other workers get their chance: after [`MAX_IN_A_ROW`] turns a commit releases the lock.

use super::{
    turn::{open_and_offer, pinned},
    FetchFilter,
};
use crate::{
    cosmos::Versioned,
    discovery::{self, TurnCandidate},
    engine::Engine,
    model::{clock::millis, kind, status, DocumentId, InstanceDocument, MessageDocument, Millis, Operation, Partition},
    turn::{cache::Contents, claim::ClaimedInstance, plan::Ack, release, Runner, TurnHandle, TurnState},
};
use azure_core::http::Etag;
use duroxide::providers::WorkItem;
use std::sync::Arc;
use tracing::debug;

/// This many turns in a row retain the lock at most.
const MAX_IN_A_ROW: u32 = 8;

/// The claim of the next turn, in the commit of a turn. If it is dropped after it was sent, the claim is released.
pub(super) struct RetainedLock {
    engine: Arc<Engine>,
    partition: Partition,
    token: String,
    runner: Runner,
    claimed_at: Millis,
    /// The document with the lock, and the ETag on which its write depends.
    sent: Option<(InstanceDocument, Etag)>,
}

impl RetainedLock {
    /// A claim of the next turn, if work waits for it and no older work waits for the dispatcher.
    pub(super) fn new(engine: &Arc<Engine>, handle: &TurnHandle, state: &TurnState, ack: &Ack) -> Option<Self> {
        let runner = Runner { in_a_row: state.runner.in_a_row + 1, ..state.runner.clone() };
        let comes_back = runner.terms.patient && !engine.stopping.is_cancelled();
        if !engine.config.inline_claims() || !comes_back || runner.in_a_row > MAX_IN_A_ROW {
            return None;
        }
        let now = engine.now();
        let goes_on = match ack.metadata.status.as_deref().is_some_and(status::execution_has_ended) {
            true => continues_as_new(&handle.partition, ack),
            false => something_waits(engine, &handle.partition, state, ack, now),
        };
        if !goes_on || engine.discovery.has_turn_for(&runner.terms.filter, now) {
            return None;
        }
        let (engine, partition, token) = (engine.clone(), handle.partition.clone(), engine.new_token());
        Some(Self { engine, partition, token, runner, claimed_at: now, sent: None })
    }

    /// Locks the document that a commit writes, if nothing prevents it. An earlier batch with this claim has failed.
    /// `operations` are the other writes of the commit.
    pub(super) fn lock(&mut self, document: &mut InstanceDocument, operations: &mut Vec<Operation>) {
        self.sent = None;
        let is_free = document.removal.deleting.is_none()
            && document.due.is_none()
            && !document.waiting.deferred
            && !document.needs_recovery()
            && self.runner.terms.filter.takes(&pinned(document));
        if is_free {
            self.claimed_at = self.engine.now();
            inline_start(document, operations);
            document.lock(&self.token, self.claimed_at.saturating_add(millis(self.runner.terms.lock_timeout)));
            document.claim.claims.push(self.claimed_at);
        }
    }

    /// The commit is about to be sent with this document, on condition of this ETag.
    pub(super) fn sent(&mut self, document: &InstanceDocument, condition: &Etag) {
        if document.held_by(&self.token) {
            self.sent = Some((document.clone(), condition.clone()));
        }
    }

    /// The commit failed, or it is sent without the claim.
    pub(super) fn withdraw(&mut self) {
        self.sent = None;
    }

    /// The commit succeeded. The dispatcher gets the next turn when it fetches. `contents` are the cached contents of
    /// the instance. Returns whether there is a next turn.
    pub(super) fn serve(mut self, etag: Etag, contents: Option<Contents>) -> bool {
        let Some((document, _)) = self.sent.take() else { return false };
        let (engine, partition) = (self.engine.clone(), self.partition.clone());
        let until = document.claim.lock.as_ref().map_or(0, |lock| lock.until);
        let history = contents.as_ref().map(|contents| contents.history.as_slice());
        let candidate = engine.discovery.turn_retained(&partition, history, until);
        let candidate = candidate.unwrap_or_else(|| match document.waiting.inlined {
            Some(_) => TurnCandidate::without_messages(partition.clone()),
            None => TurnCandidate::new(partition.clone(), false),
        });
        let (token, claimed_at, runner) = (self.token.clone(), self.claimed_at, self.runner.clone());
        let in_flight = engine.discovery.claim_in_flight();
        let ours = ClaimedInstance { token, document, etag, claimed_at, runner, contents };
        self.engine.spawn(async move {
            let _under_way = in_flight;
            match open_and_offer(&engine, &candidate, ours, None).await {
                Ok(true) => {}
                Ok(false) => engine.discovery.claim_failed(&candidate, claimed_at),
                Err(error) => {
                    debug!(instance_id = partition.instance_id(), %error, "releasing a retained lock");
                    engine.discovery.claim_failed(&candidate, claimed_at);
                    engine.discovery.turn_returned(&partition, engine.clock.after(error.pause()));
                }
            }
        });
        true
    }
}

impl Drop for RetainedLock {
    fn drop(&mut self) {
        let Some((document, condition)) = self.sent.take() else { return };
        debug!(instance_id = self.partition.instance_id(), "releasing a retained lock of unknown outcome");
        let (token, due) = (self.token.clone(), self.engine.now());
        release::release_unknown_claim(&self.engine, &document, token, Some(condition), due);
    }
}

/// Inlines the start with which the turn continues as new, so it needs no document of its own.
fn inline_start(document: &mut InstanceDocument, operations: &mut Vec<Operation>) {
    let start = operations.iter().enumerate().find_map(|(at, operation)| {
        let Operation::Create { document: created } = operation else { return None };
        let is_start = created.get("type").is_some_and(|kind| kind == kind::MESSAGE)
            && created.get("starts").is_some_and(|starts| starts == true);
        let message = is_start.then(|| serde_json::from_value::<MessageDocument>(created.clone()).ok()).flatten()?;
        Some((at, message))
    });
    if let Some((at, _)) = start.filter(|(_, message)| document.inline_message(message)) {
        operations.remove(at);
    }
}

fn continues_as_new(partition: &Partition, ack: &Ack) -> bool {
    ack.orchestrator_items.iter().any(|item| {
        matches!(item, WorkItem::ContinueAsNew { instance, .. } if Some(instance.as_str()) == partition.instance_id())
    })
}

/// Whether messages are due that the turn did not take.
fn something_waits(engine: &Engine, partition: &Partition, state: &TurnState, ack: &Ack, now: Millis) -> bool {
    let history = state.contents.iter().flat_map(|contents| contents.history.iter());
    let to_come = discovery::open(history.chain(&ack.events)).count();
    let waits = engine.discovery.peek_turn(partition, |candidate| {
        let is_new = |id: &DocumentId| {
            !state.taken.iter().any(|taken| &taken.document.id == id) && !engine.discovery.was_consumed(partition, id)
        };
        let is_there =
            |message: &&Versioned<MessageDocument>| message.document.due <= now && is_new(&message.document.id);
        let there = candidate.messages.iter().filter(is_there).count();
        there > 0 && (!candidate.waits_for_others(now) || there >= to_come)
    });
    waits.unwrap_or(false)
}
