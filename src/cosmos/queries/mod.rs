//! The queries of the provider, and statements with bound parameters.
//!
//! A test reads [`ALL`] and fails if the indexing policy lacks a path that a query filters or orders by.

mod sample;
mod statement;
#[cfg(test)]
mod tests;
mod texts;

pub(crate) use statement::{chunks_for_query, QueryText, Statement};
pub(crate) use texts::*;
