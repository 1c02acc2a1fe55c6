//! The local account, in process and over HTTP, with the SDK's own client.

mod basics;
mod charges;
mod http;
mod misbehaviours;
mod partitions;
mod program;
mod queries;
mod raw;
mod rules;
mod scene;
mod time_to_live;
