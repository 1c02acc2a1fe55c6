//! Counts requests and request units by kind of operation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The kinds of operation that [`RequestStatistics`] distinguishes.
///
/// ```
/// use duroxide_cosmos::OperationKind;
///
/// let names: Vec<&str> = OperationKind::ALL.iter().map(|kind| kind.as_str()).collect();
/// assert_eq!(names[..3], ["create", "read", "replace"]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum OperationKind {
    /// Creates a document.
    Create,
    /// Reads a document by its id.
    Read,
    /// Replaces a document.
    Replace,
    /// Creates or replaces a document.
    Upsert,
    /// Deletes a document.
    Delete,
    /// Queries one logical partition.
    PartitionQuery,
    /// Queries several partitions.
    ContainerQuery,
    /// Sends a transactional batch.
    Batch,
}

impl OperationKind {
    /// Every kind, in display order.
    pub const ALL: [Self; 8] = [
        Self::Create,
        Self::Read,
        Self::Replace,
        Self::Upsert,
        Self::Delete,
        Self::PartitionQuery,
        Self::ContainerQuery,
        Self::Batch,
    ];

    /// Whether it is a query.
    pub(crate) fn is_query(self) -> bool {
        matches!(self, Self::PartitionQuery | Self::ContainerQuery)
    }

    /// A short name for logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Read => "read",
            Self::Replace => "replace",
            Self::Upsert => "upsert",
            Self::Delete => "delete",
            Self::PartitionQuery => "partition_query",
            Self::ContainerQuery => "container_query",
            Self::Batch => "batch",
        }
    }
}

/// The requests and the cost of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct OperationStatistics {
    /// Requests sent, including those that the SDK repeated by itself.
    pub requests: u64,
    /// Request units charged.
    pub charge: f64,
    /// Answers with status 429 (too many requests).
    pub throttled: u64,
    /// Attempts that failed transiently, including those that were throttled.
    pub retried: u64,
}

/// Requests and charge by kind of operation since the provider was created.
///
/// The figures leave out metadata that the SDK fetches for itself: account, container and partition ranges.
///
/// ```
/// use duroxide_cosmos::{OperationKind, RequestStatistics};
///
/// fn print(statistics: &RequestStatistics) {
///     let reads = statistics.of(OperationKind::Read);
///     println!("{} reads for {:.1} RU, of {:.1} RU in all", reads.requests, reads.charge, statistics.charge());
/// }
/// # print(&RequestStatistics::default());
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RequestStatistics {
    by_kind: Vec<(OperationKind, OperationStatistics)>,
}

impl RequestStatistics {
    /// The figures of one kind.
    pub fn of(&self, kind: OperationKind) -> OperationStatistics {
        self.by_kind.iter().find(|(k, _)| *k == kind).map(|(_, s)| *s).unwrap_or_default()
    }

    /// Iterates over every kind and its figures.
    pub fn iter(&self) -> impl Iterator<Item = (OperationKind, OperationStatistics)> + '_ {
        self.by_kind.iter().copied()
    }

    /// The number of all requests.
    pub fn requests(&self) -> u64 {
        self.by_kind.iter().map(|(_, s)| s.requests).sum()
    }

    /// The sum of all request units.
    pub fn charge(&self) -> f64 {
        self.by_kind.iter().map(|(_, s)| s.charge).sum()
    }
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    /// In thousandths of a request unit, because there are no atomic floats.
    charge: AtomicU64,
    throttled: AtomicU64,
    retried: AtomicU64,
}

/// Adds up requests and charges.
#[derive(Default)]
pub(super) struct Accounting {
    counters: [Counters; OperationKind::ALL.len()],
}

impl Accounting {
    pub(super) fn record(&self, kind: OperationKind, requests: usize, charge: f64) {
        crate::telemetry::operation(kind.as_str(), requests, charge);
        let counters = &self.counters[kind as usize];
        counters.requests.fetch_add(requests as u64, Relaxed);
        counters.charge.fetch_add((charge * 1_000.0).round() as u64, Relaxed);
    }

    pub(super) fn record_retry(&self, kind: OperationKind, throttled: bool) {
        crate::telemetry::retry(kind.as_str(), throttled);
        let counters = &self.counters[kind as usize];
        counters.retried.fetch_add(1, Relaxed);
        counters.throttled.fetch_add(u64::from(throttled), Relaxed);
    }

    pub(super) fn statistics(&self) -> RequestStatistics {
        let by_kind =
            OperationKind::ALL.iter().map(|&kind| (kind, self.counters[kind as usize].statistics())).collect();
        RequestStatistics { by_kind }
    }
}

impl Counters {
    fn statistics(&self) -> OperationStatistics {
        OperationStatistics {
            requests: self.requests.load(Relaxed),
            charge: self.charge.load(Relaxed) as f64 / 1_000.0,
            throttled: self.throttled.load(Relaxed),
            retried: self.retried.load(Relaxed),
        }
    }
}
