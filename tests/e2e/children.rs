//! Sub-orchestrations.

use crate::fixture::process::{count_by_name, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, EventKind, OrchestrationContext,
};

fn echo() -> ActivityRegistry {
    ActivityRegistry::builder().register("Echo", |_: ActivityContext, input: String| async move { Ok(input) }).build()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_are_returned_through_three_generations() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Grandchild", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_activity("Echo", format!("{input}c")).await
        })
        .register("Child", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_sub_orchestration("Grandchild", format!("{input}b")).await
        })
        .register("Parent", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_sub_orchestration("Child", format!("{input}a")).await
        })
        .build();
    let process = Process::new(echo(), orchestrations).await;

    assert_eq!(process.run("root", "Parent", "_").await, "_abc");

    let names = process.event_names("root").await;
    let call = ["SubOrchestrationScheduled", "SubOrchestrationCompleted"];
    assert_eq!(names, [&["OrchestrationStarted"], &call[..], &["OrchestrationCompleted"]].concat());
    let mut tree = process.client.get_instance_tree("root").await.unwrap().all_ids;
    tree.sort();
    assert_eq!(tree, ["root", "root::sub::2", "root::sub::2::sub::2"]);
    let grandchild = process.client.get_instance_info("root::sub::2::sub::2").await.unwrap();
    assert_eq!(grandchild.parent_instance_id.as_deref(), Some("root::sub::2"));
    assert_eq!((grandchild.status.as_str(), grandchild.output.as_deref()), ("Completed", Some("_abc")));
    let started = &process.history("root::sub::2").await[0].kind;
    let EventKind::OrchestrationStarted { parent_instance, parent_id, .. } = started else { panic!("{started:?}") };
    assert_eq!((parent_instance.as_deref(), *parent_id), (Some("root"), Some(2)));
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_children_at_once_answer_once_each() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Child", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_activity("Echo", input).await
        })
        .register("Parent", |ctx: OrchestrationContext, _: String| async move {
            let all = (0..10).map(|n| ctx.schedule_sub_orchestration("Child", n.to_string())).collect();
            let all: Result<Vec<String>, String> = ctx.join(all).await.into_iter().collect();
            Ok(all?.concat())
        })
        .build();
    let process = Process::new(echo(), orchestrations).await;

    assert_eq!(process.run("parent", "Parent", "").await, "0123456789");

    let counts = count_by_name(&process.history("parent").await);
    assert_eq!((counts["SubOrchestrationScheduled"], counts["SubOrchestrationCompleted"]), (10, 10));
    for event in 2..12 {
        assert_eq!(process.event_names(&format!("parent::sub::{event}")).await.len(), 4);
    }
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_fails_is_an_error_that_its_parent_can_handle() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Child", |_: OrchestrationContext, _: String| async move { Err::<String, _>("not today".to_owned()) })
        .register("Careful", |ctx: OrchestrationContext, _: String| async move {
            match ctx.schedule_sub_orchestration("Child", "").await {
                Ok(output) => Ok(output),
                Err(error) => Ok(format!("handled: {error}")),
            }
        })
        .register("Careless", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_sub_orchestration("Child", "").await
        })
        .build();
    let process = Process::new(echo(), orchestrations).await;

    assert_eq!(process.run("careful", "Careful", "").await, "handled: not today");
    process.start("careless", "Careless", "").await;
    assert_eq!(process.failure("careless").await.display_message(), "not today");

    assert_eq!(process.event_names("careful").await[1..3], ["SubOrchestrationScheduled", "SubOrchestrationFailed"]);
    let mut failed = process.client.list_instances_by_status("Failed").await.unwrap();
    failed.sort();
    assert_eq!(failed, ["careful::sub::2", "careless", "careless::sub::2"]);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn children_may_have_any_name() {
    let names = ["a/b", "back\\slash", "what?", "#1", "ünï\u{1F600}", "sp ace", "100%25", "dot.", &"long".repeat(100)];
    let list = serde_json::to_string(&names).unwrap();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Child", |ctx: OrchestrationContext, input: String| async move {
            ctx.set_kv_value(format!("key/{input}?"), ctx.instance_id());
            ctx.schedule_activity("Echo", input).await
        })
        .register_typed("Parent", |ctx: OrchestrationContext, names: Vec<String>| async move {
            let call = |name: &String| ctx.schedule_sub_orchestration_with_id("Child", name.as_str(), name.as_str());
            let all: Result<Vec<String>, String> =
                ctx.join(names.iter().map(call).collect()).await.into_iter().collect();
            all
        })
        .build();
    let process = Process::new(echo(), orchestrations).await;

    assert_eq!(process.run("par/ent?#", "Parent", &list).await, list);

    for name in names {
        assert_eq!(process.output(name).await, name);
        assert_eq!(process.history(name).await.len(), 5);
        let value = process.client.get_kv_value(name, &format!("key/{name}?")).await.unwrap();
        assert_eq!(value.as_deref(), Some(name));
    }
    let tree = process.client.get_instance_tree("par/ent?#").await.unwrap();
    assert_eq!(tree.size(), names.len() + 1);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_continues_as_new_answers_its_parent_once() {
    let runs = Notebook::default();
    let ran = runs.clone();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Countdown", move |ctx: OrchestrationContext, input: String| {
            let ran = ran.clone();
            async move {
                let left: u32 = input.parse().map_err(|e| format!("{e}"))?;
                ctx.schedule_activity("Echo", input).await?;
                if left == 0 {
                    ran.write("lift-off");
                    return Ok("lift-off".to_owned());
                }
                ctx.continue_as_new((left - 1).to_string()).await
            }
        })
        .register("Parent", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_sub_orchestration("Countdown", "3").await
        })
        .build();
    let process = Process::new(echo(), orchestrations).await;

    assert_eq!(process.run("parent", "Parent", "").await, "lift-off");

    assert_eq!(process.event_names("parent").await.len(), 4);
    let child = "parent::sub::2";
    assert_eq!(process.client.list_executions(child).await.unwrap(), [1, 2, 3, 4]);
    for execution in 1..=4 {
        assert_eq!(process.history_of(child, execution).await.len(), 4);
    }
    assert_eq!(runs.lines(), ["lift-off"]);
    process.stop().await;
}
