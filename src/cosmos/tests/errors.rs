//! The error table: failures that are retried, errors at the deadline, and errors that no retry can solve.

use super::fixture::{both_ways, cut_short, done, in_time, note, refuse, refuse_as, Note, StoreFixture, SHORT};
use crate::{
    cosmos::{
        call::with_jitter,
        error::{classify, Applied, ErrorClass},
        queries::QueryText,
        Deadline, Freshness, StoreError,
    },
    Credential, OperationKind,
};
use async_trait::async_trait;
use azure_core::{
    credentials::{AccessToken, TokenCredential, TokenRequestOptions},
    error::ErrorKind,
    time::OffsetDateTime,
};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use std::{
    sync::{
        atomic::{AtomicU32, Ordering::SeqCst},
        Arc,
    },
    time::Duration,
};

both_ways!(
    writes_retry_transient_failures,
    reads_and_queries_retry_transient_failures,
    a_failed_connection_is_retried,
    the_store_waits_as_long_as_the_service_asks,
    a_write_that_is_throttled_until_the_deadline_is_not_applied,
    a_read_that_is_refused_until_the_deadline_is_unavailable,
    a_query_that_is_refused_until_the_deadline_is_unavailable,
    a_write_to_a_service_that_fails_until_the_deadline_has_an_unknown_outcome,
    a_call_to_a_silent_service_ends_at_the_deadline,
    a_write_can_be_applied_after_its_deadline,
    a_bad_request_names_the_document,
    a_document_that_the_service_finds_too_large_is_named_with_its_size,
    a_full_partition_is_not_reported_as_a_denied_credential,
    a_refused_credential_is_named_and_not_shown,
    the_error_for_a_deleted_container_has_the_command_that_creates_it,
    a_token_that_is_not_valid_by_the_services_clock_is_retried,
    an_unknown_status_is_retried_and_then_retryable,
    a_container_that_is_still_being_created_is_retried,
);

/// The statuses of transient failures.
const TRANSIENT: [u16; 8] = [408, 410, 429, 449, 500, 502, 503, 504];

/// More attempts than the SDK makes by itself before it returns an error.
const MORE_THAN_THE_SDK: u64 = 6;

const NOTES: QueryText = QueryText::across("notes", 1_000, "SELECT * FROM c WHERE c.type = 'note'");

async fn read(fixture: &StoreFixture, note: &Note, deadline: Deadline) -> Result<Option<Note>, StoreError> {
    let read = fixture.store.read(&note.instance_id, &note.id, Freshness::Session, deadline).await?;
    Ok(read.map(|versioned| versioned.document))
}

async fn query(fixture: &StoreFixture, note: &Note, deadline: Deadline) -> Result<Vec<Note>, StoreError> {
    fixture.store.query_partition(&note.instance_id, NOTES.statement(), deadline).await
}

/// The error of a create that the wire answers with `action` for ever.
async fn create_error(fixture: &StoreFixture, action: WireAction, deadline: Deadline) -> StoreError {
    let note = note("i", "a", "");
    let rule = fixture.on(RequestKind::Create, action);
    let outcome = cut_short(fixture.store.create(&note.instance_id, &note.id, &note, deadline)).await;
    assert!(rule.hits() >= 1);
    rule.remove();
    outcome.unwrap_err()
}

async fn writes_retry_transient_failures(fixture: StoreFixture) {
    for status in TRANSIENT {
        let note = note("i", &status.to_string(), "");
        let rule = fixture.next(MORE_THAN_THE_SDK, RequestKind::Create, refuse(status));
        let etag = fixture.given(&note).await;
        assert_eq!(rule.hits(), MORE_THAN_THE_SDK, "{status}");
        assert_eq!(fixture.stored(&note).await.unwrap().etag, etag, "{status}");
    }
}

async fn reads_and_queries_retry_transient_failures(fixture: StoreFixture) {
    let note = note("i", "a", "");
    fixture.given(&note).await;
    for status in TRANSIENT {
        let reads = fixture.next(MORE_THAN_THE_SDK, RequestKind::Read, refuse(status));
        assert_eq!(read(&fixture, &note, in_time()).await.unwrap().as_ref(), Some(&note), "{status}");
        let queries = fixture.next(MORE_THAN_THE_SDK, RequestKind::Query, refuse(status));
        assert_eq!(query(&fixture, &note, in_time()).await.unwrap(), std::slice::from_ref(&note), "{status}");
        assert_eq!((reads.hits(), queries.hits()), (MORE_THAN_THE_SDK, MORE_THAN_THE_SDK), "{status}");
    }
}

async fn a_failed_connection_is_retried(fixture: StoreFixture) {
    let note = note("i", "a", "");
    let writes = fixture.next(MORE_THAN_THE_SDK, RequestKind::Create, WireAction::FailConnection);
    let reads = fixture.next(MORE_THAN_THE_SDK, RequestKind::Read, WireAction::FailConnection);
    let etag = fixture.given(&note).await;
    assert_eq!(fixture.stored(&note).await.unwrap().etag, etag);
    assert_eq!((writes.hits(), reads.hits()), (MORE_THAN_THE_SDK, MORE_THAN_THE_SDK));
}

async fn the_store_waits_as_long_as_the_service_asks(fixture: StoreFixture) {
    let wait = Duration::from_millis(400);
    let throttle = WireAction::Refuse { status: 429, substatus: Some(3200), retry_after: Some(wait) };
    let rule = fixture.next(1, RequestKind::Create, throttle);
    let started = tokio::time::Instant::now();
    fixture.given(&note("i", "a", "")).await;
    assert!(started.elapsed() >= wait);
    assert_eq!(rule.hits(), 1);
    let statistics = fixture.store.statistics().of(OperationKind::Create);
    assert_eq!((statistics.throttled, statistics.retried), (1, 1));
}

async fn a_write_that_is_throttled_until_the_deadline_is_not_applied(fixture: StoreFixture) {
    let much_later =
        WireAction::Refuse { status: 429, substatus: Some(3200), retry_after: Some(Duration::from_secs(3_600)) };
    let error = create_error(&fixture, much_later, Deadline::after(SHORT)).await;
    assert!(matches!(&error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(error.is_retryable() && error.to_string().contains("429"), "{error}");
    assert!(fixture.stored(&note("i", "a", "")).await.is_none());

    // If the service asks for no pause, the deadline may pass while an attempt is in flight. That attempt may arrive
    // after the service has recovered.
    for status in [429, 449] {
        let error = create_error(&fixture, refuse(status), Deadline::after(SHORT)).await;
        assert!(error.is_retryable(), "{error:?}");
    }
}

async fn a_read_that_is_refused_until_the_deadline_is_unavailable(fixture: StoreFixture) {
    let note = note("i", "a", "");
    fixture.given(&note).await;
    for action in TRANSIENT.map(refuse).into_iter().chain([WireAction::FailConnection, WireAction::LoseAnswer]) {
        let rule = fixture.on(RequestKind::Read, action.clone());
        let error = cut_short(read(&fixture, &note, Deadline::after(SHORT))).await.unwrap_err();
        assert!(matches!(&error, StoreError::Unavailable { .. }), "{action:?}: {error:?}");
        assert!(error.is_retryable() && error.to_string().contains("note:a"), "{error}");
        assert!(rule.hits() >= 1);
        rule.remove();
    }
    assert_eq!(read(&fixture, &note, in_time()).await.unwrap(), Some(note));
}

async fn a_query_that_is_refused_until_the_deadline_is_unavailable(fixture: StoreFixture) {
    let note = note("i", "a", "");
    for action in TRANSIENT.map(refuse).into_iter().chain([WireAction::FailConnection]) {
        let rule = fixture.on(RequestKind::Query, action.clone());
        let error = cut_short(query(&fixture, &note, Deadline::after(SHORT))).await.unwrap_err();
        assert!(matches!(&error, StoreError::Unavailable { .. }), "{action:?}: {error:?}");
        assert!(error.to_string().contains("notes"), "{error}");
        assert!(rule.hits() >= 1);
        rule.remove();
    }
}

async fn a_write_to_a_service_that_fails_until_the_deadline_has_an_unknown_outcome(fixture: StoreFixture) {
    for status in [408, 410, 500, 502, 503, 504] {
        let error = create_error(&fixture, refuse(status), Deadline::after(SHORT)).await;
        assert!(matches!(&error, StoreError::OutcomeUnknown { .. }), "{status}: {error:?}");
        assert!(error.is_retryable() && error.to_string().contains("note:a"), "{error}");
    }
    let error = create_error(&fixture, WireAction::LoseAnswer, Deadline::after(SHORT)).await;
    assert!(matches!(&error, StoreError::OutcomeUnknown { .. }), "{error:?}");
    assert!(fixture.stored(&note("i", "a", "")).await.is_some());
}

async fn a_call_to_a_silent_service_ends_at_the_deadline(fixture: StoreFixture) {
    let gate = Gate::new();
    let error = create_error(&fixture, WireAction::HoldAfter(gate.clone()), Deadline::after(SHORT)).await;
    assert!(matches!(&error, StoreError::OutcomeUnknown { .. }), "{error:?}");
    assert!(fixture.stored(&note("i", "a", "")).await.is_some());
    gate.open();

    let gate = Gate::new();
    let rule = fixture.on(RequestKind::Read, WireAction::HoldBefore(gate.clone()));
    let error = cut_short(read(&fixture, &note("i", "a", ""), Deadline::after(SHORT))).await.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(rule.hits() >= 1);
    gate.open();
}

async fn a_write_can_be_applied_after_its_deadline(fixture: StoreFixture) {
    let gate = Gate::new();
    let error = create_error(&fixture, WireAction::HoldBefore(gate.clone()), Deadline::after(SHORT)).await;
    assert!(matches!(&error, StoreError::OutcomeUnknown { .. }), "{error:?}");
    let note = note("i", "a", "");
    assert!(fixture.stored(&note).await.is_none());
    gate.open();
    let deadline = in_time();
    while fixture.stored(&note).await.is_none() {
        assert!(!deadline.passed());
        tokio::task::yield_now().await;
    }
}

async fn a_bad_request_names_the_document(fixture: StoreFixture) {
    let error = create_error(&fixture, refuse(400), in_time()).await;
    assert!(matches!(&error, StoreError::Rejected { .. }), "{error:?}");
    assert!(error.is_unstorable() && !error.is_retryable());
    assert!(error.to_string().contains("note:a") && error.to_string().contains("400"), "{error}");
}

async fn a_document_that_the_service_finds_too_large_is_named_with_its_size(fixture: StoreFixture) {
    let size = serde_json::to_string(&note("i", "a", "")).unwrap().len();
    let error = create_error(&fixture, refuse(413), in_time()).await;
    assert!(error.is_unstorable(), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("note:a") && text.contains(&format!("{size} bytes")) && text.contains("2 MB"), "{text}");
}

async fn a_full_partition_is_not_reported_as_a_denied_credential(fixture: StoreFixture) {
    let error = create_error(&fixture, refuse_as(403, 1014), in_time()).await;
    assert!(matches!(&error, StoreError::PartitionFull { partition } if partition == "i"), "{error:?}");
    assert!(!error.is_retryable() && !error.is_unstorable());
}

async fn a_refused_credential_is_named_and_not_shown(fixture: StoreFixture) {
    let cases = [
        (refuse(401), "clock"),
        (refuse(403), "--ip-range-filter"),
        (refuse_as(403, 5202), "disableLocalAuth"),
        (refuse_as(403, 5203), "disableLocalAuth"),
        (refuse_as(403, 5301), "Data Contributor"),
        (refuse_as(403, 5307), "perimeter"),
    ];
    for (action, advice) in cases {
        let error = create_error(&fixture, action, in_time()).await;
        assert!(matches!(&error, StoreError::Denied { .. }), "{error:?}");
        assert!(!error.is_retryable());
        let text = format!("{error} {error:?}");
        assert!(text.contains("account key") && text.contains(advice), "{advice}: {text}");
        assert!(!text.contains(fixture.account.key()), "{text}");
    }
}

async fn the_error_for_a_deleted_container_has_the_command_that_creates_it(fixture: StoreFixture) {
    let error = create_error(&fixture, refuse_as(404, 1003), in_time()).await;
    assert!(matches!(&error, StoreError::Missing { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("az cosmosdb sql container create"), "{text}");
    assert!(text.contains("--partition-key-path /instanceId"), "{text}");
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn no_error_shows_the_key() {
    let fixture = StoreFixture::in_process().await;
    let key = fixture.account.key().to_owned();
    let statuses = [400, 401, 403, 404, 405, 408, 409, 410, 412, 413, 429, 449, 500, 503];
    for status in statuses {
        let note = note("i", "a", "");
        let rule = fixture.on(RequestKind::Replace, refuse(status));
        let deadline = Deadline::after(SHORT);
        let outcome = fixture.store.replace(&note.instance_id, &note.id, &note, None, deadline).await;
        rule.remove();
        let Err(error) = outcome else { continue };
        let provider = error.clone().into_provider_error("op");
        let text = format!("{error} {error:?} {provider} {provider:?}");
        assert!(!text.contains(&key), "{status}: {text}");
        assert!(!text.contains("authorization"), "{status}: {text}");
    }
}

#[tokio::test]
async fn transient_failures_are_retryable_for_the_runtime_and_others_are_permanent() {
    let fixture = StoreFixture::in_process().await;
    for (status, retryable) in [(429, true), (503, true), (400, false), (401, false), (413, false)] {
        let error = create_error(&fixture, refuse(status), Deadline::after(SHORT)).await;
        assert_eq!(error.into_provider_error("create").is_retryable(), retryable, "{status}");
    }
}

#[tokio::test]
async fn a_call_whose_deadline_has_passed_still_ends() {
    let fixture = StoreFixture::in_process().await;
    let note = note("i", "a", "");
    let passed = Deadline::after(Duration::ZERO);
    let outcome = cut_short(fixture.store.create(&note.instance_id, &note.id, &note, passed)).await;
    let stored = fixture.stored(&note).await;
    match outcome {
        Ok(outcome) => assert_eq!(done(Ok(outcome)), stored.unwrap().etag),
        Err(error) => assert!(error.is_retryable(), "{error:?}"),
    }
}

/// The class of the SDK's error for a create, if the wire does this to every attempt.
async fn class_of_create(fixture: &StoreFixture, action: WireAction) -> ErrorClass {
    let note = note("i", "class", "");
    let rule = fixture.on(RequestKind::Create, action);
    let container = &fixture.store.inner.container;
    let outcome = container.create_item(&note.instance_id, note.id.as_str(), &note, None).await;
    rule.remove();
    classify(&outcome.unwrap_err())
}

#[tokio::test]
async fn a_request_that_was_never_sent_is_not_applied() {
    let fixture = StoreFixture::in_process().await;
    let class = class_of_create(&fixture, WireAction::FailConnection).await;
    assert_eq!(class, ErrorClass::Retry { after: None, applied: Applied::No });
    let class = class_of_create(&fixture, WireAction::LoseAnswer).await;
    assert_eq!(class, ErrorClass::Retry { after: None, applied: Applied::Perhaps });
}

/// An identity service that fails for the next `failures` requests.
#[derive(Debug, Default)]
struct UnreachableIdentity {
    failures: AtomicU32,
}

impl UnreachableIdentity {
    fn is_unreachable(&self) -> bool {
        self.failures.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
    }
}

#[async_trait]
impl TokenCredential for UnreachableIdentity {
    async fn get_token(
        &self,
        _scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        if self.is_unreachable() {
            return Err(azure_core::Error::with_message(ErrorKind::Credential, "the identity service is unreachable"));
        }
        // The token has expired, so that every request asks for another.
        Ok(AccessToken::new("token", OffsetDateTime::UNIX_EPOCH))
    }
}

#[tokio::test]
async fn a_missing_token_is_retried_and_then_retryable() {
    let identity = Arc::new(UnreachableIdentity::default());
    let token: Arc<dyn TokenCredential> = identity.clone();
    let fixture = StoreFixture::over_http_with(Credential::from(token)).await;
    let (first, second) = (note("i", "a", ""), note("i", "b", ""));
    // The pauses after the two failures are about a second and two.
    identity.failures.store(2, SeqCst);
    fixture.given(&first).await;
    assert_eq!(identity.failures.load(SeqCst), 0);

    identity.failures.store(u32::MAX, SeqCst);
    let outcome =
        cut_short(fixture.store.create(&second.instance_id, &second.id, &second, Deadline::after(SHORT))).await;
    let error = outcome.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("the identity service is unreachable"), "{error}");
    identity.failures.store(0, SeqCst);
    assert!(fixture.stored(&second).await.is_none());
}

#[tokio::test]
async fn a_token_that_is_refused_is_fetched_anew_once_and_the_error_says_what_to_check() {
    let token: Arc<dyn TokenCredential> = Arc::new(UnreachableIdentity::default());
    let fixture = StoreFixture::over_http_with(Credential::from(token)).await;
    fixture.account.refuse_token("token");
    let note = note("i", "a", "");
    let error = fixture.store.create(&note.instance_id, &note.id, &note, in_time()).await.unwrap_err();
    assert!(matches!(&error, StoreError::Denied { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("token credential of the application"), "{text}");
    assert!(text.contains("tenant") && text.contains("clock"), "{text}");
}

/// An identity service that returns "token", then "token-2", "token-3" and so on. All are valid for two centuries.
#[derive(Debug, Default)]
struct Rotating(AtomicU32);

#[async_trait]
impl TokenCredential for Rotating {
    async fn get_token(
        &self,
        _scopes: &[&str],
        _options: Option<TokenRequestOptions<'_>>,
    ) -> azure_core::Result<AccessToken> {
        let name = match self.0.fetch_add(1, SeqCst) {
            0 => "token".to_owned(),
            before => format!("token-{}", before + 1),
        };
        Ok(AccessToken::new(name, OffsetDateTime::UNIX_EPOCH + Duration::from_secs(1 << 33)))
    }
}

#[tokio::test]
async fn a_valid_token_that_the_service_refuses_is_replaced_and_the_call_succeeds() {
    let identity = Arc::new(Rotating::default());
    let token: Arc<dyn TokenCredential> = identity.clone();
    let fixture = StoreFixture::over_http_with(Credential::from(token)).await;
    fixture.account.refuse_token("token");
    fixture.account.accept_token("token-2");
    fixture.given(&note("i", "a", "")).await;
    // A second refusal within the minute is an error, because then the token is not the cause.
    fixture.account.refuse_token("token-2");
    let note = note("i", "b", "");
    let error = fixture.store.create(&note.instance_id, &note.id, &note, in_time()).await.unwrap_err();
    assert!(matches!(&error, StoreError::Denied { .. }), "{error:?}");
    assert_eq!(identity.0.load(SeqCst), 2);
}

#[tokio::test]
async fn concurrent_calls_with_a_refused_token_continue_with_the_next_one() {
    let identity = Arc::new(Rotating::default());
    let token: Arc<dyn TokenCredential> = identity.clone();
    let fixture = StoreFixture::over_http_with(Credential::from(token)).await;
    fixture.account.refuse_token("token");
    fixture.account.accept_token("token-2");
    let notes: Vec<Note> = (0..8).map(|n| note("i", &n.to_string(), "")).collect();
    // All requests are in flight with the old token when the first refusal arrives.
    let writing = notes.iter().map(|note| fixture.store.create(&note.instance_id, &note.id, note, in_time()));
    let outcomes = futures::future::join_all(writing).await;
    outcomes.into_iter().for_each(|outcome| drop(done(outcome)));
    assert_eq!(identity.0.load(SeqCst), 2);
}

#[tokio::test]
async fn a_token_that_has_expired_by_the_services_clock_is_fetched_anew() {
    let identity = Arc::new(Rotating::default());
    let token: Arc<dyn TokenCredential> = identity.clone();
    let fixture = StoreFixture::over_http_with(Credential::from(token)).await;
    fixture.account.accept_token("token-2");
    let old = |request: &duroxide_cosmos_emulator::WireRequest<'_>| {
        request.header("authorization").is_some_and(|value| value.ends_with("token"))
    };
    let expired = WireRule::new(refuse_as(401, 5006)).on(RequestKind::Create).matching(old);
    let rule = fixture.account.wire().add(expired);
    let note = note("i", "a", "");
    let deadline = Deadline::after(Duration::from_secs(3));
    done(fixture.store.create(&note.instance_id, &note.id, &note, deadline).await);
    assert_eq!((rule.hits(), identity.0.load(SeqCst)), (1, 2));
}

#[tokio::test]
async fn a_write_that_the_sdks_own_limit_cuts_off_has_an_unknown_outcome() {
    let fixture = StoreFixture::in_process().await;
    let (note, gate) = (note("i", "a", ""), Gate::new());
    let held = fixture.next(1, RequestKind::Create, WireAction::HoldAfter(gate.clone()));
    let much_later =
        WireAction::Refuse { status: 429, substatus: Some(3200), retry_after: Some(Duration::from_secs(3_600)) };
    fixture.on(RequestKind::Create, much_later);
    let deadline = Deadline::after(Duration::from_secs(2));
    let error = fixture.store.create(&note.instance_id, &note.id, &note, deadline).await.unwrap_err();
    assert_eq!(held.hits(), 1);
    assert!(matches!(&error, StoreError::OutcomeUnknown { .. }), "{error:?}");
    assert!(fixture.stored(&note).await.is_some());
    gate.open();
}

async fn a_token_that_is_not_valid_by_the_services_clock_is_retried(fixture: StoreFixture) {
    for substatus in [5005, 5006, 5201] {
        let rule = fixture.next(2, RequestKind::Create, refuse_as(401, substatus));
        fixture.given(&note("i", &substatus.to_string(), "")).await;
        assert_eq!(rule.hits(), 2);
    }
}

async fn an_unknown_status_is_retried_and_then_retryable(fixture: StoreFixture) {
    for status in [405, 407, 415, 418] {
        let rule = fixture.next(2, RequestKind::Create, refuse(status));
        fixture.given(&note("i", &status.to_string(), "")).await;
        assert!(rule.hits() >= 2, "{status}");
        let error = create_error(&fixture, refuse(status), Deadline::after(SHORT)).await;
        assert!(error.is_retryable(), "{status}: {error:?}");
    }
}

async fn a_container_that_is_still_being_created_is_retried(fixture: StoreFixture) {
    let rule = fixture.next(3, RequestKind::Create, refuse_as(404, 1013));
    fixture.given(&note("i", "a", "")).await;
    assert_eq!(rule.hits(), 3);
}

#[test]
fn jitter_never_shortens_the_pause_that_the_service_asks_for() {
    let (pause, retry_after) = (Duration::from_millis(100), Duration::from_secs(1));
    for fraction in [0.0, 0.25, 0.5, 0.999] {
        let wait = with_jitter(pause, Some(retry_after), fraction);
        assert!((retry_after..=retry_after * 5 / 4).contains(&wait), "{wait:?}");
        let wait = with_jitter(pause, None, fraction);
        assert!((pause * 3 / 4..=pause * 5 / 4).contains(&wait), "{wait:?}");
    }
}
