//! The client process, which starts orchestrations and waits for their ends. It runs a runtime only if it is told to.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{ensure, Context, Result};
use duroxide::providers::{Provider, WorkItem};
use duroxide::runtime::OrchestrationStatus;
use duroxide::{Client, EventKind};
use futures::{stream, StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

use crate::fixture::{OpenProvider, ProviderKind};
use crate::orchestrations::DAY;
use crate::processes::{ready, reply, Process};

/// The number of starts that are sent concurrently.
const SENDERS: usize = 16;

/// The number of concurrent waits after many starts. It is low, so that waiting causes little load.
const WAITERS: usize = 4;

/// The orchestrations to start. The name of an instance is the prefix and a number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The prefix of the names of the instances.
    pub prefix: String,
    /// The name of the orchestration.
    pub orchestration: String,
    /// The input of the orchestration.
    pub input: String,
}

impl Job {
    /// Creates a job.
    pub fn new(prefix: &str, orchestration: &str, input: &str) -> Self {
        let (prefix, orchestration, input) = (prefix.to_owned(), orchestration.to_owned(), input.to_owned());
        Self { prefix, orchestration, input }
    }

    fn instance(&self, number: u64) -> String {
        format!("{}-{number}", self.prefix)
    }
}

/// A command to the client process.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum ClientCommand {
    /// Starts this many orchestrations without waiting for them.
    Fill { job: Job, count: u64 },
    /// Starts this many orchestrations, then waits for all.
    Burst { job: Job, count: u64, limit: Duration },
    /// Keeps a number of orchestrations in flight.
    Stream { job: Job, options: StreamOptions },
    /// Enqueues this many timers for each of some instances. They fire in a day.
    Timers { instances: u64, each: u64 },
    /// Counts the histories without exactly one end and exactly one completion of each activity.
    Verify { job: Job, count: u64, activities: usize },
    /// Returns the CPU time of the process so far.
    Cpu,
}

/// The options of a stream of orchestrations.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct StreamOptions {
    /// The maximum number of orchestrations.
    pub count: u64,
    /// The number in flight.
    pub in_flight: usize,
    /// The minimum pause from an end to the next start. The pause is up to half as long again, so that it does not
    /// synchronise with a poll.
    pub pause: Duration,
    /// How long orchestrations are started.
    pub duration: Duration,
    /// How long an orchestration may take.
    pub limit: Duration,
}

/// The times of one orchestration as its client saw them, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct OrchestrationTimes {
    /// When the client sent the start.
    pub started: f64,
    /// When the client saw the completion. `None` if the orchestration did not end or failed.
    pub ended: Option<f64>,
}

impl OrchestrationTimes {
    /// Returns the time from start to end.
    pub fn took(self) -> Option<Duration> {
        self.ended.map(|ended| Duration::from_secs_f64(((ended - self.started) / 1000.0).max(0.0)))
    }
}

/// The client process, as seen by the process that started it.
pub struct ClientProcess(Process);

impl ClientProcess {
    /// Starts a client process on the account at `endpoint`. It creates the container if it is missing.
    pub async fn start(kind: ProviderKind, endpoint: &str) -> Result<Self> {
        Ok(Self(Process::start("client", kind, endpoint).await?))
    }

    /// Starts a client process that also runs its orchestrations.
    pub async fn start_with_runtime(kind: ProviderKind, endpoint: &str) -> Result<Self> {
        Ok(Self(Process::start("both", kind, endpoint).await?))
    }

    /// Returns the CPU time of the process so far.
    pub async fn cpu(&mut self) -> Result<Duration> {
        self.0.ask(&ClientCommand::Cpu).await
    }

    /// Starts this many orchestrations without waiting for them.
    pub async fn fill(&mut self, job: Job, count: u64) -> Result<()> {
        self.0.ask(&ClientCommand::Fill { job, count }).await
    }

    /// Starts this many orchestrations, then waits for all in the order of their numbers.
    pub async fn burst(&mut self, job: Job, count: u64, limit: Duration) -> Result<Vec<OrchestrationTimes>> {
        self.0.ask(&ClientCommand::Burst { job, count, limit }).await
    }

    /// Keeps a number of orchestrations in flight. Returns them in the order of their numbers.
    pub async fn stream(&mut self, job: Job, options: StreamOptions) -> Result<Vec<OrchestrationTimes>> {
        self.0.ask(&ClientCommand::Stream { job, options }).await
    }

    /// Enqueues timers that fire in a day, `each` for every instance.
    pub async fn timers(&mut self, instances: u64, each: u64) -> Result<()> {
        self.0.ask(&ClientCommand::Timers { instances, each }).await
    }

    /// Returns the number of histories without exactly one end and exactly one completion of each activity.
    pub async fn verify(&mut self, job: Job, count: u64, activities: usize) -> Result<u64> {
        self.0.ask(&ClientCommand::Verify { job, count, activities }).await
    }
}

/// The main function of a client process, until its input ends. With `dispatchers` it also runs orchestrations.
pub async fn serve(kind: ProviderKind, endpoint: &str, dispatchers: Option<usize>) -> Result<()> {
    let provider = OpenProvider::at(kind, endpoint).await?;
    let (store, client) = (provider.provider(), provider.client());
    let runtime = match dispatchers {
        Some(dispatchers) => Some(provider.runtime(&Arc::default(), dispatchers).await),
        None => None,
    };
    let mut commands = ready();
    while let Some(line) = commands.next_line().await? {
        match serde_json::from_str(&line)? {
            ClientCommand::Fill { job, count } => reply(&fill(&client, &job, count).await?)?,
            ClientCommand::Burst { job, count, limit } => reply(&burst(&client, &job, count, limit).await?)?,
            ClientCommand::Stream { job, options } => reply(&keep_in_flight(&client, &job, options).await?)?,
            ClientCommand::Timers { instances, each } => reply(&timers(&store, instances, each).await?)?,
            ClientCommand::Verify { job, count, activities } => reply(&verify(&store, &job, count, activities).await?)?,
            ClientCommand::Cpu => reply(&cpu()?)?,
        }
    }
    if let Some(runtime) = runtime {
        runtime.shutdown(Some(500)).await;
    }
    provider.leave().await;
    Ok(())
}

async fn fill(client: &Client, job: &Job, count: u64) -> Result<()> {
    start_all(client, job, count).await.map(drop)
}

/// Starts the orchestrations and returns the time of each start, in the order of their numbers.
async fn start_all(client: &Client, job: &Job, count: u64) -> Result<Vec<f64>> {
    let start = |number| async move {
        let started = now();
        client.start_orchestration(job.instance(number), &job.orchestration, job.input.clone()).await?;
        anyhow::Ok(started)
    };
    stream::iter(0..count).map(start).buffered(SENDERS).try_collect().await
}

async fn burst(client: &Client, job: &Job, count: u64, limit: Duration) -> Result<Vec<OrchestrationTimes>> {
    let begun = Instant::now();
    let started = start_all(client, job, count).await?;
    let wait = |(number, started)| async move {
        let left = limit.saturating_sub(begun.elapsed());
        OrchestrationTimes { started, ended: end_of(client, &job.instance(number), left).await }
    };
    Ok(stream::iter((0..).zip(started)).map(wait).buffered(WAITERS).collect().await)
}

async fn keep_in_flight(client: &Client, job: &Job, options: StreamOptions) -> Result<Vec<OrchestrationTimes>> {
    let (begun, next) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for _ in 0..options.in_flight {
        let (client, job, next) = (client.clone(), job.clone(), Arc::clone(&next));
        tasks.spawn(async move {
            let mut runs = Vec::new();
            while begun.elapsed() < options.duration {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= options.count {
                    break;
                }
                let (id, started) = (job.instance(number), now());
                client.start_orchestration(&id, &job.orchestration, job.input.clone()).await?;
                runs.push((number, OrchestrationTimes { started, ended: end_of(&client, &id, options.limit).await }));
                tokio::time::sleep(options.pause + options.pause * jitter(number) / 200).await;
            }
            anyhow::Ok(runs)
        });
    }
    let mut runs = Vec::new();
    while let Some(task) = tasks.join_next().await {
        runs.extend(task??);
    }
    runs.sort_unstable_by_key(|(number, _)| *number);
    Ok(runs.into_iter().map(|(_, run)| run).collect())
}

/// Returns a number below 100 that is the same in every run.
fn jitter(number: u64) -> u32 {
    (number * 37 % 100) as u32
}

/// Returns when an instance completed. Otherwise logs the reason and returns `None`.
async fn end_of(client: &Client, id: &str, limit: Duration) -> Option<f64> {
    match client.wait_for_orchestration(id, limit.max(Duration::from_millis(1))).await {
        Ok(OrchestrationStatus::Completed { .. }) => Some(now()),
        other => {
            tracing::warn!(id, ?other, "an orchestration did not complete");
            None
        }
    }
}

async fn timers(store: &Arc<dyn Provider>, instances: u64, each: u64) -> Result<()> {
    let fire_at_ms = now() as u64 + DAY.as_millis() as u64;
    let put = |number: u64| async move {
        let instance = format!("timer-{}", number % instances);
        let timer = WorkItem::TimerFired { instance, execution_id: 1, id: 2 + number / instances, fire_at_ms };
        store.enqueue_for_orchestrator(timer, Some(DAY)).await.map_err(|error| anyhow::anyhow!("{error:?}"))
    };
    stream::iter(0..instances * each).map(put).buffer_unordered(SENDERS).try_collect().await
}

async fn verify(store: &Arc<dyn Provider>, job: &Job, count: u64, activities: usize) -> Result<u64> {
    let mut wrong = 0;
    for number in 0..count {
        let id = job.instance(number);
        let history = store.read(&id).await.map_err(|error| anyhow::anyhow!("{error:?}"))?;
        let count = |is: fn(&EventKind) -> bool| history.iter().filter(|event| is(&event.kind)).count();
        let ends = count(|kind| matches!(kind, EventKind::OrchestrationCompleted { .. }));
        let failures = count(|kind| matches!(kind, EventKind::OrchestrationFailed { .. }));
        let completions = count(|kind| matches!(kind, EventKind::ActivityCompleted { .. }));
        if (ends, failures, completions) != (1, 0, activities) {
            tracing::warn!(
                id,
                ends,
                failures,
                completions,
                "a history does not have exactly one end and one completion of each activity"
            );
            wrong += 1;
        }
    }
    Ok(wrong)
}

fn cpu() -> Result<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Ok(time.try_into()?)
}

/// Returns the time in milliseconds since 1970, which all processes on the machine share.
pub fn now() -> f64 {
    UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64() * 1000.0
}

/// Returns the time from the first start to the last end. It fails if an orchestration has not ended.
pub fn span(runs: &[OrchestrationTimes]) -> Result<Duration> {
    let ended =
        runs.iter().map(|run| run.ended).collect::<Option<Vec<f64>>>().context("some orchestrations have not ended")?;
    ensure!(!ended.is_empty(), "no orchestration was started");
    let last = ended.into_iter().fold(f64::MIN, f64::max);
    let first = runs.iter().map(|run| run.started).fold(f64::MAX, f64::min);
    Ok(Duration::from_secs_f64(((last - first) / 1000.0).max(0.001)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_span_is_from_the_first_start_to_the_last_end() {
        let run = |started, ended| OrchestrationTimes { started, ended };
        let all = [run(1000.0, Some(4000.0)), run(500.0, Some(2000.0))];
        assert_eq!(span(&all).unwrap(), Duration::from_millis(3500));
        assert!(span(&[run(0.0, None)]).is_err());
    }
}
