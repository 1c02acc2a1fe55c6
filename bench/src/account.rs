//! The same orchestrations on a real account, in a container that this run creates and removes. The provider counts
//! requests and request units from the answers of the service.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use duroxide::runtime::{Runtime, RuntimeOptions};
use duroxide::Client;
use duroxide_cosmos::{client, CosmosDBProvider, CosmosDBProviderConfig, Credential};
use futures::{stream, StreamExt, TryStreamExt};

use crate::fixture::{ProviderKind, DISPATCHERS};
use crate::measure::{name, Outcome};
use crate::orchestrations;
use crate::run::{run_one, warm_up, IN_FLIGHT, SETTLE};
use crate::workloads::{Plan, Workload};

/// A provider and a runtime on the account.
struct AccountFixture {
    provider: Arc<CosmosDBProvider>,
    runtime: Arc<Runtime>,
}

/// Requests and request units since the start, or between two moments.
#[derive(Clone, Copy)]
struct RequestCost {
    requests: f64,
    units: f64,
}

/// Runs the workloads that work on any account. It removes the container even after a failure.
pub async fn run(workloads: &[Workload]) -> Result<Vec<Outcome>> {
    let config = configuration()?;
    let mut workloads: Vec<&Workload> = workloads.iter().filter(|workload| is_for_accounts(workload)).collect();
    // The idle workload runs first: orchestrations that have ended still cause requests that count them.
    workloads.sort_by_key(|workload| !matches!(workload.plan, Plan::Idle { .. }));
    print_expected_cost(&config, &workloads);
    let client = client(&config).await?;
    let measured = tokio::select! {
        measured = measure_all(&config, &workloads) => measured,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    let container = config.container().to_owned();
    let database = client.database_client(config.database().to_owned());
    let removed = match database.container_client(container.clone(), None).await {
        Ok(found) => found.delete(None).await.map(drop),
        Err(error) => Err(error),
    };
    removed.with_context(|| format!("can't remove the container {container}: remove it by hand"))?;
    println!("Removed the container {container}.");
    measured
}

/// Reads the configuration and sets a container name that only this run uses.
fn configuration() -> Result<CosmosDBProviderConfig> {
    let config = CosmosDBProviderConfig::from_env()?;
    let by_key = config.credential().is_some_and(Credential::is_key);
    ensure!(by_key, "this run creates a container, which needs an account key: set COSMOS_KEY");
    let unique = std::time::UNIX_EPOCH.elapsed()?.as_millis();
    Ok(config.with_container(format!("bench-{unique}-{}", std::process::id())).with_create_if_missing(true))
}

/// Whether a workload works on any account. The other workloads read the local account directly.
fn is_for_accounts(workload: &Workload) -> bool {
    matches!(workload.plan, Plan::Run { .. } | Plan::Idle { .. })
}

fn print_expected_cost(config: &CosmosDBProviderConfig, workloads: &[&Workload]) {
    let names: Vec<&str> = workloads.iter().map(|workload| workload.slug).collect();
    println!("On {}: {}.", config.endpoint().unwrap_or("?"), names.join(", "));
    println!("Container {} in database {}, created and removed by this run.", config.container(), config.database());
    println!(
        "All workloads: about 6,000 requests, 60,000 RU and 3 minutes; with --quick about a fifth. Serverless: about 2 \
         cents. (Estimate from published prices, not measured on Azure.)\n"
    );
}

async fn measure_all(config: &CosmosDBProviderConfig, workloads: &[&Workload]) -> Result<Vec<Outcome>> {
    let fixture = AccountFixture::open(config).await?;
    let mut outcomes = Vec::new();
    for workload in workloads {
        let outcome = fixture.measure(workload).await;
        let failed = |error| Outcome::none(workload.name, ProviderKind::Cosmos, format!("failed: {error:#}"));
        outcomes.push(outcome.unwrap_or_else(failed));
        println!("{} …", workload.name);
    }
    fixture.close().await;
    Ok(outcomes)
}

impl AccountFixture {
    async fn open(config: &CosmosDBProviderConfig) -> Result<Self> {
        let provider = Arc::new(CosmosDBProvider::new_with_config(config.clone()).await?);
        let options = RuntimeOptions {
            orchestration_concurrency: DISPATCHERS,
            worker_concurrency: DISPATCHERS,
            ..RuntimeOptions::default()
        };
        let (activities, orchestrations) = orchestrations::registries(&Arc::default());
        let runtime = Runtime::start_with_options(provider.clone(), activities, orchestrations, options).await;
        let fixture = Self { provider, runtime };
        warm_up(&fixture.client(), "warm").await?;
        Ok(fixture)
    }

    fn client(&self) -> Client {
        Client::new(self.provider.clone())
    }

    fn spent(&self) -> RequestCost {
        let statistics = self.provider.request_statistics();
        RequestCost { requests: statistics.requests() as f64, units: statistics.charge() }
    }

    async fn measure(&self, workload: &Workload) -> Result<Outcome> {
        let mut outcome = Outcome::new(workload.name, ProviderKind::Cosmos);
        match &workload.plan {
            Plan::Run { orchestration, input, rounds, busy } => {
                self.run_sequentially(&mut outcome, workload, (orchestration, input), *rounds).await?;
                if *busy > 0 {
                    self.run_concurrently(&mut outcome, workload, (orchestration, input), *busy).await?;
                }
            }
            Plan::Idle { settle, watch } => self.idle(&mut outcome, *settle, *watch).await,
            _ => bail!("{} needs the local account", workload.name),
        }
        Ok(outcome)
    }

    /// Runs one orchestration after the other.
    async fn run_sequentially(
        &self,
        outcome: &mut Outcome,
        workload: &Workload,
        (orchestration, input): (&str, &str),
        rounds: u64,
    ) -> Result<()> {
        let (client, before, mut latencies) = (self.client(), self.spent(), Vec::new());
        for round in 0..rounds {
            let begun = Instant::now();
            let id = format!("{}-{round}", workload.slug);
            ensure!(run_one(&client, &id, orchestration, input, LIMIT).await?, "{id} did not end");
            latencies.push(begun.elapsed());
        }
        tokio::time::sleep(SETTLE).await;
        let each = self.spent().since(before) / rounds as f64;
        outcome.lower(name::CLIENT_REQUESTS, each.requests);
        outcome.lower(name::CLIENT_UNITS, each.units);
        outcome.latencies(latencies);
        Ok(())
    }

    /// Runs several orchestrations concurrently.
    async fn run_concurrently(
        &self,
        outcome: &mut Outcome,
        workload: &Workload,
        (orchestration, input): (&str, &str),
        total: u64,
    ) -> Result<()> {
        let (client, before, begun) = (self.client(), self.spent(), Instant::now());
        let client = &client;
        let ended: Vec<bool> = stream::iter(0..total)
            .map(|number| async move {
                run_one(client, &format!("{}-busy-{number}", workload.slug), orchestration, input, LIMIT).await
            })
            .buffer_unordered(IN_FLIGHT)
            .try_collect()
            .await?;
        ensure!(ended.iter().all(|ended| *ended), "an orchestration did not end");
        outcome.higher(name::RATE, total as f64 / begun.elapsed().as_secs_f64());
        tokio::time::sleep(SETTLE).await;
        let each = self.spent().since(before) / total as f64;
        outcome.lower(name::BUSY_REQUESTS, each.requests);
        outcome.lower(name::BUSY_UNITS, each.units);
        Ok(())
    }

    async fn idle(&self, outcome: &mut Outcome, settle: Duration, watch: Duration) {
        tokio::time::sleep(settle).await;
        let before = self.spent();
        tokio::time::sleep(watch).await;
        let each = self.spent().since(before) / watch.as_secs_f64();
        outcome.lower(name::REQUESTS_A_SECOND, each.requests);
        outcome.lower(name::UNITS_A_SECOND, each.units);
    }

    async fn close(self) {
        self.runtime.shutdown(Some(500)).await;
        self.provider.shutdown().await;
    }
}

/// How long one orchestration may take.
const LIMIT: Duration = Duration::from_secs(60);

impl RequestCost {
    fn since(self, earlier: Self) -> Self {
        Self { requests: self.requests - earlier.requests, units: self.units - earlier.units }
    }
}

impl std::ops::Div<f64> for RequestCost {
    type Output = Self;

    fn div(self, by: f64) -> Self {
        Self { requests: self.requests / by, units: self.units / by }
    }
}
