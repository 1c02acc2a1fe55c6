//! A look at an instance: everything that a diagnosis is made of, of one state of the instance.

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

/// So many other partitions are read at once.
const AT_ONCE: usize = 16;

/// What a look has seen of an instance.
pub(super) struct Snapshot {
    pub(super) partition: Partition,
    pub(super) now: Millis,
    /// The ETag of the instance's document, also where that can't be read.
    etag: Option<Etag>,
    /// The instance's document; none where there is none.
    pub(super) instance: Option<Versioned<InstanceDocument>>,
    /// The execution whose history was read: the current one.
    pub(super) execution: u64,
    /// Its events, or why they can't be read.
    pub(super) events: Result<Vec<Event>, String>,
    /// Which turns have written a history document, by execution.
    pub(super) turns: BTreeMap<u64, BTreeSet<String>>,
    /// Earlier executions but those that were pruned.
    pub(super) past: BTreeMap<u64, Past>,
    /// The last document of the history or, where there is none, a deferred message: the instance's document is made
    /// only if this is still there.
    pub(super) basis: Option<(DocumentId, Versioned<Value>)>,
    pub(super) messages: Vec<(MessageDocument, Result<WorkItem, String>)>,
    pub(super) work: BTreeMap<DocumentId, (ActivityDocument, Etag)>,
    /// Inputs, and whether each can be read.
    pub(super) payloads: BTreeMap<DocumentId, (Etag, bool)>,
    pub(super) executions: BTreeMap<u64, ExecutionDocument>,
    pub(super) values: BTreeMap<String, KvDocument>,
    pub(super) status: Option<StatusDocument>,
    pub(super) intents: Vec<IntentDocument>,
    pub(super) staged: BTreeMap<DocumentId, Etag>,
    /// Documents of ours that can't be read.
    pub(super) unreadable: Vec<Illegible>,
    /// Documents that are none of ours.
    pub(super) strangers: Vec<String>,
    /// The children that it waits for, by the id of the event that has scheduled each.
    pub(super) children: BTreeMap<u64, ChildSnapshot>,
    /// The document of its parent, where it has one.
    pub(super) parent: Option<Option<InstanceDocument>>,
    /// The sessions that its activities wait for.
    pub(super) sessions: BTreeMap<String, SessionDocument>,
}

/// The history of an earlier execution: which events there are, and what it says of values.
#[derive(Default)]
pub(super) struct Past {
    pub(super) events: EventSet,
    /// In the order of their ids.
    pub(super) values: Vec<Event>,
    /// Why a part of it can't be read.
    pub(super) unreadable: Option<String>,
}

/// A document of ours that can't be read.
pub(super) struct Illegible {
    pub(super) id: String,
    pub(super) kind: String,
    pub(super) why: String,
    pub(super) etag: Etag,
    /// Somebody who can read it may be at it until then.
    pub(super) held_until: Millis,
}

/// A child as it was seen.
pub(super) struct ChildSnapshot {
    pub(super) name: String,
    pub(super) document: Option<InstanceDocument>,
    /// A start waits in its queue.
    pub(super) is_queued: bool,
    /// Which instance of its parent's name has sent that.
    pub(super) sender: Option<String>,
    /// There is a history, but no document that says what it is.
    pub(super) is_broken: bool,
    /// It owes its end to us still.
    pub(super) owes: bool,
    /// How it has ended.
    pub(super) end: Option<End>,
}

/// How a child has ended.
pub(super) struct End {
    /// The event with which its parent scheduled it, and the parent's execution, where its history says so.
    pub(super) scheduled_by: Option<(Option<u64>, Option<u64>)>,
    /// What it has returned, or how it failed.
    pub(super) outcome: Result<String, ErrorDetails>,
}

/// What came of a look.
pub(super) enum SnapshotRead {
    /// There is nothing at all.
    Nothing,
    /// The instance has changed while it was looked at.
    Moved,
    /// It stood still.
    Still(Box<Snapshot>),
}

/// Looks at an instance. `now` is the time by which it is judged.
pub(super) async fn look(engine: &Arc<Engine>, partition: &Partition, now: Millis) -> Result<SnapshotRead, StoreError> {
    let before = read_instance(engine, partition).await?;
    let mut snapshot = Snapshot::new(partition, now, before);
    snapshot.read_contents(engine).await?;
    if snapshot.is_empty() {
        return Ok(SnapshotRead::Nothing);
    }
    snapshot.read_history(engine).await?;
    snapshot.read_past(engine).await?;
    snapshot.read_others(engine).await?;
    let after = read_instance(engine, partition).await?.map(|found| found.etag);
    Ok(if after == snapshot.etag { SnapshotRead::Still(Box::new(snapshot)) } else { SnapshotRead::Moved })
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
            work: BTreeMap::new(),
            payloads: BTreeMap::new(),
            executions: BTreeMap::new(),
            values: BTreeMap::new(),
            status: None,
            intents: Vec::new(),
            staged: BTreeMap::new(),
            unreadable: Vec::new(),
            strangers: Vec::new(),
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

    /// Whether there is a history, and no document that tells of it: none at all, or one that a claim has made since.
    pub(super) fn is_headless(&self) -> bool {
        let says_nothing = |left: &InstanceDocument| left.is_placeholder() && left.deleting.is_none();
        !self.turns.is_empty() && !self.is_illegible() && self.document().is_none_or(says_nothing)
    }

    /// Whether the instance's document is there, but can't be read.
    pub(super) fn is_illegible(&self) -> bool {
        self.cant_read_any(kind::INSTANCE)
    }

    /// Whether a document of this kind can't be read.
    pub(super) fn cant_read_any(&self, of_kind: &str) -> bool {
        self.unreadable.iter().any(|illegible| illegible.kind == of_kind)
    }

    /// What the orchestration waits for: of each schedule that nobody has ended or cancelled, its event.
    pub(super) fn outstanding(&self) -> impl Iterator<Item = &Event> {
        let events = self.events.as_deref().unwrap_or_default();
        let settled: BTreeSet<u64> = events.iter().filter_map(|event| event.source_event_id).collect();
        events.iter().filter(move |event| !settled.contains(&event.event_id))
    }

    /// The work items in its queue that can be read.
    pub(super) fn items(&self) -> impl Iterator<Item = &WorkItem> {
        self.messages.iter().filter_map(|(_, item)| item.as_ref().ok())
    }

    fn cant_read(&mut self, id: &str, of_kind: &str, row: &Value, error: impl ToString) {
        let etag = Etag::from(row.get("_etag").and_then(Value::as_str).unwrap_or_default().to_owned());
        let held_until = row.pointer("/lock/until").and_then(Value::as_u64).unwrap_or(0);
        let (id, kind, why) = (id.to_owned(), of_kind.to_owned(), error.to_string());
        self.unreadable.push(Illegible { id, kind, why, etag, held_until });
    }

    fn add_message(&mut self, message: MessageDocument) {
        let item = serde_json::from_str(&message.item).map_err(|error| error.to_string());
        self.messages.push((message, item));
    }
}

/// Which turn has written a history document.
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
            && self.work.is_empty()
            && self.intents.is_empty()
            && self.payloads.is_empty()
            && self.staged.is_empty()
            && self.unreadable.is_empty()
    }

    /// Everything in the partition but histories, and who has written those.
    async fn read_contents(&mut self, engine: &Engine) -> Result<(), StoreError> {
        let rows: Rows<HistoryRow> = ask(engine, &self.partition, queries::HISTORY_ROWS.statement()).await?;
        for HistoryRow { id, execution } in rows.readable() {
            let turn = id.split(':').nth(2).unwrap_or_default().to_owned();
            self.turns.entry(execution).or_default().insert(turn);
        }
        for of_kind in [queries::SMALL_DOCUMENTS, queries::LARGE_DOCUMENTS] {
            let rows: Rows<Value> = ask(engine, &self.partition, of_kind.statement()).await?;
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
                        self.basis = Some((message.id.clone(), Versioned { document: own(row), etag }));
                    }
                    self.add_message(message);
                }
            }
            kind::ACTIVITY => {
                if let Some(work) = self.read::<ActivityDocument>(&id, &of_kind, row) {
                    self.work.insert(work.id.clone(), (work, etag));
                }
            }
            kind::PAYLOAD => {
                // Only its beginning was asked for.
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
                // Only whether it can be read is of interest.
                self.read::<PlanDocument>(&id, &of_kind, row);
            }
            _ => self.strangers.push(id),
        }
    }

    fn read<T: DeserializeOwned>(&mut self, id: &str, of_kind: &str, row: Value) -> Option<T> {
        T::deserialize(&row).map_err(|error| self.cant_read(id, of_kind, &row, error)).ok()
    }

    /// The history of the current execution: where there is no instance's document, the last that has one.
    async fn read_history(&mut self, engine: &Engine) -> Result<(), StoreError> {
        let last = self.turns.last_key_value().map_or(1, |(execution, _)| *execution);
        let told = self.document().filter(|_| !self.is_headless()).map(|document| document.execution);
        self.execution = told.unwrap_or(last);
        let statement = queries::HISTORY.statement().bind("@execution", self.execution);
        let rows: Vec<Value> = ask(engine, &self.partition, statement).await?.complete()?;
        let mut documents: Vec<HistoryDocument> = Vec::with_capacity(rows.len());
        let mut last = 0;
        for row in rows {
            let text = |name: &str| row.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
            let (id, etag) = (text("id"), Etag::from(text("_etag")));
            let Some(document) = self.read::<HistoryDocument>(&id, kind::HISTORY, row.clone()) else { continue };
            if document.first >= last {
                last = document.first;
                self.basis = Some((document.id.clone(), Versioned { document: own(row), etag }));
            }
            documents.push(document);
        }
        self.events = load::events(documents).map(|(events, _)| events);
        Ok(())
    }

    /// Reads the histories of earlier executions, and keeps which events they have and those about values: histories
    /// may be long.
    async fn read_past(&mut self, engine: &Engine) -> Result<(), StoreError> {
        let pruned: BTreeSet<u64> = self.document().map(|d| d.pruning.iter().copied().collect()).unwrap_or_default();
        let is_past = |execution: &u64| *execution < self.execution && !pruned.contains(execution);
        if !self.turns.keys().any(is_past) {
            return Ok(());
        }
        let statement = queries::PAST_HISTORY.statement().bind("@execution", self.execution).authoritative();
        let patience = engine.per_page();
        let mut pages = engine.store.partition_pages::<Value>(&self.partition, statement, patience)?;
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

    /// What lies in other partitions: children, the parent, sessions.
    async fn read_others(&mut self, engine: &Arc<Engine>) -> Result<(), StoreError> {
        let Some(instance) = self.partition.instance_id().map(ToOwned::to_owned) else { return Ok(()) };
        let heard: BTreeSet<u64> = self.items().filter_map(|item| ended_child(item, self.execution)).collect();
        let waited: Vec<(u64, String)> = self
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
        let reading = stream::iter(waited).map(|(event, name)| {
            let parent = &parent;
            async move { Ok::<_, StoreError>((event, read_child(engine, name, parent).await?)) }
        });
        self.children = reading.buffer_unordered(AT_ONCE).try_collect().await?;
        if let Some(parent) = self.document().and_then(|document| document.parent.clone()) {
            let found = match Partition::instance(&parent) {
                Ok(partition) => read_instance(engine, &partition).await?,
                Err(_) => None,
            };
            // Nothing is said about a parent that is there and can't be read.
            self.parent = match found.map(|found| serde_json::from_value(found.document)) {
                None => Some(None),
                Some(Ok(parent)) => Some(Some(parent)),
                Some(Err(_)) => None,
            };
        }
        let sessions: BTreeSet<String> = self.work.values().filter_map(|(work, _)| work.session_id.clone()).collect();
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

/// A document without what the service has put into it.
fn own(mut row: Value) -> Value {
    if let Value::Object(fields) = &mut row {
        fields.retain(|name, _| !name.starts_with('_'));
    }
    row
}

impl Past {
    fn add(&mut self, row: Value) {
        let read = HistoryDocument::deserialize(row).map_err(|error| error.to_string());
        match read.and_then(|document| load::events(vec![document])) {
            Ok((events, _)) => {
                for event in events {
                    self.events.insert(event.event_id);
                    if says_of_values(&event) {
                        self.values.push(event);
                    }
                }
            }
            Err(error) => self.unreadable = Some(error),
        }
    }
}

fn says_of_values(event: &Event) -> bool {
    use EventKind::{KeyValueCleared, KeyValueSet, KeyValuesCleared};
    matches!(event.kind, KeyValueSet { .. } | KeyValueCleared { .. } | KeyValuesCleared)
}

/// The event of the child whose end this item tells, if it is for this execution.
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
        owes: false,
        end: None,
    };
    let Ok(partition) = Partition::instance(&child.name) else { return Ok(child) };
    let found = read_instance(engine, &partition).await?;
    let is_there = found.is_some();
    let document: Option<InstanceDocument> = found.and_then(|found| serde_json::from_value(found.document).ok());
    let inlined = document.as_ref().and_then(InstanceDocument::inlined_message).filter(|message| message.starts);
    let starts: Rows<Start> = ask(engine, &partition, queries::QUEUED_STARTS.statement()).await?;
    child.is_queued = inlined.is_some() || !starts.is_empty();
    child.sender = inlined
        .and_then(|message| message.incarnation)
        .or_else(|| starts.readable().into_iter().find_map(|start| start.incarnation));
    let is_illegible = is_there && document.is_none();
    child.document = document.filter(InstanceDocument::exists);
    // A claim may have left a document that says nothing of the history.
    let is_headless = child.document.is_none() && !child.is_queued;
    child.is_broken = is_illegible
        || is_headless && !ask::<Value>(engine, &partition, queries::ANY_HISTORY.statement()).await?.is_empty();
    if let Some(document) = child.document.as_ref().filter(|document| document.has_ended()) {
        let intents: Rows<IntentDocument> = ask(engine, &partition, queries::INTENTS.statement()).await?;
        let (intents, unreadable) = intents.into_parts();
        // A turn that is not wholly applied has not written all that it owes yet; and what can't be read may be it.
        let owes = !unreadable.is_empty() || intents.iter().any(|intent| intent.target == *parent);
        child.owes = document.roll_forward.is_some() || owes;
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

/// How a child has ended: as its history says, or its document, where that can't be read.
async fn end_of(engine: &Engine, document: &InstanceDocument) -> Result<Option<End>, StoreError> {
    let statement = queries::HISTORY.statement().bind("@execution", document.execution);
    let rows: Rows<HistoryDocument> = ask(engine, &document.instance_id, statement).await?;
    let events = rows.complete().ok().and_then(|documents| load::events(documents).ok()).map(|(events, _)| events);
    let Some(events) = events.filter(|events| events.len() as u64 == document.events.len()) else {
        let message = document.output.clone().unwrap_or_else(|| "its history can't be read".to_owned());
        let outcome = match document.status.as_deref() {
            Some(status::COMPLETED) => document.output.clone().map(Ok),
            Some(status::FAILED) => {
                let operation = "sub-orchestration".to_owned();
                Some(Err(ErrorDetails::Infrastructure { operation, message, retryable: false }))
            }
            _ => None,
        };
        return Ok(outcome.map(|outcome| End { scheduled_by: None, outcome }));
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
    Ok(outcome.map(|outcome| End { scheduled_by, outcome }))
}

/// Asks a partition for everything that was committed: findings and repairs are decided by it.
async fn ask<T: DeserializeOwned + Send + 'static>(
    engine: &Engine,
    partition: &Partition,
    statement: Statement,
) -> Result<Rows<T>, StoreError> {
    let patience = engine.per_page();
    engine.store.partition_pages(partition, statement.authoritative(), patience)?.collect().await
}
