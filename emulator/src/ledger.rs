//! The size and the index terms of every stored item: what the price of its next write depends on.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::indexing::Indexing;
use crate::prices;
use crate::request::encode;
use crate::service::ContainerName;
use crate::terms::count_changed;

/// An item's name in the account.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ItemKey {
    pub container: ContainerName,
    /// A JSON array, as in the request header.
    pub partition_key: String,
    pub id: String,
}

impl ItemKey {
    /// Clients may spell the same partition key differently: with spaces, or with letters escaped.
    pub fn new(container: ContainerName, partition_key: &str, id: &str) -> Self {
        let partition_key = match serde_json::from_str::<Value>(partition_key) {
            Ok(components) => components.to_string(),
            Err(_) => partition_key.to_owned(),
        };
        Self { container, partition_key, id: id.to_owned() }
    }

    /// The item's path.
    pub fn path(&self) -> String {
        format!("{}/docs/{}", self.container.path(), encode(&self.id))
    }
}

/// How an item is written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Put {
    Create,
    Replace,
}

impl Put {
    fn price(self, bytes: usize) -> f64 {
        match self {
            Self::Create => prices::create(bytes),
            Self::Replace => prices::replace(bytes),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    containers: Mutex<HashMap<ContainerName, Items>>,
}

/// The index terms of each item, by partition key and id.
type Items = HashMap<(String, String), Vec<u64>>;

impl Ledger {
    /// Records a write that succeeded and returns its price.
    pub fn put(&self, key: &ItemKey, put: Put, document: &Value, indexing: &Indexing) -> f64 {
        let terms = indexing.terms(document);
        let changed = self.with(|containers| {
            let items = containers.entry(key.container.clone()).or_default();
            let entry = items.entry((key.partition_key.clone(), key.id.clone())).or_default();
            let changed = count_changed(entry, &terms);
            *entry = terms;
            changed
        });
        put.price(text_len(document)) + prices::TERM * changed as f64
    }

    /// Records a deletion that succeeded and returns its price.
    pub fn delete(&self, key: &ItemKey) -> f64 {
        let terms = self.with(|containers| {
            let items = containers.get_mut(&key.container)?;
            items.remove(&(key.partition_key.clone(), key.id.clone()))
        });
        prices::DELETE + prices::TERM * terms.map_or(0, |terms| terms.len()) as f64
    }

    /// The items of a container that were written so far.
    pub fn items(&self, container: &ContainerName) -> Vec<ItemKey> {
        let key = |(partition_key, id): &(String, String)| ItemKey {
            container: container.clone(),
            partition_key: partition_key.clone(),
            id: id.clone(),
        };
        self.with(|containers| containers.get(container).map_or_else(Vec::new, |items| items.keys().map(key).collect()))
    }

    /// Drops the items of the containers that are not kept.
    pub fn retain(&self, keep: impl Fn(&ContainerName) -> bool) {
        self.with(|containers| containers.retain(|name, _| keep(name)));
    }

    fn with<R>(&self, change: impl FnOnce(&mut HashMap<ContainerName, Items>) -> R) -> R {
        change(&mut self.containers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The length of a value as JSON text.
pub(crate) fn text_len(value: &Value) -> usize {
    struct Count(usize);

    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut count = Count(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        // Only maps whose keys are no strings fail, and a `Value` has none.
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key() -> ItemKey {
        let container = ContainerName::new("d", "c");
        ItemKey::new(container, r#"[ "p" ]"#, "1")
    }

    #[test]
    fn only_terms_that_change_are_paid_for() {
        let (ledger, everything) = (Ledger::default(), Indexing::of(&json!({})));
        let put = |put, value: u64| ledger.put(&key(), put, &json!({ "id": "1", "value": value }), &everything);
        let close = |left: f64, right: f64| assert!((left - right).abs() < 1e-9, "{left}, not {right}");
        close(put(Put::Create, 1), 4.95 + 2.0 * 0.2);
        close(put(Put::Replace, 1), 9.9);
        close(put(Put::Replace, 2), 9.9 + 2.0 * 0.2);
        close(ledger.delete(&key()), 5.0 + 2.0 * 0.2);
        close(ledger.delete(&key()), 5.0);
    }

    #[test]
    fn the_items_of_a_dropped_container_are_forgotten() {
        let ledger = Ledger::default();
        ledger.put(&key(), Put::Create, &json!({}), &Indexing::default());
        assert_eq!(ledger.items(&key().container), [key()]);
        ledger.retain(|_| false);
        assert!(ledger.items(&key().container).is_empty());
    }

    #[test]
    fn the_length_of_a_value_is_that_of_its_text() {
        let value = json!({ "text": "ü\n", "list": [1, 2.5, null] });
        assert_eq!(text_len(&value), value.to_string().len());
    }
}
