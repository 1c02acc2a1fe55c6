//! The plan of a turn's commit: all documents that it writes, computed before anything is sent.

use super::{staging::TAKEOVER_AFTER, TurnState};
use crate::model::operation;
use crate::{
    cosmos::{StoreError, Versioned},
    engine::Engine,
    model::{
        item, status, ActivityDocument, DeliveredDocument, Ending, ExecutionDocument, Fingerprints, HistoryDocument,
        InstanceDocument, IntentDocument, KvDocument, MessageDocument, Millis, Operation, Partition, StatusDocument,
    },
    queue::activity::ScheduledClaims,
};
use duroxide::{
    providers::{ExecutionMetadata, ScheduledActivityIdentifier, WorkItem},
    Event, EventKind,
};
use std::collections::{BTreeMap, BTreeSet};

/// A history document holds events up to this size, so that it stays well below the document limit.
const HISTORY_BYTES: usize = 1024 * 1024;
/// A new execution keeps the fingerprints of this many messages, the last that were consumed from outside before it.
const CARRIED_FINGERPRINTS: usize = 24;

/// The result of a turn, as duroxide's runtime hands it in for commit.
pub(crate) struct Ack {
    pub(crate) execution: u64,
    pub(crate) events: Vec<Event>,
    pub(crate) worker_items: Vec<WorkItem>,
    pub(crate) orchestrator_items: Vec<WorkItem>,
    pub(crate) metadata: ExecutionMetadata,
    pub(crate) cancelled: Vec<ScheduledActivityIdentifier>,
}

/// The writes of a turn: the next instance document and all other documents.
#[derive(Clone)]
pub(crate) struct TurnPlan {
    pub(crate) document: InstanceDocument,
    /// Deletes the messages that the turn ran on. Each deletion is conditional on the message's ETag, so it must be
    /// part of the committing batch.
    pub(crate) consumption: Vec<Operation>,
    /// All other writes. They may be staged.
    pub(crate) operations: Vec<Operation>,
    pub(crate) kv: BTreeMap<String, KvDocument>,
    pub(crate) intents: Vec<IntentDocument>,
    pub(crate) history_bytes: usize,
    pub(crate) consumed: Fingerprints,
}

/// Why a turn cannot be written.
pub(crate) enum Unplannable {
    /// The history already has an event with this id.
    DuplicateEvent(u64),
    /// A document is too large or cannot be serialised.
    Store(StoreError),
    /// A message names an instance that cannot exist.
    Target(String),
}

impl From<serde_json::Error> for Unplannable {
    fn from(error: serde_json::Error) -> Self {
        StoreError::from(error).into()
    }
}

impl From<StoreError> for Unplannable {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Collects the operations of one plan.
struct Planner<'a> {
    engine: &'a Engine,
    partition: &'a Partition,
    token: &'a str,
    now: Millis,
    operations: Vec<Operation>,
}

/// Plans the writes of the turn in `state` for `ack`.
pub(crate) fn plan(
    engine: &Engine,
    partition: &Partition,
    token: &str,
    state: &TurnState,
    ack: &Ack,
    older: Option<ExecutionDocument>,
    claims: &ScheduledClaims,
) -> Result<TurnPlan, Unplannable> {
    let mut planner = Planner { engine, partition, token, now: engine.now(), operations: Vec::new() };
    let (document, fresh) = planner.document(state, ack, older)?;
    let consumed = fingerprints(state, ack);
    let history_bytes = planner.history(ack.execution, document.current.events.last(), &fresh, &consumed)?;
    let kv = planner.kv(state, &fresh, document.commit.epoch > state.document.commit.epoch)?;
    let consumption = planner.consume(&state.document, &state.taken)?;
    planner.schedule(&ack.worker_items, claims)?;
    let intents = planner.send(&document, &ack.orchestrator_items)?;
    planner.cancel(state, &fresh, &ack.cancelled);
    Ok(TurnPlan { document, consumption, operations: planner.operations, kv, intents, history_bytes, consumed })
}

/// Plans the instance document alone, from a document that other writers have changed since the rest was planned.
pub(crate) fn plan_document(
    engine: &Engine,
    partition: &Partition,
    token: &str,
    state: &TurnState,
    ack: &Ack,
    older: Option<ExecutionDocument>,
) -> Result<InstanceDocument, Unplannable> {
    let mut planner = Planner { engine, partition, token, now: engine.now(), operations: Vec::new() };
    planner.document(state, ack, older).map(|(document, _)| document)
}

/// Consumes a message, on condition of its ETag. A message from another partition leaves a marker, so that a second
/// copy is recognised.
pub(crate) fn remove_message(
    Versioned { document, etag }: &Versioned<MessageDocument>,
) -> Result<Operation, StoreError> {
    let id = document.id.clone();
    if !document.delivered {
        return Ok(Operation::delete(id, Some(etag)));
    }
    let marker = DeliveredDocument::new(id.clone(), document.instance_id.clone());
    Ok(Operation::replace(id, &marker, Some(etag))?)
}

/// The incarnation of the parent that waits for this instance. It is the one that sent the last start, even if this
/// instance was running or had ended by then. An earlier incarnation of the parent may be deleted.
fn parents_incarnation(document: &InstanceDocument, state: &TurnState) -> Option<String> {
    let parent = document.origin.parent.as_deref()?;
    let from_parent = |message: &MessageDocument| {
        let item = serde_json::from_str(&message.item).ok()?;
        let WorkItem::StartOrchestration { parent_instance, .. } = item else { return None };
        (parent_instance.as_deref() == Some(parent)).then(|| message.incarnation.clone()).flatten()
    };
    let starts = state.taken.iter().map(|taken| &taken.document).filter(|message| message.starts);
    starts.filter_map(from_parent).next_back()
}

/// The fingerprints that the turn's history document records. They identify the messages that the turn consumes from
/// outside. A new execution also gets the last ones before it.
fn fingerprints(state: &TurnState, ack: &Ack) -> Fingerprints {
    let mut fingerprints = match &state.contents {
        Some(contents) if ack.execution != state.document.current.execution => {
            contents.consumed.last(CARRIED_FINGERPRINTS)
        }
        _ => Fingerprints::default(),
    };
    fingerprints.extend(&Fingerprints::of(state.taken.iter().map(|taken| &taken.document.id)));
    fingerprints
}

impl TurnPlan {
    /// The operation at this index of the committing batch. Index 0 is the instance document, so it returns `None`.
    pub(crate) fn operation(&self, index: usize) -> Option<&Operation> {
        let index = index.checked_sub(1)?;
        self.consumption.iter().chain(&self.operations).nth(index)
    }
}

impl Planner<'_> {
    /// The instance document after the turn, and the turn's new events.
    fn document(
        &mut self,
        state: &TurnState,
        ack: &Ack,
        older: Option<ExecutionDocument>,
    ) -> Result<(InstanceDocument, Vec<Event>), Unplannable> {
        let mut document = state.document.clone();
        self.advance(&mut document, state, ack)?;
        let fresh = self.count_events(&mut document, ack)?;
        self.end_execution(&mut document, ack, older)?;
        self.custom_status(&mut document, &fresh)?;
        if document.execution_has_ended() && ack.metadata.status.is_some() {
            document.commit.epoch += 1;
        }
        Ok((document, fresh))
    }

    /// Removes the lock and records this turn in the document. A newer execution becomes the current one.
    fn advance(&mut self, document: &mut InstanceDocument, state: &TurnState, ack: &Ack) -> Result<(), StoreError> {
        let metadata = &ack.metadata;
        document.claim.lock = None;
        document.forget_claims();
        document.commit.turn += 1;
        document.commit.last_turn = Some(self.token.to_owned());
        document.updated_at = self.now;
        document.counting.count_pending = Some("open".to_owned());
        // The turn ran on the inlined message, so this consumes it.
        document.take_inlined();
        if document.waiting.deferred || !document.exists() {
            // The claim's `due` is no longer needed. Deferred messages that did not fit into this turn are invisible to
            // queries, so a recovery poll must find the instance, even if this process dies.
            document.waiting.deferred &= !state.whole;
            document.waiting.orphans = false;
            document.due = document.waiting.deferred.then(|| self.now + TAKEOVER_AFTER);
        }
        if !document.exists() {
            self.begin_instance(document, state, ack);
        } else if ack.execution > document.current.execution {
            self.begin_next_execution(document, ack)?;
        }
        if let Some(incarnation) = parents_incarnation(document, state) {
            document.origin.parent_incarnation = Some(incarnation);
        }
        if let Some(name) = &metadata.orchestration_name {
            document.current.name.clone_from(name);
        }
        if let Some(version) = &metadata.orchestration_version {
            document.current.version.clone_from(version);
        }
        if let Some(pinned) =
            metadata.pinned_duroxide_version.as_ref().filter(|_| ack.execution == document.current.execution)
        {
            document.current.pinned = Some(pinned.to_string());
        }
        Ok(())
    }

    /// Fills the document of an instance whose first turn this is.
    fn begin_instance(&self, document: &mut InstanceDocument, state: &TurnState, ack: &Ack) {
        document.origin.created_at = self.now;
        document.origin.parent = ack.metadata.parent_instance_id.clone();
        document.current.status = Some(status::RUNNING.to_owned());
        document.current.execution = ack.execution;
        document.current.started_at = self.now;
        document.counting.totals.executions += 1;
        document.current.name = state.name.clone();
        document.current.version = state.version.clone();
    }

    /// Makes a newer execution the current one, and stores the earlier one in a document of its own.
    fn begin_next_execution(&mut self, document: &mut InstanceDocument, ack: &Ack) -> Result<(), StoreError> {
        if !document.current.archived {
            let superseded = ExecutionDocument::of(document, document.current.output.clone());
            self.operations.push(Operation::upsert(&superseded)?);
        }
        document.current.archived = false;
        document.current.output = None;
        document.current.execution = ack.execution;
        document.current.status = Some(status::RUNNING.to_owned());
        document.current.started_at = self.now;
        document.current.completed_at = None;
        document.removal.ended = None;
        document.current.events = Default::default();
        document.current.pinned = None;
        document.counting.totals.executions += 1;
        Ok(())
    }

    /// The events that are new. A duplicate id is an error. Only the poison event may come twice; its second copy is
    /// skipped.
    fn count_events(&self, document: &mut InstanceDocument, ack: &Ack) -> Result<Vec<Event>, Unplannable> {
        let mut fresh = Vec::with_capacity(ack.events.len());
        for event in &ack.events {
            // The worker does not know the events of an earlier execution, so it appends to that history unchecked.
            let new = ack.execution != document.current.execution || document.current.events.insert(event.event_id);
            if !new && event.event_id == item::POISON_EVENT_ID {
                continue;
            }
            if !new {
                return Err(Unplannable::DuplicateEvent(event.event_id));
            }
            document.counting.totals.events += 1;
            fresh.push(event.clone());
        }
        Ok(fresh)
    }

    /// Records the end of the current execution, or of an older one that ends late.
    fn end_execution(
        &mut self,
        document: &mut InstanceDocument,
        ack: &Ack,
        older: Option<ExecutionDocument>,
    ) -> Result<(), StoreError> {
        let Some(status) = &ack.metadata.status else { return Ok(()) };
        if ack.execution == document.current.execution {
            document.current.status = Some(status.clone());
            document.current.completed_at = Some(self.now);
            let ending = Ending::of(status, &ack.events).filter(|_| document.origin.parent.is_none());
            document.removal.ended = ending.map(|ending| ending.at(self.now));
            let output = ack.metadata.output.clone();
            document.current.archived = output.as_ref().is_some_and(|output| output.len() > ExecutionDocument::INLINE);
            if !document.current.archived {
                document.current.output = output;
                return Ok(());
            }
            document.current.output = None;
            let ended = ExecutionDocument::of(document, output);
            self.add_checked(Operation::upsert(&ended)?, || "the output of the execution".to_owned())?;
        } else if let Some(mut ended) = older {
            ended.status.clone_from(status);
            ended.output.clone_from(&ack.metadata.output);
            ended.ended_at = Some(self.now);
            self.add_checked(Operation::upsert(&ended)?, || "the output of the execution".to_owned())?;
        }
        Ok(())
    }

    /// Writes the events into history documents, and returns the size of their text. The first document has the
    /// fingerprints.
    fn history(
        &mut self,
        execution: u64,
        last_event: u64,
        events: &[Event],
        consumed: &Fingerprints,
    ) -> Result<usize, StoreError> {
        let mut total = 0;
        let mut part = 0;
        let mut consumed = consumed.clone();
        let mut pending: Vec<String> = Vec::new();
        // A document without events sorts behind the last event.
        let (mut pending_bytes, mut first) = (0, last_event);
        for event in events {
            let text = serde_json::to_string(event)
                .map_err(|e| StoreError::Malformed { detail: format!("event {}: {e}", event.event_id) })?;
            total += text.len();
            // The text is a JSON string within the document, where each quote and backslash takes two bytes.
            let bytes = operation::size_of(&text);
            if !pending.is_empty() && pending_bytes + bytes > HISTORY_BYTES {
                let full = std::mem::take(&mut pending);
                self.history_document(execution, part, first, full, std::mem::take(&mut consumed))?;
                part += 1;
                pending_bytes = 0;
            }
            if pending.is_empty() {
                first = event.event_id;
            }
            pending_bytes += bytes;
            pending.push(text);
        }
        if !pending.is_empty() || !consumed.is_empty() {
            self.history_document(execution, part, first, pending, consumed)?;
        }
        Ok(total)
    }

    fn history_document(
        &mut self,
        execution: u64,
        part: usize,
        first: u64,
        events: Vec<String>,
        consumed: Fingerprints,
    ) -> Result<(), StoreError> {
        let count = events.len();
        let mut document = HistoryDocument::new(self.partition.clone(), execution, self.token, part, first, events);
        document.consumed = consumed;
        let name = || match count {
            1 => format!("event {first} of execution {execution}"),
            _ => format!("{count} events of execution {execution} from event {first} on"),
        };
        self.add_checked(Operation::create(&document)?, name)
    }

    /// Writes the last custom status that the turn set.
    fn custom_status(&mut self, document: &mut InstanceDocument, events: &[Event]) -> Result<(), StoreError> {
        let last = events.iter().rev().find_map(|event| match &event.kind {
            EventKind::CustomStatusUpdated { status } => Some(status.clone()),
            _ => None,
        });
        let Some(value) = last else { return Ok(()) };
        document.commit.status_version += 1;
        let document = StatusDocument::new(self.partition.clone(), value, document.commit.status_version);
        self.add_checked(Operation::upsert(&document)?, || "the custom status".to_owned())
    }

    /// The values after this turn. Only the documents of keys that the turn changed are written. The document of a
    /// cleared key is deleted once its execution no longer needs the earlier value.
    fn kv(
        &mut self,
        state: &TurnState,
        events: &[Event],
        ends: bool,
    ) -> Result<BTreeMap<String, KvDocument>, StoreError> {
        let epoch = state.document.commit.epoch;
        let mut after = state.kv.clone();
        let touched = self.write_values(&mut after, epoch, events);
        for key in &touched {
            if let Some(value) = after.get(key).filter(|value| !value.is_forgotten(epoch, ends)) {
                self.add_checked(Operation::upsert(value)?, || format!("the value of key {key:?}"))?;
            }
        }
        after.retain(|key, value| {
            let forgotten = value.is_forgotten(epoch, ends);
            if forgotten && state.kv.contains_key(key) {
                self.operations.push(Operation::delete(value.id.clone(), None));
            }
            !forgotten
        });
        Ok(after)
    }

    /// Applies the events to the values and returns the keys that they change.
    fn write_values(
        &self,
        values: &mut BTreeMap<String, KvDocument>,
        epoch: u64,
        events: &[Event],
    ) -> BTreeSet<String> {
        let mut touched = BTreeSet::new();
        let mut write = |values: &mut BTreeMap<String, KvDocument>, key: &str, value: Option<String>, at: Millis| {
            let next = KvDocument::written(self.partition, key, values.get(key), value, at, epoch);
            values.insert(key.to_owned(), next);
            touched.insert(key.to_owned());
        };
        for event in events {
            match &event.kind {
                EventKind::KeyValueSet { key, value, last_updated_at_ms } => {
                    write(values, key, Some(value.clone()), *last_updated_at_ms);
                }
                EventKind::KeyValueCleared { key } => write(values, key, None, self.now),
                EventKind::KeyValuesCleared => {
                    let live: Vec<String> =
                        values.values().filter(|v| v.value.is_some()).map(|v| v.key.clone()).collect();
                    for key in live {
                        write(values, &key, None, self.now);
                    }
                }
                _ => {}
            }
        }
        touched
    }

    /// Consumes the messages that the turn ran on. An inlined message needs no operation: the new instance document no
    /// longer has it, and its marker already exists.
    fn consume(
        &self,
        before: &InstanceDocument,
        taken: &[Versioned<MessageDocument>],
    ) -> Result<Vec<Operation>, StoreError> {
        taken.iter().filter(|taken| !before.has_inlined(&taken.document.id)).map(remove_message).collect()
    }

    /// Creates the documents of the activities that the turn schedules.
    fn schedule(&mut self, items: &[WorkItem], claims: &ScheduledClaims) -> Result<(), Unplannable> {
        for work_item in items {
            let WorkItem::ActivityExecute { instance, execution_id, id, name, .. } = work_item else {
                return Err(Unplannable::Target(format!("{} is not an activity", item::kind(work_item))));
            };
            let partition = Partition::instance(instance).map_err(|e| Unplannable::Target(e.to_string()))?;
            let id = ActivityDocument::scheduled_id(*execution_id, *id);
            let seq = self.engine.sequencer.next();
            let (mut activity, payload) =
                ActivityDocument::new(partition, id, work_item, seq, self.now).map_err(StoreError::unwritable)?;
            activity.known_by = self.engine.discovery.turn_holder_name();
            claims.lock(&mut activity);
            if let Some(payload) = payload {
                self.add_checked(Operation::upsert(&payload)?, || format!("the input of activity {name:?}"))?;
            }
            self.operations.push(Operation::upsert(&activity)?);
        }
        Ok(())
    }

    /// Messages to this instance are part of the turn. Messages to other instances become intents, which the outbox
    /// delivers after the commit.
    fn send(&mut self, sender: &InstanceDocument, items: &[WorkItem]) -> Result<Vec<IntentDocument>, Unplannable> {
        let mut intents = Vec::new();
        for (position, work_item) in items.iter().enumerate() {
            let Some(instance) = item::target(work_item) else { continue };
            let target = Partition::instance(instance).map_err(|e| Unplannable::Target(e.to_string()))?;
            let key = format!("{}:{position}", self.token);
            let due = item::visible_at(work_item, self.now);
            let seq = self.engine.sequencer.next();
            let mut message = MessageDocument::new(target.clone(), &key, work_item, seq, self.now, due)
                .map_err(StoreError::unwritable)?;
            message.known_by = self.engine.discovery.turn_holder_name();
            let name = || format!("the message {} for {instance:?}", item::kind(work_item));
            if &target == self.partition {
                self.add_limited(Operation::create(&message)?, MessageDocument::MAX_BYTES, name)?;
                continue;
            }
            message.send(sender, sender.incarnation_of(instance));
            let document = serde_json::to_value(&message).map_err(StoreError::unwritable)?;
            let takeover = self.engine.clock.after(self.engine.config.reconciler_age_threshold());
            let intent =
                IntentDocument::new(self.partition.clone(), target, self.token, position, document, self.now, takeover);
            self.add_limited(Operation::create(&intent)?, MessageDocument::MAX_BYTES, name)?;
            intents.push(intent);
        }
        Ok(intents)
    }

    /// Deletes the activities that the turn cancels, with their inputs. If a worker has completed one meanwhile, the
    /// batch fails, and the next plan omits it.
    fn cancel(&mut self, state: &TurnState, fresh: &[Event], cancelled: &[ScheduledActivityIdentifier]) {
        for activity in cancelled {
            if Partition::instance(&activity.instance).ok().as_ref() != Some(self.partition) {
                continue;
            }
            let id = ActivityDocument::scheduled_id(activity.execution_id, activity.activity_id);
            if has_payload(state, fresh, activity) {
                self.operations.push(Operation::delete(ActivityDocument::payload_id(&id), None));
            }
            self.operations.push(Operation::delete(id, None));
        }
    }

    /// Adds an operation whose document must stay below the document limit.
    fn add_checked(&mut self, operation: Operation, name: impl Fn() -> String) -> Result<(), StoreError> {
        self.add_limited(operation, operation::MAX_DOCUMENT_BYTES, name)
    }

    fn add_limited(&mut self, operation: Operation, limit: usize, name: impl Fn() -> String) -> Result<(), StoreError> {
        let bytes = operation.size();
        if bytes > limit {
            let instance = self.partition.instance_id().unwrap_or_default();
            let document = format!("{} (instance {instance:?})", name());
            return Err(StoreError::TooLarge { document, bytes, limit });
        }
        self.operations.push(operation);
        Ok(())
    }
}

/// Whether the activity's input has a document of its own. The size of the input in the scheduling event decides.
fn has_payload(state: &TurnState, fresh: &[Event], activity: &ScheduledActivityIdentifier) -> bool {
    let history = state.contents.iter().flat_map(|contents| contents.history.iter()).chain(fresh);
    let scheduled = history
        .filter(|event| event.event_id == activity.activity_id)
        .find_map(|event| item::scheduled(&activity.instance, activity.execution_id, event));
    let text = scheduled.and_then(|item| serde_json::to_string(&item).ok());
    text.is_some_and(|text| !ActivityDocument::is_inline(&text))
}
