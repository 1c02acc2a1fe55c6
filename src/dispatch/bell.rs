//! Bells: how a process that puts something into a queue wakes the member that should take it.
//!
//! Invariant: a ring is a hint. It is written after what it tells of, so that who hears it finds that; it may be lost, late,
//! overwritten by another or unheard, and then a sweep finds what it told of. An error never fails what is told of.
//!
//! Each member looks at its own bell, one point read whatever the number of partitions and members. A ring is one unconditional
//! replace that names slots; 404 means that the member has left, and the next one is rung. Rings are rare: one for a member
//! within [`GAP`], ten a second for a process; what comes in between goes with the next.

use crate::{
    dispatch::members::View,
    engine::Engine,
    model::{BellDocument, MemberDocument, Slot},
    store::{Deadline, Refusal, StoreError, WriteOutcome},
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

/// What a member is told.
#[derive(Clone, Debug, Default)]
pub(super) struct Ring {
    pub(super) turns: BTreeSet<Slot>,
    pub(super) work: BTreeSet<Slot>,
    /// Somebody has come or gone.
    pub(super) list: bool,
}

impl Ring {
    pub(super) fn turns(slot: Slot) -> Self {
        Self { turns: BTreeSet::from([slot]), ..Self::default() }
    }

    pub(super) fn work(slot: Slot) -> Self {
        Self { work: BTreeSet::from([slot]), ..Self::default() }
    }

    fn merge(&mut self, other: Self) {
        self.turns.extend(other.turns);
        self.work.extend(other.work);
        self.list |= other.list;
    }
}

/// The rings that this process sends.
#[derive(Default)]
pub(super) struct Ringer(Mutex<Sending>);

#[derive(Default)]
struct Sending {
    /// What waits for its turn.
    waiting: BTreeMap<String, Ring>,
    /// When each member was last rung.
    rung: BTreeMap<String, Instant>,
    /// What members were told of late: a ring overwrites the one before it, which may not have been heard.
    told: Vec<(Instant, String, Ring)>,
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

    /// Takes the ring of a member that is rung now.
    fn take(&mut self, member: &str, now: Instant) -> Option<Ring> {
        let news = self.waiting.remove(member)?;
        self.refill(now);
        self.told.retain(|(told, ..)| *told + HEARD_WITHIN > now);
        let mut ring = news.clone();
        for (_, _, earlier) in self.told.iter().filter(|(_, told, _)| told == member) {
            ring.merge(earlier.clone());
        }
        self.told.push((now, member.to_owned(), news));
        self.left = self.left.saturating_sub(1);
        self.rung.retain(|_, rung| *rung + FORGET > now);
        self.rung.insert(member.to_owned(), now);
        Some(ring)
    }
}

impl Ringer {
    fn lock(&self) -> std::sync::MutexGuard<'_, Sending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Somebody who runs turns is called: `knows` if it is alive, or else whoever looks after the slot. Members that run other
/// versions look after it, too, and nobody here knows which of them is meant.
pub(super) async fn call_runners(
    engine: &Arc<Engine>,
    slot: Slot,
    pinned: Option<&semver::Version>,
    knows: Option<&str>,
) {
    let choose = |view: &View| {
        if let Some(knows) = knows.filter(|knows| view.is_alive(knows)) {
            return vec![knows.to_owned()];
        }
        let runners = view.runners(slot, pinned);
        let need = |member: &MemberDocument| member.turns.as_ref().map(|stand| stand.need.clone());
        let first = runners.first().copied();
        let others = runners.iter().copied().filter(|other| first.is_some_and(|first| need(other) != need(first)));
        first.into_iter().chain(others.take(1)).map(|member| member.member.clone()).collect()
    };
    call(engine, &choose, &Ring::turns(slot)).await;
}

/// Some who run activities with this tag are called.
pub(super) async fn call_workers(engine: &Arc<Engine>, slot: Slot, tag: Option<&str>, most: usize) {
    let choose = |view: &View| view.workers(slot, tag).into_iter().take(most).map(|m| m.member.clone()).collect();
    call(engine, &choose, &Ring::work(slot)).await;
}

/// The process is called whose worker owns a session.
pub(super) async fn call_owner(engine: &Arc<Engine>, slot: Slot, owner: &str) {
    let choose = |view: &View| view.owner(owner).map(|member| member.member.clone()).into_iter().collect();
    call(engine, &choose, &Ring::work(slot)).await;
}

/// Others are told that this process has come or gone.
pub(super) async fn tell_others(engine: &Arc<Engine>) {
    let choose = |view: &View| view.others.iter().take(MOST_TOLD).map(|member| member.member.clone()).collect();
    call(engine, &choose, &Ring { list: true, ..Ring::default() }).await;
}

/// Rings those that `choose` names; where one has left, those that it names then.
async fn call(engine: &Arc<Engine>, choose: &(dyn Fn(&View) -> Vec<String> + Sync), ring: &Ring) {
    let (fleet, deadline) = (&engine.dispatch.fleet, Deadline::after(PATIENCE));
    let nobody = choose(&fleet.view()).is_empty();
    if let Err(error) = fleet.list_if_older(engine, if nobody { YOUNG } else { FRESH }, deadline).await {
        debug!(%error, "who could be rung is not known: a sweep finds it");
        return;
    }
    let mut told = BTreeSet::new();
    loop {
        let chosen: Vec<String> = choose(&fleet.view()).into_iter().filter(|member| !told.contains(member)).collect();
        let mut has_left = false;
        for member in chosen {
            has_left |= !send_or_wait(engine, &member, ring.clone()).await;
            told.insert(member);
        }
        if !has_left {
            return;
        }
    }
}

/// Rings a member now if that is allowed, or leaves it to a task; `false` where it has left.
async fn send_or_wait(engine: &Arc<Engine>, member: &str, ring: Ring) -> bool {
    let ring = {
        let (mut sending, now) = (engine.dispatch.ringer.lock(), Instant::now());
        sending.waiting.entry(member.to_owned()).or_default().merge(ring);
        match sending.next(now) {
            Some((at, first)) if at <= now && first == member => sending.take(member, now),
            _ => None,
        }
    };
    match ring {
        Some(ring) => send(engine, member, ring).await,
        None => {
            send_later(engine);
            true
        }
    }
}

/// Sends what waits, one after the other, in a task of its own.
fn send_later(engine: &Arc<Engine>) {
    if std::mem::replace(&mut engine.dispatch.ringer.lock().at_work, true) {
        return;
    }
    let engine_too = engine.clone();
    engine.spawn(async move {
        loop {
            let (at, member) = {
                let mut sending = engine_too.dispatch.ringer.lock();
                let Some(next) = sending.next(Instant::now()) else {
                    sending.at_work = false;
                    return;
                };
                next
            };
            tokio::time::sleep_until(at).await;
            let ring = engine_too.dispatch.ringer.lock().take(&member, Instant::now());
            if let Some(ring) = ring {
                send(&engine_too, &member, ring).await;
            }
        }
    });
}

/// Rings a member; `false` where it has left.
async fn send(engine: &Engine, member: &str, ring: Ring) -> bool {
    let fleet = &engine.dispatch.fleet;
    let mut bell = BellDocument::new(member, fleet.me(), engine.new_token());
    (bell.turns, bell.work, bell.list) = (ring.turns, ring.work, ring.list);
    let deadline = Deadline::after(PATIENCE);
    let rung: Result<WriteOutcome, StoreError> =
        engine.store.replace(&bell.instance_id, &bell.id, &bell, None, deadline).await;
    match rung {
        Ok(WriteOutcome::Refused(Refusal::Absent)) => {
            debug!(member, "a member that was to be rung has left");
            fleet.has_left(member);
            false
        }
        Ok(_) => {
            crate::observe::ring();
            debug!(member, "rang");
            true
        }
        Err(error) => {
            debug!(member, %error, "a ring was lost: a sweep finds what it was about");
            true
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(sending: &mut Sending, members: &[&str]) {
        for member in members {
            sending.waiting.insert((*member).to_owned(), Ring::default());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_is_rung_once_within_the_gap_and_a_process_rings_ten_a_second_in_the_long_run() {
        let mut sending = Sending::default();
        let begin = Instant::now();
        let (mut sent, mut last) = (0, BTreeMap::new());
        while begin.elapsed() < Duration::from_secs(20) {
            let members: Vec<String> = (0..40).map(|n| format!("m{n:02}")).collect();
            waiting(&mut sending, &members.iter().map(String::as_str).collect::<Vec<_>>());
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
            sending.waiting.insert("m".to_owned(), Ring::turns(Slot::of_instance(name)));
            sending.take("m", Instant::now()).unwrap().turns.len()
        };
        assert_eq!(ring(&mut sending, "a"), 1);
        tokio::time::advance(HEARD_WITHIN / 2).await;
        assert_eq!(ring(&mut sending, "b"), 2);
        tokio::time::advance(HEARD_WITHIN / 2).await;
        assert_eq!(ring(&mut sending, "c"), 2, "the first one was heard");
        tokio::time::advance(HEARD_WITHIN).await;
        assert_eq!(ring(&mut sending, "d"), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_while_a_ring_waits_goes_with_it() {
        let mut sending = Sending::default();
        let slot = |name: &str| Slot::of_instance(name);
        let mut ring = Ring::turns(slot("a"));
        ring.merge(Ring::work(slot("b")));
        ring.merge(Ring { list: true, ..Ring::turns(slot("c")) });
        sending.waiting.insert("m".to_owned(), ring);
        let taken = sending.take("m", Instant::now()).unwrap();
        assert_eq!((taken.turns.len(), taken.work.len(), taken.list), (2, 1, true));
        assert!(sending.take("m", Instant::now()).is_none());
    }
}
