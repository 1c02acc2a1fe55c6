//! A run: drawn from its seed, played until the workload is complete, and audited.

mod admins;
mod clean_up;
mod crashes;
mod observer;
mod plan;
mod special_workloads;
mod workers;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use duroxide::Client;
use duroxide_cosmos::{Clock, CosmosDBProvider, CosmosDBProviderConfig, Randomness, Retention};
use duroxide_cosmos_emulator::{LocalAccount, ReplicationConfig, WireRule};
use tokio::sync::oneshot;

use crate::audit::{self, Snapshot};
use crate::crash_plan::ScheduledFault;
use crate::fault_schedule::FaultSchedule;
use crate::host::Host;
use crate::oracle::{Oracle, Violation};
use crate::rng::SeededRng;
use crate::transcript::Transcript;
use crate::virtual_time;
use crate::worker;
use crate::workload::{ExpectedOutcome, WorkloadClient};
use admins::AdminProcess;
use crashes::PendingCrashes;
use workers::SimulatedWorker;

pub(crate) use observer::describe;
pub use plan::RunPlan;

/// The beginning of the names of workers on the wire.
const WORKER: &str = "w";

/// The name of a worker on the wire, without the number of its incarnation.
fn worker_name(worker: usize) -> String {
    format!("{WORKER}{worker}")
}

/// The outcome of a run.
#[derive(Debug)]
pub struct RunOutcome {
    /// The first violated invariant. `None`: all invariants held.
    pub violation: Option<Violation>,
    /// The virtual time that the run took.
    pub lasted: Duration,
    /// The number of requests on the wire.
    pub requests: u64,
    /// The events of the run.
    pub transcript: Arc<Transcript>,
}

/// Plays the run of this plan on this thread. A thread plays one run only.
pub fn play(plan: RunPlan) -> RunOutcome {
    virtual_time::enter(plan.seed);
    let mut run = Run::new(plan);
    let violation = run.play().err();
    let requests = run.account.stats().total().requests;
    RunOutcome { violation, lasted: run.now, requests, transcript: run.transcript.clone() }
}

struct Run {
    plan: RunPlan,
    now: Duration,
    rng: SeededRng,
    account: LocalAccount,
    /// The host that carries requests. A request arrives even if its sender is dead by then.
    network: Host,
    clients: Vec<Host>,
    admins: Vec<AdminProcess>,
    workers: Vec<SimulatedWorker>,
    process_faults: VecDeque<ScheduledFault>,
    fault_schedule: Arc<FaultSchedule>,
    pending: Arc<Mutex<PendingCrashes>>,
    transcript: Arc<Transcript>,
    oracle: Arc<Oracle>,
    /// The number of completed workload items.
    completed: Arc<AtomicUsize>,
    /// Set when administrators must stop.
    admins_stop: Arc<AtomicBool>,
    next_audit: Duration,
}

/// The length of one step of virtual time. Events of different hosts within one step have no order.
const STEP: Duration = Duration::from_millis(2);
/// The time between two audits of the stored documents during the run.
const AUDIT_INTERVAL: Duration = Duration::from_secs(5);
/// The time that the workload may take after the last fault.
const WORKLOAD_TIMEOUT: Duration = Duration::from_secs(900);
/// The time that transient documents may remain after the workload is complete.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(120);
/// The time that workers may take to shut down.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);

impl Run {
    fn new(plan: RunPlan) -> Self {
        let mut rng = SeededRng::new(plan.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let transcript = Arc::new(Transcript::default());
        let clock_difference = Duration::from_millis(u64::try_from(plan.max_skew * 2).unwrap_or(0));
        let oracle = Arc::new(Oracle::new(clock_difference, plan.lag.is_some()));
        let network = Host::new();
        let mut builder = LocalAccount::builder().with_partitions(plan.partitions);
        if let Some(lag) = plan.lag {
            builder = builder.with_regions(&admins::REGIONS).with_replication(ReplicationConfig::fixed(lag));
        }
        let account = builder.build();
        account.wire().carried_by(network.handle().clone());
        let fault_schedule =
            Arc::new(FaultSchedule::new(plan.fault_settings.clone(), rng.fork(), transcript.clone(), oracle.clone()));
        let pending = Arc::new(Mutex::new(PendingCrashes {
            staged_commits: plan.staged_commit_crashes.iter().cloned().collect(),
            retained_locks: plan.retained_lock_crashes.iter().cloned().collect(),
            pause_points: plan.pause_points.clone(),
            ..PendingCrashes::default()
        }));
        let (schedule, crashes) = (fault_schedule.clone(), pending.clone());
        let rule = WireRule::choosing(move |request| {
            crashes::crash_at_request(&crashes, request)
                .or_else(|| schedule.action_for(request).inspect(|_| crashes::pause_at_request(&crashes, request)))
        });
        account.wire().add(rule);
        let (observed, checked) = (transcript.clone(), oracle.clone());
        account.wire().observe(move |request, answer| observer::observe(&observed, &checked, request, answer));
        let workers = plan.skews.iter().map(|skew| SimulatedWorker::new(*skew)).collect();
        let process_faults = plan.process_faults.iter().cloned().collect();
        transcript.record("run", None, plan.summary());
        let mut clients: Vec<Host> = plan.client_skews.iter().map(|_| Host::new()).collect();
        clients.iter_mut().zip(&plan.client_skews).for_each(|(client, skew)| client.set_skew(*skew));
        Self {
            plan,
            now: Duration::ZERO,
            rng,
            account,
            network,
            clients,
            admins: Vec::new(),
            workers,
            process_faults,
            fault_schedule,
            pending,
            transcript,
            oracle,
            completed: Arc::default(),
            admins_stop: Arc::default(),
            next_audit: AUDIT_INTERVAL,
        }
    }

    fn play(&mut self) -> Result<(), Violation> {
        self.start_clients();
        self.start_admins();
        while self.now < self.plan.fault_time {
            self.step()?;
        }
        self.end_faults();
        self.run_doctor()?;
        self.complete_workload()?;
        self.wait_for_admins()?;
        self.wait_until_drained()?;
        self.shut_down()?;
        self.audit(true)?;
        self.clean_up()
    }

    /// Ends all faults and restarts workers that have shut down.
    fn end_faults(&mut self) {
        self.transcript.record("run", None, "faults end");
        self.fault_schedule.end_faults();
        self.process_faults.clear();
        self.pending().cancel();
        for worker in &mut self.workers {
            worker.restart_at = worker.restart_at.or(worker.has_shut_down().then_some(self.now));
        }
    }

    fn complete_workload(&mut self) -> Result<(), Violation> {
        let timeout = self.now + WORKLOAD_TIMEOUT;
        while self.completed.load(Ordering::Relaxed) < self.plan.workload.len() {
            self.step()?;
            if self.now > timeout {
                return Err(self.incomplete_workload());
            }
        }
        Ok(())
    }

    /// Advances virtual time by one step. Workers run in a random order.
    fn step(&mut self) -> Result<(), Violation> {
        self.now += STEP;
        virtual_time::set_now(self.now);
        self.apply_due_faults();
        self.network.run_until(self.now);
        self.clients.iter_mut().for_each(|client| client.run_until(self.now));
        self.admins.iter_mut().for_each(|admin| admin.host.run_until(self.now));
        let mut order: Vec<usize> = (0..self.workers.len()).collect();
        self.rng.shuffle(&mut order);
        for n in order {
            if let Some(host) = &mut self.workers[n].host {
                host.run_until(self.now);
            }
        }
        self.remove_crashed();
        self.stop_paused();
        if self.now >= self.next_audit {
            self.next_audit = self.now + AUDIT_INTERVAL;
            self.audit(false)?;
        }
        self.oracle.violation().map_or(Ok(()), Err)
    }

    fn pending(&self) -> MutexGuard<'_, PendingCrashes> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn config(&mut self) -> CosmosDBProviderConfig {
        let executions = self.plan.retained_executions;
        let retention = executions.map_or_else(Retention::default, |keep| Retention::default().with_executions(keep));
        CosmosDBProviderConfig::default()
            .with_retention(retention)
            .with_create_if_missing(true)
            .with_poll_interval(self.plan.poll_interval)
            .with_inline_claims(self.plan.inline_claims)
            .with_reconciler_age_threshold(self.plan.reconciler_age)
            .with_history_cache_bytes(self.plan.history_cache_bytes)
            .with_clock(Clock::from_fn(virtual_time::host_millis))
            .with_randomness(Randomness::seeded(self.rng.among(0..=u64::MAX)))
    }

    fn start_clients(&mut self) {
        for n in 0..self.clients.len() {
            let config = self.config();
            let account = self.account.clone();
            let (transcript, oracle, completed) =
                (self.transcript.clone(), self.oracle.clone(), self.completed.clone());
            let items: Vec<_> = self.plan.workload.iter().skip(n).step_by(self.clients.len()).cloned().collect();
            self.clients[n].handle().spawn(async move {
                let provider = Arc::new(worker::open(&account, &format!("client {n}"), &config).await);
                let client = Arc::new(Client::new(provider));
                let client = WorkloadClient { client, transcript, oracle };
                for (name, at, item) in items {
                    let (client, completed) = (client.clone(), completed.clone());
                    tokio::spawn(async move {
                        tokio::time::sleep(at).await;
                        client.run(&name, &item).await;
                        completed.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    }

    fn incomplete_workload(&mut self) -> Violation {
        let detail = match self.audit(false).err() {
            Some(violation) => format!("clients still wait; {violation}"),
            None => "clients still wait".to_owned(),
        };
        let completed = self.transcript.completed_items();
        let waiting = self.plan.workload.iter().map(|(name, ..)| name).find(|name| !completed.contains(*name));
        let instance = waiting.cloned().unwrap_or_default();
        Violation { invariant: "every orchestration ends", instance, detail }
    }

    /// Waits until no transient document is left.
    fn wait_until_drained(&mut self) -> Result<(), Violation> {
        let timeout = self.now + DRAIN_TIMEOUT;
        loop {
            let next_check = self.now + Duration::from_secs(3);
            while self.now < next_check {
                self.step()?;
            }
            match self.snapshot().transient_documents().into_iter().next() {
                None => return Ok(()),
                Some(violation) if self.now > timeout => return Err(violation),
                Some(_) => {}
            }
        }
    }

    fn shut_down(&mut self) -> Result<(), Violation> {
        self.workers.iter_mut().for_each(SimulatedWorker::request_shutdown);
        let timeout = self.now + SHUTDOWN_TIMEOUT;
        let is_down = |worker: &SimulatedWorker| worker.host.is_none() || worker.has_shut_down();
        while !self.workers.iter().all(is_down) {
            self.step()?;
            if self.now > timeout {
                let (instance, detail) = (String::new(), "a worker is still running".to_owned());
                return Err(Violation { invariant: "a worker shuts down on request", instance, detail });
            }
        }
        Ok(())
    }

    /// Runs a task in a host of its own while the run goes on.
    fn run_in_own_host<T: Send + 'static>(
        &mut self,
        task: impl std::future::Future<Output = T> + Send + 'static,
    ) -> Result<T, Violation> {
        let mut host = Host::new();
        let (send, mut receive) = oneshot::channel();
        host.handle().spawn(async move { send.send(task.await) });
        loop {
            self.step()?;
            host.run_until(self.now);
            if let Ok(found) = receive.try_recv() {
                return Ok(found);
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        let snapshot = Snapshot::of(self.account.documents("duroxide", "duroxide"));
        snapshot.with_deleted(self.oracle.deletions.names())
    }

    /// A doctor examines everything while the run goes on.
    fn run_doctor(&mut self) -> Result<(), Violation> {
        let (config, account) = (self.config(), self.account.clone());
        let violation = self.run_in_own_host(async move {
            let provider: CosmosDBProvider = worker::open(&account, "doctor", &config).await;
            let violation = audit::losses(&provider).await;
            provider.shutdown_within(Duration::from_secs(20)).await;
            violation
        })?;
        violation.map_or(Ok(()), Err)
    }

    /// The outcome that each instance must have. An instance that retention deleted after that outcome must be absent.
    fn expected_outcomes(&self) -> BTreeMap<String, ExpectedOutcome> {
        let outcomes = self.plan.workload.iter().flat_map(|(name, _, item)| item.expected_outcomes(name));
        let outcomes = outcomes.map(|(name, outcome)| {
            let deleted_as = self.oracle.deletions.last_status(&name).filter(|_| self.plan.has_retention());
            let is_absent = deleted_as.is_some_and(|status| outcome.status() == Some(status.as_str()));
            (name, if is_absent { ExpectedOutcome::Absent } else { outcome })
        });
        outcomes.collect()
    }

    /// Audits the stored documents. After the end it also asks a provider for outcomes, counters and losses.
    fn audit(&mut self, ended: bool) -> Result<(), Violation> {
        let config = self.config();
        let account = self.account.clone();
        let snapshot = self.snapshot();
        let expected = self.expected_outcomes();
        if let Some(violation) = snapshot.violations(&expected, ended).into_iter().next() {
            return Err(violation);
        }
        if !ended {
            return Ok(());
        }
        let violations = self.run_in_own_host(async move {
            let provider: Arc<CosmosDBProvider> = Arc::new(worker::open(&account, "auditor", &config).await);
            let client = Client::new(provider.clone());
            let mut violations = audit::outcomes(&client, &expected).await;
            violations.extend(audit::counters(&provider, &snapshot).await);
            violations.extend(audit::losses(&provider).await);
            provider.shutdown_within(Duration::from_secs(20)).await;
            violations
        })?;
        violations.into_iter().next().map_or(Ok(()), Err)
    }
}
