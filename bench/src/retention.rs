//! What retention adds to an orchestration, and how fast what has ended goes.

use std::time::{Duration, Instant};

use anyhow::{ensure, Result};
use duroxide::OrchestrationStatus;
use duroxide_cosmos::{CosmosDBProviderConfig, Retention};

use crate::scene::{Scene, Setting, Which};

/// Greetings, one after the other.
const GREETINGS: u64 = 100;
/// How many have ended before retention begins.
const ENDED: u64 = 900;
/// How long the last of them may stay.
const PATIENCE: Duration = Duration::from_secs(120);
/// How many end in a second, for how long, and how often it is told how many are left.
const RATE: u64 = 200;
const WHILE: Duration = Duration::from_secs(162);
const TOLD_EVERY: Duration = Duration::from_secs(27);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Measures both, and prints what comes of it.
pub async fn run(latency_ms: u64) -> Result<()> {
    let setting = Setting { latency_ms, partitions: 4 };
    println!("{GREETINGS} greetings, one after the other; {latency_ms} ms a request, 4 partitions.\n");
    println!("| Retention | requests | RU | instances left |");
    println!("|---|---|---|---|");
    let settings = [
        ("off", Retention::default()),
        ("after a day", Retention::default().with_completed(DAY)),
        ("at once", Retention::default().with_completed(Duration::from_secs(1))),
    ];
    for (name, retention) in settings {
        greet(name, retention, setting).await?;
    }
    // The emulator looks at every document of a physical partition for each query there: the service does not.
    let setting = Setting { partitions: 32, ..setting };
    go(setting).await?;
    keep_up(setting).await
}

async fn open(retention: Retention, setting: Setting) -> Result<Scene> {
    let config = CosmosDBProviderConfig::default().with_retention(retention);
    Scene::open_with(Which::Ours, setting, config).await
}

/// What a greeting costs, its deletion included where it goes.
async fn greet(name: &str, retention: Retention, setting: Setting) -> Result<()> {
    let mut scene = open(retention, setting).await?;
    scene.start().await;
    let client = scene.client();
    let greet = |id: String| {
        let client = &client;
        async move {
            client.start_orchestration(&id, "Hello", "world").await?;
            let ended = client.wait_for_orchestration(&id, PATIENCE).await?;
            ensure!(matches!(ended, OrchestrationStatus::Completed { .. }), "{id}: {ended:?}");
            Ok(())
        }
    };
    greet("warm".to_owned()).await?;
    let before = scene.reading();
    for number in 0..GREETINGS {
        greet(format!("g{number}")).await?;
    }
    let mut spent = scene.reading() - before;
    let mut requests = spent.stats.total().requests as f64 / GREETINGS as f64;
    if retention.completed().is_some_and(|age| age < DAY) {
        // What goes by itself, and nothing that looks on.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let before = scene.reading();
        let gone = scene.apply_retention().await?;
        let more = scene.reading() - before;
        ensure!(gone > GREETINGS / 2, "only {gone} went");
        spent.units += more.units / gone as f64 * GREETINGS as f64;
        requests += more.stats.total().requests as f64 / gone as f64;
    }
    println!("| {name} | {requests:.1} | {:.0} | {} |", spent.units / GREETINGS as f64, scene.instances().await?);
    scene.close().await;
    Ok(())
}

/// A scene in which a greeting has ended.
async fn after_one(setting: Setting) -> Result<Scene> {
    let mut scene = open(Retention::default().with_completed(Duration::from_secs(1)), setting).await?;
    let client = scene.client();
    scene.start().await;
    client.start_orchestration("g", "Hello", "world").await?;
    client.wait_for_orchestration("g", PATIENCE).await?;
    Ok(scene)
}

/// What it takes until a page of what has ended is gone.
async fn go(setting: Setting) -> Result<()> {
    let mut scene = after_one(setting).await?;
    scene.stop().await;
    scene.copier("g").await?.make(1..ENDED).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (before, begun) = (scene.reading(), Instant::now());
    let gone = scene.apply_retention().await? as f64;
    let (spent, took) = (scene.reading() - before, begun.elapsed().as_secs_f64());
    ensure!(scene.instances().await? == 0, "some are left");
    println!(
        "\n{gone} greetings that have ended, {} partitions: gone in {took:.1} s; {:.1} requests and {:.0} RU each.",
        setting.partitions,
        spent.stats.total().requests as f64 / gone,
        spent.units / gone
    );
    scene.close().await;
    Ok(())
}

/// Whether as many go as end, while a runtime waits for work as it always does.
async fn keep_up(setting: Setting) -> Result<()> {
    const STEP: Duration = Duration::from_millis(50);
    let mut scene = after_one(setting).await?;
    scene.stop().await;
    let copier = scene.copier("g").await?;
    let mut made = RATE;
    copier.make(1..made).await?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The metrics count what has ended, a request for each: that is not what is measured here.
    scene.start_without_metrics().await;
    let (begun, mut told, first) = (Instant::now(), Instant::now(), made);
    let mut left = Vec::new();
    let mut steps = tokio::time::interval(STEP);
    while begun.elapsed() < WHILE {
        steps.tick().await;
        let due = first + (begun.elapsed().as_secs_f64() * RATE as f64) as u64;
        copier.make(made..due).await?;
        made = due;
        if told.elapsed() >= TOLD_EVERY {
            told = Instant::now();
            left.push(scene.instances().await?.to_string());
        }
    }
    println!(
        "\n{RATE} more a second for {} s, and a runtime that waits for work: left every {} s: {}.",
        WHILE.as_secs(),
        TOLD_EVERY.as_secs(),
        left.join(", ")
    );
    scene.close().await;
    Ok(())
}
