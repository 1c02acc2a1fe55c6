//! Several versions of an orchestration at a time.

use crate::fixture::process::{Latch, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, EventKind, OrchestrationContext, RuntimeOptions,
};

async fn answer(ctx: OrchestrationContext, _: String) -> Result<String, String> {
    Ok(ctx.orchestration_version())
}

fn no_activities() -> ActivityRegistry {
    ActivityRegistry::builder().build()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_takes_the_latest_version_unless_it_names_one() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Answer", answer)
        .register_versioned("Answer", "1.9.0", answer)
        .register_versioned("Answer", "1.10.0", answer)
        .register("Parent", |ctx: OrchestrationContext, _: String| async move {
            let latest = ctx.schedule_sub_orchestration("Answer", "").await?;
            let named = ctx.schedule_sub_orchestration_versioned("Answer", Some("1.9.0".into()), "").await?;
            Ok(format!("{latest} {named}"))
        })
        .build();
    let process = Process::new(no_activities(), orchestrations).await;

    assert_eq!(process.run("latest", "Answer", "").await, "1.10.0");
    process.client.start_orchestration_versioned("named", "Answer", "1.0.0", "").await.unwrap();
    assert_eq!(process.output("named").await, "1.0.0");
    assert_eq!(process.run("parent", "Parent", "").await, "1.10.0 1.9.0");

    for (instance, version) in [("latest", "1.10.0"), ("named", "1.0.0"), ("parent::sub::4", "1.9.0")] {
        let info = process.client.get_instance_info(instance).await.unwrap();
        assert_eq!((info.orchestration_name.as_str(), info.orchestration_version.as_str()), ("Answer", version));
        let history = process.history(instance).await;
        assert!(matches!(&history[0].kind, EventKind::OrchestrationStarted { version: v, .. } if v == version));
    }
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_execution_keeps_its_version_and_its_successor_takes_the_latest() {
    let (gate, notes) = (Latch::closed(), Notebook::default());
    let (held, said) = (gate.clone(), notes.clone());
    let activities = ActivityRegistry::builder()
        .register("Step", move |ctx: ActivityContext, input: String| {
            let (gate, said) = (held.clone(), said.clone());
            let version = ctx.orchestration_version().to_owned();
            async move {
                said.write(format!("{input} in {version}"));
                if input == "first" {
                    gate.pass().await;
                }
                Ok(input)
            }
        })
        .build();
    async fn cycle(ctx: OrchestrationContext, input: String) -> Result<String, String> {
        ctx.schedule_activity("Step", input.as_str()).await?;
        if input == "first" {
            return ctx.continue_as_new("second").await;
        }
        Ok(ctx.orchestration_version())
    }
    let old = OrchestrationRegistry::builder().register("Cycle", cycle).build();
    let both = OrchestrationRegistry::builder().register("Cycle", cycle).register_versioned("Cycle", "2.0.0", cycle);
    let process = Process::new(activities.clone(), old).await;
    process.start("cycle", "Cycle", "first").await;
    notes.has("first in 1.0.0").await;

    // The new release starts beside the old one, which then stops.
    let new = Process::on(&process.account, RuntimeOptions::default(), activities, both.build()).await;
    gate.open();
    let stopped = process.stop().await;
    drop(stopped);

    let output = new.output("cycle").await;
    let info = new.client.get_instance_info("cycle").await.unwrap();
    assert_eq!(info.orchestration_version, output);
    for (execution, input) in [(1, "first"), (2, "second")] {
        let history = new.history_of("cycle", execution).await;
        let EventKind::OrchestrationStarted { version, input: i, .. } = &history[0].kind else { panic!("{history:?}") };
        assert_eq!(i, input);
        assert!(notes.lines().contains(&format!("{input} in {version}")), "{:?}", notes.lines());
    }
    let first = &new.history_of("cycle", 1).await[0].kind;
    assert!(matches!(first, EventKind::OrchestrationStarted { version, .. } if version == "1.0.0"));
    new.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_happens_where_the_execution_continues_as_new() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Service", |ctx: OrchestrationContext, input: String| async move {
            ctx.continue_as_new(format!("{input}1")).await
        })
        .register_versioned("Service", "2.0.0", |ctx: OrchestrationContext, input: String| async move {
            ctx.continue_as_new_versioned("3.0.0", format!("{input}2")).await
        })
        .register_versioned("Service", "3.0.0", |ctx: OrchestrationContext, input: String| async move {
            Ok(format!("{input}3 at {}", ctx.orchestration_version()))
        })
        .set_policy("Service", duroxide::runtime::registry::VersionPolicy::Exact("2.0.0".parse().unwrap()))
        .build();
    let process = Process::new(no_activities(), orchestrations).await;

    process.client.start_orchestration_versioned("service", "Service", "1.0.0", "0").await.unwrap();

    assert_eq!(process.output("service").await, "0123 at 3.0.0");
    assert_eq!(process.client.get_instance_info("service").await.unwrap().orchestration_version, "3.0.0");
    for (execution, version) in [(1, "1.0.0"), (2, "2.0.0"), (3, "3.0.0")] {
        let started = &process.history_of("service", execution).await[0].kind;
        assert!(matches!(started, EventKind::OrchestrationStarted { version: v, .. } if v == version), "{started:?}");
    }
    process.stop().await;
}
