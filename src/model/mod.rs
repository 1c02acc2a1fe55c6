//! Documents and their names. Nothing here does I/O.

pub(crate) mod id;
pub(crate) mod partition;

pub(crate) use id::DocumentId;
pub(crate) use partition::Partition;
