//! Queries on the wire: refused where the service refuses them, and else handed to the emulator in its own dialect.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use azure_core::http::Method;
use azure_core::Bytes;
use serde_json::Value;

use crate::answer::{Answer, Lost};
use crate::request::{read_json, Outgoing, RequestKind};
use crate::sql::{self, error_json, Query, SyntaxError};
use crate::wire::Service;

/// Longer texts are parsed each time.
const MAX_REMEMBERED_BYTES: usize = 16 * 1024;

/// So many texts are remembered; one more, and all are forgotten.
const MAX_REMEMBERED: usize = 1_000;

/// What is known of query texts.
#[derive(Default)]
pub(crate) struct Queries {
    texts: Mutex<HashMap<String, Arc<Result<Query, SyntaxError>>>>,
}

/// The body of a query.
struct Spec {
    body: Value,
    query: Arc<Result<Query, SyntaxError>>,
}

impl Queries {
    /// Answers a query or a query plan, as the service would.
    pub async fn answer(&self, service: &Service, request: &Outgoing, kind: RequestKind) -> Result<Answer, Lost> {
        // A feed without a query is a GET.
        let Some(spec) = self.read(request) else { return service.forward(request).await };
        let query = match &*spec.query {
            Ok(query) => query,
            Err(error) => return Ok(refusal(&error.to_json())),
        };
        if let Some(refusal) = unbound(query, &spec.body) {
            return Ok(refusal);
        }
        if kind == RequestKind::QueryPlan {
            return Ok(with_service_texts(service.forward(&translated(request, &spec.body, query)).await?));
        }
        service.forward(&translated(request, &spec.body, query)).await
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
            remember(&mut texts, text.to_owned(), Arc::clone(&parsed));
        }
        parsed
    }
}

impl fmt::Debug for Queries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queries").finish_non_exhaustive()
    }
}

fn remember<T>(known: &mut HashMap<String, T>, key: String, value: T) {
    if known.len() >= MAX_REMEMBERED {
        known.clear();
    }
    known.insert(key, value);
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
fn with_service_texts(mut answer: Answer) -> Answer {
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
