//! Workloads that only some seeds have. Each is drawn from a generator of its own:
//! - prunings beside large turns,
//! - messages to instances that have just been started,
//! - results over the size limit,
//! - many sessions,
//! - administrators that delete, also from a region that lags.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::admins::{AdminPlan, AdminTask};
use super::RunPlan;
use crate::crash_plan::{CrashPoint, PausePoint, Trigger};
use crate::fault_schedule::{FaultKind, FaultPeriod};
use crate::rng::SeededRng;
use crate::script::{own_session, self_contained, ActivityCall, ScriptGenerator, Step, NEVER};
use crate::sessions::partition_of;
use crate::workload::WorkloadItem;

/// Adds the special workload of the plan's seed, if it has one.
///
/// The names of the items are instance ids. They decide the physical partition, so a new name changes the run of a
/// seed.
pub(super) fn add(plan: &mut RunPlan) {
    let rng = &mut SeededRng::new(plan.seed.rotate_left(8) ^ 0xE47A);
    match rng.among(0..=15) {
        0..=2 => chain(plan, rng),
        3 | 4 => inform(plan, rng),
        5 => too_large(plan, rng),
        6 | 7 => sessions(plan, rng),
        8..=10 => administration(plan, rng),
        _ => {}
    }
}

fn add_item(plan: &mut RunPlan, rng: &mut SeededRng, name: &str, item: WorkloadItem) {
    let at = Duration::from_millis(rng.mostly_small(0..=4_000));
    plan.workload.push((name.to_owned(), at, item));
}

fn count(rng: &mut SeededRng, range: RangeInclusive<u64>) -> usize {
    usize::try_from(rng.among(range)).unwrap_or(1)
}

/// Steps of executions that end as soon as they begin. The output of each does not fit the instance document. In some
/// executions a turn does not fit one batch.
fn executions(rng: &mut SeededRng, executions: usize, large: bool) -> Vec<Step> {
    let mut steps = vec![Step::Say("x".repeat(600))];
    for _ in 0..executions {
        if large && rng.one_in(3) {
            steps.push(Step::Values { keys: count(rng, 98..=120) });
        }
        if rng.one_in(4) {
            let call =
                ActivityCall { millis: rng.mostly_small(0..=300), input: 20, output: 20, tag: None, session: None };
            steps.push(Step::Call(call));
        }
        steps.push(Step::Again);
    }
    steps
}

/// Orchestrations that continue as new repeatedly while clients prune their executions. In some runs workers also
/// prune, because they retain one execution only.
fn chain(plan: &mut RunPlan, rng: &mut SeededRng) {
    let large = rng.one_in(2);
    for n in 0..rng.among(1..=2) {
        let (length, pause) = (count(rng, 8..=30), Duration::from_millis(*rng.pick(&[20, 100, 400])));
        let steps = executions(rng, length, large);
        add_item(plan, rng, &format!("chain {n}"), WorkloadItem::Chain { steps, pause });
    }
    plan.retained_executions = rng.one_in(2).then_some(1);
}

/// Messages to instances that a committed turn has started and whose starts may not be delivered yet.
fn inform(plan: &mut RunPlan, rng: &mut SeededRng) {
    for n in 0..rng.among(1..=2) {
        let most = if rng.one_in(5) { 60 } else { 6 };
        let instances = rng.among(1..=most);
        let messages = (0..instances).map(|_| count(rng, 1..=3)).collect();
        add_item(plan, rng, &format!("herald {n}"), WorkloadItem::Run(vec![Step::Inform { messages }]));
    }
    // With inline claims the stopped worker would be the one that claims the activity with the commit.
    plan.inline_claims &= rng.one_in(2);
    for _ in 0..rng.among(0..=4) {
        let pause = Duration::from_millis(rng.among(300..=5_000));
        let requests = rng.among(0..=2);
        plan.pause_points.push(PausePoint { trigger: Trigger::CommitsIntents, requests, pause, clock_stops: false });
    }
}

/// More bytes than a document may have.
const TOO_LARGE: usize = 2_200_000;

/// Results and outputs of roots and children that are too large to be stored.
fn too_large(plan: &mut RunPlan, rng: &mut SeededRng) {
    let mut output = vec![Step::LargeOutput { bytes: TOO_LARGE }];
    if rng.one_in(2) {
        output.insert(0, Step::Timer { millis: 50 });
    }
    let steps = match rng.among(0..=3) {
        0 => output,
        1 => vec![Step::LargeResult { bytes: TOO_LARGE }],
        _ => {
            let mut generator = ScriptGenerator::new(rng, 0, 3, false);
            let mut sibling = self_contained(generator.script(), false);
            sibling.truncate(2);
            vec![Step::Children(vec![sibling, output])]
        }
    };
    add_item(plan, rng, "large", WorkloadItem::Run(steps));
}

/// Many sessions at once. The partitions of some of them are unreachable for a while.
fn sessions(plan: &mut RunPlan, rng: &mut SeededRng) {
    let (name, sessions) = ("sessions", count(rng, 12..=50));
    let steps = vec![Step::Sessions { count: sessions, millis: rng.among(10..=400) }, Step::Timer { millis: 8_000 }];
    plan.workload.push((name.to_owned(), Duration::ZERO, WorkloadItem::Run(steps)));
    plan.workers.iter_mut().for_each(|worker| worker.sessions = 100);
    plan.fault_time = plan.fault_time.max(Duration::from_secs(25));
    plan.fault_settings.per_mille = plan.fault_settings.per_mille.min(30);
    for _ in 0..rng.among(1..=3) {
        let from = Duration::from_millis(rng.among(500..=6_000));
        plan.fault_settings.periods.push(FaultPeriod {
            from,
            until: from + Duration::from_millis(rng.among(6_000..=20_000)),
            client: None,
            partition: Some(partition_of(&own_session(name, count(rng, 0..=sessions as u64 - 1)))),
            kind: *rng.pick(&[FaultKind::Unavailable, FaultKind::Throttling, FaultKind::Unreachable]),
        });
    }
}

/// Retention and bulk deletions, beside trees whose roots end before the rest and beside new starts under the same
/// names.
fn administration(plan: &mut RunPlan, rng: &mut SeededRng) {
    plan.fault_settings.spares_clients = true;
    if plan.lag.is_none() && rng.one_in(2) {
        plan.lag = Some(Duration::from_millis(rng.among(20..=2_000)));
    }
    if !rng.one_in(3) {
        retention(plan, rng);
    }
    if !rng.one_in(3) {
        restarts(plan, rng);
    }
}

fn add_admin(plan: &mut RunPlan, rng: &mut SeededRng, task: AdminTask) {
    let crash = CrashPoint { requests: rng.among(1..=300), request_arrives: rng.one_in(2), downtime: Duration::ZERO };
    let admin = AdminPlan {
        task,
        reads_lagging_region: plan.lag.is_some() && !rng.one_in(3),
        pause: Duration::from_millis(*rng.pick(&[20, 100, 500])),
        crash: rng.one_in(3).then_some(crash),
    };
    plan.admins.push(admin);
}

/// Roots that end while their children still continue as new, and administrators that apply retention to them.
fn retention(plan: &mut RunPlan, rng: &mut SeededRng) {
    remove_events(plan);
    for n in 0..rng.among(1..=3) {
        let length = count(rng, 5..=40);
        let child = executions(rng, length, false);
        if rng.one_in(2) {
            let steps = vec![Step::Abandon { child, millis: rng.among(100..=1_500) }];
            add_item(plan, rng, &format!("root {n}"), WorkloadItem::Run(steps));
        } else {
            let steps = vec![Step::Children(vec![child]), Step::Event { name: NEVER.to_owned() }];
            let after = Duration::from_millis(rng.among(100..=1_500));
            add_item(plan, rng, &format!("root {n}"), WorkloadItem::Cancel { steps, after });
        }
    }
    let age = Duration::from_millis(*rng.pick(&[0, 0, 0, 1_000]));
    for _ in 0..rng.among(1..=2) {
        add_admin(plan, rng, AdminTask::Retention(age));
    }
}

/// Removes the events of all scripts. An event that arrives after the deletion of its instance stays for good.
fn remove_events(plan: &mut RunPlan) {
    for (.., item) in &mut plan.workload {
        if let WorkloadItem::Run(steps) | WorkloadItem::Prune(steps) = item {
            steps.retain(|step| !matches!(step, Step::Event { .. }));
        }
        if let WorkloadItem::DeleteAndRunAgain(steps, more) = item {
            steps.retain(|step| !matches!(step, Step::Event { .. }));
            more.retain(|step| !matches!(step, Step::Event { .. }));
        }
    }
}

/// Instances that are started again under the same name while administrators delete the ended ones of that name.
fn restarts(plan: &mut RunPlan, rng: &mut SeededRng) {
    let names: Vec<String> = (0..rng.among(1..=2)).map(|n| format!("again {n}")).collect();
    for name in &names {
        let scripts = (0..rng.among(2..=6)).map(|_| {
            let mut steps = Vec::new();
            for _ in 0..rng.among(1..=2) {
                let millis = rng.mostly_small(0..=800);
                steps.push(Step::Call(ActivityCall { millis, input: 20, output: 20, tag: None, session: None }));
            }
            if rng.one_in(3) {
                steps.push(Step::Children(vec![vec![Step::Timer { millis: rng.mostly_small(1..=300) }]]));
            }
            steps
        });
        let scripts = scripts.collect();
        add_item(plan, rng, name, WorkloadItem::Restart(scripts));
    }
    for _ in 0..rng.among(1..=3) {
        add_admin(plan, rng, AdminTask::Bulk(names.clone()));
    }
}
