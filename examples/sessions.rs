//! Sessions: activities with the same session id run on the same worker, which can keep their data in memory.
//!
//! ```text
//! cargo run --example sessions
//! cargo run --example sessions -- --games 5 --moves 6
//! ```
//!
//! Two workers and a client share an account. Two orchestrations play each game. Every move is an activity on the
//! session of the game. The worker that takes the first move loads the board, and receives all later moves of both
//! orchestrations. So a board is loaded once for each game, not once for each move.
//!
//! If COSMOS_ENDPOINT or COSMOS_CONNECTION_STRING is set, the example uses that account; see `hello_world`.

mod common;

use clap::Parser;
use duroxide::{
    runtime::{registry::ActivityRegistry, Runtime, RuntimeOptions},
    ActivityContext, Client, OrchestrationContext, OrchestrationRegistry,
};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig};
use duroxide_cosmos_emulator::LocalAccount;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    process::ExitCode,
    sync::{Arc, Mutex},
    time::Duration,
};

/// Plays games on two workers.
#[derive(Parser)]
struct Options {
    /// The number of games
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=20))]
    games: u32,
    /// The number of moves of each player in a game
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=50))]
    moves: u32,
}

#[derive(Serialize, Deserialize)]
struct Game {
    session: String,
    moves: u32,
}

/// The memory of one worker: the number of moves on each board.
#[derive(Default)]
struct Boards(Mutex<BTreeMap<String, u32>>);

#[tokio::main]
async fn main() -> ExitCode {
    common::exit(run(Options::parse()).await)
}

async fn run(options: Options) -> anyhow::Result<()> {
    common::init_logging("warn");
    let [front, ann, bob] = three_providers().await?;
    let workers = [("ann", ann, Arc::new(Boards::default())), ("bob", bob, Arc::default())];
    let mut runtimes = Vec::new();
    for (name, provider, boards) in &workers {
        runtimes.push(start_worker(name, provider, boards).await);
    }

    let client = Client::new(front.clone());
    let run = common::unique("chess");
    let mut players = Vec::new();
    for game in 1..=options.games {
        for player in ["white", "black"] {
            let instance = format!("{run}-{game}-{player}");
            let game = Game { session: format!("{run}-{game}"), moves: options.moves };
            client.start_orchestration_typed(&instance, "Play", game).await?;
            players.push(instance);
        }
    }
    for instance in &players {
        println!("{instance}: {}", common::output(&client, instance, Duration::from_secs(60)).await?);
    }
    for (name, _, boards) in &workers {
        let boards = boards.0.lock().map_err(|_| anyhow::anyhow!("a move panicked"))?;
        println!("{name} loaded {} boards and made {} moves", boards.len(), boards.values().sum::<u32>());
    }

    for runtime in runtimes {
        runtime.shutdown(None).await;
    }
    for (_, provider, _) in &workers {
        provider.shutdown().await;
    }
    front.shutdown().await;
    Ok(())
}

/// Three providers, as three processes have them. Each one finds the work of the others through the container.
async fn three_providers() -> anyhow::Result<[Arc<CosmosDBProvider>; 3]> {
    if common::environment_names_an_account() {
        let config = CosmosDBProviderConfig::from_env()?;
        let open = || common::open_with(config.clone());
        return Ok([open().await?, open().await?, open().await?]);
    }
    println!("Account: in this process, in memory. Set COSMOS_ENDPOINT to run on another.");
    let account = LocalAccount::new();
    let open = || common::open_embedded(&account);
    Ok([open().await?, open().await?, open().await?])
}

async fn start_worker(name: &str, provider: &Arc<CosmosDBProvider>, boards: &Arc<Boards>) -> Arc<Runtime> {
    let (name, boards) = (name.to_owned(), boards.clone());
    let worker = name.clone();
    let activities = ActivityRegistry::builder()
        .register("Move", move |ctx: ActivityContext, _: String| {
            let (boards, worker) = (boards.clone(), worker.clone());
            async move {
                // During the move the other worker takes the next game.
                tokio::time::sleep(Duration::from_millis(100)).await;
                boards.make_move(ctx.session_id(), &worker)
            }
        })
        .build();
    let orchestrations = OrchestrationRegistry::builder().register_typed("Play", play).build();
    // With a node id the whole worker owns its sessions. Without one, each of its activity slots owns its own.
    let options = RuntimeOptions { worker_node_id: Some(name), ..RuntimeOptions::default() };
    Runtime::start_with_options(provider.clone(), activities, orchestrations, options).await
}

impl Boards {
    fn make_move(&self, session: Option<&str>, worker: &str) -> Result<String, String> {
        let session = session.ok_or("a move needs a session")?;
        let mut boards = self.0.lock().map_err(|_| "a move panicked")?;
        *boards.entry(session.to_owned()).or_insert(0) += 1;
        Ok(worker.to_owned())
    }
}

async fn play(ctx: OrchestrationContext, game: Game) -> Result<String, String> {
    let mut made_by = BTreeMap::<String, u32>::new();
    for turn in 1..=game.moves {
        let worker = ctx.schedule_activity_on_session("Move", turn.to_string(), &game.session).await?;
        *made_by.entry(worker).or_default() += 1;
    }
    let parts = made_by.iter().map(|(worker, moves)| format!("{moves} moves on {worker}"));
    Ok(parts.collect::<Vec<_>>().join(", "))
}
