//! The store room against the local account, reached in process and over HTTP.

#![cfg(feature = "key_auth")]

mod batches;
mod fixture;
mod lost_answers;
mod opening;
mod physical;
mod points;
mod queries;
mod regions;
mod request_options;
mod statistics;
mod trouble;
