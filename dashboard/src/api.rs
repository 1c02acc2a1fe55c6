//! The JSON API of the dashboard.

use crate::{instance::instance_tree, timeline, Shared};
use axum::{
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    Json,
};
use duroxide::{providers::SystemMetrics, Client, ClientError, OrchestrationStatus};
use duroxide_cosmos::operate::{InstanceQuery, InstanceSummary};
use serde::{Deserialize, Serialize};
use serde_json::{json, Map, Value};
use std::{
    convert::Infallible,
    fmt::Display,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

/// One overview answers every request within this time.
const OVERVIEW_AGE: Duration = Duration::from_secs(2);
/// Instances of one page of the list.
const PAGE: usize = 50;
/// Timeline entries of one answer.
const ENTRIES: usize = 500;
/// Characters of an input or output in a timeline. The browser requests the rest on demand.
const PAYLOAD: usize = 300;
/// Instances of a tree that are shown.
const TREE: usize = 500;
/// Executions that are shown.
const EXECUTIONS: usize = 50;
/// Ancestors that are followed to find a root.
const ANCESTORS: usize = 100;

type SharedState = State<Arc<Shared>>;
type ApiResult = Result<Json<Value>, ApiError>;

/// An error that the browser shows.
pub(crate) struct ApiError(StatusCode, String);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.0, Json(json!({ "error": self.1 }))).into_response()
    }
}

impl<E: Display> From<E> for ApiError {
    /// The account did not answer, or its answer was an error.
    fn from(error: E) -> Self {
        Self(StatusCode::BAD_GATEWAY, error.to_string())
    }
}

fn not_found(id: &str) -> ApiError {
    ApiError(StatusCode::NOT_FOUND, format!("there is no instance {id:?}, or no worker has processed its start yet"))
}

/// The last overview, with the time of its reads.
#[derive(Default)]
pub(crate) struct CachedOverview(Mutex<Option<(Instant, Value)>>);

/// Counts and their trend, queues and workers. Many viewers cost as much as one, because they share an answer.
pub(crate) async fn overview(State(shared): SharedState) -> ApiResult {
    let mut cached = shared.overview.0.lock().await;
    if let Some((_, value)) = cached.as_ref().filter(|(at, _)| at.elapsed() < OVERVIEW_AGE) {
        return Ok(Json(value.clone()));
    }
    let provider = &shared.provider;
    let (metrics, queues, undelivered, workers) = tokio::join!(
        shared.client.get_system_metrics(),
        provider.queues(),
        provider.late_intents(),
        provider.members()
    );
    let counts = |metrics: SystemMetrics| {
        json!({
            "running": metrics.running_instances, "completed": metrics.completed_instances,
            "failed": metrics.failed_instances,
        })
    };
    let mut parts = Parts::default();
    parts.add("counts", metrics.map(counts));
    parts.add("queues", queues);
    parts.add("undelivered", undelivered);
    parts.add("workers", workers);
    let mut value = parts.answer()?;
    value["trend"] = json!(shared.trend.all());
    value["allowChanges"] = json!(shared.allow_changes);
    *cached = Some((Instant::now(), value.clone()));
    Ok(Json(value))
}

/// The parts of an answer. A part that fails is `null`, and `failures` contains its error. The other parts are shown.
#[derive(Default)]
struct Parts {
    answer: Map<String, Value>,
    failures: Map<String, Value>,
}

impl Parts {
    fn add(&mut self, name: &str, part: Result<impl Serialize, impl Display>) {
        let (value, failure) = match part {
            Ok(part) => (json!(part), None),
            Err(error) => (Value::Null, Some(error.to_string())),
        };
        self.answer.insert(name.to_owned(), value);
        self.failures.extend(failure.map(|failure| (name.to_owned(), json!(failure))));
    }

    /// The answer, if at least one part succeeded.
    fn answer(mut self) -> Result<Value, ApiError> {
        if self.failures.len() == self.answer.len() {
            let first = self.failures.values().find_map(Value::as_str).unwrap_or("the account did not answer");
            return Err(ApiError(StatusCode::BAD_GATEWAY, first.to_owned()));
        }
        self.answer.insert("failures".to_owned(), Value::Object(self.failures));
        Ok(Value::Object(self.answer))
    }
}

/// The filters of the list.
#[derive(Deserialize)]
pub(crate) struct ListParameters {
    status: Option<String>,
    name: Option<String>,
    parent: Option<String>,
    text: Option<String>,
    /// The maximum age, in seconds.
    newer: Option<u64>,
    cursor: Option<String>,
}

pub(crate) async fn instances(State(shared): SharedState, Query(list): Query<ListParameters>) -> ApiResult {
    let non_empty = |text: Option<String>| text.filter(|text| !text.is_empty());
    let mut query = InstanceQuery::default();
    (query.status, query.name) = (non_empty(list.status), non_empty(list.name));
    (query.parent, query.text) = (non_empty(list.parent), non_empty(list.text));
    let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    let since = list.newer.map(|newer| now.saturating_sub(Duration::from_secs(newer)));
    query.created_after = since.map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
    let page = shared.provider.instances(&query, non_empty(list.cursor).as_deref(), PAGE).await?;
    Ok(Json(json!(page)))
}

/// An instance, and the part of it that is requested.
#[derive(Deserialize)]
pub(crate) struct InstanceParameters {
    id: String,
    execution: Option<u64>,
    /// The index of the first timeline entry.
    #[serde(default)]
    offset: usize,
    event: Option<u64>,
}

/// The instance that a request names.
async fn read_instance(shared: &Shared, id: &str) -> Result<InstanceSummary, ApiError> {
    shared.provider.instance(id).await?.ok_or_else(|| not_found(id))
}

pub(crate) async fn instance(State(shared): SharedState, Query(request): Query<InstanceParameters>) -> ApiResult {
    let id = &request.id;
    let (client, provider) = (&shared.client, &shared.provider);
    let instance = read_instance(&shared, id).await?;
    let is_orphan = async {
        let Some(_) = &instance.parent else { return Ok(false) };
        provider.parent_of(id).await.map(|parent| parent.is_none())
    };
    let (status, executions, values, orphan) = tokio::join!(
        client.get_orchestration_status(id),
        executions(client, id),
        client.get_kv_all_values(id),
        is_orphan
    );
    let outcome = |status: OrchestrationStatus| {
        let (result, custom_status) = crate::instance::result_and_custom_status(&status);
        json!({ "result": result, "customStatus": custom_status })
    };
    let mut parts = Parts::default();
    parts.add("outcome", status.map(outcome));
    parts.add("orphan", orphan);
    parts.add("values", values);
    parts.add("executions", executions);
    parts.add("instance", Ok::<_, Infallible>(&instance));
    Ok(Json(parts.answer()?))
}

/// The latest executions of an instance, and the number of all of them.
async fn executions(client: &Client, id: &str) -> Result<Value, ClientError> {
    let all = client.list_executions(id).await?;
    let mut shown = Vec::new();
    for execution in all.iter().rev().take(EXECUTIONS) {
        let info = client.get_execution_info(id, *execution).await?;
        shown.push(json!({
            "execution": info.execution_id, "status": info.status, "startedAt": info.started_at,
            "completedAt": info.completed_at, "events": info.event_count,
        }));
    }
    Ok(json!({ "count": all.len(), "shown": shown }))
}

/// The timeline of an execution, from the entry with index `offset`.
pub(crate) async fn history(State(shared): SharedState, Query(request): Query<InstanceParameters>) -> ApiResult {
    let history = read_history(&shared, &request).await?;
    let entries = &history.entries;
    let offset = request.offset.min(entries.len());
    let shown: Vec<Value> = entries[offset..].iter().take(ENTRIES).map(shorten).collect();
    let first = entries.first().map(|entry| entry.at);
    let last = entries.iter().map(|entry| entry.ended.unwrap_or(entry.at)).max();
    Ok(Json(json!({
        "execution": history.execution, "events": history.events, "entries": shown, "offset": offset,
        "total": entries.len(), "startedAt": first, "lastEventAt": last,
    })))
}

/// An entry with shortened payloads. The field `truncated` marks it.
fn shorten(entry: &timeline::Entry) -> Value {
    let mut object = json!(entry);
    for field in ["input", "output"] {
        let text = object[field].as_str().unwrap_or_default();
        if let Some((at, _)) = text.char_indices().nth(PAYLOAD) {
            object[field] = json!(text[..at]);
            object["truncated"] = json!(true);
        }
    }
    object
}

/// The history of one execution.
struct History {
    execution: u64,
    events: usize,
    entries: Vec<timeline::Entry>,
}

async fn read_history(shared: &Shared, request: &InstanceParameters) -> Result<History, ApiError> {
    let id = &request.id;
    let instance = read_instance(shared, id).await?;
    let execution = request.execution.unwrap_or(instance.execution);
    let events = shared.client.read_execution_history(id, execution).await?;
    if events.is_empty() {
        return Err(ApiError(StatusCode::NOT_FOUND, format!("{id:?} has no execution {execution}")));
    }
    Ok(History { execution, events: events.len(), entries: timeline::entries(&events) })
}

/// One entry of a timeline with its whole payloads.
pub(crate) async fn entry(State(shared): SharedState, Query(request): Query<InstanceParameters>) -> ApiResult {
    let history = read_history(&shared, &request).await?;
    let entry = history.entries.into_iter().find(|entry| Some(entry.event) == request.event);
    let missing = || ApiError(StatusCode::NOT_FOUND, format!("{:?} has no such event", request.id));
    Ok(Json(json!(entry.ok_or_else(missing)?)))
}

/// The tree of an instance, from its root.
pub(crate) async fn tree(State(shared): SharedState, Query(request): Query<InstanceParameters>) -> ApiResult {
    let mut root = read_instance(&shared, &request.id).await?;
    // A parent that no longer exists ends the search. The limit ends a cycle, which only a damaged container has.
    for _ in 0..ANCESTORS {
        let Some(parent) = root.parent.clone() else { break };
        let Some(ancestor) = shared.provider.instance(&parent).await? else { break };
        root = ancestor;
    }
    let instances = instance_tree(&shared.provider, &shared.client, &root.id, TREE).await?;
    Ok(Json(json!({ "root": root.id, "limit": TREE, "instances": instances })))
}

pub(crate) async fn doctor(State(shared): SharedState, Query(request): Query<InstanceParameters>) -> ApiResult {
    let diagnosis = shared.provider.doctor().await?.diagnose(&request.id).await?;
    Ok(Json(json!(diagnosis.ok_or_else(|| not_found(&request.id))?)))
}

/// A change to an instance.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ChangeRequest {
    id: String,
    /// The name of the event.
    #[serde(default)]
    name: String,
    /// The data of the event, or the reason of the cancellation.
    #[serde(default)]
    text: String,
    #[serde(default)]
    force: bool,
    /// The creation time of the instance that the browser has shown.
    created_at: Option<u64>,
    /// The details of the findings that the browser has shown.
    #[serde(default)]
    findings: Vec<String>,
}

impl Shared {
    fn check_changes_allowed(&self) -> Result<(), ApiError> {
        if self.allow_changes {
            return Ok(());
        }
        let message = "this dashboard only reads: it was started without --allow-changes";
        Err(ApiError(StatusCode::FORBIDDEN, message.to_owned()))
    }
}

/// The change is not possible in the present state of the instance.
fn conflict(error: impl Display) -> ApiError {
    ApiError(StatusCode::CONFLICT, error.to_string())
}

pub(crate) async fn cancel(State(shared): SharedState, Json(change): Json<ChangeRequest>) -> ApiResult {
    shared.check_changes_allowed()?;
    read_instance(&shared, &change.id).await?;
    shared.client.cancel_instance(&change.id, &change.text).await.map_err(conflict)?;
    Ok(Json(json!({ "done": "asked to stop" })))
}

pub(crate) async fn raise(State(shared): SharedState, Json(change): Json<ChangeRequest>) -> ApiResult {
    shared.check_changes_allowed()?;
    read_instance(&shared, &change.id).await?;
    if change.name.is_empty() {
        return Err(ApiError(StatusCode::BAD_REQUEST, "an event needs a name".to_owned()));
    }
    shared.client.raise_event(&change.id, &change.name, &change.text).await.map_err(conflict)?;
    Ok(Json(json!({ "done": format!("raised {}", change.name) })))
}

/// Repairs the findings that the browser has shown, if the doctor finds them again.
pub(crate) async fn repair(State(shared): SharedState, Json(change): Json<ChangeRequest>) -> ApiResult {
    shared.check_changes_allowed()?;
    let doctor = shared.provider.doctor().await?;
    let mut diagnosis = doctor.diagnose(&change.id).await?.ok_or_else(|| not_found(&change.id))?;
    diagnosis.findings.retain(|finding| change.findings.contains(&finding.detail));
    Ok(Json(json!(doctor.repair(&diagnosis).await?)))
}

pub(crate) async fn delete(State(shared): SharedState, Json(change): Json<ChangeRequest>) -> ApiResult {
    shared.check_changes_allowed()?;
    let instance = read_instance(&shared, &change.id).await?;
    if change.created_at.is_some_and(|shown| shown != instance.created_at) {
        return Err(conflict("another instance has this id now: open it first"));
    }
    let deleted = shared.client.delete_instance(&change.id, change.force).await.map_err(conflict)?;
    let (instances, events) = (deleted.instances_deleted, deleted.events_deleted);
    Ok(Json(json!({ "done": format!("deleted {instances} instances with {events} events") })))
}
