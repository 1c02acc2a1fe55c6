//! Sets fault rules on the wire, one group after the other, and splits partitions.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use serde_json::{json, Value};

use crate::rng::SeededRng;
use crate::soak::served_account::ServedAccount;
use crate::soak::state::SoakState;
use crate::soak::worker;

/// The number of partitions at which splitting ends.
const MAX_PARTITIONS: usize = 32;

/// A rule for the control endpoint.
struct FaultRule {
    name: String,
    rule: Value,
}

/// Sets fault rules and removes them again until the phase of faults ends.
pub async fn inject(
    state: Arc<SoakState>,
    account: Arc<ServedAccount>,
    workers: usize,
    mut rng: SeededRng,
) -> Result<()> {
    let control = account.control();
    while state.has_faults() {
        let rules: Vec<FaultRule> = (0..rng.among(1..=4)).map(|_| draw(&mut rng, workers)).collect();
        for fault in &rules {
            state.transcript.record("wire", None, fault.rule.to_string());
            control.add_fault(&fault.rule).await?;
        }
        state.sleep_while_faulty(Duration::from_millis(rng.among(1_000..=12_000))).await;
        let hits = control.clear_faults().await?;
        state.transcript.record("wire", None, format!("rules removed after {hits:?} requests"));
        state.summary.update(|summary| {
            for (fault, hits) in rules.iter().zip(hits) {
                *summary.faults.entry(fault.name.clone()).or_default() += hits;
            }
        });
        state.sleep_while_faulty(Duration::from_millis(rng.mostly_small(0..=6_000))).await;
    }
    Ok(())
}

/// Splits a partition every 8 to 40 seconds.
pub async fn split(state: Arc<SoakState>, account: Arc<ServedAccount>, mut rng: SeededRng) -> Result<()> {
    while state.has_faults() {
        state.sleep_while_faulty(Duration::from_millis(rng.among(8_000..=40_000))).await;
        let partitions = account.partitions();
        if !state.has_faults() || partitions.is_empty() || partitions.len() >= MAX_PARTITIONS {
            continue;
        }
        let partition = *rng.pick(&partitions);
        account.split(partition).await?;
        state.transcript.record("wire", None, format!("partition {partition} is split"));
        state.summary.update(|summary| summary.splits += 1);
    }
    Ok(())
}

fn draw(rng: &mut SeededRng, workers: usize) -> FaultRule {
    let (name, action, kind) = action(rng);
    // A few rules hit nearly every request. Most hit a few requests.
    let one_in = if rng.one_in(6) { rng.among(1..=3) } else { rng.among(5..=60) };
    let mut rule = json!({ "one_in": one_in, "action": action });
    if let Some(kind) = kind {
        rule["kind"] = json!(kind);
    }
    if rng.one_in(3) {
        let number = usize::try_from(rng.among(0..=workers as u64 - 1)).unwrap_or(0);
        rule["client"] = json!(worker::name(number));
    }
    FaultRule { name, rule }
}

/// Draws the name of a fault, its action, and the only kind of request that it hits, if it is limited to one.
fn action(rng: &mut SeededRng) -> (String, Value, Option<&'static str>) {
    let delay = |rng: &mut SeededRng| rng.mostly_small(20..=5_000);
    match rng.among(0..=13) {
        0 | 1 => {
            let action =
                json!({ "type": "refuse", "status": 429, "substatus": 3200, "retry_after_ms": rng.among(1..=300) });
            ("refused with 429".to_owned(), action, None)
        }
        2 => refused(503, None, None),
        3 => refused(408, None, None),
        4 => refused(449, None, Some(*rng.pick(&["batch", "replace", "create", "upsert"]))),
        5 => refused(410, Some(*rng.pick(&[1002, 1007, 1008])), None),
        6 | 7 => ("answer lost".to_owned(), json!({ "type": "lose_answer" }), None),
        8 | 9 => ("batch's answer lost".to_owned(), json!({ "type": "lose_answer" }), Some("batch")),
        10 => ("connection failed".to_owned(), json!({ "type": "fail_connection" }), None),
        11 => ("delayed".to_owned(), json!({ "type": "delay", "ms": delay(rng) }), None),
        12 => ("answer delayed".to_owned(), json!({ "type": "delay_answer", "ms": delay(rng) }), None),
        _ => {
            let (index, status) = (rng.among(0..=3), *rng.pick(&[429, 449]));
            let action = json!({ "type": "refuse_batch_operation", "index": index, "status": status });
            ("batch operation refused".to_owned(), action, Some("batch"))
        }
    }
}

fn refused(status: u16, substatus: Option<u32>, kind: Option<&'static str>) -> (String, Value, Option<&'static str>) {
    (format!("refused with {status}"), json!({ "type": "refuse", "status": status, "substatus": substatus }), kind)
}
