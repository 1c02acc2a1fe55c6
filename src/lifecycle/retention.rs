//! Retention: deletes root instances with their trees once they have ended for longer than the configured age.
//!
//! The commit that ends a root instance writes how and when it ended (`ended`), which costs no extra request. The
//! property is indexed. About every 30 s one worker begins a round. The round queries the roots whose age is over by
//! the present setting, oldest first. It deletes them as a bulk deletion does, each with its tree, if the whole tree
//! has ended. So a changed setting also applies to instances that ended before the change.
//!
//! Invariants:
//!
//! - The invariants of deletion hold. Retention deletes only whole instance trees in which every member has ended.
//! - A round works two thirds of the time at most, and each of its requests has low priority.
//! - No process's clock ends a retention period early.
//!
//! For the last invariant, a round reads Cosmos DB's time and uses the earlier of that and the local time. Another
//! worker's clock wrote `ended`. The round accepts it if the last write of the document (`_ts`) is old enough, too.
//! Otherwise the round replaces `ended` by the time of that write, by Cosmos DB's clock.
//!
//! Crash points: those of deletion. The next round, of any process, finds the instances that a round has left.

use super::{delete_bulk, plan, prune, Documents, Incarnation};
use crate::{
    cosmos::{in_background, queries, Rows, StoreError, Unreadable, Versioned, WriteOutcome},
    discovery::shared_result,
    engine::Engine,
    lifecycle::service_time::ClockSkew,
    model::{clock::millis, Ending, InstanceDocument, Millis, Partition},
    turn::instance_id,
};
use duroxide::PruneOptions;
use futures::{stream, StreamExt};
use std::{
    collections::{HashMap, HashSet},
    num::NonZeroU32,
    ops::Range,
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;
use tracing::{debug, info, warn};

/// The time between two attempts of a process to begin a round. It is slightly longer than the election of a worker is
/// valid.
const EVERY: Duration = Duration::from_secs(27);
/// The longest duration of a round, unless one page of deletions takes longer. It is shorter than the election of a
/// worker is valid. If work remains, the same worker begins the next round at once.
const ROUND: Duration = Duration::from_secs(20);
/// The time after which a tree that can't be deleted yet is tried again.
const PUT_OFF: Millis = 10 * 60 * 1_000;
/// Roots that one query returns, and that are deleted together.
const PAGE: usize = 1_000;
/// Rows that each physical partition returns at a time.
const ROWS: NonZeroU32 = NonZeroU32::new(250).unwrap();
/// The largest error of a clock whose `ended` is accepted, unless a tenth of the age is less. A correction of `ended`
/// costs a write.
const SLACK: Millis = 10 * 60 * 1_000;
/// The number of deletions in a page after which more instances may have ended meanwhile.
const MANY: u64 = 100;
/// The shortest pause between two pages of a round.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// The time when this process last applied retention. The mutex is held while it does.
#[derive(Default)]
struct LastRun(tokio::sync::Mutex<Option<Instant>>);

/// Begins a round in the background if one is due.
pub(crate) fn apply_soon(engine: &Arc<Engine>) {
    if !engine.config.retention().deletes_instances() {
        return;
    }
    let (engine_too, state) = (engine.clone(), engine.state::<LastRun>());
    engine.spawn(async move {
        let Ok(mut last) = state.0.try_lock() else { return };
        if last.is_some_and(|last| last.elapsed() < EVERY) {
            return;
        }
        *last = Some(Instant::now());
        let worker = engine_too.new_token();
        let rounds = async {
            while has_more_after_round(&engine_too, &worker).await {
                *last = Some(Instant::now());
            }
        };
        // The round may be cut anywhere.
        tokio::select! {
            biased;
            () = engine_too.stopping.cancelled() => {}
            () = rounds => {}
        }
    });
}

/// Runs one round. Returns whether it has left work, so that the next round is due at once.
async fn has_more_after_round(engine: &Arc<Engine>, worker: &str) -> bool {
    match in_background(run_round(engine, Some(worker))).await {
        Ok(round) => {
            if round.deleted > 0 || round.unreadable > 0 {
                let (instances, unreadable) = (round.deleted, round.unreadable);
                info!(instances, unreadable, "retention deleted instances");
            }
            round.has_more
        }
        Err(error) => {
            warn!(%error, "retention failed, will retry");
            false
        }
    }
}

/// Applies retention once, with low priority. Returns the number of deleted instances.
pub(crate) async fn apply(engine: &Arc<Engine>) -> Result<u64, StoreError> {
    Ok(in_background(run_round(engine, None)).await?.deleted)
}

/// The result of a round, or of one page of it.
struct RetentionResult {
    deleted: u64,
    /// Roots whose age is over and that stay because their documents can't be read. For a round, the largest number of
    /// a page.
    unreadable: usize,
    /// Whether another query may find more.
    has_more: bool,
}

/// Runs a round. A round of a `worker` stops if another worker is elected.
async fn run_round(engine: &Arc<Engine>, worker: Option<&str>) -> Result<RetentionResult, StoreError> {
    let mut scans = RetentionScan::all(engine);
    let (begun, mut deleted, mut unreadable) = (Instant::now(), 0, 0);
    let mut first_error = None;
    while !scans.is_empty() {
        let page = Instant::now();
        if let Some(worker) = worker {
            if !shared_result::is_elected(engine, shared_result::RETENTION, worker).await {
                return Ok(RetentionResult { deleted, unreadable, has_more: false });
            }
        }
        let skew = ClockSkew::measure(engine).await?;
        let mut left = Vec::new();
        // The scans take turns, so that a long one does not delay the others.
        for mut scan in scans {
            let page = match scan.apply_page(engine, skew).await {
                Ok(page) => page,
                Err(error) => {
                    first_error.get_or_insert(error);
                    continue;
                }
            };
            deleted += page.deleted;
            unreadable = unreadable.max(page.unreadable);
            if page.has_more {
                left.push(scan);
            }
        }
        scans = left;
        if scans.is_empty() {
            break;
        }
        // The pause takes a third of the time, and lets enough instances end for the next query.
        tokio::time::sleep((page.elapsed() / 2).max(MIN_PAUSE)).await;
        if begun.elapsed() >= ROUND {
            return first_error.map_or(Ok(RetentionResult { deleted, unreadable, has_more: true }), Err);
        }
    }
    first_error.map_or(Ok(RetentionResult { deleted, unreadable, has_more: false }), Err)
}

/// The ranges of `ended` whose age is over. The next round deletes these roots if their trees have ended.
pub(super) fn expired_ranges(engine: &Engine) -> Vec<Range<String>> {
    RetentionScan::all(engine).iter().map(|scan| scan.range(engine.now())).collect()
}

/// The scan of one round over the roots that ended in one way.
struct RetentionScan {
    ending: Ending,
    age: Millis,
    /// The roots that this round has tried to delete.
    tried: HashSet<(Partition, Incarnation)>,
    /// The value of `ended` at which the next page begins.
    from: String,
}

/// The document of a root instance, as the query returns it.
type Root = Versioned<InstanceDocument>;

/// The identity of a root. A new instance with the same id has another one.
fn incarnation(root: &Root) -> (Partition, Incarnation) {
    (root.document.instance_id.clone(), Incarnation::of(&root.document))
}

fn id(root: &Root) -> Option<String> {
    root.document.instance_id.instance_id().map(ToOwned::to_owned)
}

/// Cosmos DB's time of the last write of a root, precise to the second.
fn written_at(root: &Root) -> Millis {
    root.document.written_at.saturating_mul(1_000)
}

impl RetentionScan {
    /// One scan for each ending that has an age.
    fn all(engine: &Engine) -> Vec<Self> {
        let setting = engine.config.retention();
        let scans = [
            (Ending::Completed, setting.completed()),
            (Ending::Failed, setting.failed()),
            (Ending::Cancelled, setting.cancelled()),
        ];
        let with_age = scans.into_iter().filter_map(|(ending, age)| Some((ending, age?)));
        let scan = |(ending, age): (Ending, Duration)| Self {
            ending,
            age: millis(age),
            tried: HashSet::new(),
            from: ending.at(0),
        };
        with_age.map(scan).collect()
    }

    /// The range of `ended` whose age is over.
    fn range(&self, now: Millis) -> Range<String> {
        self.from.clone()..self.ending.at(now.saturating_sub(self.age))
    }

    /// Whether a root has ended long enough ago by Cosmos DB's time, too.
    fn accepts(&self, root: &Root, service_time: Millis) -> bool {
        let ended = root.document.removal.ended.as_deref();
        let slack = SLACK.min(self.age / 10);
        let is_old = written_at(root).saturating_add(self.age) <= service_time.saturating_add(slack);
        is_old || ended.is_some_and(Ending::is_proved)
    }

    /// Deletes the trees of one page, the oldest first.
    async fn apply_page(&mut self, engine: &Arc<Engine>, skew: ClockSkew) -> Result<RetentionResult, StoreError> {
        let service_time = skew.now(engine);
        let now = engine.now().min(service_time);
        let Range { start: from, end: to } = self.range(now);
        let statement = queries::ENDED.statement().bind("@from", from).bind("@to", to).in_pages_of(ROWS);
        let rows: Rows<Root> = engine.store.query_container(statement, engine.deadline()).await?;
        let is_full = rows.len() >= PAGE;
        let (rows, unreadable) = rows.into_parts();
        self.skip_unreadable_page(&rows, &unreadable, is_full);
        let unreadable = unreadable.len();
        // Roots that were tried were accepted before. The attempt has written their documents since.
        let (again, rows): (Vec<Root>, Vec<Root>) =
            rows.into_iter().partition(|root| self.tried.contains(&incarnation(root)));
        let (new, early): (Vec<Root>, Vec<Root>) = rows.into_iter().partition(|root| self.accepts(root, service_time));
        self.tried.extend(new.iter().map(incarnation));
        let later = self.ending.proved_at(now.saturating_sub(self.age).saturating_add(PUT_OFF));
        let mut waiting: Vec<InstanceTree> = again.iter().filter_map(|root| InstanceTree::of(root, &later)).collect();
        let corrected = |root: &Root| InstanceTree::of(root, &self.ending.proved_at(written_at(root)));
        waiting.extend(early.iter().filter_map(corrected));
        put_off(engine, waiting).await;
        if new.is_empty() {
            return Ok(RetentionResult { deleted: 0, unreadable, has_more: is_full });
        }
        let mut trees: HashMap<String, InstanceTree> =
            new.iter().filter_map(|root| id(root).zip(InstanceTree::of(root, &later))).collect();
        let roots: Vec<(String, Incarnation)> =
            new.iter().filter_map(|root| Some((id(root)?, Incarnation::of(&root.document)))).collect();
        let count = roots.len();
        let seen: Documents = new.into_iter().filter_map(|root| Some((id(&root)?, root))).collect();
        let bulk = delete_bulk::delete_instance_trees(engine, roots, seen, false).await;
        let deleted = bulk.result.instances_deleted;
        put_off(engine, bulk.running.iter().filter_map(|root| trees.remove(root)).collect()).await;
        debug!(trees = count, instances = deleted, "retention deleted a page of instance trees");
        Ok(RetentionResult { deleted, unreadable, has_more: is_full || deleted >= MANY || !bulk.is_complete() })
    }

    /// Moves the next page behind a page that holds nothing but unreadable documents, which would hide all others.
    fn skip_unreadable_page(&mut self, rows: &[Root], unreadable: &[Unreadable], is_full: bool) {
        let last = unreadable.last().and_then(|last| last.row.get("ended")?.as_str());
        if let Some(last) = last.filter(|_| rows.is_empty() && is_full) {
            self.from = last.to_owned();
        }
    }
}

/// An instance tree, identified by its root.
struct InstanceTree {
    root: Partition,
    ended: String,
    /// The value that replaces `ended` of the root if the tree can't be deleted yet.
    until: String,
}

impl InstanceTree {
    fn of(root: &Root, until: &str) -> Option<Self> {
        let ended = root.document.removal.ended.clone()?;
        Some(Self { root: root.document.instance_id.clone(), ended, until: until.to_owned() })
    }
}

/// Puts off trees that can't be deleted yet, because a member runs or for another reason. So they do not hide the trees
/// behind them. Failures are ignored.
async fn put_off(engine: &Arc<Engine>, trees: Vec<InstanceTree>) {
    let putting_off = stream::iter(trees).map(|tree| async move {
        if let Err(error) = put_off_one(engine, &tree).await {
            let instance_id = tree.root.instance_id();
            info!(instance_id, %error, "putting off an instance tree failed, the next query returns it again");
        }
    });
    putting_off.buffer_unordered(plan::CONCURRENCY).collect::<Vec<()>>().await;
}

/// Puts off one tree, unless its root has ended again since.
async fn put_off_one(engine: &Arc<Engine>, tree: &InstanceTree) -> Result<(), StoreError> {
    let (partition, deadline) = (&tree.root, engine.deadline());
    let Some(Versioned { mut document, etag }) = engine.read_latest(partition, deadline).await? else { return Ok(()) };
    // A deletion in progress is finished by its process or by recovery.
    if document.removal.ended.as_ref() != Some(&tree.ended) || document.removal.deleting.is_some() {
        return Ok(());
    }
    document.removal.ended = Some(tree.until.clone());
    let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await?;
    engine.cache.forget(partition);
    if let WriteOutcome::Done(_) = written {
        debug!(instance_id = partition.instance_id(), "retention put off an instance tree that can't be deleted yet");
    }
    Ok(())
}

/// Prunes old executions of an instance in the background, if the setting says so for this execution.
pub(crate) fn prune_soon(engine: &Arc<Engine>, partition: &Partition, execution: u64) {
    let Some(keep) = engine.config.retention().prunes_at(execution) else { return };
    let (engine_too, instance) = (engine.clone(), partition.instance_id().unwrap_or_default().to_owned());
    engine.spawn(async move {
        let options = PruneOptions { keep_last: Some(keep), ..PruneOptions::default() };
        match in_background(prune::prune(&engine_too, &instance, &options)).await {
            Ok(pruned) => debug!(instance_id = instance, executions = pruned.executions_deleted, "pruned"),
            Err(error) => warn!(instance_id = instance, %error, "pruning failed, will retry"),
        }
    });
}
