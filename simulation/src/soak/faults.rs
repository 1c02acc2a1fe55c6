//! What the wire is told to do to requests, one front after the other.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use serde_json::{json, Value};

use crate::dice::Dice;
use crate::soak::site::Site;
use crate::soak::stage::Stage;
use crate::soak::worker;

/// More partitions than this are not split any further.
const MOST_PARTITIONS: usize = 32;

/// A rule for the control endpoint.
struct Fault {
    name: String,
    rule: Value,
}

/// Sets faults and takes them away again, until nothing bad may happen any more.
pub async fn blow(stage: Arc<Stage>, site: Arc<Site>, workers: usize, mut dice: Dice) -> Result<()> {
    let control = site.control();
    while stage.is_rough() {
        let front: Vec<Fault> = (0..dice.among(1..=4)).map(|_| draw(&mut dice, workers)).collect();
        for fault in &front {
            stage.story.tell("wire", None, fault.rule.to_string());
            control.add_fault(&fault.rule).await?;
        }
        stage.rough_for(Duration::from_millis(dice.among(1_000..=12_000))).await;
        let hits = control.clear_faults().await?;
        stage.story.tell("wire", None, format!("clear, after {hits:?}"));
        stage.tally.count(|figures| {
            for (fault, hits) in front.iter().zip(hits) {
                *figures.faults.entry(fault.name.clone()).or_default() += hits;
            }
        });
        stage.rough_for(Duration::from_millis(dice.mostly_small(0..=6_000))).await;
    }
    Ok(())
}

/// Splits a partition now and then.
pub async fn split(stage: Arc<Stage>, site: Arc<Site>, mut dice: Dice) -> Result<()> {
    while stage.is_rough() {
        stage.rough_for(Duration::from_millis(dice.among(8_000..=40_000))).await;
        let partitions = site.partitions();
        if !stage.is_rough() || partitions.is_empty() || partitions.len() >= MOST_PARTITIONS {
            continue;
        }
        let partition = *dice.pick(&partitions);
        site.split(partition).await?;
        stage.story.tell("wire", None, format!("partition {partition} is split"));
        stage.tally.count(|figures| figures.splits += 1);
    }
    Ok(())
}

fn draw(dice: &mut Dice, workers: usize) -> Fault {
    let (name, action, kind) = action(dice);
    // Seldom nearly everything, mostly a little.
    let one_in = if dice.one_in(6) { dice.among(1..=3) } else { dice.among(5..=60) };
    let mut rule = json!({ "one_in": one_in, "action": action });
    if let Some(kind) = kind {
        rule["kind"] = json!(kind);
    }
    if dice.one_in(3) {
        let place = usize::try_from(dice.among(0..=workers as u64 - 1)).unwrap_or(0);
        rule["client"] = json!(worker::name(place));
    }
    Fault { name, rule }
}

/// What happens, and to which kind of request only.
fn action(dice: &mut Dice) -> (String, Value, Option<&'static str>) {
    let delay = |dice: &mut Dice| dice.mostly_small(20..=5_000);
    match dice.among(0..=13) {
        0 | 1 => {
            let action =
                json!({ "type": "refuse", "status": 429, "substatus": 3200, "retry_after_ms": dice.among(1..=300) });
            ("refused with 429".to_owned(), action, None)
        }
        2 => refused(503, None, None),
        3 => refused(408, None, None),
        4 => refused(449, None, Some(*dice.pick(&["batch", "replace", "create", "upsert"]))),
        5 => refused(410, Some(*dice.pick(&[1002, 1007, 1008])), None),
        6 | 7 => ("answer lost".to_owned(), json!({ "type": "lose_answer" }), None),
        8 | 9 => ("batch's answer lost".to_owned(), json!({ "type": "lose_answer" }), Some("batch")),
        10 => ("connection failed".to_owned(), json!({ "type": "fail_connection" }), None),
        11 => ("delayed".to_owned(), json!({ "type": "delay", "ms": delay(dice) }), None),
        12 => ("answer delayed".to_owned(), json!({ "type": "delay_answer", "ms": delay(dice) }), None),
        _ => {
            let (index, status) = (dice.among(0..=3), *dice.pick(&[429, 449]));
            let action = json!({ "type": "refuse_batch_operation", "index": index, "status": status });
            ("batch operation refused".to_owned(), action, Some("batch"))
        }
    }
}

fn refused(status: u16, substatus: Option<u32>, kind: Option<&'static str>) -> (String, Value, Option<&'static str>) {
    (format!("refused with {status}"), json!({ "type": "refuse", "status": status, "substatus": substatus }), kind)
}
