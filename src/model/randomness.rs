//! Randomness: unique tokens, and jitter.

use std::{
    fmt,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
};
use uuid::Uuid;

/// The source of randomness: the operating system, or a seed.
///
/// Tokens tell lock owners apart. Therefore **no two providers of one container may begin with the same seed**. Clones
/// draw from one sequence, so several providers can share clones safely.
///
/// ```
/// use duroxide_cosmos::Randomness;
///
/// let (one, other) = (Randomness::seeded(7), Randomness::seeded(7));
/// assert_eq!(one.token(), other.token());
/// assert_ne!(one.token(), one.clone().token());
/// assert_ne!(Randomness::system().token(), Randomness::system().token());
/// ```
#[derive(Clone)]
pub struct Randomness(RandomSource);

#[derive(Clone)]
enum RandomSource {
    System,
    Seeded(Arc<AtomicU64>),
}

impl Randomness {
    /// The operating system's randomness.
    pub fn system() -> Self {
        Self(RandomSource::System)
    }

    /// A sequence that depends on the seed alone, on every machine, for tests and simulations.
    pub fn seeded(seed: u64) -> Self {
        Self(RandomSource::Seeded(Arc::new(AtomicU64::new(seed))))
    }

    /// A unique token: a UUID of version 4, as 32 hex digits.
    pub fn token(&self) -> String {
        self.uuid().simple().to_string()
    }

    /// A number from 0 up to, but not including, 1.
    pub fn fraction(&self) -> f64 {
        // The first 48 bits of a UUID are random.
        let [a, b, c, d, ..] = self.uuid().into_bytes();
        f64::from(u32::from_be_bytes([a, b, c, d])) / 2f64.powi(32)
    }

    /// Puts items into a random order.
    pub(crate) fn shuffle<T>(&self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            // A fraction below 1 of the slice's length is always an index of the slice.
            let other = (self.fraction() * (last + 1) as f64) as usize;
            items.swap(last, other.min(last));
        }
    }

    #[allow(clippy::disallowed_methods, reason = "the only place that uses the randomness of the system")]
    fn uuid(&self) -> Uuid {
        match &self.0 {
            RandomSource::System => Uuid::new_v4(),
            RandomSource::Seeded(state) => {
                let (high, low) = (split_mix(state), split_mix(state));
                let random = u128::from(high) << 64 | u128::from(low);
                uuid::Builder::from_random_bytes(random.to_be_bytes()).into_uuid()
            }
        }
    }
}

/// The next number of SplitMix64 (Steele, Lea and Flood 2014). Its state is a counter, so threads need no lock. No
/// number repeats before all others have come.
fn split_mix(state: &AtomicU64) -> u64 {
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    let next = state.fetch_add(GAMMA, Ordering::Relaxed).wrapping_add(GAMMA);
    let next = (next ^ next >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let next = (next ^ next >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    next ^ next >> 31
}

impl fmt::Debug for Randomness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            RandomSource::System => "Randomness(system)",
            RandomSource::Seeded(_) => "Randomness(seeded)",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn tokens(randomness: &Randomness) -> Vec<String> {
        (0..1_000).map(|_| randomness.token()).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_sequence_and_another_seed_another() {
        let story = tokens(&Randomness::seeded(1));
        assert_eq!(tokens(&Randomness::seeded(1)), story);
        let others = (2..10).flat_map(|seed| tokens(&Randomness::seeded(seed)));
        let all: HashSet<String> = others.chain(story).collect();
        assert_eq!(all.len(), 9_000, "no token of one seed is another's");
    }

    #[test]
    fn the_numbers_match_the_published_generator() {
        let state = AtomicU64::new(1_234_567);
        let numbers = [(); 3].map(|()| split_mix(&state));
        assert_eq!(numbers, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn clones_draw_from_one_sequence() {
        let (one, expected) = (Randomness::seeded(3), tokens(&Randomness::seeded(3)));
        let other = one.clone();
        let drawn: Vec<String> = (0..500).flat_map(|_| [one.token(), other.token()]).collect();
        assert_eq!(drawn, expected);
    }

    #[test]
    fn tokens_are_uuids_of_version_4_without_hyphens_from_either_source() {
        for randomness in [Randomness::system(), Randomness::seeded(0)] {
            for token in tokens(&randomness) {
                assert!(token.len() == 32 && !token.contains(|c: char| !c.is_ascii_hexdigit() || c.is_uppercase()));
                let uuid = Uuid::parse_str(&token).unwrap();
                assert_eq!((uuid.get_version_num(), uuid.get_variant()), (4, uuid::Variant::RFC4122), "{token}");
            }
        }
    }

    #[test]
    fn fractions_spread_over_the_whole_range_and_stay_in_it() {
        for randomness in [Randomness::system(), Randomness::seeded(0)] {
            let tenths: HashSet<u32> = (0..1_000).map(|_| (randomness.fraction() * 10.0).floor() as u32).collect();
            assert_eq!(tenths, (0..10).collect(), "{randomness:?}");
        }
    }
}
