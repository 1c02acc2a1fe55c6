//! Messages that a committed turn owes to other instances outlive their sender: a deletion delivers them before it is decided,
//! wherever it is cut, and says so where it can't.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{InstanceFilter, Provider, ProviderError, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, Retention};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use futures::{stream, StreamExt};
use scene::*;
use std::time::Duration;

fn unavailable() -> WireAction {
    WireAction::Refuse { status: 503, substatus: None, retry_after: None }
}

/// The messages of an instance's first turn, which must come; there is no other.
async fn first_messages(provider: &CosmosDBProvider, instance: &str) -> Vec<WorkItem> {
    let (item, token, _) = next_turn(provider, LONG).await;
    assert_eq!((item.instance.as_str(), item.history.len()), (instance, 0));
    commit(provider, &token, vec![started(instance, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let more = provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(more.is_none(), "{more:?}");
    item.messages
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_detached_start_that_is_not_delivered_yet_outlives_its_sender_however_that_is_deleted() {
    for way in ["by name", "as a set", "in bulk", "by retention"] {
        let scene = Scene::new(2);
        end_owing(&scene, "sender", "other", vec![start("other")]).await;
        let retention = Retention::default().with_completed(Duration::ZERO);
        let deleter = scene.provider_with("deleter", quiet().with_retention(retention)).await;
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
        assert!(scene.partition("sender").await.is_empty(), "{way}: {:?}", scene.partition("sender").await);
        let messages = first_messages(&deleter, "other").await;
        assert!(matches!(messages[..], [WorkItem::StartOrchestration { .. }]), "{way}: {messages:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_owed_arrives_once_wherever_the_deletion_of_its_sender_is_cut() {
    const CASES: u64 = 26;
    let cases: Vec<(u64, bool)> = (0..CASES).flat_map(|passing| [(passing, false), (passing, true)]).collect();
    let count = cases.len();
    let running = stream::iter(cases).map(|(passing, answer_only)| async move {
        let scene = Scene::new(1);
        end_owing(&scene, "sender", "other", vec![start("other")]).await;
        let (a, b) = (scene.provider("a").await, scene.provider("b").await);
        let cut = if answer_only { scene.cut_after("a", passing) } else { scene.cut("a", passing) };
        let ended = until_cut(admin(&a).delete_instance("sender", false), &cut).await;
        drop(a);
        if let Err(error) = admin(&b).delete_instance("sender", false).await {
            assert!(error.message.contains("not found"), "cut after {passing}: {error:?}");
        }
        assert!(scene.partition("sender").await.is_empty(), "cut after {passing}");
        let messages = first_messages(&b, "other").await;
        assert!(matches!(messages[..], [WorkItem::StartOrchestration { .. }]), "cut after {passing}: {messages:?}");
        matches!(ended, Ended::Cut)
    });
    let cut: Vec<bool> = running.buffer_unordered(count).collect().await;
    let cut = cut.into_iter().filter(|cut| *cut).count();
    assert!(cut >= 12 && cut < count, "cuts before the end and after it: {cut} of {count}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_was_to_be_cancelled_hears_of_it_although_its_parent_is_deleted() {
    let scene = Scene::new(2);
    let cancel = WorkItem::CancelInstance { instance: "child".to_owned(), reason: "the parent has ended".to_owned() };
    end_owing(&scene, "parent", "child", vec![start_child("child", Some("parent")), cancel]).await;
    let deleter = scene.provider("deleter").await;
    assert_eq!(admin(&deleter).delete_instance("parent", false).await.unwrap().instances_deleted, 1);
    let messages = first_messages(&deleter, "child").await;
    assert!(
        matches!(messages[..], [WorkItem::StartOrchestration { .. }, WorkItem::CancelInstance { .. }]),
        "{messages:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_two_instances_of_one_deletion_owe_each_other_goes_with_them() {
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish(&worker, "receiver", None).await;
    end_owing(&scene, "sender", "receiver", vec![external("receiver", "late")]).await;
    let deleter = scene.provider("deleter").await;
    let set = ["receiver".to_owned(), "sender".to_owned()];
    assert_eq!(admin(&deleter).delete_instances_atomic(&set, false).await.unwrap().instances_deleted, 2);
    assert!(scene.is_erased("sender").await && scene.is_erased("receiver").await);
    worker.enqueue_for_orchestrator(start("receiver"), None).await.unwrap();
    let messages = first_messages(&worker, "receiver").await;
    assert!(matches!(messages[..], [WorkItem::StartOrchestration { .. }]), "{messages:?}");
}

/// A deletion while the target can't be reached: what it says.
async fn refused(scene: &Scene, deleter: &CosmosDBProvider, force: bool) -> ProviderError {
    let error = admin(deleter).delete_instance("sender", force).await.expect_err("the target can't be reached");
    assert!(error.message.contains("sender") && error.message.contains("could not be delivered"), "{error:?}");
    assert!(error.message.contains("Nothing was deleted"), "{error:?}");
    assert_eq!(admin(deleter).get_instance_info("sender").await.unwrap().status, "Completed");
    assert!(!scene.of_kind("sender", "intent").await.is_empty(), "the message is still owed");
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_waits_for_what_can_not_be_delivered_now() {
    let scene = Scene::new(2);
    let worker = scene.provider("worker").await;
    finish(&worker, "free", None).await;
    end_owing(&scene, "sender", "other", vec![start("other")]).await;
    let brief = quiet().with_operation_timeout(Duration::from_secs(1)).with_request_timeout(Duration::from_secs(1));
    let deleter = scene.provider_with("deleter", brief).await;
    let outage = block(&scene, "deleter", "other", unavailable());
    for force in [false, true] {
        assert!(refused(&scene, &deleter, force).await.is_retryable());
    }
    // A set of several trees goes without the one whose message is not delivered.
    let deleted = admin(&deleter).delete_instance_bulk(InstanceFilter::default()).await.unwrap();
    assert_eq!((deleted.instances_deleted, scene.is_erased("free").await), (1, true));
    outage.remove();
    assert_eq!(admin(&deleter).delete_instance("sender", false).await.unwrap().instances_deleted, 1);
    assert_eq!(first_messages(&worker, "other").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn force_gives_up_what_nobody_can_deliver() {
    let scene = Scene::new(2);
    end_owing(&scene, "sender", "other", vec![start("other")]).await;
    let deleter = scene.provider("deleter").await;
    let forbidden = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    let refusal = block(&scene, "deleter", "other", forbidden);
    assert!(!refused(&scene, &deleter, false).await.is_retryable());
    assert_eq!(admin(&deleter).delete_instance("sender", true).await.unwrap().instances_deleted, 1);
    refusal.remove();
    assert!(scene.partition("sender").await.is_empty() && scene.partition("other").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_two_instances_of_one_deletion_owe_each_other_goes_with_them() {
    let scene = Scene::new(1);
    let worker = scene.provider("worker").await;
    finish(&worker, "receiver", None).await;
    end_owing(&scene, "sender", "receiver", vec![start("receiver")]).await;
    let deleter = scene.provider("deleter").await;
    let set = ["receiver".to_owned(), "sender".to_owned()];
    assert_eq!(admin(&deleter).delete_instances_atomic(&set, false).await.unwrap().instances_deleted, 2);
    assert!(scene.is_erased("receiver").await, "{:?}", scene.partition("receiver").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_deletion_gives_up_no_message() {
    let scene = Scene::new(2);
    end_owing(&scene, "sender", "other", vec![start("other")]).await;
    let deleter = scene.provider("deleter").await;
    let refusal =
        block(&scene, "deleter", "other", WireAction::Refuse { status: 403, substatus: None, retry_after: None });
    admin(&deleter).delete_instance_bulk(InstanceFilter::default()).await.expect_err("nothing could be done");
    refusal.remove();
    assert_eq!(admin(&deleter).delete_instance_bulk(InstanceFilter::default()).await.unwrap().instances_deleted, 1);
    assert_eq!(first_messages(&deleter, "other").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_can_not_be_reached_is_not_asked_for_each_of_its_messages() {
    let scene = Scene::new(2);
    let messages = (0..320).map(|number| external("other", &number.to_string())).collect();
    end_owing(&scene, "sender", "other", messages).await;
    let brief = quiet().with_operation_timeout(Duration::from_secs(1)).with_request_timeout(Duration::from_secs(1));
    let deleter = scene.provider_with("deleter", brief).await;
    let reads = WireRule::new(WireAction::Delay(NOW)).client("deleter").on(RequestKind::Read);
    let is_intent = |request: &WireRequest<'_>| goes_to(request, "sender") && request.document_id != Some("instance");
    let reads = scene.account.wire().add(reads.matching(is_intent));
    block(&scene, "deleter", "other", unavailable());
    refused(&scene, &deleter, false).await;
    assert!(reads.hits() <= 32, "{} of 320 were tried", reads.hits());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_delivers_slowly_is_not_given_up_by_another_one() {
    let scene = Scene::new(2);
    end_owing(&scene, "sender", "other", vec![start("other")]).await;
    let patient = quiet().with_request_timeout(Duration::from_secs(10));
    let (a, b) = (scene.provider_with("a", patient.clone()).await, scene.provider_with("b", patient).await);
    // Longer than a deletion that nobody goes on with is left alone by another one.
    let slow = block(&scene, "a", "other", WireAction::Delay(Duration::from_millis(4_500)));
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
async fn a_deletion_that_was_refused_does_not_begin_the_retention_anew() {
    let scene = Scene::new(2);
    end_owing(&scene, "sender", "other", vec![start("other")]).await;
    let ended = || async { scene.of_kind("sender", "instance").await.remove(0)["ended"].as_str().unwrap().to_owned() };
    let time = |mark: &str| mark[1..].trim_end_matches('s').parse::<u64>().unwrap();
    let brief = quiet().with_operation_timeout(Duration::from_secs(1)).with_request_timeout(Duration::from_secs(1));
    let (age, before) = (Duration::from_secs(2), time(&ended().await));
    let retention = Retention::default().with_completed(age);
    let deleter = scene.provider_with("deleter", brief.with_retention(retention)).await;
    block(&scene, "deleter", "other", unavailable());
    // By the service's time, which has whole seconds.
    while std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() <= before / 1_000 + age.as_secs() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    refused(&scene, &deleter, false).await;
    assert!(time(&ended().await).abs_diff(before) <= 1_000, "{before} became {}", ended().await);
    assert_eq!(deleter.apply_retention().await.unwrap(), 0);
    assert!(time(&ended().await) > before + 590_000, "looked at again after ten minutes: {}", ended().await);
}
