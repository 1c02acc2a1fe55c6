//! The worker processes: started, killed, stopped for a while, told to leave, and started again.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};

use crate::dice::Dice;
use crate::ledger::Broken;
use crate::soak::stage::{Phase, Stage};
use crate::soak::worker::{self, RAN};

/// How long a worker may take to leave. It gives up by itself before.
const PATIENCE: Duration = Duration::from_secs(60);
/// How much of what a worker complains about is kept.
const COMPLAINT: usize = 4_000;

/// A worker's place. Lives in it come and go.
pub struct Place {
    /// What is shared.
    pub stage: Arc<Stage>,
    /// Where the account is.
    pub endpoint: String,
    /// Which place it is.
    pub number: usize,
    /// What befalls the workers in it is drawn from these.
    pub dice: Dice,
}

/// What befalls a worker.
enum Blow {
    Kill,
    Stop(Duration),
    Leave,
}

impl Place {
    /// Keeps a worker in the place until the soak is over.
    pub async fn keep(mut self) {
        if let Err(error) = self.try_to_keep().await {
            self.broken("a worker can be started", format!("{error:#}"));
        }
    }

    async fn try_to_keep(&mut self) -> Result<()> {
        let mut process = None;
        while self.stage.is_rough() {
            let running = self.running(process.take())?;
            process = self.live(running).await?;
        }
        let mut running = self.running(process)?;
        tokio::select! {
            () = self.stage.reached(Phase::Over) => {}
            died = running.died() => {
                self.died(died?);
                return Ok(());
            }
        }
        self.leave(running).await
    }

    fn running(&self, process: Option<Process>) -> Result<Process> {
        match process {
            Some(running) => Ok(running),
            None => {
                self.tell("starts");
                Process::start(&self.stage, &self.endpoint, self.number)
            }
        }
    }

    /// A worker lives until something befalls it, and maybe goes on after that.
    async fn live(&mut self, mut process: Process) -> Result<Option<Process>> {
        let life = Duration::from_millis(self.dice.among(1_000..=30_000));
        tokio::select! {
            died = process.died() => {
                self.died(died?);
                self.stage.rough_for(Duration::from_secs(1)).await;
                return Ok(None);
            }
            () = self.stage.rough_for(life) => {}
        }
        if !self.stage.is_rough() {
            return Ok(Some(process));
        }
        match self.draw() {
            Blow::Stop(pause) => {
                self.stage.tally.count(|figures| figures.stops += 1);
                self.tell(&format!("is stopped for {} ms", pause.as_millis()));
                process.signal(libc::SIGSTOP)?;
                self.stage.rough_for(pause).await;
                process.signal(libc::SIGCONT)?;
                self.tell("goes on");
                return Ok(Some(process));
            }
            Blow::Kill => {
                self.stage.tally.count(|figures| figures.kills += 1);
                self.tell("is killed");
                process.kill().await?;
            }
            Blow::Leave => {
                self.stage.tally.count(|figures| figures.leaves += 1);
                self.leave(process).await?;
            }
        }
        let away = Duration::from_millis(self.dice.mostly_small(0..=8_000));
        self.stage.rough_for(away).await;
        Ok(None)
    }

    fn draw(&mut self) -> Blow {
        match self.dice.among(0..=9) {
            0..=5 => Blow::Kill,
            6..=8 => Blow::Stop(Duration::from_millis(self.dice.among(200..=15_000))),
            _ => Blow::Leave,
        }
    }

    async fn leave(&self, process: Process) -> Result<()> {
        self.tell("is told to leave");
        match process.leave().await? {
            None => self.tell("has left"),
            Some(detail) => self.broken("workers shut down when they are told to", detail),
        }
        Ok(())
    }

    fn died(&self, how: String) {
        self.broken("workers don't end by themselves", how);
    }

    fn broken(&self, invariant: &'static str, detail: String) {
        self.stage.report(Broken { invariant, instance: worker::name(self.number), detail });
    }

    fn tell(&self, what: &str) {
        self.stage.story.tell(&worker::name(self.number), None, what);
    }
}

/// A worker process. Dropping it kills it.
struct Process {
    child: Child,
    /// Kept here, since waiting for a child ends what input it still has.
    input: Option<ChildStdin>,
    complaint: Arc<Mutex<String>>,
}

impl Process {
    fn start(stage: &Arc<Stage>, endpoint: &str, place: usize) -> Result<Self> {
        let mut child = Command::new(program()?)
            .arg0("soak")
            .args(["worker", endpoint, &place.to_string()])
            .env("COSMOS_DISABLE_IMDS", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C is for the soak, which then tells the workers.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .context("a worker process can't be started")?;
        let input = child.stdin.take();
        let complaint: Arc<Mutex<String>> = Arc::default();
        if let (Some(output), Some(errors)) = (child.stdout.take(), child.stderr.take()) {
            tokio::spawn(count_activities(output, stage.clone()));
            tokio::spawn(keep_complaints(errors, complaint.clone()));
        }
        Ok(Self { child, input, complaint })
    }

    /// Waits until it has ended, and says how.
    async fn died(&mut self) -> Result<String> {
        let status = self.child.wait().await?;
        Ok(format!("{status}: {}", self.complaint().trim()))
    }

    fn complaint(&self) -> String {
        self.complaint.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn kill(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }

    /// Ends its input and waits until it has left; says what went wrong with that.
    async fn leave(mut self) -> Result<Option<String>> {
        drop(self.input.take());
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(status) => {
                let status = status?;
                Ok((!status.success()).then(|| format!("{status}: {}", self.complaint().trim())))
            }
            Err(_) => {
                self.child.kill().await?;
                Ok(Some(format!("it has not within {PATIENCE:?}: {}", self.complaint().trim())))
            }
        }
    }

    #[allow(unsafe_code)]
    fn signal(&self, signal: libc::c_int) -> Result<()> {
        // A child that was waited for has no id any more, so the id is not another process's.
        let Some(id) = self.child.id() else { return Ok(()) };
        // SAFETY: kill(2) takes two numbers and touches no memory of this process.
        let done = unsafe { libc::kill(libc::pid_t::try_from(id)?, signal) };
        anyhow::ensure!(done == 0, "a worker can't be signalled: {}", std::io::Error::last_os_error());
        Ok(())
    }
}

/// This program. On Linux by a name that stays this very program's, also when it is compiled again meanwhile.
fn program() -> Result<PathBuf> {
    if cfg!(target_os = "linux") {
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    std::env::current_exe().context("this program can't be found")
}

/// Adds up the activities that a worker says it has begun.
async fn count_activities(output: ChildStdout, stage: Arc<Stage>) {
    let mut lines = BufReader::new(output).lines();
    let mut before = 0;
    while let Ok(Some(line)) = lines.next_line().await {
        let total: Option<u64> = line.strip_prefix(RAN).and_then(|number| number.parse().ok());
        let Some(total) = total else { continue };
        stage.tally.count(|figures| figures.activities += total.saturating_sub(before));
        before = total;
    }
}

/// Keeps the beginning of what a worker complains about, and reads on so that it is never held up.
async fn keep_complaints(mut errors: ChildStderr, complaint: Arc<Mutex<String>>) {
    let mut buffer = [0; 4_096];
    while let Ok(length @ 1..) = errors.read(&mut buffer).await {
        let mut complaint = complaint.lock().unwrap_or_else(PoisonError::into_inner);
        if complaint.len() < COMPLAINT {
            complaint.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    }
}
