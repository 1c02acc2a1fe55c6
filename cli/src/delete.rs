//! What deletes: says what it will do, asks, and does it.

use crate::{
    account::Account,
    look::{family, not_found, Filter, Status},
    output::{plain, print_error, Output},
    times::{self, length, parse_length},
    End, Result,
};
use anyhow::{bail, ensure};
use clap::{builder::NonEmptyStringValueParser, ArgGroup, Args};
use duroxide::{providers::DeleteInstanceResult, PruneOptions};
use duroxide_cosmos::operate::{InstanceQuery, InstanceSummary, QueuedStart};
use futures::{stream, StreamExt};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::{
    collections::BTreeSet,
    io::{BufRead, IsTerminal, Write},
    time::Duration,
};

/// So many families are deleted at once.
const AT_ONCE: usize = 8;

/// Whether somebody agrees: by `--yes`, or when asked. What they can do instead is said where nobody is there.
pub fn agreed(yes: bool, question: &str, instead: &str) -> anyhow::Result<bool> {
    if yes {
        return Ok(true);
    }
    let question = plain(question);
    if !std::io::stdin().is_terminal() {
        bail!("{question} Nobody is there to be asked: say --yes, or {instead}");
    }
    // Nobody agrees to a question that could not be asked.
    write!(std::io::stderr(), "{question} [y/N] ")?;
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

const LOOK_FIRST: &str = "--dry-run to see what would be done";

/// How a command that deletes goes about it.
#[derive(Args)]
struct Manner {
    /// Says what would be done, and does nothing
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Does not ask
    #[arg(long)]
    yes: bool,
}

fn bar(count: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos} of {len}, {eta} left");
    let bar = ProgressBar::new(count as u64);
    // The template is the one above; where it were wrong, the bar would be another.
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// What some deletions have come to.
#[derive(Default)]
struct Deleted {
    instances: u64,
    executions: u64,
    events: u64,
    /// Roots of families that stay since a member of each runs.
    running: Vec<String>,
    failures: Vec<(String, String)>,
}

impl Deleted {
    fn tell(self, output: Output) -> Result {
        let Self { instances, executions, events, running, failures } = self;
        output.object(
            "deleted",
            &json!({
                "deletedInstances": instances, "deletedExecutions": executions, "deletedEvents": events,
                "running": running,
                "failures": failures.iter().map(|(id, why)| json!({ "id": id, "error": why })).collect::<Vec<_>>(),
            }),
        );
        output.line(format!("deleted {instances} instances with {executions} executions and {events} events"));
        for id in &running {
            output.line(format!("{} stays: a member of its family runs", plain(id)));
        }
        for (id, why) in &failures {
            print_error(&format!("{} is left: {}", plain(id), plain(why)));
        }
        Ok(if failures.is_empty() { End::Done } else { End::Wrong })
    }
}

/// A family that was shown: its root, and where all of it was shown, the others.
struct Shown {
    root: InstanceSummary,
    others: Option<BTreeSet<String>>,
}

/// Deletes a family, if it is the one that was shown: somebody may have thought about it for hours. None where it is gone.
async fn delete_shown(account: &Account, shown: &Shown, force: bool) -> anyhow::Result<Option<DeleteInstanceResult>> {
    let root = &shown.root;
    let Some(now) = account.provider.instance(&root.id).await? else { return Ok(None) };
    let is_same =
        (now.created_at, now.execution, now.completed_at) == (root.created_at, root.execution, root.completed_at);
    ensure!(is_same || (force && now.created_at == root.created_at), "it has changed since it was shown");
    if let Some(others) = shown.others.as_ref().filter(|_| force) {
        let tree: BTreeSet<String> = account.client.get_instance_tree(&root.id).await?.all_ids.into_iter().collect();
        ensure!(&tree == others, "its family has changed since it was shown");
    }
    Ok(Some(account.client.delete_instance(&root.id, force).await?))
}

/// Deletes families that were shown.
async fn delete_all(account: &Account, families: &[Shown], force: bool) -> Deleted {
    let bar = bar(families.len());
    let mut deleting = stream::iter(families)
        .map(|shown| async move { (&shown.root.id, delete_shown(account, shown, force).await) })
        .buffer_unordered(AT_ONCE);
    let mut deleted = Deleted::default();
    while let Some((root, outcome)) = deleting.next().await {
        bar.inc(1);
        match outcome {
            Ok(result) => {
                let result = result.unwrap_or_default();
                deleted.instances += result.instances_deleted;
                deleted.executions += result.executions_deleted;
                deleted.events += result.events_deleted;
            }
            Err(error) => deleted.failures.push((root.clone(), error.to_string())),
        }
    }
    bar.finish_and_clear();
    deleted
}

#[derive(Args)]
pub struct Delete {
    /// The instances: roots, each with all that descends from it
    #[arg(required = true)]
    ids: Vec<String>,
    /// Also those that run, and those whose start waits for a worker
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    manner: Manner,
}

impl Delete {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let (mut rows, mut families, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for id in self.ids.iter().collect::<BTreeSet<_>>() {
            // A start becomes an instance, never the other way: in this order one of them is seen.
            if let Some(start) = account.provider.queued_start(id).await? {
                starts.push(self.removable(account, start).await?);
                continue;
            }
            let Some(root) = account.provider.instance(id).await? else { return Ok(not_found(id)) };
            if let Some(parent) = account.provider.parent_of(id).await? {
                bail!("{id:?} is a child of {parent:?}: a family goes as a whole, from its root");
            }
            let members = family(account, id).await?;
            if let Some(member) = members.iter().find(|member| !member.has_ended()).filter(|_| !self.force) {
                bail!("{:?} still runs: cancel it, or delete it all the same with --force", member.id);
            }
            let others = Some(members.iter().map(|member| member.id.clone()).collect());
            families.push(Shown { root, others });
            rows.extend(members);
        }
        tell(&rows, self.manner.dry_run, output);
        tell_starts(&starts, self.manner.dry_run, output);
        let count = rows.len() + starts.len();
        if self.manner.dry_run {
            output.line(format!("\ndry run: {count} instances would be deleted"));
            return Ok(End::Done);
        }
        if !agreed(self.manner.yes, &format!("Delete these {count} instances for good?"), LOOK_FIRST)? {
            return Ok(End::Declined);
        }
        let mut deleted = delete_all(account, &families, self.force).await;
        for start in &starts {
            match account.provider.drop_start(&start.id).await {
                Ok(true) => deleted.instances += 1,
                Ok(false) => deleted.failures.push((start.id.clone(), "a worker has begun it meanwhile".to_owned())),
                Err(error) => deleted.failures.push((start.id.clone(), error.to_string())),
            }
        }
        deleted.tell(output)
    }

    /// A start that no worker has begun, if it may be removed.
    async fn removable(&self, account: &Account, start: QueuedStart) -> anyhow::Result<QueuedStart> {
        let id = &start.id;
        let parent = match &start.parent {
            Some(parent) => account.provider.instance(parent).await?,
            None => None,
        };
        if let Some(InstanceSummary { id: parent, .. }) = parent {
            bail!("{id:?} is a child of {parent:?}: a family goes as a whole, from its root");
        }
        ensure!(self.force, "a start of {id:?} waits for a worker: cancel it, or delete it with --force");
        Ok(start)
    }
}

/// The starts that would go.
fn tell_starts(starts: &[QueuedStart], dry_run: bool, output: Output) {
    for start in starts {
        let mut object = json!(start);
        (object["status"], object["dryRun"]) = ("Queued".into(), dry_run.into());
        output.object("goes", &object);
    }
    if !starts.is_empty() {
        let row = |start: &QueuedStart| vec!["Queued".to_owned(), start.name.clone(), start.id.clone()];
        output.table(&["STATUS", "ORCHESTRATION", "INSTANCE"], starts.iter().map(row));
    }
}

/// What would go.
fn tell(instances: &[InstanceSummary], dry_run: bool, output: Output) {
    /// More than anybody reads.
    const MOST: usize = 50;
    for instance in instances {
        let mut object = json!(instance);
        object["dryRun"] = dry_run.into();
        output.object("goes", &object);
    }
    let row = |instance: &InstanceSummary| vec![instance.status.clone(), instance.name.clone(), instance.id.clone()];
    if instances.is_empty() {
        return;
    }
    output.table(&["STATUS", "ORCHESTRATION", "INSTANCE"], instances.iter().take(MOST).map(row));
    if instances.len() > MOST {
        output.line(format!("… and {} more", instances.len() - MOST));
    }
}

#[derive(Args)]
#[command(group = ArgGroup::new("which").required(true).args(["id", "all"]))]
#[command(group = ArgGroup::new("what").required(true).multiple(true).args(["keep_last", "ended_before"]))]
pub struct Prune {
    /// The instance
    id: Option<String>,
    /// Every instance with more than one execution that the filters take
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    filter: Filter,
    /// Keeps so many executions, the current one included
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    keep_last: Option<u32>,
    /// Deletes those that ended so long ago, as 12h or 30d; the current one stays
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    ended_before: Option<Duration>,
    #[command(flatten)]
    manner: Manner,
}

impl Prune {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        ensure!(
            self.all || self.filter.is_any(),
            "filters are for --all: an instance that is named is pruned whatever it is"
        );
        let instances = match &self.id {
            Some(id) => match account.provider.instance(id).await? {
                Some(instance) => vec![instance],
                None => return Ok(not_found(id)),
            },
            None => all(account, &self.filter.query(), |instance| instance.execution > 1).await?,
        };
        let mut options = PruneOptions { keep_last: self.keep_last, ..PruneOptions::default() };
        options.completed_before = self.ended_before.map(times::before);
        let (mut doomed, mut executions, mut failures) = (Vec::new(), 0, Vec::new());
        for instance in instances {
            let going = match self.going(account, &instance.id).await {
                Ok(going) => going,
                // It may be pruned or deleted at this moment.
                Err(error) => {
                    failures.push((instance.id, format!("{error:#}")));
                    continue;
                }
            };
            if going.is_empty() {
                continue;
            }
            executions += going.len();
            let object = json!({ "id": instance.id, "executions": going, "dryRun": self.manner.dry_run });
            output.object("goes", &object);
            output.line(format!(
                "{}: {} executions, up to {}",
                instance.id,
                going.len(),
                going.iter().max().unwrap_or(&0)
            ));
            doomed.push(instance);
        }
        let instances = doomed;
        if self.manner.dry_run {
            output
                .line(format!("\ndry run: {executions} executions of {} instances would be deleted", instances.len()));
            return Ok(End::Done);
        }
        if instances.is_empty() && failures.is_empty() {
            output.line("nothing to delete");
            return Ok(End::Done);
        }
        if instances.is_empty() {
            return Deleted { failures, ..Deleted::default() }.tell(output);
        }
        let question = format!("Delete these {executions} executions of {} instances for good?", instances.len());
        if !agreed(self.manner.yes, &question, LOOK_FIRST)? {
            return Ok(End::Declined);
        }
        let (bar, mut deleted) = (bar(instances.len()), Deleted { failures, ..Deleted::default() });
        for instance in &instances {
            match account.client.prune_executions(&instance.id, options.clone()).await {
                Ok(pruned) => {
                    deleted.executions += pruned.executions_deleted;
                    deleted.events += pruned.events_deleted;
                }
                Err(error) => deleted.failures.push((instance.id.clone(), error.to_string())),
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        deleted.tell(output)
    }

    /// The executions that would go.
    async fn going(&self, account: &Account, id: &str) -> anyhow::Result<Vec<u64>> {
        let mut executions = account.client.list_executions(id).await?;
        executions.sort_unstable();
        let current = executions.pop();
        let keep = self.keep_last.map_or(0, |keep| keep.saturating_sub(1) as usize);
        executions.truncate(executions.len().saturating_sub(keep));
        let Some(age) = self.ended_before else { return Ok(executions) };
        let (mut going, before) = (Vec::new(), times::before(age));
        for execution in executions.into_iter().filter(|execution| Some(*execution) != current) {
            let info = account.client.get_execution_info(id, execution).await?;
            if info.completed_at.is_some_and(|end| end < before) {
                going.push(execution);
            }
        }
        Ok(going)
    }
}

/// Every instance that a query and a test take.
async fn all(
    account: &Account,
    query: &InstanceQuery,
    such: impl Fn(&InstanceSummary) -> bool,
) -> anyhow::Result<Vec<InstanceSummary>> {
    let (mut found, mut cursor) = (Vec::new(), None);
    loop {
        let page = account.provider.instances(query, cursor.as_deref(), 1_000).await?;
        found.extend(page.instances.into_iter().filter(&such));
        cursor = page.cursor;
        if cursor.is_none() {
            return Ok(found);
        }
    }
}

#[derive(Args)]
pub struct Purge {
    /// Ended so long ago, as 12h or 30d
    #[arg(long, value_name = "AGE", value_parser = parse_length)]
    ended_before: Duration,
    /// Only those with this status
    #[arg(long, value_enum, ignore_case = true)]
    status: Option<Ended>,
    /// Only those of this orchestration
    #[arg(long, value_name = "ORCHESTRATION", value_parser = NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// How many families at most
    #[arg(long)]
    limit: Option<usize>,
    #[command(flatten)]
    manner: Manner,
}

/// How an instance can have ended.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Ended {
    Completed,
    Failed,
}

impl Purge {
    pub async fn run(self, account: &Account, output: Output) -> Result {
        let before = times::before(self.ended_before);
        let statuses = match self.status {
            Some(Ended::Completed) => vec![Status::Completed],
            Some(Ended::Failed) => vec![Status::Failed],
            None => vec![Status::Completed, Status::Failed],
        };
        let mut roots = Vec::new();
        for status in statuses {
            let mut query = InstanceQuery::default();
            (query.status, query.name) = (Some(status.as_str().to_owned()), self.name.clone());
            // What has ended by then was created before.
            query.created_before = Some(before);
            let is_old = |i: &InstanceSummary| i.parent.is_none() && i.completed_at.is_some_and(|end| end < before);
            roots.extend(all(account, &query, is_old).await?);
        }
        roots.sort_by_key(|instance| instance.completed_at);
        roots.truncate(self.limit.unwrap_or(usize::MAX));
        tell(&roots, self.manner.dry_run, output);
        if roots.is_empty() {
            output.line("nothing has ended so long ago");
            return Ok(End::Done);
        }
        let (count, age) = (roots.len(), length(u64::try_from(self.ended_before.as_millis()).unwrap_or(u64::MAX)));
        if self.manner.dry_run {
            output.line(format!("\ndry run: {count} instances that ended {age} ago or earlier would be deleted"));
            return Ok(End::Done);
        }
        let question =
            format!("Delete {count} instances that ended {age} ago or earlier, with their children, for good?");
        if !agreed(self.manner.yes, &question, LOOK_FIRST)? {
            return Ok(End::Declined);
        }
        let families: Vec<Shown> = roots.into_iter().map(|root| Shown { root, others: None }).collect();
        let mut deleted = delete_all(account, &families, false).await;
        set_running_aside(account, &mut deleted).await;
        deleted.tell(output)
    }
}

/// A family stays as long as one of its members runs: that is what was asked for, and no failure.
async fn set_running_aside(account: &Account, deleted: &mut Deleted) {
    for (root, why) in std::mem::take(&mut deleted.failures) {
        // Where it can't be read again, the failure stands.
        let members = family(account, &root).await.unwrap_or_default();
        match members.iter().any(|member| !member.has_ended()) {
            true => deleted.running.push(root),
            false => deleted.failures.push((root, why)),
        }
    }
}
