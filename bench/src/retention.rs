//! The cost of retention per orchestration, and the rate at which it deletes instances that have ended.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use duroxide::OrchestrationStatus;
use duroxide_cosmos::{CosmosDBProviderConfig, Retention};

use crate::fixture::{Fixture, ProviderKind, Setting};

/// The number of Hellos that run one after the other.
const HELLOS: u64 = 100;
/// The number of instances that have ended before retention begins.
const ENDED: u64 = 900;
/// How long an orchestration may take.
const LIMIT: Duration = Duration::from_secs(120);
/// The rate of completions per second, the duration, and the interval between counts of the remaining instances.
const RATE: u64 = 200;
const DURATION: Duration = Duration::from_secs(162);
const COUNT_INTERVAL: Duration = Duration::from_secs(27);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Measures both and prints the results.
pub async fn run(latency_ms: u64) -> Result<()> {
    let setting = Setting { latency_ms, partitions: 4 };
    println!(
        "{HELLOS} Hellos, one after the other; {latency_ms} ms per request, 4 partitions. \
         RU: estimate from published prices, not measured on Azure.\n"
    );
    println!("| Retention | requests | RU | instances left |");
    println!("|---|---|---|---|");
    let settings = [
        ("off", Retention::default()),
        ("after a day", Retention::default().with_completed(DAY)),
        ("at once", Retention::default().with_completed(Duration::from_secs(1))),
    ];
    for (name, retention) in settings {
        cost_per_hello(name, retention, setting).await?;
    }
    // For each query, the emulator reads every document of a physical partition. The service does not.
    let setting = Setting { partitions: 32, ..setting };
    delete_ended(setting).await?;
    keep_up(setting).await
}

async fn open(retention: Retention, setting: Setting) -> Result<Fixture> {
    let config = CosmosDBProviderConfig::default().with_retention(retention);
    Fixture::open_with(ProviderKind::Cosmos, setting, config).await
}

/// Measures the cost of a Hello, including its deletion if retention deletes it.
async fn cost_per_hello(name: &str, retention: Retention, setting: Setting) -> Result<()> {
    let mut fixture = open(retention, setting).await?;
    fixture.start().await;
    let client = fixture.client();
    let run_hello = |id: String| {
        let client = &client;
        async move {
            client.start_orchestration(&id, "Hello", "world").await?;
            let ended = client.wait_for_orchestration(&id, LIMIT).await?;
            ensure!(matches!(ended, OrchestrationStatus::Completed { .. }), "{id}: {ended:?}");
            Ok(())
        }
    };
    run_hello("warm".to_owned()).await?;
    let before = fixture.reading();
    for number in 0..HELLOS {
        run_hello(format!("g{number}")).await?;
    }
    let mut spent = fixture.reading() - before;
    let mut requests = spent.stats.total().requests as f64 / HELLOS as f64;
    if retention.completed().is_some_and(|age| age < DAY) {
        // The deletions are measured alone, without other requests.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let before = fixture.reading();
        let deleted = fixture.apply_retention().await?;
        let more = fixture.reading() - before;
        ensure!(deleted > HELLOS / 2, "retention deleted only {deleted} instances");
        spent.units += more.units / deleted as f64 * HELLOS as f64;
        requests += more.stats.total().requests as f64 / deleted as f64;
    }
    println!("| {name} | {requests:.1} | {:.0} | {} |", spent.units / HELLOS as f64, fixture.instances().await?);
    fixture.close().await;
    Ok(())
}

/// Creates a fixture in which one Hello has ended.
async fn fixture_with_ended_hello(setting: Setting) -> Result<Fixture> {
    let mut fixture = open(Retention::default().with_completed(Duration::from_secs(1)), setting).await?;
    let client = fixture.client();
    fixture.start().await;
    client.start_orchestration("g", "Hello", "world").await?;
    client.wait_for_orchestration("g", LIMIT).await?;
    Ok(fixture)
}

/// Measures the deletion of many instances that have ended.
async fn delete_ended(setting: Setting) -> Result<()> {
    let mut fixture = fixture_with_ended_hello(setting).await?;
    fixture.stop().await;
    fixture.copier("g").await?.make(1..ENDED).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (before, begun) = (fixture.reading(), Instant::now());
    let deleted = fixture.apply_retention().await? as f64;
    let (spent, took) = (fixture.reading() - before, begun.elapsed().as_secs_f64());
    ensure!(fixture.instances().await? == 0, "retention left some instances");
    println!(
        "\n{deleted} ended Hellos on {} partitions: deleted in {took:.1} s, with {:.1} requests and {:.0} RU each.",
        setting.partitions,
        spent.stats.total().requests as f64 / deleted,
        spent.units / deleted
    );
    fixture.close().await;
    Ok(())
}

/// Measures whether retention keeps up with completions, while a runtime waits for work as usual.
async fn keep_up(setting: Setting) -> Result<()> {
    const STEP: Duration = Duration::from_millis(50);
    let mut fixture = fixture_with_ended_hello(setting).await?;
    fixture.stop().await;
    let copier = fixture.copier("g").await?;
    let mut made = RATE;
    copier.make(1..made).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The metrics count ended instances, with one request each. This measurement leaves them out.
    fixture.start_without_metrics().await;
    let (begun, mut counted, first) = (Instant::now(), Instant::now(), made);
    let mut left = Vec::new();
    let mut steps = tokio::time::interval(STEP);
    while begun.elapsed() < DURATION {
        steps.tick().await;
        let due = first + (begun.elapsed().as_secs_f64() * RATE as f64) as u64;
        copier.make(made..due).await?;
        made = due;
        if counted.elapsed() >= COUNT_INTERVAL {
            counted = Instant::now();
            left.push(fixture.instances().await?.to_string());
        }
    }
    println!(
        "\n{RATE} completions per second for {} s beside a runtime that waits for work; instances left, every {} s: {}.",
        DURATION.as_secs(),
        COUNT_INTERVAL.as_secs(),
        left.join(", ")
    );
    fixture.close().await;
    Ok(())
}
