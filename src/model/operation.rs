//! One operation of a transactional batch, and the limits that Cosmos DB sets on documents and batches.

use super::DocumentId;
use azure_core::http::Etag;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Cosmos DB's limit for the operations of a batch.
pub(crate) const MAX_OPERATIONS: usize = 100;
/// The largest size of a document or a batch, in bytes. Cosmos DB's limit is 2 MB. The rest is room for additions of
/// Cosmos DB and the SDK: system properties, status codes, commas.
pub(crate) const MAX_BYTES: usize = 2 * 1024 * 1024 - 64 * 1024;
/// The largest document. It must also fit when it is staged inside another document, next to the operation that fences
/// it.
pub(crate) const MAX_DOCUMENT_BYTES: usize = MAX_BYTES - 16 * 1024;

/// One operation of a batch. It can be stored, for a turn that does not fit one batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "camelCase")]
pub(crate) enum Operation {
    /// Fails with 409 if the document exists.
    Create { document: Value },
    /// Creates or replaces the document.
    Upsert { document: Value },
    /// Fails with 404 if the document is missing, and with 412 if its ETag is not `if_match`.
    Replace { id: DocumentId, document: Value, if_match: Option<String> },
    /// Fails with 404 if the document is missing, and with 412 if its ETag is not `if_match`.
    Delete { id: DocumentId, if_match: Option<String> },
}

impl Operation {
    /// An operation that creates `document`.
    pub(crate) fn create(document: &impl Serialize) -> Result<Self, serde_json::Error> {
        Ok(Self::Create { document: serde_json::to_value(document)? })
    }

    /// An operation that creates or replaces `document`.
    pub(crate) fn upsert(document: &impl Serialize) -> Result<Self, serde_json::Error> {
        Ok(Self::Upsert { document: serde_json::to_value(document)? })
    }

    /// An operation that replaces a document, if its ETag is `if_match`.
    pub(crate) fn replace(
        id: DocumentId,
        document: &impl Serialize,
        if_match: Option<&Etag>,
    ) -> Result<Self, serde_json::Error> {
        let if_match = if_match.map(ToString::to_string);
        Ok(Self::Replace { id, document: serde_json::to_value(document)?, if_match })
    }

    /// An operation that deletes a document, if its ETag is `if_match`.
    pub(crate) fn delete(id: DocumentId, if_match: Option<&Etag>) -> Self {
        Self::Delete { id, if_match: if_match.map(ToString::to_string) }
    }

    /// The bytes that this operation adds to a batch. Cosmos DB counts ids and conditions as well as documents.
    pub(crate) fn size(&self) -> usize {
        // The field names around the document, with quotes and commas. The quotes of an ETag are escaped.
        const ENVELOPE: usize = 96;
        let document = match self {
            Self::Create { document } | Self::Upsert { document } | Self::Replace { document, .. } => size_of(document),
            Self::Delete { .. } => 0,
        };
        let (id, condition) = match self {
            Self::Create { .. } | Self::Upsert { .. } => (0, None),
            Self::Replace { id, if_match, .. } | Self::Delete { id, if_match } => {
                (id.as_str().len(), if_match.as_ref())
            }
        };
        document + id + condition.map_or(0, String::len) + ENVELOPE
    }

    /// The id of the document that this operation writes.
    pub(crate) fn document_id(&self) -> &str {
        match self {
            Self::Create { document } | Self::Upsert { document } => {
                document.get("id").and_then(Value::as_str).unwrap_or("a document without id")
            }
            Self::Replace { id, .. } | Self::Delete { id, .. } => id.as_str(),
        }
    }
}

/// The size of a document, or of a text in one, as JSON. Serialising into a counter needs no memory.
pub(crate) fn size_of(sent: &impl Serialize) -> usize {
    let mut counter = ByteCounter(0);
    // Values and texts always serialise, and `ByteCounter` accepts every byte.
    let _ = serde_json::to_writer(&mut counter, sent);
    counter.0
}

struct ByteCounter(usize);

impl std::io::Write for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
