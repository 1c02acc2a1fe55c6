//! Checks queries that name a physical partition, as the standard gateway does.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use azure_core::http::headers::HeaderName;

use crate::answer::Answer;
use crate::names::ContainerName;
use crate::request::{header, Outgoing, PARTITION_RANGE};
use crate::service::{PartitionRange, Service};

const START: HeaderName = HeaderName::from_static("x-ms-start-epk");
const END: HeaderName = HeaderName::from_static("x-ms-end-epk");

/// The physical partitions that no longer exist because of a merge.
#[derive(Debug, Default)]
pub(crate) struct MergedRanges {
    ranges: Mutex<HashSet<(ContainerName, String)>>,
}

impl MergedRanges {
    /// Records two partitions that a merge has replaced.
    pub fn add(&self, container: &ContainerName, ids: [u32; 2]) {
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.extend(ids.map(|id| (container.clone(), id.to_string())));
    }

    /// Returns the gateway's refusal of a query, because of the partition that the query names.
    ///
    /// The emulator answers 410 for any partition that no longer exists. The service does so only after a split, and
    /// the SDK then looks up the new partitions. After a merge the service answers 400.
    pub async fn refusal(&self, service: &Service, request: &Outgoing) -> Option<Answer> {
        let id = header(&request.headers, &PARTITION_RANGE)?;
        let container = ContainerName::of(request)?;
        if self.contains(&container, id) {
            let message = format!("PartitionKeyRange with id '{id}' is invalid.");
            return Some(Answer::refusal(400, None, &message));
        }
        let (start, end) = (header(&request.headers, &START), header(&request.headers, &END));
        if start.is_none() && end.is_none() {
            return None;
        }
        let ranges = service.ranges(&container).await;
        let range = ranges.iter().find(|range| range.id == id)?;
        let is_whole = covers(range, start.unwrap_or_default(), end.unwrap_or("FF"));
        (!is_whole).then(|| Answer::refusal(400, None, "One of the input values is invalid."))
    }

    fn contains(&self, container: &ContainerName, id: &str) -> bool {
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        !ranges.is_empty() && ranges.contains(&(container.clone(), id.to_owned()))
    }
}

/// Whether a window of effective partition keys, in hexadecimal digits, contains the whole partition.
fn covers(range: &PartitionRange, start: &str, end: &str) -> bool {
    let [start, end, min, max] = [start, end, &range.min, &range.max].map(str::to_ascii_uppercase);
    start <= min && end >= max
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_window_around_the_whole_partition_covers_it() {
        let range = PartitionRange { id: "1".to_owned(), min: "1FFF".to_owned(), max: "3FFF".to_owned() };
        assert!(covers(&range, "1FFF", "3fff"));
        assert!(covers(&range, "", "FF"));
        assert!(!covers(&range, "2000", "3FFF"));
        assert!(!covers(&range, "", "3FF0"));
    }
}
