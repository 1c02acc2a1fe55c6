//! Discovery: which turn or activity a dispatcher gets next. No module outside this folder knows how candidates are
//! found.
//!
//! Dispatchers wait on a ready queue in memory ([`fetch_loop`]). Candidates come from three sources:
//!
//! - This process enqueues work that it also takes. Such work goes straight into the queue.
//! - Another process enqueues work and sends a wake-up ([`wakeup`]).
//! - A poll finds work in the container ([`watch`]).
//!
//! The receiver of a wake-up, and the place of a poll, follow from the workers that are alive ([`members`],
//! [`leases`]). A candidate decides nothing: the claim, a conditional write, decides.

mod activity_fetch;
mod asked;
mod completion_batching;
mod fetch_loop;
mod in_flight;
pub(crate) mod leases;
pub(crate) mod local_instances;
mod members;
mod memory;
mod poll;
mod queue;
mod recent;
mod session_owners;
pub(crate) mod shared_result;
mod turn_fetch;
mod wakeup;
mod watch;

pub(crate) use activity_fetch::next_activity;
pub(crate) use turn_fetch::next_turn;

use crate::{
    config::CosmosDBProviderConfig,
    cosmos::{Committed, Deadline, StoreError, Versioned},
    engine::Engine,
    model::{kind, ActivityDocument, Clock, DocumentId, MessageDocument, Millis, Operation, Partition, Slot},
    queue::{
        activity::ActivityFilter,
        turn::{MessageKind, TurnFilter},
        FetchFilter,
    },
};
use asked::Asked;
use azure_core::http::Etag;
pub(crate) use completion_batching::open;
use completion_batching::CompletionBatching;
use duroxide::Event;
use in_flight::ClaimsInFlight;
use local_instances::{LocalActivity, LocalInstances};
use members::Fleet;
use queue::{Begin, Free, Offer, ReadyQueue, Weight};
use recent::Recent;
use serde_json::Value;
use session_owners::Held;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{atomic::AtomicBool, Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;
use watch::Watch;

/// An instance that may have a turn to run.
#[derive(Clone, Debug)]
pub(crate) struct TurnCandidate {
    pub(crate) partition: Partition,
    /// One of its messages is a start, so the instance may have no document yet.
    pub(crate) starts: bool,
    /// The version that its execution is pinned to, once a claim has seen it.
    pub(crate) pinned: Option<semver::Version>,
    /// Messages that this process has enqueued itself. A turn on them needs no query. The commit proves by their ETags
    /// that no other worker has consumed them meanwhile.
    pub(crate) messages: Vec<Versioned<MessageDocument>>,
    /// Messages that a poll has seen, and when each is due.
    pub(crate) seen: Vec<(DocumentId, Millis)>,
    /// The queue may have messages that this process does not know, so the turn queries them.
    pub(crate) must_query: bool,
    /// It has completions of activities or children. More of them may join the same turn.
    ends: bool,
    /// When the first of its other messages is due.
    others: Option<Millis>,
}

/// If there are more messages, or larger ones, the turn queries them.
const MAX_KEPT_MESSAGES: usize = 64;
const MAX_KEPT_BYTES: usize = 64 * 1024;
/// The candidate remembers at most this many seen messages. The next poll returns the others again, which is harmless.
const MAX_SEEN: usize = 200;

impl TurnCandidate {
    pub(crate) fn new(partition: Partition, starts: bool) -> Self {
        let (messages, seen) = (Vec::new(), Vec::new());
        Self { partition, starts, pinned: None, messages, seen, must_query: true, ends: false, others: None }
    }

    /// A candidate without messages and without the need to query any.
    pub(crate) fn without_messages(partition: Partition) -> Self {
        Self { must_query: false, ..Self::new(partition, false) }
    }

    /// A candidate for a message that this process has enqueued. Without an ETag the turn queries the message.
    pub(crate) fn of_message(document: MessageDocument, etag: Option<Etag>) -> Self {
        let mut candidate = Self::new(document.instance_id.clone(), document.starts);
        match etag.filter(|_| document.item.len() <= MAX_KEPT_BYTES) {
            Some(etag) => {
                candidate.must_query = false;
                candidate.messages.push(Versioned { document, etag });
            }
            None => candidate.seen.push((document.id, document.due)),
        }
        candidate
    }

    /// Whether it has this message.
    fn knows(&self, id: &DocumentId) -> bool {
        self.ids().any(|known| known == id)
    }

    /// The ids of its messages.
    fn ids(&self) -> impl Iterator<Item = &DocumentId> {
        self.messages.iter().map(|message| &message.document.id).chain(self.seen.iter().map(|(id, _)| id))
    }

    /// Whether all its other messages are due after `until`, so that its completions may wait.
    fn can_wait_until(&self, until: Millis) -> bool {
        self.others.is_none_or(|others| others > until)
    }

    /// The number of completions that this process has enqueued.
    fn ends_there(&self, now: Millis) -> usize {
        // A message that is not due yet is a timer.
        self.messages.iter().filter(|message| self.ends && message.document.due <= now).count()
    }

    /// Whether it has only completions that may wait for others.
    pub(crate) fn waits_for_others(&self, now: Millis) -> bool {
        self.ends && self.can_wait_until(now)
    }

    /// Adds newer messages of the same instance.
    pub(crate) fn merge(&mut self, news: Self) {
        self.starts |= news.starts;
        // The instance may have been deleted since its version was read. The next claim reads it again.
        self.pinned = news.pinned;
        self.must_query |= news.must_query;
        self.ends |= news.ends;
        self.others = self.others.into_iter().chain(news.others).min();
        self.seen.extend(news.seen);
        self.messages.extend(news.messages);
        if self.messages.len() > MAX_KEPT_MESSAGES {
            self.seen.extend(self.messages.drain(..).map(|message| (message.document.id, message.document.due)));
            self.must_query = true;
        }
        self.seen.truncate(MAX_SEEN);
    }
}

impl Weight for TurnCandidate {
    fn bytes(&self) -> usize {
        const EACH: usize = 200;
        let messages: usize = self.messages.iter().map(|message| EACH + message.document.item.len()).sum();
        EACH * (1 + self.seen.len()) + messages
    }
}

impl Weight for ActivityCandidate {
    fn bytes(&self) -> usize {
        const EACH: usize = 400;
        EACH + self.document.item.as_ref().map_or(0, String::len)
    }
}

/// An activity that may be ready.
#[derive(Clone, Debug)]
pub(crate) struct ActivityCandidate {
    pub(crate) document: ActivityDocument,
    /// The owner of its session, once that owner has got a wake-up for it.
    told: Option<String>,
    _local: Arc<LocalActivity>,
}

impl ActivityCandidate {
    fn new(document: ActivityDocument, local_instances: &LocalInstances) -> Self {
        let local = local_instances.add(&document.instance_id);
        Self { document, told: None, _local: local.into() }
    }
}

/// When an event last happened.
#[derive(Default)]
struct Moment(Mutex<Option<Instant>>);

impl Moment {
    fn is_now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn was_within(&self, time: Duration) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| at.elapsed() < time)
    }
}

/// The ready queues, and the state of the tasks that fill them.
pub(crate) struct Discovery {
    turns: ReadyQueue<Partition, TurnCandidate>,
    work: ReadyQueue<String, ActivityCandidate>,
    /// The fetch that holds this lock runs the tasks of discovery for the whole process.
    watch: tokio::sync::Mutex<Watch>,
    /// Held by a fetch without a wait time while it polls.
    asking: tokio::sync::Mutex<()>,
    /// A fetch of this process accepts work that no earlier fetch accepted, so a poll is due.
    asked_anew: AtomicBool,
    fleet: Arc<Fleet>,
    wakeup_sender: wakeup::WakeupSender,
    /// Messages that turns of this process hold or have just consumed.
    recent: Recent,
    asked: Asked,
    held: Held,
    completion_batching: CompletionBatching,
    in_flight: ClaimsInFlight,
    /// Instances of which this process holds activities or has candidates.
    pub(crate) local_instances: LocalInstances,
    /// When a fetch of this process last took an item.
    took: Moment,
    /// When this process last sent wake-ups for help.
    help_requested: Moment,
    /// Slots whose activities were recently left to other workers. Those workers report the completions.
    awaited: Mutex<BTreeMap<Slot, Instant>>,
    clock: Clock,
}

impl Discovery {
    pub(crate) fn new(config: &CosmosDBProviderConfig) -> Self {
        let mut me = config.randomness().token();
        me.truncate(12);
        Self {
            turns: ReadyQueue::new(),
            work: ReadyQueue::new(),
            watch: Watch::new().into(),
            asking: tokio::sync::Mutex::default(),
            asked_anew: AtomicBool::new(false),
            fleet: Arc::new(Fleet::new(me)),
            wakeup_sender: wakeup::WakeupSender::default(),
            recent: Recent::default(),
            asked: Asked::default(),
            held: Held::default(),
            completion_batching: CompletionBatching::default(),
            in_flight: ClaimsInFlight::default(),
            local_instances: LocalInstances::default(),
            took: Moment::default(),
            help_requested: Moment::default(),
            awaited: Mutex::default(),
            clock: config.clock().clone(),
        }
    }

    /// Whether this process fetches work and other such processes share the container.
    pub(crate) fn shares_the_container(&self) -> bool {
        self.fleet.is_member() && !self.fleet.view().others.is_empty()
    }

    fn took_something(&self) {
        self.took.is_now();
    }

    fn took_something_within(&self, time: Duration) -> bool {
        self.took.was_within(time)
    }

    /// Records that activities of an instance in this slot are left to other workers.
    fn awaits(&self, slot: Slot) {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).insert(slot, Instant::now());
    }

    /// Slots whose activities were left to other workers within this time.
    fn awaited_within(&self, time: Duration) -> BTreeSet<Slot> {
        let mut awaited = self.awaited.lock().unwrap_or_else(PoisonError::into_inner);
        awaited.retain(|_, at| at.elapsed() < time);
        awaited.keys().copied().collect()
    }

    fn called_for_help_within(&self, time: Duration) -> bool {
        self.help_requested.was_within(time)
    }

    /// Whether a queue has so many ready candidates that a poll is not needed. Candidates that some dispatchers of this
    /// process cannot take do not count.
    fn has_plenty(&self, queue: poll::QueueKind, now: Millis) -> bool {
        const PLENTY: usize = 25;
        match queue {
            poll::QueueKind::Turns => self.turns.has_ready(PLENTY, now, |candidate| candidate.pinned.is_none()),
            poll::QueueKind::Work => self.has_work(PLENTY, now),
        }
    }

    /// Whether all workers of this process are busy and this many activities are ready. An idle worker has found none
    /// of them suitable.
    fn has_work(&self, count: usize, now: Millis) -> bool {
        let is_free = |candidate: &ActivityCandidate| self.held.look(candidate, None, now, |_| ()).is_none();
        self.fleet.idle_workers() == 0 && self.work.has_ready(count, now, is_free)
    }

    /// The number of ready activities with this tag that any worker could run, counted up to `most`.
    fn waiting_work(&self, most: usize, tag: Option<&str>) -> usize {
        /// A commit examines at most this many candidates.
        const AMONG: usize = 1_024;
        // Other workers cannot help with activities of a session.
        let such = |candidate: &ActivityCandidate| {
            candidate.document.tag.as_deref() == tag && candidate.document.session_id.is_none()
        };
        self.work.count_ready(AMONG, most, self.clock.now(), such)
    }

    /// The name that this process writes into messages that it will take itself. `None` if it takes no turns.
    pub(crate) fn turn_holder_name(&self) -> Option<String> {
        self.fleet.turn_holder_name()
    }

    /// Whether a turn is ready that a dispatcher with this filter accepts.
    pub(crate) fn has_turn_for(&self, filter: &TurnFilter, now: Millis) -> bool {
        self.turns.has_ready(1, now, |candidate| filter.takes(&candidate.pinned))
    }

    /// Whether an activity is ready that a dispatcher with this filter accepts.
    pub(crate) fn has_activity_for(&self, filter: &ActivityFilter, now: Millis) -> bool {
        let is_free = |candidate: &ActivityCandidate| self.held.look(candidate, None, now, |_| ()).is_none();
        self.work.has_ready(1, now, |candidate| filter.takes(&candidate.document.tag) && is_free(candidate))
    }

    /// Reserves an instance for an inline claim that is about to be written with a message. If the message is a
    /// completion, `ends` is the number of completions for which the instance waits.
    ///
    /// Returns the queued completions if this is the last one and no claim is in flight; otherwise `None`. Other ready
    /// work for the instance also makes it return `None`.
    pub(crate) fn begin_inline_claim(
        &self,
        message: &MessageDocument,
        ends: usize,
        now: Millis,
    ) -> Option<TurnCandidate> {
        let (partition, until) = (&message.instance_id, now + fetch_loop::CLAIM_TIME);
        let how = |candidate: Option<&TurnCandidate>| match candidate
            .filter(|candidate| candidate.ends || !candidate.can_wait_until(now))
        {
            None if ends <= 1 => Begin::Leave,
            Some(candidate)
                if ends > 1
                    && !candidate.must_query
                    && candidate.waits_for_others(now)
                    && candidate.ends_there(now) + 1 >= ends =>
            {
                Begin::Take
            }
            _ => Begin::No,
        };
        let others = self.turns.begin(partition, until, now, how)?;
        let others = others.unwrap_or_else(|| TurnCandidate::without_messages(partition.clone()));
        self.recent.taken(partition, others.ids().chain(std::iter::once(&message.id)), until);
        Some(others)
    }

    /// Ends an inline claim that was not written or did not succeed. The message and the queued completions become
    /// candidates again.
    pub(crate) fn end_inline_claim(&self, message: &MessageDocument, others: TurnCandidate) {
        self.recent.returned(&message.instance_id, others.ids().chain(std::iter::once(&message.id)));
        self.turn_ended(&message.instance_id);
        self.offer_again(others.messages, self.clock.now());
    }

    /// Puts messages of a failed turn back. Messages that are due later come first, because completions must not pass a
    /// timer.
    fn offer_again(&self, mut messages: Vec<Versioned<MessageDocument>>, now: Millis) {
        messages.sort_by_key(|message| message.document.due <= now);
        for Versioned { document, etag } in messages {
            match MessageKind::of_message(&document) {
                MessageKind::Completion => self.offer_completion(document, Some(etag)),
                _ => self.offer_message(document, Some(etag)),
            }
        }
    }

    /// Takes the oldest activity that a dispatcher with this filter accepts, if it belongs to this instance, has no
    /// session, and its ETag is known.
    pub(crate) fn take_next_activity(
        &self,
        partition: &Partition,
        filter: &ActivityFilter,
        now: Millis,
    ) -> Option<(ActivityCandidate, String)> {
        let such = |candidate: &ActivityCandidate| {
            let document = &candidate.document;
            &document.instance_id == partition
                && document.session_id.is_none()
                && document.etag.is_some()
                && document.due <= now
        };
        let fits = |candidate: &ActivityCandidate| filter.takes(&candidate.document.tag);
        let (_, candidate, seq) = self.work.take_first(now, now + fetch_loop::CLAIM_TIME, fits, such)?;
        Some((candidate, seq))
    }

    /// Puts an activity back that was taken out of the queue and not claimed.
    pub(crate) fn return_activity(&self, candidate: ActivityCandidate, seq: String) {
        let (key, now) = (candidate.document.seq.clone(), self.clock.now());
        self.work.put_back(key, candidate, seq, now, now, |old, new| *old = new);
    }

    /// Puts an activity back whose claim has an unknown outcome. The next claim reads it first.
    pub(crate) fn try_activity_again(&self, mut candidate: ActivityCandidate, seq: String) {
        const PAUSE: Millis = 200;
        let (key, now) = (candidate.document.seq.clone(), self.clock.now());
        candidate.document.etag = None;
        self.work.put_back(key, candidate, seq, now + PAUSE, now, |old, new| *old = new);
    }

    /// Records that an activity that was taken out of the queue is claimed.
    pub(crate) fn activity_taken(&self, key: &String) {
        self.work.set_free(key, self.clock.now());
    }

    /// Adds a message as a candidate, ready when it is due. Drops it if no dispatcher of this process takes turns.
    pub(crate) fn offer_message(&self, message: MessageDocument, etag: Option<Etag>) {
        if !self.fleet.takes_turns() {
            self.turns.clear();
            return;
        }
        let (seq, due) = (message.seq.clone(), message.due);
        self.offer_turn(TurnCandidate::of_message(message, etag), seq, due, true);
    }

    /// Adds a completion as a candidate, like [`offer_message`](Self::offer_message). It waits for other completions of
    /// its instance.
    fn offer_completion(&self, message: MessageDocument, etag: Option<Etag>) {
        // It must not wait past a timer, because the activity ended before the timer.
        let waits = |until: &Millis| {
            self.turns.peek(&message.instance_id, |candidate| candidate.can_wait_until(*until)).unwrap_or(true)
        };
        let now = self.clock.now();
        let others = self.turns.peek(&message.instance_id, |candidate| candidate.ends_there(now)).unwrap_or(0);
        let waits_until = self.completion_batching.waits_until(&message.instance_id, others, now).filter(waits);
        let (seq, due) = (message.seq.clone(), message.due.max(waits_until.unwrap_or(0)));
        let partition = message.instance_id.clone();
        let candidate = TurnCandidate { ends: true, ..TurnCandidate::of_message(message, etag) };
        self.offer_turn(candidate, seq, due, waits_until.is_none());
        // If two completions arrive at once, each may have found itself the last but one.
        let there = || self.turns.peek(&partition, |candidate| candidate.ends_there(now)).unwrap_or(0);
        if waits_until.is_some()
            && self.completion_batching.waits_until(&partition, there().saturating_sub(1), now).is_none()
        {
            self.waits_no_longer(&partition);
        }
    }

    /// Makes the completions of an instance ready now. They no longer wait for others.
    fn waits_no_longer(&self, partition: &Partition) {
        if self.turns.peek(partition, |candidate| candidate.ends) == Some(true) {
            self.offer_turn(TurnCandidate::without_messages(partition.clone()), String::new(), 0, true);
        }
    }

    /// Keeps the messages of a candidate that were not due at `now`, when its turn was handed out.
    pub(crate) fn keep_undue(&self, candidate: &TurnCandidate, now: Millis) {
        self.recent.returned(&candidate.partition, candidate.ids());
        self.offer_again(
            candidate.messages.iter().filter(|message| message.document.due > now).cloned().collect(),
            now,
        );
        for (id, due) in candidate.seen.iter().filter(|(_, due)| *due > now) {
            let mut later = TurnCandidate::new(candidate.partition.clone(), false);
            later.seen.push((id.clone(), *due));
            // Its sequence key is not known, so its due time stands for it.
            self.offer_turn(later, format!("{due:015}"), *due, false);
        }
    }

    /// Adds a candidate for messages that did not fit into a turn. `seq` is their place in the queue, or just before
    /// it.
    pub(crate) fn offer_remaining(&self, partition: &Partition, seq: String) {
        self.offer_turn(TurnCandidate::new(partition.clone(), false), seq, self.clock.now(), true);
    }

    fn offer_turn(&self, mut candidate: TurnCandidate, seq: String, due: Millis, urgent: bool) {
        let now = self.clock.now();
        if !candidate.ends {
            candidate.others = Some(due);
        }
        // Completions wait only for each other. A later time that a claim has set stays.
        let ends_wait = !candidate.can_wait_until(now + completion_batching::LONGEST)
            && self.turns.peek(&candidate.partition, |candidate| candidate.ends) == Some(true)
            && self
                .turns
                .put_off_until(&candidate.partition)
                .is_some_and(|until| until <= now + completion_batching::LONGEST);
        let (due, urgent) = if ends_wait { (due.min(now), true) } else { (due, urgent) };
        let offer = Offer { key: candidate.partition.clone(), candidate, seq, due, urgent };
        self.turns.offer(offer, now, TurnCandidate::merge);
    }

    /// Adds an activity as a candidate, ready when it is due. Drops it if no worker of this process accepts it.
    pub(crate) fn offer_activity(&self, document: ActivityDocument) {
        if !self.fleet.takes_work(document.tag.as_deref()) {
            return;
        }
        let (key, seq, due) = (document.seq.clone(), document.seq.clone(), document.due);
        let offer =
            Offer { key, candidate: ActivityCandidate::new(document, &self.local_instances), seq, due, urgent: true };
        self.work.offer(offer, self.clock.now(), |old, new| *old = new);
    }

    /// Drops candidates of activities that have completed in other processes.
    pub(crate) fn activities_ended(&self, partition: &Partition, ids: &BTreeSet<DocumentId>) {
        if !ids.is_empty() {
            self.work.forget(|candidate| {
                &candidate.document.instance_id == partition && ids.contains(&candidate.document.id)
            });
        }
    }

    /// Ends a turn of this process. Candidates that arrived meanwhile can be tried.
    pub(crate) fn turn_ended(&self, partition: &Partition) {
        self.turns.set_free(partition, self.clock.now());
    }

    /// Ends a committed turn of this process, with its history if that is known. Candidates that arrived meanwhile can
    /// be tried.
    pub(crate) fn turn_committed(&self, partition: &Partition, history: Option<&[Event]>) {
        let now = self.clock.now();
        let open = history.map(completion_batching::open).unwrap_or_default();
        let waits_until = self.completion_batching.turn_ended(partition, open, now);
        let waits = |candidate: &TurnCandidate| {
            candidate.ends
                && candidate.can_wait_until(waits_until)
                && (open.count() == 0 || candidate.ends_there(now) < open.count())
        };
        // The batching time of the turn before is no longer valid.
        self.turns.set_free_from(partition, now, |candidate| match (candidate.ends, waits(candidate)) {
            (true, true) => Free { not_before: waits_until, due: Some(waits_until) },
            (true, false) => Free { not_before: 0, due: Some(now) },
            (false, _) => Free::default(),
        });
    }

    /// Records that a turn of this process has consumed these messages.
    pub(crate) fn messages_consumed<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>) {
        self.recent.consumed(partition, ids, self.clock.now());
    }

    /// Records that a turn of this process holds these messages until `until`.
    pub(crate) fn messages_taken<'a>(
        &self,
        partition: &Partition,
        ids: impl Iterator<Item = &'a DocumentId>,
        until: Millis,
    ) {
        self.recent.taken(partition, ids, until);
    }

    /// Records that the messages of an instance were queried, or that all of them are known.
    pub(crate) fn record_query(&self, partition: &Partition) {
        self.asked.note(partition, self.clock.now());
    }

    /// Whether the messages of an instance were queried within the last second.
    pub(crate) fn queried_recently(&self, partition: &Partition) -> bool {
        self.asked.is_fresh(partition, self.clock.now())
    }

    /// Whether a turn of this process has just consumed a message.
    pub(crate) fn was_consumed(&self, partition: &Partition, id: &DocumentId) -> bool {
        self.recent.is_consumed(partition, id)
    }

    /// Ends a released turn of this process. Each of its messages can be tried again when it is due.
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

    /// Ends a released turn of this process. Its messages can be tried again at `due`. If that is in the future, a
    /// later time that a claim has set stays.
    pub(crate) fn turn_returned(&self, partition: &Partition, due: Millis) {
        let now = self.clock.now();
        let at_once = due <= now;
        if at_once {
            self.turns.set_free(partition, now);
        } else {
            self.turns.set_idle(partition, now);
        }
        let candidate = TurnCandidate::new(partition.clone(), false);
        self.offer_turn(candidate, String::new(), due, at_once);
    }

    /// Whether this process probably has the next step of an instance: a turn that it holds or is about to claim, or an
    /// activity.
    pub(crate) fn has_next_step(&self, partition: &Partition) -> bool {
        // Perhaps no dispatcher of this process accepts a pinned execution.
        let is_ours = |candidate: &TurnCandidate| candidate.pinned.is_none();
        self.local_instances.has(partition) || self.turns.is_at_hand(partition, self.clock.now(), is_ours)
    }

    /// Looks at the candidate for the next turn of an instance.
    pub(crate) fn peek_turn<R>(&self, partition: &Partition, look: impl FnOnce(&TurnCandidate) -> R) -> Option<R> {
        self.turns.peek(partition, look)
    }

    /// Records that a commit has retained the lock until `until`. Takes out the candidate for the next turn.
    pub(crate) fn turn_retained(
        &self,
        partition: &Partition,
        history: Option<&[Event]>,
        until: Millis,
    ) -> Option<TurnCandidate> {
        let now = self.clock.now();
        self.completion_batching.turn_ended(partition, history.map(completion_batching::open).unwrap_or_default(), now);
        let candidate = self.turns.take_out(partition, until, now)?;
        self.recent.taken(partition, candidate.ids(), until);
        Some(candidate)
    }

    /// Ends a claim, made at `now`, that returned no turn. Its candidate was taken out before.
    pub(crate) fn claim_failed(&self, candidate: &TurnCandidate, now: Millis) {
        self.keep_undue(candidate, now);
        self.turn_ended(&candidate.partition);
    }

    /// Marks a claim as in flight until the guard is dropped. A fetch without a wait time waits for it.
    pub(crate) fn claim_in_flight(&self) -> impl Drop + Send + 'static {
        self.in_flight.begin()
    }

    /// Records that a turn of this process holds its lock until `until`.
    pub(crate) fn turn_holds(&self, partition: &Partition, until: Millis) {
        self.turns.set_busy(partition, until, self.clock.now());
    }
}

/// Announces a message that was written. It becomes a candidate if this process takes turns. Otherwise a worker that
/// does gets a wake-up. `knows` is a worker that probably has the instance in its cache.
pub(crate) async fn message_written(
    engine: &Arc<Engine>,
    message: MessageDocument,
    etag: Option<Etag>,
    knows: Option<&str>,
) {
    let discovery = &engine.discovery;
    let elsewhere = knows.is_some_and(|knows| discovery.fleet.view().is_alive(knows));
    if discovery.fleet.takes_turns() && !elsewhere {
        discovery.offer_message(message, etag);
        return;
    }
    if message.due <= engine.now() {
        wakeup::call_runners(engine, Slot::of(&message.instance_id), None, knows).await;
    }
    if discovery.fleet.takes_turns() && !knows.is_some_and(|knows| discovery.fleet.view().is_alive(knows)) {
        // That worker has left, as the wake-up has shown.
        discovery.offer_message(message, etag);
    }
}

/// Announces a completion that was written, like [`message_written`]. The caller does not wait for the wake-up.
pub(crate) fn completion_written(
    engine: &Arc<Engine>,
    message: MessageDocument,
    etag: Option<Etag>,
    knows: Option<&str>,
) {
    let (engine_too, knows) = (engine.clone(), knows.map(ToOwned::to_owned));
    if knows.is_none() && engine.discovery.fleet.takes_turns() {
        engine.discovery.offer_completion(message, etag);
        return;
    }
    engine.spawn(async move { message_written(&engine_too, message, etag, knows.as_deref()).await });
}

/// Announces an activity that was written. It becomes a candidate if this process accepts it. Otherwise a worker that
/// does gets a wake-up.
pub(crate) async fn activity_written(engine: &Arc<Engine>, document: ActivityDocument) {
    let (slot, tag) = (Slot::of(&document.instance_id), document.tag.clone());
    if engine.discovery.fleet.takes_work(tag.as_deref()) {
        engine.discovery.offer_activity(document);
    } else {
        wakeup::call_worker(engine, slot, tag.as_deref()).await;
    }
}

/// The worker that gets a wake-up when an activity of its turn has completed. `None` if that worker is dead or is this
/// process.
pub(crate) fn completion_receiver<'a>(engine: &Engine, by: Option<&'a str>) -> Option<&'a str> {
    by.filter(|by| engine.discovery.fleet.view().is_alive(by))
}

/// Announces the messages and activities of a committed batch. `offset` is the index of the first of `operations` in
/// the batch.
pub(crate) fn announce(
    engine: &Arc<Engine>,
    partition: &Partition,
    operations: &[Operation],
    committed: &Committed,
    offset: usize,
) {
    let discovery = &engine.discovery;
    let mut elsewhere: BTreeMap<Option<String>, usize> = BTreeMap::new();
    let mut here: BTreeSet<Option<String>> = BTreeSet::new();
    for (index, operation) in operations.iter().enumerate() {
        let (Operation::Create { document } | Operation::Upsert { document }) = operation else { continue };
        match document.get("type").and_then(Value::as_str) {
            Some(kind::ACTIVITY) => {
                let Ok(mut work) = serde_json::from_value::<ActivityDocument>(document.clone()) else { continue };
                work.etag = committed.etag(index + offset).cloned();
                // A locked activity was claimed inline.
                if &work.instance_id != partition || work.lock.is_some() {
                    continue;
                }
                if discovery.fleet.takes_work(work.tag.as_deref()) {
                    here.insert(work.tag.clone());
                    discovery.offer_activity(work);
                } else {
                    *elsewhere.entry(work.tag).or_default() += usize::from(work.session_id.is_none());
                }
            }
            Some(kind::MESSAGE) => {
                let Ok(message) = serde_json::from_value::<MessageDocument>(document.clone()) else { continue };
                discovery.offer_message(message, committed.etag(index + offset).cloned());
            }
            _ => {}
        }
    }
    call_for_help(engine, Slot::of(partition), here, elsewhere);
}

/// Sends wake-ups for activities that this process does not run, and for help if there are more than its workers can
/// soon run. `here` has the tags that this process runs. `elsewhere` has the number of activities of each other tag.
fn call_for_help(
    engine: &Arc<Engine>,
    slot: Slot,
    here: BTreeSet<Option<String>>,
    elsewhere: BTreeMap<Option<String>, usize>,
) {
    /// One helper for each so many activities.
    const WORTH: usize = 16;
    const MOST: usize = 8;
    let helpers = |count: usize| (count / WORTH).min(MOST);
    let waiting = |tag: &Option<String>| engine.discovery.waiting_work(WORTH * MOST, tag.as_deref());
    // For each tag: how many workers get a wake-up to run it, and how many to help them.
    let here = here.into_iter().map(|tag| (waiting(&tag), tag)).map(|(count, tag)| (tag, 0, helpers(count)));
    let elsewhere = elsewhere.into_iter().map(|(tag, count)| (tag, 1, helpers(count)));
    let mut calls: Vec<(Option<String>, usize, usize)> = here.chain(elsewhere).collect();
    calls.retain(|(_, first, most)| first + most > 0);
    if calls.is_empty() {
        return;
    }
    engine.discovery.awaits(slot);
    let engine_too = engine.clone();
    engine.spawn(async move {
        for (tag, first, most) in calls {
            if first > 0 {
                wakeup::call_worker(&engine_too, slot, tag.as_deref()).await;
            }
            if most > 0 && !engine_too.discovery.fleet.view().others.is_empty() {
                engine_too.discovery.help_requested.is_now();
            }
            if most > 0 {
                wakeup::call_helpers(&engine_too, slot, tag.as_deref(), first, most).await;
            }
        }
    });
}

/// Deletes the membership of this process and sends a wake-up, so that other workers take over at once.
pub(crate) async fn leave(engine: &Arc<Engine>, deadline: Deadline) -> Result<(), StoreError> {
    // A running task may be about to write the membership again.
    let _watch = tokio::time::timeout_at(deadline.instant(), engine.discovery.watch.lock()).await;
    if engine.discovery.fleet.leave(engine, deadline).await? {
        wakeup::tell_others(engine).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use duroxide::providers::{TagFilter, WorkItem};

    fn message(n: usize) -> MessageDocument {
        let item = WorkItem::CancelInstance { instance: format!("i{n}"), reason: "r".repeat(1_000) };
        let partition = Partition::instance(&format!("i{n}")).unwrap();
        MessageDocument::new(partition, &n.to_string(), &item, format!("{n:09}"), 0, 0).unwrap()
    }

    fn work(n: usize, tag: Option<&str>) -> ActivityDocument {
        let mut work = session_owners::tests::work(None);
        (work.seq, work.tag) = (format!("{n:09}"), tag.map(ToOwned::to_owned));
        work
    }

    #[test]
    fn a_client_that_only_starts_instances_keeps_nothing_of_them() {
        let discovery = Discovery::new(&CosmosDBProviderConfig::default());
        for n in 0..1_000 {
            discovery.offer_message(message(n), Some(Etag::from("etag")));
            discovery.offer_activity(work(n, None));
        }
        assert_eq!((discovery.turns.len(), discovery.work.len()), (0, 0));
    }

    #[test]
    fn what_nobody_here_takes_is_not_kept() {
        let discovery = Discovery::new(&CosmosDBProviderConfig::default());
        discovery.fleet.asks_for_work(&TagFilter::Tags(["gpu".to_owned()].into()), None);
        discovery.offer_message(message(1), Some(Etag::from("etag")));
        discovery.offer_activity(work(1, None));
        discovery.offer_activity(work(2, Some("gpu")));
        assert_eq!((discovery.turns.len(), discovery.work.len()), (0, 1));
        discovery.fleet.asks_for_turns(None);
        discovery.offer_message(message(1), Some(Etag::from("etag")));
        assert_eq!(discovery.turns.len(), 1);
    }

    #[test]
    fn turns_that_nobody_here_runs_and_sessions_of_others_are_not_plenty() {
        let discovery = Discovery::new(&CosmosDBProviderConfig::default());
        discovery.fleet.asks_for_turns(None);
        for n in 0..100 {
            let mut candidate = TurnCandidate::new(message(n).instance_id, false);
            candidate.pinned = Some(semver::Version::new(9, 0, 0));
            discovery.offer_turn(candidate, String::new(), 0, false);
        }
        let now = discovery.clock.now();
        assert!(!discovery.has_plenty(poll::QueueKind::Turns, now));
        (100..200).for_each(|n| discovery.offer_message(message(n), Some(Etag::from("etag"))));
        assert!(discovery.has_plenty(poll::QueueKind::Turns, now));
    }

    /// A dispatcher whose instance has many activities under way, so that their ends wait.
    fn paced(partition: &Partition) -> (Discovery, Millis) {
        let discovery = Discovery::new(&CosmosDBProviderConfig::default().with_clock(Clock::from_fn(|| 1_000_000)));
        discovery.fleet.asks_for_turns(None);
        let now = discovery.clock.now();
        discovery.completion_batching.turn_ended(partition, completion_batching::OpenWork::of_activities(100), now);
        (discovery, now)
    }

    /// Whether the instance can have a turn after so many milliseconds, and not before.
    fn is_ready_after(discovery: &Discovery, partition: &Partition, now: Millis, wait: Millis) -> bool {
        let take = |at: Millis| discovery.turns.take(at, at, |key, _| key == partition).is_some();
        (wait == 0 || !take(now + wait - 1)) && take(now + wait)
    }

    #[test]
    fn the_ends_of_activities_wait_for_each_other_and_for_nothing_else() {
        let due = |n: usize, due: Millis| MessageDocument { due, ..message(n) };
        let (partition, etag) = (message(1).instance_id, || Some(Etag::from("etag")));
        let (discovery, now) = paced(&partition);
        discovery.offer_completion(message(1), etag());
        assert!(is_ready_after(&discovery, &partition, now, completion_batching::LONGEST));

        // A timer that is due meanwhile would come before the activity that has ended before it.
        for (timer, wait) in [
            (30, 0),
            (completion_batching::LONGEST, 0),
            (completion_batching::LONGEST + 1, completion_batching::LONGEST),
            (3_600_000, completion_batching::LONGEST),
        ] {
            let (discovery, now) = paced(&partition);
            discovery.offer_message(due(1, now + timer), etag());
            discovery.offer_completion(message(1), etag());
            assert!(is_ready_after(&discovery, &partition, now, wait), "a timer after {timer} ms");
            let (discovery, now) = paced(&partition);
            discovery.offer_completion(message(1), etag());
            discovery.offer_message(due(1, now + timer), etag());
            assert!(is_ready_after(&discovery, &partition, now, wait), "then a timer after {timer} ms");
        }
    }

    #[test]
    fn the_last_end_takes_the_others_along_and_leaves_them_where_it_comes_to_nothing() {
        use duroxide::providers::WorkItem;
        let partition = message(1).instance_id;
        let end = |id: usize| WorkItem::ActivityCompleted {
            instance: "i".to_owned(),
            execution_id: 1,
            id: id as u64,
            result: String::new(),
        };
        let numbered = |n: usize| {
            let item = serde_json::to_string(&end(n)).unwrap();
            MessageDocument { instance_id: partition.clone(), item, ..message(n) }
        };
        let (discovery, now) = paced(&partition);
        for there in 0..3 {
            assert!(discovery.begin_inline_claim(&numbered(9), 4, now).is_none(), "{there} of 4 are there");
            discovery.offer_completion(numbered(there), Some(Etag::from("etag")));
        }
        let others = discovery.begin_inline_claim(&numbered(9), 4, now).expect("the others");
        assert_eq!(others.messages.len(), 3);
        assert!(discovery.begin_inline_claim(&numbered(9), 4, now).is_none(), "somebody does already");
        discovery.end_inline_claim(&numbered(9), others);
        let others = discovery.begin_inline_claim(&numbered(9), 4, now).expect("the others again");
        assert_eq!(others.messages.len(), 3);
    }

    #[test]
    fn what_a_look_finds_besides_the_ends_of_activities_ends_their_wait() {
        let partition = message(1).instance_id;
        let look = |ends: bool| TurnCandidate { ends, ..TurnCandidate::new(partition.clone(), false) };
        for (ends, wait) in [(true, completion_batching::LONGEST), (false, 0)] {
            let (discovery, now) = paced(&partition);
            // Both came while a turn was under way.
            discovery.turn_holds(&partition, now + 5_000);
            discovery.offer_completion(message(1), Some(Etag::from("etag")));
            discovery
                .turns
                .set_free_from(&partition, now, |_| Free { not_before: now + completion_batching::LONGEST, due: None });
            discovery.offer_turn(look(ends), String::new(), now - 10, false);
            assert!(is_ready_after(&discovery, &partition, now, wait), "{ends}");
        }
    }
}
