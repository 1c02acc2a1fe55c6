//! The same orchestrations on an account of yours, in a container that this run makes and removes. Requests and request
//! units are those that the provider counted from the service's answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};
use duroxide::runtime::{Runtime, RuntimeOptions};
use duroxide::Client;
use duroxide_cosmos::{client, CosmosDBProvider, CosmosDBProviderConfig, Credential};
use futures::{stream, StreamExt, TryStreamExt};

use crate::measure::{name, Outcome};
use crate::orchestrations;
use crate::run::{one, warm_up, IN_FLIGHT, SETTLE};
use crate::scene::{Which, DISPATCHERS};
use crate::workloads::{Plan, Workload};

/// A runtime on the account.
struct Site {
    provider: Arc<CosmosDBProvider>,
    runtime: Arc<Runtime>,
}

/// Requests and request units so far, or between two moments.
#[derive(Clone, Copy)]
struct Spent {
    requests: f64,
    units: f64,
}

/// Runs the workloads that need nothing but an account; removes the container whatever happens.
pub async fn run(workloads: &[Workload]) -> Result<Vec<Outcome>> {
    let config = configuration()?;
    let mut workloads: Vec<&Workload> = workloads.iter().filter(|workload| is_for_accounts(workload)).collect();
    // What finished orchestrations leave to be counted is no idleness.
    workloads.sort_by_key(|workload| !matches!(workload.plan, Plan::Idle { .. }));
    say_what_it_costs(&config, &workloads);
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
    removed.with_context(|| format!("the container {container} could not be removed: remove it yourself"))?;
    println!("The container {container} is removed.");
    measured
}

/// A container of this run's own.
fn configuration() -> Result<CosmosDBProviderConfig> {
    let config = CosmosDBProviderConfig::from_env()?;
    let by_key = config.credential().is_some_and(Credential::is_key);
    ensure!(by_key, "this run makes a container, which takes an account key: set COSMOS_KEY");
    let unique = std::time::UNIX_EPOCH.elapsed()?.as_millis();
    Ok(config.with_container(format!("bench-{unique}-{}", std::process::id())).with_create_if_missing(true))
}

/// Orchestrations and idleness are the same anywhere; the other plans look into the local account.
fn is_for_accounts(workload: &Workload) -> bool {
    matches!(workload.plan, Plan::Run { .. } | Plan::Idle { .. })
}

fn say_what_it_costs(config: &CosmosDBProviderConfig, workloads: &[&Workload]) {
    let names: Vec<&str> = workloads.iter().map(|workload| workload.slug).collect();
    println!("On {}: {}.", config.endpoint().unwrap_or("?"), names.join(", "));
    println!("Container {} in database {}, made and removed by this run.", config.container(), config.database());
    println!(
        "All of them: about 6,000 requests, 60,000 RU and 3 minutes, with --quick a fifth. Serverless: some 2 cents.\n"
    );
}

async fn measure_all(config: &CosmosDBProviderConfig, workloads: &[&Workload]) -> Result<Vec<Outcome>> {
    let site = Site::open(config).await?;
    let mut outcomes = Vec::new();
    for workload in workloads {
        let outcome = site.measure(workload).await;
        let failed = |error| Outcome::none(workload.name, Which::Ours, format!("failed: {error:#}"));
        outcomes.push(outcome.unwrap_or_else(failed));
        println!("{} …", workload.name);
    }
    site.close().await;
    Ok(outcomes)
}

impl Site {
    async fn open(config: &CosmosDBProviderConfig) -> Result<Self> {
        let provider = Arc::new(CosmosDBProvider::new_with_config(config.clone()).await?);
        let options = RuntimeOptions {
            orchestration_concurrency: DISPATCHERS,
            worker_concurrency: DISPATCHERS,
            ..RuntimeOptions::default()
        };
        let (activities, orchestrations) = orchestrations::registries(&Arc::default());
        let runtime = Runtime::start_with_options(provider.clone(), activities, orchestrations, options).await;
        let site = Self { provider, runtime };
        warm_up(&site.client(), "warm").await?;
        Ok(site)
    }

    fn client(&self) -> Client {
        Client::new(self.provider.clone())
    }

    fn spent(&self) -> Spent {
        let statistics = self.provider.request_statistics();
        Spent { requests: statistics.requests() as f64, units: statistics.charge() }
    }

    async fn measure(&self, workload: &Workload) -> Result<Outcome> {
        let mut outcome = Outcome::new(workload.name, Which::Ours);
        match &workload.plan {
            Plan::Run { orchestration, input, rounds, busy } => {
                self.in_turn(&mut outcome, workload, (orchestration, input), *rounds).await?;
                if *busy > 0 {
                    self.at_once(&mut outcome, workload, (orchestration, input), *busy).await?;
                }
            }
            Plan::Idle { settle, watch } => self.idle(&mut outcome, *settle, *watch).await,
            _ => bail!("{} needs the local account", workload.name),
        }
        Ok(outcome)
    }

    /// One orchestration after the other.
    async fn in_turn(
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
            ensure!(one(&client, &id, orchestration, input, LIMIT).await?, "{id} does not end");
            latencies.push(begun.elapsed());
        }
        tokio::time::sleep(SETTLE).await;
        let each = self.spent().since(before) / rounds as f64;
        outcome.lower(name::WAITED_REQUESTS, each.requests);
        outcome.lower(name::WAITED_UNITS, each.units);
        outcome.latencies(latencies);
        Ok(())
    }

    /// Several under way.
    async fn at_once(
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
                one(client, &format!("{}-busy-{number}", workload.slug), orchestration, input, LIMIT).await
            })
            .buffer_unordered(IN_FLIGHT)
            .try_collect()
            .await?;
        ensure!(ended.iter().all(|ended| *ended), "an orchestration does not end");
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

impl Spent {
    fn since(self, earlier: Self) -> Self {
        Self { requests: self.requests - earlier.requests, units: self.units - earlier.units }
    }
}

impl std::ops::Div<f64> for Spent {
    type Output = Self;

    fn div(self, by: f64) -> Self {
        Self { requests: self.requests / by, units: self.units / by }
    }
}
