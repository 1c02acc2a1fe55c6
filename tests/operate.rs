//! What those who run it ask for: pages of instances, queues, members, late messages, whether an account fits.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, TagFilter};
use duroxide_cosmos::{
    operate::{self, CheckStatus, InstanceQuery, IntentState},
    Clock, CosmosDBProvider, CosmosDBProviderConfig, Credential,
};
use duroxide_cosmos_emulator::{LocalAccount, RequestKind};
use scene::*;
use std::{
    collections::BTreeSet,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

/// A provider whose time is as the test says.
async fn with_time(scene: &Scene, time: &Arc<AtomicU64>) -> CosmosDBProvider {
    let time = time.clone();
    scene.provider_with("maker", quiet().with_clock(Clock::from_fn(move || time.load(Ordering::Relaxed)))).await
}

async fn all(provider: &CosmosDBProvider, query: &InstanceQuery, limit: usize) -> (Vec<String>, usize) {
    let (mut found, mut cursor, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = provider.instances(query, cursor.as_deref(), limit).await.unwrap();
        assert!(page.instances.len() <= limit);
        found.extend(page.instances.into_iter().map(|instance| instance.id));
        (cursor, pages) = (page.cursor, pages + 1);
        if cursor.is_none() {
            return (found, pages);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_have_every_instance_once_newest_first_also_those_of_one_millisecond() {
    for partitions in [1, 4] {
        let scene = Scene::new(partitions);
        let time = Arc::new(AtomicU64::new(1_000_000));
        let maker = with_time(&scene, &time).await;
        for n in 0..25 {
            // Ten in the same millisecond, twice.
            time.store(1_000_000 + n / 10, Ordering::Relaxed);
            begin(&maker, &format!("i{n}"), Vec::new(), Vec::new()).await;
        }
        let everything = InstanceQuery::default();
        let (found, pages) = all(&maker, &everything, 7).await;
        assert_eq!((found.len(), pages), (25, 4), "{partitions}");
        assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), 25);
        let number = |id: &String| id[1..].parse::<u64>().unwrap() / 10;
        assert!(found.windows(2).all(|pair| number(&pair[0]) >= number(&pair[1])), "newest first: {found:?}");
        // What comes and goes between two pages moves none of the others.
        let page = maker.instances(&everything, None, 7).await.unwrap();
        time.store(1_000_009, Ordering::Relaxed);
        begin(&maker, "new", Vec::new(), Vec::new()).await;
        admin(&maker).delete_instance(&page.instances[3].id, true).await.unwrap();
        let rest = maker.instances(&everything, page.cursor.as_deref(), 1_000).await.unwrap();
        assert_eq!((rest.instances.len(), rest.cursor.is_none()), (18, true));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_is_one_query_whatever_is_asked_for() {
    let scene = Scene::new(1);
    let time = Arc::new(AtomicU64::new(5_000));
    let maker = with_time(&scene, &time).await;
    begin(&maker, "parent", Vec::new(), vec![start_child("child", Some("parent"))]).await;
    let (_, token, _) = next_turn(&maker, LONG).await;
    let metadata = duroxide::providers::ExecutionMetadata {
        parent_instance_id: Some("parent".to_owned()),
        orchestration_name: Some("Other".to_owned()),
        ..ended("Failed")
    };
    time.store(9_000, Ordering::Relaxed);
    commit(&maker, &token, vec![started("child", 1)], Vec::new(), Vec::new(), metadata).await.unwrap();
    let ask = |change: fn(&mut InstanceQuery)| {
        let mut query = InstanceQuery::default();
        change(&mut query);
        query
    };
    let questions: [(InstanceQuery, &[&str]); 9] = [
        (ask(|_| ()), &["child", "parent"]),
        (ask(|q| q.status = Some("Failed".into())), &["child"]),
        (ask(|q| q.status = Some("Completed".into())), &[]),
        (ask(|q| q.name = Some("Other".into())), &["child"]),
        (ask(|q| q.parent = Some("parent".into())), &["child"]),
        (ask(|q| q.text = Some("AREN".into())), &["parent"]),
        (ask(|q| q.created_after = Some(9_000)), &["child"]),
        (ask(|q| q.created_before = Some(9_000)), &["parent"]),
        (ask(|q| (q.created_after, q.created_before) = (Some(6_000), Some(9_000))), &[]),
    ];
    for (query, expected) in questions {
        let before = scene.account.stats().of(RequestKind::Query).requests;
        let page = maker.instances(&query, None, 10).await.unwrap();
        let found: Vec<&str> = page.instances.iter().map(|instance| instance.id.as_str()).collect();
        assert_eq!(found, expected, "{query:?}");
        assert_eq!(scene.account.stats().of(RequestKind::Query).requests - before, 1, "{query:?}");
    }
    let child = maker.instance("child").await.unwrap().unwrap();
    assert_eq!((child.status.as_str(), child.parent.as_deref()), ("Failed", Some("parent")));
    assert_eq!((child.created_at, child.completed_at), (9_000, Some(9_000)));
    assert!(maker.instance("nobody").await.unwrap().is_none());
    let error = maker.instances(&InstanceQuery::default(), Some("rubbish"), 10).await.unwrap_err();
    assert!(error.to_string().contains("is not a cursor"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queues_tell_what_waits_since_when_and_what_runs() {
    let scene = Scene::new(1);
    let time = Arc::new(AtomicU64::new(1_000));
    let maker = with_time(&scene, &time).await;
    let work = vec![
        activity("i", 2),
        activity("i", 3),
        activity_with("i", 4, None, Some("gpu")),
        activity_with("i", 5, Some("cart"), None),
    ];
    begin(&maker, "i", work, Vec::new()).await;
    time.store(3_000, Ordering::Relaxed);
    let running = maker.fetch_work_item(LONG, Duration::ZERO, None, &TagFilter::DefaultOnly).await.unwrap();
    assert!(running.is_some());
    maker.enqueue_for_orchestrator(external("i", "now"), None).await.unwrap();
    maker.enqueue_for_orchestrator(external("i", "later"), Some(Duration::from_secs(60))).await.unwrap();
    let report = maker.queues().await.unwrap();
    let turns = &report.turns;
    assert_eq!((turns.waiting, turns.later, turns.deferred, turns.oldest), (1, 1, 0, Some(3_000)));
    let told: Vec<_> = report
        .activities
        .iter()
        .map(|q| (q.tag.as_deref(), q.session.as_deref(), q.waiting, q.running, q.oldest))
        .collect();
    let expected = [
        (None, None, 1, 1, Some(1_000)),
        (None, Some("cart"), 1, 0, Some(1_000)),
        (Some("gpu"), None, 1, 0, Some(1_000)),
    ];
    assert_eq!(told, expected);
    assert!(!report.capped);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_are_those_whose_dispatchers_wait() {
    let scene = Scene::new(1);
    let runner = Arc::new(scene.provider("runner").await);
    assert!(runner.members().await.unwrap().is_empty(), "nobody has waited yet");
    let waiting = runner.clone();
    let task = tokio::spawn(async move { waiting.fetch_orchestration_item(LONG, PATIENCE, None).await });
    let there = async {
        loop {
            let members = runner.members().await.unwrap();
            if members.iter().any(|member| member.turns.is_some()) {
                return members;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let members = tokio::time::timeout(PATIENCE, there).await.expect("it says that it is there");
    assert_eq!(members.len(), 1);
    assert_eq!(members[0].turns.as_ref().unwrap().slots.to_string(), "0 to 255");
    assert!(members[0].activities.is_none() && members[0].last_heard > 0);
    task.abort();
}

/// An instance that owes a message which can't be delivered.
async fn poisoned(scene: &Scene, maker: &CosmosDBProvider) -> String {
    begin(maker, "i", Vec::new(), Vec::new()).await;
    let intent = serde_json::json!({
        "id": "i:token:0", "instanceId": "i", "type": "intent", "createdAt": 1, "target": "other", "retries": 3,
        "poisoned": "too large", "document": {
            "id": "m:token:0", "instanceId": "other", "type": "message", "due": 1, "seq": "1", "createdAt": 1, "attempts": 0,
            "starts": true, "delivered": true, "item": serde_json::to_string(&start("other")).unwrap(),
        },
    });
    scene.container().await.create_item("i", "i:token:0", intent, None).await.unwrap();
    "i:token:0".to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poisoned_message_is_shown_and_tried_again_or_removed() {
    for retry in [true, false] {
        let scene = Scene::new(1);
        let maker = scene.provider("maker").await;
        let id = poisoned(&scene, &maker).await;
        let late = maker.late_intents().await.unwrap();
        assert_eq!(late.len(), 1);
        assert_eq!((late[0].id.as_str(), late[0].message.as_str()), (id.as_str(), "StartOrchestration"));
        assert_eq!(late[0].state, IntentState::Poisoned { reason: "too large".to_owned() });
        assert!(!maker.retry_intent("i", "i:nothing").await.unwrap());
        assert!(!maker.drop_intent("i", "instance").await.unwrap(), "only intents can be removed");
        if retry {
            assert!(maker.retry_intent("i", &id).await.unwrap());
            assert_eq!(next_turn(&maker, LONG).await.0.instance, "other");
        } else {
            assert!(maker.drop_intent("i", &id).await.unwrap());
            assert!(!maker.drop_intent("i", &id).await.unwrap(), "it is gone");
        }
        assert!(scene.of_kind("i", "instance").await.len() == 1);
        let gone = async {
            while !scene.of_kind("i", "intent").await.is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, gone).await.expect("it is settled");
    }
}

#[tokio::test]
async fn a_check_has_a_line_for_each_thing_and_makes_nothing() {
    let account = LocalAccount::new();
    let served = account.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let key = Credential::account_key(account.key().to_owned());
    let config = CosmosDBProviderConfig::default().with_endpoint(served.endpoint()).with_credential(key);
    let checks = operate::check(&config.clone().with_create_if_missing(true)).await;
    let last = checks.last().unwrap();
    assert_eq!((last.subject.as_str(), last.status), ("container", CheckStatus::Warning), "it would be made");
    let checks = operate::check(&config.clone().with_create_if_missing(false)).await;
    let last = checks.last().unwrap();
    assert_eq!((last.subject.as_str(), last.status), ("container", CheckStatus::Failed));
    assert!(last.detail.contains("az cosmosdb sql container create"), "{}", last.detail);
    CosmosDBProvider::new_with_config(config.clone()).await.unwrap();
    let checks = operate::check(&config).await;
    let told: Vec<_> = checks.iter().map(|check| (check.subject.as_str(), check.status)).collect();
    let subjects = [
        "configuration",
        "account",
        "container",
        "partition key",
        "index",
        "time to live",
        "throughput",
        "regions",
        "format",
    ];
    let fine = subjects.into_iter().chain(["role"]).map(|subject| (subject, CheckStatus::Ok));
    let expected: Vec<_> = fine.chain([("consistency", CheckStatus::Unknown)]).collect();
    assert_eq!(told, expected);
    let wrong = Credential::account_key("d3Jvbmc=".to_owned());
    let checks = operate::check(&config.clone().with_credential(wrong)).await;
    let last = checks.last().unwrap();
    assert_eq!((last.subject.as_str(), last.status), ("account", CheckStatus::Failed), "{checks:?}");
    assert!(!format!("{checks:?}").contains("d3Jvbmc="), "no key is shown");
    let checks = operate::check(&CosmosDBProviderConfig::default()).await;
    assert_eq!((checks.len(), checks[0].subject.as_str(), checks[0].status), (1, "configuration", CheckStatus::Failed));
}
