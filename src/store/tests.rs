//! The store room against the local account, reached in process and over HTTP.

#![cfg(feature = "key_auth")]

mod batches;
mod lost_answers;
mod manner;
mod opening;
mod physical;
mod points;
mod queries;
mod regions;
mod scene;
mod statistics;
mod trouble;
