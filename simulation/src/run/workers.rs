//! The workers of a run: started, killed, stopped, shut down and replaced.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::{worker_name, Run};
use crate::crash_plan::{CrashPoint, ProcessFault};
use crate::host::Host;
use crate::recorder::Recorder;
use crate::worker;

/// A worker of a run. Its processes come and go: each is an incarnation.
pub(super) struct SimulatedWorker {
    /// The process that runs now.
    pub(super) host: Option<Host>,
    incarnation: u32,
    skew: i64,
    /// When the next incarnation starts.
    pub(super) restart_at: Option<Duration>,
    /// Asks the runtime of the process to shut down.
    shutdown: Option<oneshot::Sender<()>>,
    /// Set when the runtime of the process has shut down.
    is_shut_down: Arc<AtomicBool>,
}

impl SimulatedWorker {
    /// A worker with this clock error in milliseconds. It starts with the first step of the run.
    pub(super) fn new(skew: i64) -> Self {
        Self {
            host: None,
            incarnation: 0,
            skew,
            restart_at: Some(Duration::ZERO),
            shutdown: None,
            is_shut_down: Arc::default(),
        }
    }

    /// The name of its present incarnation on the wire.
    fn client(&self, worker: usize) -> String {
        format!("{}#{}", worker_name(worker), self.incarnation)
    }

    pub(super) fn has_shut_down(&self) -> bool {
        self.is_shut_down.load(Ordering::Relaxed)
    }

    /// Asks the process to shut down. No incarnation follows it.
    pub(super) fn request_shutdown(&mut self) {
        self.restart_at = None;
        if let Some(shutdown) = self.shutdown.take() {
            let _ = shutdown.send(());
        }
    }
}

impl Run {
    /// Applies the faults that are due, and starts the workers that are due.
    pub(super) fn apply_due_faults(&mut self) {
        while self.process_faults.front().is_some_and(|fault| fault.at <= self.now) {
            let Some(scheduled) = self.process_faults.pop_front() else { return };
            self.apply_fault(scheduled.fault);
        }
        for n in 0..self.workers.len() {
            if self.workers[n].restart_at.is_some_and(|at| at <= self.now) {
                self.start_worker(n);
            }
        }
    }

    fn apply_fault(&mut self, fault: ProcessFault) {
        self.transcript.record("crash plan", None, format!("{fault:?}"));
        match fault {
            ProcessFault::Kill { worker, requests, request_arrives, downtime } => {
                let client = self.workers[worker].client(worker);
                let mut pending = self.pending();
                if requests == 0 {
                    pending.crashed.push((client, downtime));
                } else {
                    pending.clients.insert(client, CrashPoint { requests, request_arrives, downtime });
                }
            }
            ProcessFault::Stop { worker, pause } => {
                let until = self.now + pause;
                self.oracle.sessions.fault_met(&self.workers[worker].client(worker), None, Duration::ZERO);
                if let Some(host) = &mut self.workers[worker].host {
                    host.stop_until(until);
                }
            }
            ProcessFault::StopClient { pause } => {
                let until = self.now + pause;
                self.clients[0].stop_until(until);
            }
            ProcessFault::SetClock { worker, skew } => {
                let worker = &mut self.workers[worker];
                worker.skew = skew;
                if let Some(host) = &mut worker.host {
                    host.set_skew(skew);
                }
            }
            ProcessFault::ShutDown { worker, downtime } => {
                let worker = &mut self.workers[worker];
                if let Some(shutdown) = worker.shutdown.take() {
                    let _ = shutdown.send(());
                    // The next incarnation kills a process that is still shutting down by then.
                    worker.restart_at = Some(self.now + downtime + Duration::from_secs(5));
                }
            }
            ProcessFault::Split => self.split_partition(),
        }
    }

    /// Splits a random physical partition, unless there are 12 already.
    fn split_partition(&mut self) {
        for (n, worker) in self.workers.iter().enumerate() {
            self.oracle.sessions.fault_met(&worker.client(n), None, Duration::ZERO);
        }
        let account = self.account.clone();
        let partitions = account.partitions("duroxide", "duroxide");
        if !partitions.is_empty() && partitions.len() < 12 {
            let partition = *self.rng.pick(&partitions);
            self.network.handle().spawn(async move { account.split("duroxide", "duroxide", partition).await });
        }
    }

    /// Stops the workers whose pause is due.
    pub(super) fn stop_paused(&mut self) {
        let due = std::mem::take(&mut self.pending().due_pauses);
        for (client, point) in due {
            let max_skew = self.plan.max_skew;
            let workers = self.workers.iter_mut().enumerate();
            for (_, worker) in workers.filter(|(n, worker)| worker.host.is_some() && worker.client(*n) == client) {
                self.transcript.record("crash plan", None, format!("{client} is stopped: {point:?}"));
                self.oracle.sessions.fault_met(&client, None, Duration::ZERO);
                if point.clock_stops {
                    let behind = i64::try_from(point.pause.as_millis()).unwrap_or(0);
                    worker.skew = (worker.skew - behind).max(-max_skew);
                }
                if let Some(host) = &mut worker.host {
                    host.stop_until(self.now + point.pause);
                    host.set_skew(worker.skew);
                }
            }
        }
    }

    /// Kills the processes that have sent their last request.
    pub(super) fn remove_crashed(&mut self) {
        let crashed = std::mem::take(&mut self.pending().crashed);
        for (client, downtime) in crashed {
            self.admins.retain(|admin| admin.name != client);
            let workers = self.workers.iter_mut().enumerate();
            for (_, worker) in workers.filter(|(n, worker)| worker.host.is_some() && worker.client(*n) == client) {
                self.transcript.record("crash plan", None, format!("{client} is killed"));
                worker.host = None;
                worker.restart_at.get_or_insert(self.now + downtime);
            }
        }
    }

    /// Starts the next incarnation of a worker.
    fn start_worker(&mut self, n: usize) {
        let config = self.config();
        let rng = self.rng.fork();
        let worker = &mut self.workers[n];
        worker.incarnation += 1;
        worker.restart_at = None;
        let name = worker.client(n);
        let mut host = Host::new();
        host.set_skew(worker.skew);
        self.transcript.record("crash plan", None, format!("{name} starts, its clock off by {} ms", worker.skew));
        let (shutdown, shutdown_requested) = oneshot::channel();
        worker.shutdown = Some(shutdown);
        let (account, settings) = (self.account.clone(), self.plan.workers[n].clone());
        let (oracle, transcript, drop_one_in) = (self.oracle.clone(), self.transcript.clone(), self.plan.drop_one_in);
        let is_shut_down = worker.is_shut_down.clone();
        is_shut_down.store(false, Ordering::Relaxed);
        host.handle().spawn(async move {
            let provider = Arc::new(worker::open(&account, &name, &config).await);
            let recorder = Recorder::new(provider.clone(), &name, oracle, transcript.clone(), drop_one_in, rng);
            let recorder = Arc::new(recorder);
            let runtime = worker::start(recorder.clone(), &name, &settings).await;
            if shutdown_requested.await.is_ok() {
                transcript.record(&name, None, "shuts down");
                runtime.shutdown(None).await;
                recorder.shuts_down();
                provider.shutdown_within(Duration::from_secs(20)).await;
                transcript.record(&name, None, "has shut down");
                is_shut_down.store(true, Ordering::Relaxed);
            } else {
                std::future::pending::<()>().await;
            }
        });
        worker.host = Some(host);
    }
}
