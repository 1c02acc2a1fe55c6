//! Plays worlds, and says which invariant did not hold in which.
//!
//! ```text
//! cargo run --release -p simulation -- --seed 7           # one world, one line
//! cargo run --release -p simulation -- --seeds 1..500     # many, each in a process of its own
//! cargo run --release -p simulation -- --today            # what the gate plays: the day's seeds, and all that ever failed
//! ```
#![warn(missing_docs)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{bail, Context, Result};
use clap::Parser;
use simulation::many::{self, Player, Verdict};
use simulation::seams;
use simulation::world::{self, Outcome, Plan};

/// The local account clones documents for every query: half of a world's time is the allocator's.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Plays seeded worlds in which duroxide-cosmos meets whatever can go wrong
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Play this world
    #[arg(long, conflicts_with_all = ["seeds", "today"])]
    seed: Option<u64>,
    /// Play these worlds, from the first to the one before the last, such as 1..500
    #[arg(long, value_name = "FROM..TO", value_parser = range, conflicts_with = "today")]
    seeds: Option<(u64, u64)>,
    /// Play new worlds each day, for about a minute and a half, and all that ever failed
    #[arg(long)]
    today: bool,
    /// Write the whole story of the one world to this file
    #[arg(long, value_name = "FILE", requires = "seed")]
    story: Option<PathBuf>,
    /// How many worlds are played at once; as many as there are cores by default
    #[arg(long)]
    jobs: Option<usize>,
    /// Stop at the first world that fails
    #[arg(long)]
    stop: bool,
}

/// Seeds that once failed, and what was wrong: a world that was mended stays mended.
const EVER_FAILED: &str = include_str!("../failed.txt");

fn main() -> ExitCode {
    let _ = tracing::subscriber::set_global_default(tracing::subscriber::NoSubscriber::new());
    simulation::exit(run(&Options::parse()))
}

fn run(options: &Options) -> Result<bool> {
    let jobs = many::jobs(options.jobs);
    if options.today {
        return today(jobs);
    }
    match (options.seed, options.seeds) {
        (Some(seed), _) => one(seed, options),
        (None, Some((from, to))) => {
            summary(&many::play(&Player::this()?, (from..to).collect(), jobs, None, options.stop)?)
        }
        (None, None) => bail!("say which world to play: --seed 7, --seeds 1..500 or --today"),
    }
}

/// Plays one world and prints a line, or what went wrong.
fn one(seed: u64, options: &Options) -> Result<bool> {
    // The SDK asks the machine where it runs: a world has no network.
    std::env::set_var("COSMOS_DISABLE_IMDS", "1");
    // It also keeps a backtrace with every error, where those are on: a third of the time.
    std::env::set_var("RUST_LIB_BACKTRACE", "0");
    let began = Instant::now();
    let plan = Plan::draw(seed);
    let kind = plan.summary();
    give_up_if_it_spins(seed, kind.clone());
    let played = std::thread::Builder::new().name(format!("world {seed}")).spawn(move || world::play(plan))?.join();
    let Ok(outcome) = played else { bail!("seed {seed}: the world's thread panicked; {}", again(seed)) };
    if let Some(path) = &options.story {
        std::fs::write(path, outcome.story.whole()).with_context(|| path.display().to_string())?;
    }
    let Outcome { broken, lasted, requests, story } = outcome;
    let verdict = if broken.is_none() { "ok" } else { "FAILED" };
    let took = began.elapsed();
    println!(
        "seed {seed}: {verdict}: {kind}; {:.0} s of time in {:.1} s, {requests} requests, story {:016x}",
        lasted.as_secs_f64(),
        took.as_secs_f64(),
        story.fingerprint(),
    );
    let Some(broken) = broken else { return Ok(true) };
    println!("  broken: {broken}");
    println!("  the story of {:?}, in order (--story FILE writes all of it):", broken.instance);
    for line in story.of(&broken.instance, 120) {
        println!("    {}", line.to_string().chars().take(260).collect::<String>());
    }
    println!("  {}", again(seed));
    Ok(false)
}

/// A lock of the SDK's lets its waiters wake each other while somebody holds it across a request (`async-lock`'s readers, while
/// the partition map is fetched). Elsewhere that burns some milliseconds; here time stands still while anything runs.
fn give_up_if_it_spins(seed: u64, kind: String) {
    std::thread::spawn(move || loop {
        let before = seams::steps();
        std::thread::sleep(STANDSTILL);
        if seams::steps() == before {
            println!("seed {seed}: given up: {kind}; a library below spins, and time stands still");
            std::process::exit(many::GIVEN_UP);
        }
    });
}

/// How long a step of time may take, on the busiest machine.
const STANDSTILL: Duration = Duration::from_secs(20);

fn again(seed: u64) -> String {
    format!("again: cargo run --release -p simulation -- --seed {seed}")
}

/// Plays the day's worlds for a minute and a half, and those that ever failed.
fn today(jobs: usize) -> Result<bool> {
    let player = Player::this()?;
    let day = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    let failed = EVER_FAILED.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok());
    let failed: Vec<u64> = failed.collect();
    println!("{} worlds that once failed", failed.len());
    let mended = summary(&many::play(&player, failed, jobs, None, false)?)?;
    println!("day {day}: worlds from {} on", day * 1_000);
    let new = (day * 1_000..(day + 1) * 1_000).collect();
    let new = summary(&many::play(&player, new, jobs, Some(Duration::from_secs(75)), false)?)?;
    Ok(mended && new)
}

fn summary(verdicts: &[Verdict]) -> Result<bool> {
    let (given_up, played): (Vec<&Verdict>, Vec<&Verdict>) = verdicts.iter().partition(|verdict| verdict.is_given_up);
    for verdict in &given_up {
        println!("{}", verdict.said);
    }
    let failed: Vec<&Verdict> = played.iter().copied().filter(|verdict| !verdict.is_well).collect();
    for verdict in &failed {
        println!("{}", verdict.said);
    }
    let seeds: Vec<String> = failed.iter().map(|verdict| verdict.seed.to_string()).collect();
    let failed = if seeds.is_empty() { String::new() } else { format!(": seeds {}", seeds.join(", ")) };
    let given_up = if given_up.is_empty() { String::new() } else { format!(", {} given up", given_up.len()) };
    println!("{} worlds played{given_up}, {} failed{failed}", played.len(), seeds.len());
    Ok(seeds.is_empty())
}

fn range(text: &str) -> Result<(u64, u64), String> {
    let parts = text.split_once("..").and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
    parts.filter(|(from, to)| from < to).ok_or_else(|| "not a range such as 1..500".to_owned())
}
