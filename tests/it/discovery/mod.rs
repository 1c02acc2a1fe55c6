//! How workers find work: membership, slots, wake-ups and polls.

mod dropped_fetches;
mod hidden_work;
mod membership;
mod settings;
mod wakeups;
mod worker;
