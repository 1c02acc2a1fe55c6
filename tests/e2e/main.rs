//! The patterns that duroxide's guide describes, end to end: its `Runtime` and `Client` on a local account.
//!
//! Every test checks the output of an orchestration and its stored history. [`fixture::process::Process::history`]
//! audits each history that it reads: a missing or repeated event fails any test.

#[path = "../fixture/mod.rs"]
mod fixture;

mod admin;
mod cancellation;
mod children;
mod continue_as_new;
mod events;
mod failures;
mod kv;
mod races;
mod restart;
mod routing;
mod sequence;
mod status;
mod versions;
