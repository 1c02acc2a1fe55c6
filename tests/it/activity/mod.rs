//! Activities and their sessions.

mod cancellation;
mod completion;
mod lost_answers;
mod session_renewal;
mod sessions;
mod unreadable;
