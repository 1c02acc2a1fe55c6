//! The account: connecting, opening a container, regions, outages and refusals.

mod connecting;
mod format;
mod identifiers;
mod opening;
mod outages;
mod regions;
