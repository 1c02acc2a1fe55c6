//! A tester is tested by bugs: mutations of the library, each of which some world must find.
//!
//! A mutant is a small edit of the library's source ([`LIST`]). All of them go into one copy of the workspace, where the
//! environment says which of them is alive, so that it is built once. The library's own source has nothing of this.
//! `cargo run --release -p simulation --bin mutants` plays worlds with each of them.

mod list;

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{bail, ensure, Context, Result};

pub use list::LIST;

/// A bug that the library doesn't have.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// What it is called, such as `ghost-message`.
    pub name: &'static str,
    /// What goes wrong, in one line.
    pub what: &'static str,
    /// How it is made.
    pub edits: &'static [Edit],
}

/// A change of one place.
#[derive(Clone, Copy, Debug)]
pub struct Edit {
    /// The file, from the workspace's root.
    pub file: &'static str,
    /// What stands there, once in the file.
    pub find: &'static str,
    /// What stands there instead: [`ALIVE`] is true where the mutant is alive, and where it isn't, all is as before.
    pub replace: &'static str,
}

/// Stands for the question whether the mutant is alive, in what an edit puts into the source.
pub const ALIVE: &str = "MUTANT";
/// The environment variable that says which mutant is alive.
pub const VARIABLE: &str = "DUROXIDE_COSMOS_MUTANT";

/// What the copy has besides the library's files.
const QUESTION: (&str, &str) = (
    "src/mutant.rs",
    r#"//! Which mutant is alive.
use std::sync::OnceLock;

pub(crate) fn is(name: &str) -> bool {
    static ALIVE: OnceLock<Option<String>> = OnceLock::new();
    ALIVE.get_or_init(|| std::env::var("DUROXIDE_COSMOS_MUTANT").ok()).as_deref() == Some(name)
}
"#,
);

/// The workspace that this program was built from.
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Where an edit applies.
struct Place {
    range: Range<usize>,
    mutant: Mutant,
    edit: Edit,
}

/// The files of the workspace at `root` that the mutants change or add, as they are with all of them in. An error names the
/// mutant whose edit does not fit the source any more.
pub fn mutated(root: &Path, mutants: &[Mutant]) -> Result<BTreeMap<String, String>> {
    let mut places: BTreeMap<&str, Vec<Place>> = BTreeMap::new();
    let mut files: BTreeMap<String, String> = BTreeMap::new();
    for mutant in mutants {
        for edit in mutant.edits {
            let text = source(root, edit.file, &mut files)?;
            let range = find(text, edit).with_context(|| format!("mutant {}", mutant.name))?;
            places.entry(edit.file).or_default().push(Place { range, mutant: *mutant, edit: *edit });
        }
    }
    for (file, mut places) in places {
        places.sort_by_key(|place| place.range.start);
        if let Some(pair) = places.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
            bail!("mutants {} and {} change the same place of {file}", pair[0].mutant.name, pair[1].mutant.name);
        }
        let text = source(root, file, &mut files)?;
        for Place { range, mutant, edit } in places.into_iter().rev() {
            let alive = format!("crate::mutant::is({:?})", mutant.name);
            text.replace_range(range, &edit.replace.replace(ALIVE, &alive));
        }
    }
    source(root, "src/lib.rs", &mut files)?.push_str("\nmod mutant;\n");
    files.insert(QUESTION.0.to_owned(), QUESTION.1.to_owned());
    Ok(files)
}

fn source<'a>(root: &Path, file: &str, files: &'a mut BTreeMap<String, String>) -> Result<&'a mut String> {
    if !files.contains_key(file) {
        let text = fs::read_to_string(root.join(file)).with_context(|| file.to_owned())?;
        files.insert(file.to_owned(), text);
    }
    files.get_mut(file).context("it was put there")
}

fn find(text: &str, edit: &Edit) -> Result<Range<usize>> {
    let found: Vec<usize> = text.match_indices(edit.find).map(|(at, _)| at).collect();
    ensure!(found.len() == 1, "{} has {} times what must be there once: {}", edit.file, found.len(), edit.find);
    Ok(found[0]..found[0] + edit.find.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_mutant_still_applies_to_the_library_as_it_is() {
        let files = mutated(&workspace(), LIST).unwrap();
        for mutant in LIST {
            let alive = format!("crate::mutant::is({:?})", mutant.name);
            assert!(files.values().any(|text| text.contains(&alive)), "{} is never alive", mutant.name);
        }
    }

    #[test]
    fn no_two_mutants_have_the_same_name() {
        let names: BTreeSet<&str> = LIST.iter().map(|mutant| mutant.name).collect();
        assert_eq!(names.len(), LIST.len());
        assert!(names.iter().all(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '-')));
    }

    #[test]
    fn an_edit_that_does_not_fit_is_told_by_its_mutants_name() {
        let nowhere = [Edit { file: "src/lib.rs", find: "fn nowhere()", replace: "MUTANT" }];
        let mutant = Mutant { name: "lost", what: "", edits: Box::leak(Box::new(nowhere)) };
        let error = mutated(&workspace(), &[mutant]).unwrap_err();
        assert_eq!(error.to_string(), "mutant lost");
    }
}
