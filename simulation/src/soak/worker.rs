//! A worker process: a duroxide runtime on a provider of its own, which leaves when its input ends.

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
use crate::soak::site;
use crate::worker::{orchestrations, Setup};

/// What a worker says of the activities that it has begun, before their number.
pub const RAN: &str = "ran ";
/// How often it says so.
const SAY_EVERY: Duration = Duration::from_millis(500);
/// How long it may take to leave.
const LEAVING: Duration = Duration::from_secs(20);
/// How long it waits before it tries again to reach the account.
const PAUSE: Duration = Duration::from_millis(500);

/// The name of the worker in this place.
pub fn name(place: usize) -> String {
    format!("w{place}")
}

/// How the worker in this place is set up. The first one serves every tag, so that somebody does.
pub fn setup(place: usize) -> Setup {
    let tags = match place % 4 {
        _ if place == 0 => &TAGS[..],
        1 => &TAGS[..1],
        3 => &TAGS[1..],
        _ => &[],
    };
    Setup {
        turns: 2 + place % 2,
        activities: 4,
        tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
        turn_lock: Duration::from_secs(4),
        activity_lock: Duration::from_secs(5),
        session_lock: Duration::from_secs(5),
        long_poll: Duration::from_secs(if place.is_multiple_of(2) { 30 } else { 2 }),
        max_attempts: 40,
        sessions: 10,
    }
}

/// What the process does.
pub async fn serve(endpoint: &str, place: usize) -> Result<()> {
    end_at_panics();
    let provider = Arc::new(open(endpoint, &name(place)).await);
    let ran: Arc<AtomicU64> = Arc::default();
    let options = setup(place).options(&name(place));
    let runtime = Runtime::start_with_options(provider.clone(), activities(&ran), orchestrations(), options).await;
    let mut input = tokio::io::stdin();
    let mut rest = Vec::new();
    let told_to_leave = input.read_to_end(&mut rest);
    tokio::pin!(told_to_leave);
    while tokio::time::timeout(SAY_EVERY, told_to_leave.as_mut()).await.is_err() {
        say(&ran)?;
    }
    runtime.shutdown(None).await;
    provider.shutdown_within(LEAVING).await;
    say(&ran)
}

/// A panic anywhere is one too many, and must not go by in a task that nobody asks.
fn end_at_panics() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        std::process::exit(101);
    }));
}

/// The container's provider, tried until it works: the account may be in trouble right now.
async fn open(endpoint: &str, name: &str) -> CosmosDBProvider {
    loop {
        match CosmosDBProvider::new_with_config(site::config(endpoint, name)).await {
            Ok(provider) => return provider,
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// Fails where nobody listens any more.
fn say(ran: &AtomicU64) -> Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{RAN}{}", ran.load(Ordering::Relaxed))?;
    Ok(output.flush()?)
}

/// The activities of [`worker::activities`](crate::worker::activities), counted.
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
            bank::pay_in(context, input)
        })
        .build()
}

/// The activity that fails as often as its input says, over all processes and their lives: the history has counted.
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

/// How many calls with this input have failed in this execution.
async fn failures_so_far(context: &ActivityContext, input: &str) -> u64 {
    let client = context.get_client();
    let history = loop {
        match client.read_execution_history(context.instance_id(), context.execution_id()).await {
            Ok(history) => break history,
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    };
    let is_one = |id: u64| {
        let scheduled = history.iter().find(|event| event.event_id == id).map(|event| &event.kind);
        matches!(scheduled, Some(EventKind::ActivityScheduled { input: its, .. }) if its == input)
    };
    let failed = history.iter().filter(|event| matches!(event.kind, EventKind::ActivityFailed { .. }));
    failed.filter_map(|event| event.source_event_id).filter(|id| is_one(*id)).count() as u64
}
