//! The crash plan: faults of processes and of the container, and the time of each.

use std::time::Duration;

use crate::rng::SeededRng;

/// A fault at a fixed time.
#[derive(Clone, Debug)]
pub struct ScheduledFault {
    /// The time of the run.
    pub at: Duration,
    /// The fault.
    pub fault: ProcessFault,
}

/// A fault of a process, or a partition split.
#[derive(Clone, Debug)]
pub enum ProcessFault {
    /// Kills a worker at a later request. A new process replaces it.
    Kill {
        /// The worker.
        worker: usize,
        /// The number of requests that it still sends.
        requests: u64,
        /// Whether the last request arrives.
        request_arrives: bool,
        /// The time until the new process starts.
        downtime: Duration,
    },
    /// Stops a worker, as SIGSTOP does, and continues it later.
    Stop {
        /// The worker.
        worker: usize,
        /// The time for which it is stopped.
        pause: Duration,
    },
    /// Stops a client and continues it later.
    StopClient {
        /// The time for which it is stopped.
        pause: Duration,
    },
    /// Sets the clock of a worker.
    SetClock {
        /// The worker.
        worker: usize,
        /// The error of its clock from then on, in milliseconds.
        skew: i64,
    },
    /// Asks a worker to shut down. A new process replaces it.
    ShutDown {
        /// The worker.
        worker: usize,
        /// The time until the new process starts.
        downtime: Duration,
    },
    /// Splits a physical partition.
    Split,
}

/// Draws the faults of `workers` workers within `time`.
pub fn draw(
    rng: &mut SeededRng,
    workers: usize,
    time: Duration,
    max_skew: i64,
    with_splits: bool,
) -> Vec<ScheduledFault> {
    let mut faults = Vec::new();
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let most = if rng.one_in(6) { 25 } else { 8 };
    for _ in 0..rng.among(1..=most) {
        let at = Duration::from_millis(rng.among(500..=millis));
        let worker = usize::try_from(rng.among(0..=workers as u64 - 1)).unwrap_or(0);
        let downtime = Duration::from_millis(rng.mostly_small(0..=10_000));
        let fault = match rng.among(0..=9) {
            0..=4 => {
                let requests = rng.mostly_small(0..=40);
                ProcessFault::Kill { worker, requests, request_arrives: rng.one_in(2), downtime }
            }
            5 if rng.one_in(4) => ProcessFault::StopClient { pause: Duration::from_millis(rng.among(500..=15_000)) },
            5 | 6 => ProcessFault::Stop { worker, pause: Duration::from_millis(rng.among(500..=15_000)) },
            7 if max_skew > 0 => ProcessFault::SetClock { worker, skew: skew(rng, max_skew) },
            8 => ProcessFault::ShutDown { worker, downtime },
            9 if with_splits => ProcessFault::Split,
            _ => ProcessFault::Kill { worker, requests: 0, request_arrives: false, downtime },
        };
        faults.push(ScheduledFault { at, fault });
    }
    faults.sort_by_key(|fault| fault.at);
    faults
}

/// The request at which a process crashes.
#[derive(Clone, Debug)]
pub struct CrashPoint {
    /// The number of requests that the process still sends, the last one included.
    pub requests: u64,
    /// Whether the last request arrives.
    pub request_arrives: bool,
    /// The time until a new process replaces it.
    pub downtime: Duration,
}

/// Draws crashes of workers that commit a staged turn, in order. Requests count from the commit. A crash at a random
/// time hardly ever falls between that commit and the end of the roll-forward.
pub fn staged_commit_crashes(rng: &mut SeededRng) -> Vec<CrashPoint> {
    let crash = |rng: &mut SeededRng| CrashPoint {
        requests: rng.among(1..=8),
        request_arrives: rng.one_in(2),
        downtime: Duration::from_millis(rng.mostly_small(0..=10_000)),
    };
    (0..rng.among(0..=3)).map(|_| crash(rng)).collect()
}

/// Draws crashes of workers that retain a lock for the next turn. Most of them crash at the commit of that turn.
pub fn retained_lock_crashes(rng: &mut SeededRng) -> Vec<CrashPoint> {
    let crash = |rng: &mut SeededRng| CrashPoint {
        requests: rng.among(1..=3),
        request_arrives: rng.one_in(3),
        downtime: Duration::from_millis(rng.mostly_small(0..=10_000)),
    };
    (0..rng.among(0..=2)).map(|_| crash(rng)).collect()
}

/// A request of a worker. Other workers can hardly distinguish a worker that stops after it from a dead one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// The worker has staged a part of a turn that does not fit one batch.
    StagesPart,
    /// The worker has committed a staged turn and is about to apply its parts.
    CommitsStagedTurn,
    /// The worker has completed an activity and is about to run the turn that consumes the completion.
    CompletesActivity,
    /// The worker has claimed a turn in the batch that writes its message.
    ClaimsInline,
    /// The worker has committed a turn and retained the lock for the next one.
    RetainsLock,
    /// The worker has committed a turn whose messages for other instances are not delivered yet. The same commit may
    /// fire another trigger as well.
    CommitsIntents,
}

/// A stop that waits for a trigger. A stop at a random time hardly ever falls there.
#[derive(Clone, Debug)]
pub struct PausePoint {
    /// The trigger.
    pub trigger: Trigger,
    /// The number of requests that the worker still sends after the trigger.
    pub requests: u64,
    /// The time for which it is stopped.
    pub pause: Duration,
    /// Whether its clock stands still meanwhile, as the clock of a virtual machine that is moved.
    pub clock_stops: bool,
}

/// All triggers that [`pause_points`] draws. The last ones occur only with inline claims.
const TRIGGERS: [Trigger; 5] = [
    Trigger::StagesPart,
    Trigger::CommitsStagedTurn,
    Trigger::CompletesActivity,
    Trigger::ClaimsInline,
    Trigger::RetainsLock,
];
/// How many of [`TRIGGERS`], counted from the first, also occur without inline claims.
const TRIGGERS_WITHOUT_INLINE_CLAIMS: usize = 3;

/// Draws stops of workers at triggers, in order. In a run with correct clocks no stop makes a clock wrong.
pub fn pause_points(rng: &mut SeededRng, max_skew: i64, inline_claims: bool) -> Vec<PausePoint> {
    let max_skew = u64::try_from(max_skew).unwrap_or(0);
    let triggers = if inline_claims { &TRIGGERS[..] } else { &TRIGGERS[..TRIGGERS_WITHOUT_INLINE_CLAIMS] };
    let pause_point = |rng: &mut SeededRng| {
        let trigger = *rng.pick(triggers);
        let (requests, pause) = (rng.among(0..=3), rng.among(300..=9_000));
        let clock_stops = pause <= max_skew && !rng.one_in(3);
        PausePoint { trigger, requests, pause: Duration::from_millis(pause), clock_stops }
    };
    (0..rng.among(0..=6)).map(|_| pause_point(rng)).collect()
}

/// Draws the error of a clock, in milliseconds.
pub fn skew(rng: &mut SeededRng, max_skew: i64) -> i64 {
    let max_skew = u64::try_from(max_skew).unwrap_or(0);
    let error = i64::try_from(rng.mostly_small(0..=max_skew)).unwrap_or(0);
    if rng.one_in(2) {
        error
    } else {
        -error
    }
}
