//! Scripts: lists of random steps that an orchestration runs. Their outcome is known without running them.

mod execute;
mod generate;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub use execute::{echo, flaky, inform, own_session, run, INFORM};
pub use generate::ScriptGenerator;

/// The name of the orchestration that runs scripts.
pub const SCRIPT: &str = "Script";
/// The name of the queue that scripts read.
pub const QUEUE: &str = "inbox";
/// Tags that activities may have.
pub const TAGS: [&str; 2] = ["gpu", "cpu"];
/// An event that no client raises.
pub const NEVER: &str = "never";

/// One step of a script.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    /// Calls one activity.
    Call(ActivityCall),
    /// Calls many activities at once.
    FanOut {
        /// The number of activities.
        width: usize,
        /// Each call.
        call: ActivityCall,
    },
    /// Calls an activity that fails a few times, and retries it.
    Retry {
        /// The number of failures.
        failures: u32,
    },
    /// Starts children at once, each with a script of its own, and waits for them. A child may fail.
    Children(Vec<Vec<Step>>),
    /// Starts an orchestration without waiting for it.
    Detached(Vec<Step>),
    /// Waits for a timer.
    Timer {
        /// The time in milliseconds.
        millis: u64,
    },
    /// Waits for an event that a client raises.
    Event {
        /// The name of the event.
        name: String,
    },
    /// Takes messages of a client from the queue.
    Queue {
        /// The number of different messages.
        messages: usize,
    },
    /// Races an activity against a timer and cancels the loser.
    Race {
        /// The time of the activity in milliseconds.
        activity: u64,
        /// The time of the timer in milliseconds.
        timer: u64,
    },
    /// Writes a key-value pair.
    Put {
        /// The key.
        key: String,
        /// The value. `None` clears the key.
        value: Option<String>,
    },
    /// Reads the value of a key.
    Get {
        /// The key.
        key: String,
        /// The expected value.
        value: Option<String>,
    },
    /// Sets the custom status.
    Status(String),
    /// Adds a text to the output.
    Say(String),
    /// Writes many values in one turn. A turn with 100 of them does not fit one batch.
    Values {
        /// The number of values.
        keys: usize,
    },
    /// Starts orchestrations without waiting for them and, in the same turn, calls an activity that sends messages to
    /// each of them. The activity runs after the commit, and perhaps before the starts are delivered.
    Inform {
        /// The number of messages that each orchestration waits for.
        messages: Vec<usize>,
    },
    /// Starts a child and stops waiting for it after a while, which cancels the child.
    Abandon {
        /// The script of the child.
        child: Vec<Step>,
        /// The waiting time in milliseconds.
        millis: u64,
    },
    /// Calls an activity whose result is larger than a document may be.
    LargeResult {
        /// The size of the result.
        bytes: usize,
    },
    /// Ends with an output that is larger than a document may be, so that the turn can't be stored.
    LargeOutput {
        /// The size of the output.
        bytes: usize,
    },
    /// Calls activities at once, each on a session of its own.
    Sessions {
        /// The number of activities.
        count: usize,
        /// The time of each activity in milliseconds.
        millis: u64,
    },
    /// Continues as new.
    Again,
    /// Fails.
    Fail,
}

/// A call of an activity.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivityCall {
    /// The time that it takes in milliseconds.
    pub millis: u64,
    /// The size of its input.
    pub input: usize,
    /// The size of its result.
    pub output: usize,
    /// The tag of the workers that may run it.
    pub tag: Option<String>,
    /// The session that it is bound to.
    pub session: Option<String>,
}

/// The input of the script orchestration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScriptInput {
    /// The steps that are left.
    pub steps: Vec<Step>,
    /// The output of the steps that earlier executions have run.
    pub trail: String,
}

impl ScriptInput {
    /// The input that begins a script.
    pub fn begin(steps: &[Step]) -> String {
        Self { steps: steps.to_vec(), trail: String::new() }.to_json()
    }

    fn to_json(&self) -> String {
        serde_json::to_string(self).expect("steps are plain data")
    }
}

/// A message in the queue of a script. No two have the same number and nonce, so a script detects a second delivery.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QueueDelivery {
    /// The number of the message.
    pub number: usize,
    /// A number that is unique to the attempt to send it.
    pub nonce: u64,
}

/// The end of a script.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScriptEnding {
    /// It completes with this output.
    Output(String),
    /// It fails at [`Step::Fail`].
    Failure,
    /// It fails because a result or an output is too large to be stored.
    TooLarge,
}

/// The error message of [`Step::Fail`].
pub const TOLD_TO_FAIL: &str = "told to fail";

/// The end of a script with these steps.
pub fn ending(steps: &[Step]) -> ScriptEnding {
    let mut trail = String::new();
    for step in steps {
        match step {
            Step::Call(call) => push(&mut trail, &format!("call {}", call.output)),
            Step::FanOut { width, call } => push(&mut trail, &format!("fan {width}×{}", call.output)),
            Step::Retry { .. } => push(&mut trail, "retried"),
            // duroxide fails a parent whose child has failed with a storage error.
            Step::Children(scripts) if scripts.iter().any(|steps| ending(steps) == ScriptEnding::TooLarge) => {
                return ScriptEnding::TooLarge;
            }
            Step::Children(scripts) => {
                let endings: Vec<String> = scripts.iter().map(|steps| describe(&ending(steps))).collect();
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
            Step::Fail => return ScriptEnding::Failure,
            Step::LargeOutput { .. } => return ScriptEnding::TooLarge,
        }
    }
    ScriptEnding::Output(trail)
}

/// The last custom status of a script.
pub fn last_status(steps: &[Step]) -> Option<&str> {
    steps.iter().rev().find_map(|step| match step {
        Step::Status(status) => Some(status.as_str()),
        _ => None,
    })
}

/// The orchestrations that a script starts without waiting for them, each with its script.
pub fn detached(instance: &str, steps: &[Step]) -> Vec<(String, Vec<Step>)> {
    let mut found = Vec::new();
    let reached = steps.iter().position(|step| *step == Step::Fail).unwrap_or(steps.len());
    for (position, step) in steps[..reached].iter().enumerate() {
        // Steps count from the end, because continuing as new does not change that number.
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

/// The script of an orchestration that [`Step::Inform`] starts.
fn reader(messages: usize) -> Vec<Step> {
    vec![Step::Queue { messages }]
}

fn informed_id(id: &str, n: usize) -> String {
    format!("{id}.{n}")
}

/// The number of different messages that a script takes from its queue.
pub fn queue_messages(steps: &[Step]) -> usize {
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

fn push(trail: &mut String, output: &str) {
    if !trail.is_empty() {
        trail.push_str(", ");
    }
    trail.push_str(output);
}

fn describe(ending: &ScriptEnding) -> String {
    match ending {
        ScriptEnding::Output(output) => output.clone(),
        ScriptEnding::Failure => "failed".to_owned(),
        ScriptEnding::TooLarge => "too large".to_owned(),
    }
}

/// Removes the steps that need a client or start an orchestration without waiting for it. Keeps children if `children`
/// is set.
pub fn self_contained(mut steps: Vec<Step>, children: bool) -> Vec<Step> {
    steps.retain(|step| match step {
        Step::Detached(_) | Step::Inform { .. } | Step::Queue { .. } => false,
        Step::Event { name } => name == NEVER,
        Step::Children(_) | Step::Abandon { .. } => children,
        _ => true,
    });
    steps
}
