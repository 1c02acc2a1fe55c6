//! Counting without `COUNT`: what finished is in the counters, what is open is few.
//!
//! An instance's document has `tally` while the counters don't hold its figures. The metrics are the counters plus the
//! figures of the open instances. Finished ones are *sealed*: their figures move into the counters, exactly once:
//!
//! 1. the counters note which instances take a step, from what they hold of each to what they will;
//! 2. each instance's document takes its step: it loses `tally` and notes what the counters hold of it;
//! 3. the counters add the figures of those that took it, and their entries in the note go.
//!
//! An instance that is erased takes the step back to nothing in the same way; its erasure is the step. Entries are
//! independent of each other: each is counted by the one write that takes it out of the note. Entries of a process that has
//! died are looked after by the next that seals. An instance that changes again is open again, contributes the difference to
//! what the counters hold of it, and is sealed again.

use super::{plan, retention, shared, Documents};
use crate::{
    engine::Engine,
    model::{
        clock::millis, status, CountersDocument, Deleting, InstanceDocument, Lock, Partition, Sealed, Sealing, Totals,
    },
    store::{queries, Applied, Deadline, Freshness, Rows, StoreError, Versioned, WriteOutcome},
    turn::{instance_id, release::read_latest},
};
use azure_core::http::Etag;
use duroxide::providers::{QueueDepths, SystemMetrics};
use futures::{stream, StreamExt, TryFutureExt};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};
use tracing::{debug, error, warn};

/// Fewer finished instances than that are left to be summed up; more would make every call dear.
const WORTH_SEALING: usize = 50;
/// Where a look finds so many there is much to do: the next look follows by itself.
const BUSY: usize = 250;
const LOOK_EVERY: Duration = Duration::from_secs(3);
/// Documents that are sealed at once.
const CONCURRENCY: usize = 32;
/// A process that seals is left alone for so long after its last word.
const LEASE: Duration = Duration::from_secs(5);
/// What the note may come to: well below the limit of a document.
const MAX_NOTE_BYTES: usize = 1_000_000;
/// How often the metrics are read again because figures moved meanwhile.
const LOOKS: usize = 5;

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OpenRow {
    instance_id: Partition,
    #[serde(default)]
    status: Option<String>,
    #[serde(default)]
    totals: Totals,
    #[serde(default)]
    sealed: Option<Sealed>,
    #[serde(default)]
    deleting: Option<Deleting>,
}

impl OpenRow {
    fn figures(&self) -> Option<Sealed> {
        Some(Sealed { status: self.status.clone()?, totals: self.totals, round: String::new() })
    }

    fn is_to_be_sealed(&self) -> bool {
        self.deleting.is_none() && self.status.as_deref().is_some_and(status::instance_has_ended)
    }
}

/// The figures as they are kept for other processes.
#[derive(Clone, Serialize, Deserialize)]
struct KeptMetrics(#[serde(with = "MetricsFields")] SystemMetrics);

#[derive(Serialize, Deserialize)]
#[serde(remote = "SystemMetrics", rename_all = "camelCase")]
struct MetricsFields {
    total_instances: u64,
    total_executions: u64,
    running_instances: u64,
    completed_instances: u64,
    failed_instances: u64,
    total_events: u64,
}

/// The system's figures, for a member of a fleet those of the last minute.
pub(crate) async fn shared_system(engine: &Arc<Engine>) -> Result<SystemMetrics, StoreError> {
    let work_out = system(engine).map_ok(KeptMetrics);
    Ok(shared::ask(engine, shared::SYSTEM_METRICS, work_out).await?.whoever().0)
}

/// The system's figures: exact while at most 1,000 instances are open, a lower bound of what runs beyond that.
async fn system(engine: &Arc<Engine>) -> Result<SystemMetrics, StoreError> {
    let deadline = engine.deadline();
    let mut counters = read_counters(engine, deadline).await?;
    let mut open = open_instances(engine, deadline).await?;
    for _ in 1..LOOKS {
        // Figures that moved into the counters between the two questions would be missing from both.
        let again = read_counters(engine, deadline).await?;
        if version(again.as_ref()) == version(counters.as_ref()) {
            break;
        }
        counters = again;
        open = open_instances(engine, deadline).await?;
    }
    let counters = counters.map_or_else(CountersDocument::new, |counters| counters.document);
    // Sealing is housekeeping: it must not keep a caller from its answer. A note that its sealer has left is settled with it.
    let is_left = !counters.sealing.is_empty() && !is_leased(engine, &counters);
    if is_left || open.rows.iter().filter(|row| row.is_to_be_sealed()).count() >= WORTH_SEALING {
        seal_soon(engine);
    }
    sum(engine, &counters, &open, deadline).await
}

fn version(counters: Option<&Versioned<CountersDocument>>) -> Option<&Etag> {
    counters.map(|counters| &counters.etag)
}

/// The open instances that can be read, and the partitions of those that can't: they are not counted.
struct Open {
    rows: Vec<OpenRow>,
    unreadable: HashSet<String>,
}

async fn open_instances(engine: &Engine, deadline: Deadline) -> Result<Open, StoreError> {
    let found = engine.store.query_container(queries::OPEN_INSTANCES.statement().in_background(), deadline).await?;
    let (rows, unreadable) = found.into_parts();
    let unreadable: HashSet<String> = unreadable.iter().map(|one| one.partition().to_owned()).collect();
    if !unreadable.is_empty() {
        warn!(instances = unreadable.len(), "the metrics are without instances that this version can't read");
    }
    Ok(Open { rows, unreadable })
}

async fn read_counters(engine: &Engine, deadline: Deadline) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
    let (partition, id) = (CountersDocument::partition(), CountersDocument::document_id());
    engine.store.read(&partition, &id, Freshness::Authoritative, deadline).await
}

/// The counters, for a deletion that is decided: none where they can't be read. The deletion goes on, since nobody could
/// use the names of its instances otherwise; the counters keep their figures.
async fn counters_to_change(engine: &Engine) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
    match read_counters(engine, engine.deadline()).await {
        Err(StoreError::Malformed { detail }) => {
            error!(detail, "the counters can't be read: deleted instances stay in the metrics");
            Ok(None)
        }
        read => read,
    }
}

async fn sum(
    engine: &Arc<Engine>,
    counters: &CountersDocument,
    Open { rows: open, unreadable }: &Open,
    deadline: Deadline,
) -> Result<SystemMetrics, StoreError> {
    let mut total = counters.clone();
    let mut running = 0i64;
    let rows: HashMap<&str, &OpenRow> = open.iter().map(|row| (row.instance_id.as_str(), row)).collect();
    for (id, step) in &counters.sealing {
        // Where its document is not open any more, or shows it, the step is taken and not counted yet.
        if !unreadable.contains(id) && rows.get(id.as_str()).is_none_or(|row| row.sealed == step.now) {
            total.count_step(step);
        }
    }
    let deleted = plan::deleted_among(engine, marked(open), deadline).await?;
    for row in open {
        if let Some(sealed) = &row.sealed {
            total.count(sealed, -1);
        }
        if let Some(figures) = row.figures().filter(|_| !deleted.contains(&row.instance_id)) {
            total.count(&figures, 1);
            running += i64::from(figures.status == status::RUNNING);
        }
    }
    let figure = |n: i64| u64::try_from(n).unwrap_or(0);
    Ok(SystemMetrics {
        total_instances: figure(total.completed + total.failed + total.other),
        total_executions: figure(total.executions),
        running_instances: figure(running),
        completed_instances: figure(total.completed),
        failed_instances: figure(total.failed),
        total_events: figure(total.events),
    })
}

fn marked(open: &[OpenRow]) -> Vec<(Partition, Deleting)> {
    open.iter().filter_map(|row| Some((row.instance_id.clone(), row.deleting.clone()?))).collect()
}

/// Moves the figures of finished instances into the counters, in the background, one at a time in this process.
fn seal_soon(engine: &Arc<Engine>) {
    let engine_too = engine.clone();
    engine.spawn(async move {
        let Ok(_alone) = engine_too.sealing.try_lock() else { return };
        let sealing = async {
            if let Err(error) = seal_all(&engine_too).await {
                warn!(%error, "finished instances are counted later");
            }
        };
        tokio::select! {
            biased;
            () = engine_too.stopping.cancelled() => {}
            () = sealing => {}
        }
    });
}

/// Seals round after round, as long as there is much to do and nobody else does it.
async fn seal_all(engine: &Arc<Engine>) -> Result<(), StoreError> {
    let who = engine.new_token();
    let mut counters = counters(engine).await?;
    if sealed_by_another(engine, &counters.document, &who) {
        return Ok(());
    }
    if !counters.document.sealing.is_empty() {
        settle(engine, counters.document.sealing).await?;
        counters = self::counters(engine).await?;
    }
    loop {
        let finished = finished_instances(engine).await?;
        let found = finished.len();
        if found < WORTH_SEALING {
            return Ok(());
        }
        let Some(after) = seal(engine, &who, counters, finished).await? else { return Ok(()) };
        counters = after;
        if found < BUSY {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

fn sealed_by_another(engine: &Engine, counters: &CountersDocument, who: &str) -> bool {
    is_leased(engine, counters) && counters.sealer.as_ref().is_some_and(|sealer| sealer.token != who)
}

/// Whether somebody seals. A lease that ends later than any that begins now is that of a clock which is ahead.
fn is_leased(engine: &Engine, counters: &CountersDocument) -> bool {
    let (now, longest) = (engine.now(), millis(LEASE).saturating_mul(2));
    counters.sealer.as_ref().is_some_and(|sealer| sealer.until > now && sealer.until <= now + longest)
}

/// The counters, made where there are none.
async fn counters(engine: &Engine) -> Result<Versioned<CountersDocument>, StoreError> {
    let deadline = engine.deadline();
    loop {
        if let Some(found) = read_counters(engine, deadline).await? {
            return Ok(found);
        }
        let fresh = CountersDocument::new();
        engine.store.create(&fresh.instance_id, &fresh.id, &fresh, deadline).await?;
    }
}

/// As many as go into one note.
async fn finished_instances(engine: &Engine) -> Result<Vec<Versioned<InstanceDocument>>, StoreError> {
    let statement = queries::FINISHED_INSTANCES.statement().in_background();
    let rows: Rows<Versioned<InstanceDocument>> = engine.store.query_container(statement, engine.deadline()).await?;
    let mut bytes = 0;
    let finished = rows.readable().into_iter().filter(|found| found.document.deleting.is_none()).take_while(|found| {
        bytes += entry_bytes(found.document.instance_id.as_str());
        bytes < MAX_NOTE_BYTES / 2
    });
    // What goes next is counted as it is until then.
    let over = retention::over(engine);
    let goes =
        |document: &InstanceDocument| document.ended.as_ref().is_some_and(|at| over.iter().any(|o| o.contains(at)));
    Ok(finished.filter(|found| !goes(&found.document)).collect())
}

/// What an entry adds to the note, at most.
fn entry_bytes(id: &str) -> usize {
    const STEP: usize = 400;
    id.len() + STEP
}

/// One round. A row may be stale: whoever has sealed the instance since did so in another round, so that the step can't be
/// taken. Returns the counters as they are after it, or nothing where another one does it.
async fn seal(
    engine: &Arc<Engine>,
    who: &str,
    counters: Versioned<CountersDocument>,
    finished: Vec<Versioned<InstanceDocument>>,
) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
    let round = engine.new_token();
    let mut steps: BTreeMap<String, Sealing> = finished.iter().map(|row| step_of(&row.document, &round)).collect();
    debug!(instances = steps.len(), "sealing finished instances");
    let mut noted = counters;
    loop {
        // What another has noted is its own to take.
        steps.retain(|id, step| noted.document.sealing.get(id).is_none_or(|theirs| theirs == step));
        if steps.is_empty() || sealed_by_another(engine, &noted.document, who) {
            return Ok(None);
        }
        let mut next = noted.document.clone();
        next.sealing.extend(steps.clone());
        next.sealer = Some(lease(engine, who));
        if let Ok(written) = write_counters(engine, next, &noted.etag).await? {
            noted = written;
            break;
        }
        noted = self::counters(engine).await?;
    }
    let known = finished.into_iter().map(|row| (row.document.instance_id.as_str().to_owned(), row)).collect();
    let taken = take_steps(engine, steps, known).await;
    count(engine, noted, &taken, Some(who)).await.map(Some)
}

/// The step of a finished instance, from what the counters hold of it to its figures.
fn step_of(document: &InstanceDocument, round: &str) -> (String, Sealing) {
    let InstanceDocument { instance_id, status, totals, sealed, .. } = document;
    let now = status.clone().map(|status| Sealed { status, totals: *totals, round: round.to_owned() });
    (instance_id.as_str().to_owned(), Sealing { was: sealed.clone(), now })
}

fn lease(engine: &Engine, who: &str) -> Lock {
    Lock { token: who.to_owned(), until: engine.now() + millis(LEASE) }
}

/// A step, and whether the instance's document has taken it.
type Taken = (String, Sealing, bool);

/// Takes steps. One that can't be taken now, nor be found out about, stays in the note, and does not stop the others.
async fn take_steps(
    engine: &Arc<Engine>,
    steps: BTreeMap<String, Sealing>,
    mut known: HashMap<String, Versioned<InstanceDocument>>,
) -> Vec<Taken> {
    let steps: Vec<_> = steps.into_iter().map(|(id, step)| (known.remove(&id), id, step)).collect();
    let taking = stream::iter(steps).map(|(known, id, step)| async move {
        match take_step(engine, known, &id, &step).await {
            Ok(taken) => Some((id, step, taken)),
            Err(error) => {
                warn!(partition = id, %error, "an instance is counted later");
                None
            }
        }
    });
    taking.buffer_unordered(CONCURRENCY).filter_map(std::future::ready).collect().await
}

/// Takes the step of one instance's document; whether it is taken afterwards. It is not where the instance has changed.
async fn take_step(
    engine: &Engine,
    mut known: Option<Versioned<InstanceDocument>>,
    id: &str,
    step: &Sealing,
) -> Result<bool, StoreError> {
    // The note holds the partition's own value.
    let Ok(partition) = serde_json::from_value::<Partition>(serde_json::Value::String(id.to_owned())) else {
        return Ok(false);
    };
    let deadline = engine.deadline();
    loop {
        let found = match known.take() {
            Some(known) => Some(known),
            None => read_latest(engine, &partition, deadline).await?,
        };
        let Some(Versioned { mut document, etag }) = found else {
            // Erased: that is the step to nothing, and an instance whose step that was not had not taken any.
            return Ok(step.now.is_none());
        };
        if !step_is_open(&document, step) {
            return Ok(step.now.is_none() || document.sealed == step.now);
        }
        document.sealed.clone_from(&step.now);
        document.keep_service_times();
        if step.now.is_some() {
            document.tally = None;
        }
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(_) = written {
            return Ok(true);
        }
    }
}

/// Whether a document can take the step and has not yet. One that can't never will: else a step that was found not taken,
/// and dropped, could be taken after that.
fn step_is_open(document: &InstanceDocument, step: &Sealing) -> bool {
    let Some(now) = &step.now else { return document.sealed == step.was };
    let same = document.totals == now.totals && document.status.as_ref() == Some(&now.status);
    same && document.sealed == step.was && document.tally.is_some()
}

/// Takes entries out of the note and counts those whose step is taken. One that is not there any more was counted by
/// another.
async fn count(
    engine: &Engine,
    mut counters: Versioned<CountersDocument>,
    taken: &[Taken],
    sealer: Option<&str>,
) -> Result<Versioned<CountersDocument>, StoreError> {
    loop {
        let mut next = counters.document.clone();
        let mut changed = false;
        for (id, step, taken) in taken {
            if next.sealing.get(id) != Some(step) {
                continue;
            }
            next.sealing.remove(id);
            changed = true;
            if *taken {
                next.count_step(step);
            }
        }
        if !changed {
            return Ok(counters);
        }
        if let Some(who) = sealer {
            next.sealer = Some(lease(engine, who));
        }
        if let Ok(written) = write_counters(engine, next, &counters.etag).await? {
            return Ok(written);
        }
        counters = self::counters(engine).await?;
    }
}

/// Finishes entries that others have left in the note.
async fn settle(engine: &Arc<Engine>, steps: BTreeMap<String, Sealing>) -> Result<(), StoreError> {
    debug!(instances = steps.len(), "settling what was left in the counters' note");
    let taken = take_steps(engine, steps, HashMap::new()).await;
    count(engine, counters(engine).await?, &taken, None).await?;
    Ok(())
}

/// The instances that carry a plan's mark and are about to be erased, after the counters have noted so of those that they
/// hold. The counters are read before the documents and written only if nobody has changed them since: whoever else
/// erases the same instance and has counted it out has changed them.
pub(super) async fn note_leaving(
    engine: &Arc<Engine>,
    partitions: &[Partition],
    verdict: &Deleting,
    marked: &Documents,
) -> Result<Leaving, StoreError> {
    let _alone = engine.counting.lock().await;
    let (mut marked, nothing) = (marked, Documents::new());
    loop {
        let counters = counters_to_change(engine).await?;
        let leaving = leaving(engine, partitions, verdict, marked).await?;
        let Some(Versioned { document, etag }) = counters else { return Ok(leaving) };
        let (next, full) = noted(&document, &leaving.instances);
        let contested = contested(&document, &leaving.instances);
        if full || !contested.is_empty() {
            settle(engine, if full { document.sealing } else { contested }).await?;
            marked = &nothing;
            continue;
        }
        if next.sealing == document.sealing {
            return Ok(leaving);
        }
        match write_counters(engine, next, &etag).await? {
            Ok(_) => return Ok(leaving),
            Err(Applied::No) => {}
            // Our note may have been there, and others may have settled it.
            Err(Applied::Perhaps) => marked = &nothing,
        }
    }
}

/// Seals in the note that some of the leaving can still take. They are taken first: a seal that nobody has taken when its instance is erased
/// would count as if it were.
fn contested(counters: &CountersDocument, leaving: &[Versioned<InstanceDocument>]) -> BTreeMap<String, Sealing> {
    let seal = |document: &InstanceDocument| {
        let id = document.instance_id.as_str();
        let step = counters.sealing.get(id).filter(|step| step.now.is_some() && step_is_open(document, step))?;
        Some((id.to_owned(), step.clone()))
    };
    leaving.iter().filter_map(|found| seal(&found.document)).collect()
}

/// Instances that are about to be erased.
#[derive(Default)]
pub(super) struct Leaving {
    pub(super) instances: Vec<Versioned<InstanceDocument>>,
    /// Why others could not be read. They stay until somebody can read them.
    pub(super) trouble: Option<StoreError>,
}

/// The instances that carry a plan's mark: as the caller has `marked` them, where nobody else erases them, or as they are. One whose figures a
/// seal may be about to change is not as it was marked.
async fn leaving(
    engine: &Engine,
    partitions: &[Partition],
    verdict: &Deleting,
    marked: &Documents,
) -> Result<Leaving, StoreError> {
    let known = |partition: &Partition| {
        let found = marked.get(partition.instance_id()?)?;
        let is_settled = found.document.tally.is_none() || found.document.sealed.is_none();
        is_settled.then(|| found.clone())
    };
    let mut leaving: Vec<Versioned<InstanceDocument>> = partitions.iter().filter_map(known).collect();
    if !leaving.is_empty() && plan::is_helped(engine, verdict).await? {
        leaving.clear();
    }
    let there: HashSet<&Partition> = leaving.iter().map(|found| &found.document.instance_id).collect();
    let others: Vec<Partition> = partitions.iter().filter(|partition| !there.contains(partition)).cloned().collect();
    let mut others = marked_documents(engine, others, &verdict.plan).await;
    others.instances.append(&mut leaving);
    Ok(others)
}

async fn marked_documents(engine: &Engine, partitions: Vec<Partition>, plan: &str) -> Leaving {
    let mut reading = stream::iter(partitions)
        .map(|partition| async move { read_latest(engine, &partition, engine.deadline()).await })
        .buffer_unordered(CONCURRENCY);
    let ours =
        |found: &Versioned<InstanceDocument>| found.document.deleting.as_ref().is_some_and(|mark| mark.plan == plan);
    let mut leaving = Leaving::default();
    while let Some(found) = reading.next().await {
        match found {
            Ok(found) => leaving.instances.extend(found.filter(ours)),
            Err(error) => drop(leaving.trouble.get_or_insert(error)),
        }
    }
    leaving
}

/// The counters with the steps to nothing of what is leaving, and whether there is no room for them. A step in the note that
/// such an instance has taken is counted with it. One that it has not taken stays: whoever noted it may be about to take it.
fn noted(counters: &CountersDocument, leaving: &[Versioned<InstanceDocument>]) -> (CountersDocument, bool) {
    let mut next = counters.clone();
    for Versioned { document, .. } in leaving {
        let Some(was) = document.sealed.clone() else { continue };
        let step = Sealing { was: Some(was), now: None };
        let before = next.sealing.insert(document.instance_id.as_str().to_owned(), step);
        if let Some(before) = before.filter(|before| before.now.is_some() && before.now == document.sealed) {
            next.count_step(&before);
        }
    }
    let bytes: usize = next.sealing.keys().map(|id| entry_bytes(id)).sum();
    let full = bytes > MAX_NOTE_BYTES && !counters.sealing.is_empty();
    (next, full)
}

/// Counts instances out that are erased, of each what it was noted with: an entry of the next of the same name is not ours.
pub(super) async fn count_out(engine: &Engine, erased: &HashMap<Partition, Option<Sealed>>) -> Result<(), StoreError> {
    if erased.values().all(Option::is_none) {
        return Ok(());
    }
    let Some(counters) = counters_to_change(engine).await? else { return Ok(()) };
    let erased: HashMap<&str, &Option<Sealed>> = erased.iter().map(|(id, was)| (id.as_str(), was)).collect();
    let leaving = |(id, step): (&String, &Sealing)| {
        let ours = step.now.is_none() && erased.get(id.as_str()).is_some_and(|was| **was == step.was);
        ours.then(|| (id.clone(), step.clone(), true))
    };
    let taken: Vec<Taken> = counters.document.sealing.iter().filter_map(leaving).collect();
    count(engine, counters, &taken, None).await?;
    Ok(())
}

/// Writes the counters where they are as `etag` says. Where they have changed, whether that may have been this very write, its answer lost.
async fn write_counters(
    engine: &Engine,
    document: CountersDocument,
    etag: &Etag,
) -> Result<Result<Versioned<CountersDocument>, Applied>, StoreError> {
    let (partition, id, deadline) = (&document.instance_id, &document.id, engine.deadline());
    let (written, applied) =
        engine.store.replace_noting_repeats(partition, id, &document, Some(etag), deadline).await?;
    Ok(match written {
        WriteOutcome::Done(etag) => Ok(Versioned { document, etag }),
        WriteOutcome::Refused(_) => Err(applied),
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct MessageRow {
    instance_id: Partition,
}

#[derive(Deserialize)]
struct WorkRow {
    /// A lock that can't be read is nobody's.
    #[serde(default)]
    until: serde_json::Value,
}

/// Depths as they are kept for other processes.
#[derive(Clone, Serialize, Deserialize)]
struct KeptDepths(#[serde(with = "DepthsFields")] QueueDepths);

#[derive(Serialize, Deserialize)]
#[serde(remote = "QueueDepths", rename_all = "camelCase")]
struct DepthsFields {
    orchestrator_queue: usize,
    worker_queue: usize,
    timer_queue: usize,
}

/// How much waits, for a member of a fleet in the last minute.
pub(crate) async fn shared_queue_depths(engine: &Arc<Engine>) -> Result<QueueDepths, StoreError> {
    let work_out = queue_depths(engine).map_ok(KeptDepths);
    Ok(shared::ask(engine, shared::QUEUE_DEPTHS, work_out).await?.whoever().0)
}

/// Unlocked messages and activities: exact up to 1,000 of each.
async fn queue_depths(engine: &Arc<Engine>) -> Result<QueueDepths, StoreError> {
    let (deadline, now) = (engine.deadline(), engine.now());
    let messages = engine.store.query_container(queries::MESSAGE_DEPTH.statement().in_background(), deadline).await?;
    let messages: Vec<MessageRow> = messages.readable();
    let work = engine.store.query_container(queries::WORK_DEPTH.statement().in_background(), deadline).await?;
    let work: Vec<WorkRow> = work.readable();
    // A message is locked with its instance, which only its holder knows without asking for each.
    let held: std::collections::HashSet<Partition> = engine.turns.iter().map(|t| t.partition.clone()).collect();
    Ok(QueueDepths {
        orchestrator_queue: messages.iter().filter(|row| !held.contains(&row.instance_id)).count(),
        worker_queue: work.iter().filter(|row| row.until.as_u64().is_none_or(|until| until <= now)).count(),
        timer_queue: 0,
    })
}
