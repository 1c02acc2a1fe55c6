//! duroxide's own stress tests, for a few seconds each: every orchestration that was launched completes.

use async_trait::async_trait;
use duroxide::{
    provider_stress_tests::{
        large_payload::{run_large_payload_test_with_config, LargePayloadConfig},
        parallel_orchestrations::{run_parallel_orchestrations_test_with_config, ProviderStressFactory},
        StressTestConfig, StressTestResult,
    },
    providers::Provider,
};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::LocalAccount;
use std::sync::Arc;

/// Makes providers on accounts of so many physical partitions.
struct Factory(u32);

#[async_trait]
impl ProviderStressFactory for Factory {
    async fn create_provider(&self) -> Arc<dyn Provider> {
        crate::fixture::log::capture();
        let account = LocalAccount::builder().with_partitions(self.0).build();
        let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
        Arc::new(CosmosDBProvider::new_with_client(&account.client().await, config).await.expect("a provider"))
    }
}

fn config(max_concurrent: usize, tasks_per_instance: usize) -> StressTestConfig {
    StressTestConfig {
        max_concurrent,
        duration_secs: 3,
        tasks_per_instance,
        activity_delay_ms: 5,
        orch_concurrency: 2,
        worker_concurrency: 4,
        wait_timeout_secs: 60,
    }
}

fn all_completed(result: &StressTestResult) {
    println!(
        "{} launched, {} completed in {:?}: {:.1} orchestrations and {:.1} activities a second",
        result.launched, result.completed, result.total_time, result.orch_throughput, result.activity_throughput
    );
    assert!(result.launched > 0, "nothing was launched: {result:?}");
    assert_eq!((result.completed, result.failed), (result.launched, 0), "{result:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_orchestrations_all_complete_on_one_partition() {
    let result = run_parallel_orchestrations_test_with_config(&Factory(1), config(20, 5)).await.unwrap();
    all_completed(&result);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parallel_orchestrations_all_complete_on_several_partitions() {
    let result = run_parallel_orchestrations_test_with_config(&Factory(8), config(20, 5)).await.unwrap();
    all_completed(&result);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wide_orchestrations_all_complete() {
    let result = run_parallel_orchestrations_test_with_config(&Factory(4), config(4, 40)).await.unwrap();
    all_completed(&result);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orchestrations_with_large_payloads_all_complete() {
    let config = LargePayloadConfig {
        base: config(3, 1),
        activity_count: 9,
        sub_orch_count: 2,
        ..LargePayloadConfig::default()
    };
    let result = run_large_payload_test_with_config(&Factory(4), config).await.unwrap();
    all_completed(&result);
}
