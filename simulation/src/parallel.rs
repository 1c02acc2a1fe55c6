//! Several runs at once, each in a process of its own. So no run sees memory of another one, and a run that hangs can
//! be killed.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

/// The exit code of a run that was abandoned.
pub const ABANDONED: i32 = 3;

/// The result of one run.
#[derive(Clone, Debug)]
pub struct RunReport {
    /// The seed.
    pub seed: u64,
    /// Whether no invariant was violated before the run ended or was abandoned.
    pub passed: bool,
    /// Whether the run was abandoned because a dependency spins.
    pub is_abandoned: bool,
    /// The output of its process.
    pub output: String,
    /// The time that it took.
    pub took: Duration,
}

/// The number of runs at once: the requested number, or the number of cores.
pub fn jobs(requested: Option<usize>) -> usize {
    requested.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)).max(1)
}

/// A program that plays one run with `--seed`.
#[derive(Clone, Debug)]
pub struct RunProgram {
    /// The path of the program.
    pub path: PathBuf,
    /// Environment variables in addition to those of this process.
    pub variables: Vec<(String, String)>,
    /// The label beside the progress bar.
    pub label: String,
    /// The time after which a run counts as hanging.
    pub timeout: Duration,
}

impl RunProgram {
    /// The program that is running now.
    pub fn this() -> Result<Self> {
        Ok(Self::at(std::env::current_exe().context("the path of this program is unknown")?))
    }

    /// The program at this path.
    pub fn at(path: PathBuf) -> Self {
        Self { path, variables: Vec::new(), label: String::new(), timeout: Duration::from_secs(600) }
    }

    /// Plays one run. Returns `None` if `is_needless` becomes true before the run ends.
    fn play_one(&self, seed: u64, is_needless: impl Fn() -> bool) -> Result<Option<RunReport>> {
        let began = Instant::now();
        let mut child = Command::new(&self.path)
            .args(["--seed", &seed.to_string()])
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("the process of a run can't be started")?;
        let output = child.stdout.take().map(read);
        let errors = child.stderr.take().map(read);
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            let needless = is_needless();
            if needless || began.elapsed() > self.timeout {
                child.kill()?;
                child.wait()?;
                if needless {
                    return Ok(None);
                }
                break None;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut output: String = [output, errors].into_iter().flatten().filter_map(|text| text.join().ok()).collect();
        if status.is_none() {
            output.push_str(&format!("seed {seed}: FAILED: the run does not end\n"));
        }
        let is_abandoned = status.is_some_and(|status| status.code() == Some(ABANDONED));
        let passed = is_abandoned || status.is_some_and(|status| status.success());
        Ok(Some(RunReport { seed, passed, is_abandoned, output: output.trim_end().to_owned(), took: began.elapsed() }))
    }
}

/// Plays the runs of these seeds, `jobs` at once. It ends:
/// - when all are played,
/// - after `time`, if there is one,
/// - after the first failure, if `stop` is set.
pub fn play(
    program: &RunProgram,
    seeds: Vec<u64>,
    jobs: usize,
    time: Option<Duration>,
    stop: bool,
) -> Result<Vec<RunReport>> {
    let began = Instant::now();
    let bar = ProgressBar::new(seeds.len() as u64);
    let style = "{bar:30} {pos}/{len} runs, {elapsed} elapsed, {eta} left {msg}";
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(program.label.clone());
    let waiting = Mutex::new(VecDeque::from(seeds));
    let reports: Mutex<Vec<RunReport>> = Mutex::default();
    let next = || {
        let over = time.is_some_and(|time| began.elapsed() > time);
        let enough = stop && lock(&reports).iter().any(|report| !report.passed);
        if over || enough {
            return None;
        }
        lock(&waiting).pop_front()
    };
    std::thread::scope(|scope| {
        let worker = || -> Result<()> {
            while let Some(seed) = next() {
                // A run is needless only if a run with a smaller seed has failed. So the first failure does not depend
                // on the time that runs take.
                let is_needless = || stop && lock(&reports).iter().any(|report| !report.passed && report.seed < seed);
                let Some(report) = program.play_one(seed, is_needless)? else { continue };
                if !report.passed {
                    bar.suspend(|| eprintln!("seed {seed} failed"));
                }
                bar.inc(1);
                lock(&reports).push(report);
            }
            Ok(())
        };
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(worker)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|_| anyhow::bail!("a thread that plays runs panicked")))
    })?;
    bar.finish_and_clear();
    let mut reports = reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    reports.sort_by_key(|report| report.seed);
    Ok(reports)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads an output to its end on a thread of its own, so that the process never waits for a reader.
fn read(mut from: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = from.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}
