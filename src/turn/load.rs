//! Loads messages, history and values of a claimed instance, by one query of its partition.

use super::{
    cache::Contents,
    unknown::{self, UnknownMessages},
};
use crate::{
    cosmos::{queries, Deadline, Freshness, QueryTimeout, StoreError, Versioned},
    engine::Engine,
    model::{kind, EventSet, Fingerprints, HistoryDocument, KvDocument, MessageDocument, Millis, Partition},
};
use duroxide::Event;
use serde_json::Value;
use std::collections::BTreeMap;

/// One turn takes at most this many messages, and every start in addition. The next turn gets the rest.
const MAX_MESSAGES: usize = 500;
/// The messages of one turn have at most this size together; the message that reaches the limit is the last. The
/// process holds several copies of them in memory, and the events of the turn are about as large.
const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// The messages that a query returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageScope {
    /// Only visible messages.
    Visible,
    /// Visible and deferred messages.
    WithDeferred,
}

impl MessageScope {
    /// The `due` of deferred messages, as a parameter of the query. `None` matches no message.
    fn deferred(self) -> Option<Millis> {
        (self == Self::WithDeferred).then_some(MessageDocument::DEFERRED)
    }
}

/// The contents of an instance's partition, as a turn needs them.
pub(crate) struct Loaded {
    pub(crate) messages: Vec<Versioned<MessageDocument>>,
    /// Messages that cannot be read.
    pub(super) unknown: UnknownMessages,
    /// The queue has more messages than one turn takes.
    pub(crate) more: bool,
    pub(crate) contents: Result<Contents, String>,
}

impl Loaded {
    /// How the loaded history differs from the events of the instance document, which the claim has proved. `None` if
    /// it is complete, and also if it cannot be read.
    pub(crate) fn missing_events(&self, events: &EventSet) -> Option<String> {
        let history = &self.contents.as_ref().ok()?.history;
        let found: EventSet = history.iter().map(|event| event.event_id).collect();
        (found != *events).then(|| {
            let (is, must) = (found.len(), events.len());
            format!("the history has {is} events up to {}, and must have {must} up to {}", found.last(), events.last())
        })
    }
}

/// Loads the contents of a claimed instance in this execution. If `cached` has the contents, the query returns messages
/// only. With `authoritative` the query goes to the write region instead of a replica that may lag.
pub(crate) async fn load(
    engine: &Engine,
    partition: &Partition,
    execution: u64,
    cached: Option<Contents>,
    now: Millis,
    (scope, authoritative): (MessageScope, bool),
) -> Result<Loaded, StoreError> {
    // The time limit is per page: the caller extends the lock, so a long history loads even under throttling.
    let timeout = engine.per_page();
    // The result decides whether any deferred message is left, so it must not be stale.
    let freshness = match authoritative || scope == MessageScope::WithDeferred {
        true => Freshness::Authoritative,
        false => Freshness::Session,
    };
    if let Some(contents) = cached {
        let mut loaded =
            Loaded { messages: Vec::new(), unknown: UnknownMessages::default(), more: false, contents: Ok(contents) };
        add_visible_messages(engine, partition, now, scope, (freshness, timeout), &mut loaded).await?;
        return Ok(loaded);
    }
    let statement = queries::TURN.statement().bind("@now", now).bind("@execution", execution);
    let statement = statement.bind("@deferred", scope.deferred());
    let mut pages = engine.store.partition_pages(partition, statement.seeing(freshness), timeout)?;
    let mut documents = PartitionDocuments::default();
    while let Some(page) = pages.next().await? {
        let page: Vec<Value> = page.complete()?;
        for document in page {
            documents.add(document);
        }
        // The queue may be longer than one turn takes. Drop the rest after each page.
        documents.messages = order_and_cut(std::mem::take(&mut documents.messages), &mut documents.more);
    }
    Ok(documents.loaded())
}

/// The documents of a partition, by type.
#[derive(Default)]
struct PartitionDocuments {
    messages: Vec<Versioned<MessageDocument>>,
    unknown: UnknownMessages,
    more: bool,
    history: Vec<HistoryDocument>,
    kv: BTreeMap<String, KvDocument>,
    /// Why a part of the history or a value cannot be read.
    broken: Option<String>,
}

impl PartitionDocuments {
    fn add(&mut self, document: Value) {
        match document.get("type").and_then(Value::as_str) {
            Some(kind::MESSAGE) => unknown::take_in(document, &mut self.messages, &mut self.unknown),
            Some(kind::HISTORY) => match serde_json::from_value(document) {
                Ok(history) => self.history.push(history),
                Err(error) => self.broken = Some(format!("a history document can't be read: {error}")),
            },
            Some(kind::KV) => match serde_json::from_value::<KvDocument>(document) {
                Ok(value) => drop(self.kv.insert(value.key.clone(), value)),
                Err(error) => self.broken = Some(format!("a value's document can't be read: {error}")),
            },
            _ => {}
        }
    }

    fn loaded(mut self) -> Loaded {
        let consumed = consumed(&mut self.history);
        let contents = match self.broken {
            Some(broken) => Err(broken),
            None => events(self.history).map(|(history, text)| Contents::new(history, text, Some(self.kv), consumed)),
        };
        let more = self.more || self.unknown.more;
        Loaded { messages: self.messages, unknown: self.unknown, more, contents }
    }
}

/// Adds the oldest visible messages, and deferred ones if the scope has them. It always adds every start, because an
/// execution cannot run without its start.
async fn add_visible_messages(
    engine: &Engine,
    partition: &Partition,
    now: Millis,
    scope: MessageScope,
    (freshness, timeout): (Freshness, QueryTimeout),
    Loaded { messages, unknown, more, .. }: &mut Loaded,
) -> Result<(), StoreError> {
    let statement = queries::VISIBLE_MESSAGES.statement().bind("@now", now).bind("@deferred", scope.deferred());
    let mut pages = engine.store.partition_pages::<Value>(partition, statement.seeing(freshness), timeout)?;
    let mut rows = 0;
    // The pages come in order. Once a message does not fit, no later one does.
    while !*more {
        let Some(page) = pages.next().await? else { break };
        rows += page.len();
        page.readable().into_iter().for_each(|row| unknown::take_in(row, messages, unknown));
        *messages = order_and_cut(std::mem::take(messages), more);
    }
    // Rows include starts and unreadable messages, which do not count towards the limit. So all rows may fit although
    // the queue has more.
    *more |= rows > MAX_MESSAGES;
    if *more {
        let statement = queries::VISIBLE_STARTS.statement().bind("@now", now).seeing(freshness);
        let starts = engine.store.query_partition::<Value>(partition, statement, timeout).await?;
        starts.into_iter().for_each(|row| unknown::take_in(row, messages, unknown));
        *messages = order_and_cut(std::mem::take(messages), more);
    }
    *more |= unknown.more;
    Ok(())
}

/// Whether the queue of an instance has a start, visible or not.
pub(crate) async fn has_start(engine: &Engine, partition: &Partition, deadline: Deadline) -> Result<bool, StoreError> {
    let rows: Vec<Value> =
        engine.store.query_partition(partition, queries::QUEUED_STARTS.statement().authoritative(), deadline).await?;
    Ok(!rows.is_empty())
}

/// Sorts messages by enqueue order, which differs from the order in which they become visible. Cuts the list to the
/// size of one turn, but keeps every start. Sets `more` if it cuts any message off.
pub(super) fn order_and_cut(
    mut messages: Vec<Versioned<MessageDocument>>,
    more: &mut bool,
) -> Vec<Versioned<MessageDocument>> {
    messages.sort_by(|a, b| a.document.seq.cmp(&b.document.seq));
    messages.dedup_by(|a, b| a.document.id == b.document.id);
    let all = messages.len();
    let (mut others, mut bytes) = (0, 0);
    messages.retain(|Versioned { document: message, .. }| {
        if message.starts {
            return true;
        }
        let fits = others < MAX_MESSAGES && bytes < MAX_MESSAGE_BYTES;
        others += 1;
        bytes += message.item.len();
        fits
    });
    *more |= messages.len() < all;
    messages
}

/// Whether an instance has a history.
pub(super) async fn has_history(
    engine: &Engine,
    partition: &Partition,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let statement = queries::ANY_HISTORY.statement().authoritative();
    Ok(!engine.store.query_partition::<Value>(partition, statement, deadline).await?.is_empty())
}

/// The readable events of these history documents.
pub(crate) fn readable_events(documents: &[HistoryDocument]) -> impl Iterator<Item = Event> + '_ {
    documents.iter().flat_map(|document| &document.events).filter_map(|text| serde_json::from_str(text).ok())
}

/// Sorts history documents by the order of their turns.
fn sort(documents: &mut [HistoryDocument]) {
    documents.sort_by(|a, b| a.first.cmp(&b.first).then_with(|| a.id.cmp(&b.id)));
}

/// The fingerprints of the messages that the turns of an execution consumed from outside the instance, oldest first.
fn consumed(documents: &mut [HistoryDocument]) -> Fingerprints {
    sort(documents);
    let mut fingerprints = Fingerprints::default();
    for document in documents {
        fingerprints.extend(&document.consumed);
    }
    fingerprints
}

/// The events of one execution in order, and the size of their text.
pub(crate) fn events(mut documents: Vec<HistoryDocument>) -> Result<(Vec<Event>, usize), String> {
    sort(&mut documents);
    let mut events: Vec<Event> = Vec::new();
    let mut bytes = 0;
    for document in documents {
        for (position, text) in document.events.iter().enumerate() {
            bytes += text.len();
            let event = serde_json::from_str(text)
                .map_err(|e| format!("event {position} of history document {} can't be read: {e}", document.id))?;
            events.push(event);
        }
    }
    events.sort_by_key(|event| event.event_id);
    Ok((events, bytes))
}

/// The contents of an instance that has neither history nor values.
pub(crate) fn empty_contents() -> Contents {
    Contents::new(Vec::new(), 0, Some(BTreeMap::new()), Fingerprints::default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use azure_core::http::Etag;
    use duroxide::providers::WorkItem;

    fn message(number: usize, starts: bool) -> Versioned<MessageDocument> {
        let item = WorkItem::CancelInstance { instance: "a".into(), reason: String::new() };
        let partition = Partition::instance("a").unwrap();
        let mut document =
            MessageDocument::new(partition, &number.to_string(), &item, format!("{number:06}"), 0, 0).unwrap();
        document.starts = starts;
        Versioned { document, etag: Etag::from("e") }
    }

    #[test]
    fn a_turn_gets_every_start_however_many_messages_are_older() {
        let mut messages: Vec<_> = (0..2_000).map(|number| message(number, false)).collect();
        messages.push(message(5_000, true));
        messages.push(message(4_000, true));
        let mut more = false;
        let turn = order_and_cut(messages, &mut more);
        assert!(more);
        assert_eq!(turn.len(), MAX_MESSAGES + 2);
        let starts: Vec<&str> = turn.iter().filter(|m| m.document.starts).map(|m| m.document.seq.as_str()).collect();
        assert_eq!(starts, ["004000", "005000"]);
        assert!(turn.windows(2).all(|pair| pair[0].document.seq < pair[1].document.seq));
    }

    #[test]
    fn a_history_with_missing_or_additional_events_is_detected() {
        let history = |ids: std::ops::Range<u64>| {
            let event = |id| Event::with_event_id(id, "a", 1, None, duroxide::EventKind::TimerFired { fire_at_ms: 0 });
            let contents =
                Contents::new(ids.map(event).collect::<Vec<_>>(), 0, Some(BTreeMap::new()), Fingerprints::default());
            Loaded { messages: Vec::new(), unknown: UnknownMessages::default(), more: false, contents: Ok(contents) }
        };
        let mut events = EventSet::default();
        assert_eq!(history(1..1).missing_events(&events), None);
        assert!((1..4).all(|id| events.insert(id)));
        assert_eq!(history(1..4).missing_events(&events), None);
        let missing_events = history(1..3).missing_events(&events).expect("one is missing");
        assert_eq!(missing_events, "the history has 2 events up to 2, and must have 3 up to 3");
        assert!(history(1..5).missing_events(&events).is_some() && history(2..4).missing_events(&events).is_some());
        let unreadable = Loaded { contents: Err("garbage".to_owned()), ..history(1..3) };
        assert_eq!(unreadable.missing_events(&events), None);
    }

    #[test]
    fn a_turn_takes_all_messages_if_they_fit() {
        let messages: Vec<_> = (0..MAX_MESSAGES).map(|number| message(number, false)).collect();
        let mut more = false;
        assert_eq!((order_and_cut(messages, &mut more).len(), more), (MAX_MESSAGES, false));
    }
}
