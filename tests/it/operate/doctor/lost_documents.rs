//! The doctor names each document that is missing, and restores those that the history determines.

use super::*;
use crate::fixture::*;
use duroxide::{
    providers::TagFilter,
    runtime::{registry::ActivityRegistry, Runtime},
    ActivityContext, Client, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus, RuntimeOptions,
};
use duroxide_cosmos::{operate::Reason, CosmosDBProvider};
use serde_json::{json, Value};
use std::{sync::Arc, time::Duration};

const PARENT: &str = "everything";

const CHILD: &str = "its child";

/// Runs an orchestration that waits for one event of each kind, in its second execution, and its child and activities.
async fn run(provider: CosmosDBProvider, tags: TagFilter) -> Arc<Runtime> {
    let activities = ActivityRegistry::builder()
        .register("FetchedActivity", |_: ActivityContext, input: String| async move { Ok(input.len().to_string()) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Everything", |ctx: OrchestrationContext, input: String| async move {
            if input == "first" {
                ctx.set_custom_status("begun");
                return ctx.continue_as_new("second").await;
            }
            ctx.set_kv_value("total", "42");
            ctx.set_custom_status("waiting");
            let activity = ctx.schedule_activity("FetchedActivity", "x".repeat(8_000)).with_tag("later");
            let child = ctx.schedule_sub_orchestration_with_id("Child", CHILD, "");
            let timer = ctx.schedule_timer(Duration::from_secs(3_600));
            let (length, child) = (activity.await?, child.await?);
            timer.await;
            Ok(format!("{length} {child} {}", ctx.get_kv_value("total").unwrap_or_default()))
        })
        .register("Child", |ctx: OrchestrationContext, _: String| async move { Ok(ctx.schedule_wait("go").await) })
        .build();
    let options = RuntimeOptions { worker_tag_filter: tags, ..RuntimeOptions::default() };
    Runtime::start_with_options(Arc::new(provider), activities, orchestrations, options).await
}

/// All documents of such an instance and its child while both wait.
async fn everything() -> Vec<Value> {
    let fixture = Fixture::new(1);
    let runtime = run(fixture.provider("worker").await, TagFilter::DefaultOnly).await;
    let client = Client::new(Arc::new(fixture.provider("client").await));
    client.start_orchestration(PARENT, "Everything", "first").await.unwrap();
    // The child has run its first turn, and no turn or activity runs.
    loop {
        let waits = |of: &[Value], kind: &str| of.iter().filter(|document| document["type"] == kind).count() == 1;
        let (parent, child) = (fixture.partition(PARENT).await, fixture.partition(CHILD).await);
        let locked =
            parent.iter().chain(&child).any(|document| document["type"] == "instance" && !document["lock"].is_null());
        let running = child.iter().any(|document| document["status"] == "Running");
        if !locked
            && running
            && waits(&parent, "activity")
            && !parent.iter().any(|document| document["type"] == "intent")
        {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    runtime.shutdown(None).await;
    let all = fixture.documents().await;
    all.into_iter().filter(|document| [PARENT, CHILD].iter().any(|of| document["instanceId"] == *of)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_missing_document_is_reported_and_restored_if_the_history_determines_it() {
    let everything = everything().await;
    let kinds = |of: &str, kind: &str| {
        everything.iter().filter(|document| document["instanceId"] == of && document["type"] == kind).count()
    };
    for kind in ["instance", "execution", "kv", "customStatus", "activity", "payload", "message"] {
        assert_eq!(kinds(PARENT, kind), 1, "{kind}");
    }
    assert_eq!((kinds(CHILD, "instance"), kinds(CHILD, "delivered"), kinds(CHILD, "history")), (1, 1, 1));
    let mut ran = 0;
    for missing in std::iter::once(&Value::Null).chain(&everything) {
        let fixture = Fixture::new(1);
        // The clock is late enough for the timer to be due and the activity to be late.
        let doctor = fixture.provider("doctor").await;
        for document in everything.iter().filter(|document| *document != missing) {
            fixture.put(document).await;
        }
        let of = missing["instanceId"].as_str().unwrap_or(PARENT);
        let is_current = missing["execution"] == json!(2) || of == CHILD;
        // Whether the instance continues after the repair.
        let goes_on = match missing["type"].as_str() {
            None | Some("delivered") => {
                for instance in [PARENT, CHILD] {
                    let diagnosis = diagnose(&doctor, instance).await;
                    assert_eq!(diagnosis.findings, [], "{instance} {missing}");
                    assert!(diagnosis.state.starts_with("waits for"), "{}", diagnosis.state);
                }
                true
            }
            Some("history") => {
                not_repairable(&doctor, of, Reason::LostHistory).await;
                !is_current
            }
            Some(kind) => {
                if (of, kind) == (CHILD, "instance") {
                    not_repairable(&doctor, PARENT, Reason::LostChild).await;
                }
                let reason = match kind {
                    "instance" => Reason::LostInstance,
                    "execution" => Reason::LostExecution,
                    "kv" => Reason::LostValue,
                    "customStatus" => Reason::LostStatus,
                    "activity" => Reason::LostActivity,
                    "payload" => Reason::LostInput,
                    "message" => Reason::LostTimer,
                    other => panic!("{other} is no kind that an instance has"),
                };
                repaired_as_offered(&doctor, of, reason).await;
                true
            }
        };
        if goes_on {
            ran += 1;
            run_to_the_end(&fixture).await;
        }
    }
    assert!(ran >= 10, "{ran}");
}

/// Runs a worker that takes all the work, later.
async fn run_to_the_end(fixture: &Fixture) {
    let later = fixture.provider_with("later", test_config().with_clock(off_by(2 * HOUR))).await;
    let runtime = run(later, TagFilter::default_and(["later"])).await;
    let store = Arc::new(fixture.provider("client").await);
    let client = Client::new(store.clone());
    client.raise_event(CHILD, "go", "gone").await.unwrap();
    match client.wait_for_orchestration(PARENT, PATIENCE).await.unwrap() {
        OrchestrationStatus::Completed { output, custom_status, .. } => {
            assert_eq!((output.as_str(), custom_status.as_deref()), ("8000 gone 42", Some("waiting")));
        }
        other => panic!("{other:?}"),
    }
    let info = admin(&store).get_execution_info(PARENT, 1).await.unwrap();
    assert_eq!((info.status.as_str(), info.output.as_deref()), ("ContinuedAsNew", Some("second")));
    runtime.shutdown(None).await;
    // An intent is deleted in the background once its message has arrived.
    let passing = ["message", "activity", "payload", "intent"];
    let mut left = Vec::new();
    let emptied = async {
        loop {
            left = fixture.documents().await;
            left.retain(|document| passing.iter().any(|kind| document["type"] == *kind));
            if left.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, emptied).await.is_ok();
    assert!(in_time, "{left:?} is left over");
}
