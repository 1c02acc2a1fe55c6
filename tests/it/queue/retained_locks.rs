//! A commit retains the lock of an instance whose next turn can run at once.

use super::dispatchers::*;
use crate::fixture::*;
use duroxide::providers::Provider;
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction};
use std::pin::pin;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_continues_as_new_retains_its_lock_but_not_for_ever() {
    use RequestKind::{Batch, Replace};
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 0).await;
    let sent = Sent::record(&fixture);
    dispatchers.start().await;
    for execution in 1..=10 {
        let (turn, token, attempts) = dispatchers.turn().await;
        assert_eq!((turn.execution_id, turn.messages.len(), attempts), (execution.max(2) - 1, 1, 1));
        dispatchers.continue_as_new(&token, execution).await.unwrap();
    }
    let (_, token, _) = dispatchers.turn().await;
    dispatchers.complete(&token, 11).await;
    // The start, then the commits. One commit has released the lock, so the turn after it was claimed.
    let mut expected = vec![Batch; 12];
    expected.insert(10, Replace);
    assert_eq!(sent.to(INSTANCE), expected);
    nothing_is_left(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_claims_a_message_that_arrived_during_its_turn() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 1, 0).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    dispatchers.provider.enqueue_for_orchestrator(external(INSTANCE, "news"), None).await.unwrap();
    let sent = Sent::record(&fixture);
    commit(dispatchers.provider.as_ref(), &token, vec![started(INSTANCE, 1)], Vec::new(), Vec::new(), running())
        .await
        .unwrap();
    let (turn, token, attempts) = dispatchers.turn().await;
    assert_eq!((turn.messages.as_slice(), attempts), ([external(INSTANCE, "news")].as_slice(), 1));
    dispatchers.commit(&token, false, Vec::new()).await;
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch; 2]);
    nothing_is_left(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_turn_runs_first() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 1, 0).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    dispatchers.stop().await;
    // This turn waits for the only dispatcher.
    dispatchers.provider.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
    let sent = Sent::record(&fixture);
    dispatchers.continue_as_new(&token, 1).await.unwrap();
    let (turn, token, _) = next_turn(dispatchers.provider.as_ref(), LONG).await;
    assert_eq!(turn.instance, CHILD);
    commit(dispatchers.provider.as_ref(), &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running())
        .await
        .unwrap();
    let (turn, ..) = next_turn(dispatchers.provider.as_ref(), LONG).await;
    assert_eq!(turn.instance, INSTANCE);
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch, RequestKind::Replace]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_retained_by_a_commit_whose_answer_is_lost_counts_one_attempt() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, test_config(), 3, 0).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    let lost = on_next_inline_claim(&fixture, WireAction::LoseAnswer);
    dispatchers.continue_as_new(&token, 1).await.unwrap();
    assert_eq!(lost.hits(), 1);
    let (turn, token, attempts) = dispatchers.turn().await;
    assert_eq!((turn.messages.as_slice(), attempts), ([continue_as_new(INSTANCE)].as_slice(), 1));
    dispatchers.complete(&token, 2).await;
    nothing_is_left(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retained_lock_that_no_fetch_picks_up_is_released_and_that_of_a_crashed_process_expires() {
    for dies in [false, true] {
        let fixture = Fixture::new(1);
        let mut dispatchers = Dispatchers::begin(&fixture, test_config(), 1, 0).await;
        dispatchers.start().await;
        let (_, token, _) = dispatchers.turn().await;
        dispatchers.stop().await;
        if dies {
            let held = Gate::new();
            on_next_inline_claim(&fixture, WireAction::HoldAfter(held.clone()));
            let mut step = pin!(dispatchers.continue_as_new(&token, 1));
            tokio::select! {
                _ = &mut step => panic!("it is cut"),
                () = reached(&held) => {}
            }
            // The crash happens during the step. A dispatcher that leaves a live process releases the claims of that
            // process.
            fixture.cut("dispatchers", 0);
        } else {
            dispatchers.continue_as_new(&token, 1).await.unwrap();
        }
        let config = if dies { hours_ahead() } else { test_config() };
        let other = fixture.provider_with("other", config).await;
        let (turn, _, attempts) = next_turn(&other, LONG).await;
        assert_eq!((turn.messages, attempts), (vec![continue_as_new(INSTANCE)], 1 + u32::from(dies)), "{dies}");
    }
}
