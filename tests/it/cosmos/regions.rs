//! Workers that read in a region which lags behind the write region. The provider reads in the write region before each
//! decision, so claims, commits, completions and deletions are right however far the read region lags.

use crate::fixture::*;
use azure_data_cosmos::{options::Region, CosmosClientBuilder, RoutingStrategy};
use duroxide::providers::{Provider, ProviderAdmin};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::{
    ConsistencyLevel, LocalAccount, RequestKind, WireAction, WireRule, WireRuleHandle, WriteMode,
};
use std::time::Duration;

const HOME: &str = "East US";

const AWAY: &str = "West US";

const INSTANCE: &str = "order";

/// An account of two regions. The provider "a" reads in the region without writes, and the provider "b" in the write
/// region.
struct TwoRegions {
    account: LocalAccount,
    a: CosmosDBProvider,
    b: CosmosDBProvider,
}

impl TwoRegions {
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

    /// From now on the read region receives no writes.
    fn lag(&self) {
        self.account.store().pause_replication(AWAY);
    }

    /// Loses the answers to the next requests of this kind that the client "a" sends.
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

/// The consistency levels of the account that these tests cover.
const LEVELS: [ConsistencyLevel; 2] = [ConsistencyLevel::Session, ConsistencyLevel::Eventual];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_reads_the_present_document_and_its_turn_has_the_whole_history() {
    for level in LEVELS {
        let regions = TwoRegions::new(level).await;
        begin_with_activities(&regions.b, INSTANCE, 0).await;
        regions.lag();
        regions.b.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let (_, token) = fetch_turn(&regions.b, LONG).await;
        Delta::event(INSTANCE, 2, "paid").ack(&regions.b, &token).await.expect("the second turn");

        regions.a.enqueue_for_orchestrator(raised(INSTANCE, "shipped"), None).await.expect("a message");
        let (item, token) = within("the turn", fetch_turn(&regions.a, LONG)).await;
        assert_eq!(item.messages, [raised(INSTANCE, "shipped")]);
        assert_eq!(ids(&item.history), [1, 2]);
        Delta::event(INSTANCE, 3, "shipped").ack(&regions.a, &token).await.expect("the third turn");
        assert_eq!(ids(&regions.b.read(INSTANCE).await.expect("a history")), [1, 2, 3]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_the_read_region_does_not_have_yet_is_respected() {
    for level in LEVELS {
        let regions = TwoRegions::new(level).await;
        begin_with_activities(&regions.b, INSTANCE, 0).await;
        regions.lag();
        regions.b.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let (_, token) = fetch_turn(&regions.b, LONG).await;
        regions.a.enqueue_for_orchestrator(raised(INSTANCE, "shipped"), None).await.expect("a message");
        assert!(fetch_turn_now(&regions.a, LONG).await.is_none(), "two owners");
        Delta::event(INSTANCE, 2, "paid").ack(&regions.b, &token).await.expect("the lock is b's");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_answer_is_lost_is_valid() {
    for level in LEVELS {
        let regions = TwoRegions::new(level).await;
        begin_with_activities(&regions.a, INSTANCE, 0).await;
        regions.lag();
        regions.a.enqueue_for_orchestrator(raised(INSTANCE, "paid"), None).await.expect("a message");
        let lost = regions.lose(RequestKind::Replace, 1);
        let (item, token) = within("the turn", fetch_turn(&regions.a, LONG)).await;
        assert_eq!((lost.hits(), item.messages), (1, vec![raised(INSTANCE, "paid")]));
        Delta::event(INSTANCE, 2, "paid").ack(&regions.a, &token).await.expect("the turn commits");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_succeeds_and_is_stored_once() {
    for level in LEVELS {
        let regions = TwoRegions::new(level).await;
        regions.lag();
        regions.a.enqueue_for_orchestrator(start(INSTANCE), None).await.expect("a start");
        let (_, token) = fetch_turn(&regions.a, LONG).await;
        let lost = regions.lose(RequestKind::Batch, 1);
        let delta = Delta::start(INSTANCE, 2);
        within("the ack", delta.ack(&regions.a, &token)).await.expect("the commit happened");
        assert_eq!(lost.hits(), 1);
        assert_refused(delta.ack(&regions.a, &token).await);
        assert_eq!(regions.b.read(INSTANCE).await.expect("a history"), delta.events);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_whose_answer_is_lost_succeeds_and_is_stored_once() {
    for level in LEVELS {
        let regions = TwoRegions::new(level).await;
        begin_with_activities(&regions.a, INSTANCE, 1).await;
        regions.lag();
        let (item, token) = fetch_activity(&regions.a, LONG).await;
        assert_eq!(activity_id(&item), 2);
        let lost = regions.lose(RequestKind::Batch, 1);
        let done = completion(INSTANCE, 2, "done");
        within("the ack", regions.a.ack_work_item(&token, Some(done.clone()))).await.expect("it is done");
        assert_eq!(lost.hits(), 1);
        let (item, _) = fetch_turn(&regions.b, LONG).await;
        assert_eq!(item.messages, [done]);
        assert!(fetch_activity_now(&regions.b, LONG).await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_whose_answers_are_lost_is_committed_once() {
    for level in LEVELS {
        let regions = TwoRegions::new(level).await;
        begin_with_activities(&regions.b, INSTANCE, 0).await;
        regions.lag();
        // The first write prepares the instance, and the second one commits the deletion.
        for skipped in [0, 1] {
            let lost = WireRule::new(WireAction::LoseAnswer).client("a").on(RequestKind::Replace).skip(skipped);
            regions.account.wire().add(lost.times(1));
        }
        let ids = [INSTANCE.to_owned()];
        let deleted =
            within("the deletion", regions.a.delete_instances_atomic(&ids, true)).await.expect("it is deleted");
        assert_eq!(deleted.instances_deleted, 1);
        assert!(regions.b.read(INSTANCE).await.expect("no history").is_empty());
        assert!(regions.b.get_instance_info(INSTANCE).await.is_err());
    }
}

/// A parent with so many children. Each of them has run its first turn.
async fn begin_instance_tree(provider: &CosmosDBProvider, children: usize) -> Vec<String> {
    begin_with_activities(provider, "parent", 0).await;
    let names: Vec<String> = (0..children).map(|number| format!("child-{number}")).collect();
    for child in &names {
        provider.enqueue_for_orchestrator(start(child), None).await.expect("a start");
        let (_, token) = fetch_turn(provider, LONG).await;
        let mut first = Delta::start(child, 0);
        first.metadata.parent_instance_id = Some("parent".to_owned());
        first.ack(provider, &token).await.expect("the child's first turn");
    }
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_the_read_region_does_not_have_yet_is_deleted_with_its_parent() {
    // Session tokens belong to physical partitions. The provider that deletes has none for those of the children.
    let regions = TwoRegions::with_partitions(ConsistencyLevel::Session, 8).await;
    regions.lag();
    let children = begin_instance_tree(&regions.b, 6).await;
    let alone = regions.a.delete_instances_atomic(&["parent".to_owned()], true).await;
    assert!(alone.is_err(), "children would be left: {alone:?}");
    let mut tree = regions.a.get_instance_tree("parent").await.expect("a tree").all_ids;
    regions.a.delete_instances_atomic(&tree, true).await.expect("all are deleted");
    tree.retain(|id| id != "parent");
    tree.sort();
    assert_eq!(tree, children);
    for child in &children {
        assert!(regions.b.get_instance_info(child).await.is_err(), "{child} is left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_reports_no_loss_for_documents_that_its_region_does_not_have_yet() {
    let regions = TwoRegions::new(ConsistencyLevel::Session).await;
    begin_with_activities(&regions.b, INSTANCE, 3).await;
    regions.lag();
    let (item, token) = fetch_activity(&regions.b, LONG).await;
    let done = completion(INSTANCE, activity_id(&item), "done");
    regions.b.ack_work_item(&token, Some(done)).await.expect("it is done");
    let (_, token) = fetch_turn(&regions.b, LONG).await;
    let turn = Delta { events: vec![activity_completed(INSTANCE, 5, activity_id(&item), "done")], ..Delta::default() };
    turn.ack(&regions.b, &token).await.expect("the second turn");
    let doctor = regions.a.doctor().await.expect("a doctor");
    let diagnosis = doctor.diagnose(INSTANCE).await.expect("a diagnosis").expect("an instance");
    assert!(diagnosis.findings.is_empty(), "{:?}", diagnosis.findings);
}

/// Runs an instance that ends with its only turn.
async fn run_to_end(provider: &CosmosDBProvider, instance: &str) {
    provider.enqueue_for_orchestrator(start(instance), None).await.expect("a start");
    let (_, token) = fetch_turn(provider, LONG).await;
    let mut only = Delta::start(instance, 0);
    only.metadata.status = Some("Completed".to_owned());
    only.ack(provider, &token).await.expect("the only turn");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_instance_is_not_deleted_because_the_read_region_still_has_an_ended_one_of_its_name() {
    let regions = TwoRegions::new(ConsistencyLevel::Session).await;
    run_to_end(&regions.b, INSTANCE).await;
    regions.lag();
    regions.b.delete_instances_atomic(&[INSTANCE.to_owned()], false).await.expect("it has ended");
    begin_with_activities(&regions.b, INSTANCE, 1).await;
    let bulk = regions.a.delete_instance_bulk(duroxide::providers::InstanceFilter::default()).await;
    assert_eq!(bulk.map_or(0, |bulk| bulk.instances_deleted), 0);
    assert_eq!(regions.b.get_instance_info(INSTANCE).await.expect("it is there").status, "Running");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_finds_an_instance_that_the_read_region_does_not_have_yet() {
    let regions = TwoRegions::new(ConsistencyLevel::Session).await;
    regions.lag();
    run_to_end(&regions.b, INSTANCE).await;
    let deleted = regions.a.delete_instance(INSTANCE, false).await.expect("it is there");
    assert_eq!(deleted.instances_deleted, 1);
}

#[tokio::test]
async fn an_account_with_several_write_regions_is_refused() {
    let account = LocalAccount::builder().with_regions(&[HOME, AWAY]).with_write_mode(WriteMode::Multi).build();
    let client = account.client_named("a").await;
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    let error = CosmosDBProvider::new_with_client(&client, config).await.expect_err("it is refused");
    assert!(error.to_string().contains("--enable-multiple-write-locations false"), "{error}");
}
