//! The list of functions is as long as duroxide's.

/// The list of this program contains every function that duroxide exports.
#[test]
fn the_suite_is_complete() {
    let ours = concat!(include_str!("suite/mod.rs"), include_str!("suite/own.rs"));
    let root = duroxide_sources();
    let exported = std::fs::read_to_string(root.join("src/provider_validations.rs")).unwrap();
    let race_replay = std::fs::read_to_string(root.join("src/provider_validation/race_replay.rs")).unwrap();
    let names = names(&exported, &race_replay);
    assert_eq!(names.len(), 233, "duroxide's suite has changed");
    let missing: Vec<&String> = names.iter().filter(|name| !ours.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "not run: {missing:?}");
}

/// The folder of duroxide's sources on this machine.
fn duroxide_sources() -> std::path::PathBuf {
    // Only the dependencies for this platform are available offline.
    let version = std::process::Command::new("rustc").arg("-vV").output().expect("rustc -vV");
    let version = String::from_utf8(version.stdout).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("rustc tells its host");
    let output = std::process::Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--filter-platform", host])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo metadata");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let packages = metadata["packages"].as_array().unwrap();
    let duroxide = packages.iter().find(|package| package["name"] == "duroxide").expect("duroxide is a dependency");
    std::path::Path::new(duroxide["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned()
}

/// The names of the validation functions: those that duroxide exports, and those of its module `race_replay`.
fn names(exported: &str, race_replay: &str) -> std::collections::BTreeSet<String> {
    let code =
        |text: &str| text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let mut names = std::collections::BTreeSet::new();
    for list in code(exported).split("pub use crate::provider_validation::").skip(1) {
        let Some((_, list)) = list.split_once('{') else { continue };
        let Some((list, _)) = list.split_once('}') else { continue };
        names.extend(list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(ToOwned::to_owned));
    }
    for function in code(race_replay).split("pub async fn ").skip(1) {
        names.insert(function.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
    }
    names
}
