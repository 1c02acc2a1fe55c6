//! `prune`: deletes old executions of instances that continue as new.

use crate::{
    account::Account,
    confirm::Confirmation,
    deletion::{progress_bar, DeletionReport},
    filter::Filter,
    instances::{not_found, select_all},
    output::Output,
    times::{self, parse_length},
    Outcome, Result,
};
use anyhow::ensure;
use clap::{ArgGroup, Args};
use duroxide::PruneOptions;
use duroxide_cosmos::operate::InstanceSummary;
use serde_json::json;
use std::time::Duration;

#[derive(Args)]
#[command(group = ArgGroup::new("which").required(true).args(["id", "all"]))]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args(["keep_last", "ended_before"]))]
pub struct Prune {
    /// The instance
    id: Option<String>,
    /// Every instance with more than one execution that the filters select
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    filter: Filter,
    /// Keeps this many executions, the current one included
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    keep_last: Option<u32>,
    /// Deletes executions that ended at least this long ago, such as 12h or 30d; the current one stays
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    ended_before: Option<Duration>,
    #[command(flatten)]
    confirmation: Confirmation,
}

/// The executions that the command will delete.
#[derive(Default)]
struct PruneTargets {
    instances: Vec<InstanceSummary>,
    executions: usize,
    /// Instances that could not be read, with the error.
    failures: Vec<(String, String)>,
}

impl Prune {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        ensure!(self.all || self.filter.is_empty(), "filters need --all; they do not apply to a named instance");
        let instances = match &self.id {
            Some(id) => match account.provider.instance(id).await? {
                Some(instance) => vec![instance],
                None => return Ok(not_found(id)),
            },
            None => select_all(account, &self.filter.query(), |instance| instance.execution > 1).await?,
        };
        let mut options = PruneOptions { keep_last: self.keep_last, ..PruneOptions::default() };
        options.completed_before = self.ended_before.map(times::before);
        let PruneTargets { instances, executions, failures } = self.targets(account, instances, output).await;
        let count = instances.len();
        if self.confirmation.dry_run {
            output.line(format!("\ndry run: {executions} executions of {count} instances would be deleted"));
            return Ok(Outcome::Done);
        }
        if instances.is_empty() && failures.is_empty() {
            output.line("nothing to delete");
            return Ok(Outcome::Done);
        }
        if instances.is_empty() {
            return DeletionReport::with_failures(failures).print(output);
        }
        let question = format!("Delete these {executions} executions of {count} instances permanently?");
        if !self.confirmation.confirm(&question)? {
            return Ok(Outcome::Declined);
        }
        let mut report = DeletionReport::with_failures(failures);
        prune_all(account, &instances, &options, &mut report).await;
        report.print(output)
    }

    /// Prints and returns the instances with executions to delete.
    async fn targets(&self, account: &Account, instances: Vec<InstanceSummary>, output: Output) -> PruneTargets {
        let mut targets = PruneTargets::default();
        for instance in instances {
            let executions = match self.executions_to_delete(account, &instance.id).await {
                Ok(executions) => executions,
                // Another process may prune or delete the instance at this moment.
                Err(error) => {
                    targets.failures.push((instance.id, format!("{error:#}")));
                    continue;
                }
            };
            let Some(last) = executions.iter().max() else { continue };
            let object = json!({ "id": instance.id, "executions": executions, "dryRun": self.confirmation.dry_run });
            output.object("toDelete", &object);
            output.line(format!("{}: {} executions, up to {last}", instance.id, executions.len()));
            targets.executions += executions.len();
            targets.instances.push(instance);
        }
        targets
    }

    async fn executions_to_delete(&self, account: &Account, id: &str) -> anyhow::Result<Vec<u64>> {
        let mut executions = account.client.list_executions(id).await?;
        executions.sort_unstable();
        let current = executions.pop();
        let keep = self.keep_last.map_or(0, |keep| keep.saturating_sub(1) as usize);
        executions.truncate(executions.len().saturating_sub(keep));
        let Some(age) = self.ended_before else { return Ok(executions) };
        let (mut old, before) = (Vec::new(), times::before(age));
        for execution in executions.into_iter().filter(|execution| Some(*execution) != current) {
            let info = account.client.get_execution_info(id, execution).await?;
            if info.completed_at.is_some_and(|end| end < before) {
                old.push(execution);
            }
        }
        Ok(old)
    }
}

async fn prune_all(
    account: &Account,
    instances: &[InstanceSummary],
    options: &PruneOptions,
    report: &mut DeletionReport,
) {
    let bar = progress_bar(instances.len());
    for instance in instances {
        match account.client.prune_executions(&instance.id, options.clone()).await {
            Ok(pruned) => {
                report.executions += pruned.executions_deleted;
                report.events += pruned.events_deleted;
            }
            Err(error) => report.failures.push((instance.id.clone(), error.to_string())),
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
}
