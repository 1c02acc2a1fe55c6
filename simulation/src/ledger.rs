//! What the provider has promised so far, to whom, and what it has done: any two entries that contradict each other are a
//! broken invariant.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use duroxide::providers::{OrchestrationItem, WorkItem};

use crate::deletions::Deletions;
use crate::owed::Owed;
use crate::seams;
use crate::sessions::Sessions;

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// What must hold.
    pub invariant: &'static str,
    /// The instance.
    pub instance: String,
    /// What is the case instead.
    pub detail: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail: String = self.detail.chars().take(600).collect();
        write!(f, "{}: {:?}: {detail}", self.invariant, self.instance)
    }
}

/// Something of which there can be one holder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// The turn of an instance.
    Turn(String),
    /// An activity: its instance, execution and number.
    Activity(String, u64, u64),
    /// A session.
    Session(String),
}

impl Thing {
    fn instance(&self) -> &str {
        match self {
            Self::Turn(instance) | Self::Activity(instance, ..) => instance,
            Self::Session(session) => session,
        }
    }
}

/// Who holds it, and until when at least.
#[derive(Clone, Debug)]
struct Promise {
    holder: String,
    until: Duration,
    /// Which claim of it was the holder's. A session has owners instead.
    claim: u32,
}

/// What an instance's document says of who may write it.
#[derive(Debug, Default)]
struct Fence {
    lock: Option<String>,
    /// Locks that were given back, taken off or taken over.
    lost: BTreeSet<String>,
    last_turn: Option<String>,
}

/// The books.
#[derive(Debug, Default)]
pub struct Ledger {
    state: Mutex<State>,
    /// By how much two clocks of the world may differ: a lock may look expired by that much too early.
    clocks_differ_by: Duration,
    /// Replicas lag: one may show a message as it was before it was put off. A turn on it comes to nothing and does not count.
    replicas_lag: bool,
    /// Which instances are there, and who deletes them.
    pub deletions: Deletions,
    /// Which messages between instances are on their way.
    pub owed: Owed,
    /// Which sessions are there, and who renews them.
    pub sessions: Sessions,
}

#[derive(Debug, Default)]
struct State {
    promises: BTreeMap<Thing, Promise>,
    /// By which claims each message and activity was handed out, where that counts: the first claim is number 1.
    handed: BTreeMap<String, BTreeSet<u32>>,
    /// How often the wire has seen each instance or activity claimed.
    claimed: BTreeMap<(String, String), u32>,
    /// Which claim of its document each token is.
    claims: BTreeMap<String, u32>,
    /// Until when each lock that was seen on the wire lasts, by its holder's clock: by token, or a session's owner.
    locks: BTreeMap<String, u64>,
    consumed: BTreeMap<String, String>,
    /// What the wire has last seen of each instance's document.
    instances: BTreeMap<String, Fence>,
    /// Activities that a committed turn has removed.
    cancelled: BTreeSet<(String, String)>,
    /// Instances whose names may be used by another one after them.
    reused: BTreeSet<String>,
    /// What is broken if the turn of this token was not run on what others had consumed, which its commit will tell.
    suspected: BTreeMap<String, Broken>,
    broken: Vec<Broken>,
}

impl Ledger {
    /// The books of a world whose clocks may differ by so much, and whose replicas may lag.
    pub fn new(clocks_differ_by: Duration, replicas_lag: bool) -> Self {
        Self { clocks_differ_by, replicas_lag, ..Self::default() }
    }

    /// Whether all clocks of the world are right and all replicas know everything: only then can be said what a call must have seen.
    pub fn is_exact(&self) -> bool {
        self.clocks_differ_by.is_zero() && !self.replicas_lag
    }

    /// The first invariant that did not hold.
    pub fn broken(&self) -> Option<Broken> {
        self.with(|state| state.broken.first().cloned())
    }

    /// Something does not hold.
    pub fn report(&self, broken: Broken) {
        self.with(|state| state.broken.push(broken));
    }

    /// This instance is going to be deleted: whoever comes with its name later is another one.
    pub fn will_be_deleted(&self, instance: &str) {
        self.with(|state| {
            state.reused.insert(instance.to_owned());
        });
    }

    /// `thing` was handed to `holder`, who has it as `token`.
    pub fn promised(&self, thing: Thing, holder: &str, token: &str) {
        let now = seams::now();
        self.with(|state| {
            if state.is_reused(thing.instance()) {
                return;
            }
            let until = state.locks.get(&lock_of(thing.instance(), token)).copied();
            let until = until.map_or(Duration::ZERO, seams::since_beginning_by_host);
            let claim = state.claims.get(&lock_of(thing.instance(), token)).copied().unwrap_or(0);
            if let Some(other) = state.promises.get(&thing) {
                // The answer to an earlier claim came late: its holder will find out.
                if !matches!(thing, Thing::Session(_)) && other.claim > claim {
                    return;
                }
                if other.holder != holder && other.until > now + self.clocks_differ_by {
                    let detail = format!(
                        "{thing:?} was handed to {holder} although {} has it until {:.3}s",
                        other.holder,
                        other.until.as_secs_f64()
                    );
                    let instance = thing.instance().to_owned();
                    state.broken.push(Broken { invariant: "one holder at a time", instance, detail });
                }
            }
            state.promises.insert(thing, Promise { holder: holder.to_owned(), until, claim });
        });
    }

    /// What `holder` has is locked for longer.
    pub fn prolonged(&self, holder: &str, asked: Duration, lock: Duration) {
        self.with(|state| {
            for promise in state.promises.values_mut().filter(|promise| promise.holder == holder) {
                promise.until = promise.until.max(asked + lock);
            }
        });
    }

    /// `holder` is about to give back what it has, one way or the other.
    pub fn ended(&self, holder: &str) {
        self.with(|state| state.promises.retain(|_, promise| promise.holder != holder));
    }

    /// The wire has seen that `document` of `instance` was locked with `token` until then, by the clock of whoever did it.
    pub fn claimed(&self, instance: &str, document: &str, token: &str, until: u64) {
        self.with(|state| {
            if state.locks.insert(lock_of(instance, token), until).is_none() {
                let claimed = (instance.to_owned(), document.to_owned());
                if state.cancelled.contains(&claimed) && !state.is_reused(instance) {
                    let (instance, detail) =
                        (instance.to_owned(), format!("{document} was claimed after it was cancelled"));
                    state.broken.push(Broken { invariant: "a cancelled activity is gone", instance, detail });
                }
                let claims = state.claimed.entry(claimed).or_default();
                *claims += 1;
                state.claims.insert(lock_of(instance, token), *claims);
            }
        });
    }

    /// The wire has seen an instance's document written: with this lock, after this turn. It was not there before where it was
    /// created.
    pub fn fenced(&self, instance: &str, lock: Option<&str>, last_turn: Option<&str>, created: bool) {
        self.with(|state| {
            if created {
                state.instances.remove(instance);
            }
            let fence = state.instances.entry(instance.to_owned()).or_default();
            let mut broken = None;
            if lock.is_some_and(|lock| fence.lost.contains(lock)) {
                broken = Some(format!("the lock {lock:?} was lost, and its holder writes the instance's document"));
            }
            if !created
                && last_turn.is_some()
                && fence.last_turn.as_deref() != last_turn
                && fence.lock.as_deref() != last_turn
            {
                broken = Some(format!("the turn {last_turn:?} was committed while the lock was {:?}", fence.lock));
            }
            if fence.lock.as_deref() != lock {
                fence.lost.extend(fence.lock.take());
                fence.lock = lock.map(ToOwned::to_owned);
            }
            fence.last_turn = last_turn.map(ToOwned::to_owned);
            state.broken.extend(broken.map(|detail| Broken {
                invariant: "who lost a lock writes no more",
                instance: instance.to_owned(),
                detail,
            }));
        });
    }

    /// `holder` was told that it has ended `thing`.
    pub fn done(&self, thing: &Thing, holder: &str) {
        self.with(|state| {
            let token = holder.rsplit('/').next().unwrap_or(holder);
            let claim = state.claims.get(&lock_of(thing.instance(), token)).copied().unwrap_or(0);
            let other = state.promises.get(thing).filter(|promise| promise.holder != holder && promise.claim > claim);
            let Some(other) = other.filter(|_| !state.is_reused(thing.instance())) else { return };
            let detail = format!("{holder} has ended {thing:?}, which was handed to {} after it", other.holder);
            let instance = thing.instance().to_owned();
            state.broken.push(Broken { invariant: "who lost a lock writes no more", instance, detail });
        });
    }

    /// A turn of this instance was committed that has removed this activity.
    pub fn cancelled(&self, instance: &str, execution: u64, activity: u64) {
        self.with(|state| state.cancelled.insert((instance.to_owned(), format!("w:{execution}:{activity}"))));
    }

    /// A turn was handed out, for the `attempt`th time as the provider says.
    pub fn handed_turn(&self, item: &OrchestrationItem, token: &str, attempt: u32) {
        if let Some(broken) = self.handed(&item.instance, &keys(item), token, attempt) {
            self.with(|state| state.suspected.insert(token.to_owned(), broken));
        }
        for message in &item.messages {
            if let WorkItem::TimerFired { fire_at_ms, .. } = message {
                self.must_be_due(&item.instance, *fire_at_ms);
            }
        }
    }

    fn must_be_due(&self, instance: &str, fire_at: u64) {
        let allowance = u64::try_from(self.clocks_differ_by.as_millis()).unwrap_or(u64::MAX);
        let now = seams::wall_millis();
        if now + allowance + 1 < fire_at {
            let detail = format!("a timer came {} ms early", fire_at - now);
            self.report(Broken { invariant: "timers don't come early", instance: instance.to_owned(), detail });
        }
    }

    /// An activity was handed out, for the `attempt`th time as the provider says.
    pub fn handed_activity(&self, item: &WorkItem, token: &str, attempt: u32) {
        if let WorkItem::ActivityExecute { instance, .. } = item {
            if let Some(broken) = self.handed(instance, &[activity(item)], token, attempt) {
                self.report(broken);
            }
        }
    }

    /// Answers may overtake each other, claims can't: an attempt is counted among the claims before its own.
    fn handed(&self, instance: &str, keys: &[String], token: &str, attempt: u32) -> Option<Broken> {
        self.with(|state| {
            // A turn whose lock was taken over before it was handed out may be on messages that came after its claim. It comes to
            // nothing, and nobody can count it.
            let is_lost = state.instances.get(instance).is_some_and(|fence| fence.lost.contains(token));
            if is_lost || state.is_reused(instance) {
                return None;
            }
            let claim = state.claims.get(&lock_of(instance, token)).copied().unwrap_or(0);
            let mut most = 0;
            for key in keys {
                let handed = state.handed.entry(key.clone()).or_default();
                handed.insert(claim);
                most = most.max(u32::try_from(handed.range(..=claim).count()).unwrap_or(u32::MAX));
            }
            let least = if self.replicas_lag { 1 } else { most };
            (attempt < least || attempt > claim).then(|| Broken {
                invariant: "attempts are what really happened",
                instance: instance.to_owned(),
                detail: format!("{keys:?}: attempt {attempt}, but handed out {most} times, by claim number {claim}"),
            })
        })
    }

    /// What was handed out does not count.
    pub fn uncounted_turn(&self, item: &OrchestrationItem, token: &str) {
        self.uncounted(&item.instance, &keys(item), token);
    }

    /// What was handed out does not count.
    pub fn uncounted_activity(&self, item: &WorkItem, token: &str) {
        if let WorkItem::ActivityExecute { instance, .. } = item {
            self.uncounted(instance, &[activity(item)], token);
        }
    }

    fn uncounted(&self, instance: &str, keys: &[String], token: &str) {
        self.with(|state| {
            let Some(claim) = state.claims.get(&lock_of(instance, token)).copied() else { return };
            for key in keys {
                if let Some(handed) = state.handed.get_mut(key) {
                    handed.remove(&claim);
                }
            }
        });
    }

    /// A turn was committed.
    pub fn committed(&self, item: &OrchestrationItem, token: &str) {
        self.with(|state| {
            let suspected = state.suspected.remove(token);
            state.broken.extend(suspected);
            for message in &item.messages {
                let key = key(&item.instance, message);
                state.handed.remove(&key);
                if !comes_once(message) || state.is_reused(&item.instance) {
                    continue;
                }
                if let Some(before) = state.consumed.insert(key.clone(), token.to_owned()) {
                    let detail = format!("{key} was consumed by the turns {before} and {token}");
                    let instance = item.instance.clone();
                    state.broken.push(Broken { invariant: "a message is consumed once", instance, detail });
                }
            }
        });
    }

    fn with<R>(&self, use_it: impl FnOnce(&mut State) -> R) -> R {
        use_it(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl State {
    /// Whether it, or the root of its family, is going to be deleted.
    fn is_reused(&self, instance: &str) -> bool {
        instance.split("::").next().is_some_and(|root| self.reused.contains(root))
    }
}

/// The messages of a turn that there is one of. Those that a client sent twice are two, and each has attempts of its own.
fn keys(item: &OrchestrationItem) -> Vec<String> {
    let once = item.messages.iter().filter(|message| comes_once(message));
    once.map(|message| key(&item.instance, message)).collect()
}

fn activity(item: &WorkItem) -> String {
    match item {
        WorkItem::ActivityExecute { instance, execution_id, id, .. } => format!("{instance}/w:{execution_id}:{id}"),
        other => format!("{other:?}"),
    }
}

fn lock_of(instance: &str, token: &str) -> String {
    format!("{instance}/{token}")
}

/// Whether no two messages of this content are ever sent. Clients start and cancel until they are told that it worked.
fn comes_once(message: &WorkItem) -> bool {
    match message {
        WorkItem::StartOrchestration { parent_instance, .. } => parent_instance.is_some(),
        WorkItem::CancelInstance { .. } | WorkItem::ContinueAsNew { .. } => false,
        _ => true,
    }
}

/// What tells a message from others: its content without what is large.
fn key(instance: &str, message: &WorkItem) -> String {
    let what = match message {
        WorkItem::StartOrchestration { parent_instance, parent_id, execution_id, .. } => {
            format!("start {execution_id} of {parent_instance:?} {parent_id:?}")
        }
        WorkItem::ActivityCompleted { execution_id, id, .. } | WorkItem::ActivityFailed { execution_id, id, .. } => {
            format!("end of activity {execution_id}/{id}")
        }
        WorkItem::TimerFired { execution_id, id, .. } => format!("timer {execution_id}/{id}"),
        WorkItem::SubOrchCompleted { parent_execution_id, parent_id, .. }
        | WorkItem::SubOrchFailed { parent_execution_id, parent_id, .. } => {
            format!("end of child {parent_execution_id}/{parent_id}")
        }
        WorkItem::ExternalRaised { name, data, .. } => format!("event {name} {data}"),
        other => format!("{other:?}"),
    };
    format!("{instance}: {what}")
}
