//! Hellos that wait before the runtime starts. Another provider has enqueued them, so the runtime has to discover them.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use duroxide::runtime::OrchestrationStatus;
use duroxide::Client;
use tokio::task::JoinSet;

use crate::fixture::{Fixture, Setting};
use crate::measure::{name, Outcome, Reading};
use crate::run::{warm_up, SETTLE};

/// The number of starts that are sent concurrently.
const SENDERS: u64 = 16;

/// The number of waiting Hellos, and of other documents in the container.
#[derive(Clone, Copy)]
pub struct Backlog {
    /// Hellos that wait.
    pub waiting: u64,
    /// Padding: documents that no provider reads.
    pub padding: u64,
}

/// The result of one backlog.
struct BacklogResult {
    /// The Hellos that are done. One in flight counts as a half: messages are processed in order, so all begin before
    /// the first one ends.
    done: f64,
    elapsed: Duration,
    spent: Reading,
}

/// Processes the same backlog on several accounts in turn and takes the mean.
pub async fn run(outcome: &mut Outcome, setting: Setting, backlog: Backlog, repeats: u64, cap: Duration) -> Result<()> {
    let waiting = backlog.waiting;
    let (mut done, mut elapsed, mut requests, mut units) = (0.0, 0.0, 0, 0.0);
    for _ in 0..repeats {
        let drained = drain(outcome, setting, backlog, cap).await?;
        done += drained.done;
        elapsed += drained.elapsed.as_secs_f64();
        requests += drained.spent.stats.total().requests;
        units += drained.spent.units;
        outcome.kinds(&drained.spent, drained.done.max(1.0));
        if drained.done < waiting as f64 {
            let done = drained.done;
            outcome.note = Some(format!("cut off after {} s with {done:.0} of {waiting} done", cap.as_secs()));
            break;
        }
    }
    let by = done.max(1.0);
    outcome.higher(name::RATE, done / elapsed);
    outcome.lower(name::REQUESTS, requests as f64 / by);
    outcome.lower(name::UNITS, units / by);
    Ok(())
}

async fn drain(outcome: &Outcome, setting: Setting, backlog: Backlog, cap: Duration) -> Result<BacklogResult> {
    let Backlog { waiting, padding } = backlog;
    let mut fixture = Fixture::open(outcome.provider, setting).await?;
    fixture.start().await;
    warm_up(&fixture.client(), "warm").await?;
    fixture.stop().await;
    // The second provider stays open, because duroxide-cdb removes the container when it closes.
    let other = fixture.open_second().await?;
    fill(&other.client(), waiting).await?;
    fixture.pad(padding).await?;

    let (already, progress) = (fixture.counters.finished(), fixture.counters.progress());
    fixture.start().await;
    let (before, begun) = (fixture.reading(), Instant::now());
    // If the time runs out, the Hellos that are done by then count.
    let complete = tokio::time::timeout(cap, fixture.counters.wait_for_finished(already + waiting)).await.is_ok();
    let (elapsed, done) = (begun.elapsed(), fixture.counters.progress() - progress);
    tokio::time::sleep(SETTLE).await;
    let spent = fixture.reading() - before;
    if complete {
        verify(&fixture.client(), waiting).await?;
    }
    fixture.close().await;
    Ok(BacklogResult { done, elapsed, spent })
}

async fn fill(client: &Client, waiting: u64) -> Result<()> {
    in_parallel(client, waiting, |client, number| async move {
        Ok(client.start_orchestration(format!("waiting-{number}"), "Hello", "world").await?)
    })
    .await
}

/// Checks that every Hello has completed.
async fn verify(client: &Client, waiting: u64) -> Result<()> {
    in_parallel(client, waiting, |client, number| async move {
        let id = format!("waiting-{number}");
        match client.wait_for_orchestration(&id, Duration::from_secs(10)).await? {
            OrchestrationStatus::Completed { .. } => Ok(()),
            other => bail!("{id} is {other:?}"),
        }
    })
    .await
}

async fn in_parallel<F>(
    client: &Client,
    total: u64,
    act: impl Fn(Client, u64) -> F + Copy + Send + 'static,
) -> Result<()>
where
    F: Future<Output = Result<()>> + Send,
{
    let mut tasks = JoinSet::new();
    for sender in 0..SENDERS {
        let client = client.clone();
        tasks.spawn(async move {
            for number in (sender..total).step_by(SENDERS as usize) {
                act(client.clone(), number).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    Ok(())
}
