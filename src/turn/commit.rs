//! Committing a turn: all of it, exactly once, or nothing.
//!
//! The batch that replaces the instance's document is the commit. A turn that fits goes with it; of one that does not, the
//! operations are staged first (see [`staging`]). Whatever the service answers, [`verify`] reads what happened: the
//! document remembers the last token that it committed.

use super::{
    cache::Known,
    failure, instance_id, load, lock_lost,
    plan::{self, Ack, TurnPlan, Unplannable},
    release, staging, TurnHandle, TurnPhase, TurnState, ROOM,
};
use crate::model::operation;
use crate::{
    cosmos::{BatchOutcome, Committed, Deadline, Freshness, RolledBack, StoreError, Versioned},
    discovery,
    engine::Engine,
    model::{kind, ActivityDocument, DocumentId, ExecutionDocument, IntentDocument, Operation},
    outbox,
    queue::{commit_claims::CommitClaims, WaitingFetch},
};
use azure_core::http::Etag;
use duroxide::providers::ProviderError;
use std::sync::Arc;
use tracing::{debug, warn};

const OPERATION: &str = "ack_orchestration_item";

/// Commits a turn.
pub(crate) async fn commit(engine: &Arc<Engine>, token: &str, mut ack: Ack) -> Result<(), ProviderError> {
    failure::shorten(&mut ack);
    let handle = engine.turns.get(token).map(|entry| entry.value().clone());
    let handle = handle.ok_or_else(|| lock_lost(OPERATION, "it is not held here"))?;
    let mut state = handle.state.lock().await;
    match state.phase {
        TurnPhase::Closed => return Err(lock_lost(OPERATION, "the turn has ended")),
        TurnPhase::Aborted => return settle_given_up(engine, &handle, &mut state).await,
        TurnPhase::Open => {}
    }
    if state.until <= engine.now() {
        // Refused from now on, also if the clock is set back: the runtime may send a failure with this token next.
        state.phase = TurnPhase::Aborted;
        return Err(lock_lost(OPERATION, "the lock has expired"));
    }
    failure::tell_parent(engine, &state, &mut ack).await.map_err(|error| error.into_provider_error(OPERATION))?;
    let outcome = attempt(engine, &handle, &mut state, &ack).await;
    finish(engine, &handle, &mut state, outcome).await
}

/// How a commit ended.
enum CommitOutcome {
    /// It is there, with this document and what it left to deliver.
    Committed(Box<Done>),
    /// Another token has the lock.
    Lost,
    /// A message that the turn ran on is not in the queue any more, or is not the one that it was.
    Overtaken(Overtaken),
}

/// A message that is not as the turn knew it.
struct Overtaken {
    message: DocumentId,
    /// It is gone. Otherwise it has changed: it is a marker now, or waits with another time.
    gone: bool,
}

struct Done {
    plan: TurnPlan,
    /// The document's, where the service said so: only then is it as planned.
    etag: Option<Etag>,
    ack_events: Vec<duroxide::Event>,
    foreign_cancellations: Vec<duroxide::providers::ScheduledActivityIdentifier>,
    staged: bool,
    /// What it has claimed for those who wait.
    handed: CommitClaims,
}

/// Why a commit did not end.
enum Trouble {
    Store(StoreError),
    Refused(ProviderError),
}

impl From<StoreError> for Trouble {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

async fn attempt(
    engine: &Arc<Engine>,
    handle: &TurnHandle,
    state: &mut TurnState,
    ack: &Ack,
) -> Result<CommitOutcome, Trouble> {
    let mut gone: Vec<String> = Vec::new();
    let mut staged = false;
    let mut handed = CommitClaims::new(engine, handle, state, ack);
    loop {
        let deadline = engine.deadline_at(state.until);
        let older = older_execution(engine, handle, state, ack).await?;
        let mut plan =
            plan::plan(engine, &handle.partition, &handle.token, state, ack, older.clone(), &handed.activities)
                .map_err(|unplannable| refuse(handle, unplannable))?;
        plan.operations.retain(|operation| !gone.iter().any(|id| id == operation.document_id()));
        if !plan.document.staging.is_empty() {
            // What an earlier ack with this token has staged in vain: somebody must look at it, also if no message comes.
            plan.document.due = Some(engine.now() + staging::TAKEOVER_AFTER);
        }
        handed.lock(&mut plan.document, &mut plan.operations);
        if !fits(&plan) && !handed.is_empty() {
            // What is staged is visible later than it would be locked.
            handed.withdraw();
            continue;
        }
        let sent = if fits(&plan) {
            handed.sent(&plan.document, &state.etag, state.until);
            send(engine, handle, state, &plan, &plan.operations, deadline).await
        } else {
            staged = true;
            stage_consumption(&mut plan);
            match staging::stage(engine, handle, state, &plan.operations).await? {
                staging::Staged::Done(roll_forward) => {
                    // The fence has moved with every part, over what others have written to the document meanwhile: a
                    // pruning, the counters. So the document is planned again, from the one whose ETag is sent.
                    plan.document =
                        plan::plan_document(engine, &handle.partition, &handle.token, state, ack, older.clone())
                            .map_err(|unplannable| refuse(handle, unplannable))?;
                    // What was staged in vain is left to be swept.
                    plan.document.staging.retain(|other| other.key != roll_forward.key);
                    plan.document.roll_forward = Some(roll_forward);
                    plan.document.due = Some(engine.now() + staging::TAKEOVER_AFTER);
                    send(engine, handle, state, &plan, &[], engine.deadline_at(state.until)).await
                }
                staging::Staged::Lost => return Ok(CommitOutcome::Lost),
            }
        };
        let rolled_back = match sent? {
            BatchOutcome::Committed(committed) => {
                handed.done(&plan.operations, &committed, 1 + plan.consumption.len());
                return Ok(done(engine, handle, plan, ack, (committed.etag(0).cloned(), &committed), staged, handed));
            }
            BatchOutcome::RolledBack(rolled_back) => rolled_back,
        };
        if let Some(ids) = missing(&plan, &rolled_back) {
            debug!(instance_id = handle.partition.instance_id(), ?ids, "gone before the turn was committed");
            gone.extend(ids);
            continue;
        }
        let nothing = Committed { etags: Vec::new() };
        match verify(engine, handle, state, deadline).await? {
            // Others may have changed the document since, so that what is planned of it is not what is there.
            CommitCheck::Committed => {
                handed.done(&plan.operations, &nothing, 0);
                return Ok(done(engine, handle, plan, ack, (None, &nothing), staged, handed));
            }
            CommitCheck::StillOurs if rolled_back.index == 0 && matches!(rolled_back.status, 404 | 412) => {}
            CommitCheck::StillOurs => {
                handed.withdraw();
                return match overtaken(&plan, &rolled_back) {
                    Some(overtaken) => Ok(CommitOutcome::Overtaken(overtaken)),
                    None => Err(odd(handle, &plan, &rolled_back)),
                };
            }
            CommitCheck::Lost if left_its_history(engine, handle, &plan, deadline).await? => {
                handed.done(&plan.operations, &nothing, 0);
                return Ok(done(engine, handle, plan, ack, (None, &nothing), staged, handed));
            }
            CommitCheck::Lost => {
                handed.withdraw();
                return Ok(CommitOutcome::Lost);
            }
        }
        if engine.now() >= state.until {
            return Err(StoreError::Unavailable { detail: "the lock expired before the commit".to_owned() }.into());
        }
    }
}

/// The document of an execution that is not the current one, for an ack that ends it late.
async fn older_execution(
    engine: &Engine,
    handle: &TurnHandle,
    state: &TurnState,
    ack: &Ack,
) -> Result<Option<ExecutionDocument>, StoreError> {
    let is_older = state.document.exists() && ack.execution < state.document.execution;
    if !is_older || ack.metadata.status.is_none() || state.document.pruning.contains(&ack.execution) {
        return Ok(None);
    }
    let id = ExecutionDocument::document_id(ack.execution);
    let deadline = engine.deadline_at(state.until);
    let found = engine.store.read(&handle.partition, &id, Freshness::Authoritative, deadline).await?;
    Ok(found.map(|Versioned { document, .. }| document))
}

fn refuse(handle: &TurnHandle, unplannable: Unplannable) -> Trouble {
    let instance = handle.partition.instance_id().unwrap_or_default();
    match unplannable {
        Unplannable::Store(error) => Trouble::Store(error),
        Unplannable::DuplicateEvent(id) => Trouble::Refused(ProviderError::permanent(
            OPERATION,
            format!("Failed to append history: instance {instance:?} already has an event with id {id}"),
        )),
        Unplannable::Target(detail) => Trouble::Refused(ProviderError::permanent(OPERATION, detail)),
    }
}

fn fits(plan: &TurnPlan) -> bool {
    let operations = || plan.consumption.iter().chain(&plan.operations);
    let bytes: usize = operations().map(Operation::size).sum();
    operations().count() < operation::MAX_OPERATIONS && bytes + ROOM <= operation::MAX_BYTES
}

/// More messages than a batch takes can't be consumed by the commit itself. They were loaded under the claim, which proves
/// them as long as the fence holds: memory keeps fewer.
fn stage_consumption(plan: &mut TurnPlan) {
    if plan.consumption.len() >= operation::MAX_OPERATIONS {
        plan.operations.append(&mut plan.consumption);
    }
}

/// One batch with the instance's document first, so that a lost fence is what it fails for; then what proves that the turn ran
/// on what is in the queue.
async fn send(
    engine: &Engine,
    handle: &TurnHandle,
    state: &TurnState,
    plan: &TurnPlan,
    operations: &[Operation],
    deadline: Deadline,
) -> Result<BatchOutcome, StoreError> {
    let mut whole = Vec::with_capacity(plan.consumption.len() + operations.len() + 1);
    whole.push(Operation::replace(instance_id(), &plan.document, Some(&state.etag))?);
    whole.extend(plan.consumption.iter().chain(operations).cloned());
    engine.store.batch(&handle.partition, &whole, deadline).await
}

/// An activity that a cancellation did not find, with its input: a worker has finished it in the meantime.
fn missing(plan: &TurnPlan, rolled_back: &RolledBack) -> Option<Vec<String>> {
    match plan.operation(rolled_back.index)? {
        Operation::Delete { id, .. } if rolled_back.status == 404 && ActivityDocument::is_activity_id(id) => {
            let work = id.as_str().strip_prefix("p:").unwrap_or(id.as_str());
            Some(vec![work.to_owned(), format!("p:{work}")])
        }
        _ => None,
    }
}

/// The message that the turn ran on and that is not in the queue any more: what this process remembered of it was overtaken.
fn overtaken(plan: &TurnPlan, rolled_back: &RolledBack) -> Option<Overtaken> {
    let consumption = plan.consumption.get(rolled_back.index.checked_sub(1)?)?;
    let message = DocumentId::try_from(consumption.document_id().to_owned()).ok()?;
    let gone = rolled_back.status == 404;
    (gone || rolled_back.status == 412).then_some(Overtaken { message, gone })
}

fn odd(handle: &TurnHandle, plan: &TurnPlan, rolled_back: &RolledBack) -> Trouble {
    let document = plan.operation(rolled_back.index).map_or("the instance", Operation::document_id);
    let instance = handle.partition.instance_id().unwrap_or_default();
    let detail = format!("document {document} of instance {instance:?} was answered {}", rolled_back.status);
    Trouble::Refused(ProviderError::permanent(OPERATION, detail))
}

enum CommitCheck {
    Committed,
    StillOurs,
    Lost,
}

/// Reads what became of the turn.
async fn verify(
    engine: &Engine,
    handle: &TurnHandle,
    state: &mut TurnState,
    deadline: Deadline,
) -> Result<CommitCheck, StoreError> {
    let found = engine.read_latest(&handle.partition, deadline).await?;
    let Some(found) = found else { return Ok(CommitCheck::Lost) };
    if found.document.last_turn.as_deref() == Some(handle.token.as_str()) {
        return Ok(CommitCheck::Committed);
    }
    if found.document.held_by(&handle.token) {
        state.refresh(found);
        return Ok(CommitCheck::StillOurs);
    }
    Ok(CommitCheck::Lost)
}

/// Whether the turn was committed before others committed theirs: its events are there, under its token.
async fn left_its_history(
    engine: &Engine,
    handle: &TurnHandle,
    plan: &TurnPlan,
    deadline: Deadline,
) -> Result<bool, StoreError> {
    let history = plan.operations.iter().find_map(|operation| match operation {
        Operation::Create { document } if document.get("type").is_some_and(|t| t == kind::HISTORY) => {
            DocumentId::try_from(operation.document_id().to_owned()).ok()
        }
        _ => None,
    });
    let Some(id) = history else { return Ok(false) };
    let freshness = Freshness::Authoritative;
    let found = engine.store.read::<serde_json::Value>(&handle.partition, &id, freshness, deadline).await?;
    Ok(found.is_some())
}

fn done(
    engine: &Arc<Engine>,
    handle: &TurnHandle,
    plan: TurnPlan,
    ack: &Ack,
    (etag, committed): (Option<Etag>, &Committed),
    staged: bool,
    handed: CommitClaims,
) -> CommitOutcome {
    if !staged {
        discovery::announce(engine, &handle.partition, &plan.operations, committed, 1 + plan.consumption.len());
    }
    let foreign_cancellations =
        ack.cancelled.iter().filter(|a| Some(a.instance.as_str()) != handle.partition.instance_id()).cloned().collect();
    let ack_events = ack.events.clone();
    CommitOutcome::Committed(Box::new(Done { plan, etag, ack_events, foreign_cancellations, staged, handed }))
}

async fn finish(
    engine: &Arc<Engine>,
    handle: &TurnHandle,
    state: &mut TurnState,
    outcome: Result<CommitOutcome, Trouble>,
) -> Result<(), ProviderError> {
    match outcome {
        Ok(CommitOutcome::Committed(done)) => {
            release::close(engine, handle, state);
            engine.discovery.consumed(&handle.partition, state.taken.iter().map(|taken| &taken.document.id));
            after_commit(engine, handle, state, *done).await;
            Ok(())
        }
        Ok(CommitOutcome::Lost) => {
            release::close(engine, handle, state);
            engine.cache.forget(&handle.partition);
            release::forget_turn(engine, handle, state);
            Err(lock_lost(OPERATION, "the lock was taken over; nothing was changed"))
        }
        Ok(CommitOutcome::Overtaken(Overtaken { message, gone })) => {
            release::forget_turn(engine, handle, state);
            release::close(engine, handle, state);
            warn!(instance_id = handle.partition.instance_id(), %message, gone, "a turn ran on a message of the past");
            if gone {
                engine.discovery.consumed(&handle.partition, std::iter::once(&message));
            }
            release::release_claim_later(engine, &handle.partition, handle.token.clone(), state.until, engine.now());
            Err(lock_lost(
                OPERATION,
                "a message of the turn was consumed by another; the turn is given back, uncounted",
            ))
        }
        Err(Trouble::Refused(error)) => Err(error),
        // The turn can't be stored: the runtime may still record that it failed.
        Err(Trouble::Store(error)) if error.is_unstorable() => Err(error.into_provider_error(OPERATION)),
        Err(Trouble::Store(error)) => {
            // The runtime would fail the orchestration for good with this token: the lock is left to expire instead.
            state.phase = TurnPhase::Aborted;
            engine.cache.forget(&handle.partition);
            engine.discovery.turn_returned(&handle.partition, state.until);
            warn!(instance_id = handle.partition.instance_id(), %error, "gave a commit up: the turn runs again");
            Err(error.into_provider_error(OPERATION))
        }
    }
}

/// A commit that was given up may have happened: then the call that repeats it succeeds. Nothing else is committed.
async fn settle_given_up(engine: &Engine, handle: &TurnHandle, state: &mut TurnState) -> Result<(), ProviderError> {
    match verify(engine, handle, state, engine.deadline()).await {
        Ok(CommitCheck::Committed) => {
            release::close(engine, handle, state);
            engine.discovery.consumed(&handle.partition, state.taken.iter().map(|taken| &taken.document.id));
            engine.discovery.turn_ended(&handle.partition);
            Ok(())
        }
        Ok(_) => Err(lock_lost(OPERATION, "an earlier commit was given up; the turn runs again when the lock expires")),
        Err(error) => Err(error.into_provider_error(OPERATION)),
    }
}

/// What a committed turn leaves to do. None of it can undo the commit, and all of it is taken over after a crash.
async fn after_commit(engine: &Arc<Engine>, handle: &TurnHandle, state: &TurnState, done: Done) {
    let Done { plan, etag, ack_events, foreign_cancellations, staged, handed } = done;
    if staged {
        engine.cache.forget(&handle.partition);
        match staging::roll_forward(engine, &handle.partition, engine.deadline()).await {
            // The document is as this turn left it, but for the roll-forward.
            Ok(Some(last)) if last.document.last_turn == plan.document.last_turn => {
                let plan = TurnPlan { document: last.document, ..plan.clone() };
                remember(engine, handle, state, &plan, last.etag, &ack_events);
            }
            Ok(_) => {}
            Err(error) => {
                warn!(instance_id = handle.partition.instance_id(), %error, "a staged turn is rolled forward later");
            }
        }
    } else if let Some(etag) = &etag {
        remember(engine, handle, state, &plan, etag.clone(), &ack_events);
    } else {
        engine.cache.forget(&handle.partition);
    }
    let contents = engine.cache.get(&handle.partition).and_then(|known| known.contents);
    // They read what is remembered by now.
    let goes_on = handed.serve(etag.map(|etag| (etag, contents.clone())));
    if !goes_on {
        let history = contents.as_ref().map(|contents| contents.history.as_slice());
        engine.discovery.turn_committed(&handle.partition, history);
    }
    if plan.document.execution != state.document.execution {
        engine.lifecycle().prune_soon(engine, &handle.partition, plan.document.execution);
    }
    deliver(engine, state, plan.intents, goes_on).await;
    for activity in foreign_cancellations {
        cancel_foreign(engine, &activity).await;
    }
}

/// Sends what the turn owes others. Who has ended its turn will be back: a child can be handed to it, unless another turn waits for it already.
async fn deliver(engine: &Arc<Engine>, state: &TurnState, intents: Vec<IntentDocument>, has_another: bool) {
    if has_another {
        let engine_too = engine.clone();
        return engine.spawn(async move { outbox::deliver_soon(&engine_too, intents).await });
    }
    let terms = &state.runner.terms;
    let comes_back =
        engine.config.inline_claims() && terms.patient && !engine.stopping.is_cancelled() && !intents.is_empty();
    let standing = comes_back.then(|| engine.queue.turns.register(terms.clone()));
    let _idle = standing.as_ref().map(WaitingFetch::mark_idle);
    outbox::deliver_soon(engine, intents).await;
}

/// Keeps what the next turn needs, as long as the ETag proves that nothing has changed.
fn remember(
    engine: &Engine,
    handle: &TurnHandle,
    state: &TurnState,
    plan: &TurnPlan,
    etag: Etag,
    events: &[duroxide::Event],
) {
    let same_execution = plan.document.execution == state.document.execution || !state.document.exists();
    let contents = state.contents.as_ref().map(|before| {
        let before = if same_execution { before.clone() } else { load::nothing() };
        before.after_turn(events, plan.history_bytes, plan.kv.clone(), &plan.consumed)
    });
    let known = Known { document: plan.document.clone(), etag, contents };
    engine.cache.put(&handle.partition, known);
}

/// An activity of another instance can't go with the turn; removing it is best effort, as its worker may be done anyway.
async fn cancel_foreign(engine: &Engine, activity: &duroxide::providers::ScheduledActivityIdentifier) {
    let Ok(partition) = crate::model::Partition::instance(&activity.instance) else { return };
    let id = ActivityDocument::scheduled_id(activity.execution_id, activity.activity_id);
    for id in [ActivityDocument::payload_id(&id), id] {
        if let Err(error) = engine.store.delete(&partition, &id, None, engine.deadline()).await {
            warn!(instance_id = activity.instance, %error, "an activity of another instance could not be cancelled");
        }
    }
}
