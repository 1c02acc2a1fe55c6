//! The layers of the library: dependencies point downwards only.

use super::files;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// The top-level modules, lowest layer first. A module uses modules of lower layers only.
const LAYERS: &[&[&str]] = &[
    &["model"],
    &["telemetry"],
    &["credential"],
    &["config"],
    &["cosmos"],
    &["engine"],
    &["queue"],
    &["discovery"],
    &["outbox"],
    &["turn"],
    &["activity"],
    &["lifecycle"],
    &["operate"],
    &["provider"],
    &["lib"],
];

/// Upward dependencies that the redesign of the ready queue removes, each with its reason.
const ALLOWED: &[(&str, &str, &str)] = &[
    ("engine", "queue", "the engine holds the waiting fetches"),
    ("engine", "discovery", "the engine holds the candidates and the membership"),
    ("engine", "turn", "the engine holds the turns of this process, the instance cache and the shared reads"),
    ("engine", "activity", "the engine holds the activities of this process"),
    ("queue", "discovery", "an inline claim takes candidates out of the ready queue"),
    ("queue", "turn", "an inline claim opens the turn that it has claimed"),
    ("queue", "activity", "an inline claim opens the activity that it has claimed"),
    ("discovery", "outbox", "a poll hands undelivered messages to the outbox"),
    ("discovery", "turn", "the fetch loop claims a turn for its candidate"),
    ("discovery", "activity", "the fetch loop claims an activity for its candidate"),
];

/// Names that the crate root re-exports, and the module that defines each.
const ROOT_NAMES: &[(&str, &str)] = &[
    ("CosmosDBProvider", "provider"),
    ("CosmosDBProviderConfig", "config"),
    ("StoreError", "cosmos"),
    ("Credential", "credential"),
    ("ConfigError", "credential"),
];

fn layer(module: &str) -> usize {
    let found = LAYERS.iter().position(|modules| modules.contains(&module));
    found.unwrap_or_else(|| panic!("src has a module {module:?} that stands in no layer: add it to LAYERS"))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// Every source file of the library, without the test modules that are files of their own.
fn sources() -> Vec<PathBuf> {
    let is_test = |path: &Path| path.iter().any(|part| part == "tests" || part == "tests.rs");
    let relative = |path: &Path| path.strip_prefix(root()).expect("a file of src").to_owned();
    files(&root(), "rs").into_iter().filter(|path| !is_test(&relative(path))).collect()
}

/// The top-level module of a file.
fn module_of(path: &Path) -> String {
    let relative = path.strip_prefix(root()).expect("a file of src");
    let first = relative.iter().next().expect("a file name").to_string_lossy();
    first.trim_end_matches(".rs").to_owned()
}

/// The code of a file, without comments and without its unit tests.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("a readable file");
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The names that directly follow `crate::`, also in groups such as `use crate::{a::b, c}`.
fn names_after_crate(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let is_path = code[..at].chars().next_back().is_none_or(|before| !before.is_alphanumeric() && before != '_');
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            _ if !is_path => {}
            Some(group) => names.extend(first_segments(group)),
            None => names.extend(identifier(rest)),
        }
    }
    names
}

/// The first segment of each path in a group, up to its closing brace.
fn first_segments(group: &str) -> Vec<String> {
    let (mut names, mut depth, mut at_start) = (Vec::new(), 0, true);
    for (at, character) in group.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => at_start = true,
            _ if character.is_whitespace() => {}
            _ if at_start && depth == 0 => {
                names.extend(identifier(&group[at..]));
                at_start = false;
            }
            _ => {}
        }
    }
    names
}

fn identifier(text: &str) -> Option<String> {
    let name: String = text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty()).then_some(name)
}

/// Every dependency between top-level modules, and the files that have it.
fn dependencies() -> BTreeMap<(String, String), BTreeSet<String>> {
    let files = sources();
    let modules: BTreeSet<String> = files.iter().map(|path| module_of(path)).collect();
    let mut found: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
    for path in &files {
        let from = module_of(path);
        for name in names_after_crate(&code(path)) {
            let defined = ROOT_NAMES.iter().find(|(root_name, _)| *root_name == name).map(|(_, module)| *module);
            let to = defined.unwrap_or(&name).to_owned();
            assert!(modules.contains(&to), "{} uses crate::{name}: add it to ROOT_NAMES", path.display());
            if to != from {
                let file = path.strip_prefix(root()).expect("a file of src").display().to_string();
                found.entry((from.clone(), to)).or_default().insert(file);
            }
        }
    }
    found
}

#[test]
fn dependencies_point_downwards() {
    let found = dependencies();
    assert!(found.len() > 30, "the sources were not read: {found:?}");
    let is_allowed = |from: &str, to: &str| ALLOWED.iter().any(|(a, b, _)| *a == from && *b == to);
    let upward: Vec<String> = found
        .iter()
        .filter(|((from, to), _)| layer(to) >= layer(from) && !is_allowed(from, to))
        .map(|((from, to), files)| format!("{from} uses {to}, which is not below it: {files:?}"))
        .collect();
    assert!(upward.is_empty(), "{}", upward.join("\n"));
}

#[test]
fn every_allowed_exception_is_still_needed() {
    let found = dependencies();
    let unused: Vec<_> =
        ALLOWED.iter().filter(|(from, to, _)| !found.contains_key(&((*from).to_owned(), (*to).to_owned()))).collect();
    assert!(unused.is_empty(), "remove these lines from ALLOWED: {unused:?}");
}

#[test]
fn no_two_types_have_the_same_name() {
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in sources() {
        for line in code(&path).lines().filter(|line| !line.starts_with(' ')) {
            let words: Vec<&str> = line.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
            let keyword = words.iter().position(|word| ["struct", "enum", "trait", "union"].contains(word));
            if let Some(name) = keyword.and_then(|at| words.get(at + 1)) {
                places.entry((*name).to_owned()).or_default().insert(path.display().to_string());
            }
        }
    }
    assert!(places.len() > 100, "the sources were not read");
    let twice: Vec<_> = places.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(twice.is_empty(), "{twice:#?}");
}

#[test]
fn groups_and_paths_are_read() {
    let code = "use crate::{\n    model::{a, b},\n    cosmos::queries, Engine,\n};\nfn f() { crate::turn::g(); my_crate::no() }";
    let names: Vec<String> = names_after_crate(code).into_iter().collect();
    assert_eq!(names, ["Engine", "cosmos", "model", "turn"]);
}
