//! Runs a soak.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use duroxide::Client;
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::audit::{self, Snapshot};
use crate::oracle::{Oracle, Violation};
use crate::rng::SeededRng;
use crate::soak::clean_up::CleanUp;
use crate::soak::faults;
use crate::soak::served_account::ServedAccount;
use crate::soak::state::{Phase, SoakState};
use crate::soak::summary::Summary;
use crate::soak::traffic::{ItemRegistry, Traffic};
use crate::soak::worker_processes::WorkerSupervisor;
use crate::transcript::Transcript;
use crate::workload::WorkloadClient;

/// The time that the workload may take after the last fault.
const WORKLOAD_TIMEOUT: Duration = Duration::from_secs(300);
/// The time after that in which transient documents must disappear.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(120);
/// The time between two lines of progress in a log.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// The settings of a soak.
#[derive(Clone, Copy, Debug)]
pub struct SoakPlan {
    /// The time in which faults happen.
    pub time: Duration,
    /// The number of worker processes.
    pub workers: usize,
    /// The largest number of workload items in progress.
    pub max_in_progress: usize,
    /// The seed of workload and faults.
    pub seed: u64,
}

/// The outcome of a soak.
#[derive(Debug)]
pub struct SoakOutcome {
    /// The violated invariants.
    pub violations: Vec<Violation>,
    /// The counters.
    pub summary: Summary,
    /// The whole time that it took.
    pub took: Duration,
    /// The number of requests on the wire.
    pub requests: u64,
    /// The last events.
    pub transcript: Arc<Transcript>,
    /// The documents at the end.
    pub documents: Vec<Value>,
}

/// Runs a soak.
pub async fn run(plan: SoakPlan) -> Result<SoakOutcome> {
    let begun = Instant::now();
    let soak = Soak::open(plan).await?;
    let progress = tokio::spawn(show_progress(soak.state.clone(), plan.time));
    let played = soak.play().await;
    progress.abort();
    let outcome = SoakOutcome {
        violations: soak.state.violations(),
        summary: soak.state.summary.read(),
        took: begun.elapsed(),
        requests: soak.account.requests(),
        transcript: soak.state.transcript.clone(),
        documents: soak.account.documents(),
    };
    if let Ok(account) = Arc::try_unwrap(soak.account) {
        account.close().await;
    }
    played.map(|()| outcome)
}

struct Soak {
    plan: SoakPlan,
    state: Arc<SoakState>,
    account: Arc<ServedAccount>,
    registry: Arc<ItemRegistry>,
}

impl Soak {
    async fn open(plan: SoakPlan) -> Result<Self> {
        let state = Arc::new(SoakState::default());
        let account = Arc::new(ServedAccount::open(&state.transcript).await?);
        Ok(Self { plan, state, account, registry: Arc::default() })
    }

    async fn play(&self) -> Result<()> {
        let mut rng = SeededRng::new(self.plan.seed);
        // The container exists before the first fault.
        let provider = self.account.provider("client").await?;
        let clean_up_provider = self.account.provider("clean-up").await?;
        let supervisors = self.start_workers(&mut rng);
        let mut injectors = JoinSet::new();
        injectors.spawn(faults::inject(self.state.clone(), self.account.clone(), self.plan.workers, rng.fork()));
        injectors.spawn(faults::split(self.state.clone(), self.account.clone(), rng.fork()));
        let traffic = tokio::spawn(self.traffic(Client::new(provider.clone()), rng.fork()).run());
        let clean_up = tokio::spawn(self.clean_up(Client::new(clean_up_provider.clone())).run());
        tokio::select! {
            () = tokio::time::sleep(self.plan.time) => {}
            interrupted = tokio::signal::ctrl_c() => interrupted?,
            () = self.state.failed() => {}
        }
        self.state.enter(Phase::Drain);
        while let Some(ended) = injectors.join_next().await {
            ended??;
        }
        self.complete_workload(traffic).await?;
        clean_up.await?;
        self.wait_until_drained().await;
        self.state.enter(Phase::Shutdown);
        supervisors.join_all().await;
        for provider in [provider, clean_up_provider] {
            provider.shutdown().await;
        }
        self.audit().await
    }

    fn start_workers(&self, rng: &mut SeededRng) -> JoinSet<()> {
        let mut supervisors = JoinSet::new();
        for number in 0..self.plan.workers {
            let (state, endpoint) = (self.state.clone(), self.account.endpoint());
            supervisors.spawn(WorkerSupervisor { state, endpoint, number, rng: rng.fork() }.supervise());
        }
        supervisors
    }

    fn traffic(&self, client: Client, rng: SeededRng) -> Traffic {
        let (transcript, oracle) = (self.state.transcript.clone(), Arc::new(Oracle::default()));
        let client = WorkloadClient { client: Arc::new(client), transcript, oracle };
        let (state, registry) = (self.state.clone(), self.registry.clone());
        Traffic { state, client, registry, max_in_progress: self.plan.max_in_progress, rng }
    }

    fn clean_up(&self, client: Client) -> CleanUp {
        CleanUp { state: self.state.clone(), account: self.account.clone(), client, registry: self.registry.clone() }
    }

    async fn complete_workload(&self, mut traffic: tokio::task::JoinHandle<()>) -> Result<()> {
        // A soak that has failed already ends sooner.
        let timeout = if self.state.violations().is_empty() { WORKLOAD_TIMEOUT } else { WORKLOAD_TIMEOUT / 5 };
        if let Ok(ended) = tokio::time::timeout(timeout, &mut traffic).await {
            return Ok(ended?);
        }
        traffic.abort();
        for instance in self.registry.in_progress() {
            let detail = format!("its client still waits {timeout:?} after the last fault");
            self.state.report(Violation { invariant: "every orchestration ends", instance, detail });
        }
        Ok(())
    }

    /// Waits until no transient document is left. The audit reports those that remain.
    async fn wait_until_drained(&self) {
        let timeout = Instant::now() + DRAIN_TIMEOUT;
        while Instant::now() < timeout && !Snapshot::of(self.account.documents()).transient_documents().is_empty() {
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    async fn audit(&self) -> Result<()> {
        let snapshot = Snapshot::of(self.account.documents());
        let expected = self.registry.expected_outcomes();
        let provider = self.account.provider("auditor").await?;
        let client = Client::new(provider.clone());
        let mut violations = snapshot.transient_documents();
        violations.extend(snapshot.violations(&expected, true));
        violations.extend(audit::outcomes(&client, &expected).await);
        violations.extend(audit::counters(&provider, &snapshot).await);
        provider.shutdown().await;
        violations.into_iter().for_each(|violation| self.state.report(violation));
        let left = snapshot.metrics().total_instances;
        self.state.summary.update(|summary| summary.orchestrations += left);
        Ok(())
    }
}

/// Shows the progress: in a progress bar on a terminal, otherwise in a line every 30 seconds.
async fn show_progress(state: Arc<SoakState>, time: Duration) {
    let begun = Instant::now();
    if !std::io::stderr().is_terminal() {
        loop {
            tokio::time::sleep(LOG_INTERVAL).await;
            eprintln!("{:>5.1} min: {}", begun.elapsed().as_secs_f64() / 60.0, state.summary.read().line());
        }
    }
    let bar = ProgressBar::new(time.as_secs()).with_finish(ProgressFinish::AndClear);
    let style = ProgressStyle::with_template("{spinner} {bar:20} {elapsed_precise} {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    loop {
        let rest = if state.has_faults() { "" } else { "waiting for the workload: " };
        bar.set_position(begun.elapsed().min(time).as_secs());
        bar.set_message(format!("{rest}{}", state.summary.read().line()));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
