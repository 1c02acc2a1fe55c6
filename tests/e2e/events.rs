//! External events and queues.

use crate::scene::{census, Gate, Notebook, Scene};
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
    let scene = Scene::new(no_activities(), orchestrations).await;
    scene.start("approval", "Approval", "").await;
    scene.recorded("approval", 1, "ExternalSubscribed").await;

    scene.client.raise_event("approval", "Other", "no").await.unwrap();
    scene.client.raise_event("approval", "Approved", "by Ann").await.unwrap();

    assert_eq!(scene.output("approval").await, "by Ann");
    let history = scene.history("approval").await;
    let data: Vec<&str> = history
        .iter()
        .filter_map(|e| match &e.kind {
            EventKind::ExternalEvent { data, .. } => Some(data.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(data, ["no", "by Ann"]);
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_is_raised_before_the_wait_is_recorded_and_not_taken_for_the_answer() {
    let (gate, notes) = (Gate::closed(), Notebook::default());
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
    let scene = Scene::new(activities, orchestrations).await;
    scene.start("approval", "Approval", "").await;
    notes.has("preparing").await;

    scene.client.raise_event("approval", "Approved", "too early").await.unwrap();
    scene.recorded("approval", 1, "ExternalEvent").await;
    gate.open();
    scene.recorded("approval", 1, "ExternalSubscribed").await;
    scene.client.raise_event("approval", "Approved", "in time").await.unwrap();

    assert_eq!(scene.output("approval").await, "in time");
    let census = census(&scene.history("approval").await);
    assert_eq!((census["ExternalEvent"], census["ExternalSubscribed"]), (2, 1));
    scene.stop().await;
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
    let scene = Scene::new(no_activities(), orchestrations).await;

    scene.start("in time", "Approval", "3600000").await;
    scene.recorded("in time", 1, "ExternalSubscribed").await;
    scene.client.raise_event("in time", "Approved", "Ann").await.unwrap();
    assert_eq!(scene.output("in time").await, "approved by Ann");

    assert_eq!(scene.run("late", "Approval", "50").await, "escalated");
    scene.client.raise_event("late", "Approved", "Bob").await.unwrap();
    assert_eq!(scene.output("late").await, "escalated");

    assert!(!census(&scene.history("in time").await).contains_key("TimerFired"));
    let late = census(&scene.history("late").await);
    assert_eq!((late["TimerFired"], late.get("ExternalEvent")), (1, None));
    scene.stop().await;
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
    let scene = Scene::new(no_activities(), orchestrations).await;
    scene.start("reader", "Reader", "30").await;
    let sent: Vec<String> = (0..30).map(|n| n.to_string()).collect();

    for message in &sent {
        scene.client.enqueue_event("reader", "inbox", message.as_str()).await.unwrap();
        scene.client.enqueue_event("reader", "elsewhere", "not for the inbox").await.unwrap();
    }

    assert_eq!(scene.output("reader").await, sent.join(","));
    let history = scene.history("reader").await;
    let inbox =
        |e: &&duroxide::Event| matches!(&e.kind, EventKind::QueueEventDelivered { name, .. } if name == "inbox");
    assert_eq!(history.iter().filter(inbox).count(), 30);
    scene.stop().await;
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
    let scene = Scene::new(no_activities(), orchestrations).await;
    scene.start("chat", "Chat", "").await;

    for message in ["d", "u", "r", "a", "b", "l", "e", "."] {
        scene.client.enqueue_event("chat", "inbox", message).await.unwrap();
    }

    assert_eq!(scene.output("chat").await, "durable.");
    assert_eq!(scene.client.list_executions("chat").await.unwrap(), (1..=8).collect::<Vec<u64>>());
    for execution in 1..=8 {
        scene.history_of("chat", execution).await;
    }
    scene.quiet().await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn typed_events_and_queues_come_through_as_they_are() {
    let orchestrations = OrchestrationRegistry::builder()
        .register_typed("Pair", |ctx: OrchestrationContext, _: ()| async move {
            let event: (String, u8) = ctx.schedule_wait_typed("Event").await;
            let message: Option<Vec<bool>> = ctx.dequeue_event_typed("queue").await;
            Ok::<_, String>((event, message))
        })
        .build();
    let scene = Scene::new(no_activities(), orchestrations).await;
    scene.client.start_orchestration_typed("pair", "Pair", ()).await.unwrap();
    scene.recorded("pair", 1, "ExternalSubscribed").await;

    scene.client.enqueue_event_typed("pair", "queue", &Some(vec![true, false])).await.unwrap();
    scene.client.raise_event_typed("pair", "Event", &("é", 7)).await.unwrap();

    type Out = ((String, u8), Option<Vec<bool>>);
    let output = scene.client.wait_for_orchestration_typed::<Out>("pair", crate::scene::PATIENCE).await.unwrap();
    assert_eq!(output, Ok((("é".to_owned(), 7), Some(vec![true, false]))));
    scene.history("pair").await;
    scene.stop().await;
}
