//! Messages around the second in which a deletion is committed, sent by clocks that are right and by clocks that are
//! off. Messages for the next instance of the same name stay, and those for the old one are deleted.

use crate::fixture::*;
use duroxide::providers::{Provider, ProviderAdmin, WorkItem};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use std::{sync::Arc, time::Duration};

/// Like `messages_after_the_start_of_the_next_instance_arrive`, but the messages arrive before the query of the
/// erasure.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_after_a_start_arrive_even_if_the_erasure_sees_them() {
    let fixture = Fixture::new(2);
    let (worker, deleter) = (fixture.provider("worker").await, Arc::new(fixture.provider("deleter").await));
    begin(&worker, "i", Vec::new(), Vec::new()).await;
    worker.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
    let (_, token, _) = next_turn(&worker, LONG).await;
    // The query of the erasure.
    let gate = Gate::new();
    let query = WireRule::new(WireAction::HoldBefore(gate.clone())).client("deleter").on(RequestKind::Query);
    fixture.account.wire().add(query.matching(|request| goes_to(request, "i")).times(1));
    let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
    gate.reached().await;
    assert_eq!(fixture.documents_of_type("i", "instance").await[0]["deleting"]["state"], "committed");
    next_second().await;
    let cancel = WorkItem::CancelInstance { instance: "i".to_owned(), reason: "enough".to_owned() };
    let events = vec![started("sender", 1), completed("sender", 1, 2)];
    let messages = vec![start_child("i", Some("sender")), cancel];
    commit(&worker, &token, events, Vec::new(), messages, ended("Completed")).await.unwrap();
    while fixture.documents_of_type("i", "message").await.len() < 2 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    gate.open();
    deletion.await.unwrap().unwrap();
    let (item, ..) = next_turn(&worker, LONG).await;
    assert_eq!((item.history.len(), item.messages.len()), (0, 2), "{:?}", item.messages);
}

/// The start came long before the commit, from a client whose clock is ahead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_from_a_clock_that_is_ahead_is_deleted_with_the_instance() {
    let fixture = Fixture::new(2);
    let (worker, deleter) = (fixture.provider("worker").await, Arc::new(fixture.provider("deleter").await));
    begin(&worker, "i", Vec::new(), Vec::new()).await;
    let client = fixture.provider_with("client", test_config().with_clock(off_by(60_000))).await;
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    next_second().await;
    next_second().await;
    next_second().await;
    admin(&deleter).delete_instance("i", true).await.unwrap();
    assert!(fixture.partition("i").await.is_empty(), "{:?}", fixture.partition("i").await);
}

/// The child's start is delivered after the commit, by a process whose clock is slightly behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_is_started_after_the_commit_begins() {
    for millis in [-3_000, 0] {
        let fixture = Fixture::new(2);
        let (a, slow) = (
            fixture.provider("a").await,
            fixture.provider_with("slow", test_config().with_clock(off_by(millis))).await,
        );
        let names: Vec<String> = (0..150).map(|number| format!("i{number:03}")).collect();
        finish(&a, "i000", None).await;
        fixture.copy_instance("i000", names[1..].iter().cloned()).await;
        slow.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
        let (item, token, _) = next_turn(&slow, LONG).await;
        assert_eq!(item.instance, "sender");
        let gate = Gate::new();
        let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").on(RequestKind::Batch);
        fixture.account.wire().add(rule.matching(deletes_instance));
        let set = names.clone();
        let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&set, true).await });
        gate.reached().await;
        next_second().await;
        next_second().await;
        assert!(admin(&slow).get_instance_info("i140").await.is_err(), "the sender sees that it is deleted");
        let messages = vec![start_child("i140", Some("sender"))];
        commit(&slow, &token, vec![started("sender", 1)], Vec::new(), messages, running()).await.unwrap();
        while fixture.documents_of_type("i140", "message").await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        next_second().await;
        next_second().await;
        gate.open();
        deletion.await.unwrap().unwrap();
        assert_eq!(
            fixture.documents_of_type("i140", "message").await.len(),
            1,
            "{millis}: {:?}",
            fixture.partition("i140").await
        );
    }
}

/// The start was committed before the deletion and delivered after it. All clocks are right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_whose_start_is_delivered_after_the_commit_begins() {
    let fixture = Fixture::new(2);
    let (a, b) = (fixture.provider("a").await, fixture.provider("b").await);
    let names: Vec<String> = (0..150).map(|number| format!("i{number:03}")).collect();
    finish(&a, "i000", None).await;
    fixture.copy_instance("i000", names[1..].iter().cloned()).await;
    fixture.end_with_pending_messages("sender", "i140", vec![start("i140")]).await;
    let gate = Gate::new();
    let rule = WireRule::new(WireAction::HoldBefore(gate.clone())).client("a").on(RequestKind::Batch);
    fixture.account.wire().add(rule.matching(deletes_instance));
    let set = names.clone();
    let deletion = tokio::spawn(async move { admin(&a).delete_instances_atomic(&set, true).await });
    gate.reached().await;
    next_second().await;
    next_second().await;
    b.reconcile().await.unwrap();
    assert_eq!(fixture.documents_of_type("i140", "message").await.len(), 1);
    next_second().await;
    next_second().await;
    gate.open();
    deletion.await.unwrap().unwrap();
    assert_eq!(fixture.documents_of_type("i140", "message").await.len(), 1, "{:?}", fixture.partition("i140").await);
}

/// The message is for an instance that the deletion names and does not delete.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_for_an_instance_that_the_deletion_does_not_delete_arrives() {
    let fixture = Fixture::new(2);
    let (crashing, worker, deleter) =
        (fixture.provider("crashing").await, fixture.provider("worker").await, fixture.provider("deleter").await);
    crashing.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
    let (_, senders, _) = next_turn(&crashing, LONG).await;
    worker.enqueue_for_orchestrator(start("other"), None).await.unwrap();
    let (_, others, _) = next_turn(&worker, LONG).await;
    let blocked = fixture.block("crashing", "other", WireAction::FailConnection);
    let events = vec![started("sender", 1), completed("sender", 1, 2)];
    let messages = vec![external("other", "hello")];
    commit(&crashing, &senders, events, Vec::new(), messages, ended("Completed")).await.unwrap();
    blocked.wait_for_hits(1).await;
    fixture.cut("crashing", 0);
    assert_eq!(fixture.documents_of_type("sender", "intent").await.len(), 1, "still pending");
    let set = ["sender".to_owned(), "other".to_owned()];
    let deleted = admin(&deleter).delete_instances_atomic(&set, false).await.unwrap();
    assert_eq!(deleted.instances_deleted, 1, "the other one is left alone");
    assert!(fixture.is_erased("sender").await);
    commit(&worker, &others, vec![started("other", 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    let next = worker.fetch_orchestration_item(LONG, Duration::from_secs(3), None).await.unwrap();
    let (item, ..) = next.expect("the message of a committed turn arrives");
    assert_eq!(item.messages.len(), 1);
}

/// The instance was deleted by retention, runs again under a clock that is behind, and ends within the same round of
/// retention.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_instance_of_a_name_that_retention_deleted_has_its_whole_retention_time() {
    let fixture = Fixture::new(2);
    let worker = fixture.provider_with("worker", test_config().with_clock(off_by(-7_200_000))).await;
    finish(&worker, "i", None).await;
    let mut document = fixture.documents_of_type("i", "instance").await.remove(0);
    document["ended"] = format!("{}s", document["ended"].as_str().unwrap()).into();
    fixture.container().await.upsert_item("i".to_owned(), "instance", &document, None).await.unwrap();
    fixture.copy_instance("i", (0..120).map(|number| format!("o{number}"))).await;
    let retention = duroxide_cosmos::Retention::default().with_completed(Duration::from_secs(3_600));
    let p = Arc::new(fixture.provider_with("p", test_config().with_retention(retention)).await);
    let q = p.clone();
    let round = tokio::spawn(async move { q.apply_retention().await });
    while !fixture.is_erased("i").await {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    finish(&worker, "i", None).await;
    assert!(round.await.unwrap().unwrap() >= 121);
    let document = fixture.documents_of_type("i", "instance").await.remove(0);
    let ended = document["ended"].as_str().unwrap();
    let time: u64 = ended[1..].trim_end_matches('s').parse().unwrap();
    let now = u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    assert!(
        !ended.ends_with('s') || time + 60_000 > now,
        "it ended a moment ago, and the time of Cosmos DB says that it was {} s ago",
        (now - time) / 1_000
    );
}

/// A start has its position in the queue since the turn that sends it was planned. It may be delivered after a deletion
/// is committed, within the same second. Without it the parent would wait for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_whose_start_is_delivered_in_the_second_of_the_commit_begins() {
    for _ in 0..20 {
        let fixture = Fixture::new(1);
        let (worker, deleter) =
            (Arc::new(fixture.provider("worker").await), Arc::new(fixture.provider("deleter").await));
        begin(&*worker, "i", Vec::new(), Vec::new()).await;
        worker.enqueue_for_orchestrator(start("sender"), None).await.unwrap();
        let (item, token, _) = next_turn(&*worker, LONG).await;
        assert_eq!(item.instance, "sender");
        let delivery = Gate::new();
        fixture.block("worker", "i", WireAction::HoldBefore(delivery.clone()));
        let query = Gate::new();
        let rule = WireRule::new(WireAction::HoldBefore(query.clone())).client("deleter").on(RequestKind::Query);
        fixture.account.wire().add(rule.matching(|request| goes_to(request, "i")).times(1));
        next_second().await;
        // The parent's turn is committed, and its child's start is on its way.
        let sender = worker.clone();
        let committing = tokio::spawn(async move {
            let messages = vec![start_child("i", Some("sender"))];
            commit(&*sender, &token, vec![started("sender", 1)], Vec::new(), messages, running()).await
        });
        reached(&delivery).await;
        // The old instance of that name is deleted: the deletion is committed and about to query the documents to
        // erase.
        let deletion = tokio::spawn(async move { admin(&deleter).delete_instance("i", true).await });
        reached(&query).await;
        let committed = fixture.documents_of_type("i", "instance").await.remove(0);
        assert_eq!(committed["deleting"]["state"], "committed");
        assert!(fixture.documents_of_type("i", "message").await.is_empty(), "nothing is delivered before the decision");
        delivery.open();
        committing.await.unwrap().unwrap();
        let mut messages = fixture.documents_of_type("i", "message").await;
        while messages.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
            messages = fixture.documents_of_type("i", "message").await;
        }
        let same_second = messages[0]["_ts"].as_u64() <= committed["_ts"].as_u64();
        query.open();
        deletion.await.unwrap().unwrap();
        if !same_second {
            continue;
        }
        let left = fixture.partition("i").await;
        assert!(
            left.iter().any(|document| document["type"] == "message"),
            "the start came after the decision and is gone, and `sender` waits for ever: {left:?}"
        );
        let (item, ..) = next_turn(&*worker, LONG).await;
        assert_eq!((item.instance.as_str(), item.history.len()), ("i", 0));
        return;
    }
    panic!("the delivery never came within the second of the decision");
}

/// The clock of an operator may be ahead by days. If that process crashes before its deletion is committed, no other
/// process waits for that clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_crashed_before_its_commit_is_aborted_whatever_its_clock_said() {
    const WEEK: i64 = 7 * 24 * 3_600_000;
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish(&worker, "i", None).await;
    let operator = fixture.provider_with("operator", test_config().with_clock(off_by(WEEK))).await;
    let gate = Gate::new();
    let preparation = WireRule::new(WireAction::HoldAfter(gate.clone())).client("operator").on(RequestKind::Replace);
    fixture.account.wire().add(preparation.matching(|request| goes_to(request, "i")).times(1));
    let deletion = tokio::spawn(async move { admin(&operator).delete_instance("i", false).await });
    reached(&gate).await;
    fixture.cut("operator", 0);
    deletion.abort();
    let document = fixture.documents_of_type("i", "instance").await.remove(0);
    assert!(document["deleting"].is_object(), "it is prepared: {document}");
    // Another deletion waits for three seconds, and a worker for thirty.
    let time = Duration::from_secs(15);
    let brief = test_config().with_operation_timeout(time).with_request_timeout(Duration::from_secs(5));
    let other = fixture.provider_with("other", brief).await;
    let deleted = admin(&other).delete_instance("i", false).await;
    assert_eq!(deleted.expect("no process continues the first deletion").instances_deleted, 1);
}

/// The clock of an operator may also be behind. By other clocks its last progress is then long ago.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_that_makes_progress_is_not_aborted_whatever_its_clock_says() {
    const TEN_MINUTES: i64 = 10 * 60 * 1_000;
    let fixture = Fixture::new(1);
    let worker = fixture.provider("worker").await;
    finish(&worker, "i", None).await;
    worker.enqueue_for_orchestrator(external("i", "late"), None).await.unwrap();
    let operator = fixture.provider_with("operator", test_config().with_clock(off_by(-TEN_MINUTES))).await;
    let gate = Gate::new();
    let preparation = WireRule::new(WireAction::HoldAfter(gate.clone())).client("operator").on(RequestKind::Replace);
    fixture.account.wire().add(preparation.times(1));
    let deletion = tokio::spawn(async move { admin(&operator).delete_instance("i", false).await });
    reached(&gate).await;
    // A worker meets the prepared instance.
    let fetched = worker.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(fetched.is_none(), "{fetched:?}");
    let document = fixture.documents_of_type("i", "instance").await.remove(0);
    assert_eq!(document["deleting"]["state"], "preparing", "{document}");
    gate.open();
    assert_eq!(deletion.await.unwrap().unwrap().instances_deleted, 1);
}

const PARENT: &str = "parent";

const CHILD: &str = "child";

const HOUR: i64 = 3_600_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_instance_does_not_start_again_when_its_start_is_delivered_again() {
    for consumed in [true, false] {
        let fixture = Fixture::new(1);
        let (a, b) =
            (fixture.provider_with("a", test_config().with_inline_claims(false)).await, fixture.provider("b").await);
        if !consumed {
            // The name is in use: the start of the turn waits in its queue when the instance is deleted.
            begin(&b, CHILD, Vec::new(), Vec::new()).await;
        }
        // The process delivers the start and crashes before it deletes the intent.
        let rule = WireRule::new(WireAction::FailConnection).client("a").on(RequestKind::Delete);
        let undeleted = fixture.account.wire().add(rule.matching(|request| goes_to(request, PARENT)));
        begin(&a, PARENT, Vec::new(), vec![start(CHILD)]).await;
        undeleted.wait_for_hits(1).await;
        fixture.cut("a", 0);
        assert_eq!(fixture.documents_of_type(PARENT, "intent").await.len(), 1);
        if consumed {
            let (item, token, _) = next_turn(&b, LONG).await;
            assert_eq!(item.instance, CHILD);
            let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
            commit(&b, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
        }
        // A start within the second of a deletion has no order relative to it, and it stays.
        next_second().await;
        assert_eq!(b.delete_instance(CHILD, true).await.unwrap().instances_deleted, 1);
        let late = fixture.provider_with("late", config_ahead_by(HOUR)).await;
        late.reconcile().await.unwrap();
        assert!(fixture.documents_of_type(PARENT, "intent").await.is_empty());
        assert_no_turn(&late).await;
        assert!(fixture.documents_of_type(CHILD, "instance").await.is_empty());
        assert!(fixture.documents_of_type(CHILD, "message").await.is_empty());
        // Another start of the same name begins another instance.
        late.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
        assert_eq!(next_turn(&late, LONG).await.0.messages, [start(CHILD)]);
    }
}
