//! Tests of the store on the local account, in process and over HTTP.

#![cfg(feature = "key_auth")]

mod batches;
mod errors;
mod fixture;
mod lost_answers;
mod opening;
mod physical;
mod points;
mod queries;
mod regions;
mod request_options;
mod statistics;
