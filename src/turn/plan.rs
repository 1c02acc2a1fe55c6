//! What a turn writes, worked out before anything is sent.

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

/// Events are put together up to this size, so that a history document stays well below the limit.
const HISTORY_BYTES: usize = 1024 * 1024;
/// A new execution remembers so many of the messages from outside that were consumed last before it.
const CARRIED_FINGERPRINTS: usize = 24;

/// What duroxide's runtime asks to commit.
pub(crate) struct Ack {
    pub(crate) execution: u64,
    pub(crate) events: Vec<Event>,
    pub(crate) worker_items: Vec<WorkItem>,
    pub(crate) orchestrator_items: Vec<WorkItem>,
    pub(crate) metadata: ExecutionMetadata,
    pub(crate) cancelled: Vec<ScheduledActivityIdentifier>,
}

/// What a turn writes: the instance's next document, and everything that goes with it.
#[derive(Clone)]
pub(crate) struct TurnPlan {
    pub(crate) document: InstanceDocument,
    /// The messages that the turn ran on go: conditional on each being the very one, so that they belong into the commit.
    pub(crate) consumption: Vec<Operation>,
    /// Everything else, which may be staged.
    pub(crate) operations: Vec<Operation>,
    pub(crate) kv: BTreeMap<String, KvDocument>,
    pub(crate) intents: Vec<IntentDocument>,
    pub(crate) history_bytes: usize,
    pub(crate) consumed: Fingerprints,
}

/// Why a turn can't be written.
pub(crate) enum Unplannable {
    /// The history has an event with this id already.
    DuplicateEvent(u64),
    /// A document is too large or can't be written.
    Store(StoreError),
    /// A message names an instance that can't be.
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

struct Planner<'a> {
    engine: &'a Engine,
    partition: &'a Partition,
    token: &'a str,
    now: Millis,
    operations: Vec<Operation>,
}

/// Works out what the turn in `state` writes for `ack`.
pub(crate) fn plan(
    engine: &Engine,
    partition: &Partition,
    token: &str,
    state: &TurnState,
    ack: &Ack,
    older: Option<ExecutionDocument>,
    handed: &ScheduledClaims,
) -> Result<TurnPlan, Unplannable> {
    let mut planner = Planner { engine, partition, token, now: engine.now(), operations: Vec::new() };
    let (document, fresh) = planner.document(state, ack, older)?;
    let consumed = fingerprints(state, ack);
    let history_bytes = planner.history(ack.execution, document.events.last(), &fresh, &consumed)?;
    let kv = planner.kv(state, &fresh, document.epoch > state.document.epoch)?;
    let consumption = planner.consume(&state.document, &state.taken)?;
    planner.schedule(&ack.worker_items, handed)?;
    let intents = planner.send(&document, &ack.orchestrator_items)?;
    planner.cancel(state, &fresh, &ack.cancelled);
    Ok(TurnPlan { document, consumption, operations: planner.operations, kv, intents, history_bytes, consumed })
}

/// The instance's document of such a plan alone, for a document that others have changed since the rest was worked out.
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

/// Removes a message, as long as it is the very document that was read. A message from another partition leaves a marker, so
/// that a second copy is known.
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

/// Which instance of the parent's name waits for this one: the last that has started it, though it was running or had ended
/// already. Another instance of the parent's name may have been deleted before.
fn parents_incarnation(document: &InstanceDocument, state: &TurnState) -> Option<String> {
    let parent = document.parent.as_deref()?;
    let from_parent = |message: &MessageDocument| {
        let item = serde_json::from_str(&message.item).ok()?;
        let WorkItem::StartOrchestration { parent_instance, .. } = item else { return None };
        (parent_instance.as_deref() == Some(parent)).then(|| message.incarnation.clone()).flatten()
    };
    let starts = state.taken.iter().map(|taken| &taken.document).filter(|message| message.starts);
    starts.filter_map(from_parent).next_back()
}

/// What the turn's history document remembers of the messages from outside: those that the turn consumes, and, where it
/// begins an execution, the last ones before it.
fn fingerprints(state: &TurnState, ack: &Ack) -> Fingerprints {
    let mut fingerprints = match &state.contents {
        Some(contents) if ack.execution != state.document.execution => contents.consumed.last(CARRIED_FINGERPRINTS),
        _ => Fingerprints::default(),
    };
    fingerprints.extend(&Fingerprints::of(state.taken.iter().map(|taken| &taken.document.id)));
    fingerprints
}

impl TurnPlan {
    /// The operation at this place of the batch that commits, which the instance's document begins.
    pub(crate) fn operation(&self, index: usize) -> Option<&Operation> {
        let index = index.checked_sub(1)?;
        self.consumption.iter().chain(&self.operations).nth(index)
    }
}

impl Planner<'_> {
    /// The instance's document after the turn, and the events that are new to it.
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
            document.epoch += 1;
        }
        Ok((document, fresh))
    }

    /// The document's lock goes, and it remembers this turn; a newer execution becomes the current one.
    fn advance(&mut self, document: &mut InstanceDocument, state: &TurnState, ack: &Ack) -> Result<(), StoreError> {
        let metadata = &ack.metadata;
        document.lock = None;
        document.forget_claims();
        document.turn += 1;
        document.last_turn = Some(self.token.to_owned());
        document.updated_at = self.now;
        document.count_pending = Some("open".to_owned());
        // It is among what the turn ran on.
        document.take_inlined();
        if document.deferred || !document.exists() {
            // Nobody need look for the claim any more. What is deferred, and did not fit this turn, nobody sees: somebody must
            // look, also if this process dies.
            document.deferred &= !state.whole;
            document.orphans = false;
            document.due = document.deferred.then(|| self.now + TAKEOVER_AFTER);
        }
        if !document.exists() {
            document.created_at = self.now;
            document.parent = metadata.parent_instance_id.clone();
            document.status = Some(status::RUNNING.to_owned());
            document.execution = ack.execution;
            document.started_at = self.now;
            document.totals.executions += 1;
            document.name = state.name.clone();
            document.version = state.version.clone();
        } else if ack.execution > document.execution {
            if !document.archived {
                let superseded = ExecutionDocument::of(document, document.output.clone());
                self.operations.push(Operation::upsert(&superseded)?);
            }
            document.archived = false;
            document.output = None;
            document.execution = ack.execution;
            document.status = Some(status::RUNNING.to_owned());
            document.started_at = self.now;
            document.completed_at = None;
            document.ended = None;
            document.events = Default::default();
            document.pinned = None;
            document.totals.executions += 1;
        }
        if let Some(incarnation) = parents_incarnation(document, state) {
            document.parent_incarnation = Some(incarnation);
        }
        if let Some(name) = &metadata.orchestration_name {
            document.name.clone_from(name);
        }
        if let Some(version) = &metadata.orchestration_version {
            document.version.clone_from(version);
        }
        if let Some(pinned) = metadata.pinned_duroxide_version.as_ref().filter(|_| ack.execution == document.execution)
        {
            document.pinned = Some(pinned.to_string());
        }
        Ok(())
    }

    /// The events that are new. An id that is there is refused, but for the poison event, which is sent again.
    fn count_events(&self, document: &mut InstanceDocument, ack: &Ack) -> Result<Vec<Event>, Unplannable> {
        let mut fresh = Vec::with_capacity(ack.events.len());
        for event in &ack.events {
            // Which events an execution of the past has is not known here: its history is appended to unseen.
            let new = ack.execution != document.execution || document.events.insert(event.event_id);
            if !new && event.event_id == item::POISON_EVENT_ID {
                continue;
            }
            if !new {
                return Err(Unplannable::DuplicateEvent(event.event_id));
            }
            document.totals.events += 1;
            fresh.push(event.clone());
        }
        Ok(fresh)
    }

    fn end_execution(
        &mut self,
        document: &mut InstanceDocument,
        ack: &Ack,
        older: Option<ExecutionDocument>,
    ) -> Result<(), StoreError> {
        let Some(status) = &ack.metadata.status else { return Ok(()) };
        if ack.execution == document.execution {
            document.status = Some(status.clone());
            document.completed_at = Some(self.now);
            let ending = Ending::of(status, &ack.events).filter(|_| document.parent.is_none());
            document.ended = ending.map(|ending| ending.at(self.now));
            let output = ack.metadata.output.clone();
            document.archived = output.as_ref().is_some_and(|output| output.len() > ExecutionDocument::INLINE);
            if !document.archived {
                document.output = output;
                return Ok(());
            }
            document.output = None;
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
        // A document without events keeps its place among the others.
        let (mut pending_bytes, mut first) = (0, last_event);
        for event in events {
            let text = serde_json::to_string(event)
                .map_err(|e| StoreError::Malformed { detail: format!("event {}: {e}", event.event_id) })?;
            total += text.len();
            // A text is a string in a document: its quotes and backslashes take twice the room there.
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

    /// The last status that the turn set.
    fn custom_status(&mut self, document: &mut InstanceDocument, events: &[Event]) -> Result<(), StoreError> {
        let last = events.iter().rev().find_map(|event| match &event.kind {
            EventKind::CustomStatusUpdated { status } => Some(status.clone()),
            _ => None,
        });
        let Some(value) = last else { return Ok(()) };
        document.status_version += 1;
        let document = StatusDocument::new(self.partition.clone(), value, document.status_version);
        self.add_checked(Operation::upsert(&document)?, || "the custom status".to_owned())
    }

    /// The values after this turn. Only the documents of keys that it touched are written, and those of cleared keys go as
    /// soon as the execution that cleared them needs to know no more what was there before it.
    fn kv(
        &mut self,
        state: &TurnState,
        events: &[Event],
        ends: bool,
    ) -> Result<BTreeMap<String, KvDocument>, StoreError> {
        let epoch = state.document.epoch;
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

    /// Applies what the events say of values; the keys that they touch.
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

    /// The messages that the turn ran on are consumed. The one that the instance's document has_inlined is consumed with that: its
    /// marker is there.
    fn consume(
        &self,
        before: &InstanceDocument,
        taken: &[Versioned<MessageDocument>],
    ) -> Result<Vec<Operation>, StoreError> {
        taken.iter().filter(|taken| !before.has_inlined(&taken.document.id)).map(remove_message).collect()
    }

    fn schedule(&mut self, items: &[WorkItem], handed: &ScheduledClaims) -> Result<(), Unplannable> {
        for work_item in items {
            let WorkItem::ActivityExecute { instance, execution_id, id, name, .. } = work_item else {
                return Err(Unplannable::Target(format!("{} is not an activity", item::kind(work_item))));
            };
            let partition = Partition::instance(instance).map_err(|e| Unplannable::Target(e.to_string()))?;
            let id = ActivityDocument::scheduled_id(*execution_id, *id);
            let seq = self.engine.sequencer.next();
            let (mut work, payload) =
                ActivityDocument::new(partition, id, work_item, seq, self.now).map_err(StoreError::unwritable)?;
            work.known_by = self.engine.discovery.turn_holder_name();
            handed.lock(&mut work);
            if let Some(payload) = payload {
                self.add_checked(Operation::upsert(&payload)?, || format!("the input of activity {name:?}"))?;
            }
            self.operations.push(Operation::upsert(&work)?);
        }
        Ok(())
    }

    /// Messages for this instance go with the turn; those for others become intents, delivered after the commit.
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

    /// Activities that lost go with the turn, and so do their inputs. One that a worker has finished in the meantime is not
    /// there any more, and is left out when the batch says so.
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

    /// Adds an operation that must fit a document on its own.
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

/// Whether an activity was scheduled with an input that has a document of its own: its event tells.
fn has_payload(state: &TurnState, fresh: &[Event], activity: &ScheduledActivityIdentifier) -> bool {
    let history = state.contents.iter().flat_map(|contents| contents.history.iter()).chain(fresh);
    let scheduled = history
        .filter(|event| event.event_id == activity.activity_id)
        .find_map(|event| item::scheduled(&activity.instance, activity.execution_id, event));
    let text = scheduled.and_then(|item| serde_json::to_string(&item).ok());
    text.is_some_and(|text| !ActivityDocument::is_inline(&text))
}
