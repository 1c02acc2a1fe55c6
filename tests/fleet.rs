//! Many processes on one container: who is told of what, who takes it, and what becomes of it when one comes, leaves or dies.
//!
//! Where a sweep would find what a bell tells of, the sweep is an hour away: what is found, the bell has told.

#[path = "common/scene.rs"]
mod scene;

use duroxide::providers::{DispatcherCapabilityFilter, Provider, SemverRange, SessionFetchConfig, TagFilter, WorkItem};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, LeaseProvider, MemberPosition, Slot, SlotRange};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use scene::*;
use serde_json::Value;
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tokio::{sync::mpsc, task::JoinHandle};

/// Nothing is found by a sweep.
fn no_sweeps() -> CosmosDBProviderConfig {
    quiet().with_poll_interval(Duration::from_secs(3_600)).with_wakeup_interval(Duration::from_millis(50))
}

/// What a member has got.
type Got = (String, String);

/// A process whose dispatchers wait.
struct Member {
    provider: Arc<CosmosDBProvider>,
    waiting: Vec<JoinHandle<()>>,
}

/// What a member waits for.
enum Role {
    Turns(Option<DispatcherCapabilityFilter>),
    Work(TagFilter, Option<SessionFetchConfig>),
}

impl Member {
    /// Waits as these roles; who gets what is told to `got`.
    async fn begin(
        scene: &Scene,
        name: &str,
        config: CosmosDBProviderConfig,
        roles: Vec<Role>,
        got: &mpsc::UnboundedSender<Got>,
    ) -> Self {
        let provider = Arc::new(scene.provider_with(name, config).await);
        let waiting = roles.into_iter().map(|role| {
            let (provider, got, name) = (provider.clone(), got.clone(), name.to_owned());
            tokio::spawn(async move {
                loop {
                    let found = match &role {
                        Role::Turns(filter) => {
                            let turn = provider.fetch_orchestration_item(LONG, PATIENCE, filter.as_ref()).await;
                            turn.unwrap().map(|(turn, ..)| turn.instance)
                        }
                        Role::Work(tags, session) => {
                            let work = provider.fetch_work_item(LONG, PATIENCE, session.as_ref(), tags).await;
                            work.unwrap().map(|(work, ..)| instance_of(&work))
                        }
                    };
                    if let Some(found) = found {
                        if got.send((name.clone(), found)).is_err() {
                            return;
                        }
                    }
                }
            })
        });
        let waiting = waiting.collect();
        Self { provider, waiting }
    }

    /// It dies without a word.
    fn die(self) {
        self.waiting.iter().for_each(JoinHandle::abort);
    }

    /// It leaves in good order.
    async fn leave(self) {
        self.waiting.iter().for_each(JoinHandle::abort);
        assert!(self.provider.shutdown_within(PATIENCE).await);
    }
}

fn instance_of(work: &WorkItem) -> String {
    match work {
        WorkItem::ActivityExecute { instance, .. } => instance.clone(),
        other => panic!("{other:?}"),
    }
}

fn turns() -> Vec<Role> {
    vec![Role::Turns(None)]
}

/// Takes nothing of what a test makes.
fn nothing() -> Vec<Role> {
    work(TagFilter::Tags(["nothing".to_owned()].into()))
}

fn work(tags: TagFilter) -> Vec<Role> {
    vec![Role::Work(tags, None)]
}

/// The fleet's documents, once `settled` says that they are as they should be.
async fn members(scene: &Scene, settled: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let looking = async {
        loop {
            let members = scene.of_kind("$d:fleet", "member").await;
            if settled(&members) {
                return members;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let seen = tokio::time::timeout(PATIENCE, looking).await;
    match seen {
        Ok(members) => members,
        Err(_) => panic!("not settled: {:?}", scene.of_kind("$d:fleet", "member").await),
    }
}

fn slots(member: &Value, queue: &str) -> Option<(u64, u64)> {
    let slots = member.get(queue)?.get("slots")?;
    Some((slots["from"].as_u64()?, slots["to"].as_u64()?))
}

/// Whether the members share the slots of a queue, each slot one's.
fn are_shared(members: &[Value], queue: &str, count: usize) -> bool {
    let mut ranges: Vec<(u64, u64)> = members.iter().filter_map(|member| slots(member, queue)).collect();
    ranges.sort_unstable();
    ranges.len() == count
        && ranges.first().is_some_and(|first| first.0 == 0)
        && ranges.last().is_some_and(|last| last.1 == 256)
        && ranges.windows(2).all(|pair| pair[0].1 == pair[1].0)
}

/// An instance in the slots of a member.
fn instance_in(range: (u64, u64), salt: &str) -> String {
    let names = (0..).map(|n| format!("{salt}{n}"));
    let is_in = |name: &String| (range.0..range.1).contains(&u64::from(Slot::of_instance(name).number()));
    names.into_iter().find(is_in).expect("a name for every slot")
}

async fn next(got: &mut mpsc::UnboundedReceiver<Got>) -> Got {
    tokio::time::timeout(PATIENCE, got.recv()).await.expect("somebody gets it").expect("members are there")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_member_that_looks_after_an_instance_is_woken_by_a_client_and_takes_it() {
    let scene = Scene::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let names = ["a", "b", "c"];
    let mut fleet = Vec::new();
    for name in names {
        fleet.push(Member::begin(&scene, name, no_sweeps(), turns(), &send).await);
    }
    let members = members(&scene, |members| are_shared(members, "turns", 3)).await;
    let client = scene.provider_with("client", no_sweeps()).await;
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
    fleet.into_iter().for_each(Member::die);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn separate_pools_for_turns_and_for_activities_with_a_tag_find_each_others_work() {
    let scene = Scene::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let runner = Arc::new(scene.provider_with("runner", no_sweeps()).await);
    let gpu = Member::begin(&scene, "gpu", no_sweeps(), work(TagFilter::tags(["gpu"])), &send).await;
    let plain = Member::begin(&scene, "plain", no_sweeps(), work(TagFilter::DefaultOnly), &send).await;
    members(&scene, |members| members.len() == 2).await;
    // The turn is committed by a process that runs no activities.
    let scheduled = vec![activity_with("i", 2, None, Some("gpu")), activity("i", 3)];
    begin(runner.as_ref(), "i", scheduled, Vec::new()).await;
    let takers: BTreeSet<String> = [next(&mut got).await.0, next(&mut got).await.0].into();
    assert_eq!(takers, BTreeSet::from(["gpu".to_owned(), "plain".to_owned()]));
    gpu.die();
    plain.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_an_activity_wakes_the_process_whose_turn_scheduled_it() {
    let scene = Scene::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let runners = [
        Member::begin(&scene, "one", no_sweeps(), turns(), &send).await,
        Member::begin(&scene, "other", no_sweeps(), turns(), &send).await,
    ];
    members(&scene, |members| are_shared(members, "turns", 2)).await;
    let worker = scene.provider("worker").await;
    let client = scene.provider_with("client", no_sweeps()).await;
    for n in 0..4 {
        let instance = format!("i{n}");
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        let (taker, _) = next(&mut got).await;
        let runner = &runners[usize::from(taker == "other")].provider;
        let token = scene.of_kind(&instance, "instance").await[0]["lock"]["token"].as_str().unwrap().to_owned();
        let scheduled = vec![activity(&instance, 2)];
        let events = vec![started(&instance, 1)];
        commit(runner.as_ref(), &token, events, scheduled, Vec::new(), running()).await.unwrap();
        let (_, token, _) = next_work(&worker, LONG).await;
        worker.ack_work_item(&token, Some(done(&instance, 2))).await.unwrap();
        assert_eq!(next(&mut got).await, (taker, instance));
    }
    runners.into_iter().for_each(Member::die);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_of_a_session_is_found_by_the_process_that_owns_it_whoever_scheduled_it() {
    let scene = Scene::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let session = |name: &str| Some(SessionFetchConfig { owner_id: name.to_owned(), lock_timeout: LONG });
    let owner =
        Member::begin(&scene, "owner", no_sweeps(), vec![Role::Work(TagFilter::Any, session("owner"))], &send).await;
    members(&scene, |members| members.len() == 1).await;
    let runner = scene.provider_with("runner", no_sweeps()).await;
    begin(&runner, "first", vec![activity_with("first", 2, Some("s"), None)], Vec::new()).await;
    assert_eq!(next(&mut got).await, ("owner".to_owned(), "first".to_owned()));
    // Another process has workers of its own, and tries before it knows whose the session is.
    let other =
        Member::begin(&scene, "other", no_sweeps(), vec![Role::Work(TagFilter::Any, session("other"))], &send).await;
    members(&scene, |members| are_shared(members, "activity", 2)).await;
    for n in 0..6 {
        let instance = format!("i{n}");
        begin(other.provider.as_ref(), &instance, vec![activity_with(&instance, 2, Some("s"), None)], Vec::new()).await;
        assert_eq!(next(&mut got).await, ("owner".to_owned(), instance));
    }
    owner.die();
    other.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pinned_instance_is_found_by_the_member_that_runs_its_version() {
    let scene = Scene::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let version = |text: &str| text.parse::<semver::Version>().unwrap();
    let runs = |from: &str, to: &str| {
        let supported_duroxide_versions = vec![SemverRange::new(version(from), version(to))];
        vec![Role::Turns(Some(DispatcherCapabilityFilter { supported_duroxide_versions }))]
    };
    // Instances that are pinned to either version.
    let maker = scene.provider_with("maker", no_sweeps()).await;
    for n in 0..6 {
        let instance = format!("i{n}");
        maker.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        let (_, token, _) = next_turn(&maker, LONG).await;
        let pinned_duroxide_version = Some(version(if n % 2 == 0 { "1.0.0" } else { "2.0.0" }));
        let metadata = duroxide::providers::ExecutionMetadata { pinned_duroxide_version, ..running() };
        let events = vec![started(&instance, 1)];
        commit(&maker, &token, events, Vec::new(), Vec::new(), metadata).await.unwrap();
    }
    let old = Member::begin(&scene, "old", no_sweeps(), runs("1.0.0", "1.9.0"), &send).await;
    let new = Member::begin(&scene, "new", no_sweeps(), runs("2.0.0", "2.9.0"), &send).await;
    members(&scene, |members| members.len() == 2).await;
    let client = scene.provider_with("client", no_sweeps()).await;
    for n in 0..6 {
        let instance = format!("i{n}");
        client.enqueue_for_orchestrator(external(&instance, "news"), None).await.unwrap();
        let wanted = if n % 2 == 0 { "old" } else { "new" };
        assert_eq!(next(&mut got).await, (wanted.to_owned(), instance));
    }
    old.die();
    new.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_comes_takes_its_share_and_one_that_leaves_hands_over_at_once() {
    let scene = Scene::new(2);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Member::begin(&scene, "a", no_sweeps(), turns(), &send).await;
    members(&scene, |members| are_shared(members, "turns", 1)).await;
    let b = Member::begin(&scene, "b", no_sweeps(), turns(), &send).await;
    let both = members(&scene, |members| are_shared(members, "turns", 2)).await;
    let client = scene.provider_with("client", no_sweeps()).await;
    for (n, member) in both.iter().enumerate() {
        let instance = instance_in(slots(member, "turns").unwrap(), &format!("both-{n}-"));
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        next(&mut got).await;
    }
    b.leave().await;
    let left = members(&scene, |members| are_shared(members, "turns", 1)).await;
    // The client still has both on its list: the bell of the one that left is not there any more.
    for member in &both {
        let instance = instance_in(slots(member, "turns").unwrap(), "one-");
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        // What the other one held and has given back may come first.
        while next(&mut got).await != ("a".to_owned(), instance.clone()) {}
    }
    assert_eq!(left.len(), 1);
    let bells = scene.documents().await.into_iter().filter(|document| document["type"] == "wakeup").count();
    assert_eq!(bells, 1, "what left has left nothing");
    a.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_dead_member_would_have_taken_is_swept_although_it_is_still_listed() {
    let scene = Scene::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Member::begin(&scene, "a", quiet(), turns(), &send).await;
    let b = Member::begin(&scene, "b", quiet(), turns(), &send).await;
    let both = members(&scene, |members| are_shared(members, "turns", 2)).await;
    b.die();
    let client = scene.provider_with("client", no_sweeps()).await;
    for (n, member) in both.iter().enumerate() {
        let instance = instance_in(slots(member, "turns").unwrap(), &format!("i{n}-"));
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        assert_eq!(next(&mut got).await, ("a".to_owned(), instance));
    }
    assert_eq!(scene.of_kind("$d:fleet", "member").await.len(), 2, "nobody has taken it off the list");
    a.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_that_are_off_by_half_a_minute_change_nothing_about_who_is_there() {
    let scene = Scene::new(2);
    let (send, mut got) = mpsc::unbounded_channel();
    let mut fleet = Vec::new();
    for (name, millis) in [("behind", -30_000), ("ahead", 30_000), ("right", 0)] {
        let config = quiet().with_clock(off_by(millis));
        fleet.push(Member::begin(&scene, name, config, turns(), &send).await);
    }
    let members = members(&scene, |members| are_shared(members, "turns", 3)).await;
    let client = scene.provider_with("client", no_sweeps()).await;
    for (n, member) in members.iter().enumerate() {
        let instance = instance_in(slots(member, "turns").unwrap(), &format!("i{n}-"));
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        // To the one that is behind it is not visible yet: another one takes it.
        let (taker, taken) = next(&mut got).await;
        assert_eq!(taken, instance);
        assert_ne!(taker, "behind");
    }
    fleet.into_iter().for_each(Member::die);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn among_three_hundred_members_everybody_has_a_share_and_what_died_long_ago_is_cleared_away() {
    let scene = Scene::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    // Members of other processes, as they would have written themselves.
    drop(scene.provider("maker").await);
    let container = scene.container().await;
    for n in 0..299 {
        let member = format!("m{n:03}");
        let document = serde_json::json!({
            "id": format!("member:{member}"), "instanceId": "$d:fleet", "type": "member", "member": member,
            "turns": { "need": null, "slots": { "from": 0, "to": 0 } },
        });
        let id = document["id"].as_str().unwrap();
        container.create_item("$d:fleet", id, &document, None).await.unwrap();
    }
    let a = Member::begin(&scene, "a", quiet(), turns(), &send).await;
    let is_real = |member: &Value| !member["member"].as_str().unwrap().starts_with('m');
    let members = members(&scene, |members| {
        let ours = members.iter().find(|member| is_real(member));
        ours.and_then(|ours| slots(ours, "turns")).is_some_and(|(from, to)| to - from <= 1)
    })
    .await;
    assert_eq!(members.len(), 300);
    // Wherever an instance lies, somebody takes it: the others are not there, and a sweep is.
    let client = scene.provider_with("client", quiet()).await;
    client.enqueue_for_orchestrator(start("anywhere"), None).await.unwrap();
    assert_eq!(next(&mut got).await, ("a".to_owned(), "anywhere".to_owned()));
    a.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_is_split_is_looked_at_whole() {
    let scene = Scene::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Member::begin(&scene, "a", quiet(), turns(), &send).await;
    members(&scene, |members| are_shared(members, "turns", 1)).await;
    let partition = scene.account.partitions("duroxide", "duroxide")[0];
    scene.account.split("duroxide", "duroxide", partition).await.unwrap();
    let client = scene.provider_with("client", quiet()).await;
    for n in 0..8 {
        let instance = instance_in((n * 32, n * 32 + 32), "i");
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        assert_eq!(next(&mut got).await.1, instance);
    }
    a.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_that_is_lost_fails_nothing_and_a_sweep_finds_what_it_was_about() {
    let scene = Scene::new(2);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Member::begin(&scene, "a", quiet(), turns(), &send).await;
    members(&scene, |members| are_shared(members, "turns", 1)).await;
    let client = scene.provider_with("client", quiet()).await;
    let lost = WireRule::new(WireAction::FailConnection);
    let lost = scene.account.wire().add(lost.client("client").on(RequestKind::Replace));
    client.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    assert!(lost.hits() > 0, "it tried to ring");
    assert_eq!(next(&mut got).await.1, "i");
    a.die();
}

/// One that looks after the slots that it is told to.
#[derive(Debug)]
struct Fixed(SlotRange);

impl LeaseProvider for Fixed {
    fn slots(&self, _place: MemberPosition) -> SlotRange {
        self.0
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_application_that_knows_its_own_sharding_says_who_takes_what() {
    let scene = Scene::new(4);
    let (send, mut got) = mpsc::unbounded_channel();
    let small = no_sweeps().with_leases(Fixed(SlotRange::new(0, 10)));
    let large = no_sweeps().with_leases(Fixed(SlotRange::new(10, 256)));
    let small = Member::begin(&scene, "small", small, turns(), &send).await;
    let large = Member::begin(&scene, "large", large, turns(), &send).await;
    members(&scene, |members| are_shared(members, "turns", 2)).await;
    let client = scene.provider_with("client", no_sweeps()).await;
    for (range, wanted) in [((0, 10), "small"), ((10, 20), "large"), ((250, 256), "large"), ((5, 6), "small")] {
        let instance = instance_in(range, &format!("{}-", range.0));
        client.enqueue_for_orchestrator(start(&instance), None).await.unwrap();
        assert_eq!(next(&mut got).await, (wanted.to_owned(), instance));
    }
    small.die();
    large.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_another_process_scheduled_is_taken_by_one_request() {
    let scene = Scene::new(1);
    let (runner, worker) = (scene.provider("runner").await, scene.provider("worker").await);
    begin(&runner, "i", vec![activity("i", 2)], Vec::new()).await;
    let before = scene.account.stats_of("worker").items().requests;
    let (item, ..) = worker.fetch_work_item(LONG, NOW, None, &TagFilter::Any).await.unwrap().expect("it is there");
    assert_eq!(instance_of(&item), "i");
    let requests = scene.account.stats_of("worker").items().requests - before;
    assert_eq!(requests, 2, "a look and the claim");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dispatchers_that_take_different_things_in_one_process_are_told_of_both() {
    let scene = Scene::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let tagged = |tag: &str| TagFilter::Tags([tag.to_owned()].into());
    let roles = vec![Role::Work(tagged("gpu"), None), Role::Work(tagged("cpu"), None)];
    let worker = Member::begin(&scene, "worker", no_sweeps(), roles, &send).await;
    let takes_both = |members: &[Value]| {
        members.len() == 1 && members[0]["activity"]["need"]["tags"] == serde_json::json!(["cpu", "gpu"])
    };
    members(&scene, takes_both).await;
    // Both keep asking, and neither is news to the other.
    let settled = scene.account.stats_of("worker").items().requests;
    let runner = scene.provider_with("runner", no_sweeps()).await;
    for (instance, tag) in [("one", "gpu"), ("two", "cpu"), ("three", "gpu")] {
        begin(&runner, instance, vec![activity_with(instance, 2, None, Some(tag))], Vec::new()).await;
        assert_eq!(next(&mut got).await, ("worker".to_owned(), instance.to_owned()));
    }
    let requests = scene.account.stats_of("worker").items().requests - settled;
    assert!(requests < 150, "{requests} requests for three activities");
    worker.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_that_another_overwrites_before_it_is_heard_is_not_lost() {
    let scene = Scene::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Member::begin(&scene, "a", no_sweeps(), turns(), &send).await;
    members(&scene, |members| are_shared(members, "turns", 1)).await;
    let clients = [
        scene.provider_with("first", no_sweeps()).await,
        scene.provider_with("second", no_sweeps()).await,
        scene.provider_with("third", no_sweeps()).await,
    ];
    // Nothing is heard until all have rung.
    let is_bell = |request: &WireRequest<'_>| request.document_id == Some("wakeup") && request.method == "GET";
    let deaf = scene.account.wire().add(WireRule::new(WireAction::FailConnection).client("a").matching(is_bell));
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
    a.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cant_read_who_is_there_hears_the_bell_all_the_same() {
    let scene = Scene::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let a = Member::begin(&scene, "a", no_sweeps(), turns(), &send).await;
    members(&scene, |members| are_shared(members, "turns", 1)).await;
    let client = scene.provider_with("client", no_sweeps()).await;
    let silence = WireRule::new(WireAction::FailConnection).client("a");
    let silence = scene.account.wire().add(silence.matching(|request| goes_to(request, "$d:fleet")));
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
    a.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_more_activities_of_a_tag_than_it_can_run_calls_those_who_run_that_tag() {
    let scene = Scene::new(1);
    let (send, mut got) = mpsc::unbounded_channel();
    let gpu = || TagFilter::tags(["gpu"]);
    let other = Member::begin(&scene, "other", no_sweeps(), work(gpu()), &send).await;
    let plain = Member::begin(&scene, "plain", no_sweeps(), work(TagFilter::DefaultOnly), &send).await;
    members(&scene, |members| members.len() == 2).await;
    // It runs such activities itself, and nobody there has time.
    let busy = scene.provider_with("busy", no_sweeps()).await;
    assert!(busy.fetch_work_item(LONG, NOW, None, &gpu()).await.unwrap().is_none());
    let many = (2..42).map(|id| activity_with("i", id, None, Some("gpu"))).collect();
    begin(&busy, "i", many, Vec::new()).await;
    assert_eq!(next(&mut got).await.0, "other");
    other.die();
    plain.die();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_an_activity_is_heard_of_although_its_ring_was_overwritten_and_its_slot_is_anothers() {
    let scene = Scene::new(2);
    // Before anybody else is there who would take their first turns.
    let maker = scene.provider("maker").await;
    for instance in ["first", "second"] {
        begin(&maker, instance, vec![activity(instance, 2)], Vec::new()).await;
    }
    maker.shutdown().await;
    let (send, mut got) = mpsc::unbounded_channel();
    let runners = [
        Member::begin(&scene, "a", no_sweeps(), turns(), &send).await,
        Member::begin(&scene, "b", no_sweeps(), turns(), &send).await,
    ];
    let both = members(&scene, |members| are_shared(members, "turns", 2)).await;
    let a = runners[0].provider.as_ref();
    // A process tells again what it told a second ago: these are two. Once each has rung, it knows who is there.
    let workers = [scene.provider("worker").await, scene.provider("another").await];
    for worker in &workers {
        let (work, token, _) = next_work(worker, LONG).await;
        worker.ack_work_item(&token, Some(done(&instance_of(&work), 2))).await.unwrap();
        assert_eq!(next(&mut got).await.1, instance_of(&work));
    }
    // "a" starts one in each member's slots itself, and so has the turns of both; nobody there runs activities.
    let instances = [0, 1].map(|n| instance_in(slots(&both[n], "turns").unwrap(), "i"));
    for instance in &instances {
        a.enqueue_for_orchestrator(start(instance), None).await.unwrap();
        assert_eq!(next(&mut got).await, ("a".to_owned(), instance.clone()));
        let token = scene.of_kind(instance, "instance").await[0]["lock"]["token"].as_str().unwrap().to_owned();
        let (events, scheduled) = (vec![started(instance, 1)], vec![activity(instance, 2)]);
        commit(a, &token, events, scheduled, Vec::new(), running()).await.unwrap();
    }
    let is_bell = |request: &WireRequest<'_>| request.document_id == Some("wakeup") && request.method == "GET";
    let deaf = scene.account.wire().add(WireRule::new(WireAction::FailConnection).client("a").matching(is_bell));
    let rings = || async {
        let bells = scene.documents().await.into_iter().filter(|document| document["type"] == "wakeup");
        bells.map(|bell| bell["ring"].clone()).map(|ring| ring.to_string()).collect::<BTreeSet<_>>()
    };
    for worker in &workers {
        let before = rings().await;
        let (work, token, _) = next_work(worker, LONG).await;
        worker.ack_work_item(&token, Some(done(&instance_of(&work), 2))).await.unwrap();
        let rung = async {
            while rings().await == before {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, rung).await.expect("a ring");
    }
    deaf.remove();
    let heard: BTreeSet<Got> = [next(&mut got).await, next(&mut got).await].into();
    assert_eq!(heard, instances.map(|instance| ("a".to_owned(), instance)).into());
    runners.into_iter().for_each(Member::die);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn figures_that_every_runtime_asks_for_are_worked_out_by_one_member_and_exact_for_a_client() {
    let scene = Scene::new(2);
    let client = scene.provider("client").await;
    finish(&client, "first", None).await;
    let (got, _keep) = mpsc::unbounded_channel();
    let hours_ahead = no_sweeps().with_clock(off_by(7_200_000));
    let a = Member::begin(&scene, "a", no_sweeps(), nothing(), &got).await;
    let b = Member::begin(&scene, "b", no_sweeps(), nothing(), &got).await;
    let c = Member::begin(&scene, "c", hours_ahead, nothing(), &got).await;
    members(&scene, |members| are_shared(members, "activity", 3)).await;

    let instances = |member: &Member| {
        let provider = member.provider.clone();
        async move { admin(&provider).get_system_metrics().await.unwrap().total_instances }
    };
    let waiting = |member: &Member| {
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
async fn sessions_are_cleaned_up_by_one_member() {
    let scene = Scene::new(2);
    let client = scene.provider("client").await;
    let (got, _keep) = mpsc::unbounded_channel();
    let a = Member::begin(&scene, "a", no_sweeps(), nothing(), &got).await;
    let b = Member::begin(&scene, "b", no_sweeps(), nothing(), &got).await;
    members(&scene, |members| are_shared(members, "activity", 2)).await;
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
