//! A document that this version cannot read hides no other document: it is skipped, counted and named.

use crate::fixture::*;
use duroxide::providers::{InstanceFilter, Provider};
use duroxide_cosmos::{
    operate::{InstanceQuery, Reason},
    CosmosDBProvider, Retention,
};
use serde_json::{json, Value};
use std::{collections::BTreeSet, time::Duration};

/// Fields of an instance's document with values that this version cannot read.
fn unreadable_fields() -> Vec<(&'static str, Value)> {
    vec![
        ("execution", json!("one")),
        ("status", json!(7)),
        ("totals", json!("many")),
        ("completedAt", json!("yesterday")),
        ("deleting", json!(5)),
        ("lock", json!([])),
    ]
}

/// Three ended instances, and one with each of these fields.
async fn with_unreadable(partitions: u32) -> (Fixture, CosmosDBProvider, Vec<String>) {
    let fixture = Fixture::new(partitions);
    let provider = fixture.provider("one").await;
    for number in 0..3 {
        finish(&provider, &format!("good-{number}"), None).await;
    }
    let mut unreadable = Vec::new();
    for (field, value) in unreadable_fields() {
        let name = format!("bad-{field}");
        finish(&provider, &name, None).await;
        fixture.change(&name, "instance", |document| document[field] = value.clone()).await;
        unreadable.push(name);
    }
    // Another process has none of them in its caches.
    let fresh = fixture.provider("two").await;
    (fixture, fresh, unreadable)
}

fn good(ids: &[String]) -> Vec<&str> {
    let mut good: Vec<&str> = ids.iter().map(String::as_str).filter(|id| id.starts_with("good-")).collect();
    good.sort_unstable();
    good
}

const GOOD: [&str; 3] = ["good-0", "good-1", "good-2"];

#[tokio::test]
async fn lists_show_the_other_instances() {
    let (_scene, provider, _) = with_unreadable(3).await;
    let ids = admin(&provider).list_instances().await.expect("a list");
    assert_eq!(good(&ids), GOOD);
    let ids = admin(&provider).list_instances_by_status("Completed").await.expect("a list");
    assert_eq!(good(&ids), GOOD);
    let page = provider.instances(&InstanceQuery::default(), None, 100).await.expect("a page");
    let ids: Vec<String> = page.instances.into_iter().map(|instance| instance.id).collect();
    assert_eq!(good(&ids), GOOD);
    let told: Vec<&str> = page.unreadable.iter().map(|instance| instance.id.as_str()).collect();
    // The fields that a list shows of these instances can be read.
    let shown = ["bad-execution", "bad-status", "bad-completedAt", "bad-deleting"];
    assert!(told.len() == shown.len() && shown.iter().all(|id| told.contains(id)), "{told:?}");
    assert!(page.unreadable.iter().any(|instance| instance.error.contains("\"one\"")), "{:?}", page.unreadable);
}

#[tokio::test]
async fn pages_continue_behind_instances_that_cannot_be_read() {
    let (_scene, provider, _) = with_unreadable(1).await;
    let (mut ids, mut unreadable, mut cursor) = (Vec::new(), Vec::new(), None::<String>);
    loop {
        let page = provider.instances(&InstanceQuery::default(), cursor.as_deref(), 1).await.expect("a page");
        ids.extend(page.instances.into_iter().map(|instance| instance.id));
        unreadable.extend(page.unreadable.into_iter().map(|instance| instance.id));
        let Some(next) = page.cursor else { break };
        assert_ne!(cursor.replace(next.clone()), Some(next), "a cursor that stands still");
    }
    assert_eq!(good(&ids), GOOD);
    let told: BTreeSet<&String> = unreadable.iter().collect();
    assert_eq!((told.len(), unreadable.len()), (4, 4), "{unreadable:?}");
}

#[tokio::test]
async fn a_tree_with_an_unreadable_child_stays_whole_and_the_others_are_deleted() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("one").await;
    finish(&provider, "root", None).await;
    finish(&provider, "root::child", Some("root")).await;
    for (field, value) in unreadable_fields() {
        let before = fixture.documents_of_type("root::child", "instance").await.remove(0);
        fixture.change("root::child", "instance", |document| document[field] = value.clone()).await;
        let fresh = fixture.provider(&format!("deleting beside {field}")).await;
        finish(&fresh, "good", None).await;
        let deleted = admin(&fresh).delete_instance_bulk(InstanceFilter::default()).await.expect("a deletion");
        assert_eq!(deleted.instances_deleted, 1, "{field}");
        let error = admin(&fresh).delete_instance("root", false).await.expect_err("the child can't be judged");
        assert!(error.message.contains("root::child"), "{field}: {error}");
        assert_eq!(
            fixture.documents_of_type("root", "instance").await.len(),
            1,
            "{field}: the root is gone, and its child is not"
        );
        fixture.change("root::child", "instance", |document| *document = before.clone()).await;
    }
    admin(&provider).delete_instance("root", false).await.expect("what can be read can be deleted");
}

#[tokio::test]
async fn a_deletion_also_deletes_unreadable_documents() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("one").await;
    finish(&provider, "a", None).await;
    let strange =
        json!({ "id": "x", "instanceId": "a", "type": 7, "due": "soon", "seq": 1, "starts": "no", "execution": [] });
    fixture.container().await.create_item("a".to_owned(), "x", &strange, None).await.expect("a document");
    admin(&provider).delete_instance("a", false).await.expect("a deletion");
    assert!(fixture.partition("a").await.is_empty());
}

#[tokio::test]
async fn instances_are_listed_although_the_coordinator_of_a_deletion_cannot_be_read() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("one").await;
    finish(&provider, "good", None).await;
    finish(&provider, "prepared", None).await;
    finish(&provider, "coordinator", None).await;
    let deleting = json!({ "plan": "p", "coordinator": "coordinator", "before": "" });
    fixture.change("prepared", "instance", |document| document["deleting"] = deleting.clone()).await;
    fixture.change("coordinator", "instance", |document| document["execution"] = json!("one")).await;
    let fresh = fixture.provider("two").await;
    let ids = admin(&fresh).list_instances().await.expect("a list");
    assert!(ids.contains(&"good".to_owned()), "{ids:?}");
    admin(&fresh).get_system_metrics().await.expect("metrics");
}

#[tokio::test]
async fn metrics_count_the_others() {
    let (_scene, provider, _) = with_unreadable(1).await;
    let metrics = admin(&provider).get_system_metrics().await.expect("metrics");
    assert!(metrics.completed_instances >= 3, "{metrics:?}");
    admin(&provider).get_queue_depths().await.expect("depths");
}

#[tokio::test]
async fn a_bulk_deletion_deletes_the_others() {
    let (_scene, provider, _) = with_unreadable(3).await;
    let deleted = admin(&provider).delete_instance_bulk(InstanceFilter::default()).await.expect("a deletion");
    assert!(deleted.instances_deleted >= 3, "{deleted:?}");
    let ids = admin(&provider).list_instances().await.expect("a list");
    assert!(good(&ids).is_empty(), "{ids:?}");
}

#[tokio::test]
async fn retention_deletes_the_others() {
    let (fixture, _, _) = with_unreadable(3).await;
    let retention = Retention::default().with_completed(Duration::ZERO);
    let provider = fixture.provider_with("keeper", test_config().with_retention(retention)).await;
    let gone = provider.apply_retention().await.expect("a round");
    assert!(gone >= 3, "{gone}");
    let ids = admin(&provider).list_instances().await.expect("a list");
    assert!(good(&ids).is_empty(), "{ids:?}");
}

#[tokio::test]
async fn the_doctor_scans_all_instances_and_names_those_that_cannot_be_read() {
    let (_scene, provider, unreadable) = with_unreadable(3).await;
    let doctor = provider.doctor().await.expect("a doctor");
    let mut suspects = doctor.scan(Duration::ZERO, true);
    let mut named = Vec::new();
    while let Some(page) = suspects.next().await.expect("a page of suspects") {
        named.extend(page);
    }
    for instance in &unreadable {
        assert!(named.contains(instance), "{instance} is not among {named:?}");
        let diagnosis = doctor.diagnose(instance).await.expect("a diagnosis").expect("something of that name");
        let finding = diagnosis.findings.iter().find(|finding| finding.reason == Reason::Unreadable);
        assert!(finding.is_some_and(|finding| finding.detail.contains("instance")), "{diagnosis:?}");
    }
}

#[tokio::test]
async fn a_read_of_the_document_itself_names_it() {
    let (_scene, provider, _) = with_unreadable(1).await;
    let error = admin(&provider).get_instance_info("bad-execution").await.expect_err("it can't be read");
    let said = error.to_string();
    assert!(said.contains("document instance") && said.contains("bad-execution"), "{said}");
    provider.read("good-0").await.expect("the others can");
}

#[tokio::test]
async fn an_unreadable_instance_that_a_bulk_deletion_names_does_not_prevent_the_deletion_of_the_others() {
    let (_scene, provider, unreadable) = with_unreadable(1).await;
    let ids = GOOD.iter().map(ToString::to_string).chain(unreadable).collect();
    let filter = InstanceFilter { instance_ids: Some(ids), ..InstanceFilter::default() };
    let deleted = admin(&provider).delete_instance_bulk(filter).await.expect("a deletion");
    assert_eq!(deleted.instances_deleted, 3);
}

#[tokio::test]
async fn activities_and_messages_beside_an_unreadable_one_are_found() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("one").await;
    begin(&provider, "a", vec![activity("a", 2), activity("a", 3)], Vec::new()).await;
    fixture.change("a", "w:1:2", |document| document["attempts"] = json!("many")).await;
    let fresh = fixture.provider("two").await;
    let (item, _, _) = next_activity(&fresh, LONG).await;
    assert_eq!(item, activity("a", 3));
    let report = fresh.queues().await.expect("a report");
    assert_eq!((report.turns.waiting, report.unreadable), (0, 1));
}

/// Gives the documents of an instance a field that only a newer version knows.
async fn of_a_newer_version(fixture: &Fixture, partition: &str) {
    for document in fixture.partition(partition).await {
        let id = document["id"].as_str().expect("an id");
        fixture
            .change(partition, id, |document| document["newer"] = json!({ "kind": document["type"], "at": 7 }))
            .await;
    }
}

/// Asserts that the documents of these types still have that field.
async fn assert_has_newer_field(fixture: &Fixture, partition: &str, kinds: &[&str], when: &str) {
    for kind in kinds {
        let documents = fixture.documents_of_type(partition, kind).await;
        assert!(!documents.is_empty(), "no {kind} {when}");
        for document in documents {
            assert_eq!(document["newer"], json!({ "kind": kind, "at": 7 }), "{when}: {document}");
        }
    }
}

#[tokio::test]
async fn a_worker_keeps_the_fields_that_only_a_newer_version_knows() {
    let fixture = Fixture::new(1);
    let maker = fixture.provider("maker").await;
    let work = vec![activity_with("a", 2, Some("session"), None)];
    begin(&maker, "a", work, Vec::new()).await;
    maker.enqueue_for_orchestrator(external("a", "1"), None).await.unwrap();
    of_a_newer_version(&fixture, "a").await;

    let older = fixture.provider("older").await;
    let (_, token, _) = next_turn(&older, LONG).await;
    assert_has_newer_field(&fixture, "a", &["instance", "message"], "after a claim").await;
    older.renew_orchestration_item_lock(&token, 2 * LONG).await.unwrap();
    assert_has_newer_field(&fixture, "a", &["instance", "message"], "after a renewal").await;
    older.abandon_orchestration_item(&token, Some(Duration::from_millis(1)), false).await.unwrap();
    assert_has_newer_field(&fixture, "a", &["instance", "message"], "after an abandonment").await;
    let (_, token, _) = next_turn(&older, LONG).await;
    let events = vec![filler("a", 1, 3)];
    commit(&older, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
    assert_has_newer_field(&fixture, "a", &["instance"], "after a commit").await;

    let session = duroxide::providers::SessionFetchConfig { owner_id: "owner".to_owned(), lock_timeout: LONG };
    let tags = duroxide::providers::TagFilter::Any;
    let fetched = older.fetch_work_item(LONG, PATIENCE, Some(&session), &tags).await.unwrap();
    let (_, token, _) = fetched.expect("an activity");
    assert_has_newer_field(&fixture, "a", &["activity"], "after its claim").await;
    of_a_newer_version(&fixture, "$s:session").await;
    older.renew_work_item_lock(&token, 2 * LONG).await.unwrap();
    let owners = ["owner"];
    older.renew_session_lock(&owners, 3 * LONG, LONG).await.unwrap();
    assert_has_newer_field(&fixture, "a", &["activity"], "after its renewal").await;
    assert_has_newer_field(&fixture, "$s:session", &["session"], "after its renewal").await;
    older.abandon_work_item(&token, None, false).await.unwrap();
    assert_has_newer_field(&fixture, "a", &["activity"], "after its abandonment").await;
}
