//! Transactional batches: the service applies all operations of one partition, or none.
//!
//! The SDK returns `Ok` with status 207 for a batch in which an operation failed. Here such a batch is
//! [`BatchOutcome::RolledBack`]. That is another type than [`Committed`], so that no caller can confuse the two.

use super::error::{describe, StoreError};
use crate::model::{
    operation::{MAX_BYTES, MAX_OPERATIONS},
    Operation, Partition,
};
use azure_core::http::Etag;
use azure_data_cosmos::{
    models::{BatchResponse, TransactionalBatchOperationResult},
    options::{BatchDeleteOptions, BatchReplaceOptions, BatchUpsertOptions, Precondition},
    TransactionalBatch,
};

/// The service's answer to a batch.
#[derive(Debug)]
pub(crate) enum BatchOutcome {
    /// Every operation was applied.
    Committed(Committed),
    /// No operation was applied, because one of them failed.
    RolledBack(RolledBack),
}

/// A batch that was applied.
#[derive(Debug)]
pub(crate) struct Committed {
    /// The ETag of each operation's document, in the order of the operations.
    pub(crate) etags: Vec<Option<Etag>>,
}

impl Committed {
    /// The ETag of the document that operation `index` wrote.
    pub(crate) fn etag(&self, index: usize) -> Option<&Etag> {
        self.etags.get(index).and_then(Option::as_ref)
    }

    /// The ETag of the first document. It is the fencing condition of the next batch.
    pub(crate) fn fence(&self) -> Result<Etag, StoreError> {
        self.etag(0).cloned().ok_or_else(|| StoreError::Malformed {
            detail: "the answer to a batch has no ETag for its first document".to_owned(),
        })
    }
}

/// A batch that was not applied, because a document was not in the state that an operation expects:
///
/// - 404: the document does not exist.
/// - 409: a document with this id exists.
/// - 412: the document has another ETag.
///
/// An earlier attempt may have been applied with its answer lost, so the caller reads before it concludes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RolledBack {
    /// The index of the operation that failed.
    pub(crate) index: usize,
    /// Its status.
    pub(crate) status: u16,
    /// Its substatus, or zero.
    pub(super) substatus: u16,
    /// The pause before the next attempt that the service asks for.
    pub(crate) retry_after: Option<std::time::Duration>,
}

impl RolledBack {
    /// Whether another attempt may succeed: the failure is transient, such as throttling, or is not known.
    pub(crate) fn is_retryable(&self) -> bool {
        !matches!(self.status, 400 | 401 | 403 | 404 | 409 | 412 | 413)
    }
}

/// The answer to a batch: its status, and the result of each operation.
pub(super) struct Results {
    status: u16,
    results: Vec<TransactionalBatchOperationResult>,
}

impl Results {
    pub(super) fn read(response: BatchResponse) -> Result<Self, StoreError> {
        let status = u16::from(response.status().status_code());
        let answer = response.into_model().map_err(|e| StoreError::Malformed {
            detail: format!("the answer to a batch can't be read: {}", describe(&e)),
        })?;
        Ok(Self { status, results: answer.results().to_vec() })
    }

    /// The operation that caused the rollback. All other operations have the status 424.
    pub(super) fn failed(&self) -> Option<RolledBack> {
        let index = self.results.iter().position(|r| !r.is_success() && r.status_code() != 424)?;
        let failed = &self.results[index];
        let substatus = failed.substatus_code().and_then(|code| u16::try_from(code).ok()).unwrap_or_default();
        Some(RolledBack { index, status: failed.status_code(), substatus, retry_after: failed.retry_after() })
    }

    /// The outcome of a batch of `operations` operations.
    pub(super) fn outcome(self, operations: usize) -> Result<BatchOutcome, StoreError> {
        if let Some(back) = self.failed() {
            return Ok(BatchOutcome::RolledBack(back));
        }
        let etags = self.done(operations)?.iter().map(|r| r.etag().map(Etag::from)).collect();
        Ok(BatchOutcome::Committed(Committed { etags }))
    }

    /// The results of the operations. An error unless every one was applied.
    pub(super) fn done(&self, operations: usize) -> Result<&[TransactionalBatchOperationResult], StoreError> {
        let Self { status, results } = self;
        if *status == 207 || results.len() != operations || results.iter().any(|r| !r.is_success()) {
            let detail =
                format!("a batch of {operations} operations was answered {status} with {} results", results.len());
            return Err(StoreError::Malformed { detail });
        }
        Ok(results)
    }
}

/// Checks the limits and builds the SDK's batch.
pub(super) fn build(partition: &Partition, operations: &[Operation]) -> Result<TransactionalBatch, StoreError> {
    if operations.len() > MAX_OPERATIONS {
        return Err(StoreError::Malformed {
            detail: format!("a batch of {} operations, but the limit is {MAX_OPERATIONS}", operations.len()),
        });
    }
    check_sizes(operations)?;
    let mut batch = TransactionalBatch::new(partition);
    for operation in operations {
        batch = add(batch, operation).map_err(|e| StoreError::Malformed { detail: e.to_string() })?;
    }
    Ok(batch)
}

fn check_sizes(operations: &[Operation]) -> Result<(), StoreError> {
    let sizes: Vec<usize> = operations.iter().map(Operation::size).collect();
    let total: usize = sizes.iter().sum();
    if total <= MAX_BYTES {
        return Ok(());
    }
    let largest = sizes.iter().enumerate().max_by_key(|(_, size)| **size).map_or(0, |(index, _)| index);
    if sizes[largest] > MAX_BYTES {
        let document = format!("document {}", operations[largest].document_id());
        return Err(StoreError::TooLarge { document, bytes: sizes[largest], limit: MAX_BYTES });
    }
    let document = format!("a batch of {} operations", operations.len());
    Err(StoreError::TooLarge { document, bytes: total, limit: MAX_BYTES })
}

fn add(batch: TransactionalBatch, operation: &Operation) -> azure_data_cosmos::Result<TransactionalBatch> {
    match operation {
        Operation::Create { document } => batch.create_item(document),
        Operation::Upsert { document } => batch.upsert_item(document, None::<BatchUpsertOptions>),
        Operation::Replace { id, document, if_match } => {
            let options = if_match.as_ref().map(|etag| {
                BatchReplaceOptions::default().with_precondition(Precondition::IfMatch(Etag::from(etag.clone())))
            });
            batch.replace_item(id.as_str().to_owned(), document, options)
        }
        Operation::Delete { id, if_match } => {
            let options = if_match.as_ref().map(|etag| {
                BatchDeleteOptions::default().with_precondition(Precondition::IfMatch(Etag::from(etag.clone())))
            });
            Ok(batch.delete_item(id.as_str().to_owned(), options))
        }
    }
}
