//! What is too many, too large or can't be read ends well: starts are not hidden, failures are stored, nothing is left behind.

#[path = "common/scene.rs"]
mod scene;

use duroxide::{
    providers::{ExecutionMetadata, Provider, ScheduledActivityIdentifier, TagFilter, WorkItem},
    ErrorDetails, Event, EventKind, PoisonMessageType,
};
use duroxide_cosmos::CosmosDBProvider;
use futures::{stream, StreamExt};
use scene::*;
use serde_json::{json, Value};

const INSTANCE: &str = "i";
const MB: usize = 1024 * 1024;

fn queued(instance: &str, name: &str) -> WorkItem {
    WorkItem::QueueMessage { instance: instance.to_owned(), name: name.to_owned(), data: "{}".to_owned() }
}

/// Puts so many messages into an instance's queue.
async fn crowd(provider: &CosmosDBProvider, count: usize, message: impl Fn(&str, &str) -> WorkItem) {
    let numbers: Vec<WorkItem> = (0..count).map(|n| message(INSTANCE, &format!("{n}"))).collect();
    let sending = stream::iter(numbers).map(|message| provider.enqueue_for_orchestrator(message, None));
    let outcomes: Vec<_> = sending.buffer_unordered(16).collect().await;
    assert!(outcomes.iter().all(Result::is_ok));
}

fn starts(messages: &[WorkItem]) -> usize {
    let starts = |m: &&WorkItem| matches!(m, WorkItem::StartOrchestration { .. } | WorkItem::ContinueAsNew { .. });
    messages.iter().filter(starts).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_behind_700_older_messages_is_in_the_first_turn_and_nothing_is_dropped() {
    for message in [external, queued] {
        let scene = Scene::new(1);
        let (sender, worker) = (scene.provider("sender").await, scene.provider("worker").await);
        crowd(&sender, 700, message).await;
        sender.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
        let (item, token, _) = next_turn(&worker, LONG).await;
        assert_eq!((starts(&item.messages), item.messages.len()), (1, 501));
        commit(&worker, &token, vec![started(INSTANCE, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
        let (item, _, _) = next_turn(&worker, LONG).await;
        assert_eq!(item.messages.len(), 200, "the rest has the next turn");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_start_of_the_next_execution_is_not_hidden_by_older_messages() {
    let scene = Scene::new(1);
    let (sender, worker) = (scene.provider("sender").await, scene.provider("worker").await);
    begin(&worker, INSTANCE, Vec::new(), Vec::new()).await;
    sender.enqueue_for_orchestrator(external(INSTANCE, "wake up"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    crowd(&sender, 700, external).await;
    let end = vec![event(INSTANCE, 1, 2, EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() })];
    let messages = vec![again(INSTANCE)];
    commit(&worker, &token, end, Vec::new(), messages, ended("ContinuedAsNew")).await.unwrap();
    // For the process that knows the history, and for one that loads all of it.
    for provider in [&worker, &sender] {
        let (item, token, _) = next_turn(provider, LONG).await;
        assert_eq!(starts(&item.messages), 1, "{} messages", item.messages.len());
        provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_messages_are_not_dropped_while_their_start_waits_in_the_queue() {
    let scene = Scene::new(1);
    let provider = scene.provider("a").await;
    provider.enqueue_for_orchestrator(queued(INSTANCE, "early"), None).await.unwrap();
    provider.enqueue_for_orchestrator(start(INSTANCE), Some(LONG)).await.unwrap();
    assert!(provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    assert_eq!(scene.of_kind(INSTANCE, "message").await.len(), 2);
}

fn poison(text: String) -> ErrorDetails {
    ErrorDetails::Poison {
        attempt_count: 11,
        max_attempts: 10,
        message_type: PoisonMessageType::Orchestration { instance: INSTANCE.to_owned(), execution_id: 1 },
        message: text,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_that_embeds_more_than_a_document_takes_is_recorded_and_its_parent_hears() {
    // Quotes and control characters take several times as much when they are JSON within JSON.
    for text in ["x".repeat(3 * MB), "\"".repeat(3 * MB), "\u{1}".repeat(MB)] {
        let scene = Scene::new(1);
        let provider = scene.provider("a").await;
        begin(&provider, "parent", Vec::new(), vec![start_child(INSTANCE, Some("parent"))]).await;
        let (_, token, _) = next_turn(&provider, LONG).await;
        let details = poison(text.clone());
        let told = WorkItem::SubOrchFailed {
            parent_instance: "parent".to_owned(),
            parent_execution_id: 1,
            parent_id: 2,
            details: details.clone(),
        };
        let metadata = ExecutionMetadata { output: Some(text.clone()), ..ended("Failed") };
        let events = vec![started(INSTANCE, 1), event(INSTANCE, 1, 2, EventKind::OrchestrationFailed { details })];
        commit(&provider, &token, events, Vec::new(), vec![told], metadata).await.expect("a failure that is stored");
        let info = admin(&provider).get_instance_info(INSTANCE).await.unwrap();
        assert_eq!(info.status, "Failed");
        assert!(info.output.unwrap().contains(&format!("cut: {} bytes in all", text.len())));
        let history = provider.read(INSTANCE).await.unwrap();
        assert!(matches!(history[1].kind, EventKind::OrchestrationFailed { .. }));
        let (item, _, _) = next_turn(&provider, LONG).await;
        assert!(matches!(&item.messages[..], [WorkItem::SubOrchFailed { .. }]), "{}", item.instance);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activitys_failure_that_embeds_more_than_a_document_takes_is_recorded() {
    let scene = Scene::new(1);
    let provider = scene.provider("a").await;
    begin(&provider, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    let (_, token, _) = next_work(&provider, LONG).await;
    let details = poison("x".repeat(3 * MB));
    let failed = WorkItem::ActivityFailed { instance: INSTANCE.to_owned(), execution_id: 1, id: 2, details };
    provider.ack_work_item(&token, Some(failed)).await.expect("a failure that is stored");
    let (item, _, _) = next_turn(&provider, LONG).await;
    assert!(matches!(&item.messages[..], [WorkItem::ActivityFailed { .. }]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_could_be_queued_but_not_be_an_event_is_refused_where_it_comes_in_with_its_size() {
    let scene = Scene::new(1);
    let provider = scene.provider("a").await;
    begin(&provider, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    // Between what a message may take and what a document may: it would fit the queue, and no event.
    let size = 2 * MB - 90 * 1024;
    let large = "x".repeat(size);
    let (_, work, _) = next_work(&provider, LONG).await;
    let result =
        WorkItem::ActivityCompleted { instance: INSTANCE.to_owned(), execution_id: 1, id: 2, result: large.clone() };
    let error = provider.enqueue_for_orchestrator(external(INSTANCE, &large), None).await.unwrap_err();
    let says = |text: &str| text.contains("the limit is") && text.contains(&size.to_string()[..3]);
    assert!(!error.is_retryable() && says(&error.message), "{error:?}");
    // A refusal of its result would make the activity run again.
    provider.ack_work_item(&work, Some(result)).await.unwrap();
    // What is a little smaller is an event, too.
    let fits = "x".repeat(2 * MB - 100 * 1024);
    provider.enqueue_for_orchestrator(external(INSTANCE, &fits), None).await.unwrap();
    let (item, token, _) = next_turn(&provider, LONG).await;
    let WorkItem::ActivityFailed { details, .. } = &item.messages[0] else { panic!("{:?}", item.messages[0]) };
    assert!(says(&details.display_message()), "{details:?}");
    let kind = EventKind::ExternalEvent { name: "Event".to_owned(), data: fits };
    commit(&provider, &token, vec![event(INSTANCE, 1, 2, kind)], Vec::new(), Vec::new(), running()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_activity_leaves_no_input_behind() {
    let scene = Scene::new(1);
    let provider = scene.provider("a").await;
    let input = "x".repeat(10_000);
    let schedule = |id: u64, input: &str| {
        let kind = EventKind::ActivityScheduled {
            name: "Activity".to_owned(),
            input: input.to_owned(),
            session_id: None,
            tag: None,
        };
        let mut item = activity(INSTANCE, id);
        if let WorkItem::ActivityExecute { input: of_item, .. } = &mut item {
            input.clone_into(of_item);
        }
        (event(INSTANCE, 1, id, kind), item)
    };
    provider.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let (events, work): (Vec<Event>, Vec<WorkItem>) =
        [schedule(2, &input), schedule(3, "{}"), schedule(4, &input)].into_iter().unzip();
    let events = [vec![started(INSTANCE, 1)], events].concat();
    commit(&provider, &token, events, work, Vec::new(), running()).await.unwrap();
    assert_eq!(scene.of_kind(INSTANCE, "payload").await.len(), 2);
    // One of them is finished by its worker before the turn that cancels all three.
    let (_, work, _) = next_work(&provider, LONG).await;
    provider.ack_work_item(&work, Some(done(INSTANCE, 2))).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let cancelled = (2..=4)
        .map(|activity_id| ScheduledActivityIdentifier { instance: INSTANCE.to_owned(), execution_id: 1, activity_id })
        .collect();
    let events = vec![note(INSTANCE, 1, 5)];
    provider.ack_orchestration_item(&token, 1, events, Vec::new(), Vec::new(), running(), cancelled).await.unwrap();
    for kind in ["activity", "payload", "message"] {
        assert!(scene.of_kind(INSTANCE, kind).await.is_empty(), "{kind}");
    }
}

/// One turn of an instance that writes to values; what the snapshot of the next one has of "a".
async fn values(provider: &CosmosDBProvider, id: u64, kinds: Vec<EventKind>, metadata: ExecutionMetadata) {
    provider.enqueue_for_orchestrator(external(INSTANCE, "go on"), None).await.unwrap();
    let (item, token, _) = next_turn(provider, LONG).await;
    let execution = item.execution_id;
    let events = (id..).zip(kinds).map(|(id, kind)| event(INSTANCE, execution, id, kind)).collect();
    commit(provider, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleared_key_leaves_no_document_once_its_execution_has_ended() {
    let set =
        |key: &str| EventKind::KeyValueSet { key: key.to_owned(), value: "value".to_owned(), last_updated_at_ms: 1 };
    let clear = |key: &str| EventKind::KeyValueCleared { key: key.to_owned() };
    let scene = Scene::new(1);
    let provider = scene.provider("a").await;
    begin(&provider, INSTANCE, Vec::new(), Vec::new()).await;
    // Set and cleared by the same execution, in one turn and in two: nobody needs to know.
    values(&provider, 2, vec![set("a"), clear("a"), set("b"), set("sharedResult")], running()).await;
    values(&provider, 6, vec![clear("b")], running()).await;
    assert_eq!(scene.of_kind(INSTANCE, "kv").await.len(), 1);
    // Values of the execution before are in the snapshot of the next until that ends, cleared or not.
    provider.enqueue_for_orchestrator(external(INSTANCE, "end"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let end = vec![event(INSTANCE, 1, 7, EventKind::OrchestrationContinuedAsNew { input: "{}".to_owned() })];
    commit(&provider, &token, end, Vec::new(), vec![again(INSTANCE)], ended("ContinuedAsNew")).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    commit(&provider, &token, vec![started(INSTANCE, 2)], Vec::new(), Vec::new(), running()).await.unwrap();
    values(&provider, 2, vec![EventKind::KeyValuesCleared], running()).await;
    assert_eq!(provider.get_kv_value(INSTANCE, "sharedResult").await.unwrap(), None);
    provider.enqueue_for_orchestrator(external(INSTANCE, "look"), None).await.unwrap();
    let (item, token, _) = next_turn(&provider, LONG).await;
    assert!(item.kv_snapshot.contains_key("sharedResult"));
    provider.abandon_orchestration_item(&token, None, true).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    commit(&provider, &token, vec![completed(INSTANCE, 2, 3)], Vec::new(), Vec::new(), ended("Completed"))
        .await
        .unwrap();
    assert!(scene.of_kind(INSTANCE, "kv").await.is_empty());
}

/// Writes over a document of the instance, behind the providers' backs.
async fn tamper(scene: &Scene, kind: &str, change: impl Fn(&mut Value)) {
    let mut document = scene.of_kind(INSTANCE, kind).await.pop().expect("a document");
    change(&mut document);
    let id = document["id"].as_str().unwrap().to_owned();
    scene.container().await.replace_item(INSTANCE, &id, &document, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_cant_be_read_is_counted_put_off_and_fails_in_the_end() {
    let scene = Scene::new(1);
    let (sender, worker) = (scene.provider("sender").await, scene.provider("worker").await);
    begin(&sender, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    tamper(&scene, "activity", |work| work["item"] = json!("{\"FromTheFuture\":{}}")).await;
    let fetched = worker.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap();
    assert!(fetched.is_none());
    let work = scene.of_kind(INSTANCE, "activity").await.pop().unwrap();
    assert_eq!((work["attempts"].as_u64(), work["lock"].is_null()), (Some(1), true));
    // The last attempt, without waiting for those before it.
    tamper(&scene, "activity", |work| {
        work["attempts"] = json!(9);
        work["due"] = json!(1);
    })
    .await;
    let fresh = scene.provider("fresh").await;
    assert!(fresh.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap().is_none());
    let (item, _, _) = next_turn(&fresh, LONG).await;
    let [WorkItem::ActivityFailed { id: 2, details, .. }] = &item.messages[..] else { panic!("{:?}", item.messages) };
    assert!(matches!(details, ErrorDetails::Poison { attempt_count: 10, .. }), "{details:?}");
    assert!(scene.of_kind(INSTANCE, "activity").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_history_document_that_makes_no_sense_comes_back_as_an_unreadable_history() {
    let scene = Scene::new(1);
    let (sender, worker) = (scene.provider("sender").await, scene.provider("worker").await);
    begin(&sender, INSTANCE, Vec::new(), Vec::new()).await;
    tamper(&scene, "history", |history| history["events"] = json!("none")).await;
    sender.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    let (item, _, attempts) = next_turn(&worker, LONG).await;
    assert!(item.history_error.is_some());
    assert_eq!(attempts, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_document_that_makes_no_sense_does_not_keep_other_instances_from_their_turns() {
    let scene = Scene::new(1);
    let (sender, worker) = (scene.provider("sender").await, scene.provider("worker").await);
    sender.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    tamper(&scene, "message", |message| message["createdAt"] = json!("yesterday")).await;
    sender.enqueue_for_orchestrator(start("other"), None).await.unwrap();
    let (item, _, _) = next_turn(&worker, LONG).await;
    assert_eq!(item.instance, "other");
    let requests = scene.account.stats_of("worker").items().requests;
    assert!(worker.fetch_orchestration_item(LONG, std::time::Duration::from_secs(2), None).await.unwrap().is_none());
    // It is looked at again, but not all the time.
    let more = scene.account.stats_of("worker").items().requests - requests;
    assert!(more < 40, "{more} requests in two seconds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_turn_runs_on_a_part_of_its_history() {
    let scene = Scene::new(1);
    let (sender, worker) = (scene.provider("sender").await, scene.provider("worker").await);
    begin(&sender, INSTANCE, Vec::new(), Vec::new()).await;
    let history = scene.of_kind(INSTANCE, "history").await.pop().expect("its history");
    let id = history["id"].as_str().unwrap().to_owned();
    scene.container().await.delete_item(INSTANCE, &id, None).await.unwrap();
    sender.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    let (item, token, attempts) = next_turn(&worker, LONG).await;
    let error = item.history_error.expect("it is said");
    assert!(error.contains("the history has 0 events up to 0, and must have 1 up to 1"), "{error}");
    assert_eq!((attempts, item.history.len()), (1, 0));
    worker.abandon_orchestration_item(&token, None, false).await.unwrap();
    // It was there all the time, and the replica that answered had not heard of it.
    scene.container().await.create_item(INSTANCE, &id, &history, None).await.unwrap();
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!((item.history_error, item.history.len()), (None, 1));
}
