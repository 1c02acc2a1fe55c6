//! Retention: what has ended long enough ago goes by itself.
//!
//! The commit that ends a root instance writes how and when (`ended`), which the index has: no request more. A round, begun by one member
//! every half a minute, asks for those whose time is over by the present setting, oldest first, and deletes them as a bulk deletion does, each
//! with its family, if all of it has ended. So a setting that was changed holds for what ended before.
//!
//! Invariants: those of deletion. Nothing goes that has not ended, nor a part of a family. A round takes two thirds of the time at most, and every
//! request of it lets others go first where throughput is short.
//!
//! Crash points: those of deletion. What a round has left is found by the next, of whichever process.

use super::{delete, plan, prune, shared, Documents, WholeRow};
use crate::{
    engine::Engine,
    model::{clock::millis, Ending, Millis, Partition},
    store::{in_background, queries, StoreError, Versioned, WriteOutcome},
    turn::{instance_id, release::read_latest},
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

/// How often a process thinks of it: a little less often than another's word for it lasts.
const EVERY: Duration = Duration::from_secs(27);
/// How long a round takes at most, unless a page of deletions takes longer: less than another's word for it lasts. Where there is more to do, the
/// same process begins the next at once.
const ROUND: Duration = Duration::from_secs(20);
/// A family that can't go yet is looked at again after that.
const PUT_OFF: Millis = 10 * 60 * 1_000;
/// Rows of the query, and so many families go together.
const PAGE: usize = 1_000;
/// Rows that each physical partition returns at a time.
const ROWS: NonZeroU32 = NonZeroU32::new(250).unwrap();
/// Where so many went, as many may have ended since.
const MANY: u64 = 100;
/// How long a round waits at least before it looks again.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Begins a round in the background, if it is this process's turn.
pub(crate) fn soon(engine: &Arc<Engine>) {
    if !engine.config.retention().takes_instances() {
        return;
    }
    let engine_too = engine.clone();
    engine.spawn(async move {
        let Ok(mut last) = engine_too.retiring.try_lock() else { return };
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
            if round.gone > 0 {
                info!(instances = round.gone, "deleted what had ended long enough ago");
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
struct Retired {
    gone: u64,
    /// Whether another look is worth its while.
    has_more: bool,
}

/// A round; of `who`, as long as it is the only one.
async fn retire_all(engine: &Arc<Engine>, who: Option<&str>) -> Result<Retired, StoreError> {
    let mut ways = Way::all(engine);
    let (begun, mut gone) = (Instant::now(), 0);
    loop {
        let page = Instant::now();
        if let Some(who) = who {
            if !shared::does(engine, shared::RETENTION, who).await {
                return Ok(Retired { gone, has_more: false });
            }
        }
        let mut left = Vec::new();
        // One that has much to do does not keep the others waiting.
        for mut way in ways {
            let page = way.retire_page(engine).await?;
            gone += page.gone;
            if page.has_more {
                left.push(way);
            }
        }
        ways = left;
        if ways.is_empty() {
            return Ok(Retired { gone, has_more: false });
        }
        // A third of the time is without it, and a few are not worth a look.
        tokio::time::sleep((page.elapsed() / 2).max(MIN_PAUSE)).await;
        if begun.elapsed() >= ROUND {
            return Ok(Retired { gone, has_more: true });
        }
    }
}

/// When those have ended whose time is over, as their documents say it: the next round takes them, if their families have ended.
pub(super) fn over(engine: &Engine) -> Vec<Range<String>> {
    Way::all(engine).iter().map(|way| way.range(engine.now())).collect()
}

/// Those that have ended in one way, in a round.
struct Way {
    ending: Ending,
    age: Millis,
    /// Which this round has tried to delete.
    tried: HashSet<Partition>,
}

impl Way {
    /// Those that have an age.
    fn all(engine: &Engine) -> Vec<Self> {
        let setting = engine.config.retention();
        let ways = [
            (Ending::Completed, setting.completed()),
            (Ending::Failed, setting.failed()),
            (Ending::Cancelled, setting.cancelled()),
        ];
        let with_age = ways.into_iter().filter_map(|(ending, age)| Some((ending, age?)));
        with_age.map(|(ending, age)| Self { ending, age: millis(age), tried: HashSet::new() }).collect()
    }

    /// From when to when those have ended whose time is over, as their documents say it.
    fn range(&self, now: Millis) -> Range<String> {
        self.ending.at(0)..self.ending.at(now.saturating_sub(self.age))
    }

    /// Deletes those that ended first.
    async fn retire_page(&mut self, engine: &Arc<Engine>) -> Result<Retired, StoreError> {
        let now = engine.now();
        let Range { start: from, end: to } = self.range(now);
        let statement = queries::ENDED.statement().bind("@from", from).bind("@to", to).in_pages_of(ROWS);
        let rows: Vec<WholeRow> = engine.store.query_container(statement, engine.deadline()).await?;
        let is_full = rows.len() >= PAGE;
        let (again, new): (Vec<WholeRow>, Vec<WholeRow>) =
            rows.into_iter().partition(|whole| self.tried.contains(&whole.row.instance_id));
        let later = self.ending.at(now.saturating_sub(self.age).saturating_add(PUT_OFF));
        put_off(engine, again.iter().filter_map(Family::of).collect(), &later).await;
        if new.is_empty() {
            return Ok(Retired { gone: 0, has_more: is_full });
        }
        let roots: Vec<String> = new.iter().filter_map(|whole| whole.row.id()).collect();
        self.tried.extend(new.iter().map(|whole| whole.row.instance_id.clone()));
        let mut families: HashMap<String, Family> =
            new.iter().filter_map(|whole| whole.row.id().zip(Family::of(whole))).collect();
        let seen: Documents = new.into_iter().filter_map(|whole| whole.row.id().zip(whole.document)).collect();
        let bulk = delete::delete_families(engine, &roots, seen, false).await;
        let gone = bulk.result.instances_deleted;
        put_off(engine, bulk.running.iter().filter_map(|root| families.remove(root)).collect(), &later).await;
        debug!(families = roots.len(), instances = gone, "a page of what has ended");
        Ok(Retired { gone, has_more: is_full || gone >= MANY || !bulk.is_whole() })
    }
}

/// A family, by what was seen of its root.
struct Family {
    root: Partition,
    ended: String,
}

impl Family {
    fn of(whole: &WholeRow) -> Option<Self> {
        let ended = whole.document.as_ref()?.document.ended.clone()?;
        Some(Self { root: whole.row.instance_id.clone(), ended })
    }
}

/// Families that can't go yet, since a member of each runs or something else keeps it: they make room for those behind them. Best effort.
async fn put_off(engine: &Arc<Engine>, families: Vec<Family>, until: &str) {
    let putting_off = stream::iter(families).map(|family| async move {
        if let Err(error) = put_off_one(engine, &family, until).await {
            info!(instance_id = family.root.instance_id(), %error, "what can't go yet is looked at again at once");
        }
    });
    putting_off.buffer_unordered(plan::CONCURRENCY).collect::<Vec<()>>().await;
}

/// One of them, if it has not ended again since.
async fn put_off_one(engine: &Arc<Engine>, family: &Family, until: &str) -> Result<(), StoreError> {
    let (partition, deadline) = (&family.root, engine.deadline());
    let Some(Versioned { mut document, etag }) = read_latest(engine, partition, deadline).await? else { return Ok(()) };
    // A deletion that is under way, or was left half-way, is finished by whoever meets it.
    if document.ended.as_ref() != Some(&family.ended) || document.deleting.is_some() {
        return Ok(());
    }
    document.ended = Some(until.to_owned());
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
