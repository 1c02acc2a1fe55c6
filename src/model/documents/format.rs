//! The document that records the format of a container.

use super::kind;
use crate::model::{DocumentId, Partition};
use serde::Serialize;

/// The format of the documents in a container.
///
/// The number increases with a change that older versions would misread. A field that older versions can ignore does
/// not increase it.
pub(crate) const FORMAT: u32 = 1;

/// The format of a container. A process reads it when it opens the container.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct FormatDocument {
    pub(crate) id: DocumentId,
    pub(crate) instance_id: Partition,
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) format: u32,
    /// The version of this crate that wrote the document, for information.
    pub(crate) written_by: String,
}

impl FormatDocument {
    pub(crate) fn document_id() -> DocumentId {
        DocumentId::new("format", &[])
    }

    pub(crate) fn partition() -> Partition {
        Partition::system("format")
    }

    /// The document of this version.
    pub(crate) fn new() -> Self {
        Self {
            id: Self::document_id(),
            instance_id: Self::partition(),
            kind: kind::FORMAT.to_owned(),
            format: FORMAT,
            written_by: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}
