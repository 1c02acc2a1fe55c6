//! The counters: the figures of finished instances in one document, since Cosmos DB has no `COUNT` across partitions.
//!
//! An instance's document has `count_pending` while the counters do not hold its figures: the instance is *open*. The
//! metrics are the counters plus the figures of the open instances, which are few. A finished instance is *folded*: its
//! figures move into the counters exactly once.
//!
//! 1. The counters record a pending step for each instance: the figures that they hold of it, and the figures that they
//!    will hold.
//! 2. Each instance's document takes its step: it loses `count_pending` and gets the counted figures.
//! 3. The counters add the figures of the instances that took their steps, and drop these pending steps.
//!
//! An erased instance takes a step to no figures in the same way, and the erasure is the step. Pending steps are
//! independent of each other. The write that drops a pending step counts it. If a process dies, the next process that
//! folds settles its pending steps. An instance that changes again is open again. It contributes the difference to its
//! counted figures, and is folded again.

use super::{finish, retention, Documents};
use crate::{
    cosmos::{queries, Applied, Deadline, Freshness, Rows, StoreError, Versioned, WriteOutcome},
    engine::Engine,
    model::{clock::millis, CountedFigures, CountersDocument, Deleting, FoldStep, InstanceDocument, Lock, Partition},
    turn::instance_id,
};
use azure_core::http::Etag;
use futures::{stream, StreamExt};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};
use tracing::{debug, error, warn};

/// The number of ended instances that starts a fold. Fewer are cheap to sum up in each call of the metrics.
pub(crate) const WORTH_FOLDING: usize = 50;

/// The mutexes of this process.
#[derive(Default)]
struct FoldState {
    /// Held while ended instances are folded into the counters.
    folding: tokio::sync::Mutex<()>,
    /// Held while the steps of erased instances are recorded, so that this process does not race with itself.
    recording: tokio::sync::Mutex<()>,
}

/// The number of instances in a round that makes the next round follow without a pause.
const BUSY_ROUND: usize = 250;
/// The pause after a smaller round.
const QUERY_INTERVAL: Duration = Duration::from_secs(3);
/// Documents that are written at once.
const CONCURRENCY: usize = 32;
/// The time after its last write for which a folding process keeps the others out.
const LEASE: Duration = Duration::from_secs(5);
/// The size of all pending steps, in bytes: well below the limit of a document.
const MAX_PENDING_BYTES: usize = 1_000_000;

pub(crate) async fn read_counters(
    engine: &Engine,
    deadline: Deadline,
) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
    let (partition, id) = (CountersDocument::partition(), CountersDocument::document_id());
    engine.store.read(&partition, &id, Freshness::Authoritative, deadline).await
}

/// The counters, for a committed deletion, or `None` if they can't be read. The deletion continues, since otherwise the
/// ids of its instances would stay unusable. The counters then keep the figures of these instances.
async fn counters_to_change(engine: &Engine) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
    match read_counters(engine, engine.deadline()).await {
        Err(StoreError::Malformed { detail }) => {
            error!(detail, "the counters can't be read, deleted instances stay in the metrics");
            Ok(None)
        }
        read => read,
    }
}

/// Folds finished instances in the background, one task at a time in this process.
pub(crate) fn fold_soon(engine: &Arc<Engine>) {
    let (engine_too, state) = (engine.clone(), engine.state::<FoldState>());
    engine.spawn(async move {
        let Ok(_alone) = state.folding.try_lock() else { return };
        let folding = async {
            if let Err(error) = fold_all(&engine_too).await {
                warn!(%error, "folding finished instances failed, will retry");
            }
        };
        tokio::select! {
            biased;
            () = engine_too.stopping.cancelled() => {}
            () = folding => {}
        }
    });
}

/// Folds round after round, while there is much to do and no other process folds.
async fn fold_all(engine: &Arc<Engine>) -> Result<(), StoreError> {
    let process = engine.new_token();
    let mut counters = counters(engine).await?;
    if leased_by_another(engine, &counters.document, &process) {
        return Ok(());
    }
    if !counters.document.folding.is_empty() {
        settle(engine, counters.document.folding).await?;
        counters = self::counters(engine).await?;
    }
    loop {
        let finished = finished_instances(engine).await?;
        let found = finished.len();
        if found < WORTH_FOLDING {
            return Ok(());
        }
        let Some(after) = fold(engine, &process, counters, finished).await? else { return Ok(()) };
        counters = after;
        if found < BUSY_ROUND {
            tokio::time::sleep(QUERY_INTERVAL).await;
        }
    }
}

fn leased_by_another(engine: &Engine, counters: &CountersDocument, process: &str) -> bool {
    is_leased(engine, counters) && counters.fold_lease.as_ref().is_some_and(|fold_lease| fold_lease.token != process)
}

/// Whether a process folds. A lease that ends later than any lease that begins now is ignored: a wrong clock wrote it.
pub(crate) fn is_leased(engine: &Engine, counters: &CountersDocument) -> bool {
    let (now, longest) = (engine.now(), millis(LEASE).saturating_mul(2));
    counters.fold_lease.as_ref().is_some_and(|fold_lease| fold_lease.until > now && fold_lease.until <= now + longest)
}

/// The counters. Creates them if they do not exist.
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

/// The finished instances of one round.
async fn finished_instances(engine: &Engine) -> Result<Vec<Versioned<InstanceDocument>>, StoreError> {
    let statement = queries::FINISHED_INSTANCES.statement().in_background();
    let rows: Rows<Versioned<InstanceDocument>> = engine.store.query_container(statement, engine.deadline()).await?;
    let mut bytes = 0;
    let finished =
        rows.readable().into_iter().filter(|found| found.document.removal.deleting.is_none()).take_while(|found| {
            bytes += entry_bytes(found.document.instance_id.as_str());
            bytes < MAX_PENDING_BYTES / 2
        });
    // Retention deletes these instances next. Until then the metrics sum them up as open instances.
    let over = retention::expired_ranges(engine);
    let goes = |document: &InstanceDocument| {
        document.removal.ended.as_ref().is_some_and(|at| over.iter().any(|o| o.contains(at)))
    };
    Ok(finished.filter(|found| !goes(&found.document)).collect())
}

/// The largest size of a pending step, in bytes.
fn entry_bytes(id: &str) -> usize {
    const STEP: usize = 400;
    id.len() + STEP
}

/// Folds one round of instances. Returns the counters after it, or `None` if another process folds. A row may be stale:
/// if another round has folded the instance since, its document refuses the step.
async fn fold(
    engine: &Arc<Engine>,
    process: &str,
    counters: Versioned<CountersDocument>,
    finished: Vec<Versioned<InstanceDocument>>,
) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
    let round = engine.new_token();
    let mut steps: BTreeMap<String, FoldStep> = finished.iter().map(|row| step_of(&row.document, &round)).collect();
    debug!(instances = steps.len(), "folding finished instances");
    let mut current = counters;
    loop {
        // Another process takes the steps that it has recorded.
        steps.retain(|id, step| current.document.folding.get(id).is_none_or(|pending| pending == step));
        if steps.is_empty() || leased_by_another(engine, &current.document, process) {
            return Ok(None);
        }
        let mut next = current.document.clone();
        next.folding.extend(steps.clone());
        next.fold_lease = Some(lease(engine, process));
        if let Ok(written) = write_counters(engine, next, &current.etag).await? {
            current = written;
            break;
        }
        current = self::counters(engine).await?;
    }
    let known = finished.into_iter().map(|row| (row.document.instance_id.as_str().to_owned(), row)).collect();
    let taken = take_steps(engine, steps, known).await;
    count(engine, current, &taken, Some(process)).await.map(Some)
}

/// The step of a finished instance: from the figures that the counters hold of it to its present figures.
fn step_of(document: &InstanceDocument, round: &str) -> (String, FoldStep) {
    let (status, totals) = (document.current.status.clone(), document.counting.totals);
    let now = status.map(|status| CountedFigures { status, totals, round: round.to_owned() });
    (document.instance_id.as_str().to_owned(), FoldStep { was: document.counting.counted.clone(), now })
}

fn lease(engine: &Engine, process: &str) -> Lock {
    Lock { token: process.to_owned(), until: engine.now() + millis(LEASE) }
}

/// A step, and whether the instance's document has taken it.
type TakenStep = (String, FoldStep, bool);

/// Takes steps. If the outcome of a step is unknown, it stays pending and does not stop the others.
async fn take_steps(
    engine: &Arc<Engine>,
    steps: BTreeMap<String, FoldStep>,
    mut known: HashMap<String, Versioned<InstanceDocument>>,
) -> Vec<TakenStep> {
    let steps: Vec<_> = steps.into_iter().map(|(id, step)| (known.remove(&id), id, step)).collect();
    let taking = stream::iter(steps).map(|(known, id, step)| async move {
        match take_step(engine, known, &id, &step).await {
            Ok(taken) => Some((id, step, taken)),
            Err(error) => {
                warn!(partition = id, %error, "folding an instance failed, its step stays pending");
                None
            }
        }
    });
    taking.buffer_unordered(CONCURRENCY).filter_map(std::future::ready).collect().await
}

/// Takes the step of one instance. Returns whether it is taken afterwards. An instance that has changed does not take
/// it.
async fn take_step(
    engine: &Engine,
    mut known: Option<Versioned<InstanceDocument>>,
    id: &str,
    step: &FoldStep,
) -> Result<bool, StoreError> {
    // A pending step is stored under the value of the partition key.
    let Ok(partition) = serde_json::from_value::<Partition>(serde_json::Value::String(id.to_owned())) else {
        return Ok(false);
    };
    let deadline = engine.deadline();
    loop {
        let found = match known.take() {
            Some(known) => Some(known),
            None => engine.read_latest(&partition, deadline).await?,
        };
        let Some(Versioned { mut document, etag }) = found else {
            // The instance is erased. That takes a step to no figures. Any other step was not taken.
            return Ok(step.now.is_none());
        };
        if !step_is_open(&document, step) {
            return Ok(step.now.is_none() || document.counting.counted == step.now);
        }
        document.counting.counted.clone_from(&step.now);
        document.keep_service_times();
        if step.now.is_some() {
            document.counting.count_pending = None;
        }
        let written = engine.store.replace(&partition, &instance_id(), &document, Some(&etag), deadline).await?;
        engine.cache.forget(&partition);
        if let WriteOutcome::Done(_) = written {
            return Ok(true);
        }
    }
}

/// Whether a document can take the step and has not yet. A document that can't take it never will. Otherwise a step
/// that was found not taken, and dropped, could still be taken later.
fn step_is_open(document: &InstanceDocument, step: &FoldStep) -> bool {
    let Some(now) = &step.now else { return document.counting.counted == step.was };
    let same = document.counting.totals == now.totals && document.current.status.as_ref() == Some(&now.status);
    same && document.counting.counted == step.was && document.counting.count_pending.is_some()
}

/// Drops pending steps and counts those that were taken. Another process has counted a step that is no longer pending.
async fn count(
    engine: &Engine,
    mut counters: Versioned<CountersDocument>,
    taken: &[TakenStep],
    fold_lease: Option<&str>,
) -> Result<Versioned<CountersDocument>, StoreError> {
    loop {
        let mut next = counters.document.clone();
        let mut changed = false;
        for (id, step, taken) in taken {
            if next.folding.get(id) != Some(step) {
                continue;
            }
            next.folding.remove(id);
            changed = true;
            if *taken {
                next.count_step(step);
            }
        }
        if !changed {
            return Ok(counters);
        }
        if let Some(process) = fold_lease {
            next.fold_lease = Some(lease(engine, process));
        }
        if let Ok(written) = write_counters(engine, next, &counters.etag).await? {
            return Ok(written);
        }
        counters = self::counters(engine).await?;
    }
}

/// Finishes pending steps of other processes.
async fn settle(engine: &Arc<Engine>, steps: BTreeMap<String, FoldStep>) -> Result<(), StoreError> {
    debug!(instances = steps.len(), "settling pending steps of other processes");
    let taken = take_steps(engine, steps, HashMap::new()).await;
    count(engine, counters(engine).await?, &taken, None).await?;
    Ok(())
}

/// The prepared instances of a plan, for erasing. Before that, the counters record the steps of those instances that
/// they hold.
///
/// The counters are read before the documents, and written only if they have not changed since. Another process that
/// has erased and counted out the same instance has changed them.
pub(super) async fn record_removals(
    engine: &Arc<Engine>,
    partitions: &[Partition],
    record: &Deleting,
    prepared: &Documents,
) -> Result<Removals, StoreError> {
    let state = engine.state::<FoldState>();
    let _alone = state.recording.lock().await;
    let (mut prepared, nothing) = (prepared, Documents::new());
    loop {
        let counters = counters_to_change(engine).await?;
        let removals = find_removals(engine, partitions, record, prepared).await?;
        let Some(Versioned { document, etag }) = counters else { return Ok(removals) };
        let (next, full) = with_removals(&document, &removals.instances);
        let open_folds = open_folds(&document, &removals.instances);
        if full || !open_folds.is_empty() {
            settle(engine, if full { document.folding } else { open_folds }).await?;
            prepared = &nothing;
            continue;
        }
        if next.folding == document.folding {
            return Ok(removals);
        }
        match write_counters(engine, next, &etag).await? {
            Ok(_) => return Ok(removals),
            Err(Applied::No) => {}
            // The steps may be recorded already, and another process may have settled them.
            Err(Applied::Perhaps) => prepared = &nothing,
        }
    }
}

/// Pending folds that some of these instances can still take. They are taken first: an instance that is erased before
/// it takes a pending fold would count as folded.
fn open_folds(counters: &CountersDocument, removals: &[Versioned<InstanceDocument>]) -> BTreeMap<String, FoldStep> {
    let step = |document: &InstanceDocument| {
        let id = document.instance_id.as_str();
        let step = counters.folding.get(id).filter(|step| step.now.is_some() && step_is_open(document, step))?;
        Some((id.to_owned(), step.clone()))
    };
    removals.iter().filter_map(|found| step(&found.document)).collect()
}

/// Instances that are about to be erased.
#[derive(Default)]
pub(super) struct Removals {
    pub(super) instances: Vec<Versioned<InstanceDocument>>,
    /// The first error of reading the others. They stay until a process can read them.
    pub(super) first_error: Option<StoreError>,
}

/// The prepared instances of a plan. The caller's `prepared` documents are used unless another process erases instances
/// of the plan, or a pending fold may change the figures of the instance. The others are read.
async fn find_removals(
    engine: &Engine,
    partitions: &[Partition],
    record: &Deleting,
    prepared: &Documents,
) -> Result<Removals, StoreError> {
    let cached = |partition: &Partition| {
        let found = prepared.get(partition.instance_id()?)?;
        let is_settled = found.document.counting.count_pending.is_none() || found.document.counting.counted.is_none();
        is_settled.then(|| found.clone())
    };
    let mut removals: Vec<Versioned<InstanceDocument>> = partitions.iter().filter_map(cached).collect();
    if !removals.is_empty() && finish::is_recovered_by_others(engine, record).await? {
        removals.clear();
    }
    let there: HashSet<&Partition> = removals.iter().map(|found| &found.document.instance_id).collect();
    let others: Vec<Partition> = partitions.iter().filter(|partition| !there.contains(partition)).cloned().collect();
    let mut others = prepared_documents(engine, others, &record.plan).await;
    others.instances.append(&mut removals);
    Ok(others)
}

async fn prepared_documents(engine: &Engine, partitions: Vec<Partition>, plan: &str) -> Removals {
    let mut reading = stream::iter(partitions)
        .map(|partition| async move { engine.read_latest(&partition, engine.deadline()).await })
        .buffer_unordered(CONCURRENCY);
    let ours = |found: &Versioned<InstanceDocument>| {
        found.document.removal.deleting.as_ref().is_some_and(|deleting| deleting.plan == plan)
    };
    let mut removals = Removals::default();
    while let Some(found) = reading.next().await {
        match found {
            Ok(found) => removals.instances.extend(found.filter(ours)),
            Err(error) => drop(removals.first_error.get_or_insert(error)),
        }
    }
    removals
}

/// The counters with the steps of instances that are about to be erased, and whether they do not fit.
///
/// - A pending step that such an instance has taken is counted.
/// - A pending fold of an instance that the counters do not hold stays: its process may be about to take it.
fn with_removals(counters: &CountersDocument, removals: &[Versioned<InstanceDocument>]) -> (CountersDocument, bool) {
    let mut next = counters.clone();
    for Versioned { document, .. } in removals {
        let Some(was) = document.counting.counted.clone() else { continue };
        let step = FoldStep { was: Some(was), now: None };
        let before = next.folding.insert(document.instance_id.as_str().to_owned(), step);
        if let Some(before) = before.filter(|before| before.now.is_some() && before.now == document.counting.counted) {
            next.count_step(&before);
        }
    }
    let bytes: usize = next.folding.keys().map(|id| entry_bytes(id)).sum();
    let full = bytes > MAX_PENDING_BYTES && !counters.folding.is_empty();
    (next, full)
}

/// Counts erased instances out. It drops only steps with the recorded figures, and leaves a step of the next
/// incarnation.
pub(super) async fn count_out(
    engine: &Engine,
    erased: &HashMap<Partition, Option<CountedFigures>>,
) -> Result<(), StoreError> {
    if erased.values().all(Option::is_none) {
        return Ok(());
    }
    let Some(counters) = counters_to_change(engine).await? else { return Ok(()) };
    let erased: HashMap<&str, &Option<CountedFigures>> = erased.iter().map(|(id, was)| (id.as_str(), was)).collect();
    let removal = |(id, step): (&String, &FoldStep)| {
        let is_recorded = step.now.is_none() && erased.get(id.as_str()).is_some_and(|was| **was == step.was);
        is_recorded.then(|| (id.clone(), step.clone(), true))
    };
    let taken: Vec<TakenStep> = counters.document.folding.iter().filter_map(removal).collect();
    count(engine, counters, &taken, None).await?;
    Ok(())
}

/// Writes the counters under `etag`. If they have changed, the error tells whether an earlier attempt of this write may
/// have changed them.
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
