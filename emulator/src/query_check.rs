//! Checks queries as the service does, and translates accepted queries into the dialect of the SDK's emulator.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use azure_core::http::{headers::HeaderName, Method};
use azure_core::Bytes;
use serde_json::Value;

use crate::answer::Answer;
use crate::indexing::Indexing;
use crate::request::{is_true, read_json, Outgoing, RequestKind};
use crate::sql::{self, error_json, Query, SyntaxError};

const ENABLE_SCAN: HeaderName = HeaderName::from_static("x-ms-documentdb-query-enable-scan");

/// The longest query text whose result is cached. Longer texts are parsed each time.
const MAX_CACHED_BYTES: usize = 16 * 1024;

/// The size of the cache of parsed texts. A full cache is emptied.
const MAX_CACHED_TEXTS: usize = 1_000;

/// Checks queries and caches the parsed texts.
#[derive(Default)]
pub(crate) struct QueryChecker {
    /// Whether the account scans for a filter on a path that is not indexed.
    scans: bool,
    texts: Mutex<HashMap<String, Arc<Result<Query, SyntaxError>>>>,
}

/// The result of a check.
pub(crate) enum CheckedQuery<'r> {
    /// The service would refuse the query.
    Refused(Answer),
    /// The request in the dialect of the SDK's emulator.
    Accepted(Cow<'r, Outgoing>),
}

/// The body of a query request, with the parsed query.
struct QueryBody {
    body: Value,
    query: Arc<Result<Query, SyntaxError>>,
}

impl QueryChecker {
    /// Creates a checker. If `scans` is true, a filter on a path that is not indexed is accepted.
    pub fn new(scans: bool) -> Self {
        Self { scans, ..Self::default() }
    }

    /// Checks a query, or the request for a query plan, against a container's index.
    pub fn check<'r>(&self, request: &'r Outgoing, kind: RequestKind, indexing: &Indexing) -> CheckedQuery<'r> {
        // A GET reads a feed and has no query.
        let Some(spec) = self.read(request) else { return CheckedQuery::Accepted(Cow::Borrowed(request)) };
        let query = match &*spec.query {
            Ok(query) => query,
            Err(error) => return CheckedQuery::Refused(refusal(&error.to_json())),
        };
        let unindexed = || self.refuse_unindexed(request, query, indexing).filter(|_| kind == RequestKind::Query);
        match refuse_unbound(query, &spec.body).or_else(unindexed) {
            Some(refusal) => CheckedQuery::Refused(refusal),
            None => CheckedQuery::Accepted(translated(request, &spec.body, query)),
        }
    }

    fn read(&self, request: &Outgoing) -> Option<QueryBody> {
        if request.method != Method::Post {
            return None;
        }
        let body = read_json(&request.body)?;
        let query = self.parse(body.get("query")?.as_str()?);
        Some(QueryBody { body, query })
    }

    /// Parses a text, or returns the cached result.
    fn parse(&self, text: &str) -> Arc<Result<Query, SyntaxError>> {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cached) = texts.get(text) {
            return Arc::clone(cached);
        }
        let parsed = Arc::new(sql::parse(text));
        if text.len() <= MAX_CACHED_BYTES {
            if texts.len() >= MAX_CACHED_TEXTS {
                texts.clear();
            }
            texts.insert(text.to_owned(), Arc::clone(&parsed));
        }
        parsed
    }

    fn refuse_unindexed(&self, request: &Outgoing, query: &Query, indexing: &Indexing) -> Option<Answer> {
        if let Some(message) = indexing.order_refusal(query) {
            return Some(Answer::refusal(400, None, message));
        }
        let may_scan = self.scans || is_true(&request.headers, &ENABLE_SCAN);
        let scanned = if may_scan { None } else { indexing.unindexed_filter(query) };
        scanned.map(|path| Answer::refusal(400, None, &scan_message(path)))
    }
}

impl fmt::Debug for QueryChecker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueryChecker").field("scans", &self.scans).finish_non_exhaustive()
    }
}

fn refusal(errors: &Value) -> Answer {
    Answer::refusal(400, None, &errors.to_string())
}

/// Returns the service's refusal of a query, if the request has no value for one of its parameters.
fn refuse_unbound(query: &Query, body: &Value) -> Option<Answer> {
    let bound = body.get("parameters").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let is_bound = |name: &String| bound.iter().any(|parameter| parameter["name"] == name.as_str());
    let name = query.parameters().iter().find(|name| !is_bound(name))?;
    let message = format!("The query uses the parameter '{name}', but the request has no value for it.");
    Some(refusal(&error_json("SC2061", 0, 0, &message)))
}

fn scan_message(path: &[String]) -> String {
    let path = path.join("/");
    format!(
        "An invalid query has been specified with filters against path(s) excluded from indexing. \
         Consider adding allow scan header in the request. The path '/{path}' is not indexed."
    )
}

/// Returns the request with the query text in the emulator's dialect.
fn translated<'a>(request: &'a Outgoing, body: &Value, query: &Query) -> Cow<'a, Outgoing> {
    if body["query"] == query.emulator_text() {
        return Cow::Borrowed(request);
    }
    let mut body = body.clone();
    body["query"] = Value::from(query.emulator_text());
    Cow::Owned(Outgoing { body: Bytes::from(body.to_string()), ..request.clone() })
}

/// Translates the texts of a query plan into the service's dialect. The client sends them back in its queries.
pub(crate) fn with_service_texts(mut answer: Answer) -> Answer {
    let Some(mut plan) = read_json(&answer.body).filter(|_| answer.is_success()) else { return answer };
    let Some(info) = plan.get_mut("queryInfo") else { return answer };
    for name in ["rewrittenQuery", "orderByExpressions", "groupByExpressions"] {
        if let Some(texts) = info.get_mut(name) {
            to_service(texts);
        }
    }
    answer.body = Bytes::from(plan.to_string());
    answer
}

fn to_service(texts: &mut Value) {
    match texts {
        Value::String(text) => *text = sql::from_emulator(text),
        Value::Array(texts) => texts.iter_mut().for_each(to_service),
        _ => {}
    }
}
