//! `purge`: deletes finished instances in bulk.

use crate::{
    account::Account,
    confirm::Confirmation,
    deletion::{delete_all, print_instances, DeletionReport, ShownTree},
    filter::StatusFilter,
    instances::{instance_tree, select_all},
    output::Output,
    times::{self, length, parse_length},
    Outcome, Result,
};
use clap::{builder::NonEmptyStringValueParser, Args, ValueEnum};
use duroxide_cosmos::operate::{InstanceQuery, InstanceSummary};
use std::time::Duration;

#[derive(Args)]
pub struct Purge {
    /// Only instances that ended at least this long ago, such as 12h or 30d
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    ended_before: Duration,
    /// Only instances with this status
    #[arg(long, value_enum, ignore_case = true)]
    status: Option<EndStatus>,
    /// Only instances of this orchestration
    #[arg(long, value_name = "ORCHESTRATION", value_parser = NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// At most this many instance trees, oldest first
    #[arg(long)]
    limit: Option<usize>,
    #[command(flatten)]
    confirmation: Confirmation,
}

/// The status of an instance that has ended.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum EndStatus {
    Completed,
    Failed,
}

impl Purge {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let roots = self.select_roots(account).await?;
        print_instances(&roots, self.confirmation.dry_run, output);
        if roots.is_empty() {
            output.line("no instance ended that long ago");
            return Ok(Outcome::Done);
        }
        let (count, age) = (roots.len(), length(u64::try_from(self.ended_before.as_millis()).unwrap_or(u64::MAX)));
        if self.confirmation.dry_run {
            output.line(format!("\ndry run: {count} instances that ended {age} ago or earlier would be deleted"));
            return Ok(Outcome::Done);
        }
        let question =
            format!("Delete {count} instances that ended {age} ago or earlier, with their descendants, permanently?");
        if !self.confirmation.confirm(&question)? {
            return Ok(Outcome::Declined);
        }
        let trees: Vec<ShownTree> = roots.into_iter().map(|root| ShownTree { root, ids: None }).collect();
        let mut report = delete_all(account, &trees, false).await;
        separate_running(account, &mut report).await;
        report.print(output)
    }

    /// The roots to delete, oldest first.
    async fn select_roots(&self, account: &Account) -> anyhow::Result<Vec<InstanceSummary>> {
        let before = times::before(self.ended_before);
        let statuses = match self.status {
            Some(EndStatus::Completed) => vec![StatusFilter::Completed],
            Some(EndStatus::Failed) => vec![StatusFilter::Failed],
            None => vec![StatusFilter::Completed, StatusFilter::Failed],
        };
        let mut roots = Vec::new();
        for status in statuses {
            let mut query = InstanceQuery::default();
            (query.status, query.name) = (Some(status.as_stored().to_owned()), self.name.clone());
            // An instance that ended before this time was created before it.
            query.created_before = Some(before);
            let is_old = |i: &InstanceSummary| i.parent.is_none() && i.completed_at.is_some_and(|end| end < before);
            roots.extend(select_all(account, &query, is_old).await?);
        }
        roots.sort_by_key(|instance| instance.completed_at);
        roots.truncate(self.limit.unwrap_or(usize::MAX));
        Ok(roots)
    }
}

/// Moves the trees with a running instance from the failures to `running`: a purge keeps them on purpose.
async fn separate_running(account: &Account, report: &mut DeletionReport) {
    for (root, error) in std::mem::take(&mut report.failures) {
        // If the tree cannot be read again, the failure stays.
        let instances = instance_tree(account, &root).await.unwrap_or_default();
        match instances.iter().any(|instance| !instance.has_ended()) {
            true => report.running.push(root),
            false => report.failures.push((root, error)),
        }
    }
}
