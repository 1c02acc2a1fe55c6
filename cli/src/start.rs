//! `start`: starts an orchestration.

use crate::{account::Account, output::Output, times::parse_length, wait::wait, Outcome, Result};
use anyhow::ensure;
use clap::Args;
use duroxide::OrchestrationStatus;
use serde_json::json;
use std::time::Duration;

#[derive(Args)]
pub struct Start {
    /// The name of the orchestration
    orchestration: String,
    /// The input, sent as it is. Workers with typed functions expect JSON
    #[arg(default_value = "", allow_hyphen_values = true)]
    input: String,
    /// The id of the instance; otherwise a new one is made from the name
    #[arg(long, value_name = "ID")]
    instance: Option<String>,
    /// The version of the orchestration; otherwise the version policy decides
    #[arg(long)]
    version: Option<String>,
    /// Waits for the end and prints the output
    #[arg(long)]
    wait: bool,
    /// The time limit for --wait
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = parse_length, requires = "wait")]
    timeout: Duration,
}

impl Start {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let new_id =
            || format!("{}-{}", self.orchestration.to_lowercase(), &uuid::Uuid::new_v4().simple().to_string()[..8]);
        let id = self.instance.clone().unwrap_or_else(new_id);
        // Of several starts with one id, the first wins and the others are ignored silently.
        // A start becomes an instance, never the reverse. So the read of the start comes first.
        let is_queued = account.provider.queued_start(&id).await?.is_some();
        ensure!(!is_queued, "a start of {id:?} waits for a worker: choose another id with --instance");
        let status = account.client.get_orchestration_status(&id).await?;
        ensure!(status == OrchestrationStatus::NotFound, "{id:?} exists already: choose another id with --instance");
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
            false => Ok(Outcome::Done),
        }
    }
}
