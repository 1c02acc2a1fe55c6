//! Queries that the service refuses, and queries that only the SDK's emulator would refuse.

use azure_data_cosmos::models::{CompositeIndex, CompositeIndexOrder, CompositeIndexProperty};
use azure_data_cosmos::models::{ContainerProperties, IndexingPolicy};
use azure_data_cosmos::{ContainerClient, CosmosError, FeedScope, Query};
use duroxide_cosmos_emulator::LocalAccount;
use futures::TryStreamExt;
use serde_json::{json, Value};

use crate::fixture::{create_container, item, open_container, status, CONTAINER, DATABASE};
use crate::raw_http;

async fn find(container: &ContainerClient, query: impl Into<Query>) -> Result<Vec<Value>, CosmosError> {
    let pages = container.query_items(query.into(), FeedScope::full_container(), None).await?;
    pages.try_collect().await
}

/// Queries one logical partition, which needs no query plan.
async fn find_in(container: &ContainerClient, pk: &str, query: &str) -> Result<Vec<Value>, CosmosError> {
    let pages = container.query_items(Query::from(query), FeedScope::partition(pk.to_owned()), None).await?;
    pages.try_collect().await
}

async fn assert_refused(container: &ContainerClient, query: &str, reason: &str) {
    for answer in [find(container, query).await, find_in(container, "p", query).await] {
        let error = answer.expect_err(query);
        assert_eq!(status(&error), 400, "{query}");
        assert!(error.to_string().contains(reason), "{query}: {error}");
    }
}

async fn container_with(account: &LocalAccount, policy: IndexingPolicy) -> ContainerClient {
    let client = account.client().await;
    let properties = ContainerProperties::new(CONTAINER, "/pk".into()).with_indexing_policy(policy);
    client.create_database(DATABASE, None).await.unwrap();
    client.database_client(DATABASE).create_container(properties, None).await.unwrap();
    let container = open_container(&client).await;
    for n in 0..3 {
        let document = json!({ "id": n.to_string(), "pk": "p", "a": n, "b": 2 - n, "lock": { "until": n } });
        container.create_item("p", &n.to_string(), document, None).await.unwrap();
    }
    container
}

fn only(paths: &[&'static str]) -> IndexingPolicy {
    let policy = paths.iter().fold(IndexingPolicy::default(), |policy, path| policy.with_included_path(*path));
    policy.with_excluded_path("/*")
}

#[tokio::test]
async fn a_text_outside_the_grammar_is_refused() {
    let account = LocalAccount::builder().with_partitions(2).build();
    let container = create_container(&account.client().await).await;
    assert_refused(&container, "SELECT c.by FROM c", "Syntax error, incorrect syntax near 'by'.").await;
    assert_refused(&container, "SELECT * FROM c WHERE c.value = 1", "near 'value'").await;
    assert_refused(&container, "SELECT * FROM c WHERE", "unexpected end-of-file").await;
    assert_refused(&container, "SELECT * FROM c WHERE due = 1", "Identifier 'due' could not be resolved.").await;
    // The SDK requests a plan of this query, and the account refuses the plan.
    assert_refused(&container, "SELECT c.by, COUNT(1) AS n FROM c GROUP BY c.by", "near 'by'").await;
    assert_eq!(find(&container, r#"SELECT c["by"] FROM c"#).await.unwrap(), [] as [Value; 0]);
}

#[tokio::test]
async fn a_parameter_without_a_value_is_refused() {
    let account = LocalAccount::new();
    let container = create_container(&account.client().await).await;
    container.create_item("p", "1", item("p", "1", 7), None).await.unwrap();
    let text = r#"SELECT * FROM c WHERE c["value"] = @a AND c.id = @b"#;
    let query =
        |names: &[&str]| names.iter().fold(Query::from(text), |query, name| query.with_parameter(*name, 7).unwrap());
    let error = find(&container, query(&["@a"])).await.unwrap_err();
    assert_eq!(status(&error), 400);
    assert!(error.to_string().contains("'@b'"), "{error}");
    assert_eq!(find(&container, query(&["@a", "@b"])).await.unwrap(), [] as [Value; 0]);
}

#[tokio::test]
async fn a_refusal_has_the_services_format() {
    let account = LocalAccount::new();
    create_container(&account.client().await).await;
    let served = account.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let link = format!("dbs/{DATABASE}/colls/{CONTAINER}");
    for header in ["x-ms-documentdb-isquery", "x-ms-cosmos-is-query-plan-request"] {
        let mut headers = raw_http::signed(account.key(), "post", "docs", &link);
        headers.push((header, "true".to_owned()));
        let body = json!({ "query": "SELECT c.by FROM c" }).to_string();
        let (code, answer) = raw_http::send(&served, "POST", &format!("/{link}/docs"), &headers, &body).await;
        assert_eq!(code, Some(400));
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["code"], "BadRequest");
        let errors: Value = serde_json::from_str(answer["message"].as_str().unwrap()).unwrap();
        let expected = json!({ "errors": [{
            "severity": "Error",
            "location": { "start": 9, "end": 11 },
            "code": "SC1001",
            "message": "Syntax error, incorrect syntax near 'by'.",
        }] });
        assert_eq!(errors, expected, "{header}");
    }
    served.shutdown().await;
}

/// The test does not filter by the partition key: the SDK's planner resolves no escape sequences, so it would query the
/// wrong partition.
#[tokio::test]
async fn string_literals_match_in_both_quotes() {
    let account = LocalAccount::builder().with_partitions(3).build();
    let container = create_container(&account.client().await).await;
    for (n, text) in ["p1", "it's", r"a\b", "say \"hi\"", "line\nbreak", "🦀"].into_iter().enumerate() {
        let document = json!({ "id": "1", "pk": n.to_string(), "text": text, "value": n });
        container.create_item(n.to_string(), "1", document, None).await.unwrap();
        let double = serde_json::to_string(text).unwrap();
        let single = format!("'{}'", double[1..double.len() - 1].replace('\'', r"\'"));
        for literal in [double, single] {
            for query in [
                format!("SELECT * FROM c WHERE c.text = {literal}"),
                format!("SELECT * FROM c WHERE c['text'] IN ({literal}) ORDER BY c.text"),
                format!(r#"SELECT * FROM c WHERE c["text"] = {literal} ORDER BY c["value"] DESC OFFSET 0 LIMIT 5"#),
                format!(r#"SELECT VALUE {{"text": c.text, "value": c["value"]}} FROM c WHERE c.text = {literal}"#),
            ] {
                let found = find(&container, &*query).await.unwrap_or_else(|error| panic!("{query}: {error}"));
                let values: Vec<_> = found.iter().map(|found| (&found["text"], &found["value"])).collect();
                assert_eq!(values, [(&json!(text), &json!(n))], "{query}");
            }
        }
    }
    let by_key = find_in(&container, "0", r#"SELECT * FROM c WHERE c.pk = "0""#).await.unwrap();
    assert_eq!(by_key.len(), 1);
    assert_eq!(find(&container, r#"SELECT * FROM c WHERE c.pk = "0""#).await.unwrap(), by_key);
}

#[tokio::test]
async fn a_reserved_word_in_brackets_is_an_ordinary_property() {
    let account = LocalAccount::builder().with_partitions(4).build();
    let container = create_container(&account.client().await).await;
    for n in 0..20 {
        let pk = format!("pk{n}");
        let document = json!({ "id": "1", "pk": pk, "order": n, "lock": { "by": n % 2 } });
        container.create_item(pk, "1", document, None).await.unwrap();
    }
    let text = r#"SELECT TOP 3 c["order"] AS n FROM c WHERE c.lock["by"] = 1 ORDER BY c["order"] DESC"#;
    let found = find(&container, text).await.unwrap();
    assert_eq!(found, [json!({ "n": 19 }), json!({ "n": 17 }), json!({ "n": 15 })]);
}

#[tokio::test]
async fn a_filter_needs_an_index_or_permission_to_scan() {
    let account = LocalAccount::new();
    let container = container_with(&account, only(&["/a/?", "/lock/until/?"])).await;
    assert_eq!(find(&container, "SELECT * FROM c WHERE c.a < 2 AND c.lock.until > 0").await.unwrap().len(), 1);
    assert_eq!(find(&container, "SELECT * FROM c WHERE c.id = '1' AND c._ts > 0").await.unwrap().len(), 1);
    assert_eq!(find(&container, "SELECT c.b FROM c").await.unwrap().len(), 3);
    let excluded = "filters against path(s) excluded from indexing";
    assert_refused(&container, "SELECT * FROM c WHERE c.b = 1", excluded).await;
    assert_refused(&container, "SELECT * FROM c WHERE c.a = 1 AND NOT IS_DEFINED(c.lock.by2)", "'/lock/by2'").await;

    let served = account.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let link = format!("dbs/{DATABASE}/colls/{CONTAINER}");
    for (allowed, expected) in [("false", 400), ("true", 200)] {
        let mut headers = raw_http::signed(account.key(), "post", "docs", &link);
        headers.push(("x-ms-documentdb-isquery", "true".to_owned()));
        headers.push(("x-ms-documentdb-partitionkey", r#"["p"]"#.to_owned()));
        headers.push(("x-ms-documentdb-query-enable-scan", allowed.to_owned()));
        let body = json!({ "query": "SELECT * FROM c WHERE c.b = 1" }).to_string();
        let (code, _) = raw_http::send(&served, "POST", &format!("/{link}/docs"), &headers, &body).await;
        assert_eq!(code, Some(expected), "{allowed}");
    }
    served.shutdown().await;
}

#[tokio::test]
async fn an_account_can_scan_for_every_filter() {
    let account = LocalAccount::builder().with_unindexed_filters(true).build();
    let container = container_with(&account, only(&["/a/?"])).await;
    assert_eq!(find(&container, "SELECT * FROM c WHERE c.b = 1").await.unwrap().len(), 1);
    assert_refused(&container, "SELECT * FROM c ORDER BY c.b", "corresponding index").await;
}

#[tokio::test]
async fn an_order_by_one_path_needs_an_index_and_by_several_a_composite_index() {
    let account = LocalAccount::builder().with_partitions(2).build();
    let composite = CompositeIndex::default()
        .with_property(CompositeIndexProperty::new("/a", CompositeIndexOrder::Ascending))
        .with_property(CompositeIndexProperty::new("/b", CompositeIndexOrder::Descending));
    let policy = only(&["/a/?"]).with_composite_index(composite);
    let container = container_with(&account, policy).await;
    for served in ["c.a", "c.a DESC", "c.id", "c.a, c.b DESC", "c.a DESC, c.b"] {
        let found = find(&container, &*format!("SELECT * FROM c ORDER BY {served}")).await;
        assert_eq!(found.unwrap_or_else(|error| panic!("{served}: {error}")).len(), 3, "{served}");
    }
    assert_refused(&container, "SELECT * FROM c ORDER BY c.b", "corresponding index").await;
    for refused in ["c.a, c.b", "c.b DESC, c.a", "c.a, c.id"] {
        let text = format!("SELECT * FROM c ORDER BY {refused}");
        assert_refused(&container, &text, "corresponding composite index").await;
    }
}

#[tokio::test]
async fn a_new_indexing_policy_takes_effect_at_once() {
    let account = LocalAccount::new();
    let container = container_with(&account, only(&["/a/?"])).await;
    let text = "SELECT * FROM c WHERE c.b = 1";
    assert_refused(&container, text, "excluded").await;
    let wider = ContainerProperties::new(CONTAINER, "/pk".into()).with_indexing_policy(only(&["/b/?"]));
    container.replace(wider, None).await.unwrap();
    assert_eq!(find(&container, text).await.unwrap().len(), 1);
    assert_refused(&container, "SELECT * FROM c WHERE c.a = 1", "excluded").await;

    container.delete(None).await.unwrap();
    let again = ContainerProperties::new(CONTAINER, "/pk".into());
    let client = account.client().await;
    client.database_client(DATABASE).create_container(again, None).await.unwrap();
    let container = open_container(&client).await;
    assert_eq!(find(&container, "SELECT * FROM c WHERE c.a = 1").await.unwrap(), [] as [Value; 0]);
}
