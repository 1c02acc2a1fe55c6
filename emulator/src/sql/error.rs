//! Why a query text is refused.

use std::fmt;

use serde_json::{json, Value};

use super::lexer::Token;

/// Why the service refuses a query text: where, what stands there, and what could stand there instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntaxError {
    code: &'static str,
    start: usize,
    end: usize,
    found: String,
    expected: String,
    message: String,
}

impl SyntaxError {
    /// The grammar has no place for this token.
    pub(super) fn unexpected(text: &str, token: &Token, expected: &str) -> Self {
        if token.is_end() {
            return Self::new("SC1002", token.start, "", expected, "Syntax error, unexpected end-of-file.".to_owned());
        }
        let found = token.text(text);
        let message = format!("Syntax error, incorrect syntax near '{found}'.");
        Self::new("SC1001", token.start, found, expected, message)
    }

    /// No token begins like this.
    pub(super) fn invalid_token(start: usize, found: &str) -> Self {
        Self::new("SC1010", start, found, "a token", format!("Syntax error, invalid token '{found}'."))
    }

    /// A string has no end, a control character or an escape sequence that does not exist.
    pub(super) fn invalid_string(start: usize, found: &str, expected: &str) -> Self {
        let message = format!("Syntax error, invalid string literal token '{found}'.");
        Self::new("SC1012", start, found, expected, message)
    }

    /// The text is nested deeper than the parser follows.
    pub(super) fn too_deep(text: &str, token: &Token, limit: usize) -> Self {
        let found = token.text(text);
        let message = format!("Syntax error, the query is nested too deeply near '{found}'.");
        Self::new("SC1001", token.start, found, &format!("at most {limit} levels"), message)
    }

    /// The text is longer than the service takes.
    pub(super) fn too_long(length: usize, limit: usize) -> Self {
        let message = format!("The SQL query text of {length} bytes exceeds the maximum limit of {limit} bytes.");
        Self::new("SC1001", 0, "", &format!("at most {limit} bytes"), message)
    }

    /// A name stands for nothing that FROM or JOIN has introduced.
    pub(super) fn unresolved(start: usize, name: &str) -> Self {
        let message = format!("Identifier '{name}' could not be resolved.");
        Self::new("SC2001", start, name, "an alias of the FROM clause", message)
    }

    fn new(code: &'static str, start: usize, found: &str, expected: &str, message: String) -> Self {
        let (found, expected) = (found.to_owned(), expected.to_owned());
        Self { code, start, end: start + found.len(), found, expected, message }
    }

    /// The service's code, as `SC1001`.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// The byte at which the part begins that is refused.
    pub fn position(&self) -> usize {
        self.start
    }

    /// The byte after the part that is refused.
    pub fn end(&self) -> usize {
        self.end
    }

    /// The part of the text that is refused; empty at the end of the text.
    pub fn found(&self) -> &str {
        &self.found
    }

    /// What the grammar allows in that place.
    pub fn expected(&self) -> &str {
        &self.expected
    }

    /// The error in the service's shape.
    pub(crate) fn to_json(&self) -> Value {
        error_json(self.code, self.start, self.end, &self.message)
    }
}

/// An error of a query in the service's shape.
pub(crate) fn error_json(code: &str, start: usize, end: usize, message: &str) -> Value {
    let location = json!({ "start": start, "end": end });
    json!({ "errors": [{ "severity": "Error", "location": location, "code": code, "message": message }] })
}

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for SyntaxError {}
