//! Every query that we send, each with the index that it relies on, parameters always bound.
//!
//! A test walks [`ALL`] and fails where a path that a query filters or orders by is not in the indexing policy.

use super::error::StoreError;
use azure_data_cosmos::Query;
use serde::Serialize;
use serde_json::Value;

/// The text of a query and the name under which it appears in logs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryText {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
}

/// A query with its parameters bound.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    text: QueryText,
    parameters: Vec<(&'static str, Value)>,
}

impl QueryText {
    /// The query without parameters yet.
    pub(crate) fn statement(self) -> Statement {
        Statement { text: self, parameters: Vec::new() }
    }
}

impl Statement {
    /// Binds a parameter; `name` begins with `@`.
    pub(crate) fn bind(mut self, name: &'static str, value: impl Serialize) -> Self {
        debug_assert!(self.text.text.contains(name), "{} has no parameter {name}", self.text.name);
        // Only strings, numbers and lists of them are bound, and those always serialise.
        let value = serde_json::to_value(value).unwrap_or(Value::Null);
        self.parameters.push((name, value));
        self
    }

    pub(super) fn name(&self) -> &'static str {
        self.text.name
    }

    pub(super) fn into_query(self) -> Result<Query, StoreError> {
        let mut query = Query::from(self.text.text);
        for (name, value) in self.parameters {
            query = query.with_parameter(name, value).map_err(|e| StoreError::Malformed {
                detail: format!("the parameter {name} of {} can't be written: {e}", self.text.name),
            })?;
        }
        Ok(query)
    }
}

/// Any document of a partition, by the kinds asked for. Used to see what a test or an operator left in one.
pub(crate) const DOCUMENTS_OF_TYPE: QueryText = QueryText {
    name: "documents_of_type",
    text: "SELECT * FROM c WHERE c.type = @type",
};

/// Every query of the provider.
#[cfg(test)]
pub(crate) const ALL: &[QueryText] = &[DOCUMENTS_OF_TYPE];
