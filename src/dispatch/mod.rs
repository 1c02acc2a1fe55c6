//! Who gets what next. Nothing outside this room knows how candidates are found.
//!
//! Dispatchers wait on a ready queue in memory. What this process enqueues itself goes straight into it; what others enqueue
//! is found by polling, which one waiter does for all, only while somebody waits and nothing is ready. Entries are hints: the
//! claim, a conditional write, decides.

mod fetch;
mod parcel;
mod poll;
mod queue;
mod recent;
pub(crate) mod slots;
mod under_way;

pub(crate) use fetch::{next_turn, next_work};

use crate::{
    config::CosmosDBProviderConfig,
    model::{kind, Clock, DocumentId, MessageDocument, Millis, Partition, WorkDocument},
    store::{Committed, Operation, Versioned},
};
use azure_core::http::Etag;
use poll::Pace;
use queue::{Offer, Queue};
use recent::Recent;
use serde_json::Value;
use slots::{InMemoryLeases, Slot};
use under_way::UnderWay;

/// An instance that may have a turn to run.
#[derive(Clone, Debug)]
pub(crate) struct OrchestrationHint {
    pub(crate) partition: Partition,
    /// One of its messages can begin it, so that it may have no document yet.
    pub(crate) starts: bool,
    /// The version that its execution is pinned to, once an attempt has seen it.
    pub(crate) pinned: Option<semver::Version>,
    pub(crate) slot: Slot,
    /// Messages that this process has put into the queue itself: a turn on them need not ask for any. The commit proves by
    /// their ETags that nobody has consumed them meanwhile.
    pub(crate) messages: Vec<Versioned<MessageDocument>>,
    /// Messages that a poll has seen.
    pub(crate) seen: Vec<DocumentId>,
    /// There may be messages that this process doesn't know: the turn asks for them.
    pub(crate) ask: bool,
}

/// More messages than that, or larger ones, are asked for rather than kept.
const MAX_KEPT_MESSAGES: usize = 64;
const MAX_KEPT_BYTES: usize = 64 * 1024;
/// More messages than that of one instance are seen again by the next poll, which does no harm.
const MAX_SEEN: usize = 200;

impl OrchestrationHint {
    fn new(partition: Partition, starts: bool) -> Self {
        let slot = Slot::of(&partition);
        Self { partition, starts, pinned: None, slot, messages: Vec::new(), seen: Vec::new(), ask: true }
    }

    /// A message that this process has put into the queue. One whose ETag is not known is asked for.
    fn of_message(document: MessageDocument, etag: Option<Etag>) -> Self {
        let mut hint = Self::new(document.instance_id.clone(), document.starts);
        if let Some(etag) = etag.filter(|_| document.item.len() <= MAX_KEPT_BYTES) {
            hint.ask = false;
            hint.messages.push(Versioned { document, etag });
        }
        hint
    }

    /// Whether it knows of this message.
    fn knows(&self, id: &DocumentId) -> bool {
        self.ids().any(|known| known == id)
    }

    /// The messages that it knows of.
    fn ids(&self) -> impl Iterator<Item = &DocumentId> {
        self.messages.iter().map(|message| &message.document.id).chain(&self.seen)
    }

    /// News about the same instance.
    fn merge(&mut self, news: Self) {
        self.starts |= news.starts;
        // What was learnt of the instance may be of one that was deleted since: the next attempt learns it again.
        self.pinned = news.pinned;
        self.ask |= news.ask;
        self.seen.extend(news.seen);
        self.seen.truncate(MAX_SEEN);
        self.messages.extend(news.messages);
        if self.messages.len() > MAX_KEPT_MESSAGES {
            self.messages.clear();
            self.ask = true;
        }
    }
}

/// An activity that may be taken.
#[derive(Clone, Debug)]
pub(crate) struct WorkHint {
    pub(crate) document: WorkDocument,
    pub(crate) slot: Slot,
    /// Who owns its session, once an attempt has seen it.
    pub(crate) session_held: Option<SessionHeld>,
}

/// Why an activity of a session could not be taken.
#[derive(Clone, Debug)]
pub(crate) struct SessionHeld {
    pub(crate) owner: String,
    pub(crate) until: Millis,
    /// When that was seen.
    pub(crate) seen: Millis,
}

impl WorkHint {
    fn new(document: WorkDocument) -> Self {
        let slot = Slot::of(&document.instance_id);
        Self { document, slot, session_held: None }
    }

    /// Whether a worker that owns sessions as `owner` may take it now.
    fn session_fits(&self, owner: Option<&str>, now: Millis) -> bool {
        match (&self.document.session_id, owner, &self.session_held) {
            (None, _, _) => true,
            (Some(_), None, _) => false,
            (Some(_), Some(_), None) => true,
            (Some(_), Some(owner), Some(held)) => held.owner == owner || held.until <= now,
        }
    }

    /// A poll shows it free. Its session may have been given back long before its lock expires: what an attempt has seen is
    /// forgotten after a moment, so that there is one look a second at most.
    fn seen_free(&mut self, now: Millis) {
        const MOMENT: Millis = 1_000;
        self.session_held.take_if(|held| held.seen + MOMENT <= now);
    }
}

/// The ready queues and their pollers.
pub(crate) struct Dispatch {
    turns: Queue<Partition, OrchestrationHint>,
    work: Queue<String, WorkHint>,
    /// Whoever holds it polls for everybody.
    pace: tokio::sync::Mutex<Pace>,
    /// Messages that turns of this process have, or had a moment ago.
    recent: Recent,
    under_way: UnderWay,
    turn_leases: InMemoryLeases,
    work_leases: InMemoryLeases,
    clock: Clock,
}

impl Dispatch {
    pub(crate) fn new(config: &CosmosDBProviderConfig) -> Self {
        Self {
            turns: Queue::new(),
            work: Queue::new(),
            pace: Pace::new(config.poll_interval_min(), config.poll_interval_max()).into(),
            recent: Recent::default(),
            under_way: UnderWay::default(),
            turn_leases: InMemoryLeases::new(config.orch_concurrency() as usize),
            work_leases: InMemoryLeases::new(config.worker_concurrency() as usize),
            clock: config.clock().clone(),
        }
    }

    /// A message is in the queue, or will be visible at its time.
    pub(crate) fn offer_message(&self, message: MessageDocument, etag: Option<Etag>) {
        let (seq, due) = (message.seq.clone(), message.due);
        self.offer_turn(OrchestrationHint::of_message(message, etag), seq, due, true);
    }

    /// A turn leaves messages behind that did not fit it.
    pub(crate) fn offer_rest(&self, partition: &Partition) {
        self.offer_turn(OrchestrationHint::new(partition.clone(), false), String::new(), self.clock.now(), true);
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

    /// A turn of this process has consumed these messages.
    pub(crate) fn consumed<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>) {
        self.recent.consumed(partition, ids);
    }

    /// A turn of this process has taken these messages, and holds them until then.
    pub(crate) fn taken<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>, until: Millis) {
        self.recent.taken(partition, ids, until);
    }

    /// Whether a turn of this process has consumed a message a moment ago.
    pub(crate) fn was_consumed(&self, partition: &Partition, id: &DocumentId) -> bool {
        self.recent.is_consumed(partition, id)
    }

    /// A turn of this process was given back with these messages, each of which can be tried again at its time.
    pub(crate) fn messages_returned(
        &self,
        partition: &Partition,
        messages: impl Iterator<Item = (MessageDocument, Option<Etag>)>,
    ) {
        self.turns.set_free(partition, self.clock.now());
        for (message, etag) in messages {
            self.recent.returned(partition, std::iter::once(&message.id));
            self.offer_message(message, etag);
        }
    }

    /// A turn of this process was given back: its messages can be tried again at `due`, and if that is in the future, not
    /// earlier than an attempt has said.
    pub(crate) fn turn_returned(&self, partition: &Partition, due: Millis) {
        let now = self.clock.now();
        let at_once = due <= now;
        if at_once {
            self.turns.set_free(partition, now);
        } else {
            self.turns.set_idle(partition, now);
        }
        let hint = OrchestrationHint::new(partition.clone(), false);
        self.offer_turn(hint, String::new(), due, at_once);
    }

    /// A turn of this process holds its lock until then.
    pub(crate) fn turn_holds(&self, partition: &Partition, until: Millis) {
        self.turns.set_busy(partition, until, self.clock.now());
    }

    /// What a batch of this process has put into the queues; `offset` is where `operations` begin in the batch.
    pub(crate) fn announce(
        &self,
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
                    self.offer_message(message, committed.etag(index + offset).cloned());
                }
                _ => {}
            }
        }
    }
}
