//! The doctor repairs only inconsistencies that its write proves, whatever its region or its clock has missed.

use super::*;
use crate::fixture::*;
use azure_data_cosmos::{options::Region, CosmosClientBuilder, RoutingStrategy};
use duroxide::providers::Provider;
use duroxide_cosmos::{operate::Reason, CosmosDBProvider};
use duroxide_cosmos_emulator::{Gate, LocalAccount, RequestKind, WireAction, WireRule};
use serde_json::json;
use std::sync::Arc;

const HOME: &str = "East US";

const AWAY: &str = "West US";

async fn provider_in(account: &LocalAccount, name: &str, regions: [&str; 2]) -> CosmosDBProvider {
    let runtime = account.runtime_builder(name).build().await.expect("a runtime");
    let regions = regions.iter().map(|region| Region::new((*region).to_owned())).collect();
    let client = CosmosClientBuilder::new().with_runtime(runtime);
    let client = client.build(account.reference(), RoutingStrategy::PreferredRegions(regions)).await.expect("a client");
    CosmosDBProvider::new_with_client(&client, test_config().with_inline_claims(false)).await.expect("a provider")
}

/// The turn schedules 300 activities. Its history is in part 0, and most of its activities are in later parts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doctor_whose_region_has_only_some_parts_of_a_turn_schedules_no_activity_again() {
    const ACTIVITIES: u64 = 300;
    const ENDED: usize = 5;
    for parts in 0..4 {
        let account = LocalAccount::builder().with_regions(&[HOME, AWAY]).build();
        let worker = Arc::new(provider_in(&account, "worker", [HOME, AWAY]).await);
        let doctor = provider_in(&account, "doctor", [AWAY, HOME]).await;
        worker.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        let (_, token, _) = next_turn(&*worker, LONG).await;
        let ids = 2..2 + ACTIVITIES;
        let mut events = vec![started("i", 1)];
        events.extend(ids.clone().map(|id| activity_scheduled("i", id)));
        let work = ids.map(|id| activity("i", id)).collect();
        let gate = Gate::new();
        let held = WireRule::new(WireAction::HoldBefore(gate.clone())).client("worker").on(RequestKind::Batch);
        account.wire().add(held.matching(applies_a_part).skip(parts).times(1));
        let turn = worker.clone();
        let committing = tokio::spawn(async move { commit(&*turn, &token, events, work, Vec::new(), running()).await });
        tokio::time::timeout(PATIENCE, gate.reached()).await.expect("a part is applied");
        // From here on the doctor's region receives no writes.
        account.store().pause_replication(AWAY);
        gate.open();
        committing.await.unwrap().expect("the turn");
        for _ in 0..ENDED {
            let (item, token, _) = next_activity(&*worker, LONG).await;
            let duroxide::providers::WorkItem::ActivityExecute { id, .. } = item else { panic!("{item:?}") };
            worker.ack_work_item(&token, Some(done("i", id))).await.unwrap();
        }
        let diagnosis = diagnose(&doctor, "i").await;
        assert_eq!(diagnosis.findings, [], "after {parts} parts");
        let repair = repair(&doctor, &diagnosis).await;
        assert!(repair.done.is_empty(), "after {parts} parts: {repair:#?}");
        let depths = admin(&worker).get_queue_depths().await.unwrap();
        assert_eq!(depths.worker_queue, ACTIVITIES as usize - ENDED, "after {parts} parts");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doctor_whose_clock_is_ahead_judges_by_the_time_of_cosmos_db() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("worker").await;
    let ahead = fixture.provider_with("doctor", test_config().with_clock(off_by(2 * HOUR))).await;
    let takes = json!({ "any": false, "untagged": true, "tags": [] });
    waiting_activity(&fixture, &provider, takes).await;
    let detail = left_to_the_operator(&ahead, "i", Reason::Late).await;
    assert!(detail.contains("1 processes could take it"), "the member has just been heard of: {detail}");
    // A message of a moment ago is not late, and a running turn stays with its worker.
    fixture.remove(&fixture.only("i", "activity").await).await;
    provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let diagnosis = diagnose(&ahead, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostActivity], "{diagnosis:#?}");
    let (_, token, _) = next_turn(&provider, LONG).await;
    let repair = repair(&ahead, &diagnosis).await;
    assert!(repair.done.is_empty(), "{repair:#?}");
    assert!(repair.hindered.as_deref().is_some_and(|why| why.contains("a turn is in progress")), "{repair:#?}");
    commit(&provider, &token, vec![filler("i", 1, 3)], Vec::new(), Vec::new(), running())
        .await
        .expect("the lock is its own");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_a_doctor_whose_clock_is_ahead_restores_is_due_at_once() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("worker").await;
    let ahead = fixture.provider_with("doctor", test_config().with_clock(off_by(2 * HOUR))).await;
    first_turn(&provider, "i", vec![activity_scheduled("i", 2)]).await;
    repaired(&ahead, "i", Reason::LostActivity).await;
    let (item, ..) = next_activity(&fixture.provider("other").await, LONG).await;
    assert_eq!(item, activity("i", 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doctor_without_write_access_diagnoses_all_the_same() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("worker").await;
    first_turn(&provider, "i", vec![activity_scheduled("i", 2)]).await;
    let reader = fixture.provider("reader").await;
    let refused =
        WireRule::new(WireAction::Refuse { status: 403, substatus: Some(5302), retry_after: None }).client("reader");
    fixture
        .account
        .wire()
        .add(refused.matching(|request| matches!(request.kind, RequestKind::Upsert | RequestKind::Create)));
    assert_eq!(reasons(&diagnose(&reader, "i").await), [Reason::LostActivity]);
}
