//! Failures and retries.

use crate::fixture::process::{count_by_name, eventually, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry, UnregisteredBackoffConfig},
    ActivityContext, AppErrorKind, BackoffStrategy, ConfigErrorKind, ErrorDetails, EventKind, OrchestrationContext,
    PoisonMessageType, RetryPolicy, RuntimeOptions,
};
use std::time::Duration;

/// Three quick attempts at a handler that is not registered.
fn three_quick_attempts() -> RuntimeOptions {
    let delay = Duration::from_millis(20);
    RuntimeOptions {
        max_attempts: 3,
        unregistered_backoff: UnregisteredBackoffConfig { base_delay: delay, max_delay: delay },
        ..RuntimeOptions::default()
    }
}

fn no_activities() -> ActivityRegistry {
    ActivityRegistry::builder().build()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_s_error_reaches_its_orchestration_and_fails_it() {
    let activities = ActivityRegistry::builder()
        .register("Fail", |_: ActivityContext, input: String| async move { Err::<String, _>(format!("bad {input}")) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_activity("Fail", input).await
        })
        .build();
    let process = Process::new(activities, orchestrations).await;
    process.start("job", "Job", "luck").await;

    assert_eq!(process.failure("job").await.display_message(), "bad luck");

    let names = process.event_names("job").await;
    assert_eq!(names, ["OrchestrationStarted", "ActivityScheduled", "ActivityFailed", "OrchestrationFailed"]);
    let info = process.client.get_instance_info("job").await.unwrap();
    assert_eq!((info.status.as_str(), info.output.as_deref()), ("Failed", Some("bad luck")));
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_is_a_failure_and_the_runtime_continues() {
    let activities = ActivityRegistry::builder()
        .register("Panic", |_: ActivityContext, input: String| async move {
            if input == "now" {
                panic!("the activity's own fault");
            }
            Ok(input)
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Activity", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_activity("Panic", input).await
        })
        .register("Orchestration", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_activity("Panic", "not yet").await?;
            panic!("the orchestration's own fault")
        })
        .build();
    let process = Process::new(activities, orchestrations).await;
    process.start("activity", "Activity", "now").await;
    process.start("orchestration", "Orchestration", "").await;

    let failure = process.failure("activity").await;
    assert!(failure.display_message().contains("panicked"), "{failure:?}");
    let failure = process.failure("orchestration").await;
    assert!(matches!(failure, ErrorDetails::Application { kind: AppErrorKind::Panicked, .. }), "{failure:?}");

    assert_eq!(process.run("after", "Activity", "fine").await, "fine");
    assert_eq!(process.event_names("activity").await[2..], ["ActivityFailed", "OrchestrationFailed"]);
    assert_eq!(process.event_names("orchestration").await[2..], ["ActivityCompleted", "OrchestrationFailed"]);
    process.stop().await;
}

/// An activity that fails until its third attempt.
fn fails_twice(notes: &Notebook) -> ActivityRegistry {
    let notes = notes.clone();
    ActivityRegistry::builder()
        .register("Try", move |_: ActivityContext, input: String| {
            notes.write(input.clone());
            let attempt = notes.lines().len();
            async move {
                match attempt {
                    1 | 2 => Err(format!("{input} {attempt}")),
                    _ => Ok(format!("{input} {attempt}")),
                }
            }
        })
        .build()
}

fn every(millis: u64) -> BackoffStrategy {
    BackoffStrategy::Fixed { delay: Duration::from_millis(millis) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_policy_retries_until_success() {
    let notes = Notebook::default();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, _: String| async move {
            let policy = RetryPolicy::new(5).with_backoff(every(30));
            ctx.schedule_activity_with_retry("Try", "attempt", policy).await
        })
        .build();
    let process = Process::new(fails_twice(&notes), orchestrations).await;

    assert_eq!(process.run("job", "Job", "").await, "attempt 3");

    assert_eq!(notes.lines().len(), 3);
    let history = process.history("job").await;
    let counts = count_by_name(&history);
    assert_eq!((counts["ActivityScheduled"], counts["ActivityFailed"], counts["ActivityCompleted"]), (3, 2, 1));
    assert_eq!((counts["TimerCreated"], counts["TimerFired"]), (2, 2));
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_policy_ends_with_its_last_attempt() {
    let notes = Notebook::default();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, _: String| async move {
            let policy = RetryPolicy::new(2).with_backoff(BackoffStrategy::None);
            ctx.schedule_activity_with_retry("Try", "attempt", policy).await
        })
        .build();
    let process = Process::new(fails_twice(&notes), orchestrations).await;
    process.start("job", "Job", "").await;

    assert_eq!(process.failure("job").await.display_message(), "attempt 2");

    let counts = count_by_name(&process.history("job").await);
    assert_eq!((counts["ActivityScheduled"], counts["ActivityFailed"], counts.get("TimerCreated")), (2, 2, None));
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_takes_too_long_is_not_repeated() {
    let notes = Notebook::default();
    let said = notes.clone();
    let activities = ActivityRegistry::builder()
        .register("Hang", move |ctx: ActivityContext, _: String| {
            said.write("attempt");
            async move {
                ctx.cancelled().await;
                Ok(String::new())
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, _: String| async move {
            let policy = RetryPolicy::new(3).with_timeout(Duration::from_millis(100)).with_backoff(every(10));
            ctx.schedule_activity_with_retry("Hang", "", policy).await
        })
        .build();
    let options = RuntimeOptions { worker_lock_timeout: Duration::from_secs(2), ..RuntimeOptions::default() };
    let process = Process::with(options, activities, orchestrations).await;
    process.start("job", "Job", "").await;

    let failure = process.failure("job").await;

    assert!(failure.display_message().contains("timed out"), "{failure:?}");
    let counts = count_by_name(&process.history("job").await);
    assert_eq!((counts["ActivityScheduled"], counts["ActivityCancelRequested"]), (1, 1));
    assert!(notes.lines().len() <= 1, "{:?}", notes.lines());
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unregistered_orchestration_becomes_poison() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Parent", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_sub_orchestration("Nowhere", "").await
        })
        .build();
    let process = Process::with(three_quick_attempts(), no_activities(), orchestrations).await;
    process.start("lost", "Nowhere", "input").await;
    process.start("parent", "Parent", "").await;

    match process.failure("lost").await {
        ErrorDetails::Poison { attempt_count, max_attempts, message_type, .. } => {
            assert_eq!((attempt_count, max_attempts), (4, 3), "each attempt counts once");
            assert!(matches!(message_type, PoisonMessageType::Orchestration { instance, .. } if instance == "lost"));
        }
        other => panic!("{other:?}"),
    }
    // The parent of a failed child receives the error.
    let failure = process.failure("parent").await;
    assert!(failure.display_message().contains("poison"), "{failure:?}");
    assert_eq!(count_by_name(&process.history("parent").await)["SubOrchestrationFailed"], 1);
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unregistered_activity_becomes_poison() {
    let orchestrations = OrchestrationRegistry::builder()
        .register(
            "Job",
            |ctx: OrchestrationContext, _: String| async move { ctx.schedule_activity("Nowhere", "").await },
        )
        .build();
    let process = Process::with(three_quick_attempts(), no_activities(), orchestrations).await;
    process.start("job", "Job", "").await;

    match process.failure("job").await {
        ErrorDetails::Poison { attempt_count, message_type, .. } => {
            assert_eq!(attempt_count, 4, "each attempt counts once");
            assert!(
                matches!(message_type, PoisonMessageType::Activity { activity_name, .. } if activity_name == "Nowhere")
            );
        }
        other => panic!("{other:?}"),
    }
    let counts = count_by_name(&process.history("job").await);
    assert_eq!((counts["ActivityFailed"], counts["OrchestrationFailed"]), (1, 1));
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_knows_the_handler_takes_over_from_one_that_does_not() {
    let delay = Duration::from_millis(100);
    let options = RuntimeOptions {
        max_attempts: 1_000,
        unregistered_backoff: UnregisteredBackoffConfig { base_delay: delay, max_delay: delay },
        ..RuntimeOptions::default()
    };
    let empty = OrchestrationRegistry::builder().build();
    let old = Process::with(options, no_activities(), empty).await;
    old.start("job", "New", "x").await;
    eventually("the old release has tried", || async {
        old.client.get_queue_depths().await.unwrap().orchestrator_queue == 1
    })
    .await;

    let activities = ActivityRegistry::builder()
        .register("NewToo", |_: ActivityContext, input: String| async move { Ok(input) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("New", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_activity("NewToo", input).await
        })
        .build();
    let new = Process::on(&old.account, RuntimeOptions::default(), activities, orchestrations).await;
    old.stop().await;

    assert_eq!(new.output("job").await, "x");
    assert_eq!(new.event_names("job").await.len(), 4);
    new.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nondeterministic_code_of_a_running_execution_is_detected() {
    let activities = || {
        ActivityRegistry::builder()
            .register("A", |_: ActivityContext, input: String| async move { Ok(input) })
            .register("B", |_: ActivityContext, input: String| async move { Ok(input) })
            .build()
    };
    let before = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_activity("A", "").await?;
            Ok(ctx.schedule_wait("Go on").await)
        })
        .build();
    let after = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_activity("B", "").await?;
            Ok(ctx.schedule_wait("Go on").await)
        })
        .build();
    let process = Process::new(activities(), before).await;
    process.start("job", "Job", "").await;
    eventually("it waits", || async {
        process.client.read_execution_history("job", 1).await.is_ok_and(|history| history.len() == 4)
    })
    .await;
    let account = process.stop().await;

    let process = Process::on(&account, RuntimeOptions::default(), activities(), after).await;
    process.client.raise_event("job", "Go on", "").await.unwrap();

    let failure = process.failure("job").await;
    let nondeterminism = ConfigErrorKind::Nondeterminism;
    assert!(matches!(&failure, ErrorDetails::Configuration { kind, .. } if *kind == nondeterminism), "{failure:?}");
    let history = process.history("job").await;
    assert!(matches!(&history[1].kind, EventKind::ActivityScheduled { name, .. } if name == "A"), "{history:?}");
    process.stop().await;
}
