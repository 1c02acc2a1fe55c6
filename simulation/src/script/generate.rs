//! Draws random scripts.

use std::collections::BTreeMap;

use super::{ActivityCall, Step, TAGS};
use crate::rng::SeededRng;

/// The largest depth of an instance tree below its root.
const TOP: u32 = 2;

/// Draws random scripts.
pub struct ScriptGenerator<'a> {
    rng: &'a mut SeededRng,
    /// The sessions that activities may be bound to.
    sessions: Vec<String>,
    /// The largest width of a fan-out.
    widest: u64,
    /// Whether payloads may be large.
    heavy: bool,
}

impl<'a> ScriptGenerator<'a> {
    /// A generator that draws from `rng`.
    pub fn new(rng: &'a mut SeededRng, sessions: usize, widest: u64, heavy: bool) -> Self {
        let sessions = (0..sessions).map(|n| format!("session {n}")).collect();
        Self { rng, sessions, widest, heavy }
    }

    /// Draws a script for an orchestration that a client starts.
    pub fn script(&mut self) -> Vec<Step> {
        let length = self.rng.among(1..=6);
        let mut steps = Vec::new();
        let mut values: BTreeMap<String, String> = BTreeMap::new();
        for n in 0..length {
            let step = self.step(TOP, n);
            steps.push(step);
            self.maybe_use_value(&mut steps, &mut values);
            // The client counts messages over the whole script. An execution does not pass its count to the next one.
            let reads = steps.iter().any(|step| matches!(step, Step::Queue { .. }));
            if n + 1 < length && !reads && self.rng.one_in(4) {
                // duroxide forgets the detached orchestrations of a turn that continues as new.
                if steps.iter().any(|step| matches!(step, Step::Detached(_))) {
                    steps.push(Step::Call(self.call(false)));
                }
                steps.push(Step::Again);
            }
        }
        if self.rng.one_in(12) {
            steps.push(Step::Fail);
        }
        steps
    }

    /// Adds a step that writes or reads a value to some scripts.
    fn maybe_use_value(&mut self, steps: &mut Vec<Step>, values: &mut BTreeMap<String, String>) {
        if !self.rng.one_in(3) {
            return;
        }
        let key = (*self.rng.pick(&["color", "a/b #?", "größe"])).to_owned();
        if self.rng.one_in(3) {
            steps.push(Step::Get { value: values.get(&key).cloned(), key });
            return;
        }
        let value = (!self.rng.one_in(4)).then(|| format!("v{}", self.rng.among(0..=99)));
        match &value {
            Some(value) => values.insert(key.clone(), value.clone()),
            None => values.remove(&key),
        };
        steps.push(Step::Put { key, value });
    }

    /// Draws a script that needs no client, for a child or a detached orchestration.
    fn inner(&mut self, depth: u32) -> Vec<Step> {
        let mut steps: Vec<Step> = (0..self.rng.among(1..=3)).map(|_| self.plain_step(depth)).collect();
        if self.rng.one_in(10) {
            steps.insert(1, Step::Again);
        }
        if self.rng.one_in(10) {
            steps.push(Step::Fail);
        }
        steps
    }

    fn step(&mut self, depth: u32, n: u64) -> Step {
        match self.rng.among(0..=15) {
            0 => Step::Event { name: format!("event {n}") },
            1 => Step::Queue { messages: usize::try_from(self.rng.mostly_small(1..=12)).unwrap_or(1) },
            2 => Step::Detached(self.inner(depth - 1)),
            3 => Step::Status(format!("status {}", self.rng.among(0..=99))),
            _ => self.plain_step(depth),
        }
    }

    fn plain_step(&mut self, depth: u32) -> Step {
        match self.rng.among(0..=11) {
            0 | 1 => Step::Timer { millis: self.rng.mostly_small(1..=20_000) },
            2 | 3 => {
                let widest = if depth == TOP { self.widest } else { self.widest.min(4) };
                let width = usize::try_from(self.rng.mostly_small(1..=widest)).unwrap_or(1);
                Step::FanOut { width, call: self.call(true) }
            }
            4 => Step::Retry { failures: u32::try_from(self.rng.among(1..=3)).unwrap_or(1) },
            5 => Step::Race { activity: self.rng.mostly_small(1..=5_000), timer: self.rng.mostly_small(1..=3_000) },
            6 | 7 if depth > 0 => {
                let children = self.rng.mostly_small(1..=5);
                Step::Children((0..children).map(|_| self.inner(depth - 1)).collect())
            }
            _ => Step::Call(self.call(false)),
        }
    }

    fn call(&mut self, many: bool) -> ActivityCall {
        let largest = match (self.heavy, many) {
            (true, false) => 60_000,
            (true, true) => 8_000,
            (false, _) => 200,
        };
        let has_session = self.rng.one_in(5) && !self.sessions.is_empty();
        ActivityCall {
            millis: self.rng.mostly_small(0..=3_000),
            input: usize::try_from(self.rng.mostly_small(20..=largest)).unwrap_or(20),
            output: usize::try_from(self.rng.mostly_small(1..=largest)).unwrap_or(1),
            tag: self.rng.one_in(6).then(|| (*self.rng.pick(&TAGS)).to_owned()),
            session: has_session.then(|| self.rng.pick(&self.sessions).clone()),
        }
    }
}
