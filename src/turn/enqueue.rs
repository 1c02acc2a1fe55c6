//! Enqueues messages and appends events from outside a turn.
//!
//! A create with a new, unique id is safe to repeat: "already exists" means that an earlier request succeeded.

use crate::{
    cosmos::{queries, Applied, BatchOutcome, Deadline, Freshness, Refusal, StoreError, Versioned, WriteOutcome},
    discovery,
    engine::Engine,
    model::{item, EventSet, Fingerprints, HistoryDocument, InstanceDocument, MessageDocument, Operation, Partition},
    queue::turn::{write_with_inline_claim, InlineWrite, MessageKind},
    turn::{instance_id, load, read},
};
use azure_core::http::Etag;
use duroxide::{
    providers::{ProviderError, WorkItem},
    Event,
};
use std::{sync::Arc, time::Duration};
use tracing::{info, warn};

/// Enqueues a message to its instance.
pub(crate) async fn message(
    engine: &Arc<Engine>,
    work_item: &WorkItem,
    delay: Option<Duration>,
) -> Result<(), ProviderError> {
    const OPERATION: &str = "enqueue_for_orchestrator";
    let refuse = |why: String| ProviderError::permanent(OPERATION, why);
    let instance = item::target(work_item)
        .ok_or_else(|| refuse(format!("{} does not go to an orchestration", item::kind(work_item))))?;
    let partition = Partition::instance(instance).map_err(|e| refuse(e.to_string()))?;
    let now = engine.now();
    // Only the timers of a turn wait for their own time. A message without a delay is visible at once.
    let due = delay.map_or(now, |delay| engine.clock.after(delay));
    let key = MessageDocument::outside_key(&engine.new_token());
    let mut document = MessageDocument::new(partition.clone(), &key, work_item, engine.sequencer.next(), now, due)
        .map_err(|e| refuse(format!("the message can't be written as JSON: {e}")))?;
    document.known_by = engine.discovery.turn_holder_name();
    if let Some(bytes) = document.oversize() {
        let (kind, limit) = (item::kind(work_item), MessageDocument::MAX_BYTES);
        return Err(refuse(format!("the message {kind} for {instance:?} has {bytes} bytes, but the limit is {limit}")));
    }
    let (kind, deadline) = (MessageKind::of(work_item), engine.deadline());
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    let before = match write_with_inline_claim(engine, &document, &document, kind, deadline).await.map_err(failed)? {
        InlineWrite::Done => return Ok(()),
        InlineWrite::Written => {
            discovery::message_written(engine, document, None, None).await;
            return Ok(());
        }
        InlineWrite::Plain(before) => before,
    };
    let written = engine.store.create_noting_repeats(&partition, &document.id, &document, deadline).await;
    let (outcome, applied) = written.map_err(failed)?;
    match (outcome, before.or(applied)) {
        (WriteOutcome::Done(etag), Applied::Perhaps) => {
            let removed = remove_copy(engine, &document, &etag).await.unwrap_or_else(|error| {
                // The message is enqueued in any case, and most turns recognise a copy themselves.
                warn!(instance_id = instance, %error, "could not check whether a message was written twice");
                false
            });
            if !removed {
                discovery::message_written(engine, document, None, None).await;
            }
            Ok(())
        }
        (WriteOutcome::Done(etag), Applied::No) => {
            discovery::message_written(engine, document, Some(etag), None).await;
            Ok(())
        }
        // The write happened, and its answer was lost. The message may have been consumed since.
        (WriteOutcome::Refused(Refusal::Exists), _) => {
            discovery::message_written(engine, document, None, None).await;
            Ok(())
        }
        (WriteOutcome::Refused(refusal), _) => Err(refuse(format!("Cosmos DB refused the message: {refusal:?}"))),
    }
}

/// Removes a message that was written twice, if a turn consumed the first copy in between and a history document has
/// its fingerprint. Turns of the same execution, and the first turns of the next, recognise the copy themselves. This
/// check covers all executions.
async fn remove_copy(engine: &Engine, message: &MessageDocument, etag: &Etag) -> Result<bool, StoreError> {
    let (partition, deadline) = (&message.instance_id, engine.deadline());
    let statement = queries::CONSUMED.statement().authoritative();
    let fingerprints: Vec<Fingerprints> = engine.store.query_partition(partition, statement, deadline).await?;
    if fingerprints.iter().all(|fingerprints| fingerprints.consumed(std::iter::once(&message.id)).is_empty()) {
        return Ok(false);
    }
    info!(instance_id = partition.instance_id(), id = %message.id, "deleting the second copy of a message");
    engine.store.delete(partition, &message.id, Some(etag), deadline).await?;
    Ok(true)
}

/// Appends events to an execution, outside any turn.
pub(crate) async fn events(
    engine: &Arc<Engine>,
    instance: &str,
    execution: u64,
    events: &[Event],
) -> Result<(), ProviderError> {
    const OPERATION: &str = "append_with_execution";
    let refuse = |why: String| ProviderError::permanent(OPERATION, why);
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    let partition = Partition::instance(instance).map_err(|e| refuse(e.to_string()))?;
    let Some(first) = events.iter().map(|event| event.event_id).min() else { return Ok(()) };
    if first == 0 {
        return Err(refuse("an event has no id: the runtime assigns them".to_owned()));
    }
    let deadline = engine.deadline();
    let key = engine.new_token();
    let texts: Result<Vec<String>, _> = events.iter().map(serde_json::to_string).collect();
    let texts = texts.map_err(|e| refuse(format!("an event can't be written as JSON: {e}")))?;
    let history = HistoryDocument::new(partition.clone(), execution, &key, 0, first, texts);
    loop {
        // The write is conditional on a document that was read before this comparison.
        let found = engine.read_latest(&partition, deadline).await.map_err(failed)?;
        check_duplicates(engine, &partition, execution, events).await?;
        if append(engine, found, &history, events, deadline).await.map_err(failed)? {
            return Ok(());
        }
    }
}

/// Fails if the execution already has an event with one of these ids.
async fn check_duplicates(
    engine: &Arc<Engine>,
    partition: &Partition,
    execution: u64,
    events: &[Event],
) -> Result<(), ProviderError> {
    const OPERATION: &str = "append_with_execution";
    let documents = read::history(engine, partition, execution, Freshness::Authoritative, engine.per_page()).await;
    let documents = documents.map_err(|e| e.into_provider_error(OPERATION))?;
    let mut ids = EventSet::default();
    for event in load::readable_events(&documents) {
        ids.insert(event.event_id);
    }
    match events.iter().find(|event| !ids.insert(event.event_id)) {
        None => Ok(()),
        Some(event) => Err(ProviderError::permanent(
            OPERATION,
            format!("Failed to append history: there already is an event with id {}", event.event_id),
        )),
    }
}

/// Appends the events in one batch that also changes the instance document, so that caches notice. Returns `false` if
/// another writer changed the document first.
async fn append(
    engine: &Arc<Engine>,
    found: Option<Versioned<InstanceDocument>>,
    history: &HistoryDocument,
    events: &[Event],
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let partition = &history.instance_id;
    let (mut document, etag) = match found {
        Some(Versioned { document, etag }) => (document, Some(etag)),
        None => (InstanceDocument::new(partition.clone(), &engine.new_token(), engine.now()), None),
    };
    if document.removal.deleting.is_some() {
        // The deletion would delete the new events too, or they would remain after it.
        engine.lifecycle().recover_deletion(engine, &document, deadline).await?;
        return Err(StoreError::Unavailable { detail: "the instance is being deleted".to_owned() });
    }
    if document.current.execution == history.execution {
        for event in events {
            document.current.events.insert(event.event_id);
        }
    }
    document.counting.totals.events += events.len() as u64;
    let instance = match &etag {
        Some(etag) => Operation::replace(instance_id(), &document, Some(etag))?,
        None => Operation::create(&document)?,
    };
    engine.cache.forget(partition);
    let operations = [instance, Operation::create(history)?];
    match engine.store.batch(partition, &operations, deadline).await? {
        BatchOutcome::Committed(_) => Ok(true),
        BatchOutcome::RolledBack(_) => {
            // Either the batch happened and its answer was lost, or another writer changed the instance.
            let freshness = Freshness::Authoritative;
            let there = engine.store.read::<serde_json::Value>(partition, &history.id, freshness, deadline).await?;
            Ok(there.is_some())
        }
    }
}
