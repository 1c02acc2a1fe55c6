//! Transactional batches: they are atomic, and the store never confuses a rollback with a commit.

use super::fixture::{both_ways, cut_short, in_time, note, refuse, refuse_as, Note, StoreFixture, SHORT};
use crate::model::Operation;
use crate::{
    cosmos::{BatchOutcome, Committed, Deadline, RolledBack, StoreError},
    model::{
        operation::{MAX_BYTES, MAX_OPERATIONS},
        Partition,
    },
};
use azure_core::http::{Etag, StatusCode};
use azure_data_cosmos::fault_injection::{
    CustomResponseBuilder, FaultInjectionConditionBuilder, FaultInjectionResultBuilder, FaultInjectionRule,
    FaultInjectionRuleBuilder, FaultOperationType,
};
use duroxide_cosmos_emulator::{RequestKind, WireAction};
use serde_json::json;
use std::{sync::Arc, time::Duration};

both_ways!(
    a_committed_batch_gives_the_etag_of_every_document,
    a_batch_with_a_duplicate_create_is_rolled_back,
    a_batch_with_a_stale_condition_is_rolled_back,
    a_batch_that_replaces_or_deletes_nothing_is_rolled_back,
    a_batch_of_a_hundred_operations_is_committed,
    a_batch_of_more_operations_than_the_limit_is_refused_before_it_is_sent,
    a_batch_over_two_megabytes_is_refused_with_its_size_before_it_is_sent,
    a_document_over_the_limit_is_named_in_the_refusal_of_its_batch,
    a_batch_just_under_the_limit_is_committed,
    a_transient_failure_of_one_operation_is_retried,
    a_batch_with_an_operation_that_is_throttled_until_the_deadline_is_not_applied,
    a_throttled_operation_after_a_lost_answer_has_an_unknown_outcome,
    the_error_for_a_batch_that_is_refused_as_a_whole_names_its_size,
    the_size_of_a_batch_counts_ids_and_conditions_as_the_service_does,
);

/// Time for a few attempts on a busy machine.
const LONG_ENOUGH: Duration = Duration::from_secs(2);

fn partition() -> Partition {
    Partition::instance("i").unwrap()
}

fn create(note: &Note) -> Operation {
    Operation::create(note).unwrap()
}

fn replace(note: &Note, if_match: Option<&Etag>) -> Operation {
    Operation::replace(note.id.clone(), note, if_match).unwrap()
}

async fn batch(fixture: &StoreFixture, operations: &[Operation]) -> BatchOutcome {
    fixture.store.batch(&partition(), operations, in_time()).await.unwrap()
}

#[track_caller]
fn committed(outcome: BatchOutcome) -> Committed {
    match outcome {
        BatchOutcome::Committed(committed) => committed,
        BatchOutcome::RolledBack(back) => panic!("{back:?}"),
    }
}

#[track_caller]
fn rolled_back(outcome: BatchOutcome) -> (usize, u16) {
    match outcome {
        BatchOutcome::RolledBack(RolledBack { index, status, .. }) => (index, status),
        BatchOutcome::Committed(committed) => panic!("{committed:?}"),
    }
}

async fn a_committed_batch_gives_the_etag_of_every_document(fixture: StoreFixture) {
    let (kept, gone) = (note("i", "sharedResult", "one"), note("i", "gone", "one"));
    let (kept_etag, gone_etag) = (fixture.given(&kept).await, fixture.given(&gone).await);
    let (made, put) = (note("i", "made", "made"), note("i", "put", "put"));
    let operations = [
        create(&made),
        replace(&kept.with_text("two"), Some(&kept_etag)),
        Operation::upsert(&put).unwrap(),
        Operation::delete(gone.id.clone(), Some(&gone_etag)),
    ];
    let committed = committed(batch(&fixture, &operations).await);
    assert_eq!(committed.etags.len(), operations.len());
    for (index, note) in [(0, &made), (1, &kept), (2, &put)] {
        assert_eq!(committed.etag(index), Some(&fixture.stored(note).await.unwrap().etag), "operation {index}");
    }
    assert_eq!(fixture.text(&kept).await.as_deref(), Some("two"));
    assert!(fixture.stored(&gone).await.is_none());
}

async fn a_batch_with_a_duplicate_create_is_rolled_back(fixture: StoreFixture) {
    let (first, there) = (note("i", "first", ""), note("i", "there", "one"));
    let etag = fixture.given(&there).await;
    let outcome = batch(&fixture, &[create(&first), create(&there.with_text("two"))]).await;
    assert_eq!(rolled_back(outcome), (1, 409));
    assert!(fixture.stored(&first).await.is_none());
    assert_eq!(fixture.stored(&there).await.unwrap().etag, etag);
}

async fn a_batch_with_a_stale_condition_is_rolled_back(fixture: StoreFixture) {
    let fence = note("i", "fence", "one");
    let old = fixture.given(&fence).await;
    committed(batch(&fixture, &[replace(&fence.with_text("two"), Some(&old))]).await);
    let other = note("i", "other", "");
    for late in [replace(&fence.with_text("three"), Some(&old)), Operation::delete(fence.id.clone(), Some(&old))] {
        let outcome = batch(&fixture, &[late, create(&other)]).await;
        assert_eq!(rolled_back(outcome), (0, 412));
    }
    assert_eq!(fixture.text(&fence).await.as_deref(), Some("two"));
    assert!(fixture.stored(&other).await.is_none());
}

async fn a_batch_that_replaces_or_deletes_nothing_is_rolled_back(fixture: StoreFixture) {
    let (first, missing) = (note("i", "first", ""), note("i", "missing", ""));
    for failing in [replace(&missing, None), Operation::delete(missing.id.clone(), None)] {
        let outcome = batch(&fixture, &[create(&first), failing]).await;
        assert_eq!(rolled_back(outcome), (1, 404));
        assert!(fixture.stored(&first).await.is_none());
    }
}

async fn a_batch_of_a_hundred_operations_is_committed(fixture: StoreFixture) {
    let notes: Vec<Note> = (0..MAX_OPERATIONS).map(|n| note("i", &n.to_string(), "")).collect();
    let operations: Vec<Operation> = notes.iter().map(create).collect();
    let committed = committed(batch(&fixture, &operations).await);
    assert!(committed.etags.iter().all(Option::is_some));
    assert!(fixture.stored(&notes[MAX_OPERATIONS - 1]).await.is_some());
}

async fn a_batch_of_more_operations_than_the_limit_is_refused_before_it_is_sent(fixture: StoreFixture) {
    let operations: Vec<Operation> = (0..=MAX_OPERATIONS).map(|n| create(&note("i", &n.to_string(), ""))).collect();
    let error = fixture.store.batch(&partition(), &operations, in_time()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("101 operations") && text.contains("limit is 100"), "{text}");
    assert_eq!(fixture.account.stats().of(RequestKind::Batch).requests, 0);
}

async fn a_batch_over_two_megabytes_is_refused_with_its_size_before_it_is_sent(fixture: StoreFixture) {
    let operations: Vec<Operation> = (0..5).map(|n| create(&note("i", &n.to_string(), "x".repeat(500_000)))).collect();
    let error = fixture.store.batch(&partition(), &operations, in_time()).await.unwrap_err();
    assert!(matches!(&error, StoreError::TooLarge { bytes: 2_500_000.., limit: MAX_BYTES, .. }), "{error:?}");
    assert!(error.is_unstorable());
    assert!(error.to_string().contains("a batch of 5 operations"), "{error}");
    assert_eq!(fixture.account.stats().of(RequestKind::Batch).requests, 0);
}

async fn a_document_over_the_limit_is_named_in_the_refusal_of_its_batch(fixture: StoreFixture) {
    let operations = [create(&note("i", "small", "")), create(&note("i", "big", "x".repeat(3_000_000)))];
    let error = fixture.store.batch(&partition(), &operations, in_time()).await.unwrap_err();
    assert!(matches!(&error, StoreError::TooLarge { bytes: 3_000_000.., limit: MAX_BYTES, .. }), "{error:?}");
    assert!(error.to_string().contains("document note:big"), "{error}");
}

async fn a_batch_just_under_the_limit_is_committed(fixture: StoreFixture) {
    let full = |text: usize| -> Vec<Operation> {
        (0..MAX_OPERATIONS).map(|n| create(&note("i", &format!("{n:03}"), "x".repeat(text)))).collect()
    };
    let empty: usize = full(0).iter().map(Operation::size).sum();
    let operations = full((MAX_BYTES - empty) / MAX_OPERATIONS);
    let size: usize = operations.iter().map(Operation::size).sum();
    assert!(size > MAX_BYTES - MAX_OPERATIONS);
    committed(batch(&fixture.patient(), &operations).await);
}

async fn a_transient_failure_of_one_operation_is_retried(fixture: StoreFixture) {
    for (round, status) in [408, 410, 429, 449, 500, 503].into_iter().enumerate() {
        let note = note("i", &round.to_string(), "");
        let action = WireAction::RefuseBatchOperation { index: 0, status, substatus: None };
        let rule = fixture.next(3, RequestKind::Batch, action);
        committed(batch(&fixture, &[create(&note)]).await);
        assert_eq!(rule.hits(), 3, "{status}");
    }
    let statistics = fixture.store.statistics().of(crate::OperationKind::Batch);
    assert_eq!((statistics.retried, statistics.throttled), (18, 3));
}

async fn a_batch_with_an_operation_that_is_throttled_until_the_deadline_is_not_applied(fixture: StoreFixture) {
    let note = note("i", "a", "");
    let action = WireAction::RefuseBatchOperation { index: 1, status: 429, substatus: Some(3200) };
    let rule = fixture.on(RequestKind::Batch, action);
    let operations = [create(&note), Operation::delete(note.id.clone(), None)];
    let outcome = cut_short(fixture.store.batch(&partition(), &operations, Deadline::after(LONG_ENOUGH))).await;
    let error = outcome.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert!(rule.hits() > 1);
    assert!(fixture.stored(&note).await.is_none());
}

async fn a_throttled_operation_after_a_lost_answer_has_an_unknown_outcome(fixture: StoreFixture) {
    let note = note("i", "a", "");
    let lost = fixture.next(1, RequestKind::Batch, WireAction::LoseAnswer);
    let throttled =
        fixture.on(RequestKind::Batch, WireAction::RefuseBatchOperation { index: 0, status: 429, substatus: None });
    let outcome = cut_short(fixture.store.batch(&partition(), &[create(&note)], Deadline::after(LONG_ENOUGH))).await;
    let error = outcome.unwrap_err();
    assert!(matches!(&error, StoreError::OutcomeUnknown { .. }), "{error:?}");
    assert!(lost.hits() == 1 && throttled.hits() >= 1);
    assert!(fixture.stored(&note).await.is_some());
}

async fn the_error_for_a_batch_that_is_refused_as_a_whole_names_its_size(fixture: StoreFixture) {
    let operations = [create(&note("i", "a", "x".repeat(1_000))), create(&note("i", "b", ""))];
    let size: usize = operations.iter().map(Operation::size).sum();
    fixture.next(1, RequestKind::Batch, refuse(413));
    let error = fixture.store.batch(&partition(), &operations, in_time()).await.unwrap_err();
    assert!(error.is_unstorable(), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("a batch of 2 operations") && text.contains(&size.to_string()), "{text}");

    fixture.next(1, RequestKind::Batch, refuse(400));
    let error = fixture.store.batch(&partition(), &operations, in_time()).await.unwrap_err();
    assert!(matches!(&error, StoreError::Rejected { .. }), "{error:?}");
    assert!(error.to_string().contains("a batch of 2 operations"), "{error}");

    fixture.next(1, RequestKind::Batch, refuse_as(403, 1014));
    let error = fixture.store.batch(&partition(), &operations, in_time()).await.unwrap_err();
    assert!(matches!(&error, StoreError::PartitionFull { partition } if partition == "i"), "{error:?}");
}

/// Answers the next batch with this status and body, and applies nothing.
fn answer_batch(status: StatusCode, body: serde_json::Value) -> Arc<FaultInjectionRule> {
    let response = CustomResponseBuilder::new(status).with_body(body.to_string()).build();
    let on_batches = FaultInjectionConditionBuilder::new().with_operation_type(FaultOperationType::BatchItem).build();
    let result = FaultInjectionResultBuilder::new().with_custom_response(response).build();
    let rule = FaultInjectionRuleBuilder::new("batch", result).with_condition(on_batches).with_hit_limit(1);
    Arc::new(rule.build())
}

#[tokio::test]
async fn the_store_waits_as_long_as_an_operation_asks() {
    let wait = Duration::from_millis(400);
    let body = json!([{ "statusCode": 429, "subStatusCode": 3200, "retryAfterMilliseconds": wait.as_millis() as u64 }]);
    let rule = answer_batch(StatusCode::MultiStatus, body);
    let fixture = StoreFixture::with_rules(vec![rule.clone()]).await;
    let note = note("i", "a", "");
    let started = tokio::time::Instant::now();
    committed(batch(&fixture, &[create(&note)]).await);
    assert!(started.elapsed() >= wait);
    assert_eq!(rule.hit_count(), 1);
}

#[tokio::test]
async fn a_batch_whose_operation_asks_for_a_pause_beyond_the_deadline_is_unavailable() {
    let body = json!([{ "statusCode": 429, "retryAfterMilliseconds": 3_600_000 }]);
    let rule = answer_batch(StatusCode::MultiStatus, body);
    let fixture = StoreFixture::with_rules(vec![rule.clone()]).await;
    let operations = [create(&note("i", "a", ""))];
    let outcome = cut_short(fixture.store.batch(&partition(), &operations, Deadline::after(SHORT))).await;
    let error = outcome.unwrap_err();
    assert!(matches!(&error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("operation 0 was answered 429"), "{error}");
    assert_eq!(rule.hit_count(), 1);
}

#[tokio::test]
async fn an_answer_that_does_not_fit_its_batch_never_counts_as_a_commit() {
    let failed_dependency = json!([{ "statusCode": 424 }]);
    let one_too_many = json!([{ "statusCode": 201 }, { "statusCode": 201 }]);
    for (status, body) in [
        (StatusCode::MultiStatus, failed_dependency.clone()),
        (StatusCode::MultiStatus, json!([])),
        (StatusCode::Ok, failed_dependency),
        (StatusCode::Ok, one_too_many),
        (StatusCode::Ok, json!([])),
        (StatusCode::Ok, json!({})),
    ] {
        let fixture = StoreFixture::with_rules(vec![answer_batch(status, body.clone())]).await;
        let outcome = fixture.store.batch(&partition(), &[create(&note("i", "a", ""))], in_time()).await;
        assert!(matches!(outcome, Err(StoreError::Malformed { .. })), "{body}: {outcome:?}");
    }
}

async fn the_size_of_a_batch_counts_ids_and_conditions_as_the_service_does(fixture: StoreFixture) {
    let sent = Arc::new(std::sync::Mutex::new(0));
    let seen = sent.clone();
    fixture.account.wire().observe(move |request, _| {
        if request.kind == RequestKind::Batch {
            *seen.lock().unwrap() = request.json().map_or(0, |body| body.to_string().len());
        }
    });
    // Operations with ids and conditions but without documents. Otherwise the size would be 96 bytes for each.
    let long = |number: usize| note("i", &format!("{number:0>40}"), "");
    let etag = Etag::from("\"00000000-0000-0000-0000-000000000000\"");
    let operations: Vec<Operation> =
        (0..MAX_OPERATIONS).map(|number| Operation::delete(long(number).id, Some(&etag))).collect();
    batch(&fixture, &operations).await;
    let (counted, sent) = (operations.iter().map(Operation::size).sum::<usize>(), *sent.lock().unwrap());
    assert!(sent > 9_600 && counted >= sent && counted < sent * 2, "{counted} bytes counted, {sent} sent");
}
