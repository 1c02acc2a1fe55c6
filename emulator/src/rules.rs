//! Rules that inject faults into the requests that they match.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::request::{RequestKind, WireRequest};
use crate::request_gate::{await_at_least, Gate};

/// The action that a rule applies to a request.
///
/// As on the service, a request that was sent is executed even if its sender stops waiting. A request that is held and
/// then released still changes the store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum WireAction {
    /// Answers with a status. The request does not reach the store.
    Refuse {
        /// The HTTP status.
        status: u16,
        /// The service's substatus.
        substatus: Option<u32>,
        /// The time that the answer tells the client to wait.
        retry_after: Option<Duration>,
    },
    /// Answers a batch with 207 because one operation failed. The batch does not reach the store. That operation has
    /// the given status, the others have 424. For other requests the action is [`Refuse`](Self::Refuse).
    RefuseBatchOperation {
        /// The position of the operation in the batch. In a shorter batch it is the last operation.
        index: usize,
        /// The operation's status.
        status: u16,
        /// The service's substatus.
        substatus: Option<u32>,
    },
    /// The connection fails before the request is sent.
    FailConnection,
    /// The store executes the request, then the connection breaks.
    LoseAnswer,
    /// Holds the request at this gate before it reaches the store.
    HoldBefore(Gate),
    /// The store executes the request, then this gate holds its answer.
    HoldAfter(Gate),
    /// Delays the request before it reaches the store.
    Delay(Duration),
    /// The store executes the request, then the answer is delayed.
    DelayAnswer(Duration),
}

type ActionChooser = Arc<dyn Fn(&WireRequest<'_>) -> Option<WireAction> + Send + Sync>;
type Predicate = Arc<dyn Fn(&WireRequest<'_>) -> bool + Send + Sync>;

/// An action and the conditions under which it applies. Without conditions it applies to every request until the rule
/// is removed.
#[derive(Clone)]
#[must_use = "add the rule to a wire with `Wire::add`"]
pub struct WireRule {
    choice: ActionChooser,
    kinds: Vec<RequestKind>,
    client: Option<String>,
    predicates: Vec<Predicate>,
    skip: u64,
    times: Option<u64>,
}

impl WireRule {
    /// Creates a rule that applies `action` to every request.
    pub fn new(action: WireAction) -> Self {
        Self::choosing(move |_| Some(action.clone()))
    }

    /// Creates a rule that calls `choice` for every request. If it returns `None`, the next rule decides.
    pub fn choosing(choice: impl Fn(&WireRequest<'_>) -> Option<WireAction> + Send + Sync + 'static) -> Self {
        let choice = Arc::new(choice);
        Self { choice, kinds: Vec::new(), client: None, predicates: Vec::new(), skip: 0, times: None }
    }

    /// Restricts the rule to this kind of request. Further calls add further kinds.
    pub fn on(mut self, kind: RequestKind) -> Self {
        self.kinds.push(kind);
        self
    }

    /// Restricts the rule to requests of the client with this name.
    pub fn client(mut self, name: impl Into<String>) -> Self {
        self.client = Some(name.into());
        self
    }

    /// Restricts the rule to requests for which `predicate` holds. With several calls, all predicates must hold.
    pub fn matching(mut self, predicate: impl Fn(&WireRequest<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.predicates.push(Arc::new(predicate));
        self
    }

    /// Does not apply the rule to the first `count` matching requests.
    pub fn skip(mut self, count: u64) -> Self {
        self.skip = count;
        self
    }

    /// Applies the rule to at most `count` requests.
    pub fn times(mut self, count: u64) -> Self {
        self.times = Some(count);
        self
    }

    fn matches(&self, request: &WireRequest<'_>) -> bool {
        let kind = self.kinds.is_empty() || self.kinds.contains(&request.kind);
        let client = self.client.is_none() || self.client.as_deref() == request.client;
        kind && client && self.predicates.iter().all(|holds| holds(request))
    }
}

impl fmt::Debug for WireRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WireRule")
            .field("kinds", &self.kinds)
            .field("client", &self.client)
            .field("skip", &self.skip)
            .field("times", &self.times)
            .finish_non_exhaustive()
    }
}

/// A handle of a rule. The rule stays when the handle is dropped.
#[derive(Clone, Debug)]
pub struct WireRuleHandle {
    rule: Arc<ActiveRule>,
    list: Arc<RuleList>,
}

impl WireRuleHandle {
    /// Returns the number of requests that the rule was applied to. A request whose answer is lost, held or delayed
    /// counts after the store has executed it.
    pub fn hits(&self) -> u64 {
        *self.rule.hits.borrow()
    }

    /// Waits until the rule was applied to at least `count` requests.
    pub async fn wait_for_hits(&self, count: u64) {
        await_at_least(&self.rule.hits, count).await;
    }

    /// Removes the rule. Requests that it holds stay held.
    pub fn remove(&self) {
        self.list.remove(&self.rule);
    }
}

/// The active rules, in the order in which they were added.
#[derive(Debug, Default)]
pub(crate) struct RuleList {
    rules: Mutex<Vec<Arc<ActiveRule>>>,
}

/// A rule and the number of its matches and applications.
#[derive(Debug)]
struct ActiveRule {
    rule: WireRule,
    matched: Mutex<u64>,
    hits: watch::Sender<u64>,
}

impl RuleList {
    pub fn add(self: &Arc<Self>, rule: WireRule) -> WireRuleHandle {
        let rule = Arc::new(ActiveRule { rule, matched: Mutex::new(0), hits: watch::Sender::new(0) });
        self.with(|rules| rules.push(Arc::clone(&rule)));
        WireRuleHandle { rule, list: Arc::clone(self) }
    }

    /// Removes all rules. Returns the number of requests that each was applied to, in the order in which they were
    /// added.
    pub fn clear(&self) -> Vec<u64> {
        let rules = self.with(std::mem::take);
        rules.iter().map(|active| *active.hits.borrow()).collect()
    }

    fn remove(&self, rule: &Arc<ActiveRule>) {
        self.with(|rules| rules.retain(|other| !Arc::ptr_eq(other, rule)));
    }

    /// Returns the action of the first rule that matches and neither skips the request nor has reached its limit.
    ///
    /// The predicates run on a copy of the list, so a predicate may add or remove rules.
    pub fn action_for(&self, request: &WireRequest<'_>) -> Option<AppliedRule> {
        let rules = self.with(|rules| rules.clone());
        let found = rules.iter().find_map(|active| active.apply(request).map(|action| (action, active)));
        found.map(|(action, rule)| AppliedRule::new(action, Arc::clone(rule)))
    }

    fn with<R>(&self, change: impl FnOnce(&mut Vec<Arc<ActiveRule>>) -> R) -> R {
        change(&mut self.rules.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The action for one request, and the rule that counts it.
///
/// A test waits for a hit and then reads the store. So a request whose answer a rule changes counts after the store has
/// executed it. Every other request counts on arrival.
#[derive(Debug)]
pub(crate) struct AppliedRule {
    pub action: WireAction,
    rule: Arc<ActiveRule>,
}

impl AppliedRule {
    fn new(action: WireAction, rule: Arc<ActiveRule>) -> Self {
        let applied = Self { action, rule };
        if !applied.changes_the_answer() {
            applied.count();
        }
        applied
    }

    /// Reports that the store has executed the request.
    pub fn executed(&self) {
        if self.changes_the_answer() {
            self.count();
        }
    }

    fn changes_the_answer(&self) -> bool {
        matches!(self.action, WireAction::LoseAnswer | WireAction::HoldAfter(_) | WireAction::DelayAnswer(_))
    }

    fn count(&self) {
        self.rule.hits.send_modify(|hits| *hits += 1);
    }
}

impl ActiveRule {
    fn apply(&self, request: &WireRequest<'_>) -> Option<WireAction> {
        if !self.rule.matches(request) {
            return None;
        }
        let mut matched = self.matched.lock().unwrap_or_else(PoisonError::into_inner);
        *matched += 1;
        let position = matched.checked_sub(self.rule.skip).filter(|at| *at > 0)?;
        if self.rule.times.is_some_and(|times| position > times) {
            return None;
        }
        drop(matched);
        (self.rule.choice)(request)
    }
}
