//! A document that this version can't read hides no other: it is skipped, counted and named.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{InstanceFilter, Provider};
use duroxide_cosmos::{
    operate::{InstanceQuery, Reason},
    CosmosDBProvider, Retention,
};
use scene::{admin, begin, finish, mangle, quiet, Scene};
use serde_json::{json, Value};
use std::{collections::BTreeSet, time::Duration};

/// Fields of an instance's document with values that this version does not know.
fn manglings() -> Vec<(&'static str, Value)> {
    vec![
        ("execution", json!("one")),
        ("status", json!(7)),
        ("totals", json!("many")),
        ("completedAt", json!("yesterday")),
        ("deleting", json!(5)),
        ("lock", json!([])),
    ]
}

/// Three finished instances, and one for each mangling that can't be read.
async fn with_unreadable(partitions: u32) -> (Scene, CosmosDBProvider, Vec<String>) {
    let scene = Scene::new(partitions);
    let provider = scene.provider("one").await;
    for number in 0..3 {
        finish(&provider, &format!("good-{number}"), None).await;
    }
    let mut unreadable = Vec::new();
    for (field, value) in manglings() {
        let name = format!("bad-{field}");
        finish(&provider, &name, None).await;
        mangle(&scene, &name, "instance", |document| document[field] = value.clone()).await;
        unreadable.push(name);
    }
    // Another process knows nothing of how they were.
    let fresh = scene.provider("two").await;
    (scene, fresh, unreadable)
}

fn good(ids: &[String]) -> Vec<&str> {
    let mut good: Vec<&str> = ids.iter().map(String::as_str).filter(|id| id.starts_with("good-")).collect();
    good.sort_unstable();
    good
}

const GOOD: [&str; 3] = ["good-0", "good-1", "good-2"];

#[tokio::test]
async fn lists_of_instances_show_the_others() {
    let (_scene, provider, _) = with_unreadable(3).await;
    let ids = admin(&provider).list_instances().await.expect("a list");
    assert_eq!(good(&ids), GOOD);
    let ids = admin(&provider).list_instances_by_status("Completed").await.expect("a list");
    assert_eq!(good(&ids), GOOD);
    let page = provider.instances(&InstanceQuery::default(), None, 100).await.expect("a page");
    let ids: Vec<String> = page.instances.into_iter().map(|instance| instance.id).collect();
    assert_eq!(good(&ids), GOOD);
    let told: Vec<&str> = page.unreadable.iter().map(|instance| instance.id.as_str()).collect();
    // What a list shows of the others can be read.
    let shown = ["bad-execution", "bad-status", "bad-completedAt", "bad-deleting"];
    assert!(told.len() == shown.len() && shown.iter().all(|id| told.contains(id)), "{told:?}");
    assert!(page.unreadable.iter().any(|instance| instance.error.contains("\"one\"")), "{:?}", page.unreadable);
}

#[tokio::test]
async fn pages_go_on_behind_instances_that_cant_be_read() {
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
async fn a_tree_with_an_unreadable_child_stays_whole_and_the_others_go() {
    let scene = Scene::new(1);
    let provider = scene.provider("one").await;
    finish(&provider, "root", None).await;
    finish(&provider, "root::child", Some("root")).await;
    for (field, value) in manglings() {
        let before = scene.of_kind("root::child", "instance").await.remove(0);
        mangle(&scene, "root::child", "instance", |document| document[field] = value.clone()).await;
        let fresh = scene.provider(&format!("deleting beside {field}")).await;
        finish(&fresh, "good", None).await;
        let deleted = admin(&fresh).delete_instance_bulk(InstanceFilter::default()).await.expect("a deletion");
        assert_eq!(deleted.instances_deleted, 1, "{field}");
        let error = admin(&fresh).delete_instance("root", false).await.expect_err("the child can't be judged");
        assert!(error.message.contains("root::child"), "{field}: {error}");
        assert_eq!(scene.of_kind("root", "instance").await.len(), 1, "{field}: the root is gone, and its child is not");
        mangle(&scene, "root::child", "instance", |document| *document = before.clone()).await;
    }
    admin(&provider).delete_instance("root", false).await.expect("what can be read can be deleted");
}

#[tokio::test]
async fn a_deletion_takes_documents_along_that_nobody_can_read() {
    let scene = Scene::new(1);
    let provider = scene.provider("one").await;
    finish(&provider, "a", None).await;
    let strange =
        json!({ "id": "x", "instanceId": "a", "type": 7, "due": "soon", "seq": 1, "starts": "no", "execution": [] });
    scene.container().await.create_item("a".to_owned(), "x", &strange, None).await.expect("a document");
    admin(&provider).delete_instance("a", false).await.expect("a deletion");
    assert!(scene.partition("a").await.is_empty());
}

#[tokio::test]
async fn instances_are_listed_although_the_coordinator_of_a_deletion_cant_be_read() {
    let scene = Scene::new(1);
    let provider = scene.provider("one").await;
    finish(&provider, "good", None).await;
    finish(&provider, "marked", None).await;
    finish(&provider, "coordinator", None).await;
    let mark = json!({ "plan": "p", "coordinator": "coordinator", "before": "" });
    mangle(&scene, "marked", "instance", |document| document["deleting"] = mark.clone()).await;
    mangle(&scene, "coordinator", "instance", |document| document["execution"] = json!("one")).await;
    let fresh = scene.provider("two").await;
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
    let (scene, _, _) = with_unreadable(3).await;
    let retention = Retention::default().with_completed(Duration::ZERO);
    let provider = scene.provider_with("keeper", quiet().with_retention(retention)).await;
    let gone = provider.apply_retention().await.expect("a round");
    assert!(gone >= 3, "{gone}");
    let ids = admin(&provider).list_instances().await.expect("a list");
    assert!(good(&ids).is_empty(), "{ids:?}");
}

#[tokio::test]
async fn the_doctor_looks_at_all_and_names_those_that_cant_be_read() {
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
async fn one_that_is_named_in_a_bulk_deletion_leaves_the_others_to_be_deleted() {
    let (_scene, provider, unreadable) = with_unreadable(1).await;
    let ids = GOOD.iter().map(ToString::to_string).chain(unreadable).collect();
    let filter = InstanceFilter { instance_ids: Some(ids), ..InstanceFilter::default() };
    let deleted = admin(&provider).delete_instance_bulk(filter).await.expect("a deletion");
    assert_eq!(deleted.instances_deleted, 3);
}

#[tokio::test]
async fn work_and_messages_beside_an_unreadable_one_are_found() {
    let scene = Scene::new(1);
    let provider = scene.provider("one").await;
    begin(&provider, "a", vec![scene::activity("a", 2), scene::activity("a", 3)], Vec::new()).await;
    mangle(&scene, "a", "w:1:2", |document| document["attempts"] = json!("many")).await;
    let fresh = scene.provider("two").await;
    let (item, _, _) = scene::next_work(&fresh, scene::LONG).await;
    assert_eq!(item, scene::activity("a", 3));
    let report = fresh.queues().await.expect("a report");
    assert_eq!((report.turns.waiting, report.unreadable), (0, 1));
}

/// Gives documents of an instance a field that only a newer version knows.
async fn of_a_newer_version(scene: &Scene, partition: &str) {
    for document in scene.partition(partition).await {
        let id = document["id"].as_str().expect("an id");
        mangle(scene, partition, id, |document| document["newer"] = json!({ "kind": document["type"], "at": 7 })).await;
    }
}

/// The documents of these kinds, each of which must have the field still.
async fn assert_kept(scene: &Scene, partition: &str, kinds: &[&str], when: &str) {
    for kind in kinds {
        let documents = scene.of_kind(partition, kind).await;
        assert!(!documents.is_empty(), "no {kind} {when}");
        for document in documents {
            assert_eq!(document["newer"], json!({ "kind": kind, "at": 7 }), "{when}: {document}");
        }
    }
}

#[tokio::test]
async fn a_worker_keeps_the_fields_that_only_a_newer_version_knows() {
    let scene = Scene::new(1);
    let maker = scene.provider("maker").await;
    let work = vec![scene::activity_with("a", 2, Some("session"), None)];
    begin(&maker, "a", work, Vec::new()).await;
    maker.enqueue_for_orchestrator(scene::external("a", "1"), None).await.unwrap();
    of_a_newer_version(&scene, "a").await;

    let older = scene.provider("older").await;
    let (_, token, _) = scene::next_turn(&older, scene::LONG).await;
    assert_kept(&scene, "a", &["instance", "message"], "after a claim").await;
    older.renew_orchestration_item_lock(&token, 2 * scene::LONG).await.unwrap();
    assert_kept(&scene, "a", &["instance", "message"], "after a renewal").await;
    older.abandon_orchestration_item(&token, Some(Duration::from_millis(1)), false).await.unwrap();
    assert_kept(&scene, "a", &["instance", "message"], "after an abandonment").await;
    let (_, token, _) = scene::next_turn(&older, scene::LONG).await;
    let events = vec![scene::note("a", 1, 3)];
    scene::commit(&older, &token, events, Vec::new(), Vec::new(), scene::running()).await.unwrap();
    assert_kept(&scene, "a", &["instance"], "after a commit").await;

    let session = duroxide::providers::SessionFetchConfig { owner_id: "owner".to_owned(), lock_timeout: scene::LONG };
    let tags = duroxide::providers::TagFilter::Any;
    let fetched = older.fetch_work_item(scene::LONG, scene::PATIENCE, Some(&session), &tags).await.unwrap();
    let (_, token, _) = fetched.expect("an activity");
    assert_kept(&scene, "a", &["activity"], "after its claim").await;
    of_a_newer_version(&scene, "$s:session").await;
    older.renew_work_item_lock(&token, 2 * scene::LONG).await.unwrap();
    let owners = ["owner"];
    older.renew_session_lock(&owners, 3 * scene::LONG, scene::LONG).await.unwrap();
    assert_kept(&scene, "a", &["activity"], "after its renewal").await;
    assert_kept(&scene, "$s:session", &["session"], "after its renewal").await;
    older.abandon_work_item(&token, None, false).await.unwrap();
    assert_kept(&scene, "a", &["activity"], "after its abandonment").await;
}

/// Makes a message one of a kind that only a newer version knows.
async fn of_an_unknown_kind(scene: &Scene, instance: &str, id: &str) {
    let item = json!({ "InventedLater": { "instance": instance, "data": "1" } }).to_string();
    mangle(scene, instance, id, |document| document["item"] = json!(item)).await;
}

async fn message_ids(scene: &Scene, instance: &str) -> Vec<String> {
    let messages = scene.of_kind(instance, "message").await;
    messages.iter().map(|message| message["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_message_of_an_unknown_kind_is_left_for_a_version_that_knows_it() {
    let scene = Scene::new(1);
    let maker = scene.provider("maker").await;
    begin(&maker, "a", Vec::new(), Vec::new()).await;
    maker.enqueue_for_orchestrator(scene::external("a", "unknown"), None).await.unwrap();
    let unknown = message_ids(&scene, "a").await.remove(0);
    of_an_unknown_kind(&scene, "a", &unknown).await;
    maker.enqueue_for_orchestrator(scene::external("a", "known"), None).await.unwrap();

    // The other message has its turn, and the attempt is its first.
    let older = scene.provider("older").await;
    let (item, token, attempts) = scene::next_turn(&older, scene::LONG).await;
    assert_eq!((item.history_error, item.messages, attempts), (None, vec![scene::external("a", "known")], 1));
    scene::commit(&older, &token, vec![scene::note("a", 1, 2)], Vec::new(), Vec::new(), scene::running())
        .await
        .unwrap();

    // It is still there, as it was, and no poll finds it now.
    let left = scene.of_kind("a", "message").await.remove(0);
    assert_eq!((left["id"].as_str(), &left["attempts"]), (Some(unknown.as_str()), &json!(0)));
    assert!(left["item"].as_str().unwrap().contains("InventedLater"));
    assert!(left["due"].as_u64() > left["createdAt"].as_u64(), "{left}");
    assert!(older.fetch_orchestration_item(scene::LONG, scene::NOW, None).await.unwrap().is_none());
    assert!(scene.of_kind("a", "instance").await[0]["lock"].is_null());

    // A version that knows it gets it.
    let item = serde_json::to_string(&scene::external("a", "unknown")).unwrap();
    mangle(&scene, "a", &unknown, |document| document["item"] = json!(item)).await;
    let (item, _, attempts) = scene::next_turn(&scene.provider("newer").await, scene::LONG).await;
    assert_eq!((item.messages, attempts), (vec![scene::external("a", "unknown")], 1));
}

#[tokio::test]
async fn a_message_whose_document_cant_be_read_keeps_no_other_from_its_turn() {
    let scene = Scene::new(1);
    let maker = scene.provider("maker").await;
    begin(&maker, "a", Vec::new(), Vec::new()).await;
    maker.enqueue_for_orchestrator(scene::external("a", "unknown"), None).await.unwrap();
    let unknown = message_ids(&scene, "a").await.remove(0);
    mangle(&scene, "a", &unknown, |document| document["attempts"] = json!("many")).await;
    maker.enqueue_for_orchestrator(scene::external("a", "known"), None).await.unwrap();
    let older = scene.provider("older").await;
    let (item, _, _) = scene::next_turn(&older, scene::LONG).await;
    assert_eq!(item.messages, [scene::external("a", "known")]);
    let left = scene.of_kind("a", "message").await.into_iter().find(|message| message["id"] == *unknown).unwrap();
    assert_eq!(left["attempts"], json!("many"));
}

#[tokio::test]
async fn an_instance_that_has_nothing_but_unknown_messages_is_not_claimed_again_and_again() {
    let scene = Scene::new(1);
    let maker = scene.provider("maker").await;
    begin(&maker, "a", Vec::new(), Vec::new()).await;
    // One message is for an instance, and one for a name that nobody has started.
    for instance in ["a", "nobody"] {
        maker.enqueue_for_orchestrator(scene::external(instance, "1"), None).await.unwrap();
        let id = message_ids(&scene, instance).await.remove(0);
        of_an_unknown_kind(&scene, instance, &id).await;
        let older = scene.provider(&format!("older of {instance}")).await;
        assert!(older.fetch_orchestration_item(scene::LONG, scene::NOW, None).await.unwrap().is_none());
        let left = scene.of_kind(instance, "message").await.remove(0);
        assert!(left["due"].as_u64() > left["createdAt"].as_u64(), "{left}");
        let instances = scene.of_kind(instance, "instance").await;
        assert!(instances.iter().all(|document| document["lock"].is_null() && document["claims"].is_null()));
    }
}
