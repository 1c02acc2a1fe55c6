//! One orchestration runs many activities in parallel and shows its progress.
//!
//! ```text
//! cargo run --example fan_out                                # 60 activities in waves of 20
//! cargo run --example fan_out -- --items 300 --wave 100
//! ```
//!
//! The orchestration writes its progress as custom status after each wave. The client waits for each change of it.
//! If COSMOS_ENDPOINT or COSMOS_CONNECTION_STRING is set, the example uses that account; see `hello_world`.

mod common;

use clap::Parser;
use duroxide::{
    runtime::{registry::ActivityRegistry, Runtime, RuntimeOptions},
    ActivityContext, Client, ClientError, OrchestrationContext, OrchestrationRegistry, OrchestrationStatus,
};
use serde::{Deserialize, Serialize};
use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

/// Runs many activities in parallel.
#[derive(Parser)]
struct Options {
    /// The number of activities
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=2_000))]
    items: u32,
    /// The number of activities in each wave
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    wave: u32,
    /// The number of activities that this process runs at once
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    concurrency: u32,
}

#[derive(Serialize, Deserialize)]
struct SumInput {
    items: u32,
    wave: u32,
}

#[tokio::main]
async fn main() -> ExitCode {
    common::exit(run(Options::parse()).await)
}

async fn run(options: Options) -> anyhow::Result<()> {
    common::init_logging("warn");
    let provider = common::open().await?;
    let activities = ActivityRegistry::builder().register_typed("Square", square).build();
    let orchestrations = OrchestrationRegistry::builder().register_typed("SumOfSquares", sum_of_squares).build();
    let runtime_options =
        RuntimeOptions { worker_concurrency: options.concurrency as usize, ..RuntimeOptions::default() };
    let runtime = Runtime::start_with_options(provider.clone(), activities, orchestrations, runtime_options).await;

    let client = Client::new(provider.clone());
    let instance = common::unique("squares");
    let (began, meter) = (Instant::now(), common::Meter::start(&provider));
    let input = SumInput { items: options.items, wave: options.wave };
    client.start_orchestration_typed(&instance, "SumOfSquares", input).await?;
    show_progress(&client, &instance).await?;
    let sum = common::output(&client, &instance, Duration::from_secs(60)).await?;
    println!("{instance}: the sum of {} squares is {sum}", options.items);
    println!("Took {:.1} s and cost {}.", began.elapsed().as_secs_f64(), meter.read());

    runtime.shutdown(None).await;
    provider.shutdown().await;
    Ok(())
}

async fn square(_: ActivityContext, n: u64) -> Result<u64, String> {
    tokio::time::sleep(Duration::from_millis(20)).await;
    Ok(n * n)
}

async fn sum_of_squares(ctx: OrchestrationContext, input: SumInput) -> Result<u64, String> {
    let mut sum = 0;
    let numbers: Vec<u64> = (1..=u64::from(input.items)).collect();
    let mut done = 0;
    for wave in numbers.chunks(input.wave as usize) {
        let squares = wave.iter().map(|n| ctx.schedule_activity_typed::<u64, u64>("Square", n)).collect();
        for square in ctx.join(squares).await {
            sum += square?;
        }
        done += wave.len();
        ctx.set_custom_status(format!("{done} of {}", input.items));
    }
    Ok(sum)
}

/// Prints each change of the custom status until the instance ends.
async fn show_progress(client: &Client, instance: &str) -> anyhow::Result<()> {
    let mut seen = 0;
    loop {
        let changed =
            client.wait_for_status_change(instance, seen, Duration::from_millis(50), Duration::from_secs(30)).await;
        match changed {
            Ok(OrchestrationStatus::Running { custom_status: Some(progress), custom_status_version }) => {
                println!("  {progress}");
                seen = custom_status_version;
            }
            Ok(OrchestrationStatus::Running { custom_status: None, custom_status_version }) => {
                seen = custom_status_version;
            }
            Ok(_) => return Ok(()),
            Err(ClientError::Timeout) => println!("  no progress for 30 seconds"),
            Err(error) => return Err(error.into()),
        }
    }
}
