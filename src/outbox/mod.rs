//! What a committed turn owes to other partitions, delivered exactly once.
//!
//! The intent is in the source's partition, written with the turn. Delivering it creates the message in the target, whose id
//! holds the turn's token and the position in it: a second delivery finds it there. Consuming a delivered message leaves a
//! marker under the same id, so that a copy which comes later is known too. Then the intent is deleted.
//!
//! A late intent has one deliverer: whoever moves its `due` ahead, on the condition that it is as it was found. The others
//! leave it alone until then. A delivery that fails for a passing reason is put off, longer each time, so that intents which
//! can't be delivered fall behind those that can.
//!
//! Crash points: after the commit, the reconciler of any process takes the intent over; after that, another one does when
//! the time of the first is up; after the delivery, it delivers again, which changes nothing, and deletes the intent. A
//! target that can't take its message poisons the intent: it is reported, kept, and blocks no other.

use crate::{
    cosmos::{queries, BatchOutcome, Deadline, Freshness, Refusal, StoreError, Versioned, WriteOutcome},
    discovery,
    engine::Engine,
    model::{clock::millis, DocumentId, IntentDocument, MessageDocument, Operation, Partition},
    queue::turn::{write_with_inline_claim, InlineWrite, Kind},
};
use azure_data_cosmos::feed::FeedRange;
use futures::{stream, Stream, StreamExt};
use std::{num::NonZeroU32, sync::Arc, time::Duration};
use tracing::{debug, error, warn};

/// Deliveries that are under way at once.
const CONCURRENCY: usize = 16;
/// How long a commit waits for its deliveries.
const PATIENCE: Duration = Duration::from_millis(500);
/// Late intents that are looked at in one round.
const AT_ONCE: NonZeroU32 = NonZeroU32::new(100).unwrap();
/// Whoever has taken a late intent over has so long to deliver it.
const TAKEN_FOR: Duration = Duration::from_secs(10);
/// A delivery that failed for a passing reason is put off by this, twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Delivers intents right after the commit that wrote them. The caller waits for a moment only: what takes longer goes on
/// in the background, and what fails is taken over by the reconciler.
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
            debug!("nobody waits for these deliveries any more");
        }
        forget(&engine_too, arrived, deadline).await;
    });
    // An error means that the task is gone, and there is nothing to wait for.
    drop(tokio::time::timeout(PATIENCE, delivered).await);
}

/// Delivers each intent, several at once; returns those that have arrived.
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
                warn!(id = %intent.id, target = %intent.target, %error, "a message is delivered later");
            }
            Err(DeliveryFailure::Never(error)) => poison(engine, intent, &error, deadline).await,
        }
    }
    delivered
}

/// Why a message was not delivered.
enum DeliveryFailure {
    /// The message itself can't be stored (400, 413) or read: no later attempt succeeds.
    Never(StoreError),
    /// The failure says nothing about the message: an outage, a missing role, an answer that we do not know.
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

/// Creates the message in its target. One that is there, or whose marker is, was delivered before.
async fn deliver(engine: &Arc<Engine>, intent: &IntentDocument, deadline: Deadline) -> Result<(), DeliveryFailure> {
    let unreadable = |e: String| {
        DeliveryFailure::Never(StoreError::Malformed { detail: format!("intent {} can't be read: {e}", intent.id) })
    };
    let id = intent.document.get("id").and_then(serde_json::Value::as_str).unwrap_or_default();
    let id = DocumentId::try_from(id.to_owned()).map_err(unreadable)?;
    let message = || serde_json::from_value::<MessageDocument>(intent.document.clone());
    if let Ok(message) = message() {
        let kind = Kind::of_message(&message);
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
            match Kind::of_message(&message) {
                Kind::End => discovery::completion_written(engine, message, Some(etag), None),
                _ => discovery::message_written(engine, message, Some(etag), None).await,
            }
            Ok(())
        }
        WriteOutcome::Refused(Refusal::Exists) => {
            debug!(id = %intent.id, "delivered before");
            Ok(())
        }
        WriteOutcome::Refused(refusal) => Err(DeliveryFailure::Later(StoreError::Unavailable {
            detail: format!("a delivery was answered {refusal:?}"),
        })),
    }
}

/// Delivers a message whose sender is about to be deleted. The intent stays: it goes with the sender, and a second delivery
/// changes nothing. A message that can never be delivered is reported, and is no reason to keep its sender.
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

/// Deletes intents that were delivered. Best effort: one that stays is delivered again, which changes nothing.
async fn forget(engine: &Engine, mut intents: Vec<IntentDocument>, deadline: Deadline) {
    intents.sort_by(|a, b| a.instance_id.cmp(&b.instance_id));
    for group in intents.chunk_by(|a, b| a.instance_id == b.instance_id) {
        for chunk in group.chunks(crate::model::operation::MAX_OPERATIONS) {
            if let Err(error) = forget_chunk(engine, chunk, deadline).await {
                warn!(source = %chunk[0].instance_id, %error, "delivered intents are deleted later");
            }
        }
    }
}

async fn forget_chunk(engine: &Engine, chunk: &[IntentDocument], deadline: Deadline) -> Result<(), StoreError> {
    let partition = &chunk[0].instance_id;
    if chunk.len() > 1 {
        let operations: Vec<Operation> = chunk.iter().map(|i| Operation::delete(i.id.clone(), None)).collect();
        if let BatchOutcome::Committed(_) = engine.store.batch(partition, &operations, deadline).await? {
            return Ok(());
        }
    }
    // A single one, or one of them is gone already: one by one.
    for intent in chunk {
        engine.store.delete(partition, &intent.id, None, deadline).await?;
    }
    Ok(())
}

/// Fingerprints an intent that can never be delivered. It stays for somebody to look at, and nobody tries it again.
async fn poison(engine: &Engine, mut intent: IntentDocument, error: &StoreError, deadline: Deadline) {
    error!(
        source = %intent.instance_id,
        target = %intent.target,
        id = %intent.id,
        %error,
        "a message can't be delivered: the intent is kept as poisoned"
    );
    crate::telemetry::poisoned_intent();
    intent.due = None;
    intent.poisoned = Some(error.to_string());
    let (partition, id) = (intent.instance_id.clone(), intent.id.clone());
    if let Err(error) = engine.store.replace(&partition, &id, &intent, None, deadline).await {
        warn!(%id, %error, "a poisoned intent could not be marked: it is tried again");
    }
}

/// One round of the reconciler: takes over what the process that committed it has not delivered. How many were found.
/// Without a range the whole container is asked.
pub(crate) async fn reconcile(engine: &Arc<Engine>, range: Option<&FeedRange>) -> Result<usize, StoreError> {
    let statement = queries::DUE_INTENTS.statement().bind("@now", engine.now()).in_pages_of(AT_ONCE);
    let mut pages = match range {
        Some(range) => engine.store.range_pages(range, statement, engine.deadline())?,
        None => engine.store.container_pages(statement, engine.deadline())?,
    };
    // An intent that can't be read keeps its time, and so its place before all others: it must not take theirs.
    let mut intents: Vec<Versioned<IntentDocument>> = Vec::new();
    while intents.len() < AT_ONCE.get() as usize {
        let Some(page) = pages.next().await? else { break };
        intents.extend(page.readable());
    }
    let found = intents.len();
    crate::telemetry::outbox_age(intents.iter().map(|intent| intent.document.created_at).min(), engine.now());
    if found > 0 {
        let taken = take_over(engine, intents).await;
        debug!(found, taken, "took undelivered messages over");
    }
    Ok(found)
}

/// Takes late intents over and delivers them; how many of them became ours. They are claimed one after the other, from a place
/// on that is drawn up to one that is another's already: whoever has that one goes on from there. So processes that found the
/// same intents share them, and lose one claim each.
pub(crate) async fn take_over(engine: &Arc<Engine>, mut intents: Vec<Versioned<IntentDocument>>) -> usize {
    intents.sort_by(|a, b| (a.document.due, &a.document.id).cmp(&(b.document.due, &b.document.id)));
    // A fraction is less than one, so this is a place in the list.
    let place = (engine.config.randomness().fraction() * intents.len() as f64) as usize;
    intents.rotate_left(place);
    claimed(engine, intents).map(|intent| settle(engine, intent)).buffer_unordered(CONCURRENCY).count().await
}

/// The first of some late intents, those that become ours before one is another's.
fn claimed(
    engine: &Engine,
    intents: Vec<Versioned<IntentDocument>>,
) -> impl Stream<Item = Versioned<IntentDocument>> + use<'_> {
    stream::unfold(intents.into_iter(), move |mut left| async move {
        loop {
            match claim(engine, left.next()?).await {
                Ok(ours) => return ours.map(|intent| (intent, left)),
                Err(error) => {
                    warn!(%error, "undelivered messages are taken over later");
                    // An outage would be met by the others, too.
                    if !error.is_of_one_partition() {
                        return None;
                    }
                }
            }
        }
    })
}

/// Takes a late intent over: nobody else does while there is time to deliver it. None where another process has it, or has
/// delivered it; or where the claim's answer was lost, and then it is late again in a while.
async fn claim(
    engine: &Engine,
    found: Versioned<IntentDocument>,
) -> Result<Option<Versioned<IntentDocument>>, StoreError> {
    let Versioned { mut document, etag } = found;
    document.due = Some(engine.clock.after(TAKEN_FOR));
    let (partition, id) = (&document.instance_id, &document.id);
    let written = engine.store.replace(partition, id, &document, Some(&etag), engine.deadline()).await?;
    Ok(match written {
        WriteOutcome::Done(etag) => Some(Versioned { document, etag }),
        WriteOutcome::Refused(_) => None,
    })
}

/// Delivers an intent that is ours, and deletes it; or puts it off, or fingerprints it as one that can't be delivered.
async fn settle(engine: &Arc<Engine>, intent: Versioned<IntentDocument>) {
    // A target that does not answer is not asked again and again; one that is slow has more time with each attempt.
    let deadline = Deadline::after((pause_after(intent.document.retries) / 2).min(TAKEN_FOR));
    match deliver(engine, &intent.document, deadline).await {
        Ok(()) => forget(engine, vec![intent.document], engine.deadline()).await,
        Err(DeliveryFailure::Later(error)) => put_off(engine, intent, &error).await,
        Err(DeliveryFailure::Never(error)) => poison(engine, intent.document, &error, engine.deadline()).await,
    }
}

fn pause_after(attempts: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << attempts.min(16)).min(LONGEST_PAUSE)
}

/// Puts a delivery off that failed for a passing reason. Best effort: otherwise it is due again when our time is up.
async fn put_off(engine: &Engine, intent: Versioned<IntentDocument>, error: &StoreError) {
    let Versioned { mut document, etag } = intent;
    let pause = pause_after(document.retries);
    warn!(id = %document.id, target = %document.target, %error, ?pause, "a message is delivered later");
    document.due = Some(engine.now().saturating_add(millis(pause)));
    document.retries = document.retries.saturating_add(1);
    let (partition, id) = (&document.instance_id, &document.id);
    let written = engine.store.replace(partition, id, &document, Some(&etag), engine.deadline()).await;
    if let Err(error) = written {
        warn!(id = %document.id, %error, "an intent could not be put off");
    }
}

/// Takes over in the background what a look at this range has seen.
pub(crate) fn reconcile_soon(engine: &Arc<Engine>, range: Option<&FeedRange>) {
    let (engine_too, range) = (engine.clone(), range.cloned());
    engine.spawn(async move {
        // One at a time: a target that can't be reached must not make every poll add to what waits for it.
        let state = engine_too.state::<Reconciling>();
        let Ok(_alone) = state.0.try_lock() else { return };
        if let Err(error) = reconcile(&engine_too, range.as_ref()).await {
            warn!(%error, "undelivered messages are taken over later");
        }
    });
}

/// Held while this process delivers messages of other processes that a poll has found.
#[derive(Default)]
struct Reconciling(tokio::sync::Mutex<()>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute() {
        let pauses: Vec<u64> = (0..8).map(|attempts| pause_after(attempts).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pause_after(u32::MAX), LONGEST_PAUSE);
    }
}
