//! The tasks of a waiting process: it renews its membership, reads its wake-ups, polls the places that they name, and
//! makes recovery polls. One waiting fetch runs them for all, and only while a fetch waits. Under load a background
//! task runs them now and then.
//!
//! Invariant: the process finds every due row that one of its waiting dispatchers can take, by a wake-up at once, by a
//! poll within seconds. The cost depends neither on the number of workers nor on the rest of the container.
//!
//! A recovery poll queries one physical partition after the other for everything. So it resolves lost wake-ups, dead
//! workers, forgotten timers, undelivered intents and wrong leases.

use super::{
    poll::{self, PollRequest, PollResult, QueueKind, Rest},
    wakeup, Discovery,
};
use crate::{
    cosmos::{Deadline, StoreError, QUERY_TIME},
    engine::Engine,
    model::{clock::millis, Slot, SlotRange, Tags, WakeupDocument},
};
use azure_data_cosmos::feed::FeedRange;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{atomic::Ordering, Arc},
    time::Duration,
};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tracing::{debug, warn};

/// A process that has waited for so long is one of the fleet: shorter waits are worth no document.
const JOIN_AFTER: Duration = Duration::from_millis(500);
/// While there is something to do, the bell is looked at more often: replies come that way.
const BUSY_BELL: Duration = Duration::from_millis(100);
/// Where there is more, it is looked at so soon.
const SOON: Duration = Duration::from_millis(5);
const BUSY: Duration = Duration::from_secs(1);
/// Who has called for help and has nothing left to do itself waits for the last ends of activities: for a moment more often still.
const LAST_BELL: Duration = Duration::from_millis(30);
const LAST: Duration = Duration::from_millis(300);
const HELPED: Duration = Duration::from_secs(10);
/// How often the list of physical partitions is asked for.
const PARTITIONS: Duration = Duration::from_secs(60);
/// A ring that leads to nothing is looked after again: a replica may lag.
const AGAIN: [Duration; 2] = [Duration::from_millis(150), Duration::from_millis(600)];
/// The longest pause between sweeps.
const RAREST_SWEEP: Duration = Duration::from_secs(30);
/// Where a sweep found something, there is more.
const SWEEP_AGAIN: Duration = Duration::from_millis(250);
/// Timers are taken in before their time, this much at least and at most.
const AHEAD: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(120));
/// Rings of two members within this time may have overwritten each other.
const OVERWRITTEN: Duration = Duration::from_secs(5);
/// Where there is no sign of that, what is looked after is looked at once after a ring, so much later.
const OVERHEARD: Duration = Duration::from_secs(1);
/// Where activities were left to others so lately, their ends are expected.
const AWAITED: Duration = Duration::from_secs(10);
/// A partition that does not answer is asked more and more rarely.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);
/// After a failure.
const PAUSE: Duration = Duration::from_secs(1);
/// What a renewal may take: whatever else is to be done waits for it.
const PATIENCE: Duration = QUERY_TIME;
/// A queue with plenty at hand is looked at again then.
const PUT_OFF: Duration = Duration::from_millis(40);
/// Where so much was found, some of it is taken before there is more looking.
const ENOUGH: usize = 100;
/// Under load chores may be late by so much.
const OVERDUE: Duration = Duration::from_millis(250);

/// A physical partition.
struct Physical {
    range: FeedRange,
    slots: SlotRange,
    silence: Option<Silence>,
}

/// A partition has not answered.
#[derive(Clone, Copy)]
struct Silence {
    /// It is not asked before then: whoever waits for it hears no bell and asks nobody else.
    until: Instant,
    pause: Duration,
}

impl Silence {
    /// It has not answered, again or for the first time.
    fn after(before: Option<Self>) -> Self {
        let pause = before.map_or(PAUSE, |before| (before.pause * 2).min(LONGEST_SILENCE));
        Self { until: Instant::now() + pause, pause }
    }
}

impl Physical {
    /// Until when it is not to be asked, if it is not.
    fn is_silent(&self) -> Option<Instant> {
        self.silence.map(|silence| silence.until).filter(|until| *until > Instant::now())
    }

    fn answered(&mut self, answer: &Result<PollResult, StoreError>) {
        self.silence = match answer {
            Ok(_) | Err(StoreError::PartitionsChanged { .. }) => None,
            Err(_) => Some(Silence::after(self.silence)),
        };
    }
}

/// Where looks at physical partitions have ended, to be gone on from.
type Rests = BTreeMap<usize, Rest>;

/// Which queue to look at, where and when.
struct PollTask {
    queue: QueueKind,
    at: Instant,
    what: Where,
    /// How often it was looked at in vain.
    tries: usize,
    /// Something was left to others meanwhile.
    young: bool,
    rests: Rests,
}

/// An errand that has not been run.
fn errand_at(queue: QueueKind, at: Instant, what: Where) -> PollTask {
    // A ring that leads to nothing is looked after again; whatever else there is was there before.
    let tries = if matches!(what, Where::Ours | Where::Awaited(_)) { AGAIN.len() } else { 0 };
    PollTask { queue, at, what, tries, young: false, rests: Rests::new() }
}

impl PollTask {
    /// How soon to look again after this was found, and how often it was in vain by then; none where that is all.
    fn again(&self, found: &PollResult) -> Option<(Duration, usize)> {
        let in_vain = || AGAIN.get(self.tries).map(|pause| (*pause, self.tries + 1));
        let helps = matches!(self.what, Where::Help(_));
        match (found.more, found.news > 0) {
            (true, true) if helps => Some((SOON, 0)),
            (true, true) => Some((SOON, AGAIN.len())),
            // All that others have too many of is known here, and can't be taken: a session is another's, or they come to it.
            (true, false) if helps => in_vain(),
            (true, false) => Some((BUSY_BELL, AGAIN.len())),
            (false, false) if !helps => in_vain(),
            (false, _) => None,
        }
    }
}

/// Where to look.
#[derive(Clone)]
enum Where {
    /// Everything that this process looks after.
    Ours,
    /// Where others have something for it, though it may not look after it.
    Awaited(BTreeSet<Slot>),
    /// What a bell has named.
    Named(BTreeSet<Slot>),
    /// Where others have more than they can do soon.
    Help(BTreeSet<Slot>),
}

impl Where {
    /// Goes there, too, if that is of the same kind.
    fn add(&mut self, other: &Self) -> bool {
        match (self, other) {
            (Self::Ours, Self::Ours) => {}
            (Self::Awaited(slots), Self::Awaited(others))
            | (Self::Named(slots), Self::Named(others))
            | (Self::Help(slots), Self::Help(others)) => slots.extend(others),
            _ => return false,
        }
        true
    }

    /// What it means in a physical partition: the slots to ask for, and those among them that a bell has named. `ours` are the
    /// slots that this process looks after.
    fn within(&self, physical: &Physical, ours: SlotRange) -> Option<(SlotRange, Vec<Slot>)> {
        let (Self::Named(named) | Self::Help(named) | Self::Awaited(named)) = self else {
            return ours.overlaps(physical.slots).then_some((ours, Vec::new()));
        };
        let named: Vec<Slot> = named.iter().copied().filter(|slot| physical.slots.contains(*slot)).collect();
        let around = (!named.is_empty()).then(|| around(&named))?;
        // What is awaited is told by whom the rows say that they are for.
        Some((around, if matches!(self, Self::Awaited(_)) { Vec::new() } else { named }))
    }
}

/// What has come of an errand.
#[derive(Default)]
struct Looked {
    found: PollResult,
    /// Why some could not be looked at.
    trouble: Option<StoreError>,
    /// When those may be looked at that could not.
    later: Option<Instant>,
}

impl Looked {
    fn leave(&mut self, until: Instant) {
        self.later = Some(self.later.map_or(until, |later| later.min(until)));
    }

    fn add(&mut self, found: Result<PollResult, StoreError>) {
        match found {
            Ok(found) => self.found.add(found),
            Err(error) => {
                self.trouble.get_or_insert(error);
            }
        }
    }
}

/// When what is to be done. Whoever holds it does it.
pub(super) struct Watch {
    /// Since when somebody waits.
    since: Option<Instant>,
    renewal: Option<Instant>,
    bell: Instant,
    sweep: Instant,
    errands: Vec<PollTask>,
    partitions: Vec<Physical>,
    partitions_at: Option<Instant>,
    /// Which partition is swept next.
    turn: usize,
    /// The last ring that was heard, from whom and when.
    heard: Option<(String, String, Instant)>,
    /// The others have not been told yet that this process is there.
    is_new: bool,
    /// What it looked after when it last had a place among them.
    ours: Option<(SlotRange, SlotRange)>,
    /// Those of sweeps.
    rests: BTreeMap<(usize, QueueKind), Rest>,
}

enum Task {
    Renew,
    Wakeup,
    Poll(usize),
    RecoveryPoll,
}

impl Watch {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            since: None,
            renewal: None,
            bell: now,
            sweep: now,
            errands: Vec::new(),
            partitions: Vec::new(),
            partitions_at: None,
            turn: 0,
            heard: None,
            is_new: false,
            ours: None,
            rests: BTreeMap::new(),
        }
    }

    /// Somebody waits. The first look, and that of one who asks for something else, is at everything.
    fn begin(&mut self, engine: &Engine) {
        let now = Instant::now();
        let anew = engine.discovery.asked_anew.swap(false, Ordering::SeqCst);
        if self.since.is_none() {
            self.since = Some(now);
            self.renewal = Some(now + JOIN_AFTER);
            self.bell = now + JOIN_AFTER;
            self.sweep = now + engine.config.poll_interval().mul_f64(engine.config.randomness().fraction());
        } else if anew {
            // The others must know.
            self.renewal = self.renewal.map(|renewal| renewal.min(now + JOIN_AFTER));
        }
        if anew {
            self.look_at_ours(now);
        }
    }

    fn look_at_ours(&mut self, at: Instant) {
        for queue in [QueueKind::Turns, QueueKind::Work] {
            self.push(errand_at(queue, at, Where::Ours));
        }
    }

    /// Looks at what a bell has named, and at what was to be looked at so before.
    fn look_at_named(&mut self, queue: QueueKind, at: Instant, slots: BTreeSet<Slot>) {
        if slots.is_empty() {
            return;
        }
        for errand in self.errands.iter_mut().filter(|errand| errand.queue == queue) {
            let Where::Named(named) = &mut errand.what else { continue };
            if !slots.is_subset(named) {
                named.extend(slots);
                // That is another question.
                errand.rests.clear();
            }
            (errand.at, errand.tries) = (errand.at.min(at), 0);
            return;
        }
        self.push(errand_at(queue, at, Where::Named(slots)));
    }

    /// Helps where a bell says, and where it was to help before.
    fn help(&mut self, at: Instant, mut slots: BTreeSet<Slot>) {
        if slots.is_empty() {
            return;
        }
        self.errands.retain(|errand| match &errand.what {
            Where::Help(others) => {
                slots.extend(others);
                false
            }
            _ => true,
        });
        self.push(errand_at(QueueKind::Work, at, Where::Help(slots)));
    }

    /// Of errands to everything in a queue one is enough.
    fn push(&mut self, mut errand: PollTask) {
        let is_same = |other: &PollTask| other.queue == errand.queue && matches!(other.what, Where::Ours);
        let same = self.errands.iter().position(is_same).filter(|_| matches!(errand.what, Where::Ours));
        if let Some(other) = same.map(|at| self.errands.swap_remove(at)) {
            errand.at = errand.at.min(other.at);
            errand.young |= other.young;
            // It goes on from there.
            errand.rests = if errand.rests.is_empty() { other.rests } else { errand.rests };
        }
        self.errands.push(errand);
    }

    /// An errand to what did not answer. One like it that waits already does it, too: they would pile up meanwhile.
    fn push_silent(&mut self, errand: PollTask) {
        let queue = errand.queue;
        let took_over = self.errands.iter_mut().any(|other| other.queue == queue && other.what.add(&errand.what));
        if !took_over {
            self.push(errand);
        }
    }

    /// When there is something to do next.
    pub(super) fn next(&self) -> Instant {
        let errands = self.errands.iter().map(|errand| errand.at);
        errands.chain(self.renewal).chain([self.bell, self.sweep]).min().unwrap_or_else(Instant::now)
    }

    /// What has been due for longest: whatever takes long or fails again and again keeps nothing else from its turn.
    fn due(&self, now: Instant) -> Option<Task> {
        let errands = self.errands.iter().enumerate().map(|(index, errand)| (errand.at, Task::Poll(index)));
        let renewal = self.renewal.map(|at| (at, Task::Renew));
        let chores = errands.chain(renewal).chain([(self.bell, Task::Wakeup), (self.sweep, Task::RecoveryPoll)]);
        chores.filter(|(at, _)| *at <= now).min_by_key(|(at, _)| *at).map(|(_, chore)| chore)
    }

    /// Does one thing that is due.
    pub(super) async fn work_off(&mut self, engine: &Arc<Engine>) -> Result<(), StoreError> {
        if engine.stopping.is_cancelled() {
            // Who has left does not come back.
            return Ok(());
        }
        self.begin(engine);
        self.put_off(engine);
        let Some(chore) = self.due(Instant::now()) else { return Ok(()) };
        // A renewal that arrived after this process has left would bring it back: it is waited for.
        let only_reads = !matches!(chore, Task::Renew);
        tokio::select! {
            biased;
            () = engine.stopping.cancelled(), if only_reads => Ok(()),
            outcome = self.carry_out(engine, chore) => outcome,
        }
    }

    /// What fails is tried again after a pause, so that an outage is not made worse, and puts nothing else off.
    async fn carry_out(&mut self, engine: &Arc<Engine>, chore: Task) -> Result<(), StoreError> {
        match chore {
            Task::Poll(at) => {
                let errand = self.errands.swap_remove(at);
                self.run(engine, errand).await
            }
            Task::Renew => self.renew(engine).await,
            Task::Wakeup => {
                let heard = self.listen(engine).await;
                self.bell = self.bell.max(pause_after(&heard));
                heard
            }
            Task::RecoveryPoll => {
                let swept = self.sweep(engine).await;
                self.sweep = self.sweep.max(pause_after(&swept));
                swept
            }
        }
    }

    /// Errands to a queue with plenty at hand wait, and keep nothing else from being done.
    fn put_off(&mut self, engine: &Engine) {
        let (discovery, now) = (&engine.discovery, engine.now());
        for errand in self.errands.iter_mut().filter(|errand| errand.at <= Instant::now()) {
            let has_plenty = match errand.what {
                // Who helps takes no more from others than it needs.
                Where::Help(_) => discovery.has_work(discovery.fleet.workers() * 2 + 1, now),
                _ => discovery.has_plenty(errand.queue, now),
            };
            if has_plenty {
                errand.at = Instant::now() + PUT_OFF;
            }
        }
    }

    async fn renew(&mut self, engine: &Arc<Engine>) -> Result<(), StoreError> {
        let fleet = &engine.discovery.fleet;
        self.is_new |= !fleet.is_member();
        let renewed = fleet.renew(engine, Deadline::after(PATIENCE)).await;
        let jitter = 0.9 + engine.config.randomness().fraction() / 5.0;
        let pause = if renewed.is_ok() { super::members::LIST.mul_f64(jitter) } else { PAUSE * 2 };
        self.renewal = Some(Instant::now() + pause);
        renewed?;
        engine.lifecycle().apply_retention_soon(engine);
        let view = fleet.view();
        // Somebody who rings may have listed before: what counts is what was looked at so far.
        if self.ours.replace((view.turns, view.work)) != Some((view.turns, view.work)) {
            // Those are other slots.
            self.errands.iter_mut().for_each(|errand| errand.rests.clear());
            self.look_at_ours(Instant::now());
        }
        if std::mem::take(&mut self.is_new) {
            let engine_too = engine.clone();
            engine.spawn(async move { wakeup::tell_others(&engine_too).await });
        }
        Ok(())
    }

    /// Looks at the bell.
    async fn listen(&mut self, engine: &Arc<Engine>) -> Result<(), StoreError> {
        let interval = engine.config.wakeup_interval();
        let discovery = &engine.discovery;
        let awaits_last = discovery.called_for_help_within(HELPED)
            && discovery.took_something_within(LAST)
            && discovery.fleet.idle_workers() > 0;
        let pause = match discovery.took_something_within(BUSY) {
            true if awaits_last => interval.min(LAST_BELL),
            true => interval.min(BUSY_BELL),
            false => interval,
        };
        self.bell = Instant::now() + pause;
        let me = engine.discovery.fleet.me();
        let (partition, id) = (WakeupDocument::partition(me), WakeupDocument::document_id());
        let Some(bell) = engine.store.read_eventual::<WakeupDocument>(&partition, &id, Deadline::after(PAUSE)).await?
        else {
            if engine.discovery.fleet.was_cleared_away() {
                self.renewal = Some(Instant::now());
            }
            return Ok(());
        };
        let bell = bell.document;
        let now = Instant::now();
        if bell.from == me || self.heard.as_ref().is_some_and(|(ring, ..)| *ring == bell.wakeup_id) {
            return Ok(());
        }
        debug!(
            from = bell.from,
            turns = bell.turns.len(),
            work = bell.activities.len(),
            help = bell.help.len(),
            list = bell.list,
            "heard the bell"
        );
        let other = |(_, from, at): &(String, String, Instant)| *from != bell.from && at.elapsed() < OVERWRITTEN;
        let perhaps_more = self.heard.as_ref().is_some_and(other);
        self.heard = Some((bell.wakeup_id, bell.from, now));
        if bell.list {
            self.renewal = Some(now);
        }
        self.look_at_named(QueueKind::Turns, now, bell.turns);
        self.look_at_named(QueueKind::Work, now, bell.activities);
        self.help(now, bell.help);
        // A ring that was overwritten before it was heard leaves no trace.
        self.look_at_ours(if perhaps_more { now } else { now + OVERHEARD });
        let awaited = engine.discovery.awaited_within(AWAITED);
        if !awaited.is_empty() && !self.errands.iter().any(|errand| matches!(errand.what, Where::Awaited(_))) {
            self.push(errand_at(QueueKind::Turns, now + OVERHEARD, Where::Awaited(awaited)));
        }
        Ok(())
    }

    /// Looks where an errand says.
    async fn run(&mut self, engine: &Arc<Engine>, mut errand: PollTask) -> Result<(), StoreError> {
        let looked = self.look(engine, &mut errand).await;
        let now = Instant::now();
        let Looked { found, trouble, later } = match looked {
            Ok(looked) => looked,
            Err(error) => {
                self.push(PollTask { at: now + PAUSE, rests: Rests::new(), ..errand });
                return Err(error);
            }
        };
        if trouble.is_some() {
            // What could not be asked may be elsewhere by now.
            self.partitions_at = None;
        }
        if let Some(StoreError::PartitionsChanged { .. }) = trouble {
            // The present partitions are asked at once.
            self.push(PollTask { at: now, rests: Rests::new(), ..errand });
            return Ok(());
        }
        let rest = later.map(|later| errand_at(errand.queue, later, errand.what.clone()));
        errand.young |= found.young > 0 && !matches!(errand.what, Where::Awaited(_));
        if let Some((pause, tries)) = errand.again(&found) {
            // What is not gone on with is asked for from the start.
            let rests = if found.more { std::mem::take(&mut errand.rests) } else { Rests::new() };
            self.push(PollTask { at: now + pause, tries, rests, ..errand });
        } else if errand.young {
            // Left to others: if they don't take it, it is ours.
            self.push(errand_at(errand.queue, now + Duration::from_millis(poll::GRACE), Where::Ours));
        }
        if let Some(rest) = rest {
            self.push_silent(rest);
        }
        trouble.map_or(Ok(()), Err)
    }

    /// A partition that can't be asked hides none of the others.
    async fn look(&mut self, engine: &Arc<Engine>, errand: &mut PollTask) -> Result<Looked, StoreError> {
        if self.know_partitions(engine).await? {
            errand.rests.clear();
        }
        let fleet = &engine.discovery.fleet;
        let (view, tags) = (fleet.view(), fleet.tags());
        let ours = match errand.queue {
            QueueKind::Turns => view.turns,
            QueueKind::Work => view.work,
        };
        let mut looked = Looked::default();
        for (at, physical) in self.partitions.iter_mut().enumerate() {
            let Some((slots, named)) = errand.what.within(physical, ours) else { continue };
            if let Some(until) = physical.is_silent() {
                looked.leave(until);
                continue;
            }
            let look = PollRequest { named: &named, ..PollRequest::at(Some(&physical.range), slots) };
            let rest = errand.rests.entry(at).or_default();
            let answer = match (errand.queue, &tags) {
                (QueueKind::Turns, _) if fleet.takes_turns() => {
                    poll::turns(engine, &PollRequest { ahead: millis(AHEAD.0), ..look }, rest).await
                }
                (QueueKind::Work, Some(tags)) if matches!(errand.what, Where::Help(_)) => {
                    poll::help(engine, &look, tags).await
                }
                (QueueKind::Work, Some(tags)) => poll::work(engine, &look, tags, rest).await,
                _ => return Ok(looked),
            };
            physical.answered(&answer);
            if let Some(until) = physical.is_silent() {
                *rest = None;
                looked.leave(until);
            }
            looked.add(answer);
            if looked.found.news >= ENOUGH {
                looked.found.more = true;
                break;
            }
        }
        Ok(looked)
    }

    /// Asks one physical partition for everything, whoever looks after it.
    async fn sweep(&mut self, engine: &Arc<Engine>) -> Result<(), StoreError> {
        self.know_partitions(engine).await?;
        engine.forget_expired();
        let fleet = &engine.discovery.fleet;
        let (count, members) = (self.partitions.len().max(1), fleet.view().others.len() + 1);
        let base = engine.config.poll_interval();
        let shared = base.mul_f64((members as f64 / count as f64).max(1.0)).min(RAREST_SWEEP.max(base));
        let jitter = 0.75 + engine.config.randomness().fraction() / 2.0;
        self.sweep = Instant::now() + shared.mul_f64(jitter);
        let at = self.turn % count;
        // Whatever comes of it, the next one is another's turn.
        self.turn = at + 1;
        let Some(physical) = self.partitions.get(at).filter(|physical| physical.is_silent().is_none()) else {
            return Ok(());
        };
        let nothing = Tags { any: false, untagged: false, tags: BTreeSet::new() };
        let tags = fleet.tags().unwrap_or(nothing);
        // As far as the next sweep of this partition.
        let ahead = (shared * u32::try_from(count).unwrap_or(u32::MAX) * 2).clamp(AHEAD.0, AHEAD.1);
        let range = physical.range.clone();
        let look = PollRequest { ahead: millis(ahead), ..PollRequest::at(Some(&range), SlotRange::ALL) };
        let answer = poll::everything(engine, &look, &tags).await;
        if let Some(physical) = self.partitions.get_mut(at) {
            physical.answered(&answer);
        }
        if let Err(StoreError::PartitionsChanged { .. }) = answer {
            (self.partitions_at, self.sweep) = (None, Instant::now());
            return Ok(());
        }
        let mut found = answer?;
        if std::mem::take(&mut found.more) && found.news == 0 {
            // One queue may hide the other, and rows that nobody here takes those behind them.
            let turns = self.rests.entry((at, QueueKind::Turns)).or_default();
            if fleet.takes_turns() {
                found.add(poll::turns(engine, &look, turns).await?);
            }
            let work = self.rests.entry((at, QueueKind::Work)).or_default();
            found.add(poll::work(engine, &PollRequest { ahead: 0, ..look }, &tags, work).await?);
        }
        if found.news > 0 || found.more {
            self.sweep = Instant::now() + SWEEP_AGAIN.min(base);
        }
        Ok(())
    }

    /// The physical partitions, asked for now and then. Whether they are others than before.
    async fn know_partitions(&mut self, engine: &Engine) -> Result<bool, StoreError> {
        if self.partitions_at.is_some_and(|at| at.elapsed() < PARTITIONS) {
            return Ok(false);
        }
        let ranges = match engine.store.physical_partitions(Deadline::after(PATIENCE)).await {
            Ok(ranges) => ranges,
            Err(_) if !self.partitions.is_empty() => return Ok(false),
            Err(error) => return Err(error),
        };
        let silence = |slots: SlotRange| self.partitions.iter().find(|known| known.slots == slots)?.silence;
        let physical = |range: FeedRange| {
            let slots = SlotRange::of_feed_range(&range);
            Physical { slots, range, silence: silence(slots) }
        };
        let partitions: Vec<Physical> = ranges.into_iter().map(physical).collect();
        let are_others = !partitions.iter().map(|p| &p.range).eq(self.partitions.iter().map(|p| &p.range));
        if are_others {
            self.rests.clear();
            self.errands.iter_mut().for_each(|errand| errand.rests.clear());
            self.turn = (engine.config.randomness().fraction() * partitions.len() as f64) as usize;
        }
        self.partitions = partitions;
        self.partitions_at = Some(Instant::now());
        Ok(are_others)
    }
}

/// When what came to this may be done again.
fn pause_after(outcome: &Result<(), StoreError>) -> Instant {
    Instant::now() + if outcome.is_ok() { Duration::ZERO } else { PAUSE }
}

/// The smallest range with all of these slots.
fn around(slots: &[Slot]) -> SlotRange {
    let numbers = slots.iter().map(|slot| u16::from(slot.number()));
    match (numbers.clone().min(), numbers.max()) {
        (Some(first), Some(last)) => SlotRange::new(first, last + 1),
        _ => SlotRange::NONE,
    }
}

/// Does what is due in a task of its own: a caller that goes away, or has waited long enough, leaves it to be finished. What is
/// returned tells when, and what was wrong; it tells nothing if the task panicked.
pub(super) fn work_off_apart(engine: &Arc<Engine>) -> oneshot::Receiver<Result<(), StoreError>> {
    let (engine_too, (sender, receiver)) = (engine.clone(), oneshot::channel());
    engine.spawn(async move {
        let worked_off = match engine_too.discovery.watch.try_lock() {
            Ok(mut watch) => watch.work_off(&engine_too).await,
            Err(_) => Ok(()),
        };
        if let Err(Err(error)) = sender.send(worked_off) {
            warn!(%error, "poll failed, will retry");
        }
    });
    receiver
}

/// Under load nobody waits, and so nobody would look after others' work: a task does, now and then.
pub(super) fn work_off_if_overdue(engine: &Arc<Engine>) {
    let discovery: &Discovery = &engine.discovery;
    let is_overdue = |watch: &Watch| watch.since.is_some() && watch.next() + OVERDUE <= Instant::now();
    if discovery.watch.try_lock().is_ok_and(|watch| is_overdue(&watch)) {
        drop(work_off_apart(engine));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn found(news: usize, more: bool) -> PollResult {
        PollResult { news, young: 0, more }
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_been_due_for_longest_is_done_first_whatever_else_fails_again_and_again() {
        let mut watch = Watch::new();
        let now = Instant::now() + SECOND * 60;
        (watch.renewal, watch.bell, watch.sweep) = (Some(now + SECOND), now - SECOND, now - SECOND * 2);
        watch.push(errand_at(QueueKind::Turns, now - SECOND * 3, Where::Ours));
        let mut done = Vec::new();
        // Each of them fails, takes three seconds and is due again a second later, but for the renewal.
        for step in 0..8 {
            let now = now + SECOND * 3 * step;
            let later = now + SECOND * 4;
            match watch.due(now).unwrap() {
                Task::Poll(at) => watch.errands[at].at = later,
                Task::Renew => watch.renewal = Some(later + SECOND),
                Task::Wakeup => watch.bell = later,
                Task::RecoveryPoll => watch.sweep = later,
            }
            let names = [(watch.errands[0].at, 'e'), (watch.bell, 'b'), (watch.sweep, 's')];
            done.push(names.into_iter().find(|(at, _)| *at == later).map_or('r', |(_, name)| name));
        }
        assert_eq!(done.iter().collect::<String>(), "esbresbr");
        assert!(watch.due(Instant::now()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn errands_to_what_does_not_answer_dont_pile_up() {
        let mut watch = Watch::new();
        let named = |slot: Slot| Where::Named(BTreeSet::from([slot]));
        let slots: BTreeSet<Slot> = (0..50).map(|n: u32| Slot::of_instance(&n.to_string())).collect();
        for slot in slots.iter().copied() {
            for queue in [QueueKind::Turns, QueueKind::Work] {
                watch.push_silent(errand_at(queue, Instant::now(), named(slot)));
                watch.push_silent(errand_at(queue, Instant::now(), Where::Ours));
            }
        }
        assert_eq!(watch.errands.len(), 4, "one of each kind to each queue");
        let told = watch.errands.iter().filter_map(|errand| match &errand.what {
            Where::Named(named) => Some(named),
            _ => None,
        });
        assert_eq!(told.collect::<Vec<_>>(), [&slots, &slots], "and none of the slots is forgotten");
        // A ring is something else: it may name what did answer.
        watch.push(errand_at(QueueKind::Turns, Instant::now(), named(Slot::of_instance("i"))));
        assert_eq!(watch.errands.len(), 5);
    }

    #[tokio::test(start_paused = true)]
    async fn a_partition_that_does_not_answer_is_asked_more_and_more_rarely_until_it_does() {
        let slots = SlotRange::ALL;
        let mut physical = Physical { range: FeedRange::full(), slots, silence: None };
        let mut pauses = Vec::new();
        for _ in 0..7 {
            physical.answered(&Err(StoreError::Unavailable { detail: String::new() }));
            pauses.push((physical.is_silent().unwrap() - Instant::now()).as_secs());
            tokio::time::advance(Duration::from_secs(pauses[pauses.len() - 1])).await;
            assert!(physical.is_silent().is_none());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 30, 30]);
        physical.answered(&Ok(PollResult::default()));
        assert!(physical.silence.is_none());
    }

    #[test]
    fn who_helps_ends_where_all_that_there_is_can_not_be_taken() {
        let now = Instant::now();
        let mut helps = errand_at(QueueKind::Work, now, Where::Help(BTreeSet::new()));
        assert_eq!(helps.again(&found(3, true)), Some((SOON, 0)));
        let mut looks = 1;
        while let Some((_, tries)) = helps.again(&found(0, true)) {
            helps.tries = tries;
            looks += 1;
        }
        assert_eq!(looks, 1 + AGAIN.len());
        assert_eq!(helps.again(&found(0, false)), None);
        let named = errand_at(QueueKind::Work, now, Where::Named(BTreeSet::new()));
        assert_eq!(named.again(&found(0, false)), Some((AGAIN[0], 1)), "a replica may lag");
        assert_eq!(named.again(&found(0, true)), Some((BUSY_BELL, AGAIN.len())), "what is behind it may be for us");
        let ours = errand_at(QueueKind::Work, now, Where::Ours);
        assert_eq!(ours.again(&found(0, false)), None);
    }
}
