//! Who gets what next. Nothing outside this room knows how candidates are found.
//!
//! Dispatchers wait on a ready queue in memory ([`fetch_loop`]). What this process enqueues itself and takes itself goes straight into
//! it. What others enqueue is found because they ring ([`wakeup`]), or by a sweep ([`watch`]); who is rung, and who looks where, follows
//! from who is there ([`members`], [`leases`]). Entries are candidates: the claim, a conditional write, decides.

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
        turn::{Kind, TurnFilter},
        FetchFilter,
    },
};
use asked::Asked;
use azure_core::http::Etag;
pub(crate) use completion_batching::open;
use completion_batching::CompletionBatching;
use duroxide::Event;
use in_flight::ClaimsInFlight;
use local_instances::{Here, LocalActivity};
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
    /// One of its messages can begin it, so that it may have no document yet.
    pub(crate) starts: bool,
    /// The version that its execution is pinned to, once an attempt has seen it.
    pub(crate) pinned: Option<semver::Version>,
    /// Messages that this process has put into the queue itself: a turn on them need not ask for any. The commit proves by
    /// their ETags that nobody has consumed them meanwhile.
    pub(crate) messages: Vec<Versioned<MessageDocument>>,
    /// Messages that a look has seen, and when each is due.
    pub(crate) seen: Vec<(DocumentId, Millis)>,
    /// There may be messages that this process doesn't know: the turn asks for them.
    pub(crate) ask: bool,
    /// It tells of activities or children that have ended: more of them may go with the same turn.
    ends: bool,
    /// When the first is due of whatever else it tells of.
    others: Option<Millis>,
}

/// More messages than that, or larger ones, are asked for rather than kept.
const MAX_KEPT_MESSAGES: usize = 64;
const MAX_KEPT_BYTES: usize = 64 * 1024;
/// More messages than that of one instance are seen again by the next poll, which does no harm.
const MAX_SEEN: usize = 200;

impl TurnCandidate {
    pub(crate) fn new(partition: Partition, starts: bool) -> Self {
        let (messages, seen) = (Vec::new(), Vec::new());
        Self { partition, starts, pinned: None, messages, seen, ask: true, ends: false, others: None }
    }

    /// There is nothing to ask for.
    pub(crate) fn of_nothing(partition: Partition) -> Self {
        Self { ask: false, ..Self::new(partition, false) }
    }

    /// A message that this process has put into the queue. One whose ETag is not known is asked for.
    pub(crate) fn of_message(document: MessageDocument, etag: Option<Etag>) -> Self {
        let mut candidate = Self::new(document.instance_id.clone(), document.starts);
        match etag.filter(|_| document.item.len() <= MAX_KEPT_BYTES) {
            Some(etag) => {
                candidate.ask = false;
                candidate.messages.push(Versioned { document, etag });
            }
            None => candidate.seen.push((document.id, document.due)),
        }
        candidate
    }

    /// Whether it knows of this message.
    fn knows(&self, id: &DocumentId) -> bool {
        self.ids().any(|known| known == id)
    }

    /// The messages that it knows of.
    fn ids(&self) -> impl Iterator<Item = &DocumentId> {
        self.messages.iter().map(|message| &message.document.id).chain(self.seen.iter().map(|(id, _)| id))
    }

    /// Whether nothing else that it tells of is due by then, so that the ends of activities may wait.
    fn can_wait_until(&self, until: Millis) -> bool {
        self.others.is_none_or(|others| others > until)
    }

    /// How many ends are there, so far as they are known: the messages that this process has put into the queue.
    fn ends_there(&self, now: Millis) -> usize {
        // What is not due yet is a timer.
        self.messages.iter().filter(|message| self.ends && message.document.due <= now).count()
    }

    /// Whether all that is due tells of ends, which may wait for others.
    pub(crate) fn waits_for_others(&self, now: Millis) -> bool {
        self.ends && self.can_wait_until(now)
    }

    /// News about the same instance.
    pub(crate) fn merge(&mut self, news: Self) {
        self.starts |= news.starts;
        // What was learnt of the instance may be of one that was deleted since: the next attempt learns it again.
        self.pinned = news.pinned;
        self.ask |= news.ask;
        self.ends |= news.ends;
        self.others = self.others.into_iter().chain(news.others).min();
        self.seen.extend(news.seen);
        self.messages.extend(news.messages);
        if self.messages.len() > MAX_KEPT_MESSAGES {
            self.seen.extend(self.messages.drain(..).map(|message| (message.document.id, message.document.due)));
            self.ask = true;
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

/// An activity that may be taken.
#[derive(Clone, Debug)]
pub(crate) struct ActivityCandidate {
    pub(crate) document: ActivityDocument,
    /// Who owns its session and was told of it.
    told: Option<String>,
    _here: Arc<LocalActivity>,
}

impl ActivityCandidate {
    fn new(document: ActivityDocument, here: &Here) -> Self {
        let place = here.place(&document.instance_id);
        Self { document, told: None, _here: place.into() }
    }
}

/// When something last happened.
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

/// The ready queues, and what fills them.
pub(crate) struct Discovery {
    turns: ReadyQueue<Partition, TurnCandidate>,
    work: ReadyQueue<String, ActivityCandidate>,
    /// Whoever holds it looks for work, for everybody here.
    watch: tokio::sync::Mutex<Watch>,
    /// Held by a caller that does not wait, while it asks.
    asking: tokio::sync::Mutex<()>,
    /// Somebody here asks for what nobody here has asked for: a look is due.
    asked_anew: AtomicBool,
    fleet: Arc<Fleet>,
    wakeup_sender: wakeup::WakeupSender,
    /// Messages that turns of this process have, or had a moment ago.
    recent: Recent,
    asked: Asked,
    held: Held,
    completion_batching: CompletionBatching,
    in_flight: ClaimsInFlight,
    /// Whose activities this process has, or has in its queue.
    pub(crate) here: Here,
    /// When somebody here last took something.
    took: Moment,
    /// When others were last called to help.
    recovered_by_others: Moment,
    /// Where activities were left to others lately: they tell when these have ended.
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
            here: Here::default(),
            took: Moment::default(),
            recovered_by_others: Moment::default(),
            awaited: Mutex::default(),
            clock: config.clock().clone(),
        }
    }

    /// Whether other processes look for work here, as this one does.
    pub(crate) fn shares_the_container(&self) -> bool {
        self.fleet.is_member() && !self.fleet.view().others.is_empty()
    }

    fn took_something(&self) {
        self.took.is_now();
    }

    fn took_something_within(&self, time: Duration) -> bool {
        self.took.was_within(time)
    }

    /// Activities of an instance in this slot are left to others.
    fn awaits(&self, slot: Slot) {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).insert(slot, Instant::now());
    }

    /// Where activities were left to others within this time.
    fn awaited_within(&self, time: Duration) -> BTreeSet<Slot> {
        let mut awaited = self.awaited.lock().unwrap_or_else(PoisonError::into_inner);
        awaited.retain(|_, at| at.elapsed() < time);
        awaited.keys().copied().collect()
    }

    fn called_for_help_within(&self, time: Duration) -> bool {
        self.recovered_by_others.was_within(time)
    }

    /// Whether a queue has so many candidates at hand that nobody needs more. Those don't count that somebody here could not take.
    fn has_plenty(&self, queue: poll::QueueKind, now: Millis) -> bool {
        const PLENTY: usize = 25;
        match queue {
            poll::QueueKind::Turns => self.turns.has_ready(PLENTY, now, |candidate| candidate.pinned.is_none()),
            poll::QueueKind::Work => self.has_work(PLENTY, now),
        }
    }

    /// Whether there are so many candidates of activities that all workers are busy with. One that waits has found nothing among them.
    fn has_work(&self, count: usize, now: Millis) -> bool {
        let is_free = |candidate: &ActivityCandidate| self.held.look(candidate, None, now, |_| ()).is_none();
        self.fleet.idle_workers() == 0 && self.work.has_ready(count, now, is_free)
    }

    /// How many activities with this tag wait here that anybody could run, counted up to `most`.
    fn waiting_work(&self, most: usize, tag: Option<&str>) -> usize {
        /// Among so many: who commits does not look through all.
        const AMONG: usize = 1_024;
        // With what is bound to a session others are no help.
        let such = |candidate: &ActivityCandidate| {
            candidate.document.tag.as_deref() == tag && candidate.document.session_id.is_none()
        };
        self.work.count_ready(AMONG, most, self.clock.now(), such)
    }

    /// The name to put on what this process puts into the queue of turns and takes itself, if it does.
    pub(crate) fn turn_holder_name(&self) -> Option<String> {
        self.fleet.turn_holder_name()
    }

    /// Whether a turn is ready that a dispatcher takes who filter this.
    pub(crate) fn has_turn_for(&self, filter: &TurnFilter, now: Millis) -> bool {
        self.turns.has_ready(1, now, |candidate| filter.takes(&candidate.pinned))
    }

    /// Whether an activity is ready that a dispatcher takes who filter this.
    pub(crate) fn has_activity_for(&self, filter: &ActivityFilter, now: Millis) -> bool {
        let is_free = |candidate: &ActivityCandidate| self.held.look(candidate, None, now, |_| ()).is_none();
        self.work.has_ready(1, now, |candidate| filter.takes(&candidate.document.tag) && is_free(candidate))
    }

    /// A message is about to be written together with a claim of its instance: nobody else tries that meanwhile. It is the end of one of `ends`
    /// that the instance waits for, or none. The others that are there already, if all are, and nobody tries, and nothing else is ready for the instance.
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
                    && !candidate.ask
                    && candidate.waits_for_others(now)
                    && candidate.ends_there(now) + 1 >= ends =>
            {
                Begin::Take
            }
            _ => Begin::No,
        };
        let others = self.turns.begin(partition, until, now, how)?;
        let others = others.unwrap_or_else(|| TurnCandidate::of_nothing(partition.clone()));
        self.recent.taken(partition, others.ids().chain(std::iter::once(&message.id)), until);
        Some(others)
    }

    /// The claim was not written, or is not ours: anybody can try, with the others that are there.
    pub(crate) fn end_inline_claim(&self, message: &MessageDocument, others: TurnCandidate) {
        self.recent.returned(&message.instance_id, others.ids().chain(std::iter::once(&message.id)));
        self.turn_ended(&message.instance_id);
        self.offer_again(others.messages, self.clock.now());
    }

    /// Puts messages back whose turn came to nothing, each as what it is: first what is due later, which ends may have to come before.
    fn offer_again(&self, mut messages: Vec<Versioned<MessageDocument>>, now: Millis) {
        messages.sort_by_key(|message| message.document.due <= now);
        for Versioned { document, etag } in messages {
            match Kind::of_message(&document) {
                Kind::End => self.offer_completion(document, Some(etag)),
                _ => self.offer_message(document, Some(etag)),
            }
        }
    }

    /// Takes the oldest activity out of the queue that a dispatcher takes who filter this, if it is of this instance, without a session,
    /// and known as it is.
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

    /// An activity that was taken out of the queue was not claimed.
    pub(crate) fn return_activity(&self, candidate: ActivityCandidate, seq: String) {
        let (key, now) = (candidate.document.seq.clone(), self.clock.now());
        self.work.put_back(key, candidate, seq, now, now, |old, new| *old = new);
    }

    /// Whether an activity that was taken out of the queue was claimed is not known: it is looked at again.
    pub(crate) fn try_activity_again(&self, mut candidate: ActivityCandidate, seq: String) {
        const PAUSE: Millis = 200;
        let (key, now) = (candidate.document.seq.clone(), self.clock.now());
        candidate.document.etag = None;
        self.work.put_back(key, candidate, seq, now + PAUSE, now, |old, new| *old = new);
    }

    /// An activity that was taken out of the queue is somebody's.
    pub(crate) fn activity_taken(&self, key: &String) {
        self.work.set_free(key, self.clock.now());
    }

    /// A message is in the queue, or will be visible at its time. It is kept where somebody here takes turns.
    pub(crate) fn offer_message(&self, message: MessageDocument, etag: Option<Etag>) {
        if !self.fleet.takes_turns() {
            self.turns.clear();
            return;
        }
        let (seq, due) = (message.seq.clone(), message.due);
        self.offer_turn(TurnCandidate::of_message(message, etag), seq, due, true);
    }

    /// The end of an activity is in the queue: as [`offer_message`](Self::offer_message), but it waits for others of its instance.
    fn offer_completion(&self, message: MessageDocument, etag: Option<Etag>) {
        // Not past a timer: the activity has ended before it, and must not come after it.
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
        // Of two that come at once, each may have been the last but one.
        let there = || self.turns.peek(&partition, |candidate| candidate.ends_there(now)).unwrap_or(0);
        if waits_until.is_some()
            && self.completion_batching.waits_until(&partition, there().saturating_sub(1), now).is_none()
        {
            self.waits_no_longer(&partition);
        }
    }

    /// Somebody filter what is there now: the ends of activities of this instance wait for no others.
    fn waits_no_longer(&self, partition: &Partition) {
        if self.turns.peek(partition, |candidate| candidate.ends) == Some(true) {
            self.offer_turn(TurnCandidate::of_nothing(partition.clone()), String::new(), 0, true);
        }
    }

    /// A turn was handed out at `now` for a candidate: what the candidate knows of and was not due yet keeps its place in the queue.
    pub(crate) fn keep_rest(&self, candidate: &TurnCandidate, now: Millis) {
        self.recent.returned(&candidate.partition, candidate.ids());
        self.offer_again(
            candidate.messages.iter().filter(|message| message.document.due > now).cloned().collect(),
            now,
        );
        for (id, due) in candidate.seen.iter().filter(|(_, due)| *due > now) {
            let mut later = TurnCandidate::new(candidate.partition.clone(), false);
            later.seen.push((id.clone(), *due));
            // Its place in the queue is not known: it is as old as its time says.
            self.offer_turn(later, format!("{due:015}"), *due, false);
        }
    }

    /// A turn leaves messages behind that did not fit it; `seq` is their place in the queue, or just before it.
    pub(crate) fn offer_rest(&self, partition: &Partition, seq: String) {
        self.offer_turn(TurnCandidate::new(partition.clone(), false), seq, self.clock.now(), true);
    }

    fn offer_turn(&self, mut candidate: TurnCandidate, seq: String, due: Millis, urgent: bool) {
        let now = self.clock.now();
        if !candidate.ends {
            candidate.others = Some(due);
        }
        // The ends of activities wait for each other only; what an attempt has put off for longer is another matter.
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

    /// An activity is in the queue, or will be at its time. It is kept where somebody here runs such.
    pub(crate) fn offer_activity(&self, document: ActivityDocument) {
        if !self.fleet.takes_work(document.tag.as_deref()) {
            return;
        }
        let (key, seq, due) = (document.seq.clone(), document.seq.clone(), document.due);
        let offer = Offer { key, candidate: ActivityCandidate::new(document, &self.here), seq, due, urgent: true };
        self.work.offer(offer, self.clock.now(), |old, new| *old = new);
    }

    /// Activities of an instance have ended elsewhere: there is nothing to take of them.
    pub(crate) fn activities_ended(&self, partition: &Partition, ids: &BTreeSet<DocumentId>) {
        if !ids.is_empty() {
            self.work.forget(|candidate| {
                &candidate.document.instance_id == partition && ids.contains(&candidate.document.id)
            });
        }
    }

    /// A turn of this process has ended: what came for its instance in the meantime can be tried.
    pub(crate) fn turn_ended(&self, partition: &Partition) {
        self.turns.set_free(partition, self.clock.now());
    }

    /// A turn of this process was committed, and its history is this now, if that is known. What came meanwhile can be tried.
    pub(crate) fn turn_committed(&self, partition: &Partition, history: Option<&[Event]>) {
        let now = self.clock.now();
        let open = history.map(completion_batching::open).unwrap_or_default();
        let waits_until = self.completion_batching.turn_ended(partition, open, now);
        let waits = |candidate: &TurnCandidate| {
            candidate.ends
                && candidate.can_wait_until(waits_until)
                && (open.count() == 0 || candidate.ends_there(now) < open.count())
        };
        // The completion_batching of the turn before does not hold any more.
        self.turns.set_free_from(partition, now, |candidate| match (candidate.ends, waits(candidate)) {
            (true, true) => Free { not_before: waits_until, due: Some(waits_until) },
            (true, false) => Free { not_before: 0, due: Some(now) },
            (false, _) => Free::default(),
        });
    }

    /// A turn of this process has consumed these messages.
    pub(crate) fn consumed<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>) {
        self.recent.consumed(partition, ids, self.clock.now());
    }

    /// A turn of this process has taken these messages, and holds them until then.
    pub(crate) fn taken<'a>(&self, partition: &Partition, ids: impl Iterator<Item = &'a DocumentId>, until: Millis) {
        self.recent.taken(partition, ids, until);
    }

    /// The queue of an instance was asked for, or there can be nothing in it but what is known.
    pub(crate) fn asked(&self, partition: &Partition) {
        self.asked.note(partition, self.clock.now());
    }

    /// Whether the queue of an instance was asked for a moment ago.
    pub(crate) fn has_asked(&self, partition: &Partition) -> bool {
        self.asked.is_fresh(partition, self.clock.now())
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
        let candidate = TurnCandidate::new(partition.clone(), false);
        self.offer_turn(candidate, String::new(), due, at_once);
    }

    /// Whether the next step of an instance is this process's, as far as it knows: a turn that it has or is about to take, or an activity.
    pub(crate) fn has_next_step(&self, partition: &Partition) -> bool {
        // What is pinned to a version is perhaps for nobody here.
        let is_ours = |candidate: &TurnCandidate| candidate.pinned.is_none();
        self.here.has(partition) || self.turns.is_at_hand(partition, self.clock.now(), is_ours)
    }

    /// What waits for the next turn of an instance, while this process has one.
    pub(crate) fn peek_turn<R>(&self, partition: &Partition, look: impl FnOnce(&TurnCandidate) -> R) -> Option<R> {
        self.turns.peek(partition, look)
    }

    /// A turn of this process was committed and is followed by the next at once, under a lock until then: takes out what waits for that.
    pub(crate) fn turn_kept(
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

    /// A turn for which a candidate was taken out, and whose claim was made at `now`, came to nothing.
    pub(crate) fn claim_failed(&self, candidate: &TurnCandidate, now: Millis) {
        self.keep_rest(candidate, now);
        self.turn_ended(&candidate.partition);
    }

    /// A claim is under way, until this is dropped: a caller that does not wait waits for it.
    pub(crate) fn claim_in_flight(&self) -> impl Drop + Send + 'static {
        self.in_flight.begin()
    }

    /// A turn of this process holds its lock until then.
    pub(crate) fn turn_holds(&self, partition: &Partition, until: Millis) {
        self.turns.set_busy(partition, until, self.clock.now());
    }
}

/// A message was put into the queue: it is kept where somebody here takes turns, or else somebody is called who does. `knows`
/// is the member that has its instance at hand.
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
        // It had left, as the ring has shown.
        discovery.offer_message(message, etag);
    }
}

/// The end of an activity was put into the queue: as [`message_written`], but the worker does not wait for a ring.
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

/// An activity was put into the queue: it is kept where somebody here runs such, or else somebody is called who does.
pub(crate) async fn activity_written(engine: &Arc<Engine>, document: ActivityDocument) {
    let (slot, tag) = (Slot::of(&document.instance_id), document.tag.clone());
    if engine.discovery.fleet.takes_work(tag.as_deref()) {
        engine.discovery.offer_activity(document);
    } else {
        wakeup::call_worker(engine, slot, tag.as_deref()).await;
    }
}

/// The member that is told when an activity of its turn has ended, if it is alive and another than this process.
pub(crate) fn completion_receiver<'a>(engine: &Engine, by: Option<&'a str>) -> Option<&'a str> {
    by.filter(|by| engine.discovery.fleet.view().is_alive(by))
}

/// What a batch of this process has put into the queues; `offset` is where `operations` begin in the batch.
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
                // What is locked was handed over.
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

/// Calls those who run what nobody here runs, and some others where it is more than those can do soon. `here` has the tags of
/// what this process runs, `elsewhere` how many activities of each other tag there are.
fn call_for_help(
    engine: &Arc<Engine>,
    slot: Slot,
    here: BTreeSet<Option<String>>,
    elsewhere: BTreeMap<Option<String>, usize>,
) {
    /// So many activities are worth one who helps.
    const WORTH: usize = 16;
    const MOST: usize = 8;
    let helpers = |count: usize| (count / WORTH).min(MOST);
    let waiting = |tag: &Option<String>| engine.discovery.waiting_work(WORTH * MOST, tag.as_deref());
    // For each tag, how many are called to run it, and how many to help them.
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
                engine_too.discovery.recovered_by_others.is_now();
            }
            if most > 0 {
                wakeup::call_helpers(&engine_too, slot, tag.as_deref(), first, most).await;
            }
        }
    });
}

/// Leaves the fleet: whoever else is there takes over at once.
pub(crate) async fn leave(engine: &Arc<Engine>, deadline: Deadline) -> Result<(), StoreError> {
    // What is under way may be about to write that this process is there.
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
