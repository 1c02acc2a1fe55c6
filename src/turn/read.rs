//! Reads of instances and histories, for clients that wait and workers that start an activity. This is a hot path.

use super::{
    cache::{CachedInstance, Contents},
    instance_id, load,
    reads::AllowedStaleness,
    staging,
};
use crate::{
    cosmos::{queries, Deadline, Freshness, QueryTimeout, StoreError, Versioned},
    engine::Engine,
    model::{Fingerprints, HistoryDocument, InstanceDocument, Partition},
};
use azure_core::http::Etag;
use duroxide::Event;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// A read leaves the roll-forward of a staged turn to the committing process for this long, and checks at this
/// interval.
const LEFT_TO_OTHERS: Duration = Duration::from_millis(200);
const RECHECK_INTERVAL: Duration = Duration::from_millis(20);
/// A result may be this many times as old while this process has the next step of the instance, because it would know
/// of any change.
const LOCAL_STALENESS_FACTOR: u32 = 10;

/// How old the returned state of an instance may be.
fn staleness(engine: &Engine, partition: &Partition) -> Duration {
    let allowed = engine.config.read_staleness();
    match engine.discovery.has_next_step(partition) {
        true => allowed.saturating_mul(LOCAL_STALENESS_FACTOR),
        false => allowed,
    }
}

/// The instance document. Rolls an incomplete turn forward first. Returns `None` for a deleted instance.
pub(crate) async fn instance(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    match cached_instance(engine, partition) {
        Some(known) => Ok(known),
        // Boxed, so that a read from memory does not allocate space for this future.
        None => Box::pin(read_instance(engine, partition, deadline)).await,
    }
}

/// The cached instance document, if it is fresh enough to be returned. The inner `None` means that the instance does
/// not exist.
fn cached_instance(engine: &Engine, partition: &Partition) -> Option<Option<Versioned<InstanceDocument>>> {
    let known = engine.cache.fresh(partition, staleness(engine, partition))?;
    let settled = |known: &CachedInstance| {
        known.document.removal.deleting.is_none() && known.document.commit.roll_forward.is_none()
    };
    known
        .as_ref()
        .is_none_or(settled)
        .then(|| known.map(|CachedInstance { document, etag, .. }| Versioned { document, etag }))
}

/// Reads the instance document from Cosmos DB, until no roll-forward is pending.
async fn read_instance(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let began = Instant::now();
    loop {
        if let Some(known) = cached_instance(engine, partition) {
            return Ok(known);
        }
        let before = engine.cache.get(partition).map(|known| known.etag);
        let found = engine.store.read(partition, &instance_id(), Freshness::Session, deadline).await?;
        let Some(found): Option<Versioned<InstanceDocument>> = found else {
            engine.cache.record_read(partition, before.as_ref(), None);
            return Ok(None);
        };
        if found.document.removal.deleting.is_some()
            && engine.lifecycle().is_deleted(engine, &found.document, deadline).await?
        {
            return Ok(None);
        }
        if found.document.commit.roll_forward.is_none() {
            let Versioned { document, etag } = found.clone();
            engine.cache.record_read(
                partition,
                before.as_ref(),
                Some(CachedInstance { document, etag, contents: None }),
            );
            return Ok(Some(found));
        }
        if engine.roll_forwards.in_progress(partition) {
            engine.roll_forwards.wait(partition, deadline).await?;
        } else if began.elapsed() < LEFT_TO_OTHERS {
            tokio::time::sleep(RECHECK_INTERVAL).await;
        } else {
            staging::roll_forward(engine, partition, deadline).await?;
        }
    }
}

/// The history of the latest execution. It comes from memory if the ETag of the instance document proves that it is
/// current.
pub(crate) async fn latest(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Result<Vec<Event>, String>, StoreError> {
    let allowed = engine.reads.allowed(partition, staleness(engine, partition));
    match history_under_lock(engine, partition) {
        Some(events) => Ok(Ok(events)),
        None => Box::pin(read(engine, partition, allowed, deadline)).await,
    }
}

/// Reads the history through the shared read of this process.
async fn read(
    engine: &Arc<Engine>,
    partition: &Partition,
    allowed: AllowedStaleness,
    deadline: Deadline,
) -> Result<Result<Vec<Event>, String>, StoreError> {
    let cache = &engine.cache;
    let mut reading = engine.reads.join(partition, allowed, deadline).await?;
    if let Some(events) = reading.events(cache, partition) {
        return Ok(Ok(events));
    }
    let asked = Instant::now();
    let Some(found) = instance(engine, partition, deadline).await? else { return Ok(Ok(Vec::new())) };
    let read = match cached_history(engine, partition, &found.etag) {
        Some(read) => read,
        None => match load::events(
            history(engine, partition, found.document.current.execution, Freshness::Session, engine.per_page()).await?,
        ) {
            Ok((events, bytes)) => cache_history(engine, partition, &found, (Arc::new(events), bytes)),
            Err(unreadable) => return Ok(Err(unreadable)),
        },
    };
    let events = read.0.as_ref().clone();
    // A document that came from the cache is older than this call.
    let of = cache.checked_at(partition).map_or(asked, |checked| checked.min(asked));
    reading.share(cache, partition, of, &found.etag, read);
    Ok(Ok(events))
}

/// Events, and the size of their text.
type Text = (Arc<Vec<Event>>, usize);

/// The history in memory, while this process holds the lock and is not committing. Other processes cannot commit then.
/// During a commit a client may already have seen the new state and must not see the old one afterwards.
fn history_under_lock(engine: &Engine, partition: &Partition) -> Option<Vec<Event>> {
    let known = engine.cache.get(partition)?;
    let lock = known.document.claim.lock.as_ref()?;
    let idle = engine.turns.get(&lock.token).is_some_and(|handle| handle.state.try_lock().is_ok());
    let held = idle && lock.until > engine.now();
    known.contents.filter(|_| held).map(|contents| contents.history.as_ref().clone())
}

/// The cached history, if the cache has it for this ETag.
fn cached_history(engine: &Engine, partition: &Partition, etag: &Etag) -> Option<Text> {
    let known = engine.cache.get(partition).filter(|known| &known.etag == etag)?;
    known.contents.map(|contents| (contents.history, contents.text))
}

/// Caches a history that was read. A commit between the two reads shows as events that the document does not list.
fn cache_history(engine: &Engine, partition: &Partition, found: &Versioned<InstanceDocument>, read: Text) -> Text {
    let (listed, (events, bytes)) = (&found.document.current.events, &read);
    let same = listed.len() == events.len() as u64 && events.iter().all(|event| listed.contains(event.event_id));
    if same {
        let contents = Contents::new(events.clone(), *bytes, None, Fingerprints::default());
        engine.cache.add_contents(partition, &found.etag, contents);
    }
    read
}

/// The history documents of one execution.
pub(crate) async fn history(
    engine: &Engine,
    partition: &Partition,
    execution: u64,
    freshness: Freshness,
    timeout: impl Into<QueryTimeout>,
) -> Result<Vec<HistoryDocument>, StoreError> {
    let statement = queries::HISTORY.statement().bind("@execution", execution).seeing(freshness);
    engine.store.query_partition(partition, statement, timeout).await
}
