//! What a committed turn owes to other partitions, delivered exactly once.
//!
//! The intent is in the source's partition, written with the turn. Delivering it creates the message in the target, whose id
//! holds the turn's token and the position in it: a second delivery finds it there. Consuming a delivered message leaves a
//! marker under the same id, so that a copy which comes later is known too. Then the intent is deleted.
//!
//! Crash points: after the commit, the reconciler of any process takes the intent over; after the delivery, it delivers
//! again, which changes nothing, and deletes the intent. A target that can't take its message poisons the intent: it is
//! reported, kept, and blocks no other.

use crate::{
    engine::Engine,
    model::{DocumentId, IntentDocument, MessageDocument},
    store::{queries, BatchOutcome, Deadline, Operation, Refusal, StoreError, WriteOutcome},
};
use futures::{stream, StreamExt};
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tracing::{debug, error, warn};

/// Deliveries that are under way at once.
const CONCURRENCY: usize = 16;
/// How long a commit waits for its deliveries.
const PATIENCE: Duration = Duration::from_millis(500);
/// A process that knows of nothing undelivered looks after others' crashes less often than its interval says.
const IDLE_FACTOR: u32 = 30;

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
    let outcomes: Vec<(IntentDocument, Result<(), StoreError>)> = stream::iter(intents)
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
            // Neither an outage nor a missing role says anything about the message.
            Err(error) if !(error.is_unstorable() || matches!(error, StoreError::Malformed { .. })) => {
                warn!(id = %intent.id, target = %intent.target, %error, "a message is delivered later");
            }
            Err(error) => poison(engine, intent, &error, deadline).await,
        }
    }
    delivered
}

/// Creates the message in its target. One that is there, or whose marker is, was delivered before.
async fn deliver(engine: &Engine, intent: &IntentDocument, deadline: Deadline) -> Result<(), StoreError> {
    let unreadable = |e: String| StoreError::Malformed { detail: format!("intent {} can't be read: {e}", intent.id) };
    let id = intent.document.get("id").and_then(serde_json::Value::as_str).unwrap_or_default();
    let id = DocumentId::try_from(id.to_owned()).map_err(unreadable)?;
    let written = engine.store.create(&intent.target, &id, &intent.document, deadline).await?;
    match written {
        WriteOutcome::Done(etag) => {
            let message: MessageDocument =
                serde_json::from_value(intent.document.clone()).map_err(|e| unreadable(e.to_string()))?;
            engine.dispatch.offer_message(message, Some(etag));
            Ok(())
        }
        WriteOutcome::Refused(Refusal::Exists) => {
            debug!(id = %intent.id, "delivered before");
            Ok(())
        }
        WriteOutcome::Refused(refusal) => {
            Err(StoreError::Malformed { detail: format!("a delivery was answered {refusal:?}") })
        }
    }
}

/// Deletes intents that were delivered. Best effort: one that stays is delivered again, which changes nothing.
async fn forget(engine: &Engine, mut intents: Vec<IntentDocument>, deadline: Deadline) {
    intents.sort_by(|a, b| a.instance_id.cmp(&b.instance_id));
    for group in intents.chunk_by(|a, b| a.instance_id == b.instance_id) {
        for chunk in group.chunks(crate::store::batch::MAX_OPERATIONS) {
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

/// Marks an intent that can never be delivered. It stays for somebody to look at, and nobody tries it again.
async fn poison(engine: &Engine, mut intent: IntentDocument, error: &StoreError, deadline: Deadline) {
    error!(
        source = %intent.instance_id,
        target = %intent.target,
        id = %intent.id,
        %error,
        "a message can't be delivered: the intent is kept as poisoned"
    );
    crate::observe::poisoned_intent();
    intent.due = None;
    intent.poisoned = Some(error.to_string());
    let (partition, id) = (intent.instance_id.clone(), intent.id.clone());
    if let Err(error) = engine.store.replace(&partition, &id, &intent, None, deadline).await {
        warn!(%id, %error, "a poisoned intent could not be marked: it is tried again");
    }
}

/// One round of the reconciler: takes over what the process that committed it has not delivered. How many were found.
pub(crate) async fn reconcile(engine: &Arc<Engine>) -> Result<usize, StoreError> {
    let deadline = engine.deadline();
    let statement = queries::DUE_INTENTS.statement().bind("@now", engine.now());
    let intents: Vec<IntentDocument> = engine.store.query_container(statement, deadline).await?;
    let found = intents.len();
    crate::observe::outbox_age(intents.iter().map(|intent| intent.created_at).min(), engine.now());
    if found > 0 {
        debug!(intents = found, "taking over undelivered messages");
        let arrived = deliver_all(engine, intents, deadline).await;
        forget(engine, arrived, deadline).await;
    }
    Ok(found)
}

/// Takes over in the background what a poll has seen.
pub(crate) fn reconcile_soon(engine: &Arc<Engine>) {
    let engine_too = engine.clone();
    engine.spawn(async move {
        // One at a time: a target that can't be reached must not make every poll add to what waits for it.
        let Ok(_alone) = engine_too.reconciling.try_lock() else { return };
        if let Err(error) = reconcile(&engine_too).await {
            warn!(%error, "undelivered messages are taken over later");
        }
    });
}

/// Starts the reconciler; it ends with the provider.
pub(crate) fn start_reconciler(engine: &Arc<Engine>) {
    let (weak, stopping) = (Arc::downgrade(engine), engine.stopping.clone());
    let interval = engine.config.reconciler_interval();
    tokio::spawn(async move {
        tokio::select! {
            biased;
            () = stopping.cancelled() => {}
            () = reconcile_forever(weak, interval) => {}
        }
    });
}

/// Often while there is something to take over, and at the start; rarely otherwise, since it asks every partition, and
/// dispatchers that wait see what is undelivered with their own polls.
async fn reconcile_forever(engine: Weak<Engine>, interval: Duration) {
    let mut pause = interval;
    loop {
        tokio::time::sleep(pause).await;
        let Some(engine) = engine.upgrade() else { return };
        engine.forget_expired();
        pause = match reconcile(&engine).await {
            Ok(0) => (pause * 8).min(interval * IDLE_FACTOR),
            Ok(_) => interval,
            Err(error) => {
                warn!(%error, "the reconciler tries again");
                interval
            }
        };
    }
}
