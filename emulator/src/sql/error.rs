//! The error for a query text that the service refuses.

use std::fmt;

use serde_json::{json, Value};

use super::lexer::Token;

/// The reason why the service refuses a query text: the position, the token that it found, and the tokens that it
/// expected.
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
    /// The grammar does not allow this token here.
    pub(super) fn unexpected(text: &str, token: &Token, expected: &str) -> Self {
        if token.is_end() {
            return Self::new("SC1002", token.start, "", expected, "Syntax error, unexpected end-of-file.".to_owned());
        }
        let found = token.text(text);
        let message = format!("Syntax error, incorrect syntax near '{found}'.");
        Self::new("SC1001", token.start, found, expected, message)
    }

    /// No token begins with this character.
    pub(super) fn invalid_token(start: usize, found: &str) -> Self {
        Self::new("SC1010", start, found, "a token", format!("Syntax error, invalid token '{found}'."))
    }

    /// A string does not end, or has a control character or an unknown escape sequence.
    pub(super) fn invalid_string(start: usize, found: &str, expected: &str) -> Self {
        let message = format!("Syntax error, invalid string literal token '{found}'.");
        Self::new("SC1012", start, found, expected, message)
    }

    /// The text is nested deeper than the parser allows.
    pub(super) fn too_deep(text: &str, token: &Token, limit: usize) -> Self {
        let found = token.text(text);
        let message = format!("Syntax error, the query is nested too deeply near '{found}'.");
        Self::new("SC1001", token.start, found, &format!("at most {limit} levels"), message)
    }

    /// The text is longer than the service accepts.
    pub(super) fn too_long(length: usize, limit: usize) -> Self {
        let message = format!("The SQL query text of {length} bytes exceeds the maximum limit of {limit} bytes.");
        Self::new("SC1001", 0, "", &format!("at most {limit} bytes"), message)
    }

    /// Neither FROM nor JOIN introduces this name.
    pub(super) fn unresolved(start: usize, name: &str) -> Self {
        let message = format!("Identifier '{name}' could not be resolved.");
        Self::new("SC2001", start, name, "an alias of the FROM clause", message)
    }

    fn new(code: &'static str, start: usize, found: &str, expected: &str, message: String) -> Self {
        let (found, expected) = (found.to_owned(), expected.to_owned());
        Self { code, start, end: start + found.len(), found, expected, message }
    }

    /// Returns the service's code, such as `SC1001`.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Returns the position of the first byte of the refused part.
    pub fn position(&self) -> usize {
        self.start
    }

    /// Returns the position of the byte after the refused part.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Returns the refused part of the text. It is empty at the end of the text.
    pub fn found(&self) -> &str {
        &self.found
    }

    /// Returns a description of the tokens that the grammar allows there.
    pub fn expected(&self) -> &str {
        &self.expected
    }

    /// Returns the error in the service's format.
    pub(crate) fn to_json(&self) -> Value {
        error_json(self.code, self.start, self.end, &self.message)
    }
}

/// Returns an error of a query in the service's format.
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
