//! The observer, which sees every request and its answer.

use std::fmt;

use serde_json::Value;

use crate::request::{read_json, WireRequest};

/// An answer, as an observer sees it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct WireAnswer<'a> {
    /// The HTTP status.
    pub status: u16,
    /// The body as sent. It may be in Cosmos DB's binary JSON, which [`json`](Self::json) reads too.
    pub body: &'a [u8],
}

impl WireAnswer<'_> {
    /// Returns the body as JSON, whether it was sent as text or in the binary form.
    pub fn json(&self) -> Option<Value> {
        read_json(self.body)
    }
}

type ObserverFn = dyn Fn(&WireRequest<'_>, &WireAnswer<'_>) + Send + Sync;

/// A callback that sees every request and its answer.
pub(crate) struct Observer(Box<ObserverFn>);

impl Observer {
    pub fn new(callback: impl Fn(&WireRequest<'_>, &WireAnswer<'_>) + Send + Sync + 'static) -> Self {
        Self(Box::new(callback))
    }

    pub fn show(&self, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
        (self.0)(request, answer);
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}
