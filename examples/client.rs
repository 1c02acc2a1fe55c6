//! Starts orchestrations on the workers of the `worker` example, and follows them.
//!
//! ```text
//! cargo run --example client -- start Greeting Ada --wait
//! cargo run --example client -- start Order "two books" --instance order-1
//! cargo run --example client -- raise order-1 approval yes
//! cargo run --example client -- wait order-1
//! cargo run --example client -- cancel order-1 --reason "changed my mind"
//! cargo run --example client -- list --status running
//! cargo run --example client -- history order-1
//! ```
//!
//! It needs the account that the workers use: the one that COSMOS_ENDPOINT or COSMOS_CONNECTION_STRING names, or else the
//! local one on port 8081 (`cargo run -p duroxide-cosmos-emulator`).

mod common;

use anyhow::{bail, ensure};
use clap::{Parser, Subcommand};
use common::workflows;
use duroxide::{Client, ClientError, OrchestrationStatus};
use std::{process::ExitCode, time::Duration};

/// Starts and follows the orchestrations of the `worker` example.
#[derive(Parser)]
#[command(after_help = orchestrations())]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Starts an orchestration
    Start {
        /// Which one: see below
        #[arg(value_parser = orchestration)]
        orchestration: String,
        /// Its input
        #[arg(default_value = "")]
        input: String,
        /// The instance's id; a new one if not given
        #[arg(long)]
        instance: Option<String>,
        /// Waits for its end
        #[arg(long)]
        wait: bool,
    },
    /// Waits for an instance's end and prints its output
    Wait {
        instance: String,
        /// Seconds to wait
        #[arg(long, default_value_t = 60)]
        timeout: u64,
    },
    /// Shows how an instance is doing
    Status { instance: String },
    /// Raises an event that an instance waits for
    Raise {
        instance: String,
        event: String,
        #[arg(default_value = "")]
        data: String,
    },
    /// Cancels an instance
    Cancel {
        instance: String,
        #[arg(long, default_value = "cancelled by the client")]
        reason: String,
    },
    /// Lists instances, newest first
    List {
        /// Only those with this status
        #[arg(long, value_enum, ignore_case = true)]
        status: Option<common::Status>,
        /// How many at most
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
    /// Prints the events of an instance's execution
    History {
        instance: String,
        /// Which execution; the last one if not given
        #[arg(long)]
        execution: Option<u64>,
    },
}

fn orchestrations() -> String {
    let lines =
        workflows::ORCHESTRATIONS.iter().map(|(name, input, what)| format!("  {name:<10} {what} (input: {input})"));
    format!("Orchestrations:\n{}", lines.collect::<Vec<_>>().join("\n"))
}

fn orchestration(name: &str) -> Result<String, String> {
    let names: Vec<_> = workflows::ORCHESTRATIONS.iter().map(|(name, ..)| *name).collect();
    let found = names.iter().find(|known| known.eq_ignore_ascii_case(name));
    found.map(|name| (*name).to_owned()).ok_or_else(|| format!("the workers run {}", names.join(", ")))
}

#[tokio::main]
async fn main() -> ExitCode {
    common::exit(run(Options::parse().command).await)
}

async fn run(command: Command) -> anyhow::Result<()> {
    common::init_logging("warn");
    let provider = common::open_shared().await?;
    let client = Client::new(provider.clone());
    match command {
        Command::Start { orchestration, input, instance, wait: wait_for_it } => {
            let instance = instance.unwrap_or_else(|| common::unique(&orchestration.to_lowercase()));
            start(&client, &instance, &orchestration, input).await?;
            if wait_for_it {
                wait(&client, &instance, 60).await?;
            }
        }
        Command::Wait { instance, timeout } => wait(&client, &instance, timeout).await?,
        Command::Status { instance } => status(&client, &instance).await?,
        Command::Raise { instance, event, data } => {
            require_running(&client, &instance).await?;
            client.raise_event(&instance, &event, data).await?;
            println!("raised {event} for {instance}");
        }
        Command::Cancel { instance, reason } => {
            require_running(&client, &instance).await?;
            client.cancel_instance(&instance, reason).await?;
            println!("asked {instance} to stop; `wait {instance}` tells when it has");
        }
        Command::List { status, limit } => list(&client, status, limit).await?,
        Command::History { instance, execution } => history(&client, &instance, execution).await?,
    }
    provider.shutdown().await;
    Ok(())
}

async fn start(client: &Client, instance: &str, orchestration: &str, input: String) -> anyhow::Result<()> {
    // Of several starts with one id the first wins and the others are ignored, silently.
    if client.get_orchestration_status(instance).await? != OrchestrationStatus::NotFound {
        bail!("{instance} is already there: choose another id with --instance");
    }
    client.start_orchestration(instance, orchestration, input).await?;
    println!("started {orchestration} as {instance}");
    Ok(())
}

async fn wait(client: &Client, instance: &str, seconds: u64) -> anyhow::Result<()> {
    match client.wait_for_orchestration(instance, Duration::from_secs(seconds)).await {
        Ok(OrchestrationStatus::Completed { output, .. }) => println!("{instance} completed: {output}"),
        Ok(OrchestrationStatus::Failed { details, .. }) => bail!("{instance} failed: {}", details.display_message()),
        Ok(other) => bail!("{instance} is {other:?}"),
        Err(ClientError::Timeout) => match client.get_orchestration_status(instance).await? {
            OrchestrationStatus::NotFound => bail!("{}", not_there(instance)),
            _ => bail!("{instance} is still running after {seconds} s"),
        },
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

async fn status(client: &Client, instance: &str) -> anyhow::Result<()> {
    let (state, progress) = match client.get_orchestration_status(instance).await? {
        OrchestrationStatus::NotFound => bail!("{}", not_there(instance)),
        OrchestrationStatus::Running { custom_status, .. } => ("running".to_owned(), custom_status),
        OrchestrationStatus::Completed { output, custom_status, .. } => (format!("completed: {output}"), custom_status),
        OrchestrationStatus::Failed { details, custom_status, .. } => {
            (format!("failed: {}", details.display_message()), custom_status)
        }
    };
    let progress = progress.map(|text| format!(" ({text})")).unwrap_or_default();
    println!("{instance} {state}{progress}");
    Ok(())
}

async fn require_running(client: &Client, instance: &str) -> anyhow::Result<()> {
    let status = client.get_orchestration_status(instance).await?;
    ensure!(status != OrchestrationStatus::NotFound, not_there(instance));
    ensure!(matches!(status, OrchestrationStatus::Running { .. }), "{instance} has ended already");
    Ok(())
}

fn not_there(instance: &str) -> String {
    format!("there is no instance {instance}, or no worker has taken its start up yet: is one running?")
}

async fn list(client: &Client, status: Option<common::Status>, limit: usize) -> anyhow::Result<()> {
    let instances = match status {
        Some(status) => client.list_instances_by_status(status.as_str()).await?,
        None => client.list_all_instances().await?,
    };
    for instance in instances.iter().take(limit) {
        let info = client.get_instance_info(instance).await?;
        println!("{:<14} {:<10} {instance}", info.status, info.orchestration_name);
    }
    match instances.len() {
        0 => println!("no instances"),
        all if all > limit => println!("{limit} of {all} instances; --limit shows more"),
        _ => {}
    }
    Ok(())
}

async fn history(client: &Client, instance: &str, execution: Option<u64>) -> anyhow::Result<()> {
    let info = client.get_instance_info(instance).await;
    let Ok(info) = info else { bail!("{}", not_there(instance)) };
    let execution = execution.unwrap_or(info.current_execution_id);
    let events = client.read_execution_history(instance, execution).await?;
    ensure!(
        !events.is_empty(),
        "{instance} has no execution {execution}: it has {:?}",
        client.list_executions(instance).await?
    );
    println!("{instance}, execution {execution} of {}:", info.current_execution_id);
    for event in events {
        println!("{:>5}  {:?}", event.event_id(), event.kind);
    }
    Ok(())
}
