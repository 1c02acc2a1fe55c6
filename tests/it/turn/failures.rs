//! A turn that cannot be stored is recorded as a failure once, and the parent of a child hears of it once.

use crate::fixture::*;
use duroxide::{
    providers::{ExecutionMetadata, Provider, WorkItem},
    runtime::{registry::ActivityRegistry, Runtime, RuntimeOptions},
    ActivityContext, Client, ErrorDetails, Event, EventKind, OrchestrationContext, OrchestrationRegistry,
};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use std::{
    sync::{atomic::Ordering, Arc},
    time::Duration,
};

const INSTANCE: &str = "order";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_over_the_limit_is_named_and_the_failure_ack_succeeds() {
    let fixture = Fixture::with_container().await;
    let a = fixture.impatient_provider("a").await;
    begin_with_activities(&a, INSTANCE, 0).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "photo"), None).await.expect("a message");
    let (_, token) = fetch_turn(&a, LONG).await;
    let before = fixture.partition(INSTANCE).await;
    let mut delta = Delta::event(INSTANCE, 2, &"x".repeat(2_200_000));
    delta.events.push(external_event(INSTANCE, 3, "small"));
    let error = delta.ack(&a, &token).await.expect_err("no document holds that event");
    assert!(!error.is_retryable(), "{error:?}");
    let size: Vec<u64> = error.message.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
    assert!(error.message.contains("event 2") && error.message.contains(INSTANCE), "{error:?}");
    assert!(size.iter().any(|n| (2_200_000..2_300_000).contains(n)), "no size in {error:?}");
    assert!(size.iter().any(|n| (1_900_000..=2_097_152).contains(n)), "no limit in {error:?}");
    assert_eq!(fixture.partition(INSTANCE).await, before);

    Delta::failure(INSTANCE, 2).ack(&a, &token).await.expect("the failure can be recorded");
    assert_eq!(fixture.instance(INSTANCE).await["status"], "Failed");
    assert!(fixture.documents_of_type(INSTANCE, "message").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_cosmos_db_has_refused_a_turn_the_failure_ack_succeeds() {
    for status in [400, 413] {
        let fixture = Fixture::with_container().await;
        let a = fixture.impatient_provider("a").await;
        begin_with_activities(&a, INSTANCE, 0).await;
        a.enqueue_for_orchestrator(raised(INSTANCE, "photo"), None).await.expect("a message");
        let (_, token) = fetch_turn(&a, LONG).await;
        let before = fixture.partition(INSTANCE).await;
        let refuse = WireAction::Refuse { status, substatus: None, retry_after: None };
        fixture.account.wire().add(fixture.rule("a", refuse).on(RequestKind::Batch).times(1));
        let error = Delta::event(INSTANCE, 2, "photo").ack(&a, &token).await.expect_err("a refusal");
        assert!(!error.is_retryable(), "{error:?}");
        assert_eq!(fixture.partition(INSTANCE).await, before);
        Delta::failure(INSTANCE, 2).ack(&a, &token).await.expect("the failure can be recorded");
        assert_eq!(fixture.instance(INSTANCE).await["status"], "Failed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_failure_ack_after_a_refused_large_turn_stores_nothing_of_that_turn() {
    let fixture = Fixture::with_container().await;
    let a = fixture.impatient_provider("a").await;
    begin_with_activities(&a, INSTANCE, 0).await;
    // Consuming so many messages does not fit one batch.
    for n in 0..150 {
        a.enqueue_for_orchestrator(raised(INSTANCE, &format!("event {n}")), None).await.expect("a message");
    }
    let (item, token) = fetch_turn(&a, LONG).await;
    assert_eq!(item.messages.len(), 150);
    let refuse = WireAction::Refuse { status: 413, substatus: None, retry_after: None };
    fixture.account.wire().add(fixture.rule("a", refuse).on(RequestKind::Batch).skip(6).times(1));
    let mut delta = Delta::start(INSTANCE, 1_000);
    delta.events.remove(0);
    let error = delta.ack(&a, &token).await.expect_err("a part was refused");
    assert!(!error.is_retryable(), "{error:?}");

    Delta::failure(INSTANCE, 2).ack(&a, &token).await.expect("the failure can be recorded");
    let history = fixture.impatient_provider("b").await.read(INSTANCE).await.expect("a history");
    assert_eq!(ids(&history), [1, 2]);
    assert!(
        fixture.documents_of_type(INSTANCE, "activity").await.is_empty(),
        "activities of the turn that was refused"
    );
    assert!(fixture.documents_of_type(INSTANCE, "message").await.is_empty());
}

const PARENT: &str = "parent";

const CHILD: &str = "child";

/// Runs a parent whose child ends with more than can be stored, in one of several ways. Returns what the parent
/// received.
async fn end_of_a_child_that_is_too_large(how: &str) -> (String, Vec<Event>) {
    let fixture = Fixture::new(1);
    let provider = Arc::new(fixture.provider("a").await);
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

/// The ack that duroxide's runtime sends after one that was refused.
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
async fn a_child_that_fails_again_sends_its_parent_no_second_message() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    a.enqueue_for_orchestrator(start_child(CHILD, Some(PARENT)), None).await.unwrap();
    let (_, token, _) = next_turn(&a, LONG).await;
    fail(&a, &token, 1).await;
    let told = fixture.documents_of_type(PARENT, "message").await;
    assert_eq!(told.len(), 1, "{told:?}");
    let item: WorkItem = serde_json::from_str(told[0]["item"].as_str().unwrap()).unwrap();
    let WorkItem::SubOrchFailed { parent_instance, parent_execution_id, parent_id, details } = item else {
        panic!("{item:?}");
    };
    assert_eq!((parent_instance.as_str(), parent_execution_id, parent_id), (PARENT, 1, 2));
    assert!(details.display_message().contains("too large"), "{details:?}");
    assert_eq!(fixture.documents_of_type(CHILD, "instance").await[0]["parent"], PARENT);
    // The child's queue is poisoned once more.
    a.enqueue_for_orchestrator(external(CHILD, "late"), None).await.unwrap();
    while let Some((item, token, _)) = a.fetch_orchestration_item(LONG, NOW, None).await.unwrap() {
        assert_eq!(item.instance, CHILD);
        fail(&a, &token, 99_999).await;
    }
    assert_eq!(fixture.documents_of_type(PARENT, "message").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_parent_hears_of_a_child_whose_history_cannot_be_read() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    a.enqueue_for_orchestrator(start_child(CHILD, Some(PARENT)), None).await.unwrap();
    let (_, token, _) = next_turn(&a, LONG).await;
    let mut first = started(CHILD, 1);
    if let EventKind::OrchestrationStarted { parent_instance, parent_id, parent_execution_id, .. } = &mut first.kind {
        (*parent_instance, *parent_id, *parent_execution_id) = (Some(PARENT.to_owned()), Some(2), Some(1));
    }
    let metadata = ExecutionMetadata { parent_instance_id: Some(PARENT.to_owned()), ..running() };
    commit(&a, &token, vec![first], Vec::new(), Vec::new(), metadata).await.unwrap();
    let mut history = fixture.documents_of_type(CHILD, "history").await.pop().unwrap();
    history["events"].as_array_mut().unwrap().push("garbage".into());
    let id = history["id"].as_str().unwrap().to_owned();
    fixture.container().await.replace_item(CHILD.to_owned(), &id, &history, None).await.unwrap();
    // A start by another parent does not concern the first one.
    b.enqueue_for_orchestrator(start_child(CHILD, Some("another")), None).await.unwrap();
    let (item, token, _) = next_turn(&b, LONG).await;
    assert!(item.history_error.is_some(), "{item:?}");
    fail(&b, &token, 99_999).await;
    let told = fixture.documents_of_type(PARENT, "message").await;
    assert!(told.len() == 1 && told[0]["item"].as_str().unwrap().contains("SubOrchFailed"), "{told:?}");
    assert!(fixture.partition("another").await.is_empty());
}

const MB: usize = 1024 * 1024;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_that_is_larger_than_a_document_is_recorded_and_sent_to_the_parent() {
    // Quotes and control characters take several times as many bytes as JSON within JSON.
    for text in ["x".repeat(3 * MB), "\"".repeat(3 * MB), "\u{1}".repeat(MB)] {
        let fixture = Fixture::new(1);
        let provider = fixture.provider("a").await;
        begin(&provider, "parent", Vec::new(), vec![start_child(INSTANCE, Some("parent"))]).await;
        let (_, token, _) = next_turn(&provider, LONG).await;
        let details = poison(INSTANCE, text.clone());
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
async fn a_commit_that_a_full_partition_refuses_does_not_fail_the_orchestration() {
    for (status, substatus, is_given_up) in [(403, Some(1014), true), (403, None, true), (400, None, false)] {
        let fixture = Fixture::new(1);
        let a = fixture.provider("a").await;
        begin(&a, "i", Vec::new(), Vec::new()).await;
        a.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
        let (_, token, _) = next_turn(&a, LONG).await;
        let refusal = WireAction::RefuseBatchOperation { index: 0, status, substatus };
        let rule = WireRule::new(refusal).client("a").on(RequestKind::Batch).matching(|request| goes_to(request, "i"));
        fixture.account.wire().add(rule.times(1));
        let error = commit(&a, &token, vec![filler("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap_err();
        assert!(!error.is_retryable(), "{error:?}");
        // duroxide's runtime sends this next.
        let recorded = commit(&a, &token, vec![failed("i", 2)], Vec::new(), Vec::new(), ended("Failed")).await;
        assert_eq!(recorded.is_err(), is_given_up, "{status}/{substatus:?}: {recorded:?}");
        let expected = if is_given_up { "Running" } else { "Failed" };
        assert_eq!(status_of(&a, "i").await.as_deref(), Some(expected));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_whose_lock_has_expired_records_no_failure_when_the_clock_is_set_back() {
    let fixture = Fixture::new(1);
    let (off, clock) = adjustable_clock();
    let a = fixture.provider_with("a", test_config().with_clock(clock)).await;
    begin(&a, "i", Vec::new(), Vec::new()).await;
    a.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
    let (_, token, _) = next_turn(&a, Duration::from_secs(5)).await;
    off.store(10_000, Ordering::Relaxed);
    commit(&a, &token, vec![filler("i", 1, 2)], Vec::new(), Vec::new(), running()).await.unwrap_err();
    off.store(0, Ordering::Relaxed);
    commit(&a, &token, vec![failed("i", 2)], Vec::new(), Vec::new(), ended("Failed")).await.unwrap_err();
    assert_eq!(status_of(&a, "i").await.as_deref(), Some("Running"));
}
