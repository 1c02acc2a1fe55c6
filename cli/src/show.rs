//! One instance: as it is, and as it goes on.

use crate::{
    account::Account,
    look::{not_found, when},
    output::{nobody_reads, short, Output},
    times::{length, moment, parse_length},
    End, Result,
};
use clap::Args;
use duroxide::{providers::ExecutionInfo, OrchestrationStatus};
use duroxide_cosmos::operate::InstanceSummary;
use duroxide_cosmos_dashboard::{
    instance::told_by,
    timeline::{self, Entry},
};
use serde_json::json;
use std::time::{Duration, Instant};

#[derive(Args)]
pub struct Show {
    /// The instance
    id: String,
    /// Which execution's history; otherwise the last one's
    #[arg(long)]
    execution: Option<u64>,
    /// Shows inputs and outputs, too
    #[arg(long)]
    payloads: bool,
    /// How much of the history is shown, from its end
    #[arg(long, default_value_t = 200)]
    last: usize,
}

impl Show {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let Some(instance) = account.provider.instance(&self.id).await? else { return Ok(not_found(&self.id)) };
        let executions = account.client.list_executions(&self.id).await?;
        let execution = self.execution.unwrap_or(instance.execution);
        if !executions.contains(&execution) {
            let there = executions.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Ok(End::NotFound(format!("{:?} has no execution {execution}: it has {there}", self.id)));
        }
        let status = account.client.get_orchestration_status(&self.id).await?;
        let (result, custom) = told_by(&status);
        let values = account.client.get_kv_all_values(&self.id).await?;
        let mut object = json!(instance);
        object["customStatus"] = json!(custom);
        object["result"] = json!(result);
        object["values"] = json!(values);
        output.object("instance", &object);
        output.line(format!("{}  {} {}, {}", instance.id, instance.name, instance.version, instance.status));
        output.line(format!("created {}, last turn {}", when(instance.created_at), when(instance.updated_at)));
        if let Some(parent) = &instance.parent {
            output.line(format!("child of {parent}"));
        }
        if let Some(custom) = &custom {
            output.line(format!("status: {}", short(custom, 400)));
        }
        if let Some(result) = &result {
            output.line(format!("result: {}", if self.payloads { result.clone() } else { short(result, 400) }));
        }
        let mut keys: Vec<(&String, &String)> = values.iter().collect();
        keys.sort();
        for (key, value) in keys {
            output.line(format!("value {}: {}", short(key, 100), short(value, 300)));
        }
        if executions.len() > 1 {
            self.executions(account, &executions, output).await?;
        }
        let events = account.client.read_execution_history(&self.id, execution).await?;
        let entries = timeline::entries(&events);
        output.line(format!("\nexecution {execution}, {} events:", events.len()));
        let hidden = entries.len().saturating_sub(self.last);
        output.object("history", &json!({ "execution": execution, "events": events.len(), "hidden": hidden }));
        if hidden > 0 {
            output.line(format!("… {hidden} before these: --last {} shows them", entries.len()));
        }
        self.timeline(&entries[hidden..], output);
        Ok(End::Done)
    }

    async fn executions(&self, account: &Account, executions: &[u64], output: Output) -> anyhow::Result<()> {
        const MOST: usize = 20;
        let mut rows: Vec<ExecutionInfo> = Vec::new();
        for execution in executions.iter().rev().take(MOST) {
            rows.push(account.client.get_execution_info(&self.id, *execution).await?);
        }
        let row = |info: &ExecutionInfo| {
            let took = info.completed_at.map(|end| length(end.saturating_sub(info.started_at)));
            let (number, events) = (info.execution_id.to_string(), info.event_count.to_string());
            vec![number, info.status.clone(), moment(info.started_at), took.unwrap_or_default(), events]
        };
        output.line(format!("\n{} executions, the last {}:", executions.len(), rows.len()));
        output.table(&["EXECUTION", "STATUS", "STARTED", "TOOK", "EVENTS"], rows.iter().map(row));
        for info in &rows {
            output.object(
                "execution",
                &json!({
                    "execution": info.execution_id, "status": info.status, "startedAt": info.started_at,
                    "completedAt": info.completed_at, "events": info.event_count,
                }),
            );
        }
        Ok(())
    }

    fn timeline(&self, entries: &[Entry], output: Output) {
        for entry in entries {
            let mut object = json!(entry);
            if let Some(fields) = object.as_object_mut().filter(|_| !self.payloads) {
                fields.remove("input");
                fields.remove("output");
            }
            output.object("entry", &object);
        }
        output.table(&["#", "AT", "TOOK", "", "WHAT", "NAME"], entries.iter().map(row));
        if self.payloads {
            for entry in entries.iter().filter(|entry| entry.input.is_some() || entry.output.is_some()) {
                let tell = |text: &Option<String>| text.as_deref().unwrap_or("-").to_owned();
                output.line(format!("#{} in:  {}", entry.event, tell(&entry.input)));
                output.line(format!("#{} out: {}", entry.event, tell(&entry.output)));
            }
        }
    }
}

fn row(entry: &Entry) -> Vec<String> {
    let took = entry.ended.map(|end| length(end.saturating_sub(entry.at)));
    let attempt = if entry.attempt > 1 { format!(", attempt {}", entry.attempt) } else { String::new() };
    let name = match (entry.state, &entry.output, entry.due) {
        ("failed", Some(why), _) => format!("{}{attempt}: {}", short(&entry.name, 80), short(why, 120)),
        (_, _, Some(due)) => moment(due),
        _ => format!("{}{attempt}", short(&entry.name, 80)),
    };
    let (event, at) = (entry.event.to_string(), moment(entry.at));
    vec![event, at, took.unwrap_or_default(), entry.state.to_owned(), entry.what.to_owned(), name]
}

#[derive(Args)]
pub struct Watch {
    /// The instance
    id: String,
    /// For how long at most, as 90s, 15m, 2h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_length)]
    timeout: Duration,
    /// How often it is looked at, in milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(100..))]
    every: u64,
}

impl Watch {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let begun = Instant::now();
        let (mut told, mut said) = (Told::default(), None);
        loop {
            // First how it is, then what happened until then: of what has ended, the end is told.
            let status = match account.client.get_orchestration_status(&self.id).await {
                // An outage passes.
                Err(error) if error.is_retryable() && begun.elapsed() < self.timeout => {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    continue;
                }
                status => status?,
            };
            let Some(instance) = account.provider.instance(&self.id).await? else { return Ok(not_found(&self.id)) };
            let is_over = matches!(status, OrchestrationStatus::Completed { .. } | OrchestrationStatus::Failed { .. });
            if is_over || told.at != (instance.execution, instance.updated_at) {
                told.catch_up(account, &instance, output).await?;
            }
            let (result, custom) = told_by(&status);
            if custom != said {
                output.object("status", &json!({ "customStatus": custom }));
                output.line(format!("status: {}", short(custom.as_deref().unwrap_or("none"), 400)));
                said = custom;
            }
            let result = result.unwrap_or_default();
            match status {
                OrchestrationStatus::Completed { .. } => {
                    output.object("end", &json!({ "status": "Completed", "output": result }));
                    output.line(format!("completed: {}", short(&result, 400)));
                    return Ok(End::Done);
                }
                OrchestrationStatus::Failed { .. } => {
                    output.object("end", &json!({ "status": "Failed", "error": result }));
                    return Ok(End::Failed(format!("failed: {}", short(&result, 400))));
                }
                _ => {}
            }
            if nobody_reads() {
                return Ok(End::Done);
            }
            if begun.elapsed() > self.timeout {
                return Ok(End::TimeUp(format!("{:?} still runs", self.id)));
            }
            tokio::time::sleep(Duration::from_millis(self.every)).await;
        }
    }
}

/// What of an instance was told already.
#[derive(Default)]
struct Told {
    /// The execution and the last turn's time of the last look.
    at: (u64, u64),
    /// The execution whose events are being told, and how many of them were.
    execution: u64,
    events: usize,
}

impl Told {
    /// Tells what is new, of every execution since the last look.
    async fn catch_up(&mut self, account: &Account, instance: &InstanceSummary, output: Output) -> anyhow::Result<()> {
        self.at = (instance.execution, instance.updated_at);
        if self.execution == 0 {
            // Those before the first look are told by `show`.
            self.begin(instance.execution, output);
        }
        loop {
            let events = account.client.read_execution_history(&instance.id, self.execution).await?;
            for event in events.iter().skip(self.events) {
                output.object("event", &json!({ "event": event }));
                let kind = short(&format!("{:?}", event.kind), 160);
                output.line(format!("{}  {:>5}  {kind}", moment(event.timestamp_ms), event.event_id));
            }
            self.events = self.events.max(events.len());
            if self.execution >= instance.execution {
                return Ok(());
            }
            self.begin(self.execution + 1, output);
        }
    }

    fn begin(&mut self, execution: u64, output: Output) {
        (self.execution, self.events) = (execution, 0);
        output.object("execution", &json!({ "execution": execution }));
        output.line(format!("execution {execution}"));
    }
}
