//! The orchestrations and activities that the workloads run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use duroxide::runtime::registry::ActivityRegistry;
use duroxide::{ActivityContext, OrchestrationContext, OrchestrationRegistry};
use tokio::sync::watch;

/// What ran in this process.
#[derive(Debug, Default)]
pub struct Tally {
    activities: AtomicU64,
    finished: watch::Sender<u64>,
}

impl Tally {
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

/// Everything that a runtime of the benchmark can run.
pub fn registries(tally: &Arc<Tally>) -> (ActivityRegistry, OrchestrationRegistry) {
    let (counted, finished) = (Arc::clone(tally), Arc::clone(tally));
    let echo = move |_: ActivityContext, input: String| {
        counted.activities.fetch_add(1, Ordering::Relaxed);
        async move { Ok(input) }
    };
    let hello = move |context: OrchestrationContext, input: String| {
        let tally = Arc::clone(&finished);
        async move {
            let greeting = context.schedule_activity("Echo", input).await;
            tally.finish();
            greeting
        }
    };
    let orchestrations = OrchestrationRegistry::builder()
        .register("Hello", hello)
        .register("Sequence", sequence)
        .register("FanOut", fan_out)
        .register("Parent", parent)
        .register("Ledger", ledger);
    (ActivityRegistry::builder().register("Echo", echo).build(), orchestrations.build())
}

/// As many activities as the input says, one after the other.
async fn sequence(context: OrchestrationContext, input: String) -> Result<String, String> {
    let mut last = String::new();
    for step in 0..count(&input)? {
        last = context.schedule_activity("Echo", format!("step {step}")).await?;
    }
    Ok(last)
}

/// As many activities as the input says, at once.
async fn fan_out(context: OrchestrationContext, input: String) -> Result<String, String> {
    let part = |index| context.schedule_activity("Echo", format!("part {index}"));
    let parts: Vec<_> = (0..count(&input)?).map(part).collect();
    let results: Result<Vec<String>, String> = context.join(parts).await.into_iter().collect();
    Ok(results?.len().to_string())
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
