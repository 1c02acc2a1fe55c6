//! Listing, inspecting, deleting and pruning.

pub(crate) mod delete;
mod erase;
pub(crate) mod inspect;
pub(crate) mod metrics;
mod plan;
pub(crate) mod prune;
pub(crate) mod retention;
pub(crate) mod shared;

pub(crate) use plan::deleted_among;

use crate::{
    model::{status, Deleting, InstanceDocument, Millis, Partition},
    store::Versioned,
};
use duroxide::providers::{DeleteInstanceResult, ProviderError};
use serde::{de::Error, Deserialize, Deserializer};
use serde_json::Value;
use std::collections::HashMap;

/// Instances by their ids, as somebody has seen them: a write that relies on one is conditional on its ETag.
type Documents = HashMap<String, Versioned<InstanceDocument>>;

/// A row of a query for instances.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct InstanceRow {
    pub(crate) instance_id: Partition,
    #[serde(default)]
    pub(crate) status: Option<String>,
    #[serde(default)]
    pub(crate) parent: Option<String>,
    #[serde(default)]
    pub(crate) completed_at: Option<Millis>,
    #[serde(default)]
    pub(crate) deleting: Option<Deleting>,
}

impl InstanceRow {
    fn of(document: &InstanceDocument) -> Self {
        Self {
            instance_id: document.instance_id.clone(),
            status: document.status.clone(),
            parent: document.parent.clone(),
            completed_at: document.completed_at,
            deleting: document.deleting.clone(),
        }
    }

    pub(crate) fn id(&self) -> Option<String> {
        self.instance_id.instance_id().map(ToOwned::to_owned)
    }

    pub(crate) fn is_terminal(&self) -> bool {
        self.status.as_deref().is_some_and(status::is_terminal)
    }
}

/// A row of a query for whole documents of instances.
struct WholeRow {
    row: InstanceRow,
    /// None where this version can't read it.
    document: Option<Versioned<InstanceDocument>>,
}

impl<'de> Deserialize<'de> for WholeRow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let whole = Value::deserialize(deserializer)?;
        let row = InstanceRow::deserialize(&whole).map_err(D::Error::custom)?;
        Ok(Self { row, document: Versioned::from_row(whole).ok() })
    }
}

fn add(result: &mut DeleteInstanceResult, more: DeleteInstanceResult) {
    result.instances_deleted += more.instances_deleted;
    result.executions_deleted += more.executions_deleted;
    result.events_deleted += more.events_deleted;
    result.queue_messages_deleted += more.queue_messages_deleted;
}

/// What a bulk operation has met. One failure does not stop the others; it is what the call ends with only where nothing at
/// all could be done.
#[derive(Default)]
struct Failures {
    first: Option<ProviderError>,
}

impl Failures {
    fn note(&mut self, instance: &str, error: ProviderError) {
        tracing::warn!(instance_id = instance, error = error.message, "a bulk operation leaves an instance out");
        self.first.get_or_insert(error);
    }

    fn unless<T>(self, something_done: bool, result: T) -> Result<T, ProviderError> {
        match self.first {
            Some(error) if !something_done => Err(error),
            _ => Ok(result),
        }
    }
}
