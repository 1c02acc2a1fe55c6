//! The rows of a fleet and their tables.

/// A table of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Different numbers of processes and partitions.
    Scale,
    /// Latency on idle workers.
    Chain,
    /// One instance with many activities.
    Spread,
    /// Waiting starts.
    Starts,
    /// Waiting timers.
    Timers,
    /// A killed process.
    Crash,
}

impl Group {
    /// All groups, in the order in which they run.
    pub const ALL: [Self; 6] = [Self::Scale, Self::Chain, Self::Spread, Self::Starts, Self::Timers, Self::Crash];

    /// Returns the title of the table, with the method of measurement.
    pub fn title(self) -> &'static str {
        match self {
            Self::Scale => {
                "200 concurrent Hellos from a client process, on idle workers. Requests and RU of the workers are per \
                 Hello. The rate begins with the first turn. Shares are of turns and activities."
            }
            Self::Chain => {
                "Chain of 3 from a client process, one after the other with pauses of 3 to 4.5 s, on 4 partitions."
            }
            Self::Spread => {
                "One orchestration with 300 concurrent activities of 50 ms, 4 activity dispatchers per process, 4 \
                 partitions: the median of three."
            }
            Self::Starts => {
                "Hellos that wait before the worker starts, on 16 partitions; the first 200 of them. A poll is the same \
                 query on every partition, with all pages."
            }
            Self::Timers => {
                "200 concurrent Hellos beside timers that fire in a day, one worker, 64 partitions. Padding: as many \
                 documents of the same size that no provider reads, but that slow the local account as well. Set by the \
                 worker: orchestrations of this worker set the timers, 100 in a turn."
            }
            Self::Crash => {
                "One of 4 worker processes is killed while 32 orchestrations of 3 activities of 50 ms are in flight, 4 \
                 partitions. duroxide's locks last 5 s for a turn and 30 s for an activity. The median is that before the \
                 kill."
            }
        }
    }

    fn slug(self) -> &'static str {
        match self {
            Self::Scale => "scale",
            Self::Chain => "chain",
            Self::Spread => "spread",
            Self::Starts => "starts",
            Self::Timers => "timers",
            Self::Crash => "crash",
        }
    }
}

/// The origin of the waiting documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitingWork {
    /// Padding: documents of the same size that no provider reads.
    Padding,
    /// Another process has enqueued the timers.
    Foreign,
    /// The worker itself has set the timers, and may have cached them.
    Own,
}

/// A row of a table.
#[derive(Clone, Debug)]
pub struct FleetRow {
    /// The table of the row.
    pub group: Group,
    /// The name in the table.
    pub name: String,
    /// The name on the command line.
    pub slug: String,
    /// The number of worker processes.
    pub processes: usize,
    /// The number of physical partitions.
    pub partitions: u32,
    /// The number of waiting starts or timers.
    pub waiting: u64,
    /// The origin of the waiting documents.
    pub origin: WaitingWork,
    /// The reason why duroxide-cdb is left out, if it is.
    pub skip_cdb: Option<&'static str>,
}

const MANY_MINUTES: &str = "not run: it would take many minutes";

impl FleetRow {
    fn new(group: Group, name: String, slug: String, processes: usize, partitions: u32) -> Self {
        Self { group, name, slug, processes, partitions, waiting: 0, origin: WaitingWork::Foreign, skip_cdb: None }
    }

    /// Whether this name on the command line means the row, or its table.
    pub fn is_called(&self, slug: &str) -> bool {
        self.slug == slug || self.group.slug() == slug
    }
}

/// Returns the names of rows and tables on the command line.
pub fn slugs() -> Vec<String> {
    let groups = Group::ALL.iter().map(|group| group.slug().to_owned());
    groups.chain(rows().into_iter().map(|row| row.slug)).collect()
}

/// Returns all rows, by table.
pub fn rows() -> Vec<FleetRow> {
    let crash = FleetRow::new(Group::Crash, "One of 4 workers killed".to_owned(), "crash-4".to_owned(), 4, 4);
    [scales(), chains(), spreads(), starts(), timers(), vec![crash]].concat()
}

fn scales() -> Vec<FleetRow> {
    let each = |(partitions, processes)| {
        let plural = if partitions == 1 { "" } else { "s" };
        let name = format!("Fleet of {processes}, {partitions} partition{plural}");
        let row = FleetRow::new(Group::Scale, name, format!("scale-{processes}x{partitions}"), processes, partitions);
        FleetRow { skip_cdb: (processes == 8 || partitions == 16).then_some(MANY_MINUTES), ..row }
    };
    let sizes = [1, 4, 16].into_iter().flat_map(|partitions| [1, 2, 4, 8].map(|processes| (partitions, processes)));
    sizes.map(each).collect()
}

fn chains() -> Vec<FleetRow> {
    let each = |processes| {
        let name = format!("Chain of 3, fleet of {processes}");
        FleetRow::new(Group::Chain, name, format!("chain-{processes}"), processes, 4)
    };
    [1, 4].map(each).into()
}

fn spreads() -> Vec<FleetRow> {
    let each = |processes| {
        let name = format!("300 slow activities, fleet of {processes}");
        let row = FleetRow::new(Group::Spread, name, format!("spread-{processes}"), processes, 4);
        FleetRow { skip_cdb: (processes == 2).then_some("not run: fleets of 1 and 4 suffice"), ..row }
    };
    [1, 2, 4].map(each).into()
}

fn starts() -> Vec<FleetRow> {
    let each = |(waiting, text)| {
        let (name, slug) = (format!("{text} starts waiting"), format!("starts-{waiting}"));
        let row = FleetRow { waiting, ..FleetRow::new(Group::Starts, name, slug, 1, 16) };
        FleetRow { skip_cdb: (waiting > 2_000).then_some(MANY_MINUTES), ..row }
    };
    [(200, "200"), (2_000, "2,000"), (20_000, "20,000")].map(each).into()
}

/// Returns the rows with timers. They have many partitions, because the emulator copies a whole partition for every
/// batch.
fn timers() -> Vec<FleetRow> {
    let each = |(waiting, origin, slug, name): (u64, WaitingWork, &str, &str)| {
        let row = FleetRow::new(Group::Timers, name.to_owned(), format!("timers-{slug}"), 1, 64);
        FleetRow { waiting, origin, skip_cdb: (waiting > 20_000).then_some(MANY_MINUTES), ..row }
    };
    [
        (0, WaitingWork::Foreign, "0", "no timers"),
        (20_000, WaitingWork::Padding, "20000-padding", "20,000 padding documents"),
        (20_000, WaitingWork::Foreign, "20000", "20,000 timers"),
        (20_000, WaitingWork::Own, "20000-own", "20,000 timers set by the worker"),
        (100_000, WaitingWork::Padding, "100000-padding", "100,000 padding documents"),
        (100_000, WaitingWork::Foreign, "100000", "100,000 timers"),
    ]
    .map(each)
    .into()
}
