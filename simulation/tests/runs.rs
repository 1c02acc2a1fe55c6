//! The same seed gives the same run.

use std::path::Path;
use std::process::{Command, Output};

fn play(arguments: &[&str]) -> Output {
    let played = Command::new(env!("CARGO_BIN_EXE_simulation")).args(arguments).output();
    played.expect("the simulation can be started")
}

fn transcript(seed: &str, file: &Path) -> Vec<u8> {
    let played = play(&["--seed", seed, "--transcript", file.to_str().unwrap()]);
    assert!(played.status.success(), "{}", String::from_utf8_lossy(&played.stdout));
    std::fs::read(file).unwrap()
}

/// A transcript has every request with its answer and every fault, kill, stop and recorded call, with its time.
#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "clocks and randomness are replaced on Linux only")]
fn the_same_seed_gives_the_same_transcript_line_by_line() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // These runs have several workers, faults, kills, wrong clocks and two regions among them.
    for seed in ["3", "16", "22"] {
        let (first, second) = (folder.join(format!("{seed}.1")), folder.join(format!("{seed}.2")));
        let (first, second) = (transcript(seed, &first), transcript(seed, &second));
        assert!(first.len() > 10_000, "a transcript of {} bytes", first.len());
        let differs = first.split(|b| *b == b'\n').zip(second.split(|b| *b == b'\n')).position(|(a, b)| a != b);
        assert_eq!(differs, None, "the two transcripts of seed {seed} differ in this line");
        assert_eq!(first.len(), second.len());
    }
}

#[test]
fn different_seeds_give_different_runs() {
    let output = |seed| String::from_utf8_lossy(&play(&["--seed", seed]).stdout).into_owned();
    let fingerprint = |output: String| output.split("transcript ").nth(1).map(|print| print[..16].to_owned());
    let (one, other) = (fingerprint(output("20")), fingerprint(output("21")));
    assert!(one.is_some());
    assert_ne!(one, other);
}

#[test]
fn wrong_arguments_are_rejected_with_an_explanation() {
    for (arguments, explanation) in
        [(vec!["--seeds", "9..3"], "not a range"), (vec![], "which runs"), (vec!["--seed", "x"], "invalid value")]
    {
        let played = play(&arguments);
        assert_eq!(played.status.code(), Some(2), "{arguments:?}");
        let errors = String::from_utf8_lossy(&played.stderr).into_owned();
        assert!(errors.contains(explanation), "{errors}");
    }
}
