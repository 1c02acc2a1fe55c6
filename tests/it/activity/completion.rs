//! An activity is completed once, by the worker that holds its lock, and a result that is too large is a failure.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, TagFilter, WorkItem},
    ErrorDetails,
};
use std::{sync::atomic::Ordering, time::Duration};

const INSTANCE: &str = "order";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_activity_is_refused_by_ack_and_renew_and_runs_again() {
    let fixture = Fixture::with_container().await;
    let a = fixture.impatient_provider("a").await;
    begin_with_activities(&a, INSTANCE, 1).await;
    let lock = Duration::from_millis(300);
    let (_, token) = fetch_activity(&a, lock).await;
    expiry(lock).await;
    let before = fixture.partition(INSTANCE).await;
    assert_refused(a.renew_work_item_lock(&token, LONG).await);
    assert_refused(a.ack_work_item(&token, Some(completion(INSTANCE, 2, "late"))).await);
    assert_refused(a.ack_work_item(&token, None).await);
    assert_eq!(fixture.partition(INSTANCE).await, before);
    let (item, _) = fetch_activity(&fixture.impatient_provider("b").await, LONG).await;
    assert_eq!(activity_id(&item), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_renewal_was_refused_stays_when_the_clock_is_set_back() {
    let fixture = Fixture::new(1);
    let (off, clock) = adjustable_clock();
    let a = fixture.provider_with("a", test_config().with_clock(clock)).await;
    begin(&a, "i", vec![activity("i", 2)], Vec::new()).await;
    let (_, token, _) = next_activity(&a, Duration::from_secs(5)).await;
    off.store(10_000, Ordering::Relaxed);
    a.renew_work_item_lock(&token, LONG).await.unwrap_err();
    off.store(0, Ordering::Relaxed);
    a.ack_work_item(&token, None).await.expect_err("the runtime has cancelled it without a completion");
    assert_eq!(fixture.documents_of_type("i", "activity").await.len(), 1);
}

const CHILD: &str = "child";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_whose_result_is_too_large_fails_once_with_the_reason() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    begin(&a, CHILD, vec![activity(CHILD, 2)], Vec::new()).await;
    let (_, token, _) = next_activity(&a, LONG).await;
    let result = "\"".repeat(700_000);
    let completion = WorkItem::ActivityCompleted { instance: CHILD.to_owned(), execution_id: 1, id: 2, result };
    a.ack_work_item(&token, Some(completion)).await.unwrap();
    assert!(a.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap().is_none());
    let (item, ..) = next_turn(&a, LONG).await;
    let [WorkItem::ActivityFailed { execution_id: 1, id: 2, details, .. }] = item.messages.as_slice() else {
        panic!("{:?}", item.messages);
    };
    let ErrorDetails::Application { message, retryable, .. } = details else { panic!("{details:?}") };
    assert!(!retryable && message.contains("bytes") && message.contains("limit"), "{message}");
    assert!(message.contains("2800"), "the size as it would be sent: {message}");
}

const MB: usize = 1024 * 1024;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_failure_that_is_larger_than_a_document_is_recorded() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("a").await;
    begin(&provider, INSTANCE, vec![activity(INSTANCE, 2)], Vec::new()).await;
    let (_, token, _) = next_activity(&provider, LONG).await;
    let details = poison(INSTANCE, "x".repeat(3 * MB));
    let failed = WorkItem::ActivityFailed { instance: INSTANCE.to_owned(), execution_id: 1, id: 2, details };
    provider.ack_work_item(&token, Some(failed)).await.expect("a failure that is stored");
    let (item, _, _) = next_turn(&provider, LONG).await;
    assert!(matches!(&item.messages[..], [WorkItem::ActivityFailed { .. }]));
}
