//! Reads instances, executions, histories and values for duroxide's administration calls.

use crate::{
    cosmos::{queries, Deadline, Freshness, Statement, StoreError, Versioned},
    engine::Engine,
    lifecycle::{
        trees::{forest, visible, PastExecution},
        InstanceRow,
    },
    model::{ExecutionDocument, InstanceDocument, KvDocument, Partition, StatusDocument},
    turn::{load, read},
};
use duroxide::{
    providers::{ExecutionInfo, InstanceInfo, ProviderError},
    Event, EventKind, SystemStats,
};
use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

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

/// The executions that have documents and are not pruned: all but a running current one.
async fn past_executions(engine: &Engine, document: &InstanceDocument) -> Result<Vec<PastExecution>, StoreError> {
    // An execution whose document can't be read is not listed.
    let pages =
        engine.store.partition_pages(&document.instance_id, queries::EXECUTIONS.statement(), engine.per_page())?;
    let mut past: Vec<PastExecution> = pages.collect().await?.readable();
    past.retain(|e| !document.removal.pruning.contains(&e.execution));
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
    ids.insert(found.document.current.execution);
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
    if found.document.removal.pruning.contains(&execution) {
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

/// The current execution of an instance, or 1 if the instance does not exist.
pub(crate) async fn latest_execution(engine: &Arc<Engine>, instance: &str) -> Result<u64, ProviderError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(1) };
    let found = read::instance(engine, &partition, engine.deadline()).await;
    let found = found.map_err(|e| e.into_provider_error("latest_execution_id"))?;
    Ok(found.map_or(1, |found| found.document.current.execution))
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

/// Everything about an instance except its history.
pub(crate) async fn instance_info(engine: &Arc<Engine>, instance: &str) -> Result<InstanceInfo, ProviderError> {
    const OPERATION: &str = "get_instance_info";
    let Versioned { document, .. } = existing(engine, instance, OPERATION).await?;
    let mut output = document.current.output.clone();
    if document.current.archived {
        let found = execution_document(engine, &document, document.current.execution, engine.deadline()).await;
        output = found.map_err(|e| e.into_provider_error(OPERATION))?.and_then(|e| e.output);
    }
    let version = if document.current.version.is_empty() { "unknown".to_owned() } else { document.current.version };
    Ok(InstanceInfo {
        instance_id: instance.to_owned(),
        orchestration_name: document.current.name,
        orchestration_version: version,
        current_execution_id: document.current.execution,
        status: document.current.status.unwrap_or_default(),
        output,
        created_at: document.origin.created_at,
        updated_at: document.updated_at,
        parent_instance_id: document.origin.parent,
    })
}

/// Everything about an execution except its history.
pub(crate) async fn execution_info(
    engine: &Arc<Engine>,
    instance: &str,
    execution: u64,
) -> Result<ExecutionInfo, ProviderError> {
    const OPERATION: &str = "get_execution_info";
    let missing =
        || ProviderError::permanent(OPERATION, format!("Execution {execution} not found for instance {instance}"));
    let Versioned { document, .. } = existing(engine, instance, OPERATION).await?;
    if document.removal.pruning.contains(&execution) {
        return Err(missing());
    }
    let stored = execution_document(engine, &document, execution, engine.deadline()).await;
    let stored = stored.map_err(|e| e.into_provider_error(OPERATION))?;
    // A current execution that runs has no document of its own yet.
    let found = match stored {
        Some(stored) if execution != document.current.execution || document.current.archived => stored,
        _ if execution == document.current.execution => {
            ExecutionDocument::of(&document, document.current.output.clone())
        }
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

/// The custom status, if it is newer than `last_seen`.
pub(crate) async fn custom_status(
    engine: &Arc<Engine>,
    instance: &str,
    last_seen: u64,
) -> Result<Option<(Option<String>, u64)>, ProviderError> {
    let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
    let deadline = engine.deadline();
    let failed = |e: StoreError| e.into_provider_error("get_custom_status");
    let Some(found) = read::instance(engine, &partition, deadline).await.map_err(failed)? else { return Ok(None) };
    if found.document.commit.status_version <= last_seen {
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
    let (execution, freshness) = (found.document.current.execution, Freshness::Session);
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

/// Queue messages that the execution received from the previous one.
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

/// An instance with all its descendants, parents before children, each once.
pub(crate) async fn tree(engine: &Arc<Engine>, root: &str) -> Result<Vec<String>, StoreError> {
    let mut trees = forest(engine, &[root.to_owned()], None).await?;
    Ok(trees.pop().unwrap_or_default())
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
