//! Retention: what has ended long enough ago goes by itself.
//!
//! The commit that ends a root instance writes how and when (`ended`), which the index has: no request more. A round, begun by one member
//! every half a minute, asks for those whose time is over by the present setting, oldest first, and deletes them as a bulk deletion does, each
//! with its family, if all of it has ended. So a setting that was changed holds for what ended before.
//!
//! Invariants: those of deletion. Nothing goes that has not ended, nor a part of a family. A round takes two thirds of the time at most, and every
//! request of it lets others go first where throughput is short.
//!
//! *Time.* No process's clock ends a retention early. A round asks the service for its time, and the earlier of that
//! and of the local clock counts. The mark that tells the end of an instance was made by some other clock: it is
//! believed if the document's last write (`_ts`) is old enough, too. Otherwise the mark becomes the time of that
//! write, by the service's clock.
//!
//! Crash points: those of deletion. What a round has left is found by the next, of whichever process.

use super::{delete, plan, prune, Documents, Incarnation};
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

/// How often a process thinks of it: a little less often than another's word for it valid_for.
const EVERY: Duration = Duration::from_secs(27);
/// How long a round takes at most, unless a page of deletions takes longer: less than another's word for it valid_for. Where there is more to do, the
/// same process begins the next at once.
const ROUND: Duration = Duration::from_secs(20);
/// A family that can't go yet is looked at again after that.
const PUT_OFF: Millis = 10 * 60 * 1_000;
/// Rows of the query, and so many families go together.
const PAGE: usize = 1_000;
/// Rows that each physical partition returns at a time.
const ROWS: NonZeroU32 = NonZeroU32::new(250).unwrap();
/// A clock may be behind by so much, or by a tenth of the age if that is less, and a mark that it makes is believed
/// all the same: correcting a mark costs a write.
const SLACK: Millis = 10 * 60 * 1_000;
/// Where so many went, as many may have ended since.
const MANY: u64 = 100;
/// How long a round waits at least before it looks again.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// When this process last applied retention. Held while it does.
#[derive(Default)]
struct LastRun(tokio::sync::Mutex<Option<Instant>>);

/// Begins a round in the background, if it is this process's turn.
pub(crate) fn soon(engine: &Arc<Engine>) {
    if !engine.config.retention().takes_instances() {
        return;
    }
    let (engine_too, state) = (engine.clone(), engine.state::<LastRun>());
    engine.spawn(async move {
        let Ok(mut last) = state.0.try_lock() else { return };
        if last.is_some_and(|last| last.elapsed() < EVERY) {
            return;
        }
        *last = Some(Instant::now());
        let who = engine_too.new_token();
        let rounds = async {
            while leaves_more(&engine_too, &who).await {
                *last = Some(Instant::now());
            }
        };
        // It may be cut anywhere.
        tokio::select! {
            biased;
            () = engine_too.stopping.cancelled() => {}
            () = rounds => {}
        }
    });
}

/// One round of `who`; whether it has left something, so that the next is due at once.
async fn leaves_more(engine: &Arc<Engine>, who: &str) -> bool {
    match in_background(retire_all(engine, Some(who))).await {
        Ok(round) => {
            if round.gone > 0 || round.unreadable > 0 {
                let (instances, unreadable) = (round.gone, round.unreadable);
                info!(instances, unreadable, "deleted what had ended long enough ago");
            }
            round.has_more
        }
        Err(error) => {
            warn!(%error, "what has ended long enough ago is deleted later");
            false
        }
    }
}

/// Deletes what has ended long enough ago; how many instances. All of it lets others go first.
pub(crate) async fn round(engine: &Arc<Engine>) -> Result<u64, StoreError> {
    Ok(in_background(retire_all(engine, None)).await?.gone)
}

/// What a round has come to, or a page of it.
struct RetentionResult {
    gone: u64,
    /// Roots that are over and stay, since their documents can't be read: of a round, the most that a page had.
    unreadable: usize,
    /// Whether another look is worth its while.
    has_more: bool,
}

/// A round; of `who`, as long as it is the only one.
async fn retire_all(engine: &Arc<Engine>, who: Option<&str>) -> Result<RetentionResult, StoreError> {
    let mut ways = EndKind::all(engine);
    let (begun, mut gone, mut unreadable) = (Instant::now(), 0, 0);
    let mut trouble = None;
    while !ways.is_empty() {
        let page = Instant::now();
        if let Some(who) = who {
            if !shared_result::is_elected(engine, shared_result::RETENTION, who).await {
                return Ok(RetentionResult { gone, unreadable, has_more: false });
            }
        }
        let skew = ClockSkew::measure(engine).await?;
        let mut left = Vec::new();
        // One that has much to do does not keep the others waiting.
        for mut way in ways {
            let page = match way.retire_page(engine, skew).await {
                Ok(page) => page,
                Err(error) => {
                    trouble.get_or_insert(error);
                    continue;
                }
            };
            gone += page.gone;
            unreadable = unreadable.max(page.unreadable);
            if page.has_more {
                left.push(way);
            }
        }
        ways = left;
        if ways.is_empty() {
            break;
        }
        // A third of the time is without it, and a few are not worth a look.
        tokio::time::sleep((page.elapsed() / 2).max(MIN_PAUSE)).await;
        if begun.elapsed() >= ROUND {
            return trouble.map_or(Ok(RetentionResult { gone, unreadable, has_more: true }), Err);
        }
    }
    trouble.map_or(Ok(RetentionResult { gone, unreadable, has_more: false }), Err)
}

/// When those have ended whose time is over, as their documents say it: the next round takes them, if their families have ended.
pub(super) fn over(engine: &Engine) -> Vec<Range<String>> {
    EndKind::all(engine).iter().map(|way| way.range(engine.now())).collect()
}

/// Those that have ended in one way, in a round.
struct EndKind {
    ending: Ending,
    age: Millis,
    /// Which this round has tried to delete.
    tried: HashSet<(Partition, Incarnation)>,
    /// Where the next page begins.
    from: String,
}

/// The document of a root, as a query returns it.
type Root = Versioned<InstanceDocument>;

/// Another instance of the same name is another one.
fn incarnation(root: &Root) -> (Partition, Incarnation) {
    (root.document.instance_id.clone(), Incarnation::of(&root.document))
}

fn id(root: &Root) -> Option<String> {
    root.document.instance_id.instance_id().map(ToOwned::to_owned)
}

/// When the service took the last write of a root, by the service's time, which is in whole seconds.
fn written_at(root: &Root) -> Millis {
    root.document.written_at.saturating_mul(1_000)
}

impl EndKind {
    /// Those that have an age.
    fn all(engine: &Engine) -> Vec<Self> {
        let setting = engine.config.retention();
        let ways = [
            (Ending::Completed, setting.completed()),
            (Ending::Failed, setting.failed()),
            (Ending::Cancelled, setting.cancelled()),
        ];
        let with_age = ways.into_iter().filter_map(|(ending, age)| Some((ending, age?)));
        let way = |(ending, age): (Ending, Duration)| Self {
            ending,
            age: millis(age),
            tried: HashSet::new(),
            from: ending.at(0),
        };
        with_age.map(way).collect()
    }

    /// From when to when those have ended whose time is over, as their documents say it.
    fn range(&self, now: Millis) -> Range<String> {
        self.from.clone()..self.ending.at(now.saturating_sub(self.age))
    }

    /// Whether a root has ended long enough ago, also by the service's time.
    fn is_believed(&self, root: &Root, service_time: Millis) -> bool {
        let mark = root.document.ended.as_deref();
        let slack = SLACK.min(self.age / 10);
        let is_old = written_at(root).saturating_add(self.age) <= service_time.saturating_add(slack);
        is_old || mark.is_some_and(Ending::is_proved)
    }

    /// Deletes those that ended first.
    async fn retire_page(&mut self, engine: &Arc<Engine>, skew: ClockSkew) -> Result<RetentionResult, StoreError> {
        let service_time = skew.now(engine);
        let now = engine.now().min(service_time);
        let Range { start: from, end: to } = self.range(now);
        let statement = queries::ENDED.statement().bind("@from", from).bind("@to", to).in_pages_of(ROWS);
        let rows: Rows<Root> = engine.store.query_container(statement, engine.deadline()).await?;
        let is_full = rows.len() >= PAGE;
        let (rows, unreadable) = rows.into_parts();
        self.pass(&rows, &unreadable, is_full);
        let unreadable = unreadable.len();
        // Those that were tried were believed, and their documents were written since.
        let (again, rows): (Vec<Root>, Vec<Root>) =
            rows.into_iter().partition(|root| self.tried.contains(&incarnation(root)));
        let (new, early): (Vec<Root>, Vec<Root>) =
            rows.into_iter().partition(|root| self.is_believed(root, service_time));
        self.tried.extend(new.iter().map(incarnation));
        let later = self.ending.proved_at(now.saturating_sub(self.age).saturating_add(PUT_OFF));
        let mut waiting: Vec<InstanceTree> = again.iter().filter_map(|root| InstanceTree::of(root, &later)).collect();
        let corrected = |root: &Root| InstanceTree::of(root, &self.ending.proved_at(written_at(root)));
        waiting.extend(early.iter().filter_map(corrected));
        put_off(engine, waiting).await;
        if new.is_empty() {
            return Ok(RetentionResult { gone: 0, unreadable, has_more: is_full });
        }
        let mut families: HashMap<String, InstanceTree> =
            new.iter().filter_map(|root| id(root).zip(InstanceTree::of(root, &later))).collect();
        let roots: Vec<(String, Incarnation)> =
            new.iter().filter_map(|root| Some((id(root)?, Incarnation::of(&root.document)))).collect();
        let count = roots.len();
        let seen: Documents = new.into_iter().filter_map(|root| Some((id(&root)?, root))).collect();
        let bulk = delete::delete_families(engine, roots, seen, false).await;
        let gone = bulk.result.instances_deleted;
        put_off(engine, bulk.running.iter().filter_map(|root| families.remove(root)).collect()).await;
        debug!(families = count, instances = gone, "a page of what has ended");
        Ok(RetentionResult { gone, unreadable, has_more: is_full || gone >= MANY || !bulk.is_whole() })
    }

    /// The next page of this round begins behind one that holds nothing but what can't be read: it would hide all others.
    fn pass(&mut self, rows: &[Root], unreadable: &[Unreadable], is_full: bool) {
        let last = unreadable.last().and_then(|last| last.row.get("ended")?.as_str());
        if let Some(last) = last.filter(|_| rows.is_empty() && is_full) {
            self.from = last.to_owned();
        }
    }
}

/// A family, by what was seen of its root.
struct InstanceTree {
    root: Partition,
    ended: String,
    /// The mark that its root gets if it can't go yet.
    until: String,
}

impl InstanceTree {
    fn of(root: &Root, until: &str) -> Option<Self> {
        let ended = root.document.ended.clone()?;
        Some(Self { root: root.document.instance_id.clone(), ended, until: until.to_owned() })
    }
}

/// Families that can't go yet, since a member of each runs or something else keeps it: they make room for those behind them. Best effort.
async fn put_off(engine: &Arc<Engine>, families: Vec<InstanceTree>) {
    let putting_off = stream::iter(families).map(|family| async move {
        if let Err(error) = put_off_one(engine, &family).await {
            info!(instance_id = family.root.instance_id(), %error, "what can't go yet is looked at again at once");
        }
    });
    putting_off.buffer_unordered(plan::CONCURRENCY).collect::<Vec<()>>().await;
}

/// One of them, if it has not ended again since.
async fn put_off_one(engine: &Arc<Engine>, family: &InstanceTree) -> Result<(), StoreError> {
    let (partition, deadline) = (&family.root, engine.deadline());
    let Some(Versioned { mut document, etag }) = engine.read_latest(partition, deadline).await? else { return Ok(()) };
    // A deletion that is under way, or was left half-way, is finished by whoever meets it.
    if document.ended.as_ref() != Some(&family.ended) || document.deleting.is_some() {
        return Ok(());
    }
    document.ended = Some(family.until.clone());
    let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await?;
    engine.cache.forget(partition);
    if let WriteOutcome::Done(_) = written {
        debug!(instance_id = partition.instance_id(), "a family that has not ended as a whole is kept for now");
    }
    Ok(())
}

/// Prunes old executions of an instance that has begun this one, if it is time for that.
pub(crate) fn prune_soon(engine: &Arc<Engine>, partition: &Partition, execution: u64) {
    let Some(keep) = engine.config.retention().prunes_at(execution) else { return };
    let (engine_too, instance) = (engine.clone(), partition.instance_id().unwrap_or_default().to_owned());
    engine.spawn(async move {
        let options = PruneOptions { keep_last: Some(keep), ..PruneOptions::default() };
        match in_background(prune::prune(&engine_too, &instance, &options)).await {
            Ok(pruned) => debug!(instance_id = instance, executions = pruned.executions_deleted, "pruned"),
            Err(error) => warn!(instance_id = instance, %error, "old executions go later"),
        }
    });
}
