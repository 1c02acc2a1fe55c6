//! Plays simulation runs with a bug in the library, until a run finds the bug. It repeats that for each mutant.
//!
//! ```text
//! cargo run --release -p simulation --bin mutants                           # all of them, in up to 1,000 runs each
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
use simulation::mutants::{self, Mutant, LIST, VARIABLE};
use simulation::parallel::{self, RunProgram, RunReport};

/// Plays simulation runs with bugs in the library, until each bug is found
#[derive(Parser)]
#[command(version)]
struct Options {
    /// Play with this mutant only; may be repeated
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// The number of runs in which each mutant must be found
    #[arg(long, default_value_t = 1_000)]
    seeds: u64,
    /// List the mutants and play no run
    #[arg(long)]
    list: bool,
    /// The number of runs at once [default: the number of cores]
    #[arg(long)]
    jobs: Option<usize>,
}

/// The number of runs that must pass while no mutant is active. They show that the build is the library.
const HEALTHY: u64 = 4;
/// Options for a fast build of the crates that are built again for the mutants. Runs spend their time in other crates.
const FAST_BUILD: [&str; 2] =
    ["profile.release.package.duroxide-cosmos.opt-level=1", "profile.release.package.simulation.opt-level=1"];

fn main() -> ExitCode {
    simulation::exit(run(&Options::parse()))
}

fn run(options: &Options) -> Result<bool> {
    let chosen = choose(&options.only)?;
    if options.list {
        chosen.iter().for_each(|mutant| println!("{:<28} {}", mutant.name, mutant.bug));
        return Ok(true);
    }
    let jobs = parallel::jobs(options.jobs);
    let program = RunProgram::at(build()?);
    let healthy = parallel::play(&program, (1..=HEALTHY).collect(), jobs, None, true)?;
    if let Some(failed) = healthy.iter().find(|report| !report.passed) {
        bail!("a run fails without any mutant:\n{}", failed.output);
    }
    println!("{:<28} {:<90} {:>5} {:>7} {:>8}  violated", "mutant", "bug", "seed", "runs", "seconds");
    let mut all_found = true;
    for mutant in chosen {
        let began = Instant::now();
        let active = RunProgram {
            variables: vec![(VARIABLE.to_owned(), mutant.name.to_owned())],
            label: mutant.name.to_owned(),
            ..program.clone()
        };
        let reports = parallel::play(&active, (1..=options.seeds).collect(), jobs, None, true)?;
        all_found &= print_row(mutant, &reports, began.elapsed());
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

/// Prints the row of a mutant. Returns whether a run found it.
fn print_row(mutant: &Mutant, reports: &[RunReport], took: Duration) -> bool {
    let found = reports.iter().find(|report| !report.passed);
    let seed = found.map_or("-".to_owned(), |report| report.seed.to_string());
    let violated = found.map_or("NOT FOUND", |report| invariant(&report.output));
    let (name, bug, runs, seconds) = (mutant.name, mutant.bug, reports.len(), took.as_secs_f64());
    println!("{name:<28} {bug:<90} {seed:>5} {runs:>7} {seconds:>8.1}  {violated}");
    found.is_some()
}

/// The violated invariant in the output of a run, or the last line of the output.
fn invariant(output: &str) -> &str {
    let violated = output.lines().find_map(|line| line.trim().strip_prefix("violated: "));
    let violated = violated.map(|text| text.split_once(": \"").map_or(text, |(invariant, _)| invariant));
    violated.or_else(|| output.lines().last()).unwrap_or("no output")
}

/// Builds the simulation with a library that contains all mutants. Returns the path of the program.
fn build() -> Result<PathBuf> {
    let root = mutants::workspace().canonicalize()?;
    let folder = root.join("target/mutants");
    let (tree, target) = (folder.join("tree"), folder.join("build"));
    copy(&root, &tree)?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--release", "--locked", "-p", "simulation", "--bin", "simulation"])
        .args(FAST_BUILD.iter().flat_map(|option| ["--config", option]))
        .current_dir(&tree)
        .env("CARGO_TARGET_DIR", &target)
        .status()
        .context("cargo can't be started")?;
    ensure!(status.success(), "the library can't be built with its mutants");
    Ok(target.join("release/simulation"))
}

/// Copies the workspace and adds all mutants. It does not touch unchanged files, so that cargo does not build them
/// again.
fn copy(root: &Path, tree: &Path) -> Result<()> {
    let mutated = mutants::mutated(root, LIST)?;
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .context("git")?;
    ensure!(listed.status.success(), "git can't list the workspace's files");
    let listed = String::from_utf8(listed.stdout)?;
    let exists = |file: &&str| root.join(file).is_file();
    let files: BTreeSet<&str> = listed.split_terminator('\0').filter(exists).collect();
    for file in &files {
        if !mutated.contains_key(*file) {
            write_if_changed(&tree.join(file), &fs::read(root.join(file)).with_context(|| (*file).to_owned())?)?;
        }
    }
    for (file, text) in &mutated {
        write_if_changed(&tree.join(file), text.as_bytes())?;
    }
    let expected = |file: &str| files.contains(file) || mutated.contains_key(file);
    remove_others(tree, tree, &expected)
}

fn write_if_changed(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|existing| existing == bytes) {
        return Ok(());
    }
    let folder = path.parent().context("the file has no folder")?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    fs::write(path, bytes).with_context(|| path.display().to_string())
}

/// Removes files of an earlier copy that the workspace no longer has.
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
