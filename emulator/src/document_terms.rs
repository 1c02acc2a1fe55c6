//! The terms that a document adds to a container's index. The container's indexing policy determines them.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::Value;

use crate::indexing::Indexing;
use crate::sql::ELEMENTS;

impl Indexing {
    /// Returns the document's terms as sorted hashes without duplicates.
    pub fn terms(&self, document: &Value) -> Vec<u64> {
        let mut terms = Vec::new();
        self.collect(document, &mut Vec::new(), &mut terms);
        terms.extend(
            self.composites().enumerate().filter_map(|(number, paths)| composite_term(document, number, paths)),
        );
        terms.sort_unstable();
        terms.dedup();
        terms
    }

    fn collect<'a>(&self, value: &'a Value, path: &mut Vec<&'a str>, terms: &mut Vec<u64>) {
        let mut descend = |step: &'a str, child: &'a Value| {
            path.push(step);
            self.collect(child, path, terms);
            path.pop();
        };
        match value {
            Value::Object(fields) => fields.iter().for_each(|(name, child)| descend(name, child)),
            Value::Array(elements) => elements.iter().for_each(|child| descend(ELEMENTS, child)),
            leaf if self.includes(path) => terms.push(hash(&(path, leaf.to_string()))),
            _ => (),
        }
    }
}

/// Returns the term of a composite index. Only a document that has all its paths has one.
fn composite_term<'a>(document: &Value, number: usize, mut paths: impl Iterator<Item = &'a [String]>) -> Option<u64> {
    let value_at = |path: &[String]| path.iter().try_fold(document, |value, step| value.get(step));
    let values = paths.try_fold(Vec::new(), |mut values, path| {
        values.push(value_at(path)?.to_string());
        Some(values)
    });
    Some(hash(&(number, values?)))
}

fn hash(term: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    term.hash(&mut hasher);
    hasher.finish()
}

/// Counts the terms that are in one of two sorted lists and not in the other.
pub(crate) fn count_changed(before: &[u64], after: &[u64]) -> usize {
    let missing = |from: &[u64], terms: &[u64]| terms.iter().filter(|term| from.binary_search(term).is_err()).count();
    missing(before, after) + missing(after, before)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn indexing(policy: Value) -> Indexing {
        Indexing::of(&json!({ "indexingPolicy": policy }))
    }

    fn count(policy: Value, document: Value) -> usize {
        indexing(policy).terms(&document).len()
    }

    #[test]
    fn without_a_policy_every_leaf_is_a_term() {
        let document = json!({ "id": "1", "tags": ["a", "b", "a"], "inner": { "x": 1, "y": null } });
        assert_eq!(Indexing::of(&json!({})).terms(&document).len(), 5);
    }

    #[test]
    fn only_included_paths_are_terms() {
        let policy = json!({ "includedPaths": [{ "path": "/a/?" }, { "path": "/b/c/*" }, { "path": "/\"d e\"/[]/?" }],
            "excludedPaths": [{ "path": "/*" }] });
        let document = json!({ "a": 1, "b": { "c": { "x": 1, "y": 2 }, "z": 3 }, "d e": [1, 2], "f": 4 });
        assert_eq!(count(policy.clone(), document), 5);
        assert_eq!(count(policy, json!({ "a": { "x": 1 } })), 0, "/a/? is a value, not a subtree");
    }

    #[test]
    fn the_more_precise_path_decides() {
        let policy = json!({ "includedPaths": [{ "path": "/*" }], "excludedPaths": [{ "path": "/big/*" }] });
        assert_eq!(count(policy, json!({ "a": 1, "big": { "x": 1 } })), 1);
    }

    #[test]
    fn a_composite_index_needs_all_its_paths() {
        let policy = json!({ "excludedPaths": [{ "path": "/*" }],
            "compositeIndexes": [[{ "path": "/a", "order": "ascending" }, { "path": "/b/c" }]] });
        assert_eq!(count(policy.clone(), json!({ "a": 1, "b": { "c": 2 } })), 1);
        assert_eq!(count(policy, json!({ "a": 1 })), 0);
    }

    #[test]
    fn a_container_that_indexes_nothing_has_no_terms() {
        assert_eq!(count(json!({ "indexingMode": "none" }), json!({ "a": 1 })), 0);
    }

    #[test]
    fn a_value_that_changes_removes_a_term_and_adds_one() {
        let policy = indexing(json!({}));
        let [before, after] = [1, 2].map(|value| policy.terms(&json!({ "id": "1", "value": value })));
        assert_eq!(count_changed(&before, &after), 2);
        assert_eq!(count_changed(&[], &after), 2);
        assert_eq!(count_changed(&before, &before), 0);
    }
}
