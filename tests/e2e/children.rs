//! Orchestrations that call orchestrations.

use crate::scene::{census, Notebook, Scene};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, EventKind, OrchestrationContext,
};

fn echo() -> ActivityRegistry {
    ActivityRegistry::builder().register("Echo", |_: ActivityContext, input: String| async move { Ok(input) }).build()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_come_up_through_three_generations() {
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
    let scene = Scene::new(echo(), orchestrations).await;

    assert_eq!(scene.run("root", "Parent", "_").await, "_abc");

    let story = scene.story("root").await;
    let call = ["SubOrchestrationScheduled", "SubOrchestrationCompleted"];
    assert_eq!(story, [&["OrchestrationStarted"], &call[..], &["OrchestrationCompleted"]].concat());
    let mut tree = scene.client.get_instance_tree("root").await.unwrap().all_ids;
    tree.sort();
    assert_eq!(tree, ["root", "root::sub::2", "root::sub::2::sub::2"]);
    let grandchild = scene.client.get_instance_info("root::sub::2::sub::2").await.unwrap();
    assert_eq!(grandchild.parent_instance_id.as_deref(), Some("root::sub::2"));
    assert_eq!((grandchild.status.as_str(), grandchild.output.as_deref()), ("Completed", Some("_abc")));
    let started = &scene.history("root::sub::2").await[0].kind;
    let EventKind::OrchestrationStarted { parent_instance, parent_id, .. } = started else { panic!("{started:?}") };
    assert_eq!((parent_instance.as_deref(), *parent_id), (Some("root"), Some(2)));
    scene.quiet().await;
    scene.stop().await;
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
    let scene = Scene::new(echo(), orchestrations).await;

    assert_eq!(scene.run("parent", "Parent", "").await, "0123456789");

    let census = census(&scene.history("parent").await);
    assert_eq!((census["SubOrchestrationScheduled"], census["SubOrchestrationCompleted"]), (10, 10));
    for event in 2..12 {
        assert_eq!(scene.story(&format!("parent::sub::{event}")).await.len(), 4);
    }
    scene.quiet().await;
    scene.stop().await;
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
    let scene = Scene::new(echo(), orchestrations).await;

    assert_eq!(scene.run("careful", "Careful", "").await, "handled: not today");
    scene.start("careless", "Careless", "").await;
    assert_eq!(scene.failure("careless").await.display_message(), "not today");

    assert_eq!(scene.story("careful").await[1..3], ["SubOrchestrationScheduled", "SubOrchestrationFailed"]);
    let mut failed = scene.client.list_instances_by_status("Failed").await.unwrap();
    failed.sort();
    assert_eq!(failed, ["careful::sub::2", "careless", "careless::sub::2"]);
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn children_may_be_called_anything() {
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
    let scene = Scene::new(echo(), orchestrations).await;

    assert_eq!(scene.run("par/ent?#", "Parent", &list).await, list);

    for name in names {
        assert_eq!(scene.output(name).await, name);
        assert_eq!(scene.history(name).await.len(), 5);
        let value = scene.client.get_kv_value(name, &format!("key/{name}?")).await.unwrap();
        assert_eq!(value.as_deref(), Some(name));
    }
    let tree = scene.client.get_instance_tree("par/ent?#").await.unwrap();
    assert_eq!(tree.size(), names.len() + 1);
    scene.stop().await;
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
    let scene = Scene::new(echo(), orchestrations).await;

    assert_eq!(scene.run("parent", "Parent", "").await, "lift-off");

    assert_eq!(scene.story("parent").await.len(), 4);
    let child = "parent::sub::2";
    assert_eq!(scene.client.list_executions(child).await.unwrap(), [1, 2, 3, 4]);
    for execution in 1..=4 {
        assert_eq!(scene.history_of(child, execution).await.len(), 4);
    }
    assert_eq!(runs.lines(), ["lift-off"]);
    scene.stop().await;
}
