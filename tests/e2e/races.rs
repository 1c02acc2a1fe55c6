//! Races: the first of several tasks wins, and the losers are cancelled.

use crate::fixture::process::{count_by_name, eventually, Latch, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, Either2, Either3, EventKind, OrchestrationContext, RuntimeOptions,
};
use std::time::Duration;

/// A lock that is renewed every second, so that a worker soon learns that its activity was cancelled.
fn quick_renewal() -> RuntimeOptions {
    RuntimeOptions { worker_lock_timeout: Duration::from_secs(2), ..RuntimeOptions::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_lost_while_it_ran_is_told_to_stop() {
    let notes = Notebook::default();
    let said = notes.clone();
    let activities = ActivityRegistry::builder()
        .register("Slow", move |ctx: ActivityContext, _: String| {
            let said = said.clone();
            async move {
                said.write("begun");
                ctx.cancelled().await;
                said.write("told to stop");
                Err::<String, _>("stopped".to_owned())
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Race", |ctx: OrchestrationContext, _: String| async move {
            let slow = ctx.schedule_activity("Slow", "");
            match ctx.select2(slow, ctx.schedule_wait("Enough")).await {
                Either2::First(output) => output,
                Either2::Second(why) => Ok(why),
            }
        })
        .build();
    let process = Process::with(quick_renewal(), activities, orchestrations).await;
    process.start("race", "Race", "").await;
    notes.has("begun").await;

    process.client.raise_event("race", "Enough", "bored").await.unwrap();

    assert_eq!(process.output("race").await, "bored");
    notes.has("told to stop").await;
    let counts = count_by_name(&process.history("race").await);
    assert_eq!(counts["ActivityCancelRequested"], 1);
    assert!(!counts.contains_key("ActivityCompleted") && !counts.contains_key("ActivityFailed"), "{counts:?}");
    process.idle().await;
    assert_eq!(notes.lines(), ["begun", "told to stop"], "it is not run again");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_lost_before_it_ran_never_runs() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Race", |ctx: OrchestrationContext, _: String| async move {
            // No worker serves this tag.
            let render = ctx.schedule_activity("Render", "").with_tag("gpu");
            match ctx.select2(render, ctx.schedule_timer(Duration::from_millis(100))).await {
                Either2::First(output) => output,
                Either2::Second(()) => Ok("no worker".to_owned()),
            }
        })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;

    assert_eq!(process.run("race", "Race", "").await, "no worker");

    let history = process.history("race").await;
    let cancelled = history.iter().find(|e| matches!(e.kind, EventKind::ActivityCancelRequested { .. })).unwrap();
    assert_eq!(cancelled.source_event_id, Some(2));
    assert_eq!(process.client.get_queue_depths().await.unwrap().worker_queue, 0, "it went with the turn");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_of_three_wins_and_a_losing_child_is_cancelled() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Patient", |ctx: OrchestrationContext, _: String| async move { Ok(ctx.schedule_wait("Never").await) })
        .register("Race", |ctx: OrchestrationContext, _: String| async move {
            let child = ctx.schedule_sub_orchestration_with_id("Patient", "child", "");
            let timer = ctx.schedule_timer(Duration::from_secs(3600));
            let winner = ctx.select3(child, timer, ctx.schedule_wait("Go")).await;
            Ok(match winner {
                Either3::First(_) => "child".to_owned(),
                Either3::Second(()) => "timer".to_owned(),
                Either3::Third(data) => format!("event {data}"),
            })
        })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;
    process.start("race", "Race", "").await;
    eventually("the child waits", || async {
        process.client.read_execution_history("child", 1).await.is_ok_and(|history| history.len() == 2)
    })
    .await;

    process.client.raise_event("race", "Go", "now").await.unwrap();

    assert_eq!(process.output("race").await, "event now");
    let failure = process.failure("child").await;
    assert!(failure.display_message().starts_with("canceled"), "{failure:?}");
    let race = count_by_name(&process.history("race").await);
    assert_eq!((race["SubOrchestrationCancelRequested"], race.get("SubOrchestrationFailed")), (1, None));
    let child = count_by_name(&process.history("child").await);
    assert_eq!((child["OrchestrationCancelRequested"], child["OrchestrationFailed"]), (1, 1));
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_race_continues_with_the_winner_after_a_late_answer_of_the_loser() {
    let (gate, notes) = (Latch::closed(), Notebook::default());
    let (held, said) = (gate.clone(), notes.clone());
    let activities = ActivityRegistry::builder()
        .register("Fast", |_: ActivityContext, _: String| async move { Ok("fast".to_owned()) })
        .register("Slow", move |_: ActivityContext, _: String| {
            let (gate, said) = (held.clone(), said.clone());
            async move {
                said.write("slow begins");
                gate.pass().await;
                said.write("slow ends");
                Ok("slow".to_owned())
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Race", |ctx: OrchestrationContext, _: String| async move {
            let slow = ctx.schedule_activity("Slow", "");
            ctx.schedule_wait("Slow has begun").await;
            let winner = match ctx.select2(slow, ctx.schedule_activity("Fast", "")).await {
                Either2::First(output) | Either2::Second(output) => output?,
            };
            Ok(format!("{winner} {}", ctx.schedule_wait("Slow has ended").await))
        })
        .build();
    let process = Process::new(activities, orchestrations).await;
    process.start("race", "Race", "").await;
    notes.has("slow begins").await;
    process.client.raise_event("race", "Slow has begun", "").await.unwrap();
    eventually("the loser is cancelled", || async {
        let history = process.client.read_execution_history("race", 1).await.unwrap();
        count_by_name(&history).contains_key("ActivityCancelRequested")
    })
    .await;

    gate.open();
    notes.has("slow ends").await;
    process.client.raise_event("race", "Slow has ended", "and done").await.unwrap();

    assert_eq!(process.output("race").await, "fast and done");
    let counts = count_by_name(&process.history("race").await);
    assert_eq!((counts["ActivityScheduled"], counts["ActivityCompleted"]), (2, 1));
    assert_eq!(notes.lines(), ["slow begins", "slow ends"]);
    process.stop().await;
}
