//! Reading one document by its id.
//!
//! Three kinds of read, told apart by what they are for:
//!
//! - one that only **glances** ([`Store::read_eventual`]) may be answered by any replica, however old, and comes after all others;
//! - one that only **looks** ([`Freshness::Session`]) may be answered by any region, at least as new as what this process
//!   has written or seen;
//! - an **authoritative** one ([`Freshness::Authoritative`]) decides something, and is answered where writes go. A quorum
//!   read of another region, however strong within it, may not have the write yet: a commit would look undone, a lock free.
//!
//! No option of a point read names the write region, and a region that is preferred, hedged or failed over to for reads
//! need not be it. A transactional batch goes where writes go and nowhere else; this one holds a single read.

use super::{
    batch::Results,
    error::{describe, StoreError},
    no_etag,
    request_options::RequestOptions,
    rows::cant_be_read,
    CallOutcome, Deadline, OperationKind, Store,
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

/// Which writes a read must see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// What this process has written and been told about, at least.
    Session,
    /// Everything that was committed, answers that never came included. Every read that decides something is of this
    /// kind, and no other is.
    Authoritative,
}

/// A document as it was read, with the ETag that it had.
#[derive(Clone, Debug)]
pub(crate) struct Versioned<T> {
    pub(crate) document: T,
    pub(crate) etag: Etag,
}

impl<T: DeserializeOwned> Versioned<T> {
    /// A document as a query that selects all of it returns it.
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

/// A document as it was read, or an error that names it and says what of it can't be read: the SDK's does neither.
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
            Freshness::Authoritative => self.read_where_writes_go(partition, id, deadline).await,
        }
    }

    /// Reads what is looked at several times a second: the cheapest read there is, which may be behind what this process has
    /// written itself.
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
        let mut call = call.leaving_session();
        let span = call.span.clone();
        let reading = self.ride_out(&mut call, |options| {
            let options = ItemReadOptions::default().with_operation_options(options);
            Box::pin(self.inner.container.read_item(partition, id.as_str(), Some(options)))
        });
        let response = match reading.instrument(span).await? {
            CallOutcome::Response(response) => response,
            CallOutcome::Refused(_) => return Ok(None),
            CallOutcome::SessionRefused => return self.read_where_writes_go(partition, id, deadline).await,
        };
        let etag = response.headers().etag().cloned().ok_or_else(|| no_etag(id.as_str()))?;
        let document = model(partition, id, response.into_model())?;
        Ok(Some(Versioned { document, etag }))
    }

    async fn read_where_writes_go<T: DeserializeOwned>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        deadline: Deadline,
    ) -> Result<Option<Versioned<T>>, StoreError> {
        let mut call = self.call(OperationKind::Read, partition, id.as_str(), deadline);
        let batch = TransactionalBatch::new(partition).read_item(id.as_str().to_owned(), None);
        // A batch counts as a write: unless bodies are asked for, the SDK asks the service to leave them out.
        let results = self.send_batch(&mut call, batch, ContentResponseOnWrite::Enabled).await?;
        read_result(partition, id, &results)
    }
}

impl Store {
    /// Finds out which region takes writes, by a batch that reads nothing.
    pub(super) async fn find_write_region(&self, deadline: Deadline) -> Result<(), StoreError> {
        let (partition, nothing) = (Partition::system("any"), DocumentId::new("any", &[]));
        self.read_where_writes_go::<Value>(&partition, &nothing, deadline).await.map(drop)
    }
}

/// The document in the answer to a batch that only reads it.
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
