//! The tests of the provider, by protocol. All of them are one program, since each program links all dependencies.

#[path = "../fixture/mod.rs"]
mod fixture;

mod activity;
mod cosmos;
mod discovery;
mod documents;
mod lifecycle;
mod operate;
mod outbox;
mod queue;
mod runtime;
mod turn;
