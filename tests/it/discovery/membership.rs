//! The slots that each worker has, while workers come, leave and crash.

use super::worker::*;
use crate::fixture::*;
use duroxide::providers::{Provider, SessionFetchConfig, TagFilter};
use duroxide_cosmos::{LeaseProvider, MemberPosition, SlotRange};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use serde_json::Value;
use std::{sync::Arc, time::Duration};
use tokio::sync::mpsc;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_joins_gets_its_share_and_a_worker_that_leaves_releases_its_share_at_once() {
    let fixture = Fixture::new(2);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Worker::begin(&fixture, "a", no_polls(), turns(), &send).await;
    members(&fixture, |members| are_shared(members, "turns", 1)).await;
    let b = Worker::begin(&fixture, "b", no_polls(), turns(), &send).await;
    let both = members(&fixture, |members| are_shared(members, "turns", 2)).await;
    let client = fixture.provider_with("client", no_polls()).await;
    for (n, member) in both.iter().enumerate() {
        let instance = instance_in(slots(member, "turns").unwrap(), &format!("both-{n}-"));
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        next(&mut got).await;
    }
    b.leave().await;
    let left = members(&fixture, |members| are_shared(members, "turns", 1)).await;
    // The client still has both members in its cache. The wake-up document of the one that left is gone.
    for member in &both {
        let instance = instance_in(slots(member, "turns").unwrap(), "one-");
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        // Work that the other member has released may come first.
        while next(&mut got).await != ("a".to_owned(), instance.clone()) {}
    }
    assert_eq!(left.len(), 1);
    let wakeups = fixture.documents().await.into_iter().filter(|document| document["type"] == "wakeup").count();
    assert_eq!(wakeups, 1, "the worker that left has deleted its document");
    a.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poll_finds_the_work_of_a_dead_worker_that_is_still_listed() {
    let fixture = Fixture::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Worker::begin(&fixture, "a", test_config(), turns(), &send).await;
    let b = Worker::begin(&fixture, "b", test_config(), turns(), &send).await;
    let both = members(&fixture, |members| are_shared(members, "turns", 2)).await;
    b.crash();
    let client = fixture.provider_with("client", no_polls()).await;
    for (n, member) in both.iter().enumerate() {
        let instance = instance_in(slots(member, "turns").unwrap(), &format!("i{n}-"));
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        assert_eq!(next(&mut got).await, ("a".to_owned(), instance));
    }
    assert_eq!(fixture.documents_of_type("$d:fleet", "member").await.len(), 2, "nobody has taken it off the list");
    a.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_that_are_off_by_half_a_minute_do_not_change_the_membership() {
    let fixture = Fixture::new(2);
    let (send, mut got) = mpsc::unbounded_channel();
    let mut workers = Vec::new();
    for (name, millis) in [("behind", -30_000), ("ahead", 30_000), ("right", 0)] {
        let config = test_config().with_clock(off_by(millis));
        workers.push(Worker::begin(&fixture, name, config, turns(), &send).await);
    }
    let members = members(&fixture, |members| are_shared(members, "turns", 3)).await;
    let client = fixture.provider_with("client", no_polls()).await;
    for (n, member) in members.iter().enumerate() {
        let instance = instance_in(slots(member, "turns").unwrap(), &format!("i{n}-"));
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        // The member whose clock is behind does not see the instance as due yet: another one takes it.
        let (taker, taken) = next(&mut got).await;
        assert_eq!(taken, instance);
        assert_ne!(taker, "behind");
    }
    workers.into_iter().for_each(Worker::crash);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_three_hundred_workers_has_a_share_and_documents_of_dead_workers_are_removed() {
    let fixture = Fixture::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    // The members of other processes, as they would have written themselves.
    drop(fixture.provider("maker").await);
    let container = fixture.container().await;
    for n in 0..299 {
        let member = format!("m{n:03}");
        let document = serde_json::json!({
            "id": format!("member:{member}"), "instanceId": "$d:fleet", "type": "member", "member": member,
            "turns": { "need": null, "slots": { "from": 0, "to": 0 } },
        });
        let id = document["id"].as_str().unwrap();
        container.create_item("$d:fleet", id, &document, None).await.unwrap();
    }
    let a = Worker::begin(&fixture, "a", test_config(), turns(), &send).await;
    let is_real = |member: &Value| !member["member"].as_str().unwrap().starts_with('m');
    let members = members(&fixture, |members| {
        let ours = members.iter().find(|member| is_real(member));
        ours.and_then(|ours| slots(ours, "turns")).is_some_and(|(from, to)| to - from <= 1)
    })
    .await;
    assert_eq!(members.len(), 300);
    // A worker takes the instance in any slot: the other members do not exist, and a poll finds it.
    let client = fixture.provider_with("client", test_config()).await;
    client.enqueue_for_orchestrator(start("anywhere"), None).await.unwrap();
    assert_eq!(next(&mut got).await, ("a".to_owned(), "anywhere".to_owned()));
    a.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_split_of_a_physical_partition_polls_read_both_halves() {
    let fixture = Fixture::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Worker::begin(&fixture, "a", test_config(), turns(), &send).await;
    members(&fixture, |members| are_shared(members, "turns", 1)).await;
    let partition = fixture.account.partitions("duroxide", "duroxide")[0];
    fixture.account.split("duroxide", "duroxide", partition).await.unwrap();
    let client = fixture.provider_with("client", test_config()).await;
    for n in 0..8 {
        let instance = instance_in((n * 32, n * 32 + 32), "i");
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        assert_eq!(next(&mut got).await.1, instance);
    }
    a.crash();
}

/// A lease provider with fixed slots.
#[derive(Debug)]
struct Fixed(SlotRange);

impl LeaseProvider for Fixed {
    fn slots(&self, _place: MemberPosition) -> SlotRange {
        self.0
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_application_can_assign_slots_with_its_own_lease_provider() {
    let fixture = Fixture::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let small = no_polls().with_leases(Fixed(SlotRange::new(0, 10)));
    let large = no_polls().with_leases(Fixed(SlotRange::new(10, 256)));
    let small = Worker::begin(&fixture, "small", small, turns(), &send).await;
    let large = Worker::begin(&fixture, "large", large, turns(), &send).await;
    members(&fixture, |members| are_shared(members, "turns", 2)).await;
    let client = fixture.provider_with("client", no_polls()).await;
    for (range, wanted) in [((0, 10), "small"), ((10, 20), "large"), ((250, 256), "large"), ((5, 6), "small")] {
        let instance = instance_in(range, &format!("{}-", range.0));
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        assert_eq!(next(&mut got).await, (wanted.to_owned(), instance));
    }
    small.crash();
    large.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_are_computed_by_one_worker_for_all_and_are_exact_for_a_client() {
    let fixture = Fixture::new(2);
    let client = fixture.provider("client").await;
    finish(&client, "first", None).await;
    let (got, _keep) = mpsc::unbounded_channel();
    let hours_ahead = no_polls().with_clock(off_by(7_200_000));
    let a = Worker::begin(&fixture, "a", no_polls(), nothing(), &got).await;
    let b = Worker::begin(&fixture, "b", no_polls(), nothing(), &got).await;
    let c = Worker::begin(&fixture, "c", hours_ahead, nothing(), &got).await;
    members(&fixture, |members| are_shared(members, "activities", 3)).await;

    let instances = |member: &Worker| {
        let provider = member.provider.clone();
        async move { admin(&provider).get_system_metrics().await.unwrap().total_instances }
    };
    let waiting = |member: &Worker| {
        let provider = member.provider.clone();
        async move { admin(&provider).get_queue_depths().await.unwrap().orchestrator_queue }
    };
    assert_eq!((instances(&a).await, waiting(&a).await), (1, 0));
    finish(&client, "second", None).await;
    client.enqueue_for_orchestrator(start("third"), None).await.unwrap();
    assert_eq!((instances(&b).await, waiting(&b).await), (1, 0), "what a has worked out");
    assert_eq!(admin(&client).get_system_metrics().await.unwrap().total_instances, 2, "who only calls is told exactly");
    assert_eq!(admin(&client).get_queue_depths().await.unwrap().orchestrator_queue, 1);
    assert_eq!((instances(&c).await, waiting(&c).await), (2, 1), "for its clock that is long ago");
    for member in [a, b, c] {
        member.leave().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_sessions_are_deleted_by_one_worker() {
    let fixture = Fixture::new(2);
    let client = fixture.provider("client").await;
    let (got, _keep) = mpsc::unbounded_channel();
    let a = Worker::begin(&fixture, "a", no_polls(), nothing(), &got).await;
    let b = Worker::begin(&fixture, "b", no_polls(), nothing(), &got).await;
    members(&fixture, |members| are_shared(members, "activities", 2)).await;
    // A session whose owner is long gone.
    let leave_behind = |session: &'static str| {
        let client = &client;
        async move {
            begin(client, session, vec![activity_with(session, 2, Some(session), None)], Vec::new()).await;
            let owner = SessionFetchConfig { owner_id: "gone".to_owned(), lock_timeout: Duration::from_millis(1) };
            // A fetch that waits would make the client a member, too.
            let fetched = client.fetch_work_item(LONG, NOW, Some(&owner), &TagFilter::Any).await.unwrap();
            client.ack_work_item(&fetched.expect("the activity").1, None).await.unwrap();
        }
    };
    leave_behind("s1").await;
    assert_eq!(a.provider.cleanup_orphaned_sessions(LONG).await.unwrap(), 1);
    leave_behind("s2").await;
    assert_eq!(b.provider.cleanup_orphaned_sessions(LONG).await.unwrap(), 0, "that was done a moment ago");
    assert_eq!(client.cleanup_orphaned_sessions(LONG).await.unwrap(), 1, "who only calls does it");
    for member in [a, b] {
        member.leave().await;
    }
}

/// Lease providers of an application that fail.
#[derive(Debug)]
enum Broken {
    Panics,
    Blocks,
}

impl LeaseProvider for Broken {
    fn slots(&self, _place: MemberPosition) -> SlotRange {
        match self {
            Self::Panics => panic!("a panic that the test asked for"),
            Self::Blocks => loop {
                std::thread::park();
            },
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_is_found_although_the_lease_provider_panics_or_blocks() {
    for broken in [Broken::Panics, Broken::Blocks] {
        let fixture = Fixture::new(2);
        let worker = Arc::new(fixture.provider_with("worker", test_config().with_leases(broken)).await);
        let client = fixture.provider("client").await;
        let waits = worker.clone();
        let waiting = tokio::spawn(async move { waits.fetch_orchestration_item(LONG, PATIENCE, None).await });
        // The member's own document is written: the worker has asked its lease provider.
        let is_listed = |request: &duroxide_cosmos_emulator::WireRequest<'_>| goes_to(request, "$d:fleet");
        let listed = WireRule::new(WireAction::Delay(Duration::ZERO)).on(RequestKind::Query).client("worker");
        fixture.account.wire().add(listed.matching(is_listed)).wait_for_hits(1).await;
        client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        let found = tokio::time::timeout(PATIENCE / 2, waiting).await.expect("the fetch ends");
        let (found, ..) = found.unwrap().unwrap().expect("a turn");
        assert_eq!(found.instance, "i");
    }
}
