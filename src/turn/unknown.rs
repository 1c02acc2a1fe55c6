//! Messages that this version can't read: of a kind that only a newer duroxide knows, or in a damaged document.
//!
//! Such a message stays in the queue for a version that knows it, and the turn runs on the others. It gets a later
//! `due`, so that polls of this version do not find it all the time: as far ahead as it is old, a minute at most. No
//! attempt is counted for it. A claim puts off one batch of them at most, so that thousands neither hide the other
//! messages nor keep their turn from running.
//!
//! Invariant: a batch that puts messages off is conditional on the claim, and on each message being the one that was
//! loaded. Apart from `due` their documents stay as they are.
//!
//! Crash points: before a batch nothing has happened; after it the lock expires as after any claim.

use super::{claim::Ours, instance_id, load::Loaded, open, release};
use crate::model::operation;
use crate::{
    cosmos::{BatchOutcome, StoreError, Versioned},
    engine::Engine,
    model::{DocumentId, MessageDocument, Millis, Operation},
};
use azure_core::http::Etag;
use duroxide::providers::WorkItem;
use serde::Deserialize;
use serde_json::{Map, Value};
use tracing::warn;

/// It is put off by so much at least and at most.
const SHORTEST: Millis = 1_000;
const LONGEST: Millis = 60_000;
/// So many are put off by one claim: with the instance's document they make one batch. The next claim meets the rest.
const AT_ONCE: usize = operation::MAX_OPERATIONS - 2;

/// A message that this version can't read.
pub(super) struct UnknownMessage {
    id: DocumentId,
    etag: Etag,
    /// Its document, without the service's own properties.
    document: Map<String, Value>,
    why: String,
}

impl UnknownMessage {
    fn new(document: Value, etag: Etag, why: String) -> Option<Self> {
        let Value::Object(mut document) = document else { return None };
        document.retain(|name, _| !name.starts_with('_'));
        let id = DocumentId::try_from(document.get("id")?.as_str()?.to_owned()).ok()?;
        Some(Self { id, etag, document, why })
    }
}

/// The messages of a queue that can't be read: as many as one claim puts off.
#[derive(Default)]
pub(super) struct UnknownMessages {
    messages: Vec<UnknownMessage>,
    /// There are others.
    pub(super) more: bool,
}

impl UnknownMessages {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    fn add(&mut self, row: Value, etag: Etag, error: &serde_json::Error) {
        if self.messages.len() == AT_ONCE {
            self.more = true;
            return;
        }
        self.messages.extend(UnknownMessage::new(row, etag, error.to_string()));
    }
}

/// Takes a row in: as a message, or as one that can't be read. One without id or ETag is no document.
pub(super) fn take_in(row: Value, messages: &mut Vec<Versioned<MessageDocument>>, unknown: &mut UnknownMessages) {
    let Some(etag) = row.get("_etag").and_then(Value::as_str).map(|etag| Etag::from(etag.to_owned())) else { return };
    match read(&row) {
        Ok(document) => messages.push(Versioned { document, etag }),
        Err(error) => unknown.add(row, etag, &error),
    }
}

/// A message whose document and item can be read.
fn read(row: &Value) -> serde_json::Result<MessageDocument> {
    let document = MessageDocument::deserialize(row)?;
    serde_json::from_str::<WorkItem>(&document.item)?;
    Ok(document)
}

/// The work items of the messages that were loaded. Messages that can't be read are put off and leave the list.
pub(super) async fn set_aside(
    engine: &Engine,
    ours: &mut Ours,
    loaded: &mut Loaded,
) -> Result<Vec<WorkItem>, StoreError> {
    let mut items = Vec::with_capacity(loaded.messages.len());
    let mut unknown = std::mem::take(&mut loaded.unknown);
    loaded.messages.retain(|Versioned { document, etag }| match serde_json::from_str(&document.item) {
        Ok(item) => {
            items.push(item);
            true
        }
        Err(error) => {
            let row = serde_json::to_value(document).unwrap_or_default();
            // However many there are: an inlined message must be written out, or the turn's commit would take it along.
            unknown.messages.extend(UnknownMessage::new(row, etag.clone(), error.to_string()));
            false
        }
    });
    put_off(engine, ours, unknown.messages).await?;
    Ok(items)
}

/// When a message that was made then is looked at again.
fn later(created_at: Millis, now: Millis) -> Millis {
    now + now.saturating_sub(created_at).clamp(SHORTEST, LONGEST)
}

/// Puts messages off.
async fn put_off(engine: &Engine, ours: &mut Ours, messages: Vec<UnknownMessage>) -> Result<(), StoreError> {
    let (partition, now) = (ours.document.instance_id.clone(), engine.now());
    let mut operations = Vec::with_capacity(messages.len());
    for UnknownMessage { id, etag, mut document, why } in messages {
        warn!(instance_id = partition.instance_id(), %id, why, "left a message for a version that can read it");
        let due = later(document.get("createdAt").and_then(Value::as_u64).unwrap_or(0), now);
        if ours.document.has_inlined(&id) {
            write_out(engine, ours, due).await?;
        } else {
            document.insert("due".to_owned(), Value::from(due));
            operations.push(Operation::replace(id, &document, Some(&etag))?);
        }
    }
    open::change_messages(engine, ours, release::in_parts(operations)).await
}

/// Writes the message out that the instance's document has_inlined.
async fn write_out(engine: &Engine, ours: &mut Ours, due: Millis) -> Result<(), StoreError> {
    let deadline = engine.deadline();
    loop {
        let mut next = ours.document.clone();
        let Some(message) = next.take_inlined() else { return Ok(()) };
        let message = Operation::upsert(&MessageDocument { due, ..message })?;
        let operations = [Operation::replace(instance_id(), &next, Some(&ours.etag))?, message];
        match engine.store.batch(&next.instance_id, &operations, deadline).await? {
            BatchOutcome::Committed(committed) => {
                (ours.document, ours.etag) = (next, committed.fence()?);
                return Ok(());
            }
            BatchOutcome::RolledBack(_) => ours.look_again(engine, deadline).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_put_off_by_its_age_within_bounds() {
        assert_eq!(later(1_000_000, 1_000_000), 1_001_000);
        assert_eq!(later(1_000_000, 1_010_000), 1_020_000);
        assert_eq!(later(0, 1_000_000), 1_060_000);
        assert_eq!(later(2_000_000, 1_000_000), 1_001_000, "a clock that is behind");
    }
}
