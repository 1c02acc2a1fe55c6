//! The documents of the container, their ids, the clock and the slots. Nothing here does I/O or uses another module of
//! the crate.

pub(crate) mod clock;
pub(crate) mod documents;
mod ending;
pub(crate) mod event_set;
pub(crate) mod fingerprints;
pub(crate) mod fleet;
pub(crate) mod id;
mod inlined;
pub(crate) mod item;
mod lease;
pub(crate) mod operation;
pub(crate) mod partition;
pub(crate) mod randomness;
pub(crate) mod slot;
mod unknown;

pub use clock::Clock;
pub(crate) use clock::{Millis, Sequencer};
pub(crate) use documents::*;
pub(crate) use ending::Ending;
pub(crate) use event_set::EventSet;
pub(crate) use fingerprints::Fingerprints;
pub(crate) use fleet::{Capabilities, MemberDocument, Need, SharedResult, Tags, Versions, WakeupDocument};
pub(crate) use id::DocumentId;
pub(crate) use inlined::InlinedMessage;
pub use lease::{EqualShares, LeaseProvider, MemberPosition};
pub(crate) use operation::Operation;
pub(crate) use partition::Partition;
pub use randomness::Randomness;
pub use slot::{Slot, SlotRange, SLOTS};
pub(crate) use unknown::Unknown;
