//! Turns: the claim of an instance goes with the write of a message for it.
//!
//! For a start that is the creation of the instance's document, locked. For any other message it is a replacement of the document
//! that this process knows, with its history and values, since it has committed the last turn; nothing may be in the way (a lock,
//! earlier claims, a deletion, deferred messages …), and nothing may be ready for the instance that came before. The end of an activity,
//! or of a child, carries the claim only if it is the last that the instance waits for; the others, which wait for it, share its turn.

use super::{FetchFilter, FetchTerms, Reserved, PART_OF_LOCK};
use crate::{
    cosmos::{Applied, BatchOutcome, Deadline, StoreError},
    discovery::{self, TurnCandidate},
    engine::Engine,
    model::{clock::millis, DeliveredDocument, InstanceDocument, MessageDocument, Millis, Operation},
    queue::release_on_drop::ReleaseOnDrop,
    turn::{
        cache::{Contents, Known},
        claim::{self, Ours, TurnClaim},
        instance_id, load, open, release, Runner,
    },
};
use azure_core::http::Etag;
use duroxide::providers::{DispatcherCapabilityFilter, OrchestrationItem, WorkItem};
use std::sync::Arc;
use tracing::debug;

/// What a dispatcher of turns gets.
pub(crate) type Turn = (OrchestrationItem, String, u32);

/// The versions that a dispatcher runs.
#[derive(Clone, Debug)]
pub(crate) struct TurnFilter(pub(crate) Option<DispatcherCapabilityFilter>);

impl FetchFilter for TurnFilter {
    /// The version that the execution is pinned to.
    type Label = Option<semver::Version>;

    fn takes(&self, pinned: &Self::Label) -> bool {
        takes(self.0.as_ref(), pinned.as_ref())
    }
}

/// Whether a dispatcher with this filter runs an execution that is pinned so, as far as that is known. A filter without
/// version ranges takes nothing: no unpinned execution either.
pub(crate) fn takes(filter: Option<&DispatcherCapabilityFilter>, pinned: Option<&semver::Version>) -> bool {
    let Some(filter) = filter else { return true };
    match pinned {
        Some(pinned) => claim::supports(filter, pinned),
        None => !filter.supported_duroxide_versions.is_empty(),
    }
}

/// What a message is to its instance.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It begins it.
    Start,
    /// It ends one of the things that it waits for.
    End,
    Other,
}

impl Kind {
    pub(crate) fn of(item: &WorkItem) -> Self {
        match item {
            WorkItem::StartOrchestration { .. } | WorkItem::ContinueAsNew { .. } => Self::Start,
            WorkItem::ActivityCompleted { .. }
            | WorkItem::ActivityFailed { .. }
            | WorkItem::SubOrchCompleted { .. }
            | WorkItem::SubOrchFailed { .. } => Self::End,
            _ => Self::Other,
        }
    }

    pub(crate) fn of_message(message: &MessageDocument) -> Self {
        serde_json::from_str(&message.item).map_or(Self::Other, |item| Self::of(&item))
    }
}

/// A claim that goes with the write of a message. Dropped after it was sent, it is given back.
pub(crate) struct InlineTurnClaim {
    engine: Arc<Engine>,
    /// None once it is settled.
    claim: Option<Claim>,
    message: MessageDocument,
    /// Ends that are there already.
    others: TurnCandidate,
    sent: bool,
}

struct Claim {
    token: String,
    /// The instance's document with the lock.
    document: InstanceDocument,
    /// What its write depends on; none where it depends on there being no document.
    condition: Option<Etag>,
    contents: Option<Contents>,
    claimed_at: Millis,
    reserved: Reserved<TurnFilter, Turn>,
}

impl InlineTurnClaim {
    /// A claim for this message, if a dispatcher waits for it and nothing is in the way.
    pub(crate) fn new(engine: &Arc<Engine>, message: &MessageDocument, kind: Kind) -> Option<Self> {
        let now = engine.now();
        if !engine.config.inline_claims() || message.due > now || !engine.queue.turns.has_idle() {
            return None;
        }
        let partition = &message.instance_id;
        let known = match (kind, engine.cache.get(partition)) {
            (Kind::Start, None) => None,
            (Kind::End | Kind::Other, Some(known)) if may_take_over(engine, &known) => Some(known),
            _ => return None,
        };
        let (document, condition, contents) = match known {
            None => (None, None, Some(load::nothing())),
            Some(Known { document, etag, contents }) => (Some(document), Some(etag), contents),
        };
        let pinned = document.as_ref().and_then(pinned);
        let comes_first = |terms: &FetchTerms<TurnFilter>| engine.discovery.has_turn_for(&terms.filter, now);
        let reserved = engine.queue.turns.reserve(&pinned, comes_first)?;
        let history = contents.iter().filter(|_| kind == Kind::End).flat_map(|contents| contents.history.iter());
        let others = engine.discovery.begin_inline_claim(message, discovery::open(history).count(), now)?;
        let token = engine.new_token();
        let mut document = document.unwrap_or_else(|| InstanceDocument::new(partition.clone(), &token, now));
        let has_inlined = document.inline_message(message);
        document.hold(&token, now.saturating_add(millis(reserved.terms.lock_timeout)));
        if !has_inlined {
            // Its message tells of it: nobody need look for the claim.
            document.due = None;
        }
        document.claims.push(now);
        let claim = Claim { token, document, condition, contents, claimed_at: now, reserved };
        Some(Self { engine: engine.clone(), claim: Some(claim), message: message.clone(), others, sent: false })
    }

    /// Whether the message goes into the instance's document. Otherwise it is to be created in the same batch.
    pub(crate) fn has_inlined(&self) -> bool {
        self.claim.as_ref().is_some_and(|claim| claim.document.has_inlined(&self.message.id))
    }

    /// The write that makes it ours: to be sent in one batch with the message, after it.
    pub(crate) fn operation(&mut self) -> Result<Operation, StoreError> {
        let Some(claim) = &self.claim else {
            return Err(StoreError::Malformed { detail: "a hand-over was settled before it was sent".to_owned() });
        };
        let operation = match &claim.condition {
            None => Operation::create(&claim.document)?,
            Some(etag) => Operation::replace(instance_id(), &claim.document, Some(etag))?,
        };
        self.sent = true;
        Ok(operation)
    }

    /// Until when the batch is tried with it, of a call that has until `deadline`.
    pub(crate) fn deadline(&self, deadline: Deadline) -> Deadline {
        let lock = self.claim.as_ref().map(|claim| claim.reserved.terms.lock_timeout);
        lock.map_or(deadline, |lock| deadline.min(Deadline::after(lock / PART_OF_LOCK)))
    }

    /// The batch is done, with these ETags of the message, if it was created, and of the instance's document: whoever waits gets the turn.
    pub(crate) fn done(mut self, message: Option<Etag>, instance: Option<Etag>) {
        // An answer without it is none.
        let Some(instance) = instance else { return self.look() };
        let Some(claim) = self.claim.take() else { return };
        let (engine, document, others) = (self.engine.clone(), self.message.clone(), self.others.clone());
        // Whoever has started it asks for it next.
        let known =
            Known { document: claim.document.clone(), etag: instance.clone(), contents: claim.contents.clone() };
        engine.cache.put(&document.instance_id, known);
        let serving = serve(self.engine.clone(), claim, (document, message, others), None, instance);
        engine.spawn(serving);
    }

    /// The batch may be done, its answer lost; the message is there. What else is there tells whose it is: where it is not ours, it is put
    /// into the queue.
    pub(crate) fn look(self) {
        let engine = self.engine.clone();
        engine.spawn(async move {
            let (engine, message) = (self.engine.clone(), self.message.clone());
            if !self.settle().await {
                discovery::message_written(&engine, message, None, None).await;
            }
        });
    }

    /// The batch may be done, its answer lost. Whether it is: then whoever waits gets the turn. Where that can't be found out, what may have been
    /// claimed is given back.
    async fn settle(mut self) -> bool {
        let (engine, partition) = (self.engine.clone(), self.message.instance_id.clone());
        let found = match engine.read_latest(&partition, engine.deadline()).await {
            Ok(found) => found,
            Err(error) => {
                debug!(instance_id = partition.instance_id(), %error, "what may have been handed over is given back");
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

    /// The batch was refused because of it: nothing was written, and what was known of the instance is of the past.
    pub(crate) fn refused(mut self) {
        crate::telemetry::claim_race("hand-over");
        self.engine.cache.forget(&self.message.instance_id);
        self.sent = false;
    }

    /// The batch was refused for another reason.
    pub(crate) fn withdraw(mut self) {
        self.sent = false;
    }
}

impl Drop for InlineTurnClaim {
    fn drop(&mut self) {
        let Some(Claim { token, document, condition, .. }) = self.claim.take() else { return };
        self.engine.discovery.end_inline_claim(&self.message, self.others.clone());
        if self.sent {
            debug!(instance_id = document.instance_id.instance_id(), "giving back what may have been handed over");
            release::release_unknown_claim(&self.engine, &document, token, condition, self.engine.now());
        }
    }
}

/// Whether what is known of an instance can be claimed as it is.
fn may_take_over(engine: &Engine, Known { document, contents, .. }: &Known) -> bool {
    let is_free = document.exists()
        && !document.execution_has_ended()
        && document.lock.is_none()
        && document.claims.is_empty()
        && document.deleting.is_none()
        && document.due.is_none()
        && !document.needs_recovery();
    let is_whole = contents.as_ref().is_some_and(|contents| contents.kv.is_some());
    // What others have sent must not wait for as long as this process has something to say.
    let has_asked = engine.discovery.has_asked(&document.instance_id);
    is_free && is_whole && has_asked
}

pub(super) fn pinned(document: &InstanceDocument) -> Option<semver::Version> {
    document.pinned.as_deref().and_then(|version| semver::Version::parse(version).ok())
}

/// Makes a turn of a claim that is ours and lays it on the counter. `found` is the document, where it was read.
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
        true => TurnCandidate::of_nothing(partition.clone()),
        false => TurnCandidate::of_message(message.clone(), message_etag),
    };
    candidate.merge(others.clone());
    let runner = Runner { terms: reserved.terms.clone(), in_a_row: 0 };
    let ours = Ours { token, document, etag, claimed_at, runner, contents };
    let _under_way = engine.discovery.claim_in_flight();
    match open_and_offer(&engine, &candidate, ours, Some(reserved)).await {
        Ok(true) => {}
        Ok(false) => engine.discovery.end_inline_claim(&message, others),
        Err(error) => {
            debug!(instance_id = partition.instance_id(), %error, "what was handed over is given back");
            engine.discovery.end_inline_claim(&message, others);
        }
    }
}

/// Makes a turn of what is ours and lays it on the counter; false where there is none to run.
pub(super) async fn open_and_offer(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    ours: Ours,
    reserved: Option<Reserved<TurnFilter, Turn>>,
) -> Result<bool, StoreError> {
    let (partition, terms) = (candidate.partition.clone(), ours.runner.terms.clone());
    let (label, until) = (pinned(&ours.document), ours.document.lock.as_ref().map_or(0, |lock| lock.until));
    let TurnClaim::Turn(turn) = open::open(engine, candidate, ours).await? else { return Ok(false) };
    engine.discovery.turn_holds(&partition, until);
    let engine_too = engine.clone();
    let release_claim = move |turn: Turn| release::release_claim_later(&engine_too, &partition, turn.1, until, 0);
    engine.queue.turns.put_claimed(engine, (label, &terms), ReleaseOnDrop::new(*turn, release_claim), reserved);
    Ok(true)
}

/// How the write of a message ended that was to carry a claim.
pub(crate) enum InlineWrite {
    /// It is written, and whoever waited for it has it, or somebody will look.
    Done,
    /// It is written, or was before; the claim is not ours.
    Written,
    /// It is not written yet: the plain way is to be taken. It may have been written all the same, its answer lost.
    Plain(Applied),
}

/// Creates a message with the claim of its instance, if a dispatcher here waits for it.
pub(crate) async fn write_with_inline_claim<T: serde::Serialize + Sync>(
    engine: &Arc<Engine>,
    message: &MessageDocument,
    body: &T,
    kind: Kind,
    deadline: Deadline,
) -> Result<InlineWrite, StoreError> {
    let Some(mut offer) = InlineTurnClaim::new(engine, message, kind) else {
        return Ok(InlineWrite::Plain(Applied::No));
    };
    let has_inlined = offer.has_inlined();
    let letter = match (has_inlined, message.delivered) {
        (false, _) => Some(Operation::create(body)?),
        // A copy, and what was delivered before, meets its marker.
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
        // It is there: from an earlier attempt of this call, or of another that delivers the same.
        Ok((BatchOutcome::RolledBack(back), applied)) if back.index < at && back.status == 409 => {
            if applied == Applied::Perhaps {
                offer.look();
                return Ok(InlineWrite::Done);
            }
            offer.withdraw();
            Ok(InlineWrite::Written)
        }
        Ok((BatchOutcome::RolledBack(back), applied)) if back.index == at && matches!(back.status, 404 | 409 | 412) => {
            // What refuses it may be what an earlier attempt of this call has written.
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
        // The plain way finds out by itself, or says why not.
        Err(_) if !deadline.passed() => Ok(InlineWrite::Plain(Applied::Perhaps)),
        Err(error) => Err(error),
    }
}
