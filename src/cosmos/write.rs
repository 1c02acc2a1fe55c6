//! Writes: create, replace, upsert and delete of one document, and batches of one partition.

use super::{
    batch::{self, Results},
    call::{Call, CallOutcome, Response, MIN_PAUSE},
    error::{no_etag, Applied, PARTITION_FULL},
    BatchOutcome, Deadline, OperationKind, RolledBack, Store, StoreError,
};
use crate::model::{operation, DocumentId, Operation, Partition};
use azure_core::http::Etag;
use azure_data_cosmos::{
    models::ItemResponse,
    options::{BatchOptions, ContentResponseOnWrite, ItemWriteOptions, OperationOptions, Precondition},
    CosmosError, TransactionalBatch,
};
use futures::future::BoxFuture;
use serde::Serialize;
use tracing::Instrument;

/// The service's answer to a write of one document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WriteOutcome {
    /// The write was applied. Holds the document's new ETag.
    Done(Etag),
    /// The last attempt was not applied.
    Refused(Refusal),
}

/// The reason for which the service refused a write of one document. An earlier attempt of the same call may have been
/// applied: read the document before you conclude that another worker was faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The document does not exist (404).
    Absent,
    /// A document with this id exists (409).
    Exists,
    /// The document's ETag is not the expected one (412).
    Stale,
}

impl Store {
    /// Creates a document. [`Refusal::Exists`] may mean that an earlier attempt of the same call created it.
    pub(crate) async fn create<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        deadline: Deadline,
    ) -> Result<WriteOutcome, StoreError> {
        Ok(self.create_noting_repeats(partition, id, document, deadline).await?.0)
    }

    /// Creates a document, and returns whether an earlier attempt of the same call may have created it with its answer
    /// lost. If so:
    ///
    /// - a document that is created now may be a second copy of one that another worker has processed meanwhile;
    /// - a refusal may be caused by the caller's own document.
    pub(crate) async fn create_noting_repeats<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        deadline: Deadline,
    ) -> Result<(WriteOutcome, Applied), StoreError> {
        let body = to_body(document, id)?;
        let mut call = self.call(OperationKind::Create, partition, id.as_str(), deadline).sized(body.bytes);
        let written = self.write_as(&mut call, |options| {
            let options = ItemWriteOptions::default().with_operation_options(options);
            let container = &self.inner.container;
            Box::pin(container.create_item(partition, id.as_str(), &body.json, Some(options)))
        });
        let outcome = written.await?;
        Ok((outcome, call.applied))
    }

    /// Replaces a document whose ETag is `if_match`. Without `if_match`, replaces any version.
    pub(crate) async fn replace<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        if_match: Option<&Etag>,
        deadline: Deadline,
    ) -> Result<WriteOutcome, StoreError> {
        Ok(self.replace_noting_repeats(partition, id, document, if_match, deadline).await?.0)
    }

    /// Replaces a document whose ETag is `if_match`, and returns whether an earlier attempt of the same call may have
    /// replaced it with its answer lost. [`Refusal::Stale`] with [`Applied::No`] proves that another writer changed the
    /// document, so no read is needed.
    pub(crate) async fn replace_noting_repeats<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        if_match: Option<&Etag>,
        deadline: Deadline,
    ) -> Result<(WriteOutcome, Applied), StoreError> {
        let body = to_body(document, id)?;
        let mut call = self.call(OperationKind::Replace, partition, id.as_str(), deadline).sized(body.bytes);
        let written = self.write_as(&mut call, |options| {
            let options = write_options(options, if_match);
            let container = &self.inner.container;
            Box::pin(container.replace_item(partition, id.as_str(), &body.json, Some(options)))
        });
        let outcome = written.await?;
        Ok((outcome, call.applied))
    }

    /// Creates or replaces a document. With `if_match`, replaces only the version with that ETag.
    pub(crate) async fn upsert<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        if_match: Option<&Etag>,
        deadline: Deadline,
    ) -> Result<WriteOutcome, StoreError> {
        let body = to_body(document, id)?;
        let call = self.call(OperationKind::Upsert, partition, id.as_str(), deadline).sized(body.bytes);
        self.write(call, |options| {
            let options = write_options(options, if_match);
            let container = &self.inner.container;
            Box::pin(container.upsert_item(partition, id.as_str(), &body.json, Some(options)))
        })
        .await
    }

    /// Deletes a document. [`Refusal::Absent`] may mean that an earlier attempt of the same call deleted it.
    pub(crate) async fn delete(
        &self,
        partition: &Partition,
        id: &DocumentId,
        if_match: Option<&Etag>,
        deadline: Deadline,
    ) -> Result<WriteOutcome, StoreError> {
        let call = self.call(OperationKind::Delete, partition, id.as_str(), deadline);
        self.write(call, |options| {
            let options = write_options(options, if_match);
            Box::pin(self.inner.container.delete_item(partition, id.as_str(), Some(options)))
        })
        .await
    }

    /// Applies all operations in one partition, or none.
    pub(crate) async fn batch(
        &self,
        partition: &Partition,
        operations: &[Operation],
        deadline: Deadline,
    ) -> Result<BatchOutcome, StoreError> {
        Ok(self.batch_noting_repeats(partition, operations, deadline).await?.0)
    }

    /// Applies all operations in one partition, or none. Also returns whether an earlier attempt of the same call may
    /// have applied them with its answer lost.
    pub(crate) async fn batch_noting_repeats(
        &self,
        partition: &Partition,
        operations: &[Operation],
        deadline: Deadline,
    ) -> Result<(BatchOutcome, Applied), StoreError> {
        let batch = batch::build(partition, operations)?;
        let name = format!("of {} operations", operations.len());
        let bytes = operations.iter().map(Operation::size).sum();
        let mut call = self.call(OperationKind::Batch, partition, &name, deadline).sized(bytes);
        let results = self.send_batch(&mut call, batch, ContentResponseOnWrite::Disabled).await?;
        if let Some(error) = results.failed().and_then(|back| self.refusal_of(&back, partition, operations)) {
            return Err(error);
        }
        Ok((results.outcome(operations.len())?, call.applied))
    }

    /// The error for an operation of a batch that the service refuses independently of the stored documents. It is the
    /// same error as for a batch that the service refuses as a whole.
    fn refusal_of(&self, back: &RolledBack, partition: &Partition, operations: &[Operation]) -> Option<StoreError> {
        let operation = operations.get(back.index)?;
        let RolledBack { status, substatus, .. } = *back;
        let document = format!("document {} of {partition}", operation.document_id());
        Some(match (status, substatus) {
            (400 | 413, _) => {
                let (bytes, limit) = (operation.size(), operation::MAX_BYTES);
                let detail =
                    format!("the service answered {status}/{substatus} to {bytes} bytes, and the limit is {limit}");
                StoreError::Rejected { document, detail }
            }
            (403, PARTITION_FULL) => StoreError::PartitionFull { partition: partition.to_string() },
            (401 | 403, _) => {
                let detail = format!("the service answered {status}/{substatus} to {document}");
                self.inner.location.denied_with(status, substatus, detail)
            }
            _ => return None,
        })
    }

    /// Sends a batch until the answer is final, and reads the answer. The SDK returns `Ok` even for a batch that was
    /// rolled back.
    pub(super) async fn send_batch(
        &self,
        call: &mut Call,
        batch: TransactionalBatch,
        bodies: ContentResponseOnWrite,
    ) -> Result<Results, StoreError> {
        let span = call.span.clone();
        let mut pause = MIN_PAUSE;
        loop {
            let sending = self.with_retries(call, |mut options| {
                options.content_response_on_write = Some(bodies);
                let options = BatchOptions::default().with_operation_options(options);
                let container = &self.inner.container;
                Box::pin(container.execute_transactional_batch(batch.clone(), Some(options)))
            });
            let response = match sending.instrument(span.clone()).await? {
                CallOutcome::Response(response) => response,
                CallOutcome::Refused(refusal) => return Err(odd_batch(refusal)),
                CallOutcome::SessionRefused => {
                    return Err(call.retryable_error("the session token of a batch was refused"))
                }
            };
            self.inner.regions.wrote(&response.diagnostics());
            if response.requests() > 1 {
                call.applied = Applied::Perhaps;
            }
            let results = Results::read(response)?;
            // A 429 or 449 of one operation is inside the 207, and the SDK does not retry it.
            let Some(back) = results.failed().filter(RolledBack::is_retryable) else { return Ok(results) };
            self.inner.accounting.record_retry(call.kind, back.status == 429);
            self.pause(&mut pause, back.retry_after, call.deadline).await;
            if call.deadline.passed() {
                let detail = format!("operation {} was answered {}", back.index, back.status);
                return Err(call.retryable_error(&detail));
            }
        }
    }

    async fn write<'x>(
        &self,
        mut call: Call,
        attempt: impl FnMut(OperationOptions) -> BoxFuture<'x, Result<ItemResponse, CosmosError>>,
    ) -> Result<WriteOutcome, StoreError> {
        self.write_as(&mut call, attempt).await
    }

    async fn write_as<'x>(
        &self,
        call: &mut Call,
        attempt: impl FnMut(OperationOptions) -> BoxFuture<'x, Result<ItemResponse, CosmosError>>,
    ) -> Result<WriteOutcome, StoreError> {
        let span = call.span.clone();
        match self.with_retries(call, attempt).instrument(span).await? {
            CallOutcome::Refused(refusal) => Ok(WriteOutcome::Refused(refusal)),
            CallOutcome::SessionRefused => Err(call.retryable_error("the session token of a write was refused")),
            CallOutcome::Response(response) => {
                self.inner.regions.wrote(&response.diagnostics());
                if response.requests() > 1 {
                    call.applied = Applied::Perhaps;
                }
                // The answer to a delete has no ETag.
                let etag = response.headers().etag().cloned();
                match etag {
                    Some(etag) => Ok(WriteOutcome::Done(etag)),
                    None if u16::from(response.status().status_code()) == 204 => Ok(WriteOutcome::Done(Etag::from(""))),
                    None => Err(no_etag(&call.document)),
                }
            }
        }
    }
}

fn write_options(options: OperationOptions, if_match: Option<&Etag>) -> ItemWriteOptions {
    let options = ItemWriteOptions::default().with_operation_options(options);
    match if_match {
        Some(etag) => options.with_precondition(Precondition::IfMatch(etag.clone())),
        None => options,
    }
}

/// A document as JSON, and its size.
struct Body {
    json: serde_json::Value,
    bytes: usize,
}

fn to_body(document: &impl Serialize, id: &DocumentId) -> Result<Body, StoreError> {
    let json = serde_json::to_value(document)
        .map_err(|e| StoreError::Malformed { detail: format!("document {id} can't be serialised as JSON: {e}") })?;
    let bytes = operation::size_of(&json);
    if bytes > operation::MAX_BYTES {
        return Err(StoreError::TooLarge { document: format!("document {id}"), bytes, limit: operation::MAX_BYTES });
    }
    Ok(Body { json, bytes })
}

fn odd_batch(refusal: Refusal) -> StoreError {
    StoreError::Malformed { detail: format!("the service answered {refusal:?} to a batch as a whole") }
}
