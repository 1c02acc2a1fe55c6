//! The orchestrations and activities that the workloads run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use duroxide::runtime::registry::ActivityRegistry;
use duroxide::{ActivityContext, OrchestrationContext, OrchestrationRegistry};
use tokio::sync::watch;

/// What ran in this process.
#[derive(Debug, Default)]
pub struct Tally {
    turns: AtomicU64,
    /// When the first turn since the last look began, in microseconds since 1970; zero for none.
    woke: AtomicU64,
    activities: AtomicU64,
    finished: watch::Sender<u64>,
}

impl Tally {
    /// Turns that ran here.
    pub fn turns(&self) -> u64 {
        self.turns.load(Ordering::Relaxed)
    }

    /// When the first of those turns since this was last asked began, in milliseconds since 1970.
    pub fn take_woke(&self) -> Option<f64> {
        let woke = self.woke.swap(0, Ordering::Relaxed);
        (woke > 0).then_some(woke as f64 / 1000.0)
    }

    fn turn(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
        let now = UNIX_EPOCH.elapsed().unwrap_or_default().as_micros() as u64;
        // Only the first one counts, so a refusal is as good.
        let _ = self.woke.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Activities that ran here.
    pub fn activities(&self) -> u64 {
        self.activities.load(Ordering::Relaxed)
    }

    /// How many single greetings have come to their last line here; their last turn is yet to be committed.
    pub fn finished(&self) -> u64 {
        *self.finished.borrow()
    }

    /// Single greetings, where one that has its activity behind it counts for a half.
    pub fn progress(&self) -> f64 {
        (self.activities() + self.finished()) as f64 / 2.0
    }

    /// Waits until `count` single greetings have come to their last line.
    pub async fn reach(&self, count: u64) {
        // The sender lives in `self`, so the wait can't fail.
        let _ = self.finished.subscribe().wait_for(|finished| *finished >= count).await;
    }

    fn finish(&self) {
        self.finished.send_modify(|finished| *finished += 1);
    }
}

/// How long a slow activity takes.
pub const SLOW: Duration = Duration::from_millis(50);

/// How far away a timer is that nobody waits for.
pub const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Everything that a runtime of the benchmark can run.
pub fn registries(tally: &Arc<Tally>) -> (ActivityRegistry, OrchestrationRegistry) {
    let (counted, counted_too) = (Arc::clone(tally), Arc::clone(tally));
    let finished = Arc::clone(tally);
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
        let tally = Arc::clone(&finished);
        // Every turn plays the orchestration from its first line.
        tally.turn();
        async move {
            let greeting = context.schedule_activity("Echo", input).await;
            tally.finish();
            greeting
        }
    };
    let orchestrations = OrchestrationRegistry::builder()
        .register("Hello", hello)
        .register("Sleep", counted_in(tally, sleep_for_a_day))
        .register("Sequence", counted_in(tally, sequence))
        .register("SlowSequence", counted_in(tally, slow_sequence))
        .register("FanOut", counted_in(tally, fan_out))
        .register("SlowFanOut", counted_in(tally, slow_fan_out))
        .register("Parent", counted_in(tally, parent))
        .register("Ledger", counted_in(tally, ledger));
    (ActivityRegistry::builder().register("Echo", echo).register("Slow", slow).build(), orchestrations.build())
}

/// An orchestration whose turns are counted: every turn plays it from its first line.
fn counted_in<F, R>(tally: &Arc<Tally>, orchestration: F) -> impl Fn(OrchestrationContext, String) -> R + Send + Sync
where
    F: Fn(OrchestrationContext, String) -> R + Send + Sync,
{
    let tally = Arc::clone(tally);
    move |context, input| {
        tally.turn();
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

/// As many activities as the input says, one after the other.
async fn one_by_one(context: OrchestrationContext, activity: &str, input: String) -> Result<String, String> {
    let mut last = String::new();
    for step in 0..count(&input)? {
        last = context.schedule_activity(activity, format!("step {step}")).await?;
    }
    Ok(last)
}

/// As many activities as the input says, at once.
async fn all_at_once(context: OrchestrationContext, activity: &str, input: String) -> Result<String, String> {
    let part = |index| context.schedule_activity(activity, format!("part {index}"));
    let parts: Vec<_> = (0..count(&input)?).map(part).collect();
    let results: Result<Vec<String>, String> = context.join(parts).await.into_iter().collect();
    Ok(results?.len().to_string())
}

/// As many timers as the input says, at once.
async fn sleep_for_a_day(context: OrchestrationContext, input: String) -> Result<String, String> {
    let timers: Vec<_> = (0..count(&input)?).map(|_| context.schedule_timer(DAY)).collect();
    Ok(context.join(timers).await.len().to_string())
}

/// As many children as the input says, at once, each with an activity.
async fn parent(context: OrchestrationContext, input: String) -> Result<String, String> {
    let child = |index| context.schedule_sub_orchestration("Hello", format!("child {index}"));
    let children: Vec<_> = (0..count(&input)?).map(child).collect();
    let results: Result<Vec<String>, String> = context.join(children).await.into_iter().collect();
    Ok(results?.len().to_string())
}

/// A history of as many events as the input says, then a turn for every message. The custom status counts them.
async fn ledger(context: OrchestrationContext, input: String) -> Result<String, String> {
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
    input.parse().map_err(|error| format!("{input} is not a number: {error}"))
}
