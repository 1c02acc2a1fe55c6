//! A look at every exchange, for what the counters do not say.

use std::fmt;

use serde_json::Value;

use crate::request::{read_json, WireRequest};

/// An answer as an observer sees it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct WireAnswer<'a> {
    /// The HTTP status.
    pub status: u16,
    /// The body as sent; it may be in Cosmos's binary JSON, which [`json`](Self::json) reads too.
    pub body: &'a [u8],
}

impl WireAnswer<'_> {
    /// The body as JSON, whether it was sent as text or in Cosmos's binary form.
    pub fn json(&self) -> Option<Value> {
        read_json(self.body)
    }
}

type Look = dyn Fn(&WireRequest<'_>, &WireAnswer<'_>) + Send + Sync;

/// Whoever looks.
pub(crate) struct Observer(Box<Look>);

impl Observer {
    pub fn new(look: impl Fn(&WireRequest<'_>, &WireAnswer<'_>) + Send + Sync + 'static) -> Self {
        Self(Box::new(look))
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
