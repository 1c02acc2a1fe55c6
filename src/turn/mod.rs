//! An orchestration turn: claimed, loaded, committed or released.
//!
//! Invariants, which SPEC.md explains with their crash points:
//!
//! - **Fence.** Every write of a turn is conditional on the instance's document as this token last wrote it. Whoever takes
//!   the lock over changes that document, so a former owner's write fails whatever the clocks say.
//! - **One commit.** The batch that replaces the instance's document is the turn's commit; the document remembers the token
//!   of the turn that it last committed, so a lost answer is read, not guessed.
//! - **Proof.** A turn consumes just the messages that it ran on: what it did not load under its claim is consumed under the
//!   ETag that it is remembered with, in the batch that commits.
//! - **History first.** A turn whose staged operations are not all applied is rolled forward before its instance is handed
//!   out, so that messages are never ahead of the history.

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

/// Room that a batch keeps for the instance's document, with a message in it, and for that message where it is written out.
const ROOM: usize = 32 * 1024;

/// The id of every instance's hot document.
pub(crate) fn instance_id() -> DocumentId {
    InstanceDocument::document_id()
}

/// A turn that this process holds. Renewal, commit and release of one token take turns at the state.
pub(crate) struct TurnHandle {
    pub(crate) token: String,
    pub(crate) partition: Partition,
    pub(crate) state: tokio::sync::Mutex<TurnState>,
}

/// Who has a turn.
#[derive(Clone)]
pub(crate) struct Runner {
    /// How it claims: it comes back for the next when this one has ended.
    pub(crate) terms: FetchTerms<TurnFilter>,
    /// How many turns of the instance before this one have kept the lock for the next.
    pub(crate) in_a_row: u32,
}

/// What is known of a turn that is under way.
pub(crate) struct TurnState {
    /// The instance's document as this token last wrote it, and its ETag: the fence.
    pub(crate) document: InstanceDocument,
    pub(crate) etag: Etag,
    pub(crate) until: Millis,
    pub(crate) runner: Runner,
    /// The messages that this fetch took, each as it must be when the turn consumes it; their attempts are those with this
    /// one.
    pub(crate) taken: Vec<Versioned<MessageDocument>>,
    /// They are all that there were: if any were deferred, none of them is left behind.
    pub(crate) whole: bool,
    pub(crate) kv: BTreeMap<String, KvDocument>,
    /// History and values as loaded; none where they could not be read.
    pub(crate) contents: Option<Contents>,
    /// What the item was called when it was handed out, for an ack that does not say.
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) phase: TurnPhase,
}

impl TurnState {
    /// Takes the instance's document as somebody else has left it, under our lock. Events that others have appended are not
    /// in the history that was loaded: it is not remembered.
    pub(crate) fn refresh(&mut self, found: Versioned<InstanceDocument>) {
        if found.document.events != self.document.events {
            self.contents = None;
        }
        self.document = found.document;
        self.etag = found.etag;
    }
}

/// How far a turn has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TurnPhase {
    /// It can be committed, renewed and released.
    Open,
    /// A commit was given up for a passing reason; it may have happened. Nothing else may be committed with this token.
    Aborted,
    /// Committed, released or lost.
    Closed,
}

/// The error for a token that is not, or no longer, good.
pub(crate) fn lock_lost(operation: &str, why: &str) -> duroxide::providers::ProviderError {
    duroxide::providers::ProviderError::permanent(operation, format!("Invalid lock token: {why}"))
}
