//! Inline claims of activities: the turn that schedules an activity claims it, or the completion of the activity before
//! it.
//!
//! - A turn locks as many of its activities as local workers wait, in scheduling order.
//! - A completion locks the next activity of the same instance, if that is the oldest one for the same worker, which
//!   fetches again soon.
//! - Activities of a session are never claimed inline, because the session is another document. Neither are activities
//!   that a turn stages or cancels itself.

use super::{FetchFilter, FetchTerms, Reserved, PART_OF_LOCK};
use crate::{
    activity::{claim, ActivityHandle},
    cosmos::{Committed, Deadline, Freshness, StoreError, Versioned},
    discovery::ActivityCandidate,
    engine::Engine,
    model::{clock::millis, kind, ActivityDocument, Millis, Operation, Partition},
    queue::release_on_drop::ReleaseOnDrop,
    turn::{instance_id, plan::Ack},
};
use azure_core::http::Etag;
use duroxide::providers::{TagFilter, WorkItem};
use futures::future::BoxFuture;
use std::{collections::HashMap, sync::Arc};
use tracing::debug;

/// The result of a fetch for an activity.
pub(crate) type ActivityItem = (WorkItem, String, u32);

/// The activities that a dispatcher accepts.
#[derive(Clone, Debug)]
pub(crate) struct ActivityFilter(pub(crate) TagFilter);

impl FetchFilter for ActivityFilter {
    /// The activity's tag.
    type Label = Option<String>;

    fn takes(&self, tag: &Self::Label) -> bool {
        self.0.matches(tag.as_deref())
    }
}

/// The activities that the commit of a turn claims, by execution and id. If they are dropped after they were sent, the
/// claims are released.
pub(crate) struct ScheduledClaims {
    engine: Arc<Engine>,
    partition: Partition,
    offers: HashMap<String, ActivityOffer>,
    /// The claimed activities, with their ETags if these are known.
    claimed: Vec<(ActivityDocument, Option<Etag>, ActivityOffer)>,
    /// The ETag of the instance document on which the commit depends, and the latest time at which it can happen.
    sent: Option<(Etag, Millis)>,
}

struct ActivityOffer {
    token: String,
    until: Millis,
    reserved: Reserved<ActivityFilter, ActivityItem>,
}

impl ScheduledClaims {
    /// Reserves waiting workers for the turn's activities, as many as there are.
    pub(crate) fn new(engine: &Arc<Engine>, partition: &Partition, ack: &Ack) -> Self {
        let now = engine.now();
        let mut offers = HashMap::new();
        let on = engine.config.inline_claims();
        for item in ack.worker_items.iter().filter(|_| on) {
            let WorkItem::ActivityExecute { instance, execution_id, id, session_id: None, tag, .. } = item else {
                continue;
            };
            let is_cancelled = ack.cancelled.iter().any(|other| other.activity_id == *id);
            if is_cancelled || Some(instance.as_str()) != partition.instance_id() {
                continue;
            }
            let comes_first =
                |terms: &FetchTerms<ActivityFilter>| engine.discovery.has_activity_for(&terms.filter, now);
            let Some(reserved) = engine.queue.activities.reserve(tag, comes_first) else { break };
            let until = now.saturating_add(millis(reserved.terms.lock_timeout));
            let offer = ActivityOffer { token: engine.new_token(), until, reserved };
            offers.insert(ActivityDocument::scheduled_id(*execution_id, *id).to_string(), offer);
        }
        Self { engine: engine.clone(), partition: partition.clone(), offers, claimed: Vec::new(), sent: None }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.offers.is_empty()
    }

    /// Locks an activity if it is claimed.
    pub(crate) fn lock(&self, work: &mut ActivityDocument) {
        if let Some(offer) = self.offers.get(work.id.as_str()) {
            work.claim(&offer.token, offer.until);
        }
    }

    /// The commit is about to be sent. It depends on this ETag of the instance document and cannot happen after
    /// `until`.
    pub(crate) fn sent(&mut self, instance: &Etag, until: Millis) {
        self.sent = Some((instance.clone(), until));
    }

    /// The commit failed, or it is planned without the claims.
    pub(crate) fn withdraw(&mut self) {
        self.offers.clear();
    }

    /// The commit succeeded. `offset` is the index of the first of `operations` in the batch.
    pub(crate) fn done(&mut self, operations: &[Operation], committed: &Committed, offset: usize) {
        let mut offers = std::mem::take(&mut self.offers);
        if offers.is_empty() {
            return;
        }
        for (index, operation) in operations.iter().enumerate() {
            let (Operation::Create { document } | Operation::Upsert { document }) = operation else { continue };
            if document.get("type").is_none_or(|kind| kind != kind::ACTIVITY) {
                continue;
            }
            let Some(offer) = offers.remove(operation.document_id()) else { continue };
            let Ok(work) = serde_json::from_value::<ActivityDocument>(document.clone()) else { continue };
            self.claimed.push((work, committed.etag(index + offset).cloned(), offer));
        }
    }

    /// Gives the claimed activities to the waiting workers. An activity without a known ETag is read first.
    pub(crate) fn serve(mut self) {
        for (work, etag, ActivityOffer { token, reserved, .. }) in std::mem::take(&mut self.claimed) {
            let terms = reserved.terms.clone();
            self.engine.spawn(serve(self.engine.clone(), work, etag, token, terms, Some(reserved)));
        }
    }
}

impl Drop for ScheduledClaims {
    fn drop(&mut self) {
        for (work, _, offer) in std::mem::take(&mut self.claimed) {
            claim::release_claim_later(&self.engine, work, offer.token, offer.until);
        }
        let Some((condition, until)) = self.sent.take().filter(|_| !self.offers.is_empty()) else { return };
        let (engine, partition, offers) =
            (self.engine.clone(), self.partition.clone(), std::mem::take(&mut self.offers));
        debug!(partition = %partition, activities = offers.len(), "releasing inline claims of activities");
        self.engine.spawn(async move {
            engine.until_settled(&partition, &instance_id(), Some(&condition), until).await;
            let mut offers: Vec<(String, String, Millis)> =
                offers.into_iter().map(|(id, offer)| (id, offer.token, offer.until)).collect();
            offers.sort();
            for (id, token, until) in offers {
                claim::release_named_claim(&engine, &partition, id, token, until).await;
            }
        });
    }
}

/// The next activity for a worker, claimed in the batch that completes its present one. If it is dropped after it was
/// sent, the claim is released.
pub(crate) struct InlineNextActivity {
    engine: Arc<Engine>,
    terms: FetchTerms<ActivityFilter>,
    /// `None` once the outcome is known.
    claim: Option<NextClaim>,
    sent: bool,
}

struct NextClaim {
    token: String,
    /// The activity document with the lock.
    document: ActivityDocument,
    condition: Etag,
    candidate: ActivityCandidate,
    seq: String,
}

impl InlineNextActivity {
    /// A claim of the oldest activity for this worker, if it belongs to the same instance.
    pub(crate) fn new(engine: &Arc<Engine>, ended: &ActivityHandle) -> Option<Self> {
        if !engine.config.inline_claims() || engine.stopping.is_cancelled() || !ended.terms.patient {
            return None;
        }
        let (now, terms) = (engine.now(), ended.terms.clone());
        let (candidate, seq) = engine.discovery.take_next_activity(&ended.partition, &terms.filter, now)?;
        let mut document = candidate.document.clone();
        let Some(condition) = document.etag.take() else {
            engine.discovery.return_activity(candidate, seq);
            return None;
        };
        let token = engine.new_token();
        document.claim(&token, now.saturating_add(millis(terms.lock_timeout)));
        let claim = NextClaim { token, document, condition, candidate, seq };
        Some(Self { engine: engine.clone(), terms, claim: Some(claim), sent: false })
    }

    /// The operation that claims the activity.
    pub(crate) fn operation(&mut self) -> Result<Operation, StoreError> {
        let Some(claim) = &self.claim else {
            return Err(StoreError::Malformed { detail: "an inline claim was settled before it was sent".to_owned() });
        };
        let operation = Operation::replace(claim.document.id.clone(), &claim.document, Some(&claim.condition))?;
        self.sent = true;
        Ok(operation)
    }

    /// The deadline of the batch with this claim, for a call with this deadline.
    pub(crate) fn deadline(&self, deadline: Deadline) -> Deadline {
        deadline.min(Deadline::after(self.terms.lock_timeout / PART_OF_LOCK))
    }

    /// The batch succeeded. The worker gets the activity when it fetches. If the answer was lost, a read shows the
    /// outcome.
    pub(crate) async fn done(mut self, etag: Option<Etag>) {
        let Some(NextClaim { token, document, seq, .. }) = self.claim.take() else { return };
        self.engine.discovery.activity_taken(&seq);
        let serving = serve(self.engine.clone(), document, etag, token, self.terms.clone(), None);
        // The payload may have to be read. The completed activity does not wait for that, and its worker hardly does.
        let task = self.engine.tasks.spawn(serving);
        drop(tokio::time::timeout(std::time::Duration::from_millis(50), task).await);
    }

    /// The batch failed because of the claim: another worker has the activity.
    pub(crate) fn refused(mut self) {
        crate::telemetry::claim_race("inline");
        if let Some(NextClaim { seq, .. }) = self.claim.take() {
            self.engine.discovery.activity_taken(&seq);
        }
    }
}

impl Drop for InlineNextActivity {
    fn drop(&mut self) {
        let Some(NextClaim { token, document, condition, candidate, seq }) = self.claim.take() else { return };
        if !self.sent {
            self.engine.discovery.return_activity(candidate, seq);
            return;
        }
        debug!(id = %document.id, "releasing an inline claim of an activity");
        // Most likely the claim did not happen.
        self.engine.discovery.try_activity_again(candidate, seq);
        claim::release_unknown_claim(&self.engine, document, token, condition);
    }
}

/// Offers a claimed activity to the waiting worker. Without an ETag the activity is read first, because the claim may
/// have failed.
fn serve(
    engine: Arc<Engine>,
    document: ActivityDocument,
    etag: Option<Etag>,
    token: String,
    terms: FetchTerms<ActivityFilter>,
    reserved: Option<Reserved<ActivityFilter, ActivityItem>>,
) -> BoxFuture<'static, ()> {
    let serving = async move {
        let Some((document, etag)) = ours(&engine, document, etag, &token).await else { return };
        let (label, until) = (document.tag.clone(), document.due);
        let spent = millis(terms.lock_timeout).saturating_sub(until.saturating_sub(engine.now()));
        if spent > millis(terms.lock_timeout) / 8 {
            // Its worker would renew the lock too late.
            return claim::release_claim_later(&engine, document, token, until);
        }
        match claim::open(&engine, (document.clone(), etag, token), &terms, engine.deadline()).await {
            Ok(claim::ActivityClaim::Claimed(work, _)) => {
                let engine_too = engine.clone();
                let release_claim =
                    move |work: ActivityItem| claim::release_claim_later(&engine_too, document, work.1, until);
                engine.queue.activities.put_claimed(
                    &engine,
                    (label, &terms),
                    ReleaseOnDrop::new(*work, release_claim),
                    reserved,
                );
            }
            // The claim is already released, or the activity is delayed.
            Ok(_) => {}
            Err(error) => debug!(id = %document.id, %error, "an inline claim of an activity was released"),
        }
    };
    Box::pin(serving)
}

/// The activity document as it was written, if our token has its lock.
async fn ours(
    engine: &Arc<Engine>,
    document: ActivityDocument,
    etag: Option<Etag>,
    token: &str,
) -> Option<(ActivityDocument, Etag)> {
    if let Some(etag) = etag {
        return Some((document, etag));
    }
    let (partition, id, freshness) = (&document.instance_id, &document.id, Freshness::Authoritative);
    match engine.store.read::<ActivityDocument>(partition, id, freshness, engine.deadline()).await {
        Ok(Some(found)) if found.document.held_by(token) => Some((found.document, found.etag)),
        Ok(found) => {
            if let Some(Versioned { mut document, etag }) = found {
                document.etag = Some(etag);
                engine.discovery.offer_activity(document);
            }
            None
        }
        Err(error) => {
            debug!(%id, %error, "releasing an inline claim of an activity");
            let until = document.due;
            claim::release_claim_later(engine, document, token.to_owned(), until);
            None
        }
    }
}
