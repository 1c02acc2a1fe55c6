//! Request units by the service's cost shape. The emulator's own charges are flat for batches and queries, so they are
//! worked out here, from what goes over the wire.
//!
//! For each KB, and at least one: read 1, create 5.5, replace 10, delete 5.5, also inside a batch; on top 0.3 for every
//! indexed path or composite index whose entry changes. A query: 2.5 for each physical partition that it visits, and 1
//! for each KB that it returns. What is refused costs 1. Metadata is free.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use duroxide_cosmos_emulator::{LocalAccount, RequestKind, WireAnswer, WireRequest};
use serde_json::Value;

const READ: f64 = 1.0;
const CREATE: f64 = 5.5;
const REPLACE: f64 = 10.0;
const DELETE: f64 = 5.5;
const INDEX_ENTRY: f64 = 0.3;
const QUERY_PARTITION: f64 = 2.5;
const REFUSED: f64 = 1.0;

/// The first byte of Cosmos's binary JSON.
const BINARY: u8 = 0x80;

/// Counts the request units of an account from the moment it is attached.
#[derive(Clone, Default)]
pub struct Meter {
    ledger: Arc<Mutex<Ledger>>,
}

#[derive(Default)]
struct Ledger {
    partitions: f64,
    /// The paths of each index: one, or several for a composite index.
    indexes: Vec<Vec<String>>,
    items: HashMap<(String, String), Item>,
    /// By the client's name; none for those that have none.
    units: HashMap<Option<String>, f64>,
}

/// What a later write of the same item needs to know.
struct Item {
    bytes: usize,
    entries: Vec<Option<Vec<Value>>>,
}

/// A write of one item, alone or in a batch.
enum Write<'a> {
    Put(&'a Value),
    Delete(&'a str),
}

impl Meter {
    /// A meter for an account with so many physical partitions; whoever observes the account tells it of every exchange.
    pub fn new(partitions: u32) -> Self {
        let meter = Self::default();
        meter.with(|ledger| ledger.partitions = f64::from(partitions));
        meter
    }

    /// Meters an account with so many physical partitions.
    pub fn attach(account: &LocalAccount, partitions: u32) -> Self {
        let meter = Self::new(partitions);
        let observer = meter.clone();
        account.wire().observe(move |request, answer| observer.note(request, answer));
        meter
    }

    /// Takes an exchange into account.
    pub fn note(&self, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
        self.with(|ledger| ledger.note(request, answer));
    }

    /// Request units so far.
    pub fn units(&self) -> f64 {
        self.with(|ledger| ledger.units.values().sum())
    }

    /// Request units of one client so far.
    pub fn units_of(&self, client: &str) -> f64 {
        self.with(|ledger| ledger.units.get(&Some(client.to_owned())).copied().unwrap_or_default())
    }

    fn with<R>(&self, change: impl FnOnce(&mut Ledger) -> R) -> R {
        change(&mut self.ledger.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Ledger {
    fn note(&mut self, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
        let refused = answer.status >= 400;
        let units = match request.kind {
            RequestKind::Container => {
                self.read_policy(request);
                0.0
            }
            kind if kind.is_metadata() => 0.0,
            _ if refused => REFUSED,
            RequestKind::Query | RequestKind::ChangeFeed => self.query(request, answer),
            RequestKind::Batch => self.batch(request, answer),
            RequestKind::Create | RequestKind::Upsert | RequestKind::Replace => {
                request.json().map_or(REFUSED, |body| self.write(request, Write::Put(&body)))
            }
            RequestKind::Delete => self.write(request, Write::Delete(request.document_id.unwrap_or_default())),
            _ => READ * kilobytes(text_len(answer)),
        };
        *self.units.entry(request.client.map(str::to_owned)).or_default() += units;
    }

    fn query(&self, request: &WireRequest<'_>, answer: &WireAnswer<'_>) -> f64 {
        let one = request.partition_key.is_some() || request.partition_range.is_some();
        let visited = if one { 1.0 } else { self.partitions };
        QUERY_PARTITION * visited + text_len(answer) as f64 / 1024.0
    }

    fn batch(&mut self, request: &WireRequest<'_>, answer: &WireAnswer<'_>) -> f64 {
        let (Some(Value::Array(operations)), Some(Value::Array(results))) = (request.json(), answer.json()) else {
            return REFUSED;
        };
        if results.iter().any(|result| result["statusCode"].as_u64().is_none_or(|status| status >= 400)) {
            return REFUSED;
        }
        let cost = |operation: &Value| match operation["operationType"].as_str() {
            Some("Delete") => self.write(request, Write::Delete(operation["id"].as_str().unwrap_or_default())),
            Some("Read") => READ,
            _ => self.write(request, Write::Put(&operation["resourceBody"])),
        };
        operations.iter().map(cost).sum()
    }

    fn write(&mut self, request: &WireRequest<'_>, write: Write<'_>) -> f64 {
        let partition = request.partition_key.unwrap_or_default().to_owned();
        match write {
            Write::Put(body) => {
                let item = Item { bytes: body.to_string().len(), entries: self.entries(body) };
                let size = kilobytes(item.bytes);
                let now = item.entries.clone();
                let before = self.items.insert((partition, body["id"].as_str().unwrap_or_default().to_owned()), item);
                match before {
                    None => CREATE * size + INDEX_ENTRY * now.iter().flatten().count() as f64,
                    Some(before) => REPLACE * size + INDEX_ENTRY * changed(&before.entries, &now) as f64,
                }
            }
            Write::Delete(id) => match self.items.remove(&(partition, id.to_owned())) {
                None => DELETE,
                Some(item) => {
                    DELETE * kilobytes(item.bytes) + INDEX_ENTRY * item.entries.iter().flatten().count() as f64
                }
            },
        }
    }

    /// The item's entry in each index; none where a path is missing from it.
    fn entries(&self, item: &Value) -> Vec<Option<Vec<Value>>> {
        let entry = |paths: &Vec<String>| paths.iter().map(|path| item.pointer(path).cloned()).collect();
        self.indexes.iter().map(entry).collect()
    }

    /// Learns the indexes from the request that creates the container.
    fn read_policy(&mut self, request: &WireRequest<'_>) {
        let Some(body) = request.json().filter(|body| body.get("indexingPolicy").is_some()) else { return };
        let policy = &body["indexingPolicy"];
        let path = |entry: &Value| Some(entry["path"].as_str()?.trim_end_matches("/?").to_owned());
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let single = list(&policy["includedPaths"]).iter().filter_map(path).map(|path| vec![path]).collect::<Vec<_>>();
        let composites = list(&policy["compositeIndexes"]);
        let composite = composites.iter().map(|index| list(index).iter().filter_map(path).collect());
        self.indexes = single.into_iter().chain(composite).collect();
    }
}

fn changed(before: &[Option<Vec<Value>>], after: &[Option<Vec<Value>>]) -> usize {
    before.iter().zip(after).filter(|(before, after)| before != after).count()
}

/// The size in KB, and at least one.
fn kilobytes(bytes: usize) -> f64 {
    (bytes as f64 / 1024.0).max(1.0)
}

/// The length of an answer as text, however it was sent.
fn text_len(answer: &WireAnswer<'_>) -> usize {
    match answer.body.first() {
        Some(&BINARY) => answer.json().map_or(answer.body.len(), |body| body.to_string().len()),
        _ => answer.body.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_entries_that_change_are_paid_for() {
        let entry = |value: u64| Some(vec![Value::from(value)]);
        assert_eq!(changed(&[entry(1), entry(2), None], &[entry(1), entry(3), None]), 1);
        assert_eq!(changed(&[entry(1), None], &[None, entry(1)]), 2);
    }

    #[test]
    fn anything_costs_at_least_a_kilobyte() {
        assert_eq!(kilobytes(10), 1.0);
        assert_eq!(kilobytes(10 * 1024), 10.0);
    }
}
