//! The rows of a fleet, and the tables that they stand in.

/// Rows that belong together in one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// More processes, more partitions.
    Scale,
    /// Workers that have nothing to do until a client comes.
    Chain,
    /// One instance with many activities.
    Spread,
    /// Starts that wait.
    Starts,
    /// Timers that wait.
    Timers,
    /// A process that dies.
    Crash,
}

impl Group {
    /// All groups, in the order in which they are run.
    pub const ALL: [Self; 6] = [Self::Scale, Self::Chain, Self::Spread, Self::Starts, Self::Timers, Self::Crash];

    /// What its table is about, and how it is measured.
    pub fn title(self) -> &'static str {
        match self {
            Self::Scale => {
                "200 Hellos at once from a client process, workers up and at rest. Requests and RU of the workers, by \
                 Hello; the rate from the first turn on; shares of turns and activities."
            }
            Self::Chain => {
                "Chain of 3 from a client process, one after the other with pauses of 3 to 4.5 s, on 4 partitions."
            }
            Self::Spread => {
                "One orchestration with 300 activities of 50 ms at once, 4 activity dispatchers a process, 4 \
                 partitions: the median of three."
            }
            Self::Starts => {
                "Hellos that wait before the worker comes, on 16 partitions; the first 200 of them. A look: the same \
                 query on every partition, all pages."
            }
            Self::Timers => {
                "200 Hellos at once beside timers that are a day away, one worker, 64 partitions. Padding: as many \
                 documents of the same size that are nobody's work, which the local account pays for too. Its own: set by \
                 orchestrations that this worker ran, 100 in a turn."
            }
            Self::Crash => {
                "One of 4 worker processes is killed while 32 orchestrations of 3 activities of 50 ms are under way, 4 \
                 partitions. duroxide's locks: 5 s for a turn, 30 s for an activity. The median is of those before."
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

/// Whose work waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Nobody's: documents of the same size.
    Padding,
    /// Another process has put it there.
    Foreign,
    /// The worker has put it there itself, and may know of it.
    Own,
}

/// One row.
#[derive(Clone, Debug)]
pub struct Row {
    /// Its table.
    pub group: Group,
    /// Its name there.
    pub name: String,
    /// Its name on the command line.
    pub slug: String,
    /// Worker processes.
    pub processes: usize,
    /// Physical partitions.
    pub partitions: u32,
    /// What waits, where something does.
    pub waiting: u64,
    /// Whose that is.
    pub waits: Waits,
    /// Why the peer is left out, if it is.
    pub skip_peer: Option<&'static str>,
}

const MANY_MINUTES: &str = "not run: it would take many minutes";

impl Row {
    fn new(group: Group, name: String, slug: String, processes: usize, partitions: u32) -> Self {
        Self { group, name, slug, processes, partitions, waiting: 0, waits: Waits::Foreign, skip_peer: None }
    }

    /// Whether this name on the command line means the row, alone or with its table.
    pub fn is_called(&self, slug: &str) -> bool {
        self.slug == slug || self.group.slug() == slug
    }
}

/// Names on the command line, of rows and of their tables.
pub fn slugs() -> Vec<String> {
    let groups = Group::ALL.iter().map(|group| group.slug().to_owned());
    groups.chain(rows().into_iter().map(|row| row.slug)).collect()
}

/// All rows, by table.
pub fn rows() -> Vec<Row> {
    let crash = Row::new(Group::Crash, "One of 4 killed".to_owned(), "crash-4".to_owned(), 4, 4);
    [scales(), chains(), spreads(), starts(), timers(), vec![crash]].concat()
}

fn scales() -> Vec<Row> {
    let each = |(partitions, processes)| {
        let plural = if partitions == 1 { "" } else { "s" };
        let name = format!("Fleet of {processes}, {partitions} partition{plural}");
        let row = Row::new(Group::Scale, name, format!("scale-{processes}x{partitions}"), processes, partitions);
        Row { skip_peer: (processes == 8 || partitions == 16).then_some(MANY_MINUTES), ..row }
    };
    let sizes = [1, 4, 16].into_iter().flat_map(|partitions| [1, 2, 4, 8].map(|processes| (partitions, processes)));
    sizes.map(each).collect()
}

fn chains() -> Vec<Row> {
    let each = |processes| {
        let name = format!("Chain of 3, fleet of {processes}");
        Row::new(Group::Chain, name, format!("chain-{processes}"), processes, 4)
    };
    [1, 4].map(each).into()
}

fn spreads() -> Vec<Row> {
    let each = |processes| {
        let name = format!("300 slow activities, fleet of {processes}");
        let row = Row::new(Group::Spread, name, format!("spread-{processes}"), processes, 4);
        Row { skip_peer: (processes == 2).then_some("not run: fleets of 1 and 4 say enough of it"), ..row }
    };
    [1, 2, 4].map(each).into()
}

fn starts() -> Vec<Row> {
    let each = |(waiting, text)| {
        let (name, slug) = (format!("{text} starts waiting"), format!("starts-{waiting}"));
        let row = Row { waiting, ..Row::new(Group::Starts, name, slug, 1, 16) };
        Row { skip_peer: (waiting > 2_000).then_some(MANY_MINUTES), ..row }
    };
    [(200, "200"), (2_000, "2,000"), (20_000, "20,000")].map(each).into()
}

/// On many partitions: the emulator copies a whole one for every batch.
fn timers() -> Vec<Row> {
    let each = |(waiting, waits, slug, name): (u64, Waits, &str, &str)| {
        let row = Row::new(Group::Timers, name.to_owned(), format!("timers-{slug}"), 1, 64);
        Row { waiting, waits, skip_peer: (waiting > 20_000).then_some(MANY_MINUTES), ..row }
    };
    [
        (0, Waits::Foreign, "0", "no timers"),
        (20_000, Waits::Padding, "20000-padding", "20,000 padding"),
        (20_000, Waits::Foreign, "20000", "20,000 timers"),
        (20_000, Waits::Own, "20000-own", "20,000 timers of its own"),
        (100_000, Waits::Padding, "100000-padding", "100,000 padding"),
        (100_000, Waits::Foreign, "100000", "100,000 timers"),
    ]
    .map(each)
    .into()
}
