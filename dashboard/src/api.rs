//! What the page asks for, as JSON.

use crate::{instance::family, timeline, Shared};
use axum::{
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    Json,
};
use duroxide::{providers::SystemMetrics, Client, ClientError, OrchestrationStatus};
use duroxide_cosmos::operate::InstanceQuery;
use serde::{Deserialize, Serialize};
use serde_json::{json, Map, Value};
use std::{
    convert::Infallible,
    fmt::Display,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

/// An overview serves all who look within so long.
const FRESH: Duration = Duration::from_secs(2);
/// Instances of one page.
const PAGE: usize = 50;
/// Entries of a history that are sent at once.
const ENTRIES: usize = 500;
/// Characters of an input or output that are sent with the others; the rest is asked for.
const SHORT: usize = 300;
/// Members of a family that are shown.
const FAMILY: usize = 500;
/// Executions that are shown.
const EXECUTIONS: usize = 50;

type At = State<Arc<Shared>>;
type Told = Result<Json<Value>, Failure>;

/// Why there is no answer.
pub(crate) struct Failure(StatusCode, String);

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.0, Json(json!({ "error": self.1 }))).into_response()
    }
}

impl<E: Display> From<E> for Failure {
    /// The account did not answer, or not as it should.
    fn from(error: E) -> Self {
        Self(StatusCode::BAD_GATEWAY, error.to_string())
    }
}

fn not_found(id: &str) -> Failure {
    Failure(StatusCode::NOT_FOUND, format!("there is no instance {id:?}, or no worker has taken up its start yet"))
}

/// The overview that was worked out last.
#[derive(Default)]
pub(crate) struct Overview(Mutex<Option<(Instant, Value)>>);

/// Counts and their trend, queues, the fleet. However many look, the account is asked once.
pub(crate) async fn overview(State(shared): At) -> Told {
    let mut kept = shared.overview.0.lock().await;
    if let Some((_, value)) = kept.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
        return Ok(Json(value.clone()));
    }
    let provider = &shared.provider;
    let (metrics, queues, late, members) = tokio::join!(
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
    parts.add("late", late);
    parts.add("members", members);
    let mut value = parts.answer()?;
    value["trend"] = json!(shared.trend.all());
    value["allowChanges"] = json!(shared.allow_changes);
    *kept = Some((Instant::now(), value.clone()));
    Ok(Json(value))
}

/// The parts of an answer. A part that fails is `null`, and `failures` says why; the other parts are shown.
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
    fn answer(mut self) -> Result<Value, Failure> {
        if self.failures.len() == self.answer.len() {
            let first = self.failures.values().find_map(Value::as_str).unwrap_or("there is no answer");
            return Err(Failure(StatusCode::BAD_GATEWAY, first.to_owned()));
        }
        self.answer.insert("failures".to_owned(), Value::Object(self.failures));
        Ok(Value::Object(self.answer))
    }
}

/// Which instances a list is of.
#[derive(Deserialize)]
pub(crate) struct Wanted {
    status: Option<String>,
    name: Option<String>,
    parent: Option<String>,
    text: Option<String>,
    /// Created within so many seconds.
    newer: Option<u64>,
    cursor: Option<String>,
}

pub(crate) async fn instances(State(shared): At, Query(wanted): Query<Wanted>) -> Told {
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let mut query = InstanceQuery::default();
    (query.status, query.name) = (given(wanted.status), given(wanted.name));
    (query.parent, query.text) = (given(wanted.parent), given(wanted.text));
    let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    let since = wanted.newer.map(|newer| now.saturating_sub(Duration::from_secs(newer)));
    query.created_after = since.map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
    let page = shared.provider.instances(&query, given(wanted.cursor).as_deref(), PAGE).await?;
    Ok(Json(json!(page)))
}

/// Which instance, and what of it.
#[derive(Deserialize)]
pub(crate) struct Which {
    id: String,
    execution: Option<u64>,
    /// From which entry on.
    #[serde(default)]
    from: usize,
    event: Option<u64>,
}

pub(crate) async fn instance(State(shared): At, Query(which): Query<Which>) -> Told {
    let Which { id, .. } = which;
    let (client, provider) = (&shared.client, &shared.provider);
    let found = provider.instance(&id).await?.ok_or_else(|| not_found(&id))?;
    let is_orphan = async {
        let Some(_) = &found.parent else { return Ok(false) };
        provider.parent_of(&id).await.map(|parent| parent.is_none())
    };
    let (status, executions, values, orphan) = tokio::join!(
        client.get_orchestration_status(&id),
        executions(client, &id),
        client.get_kv_all_values(&id),
        is_orphan
    );
    let outcome = |status: OrchestrationStatus| {
        let (result, custom) = crate::instance::told_by(&status);
        json!({ "result": result, "customStatus": custom })
    };
    let mut parts = Parts::default();
    parts.add("outcome", status.map(outcome));
    parts.add("orphan", orphan);
    parts.add("values", values);
    parts.add("executions", executions);
    parts.add("instance", Ok::<_, Infallible>(&found));
    Ok(Json(parts.answer()?))
}

/// The latest executions of an instance, and how many there are.
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

/// The timeline of an execution, from its `from`th entry on.
pub(crate) async fn history(State(shared): At, Query(which): Query<Which>) -> Told {
    let (execution, events, entries) = entries(&shared, &which).await?;
    let from = which.from.min(entries.len());
    let shown: Vec<Value> = entries[from..]
        .iter()
        .take(ENTRIES)
        .map(|entry| {
            let mut told = json!(entry);
            for field in ["input", "output"] {
                let text = told[field].as_str().unwrap_or_default();
                if let Some((at, _)) = text.char_indices().nth(SHORT) {
                    told[field] = json!(text[..at]);
                    told["cut"] = json!(true);
                }
            }
            told
        })
        .collect();
    let first = entries.first().map(|entry| entry.at);
    let last = entries.iter().map(|entry| entry.ended.unwrap_or(entry.at)).max();
    Ok(Json(json!({
        "execution": execution, "events": events, "entries": shown, "from": from, "total": entries.len(),
        "begins": first, "ends": last,
    })))
}

async fn entries(shared: &Shared, which: &Which) -> Result<(u64, usize, Vec<timeline::Entry>), Failure> {
    let id = &which.id;
    let found = shared.provider.instance(id).await?.ok_or_else(|| not_found(id))?;
    let execution = which.execution.unwrap_or(found.execution);
    let events = shared.client.read_execution_history(id, execution).await?;
    if events.is_empty() {
        return Err(Failure(StatusCode::NOT_FOUND, format!("{id:?} has no execution {execution}")));
    }
    Ok((execution, events.len(), timeline::entries(&events)))
}

/// One entry of a timeline, whole.
pub(crate) async fn entry(State(shared): At, Query(which): Query<Which>) -> Told {
    let (_, _, entries) = entries(&shared, &which).await?;
    let entry = entries.into_iter().find(|entry| Some(entry.event) == which.event);
    let missing = || Failure(StatusCode::NOT_FOUND, format!("{:?} has no such event", which.id));
    Ok(Json(json!(entry.ok_or_else(missing)?)))
}

/// The family of an instance, from its root on.
pub(crate) async fn tree(State(shared): At, Query(which): Query<Which>) -> Told {
    let mut root = shared.provider.instance(&which.id).await?.ok_or_else(|| not_found(&which.id))?;
    // A parent that is gone ends it; so does a circle, which only a broken container can have.
    for _ in 0..100 {
        let Some(parent) = root.parent.clone() else { break };
        let Some(above) = shared.provider.instance(&parent).await? else { break };
        root = above;
    }
    let members = family(&shared.provider, &shared.client, &root.id, FAMILY).await?;
    Ok(Json(json!({ "root": root.id, "most": FAMILY, "members": members })))
}

pub(crate) async fn doctor(State(shared): At, Query(which): Query<Which>) -> Told {
    let diagnosis = shared.provider.doctor().await?.diagnose(&which.id).await?;
    Ok(Json(json!(diagnosis.ok_or_else(|| not_found(&which.id))?)))
}

/// What is to be done with an instance.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Order {
    id: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    text: String,
    #[serde(default)]
    force: bool,
    /// When the instance that was shown was created.
    created_at: Option<u64>,
    /// The findings that were shown.
    #[serde(default)]
    said: Vec<String>,
}

impl Shared {
    fn may_change(&self) -> Result<(), Failure> {
        let says = "this page only reads: it was started without --allow-changes";
        if self.allow_changes {
            Ok(())
        } else {
            Err(Failure(StatusCode::FORBIDDEN, says.to_owned()))
        }
    }
}

/// Something can't be done as it was asked for.
fn refused(error: impl Display) -> Failure {
    Failure(StatusCode::CONFLICT, error.to_string())
}

pub(crate) async fn cancel(State(shared): At, Json(order): Json<Order>) -> Told {
    shared.may_change()?;
    shared.provider.instance(&order.id).await?.ok_or_else(|| not_found(&order.id))?;
    shared.client.cancel_instance(&order.id, &order.text).await.map_err(refused)?;
    Ok(Json(json!({ "done": "asked to stop" })))
}

pub(crate) async fn raise(State(shared): At, Json(order): Json<Order>) -> Told {
    shared.may_change()?;
    shared.provider.instance(&order.id).await?.ok_or_else(|| not_found(&order.id))?;
    if order.name.is_empty() {
        return Err(Failure(StatusCode::BAD_REQUEST, "an event has a name".to_owned()));
    }
    shared.client.raise_event(&order.id, &order.name, &order.text).await.map_err(refused)?;
    Ok(Json(json!({ "done": format!("raised {}", order.name) })))
}

/// Mends what was shown, as far as it is found again.
pub(crate) async fn repair(State(shared): At, Json(order): Json<Order>) -> Told {
    shared.may_change()?;
    let doctor = shared.provider.doctor().await?;
    let mut diagnosis = doctor.diagnose(&order.id).await?.ok_or_else(|| not_found(&order.id))?;
    diagnosis.findings.retain(|finding| order.said.contains(&finding.detail));
    Ok(Json(json!(doctor.repair(&diagnosis).await?)))
}

pub(crate) async fn delete(State(shared): At, Json(order): Json<Order>) -> Told {
    shared.may_change()?;
    let found = shared.provider.instance(&order.id).await?.ok_or_else(|| not_found(&order.id))?;
    if order.created_at.is_some_and(|shown| shown != found.created_at) {
        return Err(refused("another instance has this id now: look at it first"));
    }
    let gone = shared.client.delete_instance(&order.id, order.force).await.map_err(refused)?;
    Ok(Json(
        json!({ "done": format!("deleted {} instances with {} events", gone.instances_deleted, gone.events_deleted) }),
    ))
}
