//! duroxide's validation suite on your own account, in a container that this run creates and removes:
//!
//! ```sh
//! export COSMOS_ENDPOINT=… COSMOS_KEY=…      # or COSMOS_CONNECTION_STRING
//! cargo test --test account -- --run         # or: --run NAME, for the functions whose name contains NAME
//! ```
//!
//! It needs an account key, since an identity of Entra ID cannot create a container. Without `--run` it only
//! reports that it is skipped.

#[path = "validation/suite/mod.rs"]
mod suite;

use async_trait::async_trait;
use azure_data_cosmos::{clients::ContainerClient, CosmosClient, FeedScope, PartitionKey, Query, TransactionalBatch};
use duroxide::{provider_validation::ProviderFactory, providers::Provider};
use duroxide_cosmos::{client, CosmosDBProvider, CosmosDBProviderConfig, Throughput};
use futures::{future::BoxFuture, TryStreamExt};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use suite::hooks;

/// The time limit of one function. Most functions wait for locks to expire.
const LIMIT: Duration = Duration::from_secs(180);

/// One function of the suite.
struct Case {
    name: &'static str,
    run: for<'a> fn(&'a Backend) -> BoxFuture<'a, ()>,
}

/// All functions, in the order of the list.
macro_rules! cases {
    ($cases:expr; $($module:ident of $path:path [$($name:ident),* $(,)?])*) => {
        $({
            use $path as suite;
            $($cases.push(Case {
                name: concat!(stringify!($module), "::", stringify!($name)),
                run: |backend| Box::pin(async move { suite::$name(backend).await }),
            });)*
        })*
    };
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for_each_validation!(cases, cases);
    cases
}

/// Makes providers on the run's container, and empties the container before each of them.
struct Backend {
    config: CosmosDBProviderConfig,
    last: Mutex<Option<Arc<CosmosDBProvider>>>,
}

impl Backend {
    async fn container(&self) -> ContainerClient {
        let client = client(&self.config).await.expect("a client");
        let database = client.database_client(self.config.database().to_owned());
        database.container_client(self.config.container().to_owned(), None).await.expect("the container")
    }
}

#[async_trait]
impl ProviderFactory for Backend {
    async fn create_provider(&self) -> Arc<dyn Provider> {
        let before = self.last.lock().unwrap().take();
        if let Some(before) = before {
            before.shutdown().await;
        }
        empty(&self.container().await).await;
        let provider = Arc::new(CosmosDBProvider::new_with_config(self.config.clone()).await.expect("a provider"));
        *self.last.lock().unwrap() = Some(provider.clone());
        hooks::warm_up(&*provider).await;
        provider
    }

    /// Requests to Azure take longer than those in memory.
    fn lock_timeout(&self) -> Duration {
        Duration::from_secs(3)
    }

    async fn corrupt_instance_history(&self, instance: &str) {
        hooks::corrupt_history(&self.container().await, instance).await;
    }

    async fn get_max_attempt_count(&self, instance: &str) -> u32 {
        hooks::max_attempts(&self.container().await, instance).await
    }
}

/// Deletes every document, partition by partition.
async fn empty(container: &ContainerClient) {
    let everything = Query::from("SELECT c.id, c.instanceId FROM c");
    let rows = container.query_items::<Value>(everything, FeedScope::full_container(), None).await.expect("a query");
    let rows: Vec<Value> = rows.try_collect().await.expect("the documents");
    let mut partitions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in rows {
        let text = |name: &str| row[name].as_str().expect("a string").to_owned();
        partitions.entry(text("instanceId")).or_default().push(text("id"));
    }
    for (partition, ids) in partitions {
        for ids in ids.chunks(100) {
            let batch = TransactionalBatch::new(PartitionKey::from(partition.clone()));
            let batch = ids.iter().fold(batch, |batch, id| batch.delete_item(id.clone(), None));
            let answer = container.execute_transactional_batch(batch, None).await.expect("a deletion");
            assert!(answer.status().is_success(), "{:?}", answer.status());
        }
    }
}

/// Runs a function in a runtime of its own, which ends the tasks that the function leaves. Returns whether it passed.
fn passes(case: &Case, config: &CosmosDBProviderConfig) -> bool {
    let backend = Backend { config: config.clone(), last: Mutex::new(None) };
    let run = case.run;
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        runtime.block_on(async { tokio::time::timeout(LIMIT, run(&backend)).await.expect("an end within the limit") });
        runtime.shutdown_timeout(Duration::from_secs(2));
    });
    thread.join().is_ok()
}

/// Runs the selected functions and prints a line for each. Returns the names of those that failed.
fn run_all(cases: &[Case], config: &CosmosDBProviderConfig) -> Vec<&'static str> {
    let mut failed = Vec::new();
    for (number, case) in cases.iter().enumerate() {
        let begun = Instant::now();
        let passed = passes(case, config);
        let word = if passed { "ok" } else { "FAILED" };
        println!("{:3}/{} {} … {word}, {:.1} s", number + 1, cases.len(), case.name, begun.elapsed().as_secs_f64());
        if !passed {
            failed.push(case.name);
        }
    }
    failed
}

/// The configuration of the environment, with a container of this run's own.
fn configuration() -> Result<CosmosDBProviderConfig, String> {
    let config = CosmosDBProviderConfig::from_env().map_err(|error| error.to_string())?;
    if !config.credential().is_some_and(duroxide_cosmos::Credential::is_key) {
        return Err("this run makes a container, which takes an account key: set COSMOS_KEY".to_owned());
    }
    let unique = uuid::Uuid::new_v4().simple().to_string();
    Ok(config.with_container(format!("validation-{}", &unique[..12])).with_create_if_missing(true))
}

fn say_what_it_costs(config: &CosmosDBProviderConfig, cases: usize) {
    let throughput = match config.throughput() {
        Throughput::ServerlessOrShared => "no throughput of its own (serverless, or shared by the database)".to_owned(),
        Throughput::Manual(ru) => format!("{ru} RU/s"),
        Throughput::Autoscale(ru) => format!("up to {ru} RU/s"),
        _ => "the throughput that is set".to_owned(),
    };
    println!(
        "{cases} functions of duroxide's validation suite, one after the other, on {}.",
        config.endpoint().unwrap_or("?")
    );
    println!(
        "Container {} in database {}, made and removed by this run, with {throughput}.",
        config.container(),
        config.database()
    );
    println!("All of them: about 10,000 requests, 50,000 RU and 5 minutes. Serverless: a cent or two.\n");
}

async fn remove(client: &CosmosClient, config: &CosmosDBProviderConfig) -> Result<(), String> {
    let database = client.database_client(config.database().to_owned());
    let container = database.container_client(config.container().to_owned(), None).await;
    let removed = match container {
        Ok(container) => container.delete(None).await.map(drop),
        Err(error) => Err(error),
    };
    let name = config.container();
    removed.map_err(|error| format!("the container {name} could not be removed: {error}. Remove it yourself"))
}

async fn run(only: Option<&str>) -> Result<ExitCode, String> {
    let config = configuration()?;
    let mut cases = cases();
    cases.retain(|case| only.is_none_or(|part| case.name.contains(part)));
    say_what_it_costs(&config, cases.len());
    let client = client(&config).await.map_err(|error| error.to_string())?;
    // This creates the container.
    CosmosDBProvider::new_with_client(&client, config.clone()).await.map_err(|error| error.to_string())?;
    let (begun, settings, count) = (Instant::now(), config.clone(), cases.len());
    let running = tokio::task::spawn_blocking(move || run_all(&cases, &settings));
    let ended = tokio::select! {
        failed = running => Some(failed.map_err(|error| error.to_string())?),
        _ = tokio::signal::ctrl_c() => None,
    };
    remove(&client, &config).await?;
    println!("The container {} is removed.", config.container());
    let Some(failed) = ended else { return Err("interrupted".to_owned()) };
    println!("{} of {count} passed in {} s.", count - failed.len(), begun.elapsed().as_secs());
    failed.iter().for_each(|name| println!("FAILED: {name}"));
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(position) = arguments.iter().position(|argument| argument == "--run") else {
        println!(
            "test the_validation_suite_on_an_account_of_yours ... ignored, see tests/account.rs or CONTRIBUTING.md"
        );
        return ExitCode::SUCCESS;
    };
    let only = arguments.get(position + 1).map(String::as_str);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let code = runtime.block_on(run(only)).unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    });
    // An interrupted function does not keep the process alive.
    runtime.shutdown_background();
    code
}
