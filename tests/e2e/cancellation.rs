//! Cancellation of an orchestration, its children and its activities.

use crate::fixture::process::{count_by_name, eventually, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, AppErrorKind, ErrorDetails, OrchestrationContext, RuntimeOptions,
};
use std::time::Duration;

fn reason(details: &ErrorDetails) -> &str {
    match details {
        ErrorDetails::Application { kind: AppErrorKind::Cancelled { reason }, .. } => reason,
        other => panic!("not cancelled but {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_waits_is_cancelled_with_its_reason() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Patient", |ctx: OrchestrationContext, _: String| async move { Ok(ctx.schedule_wait("Never").await) })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;
    process.start("patient", "Patient", "").await;

    process.client.cancel_instance("patient", "no longer needed").await.unwrap();

    assert_eq!(reason(&process.failure("patient").await), "no longer needed");
    // A second request, and a request for an unknown instance, change nothing.
    let before = process.history("patient").await;
    process.client.cancel_instance("patient", "again").await.unwrap();
    process.client.raise_event("patient", "Never", "too late").await.unwrap();
    // A message for an ended instance is consumed.
    process.idle().await;
    assert_eq!(process.history("patient").await, before);
    assert_eq!(process.client.get_instance_info("patient").await.unwrap().status, "Failed");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn children_and_grandchildren_are_cancelled_with_their_parent() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Leaf", |ctx: OrchestrationContext, _: String| async move { Ok(ctx.schedule_wait("Never").await) })
        .register("Branch", |ctx: OrchestrationContext, _: String| async move {
            let name = ctx.instance_id();
            let leaf = |n: u32| ctx.schedule_sub_orchestration_with_id("Leaf", format!("{name}.{n}"), "");
            ctx.join(vec![leaf(1), leaf(2)]).await;
            Ok(String::new())
        })
        .register("Root", |ctx: OrchestrationContext, _: String| async move {
            let branch = |n: u32| ctx.schedule_sub_orchestration_with_id("Branch", n.to_string(), "");
            ctx.join(vec![branch(1), branch(2)]).await;
            Ok(String::new())
        })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;
    process.start("root", "Root", "").await;
    let leaves = ["1.1", "1.2", "2.1", "2.2"];
    eventually("all leaves wait", || async {
        let mut waiting = 0;
        for leaf in leaves {
            let history = process.client.read_execution_history(leaf, 1).await.unwrap_or_default();
            waiting += usize::from(history.len() == 2);
        }
        waiting == leaves.len()
    })
    .await;

    process.client.cancel_instance("root", "storm").await.unwrap();

    assert_eq!(reason(&process.failure("root").await), "storm");
    for instance in ["1", "2", "1.1", "1.2", "2.1", "2.2"] {
        reason(&process.failure(instance).await);
        let counts = count_by_name(&process.history(instance).await);
        assert_eq!((counts["OrchestrationCancelRequested"], counts["OrchestrationFailed"]), (1, 1), "{instance}");
    }
    let root = count_by_name(&process.history("root").await);
    assert_eq!((root["OrchestrationCancelRequested"], root["OrchestrationFailed"]), (1, 1));
    assert_eq!(process.client.list_instances_by_status("Failed").await.unwrap().len(), 7);
    assert_eq!(process.client.list_instances_by_status("Running").await.unwrap(), Vec::<String>::new());
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_learns_that_its_instance_was_cancelled() {
    let notes = Notebook::default();
    let said = notes.clone();
    let activities = ActivityRegistry::builder()
        .register("Long", move |ctx: ActivityContext, _: String| {
            let said = said.clone();
            async move {
                said.write("begun");
                ctx.cancelled().await;
                said.write("told to stop");
                Ok("nobody wants to know".to_owned())
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, _: String| async move { ctx.schedule_activity("Long", "").await })
        .build();
    // The worker renews every second, and notices the cancellation then.
    let options = RuntimeOptions { worker_lock_timeout: Duration::from_secs(2), ..RuntimeOptions::default() };
    let process = Process::with(options, activities, orchestrations).await;
    process.start("job", "Job", "").await;
    notes.has("begun").await;

    process.client.cancel_instance("job", "enough").await.unwrap();

    assert_eq!(reason(&process.failure("job").await), "enough");
    notes.has("told to stop").await;
    process.idle().await;
    let counts = count_by_name(&process.history("job").await);
    assert!(!counts.contains_key("ActivityCompleted"), "{counts:?}");
    assert_eq!(notes.lines(), ["begun", "told to stop"]);
    process.stop().await;
}
