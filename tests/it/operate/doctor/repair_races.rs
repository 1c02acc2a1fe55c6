//! A repair beside turns, other changes and crashes.

use super::*;
use crate::fixture::*;
use duroxide::{providers::Provider, EventKind};
use duroxide_cosmos::{operate::Reason, CosmosDBProvider};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};

/// Makes an instance whose activity was lost.
async fn with_a_lost_activity(fixture: &Fixture, provider: &CosmosDBProvider) {
    provider.enqueue_for_orchestrator(start("i"), None).await.unwrap();
    let (_, token, _) = next_turn(provider, LONG).await;
    let events = vec![started("i", 1), activity_scheduled("i", 2)];
    commit(provider, &token, events, vec![activity("i", 2)], Vec::new(), running()).await.unwrap();
    fixture.remove(&fixture.documents_of_type("i", "activity").await.remove(0)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_is_not_repaired_while_a_turn_runs_or_after_it_has_changed() {
    let fixture = Fixture::new(1);
    let (provider, doctor) = (fixture.provider("worker").await, fixture.provider("doctor").await);
    with_a_lost_activity(&fixture, &provider).await;
    let diagnosis = diagnose(&doctor, "i").await;
    assert_eq!(reasons(&diagnosis), [Reason::LostActivity]);
    provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let hindered = repair(&doctor, &diagnosis).await;
    assert!(hindered.done.is_empty() && hindered.hindered.unwrap().contains("a turn is in progress"));
    assert!(fixture.documents_of_type("i", "activity").await.is_empty());
    // The turn receives the completion of the activity in another way: no repair is needed any more.
    let kind = EventKind::ActivityCompleted { result: "done".to_owned() };
    let heard = duroxide::Event::with_event_id(3, "i", 1, Some(2), kind);
    commit(&provider, &token, vec![heard, filler("i", 1, 4)], Vec::new(), Vec::new(), running()).await.unwrap();
    let nothing = repair(&doctor, &diagnosis).await;
    assert!(nothing.done.is_empty() && nothing.hindered.is_none(), "{nothing:#?}");
    assert_eq!((nothing.after.unwrap().findings, fixture.documents_of_type("i", "activity").await.len()), (vec![], 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_is_refused_if_the_instance_has_changed_since_the_diagnosis() {
    let fixture = Fixture::new(1);
    let (provider, doctor) = (fixture.provider("worker").await, fixture.provider("doctor").await);
    with_a_lost_activity(&fixture, &provider).await;
    let diagnosis = diagnose(&doctor, "i").await;
    // The batch of the repair waits until a turn is committed that no longer waits for the activity.
    let gate = Gate::new();
    let held = WireRule::new(WireAction::HoldBefore(gate.clone())).client("doctor").on(RequestKind::Batch);
    fixture.account.wire().add(held);
    let repairing = tokio::spawn(async move { repair(&doctor, &diagnosis).await });
    gate.reached().await;
    provider.enqueue_for_orchestrator(external("i", "x"), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let cancelled = EventKind::ActivityCancelRequested { reason: "dropped".to_owned() };
    let events = vec![duroxide::Event::with_event_id(3, "i", 1, Some(2), cancelled), filler("i", 1, 4)];
    commit(&provider, &token, events, Vec::new(), Vec::new(), running()).await.unwrap();
    gate.open();
    let repair = repairing.await.unwrap();
    assert!(repair.done.is_empty(), "{repair:#?}");
    assert!(
        fixture.documents_of_type("i", "activity").await.is_empty(),
        "an activity that was cancelled is not scheduled again"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_that_is_cut_at_any_request_is_finished_by_the_next_one() {
    for lost_answer in [false, true] {
        for passing in 0.. {
            let fixture = Fixture::new(1);
            let (provider, doctor) = (fixture.provider("worker").await, fixture.provider("doctor").await);
            with_a_lost_activity(&fixture, &provider).await;
            let diagnosis = diagnose(&doctor, "i").await;
            let cut = fixture.cut_at("doctor", passing, lost_answer);
            let ended = until_cut(repair(&doctor, &diagnosis), &cut).await;
            let again = fixture.provider("again").await;
            let diagnosis = diagnose(&again, "i").await;
            repair(&again, &diagnosis).await;
            assert_eq!(diagnose(&again, "i").await.findings, [], "cut after {passing}");
            let (_, token, attempt) = next_activity(&fixture.provider("other").await, LONG).await;
            assert_eq!(
                (attempt, fixture.documents_of_type("i", "activity").await.len()),
                (1, 1),
                "cut after {passing}"
            );
            drop(token);
            if let Ended::Returned(_) = ended {
                assert!(passing > 3, "a repair has more than {passing} requests");
                break;
            }
        }
    }
}
