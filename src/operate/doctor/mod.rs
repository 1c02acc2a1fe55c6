//! The doctor: finds out why an instance makes no progress, and repairs faults from its history.
//!
//! `docs/design/doctor.md` lists the documents that must exist and the conditions of each repair.

mod findings;
mod fix;
mod lateness;
mod leftovers;
mod lost;
mod rebuild;
mod scan;
mod snapshot;
mod state;
mod values;

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

/// The number of snapshots of an instance before the doctor reports. An instance may be changing, and a replica may lag
/// behind its history.
const MAX_READS: usize = 5;
/// The pause between two snapshots.
const PAUSE: Duration = Duration::from_millis(300);

/// Finds out why instances make no progress, and repairs them.
/// [`CosmosDBProvider::doctor`](crate::CosmosDBProvider::doctor) creates it.
pub struct Doctor {
    engine: Arc<Engine>,
    /// The workers that look for work.
    members: Vec<Member>,
    skew: ClockSkew,
}

/// The health of an instance.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Diagnosis {
    /// The id of the instance.
    pub instance: String,
    /// The name of its orchestration, or an empty string if it is not known.
    pub name: String,
    /// `Running`, `Completed`, `Failed` or `ContinuedAsNew`. `None` if no turn was committed.
    pub status: Option<String>,
    /// The time when its last turn was committed, in milliseconds since 1970.
    pub updated_at: Option<u64>,
    /// The activity of the instance, or the event that it waits for, in a few words.
    pub state: String,
    /// Whether the instance changed between all reads. A changing instance is not stuck, so the diagnosis has no
    /// findings.
    pub moves: bool,
    /// The faults of the instance. A healthy instance has none.
    pub findings: Vec<Finding>,
}

/// A fault of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct Finding {
    /// The kind of fault.
    pub reason: Reason,
    /// A description of the fault.
    pub detail: String,
    /// The remedy for the fault.
    #[serde(flatten)]
    pub remedy: Remedy,
}

/// The kind of fault of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum Reason {
    /// The instance has documents, but its own document is missing.
    LostInstance,
    /// An activity was scheduled, but neither the activity nor its completion exists.
    LostActivity,
    /// The input of an activity is missing.
    LostInput,
    /// A timer was created, but no message fires it.
    LostTimer,
    /// A child was scheduled, but neither the child nor its start exists.
    LostChild,
    /// A child has ended, but no message tells its parent.
    LostEnd,
    /// The orchestration continued as new, but no message starts its next execution.
    LostContinuation,
    /// A part of the history is missing, or the history has too many events.
    LostHistory,
    /// A value is missing or differs from the history.
    LostValue,
    /// The custom status is missing or differs from the history.
    LostStatus,
    /// An execution has a history, but its own document is missing.
    LostExecution,
    /// A message or an activity waits, and no worker takes it.
    Late,
    /// A message to another instance is not delivered.
    Undelivered,
    /// A turn was committed, but not all its parts are applied.
    HalfCommitted,
    /// The deletion of the instance is unfinished.
    HalfDeleted,
    /// A document can't be read.
    Unreadable,
    /// The parent of the instance does not exist.
    Orphan,
    /// A document belongs to nothing, or this crate does not know its type.
    Unreferenced,
    /// The instance runs, but waits for nothing.
    Idle,
}

impl Reason {
    /// Whether a region that lags behind the last writes would show the same.
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
            Self::Unreferenced => "unreferenced",
            Self::Idle => "idle",
        })
    }
}

/// The remedy for a finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "remedy", content = "todo", rename_all = "camelCase")]
#[non_exhaustive]
pub enum Remedy {
    /// [`Doctor::repair`] does this.
    Repair(String),
    /// An operator must do this.
    ByHand(String),
}

impl Diagnosis {
    /// Whether [`Doctor::repair`] can repair at least one finding.
    pub fn can_be_repaired(&self) -> bool {
        self.findings.iter().any(|finding| matches!(finding.remedy, Remedy::Repair(_)))
    }
}

/// A diagnosis with its snapshot and its faults.
struct Examined {
    diagnosis: Diagnosis,
    found: Vec<DetectedFault>,
    snapshot: Option<Box<Snapshot>>,
}

impl Doctor {
    pub(crate) async fn new(engine: &Arc<Engine>) -> Result<Self, StoreError> {
        let skew = ClockSkew::measure(engine).await.unwrap_or_else(|error| {
            // An operator with read access can diagnose. A repair needs the measurement.
            warn!(%error, "can't measure Cosmos DB's time, the doctor uses the clock of this machine");
            ClockSkew::default()
        });
        Ok(Self { engine: engine.clone(), members: workers::members(engine, skew.now(engine)).await?, skew })
    }

    /// Diagnoses an instance. Returns `None` if no document has its id. It changes nothing.
    pub async fn diagnose(&self, instance: &str) -> Result<Option<Diagnosis>, StoreError> {
        let Ok(partition) = Partition::instance(instance) else { return Ok(None) };
        let examined = in_background(self.examine(&partition, self.skew)).await?;
        Ok(examined.map(|examined| examined.diagnosis))
    }

    /// Repairs the findings of a diagnosis that have [`Remedy::Repair`], if the fault still exists. **Changes** the
    /// container.
    pub async fn repair(&self, diagnosis: &Diagnosis) -> Result<Repair, StoreError> {
        fix::repair(self, diagnosis).await
    }

    /// Scans for instances that may have a fault:
    ///
    /// - instances with a message or an activity that is overdue;
    /// - running instances without progress for `unmoved`;
    /// - with `all`, every instance, and every id with a history, a message or an activity.
    pub fn scan(&self, unmoved: Duration, all: bool) -> Scan {
        Scan::new(self.engine.clone(), self.skew, unmoved, all)
    }

    /// The faults that two consecutive snapshots show of the same state of the instance.
    async fn examine(&self, partition: &Partition, skew: ClockSkew) -> Result<Option<Examined>, StoreError> {
        let mut before: Option<Vec<DetectedFault>> = None;
        for number in 0..MAX_READS {
            if number > 1 {
                tokio::time::sleep(PAUSE).await;
            }
            let snapshot = match snapshot::read(&self.engine, partition, skew.now(&self.engine)).await? {
                SnapshotRead::Missing => return Ok(None),
                SnapshotRead::Changed => {
                    before = None;
                    continue;
                }
                SnapshotRead::Stable(snapshot) => snapshot,
            };
            let found = findings::of(&snapshot, &self.members);
            if found.is_empty() {
                return Ok(Some(Examined::new(snapshot, found)));
            }
            let is_same = |before: &Vec<DetectedFault>| {
                found.iter().all(|found| before.iter().any(|other| other.is_same_as(found)))
            };
            // A replica may lag by more than the time of one snapshot.
            let in_doubt = found.iter().any(|found| found.finding.reason.may_be_lag());
            let is_last = number + 1 == MAX_READS;
            match before {
                Some(before) if is_last || (is_same(&before) && !in_doubt) => {
                    let agreed = found.into_iter().filter(|found| before.iter().any(|other| other.is_same_as(found)));
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
            name: document.map(|document| document.current.name.clone()).unwrap_or_default(),
            status: document.and_then(|document| document.current.status.clone()),
            updated_at: document.filter(|document| document.exists()).map(|document| document.updated_at),
            state: state::state(&snapshot),
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
