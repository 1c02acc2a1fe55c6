//! The wire between any client and the store. Every request passes here, in process or from the HTTP server:
//! counted, matched against the rules, checked, carried out.

use std::fmt;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use crate::answer::{Answer, Lost};
use crate::batches;
use crate::conduct::{Conduct, FreshContainers};
use crate::expiry;
use crate::misbehaviour::{Misbehaviour, MisbehaviourHandle, Misbehaviours};
use crate::observe::{Observer, WireAnswer};
use crate::pages::{self, pause};
use crate::provision::{self, Provisioning};
use crate::queries::{self, Checked, Queries};
use crate::ranges::MergedRanges;
use crate::records::Records;
use crate::request::{Facts, Outgoing, RequestKind, WireRequest};
use crate::rules::{Applied, RuleBook, WireAction, WireRule, WireRuleHandle};
use crate::service::Service;
use crate::stats::Counters;
use crate::validate;

/// The wire of one account: add rules to make it misbehave below the SDK's own retries.
pub struct Wire {
    service: Service,
    provisioning: Provisioning,
    queries: Queries,
    latency: Duration,
    rules: Arc<RuleBook>,
    misbehaviours: Arc<Misbehaviours>,
    fresh: FreshContainers,
    merged: MergedRanges,
    counters: Counters,
    records: Records,
    observer: OnceLock<Observer>,
    carrier: OnceLock<Handle>,
    sequence: AtomicU64,
    /// One at a time, so that nobody sees a container between its creation and its properties.
    structure: Mutex<()>,
}

impl Wire {
    pub(crate) fn new(service: Service, provisioning: Provisioning, queries: Queries, latency: Duration) -> Self {
        Self {
            service,
            provisioning,
            queries,
            latency,
            rules: Arc::default(),
            misbehaviours: Arc::default(),
            fresh: FreshContainers::default(),
            merged: MergedRanges::default(),
            counters: Counters::default(),
            records: Records::default(),
            observer: OnceLock::new(),
            carrier: OnceLock::new(),
            sequence: AtomicU64::new(0),
            structure: Mutex::new(()),
        }
    }

    /// Puts a rule into force, after those that are there: of several that match a request the first one acts.
    pub fn add(&self, rule: WireRule) -> WireRuleHandle {
        self.rules.add(rule)
    }

    /// Takes all rules away; requests that they hold stay held. Misbehaviours stay on. Returns how many requests each
    /// rule was applied to, in the order in which they were added.
    pub fn clear(&self) -> Vec<u64> {
        self.rules.clear()
    }

    /// Makes the account behave badly until the misbehaviour is removed.
    pub fn misbehave(&self, misbehaviour: Misbehaviour) -> MisbehaviourHandle {
        self.misbehaviours.add(misbehaviour)
    }

    /// Turns every misbehaviour off.
    pub fn behave(&self) {
        self.misbehaviours.clear();
    }

    /// The names of the misbehaviours that are on, with their values, in the order in which they were turned on.
    pub fn misbehaviours(&self) -> Vec<String> {
        self.misbehaviours.conduct().names()
    }

    /// Shows every exchange to `observer` once it has its answer, before the answer goes back. Only the first one counts.
    pub fn observe(&self, observer: impl Fn(&WireRequest<'_>, &WireAnswer<'_>) + Send + Sync + 'static) {
        if self.observer.set(Observer::new(observer)).is_err() {
            tracing::warn!("the wire is observed already");
        }
    }

    /// Carries every request on this runtime instead of its sender's: what a sender has sent arrives although the sender's
    /// runtime is gone, and time on the wire is that runtime's. Only the first one counts.
    pub fn carried_by(&self, runtime: Handle) {
        if self.carrier.set(runtime).is_err() {
            tracing::warn!("the wire has a runtime already");
        }
    }

    pub(crate) fn service(&self) -> &Service {
        &self.service
    }

    pub(crate) fn records(&self) -> &Records {
        &self.records
    }

    /// Whether a stored item has outlived its time; such an item may still be in the store.
    pub(crate) fn is_expired(&self, default_ttl: Option<i64>, item: &Value) -> bool {
        self.misbehaviours.conduct().honours_time_to_live() && expiry::is_over(default_ttl, item)
    }

    pub(crate) fn merged(&self) -> &MergedRanges {
        &self.merged
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Carries a request to the store and its answer back.
    ///
    /// In a task of its own: a request that was sent is carried out even if its sender stops waiting, as by the service.
    pub(crate) async fn carry(self: &Arc<Self>, request: Outgoing) -> Result<Answer, Lost> {
        let wire = Arc::clone(self);
        let exchange = async move { wire.exchange(request).await };
        let task = match self.carrier.get() {
            Some(runtime) => runtime.spawn(exchange),
            None => tokio::spawn(exchange),
        };
        task.await.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime is shutting down.
            Err(_) => Err(Lost::Answer),
        })
    }

    async fn exchange(&self, mut request: Outgoing) -> Result<Answer, Lost> {
        request.trim_trailing_slash();
        self.misbehaviours.conduct().rewrite(&mut request);
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        let facts = Facts::of(&request, sequence);
        self.counters.arrived(facts.kind, &request);
        let applied = self.rules.action_for(&facts.view(&request));
        pause(self.latency).await;
        match applied {
            Some(applied) => self.apply(applied, &request, &facts).await,
            None => self.answer(&request, &facts).await,
        }
    }

    /// Does what a rule says.
    async fn apply(&self, applied: Applied, request: &Outgoing, facts: &Facts) -> Result<Answer, Lost> {
        let carry_out = || async {
            let answer = self.answer(request, facts).await;
            applied.carried_out();
            answer
        };
        match applied.action.clone() {
            WireAction::Refuse { status, substatus, retry_after } => {
                let refusal = Answer::refusal(status, substatus, "Refused by a rule on the wire.");
                Ok(self.settle(request, facts, refusal.with_retry_after(retry_after)).await)
            }
            WireAction::RefuseBatchOperation { index, status, substatus } => {
                let refusal = refuse_operation(facts, index, status, substatus);
                Ok(self.settle(request, facts, refusal).await)
            }
            WireAction::FailConnection => Err(Lost::Request),
            WireAction::LoseAnswer => {
                carry_out().await?;
                Err(Lost::Answer)
            }
            WireAction::HoldBefore(gate) => {
                gate.pass().await;
                carry_out().await
            }
            WireAction::HoldAfter(gate) => {
                let answer = carry_out().await;
                gate.pass().await;
                answer
            }
            WireAction::Delay(delay) => {
                pause(delay).await;
                carry_out().await
            }
            WireAction::DelayAnswer(delay) => {
                let answer = carry_out().await;
                pause(delay).await;
                answer
            }
        }
    }

    /// Answers as the service would.
    async fn answer(&self, request: &Outgoing, facts: &Facts) -> Result<Answer, Lost> {
        let conduct = self.misbehaviours.conduct();
        if conduct.honours_time_to_live() {
            self.records.expire(&self.service).await;
        }
        let refusal = conduct.refusal(request, facts, &self.fresh);
        let answer = match refusal.or_else(|| validate::refusal(facts)) {
            Some(refusal) => refusal,
            None if matches!(facts.kind, RequestKind::Database | RequestKind::Container) => {
                let _alone = self.structure.lock().await;
                provision::answer(&self.service, self.provisioning, request).await?
            }
            None => self.perform(request, facts, &conduct).await?,
        };
        conduct.note_created(request, facts, &answer, &self.fresh);
        Ok(self.settle(request, facts, answer).await)
    }

    /// Answers a request about items.
    async fn perform(&self, request: &Outgoing, facts: &Facts, conduct: &Conduct) -> Result<Answer, Lost> {
        if matches!(facts.kind, RequestKind::Query | RequestKind::QueryPlan) {
            return self.ask(request, facts, conduct).await;
        }
        let answer = match facts.operations() {
            Some(operations) => batches::answer(&self.service, request, operations, conduct).await,
            None => self.service.forward(request).await,
        };
        answer.map(validate::corrected)
    }

    /// Answers a query or a query plan.
    async fn ask(&self, request: &Outgoing, facts: &Facts, conduct: &Conduct) -> Result<Answer, Lost> {
        let indexing = &self.records.settings(&self.service, request).await.indexing;
        let request = match self.queries.check(request, facts.kind, indexing) {
            Checked::Refused(refusal) => return Ok(refusal),
            Checked::Fine(request) => request,
        };
        if facts.kind == RequestKind::QueryPlan {
            return Ok(queries::with_service_texts(self.service.forward(&request).await?));
        }
        pages::answer(&self.service, &self.merged, &request, conduct).await
    }

    /// Charges for an answer and counts it.
    async fn settle(&self, request: &Outgoing, facts: &Facts, answer: Answer) -> Answer {
        let factor = self.misbehaviours.conduct().charge_factor();
        let answer = self.records.settle(&self.service, request, facts, answer, factor).await;
        self.counters.answered(facts.kind, &request.client, &answer);
        if let Some(observer) = self.observer.get() {
            observer.show(&facts.view(request), &WireAnswer { status: answer.status, body: &answer.body });
        }
        answer
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("provisioning", &self.provisioning)
            .field("latency", &self.latency)
            .field("rules", &self.rules)
            .field("misbehaviours", &self.misbehaviours())
            .finish_non_exhaustive()
    }
}

fn refuse_operation(facts: &Facts, index: usize, status: u16, substatus: Option<u32>) -> Answer {
    let operations = facts.body.as_ref().and_then(|body| body.as_array());
    match operations {
        Some(operations) => {
            let last = operations.len().saturating_sub(1);
            Answer::rolled_back(operations.len(), index.min(last), status, substatus)
        }
        None => Answer::refusal(status, substatus, "Refused by a rule on the wire."),
    }
}
