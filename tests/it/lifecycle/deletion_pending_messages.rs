//! Messages of a committed turn to other instances outlive their sender: a deletion delivers them before its commit,
//! wherever it is cut, and fails if it cannot.

use crate::fixture::*;
use duroxide::providers::{InstanceFilter, Provider, ProviderError, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, Retention};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use futures::{stream, StreamExt};
use std::time::Duration;

/// The messages of an instance's first turn, which must come. No other turn can be fetched.
async fn first_messages(provider: &CosmosDBProvider, instance: &str) -> Vec<WorkItem> {
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!((item.instance.as_str(), item.history.len()), (instance, 0));
    commit(provider, &token, vec![started(instance, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let more = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(more.is_none(), "{more:?}");
    item.messages
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_undelivered_detached_start_outlives_its_sender_with_every_kind_of_deletion() {
    for way in ["by name", "as a set", "in bulk", "by retention"] {
        let fixture = Fixture::new(2);
        fixture.end_with_pending_messages("sender", "other", vec![start("other")]).await;
        let retention = Retention::default().with_completed(Duration::ZERO);
        let deleter = fixture.provider_with("deleter", test_config().with_retention(retention)).await;
        let deleted = match way {
            "by name" => admin(&deleter).delete_instance("sender", false).await.unwrap().instances_deleted,
            "as a set" => {
                let set = ["sender".to_owned()];
                admin(&deleter).delete_instances_atomic(&set, false).await.unwrap().instances_deleted
            }
            "in bulk" => {
                let filter = InstanceFilter::default();
                admin(&deleter).delete_instance_bulk(filter).await.unwrap().instances_deleted
            }
            _ => deleter.apply_retention().await.unwrap(),
        };
        assert_eq!(deleted, 1, "{way}");
        assert!(fixture.partition("sender").await.is_empty(), "{way}: {:?}", fixture.partition("sender").await);
        let messages = first_messages(&deleter, "other").await;
        assert!(matches!(messages[..], [WorkItem::StartOrchestration { .. }]), "{way}: {messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pending_message_arrives_once_after_a_cut_of_the_deletion_of_its_sender() {
    const CASES: u64 = 26;
    let cases: Vec<(u64, bool)> = (0..CASES).flat_map(|passing| [(passing, false), (passing, true)]).collect();
    let count = cases.len();
    let running = stream::iter(cases).map(|(passing, answer_only)| async move {
        let fixture = Fixture::new(1);
        fixture.end_with_pending_messages("sender", "other", vec![start("other")]).await;
        let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
        let cut = fixture.cut_at("a", passing, answer_only);
        let ended = until_cut(admin(&a).delete_instance("sender", false), &cut).await;
        drop(a);
        if let Err(error) = admin(&b).delete_instance("sender", false).await {
            assert!(error.message.contains("not found"), "cut after {passing}: {error:?}");
        }
        assert!(fixture.partition("sender").await.is_empty(), "cut after {passing}");
        let messages = first_messages(&b, "other").await;
        assert!(matches!(messages[..], [WorkItem::StartOrchestration { .. }]), "cut after {passing}: {messages:?}");
        matches!(ended, Ended::Cut)
    });
    let cut: Vec<bool> = running.buffer_unordered(count).collect().await;
    let cut = cut.into_iter().filter(|cut| *cut).count();
    assert!(cut >= 12 && cut < count, "cuts before the end and after it: {cut} of {count}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pending_cancellation_of_a_child_arrives_although_its_parent_is_deleted() {
    let fixture = Fixture::new(2);
    let cancel = WorkItem::CancelInstance { instance: "child".to_owned(), reason: "the parent has ended".to_owned() };
    fixture.end_with_pending_messages("parent", "child", vec![start_child("child", Some("parent")), cancel]).await;
    let deleter = fixture.provider("deleter").await;
    assert_eq!(admin(&deleter).delete_instance("parent", false).await.unwrap().instances_deleted, 1);
    let messages = first_messages(&deleter, "child").await;
    assert!(
        matches!(messages[..], [WorkItem::StartOrchestration { .. }, WorkItem::CancelInstance { .. }]),
        "{messages:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_messages_between_two_instances_of_one_deletion_are_deleted_with_them() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish(&worker, "receiver", None).await;
    fixture.end_with_pending_messages("sender", "receiver", vec![external("receiver", "late")]).await;
    let deleter = fixture.provider("deleter").await;
    let set = ["receiver".to_owned(), "sender".to_owned()];
    assert_eq!(admin(&deleter).delete_instances_atomic(&set, false).await.unwrap().instances_deleted, 2);
    assert!(fixture.is_erased("sender").await && fixture.is_erased("receiver").await);
    worker.enqueue_for_orchestrator(start("receiver"), None).await.unwrap();
    let messages = first_messages(&worker, "receiver").await;
    assert!(matches!(messages[..], [WorkItem::StartOrchestration { .. }]), "{messages:?}");
}

/// The error of a deletion while the target cannot be reached.
async fn refused(fixture: &Fixture, deleter: &CosmosDBProvider, force: bool) -> ProviderError {
    let error = admin(deleter).delete_instance("sender", force).await.expect_err("the target can't be reached");
    assert!(error.message.contains("sender") && error.message.contains("could not be delivered"), "{error:?}");
    assert!(error.message.contains("Nothing was deleted"), "{error:?}");
    assert_eq!(admin(deleter).get_instance_info("sender").await.unwrap().status, "Completed");
    assert!(!fixture.documents_of_type("sender", "intent").await.is_empty(), "the message is still pending");
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_is_refused_while_a_message_cannot_be_delivered() {
    let fixture = Fixture::new(2);
    let worker = fixture.provider("worker").await;
    finish(&worker, "free", None).await;
    fixture.end_with_pending_messages("sender", "other", vec![start("other")]).await;
    let brief =
        test_config().with_operation_timeout(Duration::from_secs(1)).with_request_timeout(Duration::from_secs(1));
    let deleter = fixture.provider_with("deleter", brief).await;
    let outage = fixture.block("deleter", "other", unavailable());
    for force in [false, true] {
        assert!(refused(&fixture, &deleter, force).await.is_retryable());
    }
    // A bulk deletion of several trees spares the one whose message is not delivered.
    let deleted = admin(&deleter).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!((deleted.instances_deleted, fixture.is_erased("free").await), (1, true));
    outage.remove();
    assert_eq!(admin(&deleter).delete_instance("sender", false).await.unwrap().instances_deleted, 1);
    assert_eq!(first_messages(&worker, "other").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_with_force_drops_messages_that_cannot_be_delivered() {
    let fixture = Fixture::new(2);
    fixture.end_with_pending_messages("sender", "other", vec![start("other")]).await;
    let deleter = fixture.provider("deleter").await;
    let forbidden = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    let refusal = fixture.block("deleter", "other", forbidden);
    assert!(!refused(&fixture, &deleter, false).await.is_retryable());
    assert_eq!(admin(&deleter).delete_instance("sender", true).await.unwrap().instances_deleted, 1);
    refusal.remove();
    assert!(fixture.partition("sender").await.is_empty() && fixture.partition("other").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pending_start_between_two_instances_of_one_deletion_is_deleted_with_them() {
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish(&worker, "receiver", None).await;
    fixture.end_with_pending_messages("sender", "receiver", vec![start("receiver")]).await;
    let deleter = fixture.provider("deleter").await;
    let set = ["receiver".to_owned(), "sender".to_owned()];
    assert_eq!(admin(&deleter).delete_instances_atomic(&set, false).await.unwrap().instances_deleted, 2);
    assert!(fixture.is_erased("receiver").await, "{:?}", fixture.partition("receiver").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_drops_no_message() {
    let fixture = Fixture::new(2);
    fixture.end_with_pending_messages("sender", "other", vec![start("other")]).await;
    let deleter = fixture.provider("deleter").await;
    let refusal =
        fixture.block("deleter", "other", WireAction::Refuse { status: 403, substatus: None, retry_after: None });
    admin(&deleter).delete_instance_bulk(InstanceFilter::default()).await.expect_err("nothing could be done");
    refusal.remove();
    assert_eq!(admin(&deleter).delete_instance_bulk(InstanceFilter::default()).await.unwrap().instances_deleted, 1);
    assert_eq!(first_messages(&deleter, "other").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_receiver_is_tried_once_and_not_for_each_of_its_messages() {
    let fixture = Fixture::new(2);
    let messages = (0..320).map(|number| external("other", &number.to_string())).collect();
    fixture.end_with_pending_messages("sender", "other", messages).await;
    let brief =
        test_config().with_operation_timeout(Duration::from_secs(1)).with_request_timeout(Duration::from_secs(1));
    let deleter = fixture.provider_with("deleter", brief).await;
    let reads = WireRule::new(WireAction::Delay(NOW)).client("deleter").on(RequestKind::Read);
    let is_intent = |request: &WireRequest<'_>| goes_to(request, "sender") && request.document_id != Some("instance");
    let reads = fixture.account.wire().add(reads.matching(is_intent));
    fixture.block("deleter", "other", unavailable());
    refused(&fixture, &deleter, false).await;
    assert!(reads.hits() <= 32, "{} of 320 were tried", reads.hits());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_delivers_slowly_is_not_aborted_by_another_one() {
    let fixture = Fixture::new(2);
    fixture.end_with_pending_messages("sender", "other", vec![start("other")]).await;
    let patient = test_config().with_request_timeout(Duration::from_secs(10));
    let (a, b) = (fixture.provider_with("a", patient.clone()).await, fixture.provider_with("b", patient).await);
    // Longer than another deletion waits for one that makes no progress.
    let slow = fixture.block("a", "other", WireAction::Delay(Duration::from_millis(4_500)));
    let second = async {
        slow.wait_for_hits(1).await;
        admin(&b).delete_instance("sender", false).await
    };
    let (first, second) = tokio::join!(admin(&a).delete_instance("sender", false), second);
    assert_eq!(first.expect("the one that began first").instances_deleted, 1);
    if let Err(error) = second {
        assert!(error.message.contains("not found"), "{error:?}");
    }
    assert_eq!(slow.hits(), 1, "it delivers once");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_deletion_does_not_restart_the_retention_time() {
    let fixture = Fixture::new(2);
    fixture.end_with_pending_messages("sender", "other", vec![start("other")]).await;
    let ended = || async {
        fixture.documents_of_type("sender", "instance").await.remove(0)["ended"].as_str().unwrap().to_owned()
    };
    let time = |mark: &str| mark[1..].trim_end_matches('s').parse::<u64>().unwrap();
    let brief =
        test_config().with_operation_timeout(Duration::from_secs(1)).with_request_timeout(Duration::from_secs(1));
    let (age, before) = (Duration::from_secs(2), time(&ended().await));
    let retention = Retention::default().with_completed(age);
    let deleter = fixture.provider_with("deleter", brief.with_retention(retention)).await;
    fixture.block("deleter", "other", unavailable());
    // The time of Cosmos DB has whole seconds.
    while std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() <= before / 1_000 + age.as_secs() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    refused(&fixture, &deleter, false).await;
    assert!(time(&ended().await).abs_diff(before) <= 1_000, "{before} became {}", ended().await);
    assert_eq!(deleter.apply_retention().await.unwrap(), 0);
    assert!(time(&ended().await) > before + 590_000, "looked at again after ten minutes: {}", ended().await);
}
