//! The soak: what worlds do in virtual time, for real and for long.
//!
//! The account is served over HTTP, workers are processes of their own that are killed, stopped and told to leave ([`crew`]),
//! the wire misbehaves as its control endpoint is told ([`faults`]), and clients keep having errands ([`traffic`]). What has
//! ended well is deleted after a while ([`tidy`]). When the time is over nothing bad happens any more: every errand must end,
//! nothing may be left under way, and the same [`audit`](crate::audit) as of a world looks at what is stored.
//!
//! Threads, processes and the network decide what happens when, so no two soaks are the same: the seed gives the same errands
//! and blows, not the same story.

pub mod control;
pub mod crew;
pub mod faults;
pub mod run;
pub mod site;
pub mod stage;
pub mod tally;
pub mod tidy;
pub mod traffic;
pub mod worker;
