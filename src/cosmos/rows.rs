//! Rows of a query, each read by itself: one that this version can't read hides no other.
//!
//! A document may be unreadable because a newer version has written it, or because somebody has changed it by hand. Each such row is
//! counted, and named in the log once a minute. [`Rows`] makes every caller say whether it can do without it.

use super::{error::StoreError, Call, Store};
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
    /// The row as JSON, or null where it is not even that.
    pub(crate) row: Value,
    /// Where the query looked, for rows that don't say where they lie.
    asked: String,
    /// Why it can't be read.
    pub(crate) error: String,
}

impl Unreadable {
    /// The key of the partition that it lies in.
    pub(crate) fn partition(&self) -> &str {
        self.text("instanceId").unwrap_or(&self.asked)
    }

    /// The document's id; some queries ask for instances only, and not for the id.
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

/// The error of a caller that needs a document which this version can't read.
pub(super) fn cant_be_read(partition: &str, id: &str, why: &str) -> StoreError {
    StoreError::Malformed { detail: format!("document {id} of partition {partition:?} can't be read: {why}") }
}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Self { read: Vec::new(), unreadable: Vec::new() }
    }
}

impl<T> Rows<T> {
    /// Rows, the unreadable ones included.
    pub(crate) fn len(&self) -> usize {
        self.read.len() + self.unreadable.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All rows, for a caller whose answer would be wrong without one of them.
    pub(crate) fn complete(self) -> Result<Vec<T>, StoreError> {
        match self.unreadable.first() {
            Some(unreadable) => Err(unreadable.to_error()),
            None => Ok(self.read),
        }
    }

    /// The rows that could be read, for a caller that can do without the others. The log names those.
    pub(crate) fn readable(self) -> Vec<T> {
        self.read
    }

    /// Both kinds, for a caller that tells of the unreadable ones.
    pub(crate) fn into_parts(self) -> (Vec<T>, Vec<Unreadable>) {
        (self.read, self.unreadable)
    }

    pub(super) fn extend(&mut self, more: Self) {
        self.read.extend(more.read);
        self.unreadable.extend(more.unreadable);
    }
}

impl Store {
    /// Reads the rows of a page one by one.
    pub(super) fn read_rows<T: DeserializeOwned>(&self, call: &Call, page: Vec<Box<RawValue>>) -> Rows<T> {
        let mut rows = Rows { read: Vec::with_capacity(page.len()), unreadable: Vec::new() };
        for raw in page {
            match serde_json::from_str(raw.get()) {
                Ok(row) => rows.read.push(row),
                Err(error) => {
                    let row = serde_json::from_str(raw.get()).unwrap_or_default();
                    let unreadable = Unreadable { row, asked: call.partition.clone(), error: error.to_string() };
                    self.tell_of(&unreadable, &call.document);
                    rows.unreadable.push(unreadable);
                }
            }
        }
        rows
    }

    fn tell_of(&self, unreadable: &Unreadable, query: &str) {
        telemetry::unreadable();
        let (partition, id) = (unreadable.partition(), unreadable.id());
        if self.inner.told.is_news(partition, id) {
            warn!(partition, id, query, error = unreadable.error, "skipped a document that this version can't read");
        }
    }
}

/// For a field of documents that may be anybody's: a value of another type says nothing.
pub(crate) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: DeserializeOwned + Default,
{
    Ok(serde_json::from_value(Value::deserialize(deserializer)?).unwrap_or_default())
}

/// Which unreadable documents the log has named lately: polls find the same ones several times a second.
#[derive(Default)]
pub(super) struct Told(Mutex<HashMap<(String, String), Instant>>);

impl Told {
    /// A document is named so often.
    const EVERY: Duration = Duration::from_secs(60);
    /// With more of them, all are named again.
    const MOST: usize = 1_000;

    fn is_news(&self, partition: &str, id: &str) -> bool {
        let now = Instant::now();
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (partition.to_owned(), id.to_owned());
        if told.get(&key).is_some_and(|last| now.duration_since(*last) < Self::EVERY) {
            return false;
        }
        if told.len() >= Self::MOST {
            told.clear();
        }
        told.insert(key, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Rows<u32> {
        let row = serde_json::json!({ "id": "m:1", "instanceId": "a", "due": "soon" });
        let unreadable = Unreadable { row, asked: "any".to_owned(), error: "no number".to_owned() };
        Rows { read: vec![1, 2], unreadable: vec![unreadable] }
    }

    #[test]
    fn who_needs_all_rows_hears_which_document_cant_be_read() {
        let error = rows().complete().unwrap_err().to_string();
        assert!(error.contains("document m:1 of partition \"a\" can't be read: no number"), "{error}");
        assert_eq!((rows().len(), rows().readable()), (3, vec![1, 2]));
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreadable_document_is_named_once_a_minute() {
        let told = Told::default();
        assert!(told.is_news("a", "m:1") && told.is_news("a", "m:2") && !told.is_news("a", "m:1"));
        tokio::time::advance(Told::EVERY).await;
        assert!(told.is_news("a", "m:1"));
    }
}
