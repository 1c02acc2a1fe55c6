//! The oracle: collects the promises of the provider and its writes. Two facts that contradict each other are a
//! violated invariant.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use duroxide::providers::{OrchestrationItem, WorkItem};

use crate::deletions::Deletions;
use crate::deliveries::Deliveries;
use crate::sessions::Sessions;
use crate::virtual_time;

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The invariant.
    pub invariant: &'static str,
    /// The instance.
    pub instance: String,
    /// The facts that contradict the invariant.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail: String = self.detail.chars().take(600).collect();
        write!(f, "{}: {:?}: {detail}", self.invariant, self.instance)
    }
}

/// An item with one holder at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LockTarget {
    /// The turn of an instance.
    Turn(String),
    /// An activity: its instance, execution and number.
    Activity(String, u64, u64),
    /// A session.
    Session(String),
}

impl LockTarget {
    fn instance(&self) -> &str {
        match self {
            Self::Turn(instance) | Self::Activity(instance, ..) => instance,
            Self::Session(session) => session,
        }
    }
}

/// The holder of an item, and the earliest end of its lock.
#[derive(Clone, Debug)]
struct Holding {
    holder: String,
    until: Duration,
    /// The number of the holder's claim among all claims of the item. Sessions have owners instead of claims.
    claim: u32,
}

/// The lock of an instance document, which decides the process that may write it.
#[derive(Debug, Default)]
struct WriteFence {
    lock: Option<String>,
    /// Locks that were released, removed or taken over.
    lost: BTreeSet<String>,
    last_turn: Option<String>,
}

/// Checks the calls and the requests of a run against the provider's promises.
#[derive(Debug, Default)]
pub struct Oracle {
    state: Mutex<OracleState>,
    /// The largest difference between two clocks of the run. A lock may look expired by that much too early.
    clock_difference: Duration,
    /// Whether replicas lag. A replica may then show a message as it was before it was delayed. A turn on such a
    /// message fails and does not count.
    replicas_lag: bool,
    /// The instances that exist, and the clients that delete them.
    pub deletions: Deletions,
    /// Messages between instances.
    pub deliveries: Deliveries,
    /// The sessions that exist, and the workers that renew them.
    pub sessions: Sessions,
}

#[derive(Debug, Default)]
struct OracleState {
    holdings: BTreeMap<LockTarget, Holding>,
    /// The claims that returned each message or activity to a fetch and count as attempts. The first claim is number 1.
    returned_by: BTreeMap<String, BTreeSet<u32>>,
    /// How often the wire has shown a claim of each instance or activity.
    claim_counts: BTreeMap<(String, String), u32>,
    /// The number of each token among the claims of its document.
    claim_numbers: BTreeMap<String, u32>,
    /// The end of each lock that the wire has shown, by its holder's clock. The key has the token or the session owner.
    locks: BTreeMap<String, u64>,
    /// The turn that consumed each message.
    consumed: BTreeMap<String, String>,
    /// The fence of each instance document, as the wire has last shown it.
    fences: BTreeMap<String, WriteFence>,
    /// Activities that a committed turn has removed.
    cancelled: BTreeSet<(String, String)>,
    /// Instances whose names a later instance may use.
    reused: BTreeSet<String>,
    /// A violation for each turn token, valid only if the turn commits. A turn on messages that others have consumed
    /// does not commit.
    suspected: BTreeMap<String, Violation>,
    violations: Vec<Violation>,
}

/// The invariant that fencing establishes.
const FENCING: &str = "a worker that lost a lock writes no more";

impl Oracle {
    /// The oracle of a run whose clocks differ by at most `clock_difference`.
    pub fn new(clock_difference: Duration, replicas_lag: bool) -> Self {
        Self { clock_difference, replicas_lag, ..Self::default() }
    }

    /// Whether all clocks are correct and no replica lags. Only then must a call have seen all earlier writes.
    pub fn is_exact(&self) -> bool {
        self.clock_difference.is_zero() && !self.replicas_lag
    }

    /// The first violation.
    pub fn violation(&self) -> Option<Violation> {
        self.with(|state| state.violations.first().cloned())
    }

    /// Adds a violation.
    pub fn report(&self, violation: Violation) {
        self.with(|state| state.violations.push(violation));
    }

    /// A client is going to delete this instance. A later instance of this name is another one.
    pub fn will_be_deleted(&self, instance: &str) {
        self.with(|state| {
            state.reused.insert(instance.to_owned());
        });
    }

    /// A fetch returned `target` to `holder`, with this token.
    pub fn held(&self, target: LockTarget, holder: &str, token: &str) {
        let now = virtual_time::now();
        self.with(|state| {
            if state.is_reused(target.instance()) {
                return;
            }
            let until = state.locks.get(&lock_key(target.instance(), token)).copied();
            let until = until.map_or(Duration::ZERO, virtual_time::from_host_millis);
            let claim = state.claim_number(target.instance(), token).unwrap_or(0);
            if let Some(other) = state.holdings.get(&target) {
                // The answer to an earlier claim was late. Its holder finds out when it commits.
                if !matches!(target, LockTarget::Session(_)) && other.claim > claim {
                    return;
                }
                if other.holder != holder && other.until > now + self.clock_difference {
                    let detail = format!(
                        "{target:?} was returned to {holder} although {} holds it until {:.3}s",
                        other.holder,
                        other.until.as_secs_f64()
                    );
                    let instance = target.instance().to_owned();
                    state.violations.push(Violation { invariant: "one holder at a time", instance, detail });
                }
            }
            state.holdings.insert(target, Holding { holder: holder.to_owned(), until, claim });
        });
    }

    /// `holder` has renewed its lock: it lasts for `lock`, counted from the call at `asked`.
    pub fn renewed(&self, holder: &str, asked: Duration, lock: Duration) {
        self.with(|state| {
            for holding in state.holdings.values_mut().filter(|holding| holding.holder == holder) {
                holding.until = holding.until.max(asked + lock);
            }
        });
    }

    /// `holder` is about to commit, complete or release its item.
    pub fn ended(&self, holder: &str) {
        self.with(|state| state.holdings.retain(|_, holding| holding.holder != holder));
    }

    /// The wire has shown `document` of `instance` locked with `token`. `until` is by the clock of the process that
    /// wrote it.
    pub fn claimed(&self, instance: &str, document: &str, token: &str, until: u64) {
        self.with(|state| {
            if state.locks.insert(lock_key(instance, token), until).is_none() {
                let claimed = (instance.to_owned(), document.to_owned());
                if state.cancelled.contains(&claimed) && !state.is_reused(instance) {
                    let (instance, detail) =
                        (instance.to_owned(), format!("{document} was claimed after it was cancelled"));
                    state.violations.push(Violation {
                        invariant: "a cancelled activity is not claimed",
                        instance,
                        detail,
                    });
                }
                let count = state.claim_counts.entry(claimed).or_default();
                *count += 1;
                state.claim_numbers.insert(lock_key(instance, token), *count);
            }
        });
    }

    /// The wire has shown a write of an instance document: with this lock, after this turn. `created`: the
    /// document did not exist before.
    pub fn instance_written(&self, instance: &str, lock: Option<&str>, last_turn: Option<&str>, created: bool) {
        self.with(|state| {
            if created {
                state.fences.remove(instance);
            }
            let fence = state.fences.entry(instance.to_owned()).or_default();
            let mut violation = None;
            if lock.is_some_and(|lock| fence.lost.contains(lock)) {
                violation = Some(format!("the holder of the lost lock {lock:?} writes the instance document"));
            }
            if !created
                && last_turn.is_some()
                && fence.last_turn.as_deref() != last_turn
                && fence.lock.as_deref() != last_turn
            {
                violation = Some(format!("the turn {last_turn:?} was committed while the lock was {:?}", fence.lock));
            }
            if fence.lock.as_deref() != lock {
                fence.lost.extend(fence.lock.take());
                fence.lock = lock.map(ToOwned::to_owned);
            }
            fence.last_turn = last_turn.map(ToOwned::to_owned);
            let instance = instance.to_owned();
            state.violations.extend(violation.map(|detail| Violation { invariant: FENCING, instance, detail }));
        });
    }

    /// The provider has told `holder` that `target` is completed.
    pub fn completed(&self, target: &LockTarget, holder: &str) {
        self.with(|state| {
            let token = holder.rsplit('/').next().unwrap_or(holder);
            let claim = state.claim_number(target.instance(), token).unwrap_or(0);
            let other = state.holdings.get(target);
            let other = other.filter(|holding| holding.holder != holder && holding.claim > claim);
            let Some(other) = other.filter(|_| !state.is_reused(target.instance())) else { return };
            let detail = format!("{holder} has completed {target:?}, which {} claimed after it", other.holder);
            let instance = target.instance().to_owned();
            state.violations.push(Violation { invariant: FENCING, instance, detail });
        });
    }

    /// A committed turn of this instance has removed this activity.
    pub fn cancelled(&self, instance: &str, execution: u64, activity: u64) {
        self.with(|state| state.cancelled.insert((instance.to_owned(), format!("w:{execution}:{activity}"))));
    }

    /// A fetch returned a turn. The provider says that this is attempt number `attempt`.
    pub fn turn_returned(&self, item: &OrchestrationItem, token: &str, attempt: u32) {
        if let Some(violation) = self.returned(&item.instance, &message_keys(item), token, attempt) {
            self.with(|state| state.suspected.insert(token.to_owned(), violation));
        }
        for message in &item.messages {
            if let WorkItem::TimerFired { fire_at_ms, .. } = message {
                self.check_timer_is_due(&item.instance, *fire_at_ms);
            }
        }
    }

    fn check_timer_is_due(&self, instance: &str, fire_at: u64) {
        let allowance = u64::try_from(self.clock_difference.as_millis()).unwrap_or(u64::MAX);
        let now = virtual_time::wall_millis();
        if now + allowance + 1 < fire_at {
            let detail = format!("a timer fired {} ms early", fire_at - now);
            self.report(Violation { invariant: "no timer fires early", instance: instance.to_owned(), detail });
        }
    }

    /// A fetch returned an activity. The provider says that this is attempt number `attempt`.
    pub fn activity_returned(&self, item: &WorkItem, token: &str, attempt: u32) {
        if let WorkItem::ActivityExecute { instance, .. } = item {
            if let Some(violation) = self.returned(instance, &[activity_key(item)], token, attempt) {
                self.report(violation);
            }
        }
    }

    /// Checks an attempt number. Answers may overtake each other, claims can't. So the attempts of an item are its
    /// returns by earlier claims.
    fn returned(&self, instance: &str, keys: &[String], token: &str, attempt: u32) -> Option<Violation> {
        self.with(|state| {
            // A turn whose lock was taken over before the fetch returned may have messages that arrived after its
            // claim. Such a turn fails, and its attempts can't be counted.
            let is_lost = state.fences.get(instance).is_some_and(|fence| fence.lost.contains(token));
            if is_lost || state.is_reused(instance) {
                return None;
            }
            let claim = state.claim_number(instance, token).unwrap_or(0);
            let mut most = 0;
            for key in keys {
                let returned_by = state.returned_by.entry(key.clone()).or_default();
                returned_by.insert(claim);
                most = most.max(u32::try_from(returned_by.range(..=claim).count()).unwrap_or(u32::MAX));
            }
            let least = if self.replicas_lag { 1 } else { most };
            (attempt < least || attempt > claim).then(|| Violation {
                invariant: "attempts are counted correctly",
                instance: instance.to_owned(),
                detail: format!("{keys:?}: attempt {attempt}, but returned {most} times, by claim number {claim}"),
            })
        })
    }

    /// A turn was released without counting an attempt.
    pub fn turn_not_counted(&self, item: &OrchestrationItem, token: &str) {
        self.not_counted(&item.instance, &message_keys(item), token);
    }

    /// An activity was released without counting an attempt.
    pub fn activity_not_counted(&self, item: &WorkItem, token: &str) {
        if let WorkItem::ActivityExecute { instance, .. } = item {
            self.not_counted(instance, &[activity_key(item)], token);
        }
    }

    fn not_counted(&self, instance: &str, keys: &[String], token: &str) {
        self.with(|state| {
            let Some(claim) = state.claim_number(instance, token) else { return };
            for key in keys {
                if let Some(returned_by) = state.returned_by.get_mut(key) {
                    returned_by.remove(&claim);
                }
            }
        });
    }

    /// A turn was committed.
    pub fn committed(&self, item: &OrchestrationItem, token: &str) {
        self.with(|state| {
            let suspected = state.suspected.remove(token);
            state.violations.extend(suspected);
            for message in &item.messages {
                let key = message_key(&item.instance, message);
                state.returned_by.remove(&key);
                if !is_sent_once(message) || state.is_reused(&item.instance) {
                    continue;
                }
                if let Some(before) = state.consumed.insert(key.clone(), token.to_owned()) {
                    let detail = format!("the turns {before} and {token} consumed {key}");
                    let instance = item.instance.clone();
                    state.violations.push(Violation { invariant: "a message is consumed once", instance, detail });
                }
            }
        });
    }

    fn with<R>(&self, use_state: impl FnOnce(&mut OracleState) -> R) -> R {
        use_state(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl OracleState {
    /// Whether a client is going to delete the instance or the root of its tree.
    fn is_reused(&self, instance: &str) -> bool {
        instance.split("::").next().is_some_and(|root| self.reused.contains(root))
    }

    /// The number of a token among the claims of its document.
    fn claim_number(&self, instance: &str, token: &str) -> Option<u32> {
        self.claim_numbers.get(&lock_key(instance, token)).copied()
    }
}

/// The keys of those messages of a turn that exist once. A message that a client sent twice is two messages, and each
/// has attempts of its own.
fn message_keys(item: &OrchestrationItem) -> Vec<String> {
    let once = item.messages.iter().filter(|message| is_sent_once(message));
    once.map(|message| message_key(&item.instance, message)).collect()
}

fn activity_key(item: &WorkItem) -> String {
    match item {
        WorkItem::ActivityExecute { instance, execution_id, id, .. } => format!("{instance}/w:{execution_id}:{id}"),
        other => format!("{other:?}"),
    }
}

fn lock_key(instance: &str, token: &str) -> String {
    format!("{instance}/{token}")
}

/// Whether no second message of this content is ever sent. Clients repeat starts and cancellations until one succeeds.
fn is_sent_once(message: &WorkItem) -> bool {
    match message {
        WorkItem::StartOrchestration { parent_instance, .. } => parent_instance.is_some(),
        WorkItem::CancelInstance { .. } | WorkItem::ContinueAsNew { .. } => false,
        _ => true,
    }
}

/// The identity of a message: its content without large parts.
fn message_key(instance: &str, message: &WorkItem) -> String {
    let content = match message {
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
    format!("{instance}: {content}")
}
