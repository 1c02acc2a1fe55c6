//! A second process on the same container: this program again, as a worker.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::measure::{name, Outcome};
use crate::run::{at_once, in_turn, warm_up};
use crate::scene::{Opened, Scene, Which};

const READY: &str = "ready";

/// More under way than one process has dispatchers for, so that there is something to share.
const IN_FLIGHT: usize = 32;

/// A worker process. It ends when its input does.
struct Worker {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    async fn start(scene: &Scene) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["worker", scene.which.as_str(), &scene.endpoint()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("the worker process can't be started")?;
        let output = child.stdout.take().context("the worker has no output")?;
        let mut worker = Self { child, lines: BufReader::new(output).lines() };
        let line = worker.lines.next_line().await?;
        anyhow::ensure!(line.as_deref() == Some(READY), "the worker does not start: {line:?}");
        Ok(worker)
    }

    /// Stops the process and returns how many activities it ran.
    async fn stop(mut self) -> Result<u64> {
        drop(self.child.stdin.take());
        let line = self.lines.next_line().await?.context("the worker left without a word")?;
        self.child.wait().await?;
        Ok(line.parse()?)
    }
}

/// What the worker process does: runs a runtime until its input ends.
pub async fn serve(which: Which, endpoint: &str) -> Result<()> {
    let provider = Opened::at(which, endpoint).await?;
    let tally = Default::default();
    let runtime = provider.runtime(&tally).await;
    println!("{READY}");
    tokio::io::stdin().read_to_end(&mut Vec::new()).await?;
    println!("{}", tally.activities());
    runtime.shutdown(Some(500)).await;
    Ok(())
}

/// A runtime in each process; the orchestrations are started in this one.
pub async fn two(scene: &mut Scene, outcome: &mut Outcome, busy: u64, cap: Duration) -> Result<()> {
    scene.start().await;
    let worker = Worker::start(scene).await?;
    warm_up(&scene.client(), "warm").await?;
    at_once(scene, outcome, ("Hello", "world"), busy, IN_FLIGHT, cap).await?;
    let (there, here) = (worker.stop().await?, scene.tally.activities());
    outcome.neutral(name::SHARE, there as f64 / (there + here).max(1) as f64);
    Ok(())
}

/// A client here, the runtime in the other process.
pub async fn apart(scene: &Scene, outcome: &mut Outcome, rounds: u64, cap: Duration) -> Result<()> {
    let worker = Worker::start(scene).await?;
    warm_up(&scene.client(), "warm").await?;
    in_turn(scene, outcome, "Hello", "world", rounds, cap).await?;
    worker.stop().await?;
    Ok(())
}
