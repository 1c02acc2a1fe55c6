//! Who gets what next. Nothing outside this room knows how candidates are found.
//!
//! Dispatchers wait on a ready queue in memory. What this process enqueues itself goes straight into it; what others enqueue
//! is found by polling, which one waiter does for all, only while somebody waits and nothing is ready. Entries are hints: the
//! claim, a conditional write, decides.

mod fetch;
mod parcel;
mod poll;
mod queue;
pub(crate) mod slots;

pub(crate) use fetch::{next_turn, next_work};

use crate::{
    config::CosmosDBProviderConfig,
    engine::Engine,
    model::{kind, MessageDocument, Millis, Partition, WorkDocument},
    store::{Committed, Operation},
};
use poll::Pace;
use queue::{Offer, Queue};
use serde_json::Value;
use slots::{InMemoryLeases, Slot};

/// An instance that may have a turn to run.
#[derive(Clone, Debug)]
pub(crate) struct OrchestrationHint {
    pub(crate) partition: Partition,
    /// One of its messages can begin it, so that it may have no document yet.
    pub(crate) starts: bool,
    /// The version that its execution is pinned to, once an attempt has seen it.
    pub(crate) pinned: Option<semver::Version>,
    /// How often an attempt found messages but no start.
    pub(crate) waits: u32,
    pub(crate) slot: Slot,
}

impl OrchestrationHint {
    fn new(partition: Partition, starts: bool) -> Self {
        let slot = Slot::of(&partition);
        Self { partition, starts, pinned: None, waits: 0, slot }
    }

    /// News about the same instance.
    fn merge(&mut self, news: Self) {
        self.starts |= news.starts;
        self.pinned = news.pinned.or_else(|| self.pinned.take());
        self.waits = self.waits.min(news.waits);
    }
}

/// An activity that may be taken.
#[derive(Clone, Debug)]
pub(crate) struct WorkHint {
    pub(crate) document: WorkDocument,
    pub(crate) slot: Slot,
    /// Who owns its session and until when, once an attempt has seen it.
    pub(crate) session_owner: Option<(String, Millis)>,
}

impl WorkHint {
    fn new(document: WorkDocument) -> Self {
        let slot = Slot::of(&document.instance_id);
        Self { document, slot, session_owner: None }
    }

    /// Whether a worker that owns sessions as `owner` may take it now.
    fn session_fits(&self, owner: Option<&str>, now: Millis) -> bool {
        match (&self.document.session_id, owner, &self.session_owner) {
            (None, _, _) => true,
            (Some(_), None, _) => false,
            (Some(_), Some(_), None) => true,
            (Some(_), Some(owner), Some((theirs, until))) => theirs == owner || *until <= now,
        }
    }
}

/// The ready queues and their pollers.
pub(crate) struct Dispatch {
    turns: Queue<Partition, OrchestrationHint>,
    work: Queue<String, WorkHint>,
    turn_pace: tokio::sync::Mutex<Pace>,
    work_pace: tokio::sync::Mutex<Pace>,
    turn_leases: InMemoryLeases,
    work_leases: InMemoryLeases,
    clock: crate::model::Clock,
}

impl Dispatch {
    pub(crate) fn new(config: &CosmosDBProviderConfig) -> Self {
        let pace = || Pace::new(config.poll_interval_min(), config.poll_interval_max()).into();
        Self {
            turns: Queue::new(),
            work: Queue::new(),
            turn_pace: pace(),
            work_pace: pace(),
            turn_leases: InMemoryLeases::new(config.orch_concurrency() as usize),
            work_leases: InMemoryLeases::new(config.worker_concurrency() as usize),
            clock: crate::model::Clock::system(),
        }
    }

    /// A message is in the queue, or will be visible at its time.
    pub(crate) fn offer_message(&self, message: &MessageDocument) {
        let hint = OrchestrationHint::new(message.instance_id.clone(), message.starts);
        self.offer_turn(hint, message.seq.clone(), message.due, true);
    }

    fn offer_turn(&self, hint: OrchestrationHint, seq: String, due: Millis, urgent: bool) {
        let offer = Offer { key: hint.partition.clone(), hint, seq, due, urgent };
        self.turns.offer(offer, self.clock.now(), OrchestrationHint::merge);
    }

    /// An activity is in the queue, or will be at its time.
    pub(crate) fn offer_work(&self, document: WorkDocument) {
        let (key, seq, due) = (document.seq.clone(), document.seq.clone(), document.due);
        let offer = Offer { key, hint: WorkHint::new(document), seq, due, urgent: true };
        self.work.offer(offer, self.clock.now(), |old, new| *old = new);
    }

    /// A turn of this process has ended: what came for its instance in the meantime can be tried.
    pub(crate) fn turn_ended(&self, partition: &Partition) {
        self.turns.set_free(partition, self.clock.now());
    }

    /// A turn of this process was given back: its messages can be tried again at `due`.
    pub(crate) fn turn_returned(&self, partition: &Partition, due: Millis) {
        self.turns.set_free(partition, self.clock.now());
        let hint = OrchestrationHint::new(partition.clone(), false);
        self.offer_turn(hint, String::new(), due, true);
    }

    /// A turn of this process holds its lock until then.
    pub(crate) fn turn_holds(&self, partition: &Partition, until: Millis) {
        self.turns.set_busy(partition, until, self.clock.now());
    }

    /// What a batch of this process has put into the queues; `offset` is where `operations` begin in the batch.
    pub(crate) fn announce(
        &self,
        _engine: &Engine,
        partition: &Partition,
        operations: &[Operation],
        committed: &Committed,
        offset: usize,
    ) {
        for (index, operation) in operations.iter().enumerate() {
            let (Operation::Create { document } | Operation::Upsert { document }) = operation else { continue };
            match document.get("type").and_then(Value::as_str) {
                Some(kind::WORK) => {
                    let Ok(mut work) = serde_json::from_value::<WorkDocument>(document.clone()) else { continue };
                    work.etag = committed.etag(index + offset).cloned();
                    if &work.instance_id == partition {
                        self.offer_work(work);
                    }
                }
                Some(kind::MESSAGE) => {
                    let Ok(message) = serde_json::from_value::<MessageDocument>(document.clone()) else { continue };
                    self.offer_message(&message);
                }
                _ => {}
            }
        }
    }
}
