//! A container's indexing policy, and the filters and orders that its index can serve.

use serde_json::Value;

use crate::sql::{Query, SortKey, ELEMENTS};

/// Properties that the service always indexes.
const ALWAYS_INDEXED: [&str; 3] = ["id", "_ts", "_rid"];

/// The index of a container, according to its policy.
#[derive(Debug, Default)]
pub(crate) struct Indexing {
    has_index: bool,
    included: Vec<Pattern>,
    excluded: Vec<Pattern>,
    composites: Vec<Vec<CompositePath>>,
    partition_key: Vec<Vec<String>>,
}

/// A path of the policy: one property, or everything below it.
#[derive(Debug)]
struct Pattern {
    steps: Vec<String>,
    is_prefix: bool,
}

/// One path of a composite index.
#[derive(Debug)]
struct CompositePath {
    steps: Vec<String>,
    descending: bool,
}

impl Indexing {
    /// Reads the policy from a container's properties.
    pub fn of(container: &Value) -> Self {
        let policy = &container["indexingPolicy"];
        let composites = list(&policy["compositeIndexes"]).iter();
        let mode = policy["indexingMode"].as_str().unwrap_or_default();
        let (mut included, excluded) = (patterns(&policy["includedPaths"]), patterns(&policy["excludedPaths"]));
        // A container without a policy indexes every path.
        if included.is_empty() && excluded.is_empty() {
            included.push(Pattern::of("/*"));
        }
        Self {
            has_index: !mode.eq_ignore_ascii_case("none"),
            included,
            excluded,
            composites: composites.map(|index| list(index).iter().map(CompositePath::of).collect()).collect(),
            partition_key: list(&container["partitionKey"]["paths"])
                .iter()
                .filter_map(Value::as_str)
                .map(steps)
                .collect(),
        }
    }

    /// Returns the first path that `query` filters by and the index does not contain.
    pub fn unindexed_filter<'q>(&self, query: &'q Query) -> Option<&'q [String]> {
        let served = |path: &Vec<String>| self.partition_key.contains(path) || self.contains(path);
        query.filter_paths().iter().find(|path| !served(path)).map(Vec::as_slice)
    }

    /// Returns the service's message if the index can't serve the order that `query` requests.
    pub fn order_refusal(&self, query: &Query) -> Option<&'static str> {
        match query.order_by() {
            [] => None,
            [key] => (!self.orders_by(key)).then_some(
                "The order by query does not have a corresponding index that it can be served from. \
                 Order-by item requires a range index to be defined on the corresponding index path.",
            ),
            keys => (!self.orders_by_all(keys)).then_some(
                "The order by query does not have a corresponding composite index that it can be served from.",
            ),
        }
    }

    /// Whether the index serves an order by one key. A function's score has an index of another kind and always passes.
    fn orders_by(&self, key: &SortKey) -> bool {
        key.path.as_ref().is_none_or(|path| self.contains(path))
    }

    /// Whether a composite index serves these keys. It serves exactly its own paths in their sequence, forwards and
    /// backwards.
    fn orders_by_all(&self, keys: &[SortKey]) -> bool {
        let serves = |index: &Vec<CompositePath>, backwards: bool| {
            let serves_one = |(sorted, key): (&CompositePath, &SortKey)| {
                Some(&sorted.steps) == key.path.as_ref() && (sorted.descending != backwards) == key.descending
            };
            index.len() == keys.len() && index.iter().zip(keys).all(serves_one)
        };
        let any_score = keys.iter().any(|key| key.path.is_none());
        any_score || self.composites.iter().any(|index| serves(index, false) || serves(index, true))
    }

    /// Whether the index contains a property, or the elements of an array property.
    fn contains(&self, path: &[String]) -> bool {
        let always = path.len() == 1 && ALWAYS_INDEXED.contains(&path[0].as_str());
        path.is_empty() || always || self.includes(path) || self.includes_elements(path)
    }

    /// Whether the index contains the elements of an array. Only a path that names the elements tells that the property
    /// is an array.
    fn includes_elements(&self, path: &[String]) -> bool {
        let elements = [path, &[ELEMENTS.to_owned()]].concat();
        self.included.iter().any(|pattern| pattern.steps == elements) && self.includes(&elements)
    }

    /// Returns the paths of each composite index.
    pub fn composites(&self) -> impl Iterator<Item = impl Iterator<Item = &[String]>> {
        let composites = self.composites.iter().filter(|_| self.has_index);
        composites.map(|index| index.iter().map(|sorted| sorted.steps.as_slice()))
    }

    /// Whether the index contains the values at a path. The most specific path of the policy decides.
    pub fn includes<S: AsRef<str>>(&self, path: &[S]) -> bool {
        let best = |patterns: &[Pattern]| patterns.iter().filter_map(|pattern| pattern.specificity(path)).max();
        self.has_index && best(&self.included) > best(&self.excluded)
    }
}

impl Pattern {
    fn of(path: &str) -> Self {
        let mut steps = steps(path);
        let is_prefix = steps.last().is_some_and(|last| last == "*");
        if is_prefix || steps.last().is_some_and(|last| last == "?") {
            steps.pop();
        }
        Self { steps, is_prefix }
    }

    /// Returns how specifically the pattern matches a path, or `None`. A longer pattern wins over a shorter one, and an
    /// exact one over a prefix.
    fn specificity<S: AsRef<str>>(&self, path: &[S]) -> Option<(usize, bool)> {
        let length = self.steps.len();
        let is_below = path.len() >= length && self.steps.iter().zip(path).all(|(step, name)| step == name.as_ref());
        let matches = is_below && (self.is_prefix || path.len() == length);
        matches.then_some((length, !self.is_prefix))
    }
}

impl CompositePath {
    fn of(path: &Value) -> Self {
        let steps = steps(path["path"].as_str().unwrap_or_default());
        Self { steps, descending: path["order"].as_str() == Some("descending") }
    }
}

fn patterns(paths: &Value) -> Vec<Pattern> {
    list(paths).iter().filter_map(|path| path["path"].as_str()).map(Pattern::of).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Splits a path of the policy, such as `/a/"b/c"/?`, into its steps.
fn steps(path: &str) -> Vec<String> {
    let mut steps = Vec::new();
    let mut rest = path;
    while let Some(step) = rest.strip_prefix('/') {
        let (step, after) = match step.strip_prefix('"').and_then(|quoted| quoted.split_once('"')) {
            Some((quoted, after)) => (quoted, after),
            None => step.split_at(step.find('/').unwrap_or(step.len())),
        };
        steps.push(step.to_owned());
        rest = after;
    }
    steps
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::sql::parse;

    fn indexing(policy: Value) -> Indexing {
        Indexing::of(&json!({ "indexingPolicy": policy, "partitionKey": { "paths": ["/pk"] } }))
    }

    fn paths(paths: &[&str]) -> Value {
        paths.iter().map(|path| json!({ "path": path })).collect()
    }

    fn only(included: &[&str]) -> Indexing {
        indexing(json!({ "includedPaths": paths(included), "excludedPaths": paths(&["/*"]) }))
    }

    fn serves(indexing: &Indexing, condition: &str) -> bool {
        let query = parse(&format!("SELECT * FROM c WHERE {condition}")).unwrap();
        indexing.unindexed_filter(&query).is_none()
    }

    fn orders(indexing: &Indexing, keys: &str) -> bool {
        let query = parse(&format!("SELECT * FROM c ORDER BY {keys}")).unwrap();
        indexing.order_refusal(&query).is_none()
    }

    #[test]
    fn the_most_specific_path_decides() {
        let some = only(&["/a/?", "/b/*", "/\"c d\"/?", "/l/[]/n/?", "/m/[]/?"]);
        for served in ["c.a = 1", "c.b = 1", "c.b.x.y = 1", "c['c d'] = 1", "c.l[0].n = 1", "ARRAY_CONTAINS(c.m, 1)"] {
            assert!(serves(&some, served), "{served}");
        }
        for scanned in ["c.x = 1", "c.a.x = 1", "c.a = 1 AND IS_DEFINED(c.x)", "c.l.n = 1", "ARRAY_CONTAINS([1], c.x)"]
        {
            assert!(!serves(&some, scanned), "{scanned}");
        }
        let most =
            indexing(json!({ "includedPaths": paths(&["/*", "/a/b/?"]), "excludedPaths": paths(&["/a/*", "/d/?"]) }));
        assert!(serves(&most, "c.x = 1 AND c.a.b = 1 AND c.d.e = 1"));
        assert!(!serves(&most, "c.a.c = 1") && !serves(&most, "c.d = 1") && !serves(&most, "c.a = 1"));
    }

    #[test]
    fn ids_timestamps_and_partition_keys_need_no_included_path() {
        let nothing = only(&[]);
        assert!(serves(&nothing, "c.id = '1' AND c._ts > 1 AND c.pk = 'p' AND c._rid > ''"));
        assert!(!serves(&nothing, "c._etag = ''"));
        assert!(orders(&nothing, "c._ts") && orders(&nothing, "c.id DESC"));
        assert!(!orders(&nothing, "c.pk"), "routing finds a partition key, but nothing orders by it");
        let none = indexing(json!({ "indexingMode": "none" }));
        assert!(!serves(&none, "c.a = 1"));
    }

    #[test]
    fn an_order_by_needs_its_path_or_its_composite_index() {
        let composite = json!([
            [{ "path": "/a", "order": "ascending" }, { "path": "/b/x", "order": "descending" }],
            [{ "path": "/a", "order": "ascending" }, { "path": "/b", "order": "ascending" }, { "path": "/d" }],
        ]);
        let all = indexing(json!({ "includedPaths": paths(&["/*"]), "compositeIndexes": composite }));
        for served in ["c.x DESC", "c.a, c.b.x DESC", "c.a DESC, c.b.x", "c.a, c.b, c.d", "VectorDistance(c.v, [1])"] {
            assert!(orders(&all, served), "{served}");
        }
        for refused in ["c.a, c.b.x", "c.b.x DESC, c.a", "c.a, c.b", "c.a, c.b, c.d DESC", "c.x, c.y"] {
            assert!(!orders(&all, refused), "{refused}");
        }
        assert!(!orders(&only(&["/a/?"]), "c.b"));
    }
}
