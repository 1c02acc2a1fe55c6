//! Messages for duroxide's event queues: they wait for a start that is on its way, and old ones without a start are
//! dropped.

use crate::fixture::*;
use duroxide::{
    providers::{Provider, WorkItem},
    runtime::{registry::ActivityRegistry, Runtime, RuntimeOptions},
    Client, OrchestrationContext, OrchestrationRegistry,
};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule, WireRuleHandle};
use std::{sync::Arc, time::Duration};

const PARENT: &str = "parent";

const CHILD: &str = "child";

const HOUR: i64 = 3_600_000;

/// A turn that commits the start of `CHILD`, by a process that cannot reach the child's partition.
async fn hold_back_a_start(fixture: &Fixture) -> WireRuleHandle {
    // No other process takes the delivery over within ten minutes.
    let config = test_config().with_reconciler_age_threshold(Duration::from_secs(600));
    let parent = fixture.provider_with("parent", config).await;
    let rule = WireRule::new(WireAction::FailConnection).client("parent").on(RequestKind::Create);
    let rule = rule.on(RequestKind::Batch).matching(|request| goes_to(request, CHILD));
    let blocked = fixture.account.wire().add(rule);
    begin(&parent, PARENT, Vec::new(), vec![start(CHILD)]).await;
    blocked.wait_for_hits(1).await;
    fixture.cut("parent", 0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_message_waits_for_a_start_that_is_still_to_be_delivered() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(HOUR)).await);
    hold_back_a_start(&fixture).await;
    let messages = [queue_message(CHILD, "queue", "1"), queue_message(CHILD, "queue", "2")];
    for message in &messages {
        a.enqueue_for_orchestrator(message.clone(), None).await.unwrap();
        assert_no_turn(&a).await;
    }
    b.reconcile().await.unwrap();
    let (item, token, attempts) = next_turn(&b, LONG).await;
    assert_eq!((item.instance.as_str(), attempts), (CHILD, 1));
    assert_eq!(item.messages, [vec![start(CHILD)], messages.to_vec()].concat());
    commit(&b, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_no_turn(&b).await;
    assert!(fixture.documents_of_type(CHILD, "message").await.is_empty());
    let instance = fixture.documents_of_type(CHILD, "instance").await.pop().unwrap();
    assert!(instance["deferred"].is_null() && instance["due"].is_null(), "{instance}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_message_that_is_older_than_the_start_of_its_instance_is_dropped() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    for round in 0..2 {
        a.enqueue_for_orchestrator(queue_message(CHILD, "queue", &round.to_string()), None).await.unwrap();
        assert_no_turn(&a).await;
    }
    // An event makes the queue messages beside it and after it wait.
    a.enqueue_for_orchestrator(external(CHILD, "event"), None).await.unwrap();
    assert_no_turn(&a).await;
    a.enqueue_for_orchestrator(queue_message(CHILD, "queue", "kept"), None).await.unwrap();
    assert_no_turn(&a).await;
    a.enqueue_for_orchestrator(start(CHILD), None).await.unwrap();
    let (item, token, _) = next_turn(&a, LONG).await;
    assert_eq!(item.messages, [external(CHILD, "event"), queue_message(CHILD, "queue", "kept"), start(CHILD)]);
    commit(&a, &token, vec![started(CHILD, 1)], Vec::new(), Vec::new(), running()).await.unwrap();
    assert_no_turn(&a).await;
    assert!(fixture.documents_of_type(CHILD, "message").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_message_from_long_before_the_turn_that_starts_its_instance_is_dropped() {
    let fixture = Fixture::new(1);
    let (past, now) = (fixture.provider_with("past", config_ahead_by(-HOUR)).await, fixture.provider("now").await);
    past.enqueue_for_orchestrator(queue_message(CHILD, "queue", "old"), None).await.unwrap();
    assert_no_turn(&past).await;
    begin(&now, PARENT, Vec::new(), vec![start(CHILD)]).await;
    let (item, ..) = next_turn(&now, LONG).await;
    assert_eq!(item.messages, [start(CHILD)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_messages_for_a_name_without_a_start_are_gone_after_a_day() {
    const MANY: usize = 620;
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(23 * HOUR)).await);
    for number in 0..MANY {
        a.enqueue_for_orchestrator(queue_message(CHILD, "queue", &number.to_string()), None).await.unwrap();
    }
    assert_no_turn(&a).await;
    a.enqueue_for_orchestrator(queue_message(CHILD, "queue", "one more"), None).await.unwrap();
    assert_no_turn(&b).await;
    assert_eq!(fixture.documents_of_type(CHILD, "message").await.len(), MANY + 1);
    let c = fixture.provider_with("c", config_ahead_by(25 * HOUR)).await;
    while fixture.documents_of_type(CHILD, "message").await.len() > 1 {
        assert_no_turn(&c).await;
    }
    let d = fixture.provider_with("d", config_ahead_by(48 * HOUR)).await;
    assert_no_turn(&d).await;
    assert!(fixture.partition(CHILD).await.is_empty(), "{:?}", fixture.partition(CHILD).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_polls_queue_messages_may_crash_at_any_request_and_the_start_gets_all_of_them() {
    const MANY: usize = 120;
    for carried_out in [false, true] {
        for passing in 0.. {
            let fixture = Fixture::new(1);
            let (maker, a) = (fixture.provider("maker").await, fixture.provider("a").await);
            hold_back_a_start(&fixture).await;
            let messages: Vec<WorkItem> =
                (0..MANY).map(|number| queue_message(CHILD, "queue", &number.to_string())).collect();
            for message in &messages {
                maker.enqueue_for_orchestrator(message.clone(), None).await.unwrap();
            }
            let cut = fixture.cut_at("a", passing, carried_out);
            let ended = until_cut(a.fetch_orchestration_item(LONG, NOW, None), &cut).await;
            let through = matches!(ended, Ended::Returned(_));
            drop(a);
            let b = fixture.provider_with("b", config_ahead_by(HOUR)).await;
            b.reconcile().await.unwrap();
            let (mut seen, mut turns) = (Vec::new(), 0);
            while seen.len() < MANY + 1 {
                let (item, token, _) = next_turn(&b, LONG).await;
                assert_eq!(item.instance, CHILD);
                seen.extend(item.messages);
                turns += 1;
                let event = if turns == 1 { started(CHILD, 1) } else { filler(CHILD, 1, turns) };
                commit(&b, &token, vec![event], Vec::new(), Vec::new(), running()).await.unwrap();
            }
            assert_eq!(seen.iter().filter(|message| matches!(message, WorkItem::StartOrchestration { .. })).count(), 1);
            seen.retain(|message| matches!(message, WorkItem::QueueMessage { .. }));
            assert_eq!(seen, messages, "cut after {passing} requests");
            if through {
                assert!(passing >= 5, "{passing}");
                break;
            }
        }
    }
}

/// More starts than fit a batch, and messages for the last ones as soon as they are known.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_a_large_turn_has_just_started_lose_no_queue_message() {
    const ALL: usize = 300;
    const LAST: usize = 30;
    let fixture = Fixture::new(2);
    let provider = Arc::new(fixture.provider_with("a", test_config()).await);
    let name = |number: usize| format!("detached {number}");
    let orchestrations = OrchestrationRegistry::builder()
        .register("Parent", move |ctx: OrchestrationContext, _: String| async move {
            for number in 0..ALL {
                ctx.schedule_orchestration("Waits", format!("detached {number}"), number.to_string());
            }
            Ok("started".to_owned())
        })
        .register("Waits", |ctx: OrchestrationContext, number: String| async move {
            if number.parse::<usize>().unwrap() < ALL - LAST {
                return Ok(number);
            }
            Ok(ctx.dequeue_event("queue").await)
        })
        .build();
    let runtime = Runtime::start_with_options(
        provider.clone(),
        ActivityRegistry::builder().build(),
        orchestrations,
        RuntimeOptions::default(),
    )
    .await;
    // A delivery is a batch if it claims the instance inline for a dispatcher that waits.
    let slow = WireRule::new(WireAction::Delay(Duration::from_millis(300))).client("a");
    let slow = slow.on(RequestKind::Create).on(RequestKind::Batch);
    let delivers_start = |request: &WireRequest<'_>| {
        let is_start = request.json().is_some_and(|body| body.to_string().contains("StartOrchestration"));
        is_start && request.partition_key.is_some_and(|key| key.contains("detached"))
    };
    fixture.account.wire().add(slow.matching(delivers_start));
    let client = Client::new(Arc::new(fixture.provider("client").await));
    client.start_orchestration(PARENT, "Parent", "").await.unwrap();
    client.wait_for_orchestration(PARENT, PATIENCE).await.unwrap();
    for number in ALL - LAST..ALL {
        client.enqueue_event(&name(number), "queue", format!("data {number}")).await.unwrap();
    }
    for number in ALL - LAST..ALL {
        let status = client.wait_for_orchestration(&name(number), PATIENCE).await;
        let status = status.unwrap_or_else(|error| panic!("{}: {error:?}", name(number)));
        assert!(format!("{status:?}").contains(&format!("data {number}")), "{status:?}");
    }
    runtime.shutdown(Some(1_000)).await;
}

const NAME: &str = "name";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_messages_without_an_instance_are_not_polled_all_the_time() {
    let fixture = Fixture::new(1);
    let (a, b) = (fixture.provider("a").await, fixture.provider_with("b", config_ahead_by(12 * HOUR)).await);
    a.enqueue_for_orchestrator(queue_message(NAME, "queue", &0.to_string()), None).await.unwrap();
    assert_no_turn(&a).await;
    for number in 1..=620 {
        b.enqueue_for_orchestrator(queue_message(NAME, "queue", &number.to_string()), None).await.unwrap();
    }
    assert_no_turn(&b).await;
    let c = fixture.provider_with("c", config_ahead_by(25 * HOUR)).await;
    assert_no_turn(&c).await;
    assert_no_turn(&c).await;
    assert_eq!(fixture.documents_of_type(NAME, "message").await.len(), 620);
    let instance = fixture.documents_of_type(NAME, "instance").await.pop().unwrap();
    let found = fixture
        .documents_of_type(NAME, "message")
        .await
        .iter()
        .filter_map(|m| m["orphanSince"].as_u64())
        .min()
        .unwrap();
    assert_eq!(instance["due"].as_u64(), Some(found + 24 * HOUR as u64), "{instance}");
}

const INSTANCE: &str = "i";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_messages_are_not_dropped_while_their_start_waits_in_the_queue() {
    let fixture = Fixture::new(1);
    let provider = fixture.provider("a").await;
    provider.enqueue_for_orchestrator(queue_message(INSTANCE, "early", "{}"), None).await.unwrap();
    provider.enqueue_for_orchestrator(start(INSTANCE), Some(LONG)).await.unwrap();
    assert!(provider.fetch_orchestration_item(LONG, NOW, None).await.unwrap().is_none());
    assert_eq!(fixture.documents_of_type(INSTANCE, "message").await.len(), 2);
}
