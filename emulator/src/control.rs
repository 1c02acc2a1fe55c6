//! The control endpoints of the served account, under `/_emulator/`: counters, rules, misbehaviours, splits and merges.
//! They need no credential.

use std::num::NonZeroU32;
use std::time::Duration;

use azure_core::http::Method;
use serde::Deserialize;
use serde_json::{json, Value};

use crate::account::LocalAccount;
use crate::answer::Answer;
use crate::misbehaviour::Misbehaviour;
use crate::request::{Outgoing, RequestKind};
use crate::rules::{WireAction, WireRule};

const ROOT: &str = "_emulator";

/// A rule in JSON, such as `{"kind":"batch","times":2,"action":{"type":"refuse","status":429}}`. With `one_in` it
/// applies to a random share of the requests: `{"one_in":20,"action":{"type":"lose_answer"}}`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleRequest {
    action: ActionRequest,
    kind: Option<RequestKind>,
    client: Option<String>,
    /// The rule applies to one in this many of the requests that match, chosen at random.
    one_in: Option<NonZeroU32>,
    #[serde(default)]
    skip: u64,
    times: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum ActionRequest {
    Refuse { status: u16, substatus: Option<u32>, retry_after_ms: Option<u64> },
    RefuseBatchOperation { index: usize, status: u16, substatus: Option<u32> },
    FailConnection,
    LoseAnswer,
    Delay { ms: u64 },
    DelayAnswer { ms: u64 },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SplitRequest {
    database: String,
    container: String,
    partition: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MergeRequest {
    database: String,
    container: String,
    partitions: [u32; 2],
}

/// A misbehaviour in JSON, such as `{"type":"empty-pages"}` or `{"type":"small-pages","value":5}`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MisbehaviourRequest {
    #[serde(rename = "type")]
    name: String,
    value: Option<Value>,
}

/// Whether the request addresses a control endpoint.
pub(crate) fn is_control(request: &Outgoing) -> bool {
    request.segments().first().is_some_and(|first| first == ROOT)
}

/// Answers a request to a control endpoint.
pub(crate) async fn answer(account: &LocalAccount, request: &Outgoing) -> Answer {
    let segments = request.segments();
    let parts: Vec<&str> = segments.iter().skip(1).map(String::as_str).collect();
    match (request.method, parts.as_slice()) {
        (Method::Get, ["health"]) => Answer::json(200, &json!({ "status": "ok" })),
        (Method::Get, ["stats"]) => read_stats(account),
        (Method::Post, ["stats", "reset"]) => {
            account.reset_stats();
            done()
        }
        (Method::Post, ["faults"]) => add_rule(account, &request.body),
        (Method::Delete, ["faults"]) => Answer::json(200, &json!({ "hits": account.wire().clear() })),
        (Method::Get, ["misbehave"]) => Answer::json(200, &json!(account.wire().misbehaviours())),
        (Method::Post, ["misbehave"]) => misbehave(account, &request.body),
        (Method::Delete, ["misbehave"]) => {
            account.wire().behave();
            done()
        }
        (Method::Post, ["split"]) => split(account, &request.body).await,
        (Method::Post, ["merge"]) => merge(account, &request.body).await,
        _ => Answer::refusal(404, None, "This control endpoint does not exist."),
    }
}

fn done() -> Answer {
    Answer::json(200, &json!({}))
}

fn read_stats(account: &LocalAccount) -> Answer {
    let stats = account.stats();
    Answer::json(200, &json!({ "total": stats.total(), "kinds": stats }))
}

fn add_rule(account: &LocalAccount, body: &[u8]) -> Answer {
    match serde_json::from_slice::<RuleRequest>(body) {
        Ok(rule) => {
            account.wire().add(rule.into());
            Answer::json(201, &json!({}))
        }
        Err(error) => Answer::refusal(400, None, &error.to_string()),
    }
}

async fn split(account: &LocalAccount, body: &[u8]) -> Answer {
    let request: SplitRequest = match serde_json::from_slice(body) {
        Ok(request) => request,
        Err(error) => return Answer::refusal(400, None, &error.to_string()),
    };
    let split = account.split(&request.database, &request.container, request.partition);
    match split.await {
        Ok(children) => Answer::json(200, &json!({ "partitions": Value::from(children) })),
        Err(error) => Answer::refusal(400, None, &error.to_string()),
    }
}

async fn merge(account: &LocalAccount, body: &[u8]) -> Answer {
    let request: MergeRequest = match serde_json::from_slice(body) {
        Ok(request) => request,
        Err(error) => return Answer::refusal(400, None, &error.to_string()),
    };
    let [a, b] = request.partitions;
    match account.merge(&request.database, &request.container, a, b).await {
        Ok(merged) => Answer::json(200, &json!({ "partition": merged })),
        Err(error) => Answer::refusal(400, None, &error.to_string()),
    }
}

fn misbehave(account: &LocalAccount, body: &[u8]) -> Answer {
    let request = serde_json::from_slice::<MisbehaviourRequest>(body).map_err(|error| error.to_string());
    let parsed = request.and_then(|request| request.text().parse::<Misbehaviour>().map_err(|error| error.to_string()));
    match parsed {
        Ok(misbehaviour) => {
            account.wire().misbehave(misbehaviour);
            Answer::json(201, &json!({}))
        }
        Err(message) => Answer::refusal(400, None, &message),
    }
}

impl MisbehaviourRequest {
    /// Returns the misbehaviour in the form of the command line: `NAME` or `NAME=VALUE`.
    fn text(&self) -> String {
        match &self.value {
            None => self.name.clone(),
            Some(Value::String(value)) => format!("{}={value}", self.name),
            Some(value) => format!("{}={value}", self.name),
        }
    }
}

impl From<RuleRequest> for WireRule {
    fn from(request: RuleRequest) -> Self {
        let mut rule = WireRule::new(request.action.into()).skip(request.skip);
        if let Some(kind) = request.kind {
            rule = rule.on(kind);
        }
        if let Some(client) = request.client {
            rule = rule.client(client);
        }
        if let Some(one_in) = request.one_in {
            rule = rule.matching(move |_| fastrand::u32(..one_in.get()) == 0);
        }
        match request.times {
            Some(times) => rule.times(times),
            None => rule,
        }
    }
}

impl From<ActionRequest> for WireAction {
    fn from(request: ActionRequest) -> Self {
        match request {
            ActionRequest::Refuse { status, substatus, retry_after_ms } => {
                Self::Refuse { status, substatus, retry_after: retry_after_ms.map(Duration::from_millis) }
            }
            ActionRequest::RefuseBatchOperation { index, status, substatus } => {
                Self::RefuseBatchOperation { index, status, substatus }
            }
            ActionRequest::FailConnection => Self::FailConnection,
            ActionRequest::LoseAnswer => Self::LoseAnswer,
            ActionRequest::Delay { ms } => Self::Delay(Duration::from_millis(ms)),
            ActionRequest::DelayAnswer { ms } => Self::DelayAnswer(Duration::from_millis(ms)),
        }
    }
}
