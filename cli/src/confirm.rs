//! Questions to the user before a command changes something.

use crate::output::escape;
use anyhow::bail;
use clap::Args;
use std::io::{BufRead, IsTerminal, Write};

/// Options of the commands that delete.
#[derive(Args)]
pub struct Confirmation {
    /// Prints what would be deleted and deletes nothing
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,
    /// Does not ask
    #[arg(long)]
    yes: bool,
}

impl Confirmation {
    /// Whether the user agrees to a deletion.
    pub fn confirm(&self, question: &str) -> anyhow::Result<bool> {
        confirm(self.yes, question, "use --dry-run to see the instances")
    }
}

/// Whether the user agrees, by `--yes` or by an answer. Without a terminal it fails, and the error names the
/// `alternative`.
pub fn confirm(yes: bool, question: &str, alternative: &str) -> anyhow::Result<bool> {
    if yes {
        return Ok(true);
    }
    let question = escape(question);
    if !std::io::stdin().is_terminal() {
        bail!("{question} Standard input is not a terminal: add --yes, or {alternative}");
    }
    // If the question cannot be printed, the command must not continue.
    write!(std::io::stderr(), "{question} [y/N] ")?;
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
