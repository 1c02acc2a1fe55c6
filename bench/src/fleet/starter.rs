//! The client process: it starts orchestrations and waits for their ends. Where nothing else is said, it runs none.

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

use crate::orchestrations::DAY;
use crate::processes::{ready, reply, Process};
use crate::scene::{Opened, Which};

/// Starts that are sent at once.
const SENDERS: usize = 16;

/// Ends that are waited for at once, where many have been started: few, so that the waiting itself is no load.
const WAITERS: usize = 4;

/// What is started. Instances are named by the prefix and their number.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// What the instances' names begin with.
    pub prefix: String,
    /// The orchestration's name.
    pub orchestration: String,
    /// Its input.
    pub input: String,
}

impl Job {
    /// One with a name of its own.
    pub fn new(prefix: &str, orchestration: &str, input: &str) -> Self {
        let (prefix, orchestration, input) = (prefix.to_owned(), orchestration.to_owned(), input.to_owned());
        Self { prefix, orchestration, input }
    }

    fn instance(&self, number: u64) -> String {
        format!("{}-{number}", self.prefix)
    }
}

/// What the client process is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Order {
    /// Starts so many and waits for none.
    Fill { job: Job, count: u64 },
    /// Starts so many, then waits for all.
    Burst { job: Job, count: u64, limit: Duration },
    /// Keeps some under way.
    Stream { job: Job, pace: Pace },
    /// Timers that far away, so many for each of some instances.
    Timers { instances: u64, each: u64 },
    /// How many of so many histories don't end once, with each of so many activities completed once.
    Verify { job: Job, count: u64, activities: usize },
    /// The processor time that it has taken so far.
    Cpu,
}

/// How a stream of orchestrations flows.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Pace {
    /// How many in all, at most.
    pub count: u64,
    /// How many at a time.
    pub under_way: usize,
    /// At least so long from an end to the next start; up to half as long again, so that it falls in with no poll.
    pub pause: Duration,
    /// Until when orchestrations are started.
    pub lasting: Duration,
    /// How long each may take.
    pub limit: Duration,
}

/// One orchestration as its client saw it, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Run {
    /// When its start was sent.
    pub started: f64,
    /// When its good end was seen; none for one that did not end, or ended badly.
    pub ended: Option<f64>,
}

impl Run {
    /// Start to end.
    pub fn took(self) -> Option<Duration> {
        self.ended.map(|ended| Duration::from_secs_f64(((ended - self.started) / 1000.0).max(0.0)))
    }
}

/// The client process, seen from this one.
pub struct Starter(Process);

impl Starter {
    /// Starts one on the account at `endpoint`. It makes the container if that is missing.
    pub async fn start(which: Which, endpoint: &str) -> Result<Self> {
        Ok(Self(Process::start("client", which, endpoint).await?))
    }

    /// Starts one that runs what it starts.
    pub async fn start_with_runtime(which: Which, endpoint: &str) -> Result<Self> {
        Ok(Self(Process::start("both", which, endpoint).await?))
    }

    /// The processor time that it has taken so far.
    pub async fn cpu(&mut self) -> Result<Duration> {
        self.0.ask(&Order::Cpu).await
    }

    /// Starts so many and waits for none.
    pub async fn fill(&mut self, job: Job, count: u64) -> Result<()> {
        self.0.ask(&Order::Fill { job, count }).await
    }

    /// Starts so many, then waits for all, in this order.
    pub async fn burst(&mut self, job: Job, count: u64, limit: Duration) -> Result<Vec<Run>> {
        self.0.ask(&Order::Burst { job, count, limit }).await
    }

    /// Keeps some under way; in the order of their numbers.
    pub async fn stream(&mut self, job: Job, pace: Pace) -> Result<Vec<Run>> {
        self.0.ask(&Order::Stream { job, pace }).await
    }

    /// Timers that are far away, `each` for every one of some instances.
    pub async fn timers(&mut self, instances: u64, each: u64) -> Result<()> {
        self.0.ask(&Order::Timers { instances, each }).await
    }

    /// How many of the histories don't end once, or don't hold each activity's completion once.
    pub async fn verify(&mut self, job: Job, count: u64, activities: usize) -> Result<u64> {
        self.0.ask(&Order::Verify { job, count, activities }).await
    }
}

/// What the client process does, until its input ends. With dispatchers, it runs orchestrations as well.
pub async fn serve(which: Which, endpoint: &str, dispatchers: Option<usize>) -> Result<()> {
    let provider = Opened::at(which, endpoint).await?;
    let (store, client) = (provider.store(), provider.client());
    let runtime = match dispatchers {
        Some(dispatchers) => Some(provider.runtime(&Arc::default(), dispatchers).await),
        None => None,
    };
    let mut orders = ready();
    while let Some(line) = orders.next_line().await? {
        match serde_json::from_str(&line)? {
            Order::Fill { job, count } => reply(&fill(&client, &job, count).await?)?,
            Order::Burst { job, count, limit } => reply(&burst(&client, &job, count, limit).await?)?,
            Order::Stream { job, pace } => reply(&keep_under_way(&client, &job, pace).await?)?,
            Order::Timers { instances, each } => reply(&timers(&store, instances, each).await?)?,
            Order::Verify { job, count, activities } => reply(&verify(&store, &job, count, activities).await?)?,
            Order::Cpu => reply(&cpu()?)?,
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

/// When each was started, in the order of their numbers.
async fn start_all(client: &Client, job: &Job, count: u64) -> Result<Vec<f64>> {
    let start = |number| async move {
        let started = now();
        client.start_orchestration(job.instance(number), &job.orchestration, job.input.clone()).await?;
        anyhow::Ok(started)
    };
    stream::iter(0..count).map(start).buffered(SENDERS).try_collect().await
}

async fn burst(client: &Client, job: &Job, count: u64, limit: Duration) -> Result<Vec<Run>> {
    let begun = Instant::now();
    let started = start_all(client, job, count).await?;
    let wait = |(number, started)| async move {
        let left = limit.saturating_sub(begun.elapsed());
        Run { started, ended: end_of(client, &job.instance(number), left).await }
    };
    Ok(stream::iter((0..).zip(started)).map(wait).buffered(WAITERS).collect().await)
}

async fn keep_under_way(client: &Client, job: &Job, pace: Pace) -> Result<Vec<Run>> {
    let (begun, next) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for _ in 0..pace.under_way {
        let (client, job, next) = (client.clone(), job.clone(), Arc::clone(&next));
        tasks.spawn(async move {
            let mut runs = Vec::new();
            while begun.elapsed() < pace.lasting {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= pace.count {
                    break;
                }
                let (id, started) = (job.instance(number), now());
                client.start_orchestration(&id, &job.orchestration, job.input.clone()).await?;
                runs.push((number, Run { started, ended: end_of(&client, &id, pace.limit).await }));
                tokio::time::sleep(pace.pause + pace.pause * jitter(number) / 200).await;
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

/// Below 100, and the same in every run.
fn jitter(number: u64) -> u32 {
    (number * 37 % 100) as u32
}

/// When an instance has ended well; none where it does not, and it is said why.
async fn end_of(client: &Client, id: &str, limit: Duration) -> Option<f64> {
    match client.wait_for_orchestration(id, limit.max(Duration::from_millis(1))).await {
        Ok(OrchestrationStatus::Completed { .. }) => Some(now()),
        other => {
            tracing::warn!(id, ?other, "an orchestration did not end well");
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
            tracing::warn!(id, ends, failures, completions, "a history is not as it should be");
            wrong += 1;
        }
    }
    Ok(wrong)
}

fn cpu() -> Result<Duration> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Ok(time.try_into()?)
}

/// Milliseconds since 1970: what this process and others on the machine agree on.
pub fn now() -> f64 {
    UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64() * 1000.0
}

/// From the first start to the last end, where all have ended.
pub fn span(runs: &[Run]) -> Result<Duration> {
    let ended = runs.iter().map(|run| run.ended).collect::<Option<Vec<f64>>>().context("some have not ended")?;
    ensure!(!ended.is_empty(), "none was started");
    let last = ended.into_iter().fold(f64::MIN, f64::max);
    let first = runs.iter().map(|run| run.started).fold(f64::MAX, f64::min);
    Ok(Duration::from_secs_f64(((last - first) / 1000.0).max(0.001)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_from_the_first_start_to_the_last_end() {
        let run = |started, ended| Run { started, ended };
        let all = [run(1000.0, Some(4000.0)), run(500.0, Some(2000.0))];
        assert_eq!(span(&all).unwrap(), Duration::from_millis(3500));
        assert!(span(&[run(0.0, None)]).is_err());
    }
}
