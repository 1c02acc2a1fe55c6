//! The parts that `delete`, `prune` and `purge` share.

use crate::{
    account::Account,
    output::{escape, print_error, Output},
    Outcome, Result,
};
use anyhow::ensure;
use duroxide::providers::DeleteInstanceResult;
use duroxide_cosmos::operate::InstanceSummary;
use futures::{stream, StreamExt};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::collections::BTreeSet;

/// The number of instance trees that are deleted at once.
const CONCURRENCY: usize = 8;
/// The number of instances that are printed for people.
const MAX_ROWS: usize = 50;

pub fn progress_bar(count: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos} of {len}, {eta} left");
    let bar = ProgressBar::new(count as u64);
    // The template is valid. A default style is better than a panic if it is not.
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// The results of several deletions.
#[derive(Default)]
pub struct DeletionReport {
    pub instances: u64,
    pub executions: u64,
    pub events: u64,
    /// Roots of instance trees that stay because one of their instances runs.
    pub running: Vec<String>,
    /// Instances that were not deleted, with the error.
    pub failures: Vec<(String, String)>,
}

impl DeletionReport {
    pub fn with_failures(failures: Vec<(String, String)>) -> Self {
        Self { failures, ..Self::default() }
    }

    pub fn print(self, output: Output) -> Result {
        let Self { instances, executions, events, running, failures } = self;
        output.object(
            "deleted",
            &json!({
                "deletedInstances": instances, "deletedExecutions": executions, "deletedEvents": events,
                "running": running,
                "failures": failures.iter().map(|(id, error)| json!({ "id": id, "error": error })).collect::<Vec<_>>(),
            }),
        );
        output.line(format!("deleted {instances} instances with {executions} executions and {events} events"));
        for id in &running {
            output.line(format!("{} stays: an instance of its tree runs", escape(id)));
        }
        for (id, error) in &failures {
            print_error(&format!("{} was not deleted: {}", escape(id), escape(error)));
        }
        Ok(if failures.is_empty() { Outcome::Done } else { Outcome::Problem })
    }
}

/// An instance tree that the command has shown to the user.
pub struct ShownTree {
    pub root: InstanceSummary,
    /// The ids of the whole tree, if the command has shown all of them.
    pub ids: Option<BTreeSet<String>>,
}

/// Deletes an instance tree if it is still the one that was shown: the user may have answered after hours. Returns
/// `None` if it no longer exists.
async fn delete_shown(
    account: &Account,
    shown: &ShownTree,
    force: bool,
) -> anyhow::Result<Option<DeleteInstanceResult>> {
    let root = &shown.root;
    let Some(current) = account.provider.instance(&root.id).await? else { return Ok(None) };
    let is_same = (current.created_at, current.execution, current.completed_at)
        == (root.created_at, root.execution, root.completed_at);
    ensure!(is_same || (force && current.created_at == root.created_at), "it has changed since it was shown");
    if let Some(ids) = shown.ids.as_ref().filter(|_| force) {
        let tree: BTreeSet<String> = account.client.get_instance_tree(&root.id).await?.all_ids.into_iter().collect();
        ensure!(&tree == ids, "its instance tree has changed since it was shown");
    }
    Ok(Some(account.client.delete_instance(&root.id, force).await?))
}

/// Deletes instance trees that were shown.
pub async fn delete_all(account: &Account, trees: &[ShownTree], force: bool) -> DeletionReport {
    let bar = progress_bar(trees.len());
    let mut deletions = stream::iter(trees)
        .map(|shown| async move { (&shown.root.id, delete_shown(account, shown, force).await) })
        .buffer_unordered(CONCURRENCY);
    let mut report = DeletionReport::default();
    while let Some((root, outcome)) = deletions.next().await {
        bar.inc(1);
        match outcome {
            Ok(result) => {
                let result = result.unwrap_or_default();
                report.instances += result.instances_deleted;
                report.executions += result.executions_deleted;
                report.events += result.events_deleted;
            }
            Err(error) => report.failures.push((root.clone(), error.to_string())),
        }
    }
    bar.finish_and_clear();
    report
}

/// Prints the instances that the command will delete.
pub fn print_instances(instances: &[InstanceSummary], dry_run: bool, output: Output) {
    for instance in instances {
        let mut object = json!(instance);
        object["dryRun"] = dry_run.into();
        output.object("toDelete", &object);
    }
    if instances.is_empty() {
        return;
    }
    let row = |instance: &InstanceSummary| vec![instance.status.clone(), instance.name.clone(), instance.id.clone()];
    output.table(&["STATUS", "ORCHESTRATION", "INSTANCE"], instances.iter().take(MAX_ROWS).map(row));
    if instances.len() > MAX_ROWS {
        output.line(format!("… and {} more", instances.len() - MAX_ROWS));
    }
}
