//! What a turn must never lose, overwrite or repeat: messages that come before their start, fields that others write beside a
//! commit in parts, the word to a parent, and the size of what is sent.

#[path = "common/scene.rs"]
mod scene;

use duroxide::{
    providers::{ExecutionMetadata, Provider, ProviderAdmin, PruneOptions, TagFilter, WorkItem},
    runtime::{registry::ActivityRegistry, Runtime, RuntimeOptions},
    ActivityContext, Client, ErrorDetails, Event, EventKind, OrchestrationContext, OrchestrationRegistry,
};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule, WireRuleHandle};
use scene::*;
use std::{sync::Arc, time::Duration};

const PARENT: &str = "parent";
const CHILD: &str = "child";
const HOUR: i64 = 3_600_000;

/// A process for which every lock has expired and everything that is put off is due.
fn later(millis: i64) -> CosmosDBProviderConfig {
    quiet().with_clock(off_by(millis))
}

fn queued(instance: &str, data: &str) -> WorkItem {
    WorkItem::QueueMessage { instance: instance.to_owned(), name: "queue".to_owned(), data: data.to_owned() }
}

/// The turn of a process that commits the start of `CHILD` and is cut off from the child's partition.
async fn owe_a_start(scene: &Scene) -> WireRuleHandle {
    // Nobody else takes the delivery over for ten minutes, by any clock that is right.
    let config = quiet().with_reconciler_age_threshold(Duration::from_secs(600));
    let parent = scene.provider_with("parent", config).await;
    let rule = WireRule::new(WireAction::FailConnection).client("parent").on(RequestKind::Create);
    let rule = rule.on(RequestKind::Batch).matching(|request| goes_to(request, CHILD));
    let blocked = scene.account.wire().add(rule);
    begin(&parent, PARENT, Vec::new(), vec![start(CHILD)]).await;
    blocked.wait_for_hits(1).await;
    scene.cut("parent", 0)
}

/// A look at the present state of the queues, which finds no turn.
async fn look(provider: &CosmosDBProvider) {
    let fetched = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(fetched.is_none(), "there is nothing to run: {fetched:?}");
}

// Queue messages for an instance that a committed turn has started.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_message_waits_for_a_start_that_is_still_to_be_delivered() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", later(HOUR)).await);
    owe_a_start(&scene).await;
    let messages = [queued(CHILD, "1"), queued(CHILD, "2")];
    for message in &messages {
        a.enqueue_for_orchestrator(message.clone(), None).await.unwrap();
        look(&a).await;
    }
    b.reconcile().await.unwrap();
    let (item, token, attempts) = next_turn(&b, LONG).await;
    assert_eq!((item.instance.as_str(), attempts), (CHILD, 1));
    assert_eq!(item.messages, [vec![start(CHILD)], messages.to_vec()].concat());
    commit(&b, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    look(&b).await;
    assert!(scene.of_kind(CHILD, "message").await.is_empty());
    let instance = scene.of_kind(CHILD, "instance").await.pop().unwrap();
    assert!(instance["deferred"].is_null() && instance["due"].is_null(), "{instance}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_message_that_was_there_before_anybody_started_its_instance_is_dropped() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    for round in 0..2 {
        a.enqueue_for_orchestrator(queued(CHILD, &round.to_string()), None).await.unwrap();
        look(&a).await;
    }
    // An event makes what comes with it and after it wait, as ever.
    a.enqueue_for_orchestrator(external(CHILD, "event"), None).await.unwrap();
    look(&a).await;
    a.enqueue_for_orchestrator(queued(CHILD, "sharedResult"), None).await.unwrap();
    look(&a).await;
    a.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external(CHILD, "event"), queued(CHILD, "sharedResult"), start(CHILD)]);
    commit(&a, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    look(&a).await;
    assert!(scene.of_kind(CHILD, "message").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_message_from_long_before_the_turn_that_starts_its_instance_is_dropped() {
    let scene = Scene::new(1);
    let (past, now) = (scene.provider_with("past", later(-HOUR)).await, scene.provider("now").await);
    past.enqueue_for_orchestrator(queued(CHILD, "old"), None).await.unwrap();
    look(&past).await;
    begin(&now, PARENT, Vec::new(), vec![start(CHILD)]).await;
    let (item, ..) = next_turn(&now, LONG).await;
    assert_eq!(item.messages, [start(CHILD)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_left_after_a_day_of_queue_messages_for_a_name_that_nobody_starts() {
    const MANY: usize = 620;
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider_with("b", later(23 * HOUR)).await);
    for number in 0..MANY {
        a.enqueue_for_orchestrator(queued(CHILD, &number.to_string()), None).await.unwrap();
    }
    look(&a).await;
    a.enqueue_for_orchestrator(queued(CHILD, "one more"), None).await.unwrap();
    look(&b).await;
    assert_eq!(scene.of_kind(CHILD, "message").await.len(), MANY + 1);
    let c = scene.provider_with("c", later(25 * HOUR)).await;
    while scene.of_kind(CHILD, "message").await.len() > 1 {
        look(&c).await;
    }
    let d = scene.provider_with("d", later(48 * HOUR)).await;
    look(&d).await;
    assert!(scene.partition(CHILD).await.is_empty(), "{:?}", scene.partition(CHILD).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_looks_at_queue_messages_may_die_at_any_request_and_the_start_has_them_all() {
    const MANY: usize = 120;
    for carried_out in [false, true] {
        for passing in 0.. {
            let scene = Scene::new(1);
            let (maker, a) = (scene.provider("maker").await, scene.provider("a").await);
            owe_a_start(&scene).await;
            let messages: Vec<WorkItem> = (0..MANY).map(|number| queued(CHILD, &number.to_string())).collect();
            for message in &messages {
                maker.enqueue_for_orchestrator(message.clone(), None).await.unwrap();
            }
            let cut = if carried_out { scene.cut_after("a", passing) } else { scene.cut("a", passing) };
            let ended = until_cut(a.fetch_orchestration_item(LONG, NOW, None), &cut).await;
            let through = matches!(ended, Ended::Returned(_));
            drop(a);
            let b = scene.provider_with("b", later(HOUR)).await;
            b.reconcile().await.unwrap();
            let (mut seen, mut turns) = (Vec::new(), 0);
            while seen.len() < MANY + 1 {
                let (item, token, _) = next_turn(&b, LONG).await;
                assert_eq!(item.instance, CHILD);
                seen.extend(item.messages);
                turns += 1;
                let event = if turns == 1 { started(CHILD, 1) } else { note(CHILD, 1, turns) };
                commit(&b, &token, vec![event], Vec::new(), Vec::new(), running()).await.unwrap();
            }
            assert_eq!(seen.iter().filter(|message| matches!(message, WorkItem::StartOrchestration { .. })).count(), 1);
            seen.retain(|message| matches!(message, WorkItem::QueueMessage { .. }));
            assert_eq!(seen, messages, "cut after {passing} requests");
            if through {
                assert!(passing >= 5, "{passing}");
                break;
            }
        }
    }
}

/// The case that showed it: more starts than a batch takes, and messages for the last ones as soon as they are known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_a_large_turn_has_just_started_lose_no_queue_message() {
    const ALL: usize = 300;
    const LAST: usize = 30;
    let scene = Scene::new(2);
    let provider = Arc::new(scene.provider_with("a", quiet()).await);
    let name = |number: usize| format!("detached {number}");
    let orchestrations = OrchestrationRegistry::builder()
        .register("Parent", move |ctx: OrchestrationContext, _: String| async move {
            for number in 0..ALL {
                ctx.schedule_orchestration("Waits", format!("detached {number}"), number.to_string());
            }
            Ok("started".to_owned())
        })
        .register("Waits", |ctx: OrchestrationContext, number: String| async move {
            if number.parse::<usize>().unwrap() < ALL - LAST {
                return Ok(number);
            }
            Ok(ctx.dequeue_event("queue").await)
        })
        .build();
    let runtime = Runtime::start_with_options(
        provider.clone(),
        ActivityRegistry::builder().build(),
        orchestrations,
        RuntimeOptions::default(),
    )
    .await;
    // A delivery is a batch where it claims the instance for a dispatcher that waits.
    let slow = WireRule::new(WireAction::Delay(Duration::from_millis(300))).client("a");
    let slow = slow.on(RequestKind::Create).on(RequestKind::Batch);
    let delivers_start = |request: &WireRequest<'_>| {
        let is_start = request.json().is_some_and(|body| body.to_string().contains("StartOrchestration"));
        is_start && request.partition_key.is_some_and(|key| key.contains("detached"))
    };
    scene.account.wire().add(slow.matching(delivers_start));
    let client = Client::new(Arc::new(scene.provider("client").await));
    client.start_orchestration(PARENT, "Parent", "").await.unwrap();
    client.wait_for_orchestration(PARENT, PATIENCE).await.unwrap();
    for number in ALL - LAST..ALL {
        client.enqueue_event(&name(number), "queue", format!("data {number}")).await.unwrap();
    }
    for number in ALL - LAST..ALL {
        let status = client.wait_for_orchestration(&name(number), PATIENCE).await;
        let status = status.unwrap_or_else(|error| panic!("{}: {error:?}", name(number)));
        assert!(format!("{status:?}").contains(&format!("data {number}")), "{status:?}");
    }
    runtime.shutdown(Some(1_000)).await;
}

// A commit in parts beside others who write the instance's document.

/// An instance in its fifth execution; those before it continued as new.
async fn continue_four_times(provider: &CosmosDBProvider, instance: &str) {
    provider.enqueue_for_orchestrator(start(instance), None).await.unwrap();
    for execution in 1..=5 {
        let (_, token, _) = next_turn(provider, LONG).await;
        let goes_on = execution < 5;
        let (messages, metadata) =
            if goes_on { (vec![again(instance)], ended("ContinuedAsNew")) } else { (Vec::new(), running()) };
        commit(provider, &token, vec![started(instance, execution)], Vec::new(), messages, metadata).await.unwrap();
    }
}

/// Whether a request writes a part of a turn that does not fit one batch.
fn stages(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    body.as_array().is_some_and(|operations| operations.iter().any(|op| op["resourceBody"]["type"] == "staged"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_in_parts_keeps_what_a_pruning_has_written_meanwhile() {
    let scene = Scene::new(1);
    let (a, b) = (Arc::new(scene.provider("a").await), scene.provider("b").await);
    continue_four_times(&a, CHILD).await;
    a.enqueue_for_orchestrator(external(CHILD, "go"), None).await.unwrap();
    let (_, token, _) = next_turn(a.as_ref(), LONG).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").on(RequestKind::Batch).matching(stages);
    scene.account.wire().add(rule.skip(1).times(1));
    let owner = a.clone();
    let ack = tokio::spawn(async move {
        let work = (2..302).map(|id| activity(CHILD, id)).collect();
        commit(owner.as_ref(), &token, vec![note(CHILD, 5, 2)], work, Vec::new(), running()).await
    });
    gate.reached().await;
    let pruned = b.prune_executions(CHILD, PruneOptions { keep_last: Some(1), ..PruneOptions::default() }).await;
    assert_eq!(pruned.unwrap().executions_deleted, 4);
    gate.open();
    ack.await.unwrap().unwrap();
    let instance = scene.of_kind(CHILD, "instance").await.pop().unwrap();
    assert_eq!(instance["totals"], serde_json::json!({"executions": 1, "events": 2}), "{instance}");
    assert!(instance["pruning"].is_null() && instance["rollForward"].is_null(), "{instance}");
    assert_eq!(b.list_executions(CHILD).await.unwrap(), [5]);
    assert_eq!(b.get_system_metrics().await.unwrap().total_executions, 1);
}

// A parent hears of a child whose turn can't be stored.

/// Runs a parent whose child ends with more than can be stored, in one of several ways; what the parent saw.
async fn end_of_a_child_that_is_too_large(how: &str) -> (String, Vec<Event>) {
    let scene = Scene::new(1);
    let provider = Arc::new(scene.provider("a").await);
    let orchestrations = OrchestrationRegistry::builder()
        .register("Parent", |ctx: OrchestrationContext, how: String| async move {
            match ctx.schedule_sub_orchestration("Child", how).await {
                Ok(_) => Ok("nothing failed".to_owned()),
                Err(error) => Ok(format!("failed: {error}")),
            }
        })
        .register("Child", |ctx: OrchestrationContext, how: String| async move {
            match how.as_str() {
                "later" => drop(ctx.schedule_activity("Step", "").await?),
                "continued" => return ctx.continue_as_new("now").await,
                _ => {}
            }
            Ok("x".repeat(3_000_000))
        })
        .build();
    let step = |_: ActivityContext, input: String| async move { Ok(input) };
    let activities = ActivityRegistry::builder().register("Step", step).build();
    let options = RuntimeOptions::default();
    let runtime = Runtime::start_with_options(provider.clone(), activities, orchestrations, options).await;
    let client = Client::new(provider.clone());
    client.start_orchestration(PARENT, "Parent", how).await.unwrap();
    let status = client.wait_for_orchestration(PARENT, Duration::from_secs(30)).await;
    let status = status.unwrap_or_else(|error| panic!("{how}: the parent waits for its child: {error:?}"));
    runtime.shutdown(Some(1_000)).await;
    (format!("{status:?}"), provider.read(PARENT).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_hears_once_of_a_child_whose_turn_is_too_large_to_be_stored() {
    for how in ["first", "later", "continued"] {
        let (seen, history) = end_of_a_child_that_is_too_large(how).await;
        let fails = |event: &&Event| matches!(event.kind, EventKind::SubOrchestrationFailed { .. });
        assert_eq!(history.iter().filter(fails).count(), 1, "{how}: {seen}");
    }
}

/// The ack that the runtime sends after one that was refused.
async fn fail(provider: &CosmosDBProvider, token: &str, event_id: u64) {
    let details = ErrorDetails::Infrastructure {
        operation: "ack_orchestration_item".to_owned(),
        message: "too large".to_owned(),
        retryable: false,
    };
    let failed = event(CHILD, 1, event_id, EventKind::OrchestrationFailed { details });
    let metadata = ExecutionMetadata { status: Some("Failed".to_owned()), ..ExecutionMetadata::default() };
    commit(provider, token, vec![failed], Vec::new(), Vec::new(), metadata).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_fails_again_tells_its_parent_nothing_more() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    a.enqueue_for_orchestrator(start_child(CHILD, Some(PARENT)), None).await.unwrap();
    let (_, token, _) = next_turn(&a, LONG).await;
    fail(&a, &token, 1).await;
    let told = scene.of_kind(PARENT, "message").await;
    assert_eq!(told.len(), 1, "{told:?}");
    let item: WorkItem = serde_json::from_str(told[0]["item"].as_str().unwrap()).unwrap();
    let WorkItem::SubOrchFailed { parent_instance, parent_execution_id, parent_id, details } = item else {
        panic!("{item:?}");
    };
    assert_eq!((parent_instance.as_str(), parent_execution_id, parent_id), (PARENT, 1, 2));
    assert!(details.display_message().contains("too large"), "{details:?}");
    assert_eq!(scene.of_kind(CHILD, "instance").await[0]["parent"], PARENT);
    // Its queue is poisoned once more.
    a.enqueue_for_orchestrator(external(CHILD, "late"), None).await.unwrap();
    while let Some((item, token, _)) = a.fetch_orchestration_item(LONG, NOW, None).await.unwrap() {
        assert_eq!(item.instance, CHILD);
        fail(&a, &token, 99_999).await;
    }
    assert_eq!(scene.of_kind(PARENT, "message").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_hears_of_a_child_whose_history_can_not_be_read_any_more() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    a.enqueue_for_orchestrator(start_child(CHILD, Some(PARENT)), None).await.unwrap();
    let (_, token, _) = next_turn(&a, LONG).await;
    let mut first = started(CHILD, 1);
    if let EventKind::OrchestrationStarted { parent_instance, parent_id, parent_execution_id, .. } = &mut first.kind {
        (*parent_instance, *parent_id, *parent_execution_id) = (Some(PARENT.to_owned()), Some(2), Some(1));
    }
    let metadata = ExecutionMetadata { parent_instance_id: Some(PARENT.to_owned()), ..running() };
    commit(&a, &token, vec![first], Vec::new(), Vec::new(), metadata).await.unwrap();
    let mut history = scene.of_kind(CHILD, "history").await.pop().unwrap();
    history["events"].as_array_mut().unwrap().push("garbage".into());
    let id = history["id"].as_str().unwrap().to_owned();
    scene.container().await.replace_item(CHILD.to_owned(), &id, &history, None).await.unwrap();
    // A start from another parent is another matter.
    b.enqueue_for_orchestrator(start_child(CHILD, Some("another")), None).await.unwrap();
    let (item, token, _) = next_turn(&b, LONG).await;
    assert!(item.history_error.is_some(), "{item:?}");
    fail(&b, &token, 99_999).await;
    let told = scene.of_kind(PARENT, "message").await;
    assert!(told.len() == 1 && told[0]["item"].as_str().unwrap().contains("SubOrchFailed"), "{told:?}");
    assert!(scene.partition("another").await.is_empty());
}

// An activity whose result can't be stored.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_result_is_too_large_has_failed_once_and_says_why() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    begin(&a, CHILD, vec![activity(CHILD, 2)], Vec::new()).await;
    let (_, token, _) = next_work(&a, LONG).await;
    let result = "\"".repeat(700_000);
    let completion = WorkItem::ActivityCompleted { instance: CHILD.to_owned(), execution_id: 1, id: 2, result };
    a.ack_work_item(&token, Some(completion)).await.unwrap();
    assert!(a.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap().is_none());
    let (item, ..) = next_turn(&a, LONG).await;
    let [WorkItem::ActivityFailed { execution_id: 1, id: 2, details, .. }] = item.messages.as_slice() else {
        panic!("{:?}", item.messages);
    };
    let ErrorDetails::Application { message, retryable, .. } = details else { panic!("{details:?}") };
    assert!(!retryable && message.contains("bytes") && message.contains("limit"), "{message}");
    assert!(message.contains("2800"), "the size as it would be sent: {message}");
}

// A start that is delivered again after its instance was deleted.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_was_deleted_does_not_start_again_when_its_start_is_delivered_again() {
    for consumed in [true, false] {
        let scene = Scene::new(1);
        let (a, b) = (scene.provider_with("a", quiet().with_inline_claims(false)).await, scene.provider("b").await);
        if !consumed {
            // The name is taken: the turn's start waits in its queue when the instance is deleted.
            begin(&b, CHILD, Vec::new(), Vec::new()).await;
        }
        // The process delivers the start, and dies before it forgets that it owes it.
        let rule = WireRule::new(WireAction::FailConnection).client("a").on(RequestKind::Delete);
        let undeleted = scene.account.wire().add(rule.matching(|request| goes_to(request, PARENT)));
        begin(&a, PARENT, Vec::new(), vec![start(CHILD)]).await;
        undeleted.wait_for_hits(1).await;
        scene.cut("a", 0);
        assert_eq!(scene.of_kind(PARENT, "intent").await.len(), 1);
        if consumed {
            let (item, token, _) = next_turn(&b, LONG).await;
            assert_eq!(item.instance, CHILD);
            let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
            commit(&b, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
        }
        // Of a start that comes in the very second of a deletion nobody knows which of the two was first, and it stays.
        next_second().await;
        assert_eq!(b.delete_instance(CHILD, true).await.unwrap().instances_deleted, 1);
        let late = scene.provider_with("late", later(HOUR)).await;
        late.reconcile().await.unwrap();
        assert!(scene.of_kind(PARENT, "intent").await.is_empty());
        look(&late).await;
        assert!(scene.of_kind(CHILD, "instance").await.is_empty());
        assert!(scene.of_kind(CHILD, "message").await.is_empty());
        // Another start of the name is another instance.
        late.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
        assert_eq!(next_turn(&late, LONG).await.0.messages, [start(CHILD)]);
    }
}

// Sizes as they are sent.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_whose_text_grows_when_it_is_sent_are_stored() {
    for text in ["\"".repeat(40_000), "\\".repeat(40_000), "\u{1}".repeat(40_000), "é".repeat(20_000)] {
        let scene = Scene::new(1);
        let a = scene.provider("a").await;
        a.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
        let (_, token, _) = next_turn(&a, LONG).await;
        let noted = |id| event(CHILD, 1, id, EventKind::ExternalSubscribed { name: text.clone() });
        let events: Vec<Event> = std::iter::once(started(CHILD, 1)).chain((2..28).map(noted)).collect();
        commit(&a, &token, events.clone(), Vec::new(), Vec::new(), running()).await.unwrap();
        assert_eq!(scene.provider("b").await.read(CHILD).await.unwrap().len(), events.len());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_gets_so_many_bytes_of_messages_and_the_next_turn_the_rest_in_order() {
    const MESSAGES: usize = 30;
    const EACH: usize = 500_000;
    const MOST: usize = 5 * 1024 * 1024;
    // With the messages that the process has sent itself, and as another process that knows nothing finds them.
    for name in ["a", "b"] {
        let scene = Scene::new(1);
        let (a, b) = (scene.provider("a").await, scene.provider("b").await);
        begin(&a, CHILD, Vec::new(), Vec::new()).await;
        for number in 0..MESSAGES {
            let data = format!("{number:06}{}", "x".repeat(EACH));
            a.enqueue_for_orchestrator(external(CHILD, &data), None).await.unwrap();
        }
        let provider = if name == "a" { &a } else { &b };
        let (mut seen, mut turns) = (Vec::new(), 1);
        while seen.len() < MESSAGES {
            let (item, token, attempts) = next_turn(provider, LONG).await;
            let data = item.messages.iter().map(|message| match message {
                WorkItem::ExternalRaised { data, .. } => data.clone(),
                other => panic!("{other:?}"),
            });
            let data: Vec<String> = data.collect();
            assert!(data.len() > 1 && data.len() * EACH <= MOST, "{} messages", data.len());
            assert_eq!(attempts, 1);
            seen.extend(data.iter().map(|data| data[..6].parse::<usize>().unwrap()));
            turns += 1;
            commit(provider, &token, vec![note(CHILD, 1, turns)], Vec::new(), Vec::new(), running()).await.unwrap();
        }
        assert_eq!(seen, (0..MESSAGES).collect::<Vec<_>>());
    }
}

// Order and attempts.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_with_more_messages_than_a_turn_takes_goes_behind_those_that_wait_longer() {
    const OTHERS: usize = 29;
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    begin(&a, "loud", Vec::new(), Vec::new()).await;
    a.enqueue_for_orchestrator(external("loud", "first"), None).await.unwrap();
    for number in 0..OTHERS {
        a.enqueue_for_orchestrator(start(&format!("other {number}")), None).await.unwrap();
    }
    for number in 0..1_100 {
        a.enqueue_for_orchestrator(external("loud", &number.to_string()), None).await.unwrap();
    }
    let mut order = Vec::new();
    for turn in 0..OTHERS + 2 {
        let (item, token, _) = next_turn(&b, LONG).await;
        let first = match item.instance.as_str() {
            "loud" => note("loud", 1, turn as u64 + 2),
            other => started(other, 1),
        };
        order.push(item.instance);
        commit(&b, &token, vec![first], Vec::new(), Vec::new(), running()).await.unwrap();
    }
    let others = (0..OTHERS).map(|number| format!("other {number}"));
    let expected: Vec<String> = ["loud".to_owned()].into_iter().chain(others).chain(["loud".to_owned()]).collect();
    assert_eq!(order, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_are_counted_however_many_there_are() {
    let scene = Scene::new(1);
    let a = scene.provider("a").await;
    a.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
    for attempt in 1..=150 {
        let (_, token, attempts) = next_turn(&a, LONG).await;
        assert_eq!(attempts, attempt);
        if attempt % 50 == 0 {
            // One that does not count, and news in between.
            a.abandon_orchestration_item(&token, None, true).await.unwrap();
            a.enqueue_for_orchestrator(external(CHILD, &attempt.to_string()), None).await.unwrap();
            let (_, token, attempts) = next_turn(&a, LONG).await;
            assert_eq!(attempts, attempt);
            a.abandon_orchestration_item(&token, None, false).await.unwrap();
            continue;
        }
        a.abandon_orchestration_item(&token, None, false).await.unwrap();
    }
    let (_, token, attempts) = next_turn(&a, LONG).await;
    assert_eq!(attempts, 151);
    commit(&a, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    a.enqueue_for_orchestrator(external(CHILD, "next"), None).await.unwrap();
    assert_eq!(next_turn(&a, LONG).await.2, 1, "a commit ends the count");
}

// An instance whose document was lost.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_instance_can_be_repaired_after_workers_have_looked_at_its_messages() {
    let scene = Scene::new(1);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    begin(&a, CHILD, Vec::new(), Vec::new()).await;
    scene.container().await.delete_item(CHILD.to_owned(), "instance", None).await.unwrap();
    drop(a);
    let messages = [queued(CHILD, "1"), external(CHILD, "2"), queued(CHILD, "3")];
    for message in &messages {
        b.enqueue_for_orchestrator(message.clone(), None).await.unwrap();
        look(&b).await;
    }
    assert_eq!(scene.of_kind(CHILD, "message").await.len(), messages.len());
    assert!(scene.of_kind(CHILD, "instance").await.is_empty(), "nothing hides that it is lost");
    let doctor = b.doctor().await.unwrap();
    let diagnosis = doctor.diagnose(CHILD).await.unwrap().expect("something of that name");
    assert!(diagnosis.can_be_repaired(), "{diagnosis:#?}");
    doctor.repair(&diagnosis).await.unwrap();
    let c = scene.provider_with("c", later(HOUR)).await;
    let (item, ..) = next_turn(&c, LONG).await;
    assert_eq!(item.messages, messages);
    assert_eq!(item.history.len(), 1);
}
