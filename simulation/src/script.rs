//! What orchestrations do: lists of steps, put together at random, whose outcome is known without running them.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use duroxide::{ActivityContext, OrchestrationContext, RetryPolicy};
use serde::{Deserialize, Serialize};

use crate::dice::Dice;

/// The name of the orchestration that runs scripts.
pub const SCRIPT: &str = "Script";
/// The name of the queue that scripts read.
pub const QUEUE: &str = "inbox";
/// Tags that activities may have.
pub const TAGS: [&str; 2] = ["gpu", "cpu"];
/// An event that nobody raises.
pub const NEVER: &str = "never";

/// One step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// One activity.
    Call(Call),
    /// Many of them at once.
    FanOut {
        /// How many.
        width: usize,
        /// Each.
        call: Call,
    },
    /// An activity that fails some times.
    Retry {
        /// How often.
        failures: u32,
    },
    /// Children at once, each with a script of its own; whether they end well is their script's word.
    Children(Vec<Vec<Step>>),
    /// An orchestration that nobody waits for.
    Detached(Vec<Step>),
    /// Some time.
    Timer {
        /// How long.
        millis: u64,
    },
    /// An event from outside.
    Event {
        /// Its name.
        name: String,
    },
    /// Messages from outside.
    Queue {
        /// How many different ones.
        messages: usize,
    },
    /// An activity against a timer; whoever loses is dropped.
    Race {
        /// How long the activity takes.
        activity: u64,
        /// How long the timer takes.
        timer: u64,
    },
    /// Writes a value.
    Put {
        /// Its key.
        key: String,
        /// The value; none clears the key.
        value: Option<String>,
    },
    /// Reads a value.
    Get {
        /// Its key.
        key: String,
        /// What is there.
        value: Option<String>,
    },
    /// Sets the custom status.
    Status(String),
    /// Adds a text to the output.
    Say(String),
    /// Writes so many values in one turn: with 100 of them the turn does not fit one batch.
    Values {
        /// How many.
        keys: usize,
    },
    /// Starts orchestrations that nobody waits for, and calls an activity that sends each of them messages, in one turn: the
    /// activity runs after the turn was committed, and perhaps before the starts are delivered.
    Inform {
        /// How many messages each of them waits for.
        messages: Vec<usize>,
    },
    /// Starts a child and stops waiting for it after a while: the child is cancelled.
    Abandon {
        /// What the child does.
        child: Vec<Step>,
        /// How long the child is waited for.
        millis: u64,
    },
    /// An activity whose result is larger than a document.
    LargeResult {
        /// How large the result is.
        bytes: usize,
    },
    /// Ends with an output that is larger than a document: the turn can't be stored.
    LargeOutput {
        /// How large the output is.
        bytes: usize,
    },
    /// Activities at once, each on a session of its own.
    Sessions {
        /// How many.
        count: usize,
        /// How long each of them takes.
        millis: u64,
    },
    /// Continues as new.
    Again,
    /// Fails.
    Fail,
}

/// An activity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// How long it takes.
    pub millis: u64,
    /// How large its input is.
    pub input: usize,
    /// How large its result is.
    pub output: usize,
    /// Who may run it.
    pub tag: Option<String>,
    /// What it is bound to.
    pub session: Option<String>,
}

/// The input of the orchestration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Input {
    /// What is still to be done.
    pub steps: Vec<Step>,
    /// What was done by executions before this one.
    pub trail: String,
}

impl Input {
    /// The input that begins a script.
    pub fn begin(steps: &[Step]) -> String {
        Self { steps: steps.to_vec(), trail: String::new() }.to_json()
    }

    fn to_json(&self) -> String {
        serde_json::to_string(self).expect("steps are plain data")
    }
}

/// A message to a script's queue. No two have the same number and nonce: who finds one twice was handed it twice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Parcel {
    /// Which of the messages it is.
    pub number: usize,
    /// Which attempt to send it.
    pub nonce: u64,
}

/// How a script ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With this output.
    Output(String),
    /// With the failure that it is told to have.
    Failure,
    /// With a failure, since what it wanted to store is too large.
    TooLarge,
}

/// What a failing script says.
pub const TOLD_TO_FAIL: &str = "told to fail";

/// How `steps` end.
pub fn ending(steps: &[Step]) -> Ending {
    let mut trail = String::new();
    for step in steps {
        match step {
            Step::Call(call) => push(&mut trail, &format!("call {}", call.output)),
            Step::FanOut { width, call } => push(&mut trail, &format!("fan {width}×{}", call.output)),
            Step::Retry { .. } => push(&mut trail, "retried"),
            // duroxide fails a parent whose child has met trouble with the storage.
            Step::Children(scripts) if scripts.iter().any(|steps| ending(steps) == Ending::TooLarge) => {
                return Ending::TooLarge;
            }
            Step::Children(scripts) => {
                let endings: Vec<String> = scripts.iter().map(|steps| told(&ending(steps))).collect();
                push(&mut trail, &format!("({})", endings.join(" | ")));
            }
            Step::Detached(_) => push(&mut trail, "detached"),
            Step::Timer { .. } => push(&mut trail, "timer"),
            Step::Event { name } => push(&mut trail, &format!("event {name}")),
            Step::Queue { messages } => push(&mut trail, &format!("queue {messages}")),
            Step::Race { .. } => push(&mut trail, "race"),
            Step::Put { .. } => {}
            Step::Get { key, value } => push(&mut trail, &format!("{key}={value:?}")),
            Step::Status(_) | Step::Values { .. } => {}
            Step::Say(text) => push(&mut trail, text),
            Step::Inform { messages } => push(&mut trail, &format!("informed {}", messages.len())),
            Step::Abandon { .. } => push(&mut trail, "abandoned"),
            Step::LargeResult { .. } => push(&mut trail, "too large"),
            Step::Sessions { count, .. } => push(&mut trail, &format!("sessions {count}")),
            Step::Again => push(&mut trail, "again"),
            Step::Fail => return Ending::Failure,
            Step::LargeOutput { .. } => return Ending::TooLarge,
        }
    }
    Ending::Output(trail)
}

/// The custom status that a script leaves.
pub fn last_status(steps: &[Step]) -> Option<&str> {
    steps.iter().rev().find_map(|step| match step {
        Step::Status(status) => Some(status.as_str()),
        _ => None,
    })
}

/// The orchestrations that `steps` start and don't wait for, each with its script.
pub fn detached(instance: &str, steps: &[Step]) -> Vec<(String, Vec<Step>)> {
    let mut found = Vec::new();
    let reached = steps.iter().position(|step| *step == Step::Fail).unwrap_or(steps.len());
    for (position, step) in steps[..reached].iter().enumerate() {
        // Steps are counted from the end, which continuing as new does not change.
        let id = detached_id(instance, steps.len() - position);
        match step {
            Step::Detached(inner) => {
                found.extend(detached(&id, inner));
                found.push((id, inner.clone()));
            }
            Step::Inform { messages } => {
                let informed = messages.iter().enumerate();
                found.extend(informed.map(|(n, messages)| (informed_id(&id, n), reader(*messages))));
            }
            _ => {}
        }
    }
    found
}

/// The script of an orchestration that is informed.
fn reader(messages: usize) -> Vec<Step> {
    vec![Step::Queue { messages }]
}

fn informed_id(id: &str, n: usize) -> String {
    format!("{id}.{n}")
}

/// How many different messages a script takes from its queue.
pub fn parcels(steps: &[Step]) -> usize {
    let messages = |step: &Step| if let Step::Queue { messages } = step { *messages } else { 0 };
    steps.iter().map(messages).sum()
}

/// The events that a script waits for.
pub fn events(steps: &[Step]) -> BTreeSet<String> {
    let names = steps.iter().filter_map(|step| match step {
        Step::Event { name } if name != NEVER => Some(name.clone()),
        _ => None,
    });
    names.collect()
}

fn detached_id(instance: &str, from_end: usize) -> String {
    format!("{instance}.d{from_end}")
}

fn push(trail: &mut String, what: &str) {
    if !trail.is_empty() {
        trail.push_str(", ");
    }
    trail.push_str(what);
}

fn told(ending: &Ending) -> String {
    match ending {
        Ending::Output(output) => output.clone(),
        Ending::Failure => "failed".to_owned(),
        Ending::TooLarge => "too large".to_owned(),
    }
}

/// Runs a script.
pub async fn run(context: OrchestrationContext, input: String) -> Result<String, String> {
    let Input { steps, mut trail } = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    let mut parcels = Parcels::default();
    for (position, step) in steps.iter().enumerate() {
        match step {
            Step::Call(call) => {
                let result = schedule(&context, call, position).await?;
                push(&mut trail, &format!("call {}", result.len()));
            }
            Step::FanOut { width, call } => {
                let calls = (0..*width).map(|n| schedule(&context, call, n)).collect();
                let results: Result<Vec<String>, String> = context.join(calls).await.into_iter().collect();
                let results = results?;
                let size = results.first().map_or(call.output, String::len);
                push(&mut trail, &format!("fan {}×{size}", results.len()));
            }
            Step::Retry { failures } => {
                let policy = RetryPolicy::new(failures + 1)
                    .with_backoff(duroxide::BackoffStrategy::Fixed { delay: Duration::from_millis(300) });
                let key = format!("{}/{}/{}", context.instance_id(), context.execution_id(), position);
                let input = serde_json::json!({ "key": key, "failures": failures }).to_string();
                let result = context.schedule_activity_with_retry("Flaky", input, policy).await?;
                push(&mut trail, &result);
            }
            Step::Children(scripts) => {
                let start = |steps: &Vec<Step>| context.schedule_sub_orchestration(SCRIPT, Input::begin(steps));
                let endings = context.join(scripts.iter().map(start).collect()).await;
                let told = endings.into_iter().map(|ending| match ending {
                    Ok(output) => output,
                    Err(error) if error.contains(TOLD_TO_FAIL) => "failed".to_owned(),
                    Err(error) => format!("unexpected: {error}"),
                });
                let told: Vec<String> = told.collect();
                push(&mut trail, &format!("({})", told.join(" | ")));
            }
            Step::Detached(inner) => {
                let id = detached_id(&context.instance_id(), steps.len() - position);
                context.schedule_orchestration(SCRIPT, id, Input::begin(inner));
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
                let taken = parcels.take(&context, *messages).await?;
                push(&mut trail, &format!("queue {taken}"));
            }
            Step::Race { activity, timer } => {
                let call = Call { millis: *activity, input: 10, output: 10, tag: None, session: None };
                let slow = schedule(&context, &call, position);
                let timer = context.schedule_timer(Duration::from_millis(*timer));
                let _ = context.select2(slow, timer).await;
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
                for (n, messages) in messages.iter().enumerate() {
                    context.schedule_orchestration(SCRIPT, informed_id(&id, n), Input::begin(&reader(*messages)));
                }
                let news = News { id, messages: messages.clone() }.to_json();
                while context.schedule_activity(INFORM, news.as_str()).await.is_err() {
                    context.schedule_timer(Duration::from_millis(500)).await;
                }
                push(&mut trail, &format!("informed {}", messages.len()));
            }
            Step::Abandon { child, millis } => {
                let child = context.schedule_sub_orchestration(SCRIPT, Input::begin(child));
                let timer = context.schedule_timer(Duration::from_millis(*millis));
                let _ = context.select2(child, timer).await;
                push(&mut trail, "abandoned");
            }
            Step::LargeResult { bytes } => {
                let call = Call { millis: 0, input: 20, output: *bytes, tag: None, session: None };
                match schedule(&context, &call, position).await {
                    Ok(_) => push(&mut trail, "unexpected result"),
                    Err(error) if is_poison(&error) => push(&mut trail, &format!("unexpected: {error}")),
                    Err(_) => push(&mut trail, "too large"),
                }
            }
            Step::LargeOutput { bytes } => return Ok("z".repeat(*bytes)),
            Step::Sessions { count, millis } => {
                let on_session = |n: usize| {
                    let session = Some(own_session(&context.instance_id(), n));
                    let call = Call { millis: *millis, input: 20, output: 1, tag: None, session };
                    schedule(&context, &call, n)
                };
                let results: Result<Vec<String>, String> =
                    context.join((0..*count).map(on_session).collect()).await.into_iter().collect();
                push(&mut trail, &format!("sessions {}", results?.len()));
            }
            Step::Again => {
                push(&mut trail, "again");
                let next = Input { steps: steps[position + 1..].to_vec(), trail };
                return context.continue_as_new(next.to_json()).await;
            }
            Step::Fail => return Err(TOLD_TO_FAIL.to_owned()),
        }
    }
    Ok(trail)
}

/// Whether an activity was given up, instead of having failed.
fn is_poison(error: &str) -> bool {
    error.to_lowercase().contains("poison")
}

/// The name of the session that the `n`th activity of [`Step::Sessions`] is bound to.
pub fn own_session(instance: &str, n: usize) -> String {
    format!("session of {instance} {n}")
}

/// The name of the activity that sends messages to orchestrations which were just started.
pub const INFORM: &str = "Inform";

/// The input of that activity.
#[derive(Debug, Serialize, Deserialize)]
struct News {
    id: String,
    messages: Vec<usize>,
}

impl News {
    fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data")
    }
}

/// The activity that sends messages to orchestrations which were just started. It may run twice: each message has a nonce.
pub async fn inform(context: ActivityContext, input: String) -> Result<String, String> {
    let News { id, messages } = serde_json::from_str(&input).map_err(|error| error.to_string())?;
    let client = context.get_client();
    // The last ones first: their starts are delivered last.
    for (n, messages) in messages.iter().enumerate().rev() {
        for number in 0..*messages {
            let parcel = Parcel { number, nonce: fastrand::u64(..1 << 50) };
            let parcel = serde_json::to_string(&parcel).map_err(|error| error.to_string())?;
            let sent = client.enqueue_event(informed_id(&id, n), QUEUE, parcel).await;
            sent.map_err(|error| error.to_string())?;
        }
    }
    Ok(String::new())
}

/// The messages that an execution has taken.
#[derive(Default)]
struct Parcels {
    seen: BTreeSet<Parcel>,
    numbers: BTreeSet<usize>,
}

impl Parcels {
    /// Takes messages until there are `count` different ones more.
    async fn take(&mut self, context: &OrchestrationContext, count: usize) -> Result<usize, String> {
        let wanted = self.numbers.len() + count;
        while self.numbers.len() < wanted {
            let message = context.dequeue_event(QUEUE).await;
            let parcel: Parcel = serde_json::from_str(&message).map_err(|error| error.to_string())?;
            if !self.seen.insert(parcel.clone()) {
                return Err(format!("message {parcel:?} came twice"));
            }
            // One client puts them into the queue, each after the one before it is there.
            let last = self.numbers.last().copied();
            if self.numbers.insert(parcel.number) && last.is_some_and(|last| last > parcel.number) {
                return Err(format!("message {parcel:?} came after {last:?}"));
            }
        }
        Ok(count)
    }
}

fn schedule(
    context: &OrchestrationContext,
    call: &Call,
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

/// The activity that scripts call: takes as long as its input says and returns as much.
pub async fn echo(context: ActivityContext, input: String) -> Result<String, String> {
    let mut parts = input.split('/').skip(1);
    let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok()).ok_or("not an input of ours");
    let (millis, bytes) = (number()?, number()?);
    tokio::select! {
        biased;
        () = tokio::time::sleep(Duration::from_millis(millis)) => {}
        () = context.cancelled() => return Err("cancelled".to_owned()),
    }
    Ok("y".repeat(usize::try_from(bytes).unwrap_or(0)))
}

/// How often each flaky activity has failed, in this process.
static FAILED: Mutex<BTreeMap<String, u32>> = Mutex::new(BTreeMap::new());

/// The activity that fails as often as its input says.
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

/// How deep families are, at most.
const TOP: u32 = 2;

/// Draws scripts.
pub struct Author<'a> {
    dice: &'a mut Dice,
    /// Sessions that activities may be bound to.
    sessions: Vec<String>,
    /// How wide fan-outs may be.
    widest: u64,
    /// Whether large payloads are drawn.
    heavy: bool,
}

impl<'a> Author<'a> {
    /// An author who draws from `dice`.
    pub fn new(dice: &'a mut Dice, sessions: usize, widest: u64, heavy: bool) -> Self {
        let sessions = (0..sessions).map(|n| format!("session {n}")).collect();
        Self { dice, sessions, widest, heavy }
    }

    /// A script for an orchestration that a client starts.
    pub fn script(&mut self) -> Vec<Step> {
        let length = self.dice.among(1..=6);
        let mut steps = Vec::new();
        let mut values: BTreeMap<String, String> = BTreeMap::new();
        for n in 0..length {
            let step = self.step(TOP, n);
            steps.push(step);
            self.about_values(&mut steps, &mut values);
            // A client's messages are counted over the whole script, an execution's are not carried into the next.
            let reads = steps.iter().any(|step| matches!(step, Step::Queue { .. }));
            if n + 1 < length && !reads && self.dice.one_in(4) {
                // duroxide forgets what a turn starts that continues as new.
                if steps.iter().any(|step| matches!(step, Step::Detached(_))) {
                    steps.push(Step::Call(self.call(false)));
                }
                steps.push(Step::Again);
            }
        }
        if self.dice.one_in(12) {
            steps.push(Step::Fail);
        }
        steps
    }

    /// Sometimes a value is written or read.
    fn about_values(&mut self, steps: &mut Vec<Step>, values: &mut BTreeMap<String, String>) {
        if !self.dice.one_in(3) {
            return;
        }
        let key = (*self.dice.pick(&["color", "a/b #?", "größe"])).to_owned();
        if self.dice.one_in(3) {
            steps.push(Step::Get { value: values.get(&key).cloned(), key });
            return;
        }
        let value = (!self.dice.one_in(4)).then(|| format!("v{}", self.dice.among(0..=99)));
        match &value {
            Some(value) => values.insert(key.clone(), value.clone()),
            None => values.remove(&key),
        };
        steps.push(Step::Put { key, value });
    }

    /// A script without anything from outside, for a child or one that is detached.
    fn inner(&mut self, depth: u32) -> Vec<Step> {
        let mut steps: Vec<Step> = (0..self.dice.among(1..=3)).map(|n| self.plain_step(depth, n)).collect();
        if self.dice.one_in(10) {
            steps.insert(1, Step::Again);
        }
        if self.dice.one_in(10) {
            steps.push(Step::Fail);
        }
        steps
    }

    fn step(&mut self, depth: u32, n: u64) -> Step {
        match self.dice.among(0..=15) {
            0 => Step::Event { name: format!("event {n}") },
            1 => Step::Queue { messages: usize::try_from(self.dice.mostly_small(1..=12)).unwrap_or(1) },
            2 => Step::Detached(self.inner(depth - 1)),
            3 => Step::Status(format!("status {}", self.dice.among(0..=99))),
            _ => self.plain_step(depth, n),
        }
    }

    fn plain_step(&mut self, depth: u32, _n: u64) -> Step {
        match self.dice.among(0..=11) {
            0 | 1 => Step::Timer { millis: self.dice.mostly_small(1..=20_000) },
            2 | 3 => {
                let widest = if depth == TOP { self.widest } else { self.widest.min(4) };
                let width = usize::try_from(self.dice.mostly_small(1..=widest)).unwrap_or(1);
                Step::FanOut { width, call: self.call(true) }
            }
            4 => Step::Retry { failures: u32::try_from(self.dice.among(1..=3)).unwrap_or(1) },
            5 => Step::Race { activity: self.dice.mostly_small(1..=5_000), timer: self.dice.mostly_small(1..=3_000) },
            6 | 7 if depth > 0 => {
                let children = self.dice.mostly_small(1..=5);
                Step::Children((0..children).map(|_| self.inner(depth - 1)).collect())
            }
            _ => Step::Call(self.call(false)),
        }
    }

    fn call(&mut self, many: bool) -> Call {
        let largest = match (self.heavy, many) {
            (true, false) => 60_000,
            (true, true) => 8_000,
            (false, _) => 200,
        };
        let session = self.dice.one_in(5) && !self.sessions.is_empty();
        Call {
            millis: self.dice.mostly_small(0..=3_000),
            input: usize::try_from(self.dice.mostly_small(20..=largest)).unwrap_or(20),
            output: usize::try_from(self.dice.mostly_small(1..=largest)).unwrap_or(1),
            tag: self.dice.one_in(6).then(|| (*self.dice.pick(&TAGS)).to_owned()),
            session: session.then(|| self.dice.pick(&self.sessions).clone()),
        }
    }
}
