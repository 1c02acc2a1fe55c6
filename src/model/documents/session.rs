//! Sessions and their owners.

use super::kind;
use crate::model::{DocumentId, Millis, Partition, Unknown};
use azure_core::http::Etag;
use serde::{Deserialize, Serialize};

/// A session and its owner. It has a partition of its own, since several instances share a session.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SessionDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) session_id: String,
    pub(crate) owner: String,
    pub(crate) locked_until: Millis,
    pub(crate) last_activity: Millis,
    #[serde(rename = "_etag", default, skip_serializing)]
    pub(crate) etag: Option<Etag>,
    /// Fields of a newer version.
    #[serde(flatten)]
    pub(crate) unknown: Unknown,
}

impl SessionDocument {
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("session", &[])
    }

    pub(crate) fn new(session: &str, owner: &str, now: Millis, locked_until: Millis) -> Self {
        Self {
            id: Self::document_id(),
            instance_id: Partition::session(session),
            kind: kind::SESSION.to_owned(),
            session_id: session.to_owned(),
            owner: owner.to_owned(),
            locked_until,
            last_activity: now,
            etag: None,
            unknown: Unknown::default(),
        }
    }
}
