//! The plan of a run: everything that is drawn from the seed before the run begins.

use std::time::Duration;

use super::admins::AdminPlan;
use super::{special_workloads, worker_name};
use crate::bank::BankWorkload;
use crate::crash_plan::{self, CrashPoint, PausePoint, ScheduledFault};
use crate::fault_schedule::{FaultKind, FaultPeriod, FaultSettings};
use crate::rng::SeededRng;
use crate::script::{self_contained, ActivityCall, ScriptGenerator, Step, NEVER, TAGS};
use crate::worker::WorkerSettings;
use crate::workload::WorkloadItem;

/// Everything that a seed determines before its run begins.
#[derive(Debug)]
pub struct RunPlan {
    pub(super) seed: u64,
    /// Physical partitions of the container.
    pub(super) partitions: u32,
    /// The replication lag of the second region. `None`: one region.
    pub(super) lag: Option<Duration>,
    pub(super) workers: Vec<WorkerSettings>,
    /// The clock errors of the workers, in milliseconds.
    pub(super) skews: Vec<i64>,
    /// The clock errors of the clients, in milliseconds.
    pub(super) client_skews: Vec<i64>,
    /// The largest clock error, in milliseconds.
    pub(super) max_skew: i64,
    pub(super) fault_settings: FaultSettings,
    pub(super) process_faults: Vec<ScheduledFault>,
    /// Crashes of workers that commit a staged turn.
    pub(super) staged_commit_crashes: Vec<CrashPoint>,
    /// Crashes of workers that retain a lock for the next turn.
    pub(super) retained_lock_crashes: Vec<CrashPoint>,
    /// Stops that wait for a trigger.
    pub(super) pause_points: Vec<PausePoint>,
    /// Workload items: name, start time, item.
    pub(super) workload: Vec<(String, Duration, WorkloadItem)>,
    /// Callers drop one call in this many. 0: none.
    pub(super) drop_one_in: u32,
    /// The time during which faults happen.
    pub(super) fault_time: Duration,
    pub(super) reconciler_age: Duration,
    pub(super) history_cache_bytes: usize,
    pub(super) poll_interval: Duration,
    pub(super) inline_claims: bool,
    /// How many executions of an instance workers retain. `None`: all.
    pub(super) retained_executions: Option<u32>,
    pub(super) admins: Vec<AdminPlan>,
}

impl RunPlan {
    /// Draws the plan of this seed.
    pub fn draw(seed: u64) -> Self {
        let rng = &mut SeededRng::new(seed);
        let worker_count = usize::try_from(rng.among(1..=5)).unwrap_or(1);
        let fault_time = Duration::from_secs(rng.among(10..=40));
        let max_skew = if rng.one_in(3) { 10_000 } else { 0 };
        let partitions = *rng.pick(&[1, 1, 2, 3, 4, 8]);
        let common = common_settings(rng);
        let workers: Vec<WorkerSettings> = (0..worker_count).map(|n| worker_settings(rng, &common, n)).collect();
        let skews = workers.iter().map(|_| crash_plan::skew(rng, max_skew)).collect();
        let fault_settings = fault_settings(rng, worker_count, fault_time);
        let inline_claims = !SeededRng::new(seed.rotate_left(16)).one_in(4);
        let process_faults =
            if rng.one_in(5) { Vec::new() } else { crash_plan::draw(rng, worker_count, fault_time, max_skew, true) };
        let mut plan = Self {
            seed,
            partitions,
            lag: rng.one_in(5).then(|| Duration::from_millis(rng.among(20..=2_000))),
            workers,
            skews,
            client_skews: (0..rng.among(1..=2)).map(|_| crash_plan::skew(rng, max_skew)).collect(),
            max_skew,
            fault_settings,
            process_faults,
            staged_commit_crashes: crash_plan::staged_commit_crashes(&mut SeededRng::new(seed.rotate_left(32))),
            retained_lock_crashes: crash_plan::retained_lock_crashes(&mut SeededRng::new(seed.rotate_left(40))),
            pause_points: {
                let rng = &mut SeededRng::new(seed.rotate_left(48));
                crash_plan::pause_points(rng, max_skew, inline_claims)
            },
            workload: workload(rng, fault_time),
            drop_one_in: *rng.pick(&[0, 0, 6, 15, 40, 150]),
            fault_time,
            reconciler_age: Duration::from_millis(*rng.pick(&[500, 2_000])),
            history_cache_bytes: *rng.pick(&[0, 20_000, 64 << 20, 64 << 20]),
            poll_interval: Duration::from_millis(*rng.pick(&[200, 3_000, 3_000])),
            inline_claims,
            retained_executions: None,
            admins: Vec::new(),
        };
        special_workloads::add(&mut plan);
        plan
    }

    /// The main properties of the run in one line.
    pub fn summary(&self) -> String {
        format!(
            "{} workers, {} partitions{}{}{}, {} workload items, {} admins, {} process faults, {}‰ request faults",
            self.workers.len(),
            self.partitions,
            if self.lag.is_some() { ", 2 regions" } else { "" },
            if self.max_skew > 0 { ", wrong clocks" } else { "" },
            if self.inline_claims { "" } else { ", no inline claims" },
            self.workload.len(),
            self.admins.len(),
            self.process_faults.len(),
            self.fault_settings.per_mille,
        )
    }
}

/// Draws the settings that all workers of a run share.
fn common_settings(rng: &mut SeededRng) -> WorkerSettings {
    let lock = |rng: &mut SeededRng| Duration::from_millis(rng.among(1_000..=5_000));
    // duroxide renews a lock after half of its time, rounded up to a second. A shorter lock ends before its renewal, or
    // with it.
    let renewed = |rng: &mut SeededRng| Duration::from_millis(rng.among(2_000..=5_000).max(2_500));
    WorkerSettings {
        turns: 2,
        activities: 2,
        tags: Vec::new(),
        turn_lock: lock(rng),
        activity_lock: renewed(rng),
        session_lock: renewed(rng),
        long_poll: Duration::from_millis(*rng.pick(&[500, 5_000, 30_000])),
        max_attempts: 40,
        sessions: 10,
    }
}

/// Draws the settings of worker `n`. The first worker serves every tag, so that no activity waits for ever.
fn worker_settings(rng: &mut SeededRng, common: &WorkerSettings, n: usize) -> WorkerSettings {
    let mut tags: Vec<String> = TAGS.iter().map(|tag| (*tag).to_owned()).collect();
    if n > 0 {
        tags.retain(|_| rng.one_in(2));
    }
    let concurrency = |rng: &mut SeededRng| usize::try_from(rng.among(1..=4)).unwrap_or(1);
    WorkerSettings { turns: concurrency(rng), activities: concurrency(rng), tags, ..common.clone() }
}

fn fault_settings(rng: &mut SeededRng, workers: usize, fault_time: Duration) -> FaultSettings {
    let millis = u64::try_from(fault_time.as_millis()).unwrap_or(u64::MAX);
    let periods = (0..rng.among(0..=3)).map(|_| {
        let from = rng.among(500..=millis);
        let all = [
            FaultKind::Throttling,
            FaultKind::Throttling,
            FaultKind::Unreachable,
            FaultKind::Silent,
            FaultKind::Slow,
            FaultKind::Unavailable,
        ];
        FaultPeriod {
            from: Duration::from_millis(from),
            until: Duration::from_millis(from + rng.mostly_small(200..=12_000)),
            client: rng.one_in(2).then(|| worker_name(usize::try_from(rng.among(0..=workers as u64 - 1)).unwrap_or(0))),
            partition: None,
            kind: *rng.pick(&all),
        }
    });
    let periods = periods.collect();
    FaultSettings {
        latency: rng.among(4..=30),
        per_mille: *rng.pick(&[0, 10, 30, 60, 120, 200, 350]),
        longest_delay: *rng.pick(&[400, 2_000, 6_000]),
        periods,
        spares_clients: false,
    }
}

fn workload(rng: &mut SeededRng, fault_time: Duration) -> Vec<(String, Duration, WorkloadItem)> {
    let millis = u64::try_from(fault_time.as_millis()).unwrap_or(u64::MAX);
    let heavy = rng.one_in(6);
    // The local account clones documents for every query. Most runs are small, so that many fit into the same time.
    let widest = if rng.one_in(60) { 400 } else { *rng.pick(&[3, 6, 6, 10, 10, 20, 40]) };
    // One turn exceeds one batch, by its number of operations or by its size.
    let large = match rng.among(0..=9) {
        0 | 1 => Some((rng.among(96..=130), 20)),
        2 => Some((rng.among(20..=30), 95_000)),
        _ => None,
    };
    let sessions = usize::try_from(rng.among(1..=3)).unwrap_or(1);
    let count = rng.among(3..=9);
    let mut items = Vec::new();
    for n in 0..count {
        let at = Duration::from_millis(rng.among(0..=millis * 3 / 4));
        let after = Duration::from_millis(rng.mostly_small(0..=15_000));
        let mut generator = ScriptGenerator::new(rng, sessions, widest, heavy);
        let mut steps = generator.script();
        if let Some((width, output)) = large.filter(|_| n == 0) {
            let width = usize::try_from(width).unwrap_or(1);
            let call = ActivityCall { millis: 0, input: 20, output, tag: None, session: None };
            steps.insert(0, Step::FanOut { width, call });
        }
        let more = generator.script();
        items.push((format!("o{n}"), at, script_item(rng, steps, more, after)));
    }
    if rng.one_in(2) {
        let accounts = usize::try_from(rng.among(2..=4)).unwrap_or(2);
        let transfers = usize::try_from(rng.among(3..=24)).unwrap_or(3);
        let bank = BankWorkload::draw(rng, accounts, transfers);
        items.push(("bank".to_owned(), Duration::ZERO, WorkloadItem::Bank(bank)));
    }
    items
}

/// Draws the workload item that uses a script.
fn script_item(rng: &mut SeededRng, mut steps: Vec<Step>, mut more: Vec<Step>, after: Duration) -> WorkloadItem {
    match rng.among(0..=11) {
        0 => {
            steps.retain(|step| *step != Step::Fail);
            steps.push(Step::Event { name: NEVER.to_owned() });
            WorkloadItem::Cancel { steps: self_contained(steps, true), after }
        }
        1 => {
            more.retain(|step| !matches!(step, Step::Detached(_)));
            steps.retain(|step| !matches!(step, Step::Detached(_)));
            WorkloadItem::DeleteAndRunAgain(steps, more)
        }
        2 => WorkloadItem::DeleteRunning { steps: self_contained(steps, false), after },
        3 => WorkloadItem::Prune(steps),
        4 => WorkloadItem::Poison,
        _ => WorkloadItem::Run(steps),
    }
}
