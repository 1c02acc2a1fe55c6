//! What the wire does to requests: seldom nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest};

use crate::dice::Dice;
use crate::ledger::Ledger;
use crate::seams;
use crate::story::Story;

/// A time in which something happens to everybody, or to one.
#[derive(Clone, Debug)]
pub struct Front {
    /// When it begins.
    pub from: Duration,
    /// When it is over.
    pub until: Duration,
    /// Whose requests it is about; everybody's where there is none.
    pub client: Option<String>,
    /// Which logical partition it is about; all where there is none.
    pub partition: Option<String>,
    /// What it is.
    pub what: Trouble,
}

/// Kinds of weather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Most requests are throttled.
    Throttling,
    /// No request arrives.
    Unreachable,
    /// Requests arrive and no answer comes back.
    Silent,
    /// Every request takes long.
    Slow,
    /// The service refuses.
    Unavailable,
}

/// What the weather is like in a world.
#[derive(Clone, Debug)]
pub struct Climate {
    /// The usual time of a request in milliseconds, at most.
    pub latency: u64,
    /// How many requests in a thousand meet trouble of their own.
    pub per_mille: u64,
    /// The longest that a single request or answer is held.
    pub longest_delay: u64,
    /// Times of trouble.
    pub fronts: Vec<Front>,
    /// Whether the clients' own requests are spared. A start that a client sends twice is two starts, where the first instance
    /// may be deleted before the second start arrives.
    pub spares_clients: bool,
}

/// How the names of clients on the wire begin.
pub const CLIENT: &str = "client";

/// The weather of a world.
pub struct Weather {
    climate: Climate,
    dice: Mutex<Dice>,
    story: Arc<Story>,
    ledger: Arc<Ledger>,
    calm: AtomicBool,
}

impl Weather {
    /// Weather of this climate.
    pub fn new(climate: Climate, dice: Dice, story: Arc<Story>, ledger: Arc<Ledger>) -> Self {
        Self { climate, dice: Mutex::new(dice), story, ledger, calm: AtomicBool::new(false) }
    }

    /// From here on nothing bad happens.
    pub fn calm_down(&self) {
        self.calm.store(true, Ordering::Relaxed);
    }

    /// What happens to a request.
    pub fn meets(&self, request: &WireRequest<'_>) -> Option<WireAction> {
        let mut dice = self.dice.lock().unwrap_or_else(PoisonError::into_inner);
        let usual = Duration::from_millis(dice.mostly_small(1..=self.climate.latency));
        let is_spared = self.climate.spares_clients && request.client.is_some_and(|name| name.starts_with(CLIENT));
        if is_spared || self.calm.load(Ordering::Relaxed) {
            return Some(WireAction::Delay(usual));
        }
        let trouble = self.front_over(request).and_then(|what| in_front(&mut dice, what));
        let trouble = trouble.or_else(|| {
            let unlucky = dice.among(1..=1_000) <= self.climate.per_mille;
            unlucky.then(|| alone(&mut dice, request, self.climate.longest_delay))
        });
        let Some(trouble) = trouble else {
            return Some(WireAction::Delay(usual));
        };
        let (client, partition) = (request.client.unwrap_or("?"), partition(request));
        let what = format!("#{} {} meets {}", request.sequence, request.kind, short(&trouble));
        self.story.tell(client, partition.as_deref(), what);
        let lasts = match request.kind {
            // All requests of a client may wait for the partition map.
            _ if partition.is_some() => Some(Duration::ZERO),
            RequestKind::Query => asks_for_sessions(request).then_some(Duration::ZERO),
            _ => Some(Duration::from_millis(self.climate.longest_delay)),
        };
        lasts.into_iter().for_each(|lasts| self.ledger.sessions.met_trouble(client, partition.clone(), lasts));
        Some(trouble)
    }

    fn front_over(&self, request: &WireRequest<'_>) -> Option<Trouble> {
        let now = seams::now();
        let over = |front: &&Front| {
            let mine = front.client.as_deref().is_none_or(|client| is_of(request.client, client));
            let here = front.partition.is_none() || front.partition == partition(request);
            mine && here && front.from <= now && now < front.until
        };
        self.climate.fronts.iter().find(over).map(|front| front.what)
    }
}

/// Whether a client's name is that of this worker, in whatever life.
pub fn is_of(client: Option<&str>, worker: &str) -> bool {
    client.and_then(|client| client.split('#').next()) == Some(worker)
}

/// Whether a query asks for sessions.
fn asks_for_sessions(request: &WireRequest<'_>) -> bool {
    String::from_utf8_lossy(request.body).contains("'session'")
}

/// The logical partition that a request is about.
pub fn partition(request: &WireRequest<'_>) -> Option<String> {
    let header = request.partition_key?;
    serde_json::from_str::<Vec<String>>(header).ok()?.pop()
}

fn in_front(dice: &mut Dice, what: Trouble) -> Option<WireAction> {
    match what {
        Trouble::Throttling if dice.chance(0.6) => Some(throttled(dice)),
        Trouble::Throttling => None,
        Trouble::Unreachable => Some(WireAction::FailConnection),
        Trouble::Silent => Some(WireAction::LoseAnswer),
        Trouble::Slow => Some(WireAction::Delay(Duration::from_millis(dice.among(200..=1_500)))),
        Trouble::Unavailable => Some(refused(503, None)),
    }
}

fn throttled(dice: &mut Dice) -> WireAction {
    let retry_after = Some(Duration::from_millis(dice.among(1..=200)));
    WireAction::Refuse { status: 429, substatus: Some(3200), retry_after }
}

fn refused(status: u16, substatus: Option<u32>) -> WireAction {
    WireAction::Refuse { status, substatus, retry_after: None }
}

/// What happens to one request only.
fn alone(dice: &mut Dice, request: &WireRequest<'_>, longest: u64) -> WireAction {
    let is_write = matches!(
        request.kind,
        RequestKind::Create | RequestKind::Upsert | RequestKind::Replace | RequestKind::Delete | RequestKind::Batch
    );
    match dice.among(0..=19) {
        0..=4 if is_write => WireAction::LoseAnswer,
        5 | 6 => WireAction::Delay(Duration::from_millis(dice.mostly_small(10..=longest))),
        7..=9 => WireAction::DelayAnswer(Duration::from_millis(dice.mostly_small(10..=longest))),
        10 | 11 => throttled(dice),
        12 => refused(449, None),
        13 if request.kind == RequestKind::Batch => {
            let operations = request.json().and_then(|body| body.as_array().map(Vec::len)).unwrap_or(1);
            let index = usize::try_from(dice.among(0..=operations.max(1) as u64 - 1)).unwrap_or(0);
            WireAction::RefuseBatchOperation { index, status: *dice.pick(&[429, 449]), substatus: None }
        }
        14 => refused(*dice.pick(&[408, 500, 502, 503, 504]), None),
        15 => refused(410, Some(*dice.pick(&[1002, 1007, 1008]))),
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
