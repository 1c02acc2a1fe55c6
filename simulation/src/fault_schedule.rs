//! The fault schedule: delays and faults of requests on the wire.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest};

use crate::oracle::Oracle;
use crate::rng::SeededRng;
use crate::transcript::Transcript;
use crate::virtual_time;

/// A period in which requests meet one kind of fault.
#[derive(Clone, Debug)]
pub struct FaultPeriod {
    /// The first moment of the period.
    pub from: Duration,
    /// The end of the period.
    pub until: Duration,
    /// The client whose requests meet the fault. `None`: all clients.
    pub client: Option<String>,
    /// The logical partition whose requests meet the fault. `None`: all partitions.
    pub partition: Option<String>,
    /// The fault.
    pub kind: FaultKind,
}

/// The kinds of faults that last for a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Most requests are throttled.
    Throttling,
    /// No request arrives.
    Unreachable,
    /// Requests arrive and no answer comes back.
    Silent,
    /// Every request takes long.
    Slow,
    /// The service refuses every request.
    Unavailable,
}

/// The settings of a fault schedule.
#[derive(Clone, Debug)]
pub struct FaultSettings {
    /// The longest time of a request without a fault, in milliseconds.
    pub latency: u64,
    /// The number of requests in a thousand that meet a fault of their own.
    pub per_mille: u64,
    /// The longest delay of a single request or answer, in milliseconds.
    pub longest_delay: u64,
    /// Periods of faults.
    pub periods: Vec<FaultPeriod>,
    /// Whether requests of clients meet no fault. A client that repeats a start after a lost answer starts two
    /// instances if the first one is deleted before the second start arrives.
    pub spares_clients: bool,
}

/// The beginning of the names of clients on the wire.
pub const CLIENT: &str = "client";

/// Draws the delay or the fault of each request of a run.
pub struct FaultSchedule {
    settings: FaultSettings,
    rng: Mutex<SeededRng>,
    transcript: Arc<Transcript>,
    oracle: Arc<Oracle>,
    faults_ended: AtomicBool,
}

impl FaultSchedule {
    /// A schedule with these settings.
    pub fn new(settings: FaultSettings, rng: SeededRng, transcript: Arc<Transcript>, oracle: Arc<Oracle>) -> Self {
        Self { settings, rng: Mutex::new(rng), transcript, oracle, faults_ended: AtomicBool::new(false) }
    }

    /// Ends all faults. Requests still take time.
    pub fn end_faults(&self) {
        self.faults_ended.store(true, Ordering::Relaxed);
    }

    /// Draws the delay or the fault of a request.
    pub fn action_for(&self, request: &WireRequest<'_>) -> Option<WireAction> {
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let latency = Duration::from_millis(rng.mostly_small(1..=self.settings.latency));
        let is_spared = self.settings.spares_clients && request.client.is_some_and(|name| name.starts_with(CLIENT));
        if is_spared || self.faults_ended.load(Ordering::Relaxed) {
            return Some(WireAction::Delay(latency));
        }
        let fault = self.active_period(request).and_then(|kind| period_fault(&mut rng, kind));
        let fault = fault.or_else(|| {
            let is_hit = rng.among(1..=1_000) <= self.settings.per_mille;
            is_hit.then(|| single_fault(&mut rng, request, self.settings.longest_delay))
        });
        let Some(fault) = fault else {
            return Some(WireAction::Delay(latency));
        };
        self.report(request, &fault);
        Some(fault)
    }

    /// Writes the fault to the transcript and reports it to the oracle, because it may disturb session renewals.
    fn report(&self, request: &WireRequest<'_>, fault: &WireAction) {
        let (client, partition) = (request.client.unwrap_or("?"), partition(request));
        let event = format!("#{} {} meets {}", request.sequence, request.kind, short(fault));
        self.transcript.record(client, partition.as_deref(), event);
        let lasts = match request.kind {
            _ if partition.is_some() => Some(Duration::ZERO),
            RequestKind::Query => reads_sessions(request).then_some(Duration::ZERO),
            // All requests of a client may wait for the partition map.
            _ => Some(Duration::from_millis(self.settings.longest_delay)),
        };
        lasts.into_iter().for_each(|lasts| self.oracle.sessions.fault_met(client, partition.clone(), lasts));
    }

    fn active_period(&self, request: &WireRequest<'_>) -> Option<FaultKind> {
        let now = virtual_time::now();
        let is_active = |period: &&FaultPeriod| {
            let has_client = period.client.as_deref().is_none_or(|client| is_incarnation_of(request.client, client));
            let has_partition = period.partition.is_none() || period.partition == partition(request);
            has_client && has_partition && period.from <= now && now < period.until
        };
        self.settings.periods.iter().find(is_active).map(|period| period.kind)
    }
}

/// Whether a client's name is that of this worker, in any incarnation.
pub fn is_incarnation_of(client: Option<&str>, worker: &str) -> bool {
    client.and_then(|client| client.split('#').next()) == Some(worker)
}

/// Whether a query reads sessions.
fn reads_sessions(request: &WireRequest<'_>) -> bool {
    String::from_utf8_lossy(request.body).contains("'session'")
}

/// The logical partition of a request.
pub fn partition(request: &WireRequest<'_>) -> Option<String> {
    let header = request.partition_key?;
    serde_json::from_str::<Vec<String>>(header).ok()?.pop()
}

/// Draws the fault of a request within a period.
fn period_fault(rng: &mut SeededRng, kind: FaultKind) -> Option<WireAction> {
    match kind {
        FaultKind::Throttling if rng.chance(0.6) => Some(throttled(rng)),
        FaultKind::Throttling => None,
        FaultKind::Unreachable => Some(WireAction::FailConnection),
        FaultKind::Silent => Some(WireAction::LoseAnswer),
        FaultKind::Slow => Some(WireAction::Delay(Duration::from_millis(rng.among(200..=1_500)))),
        FaultKind::Unavailable => Some(refused(503, None)),
    }
}

fn throttled(rng: &mut SeededRng) -> WireAction {
    let retry_after = Some(Duration::from_millis(rng.among(1..=200)));
    WireAction::Refuse { status: 429, substatus: Some(3200), retry_after }
}

fn refused(status: u16, substatus: Option<u32>) -> WireAction {
    WireAction::Refuse { status, substatus, retry_after: None }
}

/// Draws a fault that meets one request only.
fn single_fault(rng: &mut SeededRng, request: &WireRequest<'_>, longest: u64) -> WireAction {
    let is_write = matches!(
        request.kind,
        RequestKind::Create | RequestKind::Upsert | RequestKind::Replace | RequestKind::Delete | RequestKind::Batch
    );
    match rng.among(0..=19) {
        0..=4 if is_write => WireAction::LoseAnswer,
        5 | 6 => WireAction::Delay(Duration::from_millis(rng.mostly_small(10..=longest))),
        7..=9 => WireAction::DelayAnswer(Duration::from_millis(rng.mostly_small(10..=longest))),
        10 | 11 => throttled(rng),
        12 => refused(449, None),
        13 if request.kind == RequestKind::Batch => {
            let operations = request.json().and_then(|body| body.as_array().map(Vec::len)).unwrap_or(1);
            let index = usize::try_from(rng.among(0..=operations.max(1) as u64 - 1)).unwrap_or(0);
            WireAction::RefuseBatchOperation { index, status: *rng.pick(&[429, 449]), substatus: None }
        }
        14 => refused(*rng.pick(&[408, 500, 502, 503, 504]), None),
        15 => refused(410, Some(*rng.pick(&[1002, 1007, 1008]))),
        16 if is_write => refused(403, Some(3)),
        16 => refused(404, Some(1002)),
        17 => WireAction::FailConnection,
        _ if is_write => WireAction::LoseAnswer,
        _ => refused(503, None),
    }
}

fn short(action: &WireAction) -> String {
    match action {
        WireAction::Refuse { status, substatus: Some(substatus), .. } => format!("{status}/{substatus}"),
        WireAction::Refuse { status, .. } => status.to_string(),
        other => format!("{other:?}"),
    }
}
