//! The service's query language: which texts it accepts, and what they read.
//!
//! The grammar is the one that Microsoft publishes with its .NET SDK. The SDK's emulator accepts more, so a query that
//! works there can fail on Azure: `c.by`, for one, because `BY` is a reserved word.
//!
//! ```
//! use duroxide_cosmos_emulator::sql;
//!
//! let query = sql::parse("SELECT * FROM c WHERE c.lock.until < @now ORDER BY c.due").unwrap();
//! assert_eq!(query.filter_paths(), [["lock", "until"]]);
//! assert_eq!(query.parameters(), ["@now"]);
//!
//! let error = sql::parse("SELECT c.by FROM c").unwrap_err();
//! assert_eq!(error.to_string(), "Syntax error, incorrect syntax near 'by'.");
//! assert!(sql::parse(r#"SELECT c["by"] FROM c"#).is_ok());
//! ```

mod dialect;
mod error;
mod lexer;
mod parser;
mod paths;
mod syntax;
#[cfg(test)]
mod tests;

pub(crate) use error::error_json;
pub use error::SyntaxError;
pub(crate) use paths::ELEMENTS;

/// The longest query text that the service takes.
const MAX_BYTES: usize = 512 * 1024;

/// Reads a query text as the service does.
///
/// # Errors
///
/// If the service refuses the text: for its syntax, for a name that stands for nothing, or for more than 512 KiB. Texts
/// with more than 64 levels of nesting are refused, too.
pub fn parse(text: &str) -> Result<Query, SyntaxError> {
    if text.len() > MAX_BYTES {
        return Err(SyntaxError::too_long(text.len(), MAX_BYTES));
    }
    let program = parser::program(text)?;
    let mut query = paths::read(&program.select)?;
    query.emulator_text = dialect::to_emulator(text, &program);
    Ok(query)
}

/// A text that the SDK's emulator has written, as the service would write it.
pub(crate) fn from_emulator(text: &str) -> String {
    dialect::to_service(text)
}

/// What a query reads.
///
/// A path leads from the document to a property: `c.lock.until` is `["lock", "until"]`. The elements of an array are
/// the step `[]`, whether a JOIN iterates over them or a number picks one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Query {
    filters: Vec<Vec<String>>,
    order_by: Vec<SortKey>,
    calls: Vec<Call>,
    parameters: Vec<String>,
    has_top: bool,
    has_offset: bool,
    has_distinct: bool,
    has_aggregate: bool,
    has_group_by: bool,
    emulator_text: String,
}

impl Query {
    /// The properties that the WHERE clause looks at, also inside of function calls and subqueries, without repetition.
    pub fn filter_paths(&self) -> &[Vec<String>] {
        &self.filters
    }

    /// What the query orders by.
    pub fn order_by(&self) -> &[SortKey] {
        &self.order_by
    }

    /// Every function call in the text.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// The parameters that the text uses, with their `@` and without repetition.
    pub fn parameters(&self) -> &[String] {
        &self.parameters
    }

    /// Whether TOP bounds the result.
    pub fn has_top(&self) -> bool {
        self.has_top
    }

    /// Whether OFFSET and LIMIT choose a part of the result.
    pub fn has_offset(&self) -> bool {
        self.has_offset
    }

    /// Whether the result is without repetition.
    pub fn has_distinct(&self) -> bool {
        self.has_distinct
    }

    /// Whether the result is an aggregate, as COUNT or SUM.
    pub fn has_aggregate(&self) -> bool {
        self.has_aggregate
    }

    /// Whether the result is grouped.
    pub fn has_group_by(&self) -> bool {
        self.has_group_by
    }

    /// The text as the SDK's emulator understands it.
    pub(crate) fn emulator_text(&self) -> &str {
        &self.emulator_text
    }
}

/// One item of an ORDER BY.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SortKey {
    /// The property; `None` for any other expression.
    pub path: Option<Vec<String>>,
    /// Whether large values come first.
    pub descending: bool,
}

/// A function call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Call {
    /// The function, as the text spells it.
    pub name: String,
    /// Whether it is a user-defined function.
    pub is_udf: bool,
    /// What it is called with.
    pub arguments: Vec<Argument>,
}

impl Call {
    /// Whether this calls the built-in function `name`, in any case.
    pub fn is(&self, name: &str) -> bool {
        !self.is_udf && self.name.eq_ignore_ascii_case(name)
    }
}

/// An argument of a function call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Argument {
    /// A property; the document itself is the empty path.
    Path(Vec<String>),
    /// A parameter, with its `@`.
    Parameter(String),
    /// A constant.
    Literal,
    /// Any other expression.
    Other,
}
