//! What is printed: tables for people, one object a line for programs.

use comfy_table::{presets, ContentArrangement, Table};
use serde::Serialize;

/// How results are told.
#[derive(Clone, Copy)]
pub struct Output {
    pub json: bool,
}

impl Output {
    /// An object for programs. Nobody reads on where the reader has gone away.
    pub fn object(self, value: &impl Serialize) {
        if self.json {
            print_line(&serde_json::to_string(value).unwrap_or_default());
        }
    }

    /// A line for people.
    pub fn line(self, text: impl AsRef<str>) {
        if !self.json {
            print_line(text.as_ref());
        }
    }

    /// Rows for people.
    pub fn table(self, header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
        if self.json {
            return;
        }
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
        for row in rows {
            table.add_row(row.iter().map(|cell| plain(cell)));
        }
        for line in table.lines() {
            print_line(line.trim_end());
        }
    }
}

fn print_line(line: &str) {
    use std::io::Write;
    if writeln!(std::io::stdout().lock(), "{line}").is_err() {
        // The reader has what it wanted: `| head` is no failure.
        std::process::exit(0);
    }
}

/// Text that others wrote, as one line that does nothing to a terminal.
pub fn plain(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

/// The beginning of a text, in one line.
pub fn short(text: &str, most: usize) -> String {
    let text = plain(text);
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_wrote_can_t_move_the_cursor() {
        assert_eq!(plain("a\u{1b}[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
        assert_eq!(short("héllo", 3), "hél…");
        assert_eq!(short("héllo", 5), "héllo");
    }
}
