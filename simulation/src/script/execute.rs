//! The orchestration that runs scripts, and its activities.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use duroxide::{ActivityContext, OrchestrationContext, RetryPolicy};
use serde::{Deserialize, Serialize};

use super::{
    detached_id, informed_id, push, reader, ActivityCall, QueueDelivery, ScriptInput, Step, QUEUE, SCRIPT, TOLD_TO_FAIL,
};

/// The script orchestration.
pub async fn run(context: OrchestrationContext, input: String) -> Result<String, String> {
    let ScriptInput { steps, mut trail } = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    let mut received = ReceivedDeliveries::default();
    for (position, step) in steps.iter().enumerate() {
        match step {
            Step::Call(call) => {
                let result = schedule(&context, call, position).await?;
                push(&mut trail, &format!("call {}", result.len()));
            }
            Step::FanOut { width, call } => push(&mut trail, &fan_out(&context, *width, call).await?),
            Step::Retry { failures } => push(&mut trail, &retry(&context, *failures, position).await?),
            Step::Children(scripts) => push(&mut trail, &children(&context, scripts).await),
            Step::Detached(inner) => {
                let id = detached_id(&context.instance_id(), steps.len() - position);
                context.schedule_orchestration(SCRIPT, id, ScriptInput::begin(inner));
                push(&mut trail, "detached");
            }
            Step::Timer { millis } => {
                context.schedule_timer(Duration::from_millis(*millis)).await;
                push(&mut trail, "timer");
            }
            Step::Event { name } => {
                context.schedule_wait(name).await;
                push(&mut trail, &format!("event {name}"));
            }
            Step::Queue { messages } => {
                let taken = received.take(&context, *messages).await?;
                push(&mut trail, &format!("queue {taken}"));
            }
            Step::Race { activity, timer } => {
                let call = ActivityCall { millis: *activity, input: 10, output: 10, tag: None, session: None };
                let activity = schedule(&context, &call, position);
                let timer = context.schedule_timer(Duration::from_millis(*timer));
                let _ = context.select2(activity, timer).await;
                push(&mut trail, "race");
            }
            Step::Put { key, value: Some(value) } => context.set_kv_value(key, value),
            Step::Put { key, value: None } => context.clear_kv_value(key),
            Step::Get { key, .. } => {
                let value = context.get_kv_value(key);
                push(&mut trail, &format!("{key}={value:?}"));
            }
            Step::Status(status) => context.set_custom_status(status),
            Step::Say(text) => push(&mut trail, text),
            Step::Values { keys } => (0..*keys).for_each(|n| context.set_kv_value(format!("key {n}"), "value")),
            Step::Inform { messages } => {
                let id = detached_id(&context.instance_id(), steps.len() - position);
                push(&mut trail, &start_and_inform(&context, id, messages).await);
            }
            Step::Abandon { child, millis } => {
                let child = context.schedule_sub_orchestration(SCRIPT, ScriptInput::begin(child));
                let timer = context.schedule_timer(Duration::from_millis(*millis));
                let _ = context.select2(child, timer).await;
                push(&mut trail, "abandoned");
            }
            Step::LargeResult { bytes } => push(&mut trail, &large_result(&context, *bytes, position).await),
            Step::LargeOutput { bytes } => return Ok("z".repeat(*bytes)),
            Step::Sessions { count, millis } => push(&mut trail, &sessions(&context, *count, *millis).await?),
            Step::Again => {
                push(&mut trail, "again");
                let next = ScriptInput { steps: steps[position + 1..].to_vec(), trail };
                return context.continue_as_new(next.to_json()).await;
            }
            Step::Fail => return Err(TOLD_TO_FAIL.to_owned()),
        }
    }
    Ok(trail)
}

async fn fan_out(context: &OrchestrationContext, width: usize, call: &ActivityCall) -> Result<String, String> {
    let calls = (0..width).map(|n| schedule(context, call, n)).collect();
    let results: Result<Vec<String>, String> = context.join(calls).await.into_iter().collect();
    let results = results?;
    let size = results.first().map_or(call.output, String::len);
    Ok(format!("fan {}×{size}", results.len()))
}

async fn retry(context: &OrchestrationContext, failures: u32, position: usize) -> Result<String, String> {
    let policy = RetryPolicy::new(failures + 1)
        .with_backoff(duroxide::BackoffStrategy::Fixed { delay: Duration::from_millis(300) });
    let key = format!("{}/{}/{}", context.instance_id(), context.execution_id(), position);
    let input = serde_json::json!({ "key": key, "failures": failures }).to_string();
    context.schedule_activity_with_retry("Flaky", input, policy).await
}

async fn children(context: &OrchestrationContext, scripts: &[Vec<Step>]) -> String {
    let start = |steps: &Vec<Step>| context.schedule_sub_orchestration(SCRIPT, ScriptInput::begin(steps));
    let endings = context.join(scripts.iter().map(start).collect()).await;
    let endings = endings.into_iter().map(|ending| match ending {
        Ok(output) => output,
        Err(error) if error.contains(TOLD_TO_FAIL) => "failed".to_owned(),
        Err(error) => format!("unexpected: {error}"),
    });
    let endings: Vec<String> = endings.collect();
    format!("({})", endings.join(" | "))
}

async fn start_and_inform(context: &OrchestrationContext, id: String, messages: &[usize]) -> String {
    for (n, messages) in messages.iter().enumerate() {
        context.schedule_orchestration(SCRIPT, informed_id(&id, n), ScriptInput::begin(&reader(*messages)));
    }
    let input = InformInput { id, messages: messages.to_vec() }.to_json();
    while context.schedule_activity(INFORM, input.as_str()).await.is_err() {
        context.schedule_timer(Duration::from_millis(500)).await;
    }
    format!("informed {}", messages.len())
}

async fn large_result(context: &OrchestrationContext, bytes: usize, position: usize) -> String {
    let call = ActivityCall { millis: 0, input: 20, output: bytes, tag: None, session: None };
    match schedule(context, &call, position).await {
        Ok(_) => "unexpected result".to_owned(),
        Err(error) if is_poison(&error) => format!("unexpected: {error}"),
        Err(_) => "too large".to_owned(),
    }
}

async fn sessions(context: &OrchestrationContext, count: usize, millis: u64) -> Result<String, String> {
    let on_session = |n: usize| {
        let session = Some(own_session(&context.instance_id(), n));
        let call = ActivityCall { millis, input: 20, output: 1, tag: None, session };
        schedule(context, &call, n)
    };
    let results: Result<Vec<String>, String> =
        context.join((0..count).map(on_session).collect()).await.into_iter().collect();
    Ok(format!("sessions {}", results?.len()))
}

/// Whether duroxide failed the activity as poison, instead of the activity itself failing.
fn is_poison(error: &str) -> bool {
    error.to_lowercase().contains("poison")
}

/// The session of activity number `n` of [`Step::Sessions`].
pub fn own_session(instance: &str, n: usize) -> String {
    format!("session of {instance} {n}")
}

/// The name of the activity of [`Step::Inform`].
pub const INFORM: &str = "Inform";

/// The input of that activity.
#[derive(Debug, Serialize, Deserialize)]
struct InformInput {
    id: String,
    messages: Vec<usize>,
}

impl InformInput {
    fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data")
    }
}

/// The activity of [`Step::Inform`]: sends messages to orchestrations that have just been started. It may run twice, so
/// each message has a nonce.
pub async fn inform(context: ActivityContext, input: String) -> Result<String, String> {
    let InformInput { id, messages } = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    let client = context.get_client();
    // It begins with the last orchestration, because the last start is delivered last.
    for (n, messages) in messages.iter().enumerate().rev() {
        for number in 0..*messages {
            let delivery = QueueDelivery { number, nonce: fastrand::u64(..1 << 50) };
            let delivery = serde_json::to_string(&delivery).map_err(|error| error.to_string())?;
            let sent = client.enqueue_event(informed_id(&id, n), QUEUE, delivery).await;
            sent.map_err(|error| error.to_string())?;
        }
    }
    Ok(String::new())
}

/// The messages that an execution has taken.
#[derive(Default)]
struct ReceivedDeliveries {
    seen: BTreeSet<QueueDelivery>,
    numbers: BTreeSet<usize>,
}

impl ReceivedDeliveries {
    /// Takes messages until `count` more different ones have arrived.
    async fn take(&mut self, context: &OrchestrationContext, count: usize) -> Result<usize, String> {
        let wanted = self.numbers.len() + count;
        while self.numbers.len() < wanted {
            let message = context.dequeue_event(QUEUE).await;
            let delivery: QueueDelivery = serde_json::from_str(&message).map_err(|error| error.to_string())?;
            if !self.seen.insert(delivery.clone()) {
                return Err(format!("message {delivery:?} arrived twice"));
            }
            // One client enqueues the messages, each after the one before it has arrived.
            let last = self.numbers.last().copied();
            if self.numbers.insert(delivery.number) && last.is_some_and(|last| last > delivery.number) {
                return Err(format!("message {delivery:?} arrived after {last:?}"));
            }
        }
        Ok(count)
    }
}

fn schedule(
    context: &OrchestrationContext,
    call: &ActivityCall,
    position: usize,
) -> duroxide::DurableFuture<Result<String, String>> {
    let head = format!("{position}/{}/{}/", call.millis, call.output);
    let input = format!("{head}{}", "x".repeat(call.input.saturating_sub(head.len())));
    let scheduled = match &call.session {
        Some(session) => context.schedule_activity_on_session("Echo", input, session),
        None => context.schedule_activity("Echo", input),
    };
    match &call.tag {
        Some(tag) => scheduled.with_tag(tag),
        None => scheduled,
    }
}

/// The activity of [`ActivityCall`]. Its input has the time that it takes and the size of its result.
pub async fn echo(context: ActivityContext, input: String) -> Result<String, String> {
    let mut parts = input.split('/').skip(1);
    let mut number =
        || parts.next().and_then(|part| part.parse::<u64>().ok()).ok_or("the input is not that of an activity call");
    let (millis, bytes) = (number()?, number()?);
    tokio::select! {
        biased;
        () = tokio::time::sleep(Duration::from_millis(millis)) => {}
        () = context.cancelled() => return Err("cancelled".to_owned()),
    }
    Ok("y".repeat(usize::try_from(bytes).unwrap_or(0)))
}

/// The number of failures of each flaky activity in this process.
static FAILED: Mutex<BTreeMap<String, u32>> = Mutex::new(BTreeMap::new());

/// The activity of [`Step::Retry`]. It fails as often as its input says.
pub async fn flaky(_: ActivityContext, input: String) -> Result<String, String> {
    let input: serde_json::Value = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    let key = input["key"].as_str().unwrap_or_default().to_owned();
    let failures = u32::try_from(input["failures"].as_u64().unwrap_or(0)).unwrap_or(0);
    let mut failed = FAILED.lock().map_err(|_| "poisoned")?;
    let times = failed.entry(key).or_default();
    if *times < failures {
        *times += 1;
        return Err("flaky".to_owned());
    }
    Ok("retried".to_owned())
}
