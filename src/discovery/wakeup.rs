//! Wake-ups: a process that enqueues work for another worker sends that worker a wake-up.
//!
//! Invariant: a wake-up decides nothing. The process sends it after the write that it announces, so the receiver finds
//! the work. A wake-up may be lost, late, overwritten by another or unread. A poll then finds the work. A failed
//! wake-up never fails the write that it announces.
//!
//! Each worker reads its own wake-up document, one point read however many partitions and workers there are. A wake-up
//! is one unconditional replace that names slots. A 404 means that the worker has left, and the next one gets the
//! wake-up. Wake-ups are rare: one per receiver within [`GAP`], and ten a second per process. Later ones are collected
//! into the next.

use crate::{
    cosmos::{Deadline, Refusal, StoreError, WriteOutcome},
    discovery::members::View,
    engine::Engine,
    model::{MemberDocument, Slot, WakeupDocument},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::time::Instant;
use tracing::debug;

/// A member is not rung more often.
const GAP: Duration = Duration::from_millis(100);
/// Rings that a process may send at once, and how often one more is added.
const BURST: u32 = 16;
const REFILL: Duration = Duration::from_millis(100);
/// What a ring may take: who rings is in a hurry.
const PATIENCE: Duration = Duration::from_secs(1);
/// Whoever is alive has heard a ring by then.
const HEARD_WITHIN: Duration = Duration::from_secs(1);
/// When a member was rung is remembered for so long: of those that wait, who was rung first is rung last.
const FORGET: Duration = Duration::from_secs(10);
/// A list that is older is read again before somebody is rung, or before nobody is.
const FRESH: Duration = Duration::from_secs(4);
const YOUNG: Duration = Duration::from_secs(1);
/// Of those that come or go, so many members are told; the others find out when they list.
const MOST_TOLD: usize = 32;

/// Whom to ring, and what for. It is kept until it was told, since the one who was chosen may have left by then.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum WakeupReason {
    /// Somebody who runs turns: `knows` if it is alive, or else whoever looks after the slot.
    Runners { slot: Slot, pinned: Option<semver::Version>, knows: Option<String> },
    /// The first of those who run activities with this tag.
    Worker { slot: Slot, tag: Option<String> },
    /// Some who run them, after the first ones: there is more than those can do soon.
    Helpers { slot: Slot, tag: Option<String>, after: usize, most: usize },
    /// The process whose worker owns sessions as `owner`.
    Owner { slot: Slot, owner: String },
    /// Everybody: somebody has come or gone.
    Others,
}

impl WakeupReason {
    /// Who is to be rung, of those that are there.
    fn choose(&self, view: &View) -> Vec<String> {
        let names = |members: &[&MemberDocument]| members.iter().map(|member| member.member.clone()).collect();
        match self {
            Self::Runners { knows: Some(knows), .. } if view.is_alive(knows) => vec![knows.clone()],
            Self::Runners { slot, pinned, .. } => {
                let runners = view.runners(*slot, pinned.as_ref());
                let need = |member: &MemberDocument| member.turns.as_ref().map(|register| register.need.clone());
                // Members that run other versions look after it, too, and nobody here knows which of them is meant.
                let first = runners.first().copied();
                let others = runners.iter().filter(|other| first.is_some_and(|first| need(other) != need(first)));
                names(&first.into_iter().chain(others.take(1).copied()).collect::<Vec<_>>())
            }
            Self::Worker { slot, tag } => {
                names(&view.workers(*slot, tag.as_deref()).into_iter().take(1).collect::<Vec<_>>())
            }
            Self::Helpers { slot, tag, after, most } => {
                let workers = view.workers(*slot, tag.as_deref());
                names(&workers.into_iter().skip(*after).take(*most).collect::<Vec<_>>())
            }
            Self::Owner { owner, .. } => names(&view.owner(owner).into_iter().collect::<Vec<_>>()),
            Self::Others => names(&view.others.iter().take(MOST_TOLD).collect::<Vec<_>>()),
        }
    }

    /// Puts into a bell what it is about.
    fn tell(&self, bell: &mut WakeupDocument) {
        match self {
            Self::Runners { slot, .. } => drop(bell.turns.insert(*slot)),
            Self::Worker { slot, .. } | Self::Owner { slot, .. } => drop(bell.activities.insert(*slot)),
            Self::Helpers { slot, .. } => drop(bell.help.insert(*slot)),
            Self::Others => bell.list = true,
        }
    }
}

type Calls = BTreeSet<WakeupReason>;

/// The rings that this process sends.
#[derive(Default)]
pub(super) struct WakeupSender(Mutex<Sending>);

#[derive(Default)]
struct Sending {
    /// What waits for its turn.
    waiting: BTreeMap<String, Calls>,
    /// When each member was last rung.
    rung: BTreeMap<String, Instant>,
    /// What members were told of late: a ring overwrites the one before it, which may not have been heard.
    told: Vec<(Instant, String, Calls)>,
    /// What is left of the burst, and since when it is added to.
    left: u32,
    since: Option<Instant>,
    /// A task sends what waits.
    at_work: bool,
}

impl Sending {
    /// When the first of those that wait may be rung.
    fn next(&mut self, now: Instant) -> Option<(Instant, String)> {
        self.refill(now);
        let allowed = if self.left > 0 { now } else { self.since.map_or(now, |since| since + REFILL) };
        let may = |member: &String| self.rung.get(member).map_or(allowed, |rung| allowed.max(*rung + GAP));
        let waiting = self.waiting.keys().map(|member| (may(member), self.rung.get(member), member));
        waiting.min().map(|(at, _, member)| (at, member.clone()))
    }

    fn refill(&mut self, now: Instant) {
        let Some(since) = self.since else {
            (self.left, self.since) = (BURST, Some(now));
            return;
        };
        let more = u32::try_from((now - since).as_millis() / REFILL.as_millis()).unwrap_or(BURST);
        if more > 0 {
            self.left = self.left.saturating_add(more).min(BURST);
            self.since = Some(since + REFILL * more);
        }
    }

    /// Takes what a member is told that is rung now.
    fn take(&mut self, member: &str, now: Instant) -> Option<Calls> {
        let news = self.waiting.remove(member)?;
        self.refill(now);
        self.told.retain(|(told, ..)| *told + HEARD_WITHIN > now);
        let mut calls = news.clone();
        for (_, _, earlier) in self.told.iter().filter(|(_, told, _)| told == member) {
            calls.extend(earlier.iter().cloned());
        }
        self.told.push((now, member.to_owned(), news));
        self.left = self.left.saturating_sub(1);
        self.rung.retain(|_, rung| *rung + FORGET > now);
        self.rung.insert(member.to_owned(), now);
        Some(calls)
    }
}

impl Sending {
    /// Who was to be told this has left: those are told whom it is for now.
    fn wait_for_others(&mut self, calls: Calls, view: &View) {
        for call in calls {
            for member in call.choose(view) {
                self.waiting.entry(member).or_default().insert(call.clone());
            }
        }
    }
}

impl WakeupSender {
    fn lock(&self) -> std::sync::MutexGuard<'_, Sending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody who runs turns is called: `knows` if it is alive, or else whoever looks after the slot.
pub(super) async fn call_runners(
    engine: &Arc<Engine>,
    slot: Slot,
    pinned: Option<&semver::Version>,
    knows: Option<&str>,
) {
    let (pinned, knows) = (pinned.cloned(), knows.map(ToOwned::to_owned));
    call(engine, WakeupReason::Runners { slot, pinned, knows }).await;
}

/// Somebody who runs activities with this tag is called.
pub(super) async fn call_worker(engine: &Arc<Engine>, slot: Slot, tag: Option<&str>) {
    call(engine, WakeupReason::Worker { slot, tag: tag.map(ToOwned::to_owned) }).await;
}

/// Some who run activities with this tag are called to help, after those who were called already.
pub(super) async fn call_helpers(engine: &Arc<Engine>, slot: Slot, tag: Option<&str>, after: usize, most: usize) {
    call(engine, WakeupReason::Helpers { slot, tag: tag.map(ToOwned::to_owned), after, most }).await;
}

/// The process is called whose worker owns a session.
pub(super) async fn call_owner(engine: &Arc<Engine>, slot: Slot, owner: &str) {
    call(engine, WakeupReason::Owner { slot, owner: owner.to_owned() }).await;
}

/// Others are told that this process has come or gone.
pub(super) async fn tell_others(engine: &Arc<Engine>) {
    call(engine, WakeupReason::Others).await;
}

/// Rings those whom it is for; where one has left, those whom it is for then.
async fn call(engine: &Arc<Engine>, call: WakeupReason) {
    let (fleet, deadline) = (&engine.discovery.fleet, Deadline::after(PATIENCE));
    let nobody = call.choose(&fleet.view()).is_empty();
    if let Err(error) = fleet.list_if_older(engine, if nobody { YOUNG } else { FRESH }, deadline).await {
        debug!(%error, "could not list workers for a wake-up, a poll will find the work");
        return;
    }
    let mut told: BTreeSet<(WakeupReason, String)> = BTreeSet::new();
    let mut calls = Calls::from([call]);
    while !calls.is_empty() {
        let mut again = Calls::new();
        for call in calls {
            for member in call.choose(&fleet.view()) {
                if told.insert((call.clone(), member.clone())) {
                    again.extend(send_or_wait(engine, &member, call.clone()).await);
                }
            }
        }
        calls = again;
    }
}

/// Rings a member now if that is allowed, or leaves it to a task. Returns what others are to be told where it has left.
async fn send_or_wait(engine: &Arc<Engine>, member: &str, call: WakeupReason) -> Calls {
    let calls = {
        let (mut sending, now) = (engine.discovery.wakeup_sender.lock(), Instant::now());
        sending.waiting.entry(member.to_owned()).or_default().insert(call);
        match sending.next(now) {
            Some((at, first)) if at <= now && first == member => sending.take(member, now),
            _ => None,
        }
    };
    match calls {
        Some(calls) => send(engine, member, calls).await,
        None => {
            send_later(engine);
            Calls::new()
        }
    }
}

/// Sends what waits, one after the other, in a task of its own.
fn send_later(engine: &Arc<Engine>) {
    if std::mem::replace(&mut engine.discovery.wakeup_sender.lock().at_work, true) {
        return;
    }
    let mut at_work = AtWork(Some(engine.clone()));
    let engine_too = engine.clone();
    engine.spawn(async move {
        let wakeup_sender = &engine_too.discovery.wakeup_sender;
        loop {
            let (at, member) = {
                let mut sending = wakeup_sender.lock();
                let Some(next) = sending.next(Instant::now()) else {
                    sending.at_work = false;
                    // Under the lock: whoever adds a call from here on starts a task.
                    at_work.has_ended();
                    return;
                };
                next
            };
            tokio::time::sleep_until(at).await;
            let calls = wakeup_sender.lock().take(&member, Instant::now());
            if let Some(calls) = calls {
                let again = send(&engine_too, &member, calls).await;
                wakeup_sender.lock().wait_for_others(again, &engine_too.discovery.fleet.view());
            }
        }
    });
}

/// The task that sends what waits. If it is dropped before its end, as with its runtime, the next call starts another.
struct AtWork(Option<Arc<Engine>>);

impl AtWork {
    /// The task has ended, and has said so itself.
    fn has_ended(&mut self) {
        self.0 = None;
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        if let Some(engine) = self.0.take() {
            engine.discovery.wakeup_sender.lock().at_work = false;
        }
    }
}

/// Rings a member. Where it has left, returns what others are to be told instead.
async fn send(engine: &Engine, member: &str, calls: Calls) -> Calls {
    let fleet = &engine.discovery.fleet;
    let mut bell = WakeupDocument::new(member, fleet.me(), engine.new_token());
    calls.iter().for_each(|call| call.tell(&mut bell));
    let deadline = Deadline::after(PATIENCE);
    let rung: Result<WriteOutcome, StoreError> =
        engine.store.replace(&bell.instance_id, &bell.id, &bell, None, deadline).await;
    match rung {
        Ok(WriteOutcome::Refused(Refusal::Absent)) => {
            debug!(member, "the receiver of a wake-up has left");
            fleet.has_left(member);
            return calls.into_iter().filter(|call| *call != WakeupReason::Others).collect();
        }
        Ok(_) => {
            crate::telemetry::wakeup_sent();
            debug!(member, "sent a wake-up");
        }
        Err(error) => debug!(member, %error, "could not send a wake-up, a poll will find the work"),
    }
    Calls::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Capabilities, SlotRange, Versions};

    fn turns(name: &str) -> WakeupReason {
        WakeupReason::Runners { slot: Slot::of_instance(name), pinned: None, knows: None }
    }

    fn waiting(sending: &mut Sending, members: &[String]) {
        for member in members {
            sending.waiting.entry(member.clone()).or_default().insert(WakeupReason::Others);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_is_rung_once_within_the_gap_and_a_process_rings_ten_a_second_in_the_long_run() {
        let mut sending = Sending::default();
        let begin = Instant::now();
        let (mut sent, mut last) = (0, BTreeMap::new());
        while begin.elapsed() < Duration::from_secs(20) {
            waiting(&mut sending, &(0..40).map(|n| format!("m{n:02}")).collect::<Vec<_>>());
            let (at, member) = sending.next(Instant::now()).unwrap();
            tokio::time::advance(at - Instant::now()).await;
            let now = Instant::now();
            assert!(sending.take(&member, now).is_some());
            if let Some(before) = last.insert(member, now) {
                assert!(now - before >= GAP);
            }
            sent += 1;
        }
        assert!((200..=200 + BURST as usize + 1).contains(&sent), "{sent} rings in 20 s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_ring_that_may_not_have_been_heard_is_told_again_with_the_next() {
        let mut sending = Sending::default();
        let ring = |sending: &mut Sending, name: &str| {
            sending.waiting.insert("m".to_owned(), Calls::from([turns(name)]));
            sending.take("m", Instant::now()).unwrap().len()
        };
        assert_eq!(ring(&mut sending, "a"), 1);
        tokio::time::advance(HEARD_WITHIN / 2).await;
        assert_eq!(ring(&mut sending, "b"), 2);
        tokio::time::advance(HEARD_WITHIN / 2).await;
        assert_eq!(ring(&mut sending, "c"), 2, "the first one was heard");
        tokio::time::advance(HEARD_WITHIN).await;
        assert_eq!(ring(&mut sending, "d"), 1);
    }

    #[test]
    fn what_a_bell_says_is_what_the_calls_are_about() {
        let slot = Slot::of_instance("b");
        let helpers = WakeupReason::Helpers { slot: Slot::of_instance("d"), tag: None, after: 0, most: 2 };
        let calls = [turns("a"), turns("c"), WakeupReason::Worker { slot, tag: None }, helpers, WakeupReason::Others];
        let mut bell = WakeupDocument::new("m", "me", "ring".to_owned());
        calls.iter().for_each(|call| call.tell(&mut bell));
        let named = |names: &[&str]| names.iter().map(|name| Slot::of_instance(name)).collect::<BTreeSet<_>>();
        assert_eq!((bell.turns, bell.activities), (named(&["a", "c"]), named(&["b"])));
        assert_eq!((bell.help, bell.list), (named(&["d"]), true));
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_for_a_member_that_has_left_is_told_to_those_who_are_there() {
        let member = |name: &str| {
            let mut member = MemberDocument::new(name);
            member.turns = Some(Capabilities { need: Versions::from(None), slots: SlotRange::ALL });
            member
        };
        let mut view = View { others: vec![member("a"), member("b")], ..View::default() };
        let mut sending = Sending::default();
        let call = WakeupReason::Runners { slot: Slot::of_instance("i"), pinned: None, knows: Some("b".to_owned()) };
        assert_eq!(call.choose(&view), ["b"]);
        sending.waiting.entry("b".to_owned()).or_default().insert(call.clone());
        let calls = sending.take("b", Instant::now()).unwrap();
        view.others.pop();
        sending.wait_for_others(calls, &view);
        let (_, next) = sending.next(Instant::now()).unwrap();
        assert_eq!((next.as_str(), sending.take(&next, Instant::now())), ("a", Some(Calls::from([call]))));
        assert!(sending.next(Instant::now()).is_none());
    }
}
