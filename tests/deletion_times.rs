//! What comes around the moment in which a deletion is decided, by clocks that are right and by others: what is for the next
//! instance of the same name stays, and what was for the old one goes.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule};
use scene::*;
use std::{sync::Arc, time::Duration};

/// the same as `what_follows_the_start_of_the_next_instance_arrives`, but the messages are there before the erasure looks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_a_start_arrives_also_if_the_erasure_sees_it() {
    let scene = Scene::new(2);
    let (worker, deleter) = (scene.provider("worker").await, Arc::new(scene.provider("deleter").await));
    begin(&worker, "i", Vec::new(), Vec::new()).await;
    worker.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    // The erasure's look.
    let gate = Gate::new();
    let look = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Query);
    scene.account.wire().add(look.matching(|request| goes_to(request, "i")).times(1));
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
    gate.reached().await;
    assert_eq!(scene.of_kind("i", "instance").await[0]["deleting"]["state"], "committed");
    next_second().await;
    let cancel = WorkItem::CancelInstance { instance: "i".to_owned(), reason: "enough".to_owned() };
    let events = vec![started("sender", 1), completed("sender", 1, 2)];
    let messages = vec![start_child("i", Some("sender")), cancel];
    commit(&worker, &token, events, Vec::new(), messages, ended("Completed")).await.unwrap();
    while scene.of_kind("i", "message").await.len() < 2 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    gate.open();
    deletion.await.unwrap().unwrap();
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!((item.history.len(), item.messages.len()), (0, 2), "{:?}", item.messages);
}

/// a start that came long before the decision, of a client whose clock is ahead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_of_a_clock_that_is_ahead_goes_with_the_instance() {
    let scene = Scene::new(2);
    let (worker, deleter) = (scene.provider("worker").await, Arc::new(scene.provider("deleter").await));
    begin(&worker, "i", Vec::new(), Vec::new()).await;
    let client = scene.provider_with("client", quiet().with_clock(off_by(60_000))).await;
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    next_second().await;
    next_second().await;
    next_second().await;
    admin(&deleter).delete_instance("i", true).await.unwrap();
    assert!(scene.partition("i").await.is_empty(), "{:?}", scene.partition("i").await);
}

/// a child's start that is delivered after the decision, by a process whose clock is a little behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_is_started_after_the_decision_begins() {
    for millis in [-3_000, 0] {
        let scene = Scene::new(2);
        let (a, slow) =
            (scene.provider("a").await, scene.provider_with("slow", quiet().with_clock(off_by(millis))).await);
        let names: Vec<String> = (0..150).map(|number| format!("i{number:03}")).collect();
        finish(&a, "i000", None).await;
        scene.copy("i000", names[1..].iter().cloned()).await;
        slow.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
        let (item, token, _) = next_turn(&slow, LONG).await;
        assert_eq!(item.instance, "sender");
        let gate = Gate::new();
        let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").on(RequestKind::Batch);
        scene.account.wire().add(rule.matching(deletes));
        let set = names.clone();
        let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&set, true).await });
        gate.reached().await;
        next_second().await;
        next_second().await;
        assert!(admin(&slow).get_instance_info("i140").await.is_err(), "the sender sees that it is deleted");
        let messages = vec![start_child("i140", Some("sender"))];
        commit(&slow, &token, vec![started("sender", 1)], Vec::new(), messages, running()).await.unwrap();
        while scene.of_kind("i140", "message").await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        next_second().await;
        next_second().await;
        gate.open();
        deletion.await.unwrap().unwrap();
        assert_eq!(scene.of_kind("i140", "message").await.len(), 1, "{millis}: {:?}", scene.partition("i140").await);
    }
}

/// a start that was committed before the decision and delivered after it, all clocks are right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_whose_start_is_delivered_after_the_decision_begins() {
    let scene = Scene::new(2);
    let (a, b) = (scene.provider("a").await, scene.provider("b").await);
    let names: Vec<String> = (0..150).map(|number| format!("i{number:03}")).collect();
    finish(&a, "i000", None).await;
    scene.copy("i000", names[1..].iter().cloned()).await;
    end_owing(&scene, "sender", "i140", vec![start("i140")]).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").on(RequestKind::Batch);
    scene.account.wire().add(rule.matching(deletes));
    let set = names.clone();
    let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&set, true).await });
    gate.reached().await;
    next_second().await;
    next_second().await;
    b.reconcile().await.unwrap();
    assert_eq!(scene.of_kind("i140", "message").await.len(), 1);
    next_second().await;
    next_second().await;
    gate.open();
    deletion.await.unwrap().unwrap();
    assert_eq!(scene.of_kind("i140", "message").await.len(), 1, "{:?}", scene.partition("i140").await);
}

/// a message for an instance that is named and not taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_for_an_instance_that_the_deletion_overlooks_arrives() {
    let scene = Scene::new(2);
    let (doomed, worker, deleter) =
        (scene.provider("doomed").await, scene.provider("worker").await, scene.provider("deleter").await);
    doomed.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
    let (_, senders, _) = next_turn(&doomed, LONG).await;
    worker.enqueue_for_orchestrator(start("other"), None).await.unwrap();
    let (_, others, _) = next_turn(&worker, LONG).await;
    let blocked = block(&scene, "doomed", "other", WireAction::FailConnection);
    let events = vec![started("sender", 1), completed("sender", 1, 2)];
    let messages = vec![external("other", "hello")];
    commit(&doomed, &senders, events, Vec::new(), messages, ended("Completed")).await.unwrap();
    blocked.wait_for_hits(1).await;
    scene.cut("doomed", 0);
    assert_eq!(scene.of_kind("sender", "intent").await.len(), 1, "still owed");
    let set = ["sender".to_owned(), "other".to_owned()];
    let deleted = admin(&deleter).delete_instances_atomic(&set, false).await.unwrap();
    assert_eq!(deleted.instances_deleted, 1, "the other one is left alone");
    assert!(scene.is_erased("sender").await);
    commit(&worker, &others, vec![started("other", 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let next = worker.fetch_orchestration_item(LONG, Duration::from_secs(3), None).await.unwrap();
    let (item, ..) = next.expect("the message of a committed turn arrives");
    assert_eq!(item.messages.len(), 1);
}

/// an instance that was retired, runs again under a clock that is behind, and ends within the round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_instance_of_a_retired_name_has_its_whole_time() {
    let scene = Scene::new(2);
    let worker = scene.provider_with("worker", quiet().with_clock(off_by(-7_200_000))).await;
    finish(&worker, "i", None).await;
    let mut document = scene.of_kind("i", "instance").await.remove(0);
    document["ended"] = format!("{}s", document["ended"].as_str().unwrap()).into();
    scene.container().await.upsert_item("i".to_owned(), "instance", &document, None).await.unwrap();
    scene.copy("i", (0..120).map(|number| format!("o{number}"))).await;
    let retention = duroxide_cosmos::Retention::default().with_completed(Duration::from_secs(3_600));
    let p = Arc::new(scene.provider_with("p", quiet().with_retention(retention)).await);
    let q = p.clone();
    let round = tokio::spawn(async move { q.apply_retention().await });
    while !scene.is_erased("i").await {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    finish(&worker, "i", None).await;
    assert!(round.await.unwrap().unwrap() >= 121);
    let document = scene.of_kind("i", "instance").await.remove(0);
    let ended = document["ended"].as_str().unwrap();
    let time: u64 = ended[1..].trim_end_matches('s').parse().unwrap();
    let now = u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    assert!(
        !ended.ends_with('s') || time + 60_000 > now,
        "it ended a moment ago, and the mark proves that it was {} s ago",
        (now - time) / 1_000
    );
}

/// a claim whose answer was lost, and whose repetition was refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_unknown_outcome_is_released() {
    for (status, substatus) in [(403u16, Some(1014)), (403, None), (400, None)] {
        let scene = Scene::new(1);
        let (a, b) = (scene.provider("a").await, scene.provider("b").await);
        begin(&b, "i", Vec::new(), Vec::new()).await;
        b.enqueue_for_orchestrator(external("i", "go on"), None).await.unwrap();
        let is_claim = |request: &WireRequest<'_>| goes_to(request, "i") && request.document_id == Some("instance");
        let lost =
            WireRule::new(WireAction::LoseAnswer).client("a").on(RequestKind::Replace).matching(is_claim).times(1);
        let lost = scene.account.wire().add(lost);
        let refuse = WireAction::Refuse { status, substatus, retry_after: None };
        let refused = WireRule::new(refuse).client("a").on(RequestKind::Replace).matching(is_claim).times(1);
        let refused = scene.account.wire().add(refused);
        a.fetch_orchestration_item(LONG, NOW, None).await.expect_err("the second attempt is refused");
        assert_eq!((lost.hits(), refused.hits()), (1, 1));
        let released = async {
            while !scene.of_kind("i", "instance").await[0]["lock"].is_null() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, released).await.expect("the lock of the first attempt is released");
    }
}
