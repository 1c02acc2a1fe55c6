//! What happened in a world, in order.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::hash::Hasher;
use std::sync::{Mutex, PoisonError};

use crate::seams;

/// What is told of a client that has what it wanted.
pub const ERRAND_DONE: &str = "errand done";

/// One thing that happened.
#[derive(Clone, Debug)]
pub struct Line {
    /// When, in milliseconds since the beginning of the world.
    pub at: u64,
    /// To whom, or by whom.
    pub who: String,
    /// The instance that it is about; what is about none concerns all.
    pub about: Option<String>,
    /// What.
    pub what: String,
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let about = self.about.as_deref().unwrap_or("");
        write!(f, "{:>9.3}s {:<10} {:<14} {}", self.at as f64 / 1_000.0, self.who, about, self.what)
    }
}

/// The story of a world.
#[derive(Debug)]
pub struct Story {
    lines: Mutex<VecDeque<Line>>,
    limit: usize,
}

impl Default for Story {
    fn default() -> Self {
        Self::of_the_last(usize::MAX)
    }
}

impl Story {
    /// A story that forgets what is more than so many lines ago.
    pub fn of_the_last(limit: usize) -> Self {
        Self { lines: Mutex::default(), limit }
    }

    /// Something happened.
    pub fn tell(&self, who: &str, about: Option<&str>, what: impl Into<String>) {
        let at = u64::try_from(seams::now().as_millis()).unwrap_or(u64::MAX);
        let line = Line { at, who: who.to_owned(), about: about.map(ToOwned::to_owned), what: what.into() };
        self.with(|lines| {
            if lines.len() >= self.limit {
                lines.pop_front();
            }
            lines.push_back(line);
        });
    }

    /// The whole story.
    pub fn whole(&self) -> String {
        self.with(|lines| {
            lines.iter().fold(String::new(), |mut text, line| {
                let _ = writeln!(text, "{line}");
                text
            })
        })
    }

    /// What happened to an instance and to everybody, the last `limit` lines of it.
    pub fn of(&self, instance: &str, limit: usize) -> Vec<Line> {
        self.with(|lines| {
            let concerns = |line: &&Line| line.about.as_deref().is_none_or(|about| about == instance);
            let mut told: Vec<Line> = lines.iter().rev().filter(concerns).take(limit).cloned().collect();
            told.reverse();
            told
        })
    }

    /// The instances whose errands are done.
    pub fn done(&self) -> std::collections::BTreeSet<String> {
        let is_done = |line: &&Line| line.what == ERRAND_DONE;
        self.with(|lines| lines.iter().filter(is_done).filter_map(|line| line.about.clone()).collect())
    }

    /// How many lines it has.
    pub fn len(&self) -> usize {
        self.with(|lines| lines.len())
    }

    /// Whether nothing has happened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A short form of the whole: two worlds with the same one are the same.
    pub fn fingerprint(&self) -> u64 {
        // With fixed keys, unlike a map's.
        #[allow(deprecated)]
        let mut hasher = std::hash::SipHasher::new();
        self.with(|lines| lines.iter().for_each(|line| hasher.write(line.to_string().as_bytes())));
        hasher.finish()
    }

    fn with<R>(&self, use_them: impl FnOnce(&mut VecDeque<Line>) -> R) -> R {
        use_them(&mut self.lines.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
