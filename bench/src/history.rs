//! Turns of an instance that has a history of some length and is cached by this process.

use std::time::{Duration, Instant};

use anyhow::{bail, Result};

use crate::fixture::Fixture;
use crate::measure::{name, Outcome};
use crate::run::{warm_up, SETTLE};

const INSTANCE: &str = "history";

/// The interval between reads of the custom status, which changes when a turn is committed.
const STATUS_INTERVAL: Duration = Duration::from_millis(10);

/// Builds the history in one turn, then runs one turn for each message.
pub async fn run(fixture: &mut Fixture, outcome: &mut Outcome, events: u64, turns: u64, cap: Duration) -> Result<()> {
    fixture.start().await;
    let client = fixture.client();
    warm_up(&client, "warm").await?;
    client.start_orchestration(INSTANCE, "History", events.to_string()).await?;
    let mut version = wait_for_change(fixture, 0, cap).await?;
    // The first turn with a message is not measured: it may still read data that the large turn has written.
    client.enqueue_event(INSTANCE, "turns", "go").await?;
    version = wait_for_change(fixture, version, cap).await?;
    tokio::time::sleep(SETTLE).await;

    let before = fixture.reading();
    let mut latencies = Vec::new();
    for _ in 0..turns {
        let sent = Instant::now();
        client.enqueue_event(INSTANCE, "turns", "go").await?;
        version = wait_for_change(fixture, version, cap).await?;
        latencies.push(sent.elapsed());
    }
    let (spent, by) = (fixture.reading() - before, turns as f64);
    let total = spent.stats.total();
    outcome.lower(name::REQUESTS, total.requests as f64 / by);
    outcome.lower(name::UNITS, spent.units / by);
    outcome.lower(name::KILOBYTES, (total.request_bytes + total.response_bytes) as f64 / by / 1024.0);
    outcome.latencies(latencies);
    outcome.kinds(&spent, by);
    Ok(())
}

/// Waits until the custom status is newer than `version`, and returns its version.
async fn wait_for_change(fixture: &Fixture, version: u64, cap: Duration) -> Result<u64> {
    let (provider, begun) = (fixture.provider(), Instant::now());
    loop {
        if let Some((_, newer)) = provider.get_custom_status(INSTANCE, version).await? {
            return Ok(newer);
        }
        if begun.elapsed() > cap {
            bail!("a turn did not end within {} s", cap.as_secs());
        }
        tokio::time::sleep(STATUS_INTERVAL).await;
    }
}
