//! `watch`: follows an instance until it ends.

use crate::{
    account::Account,
    instances::not_found,
    output::{is_reader_gone, short, Output},
    times::{moment, parse_length},
    Outcome, Result,
};
use clap::Args;
use duroxide::OrchestrationStatus;
use duroxide_cosmos::operate::InstanceSummary;
use duroxide_cosmos_dashboard::instance::result_and_custom_status;
use serde_json::json;
use std::time::{Duration, Instant};

#[derive(Args)]
pub struct Watch {
    /// The instance
    id: String,
    /// Gives up after this time, such as 90s, 15m or 2h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_length)]
    timeout: Duration,
    /// The interval between reads, in milliseconds
    #[arg(
        long,
        value_name = "MILLISECONDS",
        default_value_t = 500,
        value_parser = clap::value_parser!(u64).range(100..)
    )]
    every: u64,
}

impl Watch {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let begun = Instant::now();
        let (mut printed, mut printed_status) = (Printed::default(), None);
        loop {
            // The status is read before the history. So the history of an ended instance contains its last event.
            let status = match account.client.get_orchestration_status(&self.id).await {
                // The error is temporary.
                Err(error) if error.is_retryable() && begun.elapsed() < self.timeout => {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    continue;
                }
                status => status?,
            };
            let Some(instance) = account.provider.instance(&self.id).await? else { return Ok(not_found(&self.id)) };
            let has_ended =
                matches!(status, OrchestrationStatus::Completed { .. } | OrchestrationStatus::Failed { .. });
            if has_ended || printed.last_turn != (instance.execution, instance.updated_at) {
                printed.print_new_events(account, &instance, output).await?;
            }
            let (result, custom_status) = result_and_custom_status(&status);
            if custom_status != printed_status {
                output.object("status", &json!({ "customStatus": custom_status }));
                output.line(format!("status: {}", short(custom_status.as_deref().unwrap_or("none"), 400)));
                printed_status = custom_status;
            }
            if let Some(outcome) = print_end(&status, &result.unwrap_or_default(), output) {
                return Ok(outcome);
            }
            if is_reader_gone() {
                return Ok(Outcome::Done);
            }
            if begun.elapsed() > self.timeout {
                return Ok(Outcome::TimedOut(format!("{:?} still runs", self.id)));
            }
            tokio::time::sleep(Duration::from_millis(self.every)).await;
        }
    }
}

/// Prints the end of an instance that has ended.
fn print_end(status: &OrchestrationStatus, result: &str, output: Output) -> Option<Outcome> {
    match status {
        OrchestrationStatus::Completed { .. } => {
            output.object("end", &json!({ "status": "Completed", "output": result }));
            output.line(format!("completed: {}", short(result, 400)));
            Some(Outcome::Done)
        }
        OrchestrationStatus::Failed { .. } => {
            output.object("end", &json!({ "status": "Failed", "error": result }));
            Some(Outcome::Failed(format!("failed: {}", short(result, 400))))
        }
        _ => None,
    }
}

/// The part of an instance that was printed already.
#[derive(Default)]
struct Printed {
    /// The execution and the time of the last turn at the last read.
    last_turn: (u64, u64),
    /// The execution whose events are being printed.
    execution: u64,
    /// The number of its events that were printed.
    events: usize,
}

impl Printed {
    /// Prints the new events of every execution since the last read.
    async fn print_new_events(
        &mut self,
        account: &Account,
        instance: &InstanceSummary,
        output: Output,
    ) -> anyhow::Result<()> {
        self.last_turn = (instance.execution, instance.updated_at);
        if self.execution == 0 {
            // `show` prints the executions before the first read.
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
