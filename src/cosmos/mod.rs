//! The store room: the only code that talks to the SDK.
//!
//! Every operation takes a [`Deadline`], rides out throttling and outages until then, and returns a typed outcome. Three
//! endings of a write are told apart:
//!
//! - **done**: the service said so;
//! - **refused** (404, 409, 412, or a batch rolled back): the service said so, but an earlier attempt of the same call may
//!   have been done with its answer lost, so a caller reads the document before it concludes that it lost a race;
//! - **unknown** ([`StoreError::OutcomeUnknown`]): the time was up with an attempt on its way.

mod accounting;
pub(crate) mod batch;
pub(crate) mod bootstrap;
pub(crate) mod check;
pub(crate) mod connect;
mod deadline;
mod deep_check;
mod denied;
pub(crate) mod error;
mod format;
pub(crate) mod indexing;
mod pages;
mod physical;
mod probe;
pub(crate) mod queries;
mod read;
mod regions;
mod request_options;
mod rows;
#[cfg(test)]
mod tests;
mod write_regions;

pub use accounting::{OperationKind, OperationStatistics, RequestStatistics};
pub(crate) use batch::{BatchOutcome, Committed, RolledBack};
pub(crate) use deadline::{after, Deadline};
pub use error::StoreError;
#[allow(unused_imports, reason = "what is read page by page is read so in other rooms")]
pub(crate) use pages::{Pages, QueryTimeout};
pub(crate) use queries::Statement;
pub(crate) use read::{Freshness, Versioned};
pub(crate) use rows::{or_default, Rows, Unreadable};

use crate::model::{operation, Operation};
use crate::{
    config::CosmosDBProviderConfig,
    credential::TokenCache,
    model::{DocumentId, Partition, Randomness},
};
use accounting::Accounting;
use azure_core::http::Etag;
use azure_data_cosmos::{
    models::{BatchResponse, ItemResponse},
    options::{
        BatchOptions, ContentResponseOnWrite, EndToEndOperationLatencyPolicy, ItemWriteOptions, OperationOptions,
        OperationOptionsBuilder, Precondition, ThrottlingRetryOptionsBuilder,
    },
    ContainerClient, CosmosError, TransactionalBatch,
};
use batch::Results;
pub(crate) use error::Applied;
use error::{
    classify, describe, is_repeated, is_session_unavailable, is_token_expired, is_unauthorized, ErrorClass,
    PARTITION_FULL,
};
use futures::future::BoxFuture;
use regions::Regions;
pub(crate) use request_options::in_background;
use request_options::RequestOptions;
use serde::Serialize;
use std::{sync::Arc, time::Duration};
use tokio::time::{error::Elapsed, Instant};
use tracing::{debug, field, Instrument, Span};

/// The first pause between two attempts; it doubles up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(500);
/// The SDK refuses a shorter end-to-end time; our own timer cuts off below it.
const MIN_SDK_TIMEOUT: Duration = Duration::from_secs(1);

/// How long one attempt of a query may take at least. The service works on a page for up to 5 s: whoever cuts it off
/// earlier meets the same page again and again.
pub(crate) const QUERY_TIME: Duration = Duration::from_secs(7);

/// How a write of one document ended, where the service said so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WriteOutcome {
    /// It was done; the document's new ETag.
    Done(Etag),
    /// It was not done by the last attempt.
    Refused(Refusal),
}

/// Why a write of one document was refused. See the module's note: read before you conclude.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The document is not there.
    Absent,
    /// A document with this id is there.
    Exists,
    /// The document is not as the condition says.
    Stale,
}

/// The container, as the rest of the provider sees it.
#[derive(Clone)]
pub(crate) struct Store {
    inner: Arc<StoreInner>,
}

struct StoreInner {
    container: ContainerClient,
    accounting: Accounting,
    place: ContainerLocation,
    /// For the jitter of pauses.
    randomness: Randomness,
    /// At most this many physical partitions are asked by one query.
    max_fan_out: u32,
    /// How long one attempt of anything but a query may take.
    attempt_time: Duration,
    regions: Regions,
    /// The tokens of the client, where they are kept by us.
    tokens: Option<TokenCache>,
    told: rows::Told,
}

/// Where the container is and how we sign in, for messages that help.
#[derive(Clone, Debug)]
pub(crate) struct ContainerLocation {
    pub(crate) account: String,
    pub(crate) database: String,
    pub(crate) container: String,
    pub(crate) credential: String,
}

impl Store {
    pub(crate) fn new(
        container: ContainerClient,
        place: ContainerLocation,
        config: &CosmosDBProviderConfig,
        tokens: Option<TokenCache>,
    ) -> Self {
        let inner = StoreInner {
            container,
            accounting: Accounting::default(),
            place,
            randomness: config.randomness().clone(),
            max_fan_out: 10_000,
            attempt_time: config.request_timeout(),
            regions: Regions::default(),
            tokens,
            told: rows::Told::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    pub(crate) fn statistics(&self) -> RequestStatistics {
        self.inner.accounting.statistics()
    }

    /// Creates a document. [`Refusal::Exists`] may mean that an earlier attempt of this very call did it.
    pub(crate) async fn create<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        deadline: Deadline,
    ) -> Result<WriteOutcome, StoreError> {
        Ok(self.create_noting_repeats(partition, id, document, deadline).await?.0)
    }

    /// Creates a document, and tells whether it may have been created before by the same call, its answer lost: then what is
    /// done now may be a second copy of what others have dealt with meanwhile, and what is refused may be our own.
    pub(crate) async fn create_noting_repeats<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        deadline: Deadline,
    ) -> Result<(WriteOutcome, Applied), StoreError> {
        let body = to_body(document, id)?;
        let mut call = self.call(OperationKind::Create, partition, id.as_str(), deadline).sized(body.bytes);
        let written = self.write_as(&mut call, |options| {
            let options = ItemWriteOptions::default().with_operation_options(options);
            let container = &self.inner.container;
            Box::pin(container.create_item(partition, id.as_str(), &body.json, Some(options)))
        });
        let outcome = written.await?;
        Ok((outcome, call.applied))
    }

    /// Replaces a document that is as `if_match` says.
    pub(crate) async fn replace<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        if_match: Option<&Etag>,
        deadline: Deadline,
    ) -> Result<WriteOutcome, StoreError> {
        Ok(self.replace_noting_repeats(partition, id, document, if_match, deadline).await?.0)
    }

    /// Replaces a document that is as `if_match` says, and tells whether it may have been replaced before by the same call, its
    /// answer lost. [`Refusal::Stale`] with [`Applied::No`] is somebody else's write for certain, and needs no read to tell.
    pub(crate) async fn replace_noting_repeats<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        if_match: Option<&Etag>,
        deadline: Deadline,
    ) -> Result<(WriteOutcome, Applied), StoreError> {
        let body = to_body(document, id)?;
        let mut call = self.call(OperationKind::Replace, partition, id.as_str(), deadline).sized(body.bytes);
        let written = self.write_as(&mut call, |options| {
            let options = write_options(options, if_match);
            let container = &self.inner.container;
            Box::pin(container.replace_item(partition, id.as_str(), &body.json, Some(options)))
        });
        let outcome = written.await?;
        Ok((outcome, call.applied))
    }

    /// Creates or replaces a document; with `if_match`, only where it is as that says.
    pub(crate) async fn upsert<T: Serialize + Sync>(
        &self,
        partition: &Partition,
        id: &DocumentId,
        document: &T,
        if_match: Option<&Etag>,
        deadline: Deadline,
    ) -> Result<WriteOutcome, StoreError> {
        let body = to_body(document, id)?;
        let call = self.call(OperationKind::Upsert, partition, id.as_str(), deadline).sized(body.bytes);
        self.write(call, |options| {
            let options = write_options(options, if_match);
            let container = &self.inner.container;
            Box::pin(container.upsert_item(partition, id.as_str(), &body.json, Some(options)))
        })
        .await
    }

    /// Deletes a document. [`Refusal::Absent`] may mean that an earlier attempt of this very call did it.
    pub(crate) async fn delete(
        &self,
        partition: &Partition,
        id: &DocumentId,
        if_match: Option<&Etag>,
        deadline: Deadline,
    ) -> Result<WriteOutcome, StoreError> {
        let call = self.call(OperationKind::Delete, partition, id.as_str(), deadline);
        self.write(call, |options| {
            let options = write_options(options, if_match);
            Box::pin(self.inner.container.delete_item(partition, id.as_str(), Some(options)))
        })
        .await
    }

    /// Does all operations in one partition, or none.
    pub(crate) async fn batch(
        &self,
        partition: &Partition,
        operations: &[Operation],
        deadline: Deadline,
    ) -> Result<BatchOutcome, StoreError> {
        Ok(self.batch_noting_repeats(partition, operations, deadline).await?.0)
    }

    /// Does all operations in one partition, or none, and tells whether they may have been done before by the same call, its answer
    /// lost.
    pub(crate) async fn batch_noting_repeats(
        &self,
        partition: &Partition,
        operations: &[Operation],
        deadline: Deadline,
    ) -> Result<(BatchOutcome, Applied), StoreError> {
        let batch = batch::build(partition, operations)?;
        let name = format!("of {} operations", operations.len());
        let bytes = operations.iter().map(Operation::size).sum();
        let mut call = self.call(OperationKind::Batch, partition, &name, deadline).sized(bytes);
        let results = self.send_batch(&mut call, batch, ContentResponseOnWrite::Disabled).await?;
        if let Some(error) = results.failed().and_then(|back| self.refusal_of(&back, partition, operations)) {
            return Err(error);
        }
        Ok((results.outcome(operations.len())?, call.applied))
    }

    /// Why the service refuses an operation of a batch whatever the documents are like: the same error as if it refused the
    /// whole batch.
    fn refusal_of(&self, back: &RolledBack, partition: &Partition, operations: &[Operation]) -> Option<StoreError> {
        let operation = operations.get(back.index)?;
        let RolledBack { status, substatus, .. } = *back;
        let document = format!("document {} of {partition}", operation.document_id());
        Some(match (status, substatus) {
            (400 | 413, _) => {
                let (bytes, limit) = (operation.size(), operation::MAX_BYTES);
                let detail =
                    format!("it was answered {status}/{substatus}; it has {bytes} bytes, and the limit is {limit}");
                StoreError::Rejected { document, detail }
            }
            (403, PARTITION_FULL) => StoreError::PartitionFull { partition: partition.to_string() },
            (401 | 403, _) => {
                let detail = format!("{document} was answered {status}/{substatus}");
                self.inner.place.denied_with(status, substatus, detail)
            }
            _ => return None,
        })
    }

    /// Sends a batch until it is answered for good, and reads the answer, which is `Ok` for the SDK even where nothing
    /// was done.
    async fn send_batch(
        &self,
        call: &mut Call,
        batch: TransactionalBatch,
        bodies: ContentResponseOnWrite,
    ) -> Result<Results, StoreError> {
        let span = call.span.clone();
        let mut pause = MIN_PAUSE;
        loop {
            let sending = self.ride_out(call, |mut options| {
                options.content_response_on_write = Some(bodies);
                let options = BatchOptions::default().with_operation_options(options);
                let container = &self.inner.container;
                Box::pin(container.execute_transactional_batch(batch.clone(), Some(options)))
            });
            let response = match sending.instrument(span.clone()).await? {
                CallOutcome::Response(response) => response,
                CallOutcome::Refused(refusal) => return Err(odd_batch(refusal)),
                CallOutcome::SessionRefused => return Err(call.give_up("a batch's session was refused")),
            };
            self.inner.regions.wrote(&response.diagnostics());
            if response.requests() > 1 {
                call.applied = Applied::Perhaps;
            }
            let results = Results::read(response)?;
            // An operation's own 429 or 449 comes inside the 207 and is never retried by the SDK.
            let Some(back) = results.failed().filter(RolledBack::is_retryable) else { return Ok(results) };
            self.inner.accounting.record_retry(call.kind, back.status == 429);
            self.pause(&mut pause, back.retry_after, call.deadline).await;
            if call.deadline.passed() {
                return Err(call.give_up(&format!("operation {} was answered {}", back.index, back.status)));
            }
        }
    }

    async fn write<'x>(
        &self,
        mut call: Call,
        attempt: impl FnMut(OperationOptions) -> BoxFuture<'x, Result<ItemResponse, CosmosError>>,
    ) -> Result<WriteOutcome, StoreError> {
        self.write_as(&mut call, attempt).await
    }

    async fn write_as<'x>(
        &self,
        call: &mut Call,
        attempt: impl FnMut(OperationOptions) -> BoxFuture<'x, Result<ItemResponse, CosmosError>>,
    ) -> Result<WriteOutcome, StoreError> {
        let span = call.span.clone();
        match self.ride_out(call, attempt).instrument(span).await? {
            CallOutcome::Refused(refusal) => Ok(WriteOutcome::Refused(refusal)),
            CallOutcome::SessionRefused => Err(call.give_up("a write's session was refused")),
            CallOutcome::Response(response) => {
                self.inner.regions.wrote(&response.diagnostics());
                if response.requests() > 1 {
                    call.applied = Applied::Perhaps;
                }
                // A delete has no ETag to give.
                let etag = response.headers().etag().cloned();
                match etag {
                    Some(etag) => Ok(WriteOutcome::Done(etag)),
                    None if u16::from(response.status().status_code()) == 204 => Ok(WriteOutcome::Done(Etag::from(""))),
                    None => Err(no_etag(&call.document)),
                }
            }
        }
    }

    /// Repeats an attempt until it is answered for good or the deadline has passed.
    async fn ride_out<'x, R: Response>(
        &self,
        call: &mut Call,
        mut attempt: impl FnMut(OperationOptions) -> BoxFuture<'x, Result<R, CosmosError>>,
    ) -> Result<CallOutcome<R>, StoreError> {
        let mut pause = MIN_PAUSE;
        loop {
            let options = call.options();
            call.begun = Instant::now();
            let outcome = tokio::time::timeout_at(call.deadline.instant(), attempt(options)).await;
            if let Some(answer) = self.judge(call, outcome, &mut pause).await? {
                return Ok(answer);
            }
        }
    }

    /// Reads one attempt: the answer, or none where it is to be made again; then the pause before that has passed.
    async fn judge<R: Response>(
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
                // How often the SDK had sent it went with it: at least once.
                self.account(call, 1, 0.0);
                call.applied = Applied::Perhaps;
                return Err(call.give_up("the deadline passed while the request was on its way"));
            }
        };
        self.account_failure(call, &error);
        if is_repeated(&error) {
            call.applied = Applied::Perhaps;
        }
        if call.leaves_session && is_session_unavailable(&error) {
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
                    // By this machine's clock it would serve on.
                    self.drop_tokens(call.begun);
                }
                let throttled = u16::from(error.status().status_code()) == 429;
                self.inner.accounting.record_retry(call.kind, throttled);
                self.pause(pause, after, call.deadline).await;
                if call.deadline.passed() {
                    return Err(call.give_up(&describe(&error)));
                }
                Ok(None)
            }
            // A token may be refused that was good a moment ago: the next attempt gets another one.
            ErrorClass::Denied if is_unauthorized(&error) && self.drop_tokens(call.begun) => Ok(None),
            verdict => Err(self.explain(call, verdict, &error)),
        }
    }

    /// Whether an attempt that was begun then has another token the next time.
    fn drop_tokens(&self, begun: Instant) -> bool {
        self.inner.tokens.as_ref().is_some_and(|tokens| tokens.drop_refused(begun))
    }

    /// Waits before the next attempt, with jitter.
    async fn pause(&self, pause: &mut Duration, asked: Option<Duration>, deadline: Deadline) {
        let wait = with_jitter(*pause, asked, self.inner.randomness.fraction());
        *pause = (*pause * 2).min(MAX_PAUSE);
        tokio::time::sleep(wait.min(deadline.remaining())).await;
    }

    fn account(&self, call: &Call, requests: usize, charge: f64) {
        // The end of a query needs no request.
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

    fn explain(&self, call: &Call, verdict: ErrorClass, error: &CosmosError) -> StoreError {
        let place = &self.inner.place;
        let detail = describe(error);
        let document = match call.kind {
            OperationKind::Batch => format!("a batch {}", call.document),
            _ => call.document.clone(),
        };
        match verdict {
            ErrorClass::Rejected => StoreError::Rejected { document, detail },
            // We counted less than the service did.
            ErrorClass::TooLarge => StoreError::Rejected {
                document,
                detail: format!("with {} bytes it is over the limit of 2 MB: {detail}", call.bytes),
            },
            ErrorClass::Full => StoreError::PartitionFull { partition: call.partition.clone() },
            ErrorClass::Denied => place.denied(error),
            ErrorClass::ContainerMissing => place.missing(),
            _ => StoreError::Malformed { detail },
        }
    }

    fn call(&self, kind: OperationKind, partition: &Partition, document: &str, deadline: Deadline) -> Call {
        let span = tracing::debug_span!(
            "cosmos",
            operation = kind.as_str(),
            instance_id = partition.instance_id(),
            document,
            charge = field::Empty,
        );
        let (partition, document) = (partition.to_string(), document.to_owned());
        let (request_options, applied) = (RequestOptions::default(), Applied::No);
        // An attempt of a query is bounded by the HTTP timeout: one page may take several requests.
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
            leaves_session: false,
            applied,
            span,
        }
    }
}

/// The pause before the next attempt: the one that the service asked for and up to a quarter more, or else `pause` and up to
/// a quarter more or less.
fn with_jitter(pause: Duration, asked: Option<Duration>, fraction: f64) -> Duration {
    match asked {
        Some(asked) => asked.mul_f64(1.0 + fraction / 4.0),
        None => pause.mul_f64(0.75 + fraction / 2.0),
    }
}

/// One call of the store: what it is, and how long it may take.
struct Call {
    kind: OperationKind,
    partition: String,
    document: String,
    /// What it carries, for a message that names the size.
    bytes: usize,
    deadline: Deadline,
    /// How long one attempt may take.
    attempt_time: Duration,
    /// When the present attempt was begun.
    begun: Instant,
    request_options: RequestOptions,
    /// A token that no region can serve ends the call instead of being sent again: the caller asks the write region, without
    /// one. After a forced failover that lost writes, or a split, such a token would be refused for ever.
    leaves_session: bool,
    /// Whether one of the attempts so far may have been done.
    applied: Applied,
    span: Span,
}

impl Call {
    fn sized(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    fn with_options(self, request_options: RequestOptions) -> Self {
        Self { request_options, ..self }
    }

    fn leaving_session(self) -> Self {
        Self { leaves_session: true, ..self }
    }

    /// Options that say what the SDK may do by itself: not more than the time that is left.
    fn options(&self) -> OperationOptions {
        // We wait between attempts ourselves, so that a caller with a short lock hears in time.
        let throttling = ThrottlingRetryOptionsBuilder::new().with_max_retry_count(0).build();
        let time = self.deadline.remaining().min(self.attempt_time).max(MIN_SDK_TIMEOUT);
        let time = EndToEndOperationLatencyPolicy::new(time);
        let options = OperationOptionsBuilder::new()
            .with_end_to_end_latency_policy(time)
            .with_throttling_retry_options(throttling);
        self.request_options.apply(options).build()
    }

    fn give_up(&self, detail: &str) -> StoreError {
        let detail = format!("{} {}: {detail}", self.kind.as_str(), self.document);
        let writes = self.kind != OperationKind::Read && !self.kind.is_query();
        match self.applied {
            Applied::Perhaps if writes => StoreError::OutcomeUnknown { detail },
            _ => StoreError::Unavailable { detail },
        }
    }
}

/// The answer to a call: what was asked for, or one of the refusals that a caller handles.
enum CallOutcome<R> {
    Response(R),
    Refused(Refusal),
    /// No region has what the session token asks for. Only a call that said so gets this.
    SessionRefused,
}

/// What the accounting filter to know of an answer.
trait Response {
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

impl ContainerLocation {
    fn missing(&self) -> StoreError {
        StoreError::Missing {
            what: format!("the container {} in database {}", self.container, self.database),
            command: bootstrap::create_command(self),
        }
    }
}

fn write_options(options: OperationOptions, if_match: Option<&Etag>) -> ItemWriteOptions {
    let options = ItemWriteOptions::default().with_operation_options(options);
    match if_match {
        Some(etag) => options.with_precondition(Precondition::IfMatch(etag.clone())),
        None => options,
    }
}

/// A document ready to be sent, and its size.
struct Body {
    json: serde_json::Value,
    bytes: usize,
}

fn to_body(document: &impl Serialize, id: &DocumentId) -> Result<Body, StoreError> {
    let json = serde_json::to_value(document)
        .map_err(|e| StoreError::Malformed { detail: format!("document {id} can't be written as JSON: {e}") })?;
    let bytes = operation::size_of(&json);
    if bytes > operation::MAX_BYTES {
        return Err(StoreError::TooLarge { document: format!("document {id}"), bytes, limit: operation::MAX_BYTES });
    }
    Ok(Body { json, bytes })
}

fn no_etag(document: &str) -> StoreError {
    StoreError::Malformed { detail: format!("the service's answer for {document} has no ETag") }
}

fn odd_batch(refusal: Refusal) -> StoreError {
    StoreError::Malformed { detail: format!("a batch as a whole was answered {refusal:?}") }
}
