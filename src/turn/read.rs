//! Histories, for clients that wait and workers that start an activity: a hot path.

use super::{
    cache::{Contents, Known},
    instance_id, load,
    reads::Allowed,
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

/// Who only reads leaves it to the process that committed a turn in parts to apply them, for so long, and looks again so often.
const LEFT_TO_OTHERS: Duration = Duration::from_millis(200);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// So many times as old an answer may be while this process has the instance's next step: it would know, were there news.
const OLDER_HERE: u32 = 10;

/// How old what is shown of an instance may be.
fn staleness(engine: &Engine, partition: &Partition) -> Duration {
    let allowed = engine.config.read_staleness();
    match engine.discovery.has_next_step(partition) {
        true => allowed.saturating_mul(OLDER_HERE),
        false => allowed,
    }
}

/// The instance's document, with a turn that was left half-way rolled forward and a deleted instance not there.
pub(crate) async fn instance(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    match remembered(engine, partition) {
        Some(known) => Ok(known),
        // Apart, so that who is answered from memory has no room made for it.
        None => Box::pin(look(engine, partition, deadline)).await,
    }
}

/// What this process knows of an instance, if that may be shown.
fn remembered(engine: &Engine, partition: &Partition) -> Option<Option<Versioned<InstanceDocument>>> {
    let known = engine.cache.fresh(partition, staleness(engine, partition))?;
    let settled = |known: &Known| known.document.deleting.is_none() && known.document.roll_forward.is_none();
    known.as_ref().is_none_or(settled).then(|| known.map(|Known { document, etag, .. }| Versioned { document, etag }))
}

async fn look(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Option<Versioned<InstanceDocument>>, StoreError> {
    let began = Instant::now();
    loop {
        if let Some(known) = remembered(engine, partition) {
            return Ok(known);
        }
        let before = engine.cache.get(partition).map(|known| known.etag);
        let found = engine.store.read(partition, &instance_id(), Freshness::Session, deadline).await?;
        let Some(found): Option<Versioned<InstanceDocument>> = found else {
            engine.cache.saw(partition, before.as_ref(), None);
            return Ok(None);
        };
        if found.document.deleting.is_some() && engine.lifecycle().is_deleted(engine, &found.document, deadline).await?
        {
            return Ok(None);
        }
        if found.document.roll_forward.is_none() {
            let Versioned { document, etag } = found.clone();
            engine.cache.saw(partition, before.as_ref(), Some(Known { document, etag, contents: None }));
            return Ok(Some(found));
        }
        if engine.roll_forwards.is_under_way(partition) {
            engine.roll_forwards.wait(partition, deadline).await?;
        } else if began.elapsed() < LEFT_TO_OTHERS {
            tokio::time::sleep(LOOK_AGAIN).await;
        } else {
            staging::roll_forward(engine, partition, deadline).await?;
        }
    }
}

/// The history of the latest execution: from memory where the document's ETag proves it current.
pub(crate) async fn latest(
    engine: &Arc<Engine>,
    partition: &Partition,
    deadline: Deadline,
) -> Result<Result<Vec<Event>, String>, StoreError> {
    let allowed = engine.reads.allowed(partition, staleness(engine, partition));
    match held_here(engine, partition) {
        Some(events) => Ok(Ok(events)),
        None => Box::pin(read(engine, partition, allowed, deadline)).await,
    }
}

async fn read(
    engine: &Arc<Engine>,
    partition: &Partition,
    allowed: Allowed,
    deadline: Deadline,
) -> Result<Result<Vec<Event>, String>, StoreError> {
    let cache = &engine.cache;
    let mut reading = engine.reads.join(partition, allowed, deadline).await?;
    if let Some(events) = reading.events(cache, partition) {
        return Ok(Ok(events));
    }
    let asked = Instant::now();
    let Some(found) = instance(engine, partition, deadline).await? else { return Ok(Ok(Vec::new())) };
    let read = match cached(engine, partition, &found.etag) {
        Some(read) => read,
        None => match load::events(
            history(engine, partition, found.document.execution, Freshness::Session, engine.per_page()).await?,
        ) {
            Ok((events, bytes)) => keep(engine, partition, &found, (Arc::new(events), bytes)),
            Err(unreadable) => return Ok(Err(unreadable)),
        },
    };
    let events = read.0.as_ref().clone();
    // What was not asked for is older than the question.
    let of = cache.seen(partition).map_or(asked, |seen| seen.min(asked));
    reading.note(cache, partition, of, &found.etag, read);
    Ok(Ok(events))
}

/// Events, and the size of their text.
type Text = (Arc<Vec<Event>>, usize);

/// While this process holds the lock, nobody else can commit: what it knows is what is there, as long as it is not
/// committing itself. Then a client may have seen the new state already, and must not be shown the old one after it.
fn held_here(engine: &Engine, partition: &Partition) -> Option<Vec<Event>> {
    let known = engine.cache.get(partition)?;
    let lock = known.document.lock.as_ref()?;
    let idle = engine.turns.get(&lock.token).is_some_and(|handle| handle.state.try_lock().is_ok());
    let held = idle && lock.until > engine.now();
    known.contents.filter(|_| held).map(|contents| contents.history.as_ref().clone())
}

fn cached(engine: &Engine, partition: &Partition, etag: &Etag) -> Option<Text> {
    let known = engine.cache.get(partition).filter(|known| &known.etag == etag)?;
    known.contents.map(|contents| (contents.history, contents.text))
}

/// Keeps a history that was read. A commit between the two reads shows as events that the document doesn't know of.
fn keep(engine: &Engine, partition: &Partition, found: &Versioned<InstanceDocument>, read: Text) -> Text {
    let (noted, (events, bytes)) = (&found.document.events, &read);
    let same = noted.len() == events.len() as u64 && events.iter().all(|event| noted.contains(event.event_id));
    if same {
        let contents = Contents::new(events.clone(), *bytes, None, Fingerprints::default());
        engine.cache.fill(partition, &found.etag, contents);
    }
    read
}

/// The history documents of one execution.
pub(crate) async fn history(
    engine: &Engine,
    partition: &Partition,
    execution: u64,
    freshness: Freshness,
    patience: impl Into<QueryTimeout>,
) -> Result<Vec<HistoryDocument>, StoreError> {
    let statement = queries::HISTORY.statement().bind("@execution", execution).seeing(freshness);
    engine.store.query_partition(partition, statement, patience).await
}
