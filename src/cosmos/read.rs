//! Reads one document by its id.
//!
//! There are three kinds of read:
//!
//! - **eventual** ([`Store::read_eventual`]): any replica may answer, however old its data. It has low priority.
//! - **session** ([`Freshness::Session`]): any region may answer whose data includes all that this process has
//!   written or seen.
//! - **authoritative** ([`Freshness::Authoritative`]): the write region answers. Every decision of the provider depends
//!   on such a read. A quorum read of another region may lack the newest write. Then a commit would look undone, or a
//!   lock free.
//!
//! No option of a point read names the write region. A region that is preferred, hedged or failed over to for reads
//! need not be the write region. A transactional batch goes to the write region only, so an authoritative read is a
//! batch of one read.

use super::{
    batch::Results,
    call::CallOutcome,
    error::{describe, no_etag, StoreError},
    request_options::RequestOptions,
    rows::cant_be_read,
    Deadline, OperationKind, Store,
};
use crate::model::{DocumentId, Partition};
use azure_core::http::Etag;
use azure_data_cosmos::{
    options::{ContentResponseOnWrite, ItemReadOptions},
    CosmosError, TransactionalBatch,
};
use serde::{
    de::{DeserializeOwned, Error},
    Deserialize, Deserializer,
};
use serde_json::{value::RawValue, Value};
use tracing::Instrument;

/// The writes that a read must see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// At least every write of this process that the service has confirmed.
    Session,
    /// Every committed write, including those whose answers were lost. The provider uses it for each read that a
    /// decision depends on, and for no other.
    Authoritative,
}

/// A document, and its ETag when it was read.
#[derive(Clone, Debug)]
pub(crate) struct Versioned<T> {
    pub(crate) document: T,
    pub(crate) etag: Etag,
}

impl<T: DeserializeOwned> Versioned<T> {
    /// A document from a row of a query that selects whole documents.
    pub(crate) fn from_row(row: Value) -> Result<Self, StoreError> {
        let id = row.get("id").and_then(Value::as_str).unwrap_or("without id").to_owned();
        let etag = row.get("_etag").and_then(Value::as_str).ok_or_else(|| no_etag(&id))?;
        let etag = Etag::from(etag.to_owned());
        let document = serde_json::from_value(row)
            .map_err(|e| StoreError::Malformed { detail: format!("document {id} can't be read: {e}") })?;
        Ok(Self { document, etag })
    }
}

/// A row of a query that selects whole documents.
impl<'de, T: DeserializeOwned> Deserialize<'de> for Versioned<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_row(Value::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

/// Parses a document. The error names the document and the reason, which the SDK's error does not.
fn model<T: DeserializeOwned>(
    partition: &Partition,
    id: &DocumentId,
    raw: Result<Box<RawValue>, CosmosError>,
) -> Result<T, StoreError> {
    let read = raw.map_err(|error| describe(&error));
    let read = read.and_then(|raw| serde_json::from_str(raw.get()).map_err(|error| error.to_string()));
    read.map_err(|why| cant_be_read(partition.as_str(), id.as_str(), &why))
}

impl Store {
    /// Reads a document by its id.
    pub(crate) async fn read<T: DeserializeOwned>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        freshness: Freshness,
        deadline: Deadline,
    ) -> Result<Option<Versioned<T>>, StoreError> {
        match freshness {
            Freshness::Session => self.read_anywhere(partition, id, RequestOptions::default(), deadline).await,
            Freshness::Authoritative => self.read_in_write_region(partition, id, deadline).await,
        }
    }

    /// Reads a document at the lowest price, for documents that are read several times a second. The answer may be
    /// older than the writes of this process.
    pub(crate) async fn read_eventual<T: DeserializeOwned>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        deadline: Deadline,
    ) -> Result<Option<Versioned<T>>, StoreError> {
        self.read_anywhere(partition, id, RequestOptions::read_eventual(), deadline).await
    }

    async fn read_anywhere<T: DeserializeOwned>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        request_options: RequestOptions,
        deadline: Deadline,
    ) -> Result<Option<Versioned<T>>, StoreError> {
        let call = self.call(OperationKind::Read, partition, id.as_str(), deadline).with_options(request_options);
        let mut call = call.ending_on_session_refusal();
        let span = call.span.clone();
        let reading = self.with_retries(&mut call, |options| {
            let options = ItemReadOptions::default().with_operation_options(options);
            Box::pin(self.inner.container.read_item(partition, id.as_str(), Some(options)))
        });
        let response = match reading.instrument(span).await? {
            CallOutcome::Response(response) => response,
            CallOutcome::Refused(_) => return Ok(None),
            CallOutcome::SessionRefused => return self.read_in_write_region(partition, id, deadline).await,
        };
        let etag = response.headers().etag().cloned().ok_or_else(|| no_etag(id.as_str()))?;
        let document = model(partition, id, response.into_model())?;
        Ok(Some(Versioned { document, etag }))
    }

    async fn read_in_write_region<T: DeserializeOwned>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        deadline: Deadline,
    ) -> Result<Option<Versioned<T>>, StoreError> {
        let mut call = self.call(OperationKind::Read, partition, id.as_str(), deadline);
        let batch = TransactionalBatch::new(partition).read_item(id.as_str().to_owned(), None);
        // A batch counts as a write, and the SDK asks for no bodies of writes by default.
        let results = self.send_batch(&mut call, batch, ContentResponseOnWrite::Enabled).await?;
        read_result(partition, id, &results)
    }
}

impl Store {
    /// Finds the write region with a batch that reads a missing document.
    pub(super) async fn find_write_region(&self, deadline: Deadline) -> Result<(), StoreError> {
        let (partition, nothing) = (Partition::system("any"), DocumentId::new("any", &[]));
        self.read_in_write_region::<Value>(&partition, &nothing, deadline).await.map(drop)
    }
}

/// The document in the answer to a batch of one read.
fn read_result<T: DeserializeOwned>(
    partition: &Partition,
    id: &DocumentId,
    results: &Results,
) -> Result<Option<Versioned<T>>, StoreError> {
    match results.failed() {
        Some(failed) if failed.status == 404 => return Ok(None),
        Some(failed) => {
            let detail = format!("the read of {id} was answered {}", failed.status);
            return Err(StoreError::Malformed { detail });
        }
        None => {}
    }
    let result = &results.done(1)?[0];
    let etag = result.etag().map(Etag::from).ok_or_else(|| no_etag(id.as_str()))?;
    let raw = result.into_model().transpose().ok_or_else(|| StoreError::Malformed {
        detail: format!("the service's answer for {id} has an ETag but no document"),
    })?;
    Ok(Some(Versioned { document: model(partition, id, raw)?, etag }))
}
