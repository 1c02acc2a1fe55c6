//! Rows of a query. Each row is parsed separately, so that one unreadable row hides no other.
//!
//! A document is unreadable if a newer version wrote it, or if it was changed by hand. A metric counts each such row,
//! and the log names it at most once a minute. Every caller of [`Rows`] chooses between an error and the rows that
//! can be read.

use super::{call::Call, error::StoreError, Store};
use crate::telemetry;
use serde::{de::DeserializeOwned, Deserialize, Deserializer};
use serde_json::{value::RawValue, Value};
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;
use tracing::warn;

/// The rows of a page, or of a whole query.
#[derive(Debug)]
pub(crate) struct Rows<T> {
    read: Vec<T>,
    unreadable: Vec<Unreadable>,
}

/// A row that this version can't read.
#[derive(Clone, Debug)]
pub(crate) struct Unreadable {
    /// The row as JSON, or null if it is not JSON.
    pub(crate) row: Value,
    /// The partition of the query, for rows without a partition key.
    queried: String,
    /// The parser's error.
    pub(crate) error: String,
}

impl Unreadable {
    /// The key of the row's partition.
    pub(crate) fn partition(&self) -> &str {
        self.text("instanceId").unwrap_or(&self.queried)
    }

    /// The document's id. Some queries select instances without their id.
    pub(crate) fn id(&self) -> &str {
        self.text("id").unwrap_or("instance")
    }

    fn text(&self, field: &str) -> Option<&str> {
        self.row.get(field).and_then(Value::as_str)
    }

    fn to_error(&self) -> StoreError {
        cant_be_read(self.partition(), self.id(), &self.error)
    }
}

/// The error for a caller that needs a document that this version can't read.
pub(super) fn cant_be_read(partition: &str, id: &str, reason: &str) -> StoreError {
    StoreError::Malformed { detail: format!("document {id} of partition {partition:?} can't be read: {reason}") }
}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Self { read: Vec::new(), unreadable: Vec::new() }
    }
}

impl<T> Rows<T> {
    /// The number of rows, including unreadable ones.
    pub(crate) fn len(&self) -> usize {
        self.read.len() + self.unreadable.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All rows, or an error if one is unreadable: for a caller that needs every row.
    pub(crate) fn complete(self) -> Result<Vec<T>, StoreError> {
        match self.unreadable.first() {
            Some(unreadable) => Err(unreadable.to_error()),
            None => Ok(self.read),
        }
    }

    /// The rows that can be read, for a caller that does not need the others. The log names the others.
    pub(crate) fn readable(self) -> Vec<T> {
        self.read
    }

    /// The rows that can be read, and the unreadable ones: for a caller that reports both.
    pub(crate) fn into_parts(self) -> (Vec<T>, Vec<Unreadable>) {
        (self.read, self.unreadable)
    }

    pub(super) fn extend(&mut self, more: Self) {
        self.read.extend(more.read);
        self.unreadable.extend(more.unreadable);
    }
}

impl Store {
    /// Parses the rows of a page one by one.
    pub(super) fn read_rows<T: DeserializeOwned>(&self, call: &Call, page: Vec<Box<RawValue>>) -> Rows<T> {
        let mut rows = Rows { read: Vec::with_capacity(page.len()), unreadable: Vec::new() };
        for raw in page {
            match serde_json::from_str(raw.get()) {
                Ok(row) => rows.read.push(row),
                Err(error) => {
                    let row = serde_json::from_str(raw.get()).unwrap_or_default();
                    let unreadable = Unreadable { row, queried: call.partition.clone(), error: error.to_string() };
                    self.report_unreadable(&unreadable, &call.document);
                    rows.unreadable.push(unreadable);
                }
            }
        }
        rows
    }

    fn report_unreadable(&self, unreadable: &Unreadable, query: &str) {
        telemetry::unreadable();
        let (partition, id) = (unreadable.partition(), unreadable.id());
        if self.inner.unreadable_log.is_due(partition, id) {
            warn!(partition, id, query, error = unreadable.error, "skipped a document that this version can't read");
        }
    }
}

/// Deserialises a field, with the default for a value of another type: for documents that other applications may write.
pub(crate) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned + Default,
{
    Ok(serde_json::from_value(Value::deserialize(deserializer)?).unwrap_or_default())
}

/// The unreadable documents that the log has named in the last minute. Polls find the same ones several times a second.
#[derive(Default)]
pub(super) struct UnreadableLog(Mutex<HashMap<(String, String), Instant>>);

impl UnreadableLog {
    /// The interval between two log messages about the same document.
    const INTERVAL: Duration = Duration::from_secs(60);
    /// The number of remembered documents. Beyond it the log forgets them, and names all of them again.
    const CAPACITY: usize = 1_000;

    fn is_due(&self, partition: &str, id: &str) -> bool {
        let now = Instant::now();
        let mut log = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (partition.to_owned(), id.to_owned());
        if log.get(&key).is_some_and(|last| now.duration_since(*last) < Self::INTERVAL) {
            return false;
        }
        if log.len() >= Self::CAPACITY {
            log.clear();
        }
        log.insert(key, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Rows<u32> {
        let row = serde_json::json!({ "id": "m:1", "instanceId": "a", "due": "soon" });
        let unreadable = Unreadable { row, queried: "any".to_owned(), error: "no number".to_owned() };
        Rows { read: vec![1, 2], unreadable: vec![unreadable] }
    }

    #[test]
    fn a_caller_that_needs_all_rows_gets_an_error_that_names_the_unreadable_document() {
        let error = rows().complete().unwrap_err().to_string();
        assert!(error.contains("document m:1 of partition \"a\" can't be read: no number"), "{error}");
        assert_eq!((rows().len(), rows().readable()), (3, vec![1, 2]));
    }

    #[tokio::test(start_paused = true)]
    async fn the_log_names_an_unreadable_document_once_a_minute() {
        let log = UnreadableLog::default();
        assert!(log.is_due("a", "m:1") && log.is_due("a", "m:2") && !log.is_due("a", "m:1"));
        tokio::time::advance(UnreadableLog::INTERVAL).await;
        assert!(log.is_due("a", "m:1"));
    }
}
