//! Deletion, pruning, retention, recovery of unfinished deletions, and shutdown.

pub(crate) mod counters;
pub(crate) mod delete;
pub(crate) mod delete_bulk;
mod delete_set;
mod erase;
mod finish;
mod plan;
mod prepare;
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

/// The tasks that the protocols delegate to this layer.
pub(crate) struct LifecycleTasks;

#[async_trait]
impl engine::Lifecycle for LifecycleTasks {
    async fn recover_deletion(
        &self,
        engine: &Arc<Engine>,
        document: &InstanceDocument,
        deadline: Deadline,
    ) -> Result<bool, StoreError> {
        recovery::recover(engine, document, plan::ABORT_AFTER, deadline).await
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
        retention::apply_soon(engine);
    }
}

/// Instance documents by instance id, as they were read. A write that relies on one is conditional on its ETag.
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

/// The identity of an instance among all instances with its id, and the number of its executions that have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(default)]
pub(crate) struct Incarnation {
    incarnation: String,
    epoch: u64,
}

impl Incarnation {
    fn of(document: &InstanceDocument) -> Self {
        Self { incarnation: document.origin.incarnation.clone(), epoch: document.commit.epoch }
    }
}

impl InstanceRow {
    fn of(document: &InstanceDocument) -> Self {
        Self {
            instance_id: document.instance_id.clone(),
            status: document.current.status.clone(),
            parent: document.origin.parent.clone(),
            completed_at: document.current.completed_at,
            deleting: document.removal.deleting.clone(),
            incarnation: Incarnation::of(document),
        }
    }

    /// A row for an instance whose document can't be read. The instance exists, and no decision about it is possible.
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

/// The failures of a bulk operation. A failure does not stop the other instances. The call returns it only if nothing
/// at all could be done.
#[derive(Default)]
struct Failures {
    first: Option<ProviderError>,
}

impl Failures {
    fn record(&mut self, instance: &str, error: ProviderError) {
        tracing::warn!(
            instance_id = instance,
            error = error.message,
            "bulk operation failed for an instance and continues with the others"
        );
        self.first.get_or_insert(error);
    }

    fn into_result<T>(self, something_done: bool, result: T) -> Result<T, ProviderError> {
        match self.first {
            Some(error) if !something_done => Err(error),
            _ => Ok(result),
        }
    }
}
