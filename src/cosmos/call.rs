//! One call to the service: attempts, pauses between them, accounting, and the meaning of each answer.

use super::{
    accounting::OperationKind,
    error::{
        classify, describe, is_repeated, is_session_unavailable, is_token_expired, is_unauthorized, Applied, ErrorClass,
    },
    request_options::RequestOptions,
    Deadline, Refusal, Store, StoreError,
};
use crate::model::Partition;
use azure_data_cosmos::{
    models::{BatchResponse, ItemResponse},
    options::{
        EndToEndOperationLatencyPolicy, OperationOptions, OperationOptionsBuilder, ThrottlingRetryOptionsBuilder,
    },
    CosmosError,
};
use futures::future::BoxFuture;
use std::time::Duration;
use tokio::time::{error::Elapsed, Instant};
use tracing::{debug, field, Span};

/// The first pause between two attempts. It doubles up to [`MAX_PAUSE`].
pub(super) const MIN_PAUSE: Duration = Duration::from_millis(10);
pub(super) const MAX_PAUSE: Duration = Duration::from_millis(500);
/// The shortest end-to-end time that the SDK takes. The timer of the store cuts off shorter ones.
const MIN_SDK_TIMEOUT: Duration = Duration::from_secs(1);

impl Store {
    /// Repeats an attempt until its answer is final or the deadline has passed.
    pub(super) async fn with_retries<'x, R: Response>(
        &self,
        call: &mut Call,
        mut attempt: impl FnMut(OperationOptions) -> BoxFuture<'x, Result<R, CosmosError>>,
    ) -> Result<CallOutcome<R>, StoreError> {
        let mut pause = MIN_PAUSE;
        loop {
            let options = call.options();
            call.begun = Instant::now();
            let outcome = tokio::time::timeout_at(call.deadline.instant(), attempt(options)).await;
            if let Some(answer) = self.interpret(call, outcome, &mut pause).await? {
                return Ok(answer);
            }
        }
    }

    /// Interprets the result of one attempt. `None` means that the caller makes another attempt. The pause before that
    /// attempt has already passed.
    pub(super) async fn interpret<R: Response>(
        &self,
        call: &mut Call,
        outcome: Result<Result<R, CosmosError>, Elapsed>,
        pause: &mut Duration,
    ) -> Result<Option<CallOutcome<R>>, StoreError> {
        let error = match outcome {
            Ok(Ok(response)) => {
                self.account(call, response.requests(), response.charge());
                return Ok(Some(CallOutcome::Response(response)));
            }
            Ok(Err(error)) => error,
            Err(_) => {
                // The number of requests that the SDK sent is lost with the future: at least one.
                self.account(call, 1, 0.0);
                call.applied = Applied::Perhaps;
                return Err(call.retryable_error("the deadline passed while the request was in flight"));
            }
        };
        self.account_failure(call, &error);
        if is_repeated(&error) {
            call.applied = Applied::Perhaps;
        }
        if call.ends_on_session_refusal && is_session_unavailable(&error) {
            return Ok(Some(CallOutcome::SessionRefused));
        }
        match classify(&error) {
            ErrorClass::Absent => Ok(Some(CallOutcome::Refused(Refusal::Absent))),
            ErrorClass::Exists => Ok(Some(CallOutcome::Refused(Refusal::Exists))),
            ErrorClass::Stale => Ok(Some(CallOutcome::Refused(Refusal::Stale))),
            ErrorClass::Retry { after, applied } => {
                if applied == Applied::Perhaps {
                    call.applied = Applied::Perhaps;
                }
                if is_token_expired(&error) {
                    // By the clock of this machine the token is still valid.
                    self.drop_tokens(call.begun);
                }
                let throttled = u16::from(error.status().status_code()) == 429;
                self.inner.accounting.record_retry(call.kind, throttled);
                self.pause(pause, after, call.deadline).await;
                if call.deadline.passed() {
                    return Err(call.retryable_error(&describe(&error)));
                }
                Ok(None)
            }
            // The service may refuse a token that it accepted a moment ago. The next attempt gets another token.
            ErrorClass::Denied if is_unauthorized(&error) && self.drop_tokens(call.begun) => Ok(None),
            class => Err(self.final_error(call, class, &error)),
        }
    }

    /// Drops the cached tokens. Returns whether the attempt after one that was begun at `begun` has another token.
    fn drop_tokens(&self, begun: Instant) -> bool {
        self.inner.tokens.as_ref().is_some_and(|tokens| tokens.drop_refused(begun))
    }

    /// Waits before the next attempt, with jitter.
    pub(super) async fn pause(&self, pause: &mut Duration, retry_after: Option<Duration>, deadline: Deadline) {
        let wait = with_jitter(*pause, retry_after, self.inner.randomness.fraction());
        *pause = (*pause * 2).min(MAX_PAUSE);
        tokio::time::sleep(wait.min(deadline.remaining())).await;
    }

    fn account(&self, call: &Call, requests: usize, charge: f64) {
        // The end of a query takes no request.
        if requests > 0 {
            self.inner.accounting.record(call.kind, requests, charge);
        }
        call.span.record("charge", charge);
        debug!(charge, requests, "{} {}", call.kind.as_str(), call.document);
    }

    fn account_failure(&self, call: &Call, error: &CosmosError) {
        let requests = error.diagnostics().map_or(1, |d| d.request_count());
        let charge = error.diagnostics().map_or(0.0, |d| d.total_request_charge().value());
        self.inner.accounting.record(call.kind, requests, charge);
        call.span.record("charge", charge);
        debug!(charge, requests, failure = %describe(error), "{} {}", call.kind.as_str(), call.document);
    }

    /// The error for an attempt whose failure is final.
    fn final_error(&self, call: &Call, class: ErrorClass, error: &CosmosError) -> StoreError {
        let location = &self.inner.location;
        let detail = describe(error);
        let document = match call.kind {
            OperationKind::Batch => format!("a batch {}", call.document),
            _ => call.document.clone(),
        };
        match class {
            ErrorClass::Rejected => StoreError::Rejected { document, detail },
            // The service counts more bytes than the check before sending.
            ErrorClass::TooLarge => StoreError::Rejected {
                document,
                detail: format!("its {} bytes are over the limit of 2 MB: {detail}", call.bytes),
            },
            ErrorClass::Full => StoreError::PartitionFull { partition: call.partition.clone() },
            ErrorClass::Denied => location.denied(error),
            ErrorClass::ContainerMissing => location.missing(),
            _ => StoreError::Malformed { detail },
        }
    }

    /// Starts a call. It has no session fallback, no size and default options.
    pub(super) fn call(&self, kind: OperationKind, partition: &Partition, document: &str, deadline: Deadline) -> Call {
        let span = tracing::debug_span!(
            "cosmos",
            operation = kind.as_str(),
            instance_id = partition.instance_id(),
            document,
            charge = field::Empty,
        );
        let (partition, document) = (partition.to_string(), document.to_owned());
        let (request_options, applied) = (RequestOptions::default(), Applied::No);
        // The HTTP timeout bounds an attempt of a query, because one page may take several requests.
        let attempt_time = if kind.is_query() { Duration::MAX } else { self.inner.attempt_time };
        let begun = Instant::now();
        Call {
            kind,
            partition,
            document,
            bytes: 0,
            deadline,
            attempt_time,
            begun,
            request_options,
            ends_on_session_refusal: false,
            applied,
            span,
        }
    }
}

/// The pause before the next attempt. A pause that the service asks for gets up to a quarter longer. Otherwise `pause`
/// gets up to a quarter longer or shorter.
pub(super) fn with_jitter(pause: Duration, retry_after: Option<Duration>, fraction: f64) -> Duration {
    match retry_after {
        Some(retry_after) => retry_after.mul_f64(1.0 + fraction / 4.0),
        None => pause.mul_f64(0.75 + fraction / 2.0),
    }
}

/// One call of the store: the operation, its deadline, and the state of its attempts.
pub(super) struct Call {
    pub(super) kind: OperationKind,
    pub(super) partition: String,
    /// The id of the document, the name of the query, or the size of the batch.
    pub(super) document: String,
    /// The size of the request, for error messages.
    bytes: usize,
    pub(super) deadline: Deadline,
    /// The longest time of one attempt.
    attempt_time: Duration,
    /// The start of the current attempt.
    pub(super) begun: Instant,
    pub(super) request_options: RequestOptions,
    /// If no region can serve the session token, the call ends with [`CallOutcome::SessionRefused`], and the caller
    /// asks the write region without a token. After a forced failover that lost writes, or after a split, the token
    /// would be refused for ever.
    pub(super) ends_on_session_refusal: bool,
    /// Whether one of the attempts so far may have been applied.
    pub(super) applied: Applied,
    pub(super) span: Span,
}

impl Call {
    pub(super) fn sized(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    pub(super) fn with_options(self, request_options: RequestOptions) -> Self {
        Self { request_options, ..self }
    }

    pub(super) fn ending_on_session_refusal(self) -> Self {
        Self { ends_on_session_refusal: true, ..self }
    }

    /// The options for the next attempt. They limit the SDK's own retries to the time that is left.
    pub(super) fn options(&self) -> OperationOptions {
        // The store waits between attempts itself, so that a caller with a short lock gets its answer in time.
        let throttling = ThrottlingRetryOptionsBuilder::new().with_max_retry_count(0).build();
        let time = self.deadline.remaining().min(self.attempt_time).max(MIN_SDK_TIMEOUT);
        let time = EndToEndOperationLatencyPolicy::new(time);
        let options = OperationOptionsBuilder::new()
            .with_end_to_end_latency_policy(time)
            .with_throttling_retry_options(throttling);
        self.request_options.apply(options).build()
    }

    /// The error for a call that ends without a final answer: the same call may succeed later.
    pub(super) fn retryable_error(&self, detail: &str) -> StoreError {
        let detail = format!("{} {}: {detail}", self.kind.as_str(), self.document);
        let writes = self.kind != OperationKind::Read && !self.kind.is_query();
        match self.applied {
            Applied::Perhaps if writes => StoreError::OutcomeUnknown { detail },
            _ => StoreError::Unavailable { detail },
        }
    }
}

/// The answer to a call: a response, or a refusal that the caller handles.
pub(super) enum CallOutcome<R> {
    Response(R),
    Refused(Refusal),
    /// No region can serve the session token. Only a call with `ends_on_session_refusal` gets this.
    SessionRefused,
}

/// The part of a response that the accounting needs.
pub(super) trait Response {
    fn requests(&self) -> usize;
    fn charge(&self) -> f64;
}

impl Response for ItemResponse {
    fn requests(&self) -> usize {
        self.diagnostics().request_count()
    }

    fn charge(&self) -> f64 {
        self.headers().request_charge().map_or(0.0, |c| c.value())
    }
}

impl Response for BatchResponse {
    fn requests(&self) -> usize {
        self.diagnostics().request_count()
    }

    fn charge(&self) -> f64 {
        self.headers().request_charge().map_or(0.0, |c| c.value())
    }
}
