//! Turns of an instance that this process knows and that has a history of some length.

use std::time::{Duration, Instant};

use anyhow::{bail, Result};

use crate::measure::{name, Outcome};
use crate::run::{warm_up, SETTLE};
use crate::scene::Scene;

const INSTANCE: &str = "ledger";

/// How often the custom status is asked for, which tells that a turn has been committed.
const ASK: Duration = Duration::from_millis(10);

/// Builds the history in one turn, then takes one turn for each message.
pub async fn run(scene: &mut Scene, outcome: &mut Outcome, events: u64, turns: u64, cap: Duration) -> Result<()> {
    scene.start().await;
    let client = scene.client();
    warm_up(&client, "warm").await?;
    client.start_orchestration(INSTANCE, "Ledger", events.to_string()).await?;
    let mut version = changed(scene, 0, cap).await?;
    // The first turn with a message is not measured: it may still read what the large one left.
    client.enqueue_event(INSTANCE, "turns", "go").await?;
    version = changed(scene, version, cap).await?;
    tokio::time::sleep(SETTLE).await;

    let before = scene.reading();
    let mut latencies = Vec::new();
    for _ in 0..turns {
        let sent = Instant::now();
        client.enqueue_event(INSTANCE, "turns", "go").await?;
        version = changed(scene, version, cap).await?;
        latencies.push(sent.elapsed());
    }
    let (spent, by) = (scene.reading() - before, turns as f64);
    let total = spent.stats.total();
    outcome.lower(name::REQUESTS, total.requests as f64 / by);
    outcome.lower(name::UNITS, spent.units / by);
    outcome.lower(name::KILOBYTES, (total.request_bytes + total.response_bytes) as f64 / by / 1024.0);
    outcome.latencies(latencies);
    outcome.kinds(&spent, by);
    Ok(())
}

/// Waits until the custom status is newer than `version`, and says how new.
async fn changed(scene: &Scene, version: u64, cap: Duration) -> Result<u64> {
    let (store, begun) = (scene.store(), Instant::now());
    loop {
        if let Some((_, newer)) = store.get_custom_status(INSTANCE, version).await? {
            return Ok(newer);
        }
        if begun.elapsed() > cap {
            bail!("a turn does not end within {} s", cap.as_secs());
        }
        tokio::time::sleep(ASK).await;
    }
}
