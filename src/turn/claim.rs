//! Taking the lock of an instance: one conditional write, and then a look at what it protects.
//!
//! Invariant: when [`claim`] does not return a turn, the instance is not locked by it. A claim whose answer was lost is
//! read; one that can't be read is given back by a task that outlives the call.

use super::{
    cache::{Contents, Known},
    instance_id, load, release, staging, Phase, TurnHandle, TurnState,
};
use crate::{
    admin::delete,
    dispatch::OrchestrationHint,
    engine::Engine,
    model::{clock::millis, item, InstanceDocument, Lock, MessageDocument, Millis, Partition},
    store::{Deadline, Freshness, StoreError, Versioned, WriteOutcome},
};
use azure_core::http::Etag;
use duroxide::{
    providers::{DispatcherCapabilityFilter, KvEntry, OrchestrationItem, WorkItem},
    EventKind,
};
use std::{collections::HashMap, sync::Arc, time::Duration};
use tracing::{debug, warn};

/// Claims kept in the document: more attempts than that are not told apart.
const MAX_CLAIMS: usize = 64;

/// How an attempt at an instance ended.
pub(crate) enum Claimed {
    /// The turn is ours.
    Turn(Box<(OrchestrationItem, String, u32)>),
    /// Somebody else has it until then.
    Locked(Millis),
    /// Nothing to do here.
    Nothing,
    /// Messages that wait for a start which has not come yet.
    Waiting,
    /// The execution is pinned to a version that the caller doesn't support.
    Incompatible(semver::Version),
}

/// Tries to take the instance that a hint names.
pub(crate) async fn claim(
    engine: &Arc<Engine>,
    hint: &OrchestrationHint,
    lock_timeout: Duration,
    filter: Option<&DispatcherCapabilityFilter>,
    deadline: Deadline,
) -> Result<Claimed, StoreError> {
    let partition = &hint.partition;
    if !hint.ask && hint.messages.iter().all(|m| engine.dispatch.was_consumed(partition, &m.id)) {
        return Ok(Claimed::Nothing);
    }
    let mut known = engine.cache.get(partition);
    if known.is_none() && !hint.starts {
        known = look(engine, partition, deadline).await?;
    }
    // What was cached may be stale, so there is a second look at most.
    for _ in 0..3 {
        let attempt = match known.take() {
            None => begin(engine, partition, lock_timeout, deadline).await?,
            Some(known) => match unclaimable(engine, &known.document, filter, deadline).await? {
                Some(outcome) => return Ok(outcome),
                None => take_over(engine, partition, known, lock_timeout, deadline).await?,
            },
        };
        match attempt {
            Attempt::Ours(ours) => return open(engine, hint, *ours, lock_timeout, deadline).await,
            Attempt::Look => {
                engine.cache.forget(partition);
                known = look(engine, partition, deadline).await?;
                if known.is_none() && !hint.starts {
                    return Ok(Claimed::Nothing);
                }
            }
        }
    }
    Ok(Claimed::Locked(engine.now() + 50))
}

/// The outcome of one conditional write.
enum Attempt {
    Ours(Box<Ours>),
    /// The document is not as we thought.
    Look,
}

struct Ours {
    token: String,
    document: InstanceDocument,
    etag: Etag,
    claimed_at: Millis,
    contents: Option<Contents>,
}

async fn look(engine: &Engine, partition: &Partition, deadline: Deadline) -> Result<Option<Known>, StoreError> {
    let found = engine.store.read(partition, &instance_id(), Freshness::LatestCommitted, deadline).await?;
    Ok(found.map(|Versioned { document, etag }| Known { document, etag, contents: None }))
}

/// What keeps an instance from being claimed, seen before anything is written.
async fn unclaimable(
    engine: &Arc<Engine>,
    document: &InstanceDocument,
    filter: Option<&DispatcherCapabilityFilter>,
    deadline: Deadline,
) -> Result<Option<Claimed>, StoreError> {
    if let Some(until) = document.locked_until(engine.now()) {
        return Ok(Some(Claimed::Locked(look_again(engine, document, until))));
    }
    if document.deleting.is_some() {
        // A deletion that was left half-way is finished, or undone where it was never decided.
        let recovered = delete::recover(engine, document, delete::UNDO_AFTER, deadline).await?;
        engine.cache.forget(&document.instance_id);
        return Ok(Some(Claimed::Locked(engine.now() + if recovered { 20 } else { 1_000 })));
    }
    if document.rolling.is_some() {
        staging::roll_forward(engine, &document.instance_id, deadline).await?;
        engine.cache.forget(&document.instance_id);
        return Ok(Some(Claimed::Locked(engine.now())));
    }
    Ok(incompatible(document, filter).map(Claimed::Incompatible))
}

/// When to try a locked instance again. This process tells when its own turn ends; another one may end it any time, so
/// there is a look now and then before its lock expires.
fn look_again(engine: &Engine, document: &InstanceDocument, until: Millis) -> Millis {
    const LOOK_AFTER: Millis = 1_000;
    let ours = document.lock.as_ref().is_some_and(|lock| engine.turns.contains_key(&lock.token));
    if ours {
        return until;
    }
    engine.cache.forget(&document.instance_id);
    until.min(engine.now() + LOOK_AFTER)
}

/// The version that the execution is pinned to, where the filter does not take it.
fn incompatible(document: &InstanceDocument, filter: Option<&DispatcherCapabilityFilter>) -> Option<semver::Version> {
    let pinned = document.pinned.as_deref().and_then(|v| semver::Version::parse(v).ok())?;
    (!supports(filter?, &pinned)).then_some(pinned)
}

/// Of the capability filter only the first range counts.
pub(crate) fn supports(filter: &DispatcherCapabilityFilter, pinned: &semver::Version) -> bool {
    filter.supported_duroxide_versions.first().is_some_and(|range| range.contains(pinned))
}

/// Claims an instance that has no document yet.
async fn begin(
    engine: &Arc<Engine>,
    partition: &Partition,
    lock_timeout: Duration,
    deadline: Deadline,
) -> Result<Attempt, StoreError> {
    let now = engine.now();
    let token = Engine::new_token();
    let mut document = InstanceDocument::new(partition.clone(), now);
    document.lock = Some(Lock { token: token.clone(), until: now.saturating_add(millis(lock_timeout)) });
    document.claims.push(now);
    let written = engine.store.create(partition, &instance_id(), &document, deadline).await;
    // Where there was no document, there is neither history nor a value.
    let nothing = load::contents(Vec::new(), 0, Some(HashMap::new()));
    settle(engine, partition, token, document, written, Some(nothing), now, deadline).await
}

/// Claims an instance whose document is as `known` says.
async fn take_over(
    engine: &Arc<Engine>,
    partition: &Partition,
    known: Known,
    lock_timeout: Duration,
    deadline: Deadline,
) -> Result<Attempt, StoreError> {
    let now = engine.now();
    let token = Engine::new_token();
    let Known { mut document, etag, contents } = known;
    document.lock = Some(Lock { token: token.clone(), until: now.saturating_add(millis(lock_timeout)) });
    if document.claims.len() >= MAX_CLAIMS {
        document.claims.remove(1);
    }
    document.claims.push(now);
    let written = engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline).await;
    settle(engine, partition, token, document, written, contents, now, deadline).await
}

/// Finds out whether a claim's write happened.
#[allow(clippy::too_many_arguments)]
async fn settle(
    engine: &Arc<Engine>,
    partition: &Partition,
    token: String,
    document: InstanceDocument,
    written: Result<WriteOutcome, StoreError>,
    contents: Option<Contents>,
    claimed_at: Millis,
    deadline: Deadline,
) -> Result<Attempt, StoreError> {
    match written {
        Ok(WriteOutcome::Done(etag)) => {
            Ok(Attempt::Ours(Box::new(Ours { token, document, etag, claimed_at, contents })))
        }
        Ok(WriteOutcome::Refused(_)) => match look(engine, partition, deadline).await {
            Ok(Some(known)) if known.document.held_by(&token) => {
                let Known { document, etag, .. } = known;
                Ok(Attempt::Ours(Box::new(Ours { token, document, etag, claimed_at, contents })))
            }
            Ok(_) => {
                crate::observe::claim_race("orchestration");
                Ok(Attempt::Look)
            }
            Err(error) => {
                release::give_back_later(engine, partition, token);
                Err(error)
            }
        },
        Err(error) => {
            release::give_back_later(engine, partition, token);
            Err(error)
        }
    }
}

/// Loads what the claim protects and hands the turn out, or gives it back.
async fn open(
    engine: &Arc<Engine>,
    hint: &OrchestrationHint,
    ours: Ours,
    lock_timeout: Duration,
    deadline: Deadline,
) -> Result<Claimed, StoreError> {
    let partition = &hint.partition;
    let Ours { token, document, etag, claimed_at, contents } = ours;
    let warm = contents.filter(|contents| contents.kv.is_some());
    let from_memory = known_messages(engine, hint, &document, claimed_at).filter(|_| warm.is_some());
    let asked = from_memory.is_none();
    let loaded = match (from_memory, warm) {
        (Some(messages), Some(contents)) => Ok(load::Loaded { messages, contents: Ok(contents), dead: Vec::new() }),
        (_, warm) => load::load(engine, partition, &document, warm, claimed_at, deadline).await,
    };
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(error) => {
            release::give_back_later(engine, partition, token);
            return Err(error);
        }
    };
    staging::sweep(engine, partition, &loaded.dead, deadline).await;
    let items: Vec<WorkItem> = match parse_items(&loaded.messages) {
        Ok(items) => items,
        Err(detail) => {
            release::give_back_later(engine, partition, token);
            return Err(StoreError::Malformed { detail });
        }
    };
    let Some((name, version)) = identity(&document, &loaded, &items) else {
        return decline(engine, partition, token, etag, document, &loaded.messages, &items, deadline).await;
    };
    let attempts = attempts(&document, &loaded.messages);
    let max_attempts = attempts.iter().copied().max().unwrap_or(1);
    let taken = loaded
        .messages
        .iter()
        .zip(&attempts)
        .map(|(message, attempts)| MessageDocument { attempts: *attempts, ..message.clone() });
    let (history, history_error, kv) = match &loaded.contents {
        Ok(contents) => {
            let kv = contents.kv.as_deref().cloned().unwrap_or_default();
            (contents.history.as_ref().clone(), None, kv)
        }
        Err(error) => {
            warn!(instance_id = partition.instance_id(), error, "the history can't be read");
            (Vec::new(), Some(format!("Failed to deserialize history: {error}")), HashMap::new())
        }
    };
    let item = OrchestrationItem {
        instance: partition.instance_id().unwrap_or_default().to_owned(),
        orchestration_name: name.clone(),
        execution_id: document.execution,
        version: version.clone(),
        history,
        messages: items,
        history_error,
        kv_snapshot: snapshot(&document, &kv),
    };
    if let Ok(contents) = &loaded.contents {
        // While the lock is held, this is what there is: reads of it cost nothing.
        let known = Known { document: document.clone(), etag: etag.clone(), contents: Some(contents.clone()) };
        engine.cache.put(partition, known);
    }
    let state = TurnState {
        until: document.lock.as_ref().map_or(0, |lock| lock.until),
        taken: taken.collect(),
        history: loaded.contents.ok().map(|contents| contents.history),
        phase: Phase::Open,
        document,
        etag,
        lock_timeout,
        kv,
        name,
        version,
    };
    engine.dispatch.taken(partition, state.taken.iter().map(|taken| &taken.id), state.until);
    let taken: std::collections::HashSet<_> = state.taken.iter().map(|taken| taken.id.clone()).collect();
    let handle = TurnHandle { token: token.clone(), partition: partition.clone(), state: state.into() };
    engine.turns.insert(token.clone(), Arc::new(handle));
    // Timers that are not due yet keep their place in the ready queue. What is due and was not found is gone: erased with a
    // former instance of the same name, perhaps. Unless there was too much for one turn.
    let all_found = asked && taken.len() < load::MAX_MESSAGES;
    let is_gone = |m: &&MessageDocument| all_found && m.due <= claimed_at;
    for message in hint.messages.iter().filter(|m| !taken.contains(&m.id) && !is_gone(m)) {
        engine.dispatch.offer_message(message.clone());
    }
    Ok(Claimed::Turn(Box::new((item, token, max_attempts))))
}

/// The visible messages, where this process has put them all into the queue itself. Others may have come from elsewhere in
/// the meantime: they stay in the queue for the next turn.
fn known_messages(
    engine: &Engine,
    hint: &OrchestrationHint,
    document: &InstanceDocument,
    now: Millis,
) -> Option<Vec<MessageDocument>> {
    // After a claim that was not committed, its messages are in the queue too.
    if hint.ask || document.claims.len() > 1 {
        return None;
    }
    // A turn of this process may have taken one from the queue while its hint was waiting.
    let waits = |m: &&MessageDocument| m.due <= now && !engine.dispatch.was_consumed(&hint.partition, &m.id);
    let mut visible: Vec<MessageDocument> = hint.messages.iter().filter(waits).cloned().collect();
    visible.sort_by(|a, b| a.seq.cmp(&b.seq));
    visible.dedup_by(|a, b| a.id == b.id);
    // Where there is no instance, what a former one of the same name was sent may have been erased with it.
    let may_be_of_another =
        |m: &MessageDocument| !m.starts || !(m.delivered || MessageDocument::is_from_outside(&m.id));
    if !document.exists() && visible.iter().any(may_be_of_another) {
        return None;
    }
    (!visible.is_empty()).then_some(visible)
}

fn parse_items(messages: &[MessageDocument]) -> Result<Vec<WorkItem>, String> {
    messages
        .iter()
        .map(|m| serde_json::from_str(&m.item).map_err(|e| format!("message {} can't be read: {e}", m.id)))
        .collect()
}

/// The orchestration's name and version: what is stored, or what the first start says. None where there is no turn.
fn identity(document: &InstanceDocument, loaded: &load::Loaded, items: &[WorkItem]) -> Option<(String, String)> {
    if items.is_empty() {
        return None;
    }
    let unknown = || "unknown".to_owned();
    if document.exists() {
        let version = if document.version.is_empty() { unknown() } else { document.version.clone() };
        return Some((document.name.clone(), version));
    }
    let appended = loaded.contents.as_ref().ok().and_then(|contents| {
        contents.history.iter().find_map(|event| match &event.kind {
            EventKind::OrchestrationStarted { name, version, .. } => Some((name.clone(), version.clone())),
            _ => None,
        })
    });
    let started = || {
        let (name, version) = items.iter().find_map(item::started)?;
        Some((name.to_owned(), version.map_or_else(unknown, ToOwned::to_owned)))
    };
    appended.or_else(started)
}

/// Gives back a claim that turned out unusable: it is not counted.
#[allow(clippy::too_many_arguments)]
async fn decline(
    engine: &Arc<Engine>,
    partition: &Partition,
    token: String,
    etag: Etag,
    document: InstanceDocument,
    messages: &[MessageDocument],
    items: &[WorkItem],
    deadline: Deadline,
) -> Result<Claimed, StoreError> {
    let orphans = !items.is_empty() && items.iter().all(|i| matches!(i, WorkItem::QueueMessage { .. }));
    if orphans {
        warn!(
            instance_id = partition.instance_id(),
            messages = items.len(),
            "dropping queue messages for an instance that does not exist"
        );
        release::drop_messages(engine, partition, messages, deadline).await?;
    }
    debug!(instance_id = partition.instance_id(), messages = items.len(), "nothing to run: giving the claim back");
    let empty = items.is_empty() || orphans;
    if let Err(error) = release::undo_claim(engine, partition, &token, document, etag, deadline).await {
        release::give_back_later(engine, partition, token);
        return Err(error);
    }
    Ok(if empty { Claimed::Nothing } else { Claimed::Waiting })
}

/// The attempts of each message with this one: the claims that it has seen since it became visible.
fn attempts(document: &InstanceDocument, messages: &[MessageDocument]) -> Vec<u32> {
    messages
        .iter()
        .map(|message| {
            let visible = message.created_at.max(message.due);
            let seen = document.claims.iter().filter(|claim| **claim >= visible).count();
            message.attempts + u32::try_from(seen).unwrap_or(u32::MAX).max(1)
        })
        .collect()
}

/// The values as the execution found them: what it wrote itself comes from its own history.
fn snapshot(document: &InstanceDocument, kv: &HashMap<String, crate::model::KvDocument>) -> HashMap<String, KvEntry> {
    kv.values()
        .filter_map(|value| {
            let base = value.snapshot(document.epoch)?;
            Some((value.key.clone(), KvEntry { value: base.value, last_updated_at_ms: base.at }))
        })
        .collect()
}
