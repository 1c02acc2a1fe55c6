//! What is printed: tables for people, one object a line for programs.

use comfy_table::{presets, ContentArrangement, Table};
use serde::Serialize;
use serde_json::Value;
use std::{
    io::{ErrorKind, IsTerminal, Write},
    sync::atomic::{AtomicBool, Ordering},
};

/// How results are told.
#[derive(Clone, Copy)]
pub struct Output {
    pub json: bool,
}

/// The reader has gone away, as `head` does when it has enough.
static NOBODY_READS: AtomicBool = AtomicBool::new(false);
/// Something that somebody reads could not be written: a disk is full.
static IS_LOST: AtomicBool = AtomicBool::new(false);

/// Whether nobody reads what is printed any more.
pub fn nobody_reads() -> bool {
    NOBODY_READS.load(Ordering::Relaxed)
}

impl Output {
    /// An object for programs; `kind` says what it is.
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

    /// A line for people.
    pub fn line(self, text: impl AsRef<str>) {
        if !self.json {
            print_line(&plain_lines(text.as_ref()));
        }
    }

    /// What an orchestration has returned: as it is, but for a terminal.
    pub fn result(self, text: &str) {
        if !self.json {
            let is_terminal = std::io::stdout().is_terminal();
            print_line(&if is_terminal { plain_lines(text) } else { text.to_owned() });
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

/// Whether output was lost for another reason than that nobody reads it.
pub fn is_lost() -> bool {
    IS_LOST.load(Ordering::Relaxed)
}

/// Prints a line. A command goes on to its end although nobody reads it: a repair must not stop half-way for `| head`
/// or a full disk.
fn print_line(line: &str) {
    if nobody_reads() {
        return;
    }
    if let Err(error) = writeln!(std::io::stdout().lock(), "{line}") {
        NOBODY_READS.store(true, Ordering::Relaxed);
        if error.kind() != ErrorKind::BrokenPipe {
            IS_LOST.store(true, Ordering::Relaxed);
            print_error(&format!("error: the output can't be written: {error}"));
        }
    }
}

/// Prints a line to standard error. It may be gone as well (`2>&1 | head`), and there is nobody else to tell.
pub fn print_error(line: &str) {
    writeln!(std::io::stderr().lock(), "{line}").ok();
}

/// Text that others wrote, as one line that does nothing to a terminal.
pub fn plain(text: &str) -> String {
    text.chars().flat_map(|c| if is_odd(c) { c.escape_default().collect() } else { vec![c] }).collect()
}

/// The same, with its lines.
pub fn plain_lines(text: &str) -> String {
    text.split('\n').map(plain).collect::<Vec<_>>().join("\n")
}

/// Whether a character moves the cursor, turns the direction, or can't be seen.
fn is_odd(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
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
    fn what_others_wrote_can_t_move_the_cursor_or_turn_the_line() {
        assert_eq!(plain("a\u{1b}[2Jb\nc"), "a\\u{1b}[2Jb\\nc");
        assert_eq!(plain("\u{202e}drow"), "\\u{202e}drow");
        assert_eq!(plain_lines("a\n\u{7}b"), "a\n\\u{7}b");
        assert_eq!(short("héllo", 3), "hél…");
        assert_eq!(short("héllo", 5), "héllo");
    }
}
