//! A cancelled activity leaves no document, even if a worker runs or completes it at the same time.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, ScheduledActivityIdentifier, WorkItem},
    Event, EventKind,
};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};

const INSTANCE: &str = "order";

/// An instance with activities, one of which a worker runs, and a turn that will cancel all of them.
async fn about_to_cancel(
    activities: u64,
) -> (Fixture, CosmosDBProvider, CosmosDBProvider, Delta, String, WorkItem, String) {
    let fixture = Fixture::with_container().await;
    let (a, worker) = (fixture.impatient_provider("a").await, fixture.impatient_provider("worker").await);
    begin_with_activities(&a, INSTANCE, activities).await;
    a.enqueue_for_orchestrator(raised(INSTANCE, "stop"), None).await.expect("a message");
    let (_, token) = fetch_turn(&a, LONG).await;
    let (item, work) = fetch_activity(&worker, LONG).await;
    let mut delta = Delta::event(INSTANCE, activities + 2, "stop");
    delta.cancelled = (2..activities + 2).map(|id| cancelled(INSTANCE, id)).collect();
    (fixture, a, worker, delta, token, item, work)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_activity_is_deleted_while_a_worker_runs_it_and_the_worker_is_told() {
    for activities in [5, 150] {
        let (fixture, a, worker, delta, token, item, work) = about_to_cancel(activities).await;
        delta.ack(&a, &token).await.expect("the turn commits");
        assert!(fixture.documents_of_type(INSTANCE, "activity").await.is_empty());
        assert_refused(worker.renew_work_item_lock(&work, LONG).await);
        assert_refused(worker.ack_work_item(&work, Some(completion(INSTANCE, activity_id(&item), "late"))).await);
        assert!(fixture.documents_of_type(INSTANCE, "message").await.is_empty());
        assert_eq!(
            fixture.impatient_provider("b").await.read(INSTANCE).await.expect("a history").len() as u64,
            activities + 2
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_a_worker_has_completed_does_not_prevent_the_cancellation_of_the_others() {
    for activities in [5, 150] {
        let (fixture, a, worker, delta, token, item, work) = about_to_cancel(activities).await;
        let done = completion(INSTANCE, activity_id(&item), "done");
        worker.ack_work_item(&work, Some(done.clone())).await.expect("it was not cancelled yet");
        delta.ack(&a, &token).await.expect("the turn commits");
        assert!(fixture.documents_of_type(INSTANCE, "activity").await.is_empty());
        let (item, _) = fetch_turn(&fixture.impatient_provider("b").await, LONG).await;
        assert_eq!(item.messages, [done]);
        assert_eq!(item.history.len() as u64, activities + 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_that_a_worker_completes_during_the_commit_does_not_undo_the_commit() {
    let (fixture, a, worker, delta, token, item, work) = about_to_cancel(5).await;
    let gate = Gate::new();
    let held = fixture.rule("a", WireAction::HoldBefore(gate.clone())).on(RequestKind::Batch);
    fixture.account.wire().add(held.times(1));
    let ack = tokio::spawn(async move { delta.ack(&a, &token).await });
    within("the commit", gate.reached()).await;
    let done = completion(INSTANCE, activity_id(&item), "done");
    worker.ack_work_item(&work, Some(done.clone())).await.expect("it was not cancelled yet");
    gate.open();
    within("the commit", ack).await.expect("no panic").expect("the turn commits");
    assert!(fixture.documents_of_type(INSTANCE, "activity").await.is_empty());
    let (item, _) = fetch_turn(&fixture.impatient_provider("b").await, LONG).await;
    assert_eq!((item.messages, item.history.len()), (vec![done], 7));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_activity_leaves_no_input_behind() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("a").await;
    let input = "x".repeat(10_000);
    let schedule = |id: u64, input: &str| {
        let kind = EventKind::ActivityScheduled {
            name: "Activity".to_owned(),
            input: input.to_owned(),
            session_id: None,
            tag: None,
        };
        let mut item = activity(INSTANCE, id);
        if let WorkItem::ActivityExecute { input: of_item, .. } = &mut item {
            input.clone_into(of_item);
        }
        (event(INSTANCE, 1, id, kind), item)
    };
    provider.enqueue_for_orchestrator(start(INSTANCE), None).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let (events, work): (Vec<Event>, Vec<WorkItem>) =
        [schedule(2, &input), schedule(3, "{}"), schedule(4, &input)].into_iter().unzip();
    let events = [vec![started(INSTANCE, 1)], events].concat();
    commit(&provider, &token, events, work, Vec::new(), running()).await.unwrap();
    assert_eq!(fixture.documents_of_type(INSTANCE, "payload").await.len(), 2);
    // A worker completes one of the three activities before the turn that cancels all three.
    let (_, work, _) = next_activity(&provider, LONG).await;
    provider.ack_work_item(&work, Some(done(INSTANCE, 2))).await.unwrap();
    let (_, token, _) = next_turn(&provider, LONG).await;
    let cancelled = (2..=4)
        .map(|activity_id| ScheduledActivityIdentifier { instance: INSTANCE.to_owned(), execution_id: 1, activity_id })
        .collect();
    let events = vec![filler(INSTANCE, 1, 5)];
    provider.ack_orchestration_item(&token, 1, events, Vec::new(), Vec::new(), running(), cancelled).await.unwrap();
    for kind in ["activity", "payload", "message"] {
        assert!(fixture.documents_of_type(INSTANCE, kind).await.is_empty(), "{kind}");
    }
}
