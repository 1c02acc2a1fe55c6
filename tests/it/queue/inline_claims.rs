//! The batch that creates work also claims it for a dispatcher that waits. This saves requests. No work is lost if the
//! batch, the dispatcher or the process fails.

use super::dispatchers::*;
use crate::fixture::*;
use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRule};
use serde_json::Value;
use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::task::JoinHandle;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_step_of_an_orchestration_is_one_request_that_claims_the_next_step() {
    use RequestKind::{Batch, Create, Replace};
    for (on, expected) in [(true, vec![Batch; 4]), (false, vec![Create, Create, Batch, Replace, Batch, Replace, Batch])]
    {
        let fixture = Fixture::new(1);
        let mut dispatchers = Dispatchers::begin(&fixture, no_polls().with_inline_claims(on), 3, 3).await;
        let sent = Sent::record(&fixture);
        assert_eq!(hello(&mut dispatchers).await, [1, 1, 1]);
        assert_eq!(sent.to(INSTANCE), expected, "{on}");
        nothing_is_left(&fixture).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inline_claim_whose_answer_is_lost_is_read_and_counts_one_attempt() {
    // The start, the commit with an activity, and the completion of the activity.
    for step in 0..3 {
        let fixture = Fixture::new(1);
        let mut dispatchers = Dispatchers::begin(&fixture, test_config(), 3, 3).await;
        let rule =
            WireRule::new(WireAction::LoseAnswer).client("dispatchers").matching(claims_inline).skip(step).times(1);
        let lost = fixture.account.wire().add(rule);
        assert_eq!(hello(&mut dispatchers).await, [1, 1, 1], "step {step}");
        assert_eq!(lost.hits(), 1, "step {step}");
        nothing_is_left(&fixture).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_is_refused_because_of_the_claim_is_written_without_it() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, test_config(), 3, 3).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    dispatchers.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let (_, token, _) = dispatchers.activity().await;
    // Another process has run a turn in the meantime.
    let held = Gate::new();
    on_next_inline_claim(&fixture, WireAction::HoldBefore(held.clone()));
    let provider = dispatchers.provider.clone();
    let ending = tokio::spawn(async move { provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await });
    reached(&held).await;
    let other = fixture.provider("other").await;
    other.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    let (_, token, _) = next_turn(&other, LONG).await;
    commit(&other, &token, vec![filler(INSTANCE, 1, 3)], Vec::new(), Vec::new(), running()).await.unwrap();
    held.open();
    ending.await.unwrap().unwrap();
    let (turn, token, attempts) = dispatchers.turn().await;
    assert_eq!((turn.messages, turn.history.len(), attempts), (vec![done(INSTANCE, 2)], 3, 1));
    dispatchers.commit(&token, false, Vec::new()).await;
    nothing_is_left(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inline_claim_for_a_dispatcher_that_has_gone_is_released_without_counting_an_attempt() {
    for step in 0..3 {
        let fixture = Fixture::new(1);
        let mut dispatchers = Dispatchers::begin(&fixture, test_config(), 3, 3).await;
        let waiting: Vec<_> = dispatchers.waiting.iter().map(JoinHandle::abort_handle).collect();
        let held = Gate::new();
        let rule = WireRule::new(WireAction::HoldAfter(held.clone())).client("dispatchers").matching(claims_inline);
        fixture.account.wire().add(rule.skip(step).times(1));
        // The call itself continues: only the dispatchers that wait for its work have gone.
        let steps = tokio::spawn(async move { hello_until_its_activity_has_ended(&mut dispatchers).await });
        reached(&held).await;
        waiting.iter().for_each(tokio::task::AbortHandle::abort);
        held.open();
        let released = async {
            while fixture.partition(INSTANCE).await.iter().any(|document| !document["lock"].is_null()) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(PATIENCE, released).await.expect("it is released");
        let other = fixture.provider("other").await;
        let attempts = match step {
            1 => next_activity(&other, LONG).await.2,
            _ => next_turn(&other, LONG).await.2,
        };
        assert_eq!(attempts, 1, "step {step}");
        steps.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inline_claim_of_a_crashed_process_is_taken_over_when_the_lock_expires() {
    for step in 0..3 {
        let fixture = Fixture::new(1);
        let mut dispatchers = Dispatchers::begin(&fixture, test_config(), 3, 3).await;
        let held = Gate::new();
        let rule = WireRule::new(WireAction::HoldAfter(held.clone())).client("dispatchers").matching(claims_inline);
        fixture.account.wire().add(rule.skip(step).times(1));
        {
            let mut steps = pin!(hello_until_its_activity_has_ended(&mut dispatchers));
            tokio::select! {
                () = &mut steps => panic!("it is cut"),
                () = reached(&held) => {}
            }
            // The crash happens during the step. A dispatcher that leaves a live process releases the claims of that
            // process.
            fixture.cut("dispatchers", 0);
        }
        dispatchers.stop().await;
        let other = fixture.provider_with("other", hours_ahead()).await;
        if step == 1 {
            let (_, _, attempts) = next_activity(&other, LONG).await;
            assert_eq!(attempts, 2, "it was claimed once");
        } else {
            let (turn, _, attempts) = next_turn(&other, LONG).await;
            assert_eq!((turn.messages.len(), attempts), (1, 2), "it was claimed once");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_claims_the_next_activity() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 1, 1).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    dispatchers.stop().await;
    let worker = dispatchers.provider.clone();
    let work = (2..5).map(|id| activity(INSTANCE, id)).collect();
    dispatchers.commit(&token, true, work).await;
    let (_, first, _) = next_activity(worker.as_ref(), LONG).await;
    let carried = Arc::new(Mutex::new(0));
    let carried_too = carried.clone();
    fixture
        .account
        .wire()
        .observe(move |request, _| *carried_too.lock().unwrap() += usize::from(claims_inline(request)));
    let mut token = first;
    for id in 2..5 {
        worker.ack_work_item(&token, Some(done(INSTANCE, id))).await.unwrap();
        if id < 4 {
            let (item, next, attempts) = next_activity(worker.as_ref(), LONG).await;
            assert_eq!((item, attempts), (activity(INSTANCE, id + 1), 1));
            token = next;
        }
    }
    // Two claims, unless the machine is so busy that one was released in the meantime.
    assert!(*carried.lock().unwrap() > 0, "the end of one claims the next");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_activity_claim_that_no_fetch_picks_up_is_released() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("dispatchers").await;
    begin(&provider, INSTANCE, (2..4).map(|id| activity(INSTANCE, id)).collect(), Vec::new()).await;
    let (_, token, _) = next_activity(&provider, LONG).await;
    provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
    let locked = |documents: &[Value]| documents.iter().any(|document| !document["lock"].is_null());
    let released = async {
        while locked(&fixture.documents_of_type(INSTANCE, "activity").await) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, released).await.expect("it is released");
    let (_, _, attempts) = next_activity(&fixture.provider("other").await, LONG).await;
    assert_eq!(attempts, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_completion_claims_no_turn_while_other_activities_run() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, test_config(), 3, 3).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    dispatchers.commit(&token, true, vec![activity(INSTANCE, 2), activity(INSTANCE, 3)]).await;
    let (first, second) = (dispatchers.activity().await, dispatchers.activity().await);
    let claims = Arc::new(Mutex::new(0));
    let claims_too = claims.clone();
    fixture
        .account
        .wire()
        .observe(move |request, _| *claims_too.lock().unwrap() += usize::from(claims_inline(request)));
    let mut ended = 0;
    for (item, token, _) in [first, second] {
        let WorkItem::ActivityExecute { id, .. } = item else { panic!("{item:?}") };
        dispatchers.provider.ack_work_item(&token, Some(done(INSTANCE, id))).await.unwrap();
        ended += 1;
        assert!(*claims.lock().unwrap() < ended, "the first waits for the second");
    }
    let (turn, ..) = dispatchers.turn().await;
    assert!(!turn.messages.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_start_claims_the_child_inline_and_its_completion_claims_the_parent() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 0).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    let kind = duroxide::EventKind::SubOrchestrationScheduled {
        name: "C".to_owned(),
        instance: CHILD.to_owned(),
        input: String::new(),
    };
    let events = vec![started(INSTANCE, 1), event(INSTANCE, 1, 2, kind)];
    let sent = Sent::record(&fixture);
    let child_start = start_child(CHILD, Some(INSTANCE));
    commit(dispatchers.provider.as_ref(), &token, events, Vec::new(), vec![child_start], running()).await.unwrap();
    let (turn, token, attempts) = dispatchers.turn().await;
    assert_eq!((turn.instance.as_str(), attempts), (CHILD, 1));
    let end = child_completion();
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some(INSTANCE.to_owned()), ..ended("Completed") };
    let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
    commit(dispatchers.provider.as_ref(), &token, events, Vec::new(), vec![end.clone()], metadata).await.unwrap();
    let (turn, token, attempts) = dispatchers.turn().await;
    assert_eq!((turn.instance.as_str(), turn.messages.as_slice(), attempts), (INSTANCE, [end].as_slice(), 1));
    dispatchers.commit(&token, false, Vec::new()).await;
    assert_eq!(sent.to(CHILD), [RequestKind::Batch; 2]);
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch; 3], "its turn, the end of the child, its last turn");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_that_was_claimed_for_a_dispatcher_of_a_dead_runtime_is_not_fetched_after_its_lock() {
    let fixture = Fixture::new(1);
    let a = Arc::new(fixture.provider("a").await);
    let b = fixture.provider("b").await;
    let lock = Duration::from_secs(2);
    let waits = a.clone();
    on_a_runtime_that_ends(move || async move {
        let mut fetch = Box::pin(waits.fetch_orchestration_item(lock, PATIENCE, None));
        // The test waits until the dispatcher has polled and sleeps.
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut fetch).await.is_err());
        waits.enqueue_for_orchestrator(start("i"), None).await.unwrap();
        // The claim is ready for the dispatcher, and no fetch takes it.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let (taken, ..) = next_turn(&b, LONG).await;
    assert_eq!(taken.instance, "i");
    let stale = a.fetch_orchestration_item(lock, NOW, None).await.unwrap();
    assert!(stale.is_none(), "another worker has this turn: {stale:?}");
}
