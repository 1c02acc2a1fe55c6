//! Runs the CLI as a process against an account over HTTP.

mod account;
mod deletion;
mod doctor;
mod fixture;
mod instances;
mod lists;
mod pipes;
mod starts;
#[path = "../../../examples/common/workflows.rs"]
#[allow(dead_code)]
mod workflows;
