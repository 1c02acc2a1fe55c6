//! The seeded source of every random choice of a run.

use std::ops::RangeInclusive;

/// A random number generator. The same seed gives the same numbers in the same order.
#[derive(Debug)]
pub struct SeededRng(fastrand::Rng);

impl SeededRng {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// A separate generator for one purpose. Numbers that it draws do not change later numbers of `self`.
    pub fn fork(&mut self) -> Self {
        Self(self.0.fork())
    }

    /// True once in `of` draws on average.
    pub fn one_in(&mut self, of: u32) -> bool {
        self.0.u32(0..of) == 0
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.0.f64() < probability
    }

    /// A number of the range. All numbers are equally likely.
    pub fn among(&mut self, range: RangeInclusive<u64>) -> u64 {
        self.0.u64(range)
    }

    /// A number of the range. Small numbers are more likely than large ones.
    pub fn mostly_small(&mut self, range: RangeInclusive<u64>) -> u64 {
        let share = self.0.f64().powi(4);
        let span = (*range.end() - *range.start()) as f64;
        range.start() + (share * (span + 0.999)) as u64
    }

    /// One of the items.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.0.usize(0..of.len())]
    }

    /// Puts the items into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        self.0.shuffle(items);
    }
}
