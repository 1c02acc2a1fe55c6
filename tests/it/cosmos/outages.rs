//! Throttling and outages of three seconds, which is shorter than the default lock of a turn. Calls under a lock retry
//! until the outage is over, fetches wait for its end, and duroxide's runtime sees no error.

use crate::fixture::*;
use duroxide::{
    providers::Provider,
    runtime::{registry::ActivityRegistry, Runtime, RuntimeOptions},
    ActivityContext, Client, EventKind, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus,
};
use duroxide_cosmos_emulator::{
    fault_injection::{
        FaultInjectionConditionBuilder, FaultInjectionErrorType, FaultInjectionResultBuilder, FaultInjectionRuleBuilder,
    },
    WireAction, WireRule, WireRuleHandle,
};
use std::{
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc,
    },
    time::Duration,
};

/// The length of the outage.
const OUTAGE: Duration = Duration::from_secs(3);

/// The default lock of a turn.
const TURN_LOCK: Duration = Duration::from_secs(5);

fn throttled() -> WireAction {
    WireAction::Refuse { status: 429, substatus: Some(3200), retry_after: Some(Duration::from_millis(300)) }
}

/// Begins an outage for all clients.
fn begin_outage(fixture: &Fixture, action: WireAction) -> WireRuleHandle {
    fixture.account.wire().add(WireRule::new(action))
}

/// Waits for the first request that the outage hits, lets it last its time, and ends it.
async fn end_outage(outage: WireRuleHandle) {
    outage.wait_for_hits(1).await;
    tokio::time::sleep(OUTAGE).await;
    outage.remove();
}

/// Every call, with and without a lock, while `action` hits every request for three seconds.
async fn every_call_survives(fault: &str, action: WireAction) {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("a").await;
    begin(&provider, "acked", Vec::new(), Vec::new()).await;
    begin(&provider, "renewed", Vec::new(), Vec::new()).await;
    begin(&provider, "works", vec![activity("works", 2), activity("works", 3)], Vec::new()).await;
    let (done_work, done_token, _) = next_activity(&provider, Duration::from_secs(30)).await;
    let (_, renewed_token, _) = next_activity(&provider, TURN_LOCK).await;
    provider.enqueue_for_orchestrator(external("acked", "news"), None).await.unwrap();
    provider.enqueue_for_orchestrator(external("renewed", "news"), None).await.unwrap();
    let (first, ack_token, _) = next_turn(&provider, TURN_LOCK).await;
    let (_, renew_token, _) = next_turn(&provider, TURN_LOCK).await;
    assert_eq!(first.instance, "acked");
    // Another process has enqueued work for the fetch.
    let other = fixture.provider("b").await;
    provider.enqueue_for_orchestrator(start("fetched"), None).await.unwrap();

    let outage = begin_outage(&fixture, action);
    let id = match done_work {
        duroxide::providers::WorkItem::ActivityExecute { id, .. } => id,
        other => panic!("{other:?}"),
    };
    let events = vec![filler("acked", 1, 2)];
    let (acked, renewed, completed, kept, read, enqueued, fetched, ()) = tokio::join!(
        commit(&provider, &ack_token, events, Vec::new(), Vec::new(), running()),
        provider.renew_orchestration_item_lock(&renew_token, TURN_LOCK),
        provider.ack_work_item(&done_token, Some(done("works", id))),
        provider.renew_work_item_lock(&renewed_token, TURN_LOCK),
        other.read("works"),
        other.enqueue_for_orchestrator(external("works", "news"), None),
        other.fetch_orchestration_item(LONG, PATIENCE, None),
        end_outage(outage),
    );
    acked.unwrap_or_else(|e| panic!("{fault}: the commit: {e}"));
    renewed.unwrap_or_else(|e| panic!("{fault}: the renewal of a turn: {e}"));
    completed.unwrap_or_else(|e| panic!("{fault}: the end of an activity: {e}"));
    kept.unwrap_or_else(|e| panic!("{fault}: the renewal of an activity: {e}"));
    assert_eq!(read.unwrap_or_else(|e| panic!("{fault}: a read: {e}")).len(), 1);
    enqueued.unwrap_or_else(|e| panic!("{fault}: a message: {e}"));
    let fetched = fetched.unwrap_or_else(|e| panic!("{fault}: a fetch: {e}"));
    assert!(fetched.is_some(), "{fault}: work that was there before the outage");
    // Each call took effect once.
    assert_eq!(provider.read("acked").await.unwrap().len(), 2);
    assert_eq!(fixture.documents_of_type("works", "activity").await.len(), 1);
    assert_eq!(fixture.documents_of_type("works", "message").await.len(), 2);
    // The locks are still valid.
    provider.renew_work_item_lock(&renewed_token, TURN_LOCK).await.unwrap();
    let events = vec![filler("renewed", 1, 2)];
    commit(&provider, &renew_token, events, Vec::new(), Vec::new(), running()).await.unwrap();
}

#[tokio::test]
async fn every_call_survives_three_seconds_of_throttling_or_refusals_or_broken_connections() {
    tokio::join!(
        every_call_survives("throttled", throttled()),
        every_call_survives("unavailable", unavailable()),
        every_call_survives("no connection", WireAction::FailConnection),
        every_call_survives("answers lost", WireAction::LoseAnswer),
    );
}

#[tokio::test]
async fn every_operation_survives_the_faults_that_the_sdk_can_inject() {
    let fixture = Fixture::new(1);
    let errors = [
        FaultInjectionErrorType::TooManyRequests,
        FaultInjectionErrorType::ServiceUnavailable,
        FaultInjectionErrorType::InternalServerError,
        FaultInjectionErrorType::ConnectionError,
        FaultInjectionErrorType::ResponseTimeout,
    ];
    for (n, error) in errors.into_iter().enumerate() {
        let result = FaultInjectionResultBuilder::new().with_error(error).with_probability(0.3).build();
        let rule = FaultInjectionRuleBuilder::new(format!("rule {n}"), result)
            .with_condition(FaultInjectionConditionBuilder::new().build())
            .build();
        rule.disable();
        let rule = Arc::new(rule);
        let name = format!("client {n}");
        let client = fixture.account.client_with(&name, vec![rule.clone()], |builder| builder).await.unwrap();
        let provider = duroxide_cosmos::CosmosDBProvider::new_with_client(&client, test_config()).await.unwrap();
        rule.enable();
        for round in 0..5 {
            let instance = format!("i{n} {round}");
            begin(&provider, &instance, vec![activity(&instance, 2)], Vec::new()).await;
            let (_, token, _) = next_activity(&provider, LONG).await;
            provider.renew_work_item_lock(&token, LONG).await.unwrap();
            provider.ack_work_item(&token, Some(done(&instance, 2))).await.unwrap();
            let (item, token, _) = next_turn(&provider, LONG).await;
            assert_eq!(item.messages.len(), 1);
            provider.renew_orchestration_item_lock(&token, LONG).await.unwrap();
            let events = vec![completed(&instance, 1, 2)];
            commit(&provider, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
            assert_eq!(provider.read(&instance).await.unwrap().len(), 2);
        }
        assert!(rule.hit_count() > 5, "{n}: {}", rule.hit_count());
        rule.disable();
    }
}

/// Runs ten chains of activities with duroxide's runtime. The outage begins while they run.
async fn a_runtime_sees_no_error_in(action: WireAction, options: RuntimeOptions) {
    const CHAINS: usize = 10;
    const LINKS: usize = 10;
    let fixture = Fixture::new(1);
    let provider = Arc::new(fixture.provider("a").await);
    let (runs, cancelled) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (runs_too, cancelled_too) = (runs.clone(), cancelled.clone());
    let outage_is_over = tokio_util::sync::CancellationToken::new();
    let over = outage_is_over.clone();
    let activities = ActivityRegistry::builder()
        .register("Link", move |_: ActivityContext, input: String| {
            runs_too.fetch_add(1, Ordering::SeqCst);
            async move { Ok(format!("{input}.")) }
        })
        .register("Long", move |context: ActivityContext, input: String| {
            let (over, cancelled) = (over.clone(), cancelled_too.clone());
            async move {
                tokio::select! {
                    () = over.cancelled() => {}
                    () = context.cancelled() => {
                        cancelled.fetch_add(1, Ordering::SeqCst);
                    }
                }
                Ok(input)
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Chain", |context: OrchestrationContext, input: String| async move {
            let mut text = input;
            for _ in 0..LINKS {
                text = context.schedule_activity("Link", text).await?;
            }
            Ok(text)
        })
        .register("Wait", |context: OrchestrationContext, input: String| async move {
            context.schedule_activity("Long", input).await
        })
        .build();
    let runtime = Runtime::start_with_options(provider.clone(), activities, orchestrations, options).await;
    let client = Client::new(provider.clone());
    client.start_orchestration("wait", "Wait", "waited").await.unwrap();
    for n in 0..CHAINS {
        client.start_orchestration(format!("chain {n}"), "Chain", "").await.unwrap();
    }
    // The outage begins when some activities have run and most have not.
    let midst = WireRule::new(WireAction::Delay(Duration::ZERO)).on(duroxide_cosmos_emulator::RequestKind::Batch);
    let midst = fixture.account.wire().add(midst);
    midst.wait_for_hits(40).await;
    midst.remove();
    let outage = begin_outage(&fixture, action);
    let ended = outage.clone();
    let ending = async {
        end_outage(outage).await;
        outage_is_over.cancel();
    };
    let (first, ()) = tokio::join!(client.wait_for_orchestration("chain 0", PATIENCE), ending);
    assert!(ended.hits() > 10);
    assert!(matches!(first.unwrap(), OrchestrationStatus::Completed { .. }), "a client that waited all the time");
    for n in 0..CHAINS {
        let instance = format!("chain {n}");
        match client.wait_for_orchestration(&instance, PATIENCE).await.unwrap() {
            OrchestrationStatus::Completed { output, .. } => assert_eq!(output, ".".repeat(LINKS)),
            other => panic!("{instance}: {other:?}"),
        }
        let history = provider.read(&instance).await.unwrap();
        let failures = history.iter().filter(|event| matches!(event.kind, EventKind::ActivityFailed { .. })).count();
        assert_eq!(failures, 0);
    }
    let waited = client.wait_for_orchestration("wait", PATIENCE).await.unwrap();
    assert!(matches!(waited, OrchestrationStatus::Completed { ref output, .. } if output == "waited"), "{waited:?}");
    assert_eq!(cancelled.load(Ordering::SeqCst), 0, "no activity was cancelled");
    assert_eq!(runs.load(Ordering::SeqCst), CHAINS * LINKS, "each activity ran once");
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_sees_no_error_while_throttled() {
    a_runtime_sees_no_error_in(throttled(), RuntimeOptions::default()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_sees_no_error_while_cosmos_db_is_unavailable() {
    a_runtime_sees_no_error_in(unavailable(), RuntimeOptions::default()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_sees_no_error_while_connections_fail() {
    a_runtime_sees_no_error_in(WireAction::FailConnection, RuntimeOptions::default()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_renews_its_activities_during_an_outage_cancels_none() {
    // The runtime renews every two and a half seconds, so one renewal falls into the outage.
    let options = RuntimeOptions { worker_lock_timeout: Duration::from_secs(5), ..RuntimeOptions::default() };
    a_runtime_sees_no_error_in(unavailable(), options).await;
}
