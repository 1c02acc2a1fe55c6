//! Statements with sample parameters.

use super::{QueryText, Statement};
use serde_json::Value;

impl QueryText {
    /// A statement with parameters of the right types, for checks that send every query once.
    pub(crate) fn sample(self) -> Statement {
        let mut statement = self.statement();
        for name in parameters(self.text) {
            let list = format!("({name})");
            statement = if self.text.contains(&list) {
                statement.bind_list(name, ["one", "two"])
            } else {
                statement.bind(name, sample_value(self.name, name))
            };
        }
        statement
    }
}

/// The distinct parameters of a text.
fn parameters(text: &str) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for (at, _) in text.match_indices('@') {
        let rest = &text[at..];
        let end = rest[1..].find(|c: char| !c.is_ascii_alphanumeric()).map_or(rest.len(), |end| end + 1);
        if !names.contains(&&rest[..end]) {
            names.push(&rest[..end]);
        }
    }
    names
}

/// A value of the type of a parameter.
fn sample_value(query: &str, parameter: &str) -> Value {
    match (query, parameter) {
        (_, "@any" | "@untagged" | "@anyStatus" | "@anyName" | "@anyParent") => Value::Bool(false),
        (_, "@status" | "@name" | "@parent") | ("ended", _) => Value::from("sample"),
        (_, "@deferred") => Value::Null,
        _ => Value::from(1_763_256_000_000_u64),
    }
}
