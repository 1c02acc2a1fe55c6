//! The patterns that duroxide's guide describes, end to end: its `Runtime` and `Client` on a local account.
//!
//! Every test looks at what an orchestration returned and at what is stored of it: [`scene::Scene::history`] audits each
//! history that it reads, so that an event which is there twice, or not at all, fails any test.

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
mod scene;
mod sequence;
mod status;
mod versions;
