//! The orchestrations and activities of the worker.

use duroxide::{
    runtime::registry::ActivityRegistry, ActivityContext, Either2, OrchestrationContext, OrchestrationRegistry,
};
use std::time::Duration;

/// The orchestrations of the worker: name, input and purpose.
pub const ORCHESTRATIONS: &[(&str, &str, &str)] = &[
    ("Greeting", "a name", "calls one activity"),
    (
        "Order",
        "a text",
        "waits up to an hour for the event `approval`, then ships; shows its progress as custom status",
    ),
    ("Batch", "a number", "runs this many activities of one second each in parallel"),
    ("Parent", "a number", "starts this many child orchestrations"),
    ("Countdown", "a number", "continues as new until it is one: one execution for each number"),
];

/// The largest input of `Batch`, `Parent` and `Countdown`.
const MAX_INPUT: u32 = 1_000;

/// The activities of these orchestrations.
pub fn activities() -> ActivityRegistry {
    ActivityRegistry::builder()
        .register("Greet", |_: ActivityContext, name: String| async move { Ok(format!("Hello, {name}!")) })
        .register("Work", |ctx: ActivityContext, item: String| async move {
            ctx.trace_info(format!("working on item {item}"));
            tokio::time::sleep(Duration::from_secs(1)).await;
            Ok(item)
        })
        .register("Ship", |ctx: ActivityContext, order: String| async move {
            ctx.trace_info(format!("shipping {order}"));
            Ok(format!("shipped {order}"))
        })
        .build()
}

/// The orchestrations.
pub fn orchestrations() -> OrchestrationRegistry {
    OrchestrationRegistry::builder()
        .register("Greeting", greeting)
        .register("Order", order)
        .register("Batch", batch)
        .register("Parent", parent)
        .register("Countdown", countdown)
        .build()
}

async fn greeting(ctx: OrchestrationContext, name: String) -> Result<String, String> {
    ctx.schedule_activity("Greet", name).await
}

async fn order(ctx: OrchestrationContext, order: String) -> Result<String, String> {
    ctx.set_custom_status("waiting for approval");
    let (approval, timeout) = (ctx.schedule_wait("approval"), ctx.schedule_timer(Duration::from_secs(3_600)));
    match ctx.select2(approval, timeout).await {
        Either2::First(answer) if answer == "yes" => {}
        Either2::First(answer) => return Err(format!("not approved: {answer}")),
        Either2::Second(()) => return Err("no approval within an hour".to_owned()),
    }
    ctx.set_custom_status("shipping");
    ctx.schedule_activity("Ship", order).await
}

async fn batch(ctx: OrchestrationContext, size: String) -> Result<String, String> {
    let size = number(&size)?;
    let items = (1..=size).map(|item| ctx.schedule_activity("Work", item.to_string())).collect();
    let done = ctx.join(items).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(format!("{} of {size} items done", done.len()))
}

async fn parent(ctx: OrchestrationContext, size: String) -> Result<String, String> {
    let size = number(&size)?;
    let children =
        (1..=size).map(|child| ctx.schedule_sub_orchestration("Greeting", format!("child {child}"))).collect();
    let greetings = ctx.join(children).await.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(greetings.join(" "))
}

async fn countdown(ctx: OrchestrationContext, from: String) -> Result<String, String> {
    match number(&from)? {
        1 => Ok("lift-off".to_owned()),
        left => ctx.continue_as_new((left - 1).to_string()).await,
    }
}

fn number(text: &str) -> Result<u32, String> {
    let parsed = text.trim().parse().ok().filter(|n| (1..=MAX_INPUT).contains(n));
    parsed.ok_or_else(|| format!("the input must be a number from 1 to {MAX_INPUT}, not {text:?}"))
}
