//! Loads the contents of a claimed instance and hands the turn out, or releases the claim.
//!
//! Invariants:
//!
//! - A turn is handed out with at least half of its lock left.
//! - A message that this process remembers, and did not load, is handed out with its ETag. The commit must find it with
//!   that ETag.
//! - A claim that finds nothing to run is not counted as an attempt.

use super::{
    cache::{CachedInstance, Contents},
    claim::{ClaimedInstance, TurnClaim},
    defer, instance_id,
    load::{self, Loaded, MessageScope},
    release, staging,
    unknown::{self, UnknownMessages},
    TurnHandle, TurnPhase, TurnState,
};
use crate::model::operation;
use crate::{
    cosmos::{BatchOutcome, Deadline, StoreError, Versioned, WriteOutcome},
    discovery::TurnCandidate,
    engine::Engine,
    model::{
        clock::millis, item, ActivityDocument, DocumentId, InstanceDocument, KvDocument, MessageDocument, Millis,
        Operation,
    },
};
use duroxide::{
    providers::{KvEntry, OrchestrationItem, WorkItem},
    EventKind,
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};
use tracing::{debug, error, info, warn};

/// Loads the contents of a claimed instance. Hands the turn out, or releases the claim if there is nothing to run.
pub(crate) async fn open(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    mut claimed: ClaimedInstance,
) -> Result<TurnClaim, StoreError> {
    match prepare(engine, candidate, &mut claimed).await {
        Ok(Prepared::Turn(ready)) => Ok(hand_out(engine, candidate, claimed, *ready)),
        Ok(Prepared::Declined(outcome)) => {
            let (partition, token, until) = (&candidate.partition, claimed.token, lock_end(&claimed.document));
            let deadline = engine.deadline();
            let undone = release::undo_claim(engine, partition, &token, claimed.document, claimed.etag, deadline).await;
            if let Err(error) = undone {
                release::release_claim_later(engine, partition, token, until, engine.clock.after(error.pause()));
                return Err(error);
            }
            Ok(outcome)
        }
        Err(error) => {
            let (until, due) = (lock_end(&claimed.document), engine.clock.after(error.pause()));
            release::release_claim_later(engine, &candidate.partition, claimed.token, until, due);
            Err(error)
        }
    }
}

/// When the lock of a claim ends.
fn lock_end(document: &InstanceDocument) -> Millis {
    document.claim.lock.as_ref().map_or(0, |lock| lock.until)
}

/// The decision about a claim once the contents are loaded.
enum Prepared {
    Turn(Box<Ready>),
    /// There is no turn to run.
    Declined(TurnClaim),
}

/// A turn that can be handed out.
struct Ready {
    taken: Vec<Versioned<MessageDocument>>,
    items: Vec<WorkItem>,
    /// Why the history cannot be read.
    unreadable: Option<String>,
    contents: Option<Contents>,
    name: String,
    version: String,
    more: bool,
}

/// Loads, discards and defers messages until it is clear whether the instance has a turn to run.
async fn prepare(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    claimed: &mut ClaimedInstance,
) -> Result<Prepared, StoreError> {
    if !claimed.document.commit.staging.is_empty() {
        staging::delete_uncommitted(engine, claimed, engine.deadline()).await?;
    }
    // An instance that does not exist has no use for its deferred messages yet, and there may be many.
    let all = claimed.document.waiting.deferred
        && (claimed.document.exists() || candidate.starts || defer::orphans_have_expired(engine, &claimed.document));
    let mut scope = if all { MessageScope::WithDeferred } else { MessageScope::Visible };
    loop {
        let mut loaded = load_contents(engine, candidate, claimed, scope).await?;
        delete_useless(engine, claimed, &mut loaded).await?;
        add_inlined(&mut loaded, claimed);
        let items = unknown::set_aside(engine, claimed, &mut loaded).await?;
        match identity(&claimed.document, &loaded, &items) {
            None => return decline(engine, claimed, loaded, &items, scope).await.map(Prepared::Declined),
            Some(_) if claimed.document.waiting.deferred && scope == MessageScope::Visible => {
                scope = MessageScope::WithDeferred
            }
            // Load again: other messages may take the place of the dropped ones.
            Some(_) if defer::drop_orphans(engine, claimed, &mut loaded).await? => {}
            Some(identity) => return ready(engine, claimed, loaded, items, identity).await,
        }
    }
}

/// Makes the turn from the loaded contents, with enough of its lock left.
async fn ready(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    loaded: Loaded,
    items: Vec<WorkItem>,
    (name, version): (String, String),
) -> Result<Prepared, StoreError> {
    let lock_left = claimed.document.claim.lock.as_ref().map_or(0, |lock| lock.until.saturating_sub(engine.now()));
    if lock_left < millis(claimed.runner.terms.lock_timeout) / 2 {
        extend_lock(engine, claimed, engine.deadline()).await?;
    }
    let (contents, unreadable) = match loaded.contents {
        Ok(contents) => (Some(contents), None),
        Err(error) => (None, Some(error)),
    };
    let (mut taken, more) = (loaded.messages, loaded.more);
    for Versioned { document: message, .. } in taken.iter_mut().filter(|m| m.document.is_deferred()) {
        // The message counts as visible since its creation.
        (message.due, message.orphan_since) = (message.created_at, None);
    }
    Ok(Prepared::Turn(Box::new(Ready { taken, items, unreadable, contents, name, version, more })))
}

/// Gets messages, history and values: from memory if the claim has proved it, otherwise from Cosmos DB.
async fn load_contents(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    claimed: &mut ClaimedInstance,
    scope: MessageScope,
) -> Result<Loaded, StoreError> {
    let cached = claimed.contents.take().filter(|contents| contents.kv.is_some());
    let cached = cached.or_else(|| claimed.document.is_placeholder().then(load::empty_contents));
    if let (Some(messages), Some(contents)) = (known_messages(engine, candidate, claimed), &cached) {
        if !claimed.document.exists() {
            engine.discovery.record_query(&candidate.partition);
        }
        let mut more = false;
        let messages = load::order_and_cut(messages, &mut more);
        return Ok(Loaded { messages, unknown: UnknownMessages::default(), more, contents: Ok(contents.clone()) });
    }
    engine.discovery.record_query(&candidate.partition);
    let is_cached = cached.is_some();
    let mut loaded = load(engine, claimed, cached, scope, false).await?;
    let mut pause = FIRST_PAUSE;
    // The claim has proved cached contents, and comparing them again may take long.
    let missing_events = |loaded: &Loaded, claimed: &ClaimedInstance| {
        (!is_cached).then(|| loaded.missing_events(&claimed.document.current.events)).flatten()
    };
    while let Some(missing_events) = missing_events(&loaded, claimed) {
        if pause > LAST_PAUSE {
            // The events are missing in the write region too.
            return Ok(Loaded { contents: Err(missing_events), ..loaded });
        }
        debug!(
            instance_id = candidate.partition.instance_id(),
            missing_events, "a lagging replica has answered, reading again"
        );
        tokio::time::sleep(pause).await;
        pause *= 2;
        loaded = load(engine, claimed, None, scope, true).await?;
    }
    Ok(loaded)
}

/// The first pause before the worker reads again a history that lacks events of the instance document. A lagging
/// replica has answered. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_millis(1_600);

/// Queries the contents of the partition and extends the lock meanwhile. With `authoritative` the query goes to the
/// write region instead of a replica that may lag.
async fn load(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    cached: Option<Contents>,
    scope: MessageScope,
    authoritative: bool,
) -> Result<Loaded, StoreError> {
    let (partition, execution) = (claimed.document.instance_id.clone(), claimed.document.current.execution);
    let loading = load::load(engine, &partition, execution, cached, claimed.claimed_at, (scope, authoritative));
    tokio::pin!(loading);
    loop {
        // Loading a long history may take longer than the lock lasts.
        tokio::select! {
            biased;
            loaded = &mut loading => return loaded,
            () = tokio::time::sleep(claimed.runner.terms.lock_timeout / 2) => {
                extend_lock(engine, claimed, engine.deadline()).await?;
            }
        }
    }
}

/// Whether a message was sent to another incarnation of this instance.
fn is_for_other_incarnation(document: &InstanceDocument, message: &MessageDocument) -> bool {
    !message.starts
        && message.incarnation.as_ref().is_some_and(|incarnation| *incarnation != document.origin.incarnation)
}

/// Adds the message that is inlined in the instance document, in its order. The fence proves it.
fn add_inlined(loaded: &mut Loaded, claimed: &mut ClaimedInstance) {
    let Some(document) = claimed.document.inlined_message() else { return };
    if is_for_other_incarnation(&claimed.document, &document) {
        // The next write of the document omits the message.
        claimed.document.take_inlined();
        return;
    }
    let at = loaded.messages.partition_point(|other| other.document.seq < document.seq);
    loaded.messages.insert(at, Versioned { document, etag: claimed.etag.clone() });
}

/// Extends the lock of a claim that is not handed out yet. Fails if another worker has taken the lock over.
async fn extend_lock(engine: &Engine, claimed: &mut ClaimedInstance, deadline: Deadline) -> Result<(), StoreError> {
    let partition = claimed.document.instance_id.clone();
    loop {
        let mut next = claimed.document.clone();
        let until = engine.clock.after(claimed.runner.terms.lock_timeout);
        next.lock(&claimed.token, until);
        let written = engine.store.replace(&partition, &instance_id(), &next, Some(&claimed.etag), deadline).await?;
        if let WriteOutcome::Done(etag) = written {
            (claimed.document, claimed.etag) = (next, etag);
            return Ok(());
        }
        claimed.refresh(engine, deadline).await?;
    }
}

/// The visible messages, if this process has enqueued all of them itself. Otherwise `None`. Messages that other
/// processes enqueue meanwhile stay in the queue for the next turn. If another worker has consumed one of the messages,
/// the commit fails.
fn known_messages(
    engine: &Engine,
    candidate: &TurnCandidate,
    claimed: &ClaimedInstance,
) -> Option<Vec<Versioned<MessageDocument>>> {
    let document = &claimed.document;
    // The messages of an earlier, uncommitted claim are in the queue too, and so are deferred ones.
    if candidate.must_query || document.claim.claims.len() > 1 || document.waiting.deferred {
        return None;
    }
    // Query regularly, or messages of other processes would wait for as long as this process sends some itself.
    if document.exists() && !engine.discovery.queried_recently(&candidate.partition) {
        return None;
    }
    // A turn of this process may have consumed a message while its candidate was queued.
    let waits = |m: &&Versioned<MessageDocument>| {
        m.document.due <= claimed.claimed_at && !engine.discovery.was_consumed(&candidate.partition, &m.document.id)
    };
    let mut visible: Vec<Versioned<MessageDocument>> = candidate.messages.iter().filter(waits).cloned().collect();
    visible.sort_by(|a, b| a.document.seq.cmp(&b.document.seq));
    visible.dedup_by(|a, b| a.document.id == b.document.id);
    let inlined = document.inlined_message();
    let mut all = visible.iter().map(|m| &m.document).chain(&inlined).peekable();
    let can_run = all.peek().is_some()
        && match document.exists() {
            // An ended execution runs only on a start.
            true => !document.execution_has_ended() || all.any(|m| m.starts),
            // Messages to a former incarnation may have been erased with it.
            false => all.all(|m| m.starts),
        };
    can_run.then_some(visible)
}

/// Deletes messages that no turn may consume. These are:
///
/// - copies of a consumed or inlined message, which a repeated request has written again,
/// - messages to another incarnation of this instance, which is deleted.
async fn delete_useless(engine: &Engine, claimed: &mut ClaimedInstance, loaded: &mut Loaded) -> Result<(), StoreError> {
    let ids = loaded.messages.iter().map(|m| &m.document.id);
    let again: HashSet<_> =
        loaded.contents.as_ref().map(|c| c.consumed.consumed(ids)).unwrap_or_default().into_iter().collect();
    let stranger = |m: &MessageDocument| is_for_other_incarnation(&claimed.document, m);
    let copy = |m: &MessageDocument| claimed.document.has_inlined(&m.id);
    let (useless, messages): (Vec<_>, Vec<_>) = std::mem::take(&mut loaded.messages)
        .into_iter()
        .partition(|m| again.contains(&m.document.id) || stranger(&m.document) || copy(&m.document));
    loaded.messages = messages;
    if useless.is_empty() {
        return Ok(());
    }
    info!(partition = %claimed.document.instance_id, messages = useless.len(), "deleting messages without a use");
    drop_messages(engine, claimed, &useless).await
}

/// Deletes messages that no turn can handle. The deletion is conditional on the instance document, which was the reason
/// for it, and on the ETag of each message.
pub(super) async fn drop_messages(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    messages: &[Versioned<MessageDocument>],
) -> Result<(), StoreError> {
    let deletion =
        |message: &Versioned<MessageDocument>| Operation::delete(message.document.id.clone(), Some(&message.etag));
    let chunks = messages.chunks(operation::MAX_OPERATIONS - 1).map(|chunk| chunk.iter().map(deletion).collect());
    change_messages(engine, claimed, chunks.collect()).await
}

/// Changes messages in batches of these operations. Each batch depends on the fence, and each operation on the ETag of
/// its message.
pub(super) async fn change_messages(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    chunks: Vec<Vec<Operation>>,
) -> Result<(), StoreError> {
    let deadline = engine.deadline();
    for mut chunk in chunks {
        while !chunk.is_empty() {
            let mut operations = vec![Operation::replace(instance_id(), &claimed.document, Some(&claimed.etag))?];
            operations.extend(chunk.iter().cloned());
            match engine.store.batch(&claimed.document.instance_id, &operations, deadline).await? {
                BatchOutcome::Committed(committed) => {
                    claimed.etag = committed.fence()?;
                    break;
                }
                BatchOutcome::RolledBack(back) if back.index > 0 && matches!(back.status, 404 | 412) => {
                    chunk.remove(back.index - 1);
                }
                BatchOutcome::RolledBack(_) => claimed.refresh(engine, deadline).await?,
            }
        }
    }
    Ok(())
}

/// The orchestration's name and version, from the instance document or from the first start. `None` if there is no turn
/// to run.
fn identity(document: &InstanceDocument, loaded: &Loaded, items: &[WorkItem]) -> Option<(String, String)> {
    if items.is_empty() {
        return None;
    }
    let unknown = || "unknown".to_owned();
    if document.exists() {
        let version = if document.current.version.is_empty() { unknown() } else { document.current.version.clone() };
        return Some((document.current.name.clone(), version));
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

/// Decides what happens if there is no turn to run. Messages to an instance that does not exist are deferred.
async fn decline(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    loaded: Loaded,
    items: &[WorkItem],
    scope: MessageScope,
) -> Result<TurnClaim, StoreError> {
    let (partition, deadline) = (claimed.document.instance_id.clone(), engine.deadline());
    debug!(instance_id = partition.instance_id(), messages = items.len(), "nothing to run, releasing the claim");
    forget_older_claims(engine, claimed, deadline).await?;
    if items.is_empty() {
        if claimed.document.waiting.deferred && scope == MessageScope::WithDeferred && !loaded.more {
            defer::clear_mark(engine, &mut claimed.document);
        }
        return Ok(TurnClaim::Nothing);
    }
    if claimed.document.is_placeholder()
        && !claimed.document.waiting.deferred
        && load::has_history(engine, &partition, deadline).await?
    {
        delay_lost(engine, claimed, loaded.messages).await?;
        return Ok(TurnClaim::Nothing);
    }
    defer::defer(engine, claimed, loaded, deadline).await?;
    Ok(TurnClaim::Deferred)
}

/// Delays the messages of an instance that has a history but has lost its document. They wait until the document is
/// repaired. The claim leaves no document that looks like an instance.
async fn delay_lost(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    mut messages: Vec<Versioned<MessageDocument>>,
) -> Result<(), StoreError> {
    /// After a repair the messages are visible within this time.
    const DELAY: Duration = Duration::from_secs(60);
    error!(
        instance_id = claimed.document.instance_id.instance_id(),
        messages = messages.len(),
        "an instance has lost its document, so its messages wait: run `duroxide-cosmos doctor --repair` on it"
    );
    for message in &mut messages {
        message.document.due = engine.clock.after(DELAY);
    }
    change_messages(engine, claimed, release::chunked(&messages)?).await
}

/// Forgets earlier claims of an instance that has neither a document nor a start. No turn of it was ever handed out, so
/// these claims belong to workers that died. Their document must be deleted with this claim, or it would remain for as
/// long as the messages do.
async fn forget_older_claims(
    engine: &Engine,
    claimed: &mut ClaimedInstance,
    deadline: Deadline,
) -> Result<(), StoreError> {
    let document = &mut claimed.document;
    let is_left = !document.exists() && document.commit.turn == 0 && document.claim.claims.len() > 1;
    if is_left && !load::has_start(engine, &document.instance_id, deadline).await? {
        document.forget_claims();
    }
    Ok(())
}

/// Registers the turn with the process and returns it to the dispatcher.
fn hand_out(engine: &Arc<Engine>, candidate: &TurnCandidate, claimed: ClaimedInstance, ready: Ready) -> TurnClaim {
    let partition = &candidate.partition;
    let ClaimedInstance { token, document, etag, claimed_at, runner, .. } = claimed;
    let Ready { mut taken, items, unreadable, contents, name, version, more } = ready;
    count_attempts(&document, &mut taken);
    let attempts = taken.iter().map(|m| m.document.attempts).max().unwrap_or(1);
    let kv = contents.as_ref().and_then(|c| c.kv.as_deref().cloned()).unwrap_or_default();
    if let Some(error) = &unreadable {
        warn!(instance_id = partition.instance_id(), error, "the history cannot be read");
    }
    engine.discovery.activities_ended(partition, &ended(candidate, &document, &taken, &items));
    let item = OrchestrationItem {
        instance: partition.instance_id().unwrap_or_default().to_owned(),
        orchestration_name: name.clone(),
        execution_id: document.current.execution,
        version: version.clone(),
        history: contents.as_ref().map(|c| c.history.as_ref().clone()).unwrap_or_default(),
        messages: items,
        history_error: unreadable.map(|error| format!("Failed to deserialize history: {error}")),
        kv_snapshot: snapshot(&document, &kv),
    };
    if let Some(contents) = &contents {
        // The contents are current while the lock is held, so reads of them need no request.
        let known = CachedInstance { document: document.clone(), etag: etag.clone(), contents: Some(contents.clone()) };
        engine.cache.put(partition, known);
    }
    let until = document.claim.lock.as_ref().map_or(0, |lock| lock.until);
    let (whole, phase) = (!more, TurnPhase::Open);
    // The remaining messages queue behind the last one taken, because other instances have waited longer.
    let last = taken.iter().map(|taken| &taken.document).rfind(|message| !message.starts);
    let rest = more.then(|| last.map_or_else(String::new, |last| last.seq.clone()));
    let state = TurnState { document, etag, until, runner, taken, whole, kv, contents, name, version, phase };
    engine.discovery.keep_undue(candidate, claimed_at);
    engine.discovery.messages_taken(partition, state.taken.iter().map(|taken| &taken.document.id), until);
    let handle = TurnHandle { token: token.clone(), partition: partition.clone(), state: state.into() };
    engine.turns.insert(token.clone(), Arc::new(handle));
    if let Some(rest) = rest {
        engine.discovery.offer_remaining(partition, rest);
    }
    TurnClaim::Turn(Box::new((item, token, attempts)))
}

/// The activities that the turn's messages report as completed. Empty if this process wrote all these messages, since
/// it then knows of the completions already.
fn ended(
    candidate: &TurnCandidate,
    document: &InstanceDocument,
    taken: &[Versioned<MessageDocument>],
    items: &[WorkItem],
) -> BTreeSet<DocumentId> {
    let claimed: BTreeSet<&DocumentId> = candidate.messages.iter().map(|message| &message.document.id).collect();
    // This process also wrote an inlined message whose first claim this is.
    let is_ours =
        |id: &DocumentId| claimed.contains(id) || (document.has_inlined(id) && document.claim.claims.len() == 1);
    if taken.iter().all(|message| is_ours(&message.document.id)) {
        return BTreeSet::new();
    }
    let ended = items.iter().filter_map(|item| match item {
        WorkItem::ActivityCompleted { execution_id, id, .. } | WorkItem::ActivityFailed { execution_id, id, .. } => {
            Some(ActivityDocument::scheduled_id(*execution_id, *id))
        }
        _ => None,
    });
    ended.collect()
}

/// Adds to each message's attempts the claims since the message became visible, including this one.
fn count_attempts(document: &InstanceDocument, messages: &mut [Versioned<MessageDocument>]) {
    for Versioned { document: message, .. } in messages {
        let visible = message.created_at.max(message.due);
        message.attempts = message.attempts.saturating_add(document.claims_since(visible).max(1));
    }
}

/// The values at the start of the execution. The runtime gets the execution's own writes from its history.
fn snapshot(document: &InstanceDocument, kv: &BTreeMap<String, KvDocument>) -> HashMap<String, KvEntry> {
    kv.values()
        .filter_map(|value| {
            let base = value.snapshot(document.commit.epoch)?;
            Some((value.key.clone(), KvEntry { value: base.value, last_updated_at_ms: base.at }))
        })
        .collect()
}

/// The longest time that a claim with this lock timeout may take. Later the turn is of no use to the caller.
pub(crate) fn claim_time(engine: &Engine, lock_timeout: Duration) -> Duration {
    /// Tests use locks that are shorter than a request may take.
    const SHORTEST: Duration = Duration::from_secs(1);
    lock_timeout.max(SHORTEST).min(engine.config.operation_timeout())
}
