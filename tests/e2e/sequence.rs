//! Sequences and fan-outs.

use crate::fixture::process::{count_by_name, Latch, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, EventKind, OrchestrationContext,
};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, time::Duration};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_run_in_order_and_each_once() {
    let notes = Notebook::default();
    let done = notes.clone();
    let activities = ActivityRegistry::builder()
        .register("Step", move |_: ActivityContext, input: String| {
            done.write(input.clone());
            async move { Ok(format!("{input}+")) }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Chain", |ctx: OrchestrationContext, input: String| async move {
            let first = ctx.schedule_activity("Step", input).await?;
            let second = ctx.schedule_activity("Step", first).await?;
            ctx.schedule_activity("Step", second).await
        })
        .build();
    let process = Process::new(activities, orchestrations).await;

    assert_eq!(process.run("chain", "Chain", "x").await, "x+++");

    assert_eq!(notes.lines(), ["x", "x+", "x++"]);
    let step = ["ActivityScheduled", "ActivityCompleted"];
    let steps = [&["OrchestrationStarted"], &step[..], &step, &step, &["OrchestrationCompleted"]].concat();
    assert_eq!(process.event_names("chain").await, steps);
    process.idle().await;
    process.stop().await;
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Basket {
    customer: String,
    pence: Vec<u64>,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn typed_values_are_preserved() {
    let activities = ActivityRegistry::builder()
        .register_typed("Sum", |_: ActivityContext, basket: Basket| async move {
            Ok::<_, String>((basket.customer, basket.pence.iter().sum::<u64>()))
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register_typed("Checkout", |ctx: OrchestrationContext, basket: Basket| async move {
            let (customer, sum): (String, u64) = ctx.schedule_activity_typed("Sum", &basket).await?;
            Ok::<_, String>(Basket { customer, pence: vec![sum] })
        })
        .build();
    let process = Process::new(activities, orchestrations).await;
    // Characters that are known to cause trouble in JSON, databases and JavaScript engines.
    let customer = "Zoë \u{1F6D2} \"quoted\" \\ / \u{0} \u{2028} end".to_owned();
    let basket = Basket { customer: customer.clone(), pence: vec![1, 9_007_199_254_740_993] };

    process.client.start_orchestration_typed("typed", "Checkout", basket).await.unwrap();
    let output =
        process.client.wait_for_orchestration_typed::<Basket>("typed", crate::fixture::PATIENCE).await.unwrap();

    assert_eq!(output, Ok(Basket { customer, pence: vec![9_007_199_254_740_994] }));
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fan_out_is_joined_in_the_order_in_which_it_was_scheduled() {
    let gate = Latch::closed();
    let first = gate.clone();
    let activities = ActivityRegistry::builder()
        .register("Square", move |_: ActivityContext, input: String| {
            let gate = first.clone();
            async move {
                // The first activity does not end before the last one has begun.
                match input.as_str() {
                    "0" => gate.pass().await,
                    "9" => gate.open(),
                    _ => {}
                }
                let n: u64 = input.parse().unwrap();
                Ok((n * n).to_string())
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Squares", |ctx: OrchestrationContext, _: String| async move {
            let squares = (0..10).map(|n| ctx.schedule_activity("Square", n.to_string())).collect();
            let squares: Result<Vec<String>, String> = ctx.join(squares).await.into_iter().collect();
            Ok(squares?.join(","))
        })
        .build();
    let process = Process::new(activities, orchestrations).await;

    assert_eq!(process.run("squares", "Squares", "").await, "0,1,4,9,16,25,36,49,64,81");

    let history = process.history("squares").await;
    let counts = count_by_name(&history);
    assert_eq!((counts["ActivityScheduled"], counts["ActivityCompleted"]), (10, 10));
    let first = history.iter().find(|e| matches!(e.kind, EventKind::ActivityCompleted { .. })).unwrap();
    assert_ne!(first.source_event_id, Some(2), "the first to be scheduled is not the first to end");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fan_out_of_a_hundred_does_each_once() {
    let notes = Notebook::default();
    let done = notes.clone();
    let activities = ActivityRegistry::builder()
        .register("Work", move |_: ActivityContext, input: String| {
            done.write(input.clone());
            async move { Ok(input) }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Wide", |ctx: OrchestrationContext, _: String| async move {
            let all = (0..100).map(|n| ctx.schedule_activity("Work", format!("{n:03}"))).collect();
            let all: Result<Vec<String>, String> = ctx.join(all).await.into_iter().collect();
            Ok(all?.join(" "))
        })
        .build();
    let process = Process::new(activities, orchestrations).await;
    let all: Vec<String> = (0..100).map(|n| format!("{n:03}")).collect();

    assert_eq!(process.run("wide", "Wide", "").await, all.join(" "));

    assert_eq!(notes.sorted(), all);
    let counts = count_by_name(&process.history("wide").await);
    assert_eq!((counts["ActivityScheduled"], counts["ActivityCompleted"]), (100, 100));
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_larger_than_a_batch_is_committed_as_a_whole() {
    let activities = ActivityRegistry::builder()
        .register("Length", |_: ActivityContext, input: String| async move { Ok(input.len().to_string()) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Bulky", |ctx: OrchestrationContext, _: String| async move {
            // The inputs exceed 2 MB, which is the limit of a batch.
            let all = (0..12).map(|_| ctx.schedule_activity("Length", "x".repeat(180_000))).collect();
            let all: Result<Vec<String>, String> = ctx.join(all).await.into_iter().collect();
            Ok(all?.iter().map(|n| n.parse::<u64>().unwrap()).sum::<u64>().to_string())
        })
        .build();
    let process = Process::new(activities, orchestrations).await;

    assert_eq!(process.run("bulky", "Bulky", "").await, (12 * 180_000).to_string());

    let counts = count_by_name(&process.history("bulky").await);
    assert_eq!((counts["ActivityScheduled"], counts["ActivityCompleted"]), (12, 12));
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_of_a_fan_out_stay_apart_from_its_successes() {
    let activities = ActivityRegistry::builder()
        .register("Even", |_: ActivityContext, input: String| async move {
            let n: u32 = input.parse().map_err(|e| format!("{input}: {e}"))?;
            if n.is_multiple_of(2) {
                Ok(input)
            } else {
                Err(format!("{input} is odd"))
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Sort", |ctx: OrchestrationContext, _: String| async move {
            let all = (0..6).map(|n| ctx.schedule_activity("Even", n.to_string())).collect();
            let (even, odd): (Vec<_>, Vec<_>) = ctx.join(all).await.into_iter().partition(Result::is_ok);
            let even: Vec<String> = even.into_iter().flatten().collect();
            let odd: Vec<String> = odd.into_iter().filter_map(Result::err).collect();
            Ok(format!("{}; {}", even.join(","), odd.join(",")))
        })
        .build();
    let process = Process::new(activities, orchestrations).await;

    assert_eq!(process.run("sort", "Sort", "").await, "0,2,4; 1 is odd,3 is odd,5 is odd");

    let counts = count_by_name(&process.history("sort").await);
    assert_eq!((counts["ActivityCompleted"], counts["ActivityFailed"]), (3, 3));
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_saga_compensates_the_steps_before_the_one_that_failed() {
    let notes = Notebook::default();
    let (reserved, released) = (notes.clone(), notes.clone());
    let activities = ActivityRegistry::builder()
        .register("Reserve", move |_: ActivityContext, input: String| {
            reserved.write(format!("reserve {input}"));
            async move { Ok(input) }
        })
        .register("Charge", |_: ActivityContext, _: String| async move { Err::<String, _>("no funds".to_owned()) })
        .register("Release", move |_: ActivityContext, input: String| {
            released.write(format!("release {input}"));
            async move { Ok(input) }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Order", |ctx: OrchestrationContext, input: String| async move {
            let reservation = ctx.schedule_activity("Reserve", input).await?;
            match ctx.schedule_activity("Charge", reservation.as_str()).await {
                Ok(paid) => Ok(paid),
                Err(error) => {
                    ctx.schedule_activity("Release", reservation).await?;
                    Err(format!("not ordered: {error}"))
                }
            }
        })
        .build();
    let process = Process::new(activities, orchestrations).await;

    process.start("order", "Order", "seat 7").await;
    let failure = process.failure("order").await;

    assert_eq!(failure.display_message(), "not ordered: no funds");
    assert_eq!(failure.category(), "application");
    assert_eq!(notes.lines(), ["reserve seat 7", "release seat 7"]);
    let names = process.event_names("order").await;
    assert_eq!(names[3..5], ["ActivityScheduled", "ActivityFailed"]);
    assert_eq!(names.last().unwrap(), "OrchestrationFailed");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guid_and_a_time_stay_the_same_in_every_replay() {
    let seen = Notebook::default();
    let said = seen.clone();
    let activities = ActivityRegistry::builder()
        .register("Step", |_: ActivityContext, input: String| async move { Ok(input) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Calls", move |ctx: OrchestrationContext, _: String| {
            let said = said.clone();
            async move {
                let (guid, other) = (ctx.new_guid().await?, ctx.new_guid().await?);
                let now = ctx.utc_now().await?;
                said.write(format!("{guid} {other} {now:?}"));
                ctx.schedule_activity("Step", "").await?;
                ctx.schedule_activity("Step", "").await?;
                Ok(if guid == other { "same" } else { "different" }.to_owned())
            }
        })
        .build();
    let process = Process::new(activities, orchestrations).await;

    assert_eq!(process.run("calls", "Calls", "").await, "different");

    let seen = seen.lines();
    assert!(seen.len() >= 3, "the orchestration was replayed: {seen:?}");
    assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), 1, "{seen:?}");
    process.history("calls").await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timer_fires_once_and_not_before_its_time() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Nap", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_timer(Duration::from_millis(300)).await;
            Ok("awake".to_owned())
        })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;

    assert_eq!(process.run("nap", "Nap", "").await, "awake");

    let history = process.history("nap").await;
    let names = ["OrchestrationStarted", "TimerCreated", "TimerFired", "OrchestrationCompleted"];
    assert_eq!(crate::fixture::process::names(&history), names);
    let EventKind::TimerCreated { fire_at_ms } = history[1].kind else { panic!("{history:?}") };
    // The timer is set before its event is made.
    assert!(fire_at_ms >= history[0].timestamp_ms + 299, "{history:?}");
    assert!(history[2].timestamp_ms >= fire_at_ms, "{history:?}");
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn timers_of_one_turn_fire_each_at_its_time() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Naps", |ctx: OrchestrationContext, _: String| async move {
            let nap = |ms: u64| ctx.schedule_timer(Duration::from_millis(ms));
            ctx.join(vec![nap(300), nap(100), nap(200), nap(0)]).await;
            Ok(String::new())
        })
        .build();
    let process = Process::new(ActivityRegistry::builder().build(), orchestrations).await;

    process.run("naps", "Naps", "").await;

    let history = process.history("naps").await;
    let mut fired = Vec::new();
    for event in &history {
        if let EventKind::TimerFired { fire_at_ms } = event.kind {
            assert!(event.timestamp_ms >= fire_at_ms, "too early: {history:?}");
            fired.extend(event.source_event_id);
        }
    }
    fired.sort_unstable();
    assert_eq!(fired, [2, 3, 4, 5]);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_detached_orchestration_runs_on_its_own() {
    let gate = Latch::closed();
    let held = gate.clone();
    let activities = ActivityRegistry::builder()
        .register("Send", move |_: ActivityContext, input: String| {
            let gate = held.clone();
            async move {
                gate.pass().await;
                Ok(format!("sent {input}"))
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Mail", |ctx: OrchestrationContext, input: String| async move {
            ctx.schedule_activity("Send", input).await
        })
        .register("Sale", |ctx: OrchestrationContext, _: String| async move {
            for n in 0..3 {
                ctx.schedule_orchestration("Mail", format!("mail/{n}?#"), n.to_string());
            }
            Ok("sold".to_owned())
        })
        .build();
    let process = Process::new(activities, orchestrations).await;

    assert_eq!(process.run("sale", "Sale", "").await, "sold");
    let names = process.event_names("sale").await;
    let chained = "OrchestrationChained";
    assert_eq!(names, ["OrchestrationStarted", chained, chained, chained, "OrchestrationCompleted"]);
    gate.open();

    for n in 0..3 {
        let mail = format!("mail/{n}?#");
        assert_eq!(process.output(&mail).await, format!("sent {n}"));
        assert_eq!(process.event_names(&mail).await.len(), 4);
        assert_eq!(process.client.get_instance_info(&mail).await.unwrap().parent_instance_id, None);
    }
    assert_eq!(process.event_names("sale").await.len(), 5, "nothing comes back to the starter");
    process.stop().await;
}
