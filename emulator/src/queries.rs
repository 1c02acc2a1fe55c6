//! Queries on the wire: refused where the service refuses them, and else handed to the emulator in its own dialect.

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

/// Longer texts are parsed each time.
const MAX_REMEMBERED_BYTES: usize = 16 * 1024;

/// So many texts are remembered; one more, and all are forgotten.
const MAX_REMEMBERED: usize = 1_000;

/// Checks queries, and remembers the texts that it has parsed.
#[derive(Default)]
pub(crate) struct Queries {
    /// Whether a filter by a path that is not indexed is served by a scan.
    scans: bool,
    texts: Mutex<HashMap<String, Arc<Result<Query, SyntaxError>>>>,
}

/// What became of a check.
pub(crate) enum Checked<'r> {
    /// The service would refuse it.
    Refused(Answer),
    /// The request as the SDK's emulator understands it.
    Fine(Cow<'r, Outgoing>),
}

/// The body of a query.
struct Spec {
    body: Value,
    query: Arc<Result<Query, SyntaxError>>,
}

impl Queries {
    /// `scans` says whether a filter by a path that is not indexed is served by a scan.
    pub fn new(scans: bool) -> Self {
        Self { scans, ..Self::default() }
    }

    /// Checks a query or a query plan of a container with this index, as the service would.
    pub fn check<'r>(&self, request: &'r Outgoing, kind: RequestKind, indexing: &Indexing) -> Checked<'r> {
        // A feed without a query is a GET.
        let Some(spec) = self.read(request) else { return Checked::Fine(Cow::Borrowed(request)) };
        let query = match &*spec.query {
            Ok(query) => query,
            Err(error) => return Checked::Refused(refusal(&error.to_json())),
        };
        let unindexed = || self.unindexed(request, query, indexing).filter(|_| kind == RequestKind::Query);
        match unbound(query, &spec.body).or_else(unindexed) {
            Some(refusal) => Checked::Refused(refusal),
            None => Checked::Fine(translated(request, &spec.body, query)),
        }
    }

    fn read(&self, request: &Outgoing) -> Option<Spec> {
        if request.method != Method::Post {
            return None;
        }
        let body = read_json(&request.body)?;
        let query = self.parse(body.get("query")?.as_str()?);
        Some(Spec { body, query })
    }

    /// Parses a text once.
    fn parse(&self, text: &str) -> Arc<Result<Query, SyntaxError>> {
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = texts.get(text) {
            return Arc::clone(known);
        }
        let parsed = Arc::new(sql::parse(text));
        if text.len() <= MAX_REMEMBERED_BYTES {
            if texts.len() >= MAX_REMEMBERED {
                texts.clear();
            }
            texts.insert(text.to_owned(), Arc::clone(&parsed));
        }
        parsed
    }

    fn unindexed(&self, request: &Outgoing, query: &Query, indexing: &Indexing) -> Option<Answer> {
        if let Some(message) = indexing.order_refusal(query) {
            return Some(Answer::refusal(400, None, message));
        }
        let may_scan = self.scans || is_true(&request.headers, &ENABLE_SCAN);
        let scanned = if may_scan { None } else { indexing.unindexed_filter(query) };
        scanned.map(|path| Answer::refusal(400, None, &scan_message(path)))
    }
}

impl fmt::Debug for Queries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queries").field("scans", &self.scans).finish_non_exhaustive()
    }
}

fn refusal(errors: &Value) -> Answer {
    Answer::refusal(400, None, &errors.to_string())
}

/// The service's refusal of a query with a parameter that the request gives no value.
fn unbound(query: &Query, body: &Value) -> Option<Answer> {
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

/// The request with the query text in the emulator's dialect.
fn translated<'a>(request: &'a Outgoing, body: &Value, query: &Query) -> Cow<'a, Outgoing> {
    if body["query"] == query.emulator_text() {
        return Cow::Borrowed(request);
    }
    let mut body = body.clone();
    body["query"] = Value::from(query.emulator_text());
    Cow::Owned(Outgoing { body: Bytes::from(body.to_string()), ..request.clone() })
}

/// A query plan with its texts in the service's dialect: the client sends them back.
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
