//! What befalls the hosts and the container of a world, and when.

use std::time::Duration;

use crate::dice::Dice;

/// Something that happens at a certain time.
#[derive(Clone, Debug)]
pub struct Blow {
    /// When.
    pub at: Duration,
    /// What.
    pub what: What,
}

/// What can happen.
#[derive(Clone, Debug)]
pub enum What {
    /// A worker is killed at the request that it makes so many requests later, and another one starts in its place.
    Kill {
        /// Which.
        worker: usize,
        /// How many requests it still makes.
        requests: u64,
        /// Whether that last request arrives.
        arrives: bool,
        /// After how long the next one starts.
        away: Duration,
    },
    /// A worker is stopped and goes on later, as if nothing had been.
    Stop {
        /// Which.
        worker: usize,
        /// For how long.
        pause: Duration,
    },
    /// A client is stopped and goes on later.
    StopClient {
        /// For how long.
        pause: Duration,
    },
    /// A worker's clock is set.
    Clock {
        /// Which.
        worker: usize,
        /// By how many milliseconds it is off from then on.
        skew: i64,
    },
    /// A worker is told to shut down, and another one starts in its place.
    Leave {
        /// Which.
        worker: usize,
        /// After how long the next one starts.
        away: Duration,
    },
    /// A physical partition is split.
    Split,
}

/// Draws what happens to `workers` workers within `time`.
pub fn draw(dice: &mut Dice, workers: usize, time: Duration, worst_skew: i64, splits: bool) -> Vec<Blow> {
    let mut blows = Vec::new();
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let most = if dice.one_in(6) { 25 } else { 8 };
    for _ in 0..dice.among(1..=most) {
        let at = Duration::from_millis(dice.among(500..=millis));
        let worker = usize::try_from(dice.among(0..=workers as u64 - 1)).unwrap_or(0);
        let away = Duration::from_millis(dice.mostly_small(0..=10_000));
        let what = match dice.among(0..=9) {
            0..=4 => What::Kill { worker, requests: dice.mostly_small(0..=40), arrives: dice.one_in(2), away },
            5 if dice.one_in(4) => What::StopClient { pause: Duration::from_millis(dice.among(500..=15_000)) },
            5 | 6 => What::Stop { worker, pause: Duration::from_millis(dice.among(500..=15_000)) },
            7 if worst_skew > 0 => What::Clock { worker, skew: skew(dice, worst_skew) },
            8 => What::Leave { worker, away },
            9 if splits => What::Split,
            _ => What::Kill { worker, requests: 0, arrives: false, away },
        };
        blows.push(Blow { at, what });
    }
    blows.sort_by_key(|blow| blow.at);
    blows
}

/// How a worker dies.
#[derive(Clone, Debug)]
pub struct Doom {
    /// How many requests it still makes.
    pub requests: u64,
    /// Whether the last one arrives.
    pub arrives: bool,
    /// How long its place is empty.
    pub away: Duration,
}

/// The ends of those that commit a turn in parts, in order, counted from the commit: blows that fall at some time hardly ever
/// fall there.
pub fn half_way(dice: &mut Dice) -> Vec<Doom> {
    let doom = |dice: &mut Dice| Doom {
        requests: dice.among(1..=8),
        arrives: dice.one_in(2),
        away: Duration::from_millis(dice.mostly_small(0..=10_000)),
    };
    (0..dice.among(0..=3)).map(|_| doom(dice)).collect()
}

/// The ends of workers that keep a lock for the next turn: most die when they would commit that turn.
pub fn keeping(dice: &mut Dice) -> Vec<Doom> {
    let doom = |dice: &mut Dice| Doom {
        requests: dice.among(1..=3),
        arrives: dice.one_in(3),
        away: Duration::from_millis(dice.mostly_small(0..=10_000)),
    };
    (0..dice.among(0..=2)).map(|_| doom(dice)).collect()
}

/// Something that a worker does and that others find hardest to tell from its being dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// It has written a part of a turn that does not fit one batch.
    Stages,
    /// It has committed such a turn, and is about to apply its parts.
    CommitsInParts,
    /// It has ended an activity, and is about to have the turn that hears of it.
    EndsActivity,
    /// It has claimed a turn by the write of its message.
    HandsOver,
    /// It has committed a turn and kept the lock for the next.
    KeepsLock,
    /// It has committed a turn, whatever else that commit does, and owes others the messages of that turn.
    Owes,
}

/// A stop that waits for a moment: one that falls at some time hardly ever falls there.
#[derive(Clone, Debug)]
pub struct Trap {
    /// What for.
    pub moment: Moment,
    /// How many requests the worker still makes after it.
    pub requests: u64,
    /// For how long it is stopped.
    pub pause: Duration,
    /// Its clock stands still meanwhile, as that of a machine which is moved.
    pub frozen: bool,
}

/// The moments of every world, and those that are only where work is handed over: a trap for one of them never springs elsewhere.
const MOMENTS: [Moment; 5] =
    [Moment::Stages, Moment::CommitsInParts, Moment::EndsActivity, Moment::HandsOver, Moment::KeepsLock];
const MOMENTS_OF_ALL: usize = 3;

/// Draws the stops of workers at the worst of moments, in order. Where clocks are right they stay so.
pub fn traps(dice: &mut Dice, worst_skew: i64, inline_claims: bool) -> Vec<Trap> {
    let worst = u64::try_from(worst_skew).unwrap_or(0);
    let moments = if inline_claims { &MOMENTS[..] } else { &MOMENTS[..MOMENTS_OF_ALL] };
    let trap = |dice: &mut Dice| {
        let moment = *dice.pick(moments);
        let (requests, pause) = (dice.among(0..=3), dice.among(300..=9_000));
        let frozen = pause <= worst && !dice.one_in(3);
        Trap { moment, requests, pause: Duration::from_millis(pause), frozen }
    };
    (0..dice.among(0..=6)).map(|_| trap(dice)).collect()
}

/// By how much a clock is off.
pub fn skew(dice: &mut Dice, worst: i64) -> i64 {
    let worst = u64::try_from(worst).unwrap_or(0);
    let off = i64::try_from(dice.mostly_small(0..=worst)).unwrap_or(0);
    if dice.one_in(2) {
        off
    } else {
        -off
    }
}
