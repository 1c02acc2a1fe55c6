//! Looks after the instances of an account: lists, inspects, prunes and deletes them.
//!
//! ```text
//! cargo run --example admin -- list
//! cargo run --example admin -- inspect countdown-1
//! cargo run --example admin -- tree family-1
//! cargo run --example admin -- prune countdown-1 --keep-last 2       # says what would go
//! cargo run --example admin -- prune countdown-1 --keep-last 2 --yes
//! cargo run --example admin -- delete family-1 --yes
//! cargo run --example admin -- clean --older-than-days 30 --yes      # finished instances, in bulk
//! cargo run --example admin -- metrics
//! ```
//!
//! On the account that COSMOS_ENDPOINT or COSMOS_CONNECTION_STRING names, or the local one on port 8081. Where there is
//! neither, on one in this process with a few instances to look at. What deletes is a dry run unless you say `--yes`.

mod common;

use anyhow::{bail, ensure};
use clap::{Parser, Subcommand};
use common::workflows;
use duroxide::{providers::InstanceInfo, runtime::Runtime, Client, InstanceFilter, PruneOptions};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::LocalAccount;
use std::{
    process::ExitCode,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// Lists, inspects, prunes and deletes instances.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lists instances, newest first
    List {
        /// Only those with this status
        #[arg(long, value_enum, ignore_case = true)]
        status: Option<common::Status>,
        /// How many at most
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
    /// Shows an instance and its executions
    Inspect { instance: String },
    /// Shows an instance with its children and theirs
    Tree { instance: String },
    /// Deletes old executions of an instance that continues as new
    Prune {
        instance: String,
        /// How many to keep, the current one included
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        keep_last: u32,
        /// Does it, instead of saying what would be done
        #[arg(long)]
        yes: bool,
    },
    /// Deletes an instance with its children
    Delete {
        instance: String,
        /// Also where it still runs
        #[arg(long)]
        force: bool,
        /// Does it, instead of saying what would be done
        #[arg(long)]
        yes: bool,
    },
    /// Deletes finished instances that ended some time ago
    Clean {
        /// Ended so many days ago or more
        #[arg(long)]
        older_than_days: u64,
        /// How many at most
        #[arg(long, default_value_t = 1_000)]
        limit: u32,
        /// Does it, instead of saying what would be done
        #[arg(long)]
        yes: bool,
    },
    /// Shows how many instances there are and what waits
    Metrics,
}

#[tokio::main]
async fn main() -> ExitCode {
    common::exit(run(Options::parse().command).await)
}

async fn run(command: Command) -> anyhow::Result<()> {
    common::init_logging("warn");
    let provider = if common::is_shared_account_there().await { common::open_shared().await? } else { demo().await? };
    let client = Client::new(provider.clone());
    match command {
        Command::List { status, limit } => list(&client, status, limit).await?,
        Command::Inspect { instance } => inspect(&client, &instance).await?,
        Command::Tree { instance } => tree(&client, &instance).await?,
        Command::Prune { instance, keep_last, yes } => prune(&client, &instance, keep_last, yes).await?,
        Command::Delete { instance, force, yes } => delete(&client, &instance, force, yes).await?,
        Command::Clean { older_than_days, limit, yes } => clean(&client, older_than_days, limit, yes).await?,
        Command::Metrics => metrics(&client).await?,
    }
    provider.shutdown().await;
    Ok(())
}

/// An account in this process with a family, a countdown of five executions, and an order that waits.
async fn demo() -> anyhow::Result<Arc<CosmosDBProvider>> {
    println!("Account: in this process, in memory, with a few instances to look at.\n");
    let provider = common::open_embedded(&LocalAccount::new()).await?;
    let client = Client::new(provider.clone());
    let runtime =
        Runtime::start_with_store(provider.clone(), workflows::activities(), workflows::orchestrations()).await;
    client.start_orchestration("family-1", "Family", "3").await?;
    client.start_orchestration("countdown-1", "Countdown", "5").await?;
    client.start_orchestration("order-1", "Order", "two books").await?;
    for finished in ["family-1", "countdown-1"] {
        common::output(&client, finished, Duration::from_secs(30)).await?;
    }
    client.wait_for_status_change("order-1", 0, Duration::from_millis(20), Duration::from_secs(30)).await?;
    runtime.shutdown(None).await;
    Ok(provider)
}

async fn existing(client: &Client, instance: &str) -> anyhow::Result<InstanceInfo> {
    match client.get_instance_info(instance).await {
        Ok(info) => Ok(info),
        Err(error) if error.is_retryable() => Err(error.into()),
        Err(_) => bail!("there is no instance {instance}: `list` shows those that there are"),
    }
}

async fn list(client: &Client, status: Option<common::Status>, limit: usize) -> anyhow::Result<()> {
    let instances = match status {
        Some(status) => client.list_instances_by_status(status.as_str()).await?,
        None => client.list_all_instances().await?,
    };
    for instance in instances.iter().take(limit) {
        let info = client.get_instance_info(instance).await?;
        println!(
            "{:<10} {:<10} {:>4} executions  {instance}",
            info.status, info.orchestration_name, info.current_execution_id
        );
    }
    println!("{} of {} instances", instances.len().min(limit), instances.len());
    Ok(())
}

async fn inspect(client: &Client, instance: &str) -> anyhow::Result<()> {
    let info = existing(client, instance).await?;
    println!("{instance}: {} {}, {}", info.orchestration_name, info.orchestration_version, info.status);
    println!("  created {}, last changed {}", ago(info.created_at), ago(info.updated_at));
    if let Some(parent) = &info.parent_instance_id {
        println!("  child of {parent}");
    }
    if let Some(output) = &info.output {
        println!("  output: {output}");
    }
    for execution in client.list_executions(instance).await? {
        let execution = client.get_execution_info(instance, execution).await?;
        println!("  execution {}: {}, {} events", execution.execution_id, execution.status, execution.event_count);
    }
    for (key, value) in client.get_kv_all_values(instance).await? {
        println!("  value {key}: {value}");
    }
    Ok(())
}

async fn tree(client: &Client, instance: &str) -> anyhow::Result<()> {
    existing(client, instance).await?;
    let tree = client.get_instance_tree(instance).await?;
    let mut members = Vec::new();
    for id in &tree.all_ids {
        members.push(client.get_instance_info(id).await?);
    }
    members.sort_by(|a, b| a.instance_id.cmp(&b.instance_id));
    print_below(&members, instance, 0);
    Ok(())
}

/// Prints an instance, and those whose parent it is below it.
fn print_below(members: &[InstanceInfo], instance: &str, depth: usize) {
    if let Some(info) = members.iter().find(|info| info.instance_id == instance) {
        println!("{:indent$}{instance}  {} {}", "", info.orchestration_name, info.status, indent = depth * 2);
    }
    for child in members.iter().filter(|info| info.parent_instance_id.as_deref() == Some(instance)) {
        print_below(members, &child.instance_id, depth + 1);
    }
}

async fn prune(client: &Client, instance: &str, keep_last: u32, yes: bool) -> anyhow::Result<()> {
    let info = existing(client, instance).await?;
    if !yes {
        let mut old = client.list_executions(instance).await?;
        old.sort_unstable();
        old.truncate(old.len().saturating_sub(keep_last as usize));
        println!("would delete {} executions of {instance}: {old:?}", old.len());
        println!("would keep the current one, {}, and the last {keep_last} in all", info.current_execution_id);
        println!("{DRY_RUN}");
        return Ok(());
    }
    let options = PruneOptions { keep_last: Some(keep_last), ..PruneOptions::default() };
    let pruned = client.prune_executions(instance, options).await?;
    println!("deleted {} executions with {} events", pruned.executions_deleted, pruned.events_deleted);
    Ok(())
}

const DRY_RUN: &str = "dry run: nothing was changed; --yes does it";

async fn delete(client: &Client, instance: &str, force: bool, yes: bool) -> anyhow::Result<()> {
    let info = existing(client, instance).await?;
    if let Some(parent) = info.parent_instance_id {
        bail!("{instance} is a child of {parent}: a family is deleted as a whole, from its root");
    }
    let tree = client.get_instance_tree(instance).await?;
    for id in &tree.all_ids {
        let member = client.get_instance_info(id).await?;
        let runs = member.status == "Running";
        ensure!(force || !runs, "{id} still runs: cancel it, or delete it all the same with --force");
    }
    if !yes {
        println!("would delete {} instances:", tree.all_ids.len());
        tree.all_ids.iter().for_each(|id| println!("  {id}"));
        println!("{DRY_RUN}");
        return Ok(());
    }
    let deleted = client.delete_instance(instance, force).await?;
    println!(
        "deleted {} instances, {} executions, {} events and {} messages",
        deleted.instances_deleted, deleted.executions_deleted, deleted.events_deleted, deleted.queue_messages_deleted
    );
    Ok(())
}

async fn clean(client: &Client, days: u64, limit: u32, yes: bool) -> anyhow::Result<()> {
    let before = now_ms().saturating_sub(days.saturating_mul(24 * 3_600 * 1_000));
    if !yes {
        let mut old = Vec::new();
        for status in ["Completed", "Failed"] {
            for id in client.list_instances_by_status(status).await? {
                let info = client.get_instance_info(&id).await?;
                if info.parent_instance_id.is_none() && info.updated_at < before && old.len() < limit as usize {
                    old.push(id);
                }
            }
        }
        println!("would delete {} instances with their children:", old.len());
        old.iter().for_each(|id| println!("  {id}"));
        println!("{DRY_RUN}");
        return Ok(());
    }
    let filter = InstanceFilter { completed_before: Some(before), limit: Some(limit), ..InstanceFilter::default() };
    let deleted = client.delete_instance_bulk(filter).await?;
    println!("deleted {} instances and {} events", deleted.instances_deleted, deleted.events_deleted);
    Ok(())
}

async fn metrics(client: &Client) -> anyhow::Result<()> {
    let (system, queues) = (client.get_system_metrics().await?, client.get_queue_depths().await?);
    println!(
        "{} instances: {} running, {} completed, {} failed; {} executions with {} events",
        system.total_instances,
        system.running_instances,
        system.completed_instances,
        system.failed_instances,
        system.total_executions,
        system.total_events
    );
    println!("waiting: {} messages, {} activities", queues.orchestrator_queue, queues.worker_queue);
    Ok(())
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn ago(ms: u64) -> String {
    let seconds = now_ms().saturating_sub(ms) / 1_000;
    match seconds {
        0..=119 => format!("{seconds} seconds ago"),
        120..=7_199 => format!("{} minutes ago", seconds / 60),
        7_200..=172_799 => format!("{} hours ago", seconds / 3_600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}
