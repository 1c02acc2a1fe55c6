//! Counting without `COUNT`: what finished is in the counters, what is open is few.
//!
//! An instance's document has `count_pending` while the counters don't hold its figures. The metrics are the counters plus the
//! figures of the open instances. Finished ones are *counted*: their figures move into the counters, exactly once:
//!
//! 1. the counters note which instances take a step, from what they hold of each to what they will;
//! 2. each instance's document takes its step: it loses `count_pending` and notes what the counters hold of it;
//! 3. the counters add the figures of those that took it, and their entries in the note go.
//!
//! An instance that is erased takes the step back to nothing in the same way; its erasure is the step. Entries are
//! independent of each other: each is counted by the one write that takes it out of the note. Entries of a process that has
//! died are looked after by the next that seals. An instance that changes again is open again, contributes the difference to
//! what the counters hold of it, and is counted again.

use super::{plan, retention, Documents};
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

/// Fewer ended instances than that are summed up by each call; more would make every call expensive.
pub(crate) const WORTH_FOLDING: usize = 50;

/// The mutexes of this process.
#[derive(Default)]
struct FoldState {
    /// Held while ended instances are folded into the counters.
    folding: tokio::sync::Mutex<()>,
    /// Held while the entries of instances that are erased are written, so that this process does not race itself.
    noting: tokio::sync::Mutex<()>,
}

/// Where a look finds so many there is much to do: the next look follows by itself.
const BUSY: usize = 250;
const LOOK_EVERY: Duration = Duration::from_secs(3);
/// Documents that are counted at once.
const CONCURRENCY: usize = 32;
/// A process that seals is left alone for so long after its last word.
const LEASE: Duration = Duration::from_secs(5);
/// What the note may come to: well below the limit of a document.
const MAX_NOTE_BYTES: usize = 1_000_000;

pub(crate) async fn read_counters(
    engine: &Engine,
    deadline: Deadline,
) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
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

/// Moves the figures of finished instances into the counters, in the background, one at a time in this process.
pub(crate) fn fold_soon(engine: &Arc<Engine>) {
    let (engine_too, state) = (engine.clone(), engine.state::<FoldState>());
    engine.spawn(async move {
        let Ok(_alone) = state.folding.try_lock() else { return };
        let folding = async {
            if let Err(error) = fold_all(&engine_too).await {
                warn!(%error, "finished instances are counted later");
            }
        };
        tokio::select! {
            biased;
            () = engine_too.stopping.cancelled() => {}
            () = folding => {}
        }
    });
}

/// Seals round after round, as long as there is much to do and nobody else does it.
async fn fold_all(engine: &Arc<Engine>) -> Result<(), StoreError> {
    let who = engine.new_token();
    let mut counters = counters(engine).await?;
    if leased_by_another(engine, &counters.document, &who) {
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
        let Some(after) = fold(engine, &who, counters, finished).await? else { return Ok(()) };
        counters = after;
        if found < BUSY {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

fn leased_by_another(engine: &Engine, counters: &CountersDocument, who: &str) -> bool {
    is_leased(engine, counters) && counters.fold_lease.as_ref().is_some_and(|fold_lease| fold_lease.token != who)
}

/// Whether somebody seals. A lease that ends later than any that begins now is that of a clock which is ahead.
pub(crate) fn is_leased(engine: &Engine, counters: &CountersDocument) -> bool {
    let (now, longest) = (engine.now(), millis(LEASE).saturating_mul(2));
    counters.fold_lease.as_ref().is_some_and(|fold_lease| fold_lease.until > now && fold_lease.until <= now + longest)
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

/// One round. A row may be stale: whoever has counted the instance since did so in another round, so that the step can't be
/// taken. Returns the counters as they are after it, or nothing where another one does it.
async fn fold(
    engine: &Arc<Engine>,
    who: &str,
    counters: Versioned<CountersDocument>,
    finished: Vec<Versioned<InstanceDocument>>,
) -> Result<Option<Versioned<CountersDocument>>, StoreError> {
    let round = engine.new_token();
    let mut steps: BTreeMap<String, FoldStep> = finished.iter().map(|row| step_of(&row.document, &round)).collect();
    debug!(instances = steps.len(), "folding finished instances");
    let mut noted = counters;
    loop {
        // What another has noted is its own to take.
        steps.retain(|id, step| noted.document.folding.get(id).is_none_or(|theirs| theirs == step));
        if steps.is_empty() || leased_by_another(engine, &noted.document, who) {
            return Ok(None);
        }
        let mut next = noted.document.clone();
        next.folding.extend(steps.clone());
        next.fold_lease = Some(lease(engine, who));
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
fn step_of(document: &InstanceDocument, round: &str) -> (String, FoldStep) {
    let InstanceDocument { instance_id, status, totals, counted, .. } = document;
    let now = status.clone().map(|status| CountedFigures { status, totals: *totals, round: round.to_owned() });
    (instance_id.as_str().to_owned(), FoldStep { was: counted.clone(), now })
}

fn lease(engine: &Engine, who: &str) -> Lock {
    Lock { token: who.to_owned(), until: engine.now() + millis(LEASE) }
}

/// A step, and whether the instance's document has taken it.
type TakenStep = (String, FoldStep, bool);

/// Takes steps. One that can't be taken now, nor be found out about, stays in the note, and does not stop the others.
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
    step: &FoldStep,
) -> Result<bool, StoreError> {
    // The note holds the partition's own value.
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
            // Erased: that is the step to nothing, and an instance whose step that was not had not taken any.
            return Ok(step.now.is_none());
        };
        if !step_is_open(&document, step) {
            return Ok(step.now.is_none() || document.counted == step.now);
        }
        document.counted.clone_from(&step.now);
        document.keep_service_times();
        if step.now.is_some() {
            document.count_pending = None;
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
fn step_is_open(document: &InstanceDocument, step: &FoldStep) -> bool {
    let Some(now) = &step.now else { return document.counted == step.was };
    let same = document.totals == now.totals && document.status.as_ref() == Some(&now.status);
    same && document.counted == step.was && document.count_pending.is_some()
}

/// Takes entries out of the note and counts those whose step is taken. One that is not there any more was counted by
/// another.
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
        if let Some(who) = fold_lease {
            next.fold_lease = Some(lease(engine, who));
        }
        if let Ok(written) = write_counters(engine, next, &counters.etag).await? {
            return Ok(written);
        }
        counters = self::counters(engine).await?;
    }
}

/// Finishes entries that others have left in the note.
async fn settle(engine: &Arc<Engine>, steps: BTreeMap<String, FoldStep>) -> Result<(), StoreError> {
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
    state: &Deleting,
    marked: &Documents,
) -> Result<Leaving, StoreError> {
    let mutexes = engine.state::<FoldState>();
    let _alone = mutexes.noting.lock().await;
    let (mut marked, nothing) = (marked, Documents::new());
    loop {
        let counters = counters_to_change(engine).await?;
        let leaving = leaving(engine, partitions, state, marked).await?;
        let Some(Versioned { document, etag }) = counters else { return Ok(leaving) };
        let (next, full) = noted(&document, &leaving.instances);
        let contested = contested(&document, &leaving.instances);
        if full || !contested.is_empty() {
            settle(engine, if full { document.folding } else { contested }).await?;
            marked = &nothing;
            continue;
        }
        if next.folding == document.folding {
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
fn contested(counters: &CountersDocument, leaving: &[Versioned<InstanceDocument>]) -> BTreeMap<String, FoldStep> {
    let step = |document: &InstanceDocument| {
        let id = document.instance_id.as_str();
        let step = counters.folding.get(id).filter(|step| step.now.is_some() && step_is_open(document, step))?;
        Some((id.to_owned(), step.clone()))
    };
    leaving.iter().filter_map(|found| step(&found.document)).collect()
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
    state: &Deleting,
    marked: &Documents,
) -> Result<Leaving, StoreError> {
    let known = |partition: &Partition| {
        let found = marked.get(partition.instance_id()?)?;
        let is_settled = found.document.count_pending.is_none() || found.document.counted.is_none();
        is_settled.then(|| found.clone())
    };
    let mut leaving: Vec<Versioned<InstanceDocument>> = partitions.iter().filter_map(known).collect();
    if !leaving.is_empty() && plan::is_helped(engine, state).await? {
        leaving.clear();
    }
    let there: HashSet<&Partition> = leaving.iter().map(|found| &found.document.instance_id).collect();
    let others: Vec<Partition> = partitions.iter().filter(|partition| !there.contains(partition)).cloned().collect();
    let mut others = marked_documents(engine, others, &state.plan).await;
    others.instances.append(&mut leaving);
    Ok(others)
}

async fn marked_documents(engine: &Engine, partitions: Vec<Partition>, plan: &str) -> Leaving {
    let mut reading = stream::iter(partitions)
        .map(|partition| async move { engine.read_latest(&partition, engine.deadline()).await })
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
        let Some(was) = document.counted.clone() else { continue };
        let step = FoldStep { was: Some(was), now: None };
        let before = next.folding.insert(document.instance_id.as_str().to_owned(), step);
        if let Some(before) = before.filter(|before| before.now.is_some() && before.now == document.counted) {
            next.count_step(&before);
        }
    }
    let bytes: usize = next.folding.keys().map(|id| entry_bytes(id)).sum();
    let full = bytes > MAX_NOTE_BYTES && !counters.folding.is_empty();
    (next, full)
}

/// Counts instances out that are erased, of each what it was noted with: an entry of the next of the same name is not ours.
pub(super) async fn count_out(
    engine: &Engine,
    erased: &HashMap<Partition, Option<CountedFigures>>,
) -> Result<(), StoreError> {
    if erased.values().all(Option::is_none) {
        return Ok(());
    }
    let Some(counters) = counters_to_change(engine).await? else { return Ok(()) };
    let erased: HashMap<&str, &Option<CountedFigures>> = erased.iter().map(|(id, was)| (id.as_str(), was)).collect();
    let leaving = |(id, step): (&String, &FoldStep)| {
        let ours = step.now.is_none() && erased.get(id.as_str()).is_some_and(|was| **was == step.was);
        ours.then(|| (id.clone(), step.clone(), true))
    };
    let taken: Vec<TakenStep> = counters.document.folding.iter().filter_map(leaving).collect();
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
