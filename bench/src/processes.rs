//! Other processes on the same container: this program again, as a worker or as a client that only starts and waits.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines, Stdin};
use tokio::process::{Child, ChildStdout, Command};

use crate::measure::{name, Outcome};
use crate::orchestrations::Tally;
use crate::run::{at_once, in_turn, warm_up, Job};
use crate::scene::{Opened, Scene, Which, DISPATCHERS};

const READY: &str = "ready";

/// More under way than one process has dispatchers for, so that there is something to share.
const IN_FLIGHT: usize = 32;

/// Another process of this program: it takes a line and answers with a line, and ends when its input does.
pub struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts this program again and waits until it says that it is ready.
    pub async fn start(role: &str, which: Which, endpoint: &str) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args([role, which.as_str(), endpoint])
            // Backtraces of the SDK's errors, as README advises: it makes some for every answer.
            .env("RUST_LIB_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("the {role} process can't be started"))?;
        let output = child.stdout.take().with_context(|| format!("the {role} has no output"))?;
        let mut process = Self { child, lines: BufReader::new(output).lines() };
        let line = process.lines.next_line().await?;
        ensure!(line.as_deref() == Some(READY), "the {role} does not start: {line:?}");
        Ok(process)
    }

    /// Sends an order and waits for its answer.
    pub async fn ask<A: DeserializeOwned>(&mut self, order: &impl Serialize) -> Result<A> {
        let input = self.child.stdin.as_mut().context("the process has been told to end")?;
        input.write_all((serde_json::to_string(order)? + "\n").as_bytes()).await?;
        self.answer().await
    }

    /// Ends the process at once, as a crash does: with a signal that it can't catch.
    pub async fn kill(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }

    async fn answer<A: DeserializeOwned>(&mut self) -> Result<A> {
        let line = self.lines.next_line().await?.context("the process left without a word")?;
        Ok(serde_json::from_str(&line)?)
    }
}

/// What a worker process has done so far.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Done {
    /// Turns.
    pub turns: u64,
    /// Activities.
    pub activities: u64,
    /// When the first turn since the last time began, in milliseconds since 1970.
    pub woke: Option<f64>,
}

impl Done {
    /// Turns and activities together; a single greeting has two and one.
    pub fn steps(self) -> u64 {
        self.turns + self.activities
    }

    fn of(tally: &Tally) -> Self {
        Self { turns: tally.turns(), activities: tally.activities(), woke: tally.take_woke() }
    }
}

/// A worker process.
pub struct Worker(Process);

impl Worker {
    /// Starts one on the account at `endpoint`.
    pub async fn start(which: Which, endpoint: &str) -> Result<Self> {
        Ok(Self(Process::start("worker", which, endpoint).await?))
    }

    /// What it has done so far.
    pub async fn done(&mut self) -> Result<Done> {
        self.0.ask(&()).await
    }

    /// Stops the process and returns what it did.
    pub async fn stop(mut self) -> Result<Done> {
        drop(self.0.child.stdin.take());
        let done = self.0.answer().await?;
        self.0.child.wait().await?;
        Ok(done)
    }

    /// Ends it as a crash does.
    pub async fn kill(self) -> Result<()> {
        self.0.kill().await
    }
}

/// What the worker process does: runs a runtime until its input ends, and says what it did whenever it is asked.
pub async fn serve(which: Which, endpoint: &str) -> Result<()> {
    let provider = Opened::at(which, endpoint).await?;
    let tally = Default::default();
    let runtime = provider.runtime(&tally, DISPATCHERS).await;
    let mut orders = ready();
    while orders.next_line().await?.is_some() {
        reply(&Done::of(&tally))?;
    }
    reply(&Done::of(&tally))?;
    runtime.shutdown(Some(500)).await;
    provider.leave().await;
    Ok(())
}

/// Says that this process can take orders, and takes them.
pub fn ready() -> Lines<BufReader<Stdin>> {
    println!("{READY}");
    BufReader::new(tokio::io::stdin()).lines()
}

/// Answers an order.
pub fn reply(answer: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string(answer)?);
    Ok(())
}

/// A runtime in each process; the orchestrations are started in this one.
pub async fn two(scene: &mut Scene, outcome: &mut Outcome, busy: u64, cap: Duration) -> Result<()> {
    scene.start().await;
    let worker = Worker::start(scene.which, &scene.endpoint()).await?;
    warm_up(&scene.client(), "warm").await?;
    at_once(scene, outcome, ("Hello", "world"), busy, IN_FLIGHT, cap).await?;
    let (there, here) = (worker.stop().await?.activities, scene.tally.activities());
    outcome.neutral(name::SHARE, there as f64 / (there + here).max(1) as f64);
    Ok(())
}

/// A client here, the runtime in the other process.
pub async fn apart(scene: &Scene, outcome: &mut Outcome, rounds: u64, cap: Duration) -> Result<()> {
    let worker = Worker::start(scene.which, &scene.endpoint()).await?;
    warm_up(&scene.client(), "warm").await?;
    in_turn(scene, outcome, Job { orchestration: "Hello", input: "world", rounds, cap }).await?;
    worker.stop().await?;
    Ok(())
}
