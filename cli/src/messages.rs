//! `raise`, `enqueue` and `cancel`: messages to an instance.

use crate::{account::Account, instances::not_found, output::Output, Outcome, Result};
use clap::Args;
use duroxide::OrchestrationStatus;
use serde_json::json;

/// The outcome for an instance that does not run; `None` for one that runs.
async fn not_running(account: &Account, id: &str) -> anyhow::Result<Option<Outcome>> {
    Ok(match account.client.get_orchestration_status(id).await? {
        OrchestrationStatus::Running { .. } => None,
        OrchestrationStatus::NotFound => Some(not_found(id)),
        _ => Some(Outcome::NotFound(format!("{id:?} has already ended"))),
    })
}

#[derive(Args)]
pub struct Raise {
    /// The instance
    id: String,
    /// The name of the event
    event: String,
    /// The data of the event
    #[arg(default_value = "", allow_hyphen_values = true)]
    data: String,
}

impl Raise {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        if let Some(outcome) = not_running(account, &self.id).await? {
            return Ok(outcome);
        }
        account.client.raise_event(&self.id, &self.event, self.data).await?;
        output.object("raised", &json!({ "event": self.event, "id": self.id }));
        output.line(format!("raised {} for {}", self.event, self.id));
        Ok(Outcome::Done)
    }
}

#[derive(Args)]
pub struct Enqueue {
    /// The instance
    id: String,
    /// The name of the queue
    queue: String,
    /// The message
    #[arg(default_value = "", allow_hyphen_values = true)]
    data: String,
}

impl Enqueue {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        if let Some(outcome) = not_running(account, &self.id).await? {
            return Ok(outcome);
        }
        account.client.enqueue_event(&self.id, &self.queue, self.data).await?;
        output.object("enqueued", &json!({ "queue": self.queue, "id": self.id }));
        output.line(format!("enqueued into {} of {}", self.queue, self.id));
        Ok(Outcome::Done)
    }
}

#[derive(Args)]
pub struct Cancel {
    /// The instance
    id: String,
    /// The reason
    #[arg(long, default_value = "cancelled by an operator")]
    reason: String,
}

impl Cancel {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        // The worker that takes a waiting start finds the cancellation beside it.
        let is_queued = account.provider.queued_start(&self.id).await?.is_some();
        if let Some(outcome) = not_running(account, &self.id).await?.filter(|_| !is_queued) {
            return Ok(outcome);
        }
        account.client.cancel_instance(&self.id, self.reason).await?;
        output.object("cancelled", &json!({ "id": self.id }));
        output.line(format!("asked {} to stop; `wait` shows when it has ended", self.id));
        Ok(Outcome::Done)
    }
}
