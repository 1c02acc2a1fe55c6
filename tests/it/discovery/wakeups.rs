//! Tests of which worker receives a wake-up and takes the work.
//!
//! The polls of these workers are an hour apart. Therefore only a wake-up can have caused the fetch.

use super::worker::*;
use crate::fixture::*;
use duroxide::providers::{DispatcherCapabilityFilter, Provider, SemverRange, SessionFetchConfig, TagFilter};
use duroxide_cosmos::Slot;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use serde_json::Value;
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::sync::mpsc;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_wakes_the_worker_that_has_the_slot_of_an_instance_and_that_worker_takes_it() {
    let fixture = Fixture::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let names = ["a", "b", "c"];
    let mut workers = Vec::new();
    for name in names {
        workers.push(Worker::begin(&fixture, name, no_polls(), turns(), &send).await);
    }
    let members = members(&fixture, |members| are_shared(members, "turns", 3)).await;
    let client = fixture.provider_with("client", no_polls()).await;
    let mut takers = BTreeSet::new();
    for member in &members {
        for n in 0..2 {
            let instance = instance_in(slots(member, "turns").unwrap(), &format!("i{n}-"));
            client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
            let (taker, taken) = next(&mut got).await;
            assert_eq!(taken, instance);
            takers.insert((member["member"].as_str().unwrap().to_owned(), taker));
        }
    }
    assert_eq!(takers.len(), 3, "each member got those of its own slots, and no other: {takers:?}");
    workers.into_iter().for_each(Worker::crash);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn separate_workers_for_turns_and_for_tagged_activities_find_each_others_work() {
    let fixture = Fixture::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let runner = Arc::new(fixture.provider_with("runner", no_polls()).await);
    let gpu = Worker::begin(&fixture, "gpu", no_polls(), work(TagFilter::tags(["gpu"])), &send).await;
    let plain = Worker::begin(&fixture, "plain", no_polls(), work(TagFilter::DefaultOnly), &send).await;
    members(&fixture, |members| members.len() == 2).await;
    // A process that runs no activities commits the turn.
    let scheduled = vec![activity_with("i", 2, None, Some("gpu")), activity("i", 3)];
    begin(runner.as_ref(), "i", scheduled, Vec::new()).await;
    let takers: BTreeSet<String> = [next(&mut got).await.0, next(&mut got).await.0].into();
    assert_eq!(takers, BTreeSet::from(["gpu".to_owned(), "plain".to_owned()]));
    gpu.crash();
    plain.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_wakes_the_process_whose_turn_scheduled_the_activity() {
    let fixture = Fixture::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let runners = [
        Worker::begin(&fixture, "one", no_polls(), turns(), &send).await,
        Worker::begin(&fixture, "other", no_polls(), turns(), &send).await,
    ];
    members(&fixture, |members| are_shared(members, "turns", 2)).await;
    let worker = fixture.provider("worker").await;
    let client = fixture.provider_with("client", no_polls()).await;
    for n in 0..4 {
        let instance = format!("i{n}");
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        let (taker, _) = next(&mut got).await;
        let runner = &runners[usize::from(taker == "other")].provider;
        let token =
            fixture.documents_of_type(&instance, "instance").await[0]["lock"]["token"].as_str().unwrap().to_owned();
        let scheduled = vec![activity(&instance, 2)];
        let events = vec![started(&instance, 1)];
        commit(runner.as_ref(), &token, events, scheduled, Vec::new(), running()).await.unwrap();
        let (_, token, _) = next_activity(&worker, LONG).await;
        worker.ack_work_item(&token, Some(done(&instance, 2))).await.unwrap();
        assert_eq!(next(&mut got).await, (taker, instance));
    }
    runners.into_iter().for_each(Worker::crash);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_of_a_session_is_found_by_the_owner_of_the_session_whichever_process_scheduled_it() {
    let fixture = Fixture::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let session = |name: &str| Some(SessionFetchConfig { owner_id: name.to_owned(), lock_timeout: LONG });
    let owner = Worker::begin(
        &fixture,
        "owner",
        no_polls(),
        vec![Role::FetchedActivity(TagFilter::Any, session("owner"))],
        &send,
    )
    .await;
    members(&fixture, |members| members.len() == 1).await;
    let runner = fixture.provider_with("runner", no_polls()).await;
    begin(&runner, "first", vec![activity_with("first", 2, Some("s"), None)], Vec::new()).await;
    assert_eq!(next(&mut got).await, ("owner".to_owned(), "first".to_owned()));
    // Another process has workers of its own, and tries the activity before it knows the owner of the session.
    let other = Worker::begin(
        &fixture,
        "other",
        no_polls(),
        vec![Role::FetchedActivity(TagFilter::Any, session("other"))],
        &send,
    )
    .await;
    members(&fixture, |members| are_shared(members, "activities", 2)).await;
    for n in 0..6 {
        let instance = format!("i{n}");
        begin(other.provider.as_ref(), &instance, vec![activity_with(&instance, 2, Some("s"), None)], Vec::new()).await;
        assert_eq!(next(&mut got).await, ("owner".to_owned(), instance));
    }
    owner.crash();
    other.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_instance_is_found_by_the_worker_that_runs_its_version() {
    let fixture = Fixture::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let version = |text: &str| text.parse::<semver::Version>().unwrap();
    let runs = |from: &str, to: &str| {
        let supported_duroxide_versions = vec![SemverRange::new(version(from), version(to))];
        vec![Role::Turns(Some(DispatcherCapabilityFilter { supported_duroxide_versions }))]
    };
    // Instances that are pinned to one version or the other.
    let maker = fixture.provider_with("maker", no_polls()).await;
    for n in 0..6 {
        let instance = format!("i{n}");
        maker.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        let (_, token, _) = next_turn(&maker, LONG).await;
        let pinned_duroxide_version = Some(version(if n % 2 == 0 { "1.0.0" } else { "2.0.0" }));
        let metadata = duroxide::providers::ExecutionMetadata { pinned_duroxide_version, ..running() };
        let events = vec![started(&instance, 1)];
        commit(&maker, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    }
    let old = Worker::begin(&fixture, "old", no_polls(), runs("1.0.0", "1.9.0"), &send).await;
    let new = Worker::begin(&fixture, "new", no_polls(), runs("2.0.0", "2.9.0"), &send).await;
    members(&fixture, |members| members.len() == 2).await;
    let client = fixture.provider_with("client", no_polls()).await;
    for n in 0..6 {
        let instance = format!("i{n}");
        client.enqueue_for_orchestrator(external(&instance, "news"), None).await.unwrap();
        let wanted = if n % 2 == 0 { "old" } else { "new" };
        assert_eq!(next(&mut got).await, (wanted.to_owned(), instance));
    }
    old.crash();
    new.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_wake_up_fails_no_call_and_a_poll_finds_the_work() {
    let fixture = Fixture::new(2);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Worker::begin(&fixture, "a", test_config(), turns(), &send).await;
    members(&fixture, |members| are_shared(members, "turns", 1)).await;
    let client = fixture.provider_with("client", test_config()).await;
    let lost = WireRule::new(WireAction::FailConnection);
    let lost = fixture.account.wire().add(lost.client("client").on(RequestKind::Replace));
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    assert!(lost.hits() > 0, "it tried to send a wake-up");
    assert_eq!(next(&mut got).await.1, "i");
    a.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_another_process_scheduled_is_claimed_with_one_request() {
    let fixture = Fixture::new(1);
    let (runner, worker) = (fixture.provider("runner").await, fixture.provider("worker").await);
    begin(&runner, "i", vec![activity("i", 2)], Vec::new()).await;
    let before = fixture.account.stats_of("worker").items().requests;
    let (item, ..) = worker.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap().expect("it is there");
    assert_eq!(instance_of(&item), "i");
    let requests = fixture.account.stats_of("worker").items().requests - before;
    assert_eq!(requests, 2, "a query and the claim");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dispatchers_of_one_process_with_different_tags_are_both_woken() {
    let fixture = Fixture::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let tagged = |tag: &str| TagFilter::Tags([tag.to_owned()].into());
    let roles = vec![Role::FetchedActivity(tagged("gpu"), None), Role::FetchedActivity(tagged("cpu"), None)];
    let worker = Worker::begin(&fixture, "worker", no_polls(), roles, &send).await;
    let takes_both = |members: &[Value]| {
        members.len() == 1 && members[0]["activities"]["need"]["tags"] == serde_json::json!(["cpu", "gpu"])
    };
    members(&fixture, takes_both).await;
    // Both dispatchers keep asking, and neither causes requests of the other.
    let settled = fixture.account.stats_of("worker").items().requests;
    let runner = fixture.provider_with("runner", no_polls()).await;
    for (instance, tag) in [("one", "gpu"), ("two", "cpu"), ("three", "gpu")] {
        begin(&runner, instance, vec![activity_with(instance, 2, None, Some(tag))], Vec::new()).await;
        assert_eq!(next(&mut got).await, ("worker".to_owned(), instance.to_owned()));
    }
    let requests = fixture.account.stats_of("worker").items().requests - settled;
    assert!(requests < 150, "{requests} requests for three activities");
    worker.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wake_up_that_another_one_overwrites_before_it_is_read_is_not_lost() {
    let fixture = Fixture::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Worker::begin(&fixture, "a", no_polls(), turns(), &send).await;
    members(&fixture, |members| are_shared(members, "turns", 1)).await;
    let clients = [
        fixture.provider_with("first", no_polls()).await,
        fixture.provider_with("second", no_polls()).await,
        fixture.provider_with("third", no_polls()).await,
    ];
    // No wake-up is read until all of them are written.
    let is_wakeup = |request: &WireRequest<'_>| request.document_id == Some("wakeup") && request.method == "GET";
    let deaf = fixture.account.wire().add(WireRule::new(WireAction::FailConnection).client("a").matching(is_wakeup));
    let mut started = BTreeSet::new();
    for (n, client) in clients.iter().enumerate() {
        let from = 80 * n as u64;
        let instance = instance_in((from, from + 1), "i");
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        started.insert(instance);
    }
    deaf.remove();
    let taken: BTreeSet<String> = [next(&mut got).await.1, next(&mut got).await.1, next(&mut got).await.1].into();
    assert_eq!(taken, started);
    a.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_cannot_read_the_members_receives_wake_ups_all_the_same() {
    let fixture = Fixture::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Worker::begin(&fixture, "a", no_polls(), turns(), &send).await;
    members(&fixture, |members| are_shared(members, "turns", 1)).await;
    let client = fixture.provider_with("client", no_polls()).await;
    let silence = WireRule::new(WireAction::FailConnection).client("a");
    let silence = fixture.account.wire().add(silence.matching(|request| goes_to(request, "$d:fleet")));
    let failing = async {
        while silence.hits() == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, failing).await.expect("it tries to read who is there");
    for instance in ["i", "j"] {
        client.enqueue_for_orchestrator(start(instance), None).await.unwrap();
        assert_eq!(next(&mut got).await.1, instance);
    }
    a.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_more_activities_of_a_tag_than_it_can_run_wakes_other_workers_with_that_tag() {
    let fixture = Fixture::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let gpu = || TagFilter::tags(["gpu"]);
    let other = Worker::begin(&fixture, "other", no_polls(), work(gpu()), &send).await;
    let plain = Worker::begin(&fixture, "plain", no_polls(), work(TagFilter::DefaultOnly), &send).await;
    members(&fixture, |members| members.len() == 2).await;
    // The busy process runs such activities itself and has no free worker.
    let busy = fixture.provider_with("busy", no_polls()).await;
    assert!(busy.fetch_work_item(LONG, NOW, None, &gpu()).await.unwrap().is_none());
    let many = (2..42).map(|id| activity_with("i", id, None, Some("gpu"))).collect();
    begin(&busy, "i", many, Vec::new()).await;
    assert_eq!(next(&mut got).await.0, "other");
    other.crash();
    plain.crash();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_is_found_although_its_wake_up_was_overwritten_and_another_worker_has_its_slot() {
    let fixture = Fixture::new(2);
    // These instances run their first turns before any other process exists.
    let maker = fixture.provider("maker").await;
    for instance in ["first", "second"] {
        begin(&maker, instance, vec![activity(instance, 2)], Vec::new()).await;
    }
    maker.shutdown().await;
    let (send, mut got) = mpsc::unbounded_channel();
    let runners = [
        Worker::begin(&fixture, "a", no_polls(), turns(), &send).await,
        Worker::begin(&fixture, "b", no_polls(), turns(), &send).await,
    ];
    let both = members(&fixture, |members| are_shared(members, "turns", 2)).await;
    let a = runners[0].provider.as_ref();
    // A process does not repeat a wake-up within a second: therefore two processes send them. After its first wake-up,
    // each has the list of members.
    let workers = [fixture.provider("worker").await, fixture.provider("another").await];
    for worker in &workers {
        let (work, token, _) = next_activity(worker, LONG).await;
        worker.ack_work_item(&token, Some(done(&instance_of(&work), 2))).await.unwrap();
        assert_eq!(next(&mut got).await.1, instance_of(&work));
    }
    // "a" starts one instance in each member's slots, and so runs the turns of both. It runs no activities.
    let instances = [0, 1].map(|n| instance_in(slots(&both[n], "turns").unwrap(), "i"));
    for instance in &instances {
        a.enqueue_for_orchestrator(start(instance), None).await.unwrap();
        assert_eq!(next(&mut got).await, ("a".to_owned(), instance.clone()));
        let token =
            fixture.documents_of_type(instance, "instance").await[0]["lock"]["token"].as_str().unwrap().to_owned();
        let (events, scheduled) = (vec![started(instance, 1)], vec![activity(instance, 2)]);
        commit(a, &token, events, scheduled, Vec::new(), running()).await.unwrap();
    }
    let is_wakeup = |request: &WireRequest<'_>| request.document_id == Some("wakeup") && request.method == "GET";
    let deaf = fixture.account.wire().add(WireRule::new(WireAction::FailConnection).client("a").matching(is_wakeup));
    let wakeup_ids = || async {
        let wakeups = fixture.documents().await.into_iter().filter(|document| document["type"] == "wakeup");
        wakeups.map(|wakeup| wakeup["wakeupId"].clone()).map(|id| id.to_string()).collect::<BTreeSet<_>>()
    };
    for worker in &workers {
        let before = wakeup_ids().await;
        let (work, token, _) = next_activity(worker, LONG).await;
        worker.ack_work_item(&token, Some(done(&instance_of(&work), 2))).await.unwrap();
        let sent = async {
            while wakeup_ids().await == before {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, sent).await.expect("a wake-up");
    }
    deaf.remove();
    let heard: BTreeSet<Fetched> = [next(&mut got).await, next(&mut got).await].into();
    assert_eq!(heard, instances.map(|instance| ("a".to_owned(), instance)).into());
    runners.into_iter().for_each(Worker::crash);
}

/// An instance in this slot.
fn instance_in_slot(slot: u8) -> String {
    (0..).map(|n| format!("i{n}")).find(|name| Slot::of_instance(name).number() == slot).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_sends_wake_ups_after_the_runtime_that_sent_the_first_ones_was_shut_down() {
    const MEMBERS: u8 = 40;
    let fixture = Fixture::new(1);
    let client = Arc::new(fixture.provider("client").await);
    // More members than a process can wake at once, each with one slot.
    for n in 0..MEMBERS {
        let name = format!("member{n:02}");
        let member = serde_json::json!({
            "id": format!("member:{name}"), "instanceId": "$d:fleet", "type": "member", "member": name,
            "turns": { "need": null, "slots": { "from": n, "to": n + 1 } }, "owners": [],
        });
        fixture.container().await.create_item("$d:fleet", &format!("member:{name}"), &member, None).await.unwrap();
        let key = format!("$b:{name}");
        let wakeup =
            serde_json::json!({ "id": "wakeup", "instanceId": key, "type": "wakeup", "wakeupId": "", "from": name });
        fixture.container().await.create_item(key.clone(), "wakeup", &wakeup, None).await.unwrap();
    }
    let enqueues = client.clone();
    on_a_runtime_that_ends(move || async move {
        for n in 0..MEMBERS {
            enqueues.enqueue_for_orchestrator(start(&instance_in_slot(n)), None).await.unwrap();
        }
    })
    .await;
    let silent = || async {
        let documents = fixture.documents().await;
        documents.iter().filter(|d| d["type"] == "wakeup" && d["wakeupId"] == "").count()
    };
    assert!(silent().await > 0, "all wake-ups were sent by the first runtime: the test shows nothing");
    client.enqueue_for_orchestrator(external(&instance_in_slot(MEMBERS - 1), "news"), None).await.unwrap();
    let all_sent = async {
        while silent().await > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), all_sent).await.expect("every member is woken");
}
