//! What there is.

use super::{plan, Documents, Failures, InstanceRow, Life};
use crate::{
    engine::Engine,
    model::{
        kind, DocumentId, EventSet, ExecutionDocument, InstanceDocument, KvDocument, Millis, Partition, StatusDocument,
    },
    store::{
        or_default, queries, queries::names_in_questions, Deadline, Freshness, Pages, Rows, Statement, StoreError,
        Versioned,
    },
    turn::{load, read, release::read_latest},
};
use duroxide::{
    providers::{ExecutionInfo, InstanceFilter, InstanceInfo, ProviderError},
    Event, EventKind, SystemStats,
};
use futures::{stream, StreamExt};
use serde::Deserialize;
use std::{
    collections::{BTreeSet, HashMap},
    num::NonZeroU32,
    sync::Arc,
};

/// The rows of a query for instances, those that can't be read among them: for a caller that must not overlook one.
fn all_rows(rows: Rows<InstanceRow>) -> Vec<InstanceRow> {
    let (mut rows, unreadable) = rows.into_parts();
    rows.extend(unreadable.iter().filter_map(InstanceRow::unreadable));
    rows
}

/// The instances among some rows that are there, and not deleted.
pub(super) async fn visible(
    engine: &Arc<Engine>,
    mut rows: Vec<InstanceRow>,
    deadline: Deadline,
) -> Result<Vec<InstanceRow>, StoreError> {
    let marked = rows.iter().filter_map(|row| Some((row.instance_id.clone(), row.deleting.clone()?))).collect();
    let deleted = plan::deleted_among(engine, marked, deadline).await?;
    rows.retain(|row| row.status.is_some() && !deleted.contains(&row.instance_id));
    Ok(rows)
}

/// The document of an instance that exists.
pub(crate) async fn existing(
    engine: &Arc<Engine>,
    instance: &str,
    operation: &str,
) -> Result<Versioned<InstanceDocument>, ProviderError> {
    let missing = || ProviderError::permanent(operation, format!("Instance {instance} not found"));
    let partition = Partition::instance(instance).map_err(|_| missing())?;
    let found = read::instance(engine, &partition, engine.deadline()).await;
    let found = found.map_err(|e| e.into_provider_error(operation))?;
    found.filter(|found| found.document.exists()).ok_or_else(missing)
}

/// An instance that exists, as the write region knows it. A turn that was left half-way is not rolled forward.
pub(super) async fn latest(
    engine: &Arc<Engine>,
    instance: &str,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
    let found = read_latest(engine, &partition, engine.deadline()).await?;
    let Some(found) = found.filter(|found| found.document.exists()) else { return Ok(None) };
    let is_gone = plan::is_deleted(engine, &found.document, engine.deadline()).await?;
    Ok(Some(found).filter(|_| !is_gone))
}

/// An execution of the past.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PastExecution {
    pub(crate) execution: u64,
    pub(crate) status: String,
    #[serde(default)]
    pub(crate) ended_at: Option<Millis>,
    #[serde(default)]
    pub(crate) events: EventSet,
}

/// The executions that are stored as documents and not pruned: all but a current one that runs.
async fn past_executions(engine: &Engine, document: &InstanceDocument) -> Result<Vec<PastExecution>, StoreError> {
    // An execution whose document can't be read is not listed.
    let pages =
        engine.store.partition_pages(&document.instance_id, queries::EXECUTIONS.statement(), engine.per_page())?;
    let mut past: Vec<PastExecution> = pages.collect().await?.readable();
    past.retain(|e| !document.pruning.contains(&e.execution));
    past.sort_by_key(|e| e.execution);
    Ok(past)
}

/// The ids of an instance's executions, in order.
pub(crate) async fn executions(engine: &Arc<Engine>, instance: &str) -> Result<Vec<u64>, ProviderError> {
    const OPERATION: &str = "list_executions";
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    let Ok(partition) = Partition::instance(instance) else { return Ok(Vec::new()) };
    let deadline = engine.deadline();
    let Some(found) = read::instance(engine, &partition, deadline).await.map_err(failed)? else {
        return Ok(Vec::new());
    };
    if !found.document.exists() {
        return Ok(Vec::new());
    }
    let past = past_executions(engine, &found.document).await.map_err(failed)?;
    let mut ids: BTreeSet<u64> = past.iter().map(|e| e.execution).collect();
    ids.insert(found.document.execution);
    Ok(ids.into_iter().collect())
}

/// The history of one execution.
pub(crate) async fn history(
    engine: &Arc<Engine>,
    instance: &str,
    execution: u64,
    operation: &str,
) -> Result<Vec<Event>, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error(operation);
    let Ok(partition) = Partition::instance(instance) else { return Ok(Vec::new()) };
    let deadline = engine.deadline();
    let Some(found) = read::instance(engine, &partition, deadline).await.map_err(failed)? else {
        return Ok(Vec::new());
    };
    if found.document.pruning.contains(&execution) {
        return Ok(Vec::new());
    }
    let documents = read::history(engine, &partition, execution, Freshness::Session, engine.per_page()).await;
    let documents = documents.map_err(failed)?;
    parsed(load::events(documents).map(|(events, _)| events), operation)
}

/// The history of the latest execution.
pub(crate) async fn latest_history(
    engine: &Arc<Engine>,
    instance: &str,
    operation: &str,
) -> Result<Vec<Event>, ProviderError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(Vec::new()) };
    let events = read::latest(engine, &partition, engine.deadline()).await;
    parsed(events.map_err(|e| e.into_provider_error(operation))?, operation)
}

fn parsed(events: Result<Vec<Event>, String>, operation: &str) -> Result<Vec<Event>, ProviderError> {
    events.map_err(|e| ProviderError::permanent(operation, format!("Failed to deserialize history: {e}")))
}

/// The current execution of an instance, 1 where there is none.
pub(crate) async fn latest_execution(engine: &Arc<Engine>, instance: &str) -> Result<u64, ProviderError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(1) };
    let found = read::instance(engine, &partition, engine.deadline()).await;
    let found = found.map_err(|e| e.into_provider_error("latest_execution_id"))?;
    Ok(found.map_or(1, |found| found.document.execution))
}

async fn execution_document(
    engine: &Engine,
    document: &InstanceDocument,
    execution: u64,
    deadline: Deadline,
) -> Result<Option<ExecutionDocument>, StoreError> {
    let id = ExecutionDocument::document_id(execution);
    let found = engine.store.read(&document.instance_id, &id, Freshness::Session, deadline).await?;
    Ok(found.map(|Versioned { document, .. }| document))
}

/// Everything about an instance but its history.
pub(crate) async fn instance_info(engine: &Arc<Engine>, instance: &str) -> Result<InstanceInfo, ProviderError> {
    const OPERATION: &str = "get_instance_info";
    let Versioned { document, .. } = existing(engine, instance, OPERATION).await?;
    let mut output = document.output.clone();
    if document.archived {
        let found = execution_document(engine, &document, document.execution, engine.deadline()).await;
        output = found.map_err(|e| e.into_provider_error(OPERATION))?.and_then(|e| e.output);
    }
    let version = if document.version.is_empty() { "unknown".to_owned() } else { document.version };
    Ok(InstanceInfo {
        instance_id: instance.to_owned(),
        orchestration_name: document.name,
        orchestration_version: version,
        current_execution_id: document.execution,
        status: document.status.unwrap_or_default(),
        output,
        created_at: document.created_at,
        updated_at: document.updated_at,
        parent_instance_id: document.parent,
    })
}

/// Everything about an execution but its history.
pub(crate) async fn execution_info(
    engine: &Arc<Engine>,
    instance: &str,
    execution: u64,
) -> Result<ExecutionInfo, ProviderError> {
    const OPERATION: &str = "get_execution_info";
    let missing =
        || ProviderError::permanent(OPERATION, format!("Execution {execution} not found for instance {instance}"));
    let Versioned { document, .. } = existing(engine, instance, OPERATION).await?;
    if document.pruning.contains(&execution) {
        return Err(missing());
    }
    let stored = execution_document(engine, &document, execution, engine.deadline()).await;
    let stored = stored.map_err(|e| e.into_provider_error(OPERATION))?;
    // A current execution that runs has no document of its own yet.
    let found = match stored {
        Some(stored) if execution != document.execution || document.archived => stored,
        _ if execution == document.execution => ExecutionDocument::of(&document, document.output.clone()),
        _ => return Err(missing()),
    };
    Ok(ExecutionInfo {
        execution_id: execution,
        status: found.status,
        output: found.output,
        started_at: found.started_at,
        completed_at: found.ended_at,
        event_count: usize::try_from(found.events.len()).unwrap_or(usize::MAX),
    })
}

/// The custom status, where it is newer than the caller has seen.
pub(crate) async fn custom_status(
    engine: &Arc<Engine>,
    instance: &str,
    last_seen: u64,
) -> Result<Option<(Option<String>, u64)>, ProviderError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
    let deadline = engine.deadline();
    let failed = |e: StoreError| e.into_provider_error("get_custom_status");
    let Some(found) = read::instance(engine, &partition, deadline).await.map_err(failed)? else { return Ok(None) };
    if found.document.status_version <= last_seen {
        return Ok(None);
    }
    let id = StatusDocument::document_id();
    let read = engine.store.read::<StatusDocument>(&partition, &id, Freshness::Session, deadline).await;
    let status = read.map_err(failed)?.map(|found| (found.document.value, found.document.version));
    Ok(status.filter(|(_, version)| *version > last_seen))
}

/// The latest value of a key.
pub(crate) async fn value(engine: &Arc<Engine>, instance: &str, key: &str) -> Result<Option<String>, ProviderError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
    let deadline = engine.deadline();
    let failed = |e: StoreError| e.into_provider_error("get_kv_value");
    if read::instance(engine, &partition, deadline).await.map_err(failed)?.is_none() {
        return Ok(None);
    }
    let id = KvDocument::document_id(key);
    let found = engine.store.read::<KvDocument>(&partition, &id, Freshness::Session, deadline).await;
    Ok(found.map_err(failed)?.and_then(|found| found.document.value))
}

/// The latest values of all keys.
pub(crate) async fn values(engine: &Arc<Engine>, instance: &str) -> Result<HashMap<String, String>, ProviderError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(HashMap::new()) };
    let documents = value_documents(engine, &partition).await;
    let documents = documents.map_err(|e| e.into_provider_error("get_kv_all_values"))?;
    Ok(documents.into_iter().filter_map(|d| d.value.map(|value| (d.key, value))).collect())
}

async fn value_documents(engine: &Arc<Engine>, partition: &Partition) -> Result<Vec<KvDocument>, StoreError> {
    let deadline = engine.deadline();
    if read::instance(engine, partition, deadline).await?.is_none() {
        return Ok(Vec::new());
    }
    engine.store.query_partition(partition, queries::VALUES.statement(), engine.per_page()).await
}

/// Sizes of an instance's history and values.
pub(crate) async fn stats(engine: &Arc<Engine>, instance: &str) -> Result<Option<SystemStats>, ProviderError> {
    const OPERATION: &str = "get_instance_stats";
    let failed = |e: StoreError| e.into_provider_error(OPERATION);
    let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
    let deadline = engine.deadline();
    let found = read::instance(engine, &partition, deadline).await.map_err(failed)?;
    let Some(found) = found.filter(|found| found.document.exists()) else { return Ok(None) };
    let (execution, freshness) = (found.document.execution, Freshness::Session);
    let documents = read::history(engine, &partition, execution, freshness, engine.per_page()).await.map_err(failed)?;
    let count: usize = documents.iter().map(|d| d.events.len()).sum();
    let bytes: usize = documents.iter().flat_map(|d| &d.events).map(String::len).sum();
    let pending = load::events(documents).map_or(0, |(events, _)| carried_forward(&events));
    let values = value_documents(engine, &partition).await.map_err(failed)?;
    let live: Vec<&String> = values.iter().filter_map(|v| v.value.as_ref()).collect();
    Ok(Some(SystemStats {
        history_event_count: count as u64,
        history_size_bytes: bytes as u64,
        queue_pending_count: pending,
        kv_user_key_count: live.len() as u64,
        kv_total_value_bytes: live.iter().map(|v| v.len() as u64).sum(),
    }))
}

/// Queue messages that the execution took over from the one before it.
fn carried_forward(events: &[Event]) -> u64 {
    events
        .iter()
        .find_map(|event| match &event.kind {
            EventKind::OrchestrationStarted { carry_forward_events, .. } => {
                Some(carry_forward_events.as_ref().map_or(0, |carried| carried.len() as u64))
            }
            _ => None,
        })
        .unwrap_or(0)
}

/// The children of some instances, and whose they are. One question: the caller cuts it to size.
pub(crate) async fn children(engine: &Arc<Engine>, parents: &[String]) -> Result<Vec<InstanceRow>, StoreError> {
    let statement = queries::CHILDREN.statement().bind_list("@parents", parents).authoritative();
    let (mut pages, mut children) = (engine.store.container_pages(statement, engine.per_page())?, Vec::new());
    while let Some(page) = pages.next().await? {
        children.extend(visible(engine, all_rows(page), engine.deadline()).await?);
    }
    Ok(children)
}

/// A document that depends on an instance: a child, or a message that the instance still owes to another one.
#[derive(Deserialize)]
pub(super) struct Dependent {
    #[serde(rename = "type")]
    kind: String,
    #[serde(deserialize_with = "DocumentId::of_any")]
    id: DocumentId,
    /// The receiver of a message.
    #[serde(default, deserialize_with = "or_default")]
    target: Option<Partition>,
    #[serde(flatten)]
    row: InstanceRow,
}

/// Some of the documents that depend on some instances.
pub(super) struct Dependents {
    pub(super) children: Vec<InstanceRow>,
    pub(super) owed: Vec<Owed>,
}

/// A message that an instance still owes to another one, by the id of its intent.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Owed {
    pub(super) sender: String,
    pub(super) receiver: Option<Partition>,
    pub(super) id: DocumentId,
}

/// What depends on some instances, page by page. The query is authoritative, since deletions are decided by it: a lagging
/// region may not show a child, which would be left without its parent.
pub(super) fn dependents_pages(engine: &Engine, parents: &[String]) -> Result<Pages<Dependent>, StoreError> {
    let statement = queries::DEPENDENTS.statement().bind_list("@parents", parents).authoritative();
    engine.store.container_pages(statement, engine.per_page())
}

pub(super) async fn next_dependents(
    engine: &Arc<Engine>,
    pages: &mut Pages<Dependent>,
) -> Result<Option<Dependents>, StoreError> {
    let Some(page) = pages.next().await? else { return Ok(None) };
    let (rows, unreadable) = page.into_parts();
    let (intents, children): (Vec<Dependent>, Vec<Dependent>) =
        rows.into_iter().partition(|dependent| dependent.kind == kind::INTENT);
    let owed = |intent: Dependent| Some(Owed { sender: intent.row.parent?, receiver: intent.target, id: intent.id });
    let owed = intents.into_iter().filter_map(owed).collect();
    let mut children: Vec<InstanceRow> = children.into_iter().map(|child| child.row).collect();
    children.extend(unreadable.iter().filter_map(InstanceRow::unreadable));
    let children = visible(engine, children, engine.deadline()).await?;
    Ok(Some(Dependents { children, owed }))
}

/// Parents whose children are asked for at once.
pub(super) const PARENTS: usize = 200;

/// An instance with all that descend from it, parents before children, each once.
pub(crate) async fn tree(engine: &Arc<Engine>, root: &str) -> Result<Vec<String>, StoreError> {
    let mut trees = forest(engine, &[root.to_owned()], None).await?;
    Ok(trees.pop().unwrap_or_default())
}

/// Descendants of some roots, as a query has shown them.
#[derive(Default)]
pub(super) struct Seen {
    /// The documents of the first of them.
    pub(super) documents: Documents,
    /// Which instance of its name each of them is.
    pub(super) lives: HashMap<String, Life>,
}

/// Several roots, each with all that descend from it, parents before children. A generation of all of them is asked for at once. The
/// descendants are noted in `seen`.
pub(super) async fn forest(
    engine: &Arc<Engine>,
    roots: &[String],
    mut seen: Option<&mut Seen>,
) -> Result<Vec<Vec<String>>, StoreError> {
    let mut trees: Vec<Vec<String>> = roots.iter().map(|root| vec![root.clone()]).collect();
    let mut tree_of: HashMap<String, usize> =
        roots.iter().enumerate().map(|(tree, root)| (root.clone(), tree)).collect();
    let mut generation = roots.to_vec();
    while !generation.is_empty() {
        let mut next = Vec::new();
        for parents in names_in_questions(&generation, PARENTS) {
            let children = match &mut seen {
                Some(seen) => whole_children(engine, parents, seen).await?,
                None => children(engine, parents).await?,
            };
            for row in children {
                let Some((id, parent)) = row.id().zip(row.parent) else { continue };
                let Some(tree) = tree_of.get(&parent).copied().filter(|_| !tree_of.contains_key(&id)) else { continue };
                tree_of.insert(id.clone(), tree);
                trees[tree].push(id.clone());
                next.push(id);
            }
        }
        generation = next;
    }
    Ok(trees)
}

/// The children of some instances, with their documents.
async fn whole_children(
    engine: &Arc<Engine>,
    parents: &[String],
    seen: &mut Seen,
) -> Result<Vec<InstanceRow>, StoreError> {
    let statement = queries::WHOLE_CHILDREN.statement().bind_list("@parents", parents).authoritative();
    let mut pages = engine.store.container_pages(statement, engine.per_page())?;
    let mut rows = Vec::new();
    while let Some(page) = pages.next().await? {
        let page: Rows<Versioned<InstanceDocument>> = page;
        let (whole, unreadable) = page.into_parts();
        for found in whole {
            let row = InstanceRow::of(&found.document);
            if let Some(id) = row.id() {
                seen.lives.insert(id.clone(), row.life.clone());
                seen.documents.extend(Some((id, found)).filter(|_| seen.documents.len() < plan::KNOWN));
            }
            rows.push(row);
        }
        // Who marks the tree reads the document, and says that it can't.
        rows.extend(unreadable.iter().filter_map(InstanceRow::unreadable));
    }
    visible(engine, rows, engine.deadline()).await
}

/// The ids of the instances that a query returns.
pub(crate) async fn list(
    engine: &Arc<Engine>,
    statement: Statement,
    operation: &str,
) -> Result<Vec<String>, ProviderError> {
    let failed = |e: StoreError| e.into_provider_error(operation);
    let pages = engine.store.container_pages::<InstanceRow>(statement, engine.per_page()).map_err(failed)?;
    let rows = pages.collect().await.map_err(failed)?;
    let rows = visible(engine, rows.readable(), engine.deadline()).await.map_err(failed)?;
    Ok(rows.iter().filter_map(InstanceRow::id).collect())
}

/// What duroxide's own provider does where a filter has no limit.
const DEFAULT_LIMIT: u32 = 1_000;
/// Rows that each physical partition returns at a time.
const PAGE: NonZeroU32 = NonZeroU32::new(200).unwrap();

/// The instances that a bulk operation may take, those among them whose deletion was left half-way included: those that the
/// filter names, or the oldest that fit, page by page until there are as many as it may take.
pub(super) async fn candidates(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
    fits: impl Fn(&InstanceRow) -> bool,
    operation: &str,
) -> Result<Vec<InstanceRow>, ProviderError> {
    let Some(named) = &filter.instance_ids else {
        return oldest(engine, filter, fits).await.map_err(|e| e.into_provider_error(operation));
    };
    let unique: BTreeSet<&String> = named.iter().collect();
    let partitions: Vec<Partition> = unique.into_iter().filter_map(|id| Partition::instance(id).ok()).collect();
    let reading = stream::iter(partitions).map(|partition| async move {
        let found = read_latest(engine, &partition, engine.deadline()).await;
        (partition, found)
    });
    let mut reading = reading.buffered(16);
    let (mut rows, mut failures) = (Vec::new(), Failures::default());
    while let Some((partition, found)) = reading.next().await {
        match found {
            Ok(found) => rows.extend(found.map(|found| InstanceRow::of(&found.document))),
            Err(error) => {
                failures.note(partition.instance_id().unwrap_or_default(), error.into_provider_error(operation));
            }
        }
    }
    failures.unless(!rows.is_empty(), rows)
}

async fn oldest(
    engine: &Arc<Engine>,
    filter: &InstanceFilter,
    fits: impl Fn(&InstanceRow) -> bool,
) -> Result<Vec<InstanceRow>, StoreError> {
    // Whoever is taken is deleted even if it runs: a lagging region may show one that has ended, of the same name.
    let statement = queries::INSTANCES_TO_CLEAN.statement().in_pages_of(PAGE).authoritative();
    let mut pages = engine.store.container_pages(statement, engine.per_page())?;
    let (mut rows, mut fitting): (Vec<InstanceRow>, usize) = (Vec::new(), 0);
    while let Some(page) = pages.next().await? {
        let page: Rows<InstanceRow> = page;
        rows.extend(page.readable().into_iter().filter(|row| {
            let fits = fits(row) && takes(filter, row);
            // A marked one may be gone already, and takes nobody's place.
            fitting += usize::from(fits && row.deleting.is_none());
            fits || row.deleting.is_some()
        }));
        if fitting >= limit(filter) {
            break;
        }
    }
    Ok(rows)
}

/// Whether the filter takes an instance by the time of its end.
fn takes(filter: &InstanceFilter, row: &InstanceRow) -> bool {
    filter.completed_before.is_none_or(|before| row.completed_at.is_some_and(|ended| ended < before))
}

fn limit(filter: &InstanceFilter) -> usize {
    filter.limit.unwrap_or(DEFAULT_LIMIT) as usize
}

/// Those of the candidates that the filter takes, up to its limit, as they were then.
pub(super) async fn chosen(
    engine: &Arc<Engine>,
    candidates: Vec<InstanceRow>,
    filter: &InstanceFilter,
    fits: impl Fn(&InstanceRow) -> bool,
) -> Result<Vec<(String, Life)>, StoreError> {
    let fitting = candidates.into_iter().filter(|row| fits(row) && takes(filter, row)).collect();
    let visible = visible(engine, fitting, engine.deadline()).await?;
    Ok(visible.iter().filter_map(|row| Some((row.id()?, row.life.clone()))).take(limit(filter)).collect())
}
