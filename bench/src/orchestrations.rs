//! The orchestrations and activities of the workloads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use duroxide::runtime::registry::ActivityRegistry;
use duroxide::{ActivityContext, OrchestrationContext, OrchestrationRegistry};
use tokio::sync::watch;

/// Counts the turns and activities that ran in this process.
#[derive(Debug, Default)]
pub struct RunCounters {
    turns: AtomicU64,
    /// When the first turn since the last call of `take_first_turn` began, in microseconds since 1970. Zero means none.
    first_turn: AtomicU64,
    activities: AtomicU64,
    finished: watch::Sender<u64>,
}

impl RunCounters {
    /// Returns the number of turns that ran here.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// Returns when the first turn since the last call began, in milliseconds since 1970.
    pub fn take_first_turn(&self) -> Option<f64> {
        let first = self.first_turn.swap(0, Ordering::Relaxed);
        (first > 0).then_some(first as f64 / 1000.0)
    }

    fn turn(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
        let now = UNIX_EPOCH.elapsed().unwrap_or_default().as_micros() as u64;
        // The exchange fails for every turn but the first, as intended.
        let _ = self.first_turn.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Returns the number of activities that ran here.
    pub fn activities(&self) -> u64 {
        self.activities.load(Ordering::Relaxed)
    }

    /// Returns the number of Hellos that have reached their last line here. Their last turn is not committed yet.
    pub fn finished(&self) -> u64 {
        *self.finished.borrow()
    }

    /// Returns the number of Hellos that are done. A Hello whose activity has run counts as a half.
    pub fn progress(&self) -> f64 {
        (self.activities() + self.finished()) as f64 / 2.0
    }

    /// Waits until `count` Hellos have reached their last line.
    pub async fn wait_for_finished(&self, count: u64) {
        // The sender lives in `self`, so the wait can't fail.
        let _ = self.finished.subscribe().wait_for(|finished| *finished >= count).await;
    }

    fn finish(&self) {
        self.finished.send_modify(|finished| *finished += 1);
    }
}

/// The duration of a slow activity.
pub const SLOW: Duration = Duration::from_millis(50);

/// The delay of a timer that does not fire during the benchmark.
pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Returns all activities and orchestrations of the benchmark.
pub fn registries(counters: &Arc<RunCounters>) -> (ActivityRegistry, OrchestrationRegistry) {
    let (counted, counted_too) = (Arc::clone(counters), Arc::clone(counters));
    let finished = Arc::clone(counters);
    let echo = move |_: ActivityContext, input: String| {
        counted.activities.fetch_add(1, Ordering::Relaxed);
        async move { Ok(input) }
    };
    let slow = move |_: ActivityContext, input: String| {
        counted_too.activities.fetch_add(1, Ordering::Relaxed);
        async move {
            tokio::time::sleep(SLOW).await;
            Ok(input)
        }
    };
    let hello = move |context: OrchestrationContext, input: String| {
        let counters = Arc::clone(&finished);
        // Every turn replays the orchestration from its first line.
        counters.turn();
        async move {
            let greeting = context.schedule_activity("Echo", input).await;
            counters.finish();
            greeting
        }
    };
    let orchestrations = OrchestrationRegistry::builder()
        .register("Hello", hello)
        .register("Sleep", counted_in(counters, sleep_for_a_day))
        .register("Sequence", counted_in(counters, sequence))
        .register("SlowSequence", counted_in(counters, slow_sequence))
        .register("FanOut", counted_in(counters, fan_out))
        .register("SlowFanOut", counted_in(counters, slow_fan_out))
        .register("Parent", counted_in(counters, parent))
        .register("History", counted_in(counters, history));
    (ActivityRegistry::builder().register("Echo", echo).register("Slow", slow).build(), orchestrations.build())
}

/// Wraps an orchestration so that its turns are counted. Every turn replays it from its first line.
fn counted_in<F, R>(
    counters: &Arc<RunCounters>,
    orchestration: F,
) -> impl Fn(OrchestrationContext, String) -> R + Send + Sync
where
    F: Fn(OrchestrationContext, String) -> R + Send + Sync,
{
    let counters = Arc::clone(counters);
    move |context, input| {
        counters.turn();
        orchestration(context, input)
    }
}

async fn sequence(context: OrchestrationContext, input: String) -> Result<String, String> {
    one_by_one(context, "Echo", input).await
}

async fn slow_sequence(context: OrchestrationContext, input: String) -> Result<String, String> {
    one_by_one(context, "Slow", input).await
}

async fn fan_out(context: OrchestrationContext, input: String) -> Result<String, String> {
    all_at_once(context, "Echo", input).await
}

async fn slow_fan_out(context: OrchestrationContext, input: String) -> Result<String, String> {
    all_at_once(context, "Slow", input).await
}

/// Runs as many activities as the input says, one after the other.
async fn one_by_one(context: OrchestrationContext, activity: &str, input: String) -> Result<String, String> {
    let mut last = String::new();
    for step in 0..count(&input)? {
        last = context.schedule_activity(activity, format!("step {step}")).await?;
    }
    Ok(last)
}

/// Runs as many activities as the input says, concurrently.
async fn all_at_once(context: OrchestrationContext, activity: &str, input: String) -> Result<String, String> {
    let part = |index| context.schedule_activity(activity, format!("part {index}"));
    let parts: Vec<_> = (0..count(&input)?).map(part).collect();
    let results: Result<Vec<String>, String> = context.join(parts).await.into_iter().collect();
    Ok(results?.len().to_string())
}

/// Sets as many timers as the input says, concurrently.
async fn sleep_for_a_day(context: OrchestrationContext, input: String) -> Result<String, String> {
    let timers: Vec<_> = (0..count(&input)?).map(|_| context.schedule_timer(DAY)).collect();
    Ok(context.join(timers).await.len().to_string())
}

/// Runs as many children as the input says, concurrently. Each child has one activity.
async fn parent(context: OrchestrationContext, input: String) -> Result<String, String> {
    let child = |index| context.schedule_sub_orchestration("Hello", format!("child {index}"));
    let children: Vec<_> = (0..count(&input)?).map(child).collect();
    let results: Result<Vec<String>, String> = context.join(children).await.into_iter().collect();
    Ok(results?.len().to_string())
}

/// Builds a history of as many events as the input says, then runs one turn for every message. The custom status counts
/// the messages.
async fn history(context: OrchestrationContext, input: String) -> Result<String, String> {
    for _ in 0..count(&input)? {
        context.set_custom_status("0");
    }
    let mut turns = 0;
    while context.dequeue_event("turns").await != "end" {
        turns += 1;
        context.set_custom_status(turns.to_string());
    }
    Ok(turns.to_string())
}

fn count(input: &str) -> Result<usize, String> {
    input.parse().map_err(|error| format!("the input {input} is not a number: {error}"))
}
