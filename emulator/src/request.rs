//! Requests on the wire: their kind, and the details that rules and checks read.

use std::fmt;
use std::sync::Arc;

use azure_core::http::{
    headers::{HeaderName, Headers},
    Method, Request, Url,
};
use azure_core::Bytes;
use azure_data_cosmos_driver::binary_json;
use percent_encoding::{percent_decode_str, utf8_percent_encode, NON_ALPHANUMERIC};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) const PARTITION_KEY: HeaderName = HeaderName::from_static("x-ms-documentdb-partitionkey");
pub(crate) const PARTITION_RANGE: HeaderName = HeaderName::from_static("x-ms-documentdb-partitionkeyrangeid");
pub(crate) const IS_UPSERT: HeaderName = HeaderName::from_static("x-ms-documentdb-is-upsert");
const IS_QUERY: HeaderName = HeaderName::from_static("x-ms-documentdb-isquery");
const IS_QUERY_LEGACY: HeaderName = HeaderName::from_static("x-ms-documentdb-query");
const IS_QUERY_PLAN: HeaderName = HeaderName::from_static("x-ms-cosmos-is-query-plan-request");
pub(crate) const IS_BATCH: HeaderName = HeaderName::from_static("x-ms-cosmos-is-batch-request");
pub(crate) const CONTINUATION: HeaderName = HeaderName::from_static("x-ms-continuation");
pub(crate) const CONSISTENCY: HeaderName = HeaderName::from_static("x-ms-consistency-level");
pub(crate) const READ_STRATEGY: HeaderName = HeaderName::from_static("x-ms-cosmos-read-consistency-strategy");
const CHANGE_FEED: HeaderName = HeaderName::from_static("a-im");

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RequestKind {
    /// The account's regions and settings.
    Account,
    /// A database: create, read, list, delete.
    Database,
    /// A container: create, read, list, replace, delete.
    Container,
    /// The physical partitions of a container.
    PartitionKeyRanges,
    /// Provisioned throughput.
    Offer,
    /// The creation of an item.
    Create,
    /// The creation or replacement of an item.
    Upsert,
    /// The replacement of an item.
    Replace,
    /// The deletion of an item.
    Delete,
    /// The point read of an item, or a batch that only reads. Such a batch goes to the write region and changes
    /// nothing.
    Read,
    /// One page of a query, or of a feed of items without a query.
    Query,
    /// A query plan.
    QueryPlan,
    /// A transactional batch.
    Batch,
    /// One page of the change feed.
    ChangeFeed,
    /// Any other request, for example a patch.
    Other,
}

impl RequestKind {
    /// Returns the name of the kind in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Account => "account",
            Self::Database => "database",
            Self::Container => "container",
            Self::PartitionKeyRanges => "partition_key_ranges",
            Self::Offer => "offer",
            Self::Create => "create",
            Self::Upsert => "upsert",
            Self::Replace => "replace",
            Self::Delete => "delete",
            Self::Read => "read",
            Self::Query => "query",
            Self::QueryPlan => "query_plan",
            Self::Batch => "batch",
            Self::ChangeFeed => "change_feed",
            Self::Other => "other",
        }
    }

    /// Whether the request concerns the account's structure rather than items.
    pub fn is_metadata(self) -> bool {
        matches!(self, Self::Account | Self::Database | Self::Container | Self::PartitionKeyRanges | Self::Offer)
    }
}

impl fmt::Display for RequestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A request, as a rule or an observer sees it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct WireRequest<'a> {
    /// The kind of the request.
    pub kind: RequestKind,
    /// The name of the client that sent the request. Over HTTP it is the suffix of the user agent.
    pub client: Option<&'a str>,
    /// The HTTP method.
    pub method: &'a str,
    /// The path, still percent-encoded and without a trailing slash.
    pub path: &'a str,
    /// The partition key header: a JSON array.
    pub partition_key: Option<&'a str>,
    /// The physical partition that the request names. The SDK names one in each part of a query across partitions.
    pub partition_range: Option<&'a str>,
    /// The continuation of the previous page of the same query or feed.
    pub continuation: Option<&'a str>,
    /// The id of the item of a point operation, from the path or else from the body.
    pub document_id: Option<&'a str>,
    /// The body as sent. It may be in Cosmos DB's binary JSON, which [`json`](Self::json) reads too.
    pub body: &'a [u8],
    /// The number of the request on this account's wire, starting at 1.
    pub sequence: u64,
    headers: &'a Headers,
}

impl<'a> WireRequest<'a> {
    /// Returns the value of a header. `name` is in lower case.
    pub fn header(&self, name: &'static str) -> Option<&'a str> {
        header(self.headers, &HeaderName::from_static(name))
    }

    /// Returns the body as JSON, whether it was sent as text or in the binary form.
    pub fn json(&self) -> Option<Value> {
        read_json(self.body)
    }
}

/// A request on its way to the store.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    pub client: Option<Arc<str>>,
    pub method: Method,
    pub url: Url,
    pub headers: Headers,
    pub body: Bytes,
}

impl Outgoing {
    /// Removes a trailing slash from the path. The Python SDK sends one, and the service ignores it.
    pub fn trim_trailing_slash(&mut self) {
        let path = self.url.path();
        if path.len() > 1 && path.ends_with('/') {
            let trimmed = path.trim_end_matches('/').to_owned();
            self.url.set_path(&trimmed);
        }
    }

    /// Returns a GET request without headers and body, to another path in the same region.
    pub fn get(&self, path: &str) -> Self {
        let mut url = self.url.clone();
        url.set_path(path);
        Self { client: None, method: Method::Get, url, headers: Headers::new(), body: Bytes::new() }
    }

    /// Returns the decoded segments of the path.
    pub fn segments(&self) -> Vec<String> {
        segments(self.url.path())
    }

    /// Returns the request in the type that the emulator accepts.
    pub fn to_core(&self) -> Request {
        let mut request = Request::new(self.url.clone(), self.method);
        *request.headers_mut() = self.headers.clone();
        if !self.body.is_empty() {
            request.set_body(self.body.clone());
        }
        request
    }
}

/// The details of a request that rules and checks use. They are read once.
#[derive(Debug)]
pub(crate) struct RequestDetails {
    pub kind: RequestKind,
    pub sequence: u64,
    pub partition_key: Option<String>,
    pub document_id: Option<String>,
    /// The body of a write, decoded.
    pub body: Option<Value>,
}

impl RequestDetails {
    /// Reads the details of `request`, which has the number `sequence` on its wire.
    pub fn of(request: &Outgoing, sequence: u64) -> Self {
        let segments = request.segments();
        let sent_as = classify(request.method, &segments, &request.headers);
        let is_write =
            matches!(sent_as, RequestKind::Create | RequestKind::Upsert | RequestKind::Replace | RequestKind::Batch);
        let body = is_write.then(|| read_json(&request.body)).flatten();
        let reads_only = sent_as == RequestKind::Batch && body.as_ref().is_some_and(has_only_reads);
        // An id with a slash consists of several segments. It is illegal, and the check refuses the joined id.
        let named = segments.get(5..).filter(|id| !id.is_empty()).map(|id| id.join("/"));
        let in_body = || {
            let item = body.as_ref()?;
            // The provider reads from the write region with a batch of one read.
            let item = if reads_only { item.get(0)? } else { item };
            item.get("id")?.as_str().map(str::to_owned)
        };
        Self {
            kind: if reads_only { RequestKind::Read } else { sent_as },
            sequence,
            partition_key: header(&request.headers, &PARTITION_KEY).map(str::to_owned),
            document_id: named.or_else(in_body),
            body,
        }
    }

    /// Returns the operations of a batch, or `None` for other requests.
    pub fn operations(&self) -> Option<&[Value]> {
        // Among the requests that read, only a batch has a body.
        let is_batch = matches!(self.kind, RequestKind::Batch | RequestKind::Read);
        self.body.as_ref().filter(|_| is_batch).and_then(Value::as_array).map(Vec::as_slice)
    }

    /// Returns the request as a rule sees it.
    pub fn view<'a>(&'a self, request: &'a Outgoing) -> WireRequest<'a> {
        WireRequest {
            kind: self.kind,
            client: request.client.as_deref(),
            method: request.method.as_str(),
            path: request.url.path(),
            partition_key: self.partition_key.as_deref(),
            partition_range: header(&request.headers, &PARTITION_RANGE),
            continuation: header(&request.headers, &CONTINUATION),
            document_id: self.document_id.as_deref(),
            body: &request.body,
            sequence: self.sequence,
            headers: &request.headers,
        }
    }
}

/// Whether a batch contains only reads.
fn has_only_reads(batch: &Value) -> bool {
    let is_read = |operation: &Value| operation.get("operationType").is_some_and(|kind| kind == "Read");
    batch.as_array().is_some_and(|operations| !operations.is_empty() && operations.iter().all(is_read))
}

/// Splits a path and decodes its segments.
pub(crate) fn segments(path: &str) -> Vec<String> {
    let decode = |segment: &str| percent_decode_str(segment).decode_utf8_lossy().into_owned();
    path.split('/').filter(|segment| !segment.is_empty()).map(decode).collect()
}

/// Encodes a name as a segment of a path.
pub(crate) fn encode(name: &str) -> String {
    utf8_percent_encode(name, NON_ALPHANUMERIC).to_string()
}

/// Determines the kind of a request from its method, path and headers, by the same rules as the emulator.
pub(crate) fn classify(method: Method, segments: &[String], headers: &Headers) -> RequestKind {
    let parts: Vec<&str> = segments.iter().map(String::as_str).collect();
    match parts.as_slice() {
        [] => RequestKind::Account,
        ["offers", ..] => RequestKind::Offer,
        ["dbs"] | ["dbs", _] => RequestKind::Database,
        ["dbs", _, "colls"] | ["dbs", _, "colls", _] => RequestKind::Container,
        ["dbs", _, "colls", _, "pkranges"] => RequestKind::PartitionKeyRanges,
        ["dbs", _, "colls", _, "docs"] => classify_feed(method, headers),
        ["dbs", _, "colls", _, "docs", ..] => match method {
            Method::Get => RequestKind::Read,
            Method::Put => RequestKind::Replace,
            Method::Delete => RequestKind::Delete,
            _ => RequestKind::Other,
        },
        _ => RequestKind::Other,
    }
}

fn classify_feed(method: Method, headers: &Headers) -> RequestKind {
    let is = |name: &HeaderName| is_true(headers, name);
    match method {
        Method::Get if header(headers, &CHANGE_FEED).is_some() => RequestKind::ChangeFeed,
        Method::Get => RequestKind::Query,
        Method::Post if is(&IS_QUERY_PLAN) => RequestKind::QueryPlan,
        Method::Post if is(&IS_QUERY) || is(&IS_QUERY_LEGACY) => RequestKind::Query,
        Method::Post if is(&IS_BATCH) => RequestKind::Batch,
        Method::Post if is(&IS_UPSERT) => RequestKind::Upsert,
        Method::Post => RequestKind::Create,
        _ => RequestKind::Other,
    }
}

/// Whether the value of a header is "true", in any case.
pub(crate) fn is_true(headers: &Headers, name: &HeaderName) -> bool {
    header(headers, name).is_some_and(|value| value.eq_ignore_ascii_case("true"))
}

/// Returns the value of a header.
pub(crate) fn header<'a>(headers: &'a Headers, name: &HeaderName) -> Option<&'a str> {
    headers.get_optional_str(name)
}

/// Reads text or binary JSON.
pub(crate) fn read_json(body: &[u8]) -> Option<Value> {
    if binary_json::is_binary(body) {
        binary_json::decode(body).ok()
    } else {
        serde_json::from_slice(body).ok()
    }
}
