//! Custom status and clients that wait for its changes.

use crate::fixture::{
    process::{count_by_name, Process},
    PATIENCE,
};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    Client, OrchestrationContext, OrchestrationStatus,
};
use std::time::Duration;

/// Waits for the next status change. Returns the status and its version.
async fn next(client: &Client, instance: &str, seen: u64) -> (Option<String>, u64) {
    match client.wait_for_status_change(instance, seen, Duration::from_millis(10), PATIENCE).await.unwrap() {
        OrchestrationStatus::Running { custom_status, custom_status_version }
        | OrchestrationStatus::Completed { custom_status, custom_status_version, .. } => {
            (custom_status, custom_status_version)
        }
        other => panic!("{instance}: {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_sees_each_status_that_it_waits_for() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Worker", |ctx: OrchestrationContext, _: String| async move {
            ctx.set_custom_status("overwritten in the same turn");
            ctx.set_custom_status("one");
            ctx.schedule_wait("Go on").await;
            ctx.set_custom_status("two");
            ctx.schedule_wait("Go on").await;
            ctx.reset_custom_status();
            ctx.schedule_wait("Go on").await;
            Ok(format!("{:?}", ctx.get_custom_status()))
        })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;
    process.start("worker", "Worker", "").await;
    let go_on = || async { process.client.raise_event("worker", "Go on", "").await.unwrap() };

    let (one, v1) = next(&process.client, "worker", 0).await;
    assert_eq!(one.as_deref(), Some("one"));
    go_on().await;
    let (two, v2) = next(&process.client, "worker", v1).await;
    assert_eq!(two.as_deref(), Some("two"));
    go_on().await;
    let (three, v3) = next(&process.client, "worker", v2).await;
    assert_eq!(three, None);
    assert!(v1 < v2 && v2 < v3);
    go_on().await;

    assert_eq!(process.output("worker").await, "None");
    assert_eq!(count_by_name(&process.history("worker").await)["CustomStatusUpdated"], 4);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_outlives_its_execution_and_its_instance_s_end() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Worker", |ctx: OrchestrationContext, input: String| async move {
            if input == "first" {
                ctx.set_custom_status("from the first execution");
                return ctx.continue_as_new("second").await;
            }
            ctx.schedule_wait("Finish").await;
            Ok(ctx.get_custom_status().unwrap_or_default())
        })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;
    process.start("worker", "Worker", "first").await;

    let (status, version) = next(&process.client, "worker", 0).await;
    assert_eq!(status.as_deref(), Some("from the first execution"));
    process.recorded("worker", 2, "ExternalSubscribed").await;
    process.client.raise_event("worker", "Finish", "").await.unwrap();

    assert_eq!(process.output("worker").await, "from the first execution");
    match process.client.get_orchestration_status("worker").await.unwrap() {
        OrchestrationStatus::Completed { custom_status, custom_status_version, .. } => {
            assert_eq!(custom_status.as_deref(), Some("from the first execution"));
            assert!(custom_status_version >= version);
        }
        other => panic!("{other:?}"),
    }
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_learns_of_an_end_without_a_status() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Silent", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_timer(Duration::from_millis(50)).await;
            Ok("done".to_owned())
        })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;
    assert_eq!(process.client.get_orchestration_status("silent").await.unwrap(), OrchestrationStatus::NotFound);
    process.start("silent", "Silent", "").await;

    assert_eq!(next(&process.client, "silent", 0).await.0, None);

    assert_eq!(process.output("silent").await, "done");
    process.stop().await;
}
