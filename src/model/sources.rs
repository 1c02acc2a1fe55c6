//! Time and randomness have one source each, which can be replaced: a seeded simulation plays the same story for the same seed
//! as long as nothing in `src/` asks the system behind their backs.

use std::{fs, path::Path};

/// The sources themselves, and this file, which names what it forbids.
const EXEMPT: [&str; 3] = ["model/clock.rs", "model/randomness.rs", "model/sources.rs"];

/// What asks the system, and what to use instead.
const FORBIDDEN: [(&str, &str); 8] = [
    ("SystemTime", "the provider's Clock"),
    ("now_utc", "the provider's Clock"),
    ("new_v4", "the provider's Randomness"),
    ("rand::", "the provider's Randomness"),
    ("fastrand", "the provider's Randomness"),
    ("getrandom", "the provider's Randomness"),
    ("RandomState", "the provider's Randomness, or a map with an order"),
    ("thread::sleep", "tokio::time::sleep"),
];

/// What a file's code has that it should not.
fn findings(code: &str) -> Vec<String> {
    let code = without_comments(code);
    let named = FORBIDDEN.iter().filter(|(name, _)| code.contains(name));
    let mut findings: Vec<String> = named.map(|(name, instead)| format!("{name}: use {instead}")).collect();
    if uses_std_instant(&code) {
        findings.push("std's Instant: use tokio::time::Instant, which feels a paused clock".to_owned());
    }
    if code.split("select!{").skip(1).any(|branches| !branches.starts_with("biased;")) {
        findings.push("select! without `biased;`, which picks a random branch: say which comes first".to_owned());
    }
    findings
}

/// The code without comments and white space, so that how it is laid out does not matter.
fn without_comments(code: &str) -> String {
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.flat_map(str::chars).filter(|c| !c.is_whitespace()).collect()
}

fn uses_std_instant(code: &str) -> bool {
    let imported = |statement: &str| {
        let import = statement.rfind("usestd::").map(|at| &statement[at..]);
        import.is_some_and(|import| import.split(|c: char| !c.is_alphanumeric()).any(|word| word == "Instant"))
    };
    let of_tokio = |before: &str| {
        before.ends_with("tokio::") || before.rsplit(';').next().is_some_and(|import| import.contains("usetokio::{"))
    };
    let by_path = code.match_indices("time::Instant").any(|(at, _)| !of_tokio(&code[..at]));
    by_path || code.split(';').any(imported)
}

fn search(folder: &Path, root: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            search(&path, root, found);
            continue;
        }
        let name = path.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/");
        if !EXEMPT.contains(&name.as_str()) {
            let code = fs::read_to_string(&path).unwrap();
            found.extend(findings(&code).iter().map(|finding| format!("src/{name} has {finding}")));
        }
    }
}

#[test]
fn nothing_else_makes_time_or_randomness() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    search(&root, &root, &mut found);
    assert!(found.is_empty(), "a simulation would not play the same story again:\n{}", found.join("\n"));
}

#[test]
fn each_other_source_is_found_however_it_is_written() {
    for bad in [
        "let now = std::time::SystemTime::now();",
        "use std::{\n    sync::Arc,\n    time::{Duration, Instant},\n};",
        "use std::time;\nlet now = time::Instant::now();",
        "let token = uuid::Uuid::new_v4();",
        "Arc::new(OffsetDateTime::now_utc)",
        "let jitter = rand::random::<f64>();",
        "tokio::select! {\n    () = one => {}\n    () = other => {}\n}",
    ] {
        assert_eq!(findings(bad).len(), 1, "{bad}: {:?}", findings(bad));
    }
    for good in [
        "// SystemTime would be the wrong one.",
        "use std::time::Duration;\nuse tokio::time::Instant;",
        "let now = tokio::time::Instant::now();",
        "use tokio::{sync::Notify, time::Instant};",
        "tokio::select! {\n    biased;\n    () = one => {}\n}",
    ] {
        assert!(findings(good).is_empty(), "{good}: {:?}", findings(good));
    }
}
