//! The workloads, and how much of each is run.

use std::time::Duration;

use crate::scene::Which;

/// A workload.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Its name in the table.
    pub name: &'static str,
    /// Its name on the command line.
    pub slug: &'static str,
    /// What is done.
    pub plan: Plan,
    /// When a run is cut short.
    pub cap: Duration,
    /// Whether the peer is left out, for want of time.
    pub skip_peer: bool,
    /// Physical partitions, where the setting has fewer: the emulator copies a whole one for every batch.
    pub partitions: u32,
}

/// What is done.
#[derive(Clone, Debug)]
pub enum Plan {
    /// Orchestrations one after the other, then several at once.
    Run {
        /// The orchestration's name.
        orchestration: &'static str,
        /// Its input.
        input: String,
        /// How many one after the other.
        rounds: u64,
        /// How many with several under way; none for zero.
        busy: u64,
    },
    /// A process that keeps several greetings under way, with more dispatchers than the others have.
    Busy {
        /// How many at a time.
        under_way: usize,
        /// How many in all.
        count: u64,
    },
    /// Greetings that wait before the runtime starts.
    Backlog {
        /// How many.
        waiting: u64,
        /// On how many accounts in turn.
        repeats: u64,
        /// Documents beside them that are nobody's work.
        padding: u64,
    },
    /// A runtime with nothing to do.
    Idle {
        /// Until the pollers have slowed down.
        settle: Duration,
        /// What is measured.
        watch: Duration,
    },
    /// Two processes with a runtime each; one of them starts the orchestrations.
    TwoProcesses {
        /// How many.
        busy: u64,
    },
    /// The client in one process, the runtime in another.
    ClientApart {
        /// How many, one after the other.
        rounds: u64,
    },
    /// Turns of an instance that has a history.
    History {
        /// Its events.
        events: u64,
        /// How many turns.
        turns: u64,
    },
}

/// The bytes of a large payload.
const PAYLOAD: usize = 100 * 1024;

/// What 380 greetings more would add, roughly: the emulator's own work grows with what a container holds, as the service's
/// does not, and this tells the two apart.
const PADDING: u64 = 380 * 3;

impl Workload {
    fn new(name: &'static str, slug: &'static str, plan: Plan, cap: u64) -> Self {
        Self { name, slug, plan, cap: Duration::from_secs(cap), skip_peer: false, partitions: 1 }
    }

    /// Why this provider is left out, if it is.
    pub fn skips(&self, which: Which) -> Option<&'static str> {
        (self.skip_peer && which == Which::Peer).then_some("not run with the peer: it would take many minutes")
    }

    /// Whether it tells what handing over changes.
    pub fn is_of_one_process(&self) -> bool {
        matches!(self.plan, Plan::Run { .. } | Plan::Busy { .. })
    }
}

/// All workloads; `quick` takes a few rounds of each.
pub fn all(quick: bool) -> Vec<Workload> {
    let mut all = runs(quick);
    all.extend(busy(quick));
    all.extend(backlogs(quick));
    all.extend(others(quick));
    all
}

fn runs(quick: bool) -> Vec<Workload> {
    let some = |full: u64| if quick { full.div_ceil(5) } else { full };
    let run = |orchestration, input: &str, rounds, busy| Plan::Run {
        orchestration,
        input: input.to_owned(),
        rounds: some(rounds),
        busy: some(busy),
    };
    vec![
        Workload::new("Hello", "hello", run("Hello", "world", 30, 100), 12),
        Workload::new("Hello, 5 cities", "cities", run("Sequence", "5", 15, 0), 12),
        Workload::new("Chain of 3", "chain3", run("Sequence", "3", 20, 40), 12),
        Workload::new("Fan-out of 20", "fanout20", run("FanOut", "20", 6, 0), 15),
        Workload::new("Fan-out of 300", "fanout300", run("FanOut", "300", 2, 0), 60),
        Workload::new("Parent of 5", "parent5", run("Parent", "5", 10, 0), 15),
        Workload::new("Hello, 100 KB", "payload", run("Hello", &"x".repeat(PAYLOAD), 10, 0), 12),
    ]
}

fn busy(quick: bool) -> Vec<Workload> {
    let each = |(name, slug, under_way, count): (&'static str, &'static str, usize, u64)| {
        let count = if quick { count / 5 } else { count };
        Workload::new(name, slug, Plan::Busy { under_way, count }, 15)
    };
    // The emulator copies a whole partition for every batch: on several it takes less of the machine.
    let on_many = |workload| Workload { partitions: 64, ..workload };
    let sizes = [
        ("Hello, 8 under way, 16 + 16", "busy8", 8, 800),
        ("Hello, 32 under way, 16 + 16", "busy32", 32, 1_200),
        ("Hello, 128 under way, 16 + 16", "busy128", 128, 1_600),
    ];
    sizes.map(each).map(on_many).into()
}

fn backlogs(quick: bool) -> Vec<Workload> {
    let backlog = |waiting, repeats, padding| Plan::Backlog { waiting, repeats, padding };
    let small = if quick { 1 } else { 3 };
    let mut large = Workload::new("Backlog of 2,000", "backlog2000", backlog(2000, 1, 0), 30);
    large.skip_peer = true;
    large.partitions = 8;
    let mut backlogs = vec![
        Workload::new("Backlog of 20", "backlog20", backlog(20, small, 0), 10),
        Workload::new("Backlog of 20, padded", "backlog20padded", backlog(20, small, PADDING), 10),
        Workload::new("Backlog of 100", "backlog100", backlog(100, 1, 0), 15),
        Workload::new("Backlog of 400", "backlog400", backlog(400, 1, 0), 20),
    ];
    if !quick {
        backlogs.push(large);
    }
    backlogs
}

fn others(quick: bool) -> Vec<Workload> {
    let some = |full: u64| if quick { full.div_ceil(5) } else { full };
    let history = |events| Plan::History { events, turns: some(10) };
    let seconds = Duration::from_secs;
    let idle = Plan::Idle { settle: seconds(some(15)), watch: seconds(some(30)) };
    vec![
        Workload::new("History of 10", "history10", history(10), 15),
        Workload::new("History of 2,000", "history2000", history(2000), 30),
        Workload::new("Two processes", "processes", Plan::TwoProcesses { busy: some(200) }, 15),
        Workload::new("Client apart", "apart", Plan::ClientApart { rounds: some(15) }, 12),
        Workload::new("Idle", "idle", idle, 60),
    ]
}
