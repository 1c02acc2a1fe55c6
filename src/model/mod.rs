//! Documents and their names. Nothing here does I/O.

pub(crate) mod clock;
pub(crate) mod documents;
mod enclosed;
mod ending;
pub(crate) mod event_set;
pub(crate) mod fleet;
pub(crate) mod id;
pub(crate) mod item;
pub(crate) mod marks;
pub(crate) mod partition;
pub(crate) mod randomness;
pub(crate) mod slot;
#[cfg(test)]
mod sources;
mod unknown;

pub use clock::Clock;
pub(crate) use clock::{Millis, Sequencer};
pub(crate) use documents::*;
pub(crate) use enclosed::EnclosedMessage;
pub(crate) use ending::Ending;
pub(crate) use event_set::EventSet;
pub(crate) use fleet::{BellDocument, Kept, MemberDocument, Need, Stand, Tags, Versions};
pub(crate) use id::DocumentId;
pub(crate) use marks::Marks;
pub(crate) use partition::Partition;
pub use randomness::Randomness;
pub use slot::{Slot, SlotRange, SLOTS};
pub(crate) use unknown::Unknown;
