//! What a claim protects, made into a turn and handed out, or given back.
//!
//! Invariants: what is handed out has at least half of its lock left; messages that this process only remembers are handed
//! out with the ETags under which the commit must find them; a claim that comes to nothing is not counted.

use super::{
    cache::{Contents, Known},
    claim::{Ours, TurnClaim},
    defer, instance_id,
    load::{self, Loaded, Sight},
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

/// Loads what the claim protects and hands the turn out, or gives it back.
pub(crate) async fn open(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    mut ours: Ours,
) -> Result<TurnClaim, StoreError> {
    match prepare(engine, candidate, &mut ours).await {
        Ok(Prepared::Turn(ready)) => Ok(hand_out(engine, candidate, ours, *ready)),
        Ok(Prepared::Declined(outcome)) => {
            let (partition, token, until) = (&candidate.partition, ours.token, lock_end(&ours.document));
            let deadline = engine.deadline();
            let undone = release::undo_claim(engine, partition, &token, ours.document, ours.etag, deadline).await;
            if let Err(error) = undone {
                release::release_claim_later(engine, partition, token, until, engine.clock.after(error.pause()));
                return Err(error);
            }
            Ok(outcome)
        }
        Err(error) => {
            let (until, due) = (lock_end(&ours.document), engine.clock.after(error.pause()));
            release::release_claim_later(engine, &candidate.partition, ours.token, until, due);
            Err(error)
        }
    }
}

/// When the lock of a claim ends.
fn lock_end(document: &InstanceDocument) -> Millis {
    document.lock.as_ref().map_or(0, |lock| lock.until)
}

/// What became of a claim once its contents were known.
enum Prepared {
    Turn(Box<Ready>),
    /// There is no turn to run.
    Declined(TurnClaim),
}

/// A turn that can be handed out.
struct Ready {
    taken: Vec<Versioned<MessageDocument>>,
    items: Vec<WorkItem>,
    /// Why the history can't be read.
    unreadable: Option<String>,
    contents: Option<Contents>,
    name: String,
    version: String,
    more: bool,
}

async fn prepare(engine: &Arc<Engine>, candidate: &TurnCandidate, ours: &mut Ours) -> Result<Prepared, StoreError> {
    if !ours.document.staging.is_empty() {
        staging::sweep(engine, ours, engine.deadline()).await?;
    }
    // What is deferred is of no interest to a name that nobody has started, and may be much.
    let all = ours.document.deferred
        && (ours.document.exists() || candidate.starts || defer::is_over(engine, &ours.document));
    let mut sight = if all { Sight::Parked } else { Sight::Visible };
    loop {
        let mut loaded = contents_of(engine, candidate, ours, sight).await?;
        discard(engine, ours, &mut loaded).await?;
        add_inlined(&mut loaded, ours);
        let items = unknown::set_aside(engine, ours, &mut loaded).await?;
        match identity(&ours.document, &loaded, &items) {
            None => return decline(engine, ours, loaded, &items, sight).await.map(Prepared::Declined),
            Some(_) if ours.document.deferred && sight == Sight::Visible => sight = Sight::Parked,
            // Others may take the place of those that are dropped.
            Some(_) if defer::drop_orphans(engine, ours, &mut loaded).await? => {}
            Some(identity) => return ready(engine, ours, loaded, items, identity).await,
        }
    }
}

/// A turn with what was loaded for it, and enough of its lock left.
async fn ready(
    engine: &Engine,
    ours: &mut Ours,
    loaded: Loaded,
    items: Vec<WorkItem>,
    (name, version): (String, String),
) -> Result<Prepared, StoreError> {
    let lock_left = ours.document.lock.as_ref().map_or(0, |lock| lock.until.saturating_sub(engine.now()));
    if lock_left < millis(ours.runner.terms.lock_timeout) / 2 {
        keep_lock(engine, ours, engine.deadline()).await?;
    }
    let (contents, unreadable) = match loaded.contents {
        Ok(contents) => (Some(contents), None),
        Err(error) => (None, Some(error)),
    };
    let (mut taken, more) = (loaded.messages, loaded.more);
    for Versioned { document: message, .. } in taken.iter_mut().filter(|m| m.document.is_deferred()) {
        // It has been visible since it came.
        (message.due, message.orphan_since) = (message.created_at, None);
    }
    Ok(Prepared::Turn(Box::new(Ready { taken, items, unreadable, contents, name, version, more })))
}

/// Messages, history and values: from memory where the claim has proved it, or else from the service.
async fn contents_of(
    engine: &Arc<Engine>,
    candidate: &TurnCandidate,
    ours: &mut Ours,
    sight: Sight,
) -> Result<Loaded, StoreError> {
    let warm = ours.contents.take().filter(|contents| contents.kv.is_some());
    let warm = warm.or_else(|| ours.document.is_placeholder().then(load::nothing));
    if let (Some(messages), Some(contents)) = (known_messages(engine, candidate, ours), &warm) {
        if !ours.document.exists() {
            engine.discovery.asked(&candidate.partition);
        }
        let mut more = false;
        let messages = load::in_order(messages, &mut more);
        return Ok(Loaded { messages, unknown: UnknownMessages::default(), more, contents: Ok(contents.clone()) });
    }
    engine.discovery.asked(&candidate.partition);
    let is_warm = warm.is_some();
    let mut loaded = load(engine, ours, warm, sight, false).await?;
    let mut pause = FIRST_PAUSE;
    // What is warm was proved by the claim, and may be long.
    let lacks = |loaded: &Loaded, ours: &Ours| (!is_warm).then(|| loaded.lacks(&ours.document.events)).flatten();
    while let Some(lacks) = lacks(&loaded, ours) {
        if pause > LAST_PAUSE {
            // It is not there, wherever it is asked for.
            return Ok(Loaded { contents: Err(lacks), ..loaded });
        }
        debug!(
            instance_id = candidate.partition.instance_id(),
            lacks, "a replica that lags has answered: asking again"
        );
        tokio::time::sleep(pause).await;
        pause *= 2;
        loaded = load(engine, ours, None, sight, true).await?;
    }
    Ok(loaded)
}

/// How long a history that is not what the instance's document says is waited for, a replica that lags having answered: 100 ms, then
/// twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_millis(1_600);

/// Asks the service for what the claim protects, and keeps the lock meanwhile. Who insists filter what was committed, not what a replica has
/// heard of.
async fn load(
    engine: &Engine,
    ours: &mut Ours,
    warm: Option<Contents>,
    sight: Sight,
    insists: bool,
) -> Result<Loaded, StoreError> {
    let (partition, execution) = (ours.document.instance_id.clone(), ours.document.execution);
    let loading = load::load(engine, &partition, execution, warm, ours.claimed_at, (sight, insists));
    tokio::pin!(loading);
    loop {
        // A long history may take longer than the lock incarnations.
        tokio::select! {
            biased;
            loaded = &mut loading => return loaded,
            () = tokio::time::sleep(ours.runner.terms.lock_timeout / 2) => keep_lock(engine, ours, engine.deadline()).await?,
        }
    }
}

/// Whether a message was meant for another instance of this name.
fn is_stranger(document: &InstanceDocument, message: &MessageDocument) -> bool {
    !message.starts && message.incarnation.as_ref().is_some_and(|incarnation| *incarnation != document.incarnation)
}

/// The message that the instance's document has_inlined comes with the others, in its place. The fence proves it.
fn add_inlined(loaded: &mut Loaded, ours: &mut Ours) {
    let Some(document) = ours.document.inlined_message() else { return };
    if is_stranger(&ours.document, &document) {
        // The next write of the document, whatever it is, leaves it out.
        ours.document.take_inlined();
        return;
    }
    let at = loaded.messages.partition_point(|other| other.document.seq < document.seq);
    loaded.messages.insert(at, Versioned { document, etag: ours.etag.clone() });
}

/// Extends the lock of a claim that is not handed out yet. An error where it was taken over meanwhile.
async fn keep_lock(engine: &Engine, ours: &mut Ours, deadline: Deadline) -> Result<(), StoreError> {
    let partition = ours.document.instance_id.clone();
    loop {
        let mut next = ours.document.clone();
        let until = engine.clock.after(ours.runner.terms.lock_timeout);
        next.hold(&ours.token, until);
        let written = engine.store.replace(&partition, &instance_id(), &next, Some(&ours.etag), deadline).await?;
        if let WriteOutcome::Done(etag) = written {
            (ours.document, ours.etag) = (next, etag);
            return Ok(());
        }
        ours.look_again(engine, deadline).await?;
    }
}

/// The visible messages, where this process has put them all into the queue itself. Others may have come from elsewhere in
/// the meantime: they stay in the queue for the next turn. Some may have been consumed: the commit finds out.
fn known_messages(engine: &Engine, candidate: &TurnCandidate, ours: &Ours) -> Option<Vec<Versioned<MessageDocument>>> {
    let document = &ours.document;
    // After a claim that was not committed, its messages are in the queue too; so are those that are deferred.
    if candidate.ask || document.claims.len() > 1 || document.deferred {
        return None;
    }
    // What others send must not wait for as long as this process has something to say.
    if document.exists() && !engine.discovery.has_asked(&candidate.partition) {
        return None;
    }
    // A turn of this process may have taken one from the queue while its candidate was waiting.
    let waits = |m: &&Versioned<MessageDocument>| {
        m.document.due <= ours.claimed_at && !engine.discovery.was_consumed(&candidate.partition, &m.document.id)
    };
    let mut visible: Vec<Versioned<MessageDocument>> = candidate.messages.iter().filter(waits).cloned().collect();
    visible.sort_by(|a, b| a.document.seq.cmp(&b.document.seq));
    visible.dedup_by(|a, b| a.document.id == b.document.id);
    let inlined = document.inlined_message();
    let mut all = visible.iter().map(|m| &m.document).chain(&inlined).peekable();
    let can_run = all.peek().is_some()
        && match document.exists() {
            // An execution that has ended runs on nothing but a start.
            true => !document.execution_has_ended() || all.any(|m| m.starts),
            // What a former instance of this name was sent may have been erased with it.
            false => all.all(|m| m.starts),
        };
    can_run.then_some(visible)
}

/// Removes messages that are not for this turn or any other: copies of what was consumed before or is inlined, which a repeated
/// request has written again, and what was meant for another instance of this name, which was deleted.
async fn discard(engine: &Engine, ours: &mut Ours, loaded: &mut Loaded) -> Result<(), StoreError> {
    let ids = loaded.messages.iter().map(|m| &m.document.id);
    let again: HashSet<_> =
        loaded.contents.as_ref().map(|c| c.consumed.consumed(ids)).unwrap_or_default().into_iter().collect();
    let stranger = |m: &MessageDocument| is_stranger(&ours.document, m);
    let copy = |m: &MessageDocument| ours.document.has_inlined(&m.id);
    let (ghosts, messages): (Vec<_>, Vec<_>) = std::mem::take(&mut loaded.messages)
        .into_iter()
        .partition(|m| again.contains(&m.document.id) || stranger(&m.document) || copy(&m.document));
    loaded.messages = messages;
    if ghosts.is_empty() {
        return Ok(());
    }
    info!(partition = %ours.document.instance_id, messages = ghosts.len(), "dropping messages that were consumed before");
    drop_messages(engine, ours, &ghosts).await
}

/// Removes messages that can never be handled: under the fence, since what they were judged by is the instance's document, and
/// each as long as it is the very one that was judged.
pub(super) async fn drop_messages(
    engine: &Engine,
    ours: &mut Ours,
    messages: &[Versioned<MessageDocument>],
) -> Result<(), StoreError> {
    let deletion =
        |message: &Versioned<MessageDocument>| Operation::delete(message.document.id.clone(), Some(&message.etag));
    let chunks = messages.chunks(operation::MAX_OPERATIONS - 1).map(|chunk| chunk.iter().map(deletion).collect());
    change_messages(engine, ours, chunks.collect()).await
}

/// Changes messages under the fence, each as long as it is the very one that was loaded, in batches of these operations.
pub(super) async fn change_messages(
    engine: &Engine,
    ours: &mut Ours,
    chunks: Vec<Vec<Operation>>,
) -> Result<(), StoreError> {
    let deadline = engine.deadline();
    for mut chunk in chunks {
        while !chunk.is_empty() {
            let mut operations = vec![Operation::replace(instance_id(), &ours.document, Some(&ours.etag))?];
            operations.extend(chunk.iter().cloned());
            match engine.store.batch(&ours.document.instance_id, &operations, deadline).await? {
                BatchOutcome::Committed(committed) => {
                    ours.etag = committed.fence()?;
                    break;
                }
                BatchOutcome::RolledBack(back) if back.index > 0 && matches!(back.status, 404 | 412) => {
                    chunk.remove(back.index - 1);
                }
                BatchOutcome::RolledBack(_) => ours.look_again(engine, deadline).await?,
            }
        }
    }
    Ok(())
}

/// The orchestration's name and version: what is stored, or what the first start says. None where there is no turn.
fn identity(document: &InstanceDocument, loaded: &Loaded, items: &[WorkItem]) -> Option<(String, String)> {
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

/// Why there is no turn. Messages for an instance that does not exist are deferred.
async fn decline(
    engine: &Engine,
    ours: &mut Ours,
    loaded: Loaded,
    items: &[WorkItem],
    sight: Sight,
) -> Result<TurnClaim, StoreError> {
    let (partition, deadline) = (ours.document.instance_id.clone(), engine.deadline());
    debug!(instance_id = partition.instance_id(), messages = items.len(), "nothing to run: giving the claim back");
    forget_older_claims(engine, ours, deadline).await?;
    if items.is_empty() {
        if ours.document.deferred && sight == Sight::Parked && !loaded.more {
            defer::nothing_is_left(engine, &mut ours.document);
        }
        return Ok(TurnClaim::Nothing);
    }
    if ours.document.is_placeholder()
        && !ours.document.deferred
        && load::has_history(engine, &partition, deadline).await?
    {
        put_off_lost(engine, ours, loaded.messages).await?;
        return Ok(TurnClaim::Nothing);
    }
    defer::defer(engine, ours, loaded, deadline).await?;
    Ok(TurnClaim::Waiting)
}

/// Messages of an instance that has a history and has lost its document wait until somebody has repaired it. Nothing is left
/// behind that looks like an instance.
async fn put_off_lost(
    engine: &Engine,
    ours: &mut Ours,
    mut messages: Vec<Versioned<MessageDocument>>,
) -> Result<(), StoreError> {
    /// Whoever repairs it waits no longer than this for its messages.
    const PUT_OFF: Duration = Duration::from_secs(60);
    error!(
        instance_id = ours.document.instance_id.instance_id(),
        messages = messages.len(),
        "an instance has lost its document, and its messages wait: run `doctor --repair` on it"
    );
    for message in &mut messages {
        message.document.due = engine.clock.after(PUT_OFF);
    }
    change_messages(engine, ours, release::chunked(&messages)?).await
}

/// Where there is no instance and no start, nothing was ever handed out, and claims that were not given back are those of workers
/// that died: the document that they made goes with this one, or it would stay for as long as the messages do.
async fn forget_older_claims(engine: &Engine, ours: &mut Ours, deadline: Deadline) -> Result<(), StoreError> {
    let document = &mut ours.document;
    let is_left = !document.exists() && document.turn == 0 && document.claims.len() > 1;
    if is_left && !load::has_start(engine, &document.instance_id, deadline).await? {
        document.forget_claims();
    }
    Ok(())
}

fn hand_out(engine: &Arc<Engine>, candidate: &TurnCandidate, ours: Ours, ready: Ready) -> TurnClaim {
    let partition = &candidate.partition;
    let Ours { token, document, etag, claimed_at, runner, .. } = ours;
    let Ready { mut taken, items, unreadable, contents, name, version, more } = ready;
    count_attempts(&document, &mut taken);
    let attempts = taken.iter().map(|m| m.document.attempts).max().unwrap_or(1);
    let kv = contents.as_ref().and_then(|c| c.kv.as_deref().cloned()).unwrap_or_default();
    if let Some(error) = &unreadable {
        warn!(instance_id = partition.instance_id(), error, "the history can't be read");
    }
    engine.discovery.activities_ended(partition, &ended(candidate, &document, &taken, &items));
    let item = OrchestrationItem {
        instance: partition.instance_id().unwrap_or_default().to_owned(),
        orchestration_name: name.clone(),
        execution_id: document.execution,
        version: version.clone(),
        history: contents.as_ref().map(|c| c.history.as_ref().clone()).unwrap_or_default(),
        messages: items,
        history_error: unreadable.map(|error| format!("Failed to deserialize history: {error}")),
        kv_snapshot: snapshot(&document, &kv),
    };
    if let Some(contents) = &contents {
        // While the lock is held, this is what there is: reads of it cost nothing.
        let known = Known { document: document.clone(), etag: etag.clone(), contents: Some(contents.clone()) };
        engine.cache.put(partition, known);
    }
    let until = document.lock.as_ref().map_or(0, |lock| lock.until);
    let (whole, phase) = (!more, TurnPhase::Open);
    // What is left comes after the last that was taken: others have waited longer.
    let last = taken.iter().map(|taken| &taken.document).rfind(|message| !message.starts);
    let rest = more.then(|| last.map_or_else(String::new, |last| last.seq.clone()));
    let state = TurnState { document, etag, until, runner, taken, whole, kv, contents, name, version, phase };
    engine.discovery.keep_rest(candidate, claimed_at);
    engine.discovery.taken(partition, state.taken.iter().map(|taken| &taken.document.id), until);
    let handle = TurnHandle { token: token.clone(), partition: partition.clone(), state: state.into() };
    engine.turns.insert(token.clone(), Arc::new(handle));
    if let Some(rest) = rest {
        engine.discovery.offer_rest(partition, rest);
    }
    TurnClaim::Turn(Box::new((item, token, attempts)))
}

/// The activities that have ended, as the messages of a turn say, where others may have run some of them.
fn ended(
    candidate: &TurnCandidate,
    document: &InstanceDocument,
    taken: &[Versioned<MessageDocument>],
    items: &[WorkItem],
) -> BTreeSet<DocumentId> {
    let ours: BTreeSet<&DocumentId> = candidate.messages.iter().map(|message| &message.document.id).collect();
    // What is inlined, and claimed for the first time, is this process's as well.
    let is_ours = |id: &DocumentId| ours.contains(id) || (document.has_inlined(id) && document.claims.len() == 1);
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

/// Counts this attempt: the claims that each message has seen since it became visible.
fn count_attempts(document: &InstanceDocument, messages: &mut [Versioned<MessageDocument>]) {
    for Versioned { document: message, .. } in messages {
        let visible = message.created_at.max(message.due);
        message.attempts = message.attempts.saturating_add(document.claims_since(visible).max(1));
    }
}

/// The values as the execution found them: what it wrote itself comes from its own history.
fn snapshot(document: &InstanceDocument, kv: &BTreeMap<String, KvDocument>) -> HashMap<String, KvEntry> {
    kv.values()
        .filter_map(|value| {
            let base = value.snapshot(document.epoch)?;
            Some((value.key.clone(), KvEntry { value: base.value, last_updated_at_ms: base.at }))
        })
        .collect()
}

/// How long a claim with such a lock may take before it is worth nothing to its caller.
pub(crate) fn claim_time(engine: &Engine, lock_timeout: Duration) -> Duration {
    /// Locks of tests are shorter than a request may take.
    const SHORTEST: Duration = Duration::from_secs(1);
    lock_timeout.max(SHORTEST).min(engine.config.operation_timeout())
}
