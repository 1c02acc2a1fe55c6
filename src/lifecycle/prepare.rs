//! Prepares one instance for a deletion, if it meets the terms of the deletion.

use super::{plan::ABORT_AFTER, recovery, Incarnation};
use crate::{
    cosmos::{StoreError, Versioned, WriteOutcome},
    engine::Engine,
    model::{Deleting, InstanceDocument, Millis, Partition},
    turn::{instance_id, staging},
};
use std::{collections::HashMap, sync::Arc, time::Duration};
use tracing::warn;

/// The time after its last heartbeat when another deletion of the same instance aborts a plan.
const CONFLICT_ABORT_AFTER: Millis = 3_000;
/// The time between two reads of an instance while another deletion holds it.
const CONFLICT_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The reason why an instance could not be prepared.
pub(super) enum PrepareError {
    Running,
    /// The instance is not the one that was found: it has ended again since, or has another incarnation.
    Changed,
    /// Another deletion that shares an instance came first.
    Overtaken,
    Store(StoreError),
}

/// The conditions that the instances of a set must meet when they are prepared.
#[derive(Clone, Default)]
pub(super) struct DeletionTerms {
    /// Running instances are prepared, too.
    pub(super) force: bool,
    /// Messages of the instances that can never be delivered are dropped.
    pub(super) drops_messages: bool,
    /// The state of each chosen instance when it was chosen. It must not have changed.
    pub(super) chosen: HashMap<String, ChosenInstance>,
}

/// The state of an instance when it was chosen.
#[derive(Clone)]
pub(super) struct ChosenInstance {
    pub(super) incarnation: Incarnation,
    /// The instance was chosen because it had ended. It must not run again, even if force allows running instances.
    pub(super) has_ended: bool,
}

impl ChosenInstance {
    fn still_holds(&self, document: &InstanceDocument) -> bool {
        let is_same = self.incarnation.incarnation == document.origin.incarnation;
        is_same && (!self.has_ended || (document.has_ended() && self.incarnation.epoch == document.commit.epoch))
    }
}

impl DeletionTerms {
    /// Whether the instance has another incarnation than was seen before. If it must have ended, also whether it has
    /// ended again since.
    pub(super) fn is_changed(&self, seen: &Incarnation, document: &InstanceDocument) -> bool {
        let now = Incarnation::of(document);
        seen.incarnation != now.incarnation || (!self.force && *seen != now)
    }

    /// Whether a document is no instance of the set. With force, an instance in its first turn belongs to the set, too.
    fn skips(&self, document: &InstanceDocument, now: Millis) -> bool {
        document.has_only_deferred(now) || (!self.force && !document.exists())
    }

    /// The reason why this instance must not be prepared.
    fn refuse(&self, id: &str, document: &InstanceDocument) -> Option<PrepareError> {
        if !self.force && document.is_running() {
            return Some(PrepareError::Running);
        }
        let chosen = self.chosen.get(id)?;
        (!chosen.still_holds(document)).then_some(PrepareError::Changed)
    }

    /// Requires these incarnations, which a query has returned.
    pub(super) fn expect(&mut self, incarnations: impl IntoIterator<Item = (String, Incarnation)>) {
        for (id, incarnation) in incarnations {
            self.chosen.entry(id).or_insert(ChosenInstance { incarnation, has_ended: false });
        }
    }
}

impl From<serde_json::Error> for PrepareError {
    fn from(error: serde_json::Error) -> Self {
        Self::Store(error.into())
    }
}

impl From<StoreError> for PrepareError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Reads an instance of the set, if it exists.
pub(super) async fn find(
    engine: &Engine,
    id: &str,
    terms: &DeletionTerms,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let found = engine.read_latest(&partition, engine.deadline()).await?;
    Ok(found.filter(|found| !terms.skips(&found.document, engine.now())))
}

/// Whether an instance can be prepared by the document that was seen, without another read.
fn can_prepare_as_seen(document: &InstanceDocument, force: bool) -> bool {
    let is_at_rest = document.exists() && document.removal.deleting.is_none() && document.commit.roll_forward.is_none();
    is_at_rest && (force || !document.is_running())
}

/// Prepares one instance. Returns its document after that, or `None` if the instance does not exist. `seen` is a
/// document that was read before: the instance must still be the same.
pub(super) async fn prepare_one(
    engine: &Arc<Engine>,
    id: &str,
    record: &Deleting,
    terms: &DeletionTerms,
    recovery_after: Millis,
    seen: Option<Versioned<InstanceDocument>>,
) -> Result<Option<Versioned<InstanceDocument>>, PrepareError> {
    let Ok(partition) = Partition::instance(id) else { return Ok(None) };
    let deadline = engine.deadline();
    let expected = seen.as_ref().map(|seen| Incarnation::of(&seen.document));
    let mut seen = seen.filter(|seen| can_prepare_as_seen(&seen.document, terms.force));
    loop {
        let found = match seen.take() {
            Some(seen) => Some(seen),
            None => engine.read_latest(&partition, deadline).await?,
        };
        let Some(Versioned { mut document, etag }) = found else { return Ok(None) };
        if document.removal.deleting.as_ref().is_some_and(|deleting| deleting.plan == record.plan) {
            return Ok(Some(Versioned { document, etag }));
        }
        if document.removal.deleting.is_none() && terms.skips(&document, engine.now()) {
            return Ok(None);
        }
        if let Some(other) = &document.removal.deleting {
            let abort_after = if record.began_before(other) { 0 } else { CONFLICT_ABORT_AFTER };
            if !recovery::recover(engine, &document, abort_after, deadline).await? {
                tokio::time::sleep(CONFLICT_POLL_INTERVAL).await;
            }
            continue;
        }
        if document.commit.roll_forward.is_some() {
            match staging::roll_forward(engine, &partition, deadline).await {
                Ok(_) => continue,
                // No process can apply the rest of that turn. The forced deletion takes the instance as it is.
                Err(error) if terms.force && !error.is_retryable() => {
                    warn!(instance_id = id, %error, "deleting an instance whose last turn can't be rolled forward");
                }
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(refused) = terms.refuse(id, &document) {
            return Err(refused);
        }
        if expected.as_ref().is_some_and(|expected| terms.is_changed(expected, &document)) {
            return Err(PrepareError::Changed);
        }
        apply_record(engine, &mut document, record, recovery_after);
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(etag) = written? {
            return Ok(Some(Versioned { document, etag }));
        }
    }
}

/// Writes the deletion record into the document and removes the lock. A turn in progress can then neither commit nor
/// stage nor renew. It does not count as an attempt if the plan is aborted.
fn apply_record(engine: &Engine, document: &mut InstanceDocument, record: &Deleting, recovery_after: Millis) {
    let now = engine.now();
    if document.locked_until(now).is_some() {
        document.claim.claims.pop();
    }
    document.claim.lock = None;
    document.prepare_deletion(record);
    // Only this `due` leads a poll to an inlined message.
    let soon = if document.waiting.inlined.is_some() { ABORT_AFTER } else { Millis::MAX };
    document.due = Some(now + recovery_after.min(soon));
}
