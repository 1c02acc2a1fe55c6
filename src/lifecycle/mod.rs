//! Deletion, pruning, retention, recovery of work that was left half done, and shutdown.

pub(crate) mod counters;
pub(crate) mod delete;
mod erase;
mod plan;
pub(crate) mod prune;
pub(crate) mod recovery;
pub(crate) mod retention;
pub(crate) mod service_time;
pub(crate) mod shutdown;
pub(crate) mod trees;

use crate::{
    cosmos::{Deadline, StoreError, Unreadable, Versioned},
    engine::{self, Engine},
    model::{status, Deleting, InstanceDocument, Millis, Partition},
};
use async_trait::async_trait;
use duroxide::providers::{DeleteInstanceResult, ProviderError};
use serde::Deserialize;
use serde_json::Value;
use std::{collections::HashMap, sync::Arc};

/// The duties that the protocols leave to this layer.
pub(crate) struct Duties;

#[async_trait]
impl engine::Lifecycle for Duties {
    async fn recover_deletion(
        &self,
        engine: &Arc<Engine>,
        document: &InstanceDocument,
        deadline: Deadline,
    ) -> Result<bool, StoreError> {
        recovery::recover(engine, document, plan::UNDO_AFTER, deadline).await
    }

    async fn is_deleted(
        &self,
        engine: &Arc<Engine>,
        document: &InstanceDocument,
        deadline: Deadline,
    ) -> Result<bool, StoreError> {
        recovery::is_deleted(engine, document, deadline).await
    }

    fn prune_soon(&self, engine: &Arc<Engine>, partition: &Partition, execution: u64) {
        retention::prune_soon(engine, partition, execution);
    }

    fn apply_retention_soon(&self, engine: &Arc<Engine>) {
        retention::soon(engine);
    }
}

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
    #[serde(flatten)]
    incarnation: Incarnation,
}

/// Tells an instance from others of the same name, and whether an execution of it has ended since.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub(crate) struct Incarnation {
    incarnation: String,
    epoch: u64,
}

impl Incarnation {
    fn of(document: &InstanceDocument) -> Self {
        Self { incarnation: document.incarnation.clone(), epoch: document.epoch }
    }
}

impl InstanceRow {
    fn of(document: &InstanceDocument) -> Self {
        Self {
            instance_id: document.instance_id.clone(),
            status: document.status.clone(),
            parent: document.parent.clone(),
            completed_at: document.completed_at,
            deleting: document.deleting.clone(),
            incarnation: Incarnation::of(document),
        }
    }

    /// As much of an instance as is known where its document can't be read: it is there, and nothing may be decided about it.
    fn unreadable(unreadable: &Unreadable) -> Option<Self> {
        Some(Self {
            instance_id: serde_json::from_value(unreadable.row.get("instanceId")?.clone()).ok()?,
            status: Some("unreadable".to_owned()),
            parent: unreadable.row.get("parent").and_then(Value::as_str).map(ToOwned::to_owned),
            completed_at: None,
            deleting: None,
            incarnation: Incarnation::default(),
        })
    }

    pub(crate) fn id(&self) -> Option<String> {
        self.instance_id.instance_id().map(ToOwned::to_owned)
    }

    fn has_ended(&self) -> bool {
        self.status.as_deref().is_some_and(status::instance_has_ended)
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
