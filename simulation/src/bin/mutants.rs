//! Plays worlds with bugs in the library, until each bug is found.
//!
//! ```text
//! cargo run --release -p simulation --bin mutants                           # all of them, in up to 1,000 worlds each
//! cargo run --release -p simulation --bin mutants -- --only ghost-message   # one
//! ```
#![warn(missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use clap::Parser;
use simulation::many::{self, Player, Verdict};
use simulation::mutants::{self, Mutant, LIST, VARIABLE};

/// Plays worlds with bugs in the library, until each bug is found
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Play with this mutant only; may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// In how many worlds each mutant must be found
    #[arg(long, default_value_t = 1_000)]
    seeds: u64,
    /// List the mutants and play nothing
    #[arg(long)]
    list: bool,
    /// How many worlds are played at once; as many as there are cores by default
    #[arg(long)]
    jobs: Option<usize>,
}

/// Worlds that must go well while no mutant is alive: what is built is the library.
const HEALTHY: u64 = 4;
/// What is built anew for the mutants is built fast: worlds spend their time in what lies below it.
const BUILT_FAST: [&str; 2] =
    ["profile.release.package.duroxide-cosmos.opt-level=1", "profile.release.package.simulation.opt-level=1"];

fn main() -> ExitCode {
    simulation::exit(run(&Options::parse()))
}

fn run(options: &Options) -> Result<bool> {
    let chosen = choose(&options.only)?;
    if options.list {
        chosen.iter().for_each(|mutant| println!("{:<28} {}", mutant.name, mutant.what));
        return Ok(true);
    }
    let jobs = many::jobs(options.jobs);
    let player = Player::of(build()?);
    let healthy = many::play(&player, (1..=HEALTHY).collect(), jobs, None, true)?;
    if let Some(failed) = healthy.iter().find(|verdict| !verdict.is_well) {
        bail!("a world fails without any mutant:\n{}", failed.said);
    }
    println!("{:<28} {:<90} {:>5} {:>7} {:>8}  broken", "mutant", "what", "seed", "worlds", "seconds");
    let mut all_found = true;
    for mutant in chosen {
        let began = Instant::now();
        let alive = Player {
            variables: vec![(VARIABLE.to_owned(), mutant.name.to_owned())],
            told: mutant.name.to_owned(),
            ..player.clone()
        };
        let verdicts = many::play(&alive, (1..=options.seeds).collect(), jobs, None, true)?;
        all_found &= tell(mutant, &verdicts, began.elapsed());
    }
    Ok(all_found)
}

fn choose(only: &[String]) -> Result<Vec<&'static Mutant>> {
    if only.is_empty() {
        return Ok(LIST.iter().collect());
    }
    let find = |name: &String| LIST.iter().find(|mutant| mutant.name == name);
    only.iter().map(|name| find(name).with_context(|| format!("there is no mutant {name:?}: see --list"))).collect()
}

/// Prints the mutant's line; whether it was found.
fn tell(mutant: &Mutant, verdicts: &[Verdict], took: Duration) -> bool {
    let found = verdicts.iter().find(|verdict| !verdict.is_well);
    let seed = found.map_or("-".to_owned(), |verdict| verdict.seed.to_string());
    let broken = found.map_or("NOT FOUND", |verdict| invariant(&verdict.said));
    let (name, what, worlds, seconds) = (mutant.name, mutant.what, verdicts.len(), took.as_secs_f64());
    println!("{name:<28} {what:<90} {seed:>5} {worlds:>7} {seconds:>8.1}  {broken}");
    found.is_some()
}

/// The invariant that a world's process says is broken, or what it says instead.
fn invariant(said: &str) -> &str {
    let broken = said.lines().find_map(|line| line.trim().strip_prefix("broken: "));
    let broken = broken.map(|broken| broken.split_once(": \"").map_or(broken, |(invariant, _)| invariant));
    broken.or_else(|| said.lines().last()).unwrap_or("it says nothing")
}

/// Builds the simulation on a library with all mutants in; the program.
fn build() -> Result<PathBuf> {
    let root = mutants::workspace().canonicalize()?;
    let place = root.join("target/mutants");
    let (tree, target) = (place.join("tree"), place.join("build"));
    copy(&root, &tree)?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--release", "--locked", "-p", "simulation", "--bin", "simulation"])
        .args(BUILT_FAST.iter().flat_map(|option| ["--config", option]))
        .current_dir(&tree)
        .env("CARGO_TARGET_DIR", &target)
        .status()
        .context("cargo can't be started")?;
    ensure!(status.success(), "the library can't be built with its mutants");
    Ok(target.join("release/simulation"))
}

/// Copies the workspace's files, with all mutants in. What has not changed is not touched, so that it is not built again.
fn copy(root: &Path, tree: &Path) -> Result<()> {
    let mutated = mutants::mutated(root, LIST)?;
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("git")?;
    ensure!(listed.status.success(), "git can't list the workspace's files");
    let listed = String::from_utf8(listed.stdout)?;
    let there = |file: &&str| root.join(file).is_file();
    let files: BTreeSet<&str> = listed.split_terminator('\0').filter(there).collect();
    for file in &files {
        if !mutated.contains_key(*file) {
            put(&tree.join(file), &fs::read(root.join(file)).with_context(|| (*file).to_owned())?)?;
        }
    }
    for (file, text) in &mutated {
        put(&tree.join(file), text.as_bytes())?;
    }
    let expected = |file: &str| files.contains(file) || mutated.contains_key(file);
    remove_others(tree, tree, &expected)
}

fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let folder = path.parent().context("a file has a folder")?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// Removes what an earlier copy has left and is not in the workspace any more.
fn remove_others(folder: &Path, tree: &Path, expected: &dyn Fn(&str) -> bool) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, tree, expected)?;
        } else if !path.strip_prefix(tree)?.to_str().is_some_and(expected) {
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}
