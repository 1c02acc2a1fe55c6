//! Output: tables for people, one JSON object per line for programs.

use comfy_table::{presets, ContentArrangement, Table};
use serde::Serialize;
use serde_json::Value;
use std::{
    io::{ErrorKind, IsTerminal, Write},
    sync::atomic::{AtomicBool, Ordering},
};

/// The format of the output.
#[derive(Clone, Copy)]
pub struct Output {
    pub json: bool,
}

/// The reader of the output has gone, as `head` does after its last line.
static IS_READER_GONE: AtomicBool = AtomicBool::new(false);
/// The output could not be written although its reader is there, for example because a disk is full.
static IS_LOST: AtomicBool = AtomicBool::new(false);

/// Whether further output is pointless: its reader has gone, or a write has failed.
pub fn is_reader_gone() -> bool {
    IS_READER_GONE.load(Ordering::Relaxed)
}

impl Output {
    /// Prints an object for programs. The field `kind` names its type.
    pub fn object(self, kind: &str, value: &impl Serialize) {
        if !self.json {
            return;
        }
        let mut object = serde_json::to_value(value).unwrap_or_default();
        if let Value::Object(fields) = &mut object {
            fields.insert("kind".to_owned(), kind.into());
        }
        print_line(&object.to_string());
    }

    /// Prints a line for people.
    pub fn line(self, text: impl AsRef<str>) {
        if !self.json {
            print_line(&escape_lines(text.as_ref()));
        }
    }

    /// Prints the output of an orchestration. It is escaped only for a terminal.
    pub fn result(self, text: &str) {
        if !self.json {
            let is_terminal = std::io::stdout().is_terminal();
            print_line(&if is_terminal { escape_lines(text) } else { text.to_owned() });
        }
    }

    /// Prints rows for people.
    pub fn table(self, header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
        if self.json {
            return;
        }
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
        for row in rows {
            table.add_row(row.iter().map(|cell| escape(cell)));
        }
        for line in table.lines() {
            print_line(line.trim_end());
        }
    }
}

/// Whether output was lost for another reason than a reader that has gone.
pub fn is_lost() -> bool {
    IS_LOST.load(Ordering::Relaxed)
}

/// Prints a line. A command continues after a failed write: a repair must not stop half-way for `| head` or a full
/// disk.
fn print_line(line: &str) {
    if is_reader_gone() {
        return;
    }
    if let Err(error) = writeln!(std::io::stdout().lock(), "{line}") {
        IS_READER_GONE.store(true, Ordering::Relaxed);
        if error.kind() != ErrorKind::BrokenPipe {
            IS_LOST.store(true, Ordering::Relaxed);
            print_error(&format!("error: the output can't be written: {error}"));
        }
    }
}

/// Prints a line to standard error. A failure is ignored: with `2>&1 | head` the reader may have gone.
pub fn print_error(line: &str) {
    writeln!(std::io::stderr().lock(), "{line}").ok();
}

/// Escapes foreign text into one line that cannot control a terminal.
pub fn escape(text: &str) -> String {
    text.chars().flat_map(|c| if is_unsafe(c) { c.escape_default().collect() } else { vec![c] }).collect()
}

/// Escapes foreign text and keeps its line breaks.
pub fn escape_lines(text: &str) -> String {
    text.split('\n').map(escape).collect::<Vec<_>>().join("\n")
}

/// Whether a character moves the cursor, changes the text direction, or is invisible.
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// The first `limit` characters of a text, escaped into one line.
pub fn short(text: &str, limit: usize) -> String {
    let text = escape(text);
    match text.char_indices().nth(limit) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_cannot_move_the_cursor_or_change_the_text_direction() {
        assert_eq!(escape("a\u{1b}[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
        assert_eq!(escape("\u{202e}drow"), "\\u{202e}drow");
        assert_eq!(escape_lines("a\n\u{7}b"), "a\n\\u{7}b");
        assert_eq!(short("héllo", 3), "hél…");
        assert_eq!(short("héllo", 5), "héllo");
    }
}
