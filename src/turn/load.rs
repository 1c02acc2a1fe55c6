//! What a claim protects: messages, history and values, in one query of the partition.

use super::cache::Contents;
use crate::{
    engine::Engine,
    model::{kind, HistoryDocument, InstanceDocument, KvDocument, MessageDocument, Millis, Partition, StagedDocument},
    store::{queries, Deadline, StoreError},
};
use duroxide::Event;
use std::{collections::HashMap, sync::Arc};

/// At most so many messages go into one turn: the rest waits for the next.
pub(super) const MAX_MESSAGES: usize = 500;

/// The contents of an instance's partition, as a turn needs them.
pub(crate) struct Loaded {
    pub(crate) messages: Vec<MessageDocument>,
    pub(crate) contents: Result<Contents, String>,
    /// Left behind by turns that were never committed.
    pub(crate) dead: Vec<StagedDocument>,
}

/// Loads what `document` protects. With `warm` contents, only the messages are asked for.
pub(crate) async fn load(
    engine: &Engine,
    partition: &Partition,
    document: &InstanceDocument,
    warm: Option<Contents>,
    now: Millis,
    deadline: Deadline,
) -> Result<Loaded, StoreError> {
    if let Some(contents) = warm {
        let statement = queries::VISIBLE_MESSAGES.statement().bind("@now", now);
        let messages = engine.store.query_partition(partition, statement, deadline).await?;
        return Ok(Loaded { messages: in_order(messages), contents: Ok(contents), dead: Vec::new() });
    }
    let statement = queries::TURN.statement().bind("@now", now).bind("@execution", document.execution);
    let documents: Vec<serde_json::Value> = engine.store.query_partition(partition, statement, deadline).await?;
    sort(documents)
}

fn sort(documents: Vec<serde_json::Value>) -> Result<Loaded, StoreError> {
    let (mut messages, mut history, mut kv, mut dead) = (Vec::new(), Vec::new(), HashMap::new(), Vec::new());
    for document in documents {
        match document.get("type").and_then(serde_json::Value::as_str) {
            Some(kind::MESSAGE) => messages.push(parse(document)?),
            Some(kind::HISTORY) => history.push(parse(document)?),
            Some(kind::STAGED) => dead.push(parse(document)?),
            Some(kind::KV) => {
                let value: KvDocument = parse(document)?;
                kv.insert(value.key.clone(), value);
            }
            _ => {}
        }
    }
    let contents = events(history).map(|(history, bytes)| contents(history, bytes, Some(kv)));
    Ok(Loaded { messages: in_order(messages), contents, dead })
}

fn parse<T: serde::de::DeserializeOwned>(document: serde_json::Value) -> Result<T, StoreError> {
    serde_json::from_value(document)
        .map_err(|e| StoreError::Malformed { detail: format!("a document of the instance can't be read: {e}") })
}

/// The queue's order is that in which messages went in, never that in which they became visible.
fn in_order(mut messages: Vec<MessageDocument>) -> Vec<MessageDocument> {
    messages.sort_by(|a, b| a.seq.cmp(&b.seq));
    messages.truncate(MAX_MESSAGES);
    messages
}

/// The events of one execution in order, and their size as stored.
pub(crate) fn events(mut documents: Vec<HistoryDocument>) -> Result<(Vec<Event>, usize), String> {
    documents.sort_by(|a, b| a.first.cmp(&b.first).then_with(|| a.id.cmp(&b.id)));
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

/// Contents with their size in memory.
pub(crate) fn contents(history: Vec<Event>, bytes: usize, kv: Option<HashMap<String, KvDocument>>) -> Contents {
    // An event in memory takes about twice its text: the strings, and the struct around them.
    let values: usize = kv.iter().flat_map(HashMap::values).map(kv_bytes).sum();
    let bytes = 2 * bytes + history.len() * std::mem::size_of::<Event>() + values;
    Contents { history: Arc::new(history), kv: kv.map(Arc::new), bytes }
}

fn kv_bytes(value: &KvDocument) -> usize {
    let base = value.base.as_ref().map_or(0, |b| b.value.len());
    256 + 2 * value.key.len() + value.value.as_ref().map_or(0, String::len) + base
}
