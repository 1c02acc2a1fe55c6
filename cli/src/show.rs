//! `show`: one instance with its history as a timeline.

use crate::{
    account::Account,
    instances::{not_found, time_and_age},
    output::{short, Output},
    times::{length, moment},
    Outcome, Result,
};
use clap::Args;
use duroxide::providers::ExecutionInfo;
use duroxide_cosmos::operate::InstanceSummary;
use duroxide_cosmos_dashboard::{
    instance::result_and_custom_status,
    timeline::{self, Entry},
};
use serde_json::json;

/// Executions that `show` prints.
const MAX_EXECUTIONS: usize = 20;

#[derive(Args)]
pub struct Show {
    /// The instance
    id: String,
    /// The execution whose history is shown; otherwise the last one
    #[arg(long)]
    execution: Option<u64>,
    /// Shows inputs and outputs too
    #[arg(long)]
    payloads: bool,
    /// The number of timeline entries, counted from the end
    #[arg(long, default_value_t = 200)]
    last: usize,
}

impl Show {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let Some(instance) = account.provider.instance(&self.id).await? else { return Ok(not_found(&self.id)) };
        let executions = account.client.list_executions(&self.id).await?;
        let execution = self.execution.unwrap_or(instance.execution);
        if !executions.contains(&execution) {
            let existing = executions.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let message = format!("{:?} has no execution {execution}; it has {existing}", self.id);
            return Ok(Outcome::NotFound(message));
        }
        self.print_instance(account, &instance, output).await?;
        if executions.len() > 1 {
            self.print_executions(account, &executions, output).await?;
        }
        self.print_history(account, execution, output).await?;
        Ok(Outcome::Done)
    }

    async fn print_instance(
        &self,
        account: &Account,
        instance: &InstanceSummary,
        output: Output,
    ) -> anyhow::Result<()> {
        let status = account.client.get_orchestration_status(&self.id).await?;
        let (result, custom_status) = result_and_custom_status(&status);
        let values = account.client.get_kv_all_values(&self.id).await?;
        let mut object = json!(instance);
        object["customStatus"] = json!(custom_status);
        object["result"] = json!(result);
        object["values"] = json!(values);
        output.object("instance", &object);
        output.line(format!("{}  {} {}, {}", instance.id, instance.name, instance.version, instance.status));
        let (created, last_turn) = (time_and_age(instance.created_at), time_and_age(instance.updated_at));
        output.line(format!("created {created}, last turn {last_turn}"));
        if let Some(parent) = &instance.parent {
            output.line(format!("child of {parent}"));
        }
        if let Some(custom_status) = &custom_status {
            output.line(format!("status: {}", short(custom_status, 400)));
        }
        if let Some(result) = &result {
            output.line(format!("result: {}", if self.payloads { result.clone() } else { short(result, 400) }));
        }
        let mut keys: Vec<(&String, &String)> = values.iter().collect();
        keys.sort();
        for (key, value) in keys {
            output.line(format!("value {}: {}", short(key, 100), short(value, 300)));
        }
        Ok(())
    }

    async fn print_executions(&self, account: &Account, executions: &[u64], output: Output) -> anyhow::Result<()> {
        let mut rows: Vec<ExecutionInfo> = Vec::new();
        for execution in executions.iter().rev().take(MAX_EXECUTIONS) {
            rows.push(account.client.get_execution_info(&self.id, *execution).await?);
        }
        output.line(format!("\n{} executions, the last {}:", executions.len(), rows.len()));
        output.table(&["EXECUTION", "STATUS", "STARTED", "TOOK", "EVENTS"], rows.iter().map(execution_row));
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

    async fn print_history(&self, account: &Account, execution: u64, output: Output) -> anyhow::Result<()> {
        let events = account.client.read_execution_history(&self.id, execution).await?;
        let entries = timeline::entries(&events);
        output.line(format!("\nexecution {execution}, {} events:", events.len()));
        let hidden = entries.len().saturating_sub(self.last);
        output.object("history", &json!({ "execution": execution, "events": events.len(), "hidden": hidden }));
        if hidden > 0 {
            output.line(format!("… {hidden} earlier entries: --last {} shows them", entries.len()));
        }
        self.print_timeline(&entries[hidden..], output);
        Ok(())
    }

    fn print_timeline(&self, entries: &[Entry], output: Output) {
        for entry in entries {
            let mut object = json!(entry);
            if let Some(fields) = object.as_object_mut().filter(|_| !self.payloads) {
                fields.remove("input");
                fields.remove("output");
            }
            output.object("entry", &object);
        }
        output.table(&["#", "AT", "TOOK", "", "WHAT", "NAME"], entries.iter().map(entry_row));
        if self.payloads {
            for entry in entries.iter().filter(|entry| entry.input.is_some() || entry.output.is_some()) {
                let text = |text: &Option<String>| text.as_deref().unwrap_or("-").to_owned();
                output.line(format!("#{} in:  {}", entry.event, text(&entry.input)));
                output.line(format!("#{} out: {}", entry.event, text(&entry.output)));
            }
        }
    }
}

fn execution_row(info: &ExecutionInfo) -> Vec<String> {
    let took = info.completed_at.map(|end| length(end.saturating_sub(info.started_at)));
    let (number, events) = (info.execution_id.to_string(), info.event_count.to_string());
    vec![number, info.status.clone(), moment(info.started_at), took.unwrap_or_default(), events]
}

fn entry_row(entry: &Entry) -> Vec<String> {
    let took = entry.ended.map(|end| length(end.saturating_sub(entry.at)));
    let attempt = if entry.attempt > 1 { format!(", attempt {}", entry.attempt) } else { String::new() };
    let name = match (entry.state, &entry.output, entry.due) {
        ("failed", Some(error), _) => format!("{}{attempt}: {}", short(&entry.name, 80), short(error, 120)),
        (_, _, Some(due)) => moment(due),
        _ => format!("{}{attempt}", short(&entry.name, 80)),
    };
    let (event, at) = (entry.event.to_string(), moment(entry.at));
    vec![event, at, took.unwrap_or_default(), entry.state.to_owned(), entry.what.to_owned(), name]
}
