//! Runs a workload with a provider and takes the figures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use duroxide::runtime::OrchestrationStatus;
use duroxide::{Client, ClientError};

use crate::backlog::{self, Backlog};
use crate::measure::{name, Outcome, Reading};
use crate::scene::{Scene, Setting, Which};
use crate::workloads::{Plan, Workload};
use crate::{busy, history, processes};

/// Orchestrations under way at once in a busy phase.
pub const IN_FLIGHT: usize = 8;

/// What an orchestration leaves behind, such as a delivery, may end after its client has its answer.
pub const SETTLE: Duration = Duration::from_millis(30);

/// From one look of a watcher to the next.
const LOOK: Duration = Duration::from_millis(4);

/// How long orchestrations may take to end once no more are started.
const GRACE: Duration = Duration::from_secs(10);

/// Runs a workload on an account of its own.
pub async fn run(workload: &Workload, which: Which, setting: Setting) -> Result<Outcome> {
    if let Some(reason) = workload.skips(which) {
        return Ok(Outcome::none(workload.name, which, reason));
    }
    let mut outcome = Outcome::new(workload.name, which);
    let setting = Setting { partitions: setting.partitions.max(workload.partitions), ..setting };
    if let Plan::Backlog { waiting, repeats, padding } = workload.plan {
        backlog::run(&mut outcome, setting, Backlog { waiting, padding }, repeats, workload.cap).await?;
        return Ok(outcome);
    }
    if let Plan::Busy { under_way, count } = workload.plan {
        busy::run(&mut outcome, setting, under_way, count, workload.cap).await?;
        return Ok(outcome);
    }
    let mut scene = Scene::open(which, setting).await?;
    let cap = workload.cap;
    match &workload.plan {
        Plan::Run { orchestration, input, rounds, busy } => {
            scene.start().await;
            warm_up(&scene.client(), "warm").await?;
            let job = Job { orchestration, input, rounds: *rounds, cap };
            counted(&scene, &mut outcome, job).await?;
            in_turn(&scene, &mut outcome, job).await?;
            if *busy > 0 {
                at_once(&scene, &mut outcome, (orchestration, input), *busy, IN_FLIGHT, cap).await?;
            }
        }
        Plan::Idle { settle, watch } => idle(&mut scene, &mut outcome, *settle, *watch).await?,
        Plan::TwoProcesses { busy } => processes::two(&mut scene, &mut outcome, *busy, cap).await?,
        Plan::ClientApart { rounds } => processes::apart(&scene, &mut outcome, *rounds, cap).await?,
        Plan::History { events, turns } => history::run(&mut scene, &mut outcome, *events, *turns, cap).await?,
        Plan::Backlog { .. } | Plan::Busy { .. } => {}
    }
    scene.close().await;
    Ok(outcome)
}

/// Runs two greetings, so that connections are open and the container's structure is known.
pub async fn warm_up(client: &Client, prefix: &str) -> Result<()> {
    for round in 0..2 {
        if !one(client, &format!("{prefix}-{round}"), "Hello", "", Duration::from_secs(30)).await? {
            bail!("a greeting does not end");
        }
    }
    Ok(())
}

/// Starts an orchestration and waits for its end; false where that takes too long.
pub async fn one(client: &Client, id: &str, orchestration: &str, input: &str, limit: Duration) -> Result<bool> {
    client.start_orchestration(id, orchestration, input).await?;
    has_ended(client, id, limit).await
}

/// Waits for the good end of an orchestration; false where that takes too long.
async fn has_ended(client: &Client, id: &str, limit: Duration) -> Result<bool> {
    match client.wait_for_orchestration(id, limit).await {
        Ok(OrchestrationStatus::Completed { .. }) => Ok(true),
        Ok(other) => bail!("{id} ended as {other:?}"),
        Err(ClientError::Timeout) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The same with a look at it every few milliseconds, so that nothing idles between one and the next.
async fn is_seen_to_end(watcher: &Client, id: &str, limit: Duration) -> Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        match watcher.get_orchestration_status(id).await? {
            OrchestrationStatus::Completed { .. } => return Ok(true),
            OrchestrationStatus::Failed { details, .. } => bail!("{id} failed: {}", details.display_message()),
            OrchestrationStatus::NotFound | OrchestrationStatus::Running { .. } => tokio::time::sleep(LOOK).await,
        }
    }
    Ok(false)
}

/// What is run one after the other.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// The orchestration's name.
    pub orchestration: &'a str,
    /// Its input.
    pub input: &'a str,
    /// How many.
    pub rounds: u64,
    /// How long all of them may take.
    pub cap: Duration,
}

/// What some orchestrations came to, one after the other.
struct Series {
    latencies: Vec<Duration>,
    spent: Reading,
    turns: u64,
}

impl Series {
    /// Starts them with the scene's own client, and waits for each as it does, or with somebody who watches closely.
    async fn run(scene: &Scene, watcher: Option<&Client>, prefix: &str, job: Job<'_>) -> Result<Self> {
        let client = scene.client();
        let (before, turns_before, begun) = (scene.reading(), scene.tally.turns(), Instant::now());
        let (mut after, mut turns, mut latencies) = (before.clone(), turns_before, Vec::new());
        for round in 0..job.rounds {
            let (started, left) = (Instant::now(), job.cap.saturating_sub(begun.elapsed()));
            // Not begun where there is no time for another one like the last.
            if left <= latencies.last().copied().unwrap_or_default() {
                break;
            }
            let id = format!("{prefix}-{round}");
            client.start_orchestration(&id, job.orchestration, job.input).await?;
            let has_ended = match watcher {
                Some(watcher) => is_seen_to_end(watcher, &id, left).await?,
                None => has_ended(&client, &id, left).await?,
            };
            if !has_ended {
                break;
            }
            latencies.push(started.elapsed());
            // One that is cut short does not count.
            (after, turns) = (scene.reading(), scene.tally.turns());
        }
        if latencies.len() as u64 == job.rounds {
            tokio::time::sleep(SETTLE).await;
            after = scene.reading();
        }
        Ok(Self { latencies, spent: after - before, turns: turns - turns_before })
    }

    fn count(&self) -> f64 {
        self.latencies.len().max(1) as f64
    }
}

/// Orchestrations one after the other, while somebody waits for them whose reads are not counted: requests, request units and turns
/// of each.
async fn counted(scene: &Scene, outcome: &mut Outcome, job: Job<'_>) -> Result<()> {
    let (watcher, door) = scene.watcher().await?;
    let series = Series::run(scene, Some(&watcher.client()), "counted", job).await?;
    watcher.leave().await;
    door.shutdown().await;
    if !series.latencies.is_empty() {
        outcome.lower(name::REQUESTS, series.spent.stats.total().requests as f64 / series.count());
        outcome.lower(name::UNITS, series.spent.units / series.count());
        outcome.lower(name::TURNS, series.turns as f64 / series.count());
        outcome.kinds(&series.spent, series.count());
    }
    Ok(())
}

/// Orchestrations one after the other, as the process that runs them waits for them itself: requests, request units and latency of
/// each.
pub async fn in_turn(scene: &Scene, outcome: &mut Outcome, job: Job<'_>) -> Result<()> {
    let series = Series::run(scene, None, "single", job).await?;
    if series.latencies.is_empty() {
        outcome.note = Some(format!("not one ended within {} s", job.cap.as_secs()));
        return Ok(());
    }
    outcome.lower(name::WAITED_REQUESTS, series.spent.stats.total().requests as f64 / series.count());
    outcome.lower(name::WAITED_UNITS, series.spent.units / series.count());
    if outcome.requests_by_kind.is_empty() {
        outcome.kinds(&series.spent, series.count());
    }
    outcome.latencies(series.latencies);
    Ok(())
}

/// Several orchestrations under way: their rate, and what each costs then.
pub async fn at_once(
    scene: &Scene,
    outcome: &mut Outcome,
    (orchestration, input): (&str, &str),
    total: u64,
    in_flight: usize,
    cap: Duration,
) -> Result<()> {
    let (before, begun) = (scene.reading(), Instant::now());
    let next = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..in_flight {
        let (client, next, done) = (scene.client(), Arc::clone(&next), Arc::clone(&done));
        let (orchestration, input) = (orchestration.to_owned(), input.to_owned());
        tasks.spawn(async move {
            while begun.elapsed() < cap {
                let number = next.fetch_add(1, Ordering::Relaxed);
                // What is under way when the time is up may end.
                let left = cap.saturating_sub(begun.elapsed()) + GRACE;
                if number >= total || !one(&client, &format!("busy-{number}"), &orchestration, &input, left).await? {
                    break;
                }
                done.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    let elapsed = begun.elapsed().as_secs_f64();
    tokio::time::sleep(SETTLE).await;
    let (spent, by) = (scene.reading() - before, done.load(Ordering::Relaxed).max(1) as f64);
    outcome.higher(name::RATE, by / elapsed);
    outcome.lower(name::BUSY_REQUESTS, spent.stats.total().requests as f64 / by);
    outcome.lower(name::BUSY_UNITS, spent.units / by);
    if outcome.requests_by_kind.is_empty() {
        outcome.kinds(&spent, by);
    }
    Ok(())
}

/// A runtime that has done something and now has nothing to do.
async fn idle(scene: &mut Scene, outcome: &mut Outcome, settle: Duration, watch: Duration) -> Result<()> {
    scene.start().await;
    warm_up(&scene.client(), "warm").await?;
    tokio::time::sleep(settle).await;
    let before = scene.reading();
    tokio::time::sleep(watch).await;
    let (spent, seconds) = (scene.reading() - before, watch.as_secs_f64());
    outcome.lower(name::REQUESTS_A_SECOND, spent.stats.total().requests as f64 / seconds);
    outcome.lower(name::UNITS_A_SECOND, spent.units / seconds);
    outcome.kinds(&spent, seconds);
    Ok(())
}
