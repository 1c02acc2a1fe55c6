//! The documents name what exists: links, settings and variables.

use super::files;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The Markdown documents: those at the top and those in `docs`.
fn documents() -> Vec<PathBuf> {
    let mut found = files(&root().join("docs"), "md");
    for entry in fs::read_dir(root()).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found
}

/// The text outside fenced code blocks.
fn prose(text: &str) -> String {
    let mut fenced = false;
    let outside = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        !fenced && !is_fence
    });
    outside.collect::<Vec<_>>().join("\n")
}

/// The targets of the links in a text.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let targets = prose.match_indices("](").filter_map(|(at, _)| prose[at + 2..].split(')').next());
    targets.map(ToOwned::to_owned).collect()
}

/// The anchor that a heading gets on the web.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.collect::<String>().trim().replace(' ', "-")
}

fn anchors(text: &str) -> BTreeSet<String> {
    let prose = prose(text);
    prose.lines().filter(|line| line.starts_with('#')).map(|line| anchor(line.trim_start_matches('#'))).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    let documents = documents();
    assert!(documents.len() > 20, "{documents:?}");
    for document in documents {
        let text = fs::read_to_string(&document).expect("a readable document");
        for link in links(&text).iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (path, anchor) = link.split_once('#').map_or((link.as_str(), None), |(path, a)| (path, Some(a)));
            let target = match path {
                "" => document.clone(),
                path => document.parent().expect("a folder").join(path),
            };
            let is_there = target.exists();
            let has_anchor = anchor.is_none_or(|anchor| {
                let is_markdown = target.extension().is_some_and(|extension| extension == "md");
                is_markdown && fs::read_to_string(&target).is_ok_and(|text| anchors(&text).contains(anchor))
            });
            if !is_there || !has_anchor {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// The names in backticks in the first cells of a document's tables.
fn first_cells(text: &str) -> BTreeSet<String> {
    let rows = text.lines().filter_map(|line| line.trim_start().strip_prefix('|')?.split('|').next());
    let names = rows.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    names.map(|name| name.split(['(', '=']).next().unwrap_or_default().to_owned()).collect()
}

/// The identifiers that follow a prefix such as `pub fn ` in a text.
fn identifiers_after<'a>(text: &'a str, prefix: &str, begins: &str) -> BTreeSet<String> {
    let found = text.match_indices(prefix).map(|(at, _)| &text[at + prefix.len()..]);
    let name = |rest: &'a str| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
    found.map(name).filter(|name| name.starts_with(begins)).map(ToOwned::to_owned).collect()
}

#[test]
fn every_setting_and_variable_is_documented_and_every_documented_one_exists() {
    let documented = first_cells(&read("docs/configuration.md"));
    let mut settings = BTreeSet::new();
    let mut elsewhere = BTreeSet::new();
    for path in files(&root().join("src"), "rs") {
        let text = fs::read_to_string(&path).expect("a readable file");
        let found = identifiers_after(&text, "pub fn ", "with_");
        if path.components().any(|part| part.as_os_str().to_string_lossy().starts_with("config")) {
            settings.extend(found);
        } else {
            elsewhere.extend(found);
        }
    }
    assert!(settings.len() > 20, "the settings were not read: {settings:?}");
    let missing: Vec<_> = settings.difference(&documented).collect();
    assert!(missing.is_empty(), "docs/configuration.md lacks {missing:?}");
    let is_setting = |name: &&String| name.starts_with("with_");
    let stale: Vec<_> = documented
        .iter()
        .filter(is_setting)
        .filter(|name| !settings.contains(*name) && !elsewhere.contains(*name))
        .collect();
    assert!(stale.is_empty(), "docs/configuration.md names {stale:?}, which no longer exist");

    let variables = identifiers_after(&read("src/config/env.rs"), "\"", "COSMOS_");
    assert!(variables.len() > 5, "the variables were not read: {variables:?}");
    let missing: Vec<_> = variables.difference(&documented).collect();
    assert!(missing.is_empty(), "docs/configuration.md lacks {missing:?}");
    let example = read(".env.example");
    let unknown: Vec<_> = identifiers_after(&example, "\n#", "COSMOS_")
        .into_iter()
        .chain(identifiers_after(&example, "\n", "COSMOS_"))
        .filter(|name| !documented.contains(name))
        .collect();
    assert!(unknown.is_empty(), ".env.example names {unknown:?}, which docs/configuration.md lacks");
}

#[test]
fn every_metric_is_documented_and_every_documented_one_exists() {
    let metrics = identifiers_after(&read("src/telemetry.rs"), "\"", "duroxide_cosmos_");
    assert!(metrics.len() > 5, "the metrics were not read: {metrics:?}");
    let documented = first_cells(&read("docs/metrics.md"));
    let missing: Vec<_> = metrics.difference(&documented).collect();
    assert!(missing.is_empty(), "docs/metrics.md lacks {missing:?}");
    let is_ours = |name: &&String| name.starts_with("duroxide_cosmos_") && !metrics.contains(*name);
    let stale: Vec<_> = documented.iter().filter(is_ours).collect();
    assert!(stale.is_empty(), "docs/metrics.md names {stale:?}, which no longer exist");
}

#[test]
fn every_setting_that_a_document_names_exists() {
    let sources: Vec<PathBuf> =
        ["src", "dashboard/src", "emulator/src"].iter().flat_map(|folder| files(&root().join(folder), "rs")).collect();
    let sources: String = sources.iter().map(|path| fs::read_to_string(path).expect("a readable file")).collect();
    let methods = identifiers_after(&sources, "fn ", "with_");
    let mut unknown = Vec::new();
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a readable document");
        let named = identifiers_after(&text, "`", "with_");
        // A text that names all settings writes `with_*`.
        let named = named.difference(&methods).filter(|name| *name != "with_");
        unknown.extend(named.map(|name| format!("{}: {name}", document.display())));
    }
    // Methods of the SDK and of duroxide.
    unknown
        .retain(|place| !["with_gateway_v2_disabled", "with_request_timeout"].iter().any(|name| place.ends_with(name)));
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
}

#[test]
fn the_readme_is_a_landing_page() {
    let readme = read("README.md");
    assert!(readme.lines().count() <= 150, "{} lines", readme.lines().count());
    let mut paragraphs = readme.split("\n\n").filter(|paragraph| !paragraph.starts_with('#'));
    let status = paragraphs.nth(1).unwrap_or_default();
    assert!(status.starts_with("**Status:**"), "the status is the second thing: {status}");
}
