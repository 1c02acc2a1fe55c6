//! `wait`: waits for the end of an instance.

use crate::{account::Account, instances::not_found, output::Output, times::parse_length, Outcome, Result};
use clap::Args;
use duroxide::{ClientError, OrchestrationStatus};
use serde_json::json;
use std::time::{Duration, Instant};

#[derive(Args)]
pub struct Wait {
    /// The instance
    id: String,
    /// Gives up after this time, such as 90s, 15m or 2h
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = parse_length)]
    timeout: Duration,
}

impl Wait {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        wait(account, &self.id, self.timeout, output).await
    }
}

/// Waits for the end of an instance and prints its output.
pub async fn wait(account: &Account, id: &str, timeout: Duration, output: Output) -> Result {
    let begun = Instant::now();
    let waited = loop {
        match account.client.wait_for_orchestration(id, timeout.saturating_sub(begun.elapsed())).await {
            // The error is temporary.
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
            Ok(Outcome::Done)
        }
        Ok(OrchestrationStatus::Failed { details, .. }) => {
            let error = details.display_message();
            output.object("end", &json!({ "id": id, "status": "Failed", "error": error }));
            Ok(Outcome::Failed(format!("{id:?} failed: {error}")))
        }
        Ok(other) => Ok(Outcome::TimedOut(format!("{id:?} is {other:?}"))),
        Err(ClientError::Timeout) => match account.client.get_orchestration_status(id).await? {
            OrchestrationStatus::NotFound => Ok(not_found(id)),
            _ => Ok(Outcome::TimedOut(format!("{id:?} still runs after {timeout:?}"))),
        },
        Err(error) => Err(error.into()),
    }
}
