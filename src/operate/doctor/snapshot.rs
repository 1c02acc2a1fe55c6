//! A snapshot of an instance: all documents that a diagnosis needs, of one state of the instance.

use crate::{
    cosmos::{queries, Freshness, Rows, Statement, StoreError, Versioned},
    engine::Engine,
    model::{
        kind, status, ActivityDocument, DocumentId, EventSet, ExecutionDocument, HistoryDocument, InstanceDocument,
        IntentDocument, KvDocument, MessageDocument, Millis, Partition, PayloadDocument, PlanDocument, SessionDocument,
        StagedDocument, StatusDocument,
    },
    turn::{instance_id, load},
};
use azure_core::http::Etag;
use duroxide::{build_child_instance_id, providers::WorkItem, ErrorDetails, Event, EventKind};
use futures::{stream, StreamExt, TryStreamExt};
use serde::{de::DeserializeOwned, Deserialize};
use serde_json::Value;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// Other partitions that are read at once.
const CONCURRENCY: usize = 16;

/// A snapshot of an instance.
pub(super) struct Snapshot {
    pub(super) partition: Partition,
    pub(super) now: Millis,
    /// The ETag of the instance's document, even if the document can't be read.
    etag: Option<Etag>,
    /// The instance's document, if it exists and can be read.
    pub(super) instance: Option<Versioned<InstanceDocument>>,
    /// The execution whose history was read: the current one.
    pub(super) execution: u64,
    /// The events of that execution, or the reason why they can't be read.
    pub(super) events: Result<Vec<Event>, String>,
    /// The turns that have written history documents, by execution.
    pub(super) turns: BTreeMap<u64, BTreeSet<String>>,
    /// The histories of earlier executions that are not pruned.
    pub(super) past: BTreeMap<u64, PastHistory>,
    /// The last document of the history, or a deferred message if no history exists. The doctor rebuilds the instance's
    /// document only if this document still exists.
    pub(super) basis: Option<(DocumentId, Versioned<Value>)>,
    pub(super) messages: Vec<(MessageDocument, Result<WorkItem, String>)>,
    pub(super) activities: BTreeMap<DocumentId, (ActivityDocument, Etag)>,
    /// The inputs, and whether each can be read.
    pub(super) payloads: BTreeMap<DocumentId, (Etag, bool)>,
    pub(super) executions: BTreeMap<u64, ExecutionDocument>,
    pub(super) values: BTreeMap<String, KvDocument>,
    pub(super) status: Option<StatusDocument>,
    pub(super) intents: Vec<IntentDocument>,
    pub(super) staged: BTreeMap<DocumentId, Etag>,
    /// Documents of known types that can't be read.
    pub(super) unreadable: Vec<UnreadableDocument>,
    /// The ids of documents with unknown types.
    pub(super) foreign_documents: Vec<String>,
    /// The children that the instance waits for, by the id of the event that scheduled each.
    pub(super) children: BTreeMap<u64, ChildSnapshot>,
    /// The document of the parent. The outer `None`: no parent, or its document can't be read. The inner `None`: the
    /// parent does not exist.
    pub(super) parent: Option<Option<InstanceDocument>>,
    /// The sessions of its activities.
    pub(super) sessions: BTreeMap<String, SessionDocument>,
}

/// The history of an earlier execution: the ids of its events, and the events that concern values.
#[derive(Default)]
pub(super) struct PastHistory {
    pub(super) events: EventSet,
    /// The events that concern values, in the order of their ids.
    pub(super) values: Vec<Event>,
    /// The reason why a part of the history can't be read.
    pub(super) unreadable: Option<String>,
}

/// A document of a known type that can't be read.
pub(super) struct UnreadableDocument {
    pub(super) id: String,
    pub(super) kind: String,
    pub(super) why: String,
    pub(super) etag: Etag,
    /// The end of its lock. A worker that can read the document may process it until then.
    pub(super) held_until: Millis,
}

/// A snapshot of a child.
pub(super) struct ChildSnapshot {
    pub(super) name: String,
    pub(super) document: Option<InstanceDocument>,
    /// Whether a start waits in its queue.
    pub(super) is_queued: bool,
    /// The incarnation of the parent that sent that start.
    pub(super) sender: Option<String>,
    /// Whether the child has a history, but no readable document.
    pub(super) is_broken: bool,
    /// Whether the message about its end may still be undelivered.
    pub(super) end_is_undelivered: bool,
    /// The end of the child, if it has ended.
    pub(super) end: Option<ChildEnd>,
}

/// The end of a child.
pub(super) struct ChildEnd {
    /// The event of the parent that scheduled the child, and the parent's execution, if the child's history has them.
    pub(super) scheduled_by: Option<(Option<u64>, Option<u64>)>,
    /// The result of the child, or its failure.
    pub(super) outcome: Result<String, ErrorDetails>,
}

/// The outcome of reading a snapshot.
pub(super) enum SnapshotRead {
    /// No document has this id.
    Missing,
    /// The instance changed during the read.
    Changed,
    /// The snapshot of an instance that did not change.
    Stable(Box<Snapshot>),
}

/// Reads a snapshot of an instance. `now` is the current time for all checks.
pub(super) async fn read(engine: &Arc<Engine>, partition: &Partition, now: Millis) -> Result<SnapshotRead, StoreError> {
    let before = read_instance(engine, partition).await?;
    let mut snapshot = Snapshot::new(partition, now, before);
    snapshot.read_contents(engine).await?;
    if snapshot.is_empty() {
        return Ok(SnapshotRead::Missing);
    }
    snapshot.read_history(engine).await?;
    snapshot.read_past(engine).await?;
    snapshot.read_others(engine).await?;
    let after = read_instance(engine, partition).await?.map(|found| found.etag);
    Ok(if after == snapshot.etag { SnapshotRead::Stable(Box::new(snapshot)) } else { SnapshotRead::Changed })
}

async fn read_instance(engine: &Engine, partition: &Partition) -> Result<Option<Versioned<Value>>, StoreError> {
    engine.store.read(partition, &instance_id(), Freshness::Authoritative, engine.deadline()).await
}

impl Snapshot {
    fn new(partition: &Partition, now: Millis, found: Option<Versioned<Value>>) -> Self {
        let etag = found.as_ref().map(|found| found.etag.clone());
        let mut snapshot = Self {
            partition: partition.clone(),
            now,
            etag,
            instance: None,
            execution: 0,
            events: Ok(Vec::new()),
            turns: BTreeMap::new(),
            past: BTreeMap::new(),
            basis: None,
            messages: Vec::new(),
            activities: BTreeMap::new(),
            payloads: BTreeMap::new(),
            executions: BTreeMap::new(),
            values: BTreeMap::new(),
            status: None,
            intents: Vec::new(),
            staged: BTreeMap::new(),
            unreadable: Vec::new(),
            foreign_documents: Vec::new(),
            children: BTreeMap::new(),
            parent: None,
            sessions: BTreeMap::new(),
        };
        if let Some(Versioned { document, etag }) = found {
            match serde_json::from_value(document) {
                Ok(document) => snapshot.instance = Some(Versioned { document, etag }),
                Err(error) => snapshot.cant_read(instance_id().as_str(), kind::INSTANCE, &Value::Null, error),
            }
        }
        if let Some(inlined) = snapshot.document().and_then(InstanceDocument::inlined_message) {
            snapshot.add_message(inlined);
        }
        snapshot
    }

    /// The instance's document.
    pub(super) fn document(&self) -> Option<&InstanceDocument> {
        self.instance.as_ref().map(|found| &found.document)
    }

    /// Whether a history exists, but the instance's document is missing or is one that a later claim created.
    pub(super) fn lacks_document(&self) -> bool {
        let says_nothing = |left: &InstanceDocument| left.is_placeholder() && left.removal.deleting.is_none();
        !self.turns.is_empty() && !self.is_unreadable() && self.document().is_none_or(says_nothing)
    }

    /// Whether the instance's document exists, but can't be read.
    pub(super) fn is_unreadable(&self) -> bool {
        self.cant_read_any(kind::INSTANCE)
    }

    /// Whether a document of this type can't be read.
    pub(super) fn cant_read_any(&self, of_kind: &str) -> bool {
        self.unreadable.iter().any(|unreadable| unreadable.kind == of_kind)
    }

    /// The events of all schedules that are neither completed nor cancelled.
    pub(super) fn outstanding(&self) -> impl Iterator<Item = &Event> {
        let events = self.events.as_deref().unwrap_or_default();
        let settled: BTreeSet<u64> = events.iter().filter_map(|event| event.source_event_id).collect();
        events.iter().filter(move |event| !settled.contains(&event.event_id))
    }

    /// The readable work items in its queue.
    pub(super) fn items(&self) -> impl Iterator<Item = &WorkItem> {
        self.messages.iter().filter_map(|(_, item)| item.as_ref().ok())
    }

    fn cant_read(&mut self, id: &str, of_kind: &str, row: &Value, error: impl ToString) {
        let etag = Etag::from(row.get("_etag").and_then(Value::as_str).unwrap_or_default().to_owned());
        let held_until = row.pointer("/lock/until").and_then(Value::as_u64).unwrap_or(0);
        let (id, kind, why) = (id.to_owned(), of_kind.to_owned(), error.to_string());
        self.unreadable.push(UnreadableDocument { id, kind, why, etag, held_until });
    }

    fn add_message(&mut self, message: MessageDocument) {
        let item = serde_json::from_str(&message.item).map_err(|error| error.to_string());
        self.messages.push((message, item));
    }
}

/// A history document without its events. Its id names the turn that wrote it.
#[derive(Deserialize)]
struct HistoryRow {
    id: String,
    execution: u64,
}

impl Snapshot {
    fn is_empty(&self) -> bool {
        self.etag.is_none()
            && self.turns.is_empty()
            && self.messages.is_empty()
            && self.activities.is_empty()
            && self.intents.is_empty()
            && self.payloads.is_empty()
            && self.staged.is_empty()
            && self.unreadable.is_empty()
    }

    /// Reads all documents of the partition except the events of histories.
    async fn read_contents(&mut self, engine: &Engine) -> Result<(), StoreError> {
        let rows: Rows<HistoryRow> = query(engine, &self.partition, queries::HISTORY_ROWS.statement()).await?;
        for HistoryRow { id, execution } in rows.readable() {
            let turn = id.split(':').nth(2).unwrap_or_default().to_owned();
            self.turns.entry(execution).or_default().insert(turn);
        }
        for of_kind in [queries::SMALL_DOCUMENTS, queries::LARGE_DOCUMENTS] {
            let rows: Rows<Value> = query(engine, &self.partition, of_kind.statement()).await?;
            rows.complete()?.into_iter().for_each(|row| self.add(row));
        }
        Ok(())
    }

    fn add(&mut self, row: Value) {
        let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (id, of_kind) = (text("id"), text("type"));
        let etag = Etag::from(text("_etag"));
        match of_kind.as_str() {
            kind::INSTANCE => {}
            kind::MESSAGE => {
                if let Some(message) = self.read::<MessageDocument>(&id, &of_kind, row.clone()) {
                    if message.is_deferred() {
                        self.basis =
                            Some((message.id.clone(), Versioned { document: without_system_properties(row), etag }));
                    }
                    self.add_message(message);
                }
            }
            kind::ACTIVITY => {
                if let Some(activity) = self.read::<ActivityDocument>(&id, &of_kind, row) {
                    self.activities.insert(activity.id.clone(), (activity, etag));
                }
            }
            kind::PAYLOAD => {
                // The query returns only the beginning of the item.
                if let Some(payload) = self.read::<PayloadDocument>(&id, &of_kind, row) {
                    self.payloads.insert(payload.id, (etag, payload.item.starts_with("{\"ActivityExecute\":")));
                }
            }
            kind::EXECUTION => {
                if let Some(execution) = self.read::<ExecutionDocument>(&id, &of_kind, row) {
                    self.executions.insert(execution.execution, execution);
                }
            }
            kind::KV => {
                if let Some(value) = self.read::<KvDocument>(&id, &of_kind, row) {
                    self.values.insert(value.key.clone(), value);
                }
            }
            kind::STATUS => self.status = self.read::<StatusDocument>(&id, &of_kind, row),
            kind::INTENT => {
                if let Some(intent) = self.read::<IntentDocument>(&id, &of_kind, row) {
                    self.intents.push(intent);
                }
            }
            kind::STAGED => {
                if let Some(staged) = self.read::<StagedDocument>(&id, &of_kind, row) {
                    self.staged.insert(staged.id, etag);
                }
            }
            kind::PLAN => {
                // The doctor only checks that the document can be read.
                self.read::<PlanDocument>(&id, &of_kind, row);
            }
            _ => self.foreign_documents.push(id),
        }
    }

    fn read<T: DeserializeOwned>(&mut self, id: &str, of_kind: &str, row: Value) -> Option<T> {
        T::deserialize(&row).map_err(|error| self.cant_read(id, of_kind, &row, error)).ok()
    }

    /// Reads the history of the current execution. Without the instance's document, that is the last execution with a
    /// history.
    async fn read_history(&mut self, engine: &Engine) -> Result<(), StoreError> {
        let last = self.turns.last_key_value().map_or(1, |(execution, _)| *execution);
        let told = self.document().filter(|_| !self.lacks_document()).map(|document| document.current.execution);
        self.execution = told.unwrap_or(last);
        let statement = queries::HISTORY.statement().bind("@execution", self.execution);
        let rows: Vec<Value> = query(engine, &self.partition, statement).await?.complete()?;
        let mut documents: Vec<HistoryDocument> = Vec::with_capacity(rows.len());
        let mut last = 0;
        for row in rows {
            let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
            let (id, etag) = (text("id"), Etag::from(text("_etag")));
            let Some(document) = self.read::<HistoryDocument>(&id, kind::HISTORY, row.clone()) else { continue };
            if document.first >= last {
                last = document.first;
                self.basis = Some((document.id.clone(), Versioned { document: without_system_properties(row), etag }));
            }
            documents.push(document);
        }
        self.events = load::events(documents).map(|(events, _)| events);
        Ok(())
    }

    /// Reads the histories of earlier executions. It keeps only the ids of all events and the events that concern
    /// values, since histories may be long.
    async fn read_past(&mut self, engine: &Engine) -> Result<(), StoreError> {
        let pruned: BTreeSet<u64> =
            self.document().map(|d| d.removal.pruning.iter().copied().collect()).unwrap_or_default();
        let is_past = |execution: &u64| *execution < self.execution && !pruned.contains(execution);
        if !self.turns.keys().any(is_past) {
            return Ok(());
        }
        let statement = queries::PAST_HISTORY.statement().bind("@execution", self.execution).authoritative();
        let deadline = engine.per_page();
        let mut pages = engine.store.partition_pages::<Value>(&self.partition, statement, deadline)?;
        while let Some(page) = pages.next().await? {
            for row in page.readable() {
                let execution = row.get("execution").and_then(Value::as_u64);
                if let Some(execution) = execution.filter(is_past) {
                    self.past.entry(execution).or_default().add(row);
                }
            }
        }
        for past in self.past.values_mut() {
            past.values.sort_by_key(|event| event.event_id);
        }
        Ok(())
    }

    /// Reads documents of other partitions: children, the parent, sessions.
    async fn read_others(&mut self, engine: &Arc<Engine>) -> Result<(), StoreError> {
        let Some(instance) = self.partition.instance_id().map(ToOwned::to_owned) else { return Ok(()) };
        let heard: BTreeSet<u64> = self.items().filter_map(|item| ended_child(item, self.execution)).collect();
        let awaited: Vec<(u64, String)> = self
            .outstanding()
            .filter(|event| !heard.contains(&event.event_id))
            .filter_map(|event| match &event.kind {
                EventKind::SubOrchestrationScheduled { instance: child, .. } => {
                    Some((event.event_id, build_child_instance_id(&instance, child)))
                }
                _ => None,
            })
            .collect();
        let parent = self.partition.clone();
        let reading = stream::iter(awaited).map(|(event, name)| {
            let parent = &parent;
            async move { Ok::<_, StoreError>((event, read_child(engine, name, parent).await?)) }
        });
        self.children = reading.buffer_unordered(CONCURRENCY).try_collect().await?;
        if let Some(parent) = self.document().and_then(|document| document.origin.parent.clone()) {
            let found = match Partition::instance(&parent) {
                Ok(partition) => read_instance(engine, &partition).await?,
                Err(_) => None,
            };
            // An unreadable parent causes no finding.
            self.parent = match found.map(|found| serde_json::from_value(found.document)) {
                None => Some(None),
                Some(Ok(parent)) => Some(Some(parent)),
                Some(Err(_)) => None,
            };
        }
        let sessions: BTreeSet<String> =
            self.activities.values().filter_map(|(activity, _)| activity.session_id.clone()).collect();
        for session in sessions {
            let (partition, id) = (Partition::session(&session), SessionDocument::document_id());
            let found = engine.store.read(&partition, &id, Freshness::Authoritative, engine.deadline()).await;
            if let Ok(Some(Versioned { document, .. })) = found {
                self.sessions.insert(session, document);
            }
        }
        Ok(())
    }
}

/// A document without Cosmos DB's system properties.
fn without_system_properties(mut row: Value) -> Value {
    if let Value::Object(fields) = &mut row {
        fields.retain(|name, _| !name.starts_with('_'));
    }
    row
}

impl PastHistory {
    fn add(&mut self, row: Value) {
        let read = HistoryDocument::deserialize(row).map_err(|error| error.to_string());
        match read.and_then(|document| load::events(vec![document])) {
            Ok((events, _)) => {
                for event in events {
                    self.events.insert(event.event_id);
                    if concerns_values(&event) {
                        self.values.push(event);
                    }
                }
            }
            Err(error) => self.unreadable = Some(error),
        }
    }
}

fn concerns_values(event: &Event) -> bool {
    use EventKind::{KeyValueCleared, KeyValueSet, KeyValuesCleared};
    matches!(event.kind, KeyValueSet { .. } | KeyValueCleared { .. } | KeyValuesCleared)
}

/// The event that scheduled the child whose end this item reports, if the item is for this execution.
pub(super) fn ended_child(item: &WorkItem, execution: u64) -> Option<u64> {
    match item {
        WorkItem::SubOrchCompleted { parent_id, parent_execution_id, .. }
        | WorkItem::SubOrchFailed { parent_id, parent_execution_id, .. } => {
            (*parent_execution_id == execution).then_some(*parent_id)
        }
        _ => None,
    }
}

async fn read_child(engine: &Arc<Engine>, name: String, parent: &Partition) -> Result<ChildSnapshot, StoreError> {
    let mut child = ChildSnapshot {
        name,
        document: None,
        is_queued: false,
        sender: None,
        is_broken: false,
        end_is_undelivered: false,
        end: None,
    };
    let Ok(partition) = Partition::instance(&child.name) else { return Ok(child) };
    let found = read_instance(engine, &partition).await?;
    let is_there = found.is_some();
    let document: Option<InstanceDocument> = found.and_then(|found| serde_json::from_value(found.document).ok());
    let inlined = document.as_ref().and_then(InstanceDocument::inlined_message).filter(|message| message.starts);
    let starts: Rows<Start> = query(engine, &partition, queries::QUEUED_STARTS.statement()).await?;
    child.is_queued = inlined.is_some() || !starts.is_empty();
    child.sender = inlined
        .and_then(|message| message.incarnation)
        .or_else(|| starts.readable().into_iter().find_map(|start| start.incarnation));
    let is_unreadable = is_there && document.is_none();
    child.document = document.filter(InstanceDocument::exists);
    // A claim may have created a document that does not describe the history.
    let lacks_document = child.document.is_none() && !child.is_queued;
    child.is_broken = is_unreadable
        || lacks_document && !query::<Value>(engine, &partition, queries::ANY_HISTORY.statement()).await?.is_empty();
    if let Some(document) = child.document.as_ref().filter(|document| document.has_ended()) {
        let intents: Rows<IntentDocument> = query(engine, &partition, queries::INTENTS.statement()).await?;
        let (intents, unreadable) = intents.into_parts();
        // An unapplied turn has not written all its intents yet. An unreadable intent may be the one about the end.
        let is_undelivered = !unreadable.is_empty() || intents.iter().any(|intent| intent.target == *parent);
        child.end_is_undelivered = document.commit.roll_forward.is_some() || is_undelivered;
        child.end = end_of(engine, document).await?;
    }
    Ok(child)
}

/// A start in a queue.
#[derive(Deserialize)]
struct Start {
    #[serde(default)]
    incarnation: Option<String>,
}

/// The end of a child, from its history, or from its document if the history can't be read.
async fn end_of(engine: &Engine, document: &InstanceDocument) -> Result<Option<ChildEnd>, StoreError> {
    let statement = queries::HISTORY.statement().bind("@execution", document.current.execution);
    let rows: Rows<HistoryDocument> = query(engine, &document.instance_id, statement).await?;
    let events = rows.complete().ok().and_then(|documents| load::events(documents).ok()).map(|(events, _)| events);
    let Some(events) = events.filter(|events| events.len() as u64 == document.current.events.len()) else {
        let message = document.current.output.clone().unwrap_or_else(|| "its history can't be read".to_owned());
        let outcome = match document.current.status.as_deref() {
            Some(status::COMPLETED) => document.current.output.clone().map(Ok),
            Some(status::FAILED) => {
                let operation = "sub-orchestration".to_owned();
                Some(Err(ErrorDetails::Infrastructure { operation, message, retryable: false }))
            }
            _ => None,
        };
        return Ok(outcome.map(|outcome| ChildEnd { scheduled_by: None, outcome }));
    };
    let scheduled_by = events.iter().find_map(|event| match &event.kind {
        EventKind::OrchestrationStarted { parent_id, parent_execution_id, .. } => {
            Some((*parent_id, *parent_execution_id))
        }
        _ => None,
    });
    let outcome = events.into_iter().rev().find_map(|event| match event.kind {
        EventKind::OrchestrationCompleted { output } => Some(Ok(output)),
        EventKind::OrchestrationFailed { details } => Some(Err(details)),
        _ => None,
    });
    Ok(outcome.map(|outcome| ChildEnd { scheduled_by, outcome }))
}

/// Queries a partition in the write region, since findings and repairs depend on the result.
async fn query<T: DeserializeOwned + Send + 'static>(
    engine: &Engine,
    partition: &Partition,
    statement: Statement,
) -> Result<Rows<T>, StoreError> {
    let deadline = engine.per_page();
    engine.store.partition_pages(partition, statement.authoritative(), deadline)?.collect().await
}
