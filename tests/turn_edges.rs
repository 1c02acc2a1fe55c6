//! Turns at the edges: more messages than one turn takes, ages, messages that can't be read, and children that fail.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, SessionFetchConfig, TagFilter, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::RequestKind;
use scene::*;
use std::time::Duration;

const NAME: &str = "name";
const HOUR: i64 = 3_600_000;

/// A process for which every lock has expired and everything that is put off is due.
fn later(millis: i64) -> CosmosDBProviderConfig {
    quiet().with_clock(off_by(millis))
}

fn queued(number: usize) -> WorkItem {
    WorkItem::QueueMessage { instance: NAME.to_owned(), name: "queue".to_owned(), data: number.to_string() }
}

/// A look at the present state of the queues, which finds no turn.
async fn look(provider: &CosmosDBProvider) {
    let fetched = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(fetched.is_none(), "there is nothing to run: {fetched:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_parked_message_is_forgotten_where_their_start_is_the_oldest_message() {
    const MANY: usize = 620;
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", later(HOUR)).await);
    a.enqueue_for_orchestrator(start(NAME), Some(Duration::from_secs(600))).await.unwrap();
    let messages: Vec<WorkItem> = (0..MANY).map(|number| external(NAME, &number.to_string())).collect();
    for message in &messages {
        a.enqueue_for_orchestrator(message.clone(), None).await.unwrap();
    }
    look(&a).await;
    let mut seen = Vec::new();
    for turn in 1.. {
        let Some((item, token, _)) = b.fetch_orchestration_item(LONG, NOW, None).await.unwrap() else { break };
        seen.extend(item.messages);
        let event = if turn == 1 { started(NAME, 1) } else { note(NAME, 1, turn) };
        commit(&b, &token, vec![event], Vec::new(), Vec::new(), running()).await.unwrap();
    }
    assert_eq!(scene.of_kind(NAME, "message").await.len(), 0, "{} were seen", seen.len());
    assert_eq!(seen, [vec![start(NAME)], messages].concat());
    let instance = scene.of_kind(NAME, "instance").await.pop().unwrap();
    assert!(instance["deferred"].is_null() && instance["due"].is_null(), "{instance}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orphans_that_are_not_a_day_old_are_not_looked_at_all_the_time() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", later(12 * HOUR)).await);
    a.enqueue_for_orchestrator(queued(0), None).await.unwrap();
    look(&a).await;
    for number in 1..=620 {
        b.enqueue_for_orchestrator(queued(number), None).await.unwrap();
    }
    look(&b).await;
    let c = scene.provider_with("c", later(25 * HOUR)).await;
    look(&c).await;
    look(&c).await;
    assert_eq!(scene.of_kind(NAME, "message").await.len(), 620);
    let instance = scene.of_kind(NAME, "instance").await.pop().unwrap();
    let found = scene.of_kind(NAME, "message").await.iter().filter_map(|m| m["orphanSince"].as_u64()).min().unwrap();
    assert_eq!(instance["due"].as_u64(), Some(found + 24 * HOUR as u64), "{instance}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_taken_again_keeps_the_fields_of_a_newer_version() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    let owner = SessionFetchConfig { owner_id: "owner".to_owned(), lock_timeout: LONG };
    begin(&a, NAME, (2..4).map(|id| activity_with(NAME, id, Some("s"), None)).collect(), Vec::new()).await;
    let tags = TagFilter::default();
    let next = || a.fetch_work_item(LONG, NOW, Some(&owner), &tags);
    assert!(next().await.unwrap().is_some());
    let container = scene.container().await;
    let mut session = scene.documents().await.into_iter().find(|document| document["type"] == "session").unwrap();
    let (key, id) = (session["instanceId"].as_str().unwrap().to_owned(), session["id"].as_str().unwrap().to_owned());
    session["newer"] = "sharedResult".into();
    container.replace_item(key.clone(), &id, &session, None).await.unwrap();
    assert!(next().await.unwrap().is_some());
    let session = scene.of_kind(&key, "session").await.pop().unwrap();
    assert_eq!(session["newer"], "sharedResult", "{session}");
}

/// Hundreds of messages of a kind that only a newer version knows, and one that this version knows behind them.
async fn with_unknown(scene: &Scene, provider: &CosmosDBProvider, count: usize) {
    for number in 0..count {
        provider.enqueue_for_orchestrator(queued(number), None).await.unwrap();
    }
    for mut message in scene.of_kind(NAME, "message").await {
        message["item"] = "{\"OfANewerVersion\":{}}".into();
        let id = message["id"].as_str().unwrap().to_owned();
        scene.container().await.replace_item(NAME.to_owned(), &id, &message, None).await.unwrap();
    }
}

/// How many messages are not due yet.
async fn put_off(scene: &Scene, now: u64) -> usize {
    scene.of_kind(NAME, "message").await.iter().filter(|message| message["due"].as_u64() > Some(now)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_does_not_wait_until_hundreds_that_cant_be_read_are_put_off() {
    const MANY: usize = 600;
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    begin(&a, NAME, Vec::new(), Vec::new()).await;
    with_unknown(&scene, &a, MANY).await;
    a.enqueue_for_orchestrator(external(NAME, "known"), None).await.unwrap();
    let before = scene.account.stats_of("b");
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [external(NAME, "known")]);
    let batches = (scene.account.stats_of("b") - before).of(RequestKind::Batch).requests;
    assert!(batches <= 4, "{batches} batches before the turn");
    let now = scene.of_kind(NAME, "instance").await.pop().unwrap()["claims"][0].as_u64().unwrap();
    assert!(put_off(&scene, now).await < 200, "the others can wait");
    commit(&b, &token, vec![note(NAME, 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    // They are put off nevertheless, by this claim and the next ones.
    let all_put_off = async {
        while put_off(&scene, now).await < MANY {
            assert!(b.fetch_orchestration_item(LONG, Duration::from_millis(200), None).await.unwrap().is_none());
        }
    };
    tokio::time::timeout(PATIENCE, all_put_off).await.expect("all of them are put off");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_parked_message_that_cant_be_read_is_forgotten() {
    const MANY: usize = 250;
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", later(HOUR)).await);
    a.enqueue_for_orchestrator(external(NAME, "known"), None).await.unwrap();
    look(&a).await;
    with_unknown(&scene, &a, MANY - 1).await;
    for mut message in scene.of_kind(NAME, "message").await {
        message["due"] = ((1u64 << 53) - 1).into();
        let id = message["id"].as_str().unwrap().to_owned();
        scene.container().await.replace_item(NAME.to_owned(), &id, &message, None).await.unwrap();
    }
    a.enqueue_for_orchestrator(start(NAME), None).await.unwrap();
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [start(NAME)]);
    commit(&b, &token, vec![started(NAME, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let none_is_parked = async {
        while scene.of_kind(NAME, "message").await.iter().any(|m| m["due"].as_u64() == Some((1 << 53) - 1)) {
            assert!(b.fetch_orchestration_item(LONG, Duration::from_millis(200), None).await.unwrap().is_none());
        }
    };
    tokio::time::timeout(PATIENCE, none_is_parked).await.expect("each is visible to a version that knows it");
    assert_eq!(scene.of_kind(NAME, "message").await.len(), MANY);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_enclosed_message_that_cant_be_read_stays_beside_hundreds_of_others() {
    const MANY: usize = 150;
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", later(HOUR)).await);
    begin(&a, NAME, Vec::new(), Vec::new()).await;
    with_unknown(&scene, &a, MANY).await;
    // The last of them is in the instance's document: its worker died after an inline claim.
    let container = scene.container().await;
    let mut instance = scene.of_kind(NAME, "instance").await.remove(0);
    let message = scene.of_kind(NAME, "message").await.pop().unwrap();
    let id = message["id"].as_str().unwrap().to_owned();
    instance["inlined"] =
        ["id", "due", "seq", "createdAt", "item"].map(|name| (name, message[name].clone())).into_iter().collect();
    instance["due"] = message["due"].clone();
    container.delete_item(NAME.to_owned(), &id, None).await.unwrap();
    container.replace_item(NAME.to_owned(), "instance", &instance, None).await.unwrap();
    a.enqueue_for_orchestrator(external(NAME, "known"), None).await.unwrap();
    let (item, token, _) = next_turn(&b, LONG).await;
    assert_eq!(item.messages, [external(NAME, "known")]);
    commit(&b, &token, vec![note(NAME, 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    let left = scene.of_kind(NAME, "message").await;
    assert!(
        left.iter().any(|message| message["id"] == *id),
        "the enclosed message is left for a version that knows it"
    );
    assert_eq!(left.len(), MANY);
}
