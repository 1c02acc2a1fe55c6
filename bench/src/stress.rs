//! duroxide's own stress test of providers, with the parameters of the published figures of other providers.

use std::sync::Arc;

use anyhow::Result;
use duroxide::provider_stress_tests::parallel_orchestrations::{
    run_parallel_orchestrations_test_with_config, ProviderStressFactory,
};
use duroxide::provider_stress_tests::{StressTestConfig, StressTestResult};
use duroxide::providers::Provider;

use crate::fixture::{Fixture, ProviderKind, Setting};

/// A factory for the test that returns an existing provider.
struct ExistingProvider(Arc<dyn Provider>);

#[async_trait::async_trait]
impl ProviderStressFactory for ExistingProvider {
    async fn create_provider(&self) -> Arc<dyn Provider> {
        Arc::clone(&self.0)
    }
}

/// Runs the test with one and with two dispatchers of each kind, on SQLite and on these providers. Prints the results.
pub async fn compare(providers: &[ProviderKind], latency_ms: u64) -> Result<()> {
    println!(
        "20 orchestrations at a time for 10 s, each with 5 concurrent activities of 10 ms; {latency_ms} ms per request.\n"
    );
    println!("| Provider | Dispatchers | Completed | Failed | Orchestrations/s | Activities/s | ms each |");
    println!("|---|---|---|---|---|---|---|");
    for dispatchers in [1, 2] {
        sqlite(dispatchers).await?;
        for kind in providers {
            let fixture = Fixture::open(*kind, Setting { latency_ms, partitions: 4 }).await?;
            report(kind.package(), dispatchers, fixture.provider()).await?;
            fixture.close().await;
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
    tracing::error!(
        "SQLite is left out; to include it, run `cargo run --release -p bench --features sqlite -- --stress`"
    );
    Ok(())
}

async fn report(name: &str, dispatchers: usize, provider: Arc<dyn Provider>) -> Result<()> {
    let config =
        StressTestConfig { orch_concurrency: dispatchers, worker_concurrency: dispatchers, ..Default::default() };
    let tested = run_parallel_orchestrations_test_with_config(&ExistingProvider(provider), config).await;
    let StressTestResult { completed, failed, orch_throughput, activity_throughput, avg_latency_ms, .. } =
        tested.map_err(|error| anyhow::anyhow!("{error}"))?;
    println!(
        "| {name} | {dispatchers}:{dispatchers} | {completed} | {failed} | {orch_throughput:.1} | {activity_throughput:.1} | \
         {avg_latency_ms:.1} |"
    );
    Ok(())
}
