//! The doctor finds nothing wrong with instances that run, at any moment.

use crate::fixture::*;
use duroxide::{
    runtime::{registry::ActivityRegistry, Runtime},
    ActivityContext, Client, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus,
};
use std::{sync::Arc, time::Duration};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_instances_have_no_findings_at_any_moment() {
    const INSTANCES: usize = 30;
    let fixture = Fixture::new(3);
    let activities = ActivityRegistry::builder()
        .register("FetchedActivity", |_: ActivityContext, input: String| async move { Ok(input.len().to_string()) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("Busy", |ctx: OrchestrationContext, left: String| async move {
            let left: u32 = left.parse().map_err(|_| "no number".to_owned())?;
            if left == 0 {
                return Ok("done".to_owned());
            }
            ctx.set_kv_value("left", left.to_string());
            ctx.set_custom_status(format!("{left} left"));
            let large = "x".repeat(6_000);
            let work = (0..4).map(|_| ctx.schedule_activity("FetchedActivity", large.as_str())).collect();
            let child = ctx.schedule_sub_orchestration("Child", "");
            ctx.schedule_timer(Duration::from_millis(30)).await;
            ctx.join(work).await;
            child.await?;
            // One of the two competitors loses.
            let (slow, fast) =
                (ctx.schedule_timer(Duration::from_secs(600)), ctx.schedule_activity("FetchedActivity", "y"));
            ctx.select2(slow, fast).await;
            ctx.continue_as_new((left - 1).to_string()).await
        })
        .register("Child", |ctx: OrchestrationContext, _: String| async move {
            ctx.schedule_activity("FetchedActivity", "z").await
        })
        .build();
    let mut runtimes = Vec::new();
    for number in 0..2 {
        let provider = Arc::new(fixture.provider(&format!("worker {number}")).await);
        runtimes.push(Runtime::start_with_store(provider, activities.clone(), orchestrations.clone()).await);
    }
    let store = Arc::new(fixture.provider("client").await);
    let client = Client::new(store.clone());
    for n in 0..INSTANCES {
        client.start_orchestration(format!("busy {n}"), "Busy", "4").await.unwrap();
    }
    let all_ended = async {
        for n in 0..INSTANCES {
            let ended = client.wait_for_orchestration(&format!("busy {n}"), PATIENCE).await.unwrap();
            assert!(matches!(ended, OrchestrationStatus::Completed { .. }), "{ended:?}");
        }
    };
    let looked = std::sync::atomic::AtomicUsize::new(0);
    let looking = async {
        let doctor = store.doctor().await.unwrap();
        loop {
            let mut suspects = doctor.scan(Duration::ZERO, true);
            while let Some(page) = suspects.next().await.unwrap() {
                for instance in page {
                    if let Some(diagnosis) = doctor.diagnose(&instance).await.unwrap() {
                        assert_eq!(diagnosis.findings, [], "{diagnosis:#?}");
                        looked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                }
            }
        }
    };
    tokio::select! {
        () = all_ended => {}
        () = looking => {}
    }
    assert!(looked.into_inner() > INSTANCES, "the doctor diagnosed them while they ran");
    for runtime in runtimes {
        runtime.shutdown(None).await;
    }
}
