//! The local account, in process and over HTTP, with the SDK's own client.

mod basics;
mod http;
mod program;
mod queries;
mod raw;
mod rules;
mod scene;
