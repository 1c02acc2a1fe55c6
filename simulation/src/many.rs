//! Many worlds at once, each in a process of its own: what one leaves in memory can't be felt by the next, and one that
//! hangs can be killed.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

/// The exit code of a world that could not be played to its end.
pub const GIVEN_UP: i32 = 3;

/// What became of one world.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// Its number.
    pub seed: u64,
    /// Whether every invariant held, as far as it was played.
    pub is_well: bool,
    /// Whether it could not be played to its end, through no fault of the library's.
    pub is_given_up: bool,
    /// What its process said.
    pub said: String,
    /// How long it took.
    pub took: Duration,
}

/// How many worlds are played at once: as many as were asked for, or as there are cores.
pub fn jobs(asked: Option<usize>) -> usize {
    asked.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from)).max(1)
}

/// A program that plays one world, as the simulation does with `--seed`.
#[derive(Clone, Debug)]
pub struct Player {
    /// The program.
    pub program: PathBuf,
    /// Environment variables that it has besides this process's own.
    pub variables: Vec<(String, String)>,
    /// What is told of it beside the progress.
    pub told: String,
    /// No world takes so long, unless something in it never ends.
    pub longest: Duration,
}

impl Player {
    /// This program.
    pub fn this() -> Result<Self> {
        Ok(Self::of(std::env::current_exe().context("this program can't be found")?))
    }

    /// Another one.
    pub fn of(program: PathBuf) -> Self {
        Self { program, variables: Vec::new(), told: String::new(), longest: Duration::from_secs(600) }
    }

    /// Plays one world, unless it turns out on the way that it is played in vain.
    fn one(&self, seed: u64, in_vain: impl Fn() -> bool) -> Result<Option<Verdict>> {
        let began = Instant::now();
        let mut child = Command::new(&self.program)
            .args(["--seed", &seed.to_string()])
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("a world can't be started")?;
        let said = child.stdout.take().map(read);
        let complained = child.stderr.take().map(read);
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            let given_up = in_vain();
            if given_up || began.elapsed() > self.longest {
                child.kill()?;
                child.wait()?;
                if given_up {
                    return Ok(None);
                }
                break None;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut said: String = [said, complained].into_iter().flatten().filter_map(|text| text.join().ok()).collect();
        if status.is_none() {
            said.push_str(&format!("seed {seed}: FAILED: it does not end\n"));
        }
        let is_given_up = status.is_some_and(|status| status.code() == Some(GIVEN_UP));
        let is_well = is_given_up || status.is_some_and(|status| status.success());
        Ok(Some(Verdict { seed, is_well, is_given_up, said: said.trim_end().to_owned(), took: began.elapsed() }))
    }
}

/// Plays these worlds, `jobs` at once, until all are played, `time` is over, or, if that is wanted, one has failed.
pub fn play(player: &Player, seeds: Vec<u64>, jobs: usize, time: Option<Duration>, stop: bool) -> Result<Vec<Verdict>> {
    let began = Instant::now();
    let bar = ProgressBar::new(seeds.len() as u64);
    let style = "{bar:30} {pos}/{len} worlds, {elapsed} gone, {eta} to go {msg}";
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(player.told.clone());
    let waiting = Mutex::new(VecDeque::from(seeds));
    let verdicts: Mutex<Vec<Verdict>> = Mutex::default();
    let next = || {
        let over = time.is_some_and(|time| began.elapsed() > time);
        let enough = stop && lock(&verdicts).iter().any(|verdict| !verdict.is_well);
        if over || enough {
            return None;
        }
        lock(&waiting).pop_front()
    };
    std::thread::scope(|scope| {
        let worker = || -> Result<()> {
            while let Some(seed) = next() {
                // Which world is the first to fail does not depend on how long others take.
                let in_vain = || stop && lock(&verdicts).iter().any(|verdict| !verdict.is_well && verdict.seed < seed);
                let Some(verdict) = player.one(seed, in_vain)? else { continue };
                if !verdict.is_well {
                    bar.suspend(|| eprintln!("seed {seed} failed"));
                }
                bar.inc(1);
                lock(&verdicts).push(verdict);
            }
            Ok(())
        };
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(|_| anyhow::bail!("a player panicked")))
    })?;
    bar.finish_and_clear();
    let mut verdicts = verdicts.into_inner().unwrap_or_else(PoisonError::into_inner);
    verdicts.sort_by_key(|verdict| verdict.seed);
    Ok(verdicts)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads all that comes, aside, so that the process is never held up by it.
fn read(mut from: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = from.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    })
}
