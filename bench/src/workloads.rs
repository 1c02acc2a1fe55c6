//! The workloads of one process and the number of their rounds.

use std::time::Duration;

use crate::fixture::ProviderKind;

/// A workload of the benchmark.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The name in the table.
    pub name: &'static str,
    /// The name on the command line.
    pub slug: &'static str,
    /// The kind of workload, with its parameters.
    pub plan: Plan,
    /// The time after which a run is cut off.
    pub cap: Duration,
    /// Whether duroxide-cdb is left out, because it would take too long.
    pub skip_cdb: bool,
    /// The minimum number of physical partitions. The emulator copies a whole partition for every batch.
    pub partitions: u32,
}

/// The kind of workload, with its parameters.
#[derive(Clone, Debug)]
pub enum Plan {
    /// Orchestrations that run one after the other, then several concurrently.
    Run {
        /// The name of the orchestration.
        orchestration: &'static str,
        /// The input of the orchestration.
        input: String,
        /// The number of orchestrations one after the other.
        rounds: u64,
        /// The number of orchestrations with several in flight, or zero.
        busy: u64,
    },
    /// A process that keeps several Hellos in flight, with more dispatchers than other workloads.
    Busy {
        /// The number in flight.
        in_flight: usize,
        /// The total number.
        count: u64,
    },
    /// Hellos that wait before the runtime starts.
    Backlog {
        /// The number of Hellos.
        waiting: u64,
        /// The number of accounts on which the backlog is repeated.
        repeats: u64,
        /// The number of padding documents, which no provider reads.
        padding: u64,
    },
    /// An idle runtime.
    Idle {
        /// The time after which polling has slowed down.
        settle: Duration,
        /// The time that is measured.
        watch: Duration,
    },
    /// Two processes with a runtime each. One of them starts the orchestrations.
    TwoProcesses {
        /// The number of orchestrations.
        busy: u64,
    },
    /// A client in one process and the runtime in another.
    RemoteClient {
        /// The number of orchestrations, one after the other.
        rounds: u64,
    },
    /// Turns of an instance that has a history.
    History {
        /// The number of events in the history.
        events: u64,
        /// The number of turns.
        turns: u64,
    },
}

/// The size of a large payload in bytes.
const PAYLOAD: usize = 100 * 1024;

/// Roughly the number of documents of 380 more Hellos. The emulator's own work grows with the number of documents,
/// unlike the service's. The padding separates that effect from the provider's.
const PADDING: u64 = 380 * 3;

impl Workload {
    fn new(name: &'static str, slug: &'static str, plan: Plan, cap: u64) -> Self {
        Self { name, slug, plan, cap: Duration::from_secs(cap), skip_cdb: false, partitions: 1 }
    }

    /// Returns the reason why this provider is left out, if it is.
    pub fn skips(&self, kind: ProviderKind) -> Option<&'static str> {
        (self.skip_cdb && kind == ProviderKind::Cdb).then_some("not run: it would take many minutes")
    }

    /// Whether the workload runs in one busy process, where inline claims make a difference.
    pub fn is_of_one_process(&self) -> bool {
        matches!(self.plan, Plan::Run { .. } | Plan::Busy { .. })
    }
}

/// Returns all workloads. `quick` reduces the number of rounds.
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
    let each = |(name, slug, in_flight, count): (&'static str, &'static str, usize, u64)| {
        let count = if quick { count / 5 } else { count };
        Workload::new(name, slug, Plan::Busy { in_flight, count }, 15)
    };
    // The emulator copies a whole partition for every batch. With more partitions it uses less CPU.
    let on_many = |workload| Workload { partitions: 64, ..workload };
    let sizes = [
        ("Hello, 8 in flight, 16 + 16", "busy8", 8, 800),
        ("Hello, 32 in flight, 16 + 16", "busy32", 32, 1_200),
        ("Hello, 128 in flight, 16 + 16", "busy128", 128, 1_600),
    ];
    sizes.map(each).map(on_many).into()
}

fn backlogs(quick: bool) -> Vec<Workload> {
    let backlog = |waiting, repeats, padding| Plan::Backlog { waiting, repeats, padding };
    let small = if quick { 1 } else { 3 };
    let mut large = Workload::new("Backlog of 2,000", "backlog2000", backlog(2000, 1, 0), 30);
    large.skip_cdb = true;
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
        Workload::new("Client in another process", "remote-client", Plan::RemoteClient { rounds: some(15) }, 12),
        Workload::new("Idle", "idle", idle, 60),
    ]
}
