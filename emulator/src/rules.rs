//! Rules that make the wire misbehave for the requests that they match.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::gate::{await_at_least, Gate};
use crate::request::{RequestKind, WireRequest};

/// What happens to a request that a rule matches.
///
/// A request that has been sent is carried out even if its sender goes away meanwhile, as it would be by the service:
/// one that is held and then let go still changes the store.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum WireAction {
    /// Answered with a status, without reaching the store.
    Refuse {
        /// The HTTP status.
        status: u16,
        /// The service's own code beside it.
        substatus: Option<u32>,
        /// How long the answer asks the client to wait.
        retry_after: Option<Duration>,
    },
    /// A batch is answered with 207 because of one operation, without reaching the store: that operation has the
    /// status, the others 424. For requests other than batches it is a [`Refuse`](Self::Refuse).
    RefuseBatchOperation {
        /// The operation's position in the batch; of a shorter batch it is the last one.
        index: usize,
        /// The operation's status.
        status: u16,
        /// The service's own code beside it.
        substatus: Option<u32>,
    },
    /// The connection fails before anything is sent.
    FailConnection,
    /// The store carries the request out, then the connection breaks.
    LoseAnswer,
    /// Held at the gate on its way to the store.
    HoldBefore(Gate),
    /// Carried out, then its answer is held at the gate.
    HoldAfter(Gate),
    /// Slower than the others on its way to the store.
    Delay(Duration),
    /// Carried out, and its answer is slower than the others'.
    DelayAnswer(Duration),
}

type Choice = Arc<dyn Fn(&WireRequest<'_>) -> Option<WireAction> + Send + Sync>;
type Predicate = Arc<dyn Fn(&WireRequest<'_>) -> bool + Send + Sync>;

/// Which requests an action applies to. Without conditions: every one, until the rule is removed.
#[derive(Clone)]
pub struct WireRule {
    choice: Choice,
    kinds: Vec<RequestKind>,
    client: Option<String>,
    predicates: Vec<Predicate>,
    skip: u64,
    times: Option<u64>,
}

impl WireRule {
    /// A rule that applies `action` to every request.
    pub fn new(action: WireAction) -> Self {
        Self::choosing(move |_| Some(action.clone()))
    }

    /// A rule that asks `choice` about every request: what happens to it, or nothing, and then the next rule is asked.
    pub fn choosing(choice: impl Fn(&WireRequest<'_>) -> Option<WireAction> + Send + Sync + 'static) -> Self {
        let choice = Arc::new(choice);
        Self { choice, kinds: Vec::new(), client: None, predicates: Vec::new(), skip: 0, times: None }
    }

    /// Only to this kind of request; called again, to either kind.
    pub fn on(mut self, kind: RequestKind) -> Self {
        self.kinds.push(kind);
        self
    }

    /// Only to what the client of this name sends.
    pub fn client(mut self, name: impl Into<String>) -> Self {
        self.client = Some(name.into());
        self
    }

    /// Only to requests for which `predicate` holds; called again, to those for which both do.
    pub fn matching(mut self, predicate: impl Fn(&WireRequest<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.predicates.push(Arc::new(predicate));
        self
    }

    /// Lets the first `count` requests that match through.
    pub fn skip(mut self, count: u64) -> Self {
        self.skip = count;
        self
    }

    /// Applies to `count` requests, then to none.
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

/// A rule that was added. Dropping it leaves the rule in place.
#[derive(Clone, Debug)]
pub struct WireRuleHandle {
    rule: Arc<Active>,
    book: Arc<RuleBook>,
}

impl WireRuleHandle {
    /// How many requests the rule was applied to. A request whose answer is lost, held or delayed counts once the store
    /// has carried it out.
    pub fn hits(&self) -> u64 {
        *self.rule.hits.borrow()
    }

    /// Waits until the rule was applied to at least `count` requests.
    pub async fn wait_for_hits(&self, count: u64) {
        await_at_least(&self.rule.hits, count).await;
    }

    /// Takes the rule away; requests that it holds stay held.
    pub fn remove(&self) {
        self.book.remove(&self.rule);
    }
}

/// The rules in force, in the order in which they were added.
#[derive(Debug, Default)]
pub(crate) struct RuleBook {
    rules: Mutex<Vec<Arc<Active>>>,
}

#[derive(Debug)]
struct Active {
    rule: WireRule,
    matched: Mutex<u64>,
    hits: watch::Sender<u64>,
}

impl RuleBook {
    pub fn add(self: &Arc<Self>, rule: WireRule) -> WireRuleHandle {
        let rule = Arc::new(Active { rule, matched: Mutex::new(0), hits: watch::Sender::new(0) });
        self.with(|rules| rules.push(Arc::clone(&rule)));
        WireRuleHandle { rule, book: Arc::clone(self) }
    }

    /// Takes all rules away: how many requests each was applied to, in the order in which they were added.
    pub fn clear(&self) -> Vec<u64> {
        let rules = self.with(std::mem::take);
        rules.iter().map(|active| *active.hits.borrow()).collect()
    }

    fn remove(&self, rule: &Arc<Active>) {
        self.with(|rules| rules.retain(|other| !Arc::ptr_eq(other, rule)));
    }

    /// The action for `request`: that of the first rule which matches and is neither skipping nor used up.
    ///
    /// The predicates run on a copy of the list, so that one may itself add or remove rules.
    pub fn action_for(&self, request: &WireRequest<'_>) -> Option<Applied> {
        let rules = self.with(|rules| rules.clone());
        let found = rules.iter().find_map(|active| active.apply(request).map(|action| (action, active)));
        found.map(|(action, rule)| Applied::new(action, Arc::clone(rule)))
    }

    fn with<R>(&self, change: impl FnOnce(&mut Vec<Arc<Active>>) -> R) -> R {
        change(&mut self.rules.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The action for one request, and the rule that counts it.
///
/// A test waits for a hit and then looks at the store. So a request whose answer a rule touches counts after the store
/// has carried it out, and every other one counts on arrival.
#[derive(Debug)]
pub(crate) struct Applied {
    pub action: WireAction,
    rule: Arc<Active>,
}

impl Applied {
    fn new(action: WireAction, rule: Arc<Active>) -> Self {
        let applied = Self { action, rule };
        if !applied.touches_the_answer() {
            applied.count();
        }
        applied
    }

    /// Says that the store has carried the request out.
    pub fn carried_out(&self) {
        if self.touches_the_answer() {
            self.count();
        }
    }

    fn touches_the_answer(&self) -> bool {
        matches!(self.action, WireAction::LoseAnswer | WireAction::HoldAfter(_) | WireAction::DelayAnswer(_))
    }

    fn count(&self) {
        self.rule.hits.send_modify(|hits| *hits += 1);
    }
}

impl Active {
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
