//! `duroxide-cosmos`: the command line for operators of duroxide on Azure Cosmos DB.
//!
//! - The CLI signs in as a worker does, with the same variables.
//! - A command reads only, unless its help says that it modifies data. Commands that delete ask first.
//! - Tables are for people. `--json` prints one object per line for programs.
#![forbid(unsafe_code)]

mod account;
mod check;
mod confirm;
mod delete;
mod deletion;
mod doctor;
mod filter;
mod instances;
mod list;
mod messages;
mod output;
mod prune;
mod purge;
mod queues;
mod serve;
mod show;
mod start;
mod times;
mod tree;
mod wait;
mod watch;
mod workers;

use clap::{CommandFactory, Parser, Subcommand};
use output::Output;
use std::process::ExitCode;

/// Inspects and operates orchestrations on Azure Cosmos DB
///
/// The command signs in with the variables of a worker: COSMOS_ENDPOINT with COSMOS_KEY or an Entra ID credential, or
/// COSMOS_CONNECTION_STRING. If neither variable names an account, it uses the local account on port 8081.
///
/// A command reads only, unless its help says "Modifies data".
#[derive(Parser)]
#[command(name = "duroxide-cosmos", version, after_help = EXIT_CODES)]
struct Options {
    /// Prints one JSON object per line, with stable names, instead of tables
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

const EXIT_CODES: &str = "\
Exit codes:
  0  the command succeeded
  1  the command failed, or check or doctor found a problem
  2  the command line is invalid
  3  the instance, execution or message does not exist, or the instance has already ended
  4  the time limit was reached
  5  the orchestration failed
  6  the user declined; nothing was changed

RUST_LOG=debug prints more log messages to standard error.";

#[derive(Subcommand)]
enum Command {
    /// Tests whether the account can be used: endpoint, credential, container, index, regions, role.
    /// Suitable as a probe
    Check(check::Check),
    /// Lists instances, newest first
    #[command(visible_alias = "ls")]
    List(list::List),
    /// Shows an instance: its executions, its values, and its history as a timeline
    Show(show::Show),
    /// Shows an instance with all its descendants
    Tree(tree::Tree),
    /// Follows an instance until it ends
    Watch(watch::Watch),
    /// Starts an orchestration. Modifies data
    Start(start::Start),
    /// Waits for the end of an instance and prints its output
    Wait(wait::Wait),
    /// Raises an event that an instance waits for. Modifies data
    Raise(messages::Raise),
    /// Puts a message into a queue of an instance. Modifies data
    Enqueue(messages::Enqueue),
    /// Asks an instance to stop. Modifies data
    Cancel(messages::Cancel),
    /// Shows waiting work with its age, and undelivered messages. Modifies data with --retry or --drop
    Queues(queues::Queues),
    /// Shows the processes that look for work
    Workers,
    /// Explains why instances do not progress, and repairs them. Modifies data with --repair
    Doctor(doctor::Doctor),
    /// Deletes instances with their descendants. Modifies data
    Delete(delete::Delete),
    /// Deletes old executions of instances that continue as new. Modifies data
    Prune(prune::Prune),
    /// Deletes finished instances in bulk. Modifies data
    Purge(purge::Purge),
    /// Serves the dashboard. Modifies data with --allow-changes
    Serve(serve::Serve),
    /// Prints completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// The outcome of a command. Each variant has an exit code.
pub enum Outcome {
    /// The command succeeded.
    Done,
    /// The instance, execution or message does not exist, or the instance has already ended.
    NotFound(String),
    /// The time limit was reached.
    TimedOut(String),
    /// The orchestration failed.
    Failed(String),
    /// The user declined.
    Declined,
    /// The command found a problem and has printed it.
    Problem,
}

type Result<T = Outcome> = anyhow::Result<T>;

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        let (code, message) = match outcome {
            Outcome::Done => (0, None),
            Outcome::Problem => (1, None),
            Outcome::NotFound(message) => (3, Some(message)),
            Outcome::TimedOut(message) => (4, Some(message)),
            Outcome::Failed(message) => (5, Some(message)),
            Outcome::Declined => (6, Some("declined: nothing was changed".to_owned())),
        };
        if let Some(message) = message {
            output::print_error(&output::escape_lines(&message));
        }
        Self::from(code)
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("error"));
    // A log that cannot be written must not end the command.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    log.log_internal_errors(false).init();
    match run(options).await {
        Ok(Outcome::Done) if output::is_lost() => Outcome::Problem.into(),
        Ok(outcome) => outcome.into(),
        Err(error) => {
            output::print_error(&format!("error: {}", output::escape_lines(&format!("{error:#}"))));
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
        return Ok(Outcome::Done);
    }
    let config = account::config(options.database, options.container)?;
    if let Command::Check(check) = &options.command {
        return check.run(&config, output).await;
    }
    // The CLI creates no container, so that a mistyped name does not become one.
    let account = account::open(config.with_create_if_missing(false)).await?;
    let outcome = match options.command {
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
        Command::Workers => workers::run(&account, output).await,
        Command::Doctor(doctor) => doctor.run(&account, output).await,
        Command::Delete(delete) => delete.run(&account, output).await,
        Command::Prune(prune) => prune.run(&account, output).await,
        Command::Purge(purge) => purge.run(&account, output).await,
        Command::Serve(serve) => serve.run(&account, output).await,
        Command::Check(_) | Command::Completions { .. } => Ok(Outcome::Done),
    };
    account.provider.shutdown().await;
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Options::command().debug_assert();
    }

    #[test]
    fn every_command_and_flag_is_documented() {
        let guide = include_str!("../../docs/cli.md");
        let mut missing = Vec::new();
        for command in Options::command().get_subcommands() {
            let name = command.get_name();
            let Some((_, section)) = guide.split_once(&format!("\n### `{name}`\n")) else {
                missing.push(name.to_owned());
                continue;
            };
            let section = section.split("\n### ").next().unwrap_or_default();
            let flags = command.get_arguments().filter_map(|argument| argument.get_long());
            let absent = flags.filter(|flag| !section.contains(&format!("--{flag}")));
            missing.extend(absent.map(|flag| format!("{name} --{flag}")));
        }
        assert!(missing.is_empty(), "docs/cli.md lacks {missing:?}");
    }

    #[test]
    fn every_command_that_a_document_names_exists() {
        let command = Options::command();
        let is_known = |name: &str| {
            name == "help"
                || command
                    .get_subcommands()
                    .any(|known| known.get_name() == name || known.get_visible_aliases().any(|alias| alias == name))
        };
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
        let pages: Vec<_> =
            std::fs::read_dir(docs).expect("the guide").map(|entry| entry.expect("a page").path()).collect();
        let mut unknown = Vec::new();
        for page in pages.iter().filter(|page| page.extension().is_some_and(|extension| extension == "md")) {
            let text = std::fs::read_to_string(page).expect("a readable page");
            let code = text.split('`').skip(1).step_by(2).flat_map(str::lines);
            let named = code.filter_map(|line| line.trim().strip_prefix("duroxide-cosmos ")?.split_whitespace().next());
            let named = named.filter(|name| name.chars().all(|c| c.is_ascii_lowercase()));
            unknown.extend(named.filter(|name| !is_known(name)).map(|name| format!("{}: {name}", page.display())));
        }
        assert!(pages.len() > 10 && unknown.is_empty(), "{unknown:?}");
    }
}
