//! The worker processes: started, killed, stopped for a while, shut down, and started again.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};

use crate::oracle::Violation;
use crate::rng::SeededRng;
use crate::soak::state::{Phase, SoakState};
use crate::soak::worker::{self, RAN};

/// The time that a worker may take to shut down. Its own timeout is shorter.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of bytes of a worker's standard error that are retained.
const MAX_ERRORS: usize = 4_000;

/// Supervises one worker: starts its processes one after the other, and applies faults to them.
pub struct WorkerSupervisor {
    /// The shared state.
    pub state: Arc<SoakState>,
    /// The endpoint of the account.
    pub endpoint: String,
    /// The number of the worker.
    pub number: usize,
    /// The generator that draws the faults.
    pub rng: SeededRng,
}

/// A fault of a worker process.
enum WorkerFault {
    Kill,
    Stop(Duration),
    ShutDown,
}

impl WorkerSupervisor {
    /// Keeps a worker process running until the soak is over.
    pub async fn supervise(mut self) {
        if let Err(error) = self.try_supervise().await {
            self.report("a worker can be started", format!("{error:#}"));
        }
    }

    async fn try_supervise(&mut self) -> Result<()> {
        let mut process = None;
        while self.state.has_faults() {
            let running = self.running(process.take())?;
            process = self.run_until_fault(running).await?;
        }
        let mut running = self.running(process)?;
        tokio::select! {
            () = self.state.reached(Phase::Shutdown) => {}
            exited = running.exited() => {
                self.exited(exited?);
                return Ok(());
            }
        }
        self.shut_down(running).await
    }

    fn running(&self, process: Option<WorkerProcess>) -> Result<WorkerProcess> {
        match process {
            Some(running) => Ok(running),
            None => {
                self.record("starts");
                WorkerProcess::start(&self.state, &self.endpoint, self.number)
            }
        }
    }

    /// Waits for the next fault of a process, and applies it. Returns the process if it survives.
    async fn run_until_fault(&mut self, mut process: WorkerProcess) -> Result<Option<WorkerProcess>> {
        let time = Duration::from_millis(self.rng.among(1_000..=30_000));
        tokio::select! {
            exited = process.exited() => {
                self.exited(exited?);
                self.state.sleep_while_faulty(Duration::from_secs(1)).await;
                return Ok(None);
            }
            () = self.state.sleep_while_faulty(time) => {}
        }
        if !self.state.has_faults() {
            return Ok(Some(process));
        }
        match self.draw_fault() {
            WorkerFault::Stop(pause) => {
                self.state.summary.update(|summary| summary.stops += 1);
                self.record(&format!("is stopped for {} ms", pause.as_millis()));
                process.signal(libc::SIGSTOP)?;
                self.state.sleep_while_faulty(pause).await;
                process.signal(libc::SIGCONT)?;
                self.record("continues");
                return Ok(Some(process));
            }
            WorkerFault::Kill => {
                self.state.summary.update(|summary| summary.kills += 1);
                self.record("is killed");
                process.kill().await?;
            }
            WorkerFault::ShutDown => {
                self.state.summary.update(|summary| summary.shutdowns += 1);
                self.shut_down(process).await?;
            }
        }
        let downtime = Duration::from_millis(self.rng.mostly_small(0..=8_000));
        self.state.sleep_while_faulty(downtime).await;
        Ok(None)
    }

    fn draw_fault(&mut self) -> WorkerFault {
        match self.rng.among(0..=9) {
            0..=5 => WorkerFault::Kill,
            6..=8 => WorkerFault::Stop(Duration::from_millis(self.rng.among(200..=15_000))),
            _ => WorkerFault::ShutDown,
        }
    }

    async fn shut_down(&self, process: WorkerProcess) -> Result<()> {
        self.record("is asked to shut down");
        match process.shut_down().await? {
            None => self.record("has shut down"),
            Some(detail) => self.report("a worker shuts down on request", detail),
        }
        Ok(())
    }

    fn exited(&self, how: String) {
        self.report("a worker does not end by itself", how);
    }

    fn report(&self, invariant: &'static str, detail: String) {
        self.state.report(Violation { invariant, instance: worker::name(self.number), detail });
    }

    fn record(&self, event: &str) {
        self.state.transcript.record(&worker::name(self.number), None, event);
    }
}

/// A worker process. Dropping it kills it.
struct WorkerProcess {
    child: Child,
    /// Held here, because waiting for a child closes its input.
    input: Option<ChildStdin>,
    errors: Arc<Mutex<String>>,
}

impl WorkerProcess {
    fn start(state: &Arc<SoakState>, endpoint: &str, number: usize) -> Result<Self> {
        let mut child = Command::new(program()?)
            .arg0("soak")
            .args(["worker", endpoint, &number.to_string()])
            .env("COSMOS_DISABLE_IMDS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C reaches the soak only, which then shuts the workers down.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("a worker process can't be started")?;
        let input = child.stdin.take();
        let errors: Arc<Mutex<String>> = Arc::default();
        if let (Some(output), Some(stderr)) = (child.stdout.take(), child.stderr.take()) {
            tokio::spawn(count_activities(output, state.clone()));
            tokio::spawn(retain_errors(stderr, errors.clone()));
        }
        Ok(Self { child, input, errors })
    }

    /// Waits until it has ended. Returns its status and its errors.
    async fn exited(&mut self) -> Result<String> {
        let status = self.child.wait().await?;
        Ok(format!("{status}: {}", self.errors().trim()))
    }

    fn errors(&self) -> String {
        self.errors.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn kill(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }

    /// Closes its input and waits until it has shut down. Returns a description of a failure.
    async fn shut_down(mut self) -> Result<Option<String>> {
        drop(self.input.take());
        match tokio::time::timeout(SHUTDOWN_TIMEOUT, self.child.wait()).await {
            Ok(status) => {
                let status = status?;
                Ok((!status.success()).then(|| format!("{status}: {}", self.errors().trim())))
            }
            Err(_) => {
                self.child.kill().await?;
                Ok(Some(format!("it is still running after {SHUTDOWN_TIMEOUT:?}: {}", self.errors().trim())))
            }
        }
    }

    #[allow(unsafe_code)]
    fn signal(&self, signal: libc::c_int) -> Result<()> {
        // A child that has been waited for has no id, so the id never belongs to another process.
        let Some(id) = self.child.id() else { return Ok(()) };
        // SAFETY: kill(2) takes two numbers and touches no memory of this process.
        let done = unsafe { libc::kill(libc::pid_t::try_from(id)?, signal) };
        anyhow::ensure!(done == 0, "a worker can't be signalled: {}", std::io::Error::last_os_error());
        Ok(())
    }
}

/// The path of this program. On Linux the path stays valid if the program is compiled again meanwhile.
fn program() -> Result<PathBuf> {
    if cfg!(target_os = "linux") {
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    std::env::current_exe().context("the path of this program is unknown")
}

/// Adds the numbers of activities that a worker reports.
async fn count_activities(output: ChildStdout, state: Arc<SoakState>) {
    let mut lines = BufReader::new(output).lines();
    let mut before = 0;
    while let Ok(Some(line)) = lines.next_line().await {
        let total: Option<u64> = line.strip_prefix(RAN).and_then(|number| number.parse().ok());
        let Some(total) = total else { continue };
        state.summary.update(|summary| summary.activities += total.saturating_sub(before));
        before = total;
    }
}

/// Retains the beginning of a worker's standard error, and reads all of it so that the worker never waits for a reader.
async fn retain_errors(mut stderr: ChildStderr, errors: Arc<Mutex<String>>) {
    let mut buffer = [0; 4_096];
    while let Ok(length @ 1..) = stderr.read(&mut buffer).await {
        let mut errors = errors.lock().unwrap_or_else(PoisonError::into_inner);
        if errors.len() < MAX_ERRORS {
            errors.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    }
}
