//! External events and queues.

use crate::fixture::process::{count_by_name, Latch, Notebook, Process};
use duroxide::{
    runtime::{registry::ActivityRegistry, OrchestrationRegistry},
    ActivityContext, Either2, EventKind, OrchestrationContext,
};
use std::time::Duration;

fn no_activities() -> ActivityRegistry {
    ActivityRegistry::builder().build()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_is_raised_after_the_wait_is_delivered_once() {
    let orchestrations = OrchestrationRegistry::builder()
        .register(
            "Approval",
            |ctx: OrchestrationContext, _: String| async move { Ok(ctx.schedule_wait("Approved").await) },
        )
        .build();
    let process = Process::new(no_activities(), orchestrations).await;
    process.start("approval", "Approval", "").await;
    process.recorded("approval", 1, "ExternalSubscribed").await;

    process.client.raise_event("approval", "Other", "no").await.unwrap();
    process.client.raise_event("approval", "Approved", "by Ann").await.unwrap();

    assert_eq!(process.output("approval").await, "by Ann");
    let history = process.history("approval").await;
    let data: Vec<&str> = history
        .iter()
        .filter_map(|e| match &e.kind {
            EventKind::ExternalEvent { data, .. } => Some(data.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(data, ["no", "by Ann"]);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_is_raised_before_the_wait_is_recorded_and_does_not_complete_the_wait() {
    let (gate, notes) = (Latch::closed(), Notebook::default());
    let (held, begun) = (gate.clone(), notes.clone());
    let activities = ActivityRegistry::builder()
        .register("Prepare", move |_: ActivityContext, input: String| {
            let gate = held.clone();
            begun.write("preparing");
            async move {
                gate.pass().await;
                Ok(input)
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Approval", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_activity("Prepare", "").await?;
            Ok(ctx.schedule_wait("Approved").await)
        })
        .build();
    let process = Process::new(activities, orchestrations).await;
    process.start("approval", "Approval", "").await;
    notes.has("preparing").await;

    process.client.raise_event("approval", "Approved", "too early").await.unwrap();
    process.recorded("approval", 1, "ExternalEvent").await;
    gate.open();
    process.recorded("approval", 1, "ExternalSubscribed").await;
    process.client.raise_event("approval", "Approved", "in time").await.unwrap();

    assert_eq!(process.output("approval").await, "in time");
    let counts = count_by_name(&process.history("approval").await);
    assert_eq!((counts["ExternalEvent"], counts["ExternalSubscribed"]), (2, 1));
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_approval_in_time_beats_the_timer_and_a_late_one_does_not() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Approval", |ctx: OrchestrationContext, millis: String| async move {
            let timeout = ctx.schedule_timer(Duration::from_millis(millis.parse().unwrap()));
            match ctx.select2(ctx.schedule_wait("Approved"), timeout).await {
                Either2::First(by) => Ok(format!("approved by {by}")),
                Either2::Second(()) => Ok("escalated".to_owned()),
            }
        })
        .build();
    let process = Process::new(no_activities(), orchestrations).await;

    process.start("in time", "Approval", "3600000").await;
    process.recorded("in time", 1, "ExternalSubscribed").await;
    process.client.raise_event("in time", "Approved", "Ann").await.unwrap();
    assert_eq!(process.output("in time").await, "approved by Ann");

    assert_eq!(process.run("late", "Approval", "50").await, "escalated");
    process.client.raise_event("late", "Approved", "Bob").await.unwrap();
    assert_eq!(process.output("late").await, "escalated");

    assert!(!count_by_name(&process.history("in time").await).contains_key("TimerFired"));
    let late = count_by_name(&process.history("late").await);
    assert_eq!((late["TimerFired"], late.get("ExternalEvent")), (1, None));
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_is_read_in_the_order_in_which_it_was_filled() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Reader", |ctx: OrchestrationContext, count: String| async move {
            let mut read = Vec::new();
            for _ in 0..count.parse::<usize>().unwrap() {
                read.push(ctx.dequeue_event("inbox").await);
            }
            Ok(read.join(","))
        })
        .build();
    let process = Process::new(no_activities(), orchestrations).await;
    process.start("reader", "Reader", "30").await;
    let sent: Vec<String> = (0..30).map(|n| n.to_string()).collect();

    for message in &sent {
        process.client.enqueue_event("reader", "inbox", message.as_str()).await.unwrap();
        process.client.enqueue_event("reader", "elsewhere", "not for the inbox").await.unwrap();
    }

    assert_eq!(process.output("reader").await, sent.join(","));
    let history = process.history("reader").await;
    let inbox =
        |e: &&duroxide::Event| matches!(&e.kind, EventKind::QueueEventDelivered { name, .. } if name == "inbox");
    assert_eq!(history.iter().filter(inbox).count(), 30);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_outlives_the_execution_that_did_not_read_all_of_it() {
    let orchestrations = OrchestrationRegistry::builder()
        .register("Chat", |ctx: OrchestrationContext, so_far: String| async move {
            let message = ctx.dequeue_event("inbox").await;
            let so_far = format!("{so_far}{message}");
            if message == "." {
                return Ok(so_far);
            }
            ctx.continue_as_new(so_far).await
        })
        .build();
    let process = Process::new(no_activities(), orchestrations).await;
    process.start("chat", "Chat", "").await;

    for message in ["d", "u", "r", "a", "b", "l", "e", "."] {
        process.client.enqueue_event("chat", "inbox", message).await.unwrap();
    }

    assert_eq!(process.output("chat").await, "durable.");
    assert_eq!(process.client.list_executions("chat").await.unwrap(), (1..=8).collect::<Vec<u64>>());
    for execution in 1..=8 {
        process.history_of("chat", execution).await;
    }
    process.idle().await;
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn typed_events_and_queues_keep_their_values() {
    let orchestrations = OrchestrationRegistry::builder()
        .register_typed("Pair", |ctx: OrchestrationContext, _: ()| async move {
            let event: (String, u8) = ctx.schedule_wait_typed("Event").await;
            let message: Option<Vec<bool>> = ctx.dequeue_event_typed("queue").await;
            Ok::<_, String>((event, message))
        })
        .build();
    let process = Process::new(no_activities(), orchestrations).await;
    process.client.start_orchestration_typed("pair", "Pair", ()).await.unwrap();
    process.recorded("pair", 1, "ExternalSubscribed").await;

    process.client.enqueue_event_typed("pair", "queue", &Some(vec![true, false])).await.unwrap();
    process.client.raise_event_typed("pair", "Event", &("é", 7)).await.unwrap();

    type Out = ((String, u8), Option<Vec<bool>>);
    let output = process.client.wait_for_orchestration_typed::<Out>("pair", crate::fixture::PATIENCE).await.unwrap();
    assert_eq!(output, Ok((("é".to_owned(), 7), Some(vec![true, false]))));
    process.history("pair").await;
    process.stop().await;
}
