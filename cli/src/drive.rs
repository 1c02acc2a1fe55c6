//! What makes instances go: starts, events, messages, cancellations, and waiting for the end.

use crate::{account::Account, look::not_found, output::Output, times::parse_length, End, Result};
use anyhow::ensure;
use clap::Args;
use duroxide::{ClientError, OrchestrationStatus};
use serde_json::json;
use std::time::{Duration, Instant};

#[derive(Args)]
pub struct Start {
    /// The orchestration's name
    orchestration: String,
    /// Its input, as it is: workers that were written with typed functions want JSON
    #[arg(default_value = "", allow_hyphen_values = true)]
    input: String,
    /// The instance's id; otherwise a new one
    #[arg(long, value_name = "ID")]
    instance: Option<String>,
    /// The orchestration's version; otherwise the one that its policy says
    #[arg(long)]
    version: Option<String>,
    /// Waits for its end
    #[arg(long)]
    wait: bool,
    /// For how long
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = parse_length, requires = "wait")]
    timeout: Duration,
}

impl Start {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let fresh =
            || format!("{}-{}", self.orchestration.to_lowercase(), &uuid::Uuid::new_v4().simple().to_string()[..8]);
        let id = self.instance.clone().unwrap_or_else(fresh);
        // Of several starts with one id the first wins, and the others are ignored without a word.
        // A start becomes an instance, never the other way: in this order one of them is seen.
        let is_queued = account.provider.queued_start(&id).await?.is_some();
        ensure!(!is_queued, "a start of {id:?} waits for a worker: choose another id with --instance");
        let status = account.client.get_orchestration_status(&id).await?;
        ensure!(status == OrchestrationStatus::NotFound, "{id:?} is there already: choose another id with --instance");
        match self.version {
            Some(version) => {
                account.client.start_orchestration_versioned(&id, &self.orchestration, version, self.input).await?;
            }
            None => account.client.start_orchestration(&id, &self.orchestration, self.input).await?,
        }
        output.object("started", &json!({ "id": id, "name": self.orchestration }));
        output.line(format!("started {id}"));
        match self.wait {
            true => wait(account, &id, self.timeout, output).await,
            false => Ok(End::Done),
        }
    }
}

#[derive(Args)]
pub struct Wait {
    /// The instance
    id: String,
    /// For how long, as 90s, 15m, 2h
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = parse_length)]
    timeout: Duration,
}

impl Wait {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        wait(account, &self.id, self.timeout, output).await
    }
}

async fn wait(account: &Account, id: &str, timeout: Duration, output: Output) -> Result {
    let begun = Instant::now();
    let waited = loop {
        match account.client.wait_for_orchestration(id, timeout.saturating_sub(begun.elapsed())).await {
            // An outage passes.
            Err(error) if error.is_retryable() && begun.elapsed() < timeout => {
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
            waited => break waited,
        }
    };
    match waited {
        Ok(OrchestrationStatus::Completed { output: result, .. }) => {
            output.object("end", &json!({ "id": id, "status": "Completed", "output": result }));
            output.result(&result);
            Ok(End::Done)
        }
        Ok(OrchestrationStatus::Failed { details, .. }) => {
            let why = details.display_message();
            output.object("end", &json!({ "id": id, "status": "Failed", "error": why }));
            Ok(End::Failed(format!("{id:?} failed: {why}")))
        }
        Ok(other) => Ok(End::TimeUp(format!("{id:?} is {other:?}"))),
        Err(ClientError::Timeout) => match account.client.get_orchestration_status(id).await? {
            OrchestrationStatus::NotFound => Ok(not_found(id)),
            _ => Ok(End::TimeUp(format!("{id:?} still runs after {timeout:?}"))),
        },
        Err(error) => Err(error.into()),
    }
}

/// The end of a command for an instance that does not run; none where it does.
async fn not_running(account: &Account, id: &str) -> anyhow::Result<Option<End>> {
    Ok(match account.client.get_orchestration_status(id).await? {
        OrchestrationStatus::Running { .. } => None,
        OrchestrationStatus::NotFound => Some(not_found(id)),
        _ => Some(End::NotFound(format!("{id:?} has ended already"))),
    })
}

#[derive(Args)]
pub struct Raise {
    /// The instance
    id: String,
    /// The event's name
    event: String,
    /// What it says
    #[arg(default_value = "", allow_hyphen_values = true)]
    data: String,
}

impl Raise {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        if let Some(end) = not_running(account, &self.id).await? {
            return Ok(end);
        }
        account.client.raise_event(&self.id, &self.event, self.data).await?;
        output.object("raised", &json!({ "event": self.event, "id": self.id }));
        output.line(format!("raised {} for {}", self.event, self.id));
        Ok(End::Done)
    }
}

#[derive(Args)]
pub struct Enqueue {
    /// The instance
    id: String,
    /// The queue's name
    queue: String,
    /// The message
    #[arg(default_value = "", allow_hyphen_values = true)]
    data: String,
}

impl Enqueue {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        if let Some(end) = not_running(account, &self.id).await? {
            return Ok(end);
        }
        account.client.enqueue_event(&self.id, &self.queue, self.data).await?;
        output.object("enqueued", &json!({ "queue": self.queue, "id": self.id }));
        output.line(format!("put into {} of {}", self.queue, self.id));
        Ok(End::Done)
    }
}

#[derive(Args)]
pub struct Cancel {
    /// The instance
    id: String,
    /// Why
    #[arg(long, default_value = "cancelled by an operator")]
    reason: String,
}

impl Cancel {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        // The worker that takes the start finds the cancellation beside it.
        let is_queued = account.provider.queued_start(&self.id).await?.is_some();
        if let Some(end) = not_running(account, &self.id).await?.filter(|_| !is_queued) {
            return Ok(end);
        }
        account.client.cancel_instance(&self.id, self.reason).await?;
        output.object("cancelled", &json!({ "id": self.id }));
        output.line(format!("asked {} to stop; `wait` tells when it has", self.id));
        Ok(End::Done)
    }
}
