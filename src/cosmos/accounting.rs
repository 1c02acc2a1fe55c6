//! What the provider has asked of the service, and what it cost.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The kinds of operation that are told apart in [`RequestStatistics`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum OperationKind {
    /// A document created.
    Create,
    /// A document read by its id.
    Read,
    /// A document replaced.
    Replace,
    /// A document created or replaced.
    Upsert,
    /// A document deleted.
    Delete,
    /// A query inside one logical partition.
    PartitionQuery,
    /// A query across partitions.
    ContainerQuery,
    /// A transactional batch.
    Batch,
}

impl OperationKind {
    /// Every kind, in the order in which they are shown.
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

/// What one kind of operation has cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct OperationStatistics {
    /// Requests sent, those that the SDK repeated by itself included.
    pub requests: u64,
    /// Request units charged.
    pub charge: f64,
    /// Answers that said "too many requests".
    pub throttled: u64,
    /// Attempts that failed in a way worth repeating, throttling included.
    pub retried: u64,
}

/// Requests and charge by kind of operation, as the provider counted them since it was made.
///
/// Metadata that the SDK fetches for itself (account, container, partition ranges) is not in it.
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

    /// Every kind with its figures.
    pub fn iter(&self) -> impl Iterator<Item = (OperationKind, OperationStatistics)> + '_ {
        self.by_kind.iter().copied()
    }

    /// All requests.
    pub fn requests(&self) -> u64 {
        self.by_kind.iter().map(|(_, s)| s.requests).sum()
    }

    /// All request units.
    pub fn charge(&self) -> f64 {
        self.by_kind.iter().map(|(_, s)| s.charge).sum()
    }
}

#[derive(Default)]
struct Counters {
    requests: AtomicU64,
    /// In thousandths of a request unit, since there are no atomic floats.
    charge: AtomicU64,
    throttled: AtomicU64,
    retried: AtomicU64,
}

/// Sums up requests and charges as they come in.
#[derive(Default)]
pub(crate) struct Accounting {
    counters: [Counters; OperationKind::ALL.len()],
}

impl Accounting {
    pub(crate) fn record(&self, kind: OperationKind, requests: usize, charge: f64) {
        crate::telemetry::operation(kind.as_str(), requests, charge);
        let counters = &self.counters[kind as usize];
        counters.requests.fetch_add(requests as u64, Relaxed);
        counters.charge.fetch_add((charge * 1_000.0).round() as u64, Relaxed);
    }

    pub(crate) fn record_retry(&self, kind: OperationKind, throttled: bool) {
        crate::telemetry::retry(kind.as_str(), throttled);
        let counters = &self.counters[kind as usize];
        counters.retried.fetch_add(1, Relaxed);
        counters.throttled.fetch_add(u64::from(throttled), Relaxed);
    }

    pub(crate) fn statistics(&self) -> RequestStatistics {
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
