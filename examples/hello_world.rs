//! One orchestration calls one activity. The example prints the result and its cost.
//!
//! ```text
//! cargo run --example hello_world              # an account in this process: no Azure, no Docker
//! cargo run --example hello_world -- Ada       # another name
//! ```
//!
//! On a real account, with the variables of `.env.example`:
//!
//! ```text
//! export COSMOS_ENDPOINT=https://<account>.documents.azure.com/ COSMOS_KEY=<key>
//! cargo run --example hello_world
//! ```

mod common;

use duroxide::{
    runtime::{registry::ActivityRegistry, Runtime},
    ActivityContext, Client, OrchestrationContext, OrchestrationRegistry,
};
use std::{process::ExitCode, time::Duration};

#[tokio::main]
async fn main() -> ExitCode {
    common::exit(run().await)
}

async fn run() -> anyhow::Result<()> {
    common::init_logging("warn");
    let name = std::env::args().nth(1).unwrap_or_else(|| "Cosmos".to_owned());
    let provider = common::open().await?;

    let activities = ActivityRegistry::builder()
        .register("Greet", |_: ActivityContext, name: String| async move { Ok(format!("Hello, {name}!")) })
        .build();
    let orchestrations = OrchestrationRegistry::builder()
        .register("HelloWorld", |ctx: OrchestrationContext, name: String| async move {
            ctx.schedule_activity("Greet", name).await
        })
        .build();
    let runtime = Runtime::start_with_store(provider.clone(), activities, orchestrations).await;

    let client = Client::new(provider.clone());
    let instance = common::unique("hello");
    let meter = common::Meter::start(&provider);
    client.start_orchestration(&instance, "HelloWorld", name).await?;
    let greeting = common::output(&client, &instance, Duration::from_secs(30)).await?;
    println!("{instance}: {greeting}");
    println!("Cost: {}.", meter.read());

    runtime.shutdown(None).await;
    provider.shutdown().await;
    Ok(())
}
