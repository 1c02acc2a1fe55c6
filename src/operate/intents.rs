//! Undelivered messages to other instances.

use crate::{
    cosmos::{queries, Freshness, Rows, StoreError, WriteOutcome},
    engine::Engine,
    model::{DocumentId, IntentDocument, Millis, Partition},
    outbox,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// An intent: a message of a committed turn to another instance.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Intent {
    /// The instance that sends it.
    pub instance: String,
    /// The id of the intent, within that instance.
    pub id: String,
    /// The instance that receives it.
    pub target: String,
    /// The kind of message, such as `SubOrchCompleted` or `StartOrchestration`.
    pub message: String,
    /// The time when the turn was committed, in milliseconds since 1970.
    pub created_at: u64,
    /// The number of deliveries that failed for a transient reason.
    pub attempts: u32,
    /// Whether the provider tries again.
    #[serde(flatten)]
    pub state: IntentState,
}

/// The state of an undelivered message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "camelCase")]
#[non_exhaustive]
pub enum IntentState {
    /// The next poll delivers it, or tries again after a pause if a delivery has failed before.
    Late,
    /// It can't be delivered, and the provider does not try again.
    Poisoned {
        /// The reason.
        reason: String,
    },
}

pub(crate) async fn late(engine: &Arc<Engine>) -> Result<Vec<Intent>, StoreError> {
    let statement = queries::LATE_INTENTS.statement().bind("@now", engine.now());
    let found: Rows<IntentRow> = engine.store.query_container(statement, engine.deadline()).await?;
    let mut intents: Vec<Intent> = found.readable().into_iter().map(Intent::of).collect();
    intents.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
    Ok(intents)
}

/// A row of the query.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct IntentRow {
    id: DocumentId,
    instance_id: Partition,
    target: Partition,
    created_at: Millis,
    #[serde(default)]
    retries: u32,
    #[serde(default)]
    poisoned: Option<String>,
    /// The beginning of the work item.
    #[serde(default)]
    item: String,
}

impl Intent {
    fn of(row: IntentRow) -> Self {
        let named = |partition: &Partition| partition.instance_id().unwrap_or_default().to_owned();
        // A work item is an object whose only property is named after its kind.
        let message =
            row.item.strip_prefix("{\"").and_then(|item| item.split_once('"')).map(|(kind, _)| kind.to_owned());
        Self {
            instance: named(&row.instance_id),
            id: row.id.to_string(),
            target: named(&row.target),
            message: message.unwrap_or_else(|| "an unreadable message".to_owned()),
            created_at: row.created_at,
            attempts: row.retries,
            state: row.poisoned.map_or(IntentState::Late, |reason| IntentState::Poisoned { reason }),
        }
    }
}

/// The partition and the document id of an intent. An invalid id has none.
fn locate(instance: &str, intent: &str) -> Option<(Partition, DocumentId)> {
    let id = DocumentId::try_from(intent.to_owned()).ok().filter(|id| id.as_str().starts_with("i:"))?;
    Some((Partition::instance(instance).ok()?, id))
}

pub(crate) async fn retry(engine: &Arc<Engine>, instance: &str, intent: &str) -> Result<bool, StoreError> {
    let Some((partition, id)) = locate(instance, intent) else { return Ok(false) };
    let deadline = engine.deadline();
    loop {
        let found = engine.store.read::<IntentDocument>(&partition, &id, Freshness::Authoritative, deadline).await?;
        let Some(found) = found else { return Ok(false) };
        let mut next = found.document;
        let now: Millis = engine.now();
        (next.due, next.poisoned, next.retries) = (Some(now), None, 0);
        let written = engine.store.replace(&partition, &id, &next, Some(&found.etag), deadline).await?;
        if let WriteOutcome::Done(_) = written {
            outbox::reconcile_soon(engine, None);
            return Ok(true);
        }
    }
}

pub(crate) async fn discard(engine: &Arc<Engine>, instance: &str, intent: &str) -> Result<bool, StoreError> {
    let Some((partition, id)) = locate(instance, intent) else { return Ok(false) };
    let deleted = engine.store.delete(&partition, &id, None, engine.deadline()).await?;
    Ok(matches!(deleted, WriteOutcome::Done(_)))
}
