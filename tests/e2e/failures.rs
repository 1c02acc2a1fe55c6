//! What goes wrong, and what is tried again.

use crate::scene::{census, eventually, Notebook, Scene};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry, UnregisteredBackoffConfig},
    ActivityContext, AppErrorKind, BackoffStrategy, ConfigErrorKind, ErrorDetails, EventKind, OrchestrationContext,
    PoisonMessageType, RetryPolicy, RuntimeOptions,
};
use std::time::Duration;

/// Three attempts at what nobody has registered, in quick succession.
fn short_of_patience() -> RuntimeOptions {
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
    let scene = Scene::new(activities, orchestrations).await;
    scene.start("job", "Job", "luck").await;

    assert_eq!(scene.failure("job").await.display_message(), "bad luck");

    let story = scene.story("job").await;
    assert_eq!(story, ["OrchestrationStarted", "ActivityScheduled", "ActivityFailed", "OrchestrationFailed"]);
    let info = scene.client.get_instance_info("job").await.unwrap();
    assert_eq!((info.status.as_str(), info.output.as_deref()), ("Failed", Some("bad luck")));
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_is_a_failure_and_the_runtime_lives_on() {
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
    let scene = Scene::new(activities, orchestrations).await;
    scene.start("activity", "Activity", "now").await;
    scene.start("orchestration", "Orchestration", "").await;

    let failure = scene.failure("activity").await;
    assert!(failure.display_message().contains("panicked"), "{failure:?}");
    let failure = scene.failure("orchestration").await;
    assert!(matches!(failure, ErrorDetails::Application { kind: AppErrorKind::Panicked, .. }), "{failure:?}");

    assert_eq!(scene.run("after", "Activity", "fine").await, "fine");
    assert_eq!(scene.story("activity").await[2..], ["ActivityFailed", "OrchestrationFailed"]);
    assert_eq!(scene.story("orchestration").await[2..], ["ActivityCompleted", "OrchestrationFailed"]);
    scene.stop().await;
}

/// An activity that fails until its third attempt.
fn third_time_lucky(notes: &Notebook) -> ActivityRegistry {
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
async fn a_policy_tries_again_until_it_works() {
    let notes = Notebook::default();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, _: String| async move {
            let policy = RetryPolicy::new(5).with_backoff(every(30));
            ctx.schedule_activity_with_retry("Try", "attempt", policy).await
        })
        .build();
    let scene = Scene::new(third_time_lucky(&notes), orchestrations).await;

    assert_eq!(scene.run("job", "Job", "").await, "attempt 3");

    assert_eq!(notes.lines().len(), 3);
    let history = scene.history("job").await;
    let census = census(&history);
    assert_eq!((census["ActivityScheduled"], census["ActivityFailed"], census["ActivityCompleted"]), (3, 2, 1));
    assert_eq!((census["TimerCreated"], census["TimerFired"]), (2, 2));
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_ends_with_its_last_attempt() {
    let notes = Notebook::default();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Job", |ctx: OrchestrationContext, _: String| async move {
            let policy = RetryPolicy::new(2).with_backoff(BackoffStrategy::None);
            ctx.schedule_activity_with_retry("Try", "attempt", policy).await
        })
        .build();
    let scene = Scene::new(third_time_lucky(&notes), orchestrations).await;
    scene.start("job", "Job", "").await;

    assert_eq!(scene.failure("job").await.display_message(), "attempt 2");

    let census = census(&scene.history("job").await);
    assert_eq!((census["ActivityScheduled"], census["ActivityFailed"], census.get("TimerCreated")), (2, 2, None));
    scene.stop().await;
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
    let scene = Scene::with(options, activities, orchestrations).await;
    scene.start("job", "Job", "").await;

    let failure = scene.failure("job").await;

    assert!(failure.display_message().contains("timed out"), "{failure:?}");
    let census = census(&scene.history("job").await);
    assert_eq!((census["ActivityScheduled"], census["ActivityCancelRequested"]), (1, 1));
    assert!(notes.lines().len() <= 1, "{:?}", notes.lines());
    scene.quiet().await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orchestration_that_nobody_registered_is_poison_in_the_end() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Parent", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_sub_orchestration("Nowhere", "").await
        })
        .build();
    let scene = Scene::with(short_of_patience(), no_activities(), orchestrations).await;
    scene.start("lost", "Nowhere", "input").await;
    scene.start("parent", "Parent", "").await;

    match scene.failure("lost").await {
        ErrorDetails::Poison { attempt_count, max_attempts, message_type, .. } => {
            assert_eq!((attempt_count, max_attempts), (4, 3), "each attempt counts once");
            assert!(matches!(message_type, PoisonMessageType::Orchestration { instance, .. } if instance == "lost"));
        }
        other => panic!("{other:?}"),
    }
    // The parent of one is told.
    let failure = scene.failure("parent").await;
    assert!(failure.display_message().contains("poison"), "{failure:?}");
    assert_eq!(census(&scene.history("parent").await)["SubOrchestrationFailed"], 1);
    scene.quiet().await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_nobody_registered_is_poison_in_the_end() {
    let orchestrations = OrchestrationRegistry::builder()
        .register(
            "Job",
            |ctx: OrchestrationContext, _: String| async move { ctx.schedule_activity("Nowhere", "").await },
        )
        .build();
    let scene = Scene::with(short_of_patience(), no_activities(), orchestrations).await;
    scene.start("job", "Job", "").await;

    match scene.failure("job").await {
        ErrorDetails::Poison { attempt_count, message_type, .. } => {
            assert_eq!(attempt_count, 4, "each attempt counts once");
            assert!(
                matches!(message_type, PoisonMessageType::Activity { activity_name, .. } if activity_name == "Nowhere")
            );
        }
        other => panic!("{other:?}"),
    }
    let census = census(&scene.history("job").await);
    assert_eq!((census["ActivityFailed"], census["OrchestrationFailed"]), (1, 1));
    scene.quiet().await;
    scene.stop().await;
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
    let old = Scene::with(options, no_activities(), empty).await;
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
    let new = Scene::on(&old.account, RuntimeOptions::default(), activities, orchestrations).await;
    old.stop().await;

    assert_eq!(new.output("job").await, "x");
    assert_eq!(new.story("job").await.len(), 4);
    new.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn code_that_changed_under_a_running_execution_is_found_out() {
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
    let scene = Scene::new(activities(), before).await;
    scene.start("job", "Job", "").await;
    eventually("it waits", || async {
        scene.client.read_execution_history("job", 1).await.is_ok_and(|history| history.len() == 4)
    })
    .await;
    let account = scene.stop().await;

    let scene = Scene::on(&account, RuntimeOptions::default(), activities(), after).await;
    scene.client.raise_event("job", "Go on", "").await.unwrap();

    let failure = scene.failure("job").await;
    let nondeterminism = ConfigErrorKind::Nondeterminism;
    assert!(matches!(&failure, ErrorDetails::Configuration { kind, .. } if *kind == nondeterminism), "{failure:?}");
    let history = scene.history("job").await;
    assert!(matches!(&history[1].kind, EventKind::ActivityScheduled { name, .. } if name == "A"), "{history:?}");
    scene.stop().await;
}
