//! Runs a workload with a provider and measures its figures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, Result};
use duroxide::runtime::OrchestrationStatus;
use duroxide::{Client, ClientError};

use crate::backlog::{self, Backlog};
use crate::fixture::{Fixture, ProviderKind, Setting};
use crate::measure::{name, Outcome, Reading};
use crate::workloads::{Plan, Workload};
use crate::{busy, history, processes};

/// The number of orchestrations in flight in a busy phase.
pub const IN_FLIGHT: usize = 8;

/// The pause before a final reading. Work after an orchestration, such as a delivery, may end after the client has its
/// answer.
pub const SETTLE: Duration = Duration::from_millis(30);

/// The interval between status reads of the observer.
const STATUS_INTERVAL: Duration = Duration::from_millis(4);

/// How long orchestrations in flight may take once no more are started.
const GRACE: Duration = Duration::from_secs(10);

/// Runs a workload on a separate account.
pub async fn run(workload: &Workload, kind: ProviderKind, setting: Setting) -> Result<Outcome> {
    if let Some(reason) = workload.skips(kind) {
        return Ok(Outcome::none(workload.name, kind, reason));
    }
    let mut outcome = Outcome::new(workload.name, kind);
    let setting = Setting { partitions: setting.partitions.max(workload.partitions), ..setting };
    if let Plan::Backlog { waiting, repeats, padding } = workload.plan {
        backlog::run(&mut outcome, setting, Backlog { waiting, padding }, repeats, workload.cap).await?;
        return Ok(outcome);
    }
    if let Plan::Busy { in_flight, count } = workload.plan {
        busy::run(&mut outcome, setting, in_flight, count, workload.cap).await?;
        return Ok(outcome);
    }
    let mut fixture = Fixture::open(kind, setting).await?;
    let cap = workload.cap;
    match &workload.plan {
        Plan::Run { orchestration, input, rounds, busy } => {
            fixture.start().await;
            warm_up(&fixture.client(), "warm").await?;
            let job = SequentialWorkload { orchestration, input, rounds: *rounds, cap };
            count_requests(&fixture, &mut outcome, job).await?;
            run_sequentially(&fixture, &mut outcome, job).await?;
            if *busy > 0 {
                run_concurrently(&fixture, &mut outcome, (orchestration, input), *busy, IN_FLIGHT, cap).await?;
            }
        }
        Plan::Idle { settle, watch } => idle(&mut fixture, &mut outcome, *settle, *watch).await?,
        Plan::TwoProcesses { busy } => processes::two_processes(&mut fixture, &mut outcome, *busy, cap).await?,
        Plan::RemoteClient { rounds } => processes::remote_client(&fixture, &mut outcome, *rounds, cap).await?,
        Plan::History { events, turns } => history::run(&mut fixture, &mut outcome, *events, *turns, cap).await?,
        Plan::Backlog { .. } | Plan::Busy { .. } => {}
    }
    fixture.close().await;
    Ok(outcome)
}

/// Runs two Hellos. Connections are then open, and the SDK has cached the properties of the container.
pub async fn warm_up(client: &Client, prefix: &str) -> Result<()> {
    for round in 0..2 {
        if !run_one(client, &format!("{prefix}-{round}"), "Hello", "", Duration::from_secs(30)).await? {
            bail!("a warm-up orchestration did not end");
        }
    }
    Ok(())
}

/// Starts an orchestration and waits for its completion. Returns false if that takes too long.
pub async fn run_one(client: &Client, id: &str, orchestration: &str, input: &str, limit: Duration) -> Result<bool> {
    client.start_orchestration(id, orchestration, input).await?;
    has_ended(client, id, limit).await
}

/// Waits for the completion of an orchestration. Returns false if that takes too long.
async fn has_ended(client: &Client, id: &str, limit: Duration) -> Result<bool> {
    match client.wait_for_orchestration(id, limit).await {
        Ok(OrchestrationStatus::Completed { .. }) => Ok(true),
        Ok(other) => bail!("{id} ended as {other:?}"),
        Err(ClientError::Timeout) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Waits for the completion by reading the status every few milliseconds, so that little time passes before the next
/// start.
async fn poll_until_ended(observer: &Client, id: &str, limit: Duration) -> Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        match observer.get_orchestration_status(id).await? {
            OrchestrationStatus::Completed { .. } => return Ok(true),
            OrchestrationStatus::Failed { details, .. } => bail!("{id} failed: {}", details.display_message()),
            OrchestrationStatus::NotFound | OrchestrationStatus::Running { .. } => {
                tokio::time::sleep(STATUS_INTERVAL).await
            }
        }
    }
    Ok(false)
}

/// Orchestrations that run one after the other.
#[derive(Clone, Copy)]
pub struct SequentialWorkload<'a> {
    /// The orchestration's name.
    pub orchestration: &'a str,
    /// Its input.
    pub input: &'a str,
    /// The number of orchestrations.
    pub rounds: u64,
    /// How long all of them may take.
    pub cap: Duration,
}

/// The results of orchestrations that ran one after the other.
struct SeriesResult {
    latencies: Vec<Duration>,
    spent: Reading,
    turns: u64,
}

impl SeriesResult {
    /// Starts the orchestrations with the fixture's own client. It waits for each with that client, or with `observer`
    /// if given.
    async fn run(
        fixture: &Fixture,
        observer: Option<&Client>,
        prefix: &str,
        job: SequentialWorkload<'_>,
    ) -> Result<Self> {
        let client = fixture.client();
        let (before, turns_before, begun) = (fixture.reading(), fixture.counters.turns(), Instant::now());
        let (mut after, mut turns, mut latencies) = (before.clone(), turns_before, Vec::new());
        for round in 0..job.rounds {
            let (started, left) = (Instant::now(), job.cap.saturating_sub(begun.elapsed()));
            // Starts no orchestration if the time left is shorter than the previous one took.
            if left <= latencies.last().copied().unwrap_or_default() {
                break;
            }
            let id = format!("{prefix}-{round}");
            client.start_orchestration(&id, job.orchestration, job.input).await?;
            let has_ended = match observer {
                Some(observer) => poll_until_ended(observer, &id, left).await?,
                None => has_ended(&client, &id, left).await?,
            };
            if !has_ended {
                break;
            }
            latencies.push(started.elapsed());
            // An orchestration that is cut off does not count.
            (after, turns) = (fixture.reading(), fixture.counters.turns());
        }
        if latencies.len() as u64 == job.rounds {
            tokio::time::sleep(SETTLE).await;
            after = fixture.reading();
        }
        Ok(Self { latencies, spent: after - before, turns: turns - turns_before })
    }

    fn count(&self) -> f64 {
        self.latencies.len().max(1) as f64
    }
}

/// Measures requests, request units and turns of orchestrations that run one after the other. A separate observer waits
/// for them, and its reads are not counted.
async fn count_requests(fixture: &Fixture, outcome: &mut Outcome, job: SequentialWorkload<'_>) -> Result<()> {
    let (observer, server) = fixture.observer().await?;
    let series = SeriesResult::run(fixture, Some(&observer.client()), "counted", job).await?;
    observer.leave().await;
    server.shutdown().await;
    if !series.latencies.is_empty() {
        outcome.lower(name::REQUESTS, series.spent.stats.total().requests as f64 / series.count());
        outcome.lower(name::UNITS, series.spent.units / series.count());
        outcome.lower(name::TURNS, series.turns as f64 / series.count());
        outcome.kinds(&series.spent, series.count());
    }
    Ok(())
}

/// Measures requests, request units and latency of orchestrations that run one after the other. The process that runs
/// them also waits for them.
pub async fn run_sequentially(fixture: &Fixture, outcome: &mut Outcome, job: SequentialWorkload<'_>) -> Result<()> {
    let series = SeriesResult::run(fixture, None, "single", job).await?;
    if series.latencies.is_empty() {
        outcome.note = Some(format!("no orchestration ended within {} s", job.cap.as_secs()));
        return Ok(());
    }
    outcome.lower(name::CLIENT_REQUESTS, series.spent.stats.total().requests as f64 / series.count());
    outcome.lower(name::CLIENT_UNITS, series.spent.units / series.count());
    if outcome.requests_by_kind.is_empty() {
        outcome.kinds(&series.spent, series.count());
    }
    outcome.latencies(series.latencies);
    Ok(())
}

/// Runs several orchestrations concurrently: measures their rate, and the requests and request units of each.
pub async fn run_concurrently(
    fixture: &Fixture,
    outcome: &mut Outcome,
    (orchestration, input): (&str, &str),
    total: u64,
    in_flight: usize,
    cap: Duration,
) -> Result<()> {
    let (before, begun) = (fixture.reading(), Instant::now());
    let next = Arc::new(AtomicU64::new(0));
    let done = Arc::new(AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..in_flight {
        let (client, next, done) = (fixture.client(), Arc::clone(&next), Arc::clone(&done));
        let (orchestration, input) = (orchestration.to_owned(), input.to_owned());
        tasks.spawn(async move {
            while begun.elapsed() < cap {
                let number = next.fetch_add(1, Ordering::Relaxed);
                // Orchestrations in flight when the time is up may end.
                let left = cap.saturating_sub(begun.elapsed()) + GRACE;
                if number >= total || !run_one(&client, &format!("busy-{number}"), &orchestration, &input, left).await?
                {
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
    let (spent, by) = (fixture.reading() - before, done.load(Ordering::Relaxed).max(1) as f64);
    outcome.higher(name::RATE, by / elapsed);
    outcome.lower(name::BUSY_REQUESTS, spent.stats.total().requests as f64 / by);
    outcome.lower(name::BUSY_UNITS, spent.units / by);
    if outcome.requests_by_kind.is_empty() {
        outcome.kinds(&spent, by);
    }
    Ok(())
}

/// Measures a runtime that has run something and is now idle.
async fn idle(fixture: &mut Fixture, outcome: &mut Outcome, settle: Duration, watch: Duration) -> Result<()> {
    fixture.start().await;
    warm_up(&fixture.client(), "warm").await?;
    tokio::time::sleep(settle).await;
    let before = fixture.reading();
    tokio::time::sleep(watch).await;
    let (spent, seconds) = (fixture.reading() - before, watch.as_secs_f64());
    outcome.lower(name::REQUESTS_A_SECOND, spent.stats.total().requests as f64 / seconds);
    outcome.lower(name::UNITS_A_SECOND, spent.units / seconds);
    outcome.kinds(&spent, seconds);
    Ok(())
}
