//! Transactional batches, and batches whose operations run one by one.

use azure_core::http::headers::{HeaderName, Headers};
use azure_core::http::Method;
use azure_core::Bytes;
use serde_json::{json, Map, Value};

use crate::active_misbehaviours::ActiveMisbehaviours;
use crate::answer::{Answer, NoAnswer, FAILED_DEPENDENCY, SUBSTATUS};
use crate::misbehaviour::Misbehaviour;
use crate::request::{encode, is_true, read_json, Outgoing, IS_BATCH, IS_UPSERT, PARTITION_KEY};
use crate::service::Service;

const ATOMIC: HeaderName = HeaderName::from_static("x-ms-cosmos-batch-atomic");
const CONTINUE_ON_ERROR: HeaderName = HeaderName::from_static("x-ms-cosmos-batch-continue-on-error");
const FORMATS: HeaderName = HeaderName::from_static("x-ms-cosmos-supported-serialization-formats");
const IF_MATCH: HeaderName = HeaderName::from_static("if-match");
const IF_NONE_MATCH: HeaderName = HeaderName::from_static("if-none-match");
const ETAG: HeaderName = HeaderName::from_static("etag");

const MAX_OPERATIONS: usize = 100;
const MAX_BYTES: usize = 2 * 1024 * 1024;

/// Answers a batch with these operations.
pub(crate) async fn answer(
    service: &Service,
    request: &Outgoing,
    operations: &[Value],
    misbehaviours: &ActiveMisbehaviours,
) -> Result<Answer, NoAnswer> {
    let is_atomic = is_true(&request.headers, &ATOMIC) && !misbehaviours.is(&Misbehaviour::BatchesNotAtomic);
    if is_atomic && misbehaviours.is_empty() {
        return service.forward(request).await;
    }
    let mut batch = Batch { request: request.clone(), operations: operations.to_vec() };
    if misbehaviours.is(&Misbehaviour::BatchesIgnoreIfMatch) {
        batch.drop_conditions();
    }
    let mut answer = if is_atomic || batch.exceeds_limits() {
        service.forward(&batch.request).await?
    } else {
        batch.run_each(service).await?
    };
    if misbehaviours.is(&Misbehaviour::BatchesWithoutEtags) {
        drop_etags(&mut answer);
    }
    Ok(answer)
}

struct Batch {
    request: Outgoing,
    operations: Vec<Value>,
}

impl Batch {
    fn drop_conditions(&mut self) {
        let conditional = self.operations.iter_mut().filter_map(Value::as_object_mut);
        conditional.for_each(|operation| drop(operation.remove("ifMatch")));
        self.request.body = Bytes::from(Value::from(self.operations.clone()).to_string());
    }

    /// Whether the emulator refuses the batch as a whole.
    fn exceeds_limits(&self) -> bool {
        self.operations.len() > MAX_OPERATIONS || self.request.body.len() > MAX_BYTES
    }

    /// Runs one operation after the other without rolling back. After a failure, the remaining operations run only if
    /// the request says so.
    async fn run_each(&self, service: &Service) -> Result<Answer, NoAnswer> {
        let continues = is_true(&self.request.headers, &CONTINUE_ON_ERROR);
        let (mut results, mut headers, mut has_failed) = (Vec::new(), Headers::new(), false);
        for operation in &self.operations {
            if has_failed && !continues {
                results.push(json!({ "statusCode": FAILED_DEPENDENCY, "requestCharge": 0 }));
                continue;
            }
            let answer = service.forward(&self.single(operation)).await?;
            if results.is_empty() && refers_to_batch(answer.status) {
                return Ok(answer);
            }
            has_failed |= answer.status >= 300;
            results.push(result(&answer));
            headers = answer.headers;
        }
        headers.remove(ETAG);
        headers.remove(SUBSTATUS);
        let body = Bytes::from(Value::from(results).to_string());
        Ok(Answer { status: if has_failed { 207 } else { 200 }, headers, body })
    }

    /// Returns the operation as a separate request.
    fn single(&self, operation: &Value) -> Outgoing {
        let mut single = self.request.clone();
        for name in [IS_BATCH, ATOMIC, CONTINUE_ON_ERROR, FORMATS] {
            single.headers.remove(name);
        }
        let text = |name: &str| operation[name].as_str().map(str::to_owned);
        for (name, value) in [(IF_MATCH, "ifMatch"), (IF_NONE_MATCH, "ifNoneMatch"), (PARTITION_KEY, "partitionKey")] {
            if let Some(value) = text(value) {
                single.headers.insert(name, value);
            }
        }
        let path = format!("{}/{}", single.url.path(), encode(&text("id").unwrap_or_default()));
        let (method, names_item) = match operation["operationType"].as_str() {
            Some("Read") => (Method::Get, true),
            Some("Replace") => (Method::Put, true),
            Some("Delete") => (Method::Delete, true),
            Some("Upsert") => {
                single.headers.insert(IS_UPSERT, "true");
                (Method::Post, false)
            }
            _ => (Method::Post, false),
        };
        single.method = method;
        if names_item {
            single.url.set_path(&path);
        }
        single.body = operation.get("resourceBody").map_or_else(Bytes::new, |body| Bytes::from(body.to_string()));
        single
    }
}

/// Whether a status refers to the whole batch. Examples: a region that accepts no writes, a partition that moved, a
/// failure of the service.
fn refers_to_batch(status: u16) -> bool {
    matches!(status, 401 | 403 | 410) || status >= 500
}

/// Returns an answer as the result of an operation.
fn result(answer: &Answer) -> Value {
    let mut result = Map::new();
    result.insert("statusCode".to_owned(), json!(answer.status));
    result.insert("requestCharge".to_owned(), json!(0));
    if let Some(substatus) = answer.headers.get_optional_str(&SUBSTATUS).and_then(|text| text.parse::<u32>().ok()) {
        result.insert("subStatusCode".to_owned(), json!(substatus));
    }
    if let Some(etag) = answer.headers.get_optional_str(&ETAG).filter(|_| answer.is_success()) {
        result.insert("eTag".to_owned(), json!(etag));
    }
    if let Some(body) = read_json(&answer.body).filter(|_| answer.is_success()) {
        result.insert("resourceBody".to_owned(), body);
    }
    Value::Object(result)
}

fn drop_etags(answer: &mut Answer) {
    let Some(Value::Array(mut results)) = read_json(&answer.body) else { return };
    results.iter_mut().filter_map(Value::as_object_mut).for_each(|result| drop(result.remove("eTag")));
    answer.body = Bytes::from(Value::from(results).to_string());
}
