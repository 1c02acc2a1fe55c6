//! The index terms of every stored item. The price of a write depends on the number of terms that it changes.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::document_terms::count_changed;
use crate::indexing::Indexing;
use crate::names::{ContainerName, ItemKey};
use crate::prices;

/// Whether a write creates or replaces an item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum WriteKind {
    Create,
    Replace,
}

impl WriteKind {
    fn price(self, bytes: usize) -> f64 {
        match self {
            Self::Create => prices::create(bytes),
            Self::Replace => prices::replace(bytes),
        }
    }
}

/// The index terms of the stored items, by container.
#[derive(Debug, Default)]
pub(crate) struct StoredTerms {
    containers: Mutex<HashMap<ContainerName, Items>>,
}

/// The index terms of each item, by partition key and id.
type Items = HashMap<(String, String), Vec<u64>>;

impl StoredTerms {
    /// Records a successful write and returns its price.
    pub fn put(&self, key: &ItemKey, put: WriteKind, document: &Value, indexing: &Indexing) -> f64 {
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

    /// Records a successful deletion and returns its price.
    pub fn delete(&self, key: &ItemKey) -> f64 {
        let terms = self.with(|containers| {
            let items = containers.get_mut(&key.container)?;
            items.remove(&(key.partition_key.clone(), key.id.clone()))
        });
        prices::DELETE + prices::TERM * terms.map_or(0, |terms| terms.len()) as f64
    }

    /// Returns the items of a container.
    pub fn items(&self, container: &ContainerName) -> Vec<ItemKey> {
        let key = |(partition_key, id): &(String, String)| ItemKey {
            container: container.clone(),
            partition_key: partition_key.clone(),
            id: id.clone(),
        };
        self.with(|containers| containers.get(container).map_or_else(Vec::new, |items| items.keys().map(key).collect()))
    }

    /// Forgets the items of every container for which `keep` returns false.
    pub fn retain(&self, keep: impl Fn(&ContainerName) -> bool) {
        self.with(|containers| containers.retain(|name, _| keep(name)));
    }

    fn with<R>(&self, change: impl FnOnce(&mut HashMap<ContainerName, Items>) -> R) -> R {
        change(&mut self.containers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns the length of a value as JSON text.
pub(crate) fn text_len(value: &Value) -> usize {
    struct ByteCount(usize);

    impl io::Write for ByteCount {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let mut count = ByteCount(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        // Serialisation fails only for maps whose keys are not strings, and a `Value` has none.
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
    fn a_write_pays_only_for_the_terms_that_it_changes() {
        let (stored_terms, everything) = (StoredTerms::default(), Indexing::of(&json!({})));
        let put = |put, value: u64| stored_terms.put(&key(), put, &json!({ "id": "1", "value": value }), &everything);
        let close = |left: f64, right: f64| assert!((left - right).abs() < 1e-9, "{left}, not {right}");
        close(put(WriteKind::Create, 1), 4.95 + 2.0 * 0.2);
        close(put(WriteKind::Replace, 1), 9.9);
        close(put(WriteKind::Replace, 2), 9.9 + 2.0 * 0.2);
        close(stored_terms.delete(&key()), 5.0 + 2.0 * 0.2);
        close(stored_terms.delete(&key()), 5.0);
    }

    #[test]
    fn the_items_of_a_dropped_container_are_forgotten() {
        let stored_terms = StoredTerms::default();
        stored_terms.put(&key(), WriteKind::Create, &json!({}), &Indexing::default());
        assert_eq!(stored_terms.items(&key().container), [key()]);
        stored_terms.retain(|_| false);
        assert!(stored_terms.items(&key().container).is_empty());
    }

    #[test]
    fn the_length_of_a_value_is_that_of_its_text() {
        let value = json!({ "text": "ü\n", "list": [1, 2.5, null] });
        assert_eq!(text_len(&value), value.to_string().len());
    }
}
