//! The indexing policy. It has only the paths that a query filters or orders by, because each path costs RU on every
//! write.

use azure_data_cosmos::models::{IndexingMode, IndexingPolicy};

/// The paths that queries filter or order by, in the syntax of the policy.
pub(super) const INDEXED_PATHS: &[&str] = &[
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
    "/countPending/?",
    "/tag/?",
    "/slot/?",
    "/retries/?",
];

/// The policy of a container that the provider creates.
pub(super) fn policy() -> IndexingPolicy {
    let mut policy = IndexingPolicy::default().with_indexing_mode(IndexingMode::Consistent);
    policy.automatic = true;
    for path in INDEXED_PATHS {
        policy = policy.with_included_path(*path);
    }
    policy.with_excluded_path("/*")
}

/// The paths that `policy` does not cover. Without each of them a query fails or scans.
pub(super) fn missing_paths(policy: Option<&IndexingPolicy>) -> Vec<&'static str> {
    // A container without its own policy indexes everything.
    let Some(policy) = policy else { return Vec::new() };
    INDEXED_PATHS.iter().copied().filter(|path| !covers(policy, path)).collect()
}

/// Whether duroxide-cdb created the container. Its policy indexes a path that only its documents have.
pub(super) fn is_of_duroxide_cdb(policy: Option<&IndexingPolicy>) -> bool {
    policy.is_some_and(|policy| policy.included_paths.iter().any(|included| included.path == "/dispatchSlot/?"))
}

/// Whether the policy indexes a path. As in the service, the most precise path that matches decides.
fn covers(policy: &IndexingPolicy, path: &str) -> bool {
    if policy.indexing_mode == Some(IndexingMode::None) {
        return false;
    }
    let best =
        |paths: &[azure_data_cosmos::models::PropertyPath]| paths.iter().filter_map(|p| precision(&p.path, path)).max();
    best(&policy.included_paths) > best(&policy.excluded_paths)
}

/// The precision of the match of `pattern` on `path`. An exact path beats a longer wildcard, which beats a shorter one.
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
    use crate::cosmos::queries;
    use duroxide_cosmos_emulator::sql;

    #[test]
    fn the_policy_covers_every_path_that_a_query_filters_or_orders_by() {
        for query in queries::ALL {
            for path in paths(query.text) {
                assert!(INDEXED_PATHS.contains(&path.as_str()), "{}: {path} is not indexed", query.name);
            }
        }
    }

    #[test]
    fn every_order_by_has_one_path_and_needs_no_composite_index() {
        for query in queries::ALL {
            assert!(parse(query.text).order_by().len() <= 1, "{}", query.name);
        }
    }

    #[test]
    fn no_path_is_indexed_that_no_query_needs() {
        let needed: Vec<String> = queries::ALL.iter().flat_map(|query| paths(query.text)).collect();
        for indexed in INDEXED_PATHS {
            assert!(
                needed.iter().any(|path| path == indexed),
                "{indexed} costs RU on every write, and no query uses it"
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
    fn a_policy_that_leaves_a_path_out_is_reported_with_that_path() {
        let partial = IndexingPolicy::default().with_included_path("/type/?").with_excluded_path("/*");
        let missing = missing_paths(Some(&partial));
        assert!(missing.contains(&"/due/?") && !missing.contains(&"/type/?"), "{missing:?}");
        let excluded = IndexingPolicy::default().with_included_path("/*").with_excluded_path("/due/?");
        assert_eq!(missing_paths(Some(&excluded)), ["/due/?"]);
    }

    fn parse(text: &str) -> sql::Query {
        sql::parse(text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The paths that a query filters or orders by, in the syntax of the policy.
    fn paths(text: &str) -> Vec<String> {
        let query = parse(text);
        let ordered = query.order_by().iter().filter_map(|key| key.path.as_ref());
        query.filter_paths().iter().chain(ordered).map(|path| format!("/{}/?", path.join("/"))).collect()
    }
}
