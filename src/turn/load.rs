//! What a claim protects: messages, history and values, in one query of the partition.

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

/// At most so many messages go into one turn, and every start besides: the rest waits for the next.
const MAX_MESSAGES: usize = 500;
/// Messages go into one turn up to this size together: the one that reaches it is the last. What a turn takes is in memory
/// several times, and its events are about as large.
const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// Which messages are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    /// Those that are visible.
    Visible,
    /// Those that are deferred, too.
    Parked,
}

impl Sight {
    /// What a query is told of deferred messages: nothing has no `due`.
    fn deferred(self) -> Option<Millis> {
        (self == Self::Parked).then_some(MessageDocument::DEFERRED)
    }
}

/// The contents of an instance's partition, as a turn needs them.
pub(crate) struct Loaded {
    pub(crate) messages: Vec<Versioned<MessageDocument>>,
    /// Messages that can't be read.
    pub(super) unknown: UnknownMessages,
    /// There are more messages than go into one turn.
    pub(crate) more: bool,
    pub(crate) contents: Result<Contents, String>,
}

impl Loaded {
    /// What the history lacks of the events that the instance's document says there are, which the claim has proved. What can't be read is
    /// another matter.
    pub(crate) fn lacks(&self, events: &EventSet) -> Option<String> {
        let history = &self.contents.as_ref().ok()?.history;
        let found: EventSet = history.iter().map(|event| event.event_id).collect();
        (found != *events).then(|| {
            let (is, must) = (found.len(), events.len());
            format!("the history has {is} events up to {}, and must have {must} up to {}", found.last(), events.last())
        })
    }
}

/// Loads what the claim of an instance in this execution protects. With `warm` contents, only the messages are asked for. Who insists filter what
/// was committed, not what a replica has heard of.
pub(crate) async fn load(
    engine: &Engine,
    partition: &Partition,
    execution: u64,
    warm: Option<Contents>,
    now: Millis,
    (sight, insists): (Sight, bool),
) -> Result<Loaded, StoreError> {
    // As long as pages come, the claim's lock is kept: a long history can't starve under throttling.
    let patience = engine.per_page();
    // Whether any deferred message is left is decided by what this returns.
    let freshness = match insists || sight == Sight::Parked {
        true => Freshness::Authoritative,
        false => Freshness::Session,
    };
    if let Some(contents) = warm {
        let mut loaded =
            Loaded { messages: Vec::new(), unknown: UnknownMessages::default(), more: false, contents: Ok(contents) };
        add_visible_messages(engine, partition, now, sight, (freshness, patience), &mut loaded).await?;
        return Ok(loaded);
    }
    let statement = queries::TURN.statement().bind("@now", now).bind("@execution", execution);
    let statement = statement.bind("@deferred", sight.deferred());
    let mut pages = engine.store.partition_pages(partition, statement.seeing(freshness), patience)?;
    let mut sorted = Sorted::default();
    while let Some(page) = pages.next().await? {
        let page: Vec<Value> = page.complete()?;
        for document in page {
            sorted.add(document);
        }
        // A queue may be longer than what one turn takes: the rest is not kept.
        sorted.messages = in_order(std::mem::take(&mut sorted.messages), &mut sorted.more);
    }
    Ok(sorted.loaded())
}

/// The documents of a partition, by kind.
#[derive(Default)]
struct Sorted {
    messages: Vec<Versioned<MessageDocument>>,
    unknown: UnknownMessages,
    more: bool,
    history: Vec<HistoryDocument>,
    kv: BTreeMap<String, KvDocument>,
    /// Why a part of the history or a value can't be read.
    broken: Option<String>,
}

impl Sorted {
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

/// The oldest messages that are visible. A start is always among them: an execution can't run without it. None is deferred.
async fn add_visible_messages(
    engine: &Engine,
    partition: &Partition,
    now: Millis,
    sight: Sight,
    (freshness, patience): (Freshness, QueryTimeout),
    Loaded { messages, unknown, more, .. }: &mut Loaded,
) -> Result<(), StoreError> {
    let statement = queries::VISIBLE_MESSAGES.statement().bind("@now", now).bind("@deferred", sight.deferred());
    let mut pages = engine.store.partition_pages::<Value>(partition, statement.seeing(freshness), patience)?;
    let mut rows = 0;
    // They come in order: behind the first that does not fit, none does.
    while !*more {
        let Some(page) = pages.next().await? else { break };
        rows += page.len();
        page.readable().into_iter().for_each(|row| unknown::take_in(row, messages, unknown));
        *messages = in_order(std::mem::take(messages), more);
    }
    // Starts and messages that can't be read are among the rows, and do not count: all may fit, and more may be there.
    *more |= rows > MAX_MESSAGES;
    if *more {
        let statement = queries::VISIBLE_STARTS.statement().bind("@now", now).seeing(freshness);
        let starts = engine.store.query_partition::<Value>(partition, statement, patience).await?;
        starts.into_iter().for_each(|row| unknown::take_in(row, messages, unknown));
        *messages = in_order(std::mem::take(messages), more);
    }
    *more |= unknown.more;
    Ok(())
}

/// Whether a start is queued for an instance, visible or not.
pub(crate) async fn has_start(engine: &Engine, partition: &Partition, deadline: Deadline) -> Result<bool, StoreError> {
    let rows: Vec<Value> =
        engine.store.query_partition(partition, queries::QUEUED_STARTS.statement().authoritative(), deadline).await?;
    Ok(!rows.is_empty())
}

/// The queue's order is that in which messages went in, never that in which they became visible. Starts are never cut off.
/// `more` tells whether others were.
pub(super) fn in_order(
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

/// The events of some history documents that can be read.
pub(crate) fn readable_events(documents: &[HistoryDocument]) -> impl Iterator<Item = Event> + '_ {
    documents.iter().flat_map(|document| &document.events).filter_map(|text| serde_json::from_str(text).ok())
}

/// History documents in the order of their turns.
fn sort(documents: &mut [HistoryDocument]) {
    documents.sort_by(|a, b| a.first.cmp(&b.first).then_with(|| a.id.cmp(&b.id)));
}

/// What the turns of an execution have consumed from outside, oldest first.
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

/// Contents of an instance that has none.
pub(crate) fn nothing() -> Contents {
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
    fn a_start_is_among_what_a_turn_gets_however_many_messages_are_older() {
        let mut messages: Vec<_> = (0..2_000).map(|number| message(number, false)).collect();
        messages.push(message(5_000, true));
        messages.push(message(4_000, true));
        let mut more = false;
        let turn = in_order(messages, &mut more);
        assert!(more);
        assert_eq!(turn.len(), MAX_MESSAGES + 2);
        let starts: Vec<&str> = turn.iter().filter(|m| m.document.starts).map(|m| m.document.seq.as_str()).collect();
        assert_eq!(starts, ["004000", "005000"]);
        assert!(turn.windows(2).all(|pair| pair[0].document.seq < pair[1].document.seq));
    }

    #[test]
    fn a_history_without_all_of_its_events_or_with_others_is_known() {
        let history = |ids: std::ops::Range<u64>| {
            let event = |id| Event::with_event_id(id, "a", 1, None, duroxide::EventKind::TimerFired { fire_at_ms: 0 });
            let contents =
                Contents::new(ids.map(event).collect::<Vec<_>>(), 0, Some(BTreeMap::new()), Fingerprints::default());
            Loaded { messages: Vec::new(), unknown: UnknownMessages::default(), more: false, contents: Ok(contents) }
        };
        let mut events = EventSet::default();
        assert_eq!(history(1..1).lacks(&events), None);
        assert!((1..4).all(|id| events.insert(id)));
        assert_eq!(history(1..4).lacks(&events), None);
        let lacks = history(1..3).lacks(&events).expect("one is missing");
        assert_eq!(lacks, "the history has 2 events up to 2, and must have 3 up to 3");
        assert!(history(1..5).lacks(&events).is_some() && history(2..4).lacks(&events).is_some());
        let unreadable = Loaded { contents: Err("garbage".to_owned()), ..history(1..3) };
        assert_eq!(unreadable.lacks(&events), None);
    }

    #[test]
    fn what_fits_one_turn_leaves_nothing_for_the_next() {
        let messages: Vec<_> = (0..MAX_MESSAGES).map(|number| message(number, false)).collect();
        let mut more = false;
        assert_eq!((in_order(messages, &mut more).len(), more), (MAX_MESSAGES, false));
    }
}
