//! The soak: the workload and the faults of a simulation run with real processes, real time and HTTP, for minutes or
//! hours.
//!
//! - An account is served over HTTP ([`served_account`]).
//! - Workers are processes that are killed, stopped and shut down ([`worker_processes`]).
//! - The control endpoint of the account sets faults on the wire ([`faults`]).
//! - Clients run workload items ([`traffic`]).
//! - A clean-up worker audits and deletes ended instances ([`clean_up`]).
//!
//! After the given time no fault happens any more. Then every workload item must end and no operation may stay in
//! progress. The same [`audit`](crate::audit) as that of a run checks the stored documents.
//!
//! Threads, processes and the network decide the order of events, so no two soaks are the same. A seed gives the same
//! workload items and faults, not the same transcript.

pub mod clean_up;
pub mod control;
pub mod faults;
pub mod run;
pub mod served_account;
pub mod state;
pub mod summary;
pub mod traffic;
pub mod worker;
pub mod worker_processes;
