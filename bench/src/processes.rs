//! Other processes on the same container: this program again, as a worker or as a client.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines, Stdin};
use tokio::process::{Child, ChildStdout, Command};

use crate::fixture::{Fixture, OpenProvider, ProviderKind, DISPATCHERS};
use crate::measure::{name, Outcome};
use crate::orchestrations::RunCounters;
use crate::run::{run_concurrently, run_sequentially, warm_up, SequentialWorkload};

const READY: &str = "ready";

/// The number of orchestrations in flight. One process has fewer dispatchers, so that the second one has work.
const IN_FLIGHT: usize = 32;

/// Another process of this program. It answers each line of input with a line of output, and ends with its input.
pub struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts this program again and waits until the new process reports that it is ready.
    pub async fn start(role: &str, kind: ProviderKind, endpoint: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([role, kind.as_str(), endpoint])
            // Turns off backtraces of the SDK's errors, as the documentation recommends: the SDK captures some for
            // every answer.
            .env("RUST_LIB_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("can't start the {role} process"))?;
        let output = child.stdout.take().with_context(|| format!("the {role} process has no output"))?;
        let mut process = Self { child, lines: BufReader::new(output).lines() };
        let line = process.lines.next_line().await?;
        ensure!(line.as_deref() == Some(READY), "the {role} process did not start: {line:?}");
        Ok(process)
    }

    /// Sends a command and waits for its answer.
    pub async fn ask<A: DeserializeOwned>(&mut self, command: &impl Serialize) -> Result<A> {
        let input = self.child.stdin.as_mut().context("the process was already told to end")?;
        input.write_all((serde_json::to_string(command)? + "\n").as_bytes()).await?;
        self.answer().await
    }

    /// Kills the process with a signal that it can't catch, like a crash.
    pub async fn kill(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }

    async fn answer<A: DeserializeOwned>(&mut self) -> Result<A> {
        let line = self.lines.next_line().await?.context("the process ended without an answer")?;
        Ok(serde_json::from_str(&line)?)
    }
}

/// The work of a worker process so far.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct WorkDone {
    /// Turns.
    pub turns: u64,
    /// Activities.
    pub activities: u64,
    /// When the first turn since the last report began, in milliseconds since 1970.
    pub first_turn: Option<f64>,
}

impl WorkDone {
    /// Returns the sum of turns and activities. A Hello has two turns and one activity.
    pub fn steps(self) -> u64 {
        self.turns + self.activities
    }

    fn of(counters: &RunCounters) -> Self {
        Self { turns: counters.turns(), activities: counters.activities(), first_turn: counters.take_first_turn() }
    }
}

/// A worker process.
pub struct WorkerProcess(Process);

impl WorkerProcess {
    /// Starts a worker on the account at `endpoint`.
    pub async fn start(kind: ProviderKind, endpoint: &str) -> Result<Self> {
        Ok(Self(Process::start("worker", kind, endpoint).await?))
    }

    /// Returns the work of the process so far.
    pub async fn done(&mut self) -> Result<WorkDone> {
        self.0.ask(&()).await
    }

    /// Stops the process and returns its work.
    pub async fn stop(mut self) -> Result<WorkDone> {
        drop(self.0.child.stdin.take());
        let done = self.0.answer().await?;
        self.0.child.wait().await?;
        Ok(done)
    }

    /// Kills the process, like a crash.
    pub async fn kill(self) -> Result<()> {
        self.0.kill().await
    }
}

/// The main function of a worker process. It runs a runtime until its input ends, and reports its work on request.
pub async fn serve(kind: ProviderKind, endpoint: &str) -> Result<()> {
    let provider = OpenProvider::at(kind, endpoint).await?;
    let counters = Default::default();
    let runtime = provider.runtime(&counters, DISPATCHERS).await;
    let mut commands = ready();
    while commands.next_line().await?.is_some() {
        reply(&WorkDone::of(&counters))?;
    }
    reply(&WorkDone::of(&counters))?;
    runtime.shutdown(Some(500)).await;
    provider.leave().await;
    Ok(())
}

/// Reports that this process is ready, and returns its input.
pub fn ready() -> Lines<BufReader<Stdin>> {
    println!("{READY}");
    BufReader::new(tokio::io::stdin()).lines()
}

/// Answers a command.
pub fn reply(answer: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(answer)?);
    Ok(())
}

/// Runs one runtime in each of two processes. This process starts the orchestrations.
pub async fn two_processes(fixture: &mut Fixture, outcome: &mut Outcome, busy: u64, cap: Duration) -> Result<()> {
    fixture.start().await;
    let worker = WorkerProcess::start(fixture.kind, &fixture.endpoint()).await?;
    warm_up(&fixture.client(), "warm").await?;
    run_concurrently(fixture, outcome, ("Hello", "world"), busy, IN_FLIGHT, cap).await?;
    let (second, first) = (worker.stop().await?.activities, fixture.counters.activities());
    outcome.neutral(name::SHARE, second as f64 / (second + first).max(1) as f64);
    Ok(())
}

/// Runs the client in this process and the runtime in another one.
pub async fn remote_client(fixture: &Fixture, outcome: &mut Outcome, rounds: u64, cap: Duration) -> Result<()> {
    let worker = WorkerProcess::start(fixture.kind, &fixture.endpoint()).await?;
    warm_up(&fixture.client(), "warm").await?;
    run_sequentially(fixture, outcome, SequentialWorkload { orchestration: "Hello", input: "world", rounds, cap })
        .await?;
    worker.stop().await?;
    Ok(())
}
