//! Management through the client.

use crate::fixture::process::{eventually, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, ClientError, InstanceFilter, OrchestrationContext, OrchestrationStatus, PruneOptions,
};

/// Orchestrations that complete, fail or never end, with a child, or in several executions.
async fn process() -> Process {
    let activities = ActivityRegistry::builder()
        .register("Echo", |_: ActivityContext, input: String| async move { Ok(input) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Good", |ctx: OrchestrationContext, input: String| async move {
            ctx.set_kv_value("key", "value");
            ctx.schedule_activity("Echo", input).await
        })
        .register("Bad", |_: OrchestrationContext, input: String| async move { Err::<String, _>(input) })
        .register("Waiting", |ctx: OrchestrationContext, _: String| async move { Ok(ctx.schedule_wait("Go on").await) })
        .register("Parent", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_sub_orchestration("Good", input).await
        })
        .register("Rounds", |ctx: OrchestrationContext, input: String| async move {
            let left: u32 = input.parse().map_err(|e| format!("{e}"))?;
            match left {
                0 => Ok("done".to_owned()),
                _ => ctx.continue_as_new((left - 1).to_string()).await,
            }
        })
        .build();
    Process::new(activities, orchestrations).await
}

async fn waiting(process: &Process, instance: &str) {
    process.start(instance, "Waiting", "").await;
    eventually("it waits", || async {
        process.client.read_execution_history(instance, 1).await.is_ok_and(|history| history.len() == 2)
    })
    .await;
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_are_listed_and_counted_by_status() {
    let process = process().await;
    assert!(process.client.has_management_capability());
    assert_eq!(process.client.list_all_instances().await.unwrap(), Vec::<String>::new());

    process.run("good", "Good", "x").await;
    process.start("bad", "Bad", "y").await;
    process.failure("bad").await;
    process.run("parent", "Parent", "z").await;
    process.run("rounds", "Rounds", "2").await;
    waiting(&process, "waiting").await;

    let all = sorted(process.client.list_all_instances().await.unwrap());
    assert_eq!(all, ["bad", "good", "parent", "parent::sub::2", "rounds", "waiting"]);
    let by = |status: &'static str| async { sorted(process.client.list_instances_by_status(status).await.unwrap()) };
    assert_eq!(by("Completed").await, ["good", "parent", "parent::sub::2", "rounds"]);
    assert_eq!(by("Failed").await, ["bad"]);
    assert_eq!(by("Running").await, ["waiting"]);
    process.idle().await;
    let metrics = process.client.get_system_metrics().await.unwrap();
    let counts = (metrics.total_instances, metrics.completed_instances, metrics.failed_instances);
    assert_eq!((counts, metrics.running_instances), ((6, 4, 1), 1));
    assert_eq!(metrics.total_executions, 8);
    let mut events = 0;
    for instance in all {
        for execution in process.client.list_executions(&instance).await.unwrap() {
            events += process.history_of(&instance, execution).await.len() as u64;
        }
    }
    assert_eq!(metrics.total_events, events);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_shows_its_orchestration_and_its_result() {
    let process = process().await;
    process.run("rounds", "Rounds", "1").await;
    process.run("good", "Good", "x").await;

    let info = process.client.get_instance_info("rounds").await.unwrap();
    assert_eq!((info.orchestration_name.as_str(), info.orchestration_version.as_str()), ("Rounds", "1.0.0"));
    assert_eq!((info.current_execution_id, info.status.as_str()), (2, "Completed"));
    assert_eq!((info.output.as_deref(), info.parent_instance_id.as_deref()), (Some("done"), None));
    assert!(info.created_at <= info.updated_at);
    let first = process.client.get_execution_info("rounds", 1).await.unwrap();
    let second = process.client.get_execution_info("rounds", 2).await.unwrap();
    assert_eq!((first.status.as_str(), first.event_count), ("ContinuedAsNew", 2));
    assert_eq!((second.status.as_str(), second.output.as_deref()), ("Completed", Some("done")));
    assert!(first.started_at <= second.started_at && second.started_at <= second.completed_at.unwrap());

    let stats = process.client.get_orchestration_stats("good").await.unwrap().unwrap();
    assert_eq!(stats.history_event_count, process.history("good").await.len() as u64);
    assert!(stats.history_size_bytes > 0);
    assert_eq!((stats.kv_user_key_count, stats.kv_total_value_bytes, stats.queue_pending_count), (1, 5, 0));

    assert!(process.client.get_instance_info("nobody").await.is_err());
    assert!(process.client.get_execution_info("rounds", 3).await.is_err());
    assert_eq!(process.client.get_orchestration_stats("nobody").await.unwrap(), None);
    assert_eq!(process.client.list_executions("nobody").await.unwrap(), Vec::<u64>::new());
    assert_eq!(process.client.get_orchestration_status("nobody").await.unwrap(), OrchestrationStatus::NotFound);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_instance_is_gone_with_its_children_and_its_name_is_free() {
    let process = process().await;
    process.run("parent", "Parent", "first life").await;
    process.run("bystander", "Good", "x").await;
    let child = "parent::sub::2";

    let refused = process.client.delete_instance(child, false).await;
    assert!(matches!(refused, Err(ClientError::CannotDeleteSubOrchestration { .. })), "{refused:?}");
    let refused = process.client.delete_instance("nobody", false).await;
    assert!(matches!(refused, Err(ClientError::InstanceNotFound { .. })), "{refused:?}");
    let deleted = process.client.delete_instance("parent", false).await.unwrap();

    assert_eq!((deleted.instances_deleted, deleted.executions_deleted), (2, 2));
    for instance in ["parent", child] {
        assert_eq!(process.client.get_orchestration_status(instance).await.unwrap(), OrchestrationStatus::NotFound);
        assert_eq!(process.client.get_kv_value(instance, "key").await.unwrap(), None);
        assert!(process.client.get_instance_info(instance).await.is_err());
    }
    assert_eq!(process.client.list_all_instances().await.unwrap(), ["bystander"]);
    assert_eq!(process.run("parent", "Parent", "second life").await, "second life");
    assert_eq!(process.event_names("parent").await.len(), 4);
    assert_eq!(process.client.get_system_metrics().await.unwrap().total_instances, 3);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_instance_is_deleted_only_with_force() {
    let process = process().await;
    waiting(&process, "waiting").await;

    let refused = process.client.delete_instance("waiting", false).await;
    assert!(matches!(refused, Err(ClientError::InstanceStillRunning { .. })), "{refused:?}");
    assert_eq!(process.client.get_instance_info("waiting").await.unwrap().status, "Running");
    assert_eq!(process.client.delete_instance("waiting", true).await.unwrap().instances_deleted, 1);

    assert_eq!(process.client.get_orchestration_status("waiting").await.unwrap(), OrchestrationStatus::NotFound);
    waiting(&process, "waiting").await;
    process.client.raise_event("waiting", "Go on", "again").await.unwrap();
    assert_eq!(process.output("waiting").await, "again");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_instances_are_deleted_in_bulk_and_running_ones_are_not() {
    let process = process().await;
    for n in 0..4 {
        process.run(&format!("good-{n}"), "Good", "x").await;
    }
    process.run("parent", "Parent", "x").await;
    waiting(&process, "waiting").await;
    let some = vec!["good-0".to_owned(), "good-1".to_owned(), "waiting".to_owned()];

    let filter = InstanceFilter { instance_ids: Some(some), completed_before: None, limit: None };
    assert_eq!(process.client.delete_instance_bulk(filter).await.unwrap().instances_deleted, 2);
    let left = sorted(process.client.list_all_instances().await.unwrap());
    assert_eq!(left, ["good-2", "good-3", "parent", "parent::sub::2", "waiting"]);
    let long_ago = InstanceFilter { instance_ids: None, completed_before: Some(1), limit: None };
    assert_eq!(process.client.delete_instance_bulk(long_ago).await.unwrap().instances_deleted, 0);
    let any = InstanceFilter { instance_ids: None, completed_before: None, limit: None };
    assert_eq!(process.client.delete_instance_bulk(any).await.unwrap().instances_deleted, 4);

    assert_eq!(process.client.list_all_instances().await.unwrap(), ["waiting"]);
    process.client.raise_event("waiting", "Go on", "still here").await.unwrap();
    assert_eq!(process.output("waiting").await, "still here");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_executions_are_pruned_and_the_last_stays() {
    let process = process().await;
    for instance in ["one", "two"] {
        process.run(instance, "Rounds", "5").await;
    }

    let keep = |last| PruneOptions { keep_last: Some(last), completed_before: None };
    let pruned = process.client.prune_executions("one", keep(2)).await.unwrap();
    assert_eq!((pruned.instances_processed, pruned.executions_deleted), (1, 4));
    assert_eq!(process.client.list_executions("one").await.unwrap(), [5, 6]);
    assert_eq!(process.client.list_executions("two").await.unwrap(), [1, 2, 3, 4, 5, 6]);
    let any = InstanceFilter { instance_ids: None, completed_before: None, limit: None };
    let pruned = process.client.prune_executions_bulk(any, keep(1)).await.unwrap();
    assert_eq!((pruned.instances_processed, pruned.executions_deleted), (2, 6));

    for instance in ["one", "two"] {
        assert_eq!(process.client.list_executions(instance).await.unwrap(), [6]);
        assert_eq!(process.output(instance).await, "done");
        assert_eq!(process.history_of(instance, 6).await.len(), 2);
        assert_eq!(process.client.get_instance_info(instance).await.unwrap().current_execution_id, 6);
    }
    assert_eq!(process.client.get_system_metrics().await.unwrap().total_executions, 2);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_depths_count_waiting_items() {
    let process = process().await;
    process.idle().await;
    // No worker runs these: the runtime is shut down, and the client is not.
    process.runtime.clone().shutdown(None).await;
    for n in 0..3 {
        process.start(&format!("job-{n}"), "Good", "x").await;
    }

    let depths = process.client.get_queue_depths().await.unwrap();

    assert_eq!((depths.orchestrator_queue, depths.worker_queue, depths.timer_queue), (3, 0, 0));
    assert_eq!(process.client.list_all_instances().await.unwrap(), Vec::<String>::new(), "not before their first turn");
    process.stop().await;
}
