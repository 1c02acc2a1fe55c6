//! `queues`: waiting work, and messages that were not delivered.

use crate::{
    account::Account,
    confirm::confirm,
    output::{short, Output},
    times::ago,
    Outcome, Result,
};
use anyhow::ensure;
use clap::Args;
use duroxide_cosmos::operate::{Intent, IntentState, QueueReport};
use serde_json::json;

#[derive(Args)]
pub struct Queues {
    /// Delivers an undelivered message again: INSTANCE and INTENT as shown, or "all". Modifies data
    #[arg(long, num_args = 1..=2, value_names = ["INSTANCE", "INTENT"], conflicts_with = "drop")]
    retry: Option<Vec<String>>,
    /// Removes an undelivered message: its target never receives it. Modifies data
    #[arg(long, num_args = 2, value_names = ["INSTANCE", "INTENT"])]
    drop: Option<Vec<String>>,
    /// Does not ask
    #[arg(long)]
    yes: bool,
}

impl Queues {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        match (&self.retry, &self.drop) {
            (Some(arguments), _) => retry(account, arguments, output).await,
            (None, Some(arguments)) => drop_intent(account, arguments, self.yes, output).await,
            (None, None) => report(account, output).await,
        }
    }
}

async fn retry(account: &Account, arguments: &[String], output: Output) -> Result {
    let intents: Vec<(String, String)> = match arguments {
        [all] if all == "all" => {
            let late = account.provider.late_intents().await?;
            late.into_iter().map(|intent| (intent.instance, intent.id)).collect()
        }
        [instance, intent] => vec![(instance.clone(), intent.clone())],
        _ => anyhow::bail!("--retry takes an instance and an intent, or \"all\""),
    };
    let is_one = intents.len() == 1;
    let mut failures = Vec::new();
    for (instance, intent) in intents {
        let retried = match account.provider.retry_intent(&instance, &intent).await {
            Ok(retried) => retried,
            Err(error) => {
                failures.push(format!("{intent} of {instance}: {error}"));
                continue;
            }
        };
        if retried {
            output.object("retried", &json!({ "intent": intent, "instance": instance }));
            output.line(format!("{intent} of {instance} will be delivered again"));
        } else if is_one {
            return Ok(Outcome::NotFound(format!("the message {intent} of {instance:?} no longer exists")));
        }
        // If there are several messages, a worker may have delivered one of them in the meantime.
    }
    ensure!(failures.is_empty(), "not retried: {}", failures.join("; "));
    Ok(Outcome::Done)
}

async fn drop_intent(account: &Account, arguments: &[String], yes: bool, output: Output) -> Result {
    let [instance, intent] = arguments else { anyhow::bail!("--drop takes an instance and an intent") };
    let late = account.provider.late_intents().await?;
    let found = late.iter().find(|other| other.instance == *instance && other.id == *intent);
    let Some(found) = found else {
        return Ok(Outcome::NotFound(format!("{intent} of {instance:?} is not among the undelivered messages")));
    };
    let question = format!("Remove {} for {}? Its target never receives it.", found.message, found.target);
    if !confirm(yes, &question, "deliver it again with --retry")? {
        return Ok(Outcome::Declined);
    }
    ensure!(account.provider.drop_intent(instance, intent).await?, "the message was delivered in the meantime");
    output.object("dropped", &json!({ "intent": intent, "instance": instance }));
    output.line(format!("removed {intent} of {instance}"));
    Ok(Outcome::Done)
}

async fn report(account: &Account, output: Output) -> Result {
    let report = account.provider.queues().await?;
    let late = account.provider.late_intents().await?;
    print_objects(&report, &late, output);
    print_queues(&report, output);
    if !late.is_empty() {
        output.line("\nundelivered messages:");
        output.table(&["OF", "INTENT", "MESSAGE", "FOR", "SENT", "STATE"], late.iter().map(intent_row));
        output.line("\n--retry INSTANCE INTENT delivers one again, --drop INSTANCE INTENT removes it");
    }
    Ok(Outcome::Done)
}

fn print_objects(report: &QueueReport, late: &[Intent], output: Output) {
    let mut turns = json!(report.turns);
    (turns["queue"], turns["capped"]) = ("turns".into(), report.capped.into());
    output.object("queue", &turns);
    for queue in &report.activities {
        let mut object = json!(queue);
        (object["queue"], object["capped"]) = ("activities".into(), report.capped.into());
        output.object("queue", &object);
    }
    late.iter().for_each(|intent| output.object("intent", intent));
}

fn print_queues(report: &QueueReport, output: Output) {
    let age = |since: Option<u64>| since.map(ago).unwrap_or_default();
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let turns = &report.turns;
    let mut rows = vec![vec![
        "turns".to_owned(),
        String::new(),
        String::new(),
        turns.waiting.to_string(),
        String::new(),
        age(turns.oldest),
        text(&turns.oldest_instance),
    ]];
    rows.extend(report.activities.iter().map(|queue| {
        vec![
            "activities".to_owned(),
            text(&queue.tag),
            text(&queue.session),
            queue.waiting.to_string(),
            queue.running.to_string(),
            age(queue.oldest),
            text(&queue.oldest_instance),
        ]
    }));
    output.table(&["QUEUE", "TAG", "SESSION", "WAITING", "RUNNING", "OLDEST", "OF"], rows);
    let (later, deferred) = (turns.later, turns.deferred);
    output.line(format!(
        "\n{later} timers and messages are due later, {deferred} messages are for instances without a start"
    ));
    if report.capped {
        output.line("there is more: the figures describe the oldest thousand of each queue");
    }
}

fn intent_row(intent: &Intent) -> Vec<String> {
    let state = match &intent.state {
        IntentState::Poisoned { reason } => format!("can't be delivered: {}", short(reason, 120)),
        _ => format!("late, {} attempts", intent.attempts),
    };
    let (message, target) = (intent.message.clone(), intent.target.clone());
    vec![intent.instance.clone(), intent.id.clone(), message, target, ago(intent.created_at), state]
}
