//! A message that a batch claims inline is stored in the instance's document until its turn is committed or released.

use super::dispatchers::*;
use crate::fixture::*;
use duroxide::providers::{Provider, WorkItem};
use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest, WireRule};
use std::time::Duration;

/// The types of the messages and markers of an instance.
async fn message_types(fixture: &Fixture, instance: &str) -> Vec<String> {
    let documents = fixture.partition(instance).await;
    let such = documents.iter().filter(|document| document["id"].as_str().is_some_and(|id| id.starts_with("m:")));
    such.map(|document| document["type"].as_str().unwrap_or_default().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inlined_message_is_in_the_instances_document_until_its_turn_is_committed() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 3).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    let instance = &fixture.instance(INSTANCE).await;
    assert!(instance["inlined"]["item"].as_str().unwrap().contains("StartOrchestration"), "{instance}");
    assert_eq!(instance["due"], instance["lock"]["until"], "a poll finds it when the lock has ended");
    assert!(message_types(&fixture, INSTANCE).await.is_empty());
    dispatchers.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let instance = &fixture.instance(INSTANCE).await;
    assert!(instance["inlined"].is_null() && instance["due"].is_null(), "{instance}");
    let (_, token, _) = dispatchers.activity().await;
    dispatchers.provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
    let (turn, token, _) = dispatchers.turn().await;
    assert_eq!(turn.messages, [done(INSTANCE, 2)]);
    let instance = &fixture.instance(INSTANCE).await;
    assert!(instance["inlined"]["item"].as_str().unwrap().contains("ActivityCompleted"), "{instance}");
    assert_eq!(instance["due"], instance["lock"]["until"]);
    dispatchers.commit(&token, false, Vec::new()).await;
    nothing_is_left(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_message_has_a_document_of_its_own() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 3).await;
    let mut large = start(INSTANCE);
    if let WorkItem::StartOrchestration { input, .. } = &mut large {
        *input = "x".repeat(5_000);
    }
    let sent = Sent::record(&fixture);
    dispatchers.provider.enqueue_for_orchestrator(large.clone(), None).await.unwrap();
    let (turn, token, _) = dispatchers.turn().await;
    assert_eq!(turn.messages, [large]);
    assert!(&fixture.instance(INSTANCE).await["inlined"].is_null());
    assert_eq!(message_types(&fixture, INSTANCE).await, ["message"]);
    dispatchers.complete(&token, 1).await;
    assert_eq!(sent.to(INSTANCE), [RequestKind::Batch; 2]);
    nothing_is_left(&fixture).await;
}

/// Fetches a turn with an inlined message: the start, or the completion of an activity.
async fn turn_with_inlined_message(dispatchers: &mut Dispatchers, is_first: bool) -> String {
    dispatchers.start().await;
    let (_, token, attempts) = dispatchers.turn().await;
    assert_eq!(attempts, 1);
    if is_first {
        return token;
    }
    dispatchers.commit(&token, true, vec![activity(INSTANCE, 2)]).await;
    let (_, token, _) = dispatchers.activity().await;
    dispatchers.provider.ack_work_item(&token, Some(done(INSTANCE, 2))).await.unwrap();
    dispatchers.turn().await.1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_turn_writes_its_inlined_message_to_a_document_and_counts_an_attempt() {
    for is_first in [true, false] {
        for delay in [None, Some(Duration::from_millis(50))] {
            for ignored in [false, true] {
                let case = format!("first {is_first}, delay {delay:?}, ignored {ignored}");
                let fixture = Fixture::new(1);
                let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 3).await;
                let token = turn_with_inlined_message(&mut dispatchers, is_first).await;
                dispatchers.stop().await;
                dispatchers.provider.abandon_orchestration_item(&token, delay, ignored).await.unwrap();
                let instance = &fixture.instance(INSTANCE).await;
                assert!(instance["inlined"].is_null() && instance["lock"].is_null(), "{case}: {instance}");
                assert_eq!(message_types(&fixture, INSTANCE).await, ["message"], "{case}");
                // The next two workers that take the turn count the attempts so far.
                let other = fixture.provider_with("other", hours_ahead()).await;
                for again in 0..2 {
                    let (turn, token, attempts) = next_turn(&other, LONG).await;
                    assert_eq!((turn.messages.len(), attempts), (1, 2 + again - u32::from(ignored)), "{case}");
                    other.abandon_orchestration_item(&token, None, false).await.unwrap();
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_whose_answer_is_lost_writes_its_inlined_message_to_one_document() {
    for is_first in [true, false] {
        let fixture = Fixture::new(1);
        let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 3).await;
        let token = turn_with_inlined_message(&mut dispatchers, is_first).await;
        dispatchers.stop().await;
        let is_release = |request: &WireRequest<'_>| goes_to(request, INSTANCE) && request.kind == RequestKind::Batch;
        let rule = WireRule::new(WireAction::LoseAnswer).client("dispatchers").matching(is_release).times(1);
        let lost = fixture.account.wire().add(rule);
        dispatchers.provider.abandon_orchestration_item(&token, None, false).await.unwrap();
        assert_eq!(lost.hits(), 1);
        let (turn, token, attempts) = next_turn(dispatchers.provider.as_ref(), LONG).await;
        assert_eq!((turn.messages.len(), attempts), (1, 2));
        match is_first {
            true => dispatchers.complete(&token, 1).await,
            false => dispatchers.commit(&token, false, Vec::new()).await,
        }
        nothing_is_left(&fixture).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_turn_keeps_its_inlined_message() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 3).await;
    let token = turn_with_inlined_message(&mut dispatchers, false).await;
    let before = &fixture.instance(INSTANCE).await;
    dispatchers.provider.renew_orchestration_item_lock(&token, LONG * 2).await.unwrap();
    let after = &fixture.instance(INSTANCE).await;
    assert_eq!(after["inlined"], before["inlined"]);
    assert_eq!(after["due"], after["lock"]["until"]);
    assert!(after["due"].as_u64() > before["due"].as_u64());
    dispatchers.commit(&token, false, Vec::new()).await;
    nothing_is_left(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_in_parts_consumes_an_inlined_message() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 1, 0).await;
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    dispatchers.commit(&token, true, (2..252).map(|id| activity(INSTANCE, id)).collect()).await;
    let instance = &fixture.instance(INSTANCE).await;
    assert!(
        instance["inlined"].is_null() && instance["due"].is_null() && instance["rollForward"].is_null(),
        "{instance}"
    );
    assert_eq!(fixture.documents_of_type(INSTANCE, "activity").await.len(), 250);
    assert!(message_types(&fixture, INSTANCE).await.is_empty());
}

/// Makes a parent whose child was claimed inline. The child's turn runs.
async fn with_child(dispatchers: &mut Dispatchers) -> String {
    dispatchers.start().await;
    let (_, token, _) = dispatchers.turn().await;
    let child = vec![start_child(CHILD, Some(INSTANCE))];
    commit(dispatchers.provider.as_ref(), &token, vec![started(INSTANCE, 1)], Vec::new(), child, running())
        .await
        .unwrap();
    let (turn, token, _) = dispatchers.turn().await;
    assert_eq!(turn.instance, CHILD);
    token
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_an_inlined_delivery_is_recognised_before_and_after_the_commit() {
    for late in [false, true] {
        let fixture = Fixture::new(1);
        // The process cannot delete the intent that it has delivered.
        let deletes_the_intent = |request: &WireRequest<'_>| {
            goes_to(request, INSTANCE) && request.kind == RequestKind::Delete && request.client == Some("dispatchers")
        };
        fixture.account.wire().add(WireRule::new(WireAction::HoldBefore(Gate::new())).matching(deletes_the_intent));
        let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 1, 0).await;
        let token = with_child(&mut dispatchers).await;
        assert_eq!(fixture.documents_of_type(INSTANCE, "intent").await.len(), 1, "it is delivered again");
        let other = fixture.provider_with("other", hours_ahead()).await;
        assert_eq!(message_types(&fixture, CHILD).await, ["delivered"], "its marker is there already");
        if !late {
            other.reconcile().await.unwrap();
        }
        commit(dispatchers.provider.as_ref(), &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running())
            .await
            .unwrap();
        if late {
            other.reconcile().await.unwrap();
        }
        assert_eq!(message_types(&fixture, CHILD).await, ["delivered"], "late {late}");
        assert!(fixture.documents_of_type(INSTANCE, "intent").await.is_empty());
        let nothing = other.fetch_orchestration_item(LONG, Duration::ZERO, None).await.unwrap();
        assert!(nothing.is_none(), "{nothing:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_an_inlined_message_of_a_crashed_process_is_not_in_the_turn_twice() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 3).await;
    turn_with_inlined_message(&mut dispatchers, true).await;
    fixture.cut("dispatchers", 0);
    dispatchers.stop().await;
    // The message is written again, as by a client whose answer was lost.
    let instance = &fixture.instance(INSTANCE).await;
    let mut copy = instance["inlined"].clone();
    (copy["instanceId"], copy["type"]) = (instance["instanceId"].clone(), "message".into());
    let id = copy["id"].as_str().expect("its id").to_owned();
    fixture.container().await.create_item(INSTANCE, &id, copy, None).await.unwrap();
    let other = fixture.provider_with("other", hours_ahead()).await;
    let (turn, token, attempts) = next_turn(&other, LONG).await;
    assert_eq!((turn.messages, attempts), (vec![start(INSTANCE)], 2));
    let events = vec![started(INSTANCE, 1), completed(INSTANCE, 1, 2)];
    commit(&other, &token, events, Vec::new(), Vec::new(), ended("Completed")).await.unwrap();
    nothing_is_left(&fixture).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deletion_deletes_an_inlined_message() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 3).await;
    let token = turn_with_inlined_message(&mut dispatchers, false).await;
    let other = fixture.provider("other").await;
    let gone = admin(&other).delete_instance(INSTANCE, true).await.unwrap();
    assert_eq!(gone.instances_deleted, 1);
    assert!(fixture.partition(INSTANCE).await.is_empty());
    let events = vec![completed(INSTANCE, 1, 50)];
    commit(dispatchers.provider.as_ref(), &token, events, Vec::new(), Vec::new(), ended("Completed"))
        .await
        .unwrap_err();
    assert!(fixture.partition(INSTANCE).await.is_empty(), "nothing comes back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumed_delivery_is_not_inlined_again() {
    let fixture = Fixture::new(1);
    let mut dispatchers = Dispatchers::begin(&fixture, no_polls(), 3, 0).await;
    let token = with_child(&mut dispatchers).await;
    // The process cannot delete the intent of the completion that it has delivered.
    let deletes_the_intent = |request: &WireRequest<'_>| goes_to(request, CHILD) && request.kind == RequestKind::Delete;
    fixture
        .account
        .wire()
        .add(WireRule::new(WireAction::HoldBefore(Gate::new())).matching(deletes_the_intent).times(1));
    let metadata =
        duroxide::providers::ExecutionMetadata { parent_instance_id: Some(INSTANCE.to_owned()), ..ended("Completed") };
    let events = vec![started(CHILD, 1), completed(CHILD, 1, 2)];
    commit(dispatchers.provider.as_ref(), &token, events, Vec::new(), vec![child_completion()], metadata)
        .await
        .unwrap();
    let (turn, token, _) = dispatchers.turn().await;
    assert_eq!(turn.messages, [child_completion()]);
    commit(dispatchers.provider.as_ref(), &token, vec![filler(INSTANCE, 1, 2)], Vec::new(), Vec::new(), running())
        .await
        .unwrap();
    // The process that caches the parent and has dispatchers waiting for it delivers the message again.
    let intent = fixture.documents_of_type(CHILD, "intent").await.pop().expect("it is not forgotten");
    let sent = Sent::record(&fixture);
    let mut late = intent.clone();
    late["due"] = 1.into();
    let id = late["id"].as_str().unwrap().to_owned();
    fixture.container().await.replace_item(CHILD, &id, late, None).await.unwrap();
    assert_eq!(dispatchers.provider.reconcile().await.unwrap(), 1);
    assert_eq!(message_types(&fixture, INSTANCE).await, ["delivered"]);
    assert!(sent.to(INSTANCE).is_empty(), "nothing is written");
    let instance = &fixture.instance(INSTANCE).await;
    assert!(instance["inlined"].is_null() && instance["lock"].is_null(), "{instance}");
}
