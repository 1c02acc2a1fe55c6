//! Messages that this version cannot read: of a kind that only a newer duroxide knows, or in a damaged document.
//!
//! Such a message stays in the queue for a version that can read it, and the turn runs on the others. The worker delays
//! it, so that polls of this version do not find it all the time. The delay is the age of the message, at most a
//! minute. No attempt is counted for it. A claim delays one batch of them at most, so that thousands neither hide the
//! other messages nor hold up their turn.
//!
//! Invariant: the batch that delays messages is conditional on the claim and on the ETag of each message. Their
//! documents change in `due` alone.
//!
//! Crash points: before the batch nothing has happened. After it the lock expires as after any claim.

use super::{claim::ClaimedInstance, instance_id, load::Loaded, open, release};
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

/// The shortest and the longest delay of a message.
const SHORTEST: Millis = 1_000;
const LONGEST: Millis = 60_000;
/// One claim delays at most this many messages: with the instance document they make one batch. The next claim handles
/// the rest.
const AT_ONCE: usize = operation::MAX_OPERATIONS - 2;

/// A message that this version cannot read.
pub(super) struct UnknownMessage {
    id: DocumentId,
    etag: Etag,
    /// The document without the properties that Cosmos DB adds.
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

/// The unreadable messages of a queue, at most as many as one claim delays.
#[derive(Default)]
pub(super) struct UnknownMessages {
    messages: Vec<UnknownMessage>,
    /// The queue has more of them.
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

/// Sorts a row into the messages or the unreadable ones. A row without an id or an ETag is not a document and is
/// skipped.
pub(super) fn take_in(row: Value, messages: &mut Vec<Versioned<MessageDocument>>, unknown: &mut UnknownMessages) {
    let Some(etag) = row.get("_etag").and_then(Value::as_str).map(|etag| Etag::from(etag.to_owned())) else { return };
    match read(&row) {
        Ok(document) => messages.push(Versioned { document, etag }),
        Err(error) => unknown.add(row, etag, &error),
    }
}

/// Reads a message, and checks that its item can be read too.
fn read(row: &Value) -> serde_json::Result<MessageDocument> {
    let document = MessageDocument::deserialize(row)?;
    serde_json::from_str::<WorkItem>(&document.item)?;
    Ok(document)
}

/// The work items of the loaded messages. Delays unreadable messages and removes them from the list.
pub(super) async fn set_aside(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
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
            // This has no limit: an inlined message needs a document of its own, or the commit would delete it.
            unknown.messages.extend(UnknownMessage::new(row, etag.clone(), error.to_string()));
            false
        }
    });
    delay(engine, claimed, unknown.messages).await?;
    Ok(items)
}

/// The new `due` of a message with this creation time.
fn later(created_at: Millis, now: Millis) -> Millis {
    now + now.saturating_sub(created_at).clamp(SHORTEST, LONGEST)
}

/// Delays messages.
async fn delay(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    messages: Vec<UnknownMessage>,
) -> Result<(), StoreError> {
    let (partition, now) = (claimed.document.instance_id.clone(), engine.now());
    let mut operations = Vec::with_capacity(messages.len());
    for UnknownMessage { id, etag, mut document, why } in messages {
        warn!(instance_id = partition.instance_id(), %id, why, "cannot read a message, leaving it for a newer version");
        let due = later(document.get("createdAt").and_then(Value::as_u64).unwrap_or(0), now);
        if claimed.document.has_inlined(&id) {
            extract_inlined(engine, claimed, due).await?;
        } else {
            document.insert("due".to_owned(), Value::from(due));
            operations.push(Operation::replace(id, &document, Some(&etag))?);
        }
    }
    open::change_messages(engine, claimed, release::in_parts(operations)).await
}

/// Writes the inlined message as a document of its own.
async fn extract_inlined(engine: &Engine, claimed: &mut ClaimedInstance, due: Millis) -> Result<(), StoreError> {
    let deadline = engine.deadline();
    loop {
        let mut next = claimed.document.clone();
        let Some(message) = next.take_inlined() else { return Ok(()) };
        let message = Operation::upsert(&MessageDocument { due, ..message })?;
        let operations = [Operation::replace(instance_id(), &next, Some(&claimed.etag))?, message];
        match engine.store.batch(&next.instance_id, &operations, deadline).await? {
            BatchOutcome::Committed(committed) => {
                (claimed.document, claimed.etag) = (next, committed.fence()?);
                return Ok(());
            }
            BatchOutcome::RolledBack(_) => claimed.refresh(engine, deadline).await?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_of_a_message_is_its_age_within_bounds() {
        assert_eq!(later(1_000_000, 1_000_000), 1_001_000);
        assert_eq!(later(1_000_000, 1_010_000), 1_020_000);
        assert_eq!(later(0, 1_000_000), 1_060_000);
        assert_eq!(later(2_000_000, 1_000_000), 1_001_000, "a clock that is behind");
    }
}
