//! Which region takes writes, and which others have answered.
//!
//! An *authoritative* read decides something: whether a commit happened, which children an instance has. Only the write
//! region can answer it, because any other region may lag behind. A point read goes there as a batch of one read. A query
//! has no such form, so it excludes every other region by name. The SDK does not list the account's regions; it names the
//! region of each answer. So a query that another region answered is asked again without that region.

use azure_data_cosmos::{diagnostics::DiagnosticsContext, options::Region};
use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;

/// For so long after a write the write region is taken to be where that one went. A failover that this process has not met by a
/// write of its own would make it take the answers of the former write region for decisions.
const KNOWN_FOR: Duration = Duration::from_secs(10);

/// The regions that this process has met.
#[derive(Default)]
pub(super) struct Regions(Mutex<Met>);

#[derive(Default)]
struct Met {
    /// The region that took the last write or batch.
    write: Option<Region>,
    /// When that was.
    wrote_at: Option<Instant>,
    /// Regions that answered a query that had to go to the write region.
    others: Vec<Region>,
}

/// Where the answer to an authoritative query came from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The write region answered, or the SDK does not say which region did.
    Write,
    /// Another region answered: it is excluded from now on.
    Other,
    /// A region answered although it was excluded: the write region may have moved.
    Excluded,
}

impl Regions {
    /// Notes which region took a write or a batch.
    pub(super) fn wrote(&self, diagnostics: &DiagnosticsContext) {
        // The requests before the last one were turned away.
        if let Some(region) = diagnostics.requests().last().and_then(|request| request.region()) {
            self.with(|met| {
                met.wrote_at = Some(Instant::now());
                if met.write.as_ref() != Some(region) {
                    met.write = Some(region.clone());
                }
            });
        }
    }

    /// The name of the region that takes writes, once it is known.
    pub(super) fn write_region(&self) -> Option<String> {
        self.with(|met| met.write.as_ref().map(|region| region.display_name().to_string()))
    }

    /// Whether it is known where writes go now.
    pub(super) fn is_write_region_known(&self) -> bool {
        self.with(|met| met.wrote_at.is_some_and(|at| at.elapsed() < KNOWN_FOR))
    }

    /// The regions that an authoritative query must not go to.
    pub(super) fn excluded(&self) -> Vec<Region> {
        self.with(|met| met.others.iter().filter(|other| met.write.as_ref() != Some(other)).cloned().collect())
    }

    /// Judges the answer to an authoritative query.
    pub(super) fn origin(&self, diagnostics: &DiagnosticsContext) -> Origin {
        let requests = diagnostics.requests();
        let answered = requests.iter().filter(|request| request.status().is_success());
        let regions: Vec<&Region> = answered.filter_map(|request| request.region()).collect();
        self.with(|met| met.judge(&regions))
    }

    fn with<R>(&self, look: impl FnOnce(&mut Met) -> R) -> R {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Met {
    fn judge(&mut self, answered: &[&Region]) -> Origin {
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
        let mut met = Met { write: Some(east.clone()), ..Met::default() };
        assert_eq!(met.judge(&[&east]), Origin::Write);
        assert_eq!(met.judge(&[]), Origin::Write);
        assert_eq!(met.judge(&[&east, &west]), Origin::Other);
        assert_eq!(met.judge(&[&west]), Origin::Excluded);
        assert_eq!(met.others, [west]);
    }
}
