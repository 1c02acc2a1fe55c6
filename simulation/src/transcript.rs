//! The transcript of a run: its events in order.

use std::collections::{BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::hash::Hasher;
use std::sync::{Mutex, PoisonError};

use crate::virtual_time;

/// The event that marks a workload item as completed.
pub const ITEM_COMPLETED: &str = "workload item completed";

/// One event.
#[derive(Clone, Debug)]
pub struct TranscriptLine {
    /// The time, in milliseconds since the run began.
    pub at: u64,
    /// The process or component that the event comes from.
    pub actor: String,
    /// The instance that the event concerns. An event without an instance concerns all of them.
    pub instance: Option<String>,
    /// The text of the event.
    pub event: String,
}

impl std::fmt::Display for TranscriptLine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let instance = self.instance.as_deref().unwrap_or("");
        write!(f, "{:>9.3}s {:<10} {:<14} {}", self.at as f64 / 1_000.0, self.actor, instance, self.event)
    }
}

/// The events of a run.
#[derive(Debug)]
pub struct Transcript {
    lines: Mutex<VecDeque<TranscriptLine>>,
    limit: usize,
}

impl Default for Transcript {
    fn default() -> Self {
        Self::with_limit(usize::MAX)
    }
}

impl Transcript {
    /// A transcript that retains the last `limit` lines.
    pub fn with_limit(limit: usize) -> Self {
        Self { lines: Mutex::default(), limit }
    }

    /// Appends an event.
    pub fn record(&self, actor: &str, instance: Option<&str>, event: impl Into<String>) {
        let at = u64::try_from(virtual_time::now().as_millis()).unwrap_or(u64::MAX);
        let instance = instance.map(ToOwned::to_owned);
        let line = TranscriptLine { at, actor: actor.to_owned(), instance, event: event.into() };
        self.with(|lines| {
            if lines.len() >= self.limit {
                lines.pop_front();
            }
            lines.push_back(line);
        });
    }

    /// All lines as one text.
    pub fn text(&self) -> String {
        self.with(|lines| {
            lines.iter().fold(String::new(), |mut text, line| {
                let _ = writeln!(text, "{line}");
                text
            })
        })
    }

    /// The last `limit` lines that concern this instance or all instances.
    pub fn lines_about(&self, instance: &str, limit: usize) -> Vec<TranscriptLine> {
        self.with(|lines| {
            let concerns = |line: &&TranscriptLine| line.instance.as_deref().is_none_or(|about| about == instance);
            let mut found: Vec<TranscriptLine> = lines.iter().rev().filter(concerns).take(limit).cloned().collect();
            found.reverse();
            found
        })
    }

    /// The names of the workload items that are completed.
    pub fn completed_items(&self) -> BTreeSet<String> {
        let is_completion = |line: &&TranscriptLine| line.event == ITEM_COMPLETED;
        self.with(|lines| lines.iter().filter(is_completion).filter_map(|line| line.instance.clone()).collect())
    }

    /// The number of lines.
    pub fn len(&self) -> usize {
        self.with(|lines| lines.len())
    }

    /// Whether the transcript has no line.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A hash of all lines. Two runs with the same fingerprint are the same.
    pub fn fingerprint(&self) -> u64 {
        // This hasher has fixed keys. The hasher of a map draws random keys.
        #[allow(deprecated)]
        let mut hasher = std::hash::SipHasher::new();
        self.with(|lines| lines.iter().for_each(|line| hasher.write(line.to_string().as_bytes())));
        hasher.finish()
    }

    fn with<R>(&self, use_lines: impl FnOnce(&mut VecDeque<TranscriptLine>) -> R) -> R {
        use_lines(&mut self.lines.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
