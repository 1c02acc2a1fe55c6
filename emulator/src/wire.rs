//! The wire between clients and the store. Every request passes it, whether it comes from this process or from the HTTP
//! server. The wire counts the request, matches it against the rules, checks it and forwards it.

use std::fmt;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use crate::accounting::Accounting;
use crate::active_misbehaviours::{ActiveMisbehaviours, NewContainers};
use crate::answer::{Answer, NoAnswer};
use crate::batch;
use crate::expiry;
use crate::misbehaviour::{Misbehaviour, MisbehaviourHandle, MisbehaviourList};
use crate::observer::{Observer, WireAnswer};
use crate::partition_ranges::MergedRanges;
use crate::provisioning::{self, Provisioning};
use crate::query_check::{self, CheckedQuery, QueryChecker};
use crate::query_pages::{self, pause};
use crate::request::{Outgoing, RequestDetails, RequestKind, WireRequest};
use crate::rules::{AppliedRule, RuleList, WireAction, WireRule, WireRuleHandle};
use crate::service::Service;
use crate::stats::Counters;
use crate::validate;

/// The wire of one account. A test adds rules and misbehaviours to it, which act below the SDK's own retries.
pub struct Wire {
    service: Service,
    provisioning: Provisioning,
    queries: QueryChecker,
    latency: Duration,
    rules: Arc<RuleList>,
    misbehaviours: Arc<MisbehaviourList>,
    new_containers: NewContainers,
    merged_ranges: MergedRanges,
    counters: Counters,
    accounting: Accounting,
    observer: OnceLock<Observer>,
    runtime: OnceLock<Handle>,
    sequence: AtomicU64,
    /// Serialises changes of databases and containers. Otherwise a client could see a container that exists without its
    /// properties.
    structure_lock: Mutex<()>,
}

impl Wire {
    pub(crate) fn new(service: Service, provisioning: Provisioning, queries: QueryChecker, latency: Duration) -> Self {
        Self {
            service,
            provisioning,
            queries,
            latency,
            rules: Arc::default(),
            misbehaviours: Arc::default(),
            new_containers: NewContainers::default(),
            merged_ranges: MergedRanges::default(),
            counters: Counters::default(),
            accounting: Accounting::default(),
            observer: OnceLock::new(),
            runtime: OnceLock::new(),
            sequence: AtomicU64::new(0),
            structure_lock: Mutex::new(()),
        }
    }

    /// Adds a rule after the existing ones. If several rules match a request, the first one acts.
    pub fn add(&self, rule: WireRule) -> WireRuleHandle {
        self.rules.add(rule)
    }

    /// Removes all rules. Requests that they hold stay held, and misbehaviours stay on. Returns the number of requests
    /// that each rule was applied to, in the order in which the rules were added.
    pub fn clear(&self) -> Vec<u64> {
        self.rules.clear()
    }

    /// Turns a misbehaviour on until it is removed.
    pub fn misbehave(&self, misbehaviour: Misbehaviour) -> MisbehaviourHandle {
        self.misbehaviours.add(misbehaviour)
    }

    /// Turns every misbehaviour off.
    pub fn behave(&self) {
        self.misbehaviours.clear();
    }

    /// Returns the names of the misbehaviours that are on, with their values, in the order in which they were turned
    /// on.
    pub fn misbehaviours(&self) -> Vec<String> {
        self.misbehaviours.active().names()
    }

    /// Calls `observer` with every request and its answer, before the answer returns to the client. Only the first
    /// observer of an account is used.
    pub fn observe(&self, observer: impl Fn(&WireRequest<'_>, &WireAnswer<'_>) + Send + Sync + 'static) {
        if self.observer.set(Observer::new(observer)).is_err() {
            tracing::warn!("the wire has an observer already; the second one is ignored");
        }
    }

    /// Runs every request on this runtime instead of the sender's. A request that was sent thus arrives even if the
    /// sender's runtime no longer exists, and delays on the wire follow the clock of this runtime. Only the first
    /// runtime of an account is used.
    pub fn carried_by(&self, runtime: Handle) {
        if self.runtime.set(runtime).is_err() {
            tracing::warn!("the wire has a runtime already; the second one is ignored");
        }
    }

    pub(crate) fn service(&self) -> &Service {
        &self.service
    }

    pub(crate) fn accounting(&self) -> &Accounting {
        &self.accounting
    }

    /// Whether the time to live of a stored item has passed. Such an item may still be in the store.
    pub(crate) fn is_expired(&self, default_ttl: Option<i64>, item: &Value) -> bool {
        self.misbehaviours.active().honours_time_to_live() && expiry::is_expired(default_ttl, item)
    }

    pub(crate) fn merged_ranges(&self) -> &MergedRanges {
        &self.merged_ranges
    }

    pub(crate) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Sends a request to the store and returns its answer.
    ///
    /// The request runs in its own task: as on the service, it is executed even if its sender stops waiting.
    pub(crate) async fn send(self: &Arc<Self>, request: Outgoing) -> Result<Answer, NoAnswer> {
        let wire = Arc::clone(self);
        let handled = async move { wire.handle(request).await };
        let task = match self.runtime.get() {
            Some(runtime) => runtime.spawn(handled),
            None => tokio::spawn(handled),
        };
        task.await.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime is shutting down.
            Err(_) => Err(NoAnswer::AnswerLost),
        })
    }

    async fn handle(&self, mut request: Outgoing) -> Result<Answer, NoAnswer> {
        request.trim_trailing_slash();
        self.misbehaviours.active().rewrite(&mut request);
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed) + 1;
        let details = RequestDetails::of(&request, sequence);
        self.counters.arrived(details.kind, &request);
        let applied = self.rules.action_for(&details.view(&request));
        pause(self.latency).await;
        match applied {
            Some(applied) => self.apply(applied, &request, &details).await,
            None => self.answer(&request, &details).await,
        }
    }

    /// Executes the action of a rule.
    async fn apply(
        &self,
        applied: AppliedRule,
        request: &Outgoing,
        details: &RequestDetails,
    ) -> Result<Answer, NoAnswer> {
        let execute = || async {
            let answer = self.answer(request, details).await;
            applied.executed();
            answer
        };
        match applied.action.clone() {
            WireAction::Refuse { status, substatus, retry_after } => {
                let refusal = Answer::refusal(status, substatus, "Refused by a rule on the wire.");
                Ok(self.charge(request, details, refusal.with_retry_after(retry_after)).await)
            }
            WireAction::RefuseBatchOperation { index, status, substatus } => {
                let refusal = refuse_operation(details, index, status, substatus);
                Ok(self.charge(request, details, refusal).await)
            }
            WireAction::FailConnection => Err(NoAnswer::NotSent),
            WireAction::LoseAnswer => {
                execute().await?;
                Err(NoAnswer::AnswerLost)
            }
            WireAction::HoldBefore(gate) => {
                gate.pass().await;
                execute().await
            }
            WireAction::HoldAfter(gate) => {
                let answer = execute().await;
                gate.pass().await;
                answer
            }
            WireAction::Delay(delay) => {
                pause(delay).await;
                execute().await
            }
            WireAction::DelayAnswer(delay) => {
                let answer = execute().await;
                pause(delay).await;
                answer
            }
        }
    }

    /// Answers a request as the service would.
    async fn answer(&self, request: &Outgoing, details: &RequestDetails) -> Result<Answer, NoAnswer> {
        let misbehaviours = self.misbehaviours.active();
        if misbehaviours.honours_time_to_live() {
            self.accounting.expire(&self.service).await;
        }
        let refusal = misbehaviours.refusal(request, details, &self.new_containers);
        let answer = match refusal.or_else(|| validate::refusal(details)) {
            Some(refusal) => refusal,
            None if matches!(details.kind, RequestKind::Database | RequestKind::Container) => {
                let _guard = self.structure_lock.lock().await;
                provisioning::answer(&self.service, self.provisioning, request).await?
            }
            None => self.perform(request, details, &misbehaviours).await?,
        };
        misbehaviours.record_created(request, details, &answer, &self.new_containers);
        Ok(self.charge(request, details, answer).await)
    }

    /// Answers a request about items.
    async fn perform(
        &self,
        request: &Outgoing,
        details: &RequestDetails,
        misbehaviours: &ActiveMisbehaviours,
    ) -> Result<Answer, NoAnswer> {
        if matches!(details.kind, RequestKind::Query | RequestKind::QueryPlan) {
            return self.query(request, details, misbehaviours).await;
        }
        let answer = match details.operations() {
            Some(operations) => batch::answer(&self.service, request, operations, misbehaviours).await,
            None => self.service.forward(request).await,
        };
        answer.map(validate::corrected)
    }

    /// Answers a query or a query plan.
    async fn query(
        &self,
        request: &Outgoing,
        details: &RequestDetails,
        misbehaviours: &ActiveMisbehaviours,
    ) -> Result<Answer, NoAnswer> {
        let indexing = &self.accounting.settings(&self.service, request).await.indexing;
        let request = match self.queries.check(request, details.kind, indexing) {
            CheckedQuery::Refused(refusal) => return Ok(refusal),
            CheckedQuery::Accepted(request) => request,
        };
        if details.kind == RequestKind::QueryPlan {
            return Ok(query_check::with_service_texts(self.service.forward(&request).await?));
        }
        query_pages::answer(&self.service, &self.merged_ranges, &request, misbehaviours).await
    }

    /// Sets the charge of an answer, counts the answer and shows it to the observer.
    async fn charge(&self, request: &Outgoing, details: &RequestDetails, answer: Answer) -> Answer {
        let factor = self.misbehaviours.active().charge_factor();
        let answer = self.accounting.charge(&self.service, request, details, answer, factor).await;
        self.counters.answered(details.kind, &request.client, &answer);
        if let Some(observer) = self.observer.get() {
            observer.show(&details.view(request), &WireAnswer { status: answer.status, body: &answer.body });
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

fn refuse_operation(details: &RequestDetails, index: usize, status: u16, substatus: Option<u32>) -> Answer {
    let operations = details.body.as_ref().and_then(|body| body.as_array());
    match operations {
        Some(operations) => {
            let last = operations.len().saturating_sub(1);
            Answer::rolled_back(operations.len(), index.min(last), status, substatus)
        }
        None => Answer::refusal(status, substatus, "Refused by a rule on the wire."),
    }
}
