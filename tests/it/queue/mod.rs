//! Inline claims: the batch that creates work also claims it for a local dispatcher that waits.

mod dispatchers;
mod inline_claims;
mod inlined_messages;
mod retained_locks;
