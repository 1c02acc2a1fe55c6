//! Parents and children on three processes, with slow, lost and refused answers: every parent completes, and no
//! document is left over.
//!
//! `TREES=600 cargo test --release --test it instance_trees` runs more trees than the default.

use crate::fixture::*;
use duroxide::{
    providers::Provider,
    runtime::{registry::ActivityRegistry, Runtime, RuntimeOptions},
    ActivityContext, Client, EventKind, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus,
};
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRequest, WireRule};
use std::{
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
    time::Duration,
};

const WORKERS: usize = 3;

const CHILDREN: usize = 3;

fn trees() -> usize {
    std::env::var("TREES").ok().and_then(|trees| trees.parse().ok()).unwrap_or(60)
}

fn activities() -> ActivityRegistry {
    ActivityRegistry::builder()
        .register("FetchedActivity", |_: ActivityContext, input: String| async move { Ok(format!("{input} done")) })
        .build()
}

fn orchestrations() -> OrchestrationRegistry {
    OrchestrationRegistry::builder()
        .register("Child", |context: OrchestrationContext, input: String| async move {
            context.schedule_activity("FetchedActivity", input).await
        })
        .register("Parent", |context: OrchestrationContext, input: String| async move {
            let children = (0..CHILDREN).map(|n| context.schedule_sub_orchestration("Child", format!("{input}.{n}")));
            let outputs: Result<Vec<String>, String> =
                context.join(children.collect::<Vec<_>>()).await.into_iter().collect();
            Ok(outputs?.join(", "))
        })
        .build()
}

/// True for about one request in `of`. It uses a counter with a stride, so that it is the same in every run.
fn one_in(of: u64, seed: u64) -> impl Fn(&WireRequest<'_>) -> bool + Send + Sync {
    let counter = AtomicU64::new(seed);
    move |request| {
        let n = counter.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        !request.kind.is_metadata() && (n >> 33).is_multiple_of(of)
    }
}

/// Adds faults to the requests of the workers.
fn misbehave(fixture: &Fixture) {
    let busy = WireAction::Refuse { status: 429, substatus: None, retry_after: Some(Duration::from_millis(5)) };
    let away = WireAction::Refuse { status: 503, substatus: None, retry_after: None };
    for worker in 0..WORKERS {
        let name = format!("worker {worker}");
        let seed = worker as u64 * 1_000;
        let rule = |action, of| WireRule::new(action).client(name.as_str()).matching(one_in(of, seed + of));
        let wire = fixture.account.wire();
        for kind in [RequestKind::Create, RequestKind::Batch, RequestKind::Replace] {
            wire.add(rule(WireAction::LoseAnswer, 23).on(kind));
            wire.add(rule(WireAction::Delay(Duration::from_millis(150)), 11).on(kind));
        }
        wire.add(rule(busy.clone(), 31));
        wire.add(rule(away.clone(), 37));
        wire.add(rule(WireAction::Delay(Duration::from_millis(400)), 29));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_parent_hears_of_each_child_once_whatever_faults_occur() {
    let fixture = Fixture::new(16);
    let mut runtimes = Vec::new();
    for worker in 0..WORKERS {
        let config = test_config()
            .with_poll_interval(Duration::from_millis(500))
            .with_reconciler_age_threshold(Duration::from_millis(500));
        let provider = Arc::new(fixture.provider_with(&format!("worker {worker}"), config).await);
        let options = RuntimeOptions { orchestration_concurrency: 4, worker_concurrency: 4, ..Default::default() };
        let runtime = Runtime::start_with_options(provider.clone(), activities(), orchestrations(), options).await;
        runtimes.push((runtime, provider));
    }
    let store = Arc::new(fixture.provider("client").await);
    let client = Client::new(store.clone());
    let patience = PATIENCE * u32::try_from(trees().div_ceil(60)).unwrap();
    misbehave(&fixture);
    for n in 0..trees() {
        client.start_orchestration(format!("p{n}"), "Parent", format!("p{n}")).await.unwrap();
    }
    for n in 0..trees() {
        let instance = format!("p{n}");
        match client.wait_for_orchestration(&instance, patience).await.unwrap() {
            OrchestrationStatus::Completed { output, .. } => {
                let wanted: Vec<String> = (0..CHILDREN).map(|child| format!("p{n}.{child} done")).collect();
                assert_eq!(output, wanted.join(", "));
            }
            other => panic!("{instance}: {other:?}"),
        }
        let history = store.read(&instance).await.unwrap();
        let ended = |e: &&duroxide::Event| matches!(e.kind, EventKind::SubOrchestrationCompleted { .. });
        assert_eq!(history.iter().filter(ended).count(), CHILDREN, "{instance}");
        assert_eq!(history.len(), 2 + 2 * CHILDREN, "{instance}: {history:?}");
    }
    fixture.account.wire().clear();
    for (runtime, provider) in runtimes {
        runtime.shutdown(None).await;
        assert!(provider.shutdown_within(PATIENCE).await);
    }
    // Another process takes over the messages of late requests. After that none is left.
    while store.reconcile().await.unwrap() > 0 {}
    let left = store.fetch_orchestration_item(LONG, NOW, None).await.unwrap();
    assert!(left.is_none(), "a turn is left: {left:?}");
    let left: Vec<_> = fixture.documents().await;
    let kinds = ["message", "activity", "payload", "intent", "staged"];
    let left: Vec<_> = left.iter().filter(|d| kinds.iter().any(|kind| d["type"] == *kind)).collect();
    assert!(left.is_empty(), "{left:?}");
}
