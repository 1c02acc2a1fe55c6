//! Several providers on one container share the work, and each piece of it is done once.

use crate::fixture::*;
use duroxide::{
    providers::Provider,
    runtime::{registry::ActivityRegistry, Runtime},
    ActivityContext, Client, EventKind, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus,
};
use duroxide_cosmos::{operate, SLOTS};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};
use tokio::sync::Barrier;

const PROVIDERS: usize = 3;

const ORCHESTRATIONS: usize = 100;

/// The provider whose worker has run each activity.
type Log = Arc<Mutex<Vec<(usize, String)>>>;

/// A runtime whose first activity waits until every runtime has one: no runtime can do all the work alone.
async fn run(fixture: &Fixture, number: usize, log: &Log, everybody: &Arc<Barrier>) -> Arc<Runtime> {
    let provider = Arc::new(fixture.provider(&format!("worker {number}")).await);
    let (log, everybody) = (log.clone(), everybody.clone());
    let activities = ActivityRegistry::builder()
        .register("FetchedActivity", move |_: ActivityContext, input: String| {
            let first = {
                let mut log = log.lock().unwrap();
                log.push((number, input.clone()));
                log.iter().filter(|(worker, _)| *worker == number).count() == 1
            };
            let everybody = everybody.clone();
            async move {
                if first {
                    everybody.wait().await;
                }
                Ok(format!("{input} done"))
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Orchestration", |context: OrchestrationContext, input: String| async move {
            context.schedule_activity("FetchedActivity", input).await
        })
        .build();
    Runtime::start_with_store(provider, activities, orchestrations).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_runtimes_share_a_hundred_orchestrations_and_each_is_run_once() {
    let fixture = Fixture::new(4);
    let (log, everybody) = (Log::default(), Arc::new(Barrier::new(PROVIDERS)));
    let mut runtimes = Vec::new();
    for number in 0..PROVIDERS {
        runtimes.push(run(&fixture, number, &log, &everybody).await);
    }
    // The client's own provider runs no work.
    let store = Arc::new(fixture.provider("client").await);
    let client = Client::new(store.clone());
    // A new worker claims all slots until it has listed the others. A client that reads this sends all its work to two
    // workers for some seconds, and they would finish it by then.
    let share_all = async {
        let slots = |member: &operate::Member| {
            let (turns, activities) = (member.turns.as_ref()?.slots, member.activities.as_ref()?.slots);
            let (from, to) = turns.bounds();
            (turns == activities).then_some(to - from)
        };
        loop {
            let shares: Vec<u16> = store.members().await.unwrap().iter().filter_map(slots).collect();
            if shares.len() == PROVIDERS && shares.iter().sum::<u16>() == SLOTS {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, share_all).await.expect("they share the slots among them");
    for n in 0..ORCHESTRATIONS {
        client.start_orchestration(format!("i{n}"), "Orchestration", format!("i{n}")).await.unwrap();
    }
    for n in 0..ORCHESTRATIONS {
        let instance = format!("i{n}");
        match client.wait_for_orchestration(&instance, PATIENCE).await.unwrap() {
            OrchestrationStatus::Completed { output, .. } => assert_eq!(output, format!("i{n} done")),
            other => panic!("{instance}: {other:?}"),
        }
        let history = store.read(&instance).await.unwrap();
        let completions = history.iter().filter(|e| matches!(e.kind, EventKind::ActivityCompleted { .. })).count();
        assert_eq!((history.len(), completions), (4, 1), "{instance}");
    }
    let log = log.lock().unwrap().clone();
    let mut runs: BTreeMap<&str, usize> = BTreeMap::new();
    let mut shares = [0; PROVIDERS];
    for (worker, instance) in &log {
        *runs.entry(instance).or_default() += 1;
        shares[*worker] += 1;
    }
    assert_eq!(runs.len(), ORCHESTRATIONS);
    assert!(runs.values().all(|count| *count == 1), "{runs:?}");
    assert!(shares.iter().all(|share| *share > 0), "{shares:?}");
    let metrics = admin(&store).get_system_metrics().await.unwrap();
    assert_eq!(metrics.completed_instances, ORCHESTRATIONS as u64);
    for runtime in runtimes {
        runtime.shutdown(None).await;
    }
    let depths = admin(&store).get_queue_depths().await.unwrap();
    assert_eq!((depths.orchestrator_queue, depths.worker_queue), (0, 0));
}
