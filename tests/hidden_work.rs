//! What can be taken is found, whatever lies in front of it: by a caller that does not wait, and by one that does.

#[path = "common/scene.rs"]
mod scene;

use azure_data_cosmos::TransactionalBatch;
use duroxide::providers::{Provider, SessionFetchConfig, TagFilter, WorkItem};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use scene::*;
use serde_json::Value;
use std::time::Duration;

/// More than any page, and than the pages of one look; `IN_FRONT=10000` makes it more.
fn in_front() -> u64 {
    std::env::var("IN_FRONT").ok().and_then(|count| count.parse().ok()).unwrap_or(2_100)
}

/// An instance with so many activities, and then another one with a single one.
async fn prepare(scene: &Scene, like: impl Fn(u64) -> WorkItem) {
    let maker = scene.provider("maker").await;
    begin(&maker, "front", (2..2 + in_front()).map(like).collect(), Vec::new()).await;
    begin(&maker, "behind", vec![activity("behind", 2)], Vec::new()).await;
}

/// Who looks now, and who waits.
async fn both(scene: &Scene) -> [(CosmosDBProvider, Duration); 2] {
    [(scene.provider("hasty").await, NOW), (scene.provider("patient").await, PATIENCE)]
}

fn assert_behind(item: &WorkItem) {
    assert!(matches!(item, WorkItem::ActivityExecute { instance, .. } if instance == "behind"), "{item:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_activities_with_a_tag_that_nobody_here_serves_hide_nothing() {
    let scene = Scene::new(2);
    prepare(&scene, |id| activity_with("front", id, None, Some("gpu"))).await;
    for (provider, patience) in both(&scene).await {
        let taken = provider.fetch_work_item(LONG, patience, None, &TagFilter::DefaultOnly).await.unwrap();
        let (item, token, _) = taken.expect("it is there");
        assert_behind(&item);
        provider.abandon_work_item(&token, None, true).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_activities_of_a_session_that_another_owns_hide_nothing() {
    let scene = Scene::new(2);
    prepare(&scene, |id| activity_with("front", id, Some("theirs"), None)).await;
    let owner = scene.provider("owner").await;
    let session = |name: &str| SessionFetchConfig { owner_id: name.to_owned(), lock_timeout: LONG };
    let theirs = owner.fetch_work_item(LONG, PATIENCE, Some(&session("owner")), &TagFilter::Any).await.unwrap();
    assert!(theirs.is_some());
    for (provider, patience) in both(&scene).await {
        // Without room for another session only what is bound to none can be taken.
        let taken = provider.fetch_work_item(LONG, patience, None, &TagFilter::Any).await.unwrap();
        let (item, token, _) = match taken {
            Some(taken) => taken,
            // One that waits is told soon, so that it may ask with a session: it asks again.
            None => next_unbound(&provider).await,
        };
        assert_behind(&item);
        provider.abandon_work_item(&token, None, true).await.unwrap();
    }
}

async fn next_unbound(provider: &CosmosDBProvider) -> Work {
    let asking = async {
        loop {
            let taken = provider.fetch_work_item(LONG, PATIENCE, None, &TagFilter::Any).await.unwrap();
            if let Some(taken) = taken {
                return taken;
            }
        }
    };
    tokio::time::timeout(PATIENCE, asking).await.expect("it is found")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_for_an_instance_with_a_timer_and_many_waiting_activities_is_seen() {
    let scene = Scene::new(1);
    let runner = scene.provider("runner").await;
    let in_an_hour = u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap() + 3_600_000;
    let timer = WorkItem::TimerFired { instance: "i".to_owned(), execution_id: 1, id: 500, fire_at_ms: in_an_hour };
    begin(&runner, "i", (2..202).map(|id| activity("i", id)).collect(), vec![timer]).await;
    let client = scene.provider("client").await;
    client.enqueue_for_orchestrator(external("i", "news"), None).await.unwrap();
    let (turn, ..) = next_turn(&runner, LONG).await;
    assert_eq!(turn.messages, [external("i", "news")]);
}

/// More messages like the one that an instance has.
async fn more_messages(scene: &Scene, instance: &str, count: u64) {
    let container = scene.container().await;
    let like = scene.of_kind(instance, "message").await.remove(0);
    for chunk in (0..count).collect::<Vec<_>>().chunks(100) {
        let mut batch = TransactionalBatch::new(instance.to_owned());
        for n in chunk {
            let own = like.as_object().unwrap().iter().filter(|(key, _)| !key.starts_with('_'));
            let mut copy: Value = own.map(|(key, value)| (key.clone(), value.clone())).collect();
            copy["id"] = Value::from(format!("m:copy:{n}"));
            batch = batch.create_item(copy).unwrap();
        }
        container.execute_transactional_batch(batch, None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_messages_for_an_instance_that_another_holds_hide_no_other_instance() {
    let scene = Scene::new(1);
    let (maker, other) = (scene.provider("maker").await, scene.provider("other").await);
    begin(&maker, "front", Vec::new(), Vec::new()).await;
    maker.enqueue_for_orchestrator(external("front", "first"), None).await.unwrap();
    let held = next_turn(&maker, LONG).await;
    more_messages(&scene, "front", in_front()).await;
    other.enqueue_for_orchestrator(start("behind"), None).await.unwrap();
    drop(other);
    for (provider, patience) in both(&scene).await {
        let taken = provider.fetch_orchestration_item(LONG, patience, None).await.unwrap();
        let (turn, token, _) = taken.expect("it is there");
        assert_eq!(turn.instance, "behind");
        provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    }
    assert_eq!(held.0.instance, "front");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_that_cant_be_read_hide_nothing_and_nobody() {
    let scene = Scene::new(1);
    let maker = scene.provider("maker").await;
    let unreadable = [
        serde_json::json!({"id": "w:bad", "instanceId": "front", "type": "activity", "due": 1, "seq": 7}),
        serde_json::json!({"id": "m:bad", "instanceId": "front", "type": "message", "due": -1.5, "seq": "1"}),
        serde_json::json!({"id": "member:bad", "instanceId": "$d:fleet", "type": "member", "member": 7}),
    ];
    for document in unreadable {
        let partition = document["instanceId"].as_str().unwrap().to_owned();
        let id = document["id"].as_str().unwrap().to_owned();
        scene.container().await.create_item(&partition, &id, document, None).await.unwrap();
    }
    begin(&maker, "behind", vec![activity("behind", 2)], Vec::new()).await;
    maker.enqueue_for_orchestrator(start("turn"), None).await.unwrap();
    drop(maker);
    for (provider, patience) in both(&scene).await {
        let taken = provider.fetch_work_item(LONG, patience, None, &TagFilter::DefaultOnly).await.unwrap();
        let (item, token, _) = taken.expect("it is there");
        assert_behind(&item);
        provider.abandon_work_item(&token, None, true).await.unwrap();
        let taken = provider.fetch_orchestration_item(LONG, patience, None).await.unwrap();
        let (turn, token, _) = taken.expect("it is there");
        assert_eq!(turn.instance, "turn");
        provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_does_not_answer_hides_none_of_the_others() {
    let scene = Scene::new(3);
    let waiting = scene.provider_with("waiting", quiet().with_poll_interval(Duration::from_secs(3_600))).await;
    let maker = scene.provider("maker").await;
    let mut instances = Vec::new();
    for n in 0..12 {
        instances.push(format!("i{n}"));
        maker.enqueue_for_orchestrator(start(&format!("i{n}")), None).await.unwrap();
    }
    // The first that is asked for its queue is the one that stays silent.
    let silent = std::sync::OnceLock::new();
    let is_silent = move |request: &WireRequest<'_>| {
        let Some(range) = request.partition_range else { return false };
        request.kind == RequestKind::Query && range == silent.get_or_init(|| range.to_owned())
    };
    let silence = WireRule::new(WireAction::FailConnection).client("waiting").matching(is_silent);
    let silence = scene.account.wire().add(silence);
    let mut found = Vec::new();
    while found.len() < 2 {
        found.push(next_turn(&waiting, LONG).await.0.instance);
    }
    assert!(silence.hits() > 0 && found.iter().all(|found| instances.contains(found)), "{found:?}");
}
