//! The outbox: delivers the messages of a committed turn to other partitions, exactly once.
//!
//! 1. The turn writes an intent into its own partition, as part of its commit.
//! 2. The delivery creates the message in the target's partition. The message id contains the turn's token and the
//!    position in the turn, so a second delivery finds the message there. A turn that consumes a delivered message
//!    leaves a marker with the same id, so a later copy is recognised too.
//! 3. The sender deletes the intent.
//!
//! A late intent is delivered by one process: the one that moves its `due` into the future, on condition of its ETag.
//! The other processes leave it alone until then. After a transient failure the process delays the intent, longer each
//! time. So intents that cannot be delivered queue behind those that can.
//!
//! Crash points:
//!
//! - After the commit: the reconciler of any process takes the intent over.
//! - After the takeover: another process takes it over when the time of the first has passed.
//! - After the delivery: the next process delivers again, which changes nothing, and deletes the intent.
//!
//! If the target can never store its message, the intent is poisoned. The provider reports it, keeps it, and it blocks
//! no other.

use crate::{
    cosmos::{queries, BatchOutcome, Deadline, Freshness, Refusal, StoreError, Versioned, WriteOutcome},
    discovery,
    engine::Engine,
    model::{clock::millis, DocumentId, IntentDocument, MessageDocument, Operation, Partition},
    queue::turn::{write_with_inline_claim, InlineWrite, MessageKind},
};
use azure_data_cosmos::feed::FeedRange;
use futures::{stream, Stream, StreamExt};
use std::{num::NonZeroU32, sync::Arc, time::Duration};
use tracing::{debug, error, warn};

/// The number of deliveries in flight at once.
const CONCURRENCY: usize = 16;
/// How long a commit waits for its deliveries.
const DELIVERY_WAIT: Duration = Duration::from_millis(500);
/// The number of late intents in one pass of the reconciler.
const PASS_SIZE: NonZeroU32 = NonZeroU32::new(100).unwrap();
/// How long a process has to deliver a late intent that it has taken over.
const TAKEOVER_TIME: Duration = Duration::from_secs(10);
/// The delay after a transient failure. It doubles with each attempt, up to the maximum.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Delivers intents right after the commit that wrote them. The caller waits for a short time only. Slower deliveries
/// continue in the background, and the reconciler takes failed ones over.
pub(crate) async fn deliver_soon(engine: &Arc<Engine>, intents: Vec<IntentDocument>) {
    if intents.is_empty() {
        return;
    }
    let engine_too = engine.clone();
    let (sender, delivered) = tokio::sync::oneshot::channel();
    engine.spawn(async move {
        let deadline = engine_too.deadline();
        let arrived = deliver_all(&engine_too, intents, deadline).await;
        if sender.send(()).is_err() {
            debug!("the commit no longer waits for these deliveries");
        }
        forget(&engine_too, arrived, deadline).await;
    });
    // An error means that the task has ended, so there is nothing to wait for.
    drop(tokio::time::timeout(DELIVERY_WAIT, delivered).await);
}

/// Delivers the intents, several at once. Returns the delivered ones.
async fn deliver_all(engine: &Arc<Engine>, intents: Vec<IntentDocument>, deadline: Deadline) -> Vec<IntentDocument> {
    let outcomes: Vec<(IntentDocument, Result<(), DeliveryFailure>)> = stream::iter(intents)
        .map(|intent| async move {
            let outcome = deliver(engine, &intent, deadline).await;
            (intent, outcome)
        })
        .buffer_unordered(CONCURRENCY)
        .collect()
        .await;
    let mut delivered: Vec<IntentDocument> = Vec::new();
    for (intent, outcome) in outcomes {
        match outcome {
            Ok(()) => delivered.push(intent),
            Err(DeliveryFailure::Later(error)) => {
                warn!(id = %intent.id, target = %intent.target, %error, "delivery failed, will retry");
            }
            Err(DeliveryFailure::Never(error)) => poison(engine, intent, &error, deadline).await,
        }
    }
    delivered
}

/// Why a message was not delivered.
enum DeliveryFailure {
    /// The message cannot be stored (400, 413) or read. No later attempt succeeds.
    Never(StoreError),
    /// The failure does not concern the message: for example an outage, a missing role or an unknown answer.
    Later(StoreError),
}

impl From<StoreError> for DeliveryFailure {
    fn from(error: StoreError) -> Self {
        if error.is_unstorable() {
            Self::Never(error)
        } else {
            Self::Later(error)
        }
    }
}

/// Creates the message in its target. If the message or its marker already exists, it was delivered before.
async fn deliver(engine: &Arc<Engine>, intent: &IntentDocument, deadline: Deadline) -> Result<(), DeliveryFailure> {
    let unreadable = |e: String| {
        DeliveryFailure::Never(StoreError::Malformed { detail: format!("intent {} can't be read: {e}", intent.id) })
    };
    let id = intent.document.get("id").and_then(serde_json::Value::as_str).unwrap_or_default();
    let id = DocumentId::try_from(id.to_owned()).map_err(unreadable)?;
    let message = || serde_json::from_value::<MessageDocument>(intent.document.clone());
    if let Ok(message) = message() {
        let kind = MessageKind::of_message(&message);
        if let InlineWrite::Done | InlineWrite::Written =
            write_with_inline_claim(engine, &message, &intent.document, kind, deadline).await?
        {
            return Ok(());
        }
    }
    let written = engine.store.create(&intent.target, &id, &intent.document, deadline).await?;
    match written {
        WriteOutcome::Done(etag) => {
            let message = message().map_err(|e| unreadable(e.to_string()))?;
            match MessageKind::of_message(&message) {
                MessageKind::Completion => discovery::completion_written(engine, message, Some(etag), None),
                _ => discovery::message_written(engine, message, Some(etag), None).await,
            }
            Ok(())
        }
        WriteOutcome::Refused(Refusal::Exists) => {
            debug!(id = %intent.id, "the message was delivered before");
            Ok(())
        }
        WriteOutcome::Refused(refusal) => Err(DeliveryFailure::Later(StoreError::Unavailable {
            detail: format!("Cosmos DB refused a delivery: {refusal:?}"),
        })),
    }
}

/// Delivers a message whose sender is about to be deleted. The intent stays: the deletion removes it with the sender,
/// and a second delivery changes nothing. A message that can never be delivered is reported, and does not prevent the
/// deletion.
pub(crate) async fn deliver_before_deletion(
    engine: &Arc<Engine>,
    sender: &Partition,
    id: &DocumentId,
) -> Result<(), StoreError> {
    let deadline = engine.deadline();
    let found = engine.store.read::<IntentDocument>(sender, id, Freshness::Authoritative, deadline).await?;
    let intent = found.map(|found| found.document).filter(|intent| intent.poisoned.is_none());
    let Some(intent) = intent else { return Ok(()) };
    match deliver(engine, &intent, deadline).await {
        Ok(()) => Ok(()),
        Err(DeliveryFailure::Later(error)) => Err(error),
        Err(DeliveryFailure::Never(error)) => {
            poison(engine, intent, &error, deadline).await;
            Ok(())
        }
    }
}

/// Deletes delivered intents. If that fails, an intent is delivered again, which changes nothing.
async fn forget(engine: &Engine, mut intents: Vec<IntentDocument>, deadline: Deadline) {
    intents.sort_by(|a, b| a.instance_id.cmp(&b.instance_id));
    for group in intents.chunk_by(|a, b| a.instance_id == b.instance_id) {
        for chunk in group.chunks(crate::model::operation::MAX_OPERATIONS) {
            if let Err(error) = forget_chunk(engine, chunk, deadline).await {
                warn!(source = %chunk[0].instance_id, %error, "could not delete delivered intents, will retry");
            }
        }
    }
}

/// Deletes intents of one partition, in one batch if possible.
async fn forget_chunk(engine: &Engine, chunk: &[IntentDocument], deadline: Deadline) -> Result<(), StoreError> {
    let partition = &chunk[0].instance_id;
    if chunk.len() > 1 {
        let operations: Vec<Operation> = chunk.iter().map(|i| Operation::delete(i.id.clone(), None)).collect();
        if let BatchOutcome::Committed(_) = engine.store.batch(partition, &operations, deadline).await? {
            return Ok(());
        }
    }
    // There is only one intent, or one of them is already deleted.
    for intent in chunk {
        engine.store.delete(partition, &intent.id, None, deadline).await?;
    }
    Ok(())
}

/// Marks an intent that can never be delivered. It stays in the container for an operator, and no process tries it
/// again.
async fn poison(engine: &Engine, mut intent: IntentDocument, error: &StoreError, deadline: Deadline) {
    error!(
        source = %intent.instance_id,
        target = %intent.target,
        id = %intent.id,
        %error,
        "a message can never be delivered, keeping its intent as poisoned"
    );
    crate::telemetry::poisoned_intent();
    intent.due = None;
    intent.poisoned = Some(error.to_string());
    let (partition, id) = (intent.instance_id.clone(), intent.id.clone());
    if let Err(error) = engine.store.replace(&partition, &id, &intent, None, deadline).await {
        warn!(%id, %error, "could not mark a poisoned intent, will retry");
    }
}

/// One pass of the reconciler: takes over intents that the committing process has not delivered. Returns how many it
/// found. Without a range it queries the whole container.
pub(crate) async fn reconcile(engine: &Arc<Engine>, range: Option<&FeedRange>) -> Result<usize, StoreError> {
    let statement = queries::DUE_INTENTS.statement().bind("@now", engine.now()).in_pages_of(PASS_SIZE);
    let mut pages = match range {
        Some(range) => engine.store.range_pages(range, statement, engine.deadline())?,
        None => engine.store.container_pages(statement, engine.deadline())?,
    };
    // An unreadable intent keeps its `due` and so stays in front of all others. It must not take their place in the
    // pass.
    let mut intents: Vec<Versioned<IntentDocument>> = Vec::new();
    while intents.len() < PASS_SIZE.get() as usize {
        let Some(page) = pages.next().await? else { break };
        intents.extend(page.readable());
    }
    let found = intents.len();
    crate::telemetry::outbox_age(intents.iter().map(|intent| intent.document.created_at).min(), engine.now());
    if found > 0 {
        let taken = take_over(engine, intents).await;
        debug!(found, taken, "took over undelivered messages");
    }
    Ok(found)
}

/// Takes late intents over and delivers them. Returns how many of them it claimed. It starts at a random position and
/// claims one intent after the other. It stops at the first intent of another process, because that process continues
/// from there. So processes that found the same intents share them, and lose one claim each.
pub(crate) async fn take_over(engine: &Arc<Engine>, mut intents: Vec<Versioned<IntentDocument>>) -> usize {
    intents.sort_by(|a, b| (a.document.due, &a.document.id).cmp(&(b.document.due, &b.document.id)));
    // A fraction is less than one, so this is an index of the list.
    let start = (engine.config.randomness().fraction() * intents.len() as f64) as usize;
    intents.rotate_left(start);
    claimed(engine, intents).map(|intent| settle(engine, intent)).buffer_unordered(CONCURRENCY).count().await
}

/// The intents that this process claims, up to the first that another process has.
fn claimed(
    engine: &Engine,
    intents: Vec<Versioned<IntentDocument>>,
) -> impl Stream<Item = Versioned<IntentDocument>> + use<'_> {
    stream::unfold(intents.into_iter(), move |mut left| async move {
        loop {
            match claim(engine, left.next()?).await {
                Ok(claimed) => return claimed.map(|intent| (intent, left)),
                Err(error) => {
                    warn!(%error, "could not take over undelivered messages, will retry");
                    // The other intents would meet the same outage.
                    if !error.is_of_one_partition() {
                        return None;
                    }
                }
            }
        }
    })
}

/// Claims a late intent: no other process takes it over while there is time to deliver it. Returns `None` if another
/// process has claimed or delivered it. It also returns `None` if the answer to the claim was lost; the intent is then
/// late again after a while.
async fn claim(
    engine: &Engine,
    found: Versioned<IntentDocument>,
) -> Result<Option<Versioned<IntentDocument>>, StoreError> {
    let Versioned { mut document, etag } = found;
    document.due = Some(engine.clock.after(TAKEOVER_TIME));
    let (partition, id) = (&document.instance_id, &document.id);
    let written = engine.store.replace(partition, id, &document, Some(&etag), engine.deadline()).await?;
    Ok(match written {
        WriteOutcome::Done(etag) => Some(Versioned { document, etag }),
        WriteOutcome::Refused(_) => None,
    })
}

/// Delivers a claimed intent and deletes it. After a failure it delays the intent, or marks it as poisoned.
async fn settle(engine: &Arc<Engine>, intent: Versioned<IntentDocument>) {
    // A target that does not answer gets few requests. A slow target gets more time with each attempt.
    let deadline = Deadline::after((pause_after(intent.document.retries) / 2).min(TAKEOVER_TIME));
    match deliver(engine, &intent.document, deadline).await {
        Ok(()) => forget(engine, vec![intent.document], engine.deadline()).await,
        Err(DeliveryFailure::Later(error)) => delay(engine, intent, &error).await,
        Err(DeliveryFailure::Never(error)) => poison(engine, intent.document, &error, engine.deadline()).await,
    }
}

/// The delay after this many failed attempts.
fn pause_after(attempts: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << attempts.min(16)).min(MAX_PAUSE)
}

/// Delays an intent after a transient failure. If the write fails, the intent is due again when our time has passed.
async fn delay(engine: &Engine, intent: Versioned<IntentDocument>, error: &StoreError) {
    let Versioned { mut document, etag } = intent;
    let pause = pause_after(document.retries);
    warn!(id = %document.id, target = %document.target, %error, ?pause, "delivery failed, will retry");
    document.due = Some(engine.now().saturating_add(millis(pause)));
    document.retries = document.retries.saturating_add(1);
    let (partition, id) = (&document.instance_id, &document.id);
    let written = engine.store.replace(partition, id, &document, Some(&etag), engine.deadline()).await;
    if let Err(error) = written {
        warn!(id = %document.id, %error, "could not delay an intent");
    }
}

/// Starts a pass of the reconciler in the background, after a poll of this range has found late intents.
pub(crate) fn reconcile_soon(engine: &Arc<Engine>, range: Option<&FeedRange>) {
    let (engine_too, range) = (engine.clone(), range.cloned());
    engine.spawn(async move {
        // One pass at a time: otherwise every poll would start another pass that waits for an unreachable target.
        let state = engine_too.state::<Reconciling>();
        let Ok(_alone) = state.0.try_lock() else { return };
        if let Err(error) = reconcile(&engine_too, range.as_ref()).await {
            warn!(%error, "could not take over undelivered messages, will retry");
        }
    });
}

/// Locked while this process delivers messages of other processes that a poll has found.
#[derive(Default)]
struct Reconciling(tokio::sync::Mutex<()>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute() {
        let pauses: Vec<u64> = (0..8).map(|attempts| pause_after(attempts).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pause_after(u32::MAX), MAX_PAUSE);
    }
}
