//! A worker process: a duroxide runtime on a provider of its own. It shuts down when its standard input ends.

use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use duroxide::runtime::registry::ActivityRegistry;
use duroxide::runtime::Runtime;
use duroxide::{ActivityContext, EventKind};
use duroxide_cosmos::CosmosDBProvider;
use tokio::io::AsyncReadExt;

use crate::bank;
use crate::script::{self, TAGS};
use crate::soak::served_account;
use crate::worker::{orchestrations, WorkerSettings};

/// The beginning of the line in which a worker reports how many activities it has begun.
pub const RAN: &str = "ran ";
/// The time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);
/// The time that the provider may take to shut down.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);
/// The time between two attempts to reach the account.
const PAUSE: Duration = Duration::from_millis(500);

/// The name of the worker with this number.
pub fn name(number: usize) -> String {
    format!("w{number}")
}

/// The settings of the worker with this number. The first worker serves every tag, so that no activity waits for ever.
pub fn settings(number: usize) -> WorkerSettings {
    let tags = match number % 4 {
        _ if number == 0 => &TAGS[..],
        1 => &TAGS[..1],
        3 => &TAGS[1..],
        _ => &[],
    };
    WorkerSettings {
        turns: 2 + number % 2,
        activities: 4,
        tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        turn_lock: Duration::from_secs(4),
        activity_lock: Duration::from_secs(5),
        session_lock: Duration::from_secs(5),
        long_poll: Duration::from_secs(if number.is_multiple_of(2) { 30 } else { 2 }),
        max_attempts: 40,
        sessions: 10,
    }
}

/// Runs the worker process.
pub async fn serve(endpoint: &str, number: usize) -> Result<()> {
    exit_on_panic();
    let provider = Arc::new(open(endpoint, &name(number)).await);
    let ran: Arc<AtomicU64> = Arc::default();
    let options = settings(number).options(&name(number));
    let runtime = Runtime::start_with_options(provider.clone(), activities(&ran), orchestrations(), options).await;
    let mut input = tokio::io::stdin();
    let mut rest = Vec::new();
    let shutdown_requested = input.read_to_end(&mut rest);
    tokio::pin!(shutdown_requested);
    while tokio::time::timeout(REPORT_INTERVAL, shutdown_requested.as_mut()).await.is_err() {
        report(&ran)?;
    }
    runtime.shutdown(None).await;
    provider.shutdown_within(SHUTDOWN_TIMEOUT).await;
    report(&ran)
}

/// Ends the process on any panic. A panic in a task that is never joined would stay unnoticed.
fn exit_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::exit(101);
    }));
}

/// Opens a provider, and repeats that until it succeeds. The account may have faults right now.
async fn open(endpoint: &str, name: &str) -> CosmosDBProvider {
    loop {
        match CosmosDBProvider::new_with_config(served_account::config(endpoint, name)).await {
            Ok(provider) => return provider,
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Reports the number of activities. It fails if the parent process is gone.
fn report(ran: &AtomicU64) -> Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{RAN}{}", ran.load(Ordering::Relaxed))?;
    Ok(output.flush()?)
}

/// The activities of [`worker::activities`](crate::worker::activities), with a counter.
fn activities(ran: &Arc<AtomicU64>) -> ActivityRegistry {
    let counted = || {
        let ran = ran.clone();
        move || ran.fetch_add(1, Ordering::Relaxed)
    };
    let (echo, flaking, pay) = (counted(), counted(), counted());
    ActivityRegistry::builder()
        .register("Echo", move |context, input| {
            echo();
            script::echo(context, input)
        })
        .register("Flaky", move |context, input| {
            flaking();
            flaky(context, input)
        })
        .register(bank::PAY, move |context, input| {
            pay();
            bank::pay(context, input)
        })
        .build()
}

/// The activity that fails as often as its input says. It counts failures in the history, so the count survives a
/// crash.
async fn flaky(context: ActivityContext, input: String) -> Result<String, String> {
    let wanted: serde_json::Value = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    let wanted = wanted["failures"].as_u64().unwrap_or(0);
    let failures = tokio::select! {
        failures = failures_so_far(&context, &input) => failures,
        () = context.cancelled() => return Err("cancelled".to_owned()),
    };
    if failures < wanted {
        return Err("flaky".to_owned());
    }
    Ok("retried".to_owned())
}

/// The number of calls with this input that have failed in this execution.
async fn failures_so_far(context: &ActivityContext, input: &str) -> u64 {
    let client = context.get_client();
    let history = loop {
        match client.read_execution_history(context.instance_id(), context.execution_id()).await {
            Ok(history) => break history,
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    };
    let has_input = |id: u64| {
        let scheduled = history.iter().find(|event| event.event_id == id).map(|event| &event.kind);
        matches!(scheduled, Some(EventKind::ActivityScheduled { input: scheduled, .. }) if scheduled == input)
    };
    let failed = history.iter().filter(|event| matches!(event.kind, EventKind::ActivityFailed { .. }));
    failed.filter_map(|event| event.source_event_id).filter(|id| has_input(*id)).count() as u64
}
