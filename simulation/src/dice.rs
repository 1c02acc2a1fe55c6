//! Whatever is drawn in a world is drawn from its seed.

use std::ops::RangeInclusive;

/// A source of draws.
#[derive(Debug)]
pub struct Dice(fastrand::Rng);

impl Dice {
    /// The dice of a world.
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Dice of their own for one purpose: what is drawn from them does not change what is drawn from these.
    pub fn fork(&mut self) -> Self {
        Self(self.0.fork())
    }

    /// True once in `of` times.
    pub fn one_in(&mut self, of: u32) -> bool {
        self.0.u32(0..of) == 0
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.0.f64() < probability
    }

    /// A number of the range.
    pub fn among(&mut self, range: RangeInclusive<u64>) -> u64 {
        self.0.u64(range)
    }

    /// A number of the range, small ones more often than large ones.
    pub fn mostly_small(&mut self, range: RangeInclusive<u64>) -> u64 {
        let share = self.0.f64().powi(4);
        let span = (*range.end() - *range.start()) as f64;
        range.start() + (share * (span + 0.999)) as u64
    }

    /// One of them.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.0.usize(0..of.len())]
    }

    /// Puts them into an order of its own.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        self.0.shuffle(items);
    }
}
