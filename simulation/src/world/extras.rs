//! What only some seeds have, each drawn from dice of its own: prunings beside large turns, messages to what was just started,
//! results over the limit, many sessions, and administrators who delete, also from a region that lags.

use std::time::Duration;

use super::admins::{Admin, Duty};
use super::{alone, Plan};
use crate::dice::Dice;
use crate::errand::Errand;
use crate::fate::{Doom, Moment, Trap};
use crate::script::{own_session, Author, Call, Step, NEVER};
use crate::sessions::partition_of;
use crate::weather::{Front, Trouble};

/// Adds to a plan what its seed has of all this.
pub(super) fn add(plan: &mut Plan) {
    let dice = &mut Dice::new(plan.seed.rotate_left(8) ^ 0xE47A);
    match dice.among(0..=15) {
        0..=2 => chain(plan, dice),
        3 | 4 => inform(plan, dice),
        5 => too_large(plan, dice),
        6 | 7 => sessions(plan, dice),
        8..=10 => administration(plan, dice),
        _ => {}
    }
}

fn errand(plan: &mut Plan, dice: &mut Dice, name: &str, errand: Errand) {
    let soon = Duration::from_millis(dice.mostly_small(0..=4_000));
    plan.errands.push((name.to_owned(), soon, errand));
}

fn some(dice: &mut Dice, range: std::ops::RangeInclusive<u64>) -> usize {
    usize::try_from(dice.among(range)).unwrap_or(1)
}

/// Executions that end as soon as they begin, each with more to say than an instance's document takes. In some of them a turn does
/// not fit one batch.
fn executions(dice: &mut Dice, count: usize, large: bool) -> Vec<Step> {
    let mut steps = vec![Step::Say("x".repeat(600))];
    for _ in 0..count {
        if large && dice.one_in(3) {
            steps.push(Step::Values { keys: some(dice, 98..=120) });
        }
        if dice.one_in(4) {
            let call = Call { millis: dice.mostly_small(0..=300), input: 20, output: 20, tag: None, session: None };
            steps.push(Step::Call(call));
        }
        steps.push(Step::Again);
    }
    steps
}

/// Continues as new again and again while its executions are pruned: by clients, and by workers that keep few of them.
fn chain(plan: &mut Plan, dice: &mut Dice) {
    let large = dice.one_in(2);
    for n in 0..dice.among(1..=2) {
        let (count, pause) = (some(dice, 8..=30), Duration::from_millis(*dice.pick(&[20, 100, 400])));
        let steps = executions(dice, count, large);
        errand(plan, dice, &format!("chain {n}"), Errand::Chain { steps, pause });
    }
    plan.executions = dice.one_in(2).then_some(1);
}

/// Messages to instances that a committed turn has started and whose starts may not be delivered yet.
fn inform(plan: &mut Plan, dice: &mut Dice) {
    for n in 0..dice.among(1..=2) {
        let many = if dice.one_in(5) { 60 } else { 6 };
        let count = dice.among(1..=many);
        let messages = (0..count).map(|_| some(dice, 1..=3)).collect();
        errand(plan, dice, &format!("herald {n}"), Errand::Run(vec![Step::Inform { messages }]));
    }
    // A worker that claims the activity with the commit would be the one that is stopped.
    plan.inline_claims &= dice.one_in(2);
    for _ in 0..dice.among(0..=4) {
        let pause = Duration::from_millis(dice.among(300..=5_000));
        plan.traps.push(Trap { moment: Moment::Owes, requests: dice.among(0..=2), pause, frozen: false });
    }
}

/// More than a document takes.
const TOO_LARGE: usize = 2_200_000;

/// Results and outputs that can't be stored, of roots and of children.
fn too_large(plan: &mut Plan, dice: &mut Dice) {
    let mut output = vec![Step::LargeOutput { bytes: TOO_LARGE }];
    if dice.one_in(2) {
        output.insert(0, Step::Timer { millis: 50 });
    }
    let steps = match dice.among(0..=3) {
        0 => output,
        1 => vec![Step::LargeResult { bytes: TOO_LARGE }],
        _ => {
            let mut author = Author::new(dice, 0, 3, false);
            let mut beside = alone(author.script(), false);
            beside.truncate(2);
            vec![Step::Children(vec![beside, output])]
        }
    };
    errand(plan, dice, "large", Errand::Run(steps));
}

/// Many sessions at once, some of which can't be reached for a while.
fn sessions(plan: &mut Plan, dice: &mut Dice) {
    let (name, count) = ("sessions", some(dice, 12..=50));
    let steps = vec![Step::Sessions { count, millis: dice.among(10..=400) }, Step::Timer { millis: 8_000 }];
    plan.errands.push((name.to_owned(), Duration::ZERO, Errand::Run(steps)));
    plan.workers.iter_mut().for_each(|worker| worker.sessions = 100);
    plan.rough = plan.rough.max(Duration::from_secs(25));
    plan.climate.per_mille = plan.climate.per_mille.min(30);
    for _ in 0..dice.among(1..=3) {
        let from = Duration::from_millis(dice.among(500..=6_000));
        plan.climate.fronts.push(Front {
            from,
            until: from + Duration::from_millis(dice.among(6_000..=20_000)),
            client: None,
            partition: Some(partition_of(&own_session(name, some(dice, 0..=count as u64 - 1)))),
            what: *dice.pick(&[Trouble::Unavailable, Trouble::Throttling, Trouble::Unreachable]),
        });
    }
}

/// Retention and bulk deletions beside trees whose roots end before the rest, and beside new starts under the same names.
fn administration(plan: &mut Plan, dice: &mut Dice) {
    plan.climate.spares_clients = true;
    if plan.lag.is_none() && dice.one_in(2) {
        plan.lag = Some(Duration::from_millis(dice.among(20..=2_000)));
    }
    if !dice.one_in(3) {
        retention(plan, dice);
    }
    if !dice.one_in(3) {
        restarts(plan, dice);
    }
}

fn admin(plan: &mut Plan, dice: &mut Dice, duty: Duty) {
    let doom = Doom { requests: dice.among(1..=300), arrives: dice.one_in(2), away: Duration::ZERO };
    let admin = Admin {
        duty,
        is_away: plan.lag.is_some() && !dice.one_in(3),
        pause: Duration::from_millis(*dice.pick(&[20, 100, 500])),
        doom: dice.one_in(3).then_some(doom),
    };
    plan.admins.push(admin);
}

/// Roots that end while their children still continue as new.
fn retention(plan: &mut Plan, dice: &mut Dice) {
    // An event that comes after its instance was deleted stays: nobody is there to take it.
    for (.., errand) in &mut plan.errands {
        if let Errand::Run(steps) | Errand::Prune(steps) = errand {
            steps.retain(|step| !matches!(step, Step::Event { .. }));
        }
        if let Errand::DeleteAndRunAgain(steps, more) = errand {
            steps.retain(|step| !matches!(step, Step::Event { .. }));
            more.retain(|step| !matches!(step, Step::Event { .. }));
        }
    }
    for n in 0..dice.among(1..=3) {
        let count = some(dice, 5..=40);
        let child = executions(dice, count, false);
        if dice.one_in(2) {
            let steps = vec![Step::Abandon { child, millis: dice.among(100..=1_500) }];
            errand(plan, dice, &format!("root {n}"), Errand::Run(steps));
        } else {
            let steps = vec![Step::Children(vec![child]), Step::Event { name: NEVER.to_owned() }];
            let after = Duration::from_millis(dice.among(100..=1_500));
            errand(plan, dice, &format!("root {n}"), Errand::Cancel { steps, after });
        }
    }
    let age = Duration::from_millis(*dice.pick(&[0, 0, 0, 1_000]));
    for _ in 0..dice.among(1..=2) {
        admin(plan, dice, Duty::Retention(age));
    }
}

/// Instances that are started again under the same name while others delete whatever of that name has ended.
fn restarts(plan: &mut Plan, dice: &mut Dice) {
    let names: Vec<String> = (0..dice.among(1..=2)).map(|n| format!("again {n}")).collect();
    for name in &names {
        let rounds = (0..dice.among(2..=6)).map(|_| {
            let mut steps = Vec::new();
            for _ in 0..dice.among(1..=2) {
                let millis = dice.mostly_small(0..=800);
                steps.push(Step::Call(Call { millis, input: 20, output: 20, tag: None, session: None }));
            }
            if dice.one_in(3) {
                steps.push(Step::Children(vec![vec![Step::Timer { millis: dice.mostly_small(1..=300) }]]));
            }
            steps
        });
        let rounds = rounds.collect();
        errand(plan, dice, name, Errand::Restart(rounds));
    }
    for _ in 0..dice.among(1..=3) {
        admin(plan, dice, Duty::Bulk(names.clone()));
    }
}
