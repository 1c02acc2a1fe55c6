//! The write region, and the other regions that have answered.
//!
//! The provider decides by an *authoritative* read: whether a commit happened, which children an instance has. Only the
//! write region can answer it, because any other region may lag behind.
//!
//! - A point read goes there as a batch of one read.
//! - A query has no such form, so it excludes every other region by name. The SDK does not list the account's
//!   regions, but names the region of each answer. So the store repeats a query that another region answered, without
//!   that region.

use azure_data_cosmos::{diagnostics::DiagnosticsContext, options::Region};
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// The time after a write in which its region counts as the write region. After a failover, a process that does not
/// write would otherwise base decisions on answers of the former write region.
const KNOWN_FOR: Duration = Duration::from_secs(10);

/// The regions of the answers that this process has received.
#[derive(Default)]
pub(super) struct Regions(Mutex<KnownRegions>);

#[derive(Default)]
struct KnownRegions {
    /// The region that accepted the last write or batch.
    write: Option<Region>,
    /// The time of that write.
    wrote_at: Option<Instant>,
    /// Regions that answered an authoritative query and are not the write region.
    others: Vec<Region>,
}

/// The region of the answer to an authoritative query.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The write region answered, or the SDK does not name the region.
    Write,
    /// Another region answered. Later queries exclude it.
    Other,
    /// A region answered although it was excluded. The write region may have moved.
    Excluded,
}

impl Regions {
    /// Records the region that accepted a write or a batch.
    pub(super) fn wrote(&self, diagnostics: &DiagnosticsContext) {
        // Other regions refused the requests before the last one.
        if let Some(region) = diagnostics.requests().last().and_then(|request| request.region()) {
            self.with(|known| {
                known.wrote_at = Some(Instant::now());
                if known.write.as_ref() != Some(region) {
                    known.write = Some(region.clone());
                }
            });
        }
    }

    /// The name of the write region, if it is known.
    pub(super) fn write_region(&self) -> Option<String> {
        self.with(|known| known.write.as_ref().map(|region| region.display_name().to_string()))
    }

    /// Whether the current write region is known.
    pub(super) fn is_write_region_known(&self) -> bool {
        self.with(|known| known.wrote_at.is_some_and(|at| at.elapsed() < KNOWN_FOR))
    }

    /// The regions that an authoritative query excludes.
    pub(super) fn excluded(&self) -> Vec<Region> {
        self.with(|known| known.others.iter().filter(|other| known.write.as_ref() != Some(other)).cloned().collect())
    }

    /// Classifies the answer to an authoritative query.
    pub(super) fn origin(&self, diagnostics: &DiagnosticsContext) -> Origin {
        let requests = diagnostics.requests();
        let answered = requests.iter().filter(|request| request.status().is_success());
        let regions: Vec<&Region> = answered.filter_map(|request| request.region()).collect();
        self.with(|known| known.origin_of(&regions))
    }

    fn with<R>(&self, access: impl FnOnce(&mut KnownRegions) -> R) -> R {
        access(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl KnownRegions {
    fn origin_of(&mut self, answered: &[&Region]) -> Origin {
        let Some(other) = answered.iter().find(|region| self.write.as_ref() != Some(region)) else {
            return Origin::Write;
        };
        if self.others.contains(other) {
            return Origin::Excluded;
        }
        self.others.push((*other).clone());
        Origin::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_that_answers_in_place_of_the_write_region_is_excluded_once_and_reported_then() {
        let (east, west) = (Region::from("eastus"), Region::from("westus"));
        let mut known = KnownRegions { write: Some(east.clone()), ..KnownRegions::default() };
        assert_eq!(known.origin_of(&[&east]), Origin::Write);
        assert_eq!(known.origin_of(&[]), Origin::Write);
        assert_eq!(known.origin_of(&[&east, &west]), Origin::Other);
        assert_eq!(known.origin_of(&[&west]), Origin::Excluded);
        assert_eq!(known.others, [west]);
    }
}
