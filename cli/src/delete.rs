//! `delete`: deletes instances with their descendants.

use crate::{
    account::Account,
    confirm::Confirmation,
    deletion::{delete_all, print_instances, ShownTree},
    instances::{instance_tree, not_found},
    output::Output,
    Outcome, Result,
};
use anyhow::{bail, ensure};
use clap::Args;
use duroxide_cosmos::operate::{InstanceSummary, QueuedStart};
use serde_json::json;
use std::collections::BTreeSet;

#[derive(Args)]
pub struct Delete {
    /// The root instances, each with all its descendants
    #[arg(required = true)]
    ids: Vec<String>,
    /// Also deletes running instances, and starts that wait for a worker
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    confirmation: Confirmation,
}

/// The targets of a deletion.
#[derive(Default)]
struct Targets {
    instances: Vec<InstanceSummary>,
    trees: Vec<ShownTree>,
    starts: Vec<QueuedStart>,
}

impl Delete {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let mut targets = Targets::default();
        for id in self.ids.iter().collect::<BTreeSet<_>>() {
            if !self.add_target(account, id, &mut targets).await? {
                return Ok(not_found(id));
            }
        }
        let Targets { instances, trees, starts } = targets;
        print_instances(&instances, self.confirmation.dry_run, output);
        print_starts(&starts, self.confirmation.dry_run, output);
        let count = instances.len() + starts.len();
        if self.confirmation.dry_run {
            output.line(format!("\ndry run: {count} instances would be deleted"));
            return Ok(Outcome::Done);
        }
        if !self.confirmation.confirm(&format!("Delete these {count} instances permanently?"))? {
            return Ok(Outcome::Declined);
        }
        let mut report = delete_all(account, &trees, self.force).await;
        for start in &starts {
            match account.provider.drop_start(&start.id).await {
                Ok(true) => report.instances += 1,
                Ok(false) => report.failures.push((start.id.clone(), "a worker has begun it meanwhile".to_owned())),
                Err(error) => report.failures.push((start.id.clone(), error.to_string())),
            }
        }
        report.print(output)
    }

    /// Adds an instance tree or a start. Returns `false` if neither exists, and an error if it may not be deleted.
    async fn add_target(&self, account: &Account, id: &str, targets: &mut Targets) -> anyhow::Result<bool> {
        // A start becomes an instance, never the reverse. So the read of the start comes first.
        if let Some(start) = account.provider.queued_start(id).await? {
            self.check_start(account, &start).await?;
            targets.starts.push(start);
            return Ok(true);
        }
        let Some(root) = account.provider.instance(id).await? else { return Ok(false) };
        if let Some(parent) = account.provider.parent_of(id).await? {
            bail!("{}", is_a_child(id, &parent));
        }
        let instances = instance_tree(account, id).await?;
        if let Some(running) = instances.iter().find(|instance| !instance.has_ended()).filter(|_| !self.force) {
            bail!("{:?} still runs: cancel it, or delete it with --force", running.id);
        }
        let ids = Some(instances.iter().map(|instance| instance.id.clone()).collect());
        targets.trees.push(ShownTree { root, ids });
        targets.instances.extend(instances);
        Ok(true)
    }

    /// Fails if a start that no worker has begun may not be removed.
    async fn check_start(&self, account: &Account, start: &QueuedStart) -> anyhow::Result<()> {
        let id = &start.id;
        let parent = match &start.parent {
            Some(parent) => account.provider.instance(parent).await?,
            None => None,
        };
        if let Some(parent) = parent {
            bail!("{}", is_a_child(id, &parent.id));
        }
        ensure!(self.force, "a start of {id:?} waits for a worker: cancel it, or delete it with --force");
        Ok(())
    }
}

fn is_a_child(id: &str, parent: &str) -> String {
    format!("{id:?} is a child of {parent:?}: an instance tree is deleted as a whole, by its root")
}

/// Prints the starts that the command will remove.
fn print_starts(starts: &[QueuedStart], dry_run: bool, output: Output) {
    for start in starts {
        let mut object = json!(start);
        (object["status"], object["dryRun"]) = ("Queued".into(), dry_run.into());
        output.object("toDelete", &object);
    }
    if !starts.is_empty() {
        let row = |start: &QueuedStart| vec!["Queued".to_owned(), start.name.clone(), start.id.clone()];
        output.table(&["STATUS", "ORCHESTRATION", "INSTANCE"], starts.iter().map(row));
    }
}
