//! A world: drawn from its number, played until everybody has what they wanted, and audited.

mod admins;
mod extras;
mod heirs;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use duroxide::Client;
use duroxide_cosmos::{Clock, CosmosDBProvider, CosmosDBProviderConfig, Randomness, Retention};
use duroxide_cosmos_emulator::{
    Gate, LocalAccount, ReplicationConfig, RequestKind, WireAction, WireAnswer, WireRequest, WireRule,
};
use serde_json::Value;
use tokio::sync::oneshot;

use crate::audit::{self, Inventory};
use crate::bank::Business;
use crate::dice::Dice;
use crate::errand::{Errand, Errands, Fate};
use crate::fate::{self, Blow, Doom, Moment, Trap, What};
use crate::host::Host;
use crate::ledger::{Broken, Ledger};
use crate::script::{Author, Call, Step, NEVER, TAGS};
use crate::seams;
use crate::story::Story;
use crate::weather::{self, Climate, Front, Trouble, Weather};
use crate::witness::Witness;
use crate::worker::{self, Setup};
use admins::{Admin, Office};

/// What is drawn of a world before it begins.
#[derive(Debug)]
pub struct Plan {
    seed: u64,
    partitions: u32,
    lag: Option<Duration>,
    workers: Vec<Setup>,
    skews: Vec<i64>,
    client_skews: Vec<i64>,
    worst_skew: i64,
    climate: Climate,
    blows: Vec<Blow>,
    /// What befalls those that commit a turn in parts.
    half_way: Vec<Doom>,
    /// What befalls those that keep a lock for the next turn.
    keeping: Vec<Doom>,
    /// Stops at the worst of moments.
    traps: Vec<Trap>,
    errands: Vec<(String, Duration, Errand)>,
    /// Callers drop one call in so many.
    drops: u32,
    /// How long something bad can happen.
    rough: Duration,
    reconciler: Duration,
    /// What a provider keeps of histories.
    cache: usize,
    slowest_poll: Duration,
    /// Whether what makes work claims it for those who wait.
    inline_claims: bool,
    /// How many executions of an instance workers keep; all where nothing is said.
    executions: Option<u32>,
    admins: Vec<Admin>,
}

impl Plan {
    /// Draws the world of this number.
    pub fn draw(seed: u64) -> Self {
        let dice = &mut Dice::new(seed);
        let worker_count = usize::try_from(dice.among(1..=5)).unwrap_or(1);
        let rough = Duration::from_secs(dice.among(10..=40));
        let worst_skew = if dice.one_in(3) { 10_000 } else { 0 };
        let partitions = *dice.pick(&[1, 1, 2, 3, 4, 8]);
        let setup = setup(dice);
        let workers: Vec<Setup> = (0..worker_count).map(|n| worker_setup(dice, &setup, n)).collect();
        let skews = workers.iter().map(|_| fate::skew(dice, worst_skew)).collect();
        let climate = climate(dice, worker_count, rough);
        let inline_claims = !Dice::new(seed.rotate_left(16)).one_in(4);
        let blows = if dice.one_in(5) { Vec::new() } else { fate::draw(dice, worker_count, rough, worst_skew, true) };
        let mut plan = Self {
            seed,
            partitions,
            lag: dice.one_in(5).then(|| Duration::from_millis(dice.among(20..=2_000))),
            workers,
            skews,
            client_skews: (0..dice.among(1..=2)).map(|_| fate::skew(dice, worst_skew)).collect(),
            worst_skew,
            climate,
            blows,
            half_way: fate::half_way(&mut Dice::new(seed.rotate_left(32))),
            keeping: fate::keeping(&mut Dice::new(seed.rotate_left(40))),
            traps: fate::traps(&mut Dice::new(seed.rotate_left(48)), worst_skew, inline_claims),
            errands: errands(dice, rough),
            drops: *dice.pick(&[0, 0, 6, 15, 40, 150]),
            rough,
            reconciler: Duration::from_millis(*dice.pick(&[500, 2_000])),
            cache: *dice.pick(&[0, 20_000, 64 << 20, 64 << 20]),
            slowest_poll: Duration::from_millis(*dice.pick(&[200, 3_000, 3_000])),
            inline_claims,
            executions: None,
            admins: Vec::new(),
        };
        extras::add(&mut plan);
        plan
    }

    /// What kind of world it is, in a few words.
    pub fn summary(&self) -> String {
        format!(
            "{} workers, {} partitions{}{}{}, {} errands, {} admins, {} blows, {}‰ trouble",
            self.workers.len(),
            self.partitions,
            if self.lag.is_some() { ", 2 regions" } else { "" },
            if self.worst_skew > 0 { ", clocks off" } else { "" },
            if self.inline_claims { "" } else { ", nothing handed over" },
            self.errands.len(),
            self.admins.len(),
            self.blows.len(),
            self.climate.per_mille,
        )
    }
}

fn setup(dice: &mut Dice) -> Setup {
    let lock = |dice: &mut Dice| Duration::from_millis(dice.among(1_000..=5_000));
    // duroxide renews after half of the time, rounded up to a second: a shorter lock would end before, or with it.
    let renewed = |dice: &mut Dice| Duration::from_millis(dice.among(2_000..=5_000).max(2_500));
    Setup {
        turns: 2,
        activities: 2,
        tags: Vec::new(),
        turn_lock: lock(dice),
        activity_lock: renewed(dice),
        session_lock: renewed(dice),
        long_poll: Duration::from_millis(*dice.pick(&[500, 5_000, 30_000])),
        max_attempts: 40,
        sessions: 10,
    }
}

/// The first worker serves every tag, so that somebody does.
fn worker_setup(dice: &mut Dice, common: &Setup, n: usize) -> Setup {
    let mut tags: Vec<String> = TAGS.iter().map(|tag| (*tag).to_owned()).collect();
    if n > 0 {
        tags.retain(|_| dice.one_in(2));
    }
    let some = |dice: &mut Dice| usize::try_from(dice.among(1..=4)).unwrap_or(1);
    Setup { turns: some(dice), activities: some(dice), tags, ..common.clone() }
}

fn climate(dice: &mut Dice, workers: usize, rough: Duration) -> Climate {
    let millis = u64::try_from(rough.as_millis()).unwrap_or(u64::MAX);
    let fronts = (0..dice.among(0..=3)).map(|_| {
        let from = dice.among(500..=millis);
        let all = [
            Trouble::Throttling,
            Trouble::Throttling,
            Trouble::Unreachable,
            Trouble::Silent,
            Trouble::Slow,
            Trouble::Unavailable,
        ];
        Front {
            from: Duration::from_millis(from),
            until: Duration::from_millis(from + dice.mostly_small(200..=12_000)),
            client: dice
                .one_in(2)
                .then(|| worker_name(usize::try_from(dice.among(0..=workers as u64 - 1)).unwrap_or(0))),
            partition: None,
            what: *dice.pick(&all),
        }
    });
    let fronts = fronts.collect();
    Climate {
        latency: dice.among(4..=30),
        per_mille: *dice.pick(&[0, 10, 30, 60, 120, 200, 350]),
        longest_delay: *dice.pick(&[400, 2_000, 6_000]),
        fronts,
        spares_clients: false,
    }
}

fn errands(dice: &mut Dice, rough: Duration) -> Vec<(String, Duration, Errand)> {
    let millis = u64::try_from(rough.as_millis()).unwrap_or(u64::MAX);
    let heavy = dice.one_in(6);
    // The account clones documents for every query: most worlds are small, so that there can be many.
    let widest = if dice.one_in(60) { 400 } else { *dice.pick(&[3, 6, 6, 10, 10, 20, 40]) };
    // One turn that does not fit one batch, by its operations or by its size.
    let large = match dice.among(0..=9) {
        0 | 1 => Some((dice.among(96..=130), 20)),
        2 => Some((dice.among(20..=30), 95_000)),
        _ => None,
    };
    let sessions = usize::try_from(dice.among(1..=3)).unwrap_or(1);
    let count = dice.among(3..=9);
    let mut errands = Vec::new();
    for n in 0..count {
        let at = Duration::from_millis(dice.among(0..=millis * 3 / 4));
        let after = Duration::from_millis(dice.mostly_small(0..=15_000));
        let mut author = Author::new(dice, sessions, widest, heavy);
        let mut steps = author.script();
        if let Some((width, output)) = large.filter(|_| n == 0) {
            let width = usize::try_from(width).unwrap_or(1);
            let call = Call { millis: 0, input: 20, output, tag: None, session: None };
            steps.insert(0, Step::FanOut { width, call });
        }
        let mut more = author.script();
        let errand = match dice.among(0..=11) {
            0 => {
                steps.retain(|step| *step != Step::Fail);
                steps.push(Step::Event { name: NEVER.to_owned() });
                Errand::Cancel { steps: alone(steps, true), after }
            }
            1 => {
                more.retain(|step| !matches!(step, Step::Detached(_)));
                steps.retain(|step| !matches!(step, Step::Detached(_)));
                Errand::DeleteAndRunAgain(steps, more)
            }
            2 => Errand::DeleteRunning { steps: alone(steps, false), after },
            3 => Errand::Prune(steps),
            4 => Errand::Poison,
            _ => Errand::Run(steps),
        };
        errands.push((format!("o{n}"), at, errand));
    }
    if dice.one_in(2) {
        let accounts = usize::try_from(dice.among(2..=4)).unwrap_or(2);
        let transfers = usize::try_from(dice.among(3..=24)).unwrap_or(3);
        errands.push(("bank".to_owned(), Duration::ZERO, Errand::Bank(Business::draw(dice, accounts, transfers))));
    }
    errands
}

/// Without what goes on by itself, and with nothing from outside; `children` stay if they are wanted.
pub(crate) fn alone(mut steps: Vec<Step>, children: bool) -> Vec<Step> {
    steps.retain(|step| match step {
        Step::Detached(_) | Step::Inform { .. } | Step::Queue { .. } => false,
        Step::Event { name } => name == NEVER,
        Step::Children(_) | Step::Abandon { .. } => children,
        _ => true,
    });
    steps
}

/// How the names of workers on the wire begin.
const WORKER: &str = "w";

/// How the hosts are called on the wire; a number behind it tells their lives.
fn worker_name(worker: usize) -> String {
    format!("{WORKER}{worker}")
}

/// What became of a world.
#[derive(Debug)]
pub struct Outcome {
    /// The invariant that did not hold, if one did not.
    pub broken: Option<Broken>,
    /// The world's time at its end.
    pub lasted: Duration,
    /// Requests on the wire.
    pub requests: u64,
    /// What happened.
    pub story: Arc<Story>,
}

/// Plays the world of this plan, on this thread, which must play no other.
pub fn play(plan: Plan) -> Outcome {
    seams::enter(plan.seed);
    let mut world = World::begin(plan);
    let broken = world.play().err();
    Outcome { broken, lasted: world.now, requests: world.account.stats().total().requests, story: world.story.clone() }
}

/// A worker's place: lives in it come and go.
struct Place {
    host: Option<Host>,
    life: u32,
    skew: i64,
    back_at: Option<Duration>,
    /// To tell the runtime in it to shut down, and to hear that it has.
    leave: Option<oneshot::Sender<()>>,
    left: Arc<AtomicBool>,
}

/// A worker that dies at its next requests.
#[derive(Debug, Default)]
struct Doomed {
    /// By the names of their clients.
    clients: BTreeMap<String, Doom>,
    /// Those that have made their last request, and for how long their places are empty.
    dead: Vec<(String, Duration)>,
    /// The ends of those that commit a turn in parts next.
    half_way: VecDeque<Doom>,
    /// The ends of those that keep a lock next.
    keeping: VecDeque<Doom>,
    /// Stops that wait for their moments.
    traps: Vec<Trap>,
    /// Those that went into one, by the names of their clients.
    trapped: BTreeMap<String, Trap>,
    /// Those that are stopped now.
    stopped: Vec<(String, Trap)>,
}

struct World {
    plan: Plan,
    now: Duration,
    dice: Dice,
    account: LocalAccount,
    network: Host,
    clients: Vec<Host>,
    admins: Vec<Office>,
    places: Vec<Place>,
    blows: VecDeque<Blow>,
    weather: Arc<Weather>,
    doomed: Arc<Mutex<Doomed>>,
    story: Arc<Story>,
    ledger: Arc<Ledger>,
    done: Arc<AtomicUsize>,
    /// Administrators are told to stop.
    resting: Arc<AtomicBool>,
    next_look: Duration,
}

/// Time goes in steps of this length: what happens in different hosts within one is in no order.
const STEP: Duration = Duration::from_millis(2);
/// How often the auditor looks at what is stored while the world goes on.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long an errand may take once nothing bad happens any more.
const PATIENCE: Duration = Duration::from_secs(900);

impl Place {
    /// The name of its present life on the wire.
    fn client(&self, worker: usize) -> String {
        format!("{}#{}", worker_name(worker), self.life)
    }
}

impl World {
    fn begin(plan: Plan) -> Self {
        let mut dice = Dice::new(plan.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let story = Arc::new(Story::default());
        let differ = Duration::from_millis(u64::try_from(plan.worst_skew * 2).unwrap_or(0));
        let ledger = Arc::new(Ledger::new(differ, plan.lag.is_some()));
        let network = Host::new();
        let mut builder = LocalAccount::builder().with_partitions(plan.partitions);
        if let Some(lag) = plan.lag {
            builder = builder.with_regions(&admins::REGIONS).with_replication(ReplicationConfig::fixed(lag));
        }
        let account = builder.build();
        account.wire().carried_by(network.handle().clone());
        let weather = Arc::new(Weather::new(plan.climate.clone(), dice.fork(), story.clone(), ledger.clone()));
        let (half_way, keeping) = (plan.half_way.iter().cloned().collect(), plan.keeping.iter().cloned().collect());
        let traps = plan.traps.clone();
        let doomed = Arc::new(Mutex::new(Doomed { half_way, keeping, traps, ..Doomed::default() }));
        let (sky, fate) = (weather.clone(), doomed.clone());
        let rule = WireRule::choosing(move |request| {
            last_request(&fate, request).or_else(|| sky.meets(request).inspect(|_| spring(&fate, request)))
        });
        account.wire().add(rule);
        let (told, seen) = (story.clone(), ledger.clone());
        account.wire().observe(move |request, answer| observe(&told, &seen, request, answer));
        let places = plan.skews.iter().map(|skew| Place {
            host: None,
            life: 0,
            skew: *skew,
            back_at: Some(Duration::ZERO),
            leave: None,
            left: Arc::default(),
        });
        let places = places.collect();
        let blows = plan.blows.iter().cloned().collect();
        story.tell("world", None, plan.summary());
        let mut clients: Vec<Host> = plan.client_skews.iter().map(|_| Host::new()).collect();
        clients.iter_mut().zip(&plan.client_skews).for_each(|(client, skew)| client.set_skew(*skew));
        let now = Duration::ZERO;
        let done = Arc::default();
        Self {
            plan,
            now,
            dice,
            account,
            network,
            clients,
            admins: Vec::new(),
            places,
            blows,
            weather,
            doomed,
            story,
            ledger,
            done,
            resting: Arc::default(),
            next_look: LOOK_EVERY,
        }
    }

    fn play(&mut self) -> Result<(), Broken> {
        self.send_clients();
        self.send_admins();
        let errands = self.plan.errands.len();
        while self.now < self.plan.rough {
            self.step()?;
        }
        self.story.tell("world", None, "nothing bad happens any more");
        self.weather.calm_down();
        self.blows.clear();
        self.doom().clients.clear();
        self.doom().half_way.clear();
        self.doom().keeping.clear();
        self.doom().traps.clear();
        self.doom().trapped.clear();
        for place in &mut self.places {
            place.back_at = place.back_at.or(place.left.load(Ordering::Relaxed).then_some(self.now));
        }
        self.examine()?;
        let patience = self.now + PATIENCE;
        while self.done.load(Ordering::Relaxed) < errands {
            self.step()?;
            if self.now > patience {
                return Err(self.stuck());
            }
        }
        self.until_admins_rest()?;
        self.until_nothing_is_left()?;
        self.shut_down()?;
        self.audit(true)?;
        self.take_everything_away()
    }

    /// One step of time for everybody, in an order of its own.
    fn step(&mut self) -> Result<(), Broken> {
        self.now += STEP;
        seams::set_now(self.now);
        self.strike();
        self.network.run_until(self.now);
        self.clients.iter_mut().for_each(|client| client.run_until(self.now));
        self.admins.iter_mut().for_each(|office| office.host.run_until(self.now));
        let mut order: Vec<usize> = (0..self.places.len()).collect();
        self.dice.shuffle(&mut order);
        for n in order {
            if let Some(host) = &mut self.places[n].host {
                host.run_until(self.now);
            }
        }
        self.bury();
        self.hold();
        if self.now >= self.next_look {
            self.next_look = self.now + LOOK_EVERY;
            self.audit(false)?;
        }
        self.ledger.broken().map_or(Ok(()), Err)
    }

    /// Whatever is due to happen happens.
    fn strike(&mut self) {
        while self.blows.front().is_some_and(|blow| blow.at <= self.now) {
            let Some(blow) = self.blows.pop_front() else { return };
            self.suffer(blow.what);
        }
        for n in 0..self.places.len() {
            if self.places[n].back_at.is_some_and(|at| at <= self.now) {
                self.start(n);
            }
        }
    }

    fn suffer(&mut self, what: What) {
        self.story.tell("fate", None, format!("{what:?}"));
        match what {
            What::Kill { worker, requests, arrives, away } => {
                let client = self.places[worker].client(worker);
                let mut doomed = self.doom();
                if requests == 0 {
                    doomed.dead.push((client, away));
                } else {
                    doomed.clients.insert(client, Doom { requests, arrives, away });
                }
            }
            What::Stop { worker, pause } => {
                let until = self.now + pause;
                self.ledger.sessions.met_trouble(&self.places[worker].client(worker), None, Duration::ZERO);
                if let Some(host) = &mut self.places[worker].host {
                    host.stop_until(until);
                }
            }
            What::StopClient { pause } => {
                let until = self.now + pause;
                self.clients[0].stop_until(until);
            }
            What::Clock { worker, skew } => {
                let place = &mut self.places[worker];
                place.skew = skew;
                if let Some(host) = &mut place.host {
                    host.set_skew(skew);
                }
            }
            What::Leave { worker, away } => {
                let place = &mut self.places[worker];
                if let Some(leave) = place.leave.take() {
                    let _ = leave.send(());
                    // Killed if it has not left by then.
                    place.back_at = Some(self.now + away + Duration::from_secs(5));
                }
            }
            What::Split => {
                for (n, place) in self.places.iter().enumerate() {
                    self.ledger.sessions.met_trouble(&place.client(n), None, Duration::ZERO);
                }
                let account = self.account.clone();
                let partitions = account.partitions("duroxide", "duroxide");
                if !partitions.is_empty() && partitions.len() < 12 {
                    let partition = *self.dice.pick(&partitions);
                    self.network.handle().spawn(async move { account.split("duroxide", "duroxide", partition).await });
                }
            }
        }
    }

    /// Workers that went into a trap stand still for a while.
    fn hold(&mut self) {
        let stopped = std::mem::take(&mut self.doom().stopped);
        for (client, trap) in stopped {
            let worst = self.plan.worst_skew;
            let places = self.places.iter_mut().enumerate();
            for (_, place) in places.filter(|(n, place)| place.host.is_some() && place.client(*n) == client) {
                self.story.tell("fate", None, format!("{client} is stopped: {trap:?}"));
                self.ledger.sessions.met_trouble(&client, None, Duration::ZERO);
                if trap.frozen {
                    let behind = i64::try_from(trap.pause.as_millis()).unwrap_or(0);
                    place.skew = (place.skew - behind).max(-worst);
                }
                if let Some(host) = &mut place.host {
                    host.stop_until(self.now + trap.pause);
                    host.set_skew(place.skew);
                }
            }
        }
    }

    /// Workers that have made their last request are no more.
    fn bury(&mut self) {
        let dead = std::mem::take(&mut self.doom().dead);
        for (client, away) in dead {
            self.admins.retain(|office| office.name != client);
            let places = self.places.iter_mut().enumerate();
            for (_, place) in places.filter(|(n, place)| place.host.is_some() && place.client(*n) == client) {
                self.story.tell("fate", None, format!("{client} is killed"));
                place.host = None;
                place.back_at.get_or_insert(self.now + away);
            }
        }
    }

    fn doom(&self) -> std::sync::MutexGuard<'_, Doomed> {
        self.doomed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn config(&mut self) -> CosmosDBProviderConfig {
        let executions = self.plan.executions;
        let retention = executions.map_or_else(Retention::default, |keep| Retention::default().with_executions(keep));
        CosmosDBProviderConfig::default()
            .with_retention(retention)
            .with_create_if_missing(true)
            .with_poll_interval(self.plan.slowest_poll)
            .with_inline_claims(self.plan.inline_claims)
            .with_reconciler_age_threshold(self.plan.reconciler)
            .with_history_cache_bytes(self.plan.cache)
            .with_clock(Clock::from_fn(seams::host_millis))
            .with_randomness(Randomness::seeded(self.dice.among(0..=u64::MAX)))
    }

    /// Another life begins in a worker's place.
    fn start(&mut self, n: usize) {
        let config = self.config();
        let dice = self.dice.fork();
        let place = &mut self.places[n];
        place.life += 1;
        place.back_at = None;
        let name = place.client(n);
        let mut host = Host::new();
        host.set_skew(place.skew);
        self.story.tell("fate", None, format!("{name} starts, its clock off by {} ms", place.skew));
        let (leave, told_to_leave) = oneshot::channel();
        place.leave = Some(leave);
        let (account, setup) = (self.account.clone(), self.plan.workers[n].clone());
        let (ledger, story, drops) = (self.ledger.clone(), self.story.clone(), self.plan.drops);
        let left = place.left.clone();
        left.store(false, Ordering::Relaxed);
        host.handle().spawn(async move {
            let provider = Arc::new(worker::open(&account, &name, &config).await);
            let witness = Arc::new(Witness::new(provider.clone(), &name, ledger, story.clone(), drops, dice));
            let runtime = worker::start(witness.clone(), &name, &setup).await;
            if told_to_leave.await.is_ok() {
                story.tell(&name, None, "leaves");
                runtime.shutdown(None).await;
                witness.leaves();
                provider.shutdown_within(Duration::from_secs(20)).await;
                story.tell(&name, None, "has left");
                left.store(true, Ordering::Relaxed);
            } else {
                std::future::pending::<()>().await;
            }
        });
        place.host = Some(host);
    }

    fn send_clients(&mut self) {
        for n in 0..self.clients.len() {
            let config = self.config();
            let account = self.account.clone();
            let (story, ledger, done) = (self.story.clone(), self.ledger.clone(), self.done.clone());
            let errands: Vec<_> = self.plan.errands.iter().skip(n).step_by(self.clients.len()).cloned().collect();
            self.clients[n].handle().spawn(async move {
                let provider = Arc::new(worker::open(&account, &format!("client {n}"), &config).await);
                let client = Arc::new(Client::new(provider));
                let runner = Errands { client, story, ledger };
                for (name, at, errand) in errands {
                    let (runner, done) = (runner.clone(), done.clone());
                    tokio::spawn(async move {
                        tokio::time::sleep(at).await;
                        runner.run(&name, &errand).await;
                        done.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    }

    fn stuck(&mut self) -> Broken {
        let broken = self.audit(false).err();
        let detail = match broken {
            Some(broken) => format!("clients still wait; {broken}"),
            None => "clients still wait".to_owned(),
        };
        let finished: BTreeSet<String> = self.story.done();
        let waiting = self.plan.errands.iter().map(|(name, ..)| name).find(|name| !finished.contains(*name));
        let instance = waiting.cloned().unwrap_or_default();
        Broken { invariant: "every orchestration ends", instance, detail }
    }

    /// Workers end what they have begun, and then nothing is left.
    fn until_nothing_is_left(&mut self) -> Result<(), Broken> {
        let patience = self.now + Duration::from_secs(120);
        loop {
            let soon = self.now + Duration::from_secs(3);
            while self.now < soon {
                self.step()?;
            }
            let left = self.inventory().passing();
            match left.into_iter().next() {
                None => return Ok(()),
                Some(broken) if self.now > patience => return Err(broken),
                Some(_) => {}
            }
        }
    }

    fn shut_down(&mut self) -> Result<(), Broken> {
        for place in &mut self.places {
            place.back_at = None;
            if let Some(leave) = place.leave.take() {
                let _ = leave.send(());
            }
        }
        let patience = self.now + Duration::from_secs(60);
        let all_left =
            |world: &Self| world.places.iter().all(|place| place.host.is_none() || place.left.load(Ordering::Relaxed));
        while !all_left(self) {
            self.step()?;
            if self.now > patience {
                let (instance, detail) = (String::new(), "a worker does not".to_owned());
                return Err(Broken { invariant: "workers shut down when they are told to", instance, detail });
            }
        }
        Ok(())
    }

    /// Runs something in a host of its own, while the world goes on.
    fn aside<T: Send + 'static>(
        &mut self,
        task: impl std::future::Future<Output = T> + Send + 'static,
    ) -> Result<T, Broken> {
        let mut host = Host::new();
        let (send, mut receive) = oneshot::channel();
        host.handle().spawn(async move { send.send(task.await) });
        loop {
            self.step()?;
            host.run_until(self.now);
            if let Ok(found) = receive.try_recv() {
                return Ok(found);
            }
        }
    }

    fn inventory(&self) -> Inventory {
        let inventory = Inventory::of(self.account.documents("duroxide", "duroxide"));
        inventory.after_deletions_of(self.ledger.deletions.names())
    }

    /// A doctor looks at everything while it goes on.
    fn examine(&mut self) -> Result<(), Broken> {
        let (config, account) = (self.config(), self.account.clone());
        let broken = self.aside(async move {
            let provider: CosmosDBProvider = worker::open(&account, "doctor", &config).await;
            let broken = audit::losses(&provider).await;
            provider.shutdown_within(Duration::from_secs(20)).await;
            broken
        })?;
        broken.map_or(Ok(()), Err)
    }

    /// How every instance must have ended, or that it must be gone: retention may have deleted it after it had ended like this.
    fn fates(&self) -> BTreeMap<String, Fate> {
        let fates = self.plan.errands.iter().flat_map(|(name, _, errand)| errand.fates(name));
        let now = fates.map(|(name, fate)| {
            let retained = self.ledger.deletions.last_status(&name).filter(|_| self.plan.has_retention());
            let is_gone = retained.is_some_and(|status| fate.status() == Some(status.as_str()));
            (name, if is_gone { Fate::Gone } else { fate })
        });
        now.collect()
    }

    fn audit(&mut self, ended: bool) -> Result<(), Broken> {
        let config = self.config();
        let account = self.account.clone();
        let inventory = self.inventory();
        let fates = self.fates();
        let faults = inventory.faults(&fates, ended);
        if let Some(broken) = faults.into_iter().next() {
            return Err(broken);
        }
        if !ended {
            return Ok(());
        }
        let broken = self.aside(async move {
            let provider: Arc<CosmosDBProvider> = Arc::new(worker::open(&account, "auditor", &config).await);
            let client = Client::new(provider.clone());
            let mut broken = audit::endings(&client, &fates).await;
            broken.extend(audit::counters(&provider, &inventory).await);
            broken.extend(audit::losses(&provider).await);
            provider.shutdown_within(Duration::from_secs(20)).await;
            broken
        })?;
        broken.into_iter().next().map_or(Ok(()), Err)
    }
}

/// Whether a request is the last that its sender makes, and what then happens to it.
fn last_request(doomed: &Mutex<Doomed>, request: &WireRequest<'_>) -> Option<WireAction> {
    let client = request.client?;
    let mut doomed = doomed.lock().unwrap_or_else(PoisonError::into_inner);
    if client.starts_with(WORKER) && !(doomed.half_way.is_empty() && doomed.keeping.is_empty()) {
        let doom = match moment(request) {
            Some(Moment::CommitsInParts) => doomed.half_way.pop_front(),
            Some(Moment::KeepsLock) if goes_on(request) => doomed.keeping.pop_front(),
            _ => None,
        };
        if let Some(doom) = doom {
            doomed.clients.entry(client.to_owned()).or_insert(doom);
        }
    }
    let doom = doomed.clients.get_mut(client)?;
    doom.requests -= 1;
    if doom.requests > 0 {
        return None;
    }
    let Doom { arrives, away, .. } = doomed.clients.remove(client)?;
    doomed.dead.push((client.to_owned(), away));
    // Nobody is there any more who could hear the answer.
    Some(if arrives { WireAction::LoseAnswer } else { WireAction::HoldBefore(Gate::new()) })
}

/// Whether a request is the one at which its sender is stopped. The request itself goes its way.
fn spring(doomed: &Mutex<Doomed>, request: &WireRequest<'_>) {
    let Some(client) = request.client.filter(|client| client.starts_with(WORKER)) else { return };
    let mut doomed = doomed.lock().unwrap_or_else(PoisonError::into_inner);
    if !doomed.traps.is_empty() && !doomed.trapped.contains_key(client) {
        let (moment, owes) = (moment(request), owes(request));
        let is_now = |trap: &Trap| Some(trap.moment) == moment || (owes && trap.moment == Moment::Owes);
        let found = doomed.traps.iter().position(is_now);
        if let Some(trap) = found.map(|at| doomed.traps.remove(at)) {
            doomed.trapped.insert(client.to_owned(), trap);
        }
    }
    let Some(trap) = doomed.trapped.get_mut(client) else { return };
    if trap.requests > 0 {
        trap.requests -= 1;
        return;
    }
    if let Some(trap) = doomed.trapped.remove(client) {
        doomed.stopped.push((client.to_owned(), trap));
    }
}

fn moment(request: &WireRequest<'_>) -> Option<Moment> {
    if request.kind != RequestKind::Batch {
        return None;
    }
    let body = request.json()?;
    let (first, second) = (body.get(0)?, body.get(1).unwrap_or(&Value::Null));
    if commits_in_parts(first) {
        return Some(Moment::CommitsInParts);
    }
    if first["resourceBody"]["staging"].as_array().is_some_and(|notes| !notes.is_empty()) {
        return Some(Moment::Stages);
    }
    let is = |operation: &Value, kind: &str| document_id(operation).is_some_and(|id| id.starts_with(kind));
    let ends = first["operationType"] == "Delete" && is(first, "w:") && (is(second, "m:") || is(second, INSTANCE));
    if ends {
        return Some(Moment::EndsActivity);
    }
    let operations = body.as_array()?;
    let locked =
        operations.iter().find(|operation| is(operation, INSTANCE) && !operation["resourceBody"]["lock"].is_null())?;
    if operations.iter().any(|operation| is(operation, "h:")) {
        return Some(Moment::KeepsLock);
    }
    (!locked["resourceBody"]["inlined"].is_null()).then_some(Moment::HandsOver)
}

/// Whether a request commits messages for others, which are then delivered.
fn owes(request: &WireRequest<'_>) -> bool {
    let is_intent = |operation: &Value| operation["resourceBody"]["type"] == "intent";
    request.kind == RequestKind::Batch
        && request.json().is_some_and(|body| body.as_array().into_iter().flatten().any(is_intent))
}

/// The id of every instance's document.
const INSTANCE: &str = "instance";

/// Whether a batch that begins so commits a turn whose parts are then applied, which takes some requests more.
/// Whether a commit leaves an execution that goes on: a turn after it has messages that are sent once.
fn goes_on(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let instance = body.as_array().into_iter().flatten().find(|operation| document_id(operation) == Some(INSTANCE));
    instance.is_some_and(|operation| operation["resourceBody"]["status"] == "Running")
}

fn commits_in_parts(first: &Value) -> bool {
    first["resourceBody"]["rollForward"]["next"] == 0
}

/// The document that an operation of a batch is about.
fn document_id(operation: &Value) -> Option<&str> {
    operation["id"].as_str().or_else(|| operation["resourceBody"]["id"].as_str())
}

fn observe(story: &Story, ledger: &Ledger, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
    let partition = weather::partition(request);
    let detail = describe(request);
    story.tell(
        request.client.unwrap_or("?"),
        partition.as_deref(),
        format!("#{} {} {detail}-> {} ({} bytes)", request.sequence, request.kind, answer.status, answer.body.len()),
    );
    if !(200..=204).contains(&answer.status) {
        return;
    }
    let partition = partition.unwrap_or_default();
    if request.kind == RequestKind::Delete {
        return note_deletion(ledger, &partition, request.document_id.unwrap_or_default());
    }
    let Some(body) = request.json() else { return };
    let note = |document: &Value, created: bool| {
        note_lock(ledger, document, created);
        ledger.owed.written(document);
        if document["type"] == "instance" {
            let broken = ledger.deletions.written(request.client.unwrap_or("?"), &partition, document);
            broken.into_iter().for_each(|broken| ledger.report(broken));
        }
    };
    match request.kind {
        RequestKind::Batch => {
            for operation in body.as_array().into_iter().flatten() {
                match operation.get("resourceBody") {
                    Some(document) => note(document, operation["operationType"] == "Create"),
                    None if operation["operationType"] == "Delete" => {
                        note_deletion(ledger, &partition, document_id(operation).unwrap_or_default());
                    }
                    None => {}
                }
            }
        }
        RequestKind::Create => note(&body, true),
        RequestKind::Replace | RequestKind::Upsert => note(&body, false),
        _ => {}
    }
}

/// Notes that a document is gone.
fn note_deletion(ledger: &Ledger, partition: &str, document: &str) {
    if document == INSTANCE {
        ledger.deletions.deleted(partition).into_iter().for_each(|broken| ledger.report(broken));
    }
    let lost = ledger.owed.deleted(partition, document, &ledger.deletions);
    lost.into_iter().for_each(|broken| ledger.report(broken));
    ledger.sessions.deleted(partition);
}

/// What the documents in a request are.
pub(crate) fn describe(request: &WireRequest<'_>) -> String {
    if request.kind == RequestKind::Batch {
        let operations = request.json().unwrap_or_default();
        let operation = |operation: &Value| {
            let id = document_id(operation).unwrap_or("?");
            format!("{} {id}", operation["operationType"].as_str().unwrap_or("?"))
        };
        let mut told: Vec<String> = operations.as_array().into_iter().flatten().map(operation).collect();
        let more = told.len().saturating_sub(12);
        told.truncate(12);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return format!("[{}{more}] ", told.join(", "));
    }
    request.document_id.map(|id| format!("{id} ")).unwrap_or_default()
}

/// Notes who holds what, from a document that was written.
fn note_lock(ledger: &Ledger, document: &Value, created: bool) {
    let text = |property: &str| document[property].as_str().unwrap_or("");
    if text("type") == "instance" {
        let (lock, last_turn) = (document["lock"]["token"].as_str(), document["lastTurn"].as_str());
        ledger.fenced(text("instanceId"), lock, last_turn, created);
    }
    match text("type") {
        "instance" | "activity" => {
            let lock = &document["lock"];
            if let (Some(token), Some(until)) = (lock["token"].as_str(), lock["until"].as_u64()) {
                ledger.claimed(text("instanceId"), text("id"), token, until);
            }
        }
        "session" => {
            let until = document["lockedUntil"].as_u64().unwrap_or(0);
            ledger.claimed(text("sessionId"), "session", text("owner"), until);
            ledger.sessions.written(document);
        }
        _ => {}
    }
}
