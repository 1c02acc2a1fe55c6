//! Inline claims of turns: the write of a message also claims its instance.
//!
//! For a start the batch creates the instance document, locked. For any other message it replaces the document that
//! this process has cached since it committed the last turn, with its history and values. The claim is not made if
//!
//! - the document has a lock, earlier claims, a deletion, deferred messages or the like, or
//! - older work for the instance is ready.
//!
//! The completion of an activity or a child makes the claim only if it is the last for which the instance waits.
//! Earlier completions wait and share its turn.

use super::{FetchFilter, FetchTerms, Reserved, PART_OF_LOCK};
use crate::{
    cosmos::{Applied, BatchOutcome, Deadline, StoreError},
    discovery::{self, TurnCandidate},
    engine::Engine,
    model::{clock::millis, DeliveredDocument, InstanceDocument, MessageDocument, Millis, Operation},
    queue::release_on_drop::ReleaseOnDrop,
    turn::{
        cache::{CachedInstance, Contents},
        claim::{self, ClaimedInstance, TurnClaim},
        instance_id, load, open, release, Runner,
    },
};
use azure_core::http::Etag;
use duroxide::providers::{DispatcherCapabilityFilter, OrchestrationItem, WorkItem};
use std::sync::Arc;
use tracing::debug;

/// The result of a fetch for a turn.
pub(crate) type Turn = (OrchestrationItem, String, u32);

/// The duroxide versions that a dispatcher supports.
#[derive(Clone, Debug)]
pub(crate) struct TurnFilter(pub(crate) Option<DispatcherCapabilityFilter>);

impl FetchFilter for TurnFilter {
    /// The version that the execution is pinned to.
    type Label = Option<semver::Version>;

    fn takes(&self, pinned: &Self::Label) -> bool {
        takes(self.0.as_ref(), pinned.as_ref())
    }
}

/// Whether a dispatcher with this filter accepts an execution that is pinned to this version, if the version is known.
/// A filter without version ranges accepts nothing, not even an unpinned execution.
pub(crate) fn takes(filter: Option<&DispatcherCapabilityFilter>, pinned: Option<&semver::Version>) -> bool {
    let Some(filter) = filter else { return true };
    match pinned {
        Some(pinned) => claim::supports(filter, pinned),
        None => !filter.supported_duroxide_versions.is_empty(),
    }
}

/// The meaning of a message for its instance.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    /// It starts the instance or an execution.
    Start,
    /// It completes an activity or a child for which the instance waits.
    Completion,
    Other,
}

impl MessageKind {
    pub(crate) fn of(item: &WorkItem) -> Self {
        match item {
            WorkItem::StartOrchestration { .. } | WorkItem::ContinueAsNew { .. } => Self::Start,
            WorkItem::ActivityCompleted { .. }
            | WorkItem::ActivityFailed { .. }
            | WorkItem::SubOrchCompleted { .. }
            | WorkItem::SubOrchFailed { .. } => Self::Completion,
            _ => Self::Other,
        }
    }

    pub(crate) fn of_message(message: &MessageDocument) -> Self {
        serde_json::from_str(&message.item).map_or(Self::Other, |item| Self::of(&item))
    }
}

/// An inline claim of a turn, in the batch that writes a message. If it is dropped after it was sent, the claim is
/// released.
pub(crate) struct InlineTurnClaim {
    engine: Arc<Engine>,
    /// `None` once the outcome is known.
    claim: Option<Claim>,
    message: MessageDocument,
    /// Completions that are already queued.
    others: TurnCandidate,
    sent: bool,
}

struct Claim {
    token: String,
    /// The instance document with the lock.
    document: InstanceDocument,
    /// The ETag on which the write depends. `None` if it depends on the absence of the document.
    condition: Option<Etag>,
    contents: Option<Contents>,
    claimed_at: Millis,
    reserved: Reserved<TurnFilter, Turn>,
}

impl InlineTurnClaim {
    /// An inline claim for this message, if a dispatcher waits for it and nothing prevents the claim.
    pub(crate) fn new(engine: &Arc<Engine>, message: &MessageDocument, kind: MessageKind) -> Option<Self> {
        let now = engine.now();
        if !engine.config.inline_claims() || message.due > now || !engine.queue.turns.has_idle() {
            return None;
        }
        let partition = &message.instance_id;
        let known = match (kind, engine.cache.get(partition)) {
            (MessageKind::Start, None) => None,
            (MessageKind::Completion | MessageKind::Other, Some(known)) if may_take_over(engine, &known) => Some(known),
            _ => return None,
        };
        let (document, condition, contents) = match known {
            None => (None, None, Some(load::empty_contents())),
            Some(CachedInstance { document, etag, contents }) => (Some(document), Some(etag), contents),
        };
        let pinned = document.as_ref().and_then(pinned);
        let comes_first = |terms: &FetchTerms<TurnFilter>| engine.discovery.has_turn_for(&terms.filter, now);
        let reserved = engine.queue.turns.reserve(&pinned, comes_first)?;
        let history =
            contents.iter().filter(|_| kind == MessageKind::Completion).flat_map(|contents| contents.history.iter());
        let others = engine.discovery.begin_inline_claim(message, discovery::open(history).count(), now)?;
        let token = engine.new_token();
        let mut document = document.unwrap_or_else(|| InstanceDocument::new(partition.clone(), &token, now));
        let has_inlined = document.inline_message(message);
        document.lock(&token, now.saturating_add(millis(reserved.terms.lock_timeout)));
        if !has_inlined {
            // The message leads to the instance, so no poll need find the claim.
            document.due = None;
        }
        document.claim.claims.push(now);
        let claim = Claim { token, document, condition, contents, claimed_at: now, reserved };
        Some(Self { engine: engine.clone(), claim: Some(claim), message: message.clone(), others, sent: false })
    }

    /// Whether the message is inlined into the instance document. Otherwise the same batch must create it.
    pub(crate) fn has_inlined(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.document.has_inlined(&self.message.id))
    }

    /// The operation that claims the instance. It must follow the message in the same batch.
    pub(crate) fn operation(&mut self) -> Result<Operation, StoreError> {
        let Some(claim) = &self.claim else {
            return Err(StoreError::Malformed { detail: "an inline claim was settled before it was sent".to_owned() });
        };
        let operation = match &claim.condition {
            None => Operation::create(&claim.document)?,
            Some(etag) => Operation::replace(instance_id(), &claim.document, Some(etag))?,
        };
        self.sent = true;
        Ok(operation)
    }

    /// The deadline of the batch with this claim, for a call with this deadline.
    pub(crate) fn deadline(&self, deadline: Deadline) -> Deadline {
        let lock = self.claim.as_ref().map(|claim| claim.reserved.terms.lock_timeout);
        lock.map_or(deadline, |lock| deadline.min(Deadline::after(lock / PART_OF_LOCK)))
    }

    /// The batch succeeded, with these ETags of the message, if it was created, and of the instance document. The
    /// waiting dispatcher gets the turn.
    pub(crate) fn done(mut self, message: Option<Etag>, instance: Option<Etag>) {
        // Without the ETag of the instance document the answer is of no use.
        let Some(instance) = instance else { return self.verify_later() };
        let Some(claim) = self.claim.take() else { return };
        let (engine, document, others) = (self.engine.clone(), self.message.clone(), self.others.clone());
        // The client that started the instance reads it next.
        let known = CachedInstance {
            document: claim.document.clone(),
            etag: instance.clone(),
            contents: claim.contents.clone(),
        };
        engine.cache.put(&document.instance_id, known);
        let serving = serve(self.engine.clone(), claim, (document, message, others), None, instance);
        engine.spawn(serving);
    }

    /// The batch may have succeeded without an answer, and the message is written. A task reads the instance document.
    /// If the claim did not succeed, the message becomes a candidate.
    pub(crate) fn verify_later(self) {
        let engine = self.engine.clone();
        engine.spawn(async move {
            let (engine, message) = (self.engine.clone(), self.message.clone());
            if !self.settle().await {
                discovery::message_written(&engine, message, None, None).await;
            }
        });
    }

    /// The batch may have succeeded without an answer. Returns whether it did; the waiting dispatcher then gets the
    /// turn. If a read cannot tell, the possible claim is released.
    async fn settle(mut self) -> bool {
        let (engine, partition) = (self.engine.clone(), self.message.instance_id.clone());
        let found = match engine.read_latest(&partition, engine.deadline()).await {
            Ok(found) => found,
            Err(error) => {
                debug!(instance_id = partition.instance_id(), %error, "could not verify an inline claim, releasing it");
                return false;
            }
        };
        let Some(claim) = self.claim.take() else { return false };
        match found {
            Some(found) if found.document.held_by(&claim.token) => {
                let message = (self.message.clone(), None, self.others.clone());
                engine.spawn(serve(self.engine.clone(), claim, message, Some(found.document), found.etag));
                true
            }
            _ => {
                engine.cache.forget(&partition);
                engine.discovery.end_inline_claim(&self.message, self.others.clone());
                false
            }
        }
    }

    /// The batch failed because of the claim. Nothing was written, and the cached instance is stale.
    pub(crate) fn refused(mut self) {
        crate::telemetry::claim_race("inline");
        self.engine.cache.forget(&self.message.instance_id);
        self.sent = false;
    }

    /// The batch failed for another reason.
    pub(crate) fn withdraw(mut self) {
        self.sent = false;
    }
}

impl Drop for InlineTurnClaim {
    fn drop(&mut self) {
        let Some(Claim { token, document, condition, .. }) = self.claim.take() else { return };
        self.engine.discovery.end_inline_claim(&self.message, self.others.clone());
        if self.sent {
            debug!(instance_id = document.instance_id.instance_id(), "releasing an inline claim of a turn");
            release::release_unknown_claim(&self.engine, &document, token, condition, self.engine.now());
        }
    }
}

/// Whether a cached instance can be claimed as it is.
fn may_take_over(engine: &Engine, CachedInstance { document, contents, .. }: &CachedInstance) -> bool {
    let is_free = document.exists()
        && !document.execution_has_ended()
        && document.claim.lock.is_none()
        && document.claim.claims.is_empty()
        && document.removal.deleting.is_none()
        && document.due.is_none()
        && !document.needs_recovery();
    let is_whole = contents.as_ref().is_some_and(|contents| contents.kv.is_some());
    // Messages of other processes must not wait for as long as this process sends some itself.
    let queried = engine.discovery.queried_recently(&document.instance_id);
    is_free && is_whole && queried
}

pub(super) fn pinned(document: &InstanceDocument) -> Option<semver::Version> {
    document.current.pinned.as_deref().and_then(|version| semver::Version::parse(version).ok())
}

/// Loads the turn of a successful claim and offers it to the waiting dispatcher. `found` is the instance document, if
/// it was read.
async fn serve(
    engine: Arc<Engine>,
    claim: Claim,
    (message, message_etag, others): (MessageDocument, Option<Etag>, TurnCandidate),
    found: Option<InstanceDocument>,
    etag: Etag,
) {
    let Claim { token, document, contents, claimed_at, reserved, .. } = claim;
    let document = found.unwrap_or(document);
    let partition = document.instance_id.clone();
    let mut candidate = match document.has_inlined(&message.id) {
        true => TurnCandidate::without_messages(partition.clone()),
        false => TurnCandidate::of_message(message.clone(), message_etag),
    };
    candidate.merge(others.clone());
    let runner = Runner { terms: reserved.terms.clone(), in_a_row: 0 };
    let ours = ClaimedInstance { token, document, etag, claimed_at, runner, contents };
    let _under_way = engine.discovery.claim_in_flight();
    match open_and_offer(&engine, &candidate, ours, Some(reserved)).await {
        Ok(true) => {}
        Ok(false) => engine.discovery.end_inline_claim(&message, others),
        Err(error) => {
            debug!(instance_id = partition.instance_id(), %error, "releasing an inline claim of a turn");
            engine.discovery.end_inline_claim(&message, others);
        }
    }
}

/// Loads the turn of a claimed instance and offers it to the waiting dispatcher. Returns `false` if there is nothing to
/// run.
pub(super) async fn open_and_offer(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    ours: ClaimedInstance,
    reserved: Option<Reserved<TurnFilter, Turn>>,
) -> Result<bool, StoreError> {
    let (partition, terms) = (candidate.partition.clone(), ours.runner.terms.clone());
    let (label, until) = (pinned(&ours.document), ours.document.claim.lock.as_ref().map_or(0, |lock| lock.until));
    let TurnClaim::Turn(turn) = open::open(engine, candidate, ours).await? else { return Ok(false) };
    engine.discovery.turn_holds(&partition, until);
    let engine_too = engine.clone();
    let release_claim = move |turn: Turn| release::release_claim_later(&engine_too, &partition, turn.1, until, 0);
    engine.queue.turns.put_claimed(engine, (label, &terms), ReleaseOnDrop::new(*turn, release_claim), reserved);
    Ok(true)
}

/// The outcome of a write that should contain an inline claim.
pub(crate) enum InlineWrite {
    /// The message is written. A dispatcher has its turn, or a task finds out.
    Done,
    /// The message is written, now or before, and the claim did not succeed.
    Written,
    /// The message must be written without a claim. It may be written already, with its answer lost.
    Plain(Applied),
}

/// Creates a message and claims its instance in the same batch, if a local dispatcher is waiting.
pub(crate) async fn write_with_inline_claim<T: serde::Serialize + Sync>(
    engine: &Arc<Engine>,
    message: &MessageDocument,
    body: &T,
    kind: MessageKind,
    deadline: Deadline,
) -> Result<InlineWrite, StoreError> {
    let Some(mut offer) = InlineTurnClaim::new(engine, message, kind) else {
        return Ok(InlineWrite::Plain(Applied::No));
    };
    let has_inlined = offer.has_inlined();
    let letter = match (has_inlined, message.delivered) {
        (false, _) => Some(Operation::create(body)?),
        // The marker makes the batch fail for a copy of a message that was delivered before.
        (true, true) => {
            Some(Operation::create(&DeliveredDocument::new(message.id.clone(), message.instance_id.clone()))?)
        }
        (true, false) => None,
    };
    let at = usize::from(letter.is_some());
    let operations: Vec<Operation> = letter.into_iter().chain([offer.operation()?]).collect();
    let bounded = offer.deadline(deadline);
    match engine.store.batch_noting_repeats(&message.instance_id, &operations, bounded).await {
        Ok((BatchOutcome::Committed(committed), _)) => {
            let etag = committed.etag(0).filter(|_| !has_inlined).cloned();
            offer.done(etag, committed.etag(at).cloned());
            Ok(InlineWrite::Done)
        }
        // An earlier request of this call, or another delivery of the same message, has written it.
        Ok((BatchOutcome::RolledBack(back), applied)) if back.index < at && back.status == 409 => {
            if applied == Applied::Perhaps {
                offer.verify_later();
                return Ok(InlineWrite::Done);
            }
            offer.withdraw();
            Ok(InlineWrite::Written)
        }
        Ok((BatchOutcome::RolledBack(back), applied)) if back.index == at && matches!(back.status, 404 | 409 | 412) => {
            // An earlier request of this call may have written the document for which the batch failed.
            if at == 0 && applied == Applied::Perhaps {
                let is_ours = offer.settle().await;
                return Ok(if is_ours { InlineWrite::Done } else { InlineWrite::Plain(applied) });
            }
            offer.refused();
            Ok(InlineWrite::Plain(applied))
        }
        Ok((BatchOutcome::RolledBack(_), applied)) => {
            offer.withdraw();
            Ok(InlineWrite::Plain(applied))
        }
        // The write without a claim finds out the outcome, or returns the error.
        Err(_) if !deadline.passed() => Ok(InlineWrite::Plain(Applied::Perhaps)),
        Err(error) => Err(error),
    }
}
