//! The commit of a turn: exactly once and as a whole, or not at all.
//!
//! The batch that replaces the instance document is the commit. A turn that fits into one batch is part of that batch.
//! A larger turn writes its operations to staging documents first (see [`staging`]).
//!
//! If the answer to the batch is lost or negative, [`verify`] reads the outcome. The instance document records the
//! token of the last committed turn.

use super::{
    cache::CachedInstance,
    failure, instance_id, load, lock_lost,
    plan::{self, Ack, TurnPlan, Unplannable},
    release, staging, TurnHandle, TurnPhase, TurnState, RESERVED_BYTES,
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

/// Commits the turn that this process holds under `token`.
pub(crate) async fn commit(engine: &Arc<Engine>, token: &str, mut ack: Ack) -> Result<(), ProviderError> {
    failure::shorten(&mut ack);
    let handle = engine.turns.get(token).map(|entry| entry.value().clone());
    let handle = handle.ok_or_else(|| lock_lost(OPERATION, "it is not held here"))?;
    let mut state = handle.state.lock().await;
    match state.phase {
        TurnPhase::Closed => return Err(lock_lost(OPERATION, "the turn has ended")),
        TurnPhase::Aborted => return settle_aborted(engine, &handle, &mut state).await,
        TurnPhase::Open => {}
    }
    if state.until <= engine.now() {
        // The provider refuses this token from now on, even if the clock moves back. Otherwise the failure that the
        // runtime may send next with the same token could succeed.
        state.phase = TurnPhase::Aborted;
        return Err(lock_lost(OPERATION, "the lock has expired"));
    }
    failure::tell_parent(engine, &state, &mut ack).await.map_err(|error| error.into_provider_error(OPERATION))?;
    let outcome = attempt(engine, &handle, &mut state, &ack).await;
    finish(engine, &handle, &mut state, outcome).await
}

/// How a commit ended.
enum CommitOutcome {
    /// The turn is stored.
    Committed(Box<CommittedTurn>),
    /// Another token has the lock.
    Lost,
    /// A message of the turn has left the queue or has changed since the turn read it.
    MessageConflict(MessageConflict),
}

/// A message that is no longer as the turn read it.
struct MessageConflict {
    message: DocumentId,
    /// The message is deleted. Otherwise it has changed: it is a delivery marker now, or it has another due time.
    gone: bool,
}

/// A committed turn and the work that follows the commit.
struct CommittedTurn {
    plan: TurnPlan,
    /// The instance document's ETag, if Cosmos DB returned it. Only then is the stored document equal to the plan's.
    etag: Option<Etag>,
    ack_events: Vec<duroxide::Event>,
    foreign_cancellations: Vec<duroxide::providers::ScheduledActivityIdentifier>,
    staged: bool,
    /// The inline claims that the batch made for waiting dispatchers.
    claims: CommitClaims,
}

/// Why the outcome of a commit is an error.
enum CommitError {
    Store(StoreError),
    Refused(ProviderError),
}

impl From<StoreError> for CommitError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Sends the commit until its outcome is known, at most until the lock ends.
async fn attempt(
    engine: &Arc<Engine>,
    handle: &TurnHandle,
    state: &mut TurnState,
    ack: &Ack,
) -> Result<CommitOutcome, CommitError> {
    let call = CommitCall { engine, handle, ack };
    let mut gone: Vec<String> = Vec::new();
    let mut staged = false;
    let mut claims = CommitClaims::new(engine, handle, state, ack);
    loop {
        let deadline = engine.deadline_at(state.until);
        let older = older_execution(engine, handle, state, ack).await?;
        let mut plan = call.plan(state, older.clone(), &gone, &mut claims)?;
        let outcome = match call.send(state, older, &mut plan, &mut claims, deadline).await? {
            Sent::InOneBatch(outcome) => outcome,
            Sent::Staged(outcome) => {
                staged = true;
                outcome
            }
            Sent::NotWithClaims => continue,
            Sent::Lost => return Ok(CommitOutcome::Lost),
        };
        let rolled_back = match outcome {
            BatchOutcome::Committed(committed) => {
                claims.done(&plan.operations, &committed, 1 + plan.consumption.len());
                return Ok(done(engine, handle, plan, ack, (committed.etag(0).cloned(), &committed), staged, claims));
            }
            BatchOutcome::RolledBack(rolled_back) => rolled_back,
        };
        match call.settle(state, &plan, &rolled_back, deadline).await? {
            RollbackCause::AlreadyCommitted => {
                let no_etags = Committed { etags: Vec::new() };
                claims.done(&plan.operations, &no_etags, 0);
                return Ok(done(engine, handle, plan, ack, (None, &no_etags), staged, claims));
            }
            RollbackCause::ActivityCompleted(ids) => gone.extend(ids),
            RollbackCause::FenceMoved => {}
            RollbackCause::Rejected(outcome) => {
                claims.withdraw();
                return outcome;
            }
        }
    }
}

/// The parts of a commit that stay the same in all its attempts.
#[derive(Clone, Copy)]
struct CommitCall<'a> {
    engine: &'a Arc<Engine>,
    handle: &'a TurnHandle,
    ack: &'a Ack,
}

/// How a planned commit was sent.
enum Sent {
    InOneBatch(BatchOutcome),
    Staged(BatchOutcome),
    /// The turn must be staged, and a staged turn has no inline claims. The commit is planned again without them.
    NotWithClaims,
    /// Another token has the lock.
    Lost,
}

/// Why Cosmos DB rolled the batch of a commit back.
enum RollbackCause {
    /// A worker has completed an activity that the turn cancels. The commit is sent again without these documents.
    ActivityCompleted(Vec<String>),
    /// An earlier request with the same token has committed the turn, and its answer was lost. Other writers may have
    /// changed the instance document since, so the plan does not tell its present state.
    AlreadyCommitted,
    /// Another writer has changed the instance document under our lock. The commit is planned and sent again.
    FenceMoved,
    /// The turn cannot be committed.
    Rejected(Result<CommitOutcome, CommitError>),
}

impl CommitCall<'_> {
    /// Plans the batch of the commit, without the documents in `gone` and with the locks of inline claims.
    fn plan(
        self,
        state: &TurnState,
        older: Option<ExecutionDocument>,
        gone: &[String],
        claims: &mut CommitClaims,
    ) -> Result<TurnPlan, CommitError> {
        let Self { engine, handle, ack } = self;
        let mut plan = plan::plan(engine, &handle.partition, &handle.token, state, ack, older, &claims.activities)
            .map_err(|unplannable| refuse(handle, unplannable))?;
        plan.operations.retain(|operation| !gone.iter().any(|id| id == operation.document_id()));
        if !plan.document.commit.staging.is_empty() {
            // An earlier ack with this token has left staging documents behind. A recovery poll must find the instance
            // to delete them, even if no message arrives.
            plan.document.due = Some(engine.now() + staging::TAKEOVER_AFTER);
        }
        claims.lock(&mut plan.document, &mut plan.operations);
        Ok(plan)
    }

    /// Sends the commit in one batch if it fits, and otherwise through staging documents.
    async fn send(
        self,
        state: &mut TurnState,
        older: Option<ExecutionDocument>,
        plan: &mut TurnPlan,
        claims: &mut CommitClaims,
        deadline: Deadline,
    ) -> Result<Sent, CommitError> {
        if fits(plan) {
            claims.sent(&plan.document, &state.etag, state.until);
            return Ok(Sent::InOneBatch(
                send_batch(self.engine, self.handle, state, plan, &plan.operations, deadline).await?,
            ));
        }
        if !claims.is_empty() {
            // Staged operations become visible only after the locks of inline claims have begun.
            claims.withdraw();
            return Ok(Sent::NotWithClaims);
        }
        Ok(self.stage_and_send(state, older, plan).await?.map_or(Sent::Lost, Sent::Staged))
    }

    /// Stages the operations of a turn that does not fit into one batch, then commits the instance document that refers
    /// to them. Returns `None` if another token has the lock.
    async fn stage_and_send(
        self,
        state: &mut TurnState,
        older: Option<ExecutionDocument>,
        plan: &mut TurnPlan,
    ) -> Result<Option<BatchOutcome>, CommitError> {
        let Self { engine, handle, ack } = self;
        stage_consumption(plan);
        let roll_forward = match staging::stage(engine, handle, state, &plan.operations).await? {
            staging::Staged::Done(roll_forward) => roll_forward,
            staging::Staged::Lost => return Ok(None),
        };
        // Every staged part has moved the fence, over changes of other writers such as pruning and the counters. So the
        // document is planned again from the version whose ETag the commit sends.
        plan.document = plan::plan_document(engine, &handle.partition, &handle.token, state, ack, older)
            .map_err(|unplannable| refuse(handle, unplannable))?;
        // The remaining entries are staging documents of failed acks. The next claim deletes them.
        plan.document.commit.staging.retain(|other| other.key != roll_forward.key);
        plan.document.commit.roll_forward = Some(roll_forward);
        plan.document.due = Some(engine.now() + staging::TAKEOVER_AFTER);
        Ok(Some(send_batch(engine, handle, state, plan, &[], engine.deadline_at(state.until)).await?))
    }

    /// Finds out why Cosmos DB rolled the batch back.
    async fn settle(
        self,
        state: &mut TurnState,
        plan: &TurnPlan,
        rolled_back: &RolledBack,
        deadline: Deadline,
    ) -> Result<RollbackCause, CommitError> {
        let Self { engine, handle, .. } = self;
        if let Some(ids) = completed_activity(plan, rolled_back) {
            debug!(instance_id = handle.partition.instance_id(), ?ids, "a cancelled activity has already completed");
            return Ok(RollbackCause::ActivityCompleted(ids));
        }
        match verify(engine, handle, state, deadline).await? {
            CommitCheck::Committed => Ok(RollbackCause::AlreadyCommitted),
            CommitCheck::StillOurs if rolled_back.index == 0 && matches!(rolled_back.status, 404 | 412) => {
                if engine.now() >= state.until {
                    let detail = "the lock expired before the commit".to_owned();
                    return Err(StoreError::Unavailable { detail }.into());
                }
                Ok(RollbackCause::FenceMoved)
            }
            CommitCheck::StillOurs => Ok(RollbackCause::Rejected(match message_conflict(plan, rolled_back) {
                Some(conflict) => Ok(CommitOutcome::MessageConflict(conflict)),
                None => Err(unexpected_rejection(handle, plan, rolled_back)),
            })),
            CommitCheck::Lost if has_its_history(engine, handle, plan, deadline).await? => {
                Ok(RollbackCause::AlreadyCommitted)
            }
            CommitCheck::Lost => Ok(RollbackCause::Rejected(Ok(CommitOutcome::Lost))),
        }
    }
}

/// Reads the document of an execution that is not the current one, for an ack that ends this execution late.
async fn older_execution(
    engine: &Engine,
    handle: &TurnHandle,
    state: &TurnState,
    ack: &Ack,
) -> Result<Option<ExecutionDocument>, StoreError> {
    let is_older = state.document.exists() && ack.execution < state.document.current.execution;
    if !is_older || ack.metadata.status.is_none() || state.document.removal.pruning.contains(&ack.execution) {
        return Ok(None);
    }
    let id = ExecutionDocument::document_id(ack.execution);
    let deadline = engine.deadline_at(state.until);
    let found = engine.store.read(&handle.partition, &id, Freshness::Authoritative, deadline).await?;
    Ok(found.map(|Versioned { document, .. }| document))
}

fn refuse(handle: &TurnHandle, unplannable: Unplannable) -> CommitError {
    let instance = handle.partition.instance_id().unwrap_or_default();
    match unplannable {
        Unplannable::Store(error) => CommitError::Store(error),
        Unplannable::DuplicateEvent(id) => CommitError::Refused(ProviderError::permanent(
            OPERATION,
            format!("Failed to append history: instance {instance:?} already has an event with id {id}"),
        )),
        Unplannable::Target(detail) => CommitError::Refused(ProviderError::permanent(OPERATION, detail)),
    }
}

/// Whether the turn fits into one batch.
fn fits(plan: &TurnPlan) -> bool {
    let operations = || plan.consumption.iter().chain(&plan.operations);
    let bytes: usize = operations().map(Operation::size).sum();
    operations().count() < operation::MAX_OPERATIONS && bytes + RESERVED_BYTES <= operation::MAX_BYTES
}

/// Stages the consumption of messages too, if a batch cannot hold it. The fence alone then proves these messages: the
/// turn loaded all of them under its claim, because the memory of a process holds fewer.
fn stage_consumption(plan: &mut TurnPlan) {
    if plan.consumption.len() >= operation::MAX_OPERATIONS {
        plan.operations.append(&mut plan.consumption);
    }
}

/// Sends one batch with the instance document first, so that a lost fence is the reason for which the batch fails. The
/// deletions of the messages follow. They prove that the turn ran on messages that are still in the queue.
async fn send_batch(
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

/// The documents of an activity that the turn cancels, if the batch failed because they do not exist. A worker has
/// completed the activity in the meantime.
fn completed_activity(plan: &TurnPlan, rolled_back: &RolledBack) -> Option<Vec<String>> {
    match plan.operation(rolled_back.index)? {
        Operation::Delete { id, .. } if rolled_back.status == 404 && ActivityDocument::is_activity_id(id) => {
            let activity = id.as_str().strip_prefix("p:").unwrap_or(id.as_str());
            Some(vec![activity.to_owned(), format!("p:{activity}")])
        }
        _ => None,
    }
}

/// The message for which the batch failed. It has changed, or it is no longer in the queue: the memory of this process
/// was stale.
fn message_conflict(plan: &TurnPlan, rolled_back: &RolledBack) -> Option<MessageConflict> {
    let consumption = plan.consumption.get(rolled_back.index.checked_sub(1)?)?;
    let message = DocumentId::try_from(consumption.document_id().to_owned()).ok()?;
    let gone = rolled_back.status == 404;
    (gone || rolled_back.status == 412).then_some(MessageConflict { message, gone })
}

/// The error for a batch that failed for a document of which the protocol expects no failure.
fn unexpected_rejection(handle: &TurnHandle, plan: &TurnPlan, rolled_back: &RolledBack) -> CommitError {
    let document = plan.operation(rolled_back.index).map_or("the instance", Operation::document_id);
    let instance = handle.partition.instance_id().unwrap_or_default();
    let status = rolled_back.status;
    let detail = format!("Cosmos DB answered {status} for document {document} of instance {instance:?}");
    CommitError::Refused(ProviderError::permanent(OPERATION, detail))
}

/// The outcome of a commit, as a read of the instance document shows it.
enum CommitCheck {
    Committed,
    StillOurs,
    Lost,
}

/// Reads the instance document to learn whether the turn is committed.
async fn verify(
    engine: &Engine,
    handle: &TurnHandle,
    state: &mut TurnState,
    deadline: Deadline,
) -> Result<CommitCheck, StoreError> {
    let found = engine.read_latest(&handle.partition, deadline).await?;
    let Some(found) = found else { return Ok(CommitCheck::Lost) };
    if found.document.commit.last_turn.as_deref() == Some(handle.token.as_str()) {
        return Ok(CommitCheck::Committed);
    }
    if found.document.held_by(&handle.token) {
        state.refresh(found);
        return Ok(CommitCheck::StillOurs);
    }
    Ok(CommitCheck::Lost)
}

/// Whether the turn was committed before other turns of the instance: its history document, whose id contains its
/// token, exists.
async fn has_its_history(
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

/// The outcome of a turn that is stored. The ready queue learns of its new messages and activities, unless they are
/// staged.
fn done(
    engine: &Arc<Engine>,
    handle: &TurnHandle,
    plan: TurnPlan,
    ack: &Ack,
    (etag, committed): (Option<Etag>, &Committed),
    staged: bool,
    claims: CommitClaims,
) -> CommitOutcome {
    if !staged {
        discovery::announce(engine, &handle.partition, &plan.operations, committed, 1 + plan.consumption.len());
    }
    let foreign_cancellations =
        ack.cancelled.iter().filter(|a| Some(a.instance.as_str()) != handle.partition.instance_id()).cloned().collect();
    let ack_events = ack.events.clone();
    CommitOutcome::Committed(Box::new(CommittedTurn { plan, etag, ack_events, foreign_cancellations, staged, claims }))
}

/// Reports the outcome to the caches and the ready queue, and turns it into the answer to the runtime.
async fn finish(
    engine: &Arc<Engine>,
    handle: &TurnHandle,
    state: &mut TurnState,
    outcome: Result<CommitOutcome, CommitError>,
) -> Result<(), ProviderError> {
    match outcome {
        Ok(CommitOutcome::Committed(done)) => {
            release::close(engine, handle, state);
            engine.discovery.messages_consumed(&handle.partition, state.taken.iter().map(|taken| &taken.document.id));
            after_commit(engine, handle, state, *done).await;
            Ok(())
        }
        Ok(CommitOutcome::Lost) => {
            release::close(engine, handle, state);
            engine.cache.forget(&handle.partition);
            release::forget_turn(engine, handle, state);
            Err(lock_lost(OPERATION, "the lock was taken over; nothing was changed"))
        }
        Ok(CommitOutcome::MessageConflict(MessageConflict { message, gone })) => {
            release::forget_turn(engine, handle, state);
            release::close(engine, handle, state);
            warn!(
                instance_id = handle.partition.instance_id(),
                %message,
                gone,
                "commit rejected: another worker has already consumed a message of this turn"
            );
            if gone {
                engine.discovery.messages_consumed(&handle.partition, std::iter::once(&message));
            }
            release::release_claim_later(engine, &handle.partition, handle.token.clone(), state.until, engine.now());
            Err(lock_lost(
                OPERATION,
                "another worker has consumed a message of this turn; the turn is released without counting an attempt",
            ))
        }
        Err(CommitError::Refused(error)) => Err(error),
        // The turn cannot be stored. The turn stays open, so that the runtime can record the failure.
        Err(CommitError::Store(error)) if error.is_unstorable() => Err(error.into_provider_error(OPERATION)),
        Err(CommitError::Store(error)) => {
            // The runtime's next ack with this token would fail the orchestration for good. The provider refuses that
            // ack, and the turn runs again when the lock expires.
            state.phase = TurnPhase::Aborted;
            engine.cache.forget(&handle.partition);
            engine.discovery.turn_returned(&handle.partition, state.until);
            warn!(
                instance_id = handle.partition.instance_id(),
                %error,
                "commit failed, the turn will run again when its lock expires"
            );
            Err(error.into_provider_error(OPERATION))
        }
    }
}

/// Answers a repeated ack after an aborted commit. It succeeds if the earlier commit happened after all. Otherwise the
/// provider commits nothing with this token.
async fn settle_aborted(engine: &Engine, handle: &TurnHandle, state: &mut TurnState) -> Result<(), ProviderError> {
    match verify(engine, handle, state, engine.deadline()).await {
        Ok(CommitCheck::Committed) => {
            release::close(engine, handle, state);
            engine.discovery.messages_consumed(&handle.partition, state.taken.iter().map(|taken| &taken.document.id));
            engine.discovery.turn_ended(&handle.partition);
            Ok(())
        }
        Ok(_) => Err(lock_lost(OPERATION, "an earlier commit failed; the turn runs again when the lock expires")),
        Err(error) => Err(error.into_provider_error(OPERATION)),
    }
}

/// Does the work that follows a commit. None of it can undo the commit. If the process dies, another process takes all
/// of it over.
async fn after_commit(engine: &Arc<Engine>, handle: &TurnHandle, state: &TurnState, done: CommittedTurn) {
    let CommittedTurn { plan, etag, ack_events, foreign_cancellations, staged, claims } = done;
    if staged {
        engine.cache.forget(&handle.partition);
        match staging::roll_forward(engine, &handle.partition, engine.deadline()).await {
            // The document is as this turn left it, except for the progress of the roll-forward.
            Ok(Some(last)) if last.document.commit.last_turn == plan.document.commit.last_turn => {
                let plan = TurnPlan { document: last.document, ..plan.clone() };
                remember(engine, handle, state, &plan, last.etag, &ack_events);
            }
            Ok(_) => {}
            Err(error) => {
                warn!(instance_id = handle.partition.instance_id(), %error, "roll-forward failed, will retry");
            }
        }
    } else if let Some(etag) = &etag {
        remember(engine, handle, state, &plan, etag.clone(), &ack_events);
    } else {
        engine.cache.forget(&handle.partition);
    }
    let contents = engine.cache.get(&handle.partition).and_then(|known| known.contents);
    // The dispatchers that receive these claims read the cache, which is up to date now.
    let has_next_turn = claims.serve(etag.map(|etag| (etag, contents.clone())));
    if !has_next_turn {
        let history = contents.as_ref().map(|contents| contents.history.as_slice());
        engine.discovery.turn_committed(&handle.partition, history);
    }
    if plan.document.current.execution != state.document.current.execution {
        engine.lifecycle().prune_soon(engine, &handle.partition, plan.document.current.execution);
    }
    deliver(engine, state, plan.intents, has_next_turn).await;
    for activity in foreign_cancellations {
        cancel_foreign(engine, &activity).await;
    }
}

/// Delivers the turn's messages to other instances. The dispatcher of this turn fetches again soon, so an inline claim
/// of a child can go to it, unless the next turn of this instance already does.
async fn deliver(engine: &Arc<Engine>, state: &TurnState, intents: Vec<IntentDocument>, has_next_turn: bool) {
    if has_next_turn {
        let engine_too = engine.clone();
        return engine.spawn(async move { outbox::deliver_soon(&engine_too, intents).await });
    }
    let terms = &state.runner.terms;
    let comes_back =
        engine.config.inline_claims() && terms.patient && !engine.stopping.is_cancelled() && !intents.is_empty();
    let waiting_fetch = comes_back.then(|| engine.queue.turns.register(terms.clone()));
    let _idle = waiting_fetch.as_ref().map(WaitingFetch::mark_idle);
    outbox::deliver_soon(engine, intents).await;
}

/// Caches the state that the next turn needs. The ETag proves later that nothing has changed.
fn remember(
    engine: &Engine,
    handle: &TurnHandle,
    state: &TurnState,
    plan: &TurnPlan,
    etag: Etag,
    events: &[duroxide::Event],
) {
    let same_execution =
        plan.document.current.execution == state.document.current.execution || !state.document.exists();
    let contents = state.contents.as_ref().map(|before| {
        let before = if same_execution { before.clone() } else { load::empty_contents() };
        before.after_turn(events, plan.history_bytes, plan.kv.clone(), &plan.consumed)
    });
    let known = CachedInstance { document: plan.document.clone(), etag, contents };
    engine.cache.put(&handle.partition, known);
}

/// Cancels an activity of another instance. It is in another partition, so the commit cannot contain it. Removing it is
/// best effort, because its worker may have completed it anyway.
async fn cancel_foreign(engine: &Engine, activity: &duroxide::providers::ScheduledActivityIdentifier) {
    let Ok(partition) = crate::model::Partition::instance(&activity.instance) else { return };
    let id = ActivityDocument::scheduled_id(activity.execution_id, activity.activity_id);
    for id in [ActivityDocument::payload_id(&id), id] {
        if let Err(error) = engine.store.delete(&partition, &id, None, engine.deadline()).await {
            warn!(instance_id = activity.instance, %error, "could not cancel an activity of another instance");
        }
    }
}
