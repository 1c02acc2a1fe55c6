//! An orchestration turn: claim, load, plan, commit or release.
//!
//! Invariants. `docs/design/turns.md` describes them with their crash points.
//!
//! - **Fence.** Every write of a turn is conditional on the instance document as this token last wrote it. A worker
//!   that takes the lock over changes that document. So a write of the former owner fails, whatever the clocks say.
//! - **One commit.** The batch that replaces the instance document is the commit of the turn. The document records the
//!   token of the last committed turn. After a lost answer the worker reads the outcome and never guesses it.
//! - **Proof.** A turn consumes only the messages that it ran on. The committing batch consumes each message under its
//!   ETag, also a message that the worker did not load under its claim.
//! - **History first.** A worker rolls a staged turn forward before it hands the instance out. So messages are never
//!   ahead of the history.

pub(crate) mod cache;
pub(crate) mod claim;
pub(crate) mod commit;
mod defer;
pub(crate) mod enqueue;
pub(crate) mod failure;
pub(crate) mod load;
pub(crate) mod open;
pub(crate) mod plan;
pub(crate) mod read;
pub(crate) mod reads;
pub(crate) mod release;
pub(crate) mod staging;
mod unknown;

use crate::{
    cosmos::Versioned,
    model::{DocumentId, InstanceDocument, KvDocument, MessageDocument, Millis, Partition},
    queue::{turn::TurnFilter, FetchTerms},
};
use azure_core::http::Etag;
use cache::Contents;
use std::collections::BTreeMap;

/// Bytes that a batch reserves for the instance document with an inlined message, and for that message if the batch
/// also writes it as a document of its own.
const RESERVED_BYTES: usize = 32 * 1024;

/// The id of the instance document, which is the same in every partition.
pub(crate) fn instance_id() -> DocumentId {
    InstanceDocument::document_id()
}

/// A turn that this process holds. The mutex serialises renewal, commit and release of one token.
pub(crate) struct TurnHandle {
    pub(crate) token: String,
    pub(crate) partition: Partition,
    pub(crate) state: tokio::sync::Mutex<TurnState>,
}

/// The dispatcher that holds a turn.
#[derive(Clone)]
pub(crate) struct Runner {
    /// How the dispatcher claims. A patient one fetches again when this turn has ended.
    pub(crate) terms: FetchTerms<TurnFilter>,
    /// The number of turns of this instance directly before this one that each kept the lock for the next turn.
    pub(crate) in_a_row: u32,
}

/// The state of a turn in progress.
pub(crate) struct TurnState {
    /// The instance document as this token last wrote it. The ETag is the fence.
    pub(crate) document: InstanceDocument,
    pub(crate) etag: Etag,
    pub(crate) until: Millis,
    pub(crate) runner: Runner,
    /// The messages of the turn, each with the ETag that it must have when the turn consumes it. Their attempts include
    /// this one.
    pub(crate) taken: Vec<Versioned<MessageDocument>>,
    /// The turn took all messages of the instance. If some of them were deferred, none is left.
    pub(crate) whole: bool,
    pub(crate) kv: BTreeMap<String, KvDocument>,
    /// History and values as loaded. `None` if they could not be read.
    pub(crate) contents: Option<Contents>,
    /// The orchestration's name when the turn was handed out, for an ack without a name.
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) phase: TurnPhase,
}

impl TurnState {
    /// Takes over the instance document as another writer left it under our lock. If that writer appended events, the
    /// loaded history is incomplete and is not cached.
    pub(crate) fn refresh(&mut self, found: Versioned<InstanceDocument>) {
        if found.document.current.events != self.document.current.events {
            self.contents = None;
        }
        self.document = found.document;
        self.etag = found.etag;
    }
}

/// The state of a turn's token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TurnPhase {
    /// The turn can be committed, renewed and released.
    Open,
    /// A commit failed for a retryable reason and may have happened. The provider commits nothing else with this token.
    Aborted,
    /// The turn is committed, released or lost.
    Closed,
}

/// The error for a token that is not, or no longer, valid.
pub(crate) fn lock_lost(operation: &str, why: &str) -> duroxide::providers::ProviderError {
    duroxide::providers::ProviderError::permanent(operation, format!("Invalid lock token: {why}"))
}
