//! Why an instance stands still, and what of it can be mended from its history.
//!
//! SPEC.md, "Doctor", says what must be there, and under which conditions something is written.

mod findings;
mod fix;
mod lateness;
mod rebuild;
mod scan;
mod snapshot;

use super::{workers, Member};
use crate::{
    cosmos::{in_background, StoreError},
    engine::Engine,
    lifecycle::service_time::ClockSkew,
    model::Partition,
};
use findings::DetectedFault;
use serde::Serialize;
use snapshot::{Snapshot, SnapshotRead};
use std::{fmt, sync::Arc, time::Duration};
use tracing::warn;

pub use fix::Repair;
pub use scan::Scan;

/// Looks at an instance that moves, or whose history a replica may not have yet, before that is said.
const LOOKS: usize = 5;
/// The pause between two of them.
const PAUSE: Duration = Duration::from_millis(300);

/// Finds out why instances register still. Made by [`CosmosDBProvider::doctor`](crate::CosmosDBProvider::doctor).
pub struct Doctor {
    engine: Arc<Engine>,
    /// Who is there to take something.
    members: Vec<Member>,
    skew: ClockSkew,
}

/// What is known of the health of an instance.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Diagnosis {
    /// The instance.
    pub instance: String,
    /// The name of its orchestration, where that is known.
    pub name: String,
    /// `Running`, `Completed`, `Failed` or `ContinuedAsNew`; none where no turn was committed.
    pub status: Option<String>,
    /// When its last turn was committed, in milliseconds since 1970.
    pub updated_at: Option<u64>,
    /// What it does or waits for, in a few words.
    pub state: String,
    /// It has changed each time that it was looked at: what moves is not stuck, and nothing more is said of it.
    pub moves: bool,
    /// What is wrong. Nothing where it is well.
    pub findings: Vec<Finding>,
}

/// Something that is wrong with an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Finding {
    /// What kind of thing is wrong.
    pub reason: Reason,
    /// What is wrong, in a sentence.
    pub detail: String,
    /// What becomes of it.
    #[serde(flatten)]
    pub remedy: Remedy,
}

/// What kind of thing is wrong with an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum Reason {
    /// There are documents of an instance, but not the one that says what it is.
    LostInstance,
    /// An activity was scheduled, and there is neither work nor a completion.
    LostActivity,
    /// An activity is to be run whose input is not there.
    LostInput,
    /// A timer was set, and there is no message that fires it.
    LostTimer,
    /// A child was scheduled, and there is neither the child nor its start.
    LostChild,
    /// A child has ended, and its end is not told.
    LostEnd,
    /// The orchestration continued as new, and nothing starts its next execution.
    LostContinuation,
    /// A part of the history is not there, or there is more of it than there should be.
    LostHistory,
    /// A value is not there, or not as the history says.
    LostValue,
    /// The custom status is not there, or not as the history says.
    LostStatus,
    /// An execution has a history, but no document that says how it ended.
    LostExecution,
    /// Something waits that nobody takes.
    Late,
    /// A message to another instance is not delivered.
    Undelivered,
    /// A turn was committed, and a part of what it has written is not applied.
    HalfCommitted,
    /// It was to be deleted, and only a part of it is.
    HalfDeleted,
    /// A document can't be read.
    Unreadable,
    /// Its parent is not there.
    Orphan,
    /// A document does not belong there.
    Stray,
    /// It runs, and there is nothing that it waits for.
    Idle,
}

impl Reason {
    /// Whether a region that has not heard of the last writes would look the same.
    fn may_be_lag(self) -> bool {
        matches!(self, Self::LostHistory | Self::LostInstance | Self::HalfCommitted | Self::LostEnd)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LostInstance => "lost instance",
            Self::LostActivity => "lost activity",
            Self::LostInput => "lost input",
            Self::LostTimer => "lost timer",
            Self::LostChild => "lost child",
            Self::LostEnd => "lost end",
            Self::LostContinuation => "lost continuation",
            Self::LostHistory => "lost history",
            Self::LostValue => "lost value",
            Self::LostStatus => "lost status",
            Self::LostExecution => "lost execution",
            Self::Late => "late",
            Self::Undelivered => "undelivered",
            Self::HalfCommitted => "half committed",
            Self::HalfDeleted => "half deleted",
            Self::Unreadable => "unreadable",
            Self::Orphan => "orphan",
            Self::Stray => "unreferenced",
            Self::Idle => "idle",
        })
    }
}

/// What becomes of a finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "remedy", content = "todo", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Remedy {
    /// [`Doctor::repair`] does this.
    Repair(String),
    /// Somebody else must do this.
    ByHand(String),
}

impl Diagnosis {
    /// Whether a repair would do something.
    pub fn can_be_repaired(&self) -> bool {
        self.findings.iter().any(|finding| matches!(finding.remedy, Remedy::Repair(_)))
    }
}

/// A diagnosis, with what it was made of.
struct Examined {
    diagnosis: Diagnosis,
    found: Vec<DetectedFault>,
    snapshot: Option<Box<Snapshot>>,
}

impl Doctor {
    pub(super) async fn new(engine: &Arc<Engine>) -> Result<Self, StoreError> {
        let skew = ClockSkew::measure(engine).await.unwrap_or_else(|error| {
            // Somebody who may only read can diagnose. A repair insists.
            warn!(%error, "the service's time is not known: what is late is judged by this machine's clock");
            ClockSkew::default()
        });
        Ok(Self { engine: engine.clone(), members: workers::members(engine, skew.now(engine)).await?, skew })
    }

    /// What is wrong with an instance; none where there is nothing of that name. Nothing is changed.
    pub async fn diagnose(&self, instance: &str) -> Result<Option<Diagnosis>, StoreError> {
        let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
        let examined = in_background(self.examine(&partition, self.skew)).await?;
        Ok(examined.map(|examined| examined.diagnosis))
    }

    /// Does what the findings of a diagnosis have said that a repair does, as far as it is still so. **Changes** the container.
    pub async fn repair(&self, diagnosis: &Diagnosis) -> Result<Repair, StoreError> {
        fix::repair(self, diagnosis).await
    }

    /// The instances that may be in trouble: of which something waits that nobody takes, and those that run and have not moved for so
    /// long; with `all`, every instance, and whatever has a history.
    pub fn scan(&self, unmoved: Duration, all: bool) -> Scan {
        Scan::new(self.engine.clone(), self.skew, unmoved, all)
    }

    /// What two looks in a row have found, of the same state of the instance.
    async fn examine(&self, partition: &Partition, skew: ClockSkew) -> Result<Option<Examined>, StoreError> {
        let mut before: Option<Vec<DetectedFault>> = None;
        for number in 0..LOOKS {
            if number > 1 {
                tokio::time::sleep(PAUSE).await;
            }
            let snapshot = match snapshot::look(&self.engine, partition, skew.now(&self.engine)).await? {
                SnapshotRead::Nothing => return Ok(None),
                SnapshotRead::Moved => {
                    before = None;
                    continue;
                }
                SnapshotRead::Still(snapshot) => snapshot,
            };
            let found = findings::of(&snapshot, &self.members);
            if found.is_empty() {
                return Ok(Some(Examined::new(snapshot, found)));
            }
            let is_same =
                |before: &Vec<DetectedFault>| found.iter().all(|found| before.iter().any(|other| other.is(found)));
            // A replica may lag by more than a look takes.
            let in_doubt = found.iter().any(|found| found.finding.reason.may_be_lag());
            let is_last = number + 1 == LOOKS;
            match before {
                Some(before) if is_last || (is_same(&before) && !in_doubt) => {
                    let agreed = found.into_iter().filter(|found| before.iter().any(|other| other.is(found)));
                    return Ok(Some(Examined::new(snapshot, agreed.collect())));
                }
                _ => before = Some(found),
            }
        }
        Ok(Some(Examined::moving(partition)))
    }
}

impl Examined {
    fn new(snapshot: Box<Snapshot>, found: Vec<DetectedFault>) -> Self {
        let document = snapshot.document();
        let diagnosis = Diagnosis {
            instance: snapshot.partition.instance_id().unwrap_or_default().to_owned(),
            name: document.map(|document| document.name.clone()).unwrap_or_default(),
            status: document.and_then(|document| document.status.clone()),
            updated_at: document.filter(|document| document.exists()).map(|document| document.updated_at),
            state: findings::state(&snapshot),
            moves: false,
            findings: found.iter().map(|found| found.finding.clone()).collect(),
        };
        Self { diagnosis, found, snapshot: Some(snapshot) }
    }

    fn moving(partition: &Partition) -> Self {
        let diagnosis = Diagnosis {
            instance: partition.instance_id().unwrap_or_default().to_owned(),
            name: String::new(),
            status: None,
            updated_at: None,
            state: "moves".to_owned(),
            moves: true,
            findings: Vec::new(),
        };
        Self { diagnosis, found: Vec::new(), snapshot: None }
    }
}
