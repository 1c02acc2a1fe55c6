//! duroxide's own stress test of providers, with the parameters by which others publish their figures.

use std::sync::Arc;

use anyhow::Result;
use duroxide::provider_stress_tests::parallel_orchestrations::{
    run_parallel_orchestrations_test_with_config, ProviderStressFactory,
};
use duroxide::provider_stress_tests::{StressTestConfig, StressTestResult};
use duroxide::providers::Provider;

use crate::scene::{Scene, Setting, Which};

/// A provider that is there already, as the test wants it.
struct Ready(Arc<dyn Provider>);

#[async_trait::async_trait]
impl ProviderStressFactory for Ready {
    async fn create_provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.0)
    }
}

/// Runs the test with one dispatcher of each kind and with two, with SQLite and with these providers, and prints what comes of it.
pub async fn compare(providers: &[Which], latency_ms: u64) -> Result<()> {
    println!(
        "20 orchestrations at a time for 10 s, each with 5 activities of 10 ms at once; {latency_ms} ms a request.\n"
    );
    println!("| Provider | Dispatchers | Completed | Failed | Orchestrations/s | Activities/s | ms each |");
    println!("|---|---|---|---|---|---|---|");
    for dispatchers in [1, 2] {
        sqlite(dispatchers).await?;
        for which in providers {
            let scene = Scene::open(*which, Setting { latency_ms, partitions: 4 }).await?;
            report(which.package(), dispatchers, scene.store()).await?;
            scene.close().await;
        }
    }
    Ok(())
}

#[cfg(feature = "sqlite")]
async fn sqlite(dispatchers: usize) -> Result<()> {
    use duroxide::providers::sqlite::SqliteProvider;
    let directory = tempfile::tempdir()?;
    let file = format!("sqlite:{}?mode=rwc", directory.path().join("stress.db").display());
    for (name, url) in [("SQLite, in memory", "sqlite::memory:?cache=shared"), ("SQLite, a file", file.as_str())] {
        let provider = Arc::new(SqliteProvider::new(url, None).await?);
        report(name, dispatchers, provider).await?;
    }
    Ok(())
}

#[cfg(not(feature = "sqlite"))]
async fn sqlite(_dispatchers: usize) -> Result<()> {
    tracing::error!("without SQLite: it takes `cargo run --release -p bench --features sqlite -- --stress`");
    Ok(())
}

async fn report(name: &str, dispatchers: usize, provider: Arc<dyn Provider>) -> Result<()> {
    let config =
        StressTestConfig { orch_concurrency: dispatchers, worker_concurrency: dispatchers, ..Default::default() };
    let tested = run_parallel_orchestrations_test_with_config(&Ready(provider), config).await;
    let StressTestResult { completed, failed, orch_throughput, activity_throughput, avg_latency_ms, .. } =
        tested.map_err(|error| anyhow::anyhow!("{error}"))?;
    println!(
        "| {name} | {dispatchers}:{dispatchers} | {completed} | {failed} | {orch_throughput:.1} | {activity_throughput:.1} | \
         {avg_latency_ms:.1} |"
    );
    Ok(())
}
