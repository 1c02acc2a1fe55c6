//! Instances, sessions, tags and keys may have any name, and no two names are confused.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, SessionFetchConfig, TagFilter, WorkItem},
    EventKind,
};

fn names() -> Vec<String> {
    let short = [
        "a/b",
        "/",
        "a\\b",
        "a?b",
        "a#b",
        "a%2Fb",
        "%",
        "🦀",
        "日本",
        "a b",
        " ",
        ".",
        "..",
        "a:b",
        "~",
        "~2f",
        "$",
        "$s:a",
        "$i:a",
        "$d:metrics",
        "'",
        "\"",
        "`",
        "{}",
        "[\"a\"]",
        "@now",
        "-- x",
        "null",
        "a\nb",
        "a\tb",
        "\u{7f}",
        "A",
        "a",
    ];
    let mut names: Vec<String> = short.iter().map(|name| (*name).to_owned()).collect();
    names.push("x".repeat(1_024));
    names.push("🦀".repeat(256));
    names
}

/// Runs one instance through all operations that store its name or the other names in a document.
#[tokio::test]
async fn names_of_any_characters_work_for_instances_sessions_tags_and_keys() {
    let fixture = Fixture::new(2);
    // One process writes, and another one reads.
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    let names = names();
    for name in &names {
        let tagged = activity_with(name, 2, Some(name), Some(name));
        begin(&a, name, vec![tagged.clone()], Vec::new()).await;
        let session = SessionFetchConfig { owner_id: name.clone(), lock_timeout: LONG };
        let tags = TagFilter::tags([name.clone()]);
        let fetched = b.fetch_work_item(LONG, PATIENCE, Some(&session), &tags).await.unwrap();
        let (item, token, _) = fetched.unwrap_or_else(|| panic!("{name:?}: no activity"));
        assert_eq!(item, tagged);
        b.ack_work_item(&token, Some(done(name, 2))).await.unwrap();
        let (item, token, _) = next_turn(&b, LONG).await;
        assert_eq!((&item.instance, item.messages), (name, vec![done(name, 2)]));
        let set = EventKind::KeyValueSet { key: name.clone(), value: format!("of {name}"), last_updated_at_ms: 1 };
        let status = EventKind::CustomStatusUpdated { status: Some(name.clone()) };
        let events = vec![event(name, 1, 2, set), event(name, 1, 3, status), completed(name, 1, 4)];
        let child = start_child(&format!("child of {name}"), Some(name));
        commit(&b, &token, events, Vec::new(), vec![child], ended("Completed")).await.unwrap();
        assert_eq!(a.read(name).await.unwrap().len(), 4, "{name:?}");
        assert_eq!(a.get_kv_value(name, name).await.unwrap(), Some(format!("of {name}")));
        assert_eq!(a.get_custom_status(name, 0).await.unwrap(), Some((Some(name.clone()), 1)));
        let (item, token, _) = next_turn(&b, LONG).await;
        assert_eq!(item.instance, format!("child of {name}"));
        let metadata =
            duroxide::providers::ExecutionMetadata { parent_instance_id: Some(name.clone()), ..ended("Completed") };
        let events = vec![started(&item.instance, 1), completed(&item.instance, 1, 2)];
        commit(&b, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    }
    let mut listed: Vec<String> = admin(&a).list_instances().await.unwrap();
    listed.retain(|id| !id.starts_with("child of "));
    listed.sort();
    let mut expected = names.clone();
    expected.sort();
    assert_eq!(listed, expected);
    for name in &names {
        assert_eq!(admin(&a).list_children(name).await.unwrap(), [format!("child of {name}")]);
        assert_eq!(admin(&b).delete_instance(name, false).await.unwrap().instances_deleted, 2);
        assert!(a.read(name).await.unwrap().is_empty());
    }
    // The sessions have no owner, and the markers of the children's starts expire. No other document is left.
    let mut left = fixture.documents().await;
    left.retain(|document| !["format", "member", "wakeup", "delivered"].iter().any(|kind| document["type"] == *kind));
    assert_eq!(left.len(), names.len(), "a session for each name: {left:?}");
    assert!(left.iter().all(|document| document["type"] == "session"));
}

#[tokio::test]
async fn an_empty_name_works_where_duroxide_allows_one() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    let work = activity_with("i", 2, Some(""), Some(""));
    begin(&a, "i", vec![work.clone()], Vec::new()).await;
    let session = SessionFetchConfig { owner_id: String::new(), lock_timeout: LONG };
    let fetched = b.fetch_work_item(LONG, PATIENCE, Some(&session), &TagFilter::tags([""])).await.unwrap();
    let (item, token, _) = fetched.expect("an activity with an empty session and tag");
    assert_eq!(item, work);
    b.ack_work_item(&token, Some(done("i", 2))).await.unwrap();
    let (_, token, _) = next_turn(&b, LONG).await;
    let set = EventKind::KeyValueSet { key: String::new(), value: String::new(), last_updated_at_ms: 1 };
    commit(&b, &token, vec![event("i", 1, 2, set)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_eq!(a.get_kv_value("i", "").await.unwrap().as_deref(), Some(""));
}

#[tokio::test]
async fn an_instance_id_may_have_two_kilobytes_and_no_more() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("a").await;
    let longest = "x".repeat(2_048);
    finish(&provider, &longest, None).await;
    assert_eq!(provider.read(&longest).await.unwrap().len(), 2);
    let too_long = "x".repeat(2_049);
    for item in [start(&too_long), external(&too_long, "news")] {
        let error = provider.enqueue_for_orchestrator(item, None).await.unwrap_err();
        assert!(!error.retryable);
        assert!(error.message.contains("2049 bytes") && error.message.contains("2048"), "{}", error.message);
    }
    let error = provider.enqueue_for_worker(activity(&too_long, 2)).await.unwrap_err();
    assert!(!error.retryable && error.message.contains("2049 bytes"), "{}", error.message);
    // A turn cannot start such a child either: the orchestration fails with the reason.
    provider.enqueue_for_orchestrator(start("parent"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let child: Vec<WorkItem> = vec![start_child(&too_long, Some("parent"))];
    let refused = commit(&provider, &token, vec![started("parent", 1)], Vec::new(), child, running()).await;
    let error = refused.unwrap_err();
    assert!(!error.retryable && error.message.contains("2049 bytes"), "{}", error.message);
    commit(&provider, &token, vec![started("parent", 1)], Vec::new(), Vec::new(), ended("Failed")).await.unwrap();
}
