//! Greetings that wait before the runtime starts. Another provider has put them there, so they have to be found.

use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use duroxide::runtime::OrchestrationStatus;
use duroxide::Client;
use tokio::task::JoinSet;

use crate::measure::{name, Outcome, Reading};
use crate::run::{warm_up, SETTLE};
use crate::scene::{Scene, Setting};

/// Starts that are sent at once.
const SENDERS: u64 = 16;

/// What waits, and in which company.
#[derive(Clone, Copy)]
pub struct Backlog {
    /// Greetings that wait.
    pub waiting: u64,
    /// Documents beside them that are nobody's work.
    pub padding: u64,
}

/// What one backlog came to.
struct Drained {
    /// Those under way count for a half: messages come in order, so all are begun before the first one ends.
    done: f64,
    elapsed: Duration,
    spent: Reading,
}

/// Drains the same backlog on several accounts in turn and takes the mean.
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

async fn drain(outcome: &Outcome, setting: Setting, backlog: Backlog, cap: Duration) -> Result<Drained> {
    let Backlog { waiting, padding } = backlog;
    let mut scene = Scene::open(outcome.provider, setting).await?;
    scene.start().await;
    warm_up(&scene.client(), "warm").await?;
    scene.stop().await;
    // It stays open: where the peer closes, the container goes.
    let other = scene.second().await?;
    fill(&Client::new(other.store()), waiting).await?;
    scene.pad(padding).await?;

    let (already, progress) = (scene.tally.finished(), scene.tally.progress());
    scene.start().await;
    let (before, begun) = (scene.reading(), Instant::now());
    // Where the time runs out, what is done by then counts.
    let complete = tokio::time::timeout(cap, scene.tally.reach(already + waiting)).await.is_ok();
    let (elapsed, done) = (begun.elapsed(), scene.tally.progress() - progress);
    tokio::time::sleep(SETTLE).await;
    let spent = scene.reading() - before;
    if complete {
        verify(&scene.client(), waiting).await?;
    }
    scene.close().await;
    Ok(Drained { done, elapsed, spent })
}

async fn fill(client: &Client, waiting: u64) -> Result<()> {
    in_parallel(client, waiting, |client, number| async move {
        Ok(client.start_orchestration(format!("waiting-{number}"), "Hello", "world").await?)
    })
    .await
}

/// Every one has ended well.
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
