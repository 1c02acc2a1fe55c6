//! `duroxide-cosmos`: for those who run duroxide on Azure Cosmos DB.
//!
//! Signs in as a worker does, by the same variables. Reads only, unless the help of a command says that it changes something; what deletes
//! asks first. Tables for people, with `--json` one object a line for programs.
#![forbid(unsafe_code)]

mod account;
mod delete;
mod doctor;
mod drive;
mod look;
mod output;
mod serve;
mod show;
mod times;

use clap::{CommandFactory, Parser, Subcommand};
use output::Output;
use std::process::ExitCode;

/// Looks at orchestrations on Azure Cosmos DB, and looks after them
///
/// Signs in by the variables that a worker has: COSMOS_ENDPOINT with COSMOS_KEY or an Entra ID credential, or COSMOS_CONNECTION_STRING. With
/// none of them the local account on port 8081 is used, if there is one.
///
/// Reads only, unless the help of a command says "Changes".
#[derive(Parser)]
#[command(name = "duroxide-cosmos", version, after_help = EXIT_CODES)]
struct Options {
    /// One JSON object a line, with stable names, instead of tables
    #[arg(long, global = true)]
    json: bool,
    /// The container; otherwise COSMOS_CONTAINER, or "duroxide"
    #[arg(long, global = true, value_name = "NAME")]
    container: Option<String>,
    /// The database; otherwise COSMOS_DATABASE, or "duroxide"
    #[arg(long, global = true, value_name = "NAME")]
    database: Option<String>,
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str =
    "Exit codes: 0 done, 1 it failed, 2 the command line is wrong, 3 there is no such thing, 4 the time was up, \
                          5 the orchestration failed, 6 somebody said no.\nRUST_LOG=debug tells more.";

#[derive(Subcommand)]
enum Command {
    /// Says whether the account can be used: endpoint, credential, container, index, regions, role. For probes, too
    Check(look::Check),
    /// Lists instances, newest first
    #[command(visible_alias = "ls")]
    List(look::List),
    /// Shows an instance: its executions, values, and its history as a timeline
    Show(show::Show),
    /// Shows an instance with its children and theirs
    Tree(look::Tree),
    /// Follows an instance until it ends
    Watch(show::Watch),
    /// Starts an orchestration. Changes
    Start(drive::Start),
    /// Waits for the end of an instance, and prints its output
    Wait(drive::Wait),
    /// Raises an event that an instance waits for. Changes
    Raise(drive::Raise),
    /// Puts a message into an instance's queue. Changes
    Enqueue(drive::Enqueue),
    /// Asks an instance to stop. Changes
    Cancel(drive::Cancel),
    /// Shows what waits, and for how long; and messages that were not delivered
    Queues(look::Queues),
    /// Shows the processes that look for work
    Fleet,
    /// Says why instances stand still, and what is wrong with them; with --repair, mends what it can. Then it changes
    Doctor(doctor::Doctor),
    /// Deletes instances with their children. Changes
    Delete(delete::Delete),
    /// Deletes old executions of instances that continue as new. Changes
    Prune(delete::Prune),
    /// Deletes finished instances in bulk. Changes
    Purge(delete::Purge),
    /// Serves a page to look at all of it. Changes something only with --allow-changes
    Serve(serve::Serve),
    /// Prints completions for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// Why a command ends.
pub enum End {
    Done,
    /// There is no such thing.
    NotFound(String),
    /// The time was up.
    TimeUp(String),
    /// The orchestration has failed.
    Failed(String),
    /// Somebody said no.
    Declined,
    /// Something is wrong, and was said.
    Wrong,
}

type Result<T = End> = anyhow::Result<T>;

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        let (code, says) = match end {
            End::Done => (0, None),
            End::Wrong => (1, None),
            End::NotFound(says) => (3, Some(says)),
            End::TimeUp(says) => (4, Some(says)),
            End::Failed(says) => (5, Some(says)),
            End::Declined => (6, Some("nothing was changed".to_owned())),
        };
        if let Some(says) = says {
            output::print_error(&output::plain_lines(&says));
        }
        Self::from(code)
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("error"));
    // A log that can't be written is no reason to end.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    log.log_internal_errors(false).init();
    match run(options).await {
        Ok(End::Done) if output::is_lost() => End::Wrong.into(),
        Ok(end) => end.into(),
        Err(error) => {
            output::print_error(&format!("error: {}", output::plain_lines(&format!("{error:#}"))));
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result {
    let output = Output { json: options.json };
    if let Command::Completions { shell } = options.command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Options::command(), "duroxide-cosmos", &mut script);
        Output { json: false }.result(&String::from_utf8_lossy(&script));
        return Ok(End::Done);
    }
    let config = account::config(options.database, options.container)?;
    if let Command::Check(check) = &options.command {
        return look::check(check, &config, output).await;
    }
    // A tool makes no container: a name that is mistyped must not become one.
    let account = account::open(config.with_create_if_missing(false)).await?;
    let end = match options.command {
        Command::List(list) => list.run(&account, output).await,
        Command::Show(show) => show.run(&account, output).await,
        Command::Tree(tree) => tree.run(&account, output).await,
        Command::Watch(watch) => watch.run(&account, output).await,
        Command::Start(start) => start.run(&account, output).await,
        Command::Wait(wait) => wait.run(&account, output).await,
        Command::Raise(raise) => raise.run(&account, output).await,
        Command::Enqueue(enqueue) => enqueue.run(&account, output).await,
        Command::Cancel(cancel) => cancel.run(&account, output).await,
        Command::Queues(queues) => queues.run(&account, output).await,
        Command::Fleet => look::fleet(&account, output).await,
        Command::Doctor(doctor) => doctor.run(&account, output).await,
        Command::Delete(delete) => delete.run(&account, output).await,
        Command::Prune(prune) => prune.run(&account, output).await,
        Command::Purge(purge) => purge.run(&account, output).await,
        Command::Serve(serve) => serve.run(&account, output).await,
        Command::Check(_) | Command::Completions { .. } => Ok(End::Done),
    };
    account.provider.shutdown().await;
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Options::command().debug_assert();
    }
}
