//! Consecutive executions of one instance.

use crate::fixture::process::{names, Latch, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, EventKind, OrchestrationContext,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_execution_starts_fresh_and_keeps_its_history() {
    let activities = ActivityRegistry::builder()
        .register(
            "Page",
            |ctx: ActivityContext, input: String| async move { Ok(format!("{}:{input}", ctx.execution_id())) },
        )
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Pages", |ctx: OrchestrationContext, input: String| async move {
            let page: u64 = input.parse().map_err(|e| format!("{e}"))?;
            let read = ctx.schedule_activity("Page", input).await?;
            if page == 5 {
                return Ok(read);
            }
            ctx.continue_as_new((page + 1).to_string()).await
        })
        .build();
    let process = Process::new(activities, orchestrations).await;

    assert_eq!(process.run("pages", "Pages", "1").await, "5:5");

    assert_eq!(process.client.list_executions("pages").await.unwrap(), [1, 2, 3, 4, 5]);
    for execution in 1..=5 {
        let history = process.history_of("pages", execution).await;
        let last = if execution == 5 { "OrchestrationCompleted" } else { "OrchestrationContinuedAsNew" };
        assert_eq!(names(&history), ["OrchestrationStarted", "ActivityScheduled", "ActivityCompleted", last]);
        let EventKind::OrchestrationStarted { input, .. } = &history[0].kind else { panic!("{history:?}") };
        assert_eq!(*input, execution.to_string());
        let info = process.client.get_execution_info("pages", execution).await.unwrap();
        assert_eq!(info.status, if execution == 5 { "Completed" } else { "ContinuedAsNew" });
        assert_eq!(info.event_count, 4);
        assert!(info.completed_at.is_some());
    }
    let info = process.client.get_instance_info("pages").await.unwrap();
    assert_eq!((info.current_execution_id, info.output.as_deref()), (5, Some("5:5")));
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_of_an_ended_execution_does_not_complete_one_of_its_successor() {
    let (gate, notes) = (Latch::closed(), Notebook::default());
    let (held, said) = (gate.clone(), notes.clone());
    let activities = ActivityRegistry::builder()
        .register("Slow", move |_: ActivityContext, input: String| {
            let (gate, said) = (held.clone(), said.clone());
            async move {
                said.write("begun");
                gate.pass().await;
                said.write("ended");
                Ok(input)
            }
        })
        .register("Quick", |_: ActivityContext, input: String| async move { Ok(input) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Loop", |ctx: OrchestrationContext, input: String| async move {
            if input == "first" {
                // The orchestration does not await this activity, which has the same event id as the successor's
                // activity.
                let _slow = ctx.schedule_activity("Slow", "from the first execution");
                ctx.schedule_wait("Go on").await;
                return ctx.continue_as_new("second").await;
            }
            let answer = ctx.schedule_activity("Quick", "from the second execution").await?;
            ctx.schedule_wait("Finish").await;
            Ok(answer)
        })
        .build();
    let process = Process::new(activities, orchestrations).await;
    process.start("loop", "Loop", "first").await;
    notes.has("begun").await;

    process.client.raise_event("loop", "Go on", "").await.unwrap();
    crate::fixture::process::eventually("the second execution waits", || async {
        process.client.read_execution_history("loop", 2).await.is_ok_and(|history| history.len() == 4)
    })
    .await;
    gate.open();
    notes.has("ended").await;
    process.client.raise_event("loop", "Finish", "").await.unwrap();

    assert_eq!(process.output("loop").await, "from the second execution");
    let (first, second) = (process.history_of("loop", 1).await, process.history_of("loop", 2).await);
    assert_eq!(names(&first)[4..], ["OrchestrationContinuedAsNew", "ActivityCancelRequested"]);
    assert_eq!(second.len(), 6);
    process.stop().await;
}
