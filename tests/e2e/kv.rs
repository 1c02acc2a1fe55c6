//! Key-value pairs of an instance.

use crate::fixture::process::{count_by_name, eventually, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, OrchestrationContext,
};
use std::collections::HashMap;

fn echo() -> ActivityRegistry {
    ActivityRegistry::builder().register("Echo", |_: ActivityContext, input: String| async move { Ok(input) }).build()
}

fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_are_set_read_and_cleared_and_clients_see_each_change() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Keeper", |ctx: OrchestrationContext, _: String| async move {
            ctx.set_kv_value("colour", "red");
            ctx.set_kv_value("size/width?", "7");
            ctx.set_kv_value("colour", "blue");
            let mine = ctx.get_kv_value("colour");
            ctx.schedule_wait("Clear one").await;
            ctx.clear_kv_value("colour");
            assert_eq!(ctx.get_kv_value("colour"), None);
            ctx.schedule_wait("Clear all").await;
            let left = ctx.get_kv_all_keys().join(",");
            ctx.set_kv_value("more", "to clear");
            ctx.clear_all_kv_values();
            ctx.schedule_wait("Set again").await;
            ctx.set_kv_value_typed("done", &(true, 3));
            Ok(format!("{mine:?} {left} {}", ctx.get_kv_length()))
        })
        .build();
    let process = Process::new(echo(), orchestrations).await;
    process.start("keeper", "Keeper", "").await;
    let values = || async { process.client.get_kv_all_values("keeper").await.unwrap() };

    assert_eq!(process.client.wait_for_kv_value("keeper", "colour", crate::fixture::PATIENCE).await.unwrap(), "blue");
    assert_eq!(values().await, map(&[("colour", "blue"), ("size/width?", "7")]));
    process.client.raise_event("keeper", "Clear one", "").await.unwrap();
    eventually("one is cleared", || async { values().await == map(&[("size/width?", "7")]) }).await;
    process.client.raise_event("keeper", "Clear all", "").await.unwrap();
    eventually("all are cleared", || async { values().await.is_empty() }).await;
    assert_eq!(process.client.get_kv_value("keeper", "size/width?").await.unwrap(), None);
    process.client.raise_event("keeper", "Set again", "").await.unwrap();

    assert_eq!(process.output("keeper").await, "Some(\"blue\") size/width? 1");
    let done: Option<(bool, u8)> = process.client.get_kv_value_typed("keeper", "done").await.unwrap();
    assert_eq!(done, Some((true, 3)));
    assert_eq!(process.client.get_kv_value("nobody", "done").await.unwrap(), None);
    let counts = count_by_name(&process.history("keeper").await);
    assert_eq!((counts["KeyValueSet"], counts["KeyValueCleared"], counts["KeyValuesCleared"]), (5, 1, 1));
    let stats = process.client.get_orchestration_stats("keeper").await.unwrap().unwrap();
    assert_eq!(stats.kv_user_key_count, 1);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_are_passed_on_to_later_executions() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Counter", |ctx: OrchestrationContext, input: String| async move {
            let round: u32 = input.parse().map_err(|e| format!("{e}"))?;
            let before = ctx.get_kv_value_typed::<u32>("count")?.unwrap_or(0);
            if before != round {
                return Err(format!("round {round} found {before}"));
            }
            if round == 2 {
                ctx.clear_kv_value("round 0");
            }
            ctx.set_kv_value_typed("count", &(before + 1));
            ctx.set_kv_value(format!("round {round}"), "done");
            // This is another turn: the writes of this execution must not be counted twice.
            ctx.schedule_activity("Echo", "").await?;
            if round < 4 {
                return ctx.continue_as_new((round + 1).to_string()).await;
            }
            let mut keys = ctx.get_kv_all_keys();
            keys.sort();
            Ok(keys.join(","))
        })
        .build();
    let process = Process::new(echo(), orchestrations).await;

    assert_eq!(process.run("counter", "Counter", "0").await, "count,round 1,round 2,round 3,round 4");

    let expected = [("count", "5"), ("round 1", "done"), ("round 2", "done"), ("round 3", "done"), ("round 4", "done")];
    assert_eq!(process.client.get_kv_all_values("counter").await.unwrap(), map(&expected));
    for execution in 1..=5 {
        assert_eq!(count_by_name(&process.history_of("counter", execution).await)["KeyValueSet"], 2);
    }
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_orchestration_reads_the_values_of_another_instance() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Source", |ctx: OrchestrationContext, input: String| async move {
            ctx.set_kv_value("answer", input);
            Ok(ctx.schedule_wait("Stop").await)
        })
        .register("Reader", |ctx: OrchestrationContext, _: String| async move {
            let there = ctx.get_kv_value_from_instance("source", "answer").await?;
            let not_there = ctx.get_kv_value_from_instance("source", "question").await?;
            Ok(format!("{there:?} {not_there:?}"))
        })
        .build();
    let process = Process::new(echo(), orchestrations).await;
    process.start("source", "Source", "42").await;
    process.client.wait_for_kv_value("source", "answer", crate::fixture::PATIENCE).await.unwrap();

    assert_eq!(process.run("reader", "Reader", "").await, "Some(\"42\") None");

    process.client.raise_event("source", "Stop", "").await.unwrap();
    process.output("source").await;
    assert_eq!(process.client.get_kv_value("source", "answer").await.unwrap().as_deref(), Some("42"));
    process.history("reader").await;
    process.stop().await;
}
