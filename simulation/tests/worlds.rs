//! The same number is the same world.

use std::path::Path;
use std::process::{Command, Output};

fn play(arguments: &[&str]) -> Output {
    let played = Command::new(env!("CARGO_BIN_EXE_simulation")).args(arguments).output();
    played.expect("the simulation can be started")
}

fn story(seed: &str, file: &Path) -> Vec<u8> {
    let played = play(&["--seed", seed, "--story", file.to_str().unwrap()]);
    assert!(played.status.success(), "{}", String::from_utf8_lossy(&played.stdout));
    std::fs::read(file).unwrap()
}

/// Request by request: every request with its answer, every fault, kill, stop and promise, with its time.
#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "clocks and randomness are taken over on Linux only")]
fn the_same_seed_is_the_same_story_word_for_word() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // With several workers, faults, kills, clocks that are off and two regions among them.
    for seed in ["3", "16", "22"] {
        let (first, second) = (folder.join(format!("{seed}.1")), folder.join(format!("{seed}.2")));
        let (first, second) = (story(seed, &first), story(seed, &second));
        assert!(first.len() > 10_000, "a story of {} bytes", first.len());
        let differs = first.split(|b| *b == b'\n').zip(second.split(|b| *b == b'\n')).position(|(a, b)| a != b);
        assert_eq!(differs, None, "the two stories of seed {seed} part in this line");
        assert_eq!(first.len(), second.len());
    }
}

#[test]
fn different_seeds_are_different_worlds() {
    let said = |seed| String::from_utf8_lossy(&play(&["--seed", seed]).stdout).into_owned();
    let fingerprint = |said: String| said.split("story ").nth(1).map(|print| print[..16].to_owned());
    let (one, other) = (fingerprint(said("20")), fingerprint(said("21")));
    assert!(one.is_some());
    assert_ne!(one, other);
}

#[test]
fn what_can_t_be_played_is_said() {
    for (arguments, says) in
        [(vec!["--seeds", "9..3"], "not a range"), (vec![], "which world"), (vec!["--seed", "x"], "invalid value")]
    {
        let played = play(&arguments);
        assert_eq!(played.status.code(), Some(2), "{arguments:?}");
        let said = String::from_utf8_lossy(&played.stderr).into_owned();
        assert!(said.contains(says), "{said}");
    }
}
