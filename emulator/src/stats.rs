//! Counters of the requests on the wire, by client and by kind of request.

use std::collections::BTreeMap;
use std::ops::{Add, AddAssign, Sub};
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;

use crate::answer::Answer;
use crate::request::{Outgoing, RequestKind};

/// The counters of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct KindStats {
    /// Requests that arrived, whatever their outcome.
    pub requests: u64,
    /// Request units, as charged in the answers: an estimate from published prices, not measured on Azure.
    pub charge: f64,
    /// Bytes of the bodies of the requests.
    pub request_bytes: u64,
    /// Bytes of the bodies of the answers.
    pub response_bytes: u64,
    /// Answers with a status of 400 or more.
    pub failures: u64,
}

impl AddAssign for KindStats {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.charge += other.charge;
        self.request_bytes += other.request_bytes;
        self.response_bytes += other.response_bytes;
        self.failures += other.failures;
    }
}

impl Sub for KindStats {
    type Output = Self;

    /// Saturates: a reset between two readings results in zeros.
    fn sub(self, earlier: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(earlier.requests),
            charge: (self.charge - earlier.charge).max(0.0),
            request_bytes: self.request_bytes.saturating_sub(earlier.request_bytes),
            response_bytes: self.response_bytes.saturating_sub(earlier.response_bytes),
            failures: self.failures.saturating_sub(earlier.failures),
        }
    }
}

/// A reading of the counters. The difference of two readings shows the requests between them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Stats {
    kinds: BTreeMap<RequestKind, KindStats>,
}

impl Stats {
    /// Returns the counters of this kind of request.
    pub fn of(&self, kind: RequestKind) -> KindStats {
        self.kinds.get(&kind).copied().unwrap_or_default()
    }

    /// Returns the sum of all kinds, including metadata requests.
    pub fn total(&self) -> KindStats {
        self.sum(|_| true)
    }

    /// Returns the sum of all kinds except metadata requests.
    pub fn items(&self) -> KindStats {
        self.sum(|kind| !kind.is_metadata())
    }

    /// Iterates over the kinds with at least one request, in order.
    pub fn iter(&self) -> impl Iterator<Item = (RequestKind, KindStats)> + '_ {
        self.kinds.iter().map(|(kind, stats)| (*kind, *stats))
    }

    fn sum(&self, wanted: impl Fn(RequestKind) -> bool) -> KindStats {
        let mut sum = KindStats::default();
        self.iter().filter(|(kind, _)| wanted(*kind)).for_each(|(_, stats)| sum += stats);
        sum
    }
}

impl Sub for Stats {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let difference = |(kind, stats): (RequestKind, KindStats)| (kind, stats - earlier.of(kind));
        Self { kinds: self.iter().map(difference).filter(|(_, stats)| *stats != KindStats::default()).collect() }
    }
}

impl Add for Stats {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        for (kind, stats) in other.iter() {
            *self.kinds.entry(kind).or_default() += stats;
        }
        self
    }
}

/// The live counters, by client and kind.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    clients: Mutex<BTreeMap<Option<Arc<str>>, Stats>>,
}

impl Counters {
    pub fn arrived(&self, kind: RequestKind, request: &Outgoing) {
        let arrived = KindStats { requests: 1, request_bytes: request.body.len() as u64, ..KindStats::default() };
        self.add(kind, &request.client, arrived);
    }

    pub fn answered(&self, kind: RequestKind, client: &Option<Arc<str>>, answer: &Answer) {
        let answered = KindStats {
            charge: answer.charge(),
            response_bytes: answer.body.len() as u64,
            failures: u64::from(!answer.is_success()),
            ..KindStats::default()
        };
        self.add(kind, client, answered);
    }

    pub fn all(&self) -> Stats {
        self.with(|clients| clients.values().cloned().fold(Stats::default(), Add::add))
    }

    pub fn of_client(&self, name: &str) -> Stats {
        self.with(|clients| clients.get(&Some(Arc::from(name))).cloned().unwrap_or_default())
    }

    pub fn reset(&self) {
        self.with(BTreeMap::clear);
    }

    fn add(&self, kind: RequestKind, client: &Option<Arc<str>>, stats: KindStats) {
        self.with(|clients| {
            *clients.entry(client.clone()).or_default().kinds.entry(kind).or_default() += stats;
        });
    }

    fn with<R>(&self, read: impl FnOnce(&mut BTreeMap<Option<Arc<str>>, Stats>) -> R) -> R {
        read(&mut self.clients.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
