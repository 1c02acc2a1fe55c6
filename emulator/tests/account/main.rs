//! The local account, in process and over HTTP, with the SDK's own client.

mod basics;
mod charges;
mod fixture;
mod http;
mod misbehaviours;
mod partitions;
mod program;
mod queries;
mod raw_http;
mod rules;
mod time_to_live;
