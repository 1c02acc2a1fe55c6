//! A query with its parameters, and the options of its requests.

use crate::cosmos::{error::StoreError, request_options::RequestOptions, Freshness};
use azure_data_cosmos::Query;
use serde::Serialize;
use serde_json::Value;
use std::{borrow::Cow, num::NonZeroU32};

/// The text of a query, its name in logs, and the page size of a query of several partitions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryText {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// The page size of one physical partition. A query of several partitions always has one. The SDK does not send
    /// `TOP` to the partitions, so otherwise the service would choose the page size.
    pub(super) page: Option<NonZeroU32>,
}

/// A query with its parameters bound.
#[derive(Clone, Debug)]
pub(crate) struct Statement {
    name: &'static str,
    pub(super) text: Cow<'static, str>,
    pub(super) parameters: Vec<(String, Value)>,
    page_size: Option<NonZeroU32>,
    request_options: RequestOptions,
}

impl QueryText {
    /// A query of one logical partition.
    pub(crate) const fn within(name: &'static str, text: &'static str) -> Self {
        Self { name, text, page: None }
    }

    /// A query of several partitions, with at most `page` rows in the page of each.
    pub(crate) const fn across(name: &'static str, page: u32, text: &'static str) -> Self {
        Self { name, text, page: NonZeroU32::new(page) }
    }

    /// Whether the query asks several partitions.
    pub(crate) fn is_across(self) -> bool {
        self.page.is_some()
    }

    /// A statement of this query, without parameters.
    pub(crate) fn statement(self) -> Statement {
        let Self { name, text, page } = self;
        Statement {
            name,
            text: Cow::Borrowed(text),
            parameters: Vec::new(),
            page_size: page,
            request_options: RequestOptions::default(),
        }
    }
}

impl Statement {
    /// Binds a parameter. `name` begins with `@`.
    pub(crate) fn bind(mut self, name: &str, value: impl Serialize) -> Self {
        debug_assert!(self.text.contains(name), "{} has no parameter {name}", self.name);
        // Callers bind only strings, numbers and lists of them, which always serialise.
        let value = serde_json::to_value(value).unwrap_or(Value::Null);
        self.parameters.push((name.to_owned(), value));
        self
    }

    /// Binds the values of an `IN (@list)`. Each value gets its own parameter, so that the service can use the index.
    /// An empty list matches no row.
    pub(crate) fn bind_list<S: AsRef<str>>(mut self, list: &str, values: impl IntoIterator<Item = S>) -> Self {
        let placeholder = format!("({list})");
        debug_assert!(self.text.contains(&placeholder), "{} has no list {list}", self.name);
        let mut names = Vec::new();
        for (index, value) in values.into_iter().enumerate() {
            names.push(format!("{list}{index}"));
            self.parameters.push((format!("{list}{index}"), Value::from(value.as_ref())));
        }
        // No indexed property is ever null.
        let inside = if names.is_empty() { "null".to_owned() } else { names.join(", ") };
        self.text = Cow::Owned(self.text.replace(&placeholder, &format!("({inside})")));
        self
    }

    /// Sets the page size of each physical partition.
    pub(crate) fn in_pages_of(mut self, rows: NonZeroU32) -> Self {
        self.page_size = Some(rows);
        self
    }

    /// Sees every write that is committed in the region that answers, not only those of this process. Use it if another
    /// worker has announced a document, because a lagging replica would not return it.
    pub(crate) fn latest_committed(mut self) -> Self {
        self.request_options = self.request_options.latest_committed();
        self
    }

    /// Sees every committed write, from the write region. Use it if the provider decides by the answer.
    pub(crate) fn authoritative(mut self) -> Self {
        self.request_options = self.request_options.authoritative();
        self
    }

    /// Sees the same writes as a read of this freshness.
    pub(crate) fn seeing(self, freshness: Freshness) -> Self {
        match freshness {
            Freshness::Session => self,
            Freshness::Authoritative => self.authoritative(),
        }
    }

    /// With low priority: if throughput is short, the service serves other requests first.
    pub(crate) fn in_background(mut self) -> Self {
        self.request_options = self.request_options.in_background();
        self
    }

    pub(in crate::cosmos) fn request_options(&self) -> RequestOptions {
        self.request_options
    }

    pub(in crate::cosmos) fn page_size(&self) -> Option<NonZeroU32> {
        self.page_size
    }

    pub(in crate::cosmos) fn name(&self) -> &'static str {
        self.name
    }

    pub(in crate::cosmos) fn into_query(self) -> Result<Query, StoreError> {
        let mut query = Query::from(self.text.into_owned());
        for (name, value) in self.parameters {
            query = query.with_parameter(&name, value).map_err(|e| StoreError::Malformed {
                detail: format!("the parameter {name} of {} can't be serialised: {e}", self.name),
            })?;
        }
        Ok(query)
    }
}

/// Splits a list of names into parts whose names fit into the parameters of one query. A part has at most `most` names.
pub(crate) fn chunks_for_query<S: AsRef<str>>(names: &[S], most: usize) -> Vec<&[S]> {
    const BYTES: usize = 100_000;
    let mut parts = Vec::new();
    let (mut from, mut bytes) = (0, 0);
    for (at, name) in names.iter().enumerate() {
        if at > from && (at - from == most || bytes + name.as_ref().len() > BYTES) {
            parts.push(&names[from..at]);
            (from, bytes) = (at, 0);
        }
        bytes += name.as_ref().len();
    }
    if from < names.len() {
        parts.push(&names[from..]);
    }
    parts
}
