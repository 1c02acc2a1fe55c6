//! Enqueues activities from outside a turn.

use crate::{
    cosmos::{BatchOutcome, Freshness, StoreError},
    discovery,
    engine::Engine,
    model::{item, operation::MAX_DOCUMENT_BYTES, ActivityDocument, DocumentId, Operation, Partition},
};
use duroxide::providers::{ProviderError, WorkItem};
use std::sync::Arc;

/// Enqueues an activity.
pub(crate) async fn enqueue(engine: &Arc<Engine>, work_item: &WorkItem) -> Result<(), ProviderError> {
    const OPERATION: &str = "enqueue_for_worker";
    let refuse = |why: String| ProviderError::permanent(OPERATION, why);
    let WorkItem::ActivityExecute { instance, execution_id, id, .. } = work_item else {
        return Err(refuse(format!("{} is not an activity", item::kind(work_item))));
    };
    let partition = Partition::instance(instance).map_err(|e| refuse(e.to_string()))?;
    let mut document_id = ActivityDocument::scheduled_id(*execution_id, *id);
    loop {
        let (mut document, payload) = ActivityDocument::new(
            partition.clone(),
            document_id.clone(),
            work_item,
            engine.sequencer.next(),
            engine.now(),
        )
        .map_err(|e| refuse(format!("the activity can't be written as JSON: {e}")))?;
        let failed = |e: StoreError| e.into_provider_error(OPERATION);
        let mut operations = vec![Operation::create(&document).map_err(|e| failed(e.into()))?];
        if let Some(payload) = &payload {
            operations.push(Operation::upsert(payload).map_err(|e| failed(e.into()))?);
        }
        let largest = operations.iter().map(Operation::size).max().unwrap_or(0);
        if largest > MAX_DOCUMENT_BYTES {
            return Err(refuse(format!("the activity has {largest} bytes, but the limit is {MAX_DOCUMENT_BYTES}")));
        }
        match engine.store.batch(&partition, &operations, engine.deadline()).await.map_err(failed)? {
            BatchOutcome::Committed(committed) => {
                document.etag = committed.etag(0).cloned();
                discovery::activity_written(engine, document).await;
                return Ok(());
            }
            BatchOutcome::RolledBack(back) if back.status == 409 => {
                if is_own(engine, &document).await.map_err(failed)? {
                    discovery::activity_written(engine, document).await;
                    return Ok(());
                }
                // The same activity is already queued. Both run, as in any queue.
                let again = engine.new_token();
                document_id = DocumentId::new("w", &[&execution_id.to_string(), &id.to_string(), &again]);
            }
            BatchOutcome::RolledBack(back) => {
                return Err(refuse(format!("Cosmos DB answered {} for the activity", back.status)));
            }
        }
    }
}

/// Whether this call wrote the existing activity, and only its answer was lost.
async fn is_own(engine: &Engine, document: &ActivityDocument) -> Result<bool, StoreError> {
    let freshness = Freshness::Authoritative;
    let found = engine
        .store
        .read::<ActivityDocument>(&document.instance_id, &document.id, freshness, engine.deadline())
        .await?;
    Ok(found.is_some_and(|found| found.document.seq == document.seq))
}
