//! Work that can be taken is found behind work that cannot, by a fetch that waits and by one that does not.

use crate::fixture::*;
use azure_data_cosmos::TransactionalBatch;
use duroxide::providers::{Provider, SessionFetchConfig, TagFilter, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{LocalAccount, RequestKind, WireAction, WireRequest, WireRule};
use serde_json::Value;
use std::time::Duration;

/// More than fit one page and the pages of one poll. `IN_FRONT=10000` makes it more.
fn in_front() -> u64 {
    std::env::var("IN_FRONT").ok().and_then(|count| count.parse().ok()).unwrap_or(2_100)
}

/// Makes an instance with so many activities, and then another one with a single activity.
async fn prepare(fixture: &Fixture, like: impl Fn(u64) -> WorkItem) {
    let maker = fixture.provider("maker").await;
    begin(&maker, "front", (2..2 + in_front()).map(like).collect(), Vec::new()).await;
    begin(&maker, "behind", vec![activity("behind", 2)], Vec::new()).await;
}

/// One provider that polls once, and one that waits.
async fn both(fixture: &Fixture) -> [(CosmosDBProvider, Duration); 2] {
    [(fixture.provider("hasty").await, NOW), (fixture.provider("patient").await, PATIENCE)]
}

fn assert_behind(item: &WorkItem) {
    assert!(matches!(item, WorkItem::ActivityExecute { instance, .. } if instance == "behind"), "{item:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_activities_with_a_tag_that_no_local_worker_serves_hide_no_others() {
    let fixture = Fixture::new(2);
    prepare(&fixture, |id| activity_with("front", id, None, Some("gpu"))).await;
    for (provider, patience) in both(&fixture).await {
        let taken = provider.fetch_work_item(LONG, patience, None, &TagFilter::DefaultOnly).await.unwrap();
        let (item, token, _) = taken.expect("it is there");
        assert_behind(&item);
        provider.abandon_work_item(&token, None, true).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_activities_of_a_session_that_another_worker_owns_hide_no_others() {
    let fixture = Fixture::new(2);
    prepare(&fixture, |id| activity_with("front", id, Some("theirs"), None)).await;
    let owner = fixture.provider("owner").await;
    let session = |name: &str| SessionFetchConfig { owner_id: name.to_owned(), lock_timeout: LONG };
    let theirs = owner.fetch_work_item(LONG, PATIENCE, Some(&session("owner")), &TagFilter::Any).await.unwrap();
    assert!(theirs.is_some());
    for (provider, patience) in both(&fixture).await {
        // Without room for another session, a worker can only take activities without a session.
        let taken = provider.fetch_work_item(LONG, patience, None, &TagFilter::Any).await.unwrap();
        let (item, token, _) = match taken {
            Some(taken) => taken,
            // A fetch that waits returns soon without an activity, so that the worker may ask for a session. This one
            // asks again.
            None => next_unbound(&provider).await,
        };
        assert_behind(&item);
        provider.abandon_work_item(&token, None, true).await.unwrap();
    }
}

async fn next_unbound(provider: &CosmosDBProvider) -> FetchedActivity {
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
async fn an_event_for_an_instance_with_a_timer_and_many_waiting_activities_is_found() {
    let fixture = Fixture::new(1);
    let runner = fixture.provider("runner").await;
    let in_an_hour = u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap() + 3_600_000;
    let timer = WorkItem::TimerFired { instance: "i".to_owned(), execution_id: 1, id: 500, fire_at_ms: in_an_hour };
    begin(&runner, "i", (2..202).map(|id| activity("i", id)).collect(), vec![timer]).await;
    let client = fixture.provider("client").await;
    client.enqueue_for_orchestrator(external("i", "news"), None).await.unwrap();
    let (turn, ..) = next_turn(&runner, LONG).await;
    assert_eq!(turn.messages, [external("i", "news")]);
}

/// Adds messages like the one that the instance has.
async fn more_messages(fixture: &Fixture, instance: &str, count: u64) {
    let container = fixture.container().await;
    let like = fixture.documents_of_type(instance, "message").await.remove(0);
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
async fn thousands_of_messages_for_an_instance_that_another_worker_runs_hide_no_other_instance() {
    let fixture = Fixture::new(1);
    let (maker, other) = (fixture.provider("maker").await, fixture.provider("other").await);
    begin(&maker, "front", Vec::new(), Vec::new()).await;
    maker.enqueue_for_orchestrator(external("front", "first"), None).await.unwrap();
    let held = next_turn(&maker, LONG).await;
    more_messages(&fixture, "front", in_front()).await;
    other.enqueue_for_orchestrator(start("behind"), None).await.unwrap();
    drop(other);
    for (provider, patience) in both(&fixture).await {
        let taken = provider.fetch_orchestration_item(LONG, patience, None).await.unwrap();
        let (turn, token, _) = taken.expect("it is there");
        assert_eq!(turn.instance, "behind");
        provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    }
    assert_eq!(held.0.instance, "front");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_that_cannot_be_read_hide_no_others() {
    let fixture = Fixture::new(1);
    let maker = fixture.provider("maker").await;
    let unreadable = [
        serde_json::json!({"id": "w:bad", "instanceId": "front", "type": "activity", "due": 1, "seq": 7}),
        serde_json::json!({"id": "m:bad", "instanceId": "front", "type": "message", "due": -1.5, "seq": "1"}),
        serde_json::json!({"id": "member:bad", "instanceId": "$d:fleet", "type": "member", "member": 7}),
    ];
    for document in unreadable {
        let partition = document["instanceId"].as_str().unwrap().to_owned();
        let id = document["id"].as_str().unwrap().to_owned();
        fixture.container().await.create_item(&partition, &id, document, None).await.unwrap();
    }
    begin(&maker, "behind", vec![activity("behind", 2)], Vec::new()).await;
    maker.enqueue_for_orchestrator(start("turn"), None).await.unwrap();
    drop(maker);
    for (provider, patience) in both(&fixture).await {
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
async fn a_physical_partition_that_does_not_answer_hides_no_others() {
    let fixture = Fixture::new(3);
    let waiting = fixture.provider_with("waiting", test_config().with_poll_interval(Duration::from_secs(3_600))).await;
    let maker = fixture.provider("maker").await;
    let mut instances = Vec::new();
    for n in 0..12 {
        instances.push(format!("i{n}"));
        maker.enqueue_for_orchestrator(start(&format!("i{n}")), None).await.unwrap();
    }
    // The first partition whose queue is queried is the one that does not answer.
    let silent = std::sync::OnceLock::new();
    let is_silent = move |request: &WireRequest<'_>| {
        let Some(range) = request.partition_range else { return false };
        request.kind == RequestKind::Query && range == silent.get_or_init(|| range.to_owned())
    };
    let silence = WireRule::new(WireAction::FailConnection).client("waiting").matching(is_silent);
    let silence = fixture.account.wire().add(silence);
    let mut found = Vec::new();
    while found.len() < 2 {
        found.push(next_turn(&waiting, LONG).await.0.instance);
    }
    assert!(silence.hits() > 0 && found.iter().all(|found| instances.contains(found)), "{found:?}");
}

/// Several pages of a poll.
const MESSAGES: usize = 350;

fn start(instance: &str) -> WorkItem {
    WorkItem::StartOrchestration {
        instance: instance.to_owned(),
        orchestration: "Orchestration".to_owned(),
        input: String::new(),
        version: Some("1.0.0".to_owned()),
        parent_instance: None,
        parent_id: None,
        parent_execution_id: None,
        execution_id: 1,
    }
}

async fn provider(account: &LocalAccount, name: &str) -> CosmosDBProvider {
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    CosmosDBProvider::new_with_client(&account.client_named(name).await, config).await.expect("a provider")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_behind_pages_of_anothers_messages_is_found_by_a_process_that_did_not_enqueue_them() {
    let account = LocalAccount::new();
    let sender = provider(&account, "sender").await;
    sender.enqueue_for_orchestrator(start("loud"), None).await.unwrap();
    for n in 0..MESSAGES {
        let event = WorkItem::ExternalRaised { instance: "loud".into(), name: "event".into(), data: n.to_string() };
        sender.enqueue_for_orchestrator(event, None).await.unwrap();
    }
    sender.enqueue_for_orchestrator(start("quiet"), None).await.unwrap();

    let worker = provider(&account, "worker").await;
    let (lock, patience) = (Duration::from_secs(60), Duration::from_secs(30));
    let (first, _token, _) =
        worker.fetch_orchestration_item(lock, patience, None).await.unwrap().expect("the oldest goes first");
    assert_eq!(first.instance, "loud");
    assert_eq!(first.messages.len(), MESSAGES + 1);
    let (second, _token, _) =
        worker.fetch_orchestration_item(lock, patience, None).await.unwrap().expect("the other is not held up");
    assert_eq!(second.instance, "quiet");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_whose_partition_is_full_delays_no_other_instance() {
    let fixture = Fixture::new(1);
    let (a, worker) = (fixture.provider("a").await, fixture.provider("worker").await);
    for instance in ["full", "good"] {
        begin(&a, instance, Vec::new(), Vec::new()).await;
    }
    for instance in ["full", "good"] {
        a.enqueue_for_orchestrator(external(instance, "go on"), None).await.unwrap();
    }
    let full = WireAction::Refuse { status: 403, substatus: Some(1014), retry_after: None };
    let rule = WireRule::new(full).client("worker").on(RequestKind::Replace).on(RequestKind::Batch);
    fixture.account.wire().add(rule.matching(|request| goes_to(request, "full")));
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "good");
}
