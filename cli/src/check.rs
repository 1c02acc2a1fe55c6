//! `check`: tests whether the account can be used.

use crate::{output::Output, Outcome, Result};
use clap::Args;
use duroxide_cosmos::{
    operate::{self, CheckStatus},
    CosmosDBProviderConfig,
};

#[derive(Args)]
pub struct Check {
    /// Tries out every assumption about the service with documents that it removes again. Takes some seconds and about
    /// 2,100 RU (estimate from published prices, not measured on Azure). Modifies data
    #[arg(long)]
    deep: bool,
}

impl Check {
    /// Prints one line for each test.
    pub async fn run(&self, config: &CosmosDBProviderConfig, output: Output) -> Result {
        let checks = if self.deep { operate::check_deep(config).await } else { operate::check(config).await };
        for check in &checks {
            output.object("check", check);
            output.line(format!("{:<8} {:<16} {}", label(check.status), check.subject, check.detail));
        }
        let is_usable = checks
            .iter()
            .all(|check| matches!(check.status, CheckStatus::Ok | CheckStatus::Warning | CheckStatus::Unknown));
        Ok(if is_usable { Outcome::Done } else { Outcome::Problem })
    }
}

fn label(status: CheckStatus) -> &'static str {
    match status {
        CheckStatus::Ok => "ok",
        CheckStatus::Warning => "warning",
        CheckStatus::Unknown => "unknown",
        CheckStatus::Differs => "differs",
        _ => "failed",
    }
}
