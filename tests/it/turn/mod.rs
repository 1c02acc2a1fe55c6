//! Turns: claiming, loading, committing and releasing them, and the messages that they consume.

mod claims;
mod crashes;
mod deferred_messages;
mod dropped_calls;
mod failures;
mod fencing;
mod history;
mod limits;
mod lost_answers;
mod queue_messages;
mod staged_parts;
mod stale_messages;
mod unknown_messages;
mod values;
