//! Mutants test the simulation: each is a bug in the library that some run must find.
//!
//! A mutant is a small edit of the library's source ([`LIST`]). All mutants go into one copy of the workspace, which is
//! built once. An environment variable selects the active mutant. The library itself contains none of them. `cargo run
//! --release -p simulation --bin mutants` plays runs with each mutant.

mod list;

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};

pub use list::LIST;

/// A bug that the simulation must find.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// The name, such as `ghost-message`.
    pub name: &'static str,
    /// The bug in one line.
    pub bug: &'static str,
    /// The edits that make the bug.
    pub edits: &'static [Edit],
}

/// An edit of one place in the source.
#[derive(Clone, Copy, Debug)]
pub struct Edit {
    /// The file, relative to the root of the workspace.
    pub file: &'static str,
    /// The text to replace. The file contains it once.
    pub find: &'static str,
    /// The new text. It contains [`ACTIVE`], and behaves as the old text while the mutant is not active.
    pub replace: &'static str,
}

/// The placeholder in the text of an edit for the condition that the mutant is active.
pub const ACTIVE: &str = "MUTANT";
/// The environment variable with the name of the active mutant.
pub const VARIABLE: &str = "DUROXIDE_COSMOS_MUTANT";

/// A file that the copy has in addition to the library's files.
const SELECTION: (&str, &str) = (
    "src/mutant.rs",
    r#"//! The active mutant.
use std::sync::OnceLock;

pub(crate) fn is(name: &str) -> bool {
    static ACTIVE: OnceLock<Option<String>> = OnceLock::new();
    ACTIVE.get_or_init(|| std::env::var("DUROXIDE_COSMOS_MUTANT").ok()).as_deref() == Some(name)
}
"#,
);

/// The root of the workspace that this program was built from.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// An edit, with its position in the source.
struct EditSite {
    range: Range<usize>,
    mutant: Mutant,
    edit: Edit,
}

/// The changed and added files of the workspace at `root` after the edits of all mutants. An error names the mutant
/// whose edit does not apply to the source.
pub fn mutated(root: &Path, mutants: &[Mutant]) -> Result<BTreeMap<String, String>> {
    let mut sites: BTreeMap<&str, Vec<EditSite>> = BTreeMap::new();
    let mut files: BTreeMap<String, String> = BTreeMap::new();
    for mutant in mutants {
        for edit in mutant.edits {
            let text = source(root, edit.file, &mut files)?;
            let range = find(text, edit).with_context(|| format!("mutant {}", mutant.name))?;
            sites.entry(edit.file).or_default().push(EditSite { range, mutant: *mutant, edit: *edit });
        }
    }
    for (file, mut sites) in sites {
        sites.sort_by_key(|site| site.range.start);
        if let Some(pair) = sites.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
            bail!("mutants {} and {} change the same place of {file}", pair[0].mutant.name, pair[1].mutant.name);
        }
        let text = source(root, file, &mut files)?;
        for EditSite { range, mutant, edit } in sites.into_iter().rev() {
            let active = format!("crate::mutant::is({:?})", mutant.name);
            text.replace_range(range, &edit.replace.replace(ACTIVE, &active));
        }
    }
    source(root, "src/lib.rs", &mut files)?.push_str("\nmod mutant;\n");
    files.insert(SELECTION.0.to_owned(), SELECTION.1.to_owned());
    Ok(files)
}

fn source<'a>(root: &Path, file: &str, files: &'a mut BTreeMap<String, String>) -> Result<&'a mut String> {
    if !files.contains_key(file) {
        let text = fs::read_to_string(root.join(file)).with_context(|| file.to_owned())?;
        files.insert(file.to_owned(), text);
    }
    files.get_mut(file).context("the file was inserted above")
}

fn find(text: &str, edit: &Edit) -> Result<Range<usize>> {
    let found: Vec<usize> = text.match_indices(edit.find).map(|(at, _)| at).collect();
    ensure!(found.len() == 1, "{} contains this text {} times instead of once: {}", edit.file, found.len(), edit.find);
    Ok(found[0]..found[0] + edit.find.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_mutant_applies_to_the_present_source() {
        let files = mutated(&workspace(), LIST).unwrap();
        for mutant in LIST {
            let active = format!("crate::mutant::is({:?})", mutant.name);
            assert!(files.values().any(|text| text.contains(&active)), "{} is never active", mutant.name);
        }
    }

    #[test]
    fn no_two_mutants_have_the_same_name() {
        let names: BTreeSet<&str> = LIST.iter().map(|mutant| mutant.name).collect();
        assert_eq!(names.len(), LIST.len());
        assert!(names.iter().all(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '-')));
    }

    #[test]
    fn an_edit_that_does_not_apply_is_reported_with_the_name_of_its_mutant() {
        let nowhere = [Edit { file: "src/lib.rs", find: "fn nowhere()", replace: "MUTANT" }];
        let mutant = Mutant { name: "lost", bug: "", edits: Box::leak(Box::new(nowhere)) };
        let error = mutated(&workspace(), &[mutant]).unwrap_err();
        assert_eq!(error.to_string(), "mutant lost");
    }
}
