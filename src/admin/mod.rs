//! Listing, inspecting, deleting and pruning.

pub(crate) mod delete;
pub(crate) mod inspect;
pub(crate) mod metrics;
pub(crate) mod prune;

use crate::model::{status, Deleting, Millis, Partition};
use serde::Deserialize;

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
    pub(crate) fn id(&self) -> Option<String> {
        self.instance_id.instance_id().map(ToOwned::to_owned)
    }

    pub(crate) fn is_terminal(&self) -> bool {
        self.status.as_deref().is_some_and(status::is_terminal)
    }
}
