//! Translation between the service's dialect and that of the SDK's emulator.
//!
//! The dialects differ as follows:
//! - The emulator reads a double-quoted string as a name.
//! - It resolves no escape sequences, and a single quote inside a string is doubled.
//! - It can't plan an ORDER BY of a member in brackets, but it accepts reserved words after a dot.

use super::lexer::{is_reserved, word_length, TokenKind};
use super::parser::ParsedText;

/// A part of a text and its replacement.
struct TextEdit {
    start: usize,
    end: usize,
    replacement: String,
}

/// Returns the text in the emulator's dialect.
pub(super) fn to_emulator(text: &str, parsed: &ParsedText) -> String {
    let members = parsed.brackets.iter().map(|bracket| TextEdit {
        start: bracket.start,
        end: bracket.end,
        replacement: format!(".{}", bracket.name),
    });
    let mut edits: Vec<TextEdit> = members.chain(strings(parsed)).collect();
    // A bracket begins before the string in it, and its edit replaces that string too.
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

fn strings(parsed: &ParsedText) -> impl Iterator<Item = TextEdit> + '_ {
    parsed.tokens.iter().filter_map(|token| {
        let TokenKind::Text(value) = &token.kind else { return None };
        let replacement = format!("'{}'", value.replace('\'', "''"));
        Some(TextEdit { start: token.start, end: token.end, replacement })
    })
}

/// Returns a text of the emulator in the service's dialect.
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

/// Returns the emulator's string at the beginning of `text` in the service's spelling, and its length in the
/// emulator's.
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

/// Returns a string in the service's spelling: that of JSON, in single quotes.
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

/// Returns the length of the JSON string at the beginning of `text`.
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

/// Returns the member access at the beginning of `text`, and its length. A reserved word is put in brackets.
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
    fn strings_and_members_are_translated_into_the_emulators_dialect() {
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
    fn texts_of_the_emulator_are_translated_into_the_services_dialect() {
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
