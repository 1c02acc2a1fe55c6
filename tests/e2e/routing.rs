//! Routing of activities by tags and sessions.

use crate::fixture::process::{Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, EventKind, OrchestrationContext, RuntimeOptions, TagFilter,
};
use duroxide_cosmos_emulator::LocalAccount;
use std::time::Duration;

/// Activities that record which process ran them.
fn activities(process: &'static str, notes: &Notebook) -> ActivityRegistry {
    let notes = notes.clone();
    ActivityRegistry::builder()
        .register("Where", move |ctx: ActivityContext, input: String| {
            notes.write(format!("{input} {process}"));
            let tag = ctx.tag().unwrap_or("none").to_owned();
            async move { Ok(format!("{process}/{tag}")) }
        })
        .build()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_runs_where_its_tag_is_served() {
    let orchestrations = || {
        OrchestrationRegistry::builder()
            .register("Render", |ctx: OrchestrationContext, _: String| async move {
                let plain = (0..3).map(|_| ctx.schedule_activity("Where", "plain"));
                let gpu = (0..3).map(|_| ctx.schedule_activity("Where", "render").with_tag("gpu"));
                let all: Result<Vec<String>, String> = ctx.join(plain.chain(gpu).collect()).await.into_iter().collect();
                Ok(all?.join(" "))
            })
            .build()
    };
    let notes = Notebook::default();
    let account = LocalAccount::builder().with_partitions(4).build();
    let plain = RuntimeOptions { worker_tag_filter: TagFilter::DefaultOnly, ..RuntimeOptions::default() };
    let gpu = RuntimeOptions { worker_tag_filter: TagFilter::tags(["gpu"]), ..RuntimeOptions::default() };
    let cpu = Process::on(&account, plain, activities("cpu", &notes), orchestrations()).await;
    let gpu = Process::on(&account, gpu, activities("gpu", &notes), orchestrations()).await;

    let output = cpu.run("render", "Render", "").await;

    assert_eq!(output, "cpu/none cpu/none cpu/none gpu/gpu gpu/gpu gpu/gpu");
    let ran = [["plain cpu"; 3], ["render gpu"; 3]].concat();
    assert_eq!(notes.sorted(), ran);
    let history = gpu.history("render").await;
    let tagged =
        |e: &&duroxide::Event| matches!(&e.kind, EventKind::ActivityScheduled { tag: Some(t), .. } if t == "gpu");
    assert_eq!(history.iter().filter(tagged).count(), 3);
    cpu.stop().await;
    gpu.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_waits_for_a_worker_that_serves_its_tag() {
    let orchestrations = || {
        OrchestrationRegistry::builder()
            .register("Render", |ctx: OrchestrationContext, _: String| async move {
                ctx.schedule_activity("Where", "render").with_tag("gpu").await
            })
            .register("Plain", |ctx: OrchestrationContext, _: String| async move {
                ctx.schedule_activity("Where", "plain").await
            })
            .build()
    };
    let notes = Notebook::default();
    let cpu = Process::new(activities("cpu", &notes), orchestrations()).await;
    cpu.start("render", "Render", "").await;

    // Activities with an unserved tag do not delay the others.
    for n in 0..5 {
        assert_eq!(cpu.run(&format!("plain-{n}"), "Plain", "").await, "cpu/none");
    }
    assert_eq!(cpu.client.get_queue_depths().await.unwrap().worker_queue, 1);
    let options = RuntimeOptions { worker_tag_filter: TagFilter::default_and(["gpu"]), ..RuntimeOptions::default() };
    let gpu = Process::on(&cpu.account, options, activities("gpu", &notes), orchestrations()).await;

    assert_eq!(cpu.output("render").await, "gpu/gpu");
    assert_eq!(cpu.event_names("render").await.len(), 4);
    cpu.stop().await;
    gpu.stop().await;
}

/// A process whose workers share a session owner.
fn node(name: &str) -> RuntimeOptions {
    RuntimeOptions { worker_node_id: Some(name.to_owned()), ..RuntimeOptions::default() }
}

/// Two activities at a time on one session, several times.
async fn conversation(ctx: OrchestrationContext, input: String) -> Result<String, String> {
    let mut nodes = Vec::new();
    for turn in 0..3 {
        let say = |n: u32| ctx.schedule_activity_on_session("Where", format!("{input} {turn}.{n}"), input.as_str());
        for node in ctx.join(vec![say(0), say(1)]).await {
            nodes.push(node?);
        }
    }
    nodes.dedup();
    Ok(nodes.join(" "))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_stays_with_the_process_that_took_it() {
    let notes = Notebook::default();
    let orchestrations = || OrchestrationRegistry::builder().register("Talk", conversation).build();
    let account = LocalAccount::builder().with_partitions(4).build();
    let one = Process::on(&account, node("one"), activities("one", &notes), orchestrations()).await;
    let two = Process::on(&account, node("two"), activities("two", &notes), orchestrations()).await;

    // Three instances share a session, three have one of their own.
    let talks = [("a", "shared"), ("b", "shared"), ("c", "shared"), ("d", "d/?#"), ("e", "e"), ("f", "f")];
    for (instance, session) in talks {
        let process = if instance < "d" { &one } else { &two };
        process.start(instance, "Talk", session).await;
    }

    let mut shared = Vec::new();
    for (instance, session) in talks {
        let output = one.output(instance).await;
        assert!(["one/none", "two/none"].contains(&output.as_str()), "{session} moved: {output}");
        if session == "shared" {
            shared.push(output);
        }
        let history = one.history(instance).await;
        assert_eq!(history.len(), 2 + 2 * 6);
        assert!(matches!(&history[1].kind, EventKind::ActivityScheduled { session_id: Some(s), .. } if s == session));
    }
    shared.dedup();
    assert_eq!(shared.len(), 1, "one owner for all instances");
    assert_eq!(notes.lines().len(), 6 * 6);
    one.stop().await;
    two.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_moves_when_its_owner_is_gone() {
    let notes = Notebook::default();
    let orchestrations = || {
        OrchestrationRegistry::builder()
            .register("Talk", |ctx: OrchestrationContext, _: String| async move {
                let first = ctx.schedule_activity_on_session("Where", "first", "session").await?;
                ctx.schedule_wait("Go on").await;
                let second = ctx.schedule_activity_on_session("Where", "second", "session").await?;
                Ok(format!("{first} {second}"))
            })
            .build()
    };
    // The owner's lock outlives it by two seconds at most.
    let options = RuntimeOptions { session_lock_timeout: Duration::from_secs(2), ..node("one") };
    let one = Process::with(options, activities("one", &notes), orchestrations()).await;
    one.start("talk", "Talk", "").await;
    one.recorded("talk", 1, "ExternalSubscribed").await;
    let account = one.stop().await;

    let two = Process::on(&account, node("two"), activities("two", &notes), orchestrations()).await;
    two.client.raise_event("talk", "Go on", "").await.unwrap();

    assert_eq!(two.output("talk").await, "one/none two/none");
    assert_eq!(notes.lines(), ["first one", "second two"]);
    two.history("talk").await;
    two.stop().await;
}
