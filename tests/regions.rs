//! Workers that read in a region which lags behind the one that takes writes: what decides is read where writes go, so a
//! claim, a commit, an activity's end and a deletion come out right however far behind that region is.

#[path = "common/turns.rs"]
mod turns;

use azure_data_cosmos::{options::Region, CosmosClientBuilder, RoutingStrategy};
use duroxide::providers::{Provider, ProviderAdmin};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{
    ConsistencyLevel, LocalAccount, RequestKind, WireAction, WireRule, WireRuleHandle, WriteMode,
};
use std::time::Duration;
use turns::{
    activity_id, assert_refused, begun, completion, fetch, fetch_now, fetch_work, fetch_work_now, ids, raised, start,
    within, Delta, LONG,
};

const HOME: &str = "East US";
const AWAY: &str = "West US";
const INSTANCE: &str = "order";

/// An account of two regions with a provider "a", whose reads go to the region that takes no writes, and a provider "b"
/// at home.
struct Site {
    account: LocalAccount,
    a: CosmosDBProvider,
    b: CosmosDBProvider,
}

impl Site {
    async fn new(consistency: ConsistencyLevel) -> Self {
        Self::with_partitions(consistency, 1).await
    }

    async fn with_partitions(consistency: ConsistencyLevel, partitions: u32) -> Self {
        let builder = LocalAccount::builder().with_regions(&[HOME, AWAY]).with_partitions(partitions);
        let account = builder.with_consistency(consistency).build();
        let b = provider(&account, "b", &[HOME, AWAY]).await;
        let a = provider(&account, "a", &[AWAY, HOME]).await;
        Self { account, a, b }
    }

    /// From now on the other region hears of nothing.
    fn lag(&self) {
        self.account.store().pause_replication(AWAY);
    }

    /// Loses the next answers to "a" of this kind.
    fn lose(&self, kind: RequestKind, times: u64) -> WireRuleHandle {
        self.account.wire().add(WireRule::new(WireAction::LoseAnswer).client("a").on(kind).times(times))
    }
}

async fn provider(account: &LocalAccount, name: &str, regions: &[&str]) -> CosmosDBProvider {
    let runtime = account.runtime_builder(name).build().await.expect("a runtime");
    let regions = regions.iter().map(|region| Region::new((*region).to_owned())).collect();
    let client = CosmosClientBuilder::new().with_runtime(runtime);
    let client = client.build(account.reference(), RoutingStrategy::PreferredRegions(regions)).await.expect("a client");
    let config = CosmosDBProviderConfig::default()
        .with_create_if_missing(true)
        .with_poll_interval(Duration::from_millis(300))
        .with_read_staleness(Duration::ZERO);
    CosmosDBProvider::new_with_client(&client, config).await.expect("a provider")
}

/// Every promise holds at each of these levels of the account.
const LEVELS: [ConsistencyLevel; 2] = [ConsistencyLevel::Session, ConsistencyLevel::Eventual];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_goes_by_the_document_as_it_is_and_its_turn_has_the_whole_history() {
    for level in LEVELS {
        let site = Site::new(level).await;
        begun(&site.b, INSTANCE, 0).await;
        site.lag();
        site.b.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let (_, token) = fetch(&site.b, LONG).await;
        Delta::event(INSTANCE, 2, "paid").ack(&site.b, &token).await.expect("the second turn");

        site.a.enqueue_for_orchestrator(raised(INSTANCE, "shipped"), None).await.expect("a message");
        let (item, token) = within("the turn", fetch(&site.a, LONG)).await;
        assert_eq!(item.messages, [raised(INSTANCE, "shipped")]);
        assert_eq!(ids(&item.history), [1, 2]);
        Delta::event(INSTANCE, 3, "shipped").ack(&site.a, &token).await.expect("the third turn");
        assert_eq!(ids(&site.b.read(INSTANCE).await.expect("a history")), [1, 2, 3]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_the_read_region_has_not_heard_of_is_respected() {
    for level in LEVELS {
        let site = Site::new(level).await;
        begun(&site.b, INSTANCE, 0).await;
        site.lag();
        site.b.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let (_, token) = fetch(&site.b, LONG).await;
        site.a.enqueue_for_orchestrator(raised(INSTANCE, "shipped"), None).await.expect("a message");
        assert!(fetch_now(&site.a, LONG).await.is_none(), "two owners");
        Delta::event(INSTANCE, 2, "paid").ack(&site.b, &token).await.expect("the lock is b's");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_answer_is_lost_is_a_claim() {
    for level in LEVELS {
        let site = Site::new(level).await;
        begun(&site.a, INSTANCE, 0).await;
        site.lag();
        site.a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let lost = site.lose(RequestKind::Replace, 1);
        let (item, token) = within("the turn", fetch(&site.a, LONG)).await;
        assert_eq!((lost.hits(), item.messages), (1, vec![raised(INSTANCE, "paid")]));
        Delta::event(INSTANCE, 2, "paid").ack(&site.a, &token).await.expect("the turn commits");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_is_reported_as_done_and_done_once() {
    for level in LEVELS {
        let site = Site::new(level).await;
        site.lag();
        site.a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
        let (_, token) = fetch(&site.a, LONG).await;
        let lost = site.lose(RequestKind::Batch, 1);
        let delta = Delta::start(INSTANCE, 2);
        within("the ack", delta.ack(&site.a, &token)).await.expect("the commit happened");
        assert_eq!(lost.hits(), 1);
        assert_refused(delta.ack(&site.a, &token).await);
        assert_eq!(site.b.read(INSTANCE).await.expect("a history"), delta.events);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activitys_end_whose_answer_is_lost_is_reported_as_done_and_completes_it_once() {
    for level in LEVELS {
        let site = Site::new(level).await;
        begun(&site.a, INSTANCE, 1).await;
        site.lag();
        let (item, token) = fetch_work(&site.a, LONG).await;
        assert_eq!(activity_id(&item), 2);
        let lost = site.lose(RequestKind::Batch, 1);
        let done = completion(INSTANCE, 2, "done");
        within("the ack", site.a.ack_work_item(&token, Some(done.clone()))).await.expect("it is done");
        assert_eq!(lost.hits(), 1);
        let (item, _) = fetch(&site.b, LONG).await;
        assert_eq!(item.messages, [done]);
        assert!(fetch_work_now(&site.b, LONG).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_whose_answers_are_lost_is_decided_once_and_for_all() {
    for level in LEVELS {
        let site = Site::new(level).await;
        begun(&site.b, INSTANCE, 0).await;
        site.lag();
        // The first write marks the instance, the second one decides.
        for skipped in [0, 1] {
            let lost = WireRule::new(WireAction::LoseAnswer).client("a").on(RequestKind::Replace).skip(skipped);
            site.account.wire().add(lost.times(1));
        }
        let ids = [INSTANCE.to_owned()];
        let deleted = within("the deletion", site.a.delete_instances_atomic(&ids, true)).await.expect("it is deleted");
        assert_eq!(deleted.instances_deleted, 1);
        assert!(site.b.read(INSTANCE).await.expect("no history").is_empty());
        assert!(site.b.get_instance_info(INSTANCE).await.is_err());
    }
}

/// A parent with so many children, all of which have run their first turn.
async fn begun_family(provider: &CosmosDBProvider, children: usize) -> Vec<String> {
    begun(provider, "parent", 0).await;
    let names: Vec<String> = (0..children).map(|number| format!("child-{number}")).collect();
    for child in &names {
        provider.enqueue_for_orchestrator(start(child), None).await.expect("a start");
        let (_, token) = fetch(provider, LONG).await;
        let mut first = Delta::start(child, 0);
        first.metadata.parent_instance_id = Some("parent".to_owned());
        first.ack(provider, &token).await.expect("the child's first turn");
    }
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_the_read_region_has_not_heard_of_is_not_left_without_its_parent() {
    // Session tokens are those of physical partitions: of the children's, the one that deletes has none.
    let site = Site::with_partitions(ConsistencyLevel::Session, 8).await;
    site.lag();
    let children = begun_family(&site.b, 6).await;
    let alone = site.a.delete_instances_atomic(&["parent".to_owned()], true).await;
    assert!(alone.is_err(), "children would be left: {alone:?}");
    let mut tree = site.a.get_instance_tree("parent").await.expect("a tree").all_ids;
    site.a.delete_instances_atomic(&tree, true).await.expect("all are deleted");
    tree.retain(|id| id != "parent");
    tree.sort();
    assert_eq!(tree, children);
    for child in &children {
        assert!(site.b.get_instance_info(child).await.is_err(), "{child} is left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doctor_finds_nothing_lost_in_what_its_region_has_not_heard_of() {
    let site = Site::new(ConsistencyLevel::Session).await;
    begun(&site.b, INSTANCE, 3).await;
    site.lag();
    let (item, token) = fetch_work(&site.b, LONG).await;
    let done = completion(INSTANCE, activity_id(&item), "done");
    site.b.ack_work_item(&token, Some(done)).await.expect("it is done");
    let (_, token) = fetch(&site.b, LONG).await;
    let turn = Delta { events: vec![turns::completed(INSTANCE, 5, activity_id(&item), "done")], ..Delta::default() };
    turn.ack(&site.b, &token).await.expect("the second turn");
    let doctor = site.a.doctor().await.expect("a doctor");
    let diagnosis = doctor.diagnose(INSTANCE).await.expect("a diagnosis").expect("an instance");
    assert!(diagnosis.findings.is_empty(), "{:?}", diagnosis.findings);
}

/// An instance whose only turn has ended it.
async fn ended(provider: &CosmosDBProvider, instance: &str) {
    provider.enqueue_for_orchestrator(start(instance), None).await.expect("a start");
    let (_, token) = fetch(provider, LONG).await;
    let mut only = Delta::start(instance, 0);
    only.metadata.status = Some("Completed".to_owned());
    only.ack(provider, &token).await.expect("the only turn");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_runs_is_not_deleted_since_the_read_region_knows_a_former_one_that_has_ended() {
    let site = Site::new(ConsistencyLevel::Session).await;
    ended(&site.b, INSTANCE).await;
    site.lag();
    site.b.delete_instances_atomic(&[INSTANCE.to_owned()], false).await.expect("it has ended");
    begun(&site.b, INSTANCE, 1).await;
    let bulk = site.a.delete_instance_bulk(duroxide::providers::InstanceFilter::default()).await;
    assert_eq!(bulk.map_or(0, |bulk| bulk.instances_deleted), 0);
    assert_eq!(site.b.get_instance_info(INSTANCE).await.expect("it is there").status, "Running");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_the_read_region_has_not_heard_of_is_found_by_who_deletes_it() {
    let site = Site::new(ConsistencyLevel::Session).await;
    site.lag();
    ended(&site.b, INSTANCE).await;
    let deleted = site.a.delete_instance(INSTANCE, false).await.expect("it is there");
    assert_eq!(deleted.instances_deleted, 1);
}

#[tokio::test]
async fn an_account_that_takes_writes_everywhere_is_refused() {
    let account = LocalAccount::builder().with_regions(&[HOME, AWAY]).with_write_mode(WriteMode::Multi).build();
    let client = account.client_named("a").await;
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    let error = CosmosDBProvider::new_with_client(&client, config).await.expect_err("it is refused");
    assert!(error.to_string().contains("--enable-multiple-write-locations false"), "{error}");
}
