//! The service's query language: checks query texts and determines the properties that they read.
//!
//! The grammar is the one that Microsoft publishes with its .NET SDK. The SDK's emulator accepts more, so a query that
//! works there can fail on Azure. An example is `c.by`, because `BY` is a reserved word.
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

/// The longest query text that the service accepts.
const MAX_BYTES: usize = 512 * 1024;

/// Parses a query text as the service does.
///
/// # Errors
///
/// If the service refuses the text: for its syntax, for an unknown name, or for more than 512 KiB. Texts with more than
/// 64 levels of nesting are refused, too.
pub fn parse(text: &str) -> Result<Query, SyntaxError> {
    if text.len() > MAX_BYTES {
        return Err(SyntaxError::too_long(text.len(), MAX_BYTES));
    }
    let parsed = parser::parse_text(text)?;
    let mut query = paths::read(&parsed.select)?;
    query.emulator_text = dialect::to_emulator(text, &parsed);
    Ok(query)
}

/// Translates a text of the SDK's emulator into the service's dialect.
pub(crate) fn from_emulator(text: &str) -> String {
    dialect::to_service(text)
}

/// A parsed query: the properties that it reads, and the clauses that it has.
///
/// A path leads from the document to a property: `c.lock.until` is `["lock", "until"]`. The step `[]` stands for the
/// elements of an array, whether a JOIN iterates over them or a number selects one.
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
    /// Returns the properties that the WHERE clause reads, also in function calls and subqueries, without duplicates.
    pub fn filter_paths(&self) -> &[Vec<String>] {
        &self.filters
    }

    /// Returns the keys of the ORDER BY clause.
    pub fn order_by(&self) -> &[SortKey] {
        &self.order_by
    }

    /// Returns every function call in the text.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// Returns the parameters of the text, with their `@` and without duplicates.
    pub fn parameters(&self) -> &[String] {
        &self.parameters
    }

    /// Whether TOP limits the result.
    pub fn has_top(&self) -> bool {
        self.has_top
    }

    /// Whether OFFSET and LIMIT select a part of the result.
    pub fn has_offset(&self) -> bool {
        self.has_offset
    }

    /// Whether DISTINCT removes duplicates from the result.
    pub fn has_distinct(&self) -> bool {
        self.has_distinct
    }

    /// Whether the result is an aggregate, such as COUNT or SUM.
    pub fn has_aggregate(&self) -> bool {
        self.has_aggregate
    }

    /// Whether the result is grouped.
    pub fn has_group_by(&self) -> bool {
        self.has_group_by
    }

    /// Returns the text in the dialect of the SDK's emulator.
    pub(crate) fn emulator_text(&self) -> &str {
        &self.emulator_text
    }
}

/// One key of an ORDER BY clause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SortKey {
    /// The property, or `None` for any other expression.
    pub path: Option<Vec<String>>,
    /// Whether large values come first.
    pub descending: bool,
}

/// A function call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Call {
    /// The name of the function, as the text spells it.
    pub name: String,
    /// Whether the function is user-defined.
    pub is_udf: bool,
    /// The arguments of the call.
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
    /// A property. The document itself is the empty path.
    Path(Vec<String>),
    /// A parameter, with its `@`.
    Parameter(String),
    /// A constant.
    Literal,
    /// Any other expression.
    Other,
}
