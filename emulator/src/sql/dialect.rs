//! The dialect of the SDK's emulator, where it differs from the service's.
//!
//! The emulator takes a double-quoted string for a name, resolves no escape sequences, and doubles a single quote
//! inside of a string. It also plans no ORDER BY of a member in brackets, but takes reserved words after a dot.

use super::lexer::{is_reserved, word_length, Kind};
use super::parser::Program;

/// A part of a text and its replacement.
struct Edit {
    start: usize,
    end: usize,
    replacement: String,
}

/// The text as the emulator understands it.
pub(super) fn to_emulator(text: &str, program: &Program) -> String {
    let members = program.brackets.iter().map(|bracket| Edit {
        start: bracket.start,
        end: bracket.end,
        replacement: format!(".{}", bracket.name),
    });
    let mut edits: Vec<Edit> = members.chain(strings(program)).collect();
    // A bracket begins before the string in it, and replaces that too.
    edits.sort_by_key(|edit| edit.start);
    let (mut result, mut copied) = (String::with_capacity(text.len()), 0);
    for edit in edits.iter() {
        if edit.start >= copied {
            result.push_str(&text[copied..edit.start]);
            result.push_str(&edit.replacement);
            copied = edit.end;
        }
    }
    result.push_str(&text[copied..]);
    result
}

fn strings(program: &Program) -> impl Iterator<Item = Edit> + '_ {
    program.tokens.iter().filter_map(|token| {
        let Kind::Text(value) = &token.kind else { return None };
        let replacement = format!("'{}'", value.replace('\'', "''"));
        Some(Edit { start: token.start, end: token.end, replacement })
    })
}

/// A text that the emulator has written, as the service would write it.
pub(super) fn to_service(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['\'', '"', '.']) {
        let (before, special) = rest.split_at(at);
        result.push_str(before);
        let (replacement, length) = match special.as_bytes()[0] {
            b'\'' => requoted(special),
            b'"' => (special[..quoted_length(special)].to_owned(), quoted_length(special)),
            _ => member(special),
        };
        result.push_str(&replacement);
        rest = &special[length..];
    }
    result.push_str(rest);
    result
}

/// The emulator's string at the beginning of `text` in the service's spelling, and its length in the emulator's.
fn requoted(text: &str) -> (String, usize) {
    let mut value = String::new();
    let mut chars = text.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        let doubled = c == '\'' && chars.next_if(|(_, next)| *next == '\'').is_some();
        if c == '\'' && !doubled {
            return (literal(&value), at + 1);
        }
        value.push(c);
    }
    (text.to_owned(), text.len())
}

/// A string in the service's spelling: that of JSON, in single quotes.
fn literal(value: &str) -> String {
    let mut result = String::from("'");
    for c in value.chars() {
        match c {
            '\'' | '\\' => result.extend(['\\', c]),
            c if c < ' ' => result.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => result.push(c),
        }
    }
    result.push('\'');
    result
}

/// The length of the JSON string at the beginning of `text`.
fn quoted_length(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The member access at the beginning of `text`, in brackets if its name is a reserved word, and its length.
fn member(text: &str) -> (String, usize) {
    let length = 1 + word_length(&text[1..]);
    let name = &text[1..length];
    let spelled = if is_reserved(name) { format!("[\"{name}\"]") } else { text[..length].to_owned() };
    (spelled, length)
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::to_service;

    #[test]
    fn strings_and_members_reach_the_emulator_in_its_dialect() {
        for (sent, forwarded) in [
            (r#"SELECT * FROM c WHERE c.a = "p1""#, "SELECT * FROM c WHERE c.a = 'p1'"),
            (r#"SELECT * FROM c WHERE c.a = "it's""#, "SELECT * FROM c WHERE c.a = 'it''s'"),
            (r"SELECT * FROM c WHERE c.a = 'it\'s'", "SELECT * FROM c WHERE c.a = 'it''s'"),
            (r#"SELECT * FROM c WHERE c.a = 'a\\b\u00e9\n"'"#, "SELECT * FROM c WHERE c.a = 'a\\bé\n\"'"),
            (r#"SELECT c["by"], c["a b"] FROM c"#, "SELECT c.by, c['a b'] FROM c"),
            (r#"SELECT VALUE {"a": ["b"]} FROM c["d"]"#, "SELECT VALUE {'a': ['b']} FROM c['d']"),
            ("SELECT * FROM c", "SELECT * FROM c"),
        ] {
            assert_eq!(parse(sent).unwrap().emulator_text(), forwarded, "{sent}");
        }
    }

    #[test]
    fn texts_of_the_emulator_come_back_in_the_services_dialect() {
        for (written, returned) in [
            (r#"{"it's": c.by, "b\".by": c.a}"#, r#"{"it's": c["by"], "b\".by": c.a}"#),
            (r"c.a = 'it''s' AND c.b = '' AND c.c = 'a\.by'", r"c.a = 'it\'s' AND c.b = '' AND c.c = 'a\\.by'"),
            ("c.first.last.true = 1.5 AND 'a\n'", "c.first.last[\"true\"] = 1.5 AND 'a\\u000a'"),
            ("'open", "'open"),
            ("c.", "c."),
        ] {
            assert_eq!(to_service(written), returned, "{written}");
        }
    }
}
