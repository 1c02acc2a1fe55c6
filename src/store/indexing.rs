//! The indexing policy: only what a query filters or orders by, since every indexed path is paid for on every write.

use azure_data_cosmos::models::{IndexingMode, IndexingPolicy};

/// The paths that queries filter or order by, as the policy spells them.
pub(crate) const INDEXED_PATHS: &[&str] = &[
    "/type/?",
    "/due/?",
    "/seq/?",
    "/starts/?",
    "/execution/?",
    "/status/?",
    "/parent/?",
    "/name/?",
    "/ended/?",
    "/createdAt/?",
    "/sessionId/?",
    "/owner/?",
    "/lockedUntil/?",
    "/tally/?",
    "/tag/?",
];

/// Paths that queries look at in the documents which the index has found: indexing them would cost more on every write than it
/// saves on a look.
#[cfg(test)]
const LOOKED_AT: &[&str] = &["/slot/?", "/attempts/?"];

/// Composite indexes, for an `ORDER BY` of several paths. None is needed so far.
#[cfg(test)]
pub(crate) const COMPOSITE_INDEXES: &[&[&str]] = &[];

/// The policy of a container that the provider creates.
pub(crate) fn policy() -> IndexingPolicy {
    let mut policy = IndexingPolicy::default().with_indexing_mode(IndexingMode::Consistent);
    policy.automatic = true;
    for path in INDEXED_PATHS {
        policy = policy.with_included_path(*path);
    }
    policy.with_excluded_path("/*")
}

/// The paths that `policy` does not cover, each of which would make a query fail or scan.
pub(crate) fn missing_paths(policy: Option<&IndexingPolicy>) -> Vec<&'static str> {
    // A container without a policy of its own indexes everything.
    let Some(policy) = policy else { return Vec::new() };
    INDEXED_PATHS.iter().copied().filter(|path| !covers(policy, path)).collect()
}

/// Whether this is the policy of a container that duroxide-cdb made: it indexes a path that only its documents have.
pub(crate) fn is_of_duroxide_cdb(policy: Option<&IndexingPolicy>) -> bool {
    policy.is_some_and(|policy| policy.included_paths.iter().any(|included| included.path == "/dispatchSlot/?"))
}

/// The most precise path that matches decides, as in the service.
fn covers(policy: &IndexingPolicy, path: &str) -> bool {
    if policy.indexing_mode == Some(IndexingMode::None) {
        return false;
    }
    let best =
        |paths: &[azure_data_cosmos::models::PropertyPath]| paths.iter().filter_map(|p| precision(&p.path, path)).max();
    best(&policy.included_paths) > best(&policy.excluded_paths)
}

/// How precisely `pattern` matches `path`: an exact path beats a longer wildcard, which beats a shorter one.
fn precision(pattern: &str, path: &str) -> Option<usize> {
    if pattern == path {
        return Some(usize::MAX);
    }
    let prefix = pattern.strip_suffix('*')?;
    path.starts_with(prefix).then_some(prefix.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::queries;

    #[test]
    fn the_policy_covers_every_path_that_a_query_filters_or_orders_by() {
        for query in queries::ALL {
            for path in paths_after(query.text, &["WHERE", "ORDER BY"]) {
                let indexed = format!("/{path}/?");
                let fine = INDEXED_PATHS.contains(&indexed.as_str()) || LOOKED_AT.contains(&indexed.as_str());
                assert!(fine, "{}: {indexed} is not indexed", query.name);
            }
        }
    }

    #[test]
    fn an_order_by_of_several_paths_has_its_composite_index() {
        for query in queries::ALL {
            let paths = paths_after(query.text, &["ORDER BY"]);
            if paths.len() > 1 {
                let wanted: Vec<String> = paths.iter().map(|p| format!("/{p}")).collect();
                assert!(
                    COMPOSITE_INDEXES.iter().any(|index| index.iter().eq(wanted.iter())),
                    "{}: no composite index {wanted:?}",
                    query.name
                );
            }
        }
    }

    #[test]
    fn no_path_is_indexed_that_no_query_needs() {
        for indexed in INDEXED_PATHS {
            let path = indexed.trim_start_matches('/').trim_end_matches("/?");
            assert!(
                queries::ALL.iter().any(|q| paths_after(q.text, &["WHERE", "ORDER BY"]).contains(&path.to_owned())),
                "{indexed} is paid for on every write, but no query uses it"
            );
        }
    }

    #[test]
    fn a_policy_that_indexes_everything_fits() {
        let everything = IndexingPolicy::default().with_included_path("/*");
        assert!(missing_paths(Some(&everything)).is_empty());
        assert!(missing_paths(None).is_empty());
        assert!(missing_paths(Some(&policy())).is_empty());
    }

    #[test]
    fn a_policy_that_leaves_a_path_out_is_told_which() {
        let partial = IndexingPolicy::default().with_included_path("/type/?").with_excluded_path("/*");
        let missing = missing_paths(Some(&partial));
        assert!(missing.contains(&"/due/?") && !missing.contains(&"/type/?"), "{missing:?}");
        let excluded = IndexingPolicy::default().with_included_path("/*").with_excluded_path("/due/?");
        assert_eq!(missing_paths(Some(&excluded)), ["/due/?"]);
    }

    /// The first segment of every `c.path` behind the first of `keywords`.
    fn paths_after(text: &str, keywords: &[&str]) -> Vec<String> {
        let Some(start) = keywords.iter().filter_map(|k| text.find(k)).min() else { return Vec::new() };
        let mut paths = Vec::new();
        for (at, _) in text[start..].match_indices("c.") {
            let at = start + at;
            if text[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
                continue;
            }
            let path: String = text[at + 2..].chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        paths
    }
}
