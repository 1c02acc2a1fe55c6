//! The documents, the examples, the deployment templates and the layers match the code.

mod architecture;
mod deployment;
mod examples;
mod names;

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Every file below a folder whose name ends so.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a readable folder") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|own| own == extension) {
            found.push(path);
        }
    }
    found
}
