//! Restarts, and several processes at a time.

use crate::fixture::process::{count_by_name, eventually, Latch, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, OrchestrationContext, RuntimeOptions,
};
use duroxide_cosmos_emulator::LocalAccount;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_orchestrations_continue_in_the_next_process() {
    let notes = Notebook::default();
    let activities = || {
        let notes = notes.clone();
        ActivityRegistry::builder()
            .register("Step", move |_: ActivityContext, input: String| {
                notes.write(input.clone());
                async move { Ok(input) }
            })
            .build()
    };
    let orchestrations = || {
        OrchestrationRegistry::builder()
            .register(
                "Child",
                |ctx: OrchestrationContext, _: String| async move { Ok(ctx.schedule_wait("Go on").await) },
            )
            .register("Job", |ctx: OrchestrationContext, _: String| async move {
                ctx.set_kv_value("phase", "one");
                ctx.set_custom_status("one");
                ctx.schedule_activity("Step", "before").await?;
                let child = ctx.schedule_sub_orchestration_with_id("Child", "child", "");
                let timer = ctx.schedule_timer(Duration::from_millis(700));
                let message = ctx.dequeue_event("inbox").await;
                let (child, ()) = ctx.join2(child, timer).await;
                ctx.schedule_activity("Step", "after").await?;
                let phase = ctx.get_kv_value("phase").unwrap_or_default();
                Ok(format!("{phase} {message} {}", child?))
            })
            .build()
    };
    let first = Process::new(activities(), orchestrations()).await;
    first.start("job", "Job", "").await;
    first.client.enqueue_event("job", "inbox", "hello").await.unwrap();
    eventually("both wait", || async {
        let child = first.client.read_execution_history("child", 1).await.unwrap_or_default();
        let job = first.client.read_execution_history("job", 1).await.unwrap_or_default();
        child.len() == 2 && count_by_name(&job).contains_key("ExternalEventPersistent")
    })
    .await;
    let account = first.stop().await;

    let second = Process::on(&account, RuntimeOptions::default(), activities(), orchestrations()).await;
    second.client.raise_event("child", "Go on", "child").await.unwrap();

    assert_eq!(second.output("job").await, "one hello child");
    assert_eq!(notes.lines(), ["before", "after"], "nothing is done twice");
    let counts = count_by_name(&second.history("job").await);
    let once = ["TimerCreated", "TimerFired", "SubOrchestrationScheduled", "SubOrchestrationCompleted", "KeyValueSet"];
    for name in once {
        assert_eq!(counts[name], 1, "{name}");
    }
    assert_eq!(second.event_names("child").await.len(), 4);
    second.idle().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_died_with_its_process_runs_again_in_another() {
    let notes = Notebook::default();
    let gate = Latch::closed();
    let activities = |process: &'static str| {
        let (notes, gate) = (notes.clone(), gate.clone());
        ActivityRegistry::builder()
            .register("Step", move |_: ActivityContext, input: String| {
                let gate = gate.clone();
                notes.write(format!("{input} in {process}"));
                async move {
                    if process == "first" {
                        gate.pass().await;
                    }
                    Ok(format!("{input} in {process}"))
                }
            })
            .build()
    };
    let orchestrations = || {
        OrchestrationRegistry::builder()
            .register("Job", |ctx: OrchestrationContext, _: String| async move {
                ctx.schedule_activity("Step", "done").await
            })
            .build()
    };
    let options = RuntimeOptions { worker_lock_timeout: Duration::from_secs(1), ..RuntimeOptions::default() };
    let first = Process::with(options, activities("first"), orchestrations()).await;
    first.start("job", "Job", "").await;
    notes.has("done in first").await;
    // As when the process is killed: it releases no lock.
    first.runtime.clone().shutdown(Some(0)).await;

    let second = Process::on(&first.account, RuntimeOptions::default(), activities("second"), orchestrations()).await;

    assert_eq!(second.output("job").await, "done in second");
    assert_eq!(notes.lines(), ["done in first", "done in second"]);
    assert_eq!(second.event_names("job").await.len(), 4);
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_backlog_of_a_client_process_is_run_by_the_next_process() {
    let activities = || {
        ActivityRegistry::builder()
            .register("Step", |_: ActivityContext, input: String| async move { Ok(input) })
            .build()
    };
    let orchestrations = || {
        OrchestrationRegistry::builder()
            .register("Job", |ctx: OrchestrationContext, input: String| async move {
                ctx.schedule_activity("Step", input).await
            })
            .build()
    };
    // A client without a runtime, in a process that ends before the work begins.
    let account = LocalAccount::builder().with_partitions(4).build();
    let provider = crate::fixture::process::provider_on(&account).await;
    let client = duroxide::Client::new(provider.clone());
    for n in 0..20 {
        client.start_orchestration(format!("job-{n}"), "Job", n.to_string()).await.unwrap();
    }
    drop(client);
    provider.shutdown().await;
    drop(provider);

    let process = Process::on(&account, RuntimeOptions::default(), activities(), orchestrations()).await;

    for n in 0..20 {
        let instance = format!("job-{n}");
        assert_eq!(process.output(&instance).await, n.to_string());
        assert_eq!(process.event_names(&instance).await.len(), 4);
    }
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_share_the_work_and_do_none_of_it_twice() {
    let notes = Notebook::default();
    let activities = |process: &'static str| {
        let notes = notes.clone();
        ActivityRegistry::builder()
            .register("Step", move |ctx: ActivityContext, input: String| {
                notes.write(format!("{} {input}", ctx.instance_id()));
                async move { Ok(format!("{input}{}", &process[..1])) }
            })
            .build()
    };
    let orchestrations = || {
        OrchestrationRegistry::builder()
            .register("Child", |ctx: OrchestrationContext, input: String| async move {
                ctx.schedule_activity("Step", input).await
            })
            .register("Job", |ctx: OrchestrationContext, input: String| async move {
                let two = (0..2).map(|n| ctx.schedule_activity("Step", n.to_string())).collect();
                ctx.join(two).await;
                ctx.schedule_sub_orchestration("Child", "child").await?;
                Ok(input)
            })
            .build()
    };
    let account = LocalAccount::builder().with_partitions(4).build();
    let options = RuntimeOptions::default;
    let one = Process::on(&account, options(), activities("one"), orchestrations()).await;
    let two = Process::on(&account, options(), activities("two"), orchestrations()).await;

    for n in 0..12 {
        let starter = if n % 2 == 0 { &one } else { &two };
        starter.start(&format!("job-{n}"), "Job", &n.to_string()).await;
    }

    for n in 0..12 {
        let instance = format!("job-{n}");
        // The process that did not start the instance waits for it.
        let watcher = if n % 2 == 0 { &two } else { &one };
        assert_eq!(watcher.output(&instance).await, n.to_string());
        let counts = count_by_name(&watcher.history(&instance).await);
        assert_eq!((counts["ActivityScheduled"], counts["ActivityCompleted"]), (2, 2));
        assert_eq!(counts["SubOrchestrationCompleted"], 1);
    }
    let mut done = notes.sorted();
    assert_eq!(done.len(), 12 * 3);
    done.dedup();
    assert_eq!(done.len(), 12 * 3, "no activity ran twice");
    one.idle().await;
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_remaining_process_takes_over_the_work_of_one_that_leaves() {
    let activities = || {
        ActivityRegistry::builder()
            .register("Step", |_: ActivityContext, input: String| async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                Ok(input)
            })
            .build()
    };
    let orchestrations = || {
        OrchestrationRegistry::builder()
            .register("Job", |ctx: OrchestrationContext, input: String| async move {
                for n in 0..4 {
                    ctx.schedule_activity("Step", n.to_string()).await?;
                }
                Ok(input)
            })
            .build()
    };
    let account = LocalAccount::builder().with_partitions(4).build();
    let options = || RuntimeOptions {
        orchestrator_lock_timeout: Duration::from_secs(1),
        worker_lock_timeout: Duration::from_secs(1),
        ..RuntimeOptions::default()
    };
    let leaving = Process::on(&account, options(), activities(), orchestrations()).await;
    let staying = Process::on(&account, options(), activities(), orchestrations()).await;
    for n in 0..8 {
        leaving.start(&format!("job-{n}"), "Job", &n.to_string()).await;
    }
    leaving.output("job-0").await;

    leaving.stop().await;

    for n in 0..8 {
        let instance = format!("job-{n}");
        assert_eq!(staying.output(&instance).await, n.to_string());
        assert_eq!(staying.event_names(&instance).await.len(), 10);
    }
    staying.idle().await;
    staying.stop().await;
}
